"""Coalesced launches: one call and one latency, the values of separate calls, and what becomes of
lists that differ.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from distsim.analysis.run_comparison import compare_runs
from distsim.backends import BACKEND_PROFILES, SUPPORT_BY_BACKEND
from distsim.backends.profile import MismatchedCalls
from distsim.cli.commands.explain import explain_page
from distsim.engine import run_program
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.operations.core.resolved_call import DTYPE_BYTES, RankGroup, ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.scenario import Scenario, loads
from distsim.simulation.check_scenario import check_program
from distsim.simulation.simulate_scenario import Simulation, simulate
from distsim.simulation.trace_replay.rebuild import rebuild_program
from tests.support.harness import draws

LAUNCHES = {op: row for op, row in OPERATIONS.items() if row.coalesces is not None}
each_launch = pytest.mark.parametrize("op", LAUNCHES)
WORLD = RankGroup(0, "world", (0, 1))


def buffers(name: str, *sizes: int, dtype: str = "float32") -> tuple[TensorBuffer, ...]:
    return tuple(TensorBuffer(f"{name}{k}", 0, (size,), dtype) for k, size in enumerate(sizes))


def launch(
    op: str, *shares: int, rank: int = 0, dtype: str = "float32", names: str = ""
) -> ResolvedCall:
    """A launch on two ranks; ``shares`` are elements of a rank's share of each part, ``names``
    letters of the tensors.
    """
    row = OPERATIONS[op]
    sides = []
    for side in ("input", "output"):
        wide = getattr(row, f"{side}_parts") == "n"
        named = names or "abcdefgh"
        label = "" if "tensor" in row.model_fields else side[0]
        sides.append(
            tuple(
                TensorBuffer(label + named[k], 0, (n * (2 if wide else 1),), dtype)
                for k, n in enumerate(shares)
            )
        )
    return ResolvedCall(
        op, rank, WORLD, reduce_op="sum" if row.reduces else None, inputs=sides[0], outputs=sides[1]
    )


def scenario(*program: str, world: int = 2, backend: str = "gloo", **tensors: str) -> Scenario:
    declared = "".join(f"  {name}: {spec}\n" for name, spec in tensors.items())
    steps = "".join(f"  - {step}\n" for step in program)
    return loads(
        f"world: {world}\nbackend: {backend}\ncluster: cpu-10gbe\ntensors:\n{declared}program:\n{steps}"
    )


def done(*program: str, **more: Any) -> Simulation:
    return simulate(scenario(*program, **more))


# --- the row ---


@each_launch
def test_a_launch_equals_its_parts_together(op: str) -> None:
    """Bytes add up; what it does to values, its busbw factor and its schedule are those of one
    part.
    """
    row, call = LAUNCHES[op], launch(op, 3, 5, 2)
    member = row.coalesces
    parts = row.separate(call)

    assert member is not None
    assert [part.op for part in parts] == [member.op] * 3
    assert row.nbytes(call) == sum(member.nbytes(part) for part in parts)
    assert row.agreement(call)["numel"] == (3, 5, 2)
    assert row.faults(call) is None
    assert row.effect(4, 0) == member.effect(4, 0)
    assert (row.busbw_factor(8), row.schedule(4, 0)) == (
        member.busbw_factor(8),
        member.schedule(4, 0),
    )
    assert (row.nccl_tests, row.reduces, row.parties(call)) == (
        member.nccl_tests,
        member.reduces,
        (0, 1),
    )


@each_launch
def test_other_calls_are_not_parts_of_a_launch(op: str) -> None:
    alone = LAUNCHES[op].coalesces
    call = ResolvedCall(alone.op, 0, WORLD)

    assert alone.coalesces is None
    assert alone.separate(call) == (call,)


@each_launch
@pytest.mark.parametrize(
    ("second", "words"),
    [
        ({"dtype": "float64"}, "the parts of one launch must have the same dtype"),
        ({"names": "a"}, "is used in two parts of one launch"),
    ],
)
def test_an_operation_not_allowed_in_a_launch_is_a_fault(
    op: str, second: dict[str, str], words: str
) -> None:
    one, other = launch(op, 3), launch(op, 3, **{"names": "b", **second})
    both = ResolvedCall(
        op,
        0,
        WORLD,
        reduce_op="sum",
        inputs=one.inputs + other.inputs,
        outputs=one.outputs + other.outputs,
    )

    assert words in (LAUNCHES[op].faults(both) or "")


def test_a_part_that_does_not_match_is_named() -> None:
    call = ResolvedCall(
        "all_gather_into_tensor_coalesced",
        0,
        WORLD,
        inputs=buffers("x", 3, 4),
        outputs=buffers("y", 6, 9),
    )

    assert (
        OPERATIONS[call.op].faults(call)
        == "part 2: output has 9 elements, but 2 ranks contribute 4 each, in total 8"
    )


@pytest.mark.parametrize(
    ("mine", "theirs", "names", "words"),
    [
        ((3, 5), (3, 5), ("ab", "ab"), None),
        ((3, 5), (5, 3), ("ab", "ba"), "rank 1 has the parts of rank 0 in a different order: b, a"),
        ((3, 5, 2), (3, 2), ("abc", "ac"), "rank 0 coalesces 3 parts, rank 1 only 2: b is missing"),
        (
            (3,),
            (3, 5, 2),
            ("a", "abc"),
            "rank 1 coalesces 3 parts, rank 0 only 1: b, c are missing",
        ),
        ((3, 5), (3, 6), ("ab", "ac"), "part 2 is b of 5 elements on rank 0, c of 6 on rank 1"),
        ((4,), (2, 2), ("a", "bc"), "rank 1 coalesces 2 parts, rank 0 only 1"),
    ],
)
def test_the_part_that_differs_between_two_ranks_is_named(
    mine: tuple[int, ...], theirs: tuple[int, ...], names: tuple[str, str], words: str | None
) -> None:
    row = OPERATIONS["all_reduce_coalesced"]
    calls = [launch(row.op, *mine, names=names[0]), launch(row.op, *theirs, rank=1, names=names[1])]

    assert row.mismatched_pairs(calls) == ([] if words is None else [(0, 1, words)])


@pytest.mark.parametrize("fields", ["{tensor: []}", "{tensors: [a]}"])
def test_a_launch_without_tensors_is_refused_in_the_file(fields: str) -> None:
    with pytest.raises(Exception, match=re.escape("tensor")):
        scenario(f"all_reduce_coalesced: {fields}", a="{shape: [4]}")


def test_inputs_and_outputs_come_in_pairs() -> None:
    with pytest.raises(Exception, match="expected an output for each input, found 2 and 1"):
        scenario(
            "all_gather_into_tensor_coalesced: {input: [a, a], output: [b]}",
            a="{shape: [4]}",
            b="{shape: [8]}",
        )


@each_launch
def test_the_page_of_a_launch_has_80_columns(op: str) -> None:
    assert max(map(len, explain_page(op).splitlines())) <= 80


# --- values ---

KINDS = {
    "all_reduce": ("all_reduce", "all_reduce_coalesced"),
    "gather": ("all_gather_into_tensor", "all_gather_into_tensor_coalesced"),
    "scatter": ("reduce_scatter_tensor", "reduce_scatter_tensor_coalesced"),
}


@settings(max_examples=draws(60), deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    world=st.integers(1, 4),
    shares=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    op=st.sampled_from(("sum", "avg", "max", "product")),
    is_async=st.booleans(),
    dtype=st.sampled_from(("float32", "int32", "bfloat16")),
)
def test_a_coalesced_call_has_the_values_and_lineage_of_separate_calls(
    kind: str, world: int, shares: list[int], op: str, is_async: bool, dtype: str
) -> None:
    """Numbers, and whose contribution each element holds how often, on every rank."""
    alone, together = KINDS[kind]
    tensors, fields = {}, []
    op = "max" if dtype == "int32" and op == "avg" else op
    for k, share in enumerate(shares):
        given, got = (share * world, share) if kind == "scatter" else (share, share * world)
        tensors[f"x{k}"] = f"{{shape: [{given}], dtype: {dtype}, value: rank + index + {k}}}"
        tensors[f"y{k}"] = f"{{shape: [{got}], dtype: {dtype}, value: 7}}"
        fields.append(
            {"tensor": f"x{k}"} if kind == "all_reduce" else {"input": f"x{k}", "output": f"y{k}"}
        )
    reduction = f", op: {op}" if kind != "gather" else ""
    handle = ", async: true, as: h" if is_async else ""
    plain = [
        "{}: {{{}{}}}".format(alone, ", ".join(f"{k}: {v}" for k, v in one.items()), reduction)
        for one in fields
    ]
    lists = ", ".join(f"{side}: [{', '.join(one[side] for one in fields)}]" for side in fields[0])
    launched = [f"{together}: {{{lists}{reduction}{handle}}}", *(["wait: h"] if is_async else [])]
    separate, coalesced = (done(*steps, world=world, **tensors) for steps in (plain, launched))

    assert (coalesced.outcome, coalesced.verdict.verdict) == ("completes", "ok")
    for rank in range(world):
        for name in tensors:
            assert coalesced.values.text(rank, name) == separate.values.text(rank, name)
            assert coalesced.values.stretches(rank, name) == separate.values.stretches(rank, name)
            for element in range(coalesced.values.array(rank, name).size):
                assert coalesced.values.origins(rank, name, element) == separate.values.origins(
                    rank, name, element
                )


def test_outputs_of_a_launch_may_take_their_shape_from_it() -> None:
    ran = done(
        "all_gather_into_tensor_coalesced: {input: [a, b], output: [A, B]}",
        a="{shape: [2], value: rank}",
        b="{shape: [1, 3], value: 1}",
        A="{shape: auto}",
        B="{shape: auto}",
    )

    assert ran.values.state(0, "A").shape == (4,)
    assert ran.values.state(1, "B").shape == (2, 3)


# --- time ---


@each_launch
@pytest.mark.parametrize("backend", ["gloo", "nccl"])
def test_a_launch_costs_as_much_as_one_operation_with_all_its_bytes(op: str, backend: str) -> None:
    """And less than its parts one after the other, by one latency for each further part."""
    shares, world = (256, 1024, 64), 4
    cost = CostModel(cluster_from("cpu-10gbe"), world, world)
    row = LAUNCHES[op]
    together = build_program(
        world, {r: [{"op": op, "numels": list(shares)}] for r in range(world)}, backend=backend
    )
    apart = build_program(
        world,
        {r: [{"op": row.coalesces.op, "numel": n} for n in shares] for r in range(world)},
        backend=backend,
    )
    one, many = (
        run_program(program, BACKEND_PROFILES[backend], cost) for program in (together, apart)
    )
    members = tuple(range(world))
    prices = [
        cost.collective_ns(
            row.coalesces, members, 4 * n * (1 if "tensor" in row.model_fields else world), None
        )
        for n in shares
    ]

    assert one.makespan_ns == cost.collective_ns(
        row, members, row.nbytes(together.call(0, 0)), None
    )
    assert many.makespan_ns == sum(prices)
    latency = cost.collective_ns(row, members, 0, None)
    assert many.makespan_ns - one.makespan_ns == pytest.approx(2 * latency, rel=0.2)


# --- lists that differ ---


def test_lists_of_different_lengths_are_a_mismatch_that_names_the_parts() -> None:
    verdict = check_program(
        lower(
            scenario(
                "{all_reduce_coalesced: {tensor: [a, b, c]}, ranks: 0}",
                "{all_reduce_coalesced: {tensor: [a, c]}, ranks: 1}",
                a="{shape: [4]}",
                b="{shape: [2]}",
                c="{shape: [3]}",
            )
        )
    )
    finding = verdict.findings[0]

    assert (verdict.verdict.verdict, finding.code) == ("mismatch", "DS202")
    assert "all_reduce_coalesced(a, b, c, 36 B)" in finding.message
    assert "rank 0 coalesces 3 parts, rank 1 only 2: b is missing" in finding.message
    assert "coalesce the same tensors in the same order" in finding.help[0]


def test_parts_of_different_sizes_in_another_order_are_a_mismatch() -> None:
    verdict = check_program(
        lower(
            scenario(
                "{all_reduce_coalesced: {tensor: [a, b]}, ranks: 0}",
                "{all_reduce_coalesced: {tensor: [b, a]}, ranks: 1}",
                a="{shape: [4]}",
                b="{shape: [2]}",
            )
        )
    )

    assert (verdict.verdict.verdict, verdict.findings[0].code) == ("mismatch", "DS202")
    assert (
        "rank 1 has the parts of rank 0 in a different order: b, a" in verdict.findings[0].message
    )
    assert {name: p.outcome for name, p in verdict.profiles.items()} == {
        "gloo": "wrong-data",
        "nccl": "undefined",
        "mpi": "raises",
    }


def test_equal_parts_in_another_order_are_wrong_data_and_a_warning() -> None:
    ran = done(
        "{all_reduce_coalesced: {tensor: [a, b]}, ranks: 0}",
        "{all_reduce_coalesced: {tensor: [b, a]}, ranks: 1}",
        a="{shape: [2], value: 1}",
        b="{shape: [2], value: 10}",
    )
    warning = next(f for f in ran.findings if f.code == "DS601")

    assert (ran.verdict.verdict, ran.outcome) == ("ok", "wrong-data")
    assert (
        "a of rank 0 is combined with b of rank 1: the ranks coalesce a and b in different orders on world"
        in warning.message
    )
    assert [ran.values.text(rank, "a") for rank in (0, 1)] == ["[11.0, 11.0]", "[11.0, 11.0]"]


def test_a_launch_that_meets_a_single_collective_is_a_different_operation() -> None:
    verdict = check_program(
        lower(
            scenario(
                "{all_reduce_coalesced: {tensor: [a, b]}, ranks: 0}",
                "{all_reduce: {tensor: c}, ranks: 1}",
                a="{shape: [4]}",
                b="{shape: [2]}",
                c="{shape: [6]}",
            )
        )
    )

    assert verdict.findings[0].code == "DS201"
    assert verdict.profiles["gloo"].outcome == "completes"  # one all_reduce of six numbers on both


def test_launches_with_different_reduce_ops_mismatch() -> None:
    verdict = check_program(
        lower(
            scenario(
                "{all_reduce_coalesced: {tensor: [a], op: max}, ranks: 0}",
                "{all_reduce_coalesced: {tensor: [a]}, ranks: 1}",
                a="{shape: [4]}",
            )
        )
    )

    assert verdict.findings[0].code == "DS204"


@pytest.mark.parametrize(
    ("op", "lists", "expected"),
    [
        ("all_reduce_coalesced", ((2, 3), (3, 2)), ("wrong-data", ())),
        ("all_reduce_coalesced", ((2, 3), (2, 9)), ("crashes", (0,))),
        ("all_gather_into_tensor_coalesced", ((2, 3), (3, 2)), ("wrong-data", ())),
        ("reduce_scatter_tensor_coalesced", ((2, 3), (3, 2)), ("crashes", (0, 1))),
        ("reduce_scatter_tensor_coalesced", ((2, 3), (2,)), ("hangs", ())),
    ],
)
def test_gloo_flattens_all_reduce_and_all_gather_and_runs_reduce_scatter_part_by_part(
    op: str, lists: tuple[tuple[int, ...], ...], expected: tuple[str, tuple[int, ...]]
) -> None:
    """As run on two ranks of torch 2.13: the first two end, or abort, by their totals; the last by
    each part.
    """
    calls = tuple(launch(op, *shares, rank=rank) for rank, shares in enumerate(lists))
    mishap = BACKEND_PROFILES["gloo"].mismatch(
        MismatchedCalls(
            ("numel",), calls, tuple(LAUNCHES[op].nbytes(call) for call in calls), False
        )
    )

    assert (mishap.outcome, mishap.crash) == expected


# --- back ends ---


@each_launch
def test_only_gloo_and_nccl_have_launches(op: str) -> None:
    assert [
        name
        for name, one in SUPPORT_BY_BACKEND.items()
        if one.takes(op, "float32", "sum" if OPERATIONS[op].reduces else None)
    ] == [
        "gloo",
        "nccl",
    ]
    assert "support" in (SUPPORT_BY_BACKEND["mpi"].refusal(op, "float32") or "")


@pytest.mark.parametrize(
    ("op", "gloo", "nccl"),
    [
        ("all_reduce_coalesced", "raises", "raises"),
        ("all_gather_into_tensor_coalesced", "goes on", "goes on"),
        ("reduce_scatter_tensor_coalesced", "goes on", "goes on"),
    ],
)
def test_parts_of_two_dtypes_are_refused_by_backends_that_check(
    op: str, gloo: str, nccl: str
) -> None:
    one, other = launch(op, 3), launch(op, 3, dtype="float64", names="b")
    call = ResolvedCall(
        op, 0, WORLD, inputs=one.inputs + other.inputs, outputs=one.outputs + other.outputs
    )

    assert [BACKEND_PROFILES[name].invalid(call, "DS110", {}) for name in ("gloo", "nccl")] == [
        gloo,
        nccl,
    ]


# --- replay ---


@each_launch
@pytest.mark.parametrize("is_async", [False, True])
def test_a_trace_of_a_launch_is_replayed_exactly(op: str, is_async: bool) -> None:
    """The parts too, not only their sum."""
    handle = {"async": True, "handle": "h"} if is_async else {}
    calls = [{"op": op, "numels": [5, 3, 8], "dtype": "bfloat16", "reduce_op": "max", **handle}]
    calls += [{"op": "wait", "handles": ["h"]}] if is_async else []
    program = build_program(4, dict.fromkeys(range(4), calls))
    cost = CostModel(cluster_from("cpu-10gbe"), 4, 4)
    first = run_program(program, BACKEND_PROFILES["gloo"], cost)
    rebuilt = rebuild_program(first.trace, backend="gloo").program
    again = run_program(rebuilt, BACKEND_PROFILES["gloo"], cost)

    assert OPERATIONS[op].agreement(rebuilt.call(2, 0)) == OPERATIONS[op].agreement(
        program.call(2, 0)
    )
    assert rebuilt.call(2, 0).is_async is is_async
    assert again.makespan_ns == first.makespan_ns
    assert compare_runs(first.trace, again.trace).same
    assert (
        DTYPE_BYTES["bfloat16"] * sum(b.numel for b in rebuilt.call(0, 0).inputs)
        == program.call(0, 0).input_nbytes
    )
