"""Why nothing moves: every kind of cause, each with its grade, the lines, and those whom the records prove it of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distsim.doctor.differ import Clash, Parting, first_clash, message_clash, partings
from distsim.doctor.records import Call, End, Frame, Grade
from distsim.doctor.stacks import is_library, user_frame
from distsim.doctor.standing import Standing
from distsim.doctor.words import call_text, verb, who

#: Ranks, what they do, and where.
Line = tuple[tuple[int, ...], str, Frame | None]


@dataclass
class Cause:
    """``culprits``: of whom the records prove it. ``ranks``: whom it concerns. ``lines``: (ranks, what, frame)."""

    kind: str
    grade: Grade
    title: str
    culprits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    lines: Sequence[Line] = ()
    details: list[str] = field(default_factory=list)
    group: str = ""
    number: int = -1
    of_library: bool = False


# --- a crash before the hang ---


def crashes(whole: Standing) -> list[Cause]:
    """Ranks whose process failed of itself; the others wait for it, or lost their connection to it."""
    awaited = {m for s in whole.ranks.values() for w in s.waits for m in w.missing}
    found = []
    for rank, stand in whole.ranks.items():
        end = stand.end
        if end is None or end.follows or end.clean:
            continue
        if end.unexplained:
            found += [] if stand.waits else [_unexplained(rank, end)]
        elif stand.waits and rank not in awaited:
            found.append(_lived_on(rank, end))
        else:
            found.append(_crash(whole, rank, end))
    return _first_crash(whole, found)


def _crash(whole: Standing, rank: int, end: End) -> Cause:
    title = f"rank {rank} {_ended(end)} before the others hung"
    waiting = tuple(r for r, s in whole.ranks.items() if r != rank and (s.waits or (s.end is not None and s.end.follows)))
    details = [f"{who(waiting)} {verb(waiting, 'waits', 'wait')} for it, or lost the connection to it"] if waiting else []
    of_library = bool(end.frames) and is_library(end.frames[0].file)
    return Cause("crash", "proved", title, (rank,), (rank,), _crash_lines(rank, end), details, of_library=of_library)


def _crash_lines(rank: int, end: End) -> list[Line]:
    frame = user_frame(end.frames)
    return [((rank,), end.text.split(":")[0] if end.kind == "raised" else end.text, frame)] if frame else []


def _lived_on(rank: int, end: End) -> Cause:
    """An error that was caught: the rank is in a call, and nobody waits for it."""
    title = f"rank {rank} {_ended(end)}, and is in a call all the same, where nobody waits for it"
    details = ["the error was caught, or is of another thread: it need not have to do with the hang"]
    return Cause("crash", "suspected", title, (), (rank,), _crash_lines(rank, end), details)


def _unexplained(rank: int, end: End) -> Cause:
    """A launcher says that a process ended first. A call that ran out of time ends a process as well."""
    details = [
        f"why, only the log of rank {rank} tells: an error of its own, or a call that ran out of time because another was missing"
    ]
    return Cause("crash", "suspected", f"rank {rank} {_ended(end)}", (), (rank,), (), details)


def _ended(end: End) -> str:
    if end.kind == "killed":
        return f"was killed ({end.text})"
    return end.text if end.text.startswith("ended") else f"raised {end.text}"


def _first_crash(whole: Standing, found: list[Cause]) -> list[Cause]:
    """Of several crashes no order is known, unless a launcher saw one first: then all are one cause, of those that failed alike."""
    proved = [c for c in found if c.grade == "proved"]
    rest = [c for c in found if c.grade != "proved"]
    seen_first = [c for c in proved if any(e.at for e in whole.evidence.ranks[c.ranks[0]].ends)]
    if len(proved) <= 1 or len(seen_first) == 1:
        return [*seen_first, *(c for c in proved if c not in seen_first), *rest]
    ranks = tuple(sorted(r for c in proved for r in c.ranks))
    lines = [line for c in proved for line in c.lines]
    texts = {c.title.split(" ", 2)[2] for c in proved}
    if len(texts) == 1:
        return [Cause("crash", "proved", f"{who(ranks)} {texts.pop()}", ranks, ranks, lines), *rest]
    said = "; ".join(c.title.removesuffix(" before the others hung") for c in proved[:4])
    details = [
        "which of them failed first, and whether another followed from it, nothing here tells: compare the times of their logs"
    ]
    return [Cause("crash", "proved", f"{who(ranks)} failed, each in its own way: {said}", (), ranks, lines, details), *rest]


# --- calls that do not fit ---


def parted(whole: Standing) -> list[Cause]:
    """Ranks that make a call too many or too few, told by the lines of their calls."""
    found = []
    for group in whole.evidence.groups:
        if not whole.evidence.groups[group].sure:
            continue
        waiting = {r for r, s in whole.ranks.items() for w in s.waits if w.call.group == group}
        shifts = partings(whole, group) if waiting or any(s.end for s in whole.ranks.values()) else []
        several = len({p.rank for p in shifts}) > 1
        known = [r for r in whole.members(group) if any(c.group == group for c in _calls(whole, r))]
        shown = shifts[:1] if several and len(known) == 2 else shifts
        found += [_parted(whole, parting, len(known) > 2 and not several) for parting in shown]
    return found


def _calls(whole: Standing, rank: int) -> list[Call]:
    given = whole.evidence.ranks.get(rank)
    return given.calls if given else []


def _parted(whole: Standing, parting: Parting, proved: bool) -> Cause:
    rank, call = parting.rank, parting.call
    count = f"{parting.calls} calls" if parting.calls > 1 else "the call"
    frame = user_frame(call.frames)
    where = f"{call.op} at {frame.place}" if frame else call.op
    does = f"makes {count} that the others do not make" if parting.extra else f"leaves out {count} that the others make"
    group = whole.evidence.groups[parting.group].shown
    title = f"rank {rank} {does}: {where} (call {parting.number} of {group})"
    who_makes = (rank,) if parting.extra else tuple(r for r in whole.members(parting.group) if r != rank and r in whole.ranks)
    if not proved:
        maker, other = (rank, _other(whole, parting)) if parting.extra else (_other(whole, parting), rank)
        title = f"{who((maker, other))} part at call {parting.number} of {group}: rank {maker} makes {where}, " \
                f"rank {other} does not"  # fmt: skip
    details = [f"from there on its calls on {group} meet the others' {'previous' if parting.extra else 'next'} ones"]
    if not proved:
        details = ["of these two I cannot tell which is meant: it makes a call too many, or the other one too few"]
    lines = [(who_makes, call.op, frame)]
    stand = whole.ranks.get(rank)
    if stand is not None and stand.frame is not None and not parting.extra:
        lines.append(((rank,), "stands", stand.frame))
    ranks = (rank,) if proved else tuple(sorted((rank, _other(whole, parting))))
    return Cause("parted", "proved", title, (rank,) if proved else (), ranks, lines, details, parting.group, parting.number)


def _other(whole: Standing, parting: Parting) -> int:
    """A rank that goes the other way."""
    makers = [r for r in whole.members(parting.group) if r != parting.rank and r in whole.ranks]
    return makers[0] if makers else parting.rank


def clashes(whole: Standing, parted_: list[Cause]) -> list[Cause]:
    """Calls of one number that do not fit, on groups on which somebody waits or failed."""
    found = []
    for group, known in whole.evidence.groups.items():
        clash = first_clash(whole, group)
        if clash is None or not _matters(whole, clash):
            continue
        shift = next((c for c in parted_ if c.group == group and c.number <= clash.number), None)
        cause = _clash(whole, clash, known.sure)
        if shift is not None:
            cause.title, cause.culprits, cause.lines = shift.title, shift.culprits, [*shift.lines, *cause.lines]
            cause.details = [*shift.details, *cause.details]
        found.append(cause)
    return found


def _matters(whole: Standing, clash: Clash) -> bool:
    """Not a difference that did no harm: all of the calls done, and nobody stuck on the group from there on."""
    calls = [p.call for p in clash.parties]
    stuck = any(w.call.group == clash.group and w.call.number >= clash.number for s in whole.ranks.values() for w in s.waits)
    failed = any(s.end is not None for s in whole.ranks.values())
    if clash.what != "kind" and all(c.state == "done" for c in calls):
        return False
    return stuck or failed or any(c.state == "waiting" for c in calls)


def _clash(whole: Standing, clash: Clash, sure: bool) -> Cause:
    parties = clash.parties
    group = whole.evidence.groups[clash.group].shown
    said = "; ".join(f"{who(p.ranks)} {verb(p.ranks, 'has', 'have')} {p.text}" for p in parties)
    word = {"kind": "different operations", "size": "different sizes", "dtype": "different dtypes"}[clash.what]
    title = f"{word} meet in call {clash.number} of {group}: {said}"
    lines = [
        (p.ranks, p.call.op if clash.what == "kind" else f"{p.call.op} of {p.text}", user_frame(p.call.frames)) for p in parties
    ]
    details = []
    culprits = clash.odd if sure else ()
    if not culprits and sure:
        details.append("neither is clearly the odd one: I cannot tell which is meant")
    if not sure:
        details.append("the lines do not name the group by what is equal in all processes: these may be two groups")
    return Cause("clash", "proved" if sure else "suspected", title, culprits, tuple(sorted(r for p in parties for r in p.ranks)),
                 lines, details, clash.group, clash.number)  # fmt: skip


def said_mismatch(whole: Standing) -> list[Cause]:
    """What torch found itself under TORCH_DISTRIBUTED_DEBUG=DETAIL. It compares with one rank, so who is odd is open."""
    pairs = whole.evidence.mismatched
    if not pairs:
        return []
    calls: dict[str, set[int]] = {}
    for pair in pairs:
        calls.setdefault(pair.call, set()).add(pair.rank)
        calls.setdefault(pair.other_call, set()).add(pair.other)
    said = "; ".join(f"{who(ranks)} {verb(tuple(ranks), 'is', 'are')} in {call}" for call, ranks in calls.items())
    ranks = tuple(sorted({r for s in calls.values() for r in s}))
    lines = [
        ((r,), "raised it", user_frame(e.frames)) for r in ranks if r in whole.ranks and (e := whole.ranks[r].end) and e.frames
    ]
    details = ["torch compared these two; which of them is meant, their lines tell, not this text"]
    return [Cause("clash", "proved", f"torch found calls that do not fit: {said}", (), ranks, lines, details)]


def messages(whole: Standing) -> list[Cause]:
    """A send and a receive that met and differ."""
    pair = message_clash(whole)
    if pair is None:
        return []
    a, b = pair
    sizes = f"{max(a.elements_in, 0):,} {a.dtype} against {max(b.elements_out, b.elements_in, 0):,} {b.dtype}"
    lines = [((c.rank,), call_text(whole.evidence, c), user_frame(c.frames)) for c in (a, b)]
    return [Cause("clash", "proved", f"a send of rank {a.rank} and its receive on rank {b.rank} differ: {sizes}", (), (a.rank, b.rank),
                  lines, group=a.group)]  # fmt: skip
