"""The verdict on a program under the contract: the worst of what its readings end in."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

from distsim.check.diagnose import diagnose
from distsim.check.instructions import Reading
from distsim.check.judge import choice_findings, end_findings, leak_findings, unlike_findings, unreceived_findings
from distsim.check.layout import Layout, build_layout
from distsim.check.leaks import Leak, leaks
from distsim.check.leftovers import standstill
from distsim.check.onepass import Pass
from distsim.check.unlike import Unlike, unlike_calls
from distsim.check.waitfor import wait_for
from distsim.check.whereabouts import Whereabouts
from distsim.findings.codes import CODES
from distsim.findings.record import Finding
from distsim.program.records import Program
from distsim.standstill import Standstill

Class = Literal["invalid", "mismatch", "deadlock", "race", "leak", "ok"]
How = Literal["always", "sometimes", "never"]
_READINGS: tuple[Reading, ...] = ("rendezvous", "early", "buffered")


@dataclass(frozen=True, slots=True)
class Verdict:
    """What may become of a program, whatever the back end. The words are those of `cases/FORMAT.md`.

    ``ranks``: the callers (invalid), the members or sender and receiver (mismatch), who is still blocked (deadlock), the owners
    (leak). ``core``: at a deadlock the ranks on a circle and those that wait directly for one who has left. ``readings``: in
    which reading of what blocks the verdict's own class shows up. ``culprits``: the minority of a mismatched collective.
    ``explored``: states stored, 0 for single passes. ``standstill`` is that of the first reading that has the verdict.
    ``complete`` is False where another order of events might do worse.
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


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What one reading ends in."""

    standstill: Standstill
    unlikes: tuple[Unlike, ...]
    choices: tuple[tuple[int, int], ...] = ()

    def has(self, verdict: str) -> bool:
        return bool(self.unlikes) if verdict == "mismatch" else bool(self.standstill.blocked) if verdict == "deadlock" else False


def verdict_of(program: Program) -> Verdict:
    """Judge a program by one untimed pass per reading; the second and third only if the first stands still.

    Without a receive from any source this is exact: the matching is fixed, so the order of events cannot matter.
    """
    layout = build_layout(program)
    where = Whereabouts(layout)
    outcomes = {"rendezvous": _run(layout, where, "rendezvous")}
    if outcomes["rendezvous"].standstill.blocked:
        outcomes |= {reading: _run(layout, where, reading) for reading in _READINGS[1:]}
    found = _judge(program, layout, where, outcomes)
    if layout.any_source:
        found = replace(
            found,
            complete=False,
            findings=(*found.findings, *choice_findings(program, outcomes["rendezvous"].choices), _incomplete()),
        )
    return found


def _run(layout: Layout, where: Whereabouts, reading: Reading) -> _Outcome:
    absent = frozenset(f.rank for f in layout.program.faults if f.kind == "absent")
    done = Pass(layout, reading).run(absent)
    choices = tuple(sorted(done.inboxes.choices)) if done.inboxes is not None else ()
    return _Outcome(standstill(done, where), unlike_calls(done, where), choices)


def _judge(program: Program, layout: Layout, where: Whereabouts, outcomes: dict[str, _Outcome]) -> Verdict:
    first = outcomes["rendezvous"]
    invalid = tuple(f for f in program.findings if f.code in CODES and CODES[f.code].verdict == "invalid")
    leaking = () if first.standstill.blocked else leaks(program, first.standstill)
    kind = _kind(outcomes, bool(invalid), bool(leaking or first.standstill.unreceived))
    shown = next((o for o in outcomes.values() if o.has(kind)), first)
    seen = shown.unlikes or next((o.unlikes for o in outcomes.values() if o.unlikes), ())
    stood = next((o for o in outcomes.values() if o.standstill.blocked), None)
    findings = (
        *program.findings,
        *unlike_findings(program, where, seen),
        *(diagnose(program, stood.standstill, layout) if stood else ()),
        *(_luck(outcomes) if kind == "deadlock" else ()),
        *leak_findings(program, leaking),
        *(unreceived_findings(program, first.standstill) if not first.standstill.blocked else ()),
        *end_findings(program, first.standstill),
    )
    who = _who(kind, invalid, shown, seen, leaking)
    return Verdict(
        kind, depends_on=_depends(outcomes, kind), ranks=who.ranks, core=who.core, readings=_readings(outcomes, kind),
        stuck_sets=who.stuck_sets, culprits=who.culprits, findings=findings, standstill=shown.standstill,
    )  # fmt: skip


def _kind(outcomes: dict[str, _Outcome], invalid: bool, leaking: bool) -> Class:
    if invalid:
        return "invalid"
    kinds: tuple[Class, ...] = ("mismatch", "deadlock")
    for kind in kinds:
        if any(o.has(kind) for o in outcomes.values()):
            return kind
    return "leak" if leaking else "ok"


class _Who(NamedTuple):
    ranks: tuple[int, ...] = ()
    core: tuple[int, ...] = ()
    stuck_sets: tuple[tuple[int, ...], ...] = ()
    culprits: tuple[int, ...] = ()


def _who(kind: Class, invalid: tuple[Finding, ...], shown: _Outcome, seen: tuple[Unlike, ...], leaking: tuple[Leak, ...]) -> _Who:
    """ranks, core, stuck_sets and culprits of each class."""
    if kind == "invalid":
        return _Who(_union(f.ranks for f in invalid))
    if kind == "mismatch":
        return _Who(_union(u.ranks for u in seen), culprits=_union(u.minority for u in seen))
    if kind == "deadlock":
        stuck = shown.standstill.stuck
        return _Who(stuck, wait_for(shown.standstill).core, (stuck,))
    if kind == "leak":
        return _Who(_union([*(leak.ranks for leak in leaking), tuple(rank for rank, _, _ in shown.standstill.unreceived)]))
    return _Who()


def _union(sets: Iterable[tuple[int, ...]]) -> tuple[int, ...]:
    return tuple(sorted({rank for ranks in sets for rank in ranks}))


def _readings(outcomes: dict[str, _Outcome], kind: str) -> dict[str, How]:
    """Which readings have a deadlock or mismatch, when that is the verdict. A reading that was not run ends as rendezvous
    does."""
    said: dict[str, How] = {r: "always" if outcomes.get(r, outcomes["rendezvous"]).has(kind) else "never" for r in _READINGS}
    same = len(set(said.values())) == 1
    return {**said, "mixed": said["rendezvous"] if same else "sometimes"}


def _depends(outcomes: dict[str, _Outcome], kind: str) -> Literal["buffering"] | None:
    return "buffering" if _readings(outcomes, kind)["mixed"] == "sometimes" else None


def _luck(outcomes: dict[str, _Outcome]) -> tuple[Finding, ...]:
    """DS603: the rendezvous reading stands still, the buffered one does not."""
    buffered = outcomes.get("buffered")
    if buffered is None or buffered.standstill.blocked:
        return ()
    stuck = outcomes["rendezvous"].standstill.stuck
    message = "it gets through where sends are buffered: small messages on mpi and nccl"
    return (
        Finding("DS603", "warning", message, stuck, (), ("do not rely on it: a larger tensor, another back end, and it hangs",)),
    )


def _incomplete() -> Finding:
    message = "a receive from any source lets the order of arrival decide; one order was followed, others may do worse"
    return Finding("DS902", "warning", message, (), (), ("name the sources where you can",))


#: The same under the name that the package shows.
verdict = verdict_of
