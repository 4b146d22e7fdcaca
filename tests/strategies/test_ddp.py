"""`ddp` issues what DistributedDataParallel issues, and every replica ends with every gradient
exactly once.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.common.errors import ScenarioErrors
from distsim.scenario import Scenario, load, loads
from distsim.scenario.strategies.base import ModelLayer
from distsim.scenario.strategies.ddp.buckets import (
    assign_buckets,
    initial_buckets,
    model_parameters,
    rebuilt_buckets,
)
from distsim.simulation.simulate_scenario import simulate
from tests.support.harness import draws
from tests.support.strategy_checks import (
    ROOT,
    calls_of,
    held_once,
    meeting,
    noticed,
    simulated,
    spoiled,
)

MIB = 2**20


def ddp(world: int = 4, iterations: int = 1, **fields: object) -> Scenario:
    layers = {"params": [[512, 1024], [512]], "forward": "1 ms", "backward": "2 ms", "count": 4}
    groups = {"half": [0, 1]}
    return Scenario(
        world=world,
        backend="nccl",
        iterations=iterations,
        groups=groups,
        program=[{"ddp": {"layers": layers, **fields}}],
    )


def model(*params: tuple[tuple[int, ...], ...]) -> list[ModelLayer]:
    return [ModelLayer(str(k), shapes, {}, {}) for k, shapes in enumerate(params)]


def test_construction_checks_the_model_then_sends_it_from_rank_0():
    """semantics: all_gather of parameter counts, broadcast of shapes and strides, broadcast of the
    weights.
    """
    calls = meeting(ddp())

    assert [(op, nbytes) for op, _, nbytes, _ in calls[:3]] == [
        ("all_gather", 4 * 8),
        ("broadcast", 4 * (2 * 2 + 2 * 1) * 8),
        ("broadcast", 4 * (512 * 1024 + 512) * 4),
    ]


def test_the_first_iteration_has_one_bucket_and_the_second_agrees_on_new_ones():
    calls = meeting(ddp(iterations=3))[3:]
    layer = (512 * 1024 + 512) * 4

    assert [(op, nbytes) for op, _, nbytes, _ in calls] == [
        ("all_reduce", 4 * layer),
        ("broadcast", 4 * (8 + 1)),
        ("broadcast", 4 * 2),
        *2 * [("all_reduce", layer), ("all_reduce", 3 * layer)],
    ]


def test_the_first_bucket_closes_at_1_mib_and_the_others_at_25():
    params = model_parameters(model(*[((MIB // 8,),)] * 60))  # half a MiB each

    assert [b.numel * 4 // MIB for b in rebuilt_buckets(params, 4, None)] == [1, 25, 4]
    assert [b.numel * 4 // MIB for b in rebuilt_buckets(params, 4, 10 * MIB)] == [10, 10, 10]
    assert len(initial_buckets(params, 4, None, find_unused=False)) == 1
    assert [b.numel * 4 // MIB for b in initial_buckets(params, 4, None, find_unused=True)] == [
        4,
        25,
        1,
    ]


@given(
    st.lists(st.integers(1, 4 * MIB), min_size=1, max_size=20),
    st.sampled_from([None, 1, MIB, 7 * MIB]),
)
def test_buckets_contain_every_parameter_once_and_are_full_except_for_the_last(sizes, cap):
    found = rebuilt_buckets(model_parameters(model(*[((n,),) for n in sizes])), 4, cap)
    limits = [MIB, 25 * MIB] if cap is None else [cap]

    assert [p.number for b in found for p in b.params] == list(range(len(sizes)))[::-1]
    assert all(b.numel * 4 >= limits[min(k, len(limits) - 1)] for k, b in enumerate(found[:-1]))


def test_buckets_are_split_like_in_torch():
    dist = pytest.importorskip("torch.distributed")
    torch = pytest.importorskip("torch")
    sizes = [300_000, 5, 262_144, 1_000_000, 7_000_000, 12, 3_000_000]
    limits = [MIB, 25 * MIB]
    theirs, _ = dist._compute_bucket_assignment_by_size(
        [torch.empty(n) for n in sizes], limits, [False] * len(sizes)
    )

    ours = assign_buckets(model_parameters(model(*[((n,),) for n in sizes])), 4, limits)

    assert [[p.number for p in b.params] for b in ours] == theirs


@pytest.mark.parametrize("world", [2, 3, 8])
@pytest.mark.parametrize(
    "fields",
    [{}, {"accumulate": 3}, {"find_unused_parameters": True, "bucket_cap_mb": 2}, {"buffers": 64}],
)
def test_after_every_iteration_all_replicas_hold_each_gradient_exactly_once(world, fields):
    for iterations in (1, 2, 3):
        done = simulated(ddp(world, iterations, **fields).to_yaml())
        word = "bucket" if iterations > 1 or "find_unused_parameters" in fields else "initial"
        labels = [name for name in done.scenario.tensors if name.startswith(f"ddp_{word}_")]

        assert done.outcome == "completes"
        assert labels
        assert all(held_once(done, label, range(world)) for label in labels)


def test_no_sync_reduces_once_per_iteration_and_plain_accumulation_every_time():
    once = [op for op, *_ in meeting(ddp(accumulate=4, setup=False))]
    every = [op for op, *_ in meeting(ddp(accumulate=4, no_sync=False, setup=False))]

    assert (once, every) == (["all_reduce"] * 2, ["all_reduce"] * 8)


def test_all_reduces_overlap_with_the_backward_pass():
    done = simulated(ddp(iterations=3).to_yaml())
    by_hand = 4 * (1 + 2) * 10**6

    assert done.iteration_ns - by_hand < done.timeline.collectives[-1].duration_ns * 2


@settings(max_examples=draws(30), deadline=None)
@given(
    st.integers(0, 20), st.integers(0, 2), st.sampled_from(["dropped", "doubled", "misdirected"])
)
def test_a_call_dropped_doubled_or_misdirected_on_one_rank_is_always_detected(number, rank, how):
    wrong = spoiled(ddp(3, iterations=2), number, rank, how)
    if wrong is not None:
        assert noticed(wrong, ["ddp_bucket_0", "ddp_bucket_1"], range(3))


def test_a_gradient_reduced_twice_or_not_at_all_on_every_rank_breaks_the_lineage():
    good = ddp(3, setup=False).to_yaml(flat=True)
    line = next(text for text in good.splitlines() if "all_reduce" in text and "@1" in text)
    twice, never = (
        good.replace(line, f"{line}\n- wait: ddp_bucket_reduced@1\n{line}"),
        good.replace(line, "- barrier: {}"),
    )
    never = never.replace("- wait: {handles: ddp_bucket_reduced@1}\n", "")

    assert not noticed(loads(good), ["ddp_bucket_0", "ddp_bucket_1"], range(3))
    assert noticed(loads(twice), ["ddp_bucket_1"], range(3))
    assert noticed(loads(never), ["ddp_bucket_1"], range(3))


@pytest.mark.parametrize(
    ("fields", "place", "words"),
    [
        ({"group": "dpp"}, "ddp.group", "unknown axis dpp"),
        ({"inputs": {0: 3}}, "ddp.inputs", "rank 1 has no entry"),
        ({"inputs": {9: 3, "else": 1}}, "ddp.inputs[9]", "outside the world of 4 ranks"),
        ({"unused": {1: [7]}}, "ddp.unused[1]", "the layers are 0 to 3"),
        ({"join": True}, "ddp.join", "set `inputs`"),
        ({"join": True, "inputs": 2, "group": "half"}, "ddp.join", "only the group of all ranks"),
        ({"bucket_cap_mb": 0}, "ddp.bucket_cap_mb", "above 0"),
    ],
)
def test_an_impossible_layout_is_refused_at_its_place(fields, place, words):
    with pytest.raises(ScenarioErrors) as caught:
        ddp(**fields)

    assert [p.path for p in caught.value.problems] == [f"program[0].{place}"]
    assert words in caught.value.problems[0].message


JOIN = {"inputs": {0: 3, "else": 1}, "join": True, "setup": False}


def test_a_rank_without_batches_shadows_every_call_of_the_others():
    """Compared with a recording of torch 2.13: three ranks, three batches on rank 0 and one on the
    others.
    """
    ranks = [meeting(ddp(3, buffers=4, **JOIN), rank) for rank in range(3)]
    kinds = [[(op, nbytes) for op, _, nbytes, _ in calls] for calls in ranks]
    small, common, buffers = ("all_reduce", 4), ("all_reduce", 8), ("broadcast", 16)

    assert kinds[0] == kinds[1] == kinds[2]
    found = [kind for kind in kinds[0] if kind in (small, common, buffers)]
    assert found == [*(3 * [small, common, buffers, small]), small, common]


def test_buffers_are_sent_by_the_highest_rank_that_has_a_batch():
    roots = [
        call.root
        for call in calls_of(ddp(3, buffers=4, **JOIN))[0]
        if call.op == "broadcast" and call.inputs[0].nbytes == 16
    ]

    assert roots == [2, 0, 0]


def test_a_batch_on_only_one_rank_counts_exactly_once_and_its_model_is_kept():
    done = simulated(ddp(3, **JOIN).to_yaml())

    assert (done.outcome, done.verdict.verdict) == ("completes", "leak")
    assert [
        {c.rank for c in done.values.lineage(rank, "ddp_weights_0")} for rank in range(3)
    ] == 3 * [{0}]
    assert set(done.values.lineage(0, "ddp_bucket_0").values()) == {1}


def test_without_join_the_rank_with_more_batches_hangs():
    done = simulated(ddp(3, inputs={0: 3, "else": 2}).to_yaml())

    assert (done.outcome, done.verdict.verdict) == ("hangs", "deadlock")


def test_a_tiny_model_ends_with_the_weights_of_plain_pytorch():
    """Two samples on two ranks by the expanded program; both on one process by torch's autograd and
    SGD.
    """
    torch = pytest.importorskip("torch")
    weight = torch.tensor([0.5], requires_grad=True)
    optimizer = torch.optim.SGD([weight], lr=0.125)
    for _ in range(3):
        (sum(0.5 * (weight * (r + 1) - (3 * r + 2)) ** 2 for r in range(2)) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()

    values = simulate(
        load(str(ROOT / "scenarios" / "strategies" / "ddp_trains.yaml")), with_values=True
    ).values

    assert [values.array(rank, "ddp_weights_0").tolist() for rank in range(2)] == 2 * [
        weight.tolist()
    ]


@pytest.mark.parametrize(
    ("mine", "theirs", "outcome", "ends"),
    [
        (
            "[{params: 100, forward: 1 ms, backward: 1 ms}, {params: 200, forward: 1 ms, backward: 1 ms}]",
            "[{params: 100, forward: 1 ms, backward: 1 ms}]",
            "raises",
            [
                "DDP expects same model across all ranks, but Rank 0 has 2 params, while rank 1 has inconsistent 1 params.",
                "DDP expects same model across all ranks, but Rank 1 has 1 params, while rank 0 has inconsistent 2 params.",
                "DDP expects same model across all ranks, but Rank 2 has 1 params, while rank 0 has inconsistent 2 params.",
            ],
        ),
        (
            "[{params: 100, forward: 1 ms, backward: 1 ms}]",
            "[{params: 200, forward: 1 ms, backward: 1 ms}]",
            "raises",
            [
                "Connection closed by peer",
                "[1]: params[0] in this process with sizes [200] appears not to match sizes of the same param in process 0.",
                "[2]: params[0] in this process with sizes [200] appears not to match sizes of the same param in process 0.",
            ],
        ),
        (
            "[{params: 100, forward: 1 ms, backward: 1 ms}]",
            "[{params: 100, forward: 1 ms, backward: 1 ms}]",
            "completes",
            ["", "", ""],
        ),
    ],
)
def test_models_that_differ_by_rank_raise_at_the_construction_of_ddp_like_in_torch(
    mine: str, theirs: str, outcome: str, ends: list[str]
) -> None:
    """Run on gloo, torch 2.13. All ranks report different numbers of parameters; only ranks that
    differ from rank 0 report different shapes.
    """
    text = f"world: 3\nbackend: gloo\nprogram:\n- {{ddp: {{layers: {mine}}}, ranks: 0}}\n- {{ddp: {{layers: {theirs}}}, ranks: [1, 2]}}\n"
    found = simulate(loads(text))
    assert found.outcome == outcome
    said = [end.message for end in found.run.final_state.ends]
    assert [now.startswith(then) for now, then in zip(said, ends, strict=True)] == [True] * 3, said
    assert any(said) == (outcome == "raises")
