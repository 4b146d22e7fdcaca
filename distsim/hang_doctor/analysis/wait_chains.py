"""Who waits for whom, to its end: circles, and those who are waited for and wait for nobody."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from distsim.hang_doctor.analysis.causes import CauseLine, HangCause
from distsim.hang_doctor.analysis.wait_graph import EvidenceWait, JobWaitState, RankWaitState
from distsim.hang_doctor.model.evidence_records import CauseGrade
from distsim.hang_doctor.model.phrases import (
    call_text,
    may_hide_a_wait,
    ranks_text,
    source_line,
    verb_form,
)

#: Messages that wait for one rank, each shown with its line.
_MAX_LINES = 8

# --- circles ---


def wait_edges(whole: JobWaitState, doubtful: bool = True) -> dict[int, dict[int, EvidenceWait]]:
    """Rank -> rank it waits for, as the records prove it, or else, where they are asked for, as
    they make it likely.
    """
    found: dict[int, dict[int, EvidenceWait]] = {}
    for rank, stand in whole.ranks.items():
        if stand.waits:
            waits = sorted(
                stand.waits, key=lambda w: not w.doubtful
            )  # what is proved comes last, and stays
            found[rank] = {m: w for w in waits if doubtful or not w.doubtful for m in w.missing}
    return found


def _grade_of_waits(
    waits: Iterable[EvidenceWait], culprits: tuple[int, ...]
) -> tuple[CauseGrade, tuple[int, ...]]:
    """What waits prove, and of whom: nothing where one of them is doubtful."""
    return ("suspected", ()) if any(w.doubtful for w in waits) else ("proved", culprits)


def wait_cycles(whole: JobWaitState) -> list[HangCause]:
    """Ranks that wait for each other in a ring: the shortest one of each knot, of what is proved if
    there is one.
    """
    return _cycles_in(whole, wait_edges(whole, doubtful=False)) or _cycles_in(
        whole, wait_edges(whole)
    )


def _cycles_in(whole: JobWaitState, graph: dict[int, dict[int, EvidenceWait]]) -> list[HangCause]:
    rings: list[list[int]] = []
    for start in sorted(graph):
        if any(start in ring for ring in rings):
            continue
        ring = _shortest_cycle(graph, start)
        if ring:
            rings.append(ring)
    pairs = _cycles_sharing_one_rank(graph, rings)
    if pairs is not None:
        return [_one_against_many(whole, graph, *pairs)]
    return (
        [_cycle_cause(whole, graph, ring) for ring in rings]
        or _cycle_through_unknown_group(whole, graph)
        or _all_in_same_direction(whole)
    )


def _cycle_through_unknown_group(
    whole: JobWaitState, graph: dict[int, dict[int, EvidenceWait]]
) -> list[HangCause]:
    """A rank in a call of a group whose members nobody named, while all others wait for it: whoever
    they are, it is a circle.
    """
    everybody = set(whole.ranks)
    if len(everybody) < max(whole.evidence.world, 2):
        return []
    for rank, stand in whole.ranks.items():
        wait = next(
            (w for w in stand.waits if w.open_ended and w.call.number >= 0 and not w.call.p2p), None
        )
        if (
            wait is None
            or not whole.evidence.groups[wait.call.group].sure
            or whole.evidence.groups[wait.call.group].members is not None
        ):
            continue
        others = sorted(everybody - {rank})
        theirs = [graph[o][rank] for o in others if rank in graph.get(o, {})]
        if len(theirs) < len(others):
            continue
        title = (
            f"rank {rank} is in {call_text(whole.evidence, wait.call)}, and all whom it may wait for there wait for it in "
            f"{call_text(whole.evidence, theirs[0].call)}: a circle, of groups entered in different orders"
        )
        lines: list[CauseLine] = [((rank,), call_text(whole.evidence, wait.call), wait.frame)]
        lines.append((tuple(others), call_text(whole.evidence, theirs[0].call), theirs[0].frame))
        return [
            HangCause(
                "circle",
                "proved",
                title,
                (),
                (rank, *others),
                lines,
                ["the dumps do not name the members of that group"],
            )
        ]
    return []


def _cycles_sharing_one_rank(
    graph: dict[int, dict[int, EvidenceWait]], rings: list[list[int]]
) -> tuple[int, list[int]] | None:
    """Circles of two that share one rank, the others all in the same call: then it is one against
    the many.
    """
    common = (
        set.intersection(*(set(r) for r in rings))
        if len(rings) > 1 and all(len(r) == 2 for r in rings)
        else set()
    )
    if len(common) != 1:
        return None
    one = common.pop()
    many = sorted(r for ring in rings for r in ring if r != one)
    first = graph[many[0]][one]
    same = all(
        same_call(graph[r][one], first) and graph[r][one].call.op == first.call.op for r in many
    )
    return (one, many) if same else None


def _one_against_many(
    whole: JobWaitState, graph: dict[int, dict[int, EvidenceWait]], one: int, many: list[int]
) -> HangCause:
    mine, theirs = graph[one][many[0]], graph[many[0]][one]
    title = (
        f"rank {one} and {ranks_text(many)} wait for each other: rank {one} is in {call_text(whole.evidence, mine.call)}, the others in "
        f"{call_text(whole.evidence, theirs.call)}"
    )
    lines = [
        ((one,), call_text(whole.evidence, mine.call), mine.frame),
        (tuple(many), call_text(whole.evidence, theirs.call), theirs.frame),
    ]
    ranks = tuple(sorted([one, *many]))
    grade, culprits = _grade_of_waits((mine, theirs), ranks)
    return HangCause("circle", grade, title, culprits, ranks, lines)


def _shortest_cycle(graph: dict[int, dict[int, EvidenceWait]], start: int) -> list[int]:
    """The shortest way from a rank back to itself, by breadth."""
    before: dict[int, int] = {}
    queue = [start]
    for rank in queue:
        for other in sorted(graph.get(rank, {})):
            if other == start:
                way = [rank]
                while way[-1] != start:
                    way.append(before[way[-1]])
                return way[::-1]
            if other in graph and other not in before:
                before[other] = rank
                queue.append(other)
    return []


def _cycle_cause(
    whole: JobWaitState, graph: dict[int, dict[int, EvidenceWait]], ring: list[int]
) -> HangCause:
    steps = [(rank, graph[rank][ring[(i + 1) % len(ring)]]) for i, rank in enumerate(ring)]
    lines = [((rank,), call_text(whole.evidence, wait.call), wait.frame) for rank, wait in steps]
    way = " -> ".join(str(r) for r in [*ring[:12], ring[0]])
    calls = [wait.call for _, wait in steps]
    tags = {c.tag for c in calls if c.tag is not None}
    if (
        len(ring) == 2
        and {c.op for c in calls} == {"send", "recv"}
        and len(tags) == 2
        and all(c.tag is not None for c in calls)
    ):
        a, b = calls
        text = f"a send and a receive do not meet: {a.op} of rank {a.rank} has tag {a.tag}, {b.op} of rank {b.rank} tag {b.tag}"
        return HangCause("tags", "proved", text, (), tuple(ring), lines)
    if len(ring) == 1:
        return HangCause(
            "circle",
            "proved",
            f"rank {ring[0]} waits for itself, in {call_text(whole.evidence, calls[0])}",
            (ring[0],),
            (ring[0],),
            lines,
        )
    if all(c.p2p for c in calls):
        what = "each is in a message that meets another only later"
    elif any(c.p2p for c in calls):
        what = "messages and collectives come in different orders"
    else:
        what = (
            "they enter calls of several groups in different orders"
            if len({c.group for c in calls}) > 1
            else "their calls cross"
        )
    grade, culprits = _grade_of_waits((wait for _, wait in steps), tuple(sorted(ring)))
    return HangCause(
        "circle",
        grade,
        f"{ranks_text(ring)} wait for each other in a circle ({way}): {what}",
        culprits,
        tuple(sorted(ring)),
        lines,
    )


def _all_in_same_direction(whole: JobWaitState) -> list[HangCause]:
    """Stacks without locals do not name the peer; where all are in receives, none can send."""
    stands = list(whole.ranks.values())
    kinds = {w.call.op for s in stands for w in s.waits}
    complete = len(stands) >= max(whole.evidence.world, 2) and all(s.waits for s in stands)
    if not complete or kinds not in ({"recv"}, {"send"}):
        return []
    op = kinds.pop()
    ranks = tuple(sorted(whole.ranks))
    lines = [((s.rank,), op, s.frame) for s in stands]
    text = f"every rank is in a {op}, so nobody {'sends' if op == 'recv' else 'receives'}"
    return [HangCause("circle", "proved", text, ranks, ranks, lines[:8])]


# --- behind ---


def ranks_behind(whole: JobWaitState) -> list[HangCause]:
    """Who is waited for and waits for nobody: at the end of all chains."""
    graph = wait_edges(whole)
    awaited: dict[int, EvidenceWait] = {}
    for rank in sorted(graph):
        for other, wait in graph[rank].items():
            if (
                other not in graph
                and other in whole.ranks
                and (other not in awaited or awaited[other].doubtful)
            ):
                awaited[other] = wait
    if not awaited:
        return []
    by_call: dict[tuple[str, int, int | None], list[int]] = {}
    for rank, wait in awaited.items():
        call = wait.call
        by_call.setdefault(
            ("", 0, call.peer) if call.p2p else (call.group, call.number, None), []
        ).append(rank)
    causes = [_behind_cause(whole, ranks, awaited[ranks[0]]) for ranks in by_call.values()]
    return sorted(causes, key=lambda c: (not c.culprits, len(c.ranks), c.ranks))


def _behind_cause(whole: JobWaitState, ranks: list[int], wait: EvidenceWait) -> HangCause:
    """Ranks that have not come to a call which others are in."""
    call, evidence = wait.call, whole.evidence
    waits = [w for s in whole.ranks.values() for w in s.waits if _waits_for_same(w, wait, ranks)]
    inside = tuple(dict.fromkeys(w.rank for w in waits))
    text = call_text(evidence, call)
    stands = [whole.ranks[r] for r in ranks]
    numbers = {r: whole.last(r, call.group) for r in ranks}
    last = next(iter(numbers.values())) if len(set(numbers.values())) == 1 else None
    at = f", at call {last}" if last is not None and call.number >= 0 else ""
    are = verb_form(ranks, "is", "are")
    title = f"{ranks_text(ranks)} {are} behind{at}: {ranks_text(inside)} {verb_form(inside, 'waits', 'wait')} for {verb_form(ranks, 'it', 'them')} in {text}"
    if call.p2p:
        others = [r for r in inside if r != wait.rank]
        more = (
            f", and {ranks_text(others)} {verb_form(others, 'waits', 'wait')} for a message of {verb_form(ranks, 'it', 'them')} too"
            if others
            else ""
        )
        title = f"{ranks_text(ranks)} {verb_form(ranks, 'does', 'do')} not answer: rank {wait.rank} is in {text}{more}"
    certain = all(_is_end_of_chain(whole, s) for s in stands)
    minor = len(ranks) * 2 < len(ranks) + len(inside)
    shown_by_stack = all(s.place is not None and s.place.frame is not None for s in stands)
    culprits = (
        tuple(ranks)
        if certain and (minor or (shown_by_stack and len(ranks) <= len(inside)))
        else ()
    )
    lines: list[CauseLine] = [
        ((s.rank,), activity_text(s), s.told) for s in stands if s.told is not None
    ]
    if call.p2p:
        lines += [((w.rank,), call_text(evidence, w.call), w.frame) for w in waits[:_MAX_LINES]]
    else:
        lines.append((inside or (wait.rank,), call.op or "waits", wait.frame))
    details = list(_explanations(whole, stands, culprits, minor))
    grade, culprits = _grade_of_waits(waits, culprits)
    return HangCause(
        "behind", grade, title, culprits, tuple(ranks), lines, details, call.group, call.number
    )


def _waits_for_same(one: EvidenceWait, other: EvidenceWait, ranks: list[int]) -> bool:
    """Does one wait for these ranks as the other does: in the same call, or in any message?"""
    return same_call(one, other) or (
        one.call.p2p and other.call.p2p and one.call.peer in ranks and one.call.peer in one.missing
    )


def same_call(one: EvidenceWait, other: EvidenceWait) -> bool:
    if one.call.p2p or other.call.p2p:
        return one is other
    return (one.call.group, one.call.number) == (other.call.group, other.call.number)


def _is_end_of_chain(whole: JobWaitState, stand: RankWaitState) -> bool:
    """Is it the end of the chain, and not itself in a wait that nothing recorded?"""
    given = whole.evidence.ranks[stand.rank]
    if stand.rank in whole.evidence.disputed:
        return False
    if stand.end is not None:
        return not (stand.end.follows or stand.end.unexplained)
    if stand.place is not None and stand.place.frame is not None:
        return given.messages or not may_hide_a_wait(stand.place.frame)
    return given.messages or (not given.recorded and bool(given.status))


def activity_text(stand: RankWaitState) -> str:
    if stand.end is not None:
        return stand.end.text
    if stand.place is None:
        return "its last known line"
    return "waits for its device" if stand.place.op == "synchronize" else "host code"


def _explanations(
    whole: JobWaitState, stands: list[RankWaitState], culprits: tuple[int, ...], minor: bool
) -> Iterator[str]:
    """What keeps them, as far as it is known."""
    for stand in stands[:4]:
        text = source_line(stand.frame)
        shown = f": {text}" if text else ""
        if stand.end is not None and stand.end.clean:
            yield f"rank {stand.rank} came to the end of its program: it makes a call fewer, or the others make one more"
        elif stand.place is None:
            yield f"rank {stand.rank}'s record says that it has not come there; what keeps it is not in what I was given: take its stack"
        elif stand.place.op == "synchronize":
            yield f"rank {stand.rank} waits for its device{shown}; the kernel before it is slow or hangs"
        elif may_hide_a_wait(stand.place.frame) and not whole.evidence.ranks[stand.rank].messages:
            yield f"rank {stand.rank} is in host code, or in a wait that neither its stack nor its recording shows{shown}"
        else:
            yield f"rank {stand.rank} is in host code, in no communication: it is the code there that hangs or takes its time{shown}"
    if not culprits and not minor:
        yield "as many ranks are behind as wait: they may leave out a call, or the others make one too many; I cannot tell which"
