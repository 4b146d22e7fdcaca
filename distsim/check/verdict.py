"""The verdict on a program under the contract: the worst of what its readings end in. Before that, which detectors it concerns."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from distsim.check.ending import MAX_STATES, READINGS, Ending, Example, How, Kind, Orders, depends_on, first_with, hows
from distsim.check.schedule import Schedule
from distsim.findings.codes import CODES
from distsim.findings.record import Finding
from distsim.ops.table import OPS
from distsim.program.features import Feature
from distsim.program.records import Program
from distsim.records import dataclass
from distsim.standstill import Standstill

if TYPE_CHECKING:
    from distsim.check.call_index import CallIndex
    from distsim.check.layout import Layout
    from distsim.check.leaks import Leak
    from distsim.check.mismatch import Mismatch
    from distsim.check.races import DataRace
    from distsim.check.readings import Contract, Reading
    from distsim.check.remote import RemoteRace


# --- what detectors are asked about ---


#: Detector -> what concerns it: in a program that uses none of these it has nothing to find. Each is the module of this folder.
CONCERNS: Final[dict[str, frozenset[Feature]]] = {
    "leaks": frozenset({"requests"}),
    "races": frozenset({"requests", "streams"}),
    "remote": frozenset({"remote"}),
    "signals": frozenset({"signals"}),
    "names": frozenset({"branches"}),
    "messages": frozenset({"messages"}),
    "remarks": frozenset({"requests", "branches", "timeouts"}),
}


class Subject:
    """What detectors are asked about."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self._concerned = frozenset(name for name, uses in CONCERNS.items() if not uses.isdisjoint(program.features))

    def concerns(self, detector: str) -> bool:
        """Whether a detector may find something."""
        return detector in self._concerned

    @cached_property
    def layout(self) -> Layout:
        """Where the program's calls meet."""
        from distsim.check.layout import build_layout

        return build_layout(self.program)

    @cached_property
    def where(self) -> CallIndex:
        """The same, call by call."""
        from distsim.check.call_index import CallIndex

        return CallIndex(self.layout)


def made_all_calls(program: Program, left: Standstill) -> bool:
    """Every rank came to the end of its code."""
    return all(end.status == "ended" and end.position >= len(program.code(end.rank).calls) for end in left.ends)


# --- the verdict ---


Class = Literal["invalid", "mismatch", "deadlock", "race", "leak", "ok"]
_PLAIN: tuple[Reading, ...] = ("rendezvous", "early", "buffered")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may become of a program, whatever the back end. The words are those of `cases/FORMAT.md`.

    ``ranks``: the callers (invalid), the members or sender and receiver (mismatch), who is still blocked (deadlock), the rank
    that races, the owners (leak). ``core``: at a deadlock the ranks on a circle and those that wait directly for one who has left;
    where several executions end with the same ranks blocked, one of them stands for all. Both are united over the executions of
    the first reading that has the verdict, whose sets of blocked ranks are ``stuck_sets``. ``readings``: in which reading of what
    blocks a deadlock or mismatch shows up, if that is the verdict. ``culprits``: the minority of a mismatched collective.
    ``nondeterministic``: ranks with an open receive that may take more than one sender's message (a remark).
    ``explored``: states stored, 0 for single passes. ``standstill`` is that of one execution of the first reading that has the
    verdict, ``schedule`` the choices that lead there. ``complete`` is False where the search hit its bound.
    """

    verdict: Class
    complete: bool = True
    explored: int = 0
    depends_on: Literal["buffering", "schedule"] | None = None
    ranks: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    readings: dict[str, How] = field(default_factory=dict)
    stuck_sets: tuple[tuple[int, ...], ...] = ()
    culprits: tuple[int, ...] = ()
    findings: tuple[Finding, ...] = ()
    standstill: Standstill | None = None
    nondeterministic: tuple[int, ...] = ()
    schedule: Schedule | None = None


def verdict_of(
    program: Program, max_states: int = MAX_STATES, *, subject: Subject | None = None, ended: Standstill | None = None
) -> Verdict:
    """Judge a program under every reading of what blocks, and every order of events.

    Without a receive from any source one untimed pass per reading is exact: the matching is fixed, so the order of events cannot
    matter. Else every order is explored, until at most ``max_states`` states are stored. ``ended``: how a run ended that completed under
    rules at least as strict as the rendezvous reading, with nothing that differed where calls met; it stands for that pass.
    ``subject``: the program, if it has been asked about.
    """
    subject = subject or Subject(program)
    return _Judgement(subject, _orders(subject, max_states, ended), max_states).verdict()


def _orders(subject: Subject, max_states: int, ended: Standstill | None) -> Orders:
    """What its executions end in: what is known, that of every order, or that of a pass for each reading."""
    program = subject.program
    starts = not (program.faults and _never_starts(program))
    if "any source" in program.features and starts and subject.layout.any_source:
        from distsim.check.orders import all_orders  # most programs need no search

        return all_orders(subject.layout, max_states)
    if ended is not None and starts:
        return Orders({"rendezvous": Ending({}, True, (), True, {"end": Example(ended)}, mismatch_ranks=())}, 0, True)
    from distsim.check.readings import Contract

    return Orders(_single_passes(Contract(subject.layout, subject.where)), 0, True)


def _never_starts(program: Program) -> bool:
    """Somebody is absent, and no rank gets past the world's first meeting."""
    written = any(call.op == "init_process_group" for code in program.codes for call in code.calls)
    return not written and any(fault.kind == "absent" for fault in program.faults)


def _single_passes(contract: Contract) -> dict[str, Ending]:
    """The second and third reading only if the first stands still: they get at least as far."""
    endings = {"rendezvous": _pass(contract, "rendezvous")}
    if endings["rendezvous"].stuck:
        for before, reading in pairwise(_PLAIN):
            alike = contract.ends_alike(before, reading, endings[before])
            endings[reading] = endings[before] if alike else _pass(contract, reading)
    return endings


def _pass(contract: Contract, reading: Reading) -> Ending:
    """One run, or, where ranks leave with requests open, one for each way in which these meet or do not."""
    from distsim.check.leaving import runs_of
    from distsim.check.readings import leavers

    runs = runs_of(contract, reading) if leavers(contract.linked) else [contract.run(reading)]
    stuck: dict[tuple[int, ...], tuple[int, ...]] = {}
    unlikes: dict[object, Mismatch] = {}
    examples: dict[str, Example] = {}
    passed = fit = False
    for done in runs:
        found, met = done.standstill(), done.mismatches()
        examples.setdefault("end", Example(found))
        if met:
            unlikes = {u.calls: u for u in met} | unlikes
            examples.setdefault("mismatch", Example(found))
        if found.blocked:
            from distsim.check.waitfor import wait_for

            stuck.setdefault(found.stuck, wait_for(found).core)
            examples.setdefault("deadlock", Example(found))
        passed, fit = passed or not found.blocked, fit or not met
    ranks = _union(u.ranks for u in unlikes.values())
    return Ending(stuck, passed, tuple(unlikes.values()), fit, examples, mismatch_ranks=ranks)


class _Who(NamedTuple):
    ranks: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    stuck_sets: tuple[tuple[int, ...], ...] = ()
    culprits: tuple[int, ...] = ()


class _Judgement:
    """One program with the endings of its readings."""

    def __init__(self, subject: Subject, orders: Orders, bound: int) -> None:
        self.subject, self.program, self.orders, self.bound = subject, subject.program, orders, bound
        self.endings, program = orders.endings, subject.program
        self.invalid = tuple(f for f in program.findings if f.code in CODES and CODES[f.code].verdict == "invalid")
        example = self.endings["rendezvous"].example("end")
        first = example.standstill
        # an execution that was not followed beyond calls that differ leaves all at them
        blocked = not example.ended or bool(first.blocked) or any(ending.stuck for ending in self.endings.values())
        self.clashes, self.remote = self._races([end.position for end in first.ends])
        self.leaks = () if blocked else self._leaks(first)
        self.unreceived = () if blocked else first.unreceived
        self.kind = self._kind()

    def _races(self, reached: list[int]) -> tuple[tuple[DataRace, ...], tuple[RemoteRace, ...]]:
        """Of calls that were reached: uses of a buffer that a request has, and of another rank's memory."""
        clashes: tuple[DataRace, ...] = ()
        remote: tuple[RemoteRace, ...] = ()
        if self.subject.concerns("races"):
            from distsim.check.races import data_races

            clashes = data_races(self.program, reached)
        if self.subject.concerns("remote"):
            from distsim.check.remote import remote_races

            remote = remote_races(self.program, self.subject.layout, reached)
        return clashes, remote

    def _leaks(self, first: Standstill) -> tuple[Leak, ...]:
        if not self.subject.concerns("leaks"):
            return ()
        from distsim.check.leaks import leaks

        return leaks(self.program, first)

    def _kind(self) -> Class:
        if self.invalid:
            return "invalid"
        kinds: tuple[Kind, ...] = ("mismatch", "deadlock")
        for kind in kinds:
            if first_with(self.endings, kind) is not None:
                return kind
        if self.clashes or self.remote or first_with(self.endings, "race") is not None:
            return "race"
        return "leak" if self.leaks or self.unreceived else "ok"

    def verdict(self) -> Verdict:
        kind, who = self.kind, self._who()
        shown = first_with(self.endings, kind) if kind in ("mismatch", "deadlock", "race") else None
        example = (shown or self.endings["rendezvous"]).example(kind)
        never: dict[str, How] = dict.fromkeys(READINGS, "never")
        said = hows(self.endings, kind) if kind in ("mismatch", "deadlock") else never
        choices = self._choices()
        return Verdict(
            kind, self.orders.complete, self.orders.explored, self._depends_on(), who.ranks, who.core, said, who.stuck_sets,
            who.culprits, self._findings(choices), example.standstill, tuple(sorted({rank for rank, _, _ in choices})),
            example.schedule if shown is not None else None,
        )  # fmt: skip

    def _depends_on(self) -> Literal["buffering", "schedule"] | None:
        if self.kind == "race":
            return None if self.clashes or self.remote else depends_on(hows(self.endings, "race"))
        return depends_on(hows(self.endings, self.kind)) if self.kind in ("mismatch", "deadlock") else None

    def _who(self) -> _Who:
        """ranks, core, stuck_sets and culprits of each class."""
        if self.kind == "invalid":
            return _Who(_union(f.ranks for f in self.invalid))
        if self.kind == "race":
            relying = first_with(self.endings, "race")
            told = [r for r, _, _ in (relying.relying if relying else ())]
            return _Who(_union([*(c.ranks for c in self.clashes), *(c.ranks for c in self.remote), told]))
        if self.kind == "leak":
            return _Who(_union([*(leak.ranks for leak in self.leaks), [rank for rank, _, _ in self.unreceived]]))
        shown = first_with(self.endings, self.kind) if self.kind != "ok" else None
        if shown is None:
            return _Who()
        if self.kind == "mismatch":
            return _Who(shown.mismatch_ranks, culprits=_union(u.minority for u in shown.unlikes))
        return _Who(_union(shown.stuck), shown.core, tuple(sorted(shown.stuck)))

    def _choices(self) -> list[tuple[int, int, int]]:
        """Open receives that may take more than one sender's message."""
        takers: dict[tuple[int, int, int], set[int]] = {}
        for ending in self.endings.values():
            for receive, senders in ending.takers.items():
                takers.setdefault(receive, set()).update(senders)
        return sorted(receive for receive, senders in takers.items() if len(senders) > 1)

    def _findings(self, choices: list[tuple[int, int, int]]) -> tuple[Finding, ...]:
        found = (*self.program.findings, *self._of_failures(), *self._of_orders(), *self._of_races(), *self._of_ends(choices))
        if self.orders.complete:
            return found
        from distsim.check.timing import bound_finding

        return (*found, bound_finding(self.orders.explored, self.bound))

    def _of_failures(self) -> tuple[Finding, ...]:
        """What met and differs, who stands still, and whether buffers would hide it."""
        unlike, stuck = first_with(self.endings, "mismatch"), first_with(self.endings, "deadlock")
        if unlike is None and stuck is None:
            return ()
        from distsim.check.judge import failure_findings
        from distsim.check.timing import buffering_dependence

        stood = stuck.example("deadlock") if stuck else None
        taken = stood.schedule.sender_of if stood is not None and stood.schedule else None
        left = None if stood is None else stood.standstill
        found = failure_findings(self.program, self.subject.where, unlike.unlikes if unlike else (), left, taken)
        if self.kind != "deadlock" or stuck is None:
            return found
        sends = left is None or _wait_to_send(self.program, left)
        return (*found, *buffering_dependence(hows(self.endings, "deadlock"), _union(stuck.stuck), sends=sends))

    def _of_orders(self) -> tuple[Finding, ...]:
        """DS609, where the verdict shows in some orders of events only, and DS401."""
        shown, racing = None, first_with(self.endings, "race")
        if self.kind in _KINDS and "sometimes" in hows(self.endings, self.kind).values():
            shown = first_with(self.endings, self.kind)
        if shown is None and racing is None:
            return ()
        from distsim.check.timing import order_findings, reliance_findings

        found = () if shown is None else order_findings(self.program, shown.example(self.kind).schedule, self.kind)
        return (*found, *(reliance_findings(self.program, racing) if racing is not None else ()))

    def _of_races(self) -> tuple[Finding, ...]:
        """Of what nothing orders."""
        program, found = self.program, list[Finding]()
        if self.clashes:
            from distsim.check.timing import race_findings

            found += race_findings(program, self.clashes)
        if self.remote:
            from distsim.check.remote import remote_findings

            found += remote_findings(program, self.remote)
        if self.subject.concerns("signals"):
            from distsim.check.signals import signal_findings

            found += signal_findings(program, self.subject.layout)
        return tuple(found)

    def _of_ends(self, choices: list[tuple[int, int, int]]) -> tuple[Finding, ...]:
        """What is left over where the first execution ends, how its ranks ended, and what other messages they could have taken."""
        program, first = self.program, self.endings["rendezvous"].example("end").standstill
        if made_all_calls(program, first) and not (self.leaks or self.unreceived or choices):
            return ()
        from distsim.check.judge import choice_findings, end_findings, leak_findings, unreceived_findings

        left = unreceived_findings(program, first) if self.unreceived else ()
        return (*leak_findings(program, self.leaks), *left, *end_findings(program, first), *choice_findings(program, choices))


_KINDS: tuple[Kind, ...] = ("mismatch", "deadlock", "race")


def _wait_to_send(program: Program, left: Standstill) -> bool:
    """Some blocked rank waits for a message of its own to be taken."""
    for blocked in left.blocked:
        for need in blocked.needs:
            if need.position < len(program.code(blocked.rank).calls):
                call = program.call(blocked.rank, need.position)
                parts = call.parts if need.part < 0 else call.parts[need.part : need.part + 1]
                if any(OPS[one.op].direction == "send" for one in parts or (call,)):
                    return True
    return False


def _union(sets: Iterable[Iterable[int]]) -> tuple[int, ...]:
    return tuple(sorted({rank for ranks in sets for rank in ranks}))


#: The same under the name that the package shows.
verdict = verdict_of
