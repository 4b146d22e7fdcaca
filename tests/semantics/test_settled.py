"""Questions on which ways to run a program differed, or differed from a real run: one small
scenario each, and what is right.

`tests/data/settled/README.md` lists them.
"""

from __future__ import annotations

from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from distsim.backends import BACKEND_PROFILES
from distsim.checker.early_exit import early_exit_runs
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import build_channel_layout
from distsim.checker.reading_run import ContractProgram
from distsim.engine import run_program
from distsim.engine.backend_outcomes import backend_outcome
from distsim.program.from_calls import build_program
from distsim.program.lower import lower
from distsim.scenario import load, loads
from distsim.simulation.check_scenario import check_scenario
from distsim.simulation.expectations import unmet_expectations
from distsim.simulation.simulate_scenario import cost_model, simulate

SETTLED = sorted((Path(__file__).resolve().parents[1] / "data" / "settled").glob("*.yaml"))


def cases(*names: str) -> list[Any]:
    """Scenarios by name; all, if none is given."""
    return [pytest.param(path, id=path.stem) for path in SETTLED if not names or path.stem in names]


@pytest.mark.parametrize("path", cases())
def test_a_settled_scenario_has_its_settled_outcome(path: Path) -> None:
    assert [str(d) for d in unmet_expectations(simulate(load(str(path))))] == []


@pytest.mark.parametrize(
    "path", cases("window_in_order", "blocked_since", "blocked_since_a_launch", "needs_of_the_wait")
)
def test_both_engines_report_a_settled_scenario_equally(path: Path) -> None:
    scenario = load(str(path))
    program = lower(scenario)
    profile, cost = BACKEND_PROFILES[program.backend], cost_model(scenario, program, None)

    fast, ordered = (
        run_program(program, profile, cost),
        run_program(program, profile, cost, ordered=True),
    )

    assert (fast.driver, fast.makespan_ns, fast.final_state) == (
        "local clocks",
        ordered.makespan_ns,
        ordered.final_state,
    )
    assert fast.trace["finished_ns"].tolist() == ordered.trace["finished_ns"].tolist()


def test_a_collective_is_in_flight_at_a_returned_member_until_the_last_returns() -> None:
    """So a kernel beside the rest of it slows it down, and the run is made in the order of time."""
    scenario = load(str(next(path for path in SETTLED if path.stem == "uneven_prices")))
    program = lower(scenario)
    profile, cost = BACKEND_PROFILES[program.backend], cost_model(scenario, program, None)

    runs = [run_program(program, profile, cost, ordered=ordered) for ordered in (False, True)]

    ends = [made.trace["finished_ns"].tolist() for made in runs]
    assert ends[0] == ends[1]
    assert (
        ends[0][1] < ends[0][0] < ends[0][2]
    )  # rank 1 is done, then rank 0, then the kernel of rank 1


@pytest.mark.parametrize("path", cases("transfers_outlast_timeout", "launches_outlast_timeout"))
def test_check_detects_a_timeout_that_expires(path: Path) -> None:
    """As the simulation does."""
    scenario = load(str(path))
    program = lower(scenario)

    assert (
        backend_outcome(program, BACKEND_PROFILES[program.backend]).outcome
        == simulate(scenario).outcome
    )


def test_an_open_message_of_a_process_that_ends_arrives_or_is_lost() -> None:
    """Both were seen for real under gloo, for the same program and other delays."""
    for name in ("end_open_isend", "end_open_isend_soon", "leave_open_isend"):
        scenario = load(str(next(path for path in SETTLED if path.stem == name)))

        found = backend_outcome(lower(scenario), BACKEND_PROFILES["gloo"])
        assert found.possible == ("raises", "completes")


def check_one(text: str) -> tuple[object, ...]:
    """The verdict and, by backend, the outcomes of a scenario."""
    found = check_scenario(loads(text))
    assert found.verdict is not None
    outcomes = {name: (one.outcome, one.possible) for name, one in found.profiles.items()}
    return found.verdict.verdict, outcomes


def test_a_program_that_exits_ends_as_one_that_reaches_its_end() -> None:
    """Under every backend, with and without open requests."""
    calls = ("all_reduce: {tensor: x, async: true}", "isend: {tensor: x, dst: 1, as: h}", "barrier")
    for call in calls:
        head = "world: 2\ntensors: {x: {shape: [4]}}\nprogram:\n  - ranks: 0\n    steps:\n"
        start, rest = f"{head}      - {call}\n", "  - {recv: {tensor: x, src: 0}, ranks: 1}\n"
        reaches_end = check_one(start + rest)
        exits = check_one(f"{start}      - exit: {{code: 0}}\n{rest}")

        assert exits == reaches_end


def test_a_rank_is_blocked_from_the_moment_it_waits_for_something_missing() -> None:
    """The all_reduce is done before: the wait for the message begins when that ends."""
    found = simulate(load(str(next(path for path in SETTLED if path.stem == "blocked_since"))))
    trace = found.run.trace
    done = max(
        int(trace["finished_ns"][row])
        for row in range(len(trace))
        if trace.row(row).op == "all_reduce"
    )

    assert [b.since_ns for b in found.run.final_state.blocked] == [done]


def test_every_settled_scenario_is_in_the_table() -> None:
    text = (Path(__file__).resolve().parents[1] / "data" / "settled" / "README.md").read_text(
        encoding="utf-8"
    )

    assert [path.stem for path in SETTLED if f"`{path.stem}`" not in text] == []


def test_calls_that_differ_on_too_many_ranks_are_refused_with_an_estimate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight roots of eight members are 64 comparisons; where two sizes differ they are 16."""
    from distsim.common.errors import UsageError

    monkeypatch.setattr("distsim.semantics.form.mismatches.MOST_COMPARED", 60)
    text = "name: n\nworld: 8\nbackend: nccl\ntensors: {x: {shape: ['4 + (rank == 3)']}}\nprogram:\n  - "

    with pytest.raises(UsageError, match="64 comparisons"):
        simulate(loads(text + "broadcast: {tensor: {shape: [4]}, src: rank}\n"))
    assert simulate(loads(text + "all_reduce: {tensor: x}\n")).outcome != "completes"


def test_with_seven_requests_open_at_exit_every_set_of_partners_may_be_too_late() -> None:
    """Rank 0 leaves with five sends to rank 2 open, and one to each of ranks 1 and 3: any of these
    three may find itself alone.
    """
    to = [1, 3, 2, 2, 2, 2, 2]
    ranks = [
        [{"op": "isend", "peer": peer, "numel": 4} for peer in to] + [{"op": "exit", "code": 0}]
    ]
    ranks += [[{"op": "recv", "peer": 0, "numel": 4}] * to.count(rank) for rank in (1, 2, 3)]
    layout = build_channel_layout(build_program(4, dict(enumerate(ranks))))

    stuck = {
        run.final_state().stuck
        for run in early_exit_runs(ContractProgram(layout, CallIndex(layout)), "rendezvous")
    }

    assert stuck == {sets for count in range(4) for sets in combinations((1, 2, 3), count)}


def test_each_member_of_a_broadcast_may_or_may_not_have_its_part_before_the_root_exits() -> None:
    """Under `early` each alone; under `rendezvous` all or none; and who is still blocked waits for
    the root.
    """
    ranks = [[{"op": "broadcast", "numel": 4, "root": 0, "async": True}, {"op": "exit", "code": 0}]]
    ranks += [[{"op": "broadcast", "numel": 4, "root": 0}] for _ in range(2)]
    layout = build_channel_layout(build_program(3, dict(enumerate(ranks))))
    contract = ContractProgram(layout, CallIndex(layout))

    ends = {
        reading: [run.final_state() for run in early_exit_runs(contract, reading)]
        for reading in ("early", "rendezvous")
    }  # type: ignore[arg-type]

    assert sorted(left.stuck for left in ends["early"]) == [(), (1,), (1, 2), (2,)]
    assert sorted(left.stuck for left in ends["rendezvous"]) == [(), (1, 2)]
    assert {need.ranks for left in ends["early"] for b in left.blocked for need in b.needs} == {
        (0,)
    }


def test_differing_calls_are_compared_once_per_kind_of_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Members who say the same agree: who comes late to a collective of hundreds that differ is not
    compared with each of them.
    """
    from distsim.operations.unrooted import AllReduceOperation

    asked, said, size = list[str](), AllReduceOperation.agreement, 200
    monkeypatch.setattr(
        AllReduceOperation, "agreement", lambda call: asked.append(call.op) or said(call)
    )
    done = simulate(
        loads(f"world: {size}\nprogram: [all_reduce: {{tensor: {{shape: ['4 + (rank == 0)']}}}}]\n")
    )
    assert done.outcome == "raises"  # rank 0 returns, and its process ends
    assert len(asked) <= 10 * size
