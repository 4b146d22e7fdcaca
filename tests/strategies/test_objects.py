"""Object collectives are lengths and bytes; a coalesced launch is its collectives, waited for
together.
"""

from __future__ import annotations

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.program.lower import lower
from distsim.scenario import Scenario, loads
from tests.support.strategy_checks import meeting, simulated


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
        (
            "all_gather_object",
            {0: "100 B", "else": "70 B"},
            [("all_gather", 24), ("all_gather", 300)],
        ),
        ("gather_object", {"object": "100 B", "dst": 1}, [("all_gather", 24), ("gather", 300)]),
        (
            "scatter_object_list",
            ["5 B", "9 B", "2 B"],
            [("broadcast", 8), ("scatter", 27), ("scatter", 24)],
        ),
    ],
)
def test_an_object_is_sent_as_its_length_and_its_bytes(name, fields, calls):
    """distributed_c10d.py: lengths are int64, bytes uint8, all as long as the longest where sizes
    differ.
    """
    scenario = one(name, fields)
    rank = 1 if name == "gather_object" else 0

    assert [(op, nbytes) for op, _, nbytes, _ in meeting(scenario, rank)] == calls
    done = simulated(scenario.to_yaml())
    assert (done.outcome, done.verdict.verdict) == ("completes", "ok")


def test_object_lengths_arrive():
    done = simulated(one("all_gather_object", {0: "100 B", "else": "70 B"}).to_yaml())

    assert done.values.text(2, "all_gather_object_lengths") == "[[100], [70], [70]]"


def test_object_collectives_make_the_recorded_calls_of_torch(monkeypatch):
    """The functions themselves, with collectives that only take notes."""
    dist = pytest.importorskip("torch.distributed")
    from torch.distributed import distributed_c10d as c10d

    notes: list[tuple[str, int]] = []
    monkeypatch.setattr(
        c10d, "broadcast", lambda t, **_: notes.append(("broadcast", t.numel() * t.element_size()))
    )
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        dist.broadcast_object_list(["a" * 40, list(range(9))], src=0)
    finally:
        dist.destroy_process_group()
    ours = [
        (op, nbytes)
        for op, _, nbytes, _ in meeting(
            one("broadcast_object_list", [f"{n} B" for n in _lengths()])
        )
    ]

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
    assert (
        refused("scatter_object_list", ["5 B"])
        == "expected an object for each of the 3 ranks of the group, found 1"
    )


TENSORS = {
    "a": {"shape": [4], "value": "rank"},
    "b": {"shape": [2], "value": 1},
    "B": {"shape": [4]},
    "d": {"shape": [3]},
    "D": {"shape": [6]},
}


def coalesced(*ops: object, world: int = 2, **fields: object) -> Scenario:
    return one("coalescing_manager", {"ops": list(ops), **fields}, world=world, tensors=TENSORS)


def test_coalesced_collectives_are_one_call():
    text = "world: 2\ntensors: {a: {shape: [4], value: rank}, b: {shape: [2], value: 1}}\nprogram:\n  - coalescing_manager:\n"
    done = simulated(
        text
        + "      - all_reduce: {tensor: a, op: max}\n      - all_reduce: {tensor: b, op: max}\n"
    )
    ((_, call),) = done.program.calls_of(0)

    assert (call.op, [b.name for b in call.inputs], call.reduce_op) == (
        "all_reduce_coalesced",
        ["a", "b"],
        "max",
    )
    assert (done.verdict.verdict, done.values.text(0, "a"), done.values.text(1, "b")) == (
        "ok",
        "[1.0, 1.0, 1.0, 1.0]",
        "[1.0, 1.0]",
    )


@pytest.mark.parametrize(
    "name",
    [
        "all_gather_into_tensor",
        "all_gather_single",
        "reduce_scatter_tensor",
        "reduce_scatter_single",
    ],
)
def test_inputs_and_outputs_of_a_coalesced_launch_keep_their_order(name):
    """By torch's old and new names."""
    gathers = name.startswith("all_gather")
    short, long = ("input", "output") if gathers else ("output", "input")
    ((_, call),) = lower(
        coalesced(*({name: {short: x, long: x.upper()}} for x in ("b", "d")))
    ).calls_of(1)

    assert call.op == (
        "all_gather_into_tensor_coalesced" if gathers else "reduce_scatter_tensor_coalesced"
    )
    sides = [b.name for b in call.inputs], [b.name for b in call.outputs]
    assert sides == ((["b", "d"], ["B", "D"]) if gathers else (["B", "D"], ["b", "d"]))


def test_a_coalesced_launch_may_be_a_request():
    scenario = coalesced(
        {"all_reduce": {"tensor": "a"}},
        {"all_reduce": {"tensor": "b"}},
        **{"async": True, "as": "h"},
    )
    program = lower(Scenario(world=2, tensors=TENSORS, program=[*scenario.program, {"wait": "h"}]))

    assert [(call.op, call.is_async) for _, call in program.calls_of(0)] == [
        ("all_reduce_coalesced", True),
        ("wait", False),
    ]


@pytest.mark.parametrize(
    ("selectors", "lists"),
    [
        ((None, 1), [["a"], ["a", "b"], ["a"]]),
        ((None, "rank > 0"), [["a"], ["a", "b"], ["a", "b"]]),
        (([0, 2], "rank < 2"), [["a", "b"], ["b"], ["a"]]),
        ((0, 0), [["a", "b"], [], []]),
        ((0, "local_rank == 0"), [["a", "b"], [], []]),
    ],
)
def test_each_rank_coalesces_the_parts_that_it_selects(selectors, lists):
    """One launch per rank, without a warning about selectors that select no rank."""
    ops = [
        {"all_reduce": {"tensor": x}} | ({} if s is None else {"ranks": s})
        for x, s in zip("ab", selectors, strict=True)
    ]
    program = lower(coalesced(*ops, world=3))

    found = [
        [[b.name for b in call.inputs] for _, call in program.calls_of(rank)] for rank in range(3)
    ]
    assert found == [[names] if names else [] for names in lists]
    assert program.findings == ()


@pytest.mark.parametrize(
    ("ops", "words"),
    [
        (
            [
                {"all_reduce": {"tensor": "a"}},
                {"all_gather_into_tensor": {"input": "a", "output": "b"}},
            ],
            "must be of one kind",
        ),
        ([{"broadcast": {"tensor": "a", "src": 0}}], "a coalesced launch can contain all_reduce"),
        (
            [{"all_gather": {"input": "b", "output": "a"}}],
            "torch issues any other call immediately and separately, found all_gather",
        ),
        ([{"all_reduce": {"tensor": "a", "async": True}}], "is a field of the launch"),
        (
            [{"all_reduce": {"tensor": "a"}}, {"all_reduce": {"tensor": "b", "group": "g"}}],
            "must be on one group",
        ),
        (
            [{"all_reduce": {"tensor": "a"}}, {"all_reduce": {"tensor": "b", "op": "max"}}],
            "the reduce op of the first part, sum, for all",
        ),
        ([{"all_reduce": {"tensor": ["a", "b"]}}], "needs one tensor as `tensor`"),
        (
            [{"all_reduce": {"tensr": "a"}}],
            "unknown key `tensr`; a part has tensor, group, op; did you mean tensor?",
        ),
        ([], "expected a list of collectives"),
    ],
)
def test_operations_that_pytorch_does_not_coalesce_are_refused(ops, words):
    with pytest.raises(ScenarioErrors) as caught:
        one("coalescing_manager", ops, tensors=TENSORS)

    assert words in caught.value.problems[0].message
    assert loads("world: 1\nprogram: []\n").program == ()
