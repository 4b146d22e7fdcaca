"""DS610: equal messages that meet by order but not by name are found, and what merely has other
names is left alone.
"""

from __future__ import annotations

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.checker.detectors.swapped_messages import swapped_message_findings
from distsim.findings.finding_types import Finding
from distsim.program.lower import lower
from distsim.scenario import Scenario, load, loads
from distsim.scenario.strategies.pipeline.builtin_schedules import SCHEDULE_BUILDERS
from distsim.scenario.strategies.pipeline.send_recv import with_send_recv
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.simulate_scenario import simulate
from tests.strategies.test_pipeline import LAYOUTS, scenario
from tests.support.harness import draws
from tests.support.strategy_checks import STRATEGY_SCENARIOS
from tests.support.training_arithmetic import unrolled

SWAPPED = {"pipeline_chunks_swapped"}


def found(
    tensors: dict[str, Any], *programs: list[dict[str, Any]], **top: Any
) -> tuple[Finding, ...]:
    """What is said of a program given rank by rank."""
    blocks = [{"ranks": rank, "steps": steps} for rank, steps in enumerate(programs)]
    named = {name: {"shape": [4], **more} for name, more in tensors.items()}
    return swapped_message_findings(
        lower(Scenario(world=len(programs), tensors=named, program=blocks, **top))
    )


def sends(*labels: str, dst: int = 1, **more: Any) -> list[dict[str, Any]]:
    return [{"send": {"tensor": label, "dst": dst, **more}} for label in labels]


def recvs(*labels: str, src: int = 0, **more: Any) -> list[dict[str, Any]]:
    return [{"recv": {"tensor": label, "src": src, **more}} for label in labels]


def copies(name: str, *numbers: int) -> list[str]:
    return [f"{name}@{k}" for k in numbers]


# --- what is found ---
def test_swapped_micro_batches_are_found_by_their_numbers():
    """act@1 comes into input@2: the other messages go to the copy of their own number."""
    two = {"act": {"copies": 4}, "input": {"copies": 4}}
    (one,) = found(two, sends(*copies("act", 0, 1, 2, 3)), recvs(*copies("input", 0, 2, 1, 3)))

    assert (one.code, one.severity, one.ranks) == ("DS610", "warning", (0, 1))
    assert "act@1 of rank 0 arrives in input@2 of rank 1" in one.message
    assert one.help[0].startswith("receive input@1 before input@2 on rank 1")
    assert [(p.rank, p.op) for p in one.places] == [(0, "send"), (1, "recv")]


def test_a_gradient_swapped_with_an_activation_is_found_from_the_other_messages():
    named = {word: {"copies": 4} for word in ("out", "in", "out_grad", "in_grad")}
    order = ["out@0", "in_grad@0", "out@1", "in_grad@1", "out@2", "in_grad@2"]
    wrong = ["in@0", "out_grad@0", "out_grad@1", "in@1", "in@2", "out_grad@2"]
    (one,) = found(named, sends(*order), recvs(*wrong))

    assert "out@1 of rank 0 arrives in out_grad@1 of rank 1" in one.message


@pytest.mark.parametrize(
    ("sent", "got"),
    [
        (["a", "b"], ["b", "a"]),
        (["act@0", "act@1"], ["input@1", "input@0"]),
        (["a@0", "a@1"], ["a@1", "a@0"]),
    ],
)
def test_two_swapped_messages_are_found_by_their_own_labels(sent, got):
    named = {label.partition("@")[0]: {"copies": 2} for label in sent + got}

    assert [f.code for f in found(named, sends(*sent), recvs(*got))] == ["DS610"]


def test_names_that_are_swapped_in_each_round_of_a_loop_are_found() -> None:
    """Keys and values of three layers."""
    tensors = {"keys": {"copies": 3}, "values": {"copies": 3}}
    sent = [label for k in range(3) for label in (f"keys@{k}", f"values@{k}")]
    got = [label for k in range(3) for label in (f"values@{k}", f"keys@{k}")]

    (one,) = found(tensors, sends(*sent), recvs(*got))

    assert one.message.startswith("keys")
    assert "arrives in values" in one.message


def test_names_that_are_swapped_in_some_rounds_of_a_loop_only_are_no_swap_by_name() -> None:
    tensors = {"keys": {"copies": 3}, "values": {"copies": 3}, "rest": {"copies": 3}}
    sent = [*copies("keys", 0, 1, 2), *copies("values", 0, 1, 2)]
    got = [*copies("values", 0, 1, 2), *copies("rest", 0, 1, 2)]

    assert found(tensors, sends(*sent), recvs(*got)) == ()


def test_a_swap_is_reported_as_wrong_data_without_changing_the_verdict():
    made = scenario_of("act@0 act@1 act@2 act@3", "input@0 input@2 input@1 input@3")
    done, result = simulate(made), check_scenario(made)

    assert (done.outcome, done.verdict.verdict) == ("wrong-data", "ok")
    assert (result.verdict.verdict, {p.outcome for p in result.profiles.values()}) == (
        "ok",
        {"wrong-data"},
    )
    assert result.profiles["nccl"].variants == {"lazy": "wrong-data", "eager": "wrong-data"}
    assert [f.code for f in done.findings] == [f.code for f in result.findings] == ["DS610"]


def scenario_of(sent: str, got: str) -> Scenario:
    program = [
        {"ranks": 0, "steps": sends(*sent.split())},
        {"ranks": 1, "steps": recvs(*got.split())},
    ]
    tensors = {"act": {"shape": [4], "copies": 4}, "input": {"shape": [4], "copies": 4}}
    return Scenario(world=2, tensors=tensors, program=program)


@settings(max_examples=draws(15), deadline=None)
@given(st.sampled_from([("gpipe", 2, 4), ("1f1b", 3, 5), ("gpipe", 4, 6)]), st.data())
def test_any_two_swapped_receives_in_a_pipeline_are_found(layout, data):
    """Their tensors exchanged on one rank, in a pipeline of at least four micro-batches."""
    plain = yaml.safe_load(scenario(*layout).to_yaml())
    plain["program"] = unrolled(plain["program"])
    block = data.draw(st.sampled_from([e for e in plain["program"][0]["steps"] if _received(e)]))
    received = _received(block)
    word = data.draw(st.sampled_from(sorted({_word(r) for r in received})))
    same = [r for r in received if _word(r) == word]
    a, b = data.draw(st.lists(st.integers(0, len(same) - 1), min_size=2, max_size=2, unique=True))
    same[a]["tensor"], same[b]["tensor"] = same[b]["tensor"], same[a]["tensor"]

    assert "DS610" in [
        f.code
        for f in swapped_message_findings(lower(loads(yaml.safe_dump(plain, sort_keys=False))))
    ]


def _word(fields: dict[str, Any]) -> str:
    return fields["tensor"].partition("@")[0]


def _received(entry: dict[str, Any]) -> list[dict[str, Any]]:
    """The fields of all receives of an entry, those of its steps and batches included."""
    if "irecv" in entry:
        return [entry["irecv"]]
    inner = entry.get("steps") or (entry.get("batch_isend_irecv") or {}).get("ops") or []
    return [fields for e in inner for fields in _received(e)]


# --- what is left alone ---
@pytest.mark.parametrize(
    "path", [p for p in STRATEGY_SCENARIOS if p.stem not in SWAPPED], ids=lambda p: p.stem
)
def test_no_scenario_of_a_strategy_is_reported_as_swapped(path):
    assert swapped_message_findings(lower(load(str(path)))) == ()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda x: "-".join(map(str, x)))
def test_no_pipeline_is_reported_as_swapped_over_several_iterations(layout):
    assert len(with_send_recv(SCHEDULE_BUILDERS[layout[0]](*layout[1:])).rows) == layout[1]
    assert (
        swapped_message_findings(
            lower(scenario(*layout, iterations=2, shapes_exchange=layout[0] != "dualpipe"))
        )
        == ()
    )


def test_different_names_in_the_same_order_are_no_swap():
    assert found({"a": {}, "b": {}, "x": {}, "y": {}}, sends("a", "b"), recvs("y", "x")) == ()


@pytest.mark.parametrize("count", [3, 4, 5])
def test_copies_received_in_reverse_order_are_no_swap(count):
    """A stack: the last one sent lies on top."""
    named = {"act": {"copies": count}, "input": {"copies": count}}

    assert (
        found(
            named,
            sends(*copies("act", *range(count))),
            recvs(*copies("input", *reversed(range(count)))),
        )
        == ()
    )


def test_alternating_buffers_are_no_swap():
    """Two on the sender, three on the receiver."""
    named = {"out": {"copies": 2}, "in": {"copies": 3}}

    assert (
        found(
            named,
            sends(*copies("out", *[k % 2 for k in range(8)])),
            recvs(*copies("in", *[k % 3 for k in range(8)])),
        )
        == ()
    )


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_ring_with_alternating_buffers_is_no_swap(ranks):
    """kv@0 goes to the next one's kv@1, which is computed with and goes on to kv@0."""
    turns = []
    for k in (0, 1):
        to, back = f"(rank + 1) % {ranks}", f"(rank - 1) % {ranks}"
        ops = [
            {"isend": {"tensor": f"kv@{k}", "dst": to}},
            {"irecv": {"tensor": f"kv@{1 - k}", "src": back}},
        ]
        turns += [
            {"batch_isend_irecv": {"ops": ops}},
            {"compute": {"time": "1 ms", "reads": [f"kv@{1 - k}"]}},
        ]
    made = Scenario(world=ranks, tensors={"kv": {"shape": [4], "copies": 2}}, program=turns)

    assert swapped_message_findings(lower(made)) == ()


def test_a_halo_exchange_between_two_ranks_is_no_swap():
    """What leaves on the left comes in on the right: both messages of a pair cross, both ways."""
    ops = [
        {"isend": {"tensor": "edge@0", "dst": "(rank - 1) % 2"}},
        {"isend": {"tensor": "edge@1", "dst": "(rank + 1) % 2"}},
        {"irecv": {"tensor": "halo@1", "src": "(rank + 1) % 2"}},
        {"irecv": {"tensor": "halo@0", "src": "(rank - 1) % 2"}},
    ]
    tensors = {"edge": {"shape": [4], "copies": 2}, "halo": {"shape": [4], "copies": 2}}
    made = Scenario(world=2, tensors=tensors, program=[{"batch_isend_irecv": {"ops": ops}}])

    assert swapped_message_findings(lower(made)) == ()


def test_receives_that_cannot_be_exchanged_are_no_swap():
    """The first one's tensor is computed with before the second comes, and no other message tells
    of a custom.
    """
    between = [{"compute": {"time": "1 ms", "reads": ["b"]}}]

    assert found({"a": {}, "b": {}}, sends("a", "b"), [*recvs("b"), *between, *recvs("a")]) == ()


def test_messages_of_different_sizes_or_tags_are_no_swap():
    named = {"a": {}, "b": {}}
    tagged = [*sends("a", tag=1), *sends("b", tag=2)], [*recvs("b", tag=2), *recvs("a", tag=1)]

    assert found(named, *tagged) == ()
    assert found({"a": {}, "b": {"dtype": "float64"}}, sends("a", "b"), recvs("b", "a")) == ()


def test_wildcard_receives_are_no_evidence_of_a_swap():
    anybody = [{"recv": {"tensor": label}} for label in ("b", "a")]

    assert found({"a": {}, "b": {}}, sends("a", "b"), anybody) == ()


def test_only_messages_that_matched_in_a_run_count():
    """The run ends before the second message."""
    blocked = [{"recv": {"tensor": "a", "src": 1}}]
    program = [
        {"ranks": 0, "steps": [*sends("a"), *blocked, *sends("b")]},
        {"ranks": 1, "steps": recvs("b", "a")},
    ]
    made = Scenario(world=2, tensors={"a": {"shape": [4]}, "b": {"shape": [4]}}, program=program)

    assert [f.code for f in swapped_message_findings(lower(made))] == ["DS610"]
    assert "DS610" not in [f.code for f in simulate(made).findings]


@pytest.mark.parametrize("ranks", [3, 4, 5, 6, 8])
@pytest.mark.parametrize("phase", [0, 1])
def test_a_ring_reduction_with_one_buffer_per_step_is_no_swap(ranks, phase):
    """Chunks go in an order that starts elsewhere on every rank, buffers from the first to the
    last.
    """
    steps = []
    for k in range(ranks - 1):
        ops = [
            {
                "isend": {
                    "tensor": f"chunk@((rank + {phase} - {k}) % {ranks})",
                    "dst": f"(rank + 1) % {ranks}",
                }
            },
            {"irecv": {"tensor": f"came@{k}", "src": f"(rank - 1) % {ranks}"}},
        ]
        steps += [
            {"batch_isend_irecv": {"ops": ops}},
            {"compute": {"time": "1 us", "reads": [f"came@{k}"]}},
        ]
    tensors = {name: {"shape": [4], "copies": ranks} for name in ("chunk", "came")}

    assert (
        swapped_message_findings(lower(Scenario(world=ranks, tensors=tensors, program=steps))) == ()
    )


def test_two_pairs_swapped_on_one_channel_are_found():
    named = {"act": {"copies": 8}, "input": {"copies": 8}}
    wrong = [0, 2, 1, 3, 4, 6, 5, 7]

    assert [
        f.code
        for f in found(named, sends(*copies("act", *range(8))), recvs(*copies("input", *wrong)))
    ] == ["DS610"]
