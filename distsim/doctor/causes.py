"""Why nothing moves: every kind of cause, each with its grade, the lines, and those whom the records prove it of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from distsim.doctor.differ import Clash, Parting, first_clash, line_of, message_clash, partings
from distsim.doctor.records import End, Frame, Grade
from distsim.doctor.standing import Stand, Standing, Wait
from distsim.doctor.stacks import is_library, user_frame
from distsim.doctor.words import call_text, may_hide_a_wait, ranges, source_line, verb, who


@dataclass
class Cause:
    """``culprits``: of whom the records prove it. ``ranks``: whom it concerns. ``lines``: (ranks, what, frame)."""

    kind: str
    grade: Grade
    title: str
    culprits: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    lines: list[tuple[tuple[int, ...], str, Frame | None]] = field(default_factory=list)
    details: list[str] = field(default_factory=list)
    group: str = ""
    number: int = -1
    of_library: bool = False


# --- a crash before the hang ---


def crashes(whole: Standing) -> list[Cause]:
    """Ranks whose process failed of itself; the others wait for it, or lost their connection to it."""
    found = []
    for rank, stand in whole.ranks.items():
        end = stand.end
        if end is None or end.follows or end.clean:
            continue
        frame = user_frame(end.frames)
        title = f"rank {rank} {_ended(end)} before the others hung"
        waiting = tuple(r for r, s in whole.ranks.items() if r != rank and (s.waits or (s.end is not None and s.end.follows)))
        details = [f"{who(waiting)} {verb(waiting, 'waits', 'wait')} for it, or lost the connection to it"] if waiting else []
        lines = [((rank,), end.text.split(":")[0] if end.kind == "raised" else end.text, frame)] if frame else []
        of_library = bool(end.frames) and is_library(end.frames[0].file)
        found.append(Cause("crash", "proved", title, (rank,), (rank,), lines, details, of_library=of_library))
    return _first_crash(found, whole)


def _ended(end: End) -> str:
    if end.kind == "killed":
        return f"was killed ({end.text})"
    return end.text if end.text.startswith("ended") else f"raised {end.text}"


def _first_crash(found: list[Cause], whole: Standing) -> list[Cause]:
    """Of several crashes no order is known, unless times say it: then they are one cause with several ranks."""
    if len(found) <= 1:
        return found
    texts = {c.title.split(" ", 2)[2] for c in found}
    if len(texts) == 1:
        ranks = tuple(sorted(r for c in found for r in c.ranks))
        return [Cause("crash", "proved", f"{who(ranks)} {texts.pop()}", ranks, ranks, [line for c in found for line in c.lines])]
    return found


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
        for parting in shifts[:1] if several and len(known) == 2 else shifts:
            found.append(_parted(whole, parting, len(known) > 2 and not several))
    return found


def _calls(whole: Standing, rank: int) -> Iterable[object]:
    given = whole.evidence.ranks.get(rank)
    return [c for c in given.calls] if given else []


def _parted(whole: Standing, parting: Parting, proved: bool) -> Cause:
    rank, call = parting.rank, parting.call
    count = f"{parting.count} calls" if parting.count > 1 else "the call"
    frame = user_frame(call.frames)
    where = f"{call.op} at {frame.place}" if frame else call.op
    does = f"makes {count} that the others do not make" if parting.extra else f"leaves out {count} that the others make"
    group = whole.evidence.groups[parting.group].shown
    title = f"rank {rank} {does}: {where} (call {parting.number} of {group})"
    who_makes = (rank,) if parting.extra else tuple(r for r in whole.members(parting.group) if r != rank and r in whole.ranks)
    details = [f"from there on its calls on {group} meet the others' {'previous' if parting.extra else 'next'} ones"]
    if not proved:
        details.append("with two ranks I cannot tell which of them is meant to make it")
    lines = [(who_makes, call.op, frame)]
    stand = whole.ranks.get(rank)
    if stand is not None and stand.frame is not None and not parting.extra:
        lines.append(((rank,), "stands", stand.frame))
    return Cause("parted", "proved", title, (rank,) if proved else (), (rank,), lines, details, parting.group, parting.number)


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
    lines = [(p.ranks, p.call.op if clash.what == "kind" else f"{p.call.op} of {p.text}", user_frame(p.call.frames)) for p in parties]
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
    lines = [((r,), "raised it", user_frame(e.frames)) for r in ranks if r in whole.ranks and (e := whole.ranks[r].end) and e.frames]
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


# --- circles ---


def edges(whole: Standing) -> dict[int, dict[int, Wait]]:
    """Rank -> rank it waits for, as the records prove it."""
    return {rank: {m: w for w in stand.waits for m in w.missing} for rank, stand in whole.ranks.items() if stand.waits}


def circles(whole: Standing) -> list[Cause]:
    """Ranks that wait for each other in a ring: the shortest one of each knot."""
    graph = edges(whole)
    rings: list[list[int]] = []
    for start in sorted(graph):
        if any(start in ring for ring in rings):
            continue
        ring = _ring(graph, start)
        if ring:
            rings.append(ring)
    pairs = _pairs_of_one(graph, rings)
    if pairs is not None:
        return [_two_camps(whole, graph, *pairs)]
    return [_circle(whole, graph, ring) for ring in rings] or _all_receive(whole)


def _pairs_of_one(graph: dict[int, dict[int, Wait]], rings: list[list[int]]) -> tuple[int, list[int]] | None:
    """Circles of two that share one rank, the others all in the same call: then it is one against the many."""
    common = set.intersection(*(set(r) for r in rings)) if len(rings) > 1 and all(len(r) == 2 for r in rings) else set()
    if len(common) != 1:
        return None
    one = common.pop()
    many = sorted(r for ring in rings for r in ring if r != one)
    first = graph[many[0]][one]
    same = all(_same(graph[r][one], first) and graph[r][one].call.op == first.call.op for r in many)
    return (one, many) if same else None


def _two_camps(whole: Standing, graph: dict[int, dict[int, Wait]], one: int, many: list[int]) -> Cause:
    mine, theirs = graph[one][many[0]], graph[many[0]][one]
    title = f"rank {one} and {who(many)} wait for each other: rank {one} is in {call_text(whole.evidence, mine.call)}, the others in " \
            f"{call_text(whole.evidence, theirs.call)}"  # fmt: skip
    lines = [((one,), call_text(whole.evidence, mine.call), mine.frame), (tuple(many), call_text(whole.evidence, theirs.call), theirs.frame)]
    ranks = tuple(sorted([one, *many]))
    return Cause("circle", "proved", title, ranks, ranks, lines)


def _ring(graph: dict[int, dict[int, Wait]], start: int) -> list[int]:
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


def _circle(whole: Standing, graph: dict[int, dict[int, Wait]], ring: list[int]) -> Cause:
    steps = [(rank, graph[rank][ring[(i + 1) % len(ring)]]) for i, rank in enumerate(ring)]
    lines = [((rank,), call_text(whole.evidence, wait.call), wait.frame) for rank, wait in steps]
    way = " -> ".join(str(r) for r in [*ring[:12], ring[0]])
    calls = [wait.call for _, wait in steps]
    tags = {c.tag for c in calls if c.tag is not None}
    if len(ring) == 2 and {c.op for c in calls} == {"send", "recv"} and len(tags) == 2 and all(c.tag is not None for c in calls):
        a, b = calls
        text = f"a send and a receive do not meet: {a.op} of rank {a.rank} has tag {a.tag}, {b.op} of rank {b.rank} tag {b.tag}"
        return Cause("tags", "proved", text, (), tuple(ring), lines)
    if all(c.p2p for c in calls):
        what = "each is in a message that meets another only later"
    elif any(c.p2p for c in calls):
        what = "messages and collectives come in different orders"
    else:
        what = "they enter calls of several groups in different orders" if len({c.group for c in calls}) > 1 else "their calls cross"
    return Cause("circle", "proved", f"{who(ring)} wait for each other in a circle ({way}): {what}", tuple(sorted(ring)),
                 tuple(sorted(ring)), lines)  # fmt: skip


def _all_receive(whole: Standing) -> list[Cause]:
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
    return [Cause("circle", "proved", text, ranks, ranks, lines[:8])]


# --- behind ---


def behind(whole: Standing, absent: tuple[int, ...]) -> list[Cause]:
    """Who is waited for and waits for nobody: at the end of all chains."""
    graph = edges(whole)
    awaited: dict[int, Wait] = {}
    for rank in sorted(graph):
        for other, wait in graph[rank].items():
            if other not in graph and other in whole.ranks:
                awaited.setdefault(other, wait)
    if not awaited:
        return []
    by_call: dict[tuple[str, int, int | None], list[int]] = {}
    for rank, wait in awaited.items():
        by_call.setdefault((wait.call.group, wait.call.number, wait.call.peer), []).append(rank)
    causes = [_behind(whole, ranks, awaited[ranks[0]], absent) for ranks in by_call.values()]
    return sorted(causes, key=lambda c: (not c.culprits, len(c.ranks), c.ranks))


def _behind(whole: Standing, ranks: list[int], wait: Wait, absent: tuple[int, ...]) -> Cause:
    """Ranks that have not come to a call which others are in."""
    call, evidence = wait.call, whole.evidence
    inside = tuple(r for r, s in whole.ranks.items() if any(_same(w, wait) for w in s.waits))
    text = call_text(evidence, call)
    stands = [whole.ranks[r] for r in ranks]
    numbers = {r: whole.last(r, call.group) for r in ranks}
    last = next(iter(numbers.values())) if len(set(numbers.values())) == 1 else None
    at = f", at call {last}" if last is not None and call.number >= 0 else ""
    are = verb(ranks, "is", "are")
    title = f"{who(ranks)} {are} behind{at}: {who(inside)} {verb(inside, 'waits', 'wait')} for {verb(ranks, 'it', 'them')} in {text}"
    if call.p2p:
        title = f"{who(ranks)} {verb(ranks, 'does', 'do')} not answer: rank {wait.rank} is in {text}"
    certain = all(_certain(whole, s, absent) for s in stands)
    minor = len(ranks) * 2 < len(ranks) + len(inside)
    shown_by_stack = all(s.place is not None and s.place.frame is not None for s in stands)
    culprits = tuple(ranks) if certain and (minor or (shown_by_stack and len(ranks) <= len(inside))) else ()
    lines = [((s.rank,), _doing(s), s.frame) for s in stands if s.frame is not None]
    lines.append((inside or (wait.rank,), call.op, wait.frame))
    details = list(_why(whole, stands, ranks, culprits, minor))
    return Cause("behind", "proved", title, culprits, tuple(ranks), lines, details, call.group, call.number)


def _same(one: Wait, other: Wait) -> bool:
    if one.call.p2p or other.call.p2p:
        return one is other
    return (one.call.group, one.call.number) == (other.call.group, other.call.number)


def _certain(whole: Standing, stand: Stand, absent: tuple[int, ...]) -> bool:
    """Is it the end of the chain, and not itself in a wait that nothing recorded?"""
    given = whole.evidence.ranks[stand.rank]
    if stand.end is not None:
        return not stand.end.follows
    if stand.place is not None and stand.place.frame is not None:
        return given.messages or not may_hide_a_wait(stand.place.frame)
    return given.messages or (not given.recorded and bool(given.status))


def _doing(stand: Stand) -> str:
    if stand.end is not None:
        return stand.end.text
    if stand.place is None:
        return "its last known line"
    return "waits for its device" if stand.place.op == "synchronize" else "host code"


def _why(whole: Standing, stands: list[Stand], ranks: list[int], culprits: tuple[int, ...], minor: bool) -> Iterator[str]:
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


# --- nobody is behind ---


def passed(whole: Standing) -> list[Cause]:
    """A rank stands in a call which another member has finished: what met there did not belong together, or it left early."""
    found = []
    for rank, stand in whole.ranks.items():
        for wait in stand.waits:
            call = wait.call
            if call.p2p or call.number < 0 or not whole.evidence.groups[call.group].sure:
                continue
            after = tuple(m for m in whole.members(call.group) if m != rank and _finished(whole, m, call.group) >= call.number)
            if not after:
                continue
            title = f"rank {rank} is still in {call_text(whole.evidence, call)}, which {who(after)} {verb(after, 'has', 'have')} finished"
            details = ["a call that needs everybody can't end on one and not on another, unless their calls were other ones (another order, "
                       "size or group), or the connection broke between them; who is wrong, this does not tell"]  # fmt: skip
            lines = [((rank,), call.op or "a call", wait.frame)]
            found.append(Cause("passed", "suspected", title, (), (rank, *after), lines, details, call.group, call.number))
    return found[:4]


def _finished(whole: Standing, rank: int, group: str) -> int:
    """The last call that a rank is known to have finished on a group, -1 unknown."""
    given = whole.evidence.ranks.get(rank)
    if given is None:
        return -1
    status = given.status.get(group)
    done = [c.number for c in given.calls if c.group == group and not c.p2p and c.state == "done"]
    return max([status.completed if status else -1, *done])


def silent(whole: Standing, absent: tuple[int, ...]) -> list[Cause]:
    """All of whom something is known stand in one call; whoever is missing was not given."""
    found: dict[tuple[str, int], list[Wait]] = {}
    for stand in whole.ranks.values():
        for wait in stand.waits:
            found.setdefault((wait.call.group, wait.call.number), []).append(wait)
    causes = []
    for (group, number), waits in found.items():
        unknown = tuple(sorted({r for w in waits for r in w.silent}))
        if group and not whole.evidence.groups[group].sure:
            unknown = ()
        if not unknown:
            continue
        inside = tuple(sorted({w.rank for w in waits}))
        title = f"{who(inside)} {verb(inside, 'waits', 'wait')} in {call_text(whole.evidence, waits[0].call)}; {who(unknown)} " \
                f"{verb(unknown, 'is', 'are')} not in what I was given"  # fmt: skip
        lines = [(inside, waits[0].call.op, waits[0].frame)]
        causes.append(Cause("silent", "unknown", title, (), inside, lines,
                            [f"whether {verb(unknown, 'it is', 'they are')} behind, gone, or only {verb(unknown, 'its', 'their')} files "
                             "are missing, nothing here tells"], group, number))  # fmt: skip
    return sorted(causes, key=lambda c: (c.number, c.group))


def all_there(whole: Standing) -> list[Cause]:
    """Every member is in the call, the calls fit, and it is not done: then it is the communication that hangs."""
    found = []
    for stand in whole.ranks.values():
        for wait in stand.waits:
            group = whole.evidence.groups.get(wait.call.group)
            if wait.missing or wait.silent or wait.open_ended or group is None or group.members is None or not group.sure:
                continue
            inside = tuple(r for r in group.members if any(_same(w, wait) for w in whole.ranks[r].waits))
            if wait.call.p2p or len(inside) < len(group.members):
                continue
            title = f"all {len(inside)} members are in {call_text(whole.evidence, wait.call)}, and their calls fit: the communication itself hangs"
            details = ["no rank is to blame by these records: look at the network, at NCCL's or the driver's errors (NCCL_DEBUG=WARN, dmesg), "
                       "at a device kernel before the call"]  # fmt: skip
            found.append(Cause("communication", "proved", title, (), inside, [(inside, wait.call.op, wait.frame)], details,
                               wait.call.group, wait.call.number))  # fmt: skip
    return found[:1]


def reported(whole: Standing) -> list[Cause]:
    """What other tools concluded, in their name."""
    found = []
    for said in whole.evidence.said:
        if said.tool == "monitored_barrier":
            known = [r for r in said.ranks if r in whole.ranks and whole.ranks[r].waits]
            title = f"{who(said.ranks)} did not come to a monitored_barrier in its time"
            found.append(Cause("behind", "proved", title, () if known else said.ranks, said.ranks, _stands(whole, said.ranks)))
        elif said.ranks:
            detail = "its numbers mix the groups of a job, so I do not take it for proof" if "desync" in said.tool else \
                "it lists the smaller party and counts each communicator by itself: a hint, no proof of who is wrong"  # fmt: skip
            if "does not answer" in said.text or "dead" in said.text:
                detail = "a process that does not answer has ended, is stopped, or its machine is gone: look there first"
            found.append(Cause("reported", "suspected", f"{said.tool} says: {who(said.ranks)} {said.text}", (), said.ranks,
                               _stands(whole, said.ranks), [detail]))  # fmt: skip
    return found[:6]


def _stands(whole: Standing, ranks: Iterable[int]) -> list[tuple[tuple[int, ...], str, Frame | None]]:
    return [((r,), _doing(whole.ranks[r]), whole.ranks[r].frame) for r in ranks if r in whole.ranks and whole.ranks[r].frame is not None]


def by_stack(whole: Standing) -> list[Cause]:
    """Stacks alone: who is in a collective, who is elsewhere. A stack names no group, so this proves little."""
    inside: dict[tuple[str, str], list[int]] = {}
    outside: list[Stand] = []
    for stand in whole.ranks.values():
        if stand.place is None or stand.place.frame is None:
            continue
        if stand.place.op:
            inside.setdefault((stand.place.op, stand.place.frame.place), []).append(stand.rank)
        else:
            outside.append(stand)
    if not inside:
        return []
    lines = [(tuple(ranks), op, whole.ranks[ranks[0]].frame) for (op, _), ranks in sorted(inside.items(), key=lambda kv: -len(kv[1]))]
    lines += [((s.rank,), "host code" if not may_hide_a_wait(s.frame) else "host code, or a wait that a stack does not show", s.frame)
              for s in outside]  # fmt: skip
    counts = sum(len(r) for r in inside.values())
    if outside and len(outside) < counts:
        ranks = tuple(s.rank for s in outside)
        title = f"{counts} ranks are in communication, {who(ranks)} {verb(ranks, 'is', 'are')} not"
        return [Cause("stacks", "suspected", title, (), ranks, lines, ["stacks do not tell groups and call numbers: no proof"])]
    if len(inside) > 1:
        parts = "; ".join(f"{who(r)} in {op} at {at}" for (op, at), r in sorted(inside.items(), key=lambda kv: -len(kv[1])))
        return [Cause("stacks", "suspected", f"ranks stand in different calls: {parts}", (), tuple(whole.ranks), lines,
                      ["if they are of one group, they do not fit; stacks do not tell groups"])]  # fmt: skip
    (op, at), ranks = next(iter(inside.items()))
    return [Cause("stacks", "unknown", f"{who(ranks)} {verb(ranks, 'is', 'are')} in {op} at {at}; nobody I was given is elsewhere", (),
                  tuple(ranks), lines)]  # fmt: skip


__all__ = ["Cause", "all_there", "behind", "by_stack", "circles", "clashes", "crashes", "edges", "line_of", "messages", "parted", "passed",
           "ranges", "reported", "said_mismatch", "silent"]  # fmt: skip
