"""The verdict on a program under the contract: the worst of what its readings end in. Before that,
which detectors it concerns.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from distsim.checker.reading_result import (
    MAX_STATES,
    READING_ORDER,
    ContractResult,
    ExampleExecution,
    FailureKind,
    Frequency,
    ReadingResult,
    first_reading_with,
    frequency_by_reading,
    verdict_dependence,
)
from distsim.checker.replay_schedule import ReplaySchedule
from distsim.common.records import dataclass
from distsim.findings.codes import CODES
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.program.features import Feature
from distsim.program.model import Program

if TYPE_CHECKING:
    from distsim.checker.detectors.buffer_races import DataRace
    from distsim.checker.detectors.one_sided_races import OneSidedRace
    from distsim.checker.detectors.request_leaks import RequestLeak
    from distsim.checker.matching.call_index import CallIndex
    from distsim.checker.matching.call_mismatch import CallMismatch
    from distsim.checker.matching.channel_layout import ChannelLayout
    from distsim.checker.reading_run import ContractProgram, Reading


# --- what detectors are asked about ---


#: Detector -> what concerns it: in a program that uses none of these it has nothing to find. Each
#: is the module of this folder.
DETECTOR_FEATURES: Final[dict[str, frozenset[Feature]]] = {
    "request_leaks": frozenset({"requests"}),
    "buffer_races": frozenset({"requests", "streams"}),
    "one_sided_races": frozenset({"remote"}),
    "signal_conflicts": frozenset({"signals"}),
    "swapped_collectives": frozenset({"branches"}),
    "swapped_messages": frozenset({"messages"}),
    "lint": frozenset({"requests", "branches", "timeouts"}),
}


class CheckedProgram:
    """What detectors are asked about."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._concerned = frozenset(
            name
            for name, uses in DETECTOR_FEATURES.items()
            if not uses.isdisjoint(program.features)
        )

    def concerns(self, detector: str) -> bool:
        """Whether a detector may find something."""
        return detector in self._concerned

    @cached_property
    def layout(self) -> ChannelLayout:
        """Where the program's calls meet."""
        from distsim.checker.matching.channel_layout import build_channel_layout

        return build_channel_layout(self.program)

    @cached_property
    def where(self) -> CallIndex:
        """The same, call by call."""
        from distsim.checker.matching.call_index import CallIndex

        return CallIndex(self.layout)


def made_all_calls(program: Program, left: FinalState) -> bool:
    """Every rank came to the end of its code."""
    return all(
        end.status == "ended" and end.position >= len(program.code(end.rank).calls)
        for end in left.ends
    )


# --- the verdict ---


VerdictClass = Literal["invalid", "mismatch", "deadlock", "race", "leak", "ok"]
_PLAIN_READINGS: tuple[Reading, ...] = ("rendezvous", "early", "buffered")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may become of a program, whatever the back end. The words are those of
    `cases/FORMAT.md`.

    ``ranks``: the callers (invalid), the members or sender and receiver (mismatch), who is still
    blocked (deadlock), the rank that races, the owners (leak). ``core``: at a deadlock the ranks on
    a circle and those that wait directly for one who has left; where several executions end with
    the same ranks blocked, one of them stands for all. Both are united over the executions of the
    first reading that has the verdict, whose sets of blocked ranks are ``stuck_sets``.
    ``readings``: in which reading of what blocks a deadlock or mismatch shows up, if that is the
    verdict. ``culprits``: the minority of a mismatched collective. ``nondeterministic``: ranks with
    an open receive that may take more than one sender's message (a remark). ``explored``: states
    stored, 0 for single passes. ``standstill`` is that of one execution of the first reading that
    has the verdict, ``schedule`` the choices that lead there. ``complete`` is False where the
    search hit its bound.
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
    """Judge a program under every reading of what blocks, and every order of events.

    Without a receive from any source one untimed pass per reading is exact: the matching is fixed,
    so the order of events cannot matter. Else every order is explored, until at most ``max_states``
    states are stored. ``ended``: how a run ended that completed under rules at least as strict as
    the rendezvous reading, with nothing that differed where calls met; it stands for that pass.
    ``subject``: the program, if it has been asked about.
    """
    subject = subject or CheckedProgram(program)
    return _VerdictBuilder(
        subject, _contract_result(subject, max_states, ended), max_states
    ).verdict()


def _contract_result(
    subject: CheckedProgram, max_states: int, ended: FinalState | None
) -> ContractResult:
    """What its executions end in: what is known, that of every order, or that of a pass for each
    reading.
    """
    program = subject.program
    starts = not (program.faults and _start_up_blocks(program))
    if "any source" in program.features and starts and subject.layout.any_source:
        from distsim.checker.explore.all_readings import (
            explore_all_readings,
        )  # most programs need no search

        return explore_all_readings(subject.layout, max_states)
    if ended is not None and starts:
        return ContractResult(
            {
                "rendezvous": ReadingResult(
                    {}, True, (), True, {"end": ExampleExecution(ended)}, mismatch_ranks=()
                )
            },
            0,
            True,
        )
    from distsim.checker.reading_run import ContractProgram

    return ContractResult(_single_passes(ContractProgram(subject.layout, subject.where)), 0, True)


def _start_up_blocks(program: Program) -> bool:
    """Somebody is absent, and no rank gets past the world's first meeting."""
    written = any(call.op == "init_process_group" for code in program.codes for call in code.calls)
    return not written and any(fault.kind == "absent" for fault in program.faults)


def _single_passes(contract: ContractProgram) -> dict[str, ReadingResult]:
    """The second and third reading only if the first stands still: they get at least as far."""
    endings = {"rendezvous": _single_pass(contract, "rendezvous")}
    if endings["rendezvous"].stuck:
        for before, reading in pairwise(_PLAIN_READINGS):
            alike = contract.has_same_result(before, reading, endings[before])
            endings[reading] = endings[before] if alike else _single_pass(contract, reading)
    return endings


def _single_pass(contract: ContractProgram, reading: Reading) -> ReadingResult:
    """One run, or, where ranks leave with requests open, one for each way in which these meet or do
    not.
    """
    from distsim.checker.early_exit import early_exit_runs
    from distsim.checker.reading_run import early_exit_ranks

    runs = (
        early_exit_runs(contract, reading)
        if early_exit_ranks(contract.linked)
        else [contract.run(reading)]
    )
    stuck: dict[tuple[int, ...], tuple[int, ...]] = {}
    mismatches: dict[object, CallMismatch] = {}
    examples: dict[str, ExampleExecution] = {}
    passed = fit = False
    for done in runs:
        found, met = done.final_state(), done.mismatches()
        examples.setdefault("end", ExampleExecution(found))
        if met:
            mismatches = {u.calls: u for u in met} | mismatches
            examples.setdefault("mismatch", ExampleExecution(found))
        if found.blocked:
            from distsim.checker.diagnosis.wait_for_graph import build_wait_for_graph

            stuck.setdefault(found.stuck, build_wait_for_graph(found).core)
            examples.setdefault("deadlock", ExampleExecution(found))
        passed, fit = passed or not found.blocked, fit or not met
    ranks = _union_of_ranks(u.ranks for u in mismatches.values())
    return ReadingResult(
        stuck, passed, tuple(mismatches.values()), fit, examples, mismatch_ranks=ranks
    )


class _AffectedRanks(NamedTuple):
    ranks: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    stuck_sets: tuple[tuple[int, ...], ...] = ()
    culprits: tuple[int, ...] = ()


class _VerdictBuilder:
    """One program with the endings of its readings."""

    def __init__(self, subject: CheckedProgram, orders: ContractResult, bound: int) -> None:
        self.subject, self.program, self.orders, self.bound = (
            subject,
            subject.program,
            orders,
            bound,
        )
        self.endings, program = orders.endings, subject.program
        self.invalid = tuple(
            f for f in program.findings if f.code in CODES and CODES[f.code].verdict == "invalid"
        )
        example = self.endings["rendezvous"].example("end")
        first = example.final_state
        # an execution that was not followed beyond calls that differ leaves all at them
        blocked = (
            not example.ended
            or bool(first.blocked)
            or any(ending.stuck for ending in self.endings.values())
        )
        self.buffer_races, self.remote = self._races([end.position for end in first.ends])
        self.leaks = () if blocked else self._leaks(first)
        self.unreceived = () if blocked else first.unreceived
        self.kind = self._kind()

    def _races(self, reached: list[int]) -> tuple[tuple[DataRace, ...], tuple[OneSidedRace, ...]]:
        """Of calls that were reached: uses of a buffer that a request has, and of another rank's
        memory.
        """
        buffer_races: tuple[DataRace, ...] = ()
        remote: tuple[OneSidedRace, ...] = ()
        if self.subject.concerns("buffer_races"):
            from distsim.checker.detectors.buffer_races import find_data_races

            buffer_races = find_data_races(self.program, reached)
        if self.subject.concerns("one_sided_races"):
            from distsim.checker.detectors.one_sided_races import find_one_sided_races

            remote = find_one_sided_races(self.program, self.subject.layout, reached)
        return buffer_races, remote

    def _leaks(self, first: FinalState) -> tuple[RequestLeak, ...]:
        if not self.subject.concerns("request_leaks"):
            return ()
        from distsim.checker.detectors.request_leaks import request_leaks

        return request_leaks(self.program, first)

    def _kind(self) -> VerdictClass:
        if self.invalid:
            return "invalid"
        kinds: tuple[FailureKind, ...] = ("mismatch", "deadlock")
        for kind in kinds:
            if first_reading_with(self.endings, kind) is not None:
                return kind
        if self.buffer_races or self.remote or first_reading_with(self.endings, "race") is not None:
            return "race"
        return "leak" if self.leaks or self.unreceived else "ok"

    def verdict(self) -> Verdict:
        kind, who = self.kind, self._who()
        shown = (
            first_reading_with(self.endings, kind)
            if kind in ("mismatch", "deadlock", "race")
            else None
        )
        example = (shown or self.endings["rendezvous"]).example(kind)
        never: dict[str, Frequency] = dict.fromkeys(READING_ORDER, "never")
        said = (
            frequency_by_reading(self.endings, kind) if kind in ("mismatch", "deadlock") else never
        )
        choices = self._choices()
        return Verdict(
            kind,
            self.orders.complete,
            self.orders.explored,
            self._depends_on(),
            who.ranks,
            who.core,
            said,
            who.stuck_sets,
            who.culprits,
            self._findings(choices),
            example.final_state,
            tuple(sorted({rank for rank, _, _ in choices})),
            example.schedule if shown is not None else None,
        )

    def _depends_on(self) -> Literal["buffering", "schedule"] | None:
        if self.kind == "race":
            return (
                None
                if self.buffer_races or self.remote
                else verdict_dependence(frequency_by_reading(self.endings, "race"))
            )
        return (
            verdict_dependence(frequency_by_reading(self.endings, self.kind))
            if self.kind in ("mismatch", "deadlock")
            else None
        )

    def _who(self) -> _AffectedRanks:
        """ranks, core, stuck_sets and culprits of each class."""
        if self.kind == "invalid":
            return _AffectedRanks(_union_of_ranks(f.ranks for f in self.invalid))
        if self.kind == "race":
            broken_reliances = first_reading_with(self.endings, "race")
            told = [
                r for r, _, _ in (broken_reliances.broken_reliances if broken_reliances else ())
            ]
            return _AffectedRanks(
                _union_of_ranks(
                    [*(c.ranks for c in self.buffer_races), *(c.ranks for c in self.remote), told]
                )
            )
        if self.kind == "leak":
            return _AffectedRanks(
                _union_of_ranks(
                    [*(leak.ranks for leak in self.leaks), [rank for rank, _, _ in self.unreceived]]
                )
            )
        shown = first_reading_with(self.endings, self.kind) if self.kind != "ok" else None
        if shown is None:
            return _AffectedRanks()
        if self.kind == "mismatch":
            return _AffectedRanks(
                shown.mismatch_ranks, culprits=_union_of_ranks(u.minority for u in shown.mismatches)
            )
        return _AffectedRanks(_union_of_ranks(shown.stuck), shown.core, tuple(sorted(shown.stuck)))

    def _choices(self) -> list[tuple[int, int, int]]:
        """Open receives that may take more than one sender's message."""
        takers: dict[tuple[int, int, int], set[int]] = {}
        for ending in self.endings.values():
            for receive, senders in ending.takers.items():
                takers.setdefault(receive, set()).update(senders)
        return sorted(receive for receive, senders in takers.items() if len(senders) > 1)

    def _findings(self, choices: list[tuple[int, int, int]]) -> tuple[Finding, ...]:
        found = (
            *self.program.findings,
            *self._of_failures(),
            *self._of_orders(),
            *self._of_races(),
            *self._of_ends(choices),
        )
        if self.orders.complete:
            return found
        from distsim.checker.diagnosis.nondeterminism import search_bound_finding

        return (*found, search_bound_finding(self.orders.explored, self.bound))

    def _of_failures(self) -> tuple[Finding, ...]:
        """What met and differs, who stands still, and whether buffers would hide it."""
        unlike, stuck = (
            first_reading_with(self.endings, "mismatch"),
            first_reading_with(self.endings, "deadlock"),
        )
        if unlike is None and stuck is None:
            return ()
        from distsim.checker.diagnosis.match_findings import failure_findings
        from distsim.checker.diagnosis.nondeterminism import buffering_findings

        stood = stuck.example("deadlock") if stuck else None
        taken = stood.schedule.sender_of if stood is not None and stood.schedule else None
        left = None if stood is None else stood.final_state
        found = failure_findings(
            self.program, self.subject.where, unlike.mismatches if unlike else (), left, taken
        )
        if self.kind != "deadlock" or stuck is None:
            return found
        sends = left is None or _has_blocked_sender(self.program, left)
        return (
            *found,
            *buffering_findings(
                frequency_by_reading(self.endings, "deadlock"),
                _union_of_ranks(stuck.stuck),
                sends=sends,
            ),
        )

    def _of_orders(self) -> tuple[Finding, ...]:
        """DS609, where the verdict shows in some orders of events only, and DS401."""
        shown, racing = None, first_reading_with(self.endings, "race")
        if (
            self.kind in _FAILURE_KINDS
            and "sometimes" in frequency_by_reading(self.endings, self.kind).values()
        ):
            shown = first_reading_with(self.endings, self.kind)
        if shown is None and racing is None:
            return ()
        from distsim.checker.diagnosis.nondeterminism import (
            event_order_findings,
            sender_reliance_findings,
        )

        found = (
            ()
            if shown is None
            else event_order_findings(self.program, shown.example(self.kind).schedule, self.kind)
        )
        return (
            *found,
            *(sender_reliance_findings(self.program, racing) if racing is not None else ()),
        )

    def _of_races(self) -> tuple[Finding, ...]:
        """Of what nothing orders."""
        program, found = self.program, list[Finding]()
        if self.buffer_races:
            from distsim.checker.diagnosis.nondeterminism import data_race_findings

            found += data_race_findings(program, self.buffer_races)
        if self.remote:
            from distsim.checker.detectors.one_sided_races import one_sided_race_findings

            found += one_sided_race_findings(program, self.remote)
        if self.subject.concerns("signal_conflicts"):
            from distsim.checker.detectors.signal_conflicts import signal_findings

            found += signal_findings(program, self.subject.layout)
        return tuple(found)

    def _of_ends(self, choices: list[tuple[int, int, int]]) -> tuple[Finding, ...]:
        """What is left over where the first execution ends, how its ranks ended, and what other
        messages they could have taken.
        """
        program, first = self.program, self.endings["rendezvous"].example("end").final_state
        if made_all_calls(program, first) and not (self.leaks or self.unreceived or choices):
            return ()
        from distsim.checker.diagnosis.match_findings import (
            leak_findings,
            open_receive_findings,
            rank_end_findings,
            unreceived_findings,
        )

        left = unreceived_findings(program, first) if self.unreceived else ()
        return (
            *leak_findings(program, self.leaks),
            *left,
            *rank_end_findings(program, first),
            *open_receive_findings(program, choices),
        )


_FAILURE_KINDS: tuple[FailureKind, ...] = ("mismatch", "deadlock", "race")


def _has_blocked_sender(program: Program, left: FinalState) -> bool:
    """Some blocked rank waits for a message of its own to be taken."""
    for blocked in left.blocked:
        for need in blocked.needs:
            if need.position < len(program.code(blocked.rank).calls):
                call = program.call(blocked.rank, need.position)
                parts = call.parts if need.part < 0 else call.parts[need.part : need.part + 1]
                if any(OPERATIONS[one.op].direction == "send" for one in parts or (call,)):
                    return True
    return False


def _union_of_ranks(sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted({rank for ranks in sets for rank in ranks}))


#: The same under the name that the package shows.
verdict = verdict_of
