"""Gloo as torch 2.13 uses it. The tags (G1 …) are the rules of the evidence gathered on it, case by
case.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache

from distsim.backends.gloo_rings import RING_STEPS, RingContribution, RingOutcome, simulate_ring
from distsim.backends.profile import (
    COMPLEX_DTYPES,
    FLOAT_DTYPES,
    INTEGER_DTYPES,
    BackendOptions,
    BackendProfile,
    BackendSupport,
    InvalidCallReaction,
    MemberNeeds,
    MismatchedCalls,
    MismatchOutcome,
    NewGroupParticipants,
    WorkerQueue,
    dtypes_by_reduce_op,
    never_buffered,
    torch_frontend_reaction,
)
from distsim.operations.all_to_all_barrier import AllToAllCollective
from distsim.operations.core.algorithms import binomial_parent, binomial_path_and_children
from distsim.operations.core.backend_bindings import needs_only_root
from distsim.operations.core.operation_base import BackendBinding, MemberRoute
from distsim.operations.core.resolved_call import DTYPE_BYTES, ResolvedCall, part_sizes
from distsim.operations.registry import OPERATIONS

#: Run on torch 2.13, each cell. A mean of integers is refused only after the sum was taken.
SUPPORT = BackendSupport(
    "gloo",
    cpu="yes",
    gpu="yes",
    messages=frozenset(DTYPE_BYTES),
    moved=FLOAT_DTYPES | INTEGER_DTYPES | COMPLEX_DTYPES | {"bool"},
    reduced=dtypes_by_reduce_op(
        FLOAT_DTYPES | INTEGER_DTYPES | {"bool"},
        FLOAT_DTYPES,
        INTEGER_DTYPES | {"bool"},
        COMPLEX_DTYPES,
    ),
    dtype_text="Invalid scalar type",
    reduce_text={
        "": "Cannot use ReduceOp.{op} with non-integral dtype",
        "avg": "result type Float can't be cast to the desired output type {type}",
    },
)
#: What is underneath the sums, and alone may meet in one slot and end right.
_SUM_COLLECTIVE = "all_reduce"


def refuse(call: ResolvedCall) -> str | None:
    """What gloo has no word for, and a receive of nothing from any source, whose buffer has no
    place to begin at (run).
    """
    if call.peer is None and OPERATIONS[call.op].direction == "recv" and not call.outputs[0].nbytes:
        return "[enforce fail at gloo/transport/tcp/unbound_buffer.cc] offset < this->size. 0 vs 0"
    return SUPPORT.refuse(call)


def slot(op: str) -> Hashable:
    """G5: kinds have slots of their own, so another kind at the same number hangs; rows say what
    they are underneath. Calls that name another root meet, as `apart` says."""
    return _implementing_collective(op)


def per_rank_needs(calls: Sequence[ResolvedCall]) -> Mapping[int, MemberNeeds]:
    """Members that name different roots send and receive each by its own: a message goes through
    where both sides have it (run: whoever names a rank that takes itself for the root is through
    with a gather, a scatter or, after the ring, a reduce). Of a ring to which not all bring equally
    much, those get round whom the segments reach."""
    found = _ring_needs(calls) if skips_empty(calls[0].op) else {}
    if found or calls[0].root is None:
        return found
    group = calls[0].group
    everybody = frozenset(group.ranks)
    routes = {call.group_rank: _route_of_call(call) for call in calls}
    came: dict[int, tuple[frozenset[int], frozenset[int]]] = {}

    def received(me: int, above: tuple[int, ...] = ()) -> tuple[frozenset[int], frozenset[int]]:
        """(who must have come before a member has all that it receives, from whom it comes
        never)
        """
        if me not in came:
            needed, never = set[int](), set[int]()
            for peer in routes[me].receives:
                needed.add(peer)
                if peer in routes:
                    more, lost = (
                        received(peer, (*above, me))
                        if peer not in (*above, me)
                        else (frozenset[int](), frozenset({me}))
                    )
                    needed |= more
                    never |= {peer} if lost or me not in routes[peer].sends else set()
            came[me] = frozenset(needed), frozenset(never)
        return came[me]

    found = {}
    for me, route in routes.items():
        needed, never = received(me)
        deaf = {peer for peer in route.sends if peer in routes and me not in routes[peer].receives}
        in_vain = frozenset(group.ranks[i] for i in (never | deaf) - {me})
        ranks = (
            everybody
            if route.ring
            else frozenset(group.ranks[i] for i in (needed | route.sends) - {me})
        )
        found[group.ranks[me]] = MemberNeeds(ranks, in_vain)
    return found


def _route_of_call(call: ResolvedCall) -> MemberRoute:
    route, group = _binding_of(call.op).route, call.group
    assert route is not None
    assert call.root is not None
    return route(call, max(group.group_rank(call.root), 0), call.group_rank)


@cache
def _binding_of(op: str) -> BackendBinding:
    return SUPPORT.binding(op) or BackendBinding()


def _implementing_collective(op: str) -> str:
    return _binding_of(op).slot or op


def skips_empty(op: str) -> bool:
    """G15: a rank that has nothing to send passes a ring by (run: all_reduce, reduce, all_gather,
    reduce_scatter, alone and coalesced; broadcast, gather, scatter, all_to_all and messages of
    nothing do wait)."""
    return _implementing_collective(op) in RING_STEPS


def _ring_outcome_of(calls: Sequence[ResolvedCall]) -> RingOutcome:
    """What comes of a ring of those who came, in group ranks."""
    group = calls[0].group
    shares = sorted((call.group_rank, _ring_contributions(call)) for call in calls)
    return simulate_ring(_implementing_collective(calls[0].op), group.size, tuple(shares))


def _ring_contributions(call: ResolvedCall) -> tuple[RingContribution, ...]:
    """A coalesced reduce_scatter goes round once for each part (run: the parts [2, 3] and [3, 2]
    abort both of two ranks; two plain calls of 2 and 3 end right), one of a list once for each
    rank. Complex numbers travel as pairs of real ones."""
    root = max(call.group.group_rank(call.root), 0) if call.root is not None else -1
    dtype = call.inputs[0].dtype
    item = DTYPE_BYTES[dtype]
    if not _binding_of(call.op).part_by_part:
        sizes = [call.input_nbytes]
    elif OPERATIONS[call.op].coalesces is not None:
        sizes = [part.nbytes for part in call.inputs]
    else:
        sizes = [numel * item for numel in part_sizes(call.inputs, call.group.size)]
    return tuple(
        RingContribution(nbytes, item // 2 if dtype in COMPLEX_DTYPES else item, root)
        for nbytes in sizes
    )


def _ring_needs(calls: Sequence[ResolvedCall]) -> Mapping[int, MemberNeeds]:
    """Nothing where all who come get round once the others are there."""
    ranks, ends = calls[0].group.ranks, _ring_outcome_of(calls)
    everybody = frozenset(ranks)
    found = {call.rank: MemberNeeds(frozenset()) for call in calls if not call.input_nbytes}
    if len(calls) == len(ranks):
        found |= {
            ranks[me]: MemberNeeds(everybody, frozenset({ranks[peer]}))
            for me, peer in ends.waits.items()
        }
    rest = {call.rank: MemberNeeds(everybody) for call in calls}
    return rest | found if found else {}


def needs(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """G6, 2.5: data flow, not a barrier, where a row says so: broadcast all above in a binomial
    tree and the own children, gather and scatter the root all and the others the root. Everything
    else synchronises fully."""
    needed = _binding_of(op).needs
    return None if needed is None else needed(n, root, me)


def has_traffic(op: str, n: int, root: int, one: int, other: int) -> bool:
    """Neighbours in a ring, and of a reduce the root with all; the two ends of an edge of a tree;
    the root and another; those a power of two apart in a barrier (barrier.cc, read); any two in
    all_to_all. Run: four ranks of which 0 and 1 do not hear each other."""
    distance = (one - other) % n
    includes_root = root in (one, other)
    needed = _binding_of(op).needs
    if needed is needs_only_root:
        return includes_root
    if needed is not None:
        first, second = (one - root) % n, (other - root) % n  # positions in the tree
        if first > 0 and binomial_parent(first) == second:
            return True
        return second > 0 and binomial_parent(second) == first
    if skips_empty(op):
        return distance in (1, n - 1) or (op == "reduce" and includes_root)
    if OPERATIONS[op].pairwise:
        return True
    return _is_power_of_two(distance) or _is_power_of_two(n - distance)


def _is_power_of_two(number: int) -> bool:
    """Also true for 0, which is no distance between two ranks."""
    return number & (number - 1) == 0


def workers(rank: int, group: int) -> WorkerQueue:
    """G7: two worker threads per group, first in first out. Messages have none."""
    return WorkerQueue(("workers", rank, group), 2)


def mismatch(meeting: MismatchedCalls) -> MismatchOutcome:
    """G14 and 2.2. A buffer too small for what comes aborts its process; a larger one keeps its
    tail; equal bytes of another dtype, or another reduce op, go through unseen.

    all_reduce meets reduce_scatter_tensor of the same input: one is the other underneath, and both
    end right (`coll.kind.all_reduce_vs_reduce_scatter`). Parts of an all_to_all are judged one by
    one, as messages."""
    sizes = meeting.nbytes
    if "root" in meeting.fields:
        return _outcome_of_different_roots(meeting)
    if meeting.is_message:
        return (
            MismatchOutcome("crashes", (meeting.calls[1].rank,))
            if sizes[1] < sizes[0]
            else MismatchOutcome("wrong-data")
        )
    ops = {call.op for call in meeting.calls}
    if all(OPERATIONS[op].pairwise for op in ops) and "splits" in meeting.fields:
        return _outcome_of_uneven_parts(meeting)
    if all(map(skips_empty, ops)):
        return _outcome_of_different_rings(meeting)
    if len(set(sizes)) == 1:
        return MismatchOutcome("wrong-data")
    if all(_binding_of(op).needs is needs_only_root for op in ops):
        crash = _overflowed_receivers(meeting)
    elif all(OPERATIONS[op].pairwise for op in ops):
        crash = tuple(
            call.rank
            for call, nbytes in zip(meeting.calls, sizes, strict=True)
            if nbytes < max(sizes)
        )
    else:
        crash = _overflowed_tree_children(meeting)
    return MismatchOutcome("crashes", crash) if crash else MismatchOutcome("wrong-data")


def _overflowed_receivers(meeting: MismatchedCalls) -> tuple[int, ...]:
    """Of a gather or a scatter the ranks that are given more than they have room for, by those who
    are there; the root's partners have nothing for each other (run: two takers of a scatter whose
    root never comes wait, whatever their sizes)."""
    room_by_receiver: dict[int, int] = {}
    largest_sent = 0
    for call, nbytes in zip(meeting.calls, meeting.nbytes, strict=True):
        is_root = call.rank == call.root
        only_root_receives = OPERATIONS[call.op].gets == "root"
        if is_root == only_root_receives:
            room_by_receiver[call.rank] = nbytes
        else:
            largest_sent = max(largest_sent, nbytes)
    return tuple(rank for rank, room in room_by_receiver.items() if room < largest_sent)


def _outcome_of_different_roots(meeting: MismatchedCalls) -> MismatchOutcome:
    """Who names the same root is judged apart, but for the ring of a reduce, through which all
    send. That some wait in vain is told by `apart`; where nobody does, a reduce has come out right
    at its root."""
    other_fields = tuple(name for name in meeting.fields if name != "root")
    ops = {call.op for call in meeting.calls}
    if not other_fields:
        # Without `needs` the operation is a ring, through which every rank sends to every other.
        are_rings = all(_binding_of(op).needs is None for op in ops)
        return MismatchOutcome("completes" if are_rings else "wrong-data")

    crashed: set[int] = set()
    if any(_binding_of(op).needs is None for op in ops):
        crashed.update(mismatch(meeting._replace(fields=other_fields)).crash)
    else:
        for root in {call.root for call in meeting.calls}:
            crashed.update(mismatch(_part_with_root(meeting, root, other_fields)).crash)
    if crashed:
        return MismatchOutcome("crashes", tuple(sorted(crashed)))
    return MismatchOutcome("wrong-data")


def _part_with_root(
    meeting: MismatchedCalls, root: int | None, fields: tuple[str, ...]
) -> MismatchedCalls:
    """The calls that name the same root, with the fields in which they may differ."""
    indices = [index for index, call in enumerate(meeting.calls) if call.root == root]
    return MismatchedCalls(
        fields,
        tuple(meeting.calls[index] for index in indices),
        tuple(meeting.nbytes[index] for index in indices),
        False,
    )


def _outcome_of_different_rings(meeting: MismatchedCalls) -> MismatchOutcome:
    """Who is not through is told by `apart`. What adds up the same inputs ends right, whatever it
    is called.
    """
    calls = meeting.calls
    result = _ring_outcome_of(calls)
    if result.aborts:
        aborted = tuple(call.rank for call in calls if call.group_rank in result.aborts)
        return MismatchOutcome("crashes", aborted)
    if len(calls) == calls[0].group.size and result.waits:
        return MismatchOutcome("hangs")
    moves_no_data = not any(call.input_nbytes for call in calls)
    if moves_no_data or _add_up_same_inputs(meeting):
        return MismatchOutcome("completes")
    return MismatchOutcome("wrong-data")


def _add_up_same_inputs(meeting: MismatchedCalls) -> bool:
    """Whether the calls are different names, or cuts, of one sum over inputs of equal size."""
    if len({call.input_nbytes for call in meeting.calls}) != 1:
        return False
    if not set(meeting.fields) <= {"op", "numel"}:
        return False
    ops = {call.op for call in meeting.calls}
    if any(_implementing_collective(op) != _SUM_COLLECTIVE for op in ops):
        return False
    return len(ops) > 1 or any(_binding_of(op).part_by_part for op in ops)


def _overflowed_tree_children(meeting: MismatchedCalls) -> tuple[int, ...]:
    """The ranks that are sent more than they have room for down a binomial tree, of those who have
    come.
    """
    n = meeting.calls[0].group.size
    sizes = {
        call.group_rank: nbytes for call, nbytes in zip(meeting.calls, meeting.nbytes, strict=True)
    }
    crash = []
    for call in meeting.calls:
        me = call.group_rank
        root = call.group.group_rank(call.root) if call.root is not None else 0
        parent = (binomial_parent((me - root) % n) + root) % n
        if sizes.get(parent, 0) > sizes[me]:
            crash.append(call.rank)
    return tuple(crash)


def neighbours(call: ResolvedCall) -> frozenset[int]:
    """From whom a member receives and to whom it sends: in the ring (`simulate_ring`), in the tree
    (`_overflowed_tree_children`), or as or with the root.
    """
    n, me = call.group.size, call.group_rank
    needed = _binding_of(call.op).needs
    ring = frozenset({(me - 1) % n, (me + 1) % n})
    if needed is None or call.root is None:
        return ring
    root = max(call.group.group_rank(call.root), 0)
    if needed is not needs_only_root:
        return ring | binomial_path_and_children(n, root, me)
    return ring | (frozenset(range(n)) if me == root else frozenset({root}))


def _outcome_of_uneven_parts(meeting: MismatchedCalls) -> MismatchOutcome:
    """As with messages: a part larger than the room for it aborts its receiver, a smaller one
    leaves the tail (G14); both at once, also while a third member has not come (run: of three the
    second was sent 1200 bytes for 16 by the last)."""
    calls = sorted(meeting.calls, key=lambda call: call.group_rank)
    sent = {
        call.group_rank: [
            n * DTYPE_BYTES[call.inputs[0].dtype] for n in AllToAllCollective.sent(call)
        ]
        for call in calls
    }
    room = {
        call.group_rank: [
            n * DTYPE_BYTES[call.outputs[0].dtype] for n in AllToAllCollective.received(call)
        ]
        for call in calls
    }
    crash = tuple(
        b.rank
        for b in calls
        if any(out[b.group_rank] > room[b.group_rank][i] for i, out in sent.items())
    )
    return MismatchOutcome("crashes", crash) if crash else MismatchOutcome("wrong-data")


def new_group(call: ResolvedCall, options: BackendOptions) -> NewGroupParticipants:
    """2.3: the members connect to each other, and find each other in the store by the group's name;
    who is none passes through. The name is the rank's own count of new_group calls, so different
    orders make names collide (`distsim.semantics.form.group_creation`). With
    use_local_synchronization it is a hash of the members (`group.members_only_local_sync`)."""
    return "members" if call.local_sync else "named"


def invalid(call: ResolvedCall, code: str, options: BackendOptions) -> InvalidCallReaction:
    """What gloo does with calls that no program may make.

    A partner outside the world: the pair is sought in the store, until the timeout and 1 s
    (`p2p.out_of_range.*`; memory that is not the world's may also end it by SIGSEGV). In other
    groups torch's own lookup refuses it. The second wait on a message's request hangs
    (`p2p.irecv_not_waited_poll_is_completed`), on a collective's it returns. A group that was
    destroyed by itself still takes collectives; torch refuses messages on it (run). all_to_all
    whose parts do not come out even is taken: wrong data (2.2, "not refused on Gloo")."""
    if code == "DS101" and call.group.id == 0:
        return "hangs"
    if code == "DS105":
        return "hangs"
    if code == "DS108" and _is_collective_of_member_on_subgroup(call):
        return "goes on"
    if SUPPORT.overlooks(call, code):
        return "goes on"
    if code != "DS104" and _is_unevenly_divided(call):
        return "goes on"
    return torch_frontend_reaction(call, code, options)


def _is_collective_of_member_on_subgroup(call: ResolvedCall) -> bool:
    if not call.group.id or OPERATIONS[call.op].kind != "collective":
        return False
    return call.group.group_rank(call.rank) >= 0


def _is_unevenly_divided(call: ResolvedCall) -> bool:
    """Whether an all_to_all without splits has an input that the ranks cannot share evenly."""
    if not OPERATIONS[call.op].pairwise or len(call.inputs) != 1:
        return False
    if call.input_splits is not None or call.output_splits is not None:
        return False
    return call.inputs[0].numel % call.group.size != 0


def alternative_outcomes(
    outcome: str, fields: Sequence[tuple[str, ...]], outside: bool
) -> frozenset[str]:
    """Bits that mean the same in both dtypes, as zeros do, arrive unharmed. A partner outside
    the world: the pair's place in memory is not the world's (`p2p.out_of_range.*`: SIGSEGV for 7
    of 2)."""
    if outcome == "hangs" and outside:
        return frozenset({"crashes"})
    if outcome == "wrong-data" and all(differing == ("dtype",) for differing in fields):
        return frozenset({"completes"})
    return frozenset()


GLOO = BackendProfile(
    name="gloo",
    about="Every send is a rendezvous at every size (G1). Tags and any-source are true (G2). "
    "Collectives meet by kind and number "
    "on the group (G5) and run on two worker threads per group (G7). A dropped request is "
    "cancelled (G4).",
    needs=needs,
    mismatch=mismatch,
    refuse=refuse,
    credit=never_buffered,
    slot=slot,
    workers=workers,
    new_group=new_group,
    invalid=invalid,
    dropped="cancels",
    peer_death="raises",
    specific_first=True,
    timed_out="raises",
    store_grace_ns=10**9,
    support=SUPPORT,
    listed=1,
    alternative_outcomes=alternative_outcomes,
    per_rank_needs=per_rank_needs,
    neighbours=neighbours,
    skips_empty=skips_empty,
    has_traffic=has_traffic,
)


def monitored_barrier_error(
    rank: int, missing: Sequence[int], all_of_them: bool, limit_ns: int
) -> str:
    """What rank ``rank``, which keeps the list of a ``monitored_barrier``, raises for who has not
    come (ProcessGroupGloo.cpp).
    """
    who = f"Ranks {', '.join(map(str, missing))}" if all_of_them else f"Rank {missing[0]}"
    return f"[Rank {rank}]: {who} failed to pass monitoredBarrier in {limit_ns // 10**6} ms"
