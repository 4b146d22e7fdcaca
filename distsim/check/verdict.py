"""The verdict on a program under the contract: the worst of what its readings end in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from itertools import pairwise
from typing import Literal, NamedTuple

from distsim.check.call_index import CallIndex
from distsim.check.ending import MAX_STATES, READINGS, Ending, Example, How, Kind, Orders, depends_on, first_with, hows
from distsim.check.judge import choice_findings, end_findings, failure_findings, leak_findings, unreceived_findings
from distsim.check.layout import Layout, build_layout
from distsim.check.leaks import Leak, leaks
from distsim.check.leaving import runs_of
from distsim.check.mismatch import Mismatch
from distsim.check.races import DataRace, data_races
from distsim.check.readings import Contract, Reading, leavers, never_starts
from distsim.check.remote import remote_findings, remote_races
from distsim.check.schedule import Schedule
from distsim.check.signals import signal_findings
from distsim.check.timing import bound_finding, buffering_dependence, order_findings, race_findings, reliance_findings
from distsim.findings.codes import CODES
from distsim.findings.record import Finding
from distsim.ops.table import OPS
from distsim.program.records import Program
from distsim.records import dataclass
from distsim.standstill import Standstill

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
    program: Program, max_states: int = MAX_STATES, *, layout: Layout | None = None, ended: Standstill | None = None
) -> Verdict:
    """Judge a program under every reading of what blocks, and every order of events.

    Without a receive from any source one untimed pass per reading is exact: the matching is fixed, so the order of events cannot
    matter. Else every order is explored, until at most ``max_states`` states are stored. ``ended``: how a run ended that completed under
    rules at least as strict as the rendezvous reading, with nothing that differed where calls met; it stands for that pass.
    """
    layout = layout or build_layout(program)
    where = CallIndex(layout)
    starts = not never_starts(program)
    if layout.any_source and starts:
        from distsim.check.orders import all_orders  # most programs need no search

        orders = all_orders(layout, max_states)
    elif ended is not None and starts:
        orders = Orders({"rendezvous": Ending({}, True, (), True, {"end": Example(ended)}, mismatch_ranks=())}, 0, True)
    else:
        orders = Orders(_single_passes(Contract(layout, where)), 0, True)
    return _Judgement(program, layout, where, orders, max_states).verdict()


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

    def __init__(self, program: Program, layout: Layout, where: CallIndex, orders: Orders, bound: int) -> None:
        self.program, self.layout, self.where, self.orders, self.bound = program, layout, where, orders, bound
        self.endings = orders.endings
        self.invalid = tuple(f for f in program.findings if f.code in CODES and CODES[f.code].verdict == "invalid")
        example = self.endings["rendezvous"].example("end")
        first = example.standstill
        # an execution that was not followed beyond calls that differ leaves all at them
        blocked = not example.ended or bool(first.blocked) or any(ending.stuck for ending in self.endings.values())
        self.clashes: tuple[DataRace, ...] = data_races(program, [end.position for end in first.ends])
        self.remote = remote_races(program, layout, [end.position for end in first.ends])
        self.leaks: tuple[Leak, ...] = () if blocked else leaks(program, first)
        self.unreceived = () if blocked else first.unreceived
        self.kind = self._kind()

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
        program = self.program
        unlike, stuck, racing = (first_with(self.endings, kind) for kind in _KINDS)
        stood = stuck.example("deadlock") if stuck else None
        first = self.endings["rendezvous"].example("end").standstill
        taken = stood.schedule.sender_of if stood is not None and stood.schedule else None
        left = None if stood is None else stood.standstill
        found = [*program.findings, *failure_findings(program, self.where, unlike.unlikes if unlike else (), left, taken)]
        if self.kind == "deadlock" and stuck is not None:
            found += buffering_dependence(
                hows(self.endings, "deadlock"), _union(stuck.stuck), sends=left is None or _wait_to_send(program, left)
            )
        found += self._order_findings()
        found += reliance_findings(program, racing) if racing is not None else ()
        found += (
            *race_findings(program, self.clashes),
            *remote_findings(program, self.remote),
            *signal_findings(program, self.layout),
            *leak_findings(program, self.leaks),
        )
        found += unreceived_findings(program, first) if self.unreceived else ()
        found += (*end_findings(program, first), *choice_findings(program, choices))
        return (*found, *(() if self.orders.complete else (bound_finding(self.orders.explored, self.bound),)))

    def _order_findings(self) -> tuple[Finding, ...]:
        """DS609, where the verdict shows in some orders of events only."""
        if self.kind not in _KINDS or "sometimes" not in hows(self.endings, self.kind).values():
            return ()
        shown = first_with(self.endings, self.kind)
        return order_findings(self.program, shown.example(self.kind).schedule, self.kind) if shown is not None else ()


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
