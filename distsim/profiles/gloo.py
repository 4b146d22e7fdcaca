"""Gloo as torch 2.13 uses it. The tags (G1 …) are the rules of the evidence gathered on it, case by case."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache

from distsim.ops.base import Binding, Route
from distsim.ops.bindings import root_alone
from distsim.ops.exchange import Exchange
from distsim.ops.records import DTYPE_BYTES, Call, part_sizes
from distsim.ops.table import OPS
from distsim.profiles.gloo_rings import RINGS, Ends, Share, ring_ends
from distsim.profiles.record import (
    COMPLEX,
    FLOATS,
    INTEGERS,
    Awaited,
    Meeting,
    Mishap,
    Options,
    Parties,
    Profile,
    Reaction,
    Support,
    Workers,
    never,
    reduced_by,
    torch_layer,
)
from distsim.schedules import binomial_kin, binomial_parent

#: Run on torch 2.13, each cell. A mean of integers is refused only after the sum was taken.
SUPPORT = Support(
    "gloo",
    cpu="yes",
    gpu="yes",
    messages=frozenset(DTYPE_BYTES),
    moved=FLOATS | INTEGERS | COMPLEX | {"bool"},
    reduced=reduced_by(FLOATS | INTEGERS | {"bool"}, FLOATS, INTEGERS | {"bool"}, COMPLEX),
    dtype_text="Invalid scalar type",
    reduce_text={"": "Cannot use ReduceOp.{op} with non-integral dtype",
                 "avg": "result type Float can't be cast to the desired output type {type}"},
)  # fmt: skip
#: What is underneath the sums, and alone may meet in one slot and end right.
_SUM = "all_reduce"


def refuse(call: Call) -> str | None:
    """What gloo has no word for, and a receive of nothing from any source, whose buffer has no place to begin at (run)."""
    if call.peer is None and OPS[call.op].direction == "recv" and not call.outputs[0].nbytes:
        return "[enforce fail at gloo/transport/tcp/unbound_buffer.cc] offset < this->size. 0 vs 0"
    return SUPPORT.refuse(call)


def slot(op: str) -> Hashable:
    """G5: kinds have slots of their own, so another kind at the same number hangs; rows say what they are underneath. Calls that name
    another root meet, as `apart` says."""
    return _underneath(op)


def apart(calls: Sequence[Call]) -> Mapping[int, Awaited]:
    """Members that name different roots send and receive each by its own: a message goes through where both sides have it (run: whoever
    names a rank that takes itself for the root is through with a gather, a scatter or, after the ring, a reduce). Of a ring to which
    not all bring equally much, those get round whom the segments reach."""
    found = _round(calls) if ring(calls[0].op) else {}
    if found or calls[0].root is None:
        return found
    group = calls[0].group
    everybody = frozenset(group.ranks)
    routes = {call.group_rank: _route(call) for call in calls}
    came: dict[int, tuple[frozenset[int], frozenset[int]]] = {}

    def received(me: int, above: tuple[int, ...] = ()) -> tuple[frozenset[int], frozenset[int]]:
        """(who must have come before a member has all that it receives, from whom it comes never)"""
        if me not in came:
            needed, never = set[int](), set[int]()
            for peer in routes[me].receives:
                needed.add(peer)
                if peer in routes:
                    more, lost = received(peer, (*above, me)) if peer not in (*above, me) else (frozenset[int](), frozenset({me}))
                    needed |= more
                    never |= {peer} if lost or me not in routes[peer].sends else set()
            came[me] = frozenset(needed), frozenset(never)
        return came[me]

    found = {}
    for me, route in routes.items():
        needed, never = received(me)
        deaf = {peer for peer in route.sends if peer in routes and me not in routes[peer].receives}
        in_vain = frozenset(group.ranks[i] for i in (never | deaf) - {me})
        ranks = everybody if route.ring else frozenset(group.ranks[i] for i in (needed | route.sends) - {me})
        found[group.ranks[me]] = Awaited(ranks, in_vain)
    return found


def _route(call: Call) -> Route:
    route, group = _bound(call.op).route, call.group
    assert route is not None
    assert call.root is not None
    return route(call, max(group.group_rank(call.root), 0), call.group_rank)


@cache
def _bound(op: str) -> Binding:
    return SUPPORT.binding(op) or Binding()


def _underneath(op: str) -> str:
    return _bound(op).slot or op


def ring(op: str) -> bool:
    """G15: a rank that has nothing to send passes a ring by (run: all_reduce, reduce, all_gather, reduce_scatter, alone and coalesced;
    broadcast, gather, scatter, all_to_all and messages of nothing do wait)."""
    return _underneath(op) in RINGS


def _ends(calls: Sequence[Call]) -> Ends:
    """What comes of a ring of those who came, in group ranks."""
    group = calls[0].group
    shares = sorted((call.group_rank, _shares(call)) for call in calls)
    return ring_ends(_underneath(calls[0].op), group.size, tuple(shares))


def _shares(call: Call) -> tuple[Share, ...]:
    """A coalesced reduce_scatter goes round once for each part (run: the parts [2, 3] and [3, 2] abort both of two ranks; two plain calls
    of 2 and 3 end right), one of a list once for each rank. Complex numbers travel as pairs of real ones."""
    root = max(call.group.group_rank(call.root), 0) if call.root is not None else -1
    dtype = call.inputs[0].dtype
    item = DTYPE_BYTES[dtype]
    if not _bound(call.op).part_by_part:
        sizes = [call.input_nbytes]
    elif OPS[call.op].coalesces is not None:
        sizes = [part.nbytes for part in call.inputs]
    else:
        sizes = [numel * item for numel in part_sizes(call.inputs, call.group.size)]
    return tuple(Share(nbytes, item // 2 if dtype in COMPLEX else item, root) for nbytes in sizes)


def _round(calls: Sequence[Call]) -> Mapping[int, Awaited]:
    """Nothing where all who come get round once the others are there."""
    ranks, ends = calls[0].group.ranks, _ends(calls)
    everybody = frozenset(ranks)
    found = {call.rank: Awaited(frozenset()) for call in calls if not call.input_nbytes}
    if len(calls) == len(ranks):
        found |= {ranks[me]: Awaited(everybody, frozenset({ranks[peer]})) for me, peer in ends.waits.items()}
    rest = {call.rank: Awaited(everybody) for call in calls}
    return rest | found if found else {}


def needs(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """G6, 2.5: data flow, not a barrier, where a row says so: broadcast all above in a binomial tree and the own children, gather and
    scatter the root all and the others the root. Everything else synchronises fully."""
    needed = _bound(op).needs
    return None if needed is None else needed(n, root, me)


def talks(op: str, n: int, root: int, one: int, other: int) -> bool:
    """Neighbours in a ring, and of a reduce the root with all; the two ends of an edge of a tree; the root and another; those a power of
    two apart in a barrier (barrier.cc, read); any two in all_to_all. Run: four ranks of which 0 and 1 do not hear each other."""
    apart, rooted = (one - other) % n, root in (one, other)
    if _bound(op).needs is root_alone:
        return rooted
    if _bound(op).needs is not None:
        v, w = (one - root) % n, (other - root) % n
        return (v > 0 and binomial_parent(v) == w) or (w > 0 and binomial_parent(w) == v)
    if ring(op):
        return apart in (1, n - 1) or (op == "reduce" and rooted)
    return OPS[op].pairwise or any(gap & (gap - 1) == 0 for gap in (apart, n - apart))


def workers(rank: int, group: int) -> Workers:
    """G7: two worker threads per group, first in first out. Messages have none."""
    return Workers(("workers", rank, group), 2)


def mismatch(meeting: Meeting) -> Mishap:
    """G14 and 2.2. A buffer too small for what comes aborts its process; a larger one keeps its tail; equal bytes of another
    dtype, or another reduce op, go through unseen.

    all_reduce meets reduce_scatter_tensor of the same input: one is the other underneath, and both end right
    (`coll.kind.all_reduce_vs_reduce_scatter`). Parts of an all_to_all are judged one by one, as messages."""
    sizes = meeting.nbytes
    if "root" in meeting.fields:
        return _by_root(meeting)
    if meeting.is_message:
        return Mishap("crashes", (meeting.calls[1].rank,)) if sizes[1] < sizes[0] else Mishap("wrong-data")
    ops = {call.op for call in meeting.calls}
    if all(OPS[op].pairwise for op in ops) and "splits" in meeting.fields:
        return _uneven_parts(meeting)
    if all(map(ring, ops)):
        return _unlike_rings(meeting)
    if len(set(sizes)) == 1:
        return Mishap("wrong-data")
    if all(_bound(op).needs is root_alone for op in ops):
        crash = _beyond_room(meeting)
    elif all(OPS[op].pairwise for op in ops):
        crash = tuple(call.rank for call, nbytes in zip(meeting.calls, sizes, strict=True) if nbytes < max(sizes))
    else:
        crash = _overrun(meeting)
    return Mishap("crashes", crash) if crash else Mishap("wrong-data")


def _beyond_room(meeting: Meeting) -> tuple[int, ...]:
    """Of a gather or a scatter the ranks that are given more than they have room for, by those who are there; the root's partners have
    nothing for each other (run: two takers of a scatter whose root never comes wait, whatever their sizes)."""
    pairs = tuple(zip(meeting.calls, meeting.nbytes, strict=True))
    takes = [(call.rank == call.root) == (OPS[call.op].gets == "root") for call in meeting.calls]
    sent = max((nbytes for (_, nbytes), taker in zip(pairs, takes, strict=True) if not taker), default=0)
    return tuple(call.rank for (call, room), taker in zip(pairs, takes, strict=True) if taker and room < sent)


def _by_root(meeting: Meeting) -> Mishap:
    """Who names the same root is judged apart, but for the ring of a reduce, through which all send. That some wait in vain is told by
    `apart`; where nobody does, a reduce has come out right at its root."""
    fields = tuple(name for name in meeting.fields if name != "root")
    ops, crash = {call.op for call in meeting.calls}, set[int]()
    if fields and any(_bound(op).needs is None for op in ops):
        crash.update(mismatch(meeting._replace(fields=fields)).crash)
    elif fields:
        for root in {call.root for call in meeting.calls}:
            those = [i for i, call in enumerate(meeting.calls) if call.root == root]
            part = Meeting(fields, tuple(meeting.calls[i] for i in those), tuple(meeting.nbytes[i] for i in those), False)
            crash.update(mismatch(part).crash)
    if crash:
        return Mishap("crashes", tuple(sorted(crash)))
    return Mishap("completes" if not fields and all(_bound(op).needs is None for op in ops) else "wrong-data")


def _unlike_rings(meeting: Meeting) -> Mishap:
    """Who is not through is told by `apart`. What adds up the same inputs ends right, whatever it is called."""
    calls, ends = meeting.calls, _ends(meeting.calls)
    if ends.aborts:
        return Mishap("crashes", tuple(call.rank for call in calls if call.group_rank in ends.aborts))
    if len(calls) == calls[0].group.size and ends.waits:
        return Mishap("hangs")
    ops, alike = (
        {call.op for call in calls},
        len({call.input_nbytes for call in calls}) == 1 and set(meeting.fields) <= {"op", "numel"},
    )
    same = alike and all(_underneath(op) == _SUM for op in ops) and (len(ops) > 1 or any(_bound(op).part_by_part for op in ops))
    return Mishap("completes" if same or not any(call.input_nbytes for call in calls) else "wrong-data")


def _overrun(meeting: Meeting) -> tuple[int, ...]:
    """The ranks that are sent more than they have room for down a binomial tree, of those who have come."""
    n = meeting.calls[0].group.size
    sizes = {call.group_rank: nbytes for call, nbytes in zip(meeting.calls, meeting.nbytes, strict=True)}
    crash = []
    for call in meeting.calls:
        me, root = call.group_rank, call.group.group_rank(call.root) if call.root is not None else 0
        if sizes.get((binomial_parent((me - root) % n) + root) % n, 0) > sizes[me]:
            crash.append(call.rank)
    return tuple(crash)


def neighbours(call: Call) -> frozenset[int]:
    """From whom a member receives and to whom it sends: in the ring (`ring_ends`), in the tree (`_overrun`), or as or with the root."""
    n, me, needed = call.group.size, call.group_rank, _bound(call.op).needs
    ring = frozenset({(me - 1) % n, (me + 1) % n})
    if needed is None or call.root is None:
        return ring
    root = max(call.group.group_rank(call.root), 0)
    with_root = frozenset(range(n)) if me == root else frozenset({root})
    return ring | (with_root if needed is root_alone else binomial_kin(n, root, me))


def _uneven_parts(meeting: Meeting) -> Mishap:
    """As with messages: a part larger than the room for it aborts its receiver, a smaller one leaves the tail (G14); both at once, also
    while a third member has not come (run: of three the second was sent 1200 bytes for 16 by the last)."""
    calls = sorted(meeting.calls, key=lambda call: call.group_rank)
    sent = {call.group_rank: [n * DTYPE_BYTES[call.inputs[0].dtype] for n in Exchange.sent(call)] for call in calls}
    room = {call.group_rank: [n * DTYPE_BYTES[call.outputs[0].dtype] for n in Exchange.received(call)] for call in calls}
    crash = tuple(b.rank for b in calls if any(out[b.group_rank] > room[b.group_rank][i] for i, out in sent.items()))
    return Mishap("crashes", crash) if crash else Mishap("wrong-data")


def new_group(call: Call, options: Options) -> Parties:
    """2.3: the members connect to each other, and find each other in the store by the group's name; who is none passes through. The
    name is the rank's own count of new_group calls, so different orders make names collide (`distsim.semantics.creation`). With
    use_local_synchronization it is a hash of the members (`group.members_only_local_sync`)."""
    return "members" if call.local_sync else "named"


def invalid(call: Call, code: str, options: Options) -> Reaction:
    """What gloo does with calls that no program may make.

    A partner outside the world: the pair is sought in the store, until the timeout and 1 s (`p2p.out_of_range.*`; memory that is not
    the world's may also end it by SIGSEGV). In other groups torch's own lookup refuses it. The second wait on a message's request
    hangs (`p2p.irecv_not_waited_poll_is_completed`), on a collective's it returns. A group that was destroyed by itself still takes
    collectives; torch refuses messages on it (run). all_to_all whose parts do not come out even is
    taken: wrong data (2.2, "not refused on Gloo")."""
    if code == "DS101" and call.group.id == 0:
        return "hangs"
    if code == "DS105":
        return "hangs"
    if code == "DS108" and call.group.id and OPS[call.op].kind == "collective" and call.group.group_rank(call.rank) >= 0:
        return "goes on"
    if SUPPORT.overlooks(call, code):
        return "goes on"
    if OPS[call.op].pairwise and call.input_splits is None is call.output_splits:
        uneven = call.inputs and len(call.inputs) == 1 and call.inputs[0].numel % call.group.size != 0
        return "goes on" if uneven and code != "DS104" else torch_layer(call, code, options)
    return torch_layer(call, code, options)


def besides(outcome: str, fields: Sequence[tuple[str, ...]], outside: bool) -> frozenset[str]:
    """Bits that mean the same in both dtypes, as zeros do, arrive unharmed. A partner outside the world: the pair's place in memory is
    not the world's (`p2p.out_of_range.*`: SIGSEGV for 7 of 2)."""
    unharmed = outcome == "wrong-data" and all(differ == ("dtype",) for differ in fields)
    found = {"completes"} if unharmed else set()
    return frozenset(found | {"crashes"} if outcome == "hangs" and outside else found)


GLOO = Profile(
    name="gloo",
    about="Every send is a rendezvous at every size (G1). Tags and any-source are true (G2). Collectives meet by kind and number "
          "on the group (G5) and run on two worker threads per group (G7). A dropped request is cancelled (G4).",
    needs=needs, mismatch=mismatch, refuse=refuse, credit=never, slot=slot, workers=workers, new_group=new_group,
    invalid=invalid, dropped="cancels", peer_death="raises", specific_first=True, timed_out="raises", store_grace_ns=10**9,
    support=SUPPORT, listed=1, besides=besides, apart=apart, neighbours=neighbours, ring=ring, talks=talks,
)  # fmt: skip


def barrier_missed(rank: int, missing: Sequence[int], all_of_them: bool, limit_ns: int) -> str:
    """What rank ``rank``, which keeps the list of a ``monitored_barrier``, raises for who has not come (ProcessGroupGloo.cpp)."""
    who = f"Ranks {', '.join(map(str, missing))}" if all_of_them else f"Rank {missing[0]}"
    return f"[Rank {rank}]: {who} failed to pass monitoredBarrier in {limit_ns // 10**6} ms"
