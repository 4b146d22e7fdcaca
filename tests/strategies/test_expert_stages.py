"""`expert_parallel` in two stages: what crosses between machines and inside, in which order, and
and refused layouts.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.program.lower import lower
from distsim.scenario import Scenario
from distsim.scenario.strategies.intra_layer.hierarchical_all_to_all import hit_probability
from distsim.simulation.simulate_scenario import simulate
from tests.support.strategy_checks import noticed, spoiled

FIELDS = {
    "experts": 16,
    "tokens": 64,
    "top_k": 2,
    "hidden": 256,
    "forward": "1 ms",
    "backward": "2 ms",
    "between": "machine",
}


def scenario(**fields: Any) -> Scenario:
    return Scenario(
        world={"nodes": 2, "ranks_per_node": 2},
        backend="nccl",
        cluster="dgx-h100",
        mesh={"machine": 2, "ep": 2},
        program=[{"expert_parallel": {**FIELDS, **fields}}],
    )


def sent(made: Scenario) -> list[tuple[str, int]]:
    """(group, bytes) of the exchanges of rank 0."""
    calls = [c for _, c in lower(made).calls_of(0) if c.op == "all_to_all_single"]
    return [(c.group.name.partition("[")[0], c.input_nbytes) for c in calls]


def test_both_stages_carry_all_rows_and_the_backward_pass_carries_them_again() -> None:
    """64 tokens for 2 experts each, 256 bfloat16: 64 KiB out by each stage and back by each, after
    the counts.
    """
    row = 64 * 2 * 256 * 2
    out, back = [("machine", row), ("ep", row)], [("ep", row), ("machine", row)]

    assert sent(scenario())[1:] == [*out, *back, *out, *back]


@pytest.mark.parametrize(
    ("experts", "of_place", "top_k"), [(8, 4, 2), (8, 2, 3), (6, 3, 4), (5, 1, 1)]
)
def test_the_number_of_nodes_of_a_token_is_counted_over_all_choices(
    experts: int, of_place: int, top_k: int
) -> None:
    choices = list(combinations(range(experts), top_k))

    assert hit_probability(experts, of_place, top_k) == pytest.approx(
        sum(min(c) < of_place for c in choices) / len(choices)
    )


def test_a_token_crosses_nodes_once_and_is_sent_in_fp8_with_its_scales() -> None:
    """1 - C(8, 2) / C(16, 2) of 64 tokens is 49.07: 50 rows to each machine, 256 bytes and two
    float32 scales each; BF16 back.
    """
    found = sent(scenario(once_per_machine=True, dispatch_dtype="float8_e4m3fn"))

    assert found[1] == ("machine", 2 * 50 * (256 + 8))
    assert found[4] == ("machine", 2 * 50 * 256 * 2)


def test_one_piece_circulates_inside_while_the_next_is_between_nodes() -> None:
    """All pieces are sent off at once, and each goes on when it has come; so the two stages
    overlap.
    """
    made = scenario(pieces=2, tokens=65536, hidden=4096, beside="1 ms")
    calls = [
        (c.group.name.partition("[")[0], c.op)
        for _, c in lower(made).calls_of(0)
        if c.op in ("all_to_all_single", "wait", "compute")
    ]
    begin = [f"{op} {group}" if op == "all_to_all_single" else op for group, op in calls][2:9]
    whole, halves = (
        simulate(scenario(pieces=n, tokens=65536, hidden=4096)).run.makespan_ns for n in (1, 2)
    )

    assert begin == [
        "all_to_all_single machine",
        "all_to_all_single machine",
        "compute",
        "wait",
        "compute",
        "all_to_all_single ep",
        "wait",
    ]
    assert halves < whole


def test_tokens_arrive_from_the_same_place_of_all_nodes_and_then_from_the_own_node() -> None:
    """Rank 3 is place 1 of machine 1."""
    values = simulate(scenario(), with_values=True).values
    assert values is not None

    def givers(word: str) -> set[int]:
        return {c.rank for c in values.lineage(3, f"expert_parallel_{word}")}

    assert (givers("tokens_out_got"), givers("forwarded_out_got"), givers("tokens_back_got")) == (
        {1, 3},
        {2, 3},
        {1, 3},
    )


UNEVEN: list[dict[str, Any]] = [
    {"imbalance": 0.8, "seed": 3},
    {"imbalance": 0.8, "capacity_factor": 1.25},
    {"imbalance": 2, "seed": 1},
    {"imbalance": 0.8, "capacity_factor": 1.25, "pad_to_capacity": True},
]


@pytest.mark.parametrize("fields", UNEVEN)
def test_an_uneven_router_brings_every_rank_the_same_tokens_as_one_stage(
    fields: dict[str, Any],
) -> None:
    """Through both stages, in as many bytes; experts take as long. Tokens and results are of one
    number on all ranks.
    """

    def computed(made: Scenario) -> list[list[int]]:
        return [
            [
                call.time_ns
                for _, call in lower(made).calls_of(rank)
                if call.op == "compute" and call.time_ns
            ]
            for rank in range(4)
        ]

    def came(made: Scenario, word: str) -> list[int]:
        labels = {f"expert_parallel_{word}", f"expert_parallel_{word}@0"}
        calls = [
            [c for _, c in lower(made).calls_of(rank) if any(b.label in labels for b in c.outputs)]
            for rank in range(4)
        ]
        return [found[0].output_nbytes for found in calls]

    one = Scenario(
        world=4,
        mesh={"ep": 4},
        program=[{"expert_parallel": {**FIELDS, "between": None, **fields}}],
    )
    two = scenario(**fields)

    assert came(two, "forwarded_out_got") == came(one, "routed")
    assert came(two, "tokens_back_got") == came(one, "combined")
    assert computed(two) == computed(one)
    for made in (two, scenario(**fields, pieces=3)):
        found = simulate(made, with_values=True)
        assert found.verdict is not None
        assert (found.outcome, found.verdict.verdict, found.findings) == ("completes", "ok", ())


def test_an_altered_call_of_an_uneven_router_is_always_detected() -> None:
    good = scenario(imbalance=0.8, seed=3)
    assert not noticed(good, [], range(4))
    for number in range(0, 12, 3):
        wrong = spoiled(good, number, number % 4, "dropped")
        assert wrong is None or noticed(wrong, [], range(4)), number


@pytest.mark.parametrize("how", ["dropped", "doubled"])
def test_an_altered_call_is_always_detected(how: str) -> None:
    good = scenario(pieces=2)
    assert not noticed(good, [], range(4))
    for number in range(0, 17, 2):
        wrong = spoiled(good, number, number % 4, how)
        assert wrong is None or noticed(wrong, [], range(4)), number


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"between": None, "pieces": 2}, "this field needs two-level exchange"),
        ({"between": "ep"}, "a mesh axis other than ep"),
        ({"between": "dp"}, "unknown axis dp"),
        ({"imbalance": 0.5, "once_per_machine": True}, "supports only an even router"),
        ({"capacity_factor": 2, "once_per_machine": True}, "supports only an even router"),
        ({"experts": 6}, "6 experts are not divisible by the 4 ranks"),
        (
            {"experts": 2**40, "top_k": 2**20},
            "at most 65536 experts, found 1099511627776",
        ),
        ({"pieces": 20001, "tokens": 2**30}, "pieces is 20001; the limit is 20000"),
        (
            {"pieces": 65},
            "each piece needs at least one token: expected at most 64 pieces, found 65",
        ),
    ],
)
def test_impossible_layouts_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ScenarioErrors, match=words):
        scenario(**fields)
