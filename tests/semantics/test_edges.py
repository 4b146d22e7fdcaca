"""The edges of the one form: what small programs show of a driver, of classes of ranks, and of who
makes which group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS
from distsim.common.arrays import first_equal_columns
from distsim.common.errors import UsageError
from distsim.engine import SimulatedRun
from distsim.engine import run_program as run_engine
from distsim.findings.final_state import FinalState
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import loads
from distsim.semantics.classes.rank_keys import row_numbers, vectors_of_call
from distsim.semantics.classes.representatives import representative_program
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.group_creation import created_group_ids
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import ProgramMismatches
from distsim.semantics.form.order_dependence import why_order_matters
from distsim.semantics.local.blocked_ranks import blocked_state_of_run as left_by
from distsim.semantics.local.class_clocks import run_quotient
from distsim.semantics.local.quotient import coarsest_quotient
from distsim.semantics.local.rank_clocks import LocalClocks, local_run_inputs
from distsim.semantics.local.run import run_local_clocks
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.machine_tables import is_member
from distsim.semantics.ordered.state import (
    CHOICE_STEP,
    RowCancelled,
    RowsMismatched,
    SchedulerChoice,
)
from distsim.semantics.ordered.transitions import TransitionRules
from distsim.simulation.simulate_scenario import cost_model, simulate
from tests.semantics.test_rules import end, to
from tests.semantics.test_rules import run as settle

REDUCE = {"op": "all_reduce", "numel": 4}
#: Of a run on local clocks, by row.
TIMES = ("posted", "returned", "ended", "waited")


def ran(*ranks: list[dict[str, Any]], backend: str = "gloo", **more: Any) -> SimulatedRun:
    program = build_program(len(ranks), dict(enumerate(ranks)), backend=backend, **more)
    return run_engine(
        program,
        BACKEND_PROFILES[backend],
        CostModel(cluster_from("cpu-10gbe"), program.world_size, 1),
    )


# --- who is missing ---
def test_a_rank_that_arrived_at_time_zero_is_not_missing() -> None:
    """A root of gather lacks rank 2 alone, though rank 1 came at 0 ns."""
    gather = {"op": "gather", "numel": 4, "root": 0}
    linked = LinkedProgram(
        build_program(3, {0: [gather], 1: [gather], 2: []}), CONTRACT_READINGS["early"]
    )
    left = left_by(run_local_clocks(linked, CompletionConditions(linked, None)))

    assert [(b.rank, [need.ranks for need in b.needs]) for b in left.blocked] == [(0, [(2,)])]


def test_a_host_behind_queued_launches_waits_for_the_peers_of_the_first_open_one() -> None:
    """Its own stream is done with the first of them."""
    pair, world = {**REDUCE, "group": "pair", "async": True}, {**REDUCE, "async": True}
    ranks = [
        [pair, world, world, {"op": "synchronize"}],
        [pair, world, {"op": "compute", "time_ns": 1000}],
        [],
    ]
    found = ran(*ranks, backend="nccl", groups={"pair": [0, 1]})

    assert found.outcome == "hangs"
    assert {need.ranks for b in found.final_state.blocked if b.rank == 0 for need in b.needs} == {
        (2,)
    }


# --- hosts and devices ---
def test_destroying_a_group_waits_for_its_device_first() -> None:
    """nccl: the host of rank 0 is blocked inside destroy_process_group, before it returns."""
    init, end = {"op": "init_process_group"}, {"op": "destroy_process_group"}
    found = ran(
        [init, REDUCE, REDUCE, end, {"op": "compute", "time_ns": 10}],
        [init, REDUCE, end],
        backend="nccl",
    )

    assert [(b.rank, b.position) for b in found.final_state.blocked] == [(0, 3)]


@pytest.mark.parametrize("blocking", [False, True])
def test_a_wait_returns_after_the_work_only_if_it_blocks(blocking: bool) -> None:
    """TORCH_NCCL_BLOCKING_WAIT: else the stream waits, and the host goes on."""
    steps = [
        REDUCE,
        {**REDUCE, "numel": 4_000_000, "async": True, "handle": "h"},
        {"op": "wait", "handles": ["h"]},
    ]
    found = ran(steps, steps, backend="nccl", options={"blocking_wait": blocking})
    rows = {
        found.trace.row(row).op: row
        for row in range(len(found.trace))
        if found.trace.row(row).rank == 0
    }

    done = found.trace["finished_ns"][rows["all_reduce"]]
    assert bool(found.trace["returned_ns"][rows["wait"]] >= done) is blocking


def test_a_first_call_without_anything_to_wait_for_returns_at_once() -> None:
    found = ran([{"op": "synchronize"}], backend="nccl")

    text = "world: 1\nbackend: nccl\nfaults: [{rank: 0, kind: late, delay: 1 ms}]\nprogram:\n  - synchronize: {}\n"

    assert found.trace["returned_ns"].tolist() == [0]
    assert simulate(loads(text)).run.trace["returned_ns"].tolist() == [1_000_000]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_work_without_a_time_takes_the_time_of_its_operations(dtype: str) -> None:
    """In its type, and no nanosecond on top; a put what its link takes."""
    cost = CostModel(cluster_from("dgx-a100"), 2, 2)
    text = "world: {nodes: 1, ranks_per_node: 2}\nbackend: nccl\ncluster: dgx-a100\nprogram:\n  - "
    work = simulate(loads(f"{text}compute: {{flops: 1 TFLOP, dtype: {dtype}}}\n")).run
    put = simulate(
        loads(text + "{put: {tensor: {shape: [1000000]}, dst: 1}, ranks: rank == 0}\n")
    ).run

    assert work.makespan_ns == cost.compute_ns(0, 1e12, 0, dtype)
    assert put.makespan_ns == cost.one_sided_ns(0, 1, 4_000_000)


def test_order_matters_only_for_calls_that_take_the_process_lock_during_a_collective() -> None:
    """mpi: order matters for a message during an open all_reduce, not for the wait of that call."""
    asked = {**REDUCE, "async": True, "handle": "h"}
    waits: list[dict[str, Any]] = [asked, {"op": "wait", "handles": ["h"]}]
    talks = [
        [asked, {"op": "send", "peer": 1, "numel": 4}, waits[1]],
        [asked, {"op": "recv", "peer": 0, "numel": 4}, waits[1]],
    ]

    def why(ranks: list[list[dict[str, Any]]]) -> str | None:
        return why_order_matters(
            LinkedProgram(
                build_program(2, dict(enumerate(ranks)), backend="mpi"), BACKEND_PROFILES["mpi"]
            )
        )

    assert why([waits, waits]) is None
    assert why([[asked, {"op": "compute", "time_ns": 10, "queue": "device"}, waits[1]]] * 2) is None
    assert why(talks) == "the process's one lock decides who comes first"


# --- calls that do not fit ---
def splits(given: list[int], got: list[int]) -> dict[str, Any]:
    return {"op": "all_to_all_single", "numel": sum(given), "in_splits": given, "out_splits": got}


def reported_mismatches(program: Program, profile: str = "rendezvous") -> list[RowsMismatched]:
    return [event for event in settle(program, profile)[2] if isinstance(event, RowsMismatched)]


def test_a_mismatch_is_reported_when_two_have_arrived_and_again_for_all() -> None:
    """Rank 2 expects one element of rank 0 more than it gets; rank 1 fits both, comes last where it
    comes, and keeps two for itself.
    """
    calls = [
        [splits([1, 1, 2], [1, 1, 2])],
        [splits([1, 2, 1], [1, 2, 1])],
        [splits([2, 1, 1], [3, 1, 1])],
    ]
    two, three = (
        [
            sorted(found.rows)
            for found in reported_mismatches(build_program(3, dict(enumerate(those))))
        ]
        for those in ([calls[0], [], calls[2]], calls)
    )

    assert two == [[0, 1]]  # the rows of two calls
    assert three == [[0, 2], [0, 1, 2]]


def test_matching_parts_are_never_reported_in_any_order_of_arrival() -> None:
    right, wrong = splits([3, 1], [2, 1]), splits([3, 1], [3, 1])
    found = [
        reported_mismatches(build_program(2, {0: [splits([1, 2], [1, 3])], 1: [other]}))
        for other in (right, wrong)
    ]

    assert [len(each) for each in found] == [0, 1]
    assert found[1][0].fields == ("splits",)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)])
def test_an_exchange_that_meets_other_calls_is_a_different_operation(
    order: tuple[int, ...],
) -> None:
    """Calls are matched by number, whichever rank arrives first; sizes do not matter then."""
    calls = [splits([1, 2, 1], [1, 2, 1]), {"op": "barrier"}, splits([3, 1, 1], [3, 1, 1])]
    slow = {
        rank: [{"op": "compute", "time_ns": place}, calls[rank]] for place, rank in enumerate(order)
    }
    found = reported_mismatches(build_program(3, slow))

    assert found
    assert found[-1].fields[0] == "op"
    assert "splits" not in found[-1].fields[:1]


def test_members_of_an_exchange_with_two_dtypes_are_reported_before_all_have_arrived() -> None:
    calls = {
        rank: [{"op": "all_to_all_single", "numel": 6, "dtype": dtype}]
        for rank, dtype in enumerate(("float32", "int32"))
    }

    assert [found.fields for found in reported_mismatches(build_program(3, calls))] == [("dtype",)]


# --- who makes which group ---
def test_groups_are_counted_when_created_and_destroyed() -> None:
    """Rank 0 is in a group of the file, rank 1 in one that was made: equally many, so that their
    next group has one name.
    """
    text = "groups: {a: [0, 2]}\nworld: 3\nbackend: gloo\nprogram:\n  - new_group: {name: c, ranks: [1, 2]}\n"
    text += "  - new_group: {name: b, ranks: [0, 1], use_local_synchronization: true}\n    ranks: rank < 2\n"
    text += "  - all_reduce: {tensor: {shape: [1]}, group: b}\n    ranks: rank < 2\n"
    used = "  - all_reduce: {tensor: {shape: [1]}, group: a}\n    ranks: rank != 1\n"

    assert [simulate(loads(text + more)).outcome for more in ("", used)] == [
        "hangs",
        "completes",
    ]  # an unused group does not count


def test_the_groups_that_matched_in_a_recorded_program_are_known() -> None:
    """Local groups that would not match in a scenario file did match in the recorded run."""
    make = {"op": "new_group", "name": "b", "ranks": [0, 1], "use_local_synchronization": True}
    other = {"op": "new_group", "name": "a", "ranks": [0, 2], "use_local_synchronization": True}
    use = {**REDUCE, "group": "b"}

    assert ran([other, make, use], [make, use], [other]).outcome == "completes"


def test_order_does_not_matter_for_a_group_that_all_members_create_equally() -> None:
    make, use = {"op": "new_group", "name": "g", "ranks": [0, 1]}, {**REDUCE, "group": "g"}
    other = {**make, "ranks": [0, 2]}
    programs = ([[make, use], [make, use], [make]], [[make, use], [make, use], [other]])
    found = [
        why_order_matters(
            LinkedProgram(build_program(3, dict(enumerate(ranks))), BACKEND_PROFILES["gloo"])
        )
        for ranks in programs
    ]

    assert found == [None, "the ranks made different groups"]


def test_an_unused_group_is_recognised_as_the_world() -> None:
    program = build_program(
        2, {r: [{"op": "new_group", "name": "g", "ranks": [0, 1]}] for r in range(2)}
    )
    call = program.call(0, 0)
    program.groups[1:] = []

    assert created_group_ids(program, call) == (0,)


# --- classes ---
def conditions(text: str, reading: str | None = None) -> tuple[LinkedProgram, CompletionConditions]:
    program = lower(loads(text))
    linked = LinkedProgram(
        program, CONTRACT_READINGS[reading] if reading else BACKEND_PROFILES[program.backend]
    )
    return linked, CompletionConditions(linked, None)


RING = """
world: 64
backend: mpi
program:
  - isend: {tensor: {shape: [4]}, dst: (rank + 1) % 64, as: s}
  - recv: {tensor: {shape: [4]}, src: (rank - 1) % 64}
  - wait: s
"""
CHAIN = """
world: 64
backend: gloo
program:
  - {recv: {tensor: {shape: [4]}, src: rank - 1}, ranks: rank > 0}
  - {send: {tensor: {shape: [4]}, dst: rank + 1}, ranks: rank < 63}
"""


def test_a_ring_is_one_class_and_a_chain_that_splits_from_its_ends_is_given_up() -> None:
    """With higher limits, the chain splits into as many classes as it has ranks."""
    ring, chain = conditions(RING), conditions(CHAIN)

    one = coarsest_quotient(*ring)
    assert one is not None
    assert [len(found.ranks) for found in one.classes] == [64]
    assert coarsest_quotient(*chain) is None
    patient = coarsest_quotient(*chain, worth=1, rounds=100)
    assert patient is not None
    assert len(patient.classes) == 64


def test_ranks_with_two_kinds_of_partners_are_two_classes() -> None:
    """Even ranks send to a late rank and odd ranks to a fast rank; equal ranks share a class."""
    text = "world: 16\nbackend: gloo\nprogram:\n"
    text += "  - {send: {tensor: {shape: [4]}, dst: rank + 8}, ranks: rank < 8}\n"
    text += "  - {compute: {time: 1 ms}, ranks: rank > 7 and rank % 2 == 0}\n"
    text += "  - {recv: {tensor: {shape: [4]}, src: rank - 8}, ranks: rank > 7}\n"
    found = coarsest_quotient(*conditions(text), worth=1)

    assert found is not None
    assert sorted(one.ranks.tolist() for one in found.classes) == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
        [8, 10, 12, 14],
        [9, 11, 13, 15],
    ]


def test_a_send_that_waits_for_buffer_space_differs_from_one_that_has_it() -> None:
    """mpi buffers a limited number of bytes; one of two equal pairs has sent before."""
    size = 4000
    text = f"world: 8\nbackend: mpi\nprogram:\n  - {{isend: {{tensor: {{shape: [{size}]}}, dst: rank + 4, as: a}}, ranks: rank < 4}}\n"
    text += (
        f"  - {{isend: {{tensor: {{shape: [{size}]}}, dst: rank + 4, as: b}}, ranks: rank < 4}}\n"
    )
    text += f"  - {{recv: {{tensor: {{shape: [{size}]}}, src: rank - 4}}, ranks: rank > 3}}\n" * 2
    linked, found = conditions(text)
    folded = coarsest_quotient(linked, found, worth=1)

    assert folded is not None
    assert len(folded.classes) == 2
    assert all(
        len({int(found.freed_by[linked.base[rank]]) >= 0 for rank in one.ranks.tolist()}) == 1
        for one in folded.classes
    )


# --- the rules, step by step ---
def test_a_rank_that_exited_or_is_blocked_offers_no_step() -> None:
    rules = TransitionRules(
        build_program(2, {0: [{"op": "exit", "code": 0}], 1: [{"op": "barrier"}]}),
        CONTRACT_READINGS["rendezvous"],
    )
    state = rules.initial()
    rules.settle(state)

    assert [rules.can_step(state, rank) for rank in (0, 1)] == [False, False]
    assert rules.enabled(state) == []


# --- which call waits behind which other call ---
def needs(found: FinalState, rank: int) -> list[tuple[int, tuple[int, ...], bool]]:
    """For each need of a blocked rank: (position, ranks, whether any one of them is enough)."""
    return [
        (need.position, need.ranks, need.any)
        for b in found.blocked
        if b.rank == rank
        for need in b.needs
    ]


def test_a_host_that_needs_the_lock_waits_for_the_peers_of_the_collective_that_holds_it() -> None:
    """mpi: an irecv that is open at the same time does not matter."""
    mine = [
        {"op": "irecv", "peer": 2, "numel": 4, "handle": "h"},
        {**REDUCE, "group": "pair", "async": True, "handle": "g"},
    ]
    mine += [{"op": "send", "peer": 2, "numel": 4}]
    left = end("mpi", mine, [], [{"op": "recv", "peer": 0, "numel": 4}], groups={"pair": [0, 1]})

    assert [(b.rank, b.position) for b in left.blocked] == [(0, 2), (2, 0)]
    assert needs(left, 0) == [(1, (1,), False)]


def test_a_launch_behind_two_busy_workers_waits_for_either_and_names_the_first() -> None:
    """gloo: a group runs at most two collectives at the same time."""
    mine = [
        *({"op": "broadcast", "numel": 4, "root": root, "async": True} for root in (1, 2)),
        {**REDUCE},
    ]
    left = end("gloo", mine, [{"op": "compute", "time_ns": 1}], [])

    assert [b.position for b in left.blocked if b.rank == 0] == [2]
    assert needs(left, 0) == [(0, (1, 2), True)]


def test_a_host_behind_a_stream_waits_for_the_peers_of_the_running_launch() -> None:
    """nccl: a barrier is behind the two collectives before it, and the second has not begun."""
    pair = {**REDUCE, "group": "pair"}
    ranks = [[pair, REDUCE, {"op": "barrier"}], [{"op": "compute", "time_ns": 1}], []]
    left = end("nccl", *ranks, groups={"pair": [0, 1]}, options={"init": "eager"})
    fast = ran(
        *ranks, backend="nccl", groups={"pair": [0, 1]}, options={"init": "eager"}
    ).final_state

    assert needs(left, 0) == needs(fast, 0) == [(0, (1,), False)]


LAUNCHES = """
world: 16
backend: nccl
options: {blocking_wait: true}
mesh: {pair: 8, half: 2}
program:
  - all_reduce: {tensor: {shape: [4]}}
  - compute: {time: 1 ms}
  - all_reduce: {tensor: {shape: ['1000 * (rank // 2 + 1)']}, group: half, async: true, as: a}
  - {all_reduce: {tensor: {shape: [4]}, async: true, as: b}, ranks: rank < 14}
  - all_reduce: {tensor: {shape: ['900000 * (rank // 2 + 1)']}, group: half, async: true, as: c}
  - {wait: [a, b, c], ranks: rank < 14}
"""
MESSAGES = """
world: 16
backend: BACKEND
program:
  - {isend: {tensor: {shape: ['100000 * (rank + 1)']}, dst: rank + 8, as: s}, ranks: rank < 8}
  - {wait: s, ranks: rank < 8}
  - {irecv: {tensor: {shape: ['100000 * (rank - 7)']}, src: rank - 8, as: a}, ranks: rank > 7}
  - {irecv: {tensor: {shape: [4]}, src: rank - 8, as: b}, ranks: rank > 7}
  - {wait: [a, b], ranks: rank > 7}
"""


@pytest.mark.parametrize(
    "text",
    [LAUNCHES, *(MESSAGES.replace("BACKEND", name) for name in ("gloo", "mpi"))],
    ids=["nccl", "gloo", "mpi"],
)
def test_ranks_of_a_class_that_wait_for_several_are_blocked_since_the_first_missing_one(
    text: str,
) -> None:
    """Each rank alone gives the same time; calls that end after the missing one do not matter."""
    program = lower(loads(text))
    linked = LinkedProgram(program, BACKEND_PROFILES[program.backend])
    prices = CompletionConditions(linked, CostModel(cluster_from("dgx-a100"), 16, 8))
    folded = coarsest_quotient(linked, prices, worth=1)
    alone = left_by(LocalClocks(local_run_inputs(linked, prices)).run())

    assert folded is not None
    assert any(len(one.ranks) > 2 for one in folded.classes)
    together = left_by(run_quotient(linked, prices, folded))
    assert [(b.rank, b.since_ns) for b in together.blocked] == [
        (b.rank, b.since_ns) for b in alone.blocked
    ]
    assert len({b.since_ns for b in alone.blocked}) > 2


LATE = """
world: 16
backend: BACKEND
faults: [FAULTS]
program:
  - {isend: {tensor: {shape: [4]}, dst: rank + 8, as: s}, ranks: rank < 8}
  - {recv: {tensor: {shape: [4]}, src: rank - 8}, ranks: rank > 7}
  - {wait: s, ranks: rank < 8}
  - all_reduce: {tensor: {shape: [1000000]}, async: true, as: a}
  - compute: {time: 3 us}
  - synchronize: {}
  - compute: {time: 5 us}
  - wait: a
"""


@pytest.mark.parametrize("backend", list(BACKEND_PROFILES))
def test_ranks_that_start_late_have_the_same_times_as_a_class_and_alone(backend: str) -> None:
    """Their hosts start late, so the work queued on their devices waits for them."""
    late = ", ".join(
        f"{{rank: {rank}, kind: late, delay: 1 ms}}" for rank in (*range(2), *range(8, 10))
    )
    program = lower(loads(LATE.replace("BACKEND", backend).replace("FAULTS", late)))
    linked = LinkedProgram(program, BACKEND_PROFILES[backend])
    prices = CompletionConditions(linked, CostModel(cluster_from("dgx-a100"), 16, 8))
    folded = coarsest_quotient(linked, prices, worth=1)

    assert folded is not None
    assert max(len(one.ranks) for one in folded.classes) > 2
    together, alone = (
        run_quotient(linked, prices, folded),
        LocalClocks(local_run_inputs(linked, prices)).run(),
    )
    assert [list(getattr(together, name)) for name in TIMES] == [
        list(getattr(alone, name)) for name in TIMES
    ]
    assert alone.posted[linked.base[0]] == alone.posted[linked.base[8]] == 1_000_000


@pytest.mark.parametrize(("odd", "folds"), [(1, True), (2, False)])
def test_an_exchange_with_different_parts_completes_with_all_its_ranks(
    odd: int, folds: bool
) -> None:
    """Odd ranks get so many elements of each rank, even ones one. Whether that fits goes by where
    each stands.
    """
    text = f"world: 8\nbackend: nccl\nprogram:\n  - all_to_all_single:\n      input: {{shape: [{4 + 4 * odd}]}}\n"
    text += f"      output: {{shape: ['8 * (1 + {odd - 1} * (rank % 2))']}}\n"
    text += f"      input_splits: {[1, odd] * 4}\n      output_splits: {[f'1 + {odd - 1} * (rank % 2)'] * 8}\n"
    scenario = loads(text)
    program = lower(scenario)

    assert simulate(scenario).outcome == "completes"
    assert (
        representative_program(
            program, [cost_model(scenario, program, None)], [BACKEND_PROFILES["nccl"]], worth=1
        )
        is not None
    ) is folds


def test_a_host_queues_collectives_while_a_worker_holds_the_lock() -> None:
    """mpi: the host blocks at the wait, not at the call that queues the second collective."""
    asked = [{**REDUCE, "async": True, "handle": name} for name in "ab"]
    left = end("mpi", [*asked, {"op": "wait", "handles": ["a", "b"]}], [])

    assert [(b.rank, b.position) for b in left.blocked] == [(0, 2)]
    assert needs(left, 0)[0] == (0, (1,), False)


def test_a_dropped_request_is_reported_as_cancelled() -> None:
    """gloo: an isend whose handle is dropped. A choice without a message names no message."""
    events = settle(
        build_program(2, {0: [{"op": "isend", "peer": 1, "numel": 4, "handle": None}], 1: []}),
        "gloo",
    )[2]

    assert [event.row for event in events if isinstance(event, RowCancelled)] == [0]
    assert (
        SchedulerChoice(CHOICE_STEP, 0)
        == SchedulerChoice(CHOICE_STEP, 0, -1)
        != SchedulerChoice(CHOICE_STEP, 0, 1)
    )


# --- equal columns and rows ---
def test_coincidences_name_the_first_equal_column_and_number_rows_by_equality() -> None:
    assert first_equal_columns(np.array([[5, 7, 5, 7], [1, 1, 2, 2], [3, 2, 1, 0]])).tolist() == [
        [0, 1, 0, 1],
        [0, 0, 2, 2],
        [0, 1, 2, 3],
    ]
    first, second, third, fourth = row_numbers(
        np.array([[1, 2, 9], [1, 3, 9], [1, 2, 9], [1, 1, 9]])
    ).tolist()
    assert (first == third, len({first, second, fourth})) == (True, 3)
    assert row_numbers(np.array([[4, 4], [4, 4]])).tolist() == [0, 0]


def test_vectors_of_a_call_include_those_of_its_tensors() -> None:
    program = lower(
        loads(
            "world: 3\nbackend: gloo\nprogram:\n  - all_reduce: {tensor: {shape: [2, rank + 1]}}\n"
        )
    )
    found = [vector.tolist() for vector in vectors_of_call(program.codes[0].calls[0])]

    assert [1, 2, 3] in found
    assert [8, 16, 24] in found


STAGES = """
world: 128
backend: gloo
program:
  - {recv: {tensor: {shape: [4]}, src: rank - 16}, ranks: rank > 15}
  - {send: {tensor: {shape: [4]}, dst: rank + 16}, ranks: rank < 112}
"""
TREE = """
world: 255
backend: gloo
program:
  - {recv: {tensor: {shape: [4]}, src: (rank - 1) // 2}, ranks: rank > 0}
  - {send: {tensor: {shape: [4]}, dst: 2 * rank + 1}, ranks: rank < 127}
  - {send: {tensor: {shape: [4]}, dst: 2 * rank + 2}, ranks: rank < 127}
"""


IDLE = """
world: 200
backend: gloo
program:
  - {recv: {tensor: {shape: [4]}, src: rank - 1}, ranks: 0 < rank < 10}
  - {send: {tensor: {shape: [4]}, dst: rank + 1}, ranks: rank < 9}
"""


@pytest.mark.parametrize(
    ("text", "worth", "classes"),
    [(STAGES, 8, 8), (TREE, 1, 255), (IDLE, 8, 11)],
    ids=["stages", "tree", "idle"],
)
def test_classes_that_split_quickly_or_inside_are_refined_to_the_end(
    text: str, worth: int, classes: int
) -> None:
    """Pipeline stages split from both ends, a tree splits from its root, and a short chain splits
    although many other ranks are idle.
    """
    found = coarsest_quotient(*conditions(text), worth=worth)

    assert found is not None
    assert len(found.classes) == classes


def test_every_instruction_of_a_host_runs_exactly_once() -> None:
    """What stands behind a synchronize, a wait, a sleep and a meeting takes its time, as in the
    order of time.
    """
    pause = {"op": "sleep", "time_ns": 1000}
    asked, sync = {**REDUCE, "async": True, "handle": "h"}, {"op": "synchronize"}
    steps = [
        sync,
        pause,
        asked,
        pause,
        {"op": "wait", "handles": ["h"]},
        pause,
        sync,
        pause,
        {"op": "barrier"},
        pause,
        pause,
    ]
    program = build_program(2, {0: steps, 1: steps}, backend="nccl")
    cost = CostModel(cluster_from("cpu-10gbe"), 2, 1)
    fast, ordered = (
        run_engine(program, BACKEND_PROFILES["nccl"], cost, ordered=flag) for flag in (False, True)
    )

    assert (fast.driver, ordered.driver) == ("local clocks", "event-driven")
    assert all(
        fast.trace[name].tolist() == ordered.trace[name].tolist()
        for name in ("posted_ns", "returned_ns", "finished_ns")
    )
    assert fast.makespan_ns >= 6 * 1000


def test_a_batch_behind_a_collective_waits_for_the_peers_of_the_collective() -> None:
    """nccl: both use one communicator, and the host waits for the batch."""

    def batch(peer: int) -> dict[str, Any]:
        return {
            "op": "batch_isend_irecv",
            "ops": [to(peer, "isend"), to(peer, "irecv")],
            "handle": "b",
        }

    ranks = [
        [{**REDUCE, "async": True}, batch(peer), {"op": "wait", "handles": ["b"]}]
        for peer in (1, 0)
    ]
    options = {"init": "eager", "blocking_wait": True}
    left, fast = (
        end("nccl", *ranks, [], options=options),
        ran(*ranks, [], backend="nccl", options=options).final_state,
    )

    assert needs(left, 0) == needs(fast, 0) == [(0, (2,), False)]


def test_ranks_that_all_do_the_same_fold_from_the_number_on_that_pays_off() -> None:
    scenario = loads("world: 8\nbackend: nccl\nprogram:\n  - all_reduce: {tensor: {shape: [4]}}\n")
    program = lower(scenario)
    cost, profiles = [cost_model(scenario, program, None)], [BACKEND_PROFILES["nccl"]]
    found = representative_program(program, cost, profiles, worth=8.0)

    assert found is not None
    assert len(found.present) == 1
    assert representative_program(program, cost, profiles, worth=8.5) is None


def test_places_in_a_group_are_not_global_ranks() -> None:
    """Rank 1 is the first of three and their root: it waits for rank 3, while rank 2 has its part
    and goes on.
    """
    give = {"op": "broadcast", "numel": 4, "root": 1, "group": "g"}
    program = build_program(4, {1: [give], 2: [give]}, groups={"g": [1, 2, 3]})

    assert [hang_on_local_clocks(program).stuck, settled(program).stuck] == [(1,), (1,)]


def hang_on_local_clocks(program: Program) -> FinalState:
    """The final state that local clocks give, if sends return early."""
    linked = LinkedProgram(program, CONTRACT_READINGS["early"])
    return left_by(run_local_clocks(linked, CompletionConditions(linked, None)))


def settled(program: Program) -> FinalState:
    """The final state that the transition rules give, if sends return early."""
    rules, state, _ = settle(program, "early")
    return blocked_state_at(rules, state)


# --- membership in a set of ranks ---
@pytest.mark.parametrize(
    ("ranks", "rank", "there"),
    [((0, 1, 2), 2, True), ((0, 1, 2), 3, False), ((2, 0), 2, True), ((2, 0), 1, False)],
)
def test_membership_of_a_rank_does_not_depend_on_the_order_of_the_ranks(
    ranks: tuple[int, ...], rank: int, there: bool
) -> None:
    assert is_member(ranks, rank) == there


# --- which ranks a blocked rank waits for ---
GATHERED = """name: n
backend: gloo
world: 3
options: {stays_connected: true}
cluster: {preset: cpu-10gbe, shared_links: false}
tensors: {x: {shape: [4]}, y: {shape: [4], copies: 3}}
program:
- {gather: {input: x, output: ['y@0', 'y@1', 'y@2'], dst: 0}, ranks: rank < 2}
"""
BEHIND = """name: n
backend: nccl
world: 2
options: {blocking_wait: true}
tensors: {x: {shape: [4]}}
program:
- all_reduce: {tensor: x}
- {all_reduce: {tensor: x, async: true, as: b}, ranks: 1}
- {all_reduce: {tensor: x, async: true, as: c}, ranks: 1}
- {wait: c, ranks: 1}
"""
BATCH_BEHIND = """name: n
backend: nccl
world: 2
options: {blocking_wait: true}
tensors: {x: {shape: [4]}, y: {shape: [4]}, z: {shape: [4]}}
program:
- all_reduce: {tensor: z}
- batch_isend_irecv:
    ops: [{isend: {tensor: x, dst: 1 - rank}}, {irecv: {tensor: y, src: 1 - rank}}]
- {all_reduce: {tensor: z, async: true, as: b}, ranks: 1}
- batch_isend_irecv:
    ops: [{isend: {tensor: x, dst: 0}}, {irecv: {tensor: y, src: 0}}]
    as: c
  ranks: 1
- {wait: c, ranks: 1}
"""


@pytest.mark.parametrize(
    ("text", "waits"),
    [(GATHERED, (0, 0, (2,))), (BEHIND, (1, 1, (0,))), (BATCH_BEHIND, (1, 2, (0,)))],
)
def test_blocked_ranks_wait_for_ranks_that_have_not_reached_the_call(
    text: str, waits: tuple[int, int, tuple[int, ...]]
) -> None:
    """A root lacks no member that came at once; whoever waits for a launch that has not begun lacks
    what the one before it lacks.
    """
    scenario = loads(text)
    program = lower(scenario)
    cost = cost_model(scenario, program, None)

    runs = [
        run_engine(program, BACKEND_PROFILES[program.backend], cost, ordered=ordered)
        for ordered in (False, True)
    ]

    assert [one.driver for one in runs] == ["local clocks", "event-driven"]
    for one in runs:
        assert [
            (b.rank, need.position, need.ranks) for b in one.final_state.blocked for need in b.needs
        ] == [waits]


# --- room in buffers ---
@pytest.mark.parametrize("sizes", [(4,), (2, 2), (1, 3), (3, 1)])
@pytest.mark.parametrize("early", [0, 1])
def test_a_buffer_has_exactly_its_bytes(sizes: tuple[int, ...], early: int) -> None:
    """Two ranks that send 16 bytes in all before they receive, in one message or two, into 16 bytes
    of buffer, and into one byte less.
    """
    ranks = [
        [
            *(to(peer, "isend", numel=n, handle=f"s{k}") for k, n in enumerate(sizes)),
            *(to(peer, "irecv", numel=n, handle=f"r{k}") for k, n in enumerate(sizes)),
            {"op": "wait", "handles": "all"},
        ]
        for peer in (1, 0)
    ]

    def left(nbytes: int) -> tuple[int, ...]:
        linked = LinkedProgram(
            build_program(
                2,
                dict(enumerate(ranks)),
                backend="nccl",
                options={"buffsize": nbytes, "connected": True},
            ),
            BACKEND_PROFILES["nccl"],
        )
        slow = settle(linked.program, "nccl")
        assert (
            left_by(run_local_clocks(linked, CompletionConditions(linked, None))).stuck
            == blocked_state_at(*slow[:2]).stuck
        )
        return blocked_state_at(*slow[:2]).stuck

    assert left(16 - early) == ((0, 1) if early else ())


# --- many that differ ---
@pytest.mark.parametrize(("ranks", "refused"), [(2048, False), (2049, True)])
def test_calls_with_too_many_differences_are_refused_with_an_estimate(
    ranks: int, refused: bool
) -> None:
    """Each rank reduces another size: 2049 x 2049 comparisons are more than 2^22."""
    text = f"name: t\nworld: {ranks}\nbackend: nccl\ncluster: dgx-h100\ntensors: {{x: {{shape: [rank + 1]}}}}\nprogram: [all_reduce: x]\n"
    linked = LinkedProgram(lower(loads(text)), CONTRACT_READINGS["rendezvous"])

    if refused:
        with pytest.raises(
            UsageError, match=r"4,198,401 comparisons, about 1 min, where 4,194,304 are allowed"
        ):
            ProgramMismatches(linked)
    else:
        assert ProgramMismatches(linked).instances.tolist() == [0]
