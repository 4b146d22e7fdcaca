"""The verdict on a program: the worst outcome of its executions under the contract.

The contract is what every backend guarantees; the verdict covers all its readings
(`reading_result`) and all event orders. `run_readings` determines how the executions end. This
module adds what detectors find in the calls that were reached, chooses the verdict class, and
collects the findings. Detectors and diagnosis are imported on demand, because most programs are
correct and need none of them.
"""

from __future__ import annotations

from dataclasses import field
from typing import TYPE_CHECKING, Literal, NamedTuple

from distsim.checker.checked_program import CheckedProgram, made_all_calls
from distsim.checker.reading_result import (
    MAX_STATES,
    ContractResult,
    FailureKind,
    Frequency,
    ReadingResult,
    first_reading_with,
    frequency_by_reading,
    union_of_ranks,
    verdict_dependence,
)
from distsim.checker.replay_schedule import READING_ORDER, ReplaySchedule
from distsim.checker.run_readings import run_all_readings
from distsim.common.records import dataclass
from distsim.findings.codes import CODES
from distsim.findings.final_state import FinalState, WaitDependency
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

if TYPE_CHECKING:
    from distsim.checker.detectors.buffer_races import DataRace
    from distsim.checker.detectors.one_sided_races import OneSidedRace
    from distsim.checker.detectors.request_leaks import RequestLeak

VerdictClass = Literal["invalid", "mismatch", "deadlock", "race", "leak", "ok"]

#: An any-source receive: rank, position, part.
_ReceiveId = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may happen to a program on some backend, in the terms of `cases/FORMAT.md`.

    ``ranks``: the callers (invalid), the members or sender and receiver (mismatch), the blocked
    ranks (deadlock), the rank that races (race), the owners (leak). ``core``: at a deadlock, the
    ranks on a wait-for cycle and those that wait directly for a rank that has exited; of several
    executions that end with the same ranks blocked, one is the example for all. ``ranks`` and
    ``core`` are unions over the executions of the first reading that has the verdict;
    ``stuck_sets`` are its sets of blocked ranks.

    ``readings``: how often each reading has the deadlock or mismatch that is the verdict.
    ``culprits``: the minority of a mismatched collective. ``nondeterministic``: ranks with an
    any-source receive that may take messages of several senders (a remark).

    ``explored``: the number of stored states, 0 for single runs. ``complete`` is False if the
    search hit its bound. ``final_state`` is that of one execution of the first reading that has the
    verdict, ``schedule`` the choices that lead there.
    """

    verdict: VerdictClass
    complete: bool = True
    explored: int = 0
    depends_on: Literal["buffering", "schedule"] | None = None
    ranks: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    readings: dict[str, Frequency] = field(default_factory=dict)
    stuck_sets: tuple[tuple[int, ...], ...] = ()
    culprits: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()
    final_state: FinalState | None = None
    nondeterministic: tuple[int, ...] = ()
    schedule: ReplaySchedule | None = None


def verdict_of(
    program: Program,
    max_states: int = MAX_STATES,
    *,
    subject: CheckedProgram | None = None,
    ended: FinalState | None = None,
) -> Verdict:
    """Judge a program under every reading and every order of events.

    Without any-source receives, one untimed run per reading is exact, because the program fixes
    which calls meet. Otherwise every order is explored, until ``max_states`` states are stored.

    ``ended``: the final state of a run that completed under rules at least as strict as
    ``rendezvous``, without a mismatch; it replaces the run under that reading. ``subject``: the
    program with its lookups, if the caller has them.
    """
    subject = subject or CheckedProgram(program)
    outcome = run_all_readings(subject, max_states, ended)
    return _VerdictBuilder(subject, outcome, max_states).verdict()


class _AffectedRanks(NamedTuple):
    """The fields of a `Verdict` that list ranks."""

    ranks: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    stuck_sets: tuple[tuple[int, ...], ...] = ()
    culprits: tuple[int, ...] = ()


class _VerdictBuilder:
    """Builds the verdict on one program from the results of its readings."""

    def __init__(self, subject: CheckedProgram, outcome: ContractResult, max_states: int) -> None:
        self.subject, self.program = subject, subject.program
        self.outcome, self.max_states = outcome, max_states
        self.results = outcome.results
        self.invalid_findings = tuple(
            finding
            for finding in self.program.findings
            if finding.code in CODES and CODES[finding.code].verdict == "invalid"
        )
        example = self.results["rendezvous"].example("end")
        self.first_end = example.final_state
        reached = [end.position for end in self.first_end.ends]
        self.buffer_races = self._find_buffer_races(reached)
        self.one_sided_races = self._find_one_sided_races(reached)
        self.leaks: tuple[RequestLeak, ...] = ()
        self.unreceived: tuple[tuple[int, int, int], ...] = ()
        # What is left over at a hang, or before a search saw an end, is not a leak.
        may_hang = any(result.blocked_sets for result in self.results.values())
        if example.ended and not self.first_end.blocked and not may_hang:
            self.leaks = self._find_leaks()
            self.unreceived = self.first_end.unreceived
        self.kind = self._verdict_class()
        self.takers = self._receives_with_choice()

    # --- detectors ---
    def _find_buffer_races(self, reached: list[int]) -> tuple[DataRace, ...]:
        """Uses of a buffer that a request still owns, among the calls that were reached."""
        if not self.subject.concerns("buffer_races"):
            return ()
        from distsim.checker.detectors.buffer_races import find_data_races

        return find_data_races(self.program, reached)

    def _find_one_sided_races(self, reached: list[int]) -> tuple[OneSidedRace, ...]:
        """Unordered accesses to another rank's memory, among the calls that were reached."""
        if not self.subject.concerns("one_sided_races"):
            return ()
        from distsim.checker.detectors.one_sided_races import find_one_sided_races

        return find_one_sided_races(self.program, self.subject.layout, reached)

    def _find_leaks(self) -> tuple[RequestLeak, ...]:
        if not self.subject.concerns("request_leaks"):
            return ()
        from distsim.checker.detectors.request_leaks import request_leaks

        return request_leaks(self.program, self.first_end)

    def _receives_with_choice(self) -> list[_ReceiveId]:
        """Any-source receives that may take messages of several senders."""
        takers: dict[_ReceiveId, set[int]] = {}
        for result in self.results.values():
            for receive, senders in result.takers.items():
                takers.setdefault(receive, set()).update(senders)
        return sorted(receive for receive, senders in takers.items() if len(senders) > 1)

    # --- the verdict ---
    def _verdict_class(self) -> VerdictClass:
        """The worst class for which there is evidence."""
        # An invalid call ends its rank on most backends, and a mismatch leaves data or order
        # undefined, so what is found behind them may only be a consequence.
        if self.invalid_findings:
            return "invalid"
        if self._first_with("mismatch") is not None:
            return "mismatch"
        if self._first_with("deadlock") is not None:
            return "deadlock"
        if self.buffer_races or self.one_sided_races or self._first_with("race") is not None:
            return "race"
        return "leak" if self.leaks or self.unreceived else "ok"

    def _first_with(self, kind: FailureKind) -> ReadingResult | None:
        return first_reading_with(self.results, kind)

    @property
    def _failure_kind(self) -> FailureKind | None:
        """The verdict, if the executions of a reading may show it; detectors find all others."""
        kind = self.kind
        # Written out, because only so the type checker sees which kinds remain.
        return kind if kind == "mismatch" or kind == "deadlock" or kind == "race" else None

    def verdict(self) -> Verdict:
        kind, affected = self.kind, self._affected_ranks()
        failure = self._failure_kind
        shown = None if failure is None else self._first_with(failure)
        example = (shown or self.results["rendezvous"]).example(kind)
        readings: dict[str, Frequency] = dict.fromkeys(READING_ORDER, "never")
        if kind == "mismatch" or kind == "deadlock":
            readings = frequency_by_reading(self.results, kind)
        return Verdict(
            verdict=kind,
            complete=self.outcome.complete,
            explored=self.outcome.explored,
            depends_on=self._depends_on(),
            ranks=affected.ranks,
            core=affected.core,
            readings=readings,
            stuck_sets=affected.stuck_sets,
            culprits=affected.culprits,
            findings=self._findings(),
            final_state=example.final_state,
            nondeterministic=tuple(sorted({rank for rank, _, _ in self.takers})),
            schedule=example.schedule if shown is not None else None,
        )

    def _depends_on(self) -> Literal["buffering", "schedule"] | None:
        failure = self._failure_kind
        if failure is None:
            return None
        if failure == "race" and (self.buffer_races or self.one_sided_races):
            return None  # These races are in the calls of the program, whatever happens first.
        return verdict_dependence(frequency_by_reading(self.results, failure))

    def _affected_ranks(self) -> _AffectedRanks:
        if self.kind == "invalid":
            return _AffectedRanks(union_of_ranks(each.ranks for each in self.invalid_findings))
        if self.kind == "race":
            return _AffectedRanks(self._racing_ranks())
        if self.kind == "leak":
            owners = [leak.ranks for leak in self.leaks]
            senders = tuple(rank for rank, _, _ in self.unreceived)
            return _AffectedRanks(union_of_ranks([*owners, senders]))
        if self.kind == "ok":
            return _AffectedRanks()
        shown = self._first_with(self.kind)
        assert shown is not None
        if self.kind == "mismatch":
            minority = union_of_ranks(mismatch.minority for mismatch in shown.mismatches)
            return _AffectedRanks(shown.mismatch_ranks, culprits=minority)
        blocked_sets = tuple(sorted(shown.blocked_sets))
        return _AffectedRanks(union_of_ranks(blocked_sets), shown.core, blocked_sets)

    def _racing_ranks(self) -> tuple[int, ...]:
        buffer_races = [race.ranks for race in self.buffer_races]
        one_sided_races = [race.ranks for race in self.one_sided_races]
        shown = self._first_with("race")
        receivers: tuple[int, ...] = ()
        if shown is not None:
            receivers = tuple(rank for rank, _, _ in shown.broken_reliances)
        return union_of_ranks([*buffer_races, *one_sided_races, receivers])

    # --- findings ---
    def _findings(self) -> tuple[Finding, ...]:
        found = (
            *self.program.findings,
            *self._failure_findings(),
            *self._event_order_findings(),
            *self._race_findings(),
            *self._end_findings(),
        )
        if self.outcome.complete:
            return found
        from distsim.checker.diagnosis.nondeterminism import search_bound_finding

        return (*found, search_bound_finding(self.outcome.explored, self.max_states))

    def _failure_findings(self) -> tuple[Finding, ...]:
        """Mismatched calls, blocked ranks, and whether buffering would hide a deadlock."""
        mismatch, deadlock = self._first_with("mismatch"), self._first_with("deadlock")
        if mismatch is None and deadlock is None:
            return ()
        from distsim.checker.diagnosis.match_findings import failure_findings
        from distsim.checker.diagnosis.nondeterminism import buffering_findings

        mismatches = mismatch.mismatches if mismatch else ()
        if deadlock is None:
            return failure_findings(self.program, self.subject.call_index, mismatches, None, None)
        example = deadlock.example("deadlock")
        sender_of = example.schedule.sender_of if example.schedule else None
        found = failure_findings(
            self.program, self.subject.call_index, mismatches, example.final_state, sender_of
        )
        if self.kind != "deadlock":
            return found
        buffering = buffering_findings(
            frequency_by_reading(self.results, "deadlock"),
            union_of_ranks(deadlock.blocked_sets),
            sends=_buffering_may_help(self.program, example.final_state),
        )
        return (*found, *buffering)

    def _event_order_findings(self) -> tuple[Finding, ...]:
        """A verdict that occurs only in some orders (DS609), and broken reliances (DS401)."""
        failure, racing = self._failure_kind, self._first_with("race")
        shown: ReadingResult | None = None
        if failure is not None:
            frequencies = frequency_by_reading(self.results, failure)
            if "sometimes" in frequencies.values():
                shown = self._first_with(failure)
        if shown is None and racing is None:
            return ()
        from distsim.checker.diagnosis.nondeterminism import (
            event_order_findings,
            sender_reliance_findings,
        )

        found: list[Finding] = []
        if shown is not None:
            schedule = shown.example(self.kind).schedule
            found += event_order_findings(self.program, schedule, self.kind)
        if racing is not None:
            found += sender_reliance_findings(self.program, racing)
        return tuple(found)

    def _race_findings(self) -> tuple[Finding, ...]:
        """Accesses that nothing orders."""
        found: list[Finding] = []
        if self.buffer_races:
            from distsim.checker.detectors.buffer_races import data_race_findings

            found += data_race_findings(self.program, self.buffer_races)
        if self.one_sided_races:
            from distsim.checker.detectors.one_sided_races import one_sided_race_findings

            found += one_sided_race_findings(self.program, self.one_sided_races)
        if self.subject.concerns("signal_conflicts"):
            from distsim.checker.detectors.signal_conflicts import signal_findings

            found += signal_findings(self.program, self.subject.layout)
        return tuple(found)

    def _end_findings(self) -> tuple[Finding, ...]:
        """What is left over at the end of the first execution, and how its ranks ended."""
        is_clean = not (self.leaks or self.unreceived or self.takers)
        if is_clean and made_all_calls(self.program, self.first_end):
            return ()
        from distsim.checker.diagnosis.end_of_run_findings import (
            leak_findings,
            open_receive_findings,
            rank_end_findings,
            unreceived_findings,
        )

        found = list(leak_findings(self.program, self.leaks))
        if self.unreceived:
            found += unreceived_findings(self.program, self.first_end)
        found += rank_end_findings(self.program, self.first_end)
        found += open_receive_findings(self.program, self.takers)
        return tuple(found)


def _buffering_may_help(program: Program, final_state: FinalState) -> bool:
    """Whether some blocked rank waits for a message of its own to be taken, or all wait for
    messages: then the sender's process has ended before the message was sent.
    """
    directions: list[str | None] = []
    for blocked in final_state.blocked:
        for need in blocked.needs:
            directions += _directions_waited_for(program, blocked.rank, need)
    return "send" in directions or None not in directions


def _directions_waited_for(program: Program, rank: int, need: WaitDependency) -> list[str | None]:
    """``send`` or ``recv`` of the calls that a rank waits for; None for other calls."""
    if need.position >= len(program.code(rank).calls):
        return [None]
    call = program.call(rank, need.position)
    parts = call.parts if need.part < 0 else call.parts[need.part : need.part + 1]
    return [OPERATIONS[part.op].direction for part in parts or (call,)]


#: The public name of `verdict_of` in the package.
verdict = verdict_of
