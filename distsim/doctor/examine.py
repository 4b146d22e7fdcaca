"""The analysis: what the evidence proves of why nothing moves, what it only suggests, and what is to be collected next."""

from __future__ import annotations

from dataclasses import dataclass, field

from distsim.doctor import causes
from distsim.doctor.advice import advice
from distsim.doctor.causes import Cause
from distsim.doctor.evidence import Evidence
from distsim.doctor.standing import Standing, standing
from distsim.doctor.words import call_text, who


@dataclass
class Diagnosis:
    """``causes``: the main one first. ``culprits`` of the main one: ranks that the records prove it of; often nobody."""

    evidence: Evidence
    standing: Standing
    causes: list[Cause] = field(default_factory=list)
    common: list[str] = field(default_factory=list)
    absent: tuple[int, ...] = ()
    collect: list[str] = field(default_factory=list)

    @property
    def main(self) -> Cause | None:
        return self.causes[0] if self.causes else None

    @property
    def culprits(self) -> tuple[int, ...]:
        return self.causes[0].culprits if self.causes else ()


def examine(evidence: Evidence) -> Diagnosis:
    """The diagnosis of what was given."""
    whole = standing(evidence)
    found = Diagnosis(evidence, whole)
    found.absent = _absent(evidence)
    found.causes = _ordered(whole, found.absent)
    found.common = _common(whole)
    found.collect = advice(evidence, whole, found.absent, found.main)
    return found


def _absent(evidence: Evidence) -> tuple[int, ...]:
    """Ranks of the job of whom nothing was given."""
    members = {m for g in evidence.groups.values() if g.members for m in g.members} | set(range(min(evidence.world, 1 << 16)))
    return tuple(sorted(members - set(evidence.ranks)))


def _ordered(whole: Standing, absent: tuple[int, ...]) -> list[Cause]:
    """All causes that the evidence shows, that which explains the others first."""
    crashes = causes.crashes(whole)
    parted = causes.parted(whole)
    clashes = causes.clashes(whole, parted)
    circles = causes.circles(whole)
    named = [*crashes, *clashes, *parted, *causes.said_mismatch(whole), *causes.messages(whole), *circles]
    clashing = {r for c in clashes for r in c.ranks}
    if crashes and clashes and set(crashes[0].culprits) & clashing and crashes[0].of_library:
        named = [*clashes, *crashes, *parted, *circles]  # torch raised because they did not fit
    behind = causes.behind(whole, absent)
    found = [*named, *behind]
    if any(c.grade == "proved" for c in behind):  # suspicions come after what is proved
        found.sort(key=lambda c: c.grade != "proved")
    if not found:
        found = [*causes.passed(whole), *causes.reported(whole), *causes.silent(whole, absent), *causes.all_there(whole), *causes.by_stack(whole)]
    else:
        found += causes.reported(whole)
    return _distinct(found)


def _distinct(found: list[Cause]) -> list[Cause]:
    """One bug, one cause: what says the same again is left out, and so is a circle of those who merely wait behind a proved cause."""
    kept: list[Cause] = []
    for cause in found:
        if any(cause.title == other.title for other in kept):
            continue
        if kept and kept[0].grade == "proved" and cause.kind in ("circle", "behind", "messages") and kept[0].kind not in ("behind", "circle"):
            continue
        if kept and cause.kind == "parted" and any(k.kind == "clash" and k.group == cause.group for k in kept):
            continue
        kept.append(cause)
    return kept


def _common(whole: Standing) -> list[str]:
    """Of each group on which somebody waits: the last call that all of whom something is known have made."""
    found = []
    for group in dict.fromkeys(w.call.group for s in whole.ranks.values() for w in s.waits if w.call.number >= 0 and not w.call.p2p):
        known = [(whole.last(m, group), m) for m in whole.members(group)]
        numbers = [n for n, _ in known if n is not None]
        if not numbers or not whole.evidence.groups[group].sure:
            continue
        least = min(numbers)
        shown = next((c for e in whole.evidence.ranks.values() for c in e.calls if (c.group, c.number, c.p2p) == (group, least, False)), None)
        what = call_text(whole.evidence, shown) if shown else f"call {least} of {whole.evidence.groups[group].shown}"
        given = [m for n, m in known if n is not None]
        found.append(f"{what}, by {who(given)}" if least > 0 else f"none on {whole.evidence.groups[group].shown}")
    return found
