"""Why nothing moves: every kind of cause, each with its grade, the lines, and those whom the
records prove it of.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from distsim.hang_doctor.analysis.divergence import (
    RankDivergence,
    RecordedMismatch,
    first_mismatch,
    mismatched_message,
    rank_divergences,
)
from distsim.hang_doctor.analysis.wait_graph import JobWaitState
from distsim.hang_doctor.model.evidence_records import (
    CauseGrade,
    EvidenceCall,
    ProcessEnd,
    StackFrame,
)
from distsim.hang_doctor.model.phrases import call_text, ranks_text, verb_form
from distsim.hang_doctor.readers.stacks import is_library_file, user_frame

#: Ranks, what they do, and where.
CauseLine = tuple[tuple[int, ...], str, StackFrame | None]


@dataclass
class HangCause:
    """``culprits``: of whom the records prove it. ``ranks``: whom it concerns. ``lines``: (ranks,
    what, frame).
    """

    kind: str
    grade: CauseGrade
    title: str
    culprits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    lines: Sequence[CauseLine] = ()
    details: list[str] = field(default_factory=list)
    group: str = ""
    number: int = -1
    of_library: bool = False


# --- a crash before the hang ---


def crash_causes(whole: JobWaitState) -> list[HangCause]:
    """Ranks whose process failed of itself; the others wait for it, or lost their connection to
    it.
    """
    awaited = {m for s in whole.ranks.values() for w in s.waits for m in w.missing}
    found = []
    for rank, stand in whole.ranks.items():
        end = stand.end
        if end is None or end.follows or end.clean:
            continue
        if end.unexplained:
            found += [] if stand.waits else [_unexplained_end_cause(rank, end)]
        elif stand.waits and rank not in awaited:
            found.append(_caught_error_cause(rank, end))
        else:
            found.append(_crash_cause(whole, rank, end))
    return _merge_crashes(whole, found)


def _crash_cause(whole: JobWaitState, rank: int, end: ProcessEnd) -> HangCause:
    title = f"rank {rank} {_end_text(end)} before the others hung"
    waiting = tuple(
        r
        for r, s in whole.ranks.items()
        if r != rank and (s.waits or (s.end is not None and s.end.follows))
    )
    details = (
        [
            f"{ranks_text(waiting)} {verb_form(waiting, 'waits', 'wait')} for it, or lost the connection to it"
        ]
        if waiting
        else []
    )
    of_library = bool(end.frames) and is_library_file(end.frames[0].file)
    return HangCause(
        "crash",
        "proved",
        title,
        (rank,),
        (rank,),
        _crash_lines(rank, end),
        details,
        of_library=of_library,
    )


def _crash_lines(rank: int, end: ProcessEnd) -> list[CauseLine]:
    frame = user_frame(end.frames)
    return (
        [((rank,), end.text.split(":")[0] if end.kind == "raised" else end.text, frame)]
        if frame
        else []
    )


def _caught_error_cause(rank: int, end: ProcessEnd) -> HangCause:
    """An error that was caught: the rank is in a call, and nobody waits for it."""
    title = (
        f"rank {rank} {_end_text(end)}, and is in a call all the same, where nobody waits for it"
    )
    details = [
        "the error was caught, or is of another thread: it need not have to do with the hang"
    ]
    return HangCause("crash", "suspected", title, (), (rank,), _crash_lines(rank, end), details)


def _unexplained_end_cause(rank: int, end: ProcessEnd) -> HangCause:
    """A launcher says that a process ended first. A call that ran out of time ends a process as
    well.
    """
    details = [
        f"why, only the log of rank {rank} tells: an error of its own, or a call that ran out of time because another was missing"
    ]
    return HangCause(
        "crash", "suspected", f"rank {rank} {_end_text(end)}", (), (rank,), (), details
    )


def _end_text(end: ProcessEnd) -> str:
    if end.kind == "killed":
        return f"was killed ({end.text})"
    return end.text if end.text.startswith("ended") else f"raised {end.text}"


def _merge_crashes(whole: JobWaitState, found: list[HangCause]) -> list[HangCause]:
    """Of several crashes no order is known, unless a launcher saw one first: then all are one
    cause, of those that failed alike.
    """
    proved = [c for c in found if c.grade == "proved"]
    rest = [c for c in found if c.grade != "proved"]
    seen_first = [c for c in proved if any(e.at for e in whole.evidence.ranks[c.ranks[0]].ends)]
    if len(proved) <= 1 or len(seen_first) == 1:
        return [*seen_first, *(c for c in proved if c not in seen_first), *rest]
    ranks = tuple(sorted(r for c in proved for r in c.ranks))
    lines = [line for c in proved for line in c.lines]
    texts = {c.title.split(" ", 2)[2] for c in proved}
    if len(texts) == 1:
        return [
            HangCause("crash", "proved", f"{ranks_text(ranks)} {texts.pop()}", ranks, ranks, lines),
            *rest,
        ]
    said = "; ".join(c.title.removesuffix(" before the others hung") for c in proved[:4])
    details = [
        "which of them failed first, and whether another followed from it, nothing here tells: compare the times of their logs"
    ]
    return [
        HangCause(
            "crash",
            "proved",
            f"{ranks_text(ranks)} failed, each in its own way: {said}",
            (),
            ranks,
            lines,
            details,
        ),
        *rest,
    ]


# --- calls that do not fit ---


def divergence_causes(whole: JobWaitState) -> list[HangCause]:
    """Ranks that make a call too many or too few, told by the lines of their calls."""
    found = []
    for group in whole.evidence.groups:
        if not whole.evidence.groups[group].sure:
            continue
        waiting = {r for r, s in whole.ranks.items() for w in s.waits if w.call.group == group}
        shifts = (
            rank_divergences(whole, group)
            if waiting or any(s.end for s in whole.ranks.values())
            else []
        )
        several = len({p.rank for p in shifts}) > 1
        known = [
            r
            for r in whole.members(group)
            if any(c.group == group for c in _calls_of_rank(whole, r))
        ]
        shown = shifts[:1] if several and len(known) == 2 else shifts
        found += [
            _divergence_cause(whole, parting, len(known) > 2 and not several) for parting in shown
        ]
    return found


def _calls_of_rank(whole: JobWaitState, rank: int) -> list[EvidenceCall]:
    given = whole.evidence.ranks.get(rank)
    return given.calls if given else []


def _divergence_cause(whole: JobWaitState, parting: RankDivergence, proved: bool) -> HangCause:
    rank, call = parting.rank, parting.call
    count = f"{parting.calls} calls" if parting.calls > 1 else "the call"
    frame = user_frame(call.frames)
    where = f"{call.op} at {frame.place}" if frame else call.op
    does = (
        f"makes {count} that the others do not make"
        if parting.extra
        else f"leaves out {count} that the others make"
    )
    group = whole.evidence.groups[parting.group].shown
    title = f"rank {rank} {does}: {where} (call {parting.number} of {group})"
    who_makes = (
        (rank,)
        if parting.extra
        else tuple(r for r in whole.members(parting.group) if r != rank and r in whole.ranks)
    )
    if not proved:
        maker, other = (
            (rank, _rank_without_divergence(whole, parting))
            if parting.extra
            else (_rank_without_divergence(whole, parting), rank)
        )
        title = (
            f"{ranks_text((maker, other))} part at call {parting.number} of {group}: rank {maker} makes {where}, "
            f"rank {other} does not"
        )
    details = [
        f"from there on its calls on {group} meet the others' {'previous' if parting.extra else 'next'} ones"
    ]
    if not proved:
        details = [
            "of these two I cannot tell which is meant: it makes a call too many, or the other one too few"
        ]
    lines = [(who_makes, call.op, frame)]
    stand = whole.ranks.get(rank)
    if stand is not None and stand.frame is not None and not parting.extra:
        lines.append(((rank,), "stands", stand.frame))
    ranks = (rank,) if proved else tuple(sorted((rank, _rank_without_divergence(whole, parting))))
    return HangCause(
        "parted",
        "proved",
        title,
        (rank,) if proved else (),
        ranks,
        lines,
        details,
        parting.group,
        parting.number,
    )


def _rank_without_divergence(whole: JobWaitState, parting: RankDivergence) -> int:
    """A rank that goes the other way."""
    makers = [r for r in whole.members(parting.group) if r != parting.rank and r in whole.ranks]
    return makers[0] if makers else parting.rank


def mismatch_causes(whole: JobWaitState, parted_: list[HangCause]) -> list[HangCause]:
    """Calls of one number that do not fit, on groups on which somebody waits or failed."""
    found = []
    for group, known in whole.evidence.groups.items():
        clash = first_mismatch(whole, group)
        if clash is None or not _is_harmful(whole, clash):
            continue
        shift = next((c for c in parted_ if c.group == group and c.number <= clash.number), None)
        cause = _mismatch_cause(whole, clash, known.sure)
        if shift is not None:
            cause.title, cause.culprits, cause.lines = (
                shift.title,
                shift.culprits,
                [*shift.lines, *cause.lines],
            )
            cause.details = [*shift.details, *cause.details]
        found.append(cause)
    return found


def _is_harmful(whole: JobWaitState, clash: RecordedMismatch) -> bool:
    """Not a difference that did no harm: all of the calls done, and nobody stuck on the group from
    there on.
    """
    calls = [p.call for p in clash.parties]
    stuck = any(
        w.call.group == clash.group and w.call.number >= clash.number
        for s in whole.ranks.values()
        for w in s.waits
    )
    failed = any(s.end is not None for s in whole.ranks.values())
    if clash.what != "kind" and all(c.state == "done" for c in calls):
        return False
    return stuck or failed or any(c.state == "waiting" for c in calls)


def _mismatch_cause(whole: JobWaitState, clash: RecordedMismatch, sure: bool) -> HangCause:
    parties = clash.parties
    group = whole.evidence.groups[clash.group].shown
    said = "; ".join(
        f"{ranks_text(p.ranks)} {verb_form(p.ranks, 'has', 'have')} {p.text}" for p in parties
    )
    word = {"kind": "different operations", "size": "different sizes", "dtype": "different dtypes"}[
        clash.what
    ]
    title = f"{word} meet in call {clash.number} of {group}: {said}"
    lines = [
        (
            p.ranks,
            p.call.op if clash.what == "kind" else f"{p.call.op} of {p.text}",
            user_frame(p.call.frames),
        )
        for p in parties
    ]
    details = []
    culprits = clash.odd if sure else ()
    if not culprits and sure:
        details.append("neither is clearly the odd one: I cannot tell which is meant")
    if not sure:
        details.append(
            "the lines do not name the group by what is equal in all processes: these may be two groups"
        )
    return HangCause(
        "clash",
        "proved" if sure else "suspected",
        title,
        culprits,
        tuple(sorted(r for p in parties for r in p.ranks)),
        lines,
        details,
        clash.group,
        clash.number,
    )


def mismatch_reported_by_torch(whole: JobWaitState) -> list[HangCause]:
    """What torch found itself under TORCH_DISTRIBUTED_DEBUG=DETAIL. It compares with one rank, so
    who is odd is open.
    """
    pairs = whole.evidence.mismatched
    if not pairs:
        return []
    calls: dict[str, set[int]] = {}
    for pair in pairs:
        calls.setdefault(pair.call, set()).add(pair.rank)
        calls.setdefault(pair.other_call, set()).add(pair.other)
    said = "; ".join(
        f"{ranks_text(ranks)} {verb_form(tuple(ranks), 'is', 'are')} in {call}"
        for call, ranks in calls.items()
    )
    ranks = tuple(sorted({r for s in calls.values() for r in s}))
    lines = [
        ((r,), "raised it", user_frame(e.frames))
        for r in ranks
        if r in whole.ranks and (e := whole.ranks[r].end) and e.frames
    ]
    details = ["torch compared these two; which of them is meant, their lines tell, not this text"]
    return [
        HangCause(
            "clash",
            "proved",
            f"torch found calls that do not fit: {said}",
            (),
            ranks,
            lines,
            details,
        )
    ]


def message_mismatch_causes(whole: JobWaitState) -> list[HangCause]:
    """A send and a receive that met and differ."""
    pair = mismatched_message(whole)
    if pair is None:
        return []
    a, b = pair
    sizes = f"{max(a.elements_in, 0):,} {a.dtype} against {max(b.elements_out, b.elements_in, 0):,} {b.dtype}"
    lines = [((c.rank,), call_text(whole.evidence, c), user_frame(c.frames)) for c in (a, b)]
    return [
        HangCause(
            "clash",
            "proved",
            f"a send of rank {a.rank} and its receive on rank {b.rank} differ: {sizes}",
            (),
            (a.rank, b.rank),
            lines,
            group=a.group,
        )
    ]
