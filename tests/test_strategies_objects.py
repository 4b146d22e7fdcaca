"""Object collectives are lengths and bytes; a coalesced launch is its collectives, waited for together."""

from __future__ import annotations

import pytest
from strategy_checks import meeting, simulated

from distsim.errors import ScenarioErrors
from distsim.scenario import Scenario, loads


def one(name: str, fields: object, world: int = 3, **more: object) -> Scenario:
    return Scenario(world=world, program=[{name: fields}], **more)


def refused(name: str, fields: object) -> str:
    with pytest.raises(ScenarioErrors) as caught:
        one(name, fields)
    return caught.value.problems[0].message


@pytest.mark.parametrize(
    ("name", "fields", "calls"),
    [
        ("broadcast_object_list", ["1 KiB", "500 B"], [("broadcast", 16), ("broadcast", 1524)]),
        ("all_gather_object", {0: "100 B", "else": "70 B"}, [("all_gather", 24), ("all_gather", 300)]),
        ("gather_object", {"object": "100 B", "dst": 1}, [("all_gather", 24), ("gather", 300)]),
        ("scatter_object_list", ["5 B", "9 B", "2 B"], [("broadcast", 8), ("scatter", 27), ("scatter", 24)]),
    ],
)
def test_an_object_travels_as_its_length_and_its_bytes(name, fields, calls):
    """distributed_c10d.py: lengths are int64, bytes uint8, all as long as the longest where sizes differ."""
    scenario = one(name, fields)
    rank = 1 if name == "gather_object" else 0

    assert [(op, nbytes) for op, _, nbytes, _ in meeting(scenario, rank)] == calls
    done = simulated(scenario.to_yaml())
    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")


def test_lengths_arrive():
    done = simulated(one("all_gather_object", {0: "100 B", "else": "70 B"}).to_yaml())

    assert done.values.text(2, "all_gather_object_lengths") == "[[100], [70], [70]]"


def test_a_recorded_object_collective_of_torch_has_the_same_calls(monkeypatch):
    """The functions themselves, with collectives that only take notes."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed import distributed_c10d as c10d

    notes: list[tuple[str, int]] = []
    monkeypatch.setattr(c10d, "broadcast", lambda t, **_: notes.append(("broadcast", t.numel() * t.element_size())))
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.broadcast_object_list(["a" * 40, list(range(9))], src=0)
    finally:
        dist.destroy_process_group()
    ours = [(op, nbytes) for op, _, nbytes, _ in meeting(one("broadcast_object_list", [f"{n} B" for n in _lengths()]))]

    assert notes == ours


def _lengths() -> list[int]:
    import io

    from torch.distributed import distributed_c10d as c10d

    found = []
    for value in ("a" * 40, list(range(9))):
        buffer = io.BytesIO()
        c10d._pickler(buffer).dump(value)
        found.append(len(buffer.getvalue()))
    return found


def test_scatter_needs_an_object_for_every_rank():
    assert refused("scatter_object_list", ["5 B"]) == "expected an object for each of the 3 ranks of the group, found 1"


TENSORS = {"a": {"shape": [4], "value": "rank"}, "b": {"shape": [2], "value": 1}}


def test_coalesced_collectives_are_issued_together_and_waited_for_together():
    text = "world: 2\ntensors: {a: {shape: [4], value: rank}, b: {shape: [2], value: 1}}\nprogram:\n  - coalescing_manager:\n"
    done = simulated(text + "      - all_reduce: {tensor: a}\n      - all_reduce: {tensor: b, op: max}\n")

    assert [call.op for _, call in done.program.calls_of(0)] == ["all_reduce", "all_reduce", "wait", "wait"]
    assert (done.verdict.verdict, done.values.text(0, "a"), done.values.text(1, "b")) == (
        "ok",
        "[1.0, 1.0, 1.0, 1.0]",
        "[1.0, 1.0]",
    )


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        ([{"all_reduce": {"tensor": "a"}}, {"all_gather_into_tensor": {"input": "a", "output": "b"}}], "are of one kind"),
        ([{"broadcast": {"tensor": "a", "src": 0}}], "a coalesced launch holds all_reduce"),
        ([{"all_reduce": {"tensor": "a", "async": True}}], "belongs to the launch"),
        ([], "expected a list of collectives"),
    ],
)
def test_what_pytorch_does_not_coalesce_is_refused(ops, words):
    with pytest.raises(ScenarioErrors) as caught:
        one("coalescing_manager", ops, tensors=TENSORS)

    assert words in caught.value.problems[0].message
    assert loads("world: 1\nprogram: []\n").program == ()
