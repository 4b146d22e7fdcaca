"""Every way to run a program, asked the same questions: who disagrees with whom.

An *executor* takes a program and gives answers by the name of the question, or None where the
program is none of its own. Two executors disagree where both answer a question and not alike. To
hold a new driver to the others, write one function more, put it into `EXECUTORS` and name its
partners in `PAIRS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from distsim.backends import BACKEND_PROFILES, CONTRACT_READINGS
from distsim.checker.early_exit import early_exit_runs
from distsim.checker.explore.all_readings import reading_result_of
from distsim.checker.explore.search import StateSearch
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout, build_channel_layout
from distsim.checker.reading_result import verdict_dependence
from distsim.checker.reading_run import ContractProgram
from distsim.checker.reading_run import ReadingRun as SingleRun
from distsim.checker.verdict import Verdict, verdict_of
from distsim.common.records import gc_paused
from distsim.engine import SimulatedRun, run_program
from distsim.engine.backend_outcomes import BackendOutcome, backend_outcome
from distsim.engine.local_run_columns import fill_columns
from distsim.engine.order_search import OrderSearchResult, search_event_orders
from distsim.findings.final_state import FinalState
from distsim.hardware.cost import CostModel
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import Scenario
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.order_dependence import exits_with_open_requests, why_order_matters
from distsim.semantics.local.blocked_ranks import blocked_state_of_run as left_by
from distsim.semantics.local.class_clocks import run_quotient
from distsim.semantics.local.quotient import coarsest_quotient
from distsim.semantics.local.rank_clocks import LocalClocks, RunProgress, local_run_inputs
from distsim.semantics.local.run import run_local_clocks
from distsim.semantics.ordered.blocked_state import blocked_state_at
from distsim.semantics.ordered.state import RowsMismatched
from distsim.semantics.ordered.transitions import TransitionRules
from distsim.simulation.simulate_scenario import cost_model, simulate_program
from tests.support.brute_force import BruteForce, Found, TooLarge
from tests.support.plain_calls import can_be_plain, plain_calls, plain_groups
from tests.support.reference import Reference

Answers = dict[str, Any]
TIMES = ("posted_ns", "returned_ns", "started_ns", "finished_ns", "waited_ns")
#: States of a search and of the brute force; what needs more is no disagreement.
MOST_STATES, MOST_BRUTE = 400, 1_500


class Case:
    """A scenario, lowered, and what several executors need of it, worked out once."""

    def __init__(self, said: dict[str, Any] | Scenario) -> None:
        self.scenario = said if isinstance(said, Scenario) else Scenario(**said)
        self.program: Program = lower(self.scenario)
        self.cost: CostModel = cost_model(self.scenario, self.program, None)
        self.profile = BACKEND_PROFILES[self.program.backend]

    @cached_property
    def layout(self) -> ChannelLayout:
        return build_channel_layout(self.program)

    @cached_property
    def linked(self) -> LinkedProgram:
        return LinkedProgram(self.program, self.profile)

    @cached_property
    def absent(self) -> frozenset[int]:
        return frozenset(fault.rank for fault in self.program.faults if fault.kind == "absent")

    @cached_property
    def leaves(self) -> bool:
        """A rank leaves with requests open: the order of events decides what becomes of them, so
        that one run tells little.
        """
        return exits_with_open_requests(self.layout.linked)

    @cached_property
    def starts(self) -> bool:
        """False where a rank never comes to the init_process_group that everybody implies."""
        return not self.absent or "init_process_group" in self.layout.sequence_names

    @cached_property
    def run(self) -> SimulatedRun:
        return run_program(self.program, self.profile, self.cost)

    @cached_property
    def ordered(self) -> SimulatedRun:
        return (
            self.run
            if self.run.driver == "event-driven"
            else run_program(self.program, self.profile, self.cost, ordered=True)
        )

    @cached_property
    def outcome(self) -> BackendOutcome:
        return backend_outcome(self.program, self.profile, self.cost, max_states=MOST_STATES)

    @cached_property
    def verdict(self) -> Verdict:
        return verdict_of(self.program, MOST_STATES)

    @cached_property
    def brute(self) -> dict[str, Found] | None:
        if not can_be_plain(self.program, any_source=True) or self.program.call_count > 14:
            return None
        calls, groups = plain_calls(self.program), plain_groups(self.program)
        ends = not self.program.options.get("stays_connected")
        try:
            return {
                r: BruteForce(calls, groups, r, MOST_BRUTE, ends).explore()
                for r in (*CONTRACT_READINGS, "mixed")
            }
        except TooLarge:
            return None


# --- under the back end of the file ---
def _of_run(result: SimulatedRun) -> Answers:
    left = result.final_state
    return {
        "outcome": result.outcome,
        "makespan": result.makespan_ns,
        "ends": left.ends,
        "blocked": [(b.rank, b.position, b.since_ns) for b in left.blocked],
        "needs": [sorted(b.needs) for b in left.blocked],
        "unreceived": left.unreceived,
        "match": result.trace["match"].tolist(),
        "late": result.findings,
        **{name: result.trace[name].tolist() for name in TIMES},
    }


def fast(case: Case) -> Answers | None:
    return _of_run(case.run) if case.run.driver == "local clocks" else None


def ordered(case: Case) -> Answers | None:
    return _of_run(case.ordered)


def surely(case: Case) -> Answers | None:
    """The one form without prices: in no time."""
    linked = case.linked
    if (
        why_order_matters(linked) is not None
        or case.outcome.outcome == "undefined"
        or case.run.findings
        or case.run.mismatches
    ):
        return None
    return (
        {"outcome": "completes"}
        if all(
            host.ended
            for host in run_local_clocks(linked, CompletionConditions(linked, None)).hosts
        )
        else None
    )


def one_by_one(case: Case) -> Answers | None:
    """The fast driver without classes."""
    if case.run.driver != "local clocks":
        return None
    return _of_progress(
        LocalClocks(
            local_run_inputs(case.linked, CompletionConditions(case.linked, case.cost))
        ).run()
    )


def in_classes(case: Case) -> Answers | None:
    """The fast driver with classes, however small they are."""
    if case.run.driver != "local clocks":
        return None
    conditions = CompletionConditions(case.linked, case.cost)
    folded = coarsest_quotient(case.linked, conditions, worth=1, rounds=100)
    return None if folded is None else _of_progress(run_quotient(case.linked, conditions, folded))


def _of_progress(left: RunProgress) -> Answers:
    columns, ended = fill_columns(left), left_by(left)
    return {
        "ends": ended.ends,
        "blocked": [(b.rank, b.position, b.since_ns) for b in ended.blocked],
        "needs": [sorted(b.needs) for b in ended.blocked],
        "all finished": columns.finished.tolist(),
    }


def simulated(case: Case) -> Answers | None:
    found = simulate_program(case.scenario, case.program, case.cost, with_values=False)
    swapped = (
        found.outcome == "wrong-data" and found.run.outcome == "completes"
    )  # a finding about names, not a rule
    said = (
        _of_verdict(found.verdict)
        if found.verdict is not None and found.verdict.complete and case.verdict.complete
        else {}
    )
    return {"reported": "completes" if swapped else found.outcome, **said}


def checked(case: Case) -> Answers | None:
    """What `check` says: the outcome, and that it is among those that are possible."""
    said = case.outcome
    return {"reported": said.outcome, "possible": True, **_of_verdict(case.verdict)}


def in_time(case: Case) -> Answers | None:
    """The run in the order of time is one of those that the search over orders found."""
    said = case.outcome
    one = case.ordered.outcome
    return {
        "possible": one in said.possible
        or not said.complete
        or (one == "completes" and "undefined" in said.possible)
    }


def _of_verdict(verdict: Verdict) -> Answers:
    names = ("verdict", "depends_on", "ranks", "core", "readings", "stuck_sets", "nondeterministic")
    return {name: getattr(verdict, name) for name in names}


# --- under the readings of the contract ---
def _of_reading(reading: str, left: FinalState, unfit: bool) -> Answers:
    said: Answers = {f"{reading} unfit": unfit}
    if not unfit:  # after that a reading may go on as it likes
        said |= {
            f"{reading} stuck": left.stuck,
            f"{reading} unreceived": tuple(sorted(left.unreceived)),
            f"{reading} ends": [(end.status, end.position) for end in left.ends],
            f"{reading} needs": {
                b.rank: sorted({r for need in b.needs for r in need.ranks}) for b in left.blocked
            },
        }
    return said


def passes(case: Case) -> Answers | None:
    """The single passes of the verdict."""
    if case.layout.any_source:
        return None
    said: Answers = {}
    contract = ContractProgram(case.layout, CallIndex(case.layout))
    for reading in CONTRACT_READINGS:
        runs = _runs(case, contract, reading)
        ends, unfit = (
            [done.final_state() for done in runs],
            [bool(done.mismatches()) for done in runs],
        )
        said |= _of_reading(reading, ends[0], unfit[0]) if not case.leaves else {}
        said |= {f"{reading} unfit somewhere": any(unfit), f"{reading} among": True}
        said |= (
            {f"{reading} stuck sets": sorted({left.stuck for left in ends})}
            if not any(unfit)
            else {}
        )
    return said


def _runs(case: Case, contract: ContractProgram, reading: str) -> list[SingleRun]:
    return list(early_exit_runs(contract, reading)) if case.leaves else [contract.run(reading)]  # type: ignore[arg-type]


def rules(case: Case) -> Answers | None:
    """The explicit rules, run to a standstill."""
    if case.layout.any_source:
        return None
    said: Answers = {}
    contract = ContractProgram(case.layout, CallIndex(case.layout))
    for reading, profile in CONTRACT_READINGS.items():
        made = TransitionRules(case.program, profile)
        state = made.initial()
        events = made.settle(state)
        left, unfit = (
            blocked_state_at(made, state),
            any(isinstance(e, RowsMismatched) for e in events),
        )
        if case.leaves:  # one order of many: it ends as one of the runs
            among = _runs(case, contract, reading)
            ways = {(run.final_state().stuck, bool(run.mismatches())) for run in among}
            said |= {f"{reading} among": any(way[1] for way in ways) or (left.stuck, unfit) in ways}
        else:
            said |= _of_reading(reading, left, unfit)
    return said


def naive(case: Case) -> Answers | None:
    """The naive simulator, which knows no calls that don't fit: they meet and go on."""
    if case.absent or not can_be_plain(case.program, any_source=False):
        return None
    calls, groups = plain_calls(case.program), plain_groups(case.program)
    return {
        f"{r} stuck": Reference(case.program.world_size, calls, groups, r).stuck()
        for r in CONTRACT_READINGS
    }


def searched(case: Case) -> Answers | None:
    """The explorer of the verdict, over every order of events."""
    if not case.starts or not case.layout.any_source:
        return None
    said: Answers = {}
    for reading in CONTRACT_READINGS:
        search = StateSearch(case.layout, reading, absent=case.absent)
        search.run(MOST_STATES)
        if search.finished:
            found = reading_result_of(search)
            said |= {f"{reading} unfit somewhere": bool(found.mismatches)}
            said |= (
                {f"{reading} stuck sets": _sets(found.blocked_sets, found.has_completing_run)}
                if not found.mismatches
                else {}
            )
    return said


def all_rules(case: Case) -> Answers | None:
    """The explicit rules, over every order of events."""
    said: Answers = {}
    for reading, profile in CONTRACT_READINGS.items():
        ends: OrderSearchResult = search_event_orders(
            LinkedProgram(case.program, profile), MOST_STATES
        )
        if ends.complete:
            unfit = any(end.notes for end in ends.ends)
            sets = {end.final_state.stuck for end in ends.ends}
            said |= {f"{reading} unfit somewhere": unfit}
            said |= (
                {f"{reading} stuck sets": _sets({s: 0 for s in sets if s}, () in sets)}
                if not unfit
                else {}
            )
    return said


def _sets(stuck: Any, passed: bool) -> list[tuple[int, ...]]:
    return sorted({*stuck, *([()] if passed else [])})


def brute(case: Case) -> Answers | None:
    """Every interleaving of a small program."""
    if case.brute is None or case.absent:
        return None
    said: Answers = {}
    for reading in CONTRACT_READINGS:
        found = case.brute[reading]
        unfit = bool(found.unfit)
        said |= {f"{reading} unfit somewhere": unfit}
        said |= {f"{reading} stuck sets": _sets(found.stuck, found.passed)} if not unfit else {}
    hows = {
        kind: {r: found.how(kind) for r, found in case.brute.items()}
        for kind in ("mismatch", "deadlock")
    }
    kind = next((k for k, how in hows.items() if set(how.values()) != {"never"}), None)
    if kind is not None and case.verdict.complete:
        said |= {
            "verdict": kind,
            "readings": hows[kind],
            "depends_on": verdict_dependence(hows[kind]),
        }
    return said


Executor = Callable[[Case], "Answers | None"]
EXECUTORS: dict[str, Executor] = {
    f.__name__: f
    for f in (
        fast,
        ordered,
        surely,
        one_by_one,
        in_classes,
        simulated,
        checked,
        in_time,
        passes,
        rules,
        naive,
        searched,
        all_rules,
        brute,
    )
}
#: Who is held to whom; the second is the one to be believed.
PAIRS = (
    ("fast", "ordered"),
    ("surely", "ordered"),
    ("one_by_one", "fast"),
    ("in_classes", "one_by_one"),
    ("checked", "simulated"),
    ("checked", "in_time"),
    ("passes", "rules"),
    ("passes", "naive"),
    ("passes", "all_rules"),
    ("passes", "brute"),
    ("rules", "naive"),
    ("searched", "all_rules"),
    ("searched", "brute"),
    ("all_rules", "brute"),
    ("checked", "brute"),
)


class Difference(NamedTuple):
    """Two executors and the question on which they differ, with their answers; or one that fails
    (its own partner).
    """

    pair: tuple[str, str]
    question: str
    answers: tuple[Any, Any]

    @property
    def kind(self) -> str:
        return f"{self.pair[0]}/{self.pair[1]}: {self.question}"

    def __str__(self) -> str:
        return f"{self.kind}: {self.answers[0]} != {self.answers[1]}"


def differences(
    mapping: dict[str, Any], pairs: tuple[tuple[str, str], ...] = PAIRS
) -> list[Difference]:
    """Every disagreement on one scenario, and every executor that fails."""
    case, said = Case(mapping), dict[str, Answers]()
    found: list[Difference] = []
    with gc_paused():
        for name in dict.fromkeys(name for pair in pairs for name in pair):
            try:
                said[name] = EXECUTORS[name](case) or {}
            except Exception as error:
                said[name] = {}
                found.append(Difference((name, name), "fails", (repr(error), "an answer")))
    return found + [d for one, other in pairs for d in _between(one, other, said[one], said[other])]


def _between(one: str, other: str, mine: Answers, theirs: Answers) -> Iterator[Difference]:
    for question in mine:
        if question in theirs and mine[question] != theirs[question]:
            yield Difference((one, other), question, (mine[question], theirs[question]))


# --- what is settled and not yet so ---
#: By the scenario of tests/data/settled that shows it: the differences that are expected until it
#: comes out as settled.
EXPECTED: dict[str, Callable[[Case, Difference], bool]] = {
    # The search over senders knows one of the ways in which open requests of a leaver meet or do
    # not.
    "leave_open_isend": lambda case, d: d.pair[0] == "searched" and case.leaves,
}


def surprises(mapping: dict[str, Any]) -> list[str]:
    """The disagreements on a scenario that nothing settled explains, in words."""
    found = differences(mapping)
    case = Case(mapping) if found else None
    return [
        str(d)
        for d in found
        if case is not None and not any(holds(case, d) for holds in EXPECTED.values())
    ]
