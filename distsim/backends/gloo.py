"""The blocking rules of Gloo, as torch 2.13 uses it.

Tags such as G1 name the rules in docs/explanation/semantics.md. They were found by running torch on
CPUs, case by case; "run" marks such a fact, "read" one from the sources of gloo. Identifiers such
as `p2p.out_of_range.*` are cases of those runs.

The key idea: gloo matches collectives by operation and number, and then only moves bytes. It
compares neither dtypes nor roots, so most mismatches end in wrong data, in an abort of a receiver
whose buffer is too small, or in ranks that wait in vain. Rings whose members bring different sizes
are simulated message by message (`distsim.backends.gloo_rings`).
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

from distsim.backends.gloo_rings import RING_STEPS, RingContribution, RingOutcome, simulate_ring
from distsim.backends.object_list_mismatch import receivers_of_wrong_lengths
from distsim.backends.profile import (
    FLOAT_DTYPES,
    IMMEDIATE_CONTACT,
    INTEGER_DTYPES,
    BackendOptions,
    BackendProfile,
    BackendSupport,
    Contact,
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
from distsim.operations.core.algorithms import (
    binomial_parent,
    binomial_parent_of,
    binomial_path_and_children,
)
from distsim.operations.core.backend_bindings import needs_only_root
from distsim.operations.core.operation_base import BackendBinding, MemberRoute
from distsim.operations.core.resolved_call import (
    COMPLEX_DTYPES,
    DTYPE_BYTES,
    ResolvedCall,
    part_sizes,
)
from distsim.operations.registry import OPERATIONS

#: Every entry was run on torch 2.13. gloo refuses an average of integers only after it has
#: computed the sum.
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
#: The gloo collective behind all sums. Only for it can different operations match each other in one
#: slot and still give the right result.
_SUM_COLLECTIVE = "all_reduce"


def refuse(call: ResolvedCall) -> str | None:
    """The error text of a call that gloo rejects, else None.

    Besides unsupported calls, gloo rejects an empty receive from any source, because the buffer has
    no valid offset (run).
    """
    if call.peer is None and OPERATIONS[call.op].direction == "recv" and not call.outputs[0].nbytes:
        return "[enforce fail at gloo/transport/tcp/unbound_buffer.cc] offset < this->size. 0 vs 0"
    return SUPPORT.refuse(call)


def slot(op: str) -> Hashable:
    """G5: different operations at the same number do not match each other, and hang.

    Operations that gloo implements with the same collective share a slot. Calls that name different
    roots do match; `per_rank_needs` decides what happens to them.
    """
    return _implementing_collective(op)


def per_rank_needs(calls: Sequence[ResolvedCall]) -> Mapping[int, MemberNeeds]:
    """The needs of each member if roots differ, or if sizes differ in a ring.

    Members that name different roots each send and receive according to their own root. A message
    is transferred if it exists on both sides (run: a rank completes a gather, a scatter or, after
    the ring, a reduce if the root that it names takes itself for the root as well).

    If the members of a ring bring different sizes, those complete that all segments reach.
    """
    needs_in_ring = _ring_needs(calls) if skips_empty(calls[0].op) else {}
    if needs_in_ring or calls[0].root is None:
        return needs_in_ring
    return _needs_with_different_roots(calls)


def _needs_with_different_roots(calls: Sequence[ResolvedCall]) -> dict[int, MemberNeeds]:
    members = calls[0].group.ranks
    routes = {call.group_rank: _route_of_call(call) for call in calls}
    reception = _ReceptionByRoute(routes)
    found: dict[int, MemberNeeds] = {}
    for me, route in routes.items():
        needed, missing = reception.of(me)
        arrived_receivers = route.sends & routes.keys()
        not_receiving = {peer for peer in arrived_receivers if me not in routes[peer].receives}
        in_vain = frozenset(members[peer] for peer in (missing | not_receiving) - {me})
        if route.ring:
            # The ring before the root's transfers synchronises all members.
            needed_ranks = frozenset(members)
        else:
            needed_ranks = frozenset(members[peer] for peer in (needed | route.sends) - {me})
        found[members[me]] = MemberNeeds(needed_ranks, in_vain)
    return found


class _Reception(NamedTuple):
    """The data that one member expects to receive, in group ranks."""

    #: The members that must have arrived before the data can arrive, directly or through others.
    needed: frozenset[int]
    #: The members whose data never arrive.
    missing: frozenset[int]


class _ReceptionByRoute:
    """Follows the routes of all members that have arrived, to find the data that never arrive."""

    def __init__(self, routes: Mapping[int, MemberRoute]) -> None:
        self.routes = routes
        self._known: dict[int, _Reception] = {}

    def of(self, me: int, receivers: tuple[int, ...] = ()) -> _Reception:
        """``receivers``: the members behind ``me`` that wait for its data, farthest first."""
        if me not in self._known:
            self._known[me] = self._follow(me, (*receivers, me))
        return self._known[me]

    def _follow(self, me: int, receivers: tuple[int, ...]) -> _Reception:
        needed, missing = set[int](), set[int]()
        for sender in self.routes[me].receives:
            needed.add(sender)
            if sender not in self.routes:
                continue  # It has not arrived, so nothing is known about its route.
            if sender in receivers:
                missing.add(sender)  # Each waits for the other's data before it sends its own.
                continue
            upstream = self.of(sender, receivers)
            needed |= upstream.needed
            if upstream.missing or me not in self.routes[sender].sends:
                missing.add(sender)
        return _Reception(frozenset(needed), frozenset(missing))


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
    """G15: whether a rank without data to send skips the collective, as in every ring.

    Run: all_reduce, reduce, all_gather and reduce_scatter, alone and coalesced, return at once.
    Empty calls of broadcast, gather, scatter and all_to_all, and empty messages, do wait.
    """
    return _implementing_collective(op) in RING_STEPS


def _ring_outcome_of(calls: Sequence[ResolvedCall]) -> RingOutcome:
    """The outcome of a ring of the members that have arrived, in group ranks."""
    group = calls[0].group
    shares = sorted((call.group_rank, _ring_contributions(call)) for call in calls)
    return simulate_ring(_implementing_collective(calls[0].op), group.size, tuple(shares))


def _ring_contributions(call: ResolvedCall) -> tuple[RingContribution, ...]:
    """What a call brings to each ring that it consists of.

    A coalesced reduce_scatter is one ring for each part (run: the parts [2, 3] and [3, 2] abort
    both of two ranks; two plain calls of 2 and 3 complete). A reduce_scatter of a list is one ring
    for each rank. Complex numbers travel as pairs of real numbers.
    """
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
    """The needs of the members of a ring; empty if all complete once all have arrived."""
    ranks, outcome = calls[0].group.ranks, _ring_outcome_of(calls)
    all_members = frozenset(ranks)
    exceptions = {call.rank: MemberNeeds(frozenset()) for call in calls if not call.input_nbytes}
    if len(calls) == len(ranks):
        for me, peer in outcome.waits.items():
            exceptions[ranks[me]] = MemberNeeds(all_members, frozenset({ranks[peer]}))
    if not exceptions:
        return {}
    return {call.rank: MemberNeeds(all_members) for call in calls} | exceptions


def needs(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """G6, 2.5: the members that one member waits for, as group ranks; None for all.

    Operations with `BackendBinding.needs` follow the data flow and are no barriers. In broadcast a
    member needs its ancestors in a binomial tree and its children. In gather and scatter the root
    needs all members, and the others need the root. All other operations synchronise all members.
    """
    needed = _binding_of(op).needs
    return None if needed is None else needed(n, root, me)


def has_traffic(op: str, n: int, root: int, one: int, other: int) -> bool:
    """Whether two members exchange data in a collective.

    Run: four ranks of which ranks 0 and 1 get no data from each other. In a reduce, the members
    send their parts of the result to the root after the ring.
    """
    if op == "reduce" and root in (one, other):
        return True
    return contact(op, n, root, one, other) is not None


@lru_cache(maxsize=1 << 12)
def contact(op: str, n: int, root: int, me: int, other: int) -> Contact | None:
    """When a member uses its connection with another one, and so notices its death (G13).

    Run: each collective on 3 to 6 ranks of which one had died before or died meanwhile, with and
    without an absent rank. The orders of the transfers are read in the sources of gloo.

    * ring: the neighbours;
    * tree: the parent; the children once the data have arrived;
    * gather and scatter: the root with every member;
    * barrier: members whose distance is a power of two, nearest first;
    * all_to_all: any two members.
    """
    needed = _binding_of(op).needs
    if needed is needs_only_root or op == "monitored_barrier":
        return IMMEDIATE_CONTACT if root in (me, other) else None
    if needed is not None:
        return _contact_in_tree(n, root, me, other)
    if skips_empty(op):
        return _contact_in_ring(op, n, me, other)
    if OPERATIONS[op].pairwise:
        return IMMEDIATE_CONTACT
    return _contact_in_barrier(n, me, other)


def _contact_in_tree(n: int, root: int, me: int, other: int) -> Contact | None:
    # Positions in the tree, whose root has position 0.
    mine, others = (me - root) % n, (other - root) % n
    if mine > 0 and binomial_parent(mine) == others:
        return IMMEDIATE_CONTACT
    if others == 0 or binomial_parent(others) != mine:
        return None
    ancestors = set[int]()
    while mine > 0:
        mine = binomial_parent(mine)
        ancestors.add((mine + root) % n)
    return Contact(frozenset(ancestors), frozenset(ancestors))


def _contact_in_ring(op: str, n: int, me: int, other: int) -> Contact | None:
    """all_gather waits for both neighbours. The others wait for their source before their target:
    they receive into a buffer of its own.
    """
    source, target = (me + 1) % n, (me - 1) % n
    if other not in (source, target):
        return None
    if other == source or _implementing_collective(op) == "all_gather":
        return IMMEDIATE_CONTACT
    return Contact(frozenset(), frozenset({source}))


def _contact_in_barrier(n: int, me: int, other: int) -> Contact | None:
    """Each round doubles the distance, and needs the data of all members that are nearer."""
    distances = [d for d in ((me - other) % n, (other - me) % n) if _is_power_of_two(d)]
    if not distances:
        return None
    nearer = frozenset((me - k) % n for k in range(1, min(distances)))
    return Contact(nearer, nearer)


def _is_power_of_two(number: int) -> bool:
    """Also true for 0, which is not a distance between two different ranks."""
    return number & (number - 1) == 0


def workers(rank: int, group: int) -> WorkerQueue:
    """G7: two worker threads per group run its collectives, first in first out.

    Messages do not use worker threads.
    """
    return WorkerQueue(("workers", rank, group), 2)


def mismatch(meeting: MismatchedCalls) -> MismatchOutcome:
    """G14 and 2.2: the consequence of calls that match although they differ.

    A process aborts if it receives more than its buffer holds. A larger buffer keeps its old
    contents behind the received data. gloo does not notice another dtype of the same size, or
    another reduce op.

    An all_reduce matches a reduce_scatter_tensor of the same input: gloo implements the second with
    the first, and both give the right result (`coll.kind.all_reduce_vs_reduce_scatter`). Each part
    of an all_to_all is judged by itself, like a message. A rank raises if it takes wrong data for
    the lengths of pickled objects.
    """
    found = _mismatch_of_buffers(meeting)
    if found.outcome != "wrong-data" or meeting.is_message:
        return found
    raising = receivers_of_wrong_lengths(meeting)
    return MismatchOutcome("raises", raises=raising) if raising else found


def _mismatch_of_buffers(meeting: MismatchedCalls) -> MismatchOutcome:
    sizes = meeting.nbytes
    if "root" in meeting.fields:
        return _outcome_of_different_roots(meeting)
    if meeting.is_message:
        if sizes[1] < sizes[0]:
            return MismatchOutcome("crashes", (meeting.calls[1].rank,))
        return MismatchOutcome("wrong-data")
    ops = {call.op for call in meeting.calls}
    are_pairwise = all(OPERATIONS[op].pairwise for op in ops)
    if are_pairwise and "splits" in meeting.fields:
        return _outcome_of_uneven_parts(meeting)
    if all(map(skips_empty, ops)):
        return _outcome_of_different_rings(meeting)
    if len(set(sizes)) == 1:
        return MismatchOutcome("wrong-data")
    if all(_binding_of(op).needs is needs_only_root for op in ops):
        crashed = _overflowed_receivers(meeting)
    elif are_pairwise:
        crashed = _members_below_largest_size(meeting)
    else:
        crashed = _overflowed_tree_children(meeting)
    return _crash_or_wrong_data(crashed)


def _crash_or_wrong_data(crashed: tuple[int, ...]) -> MismatchOutcome:
    return MismatchOutcome("crashes", crashed) if crashed else MismatchOutcome("wrong-data")


def _members_below_largest_size(meeting: MismatchedCalls) -> tuple[int, ...]:
    largest = max(meeting.nbytes)
    return tuple(
        call.rank
        for call, nbytes in zip(meeting.calls, meeting.nbytes, strict=True)
        if nbytes < largest
    )


def _overflowed_receivers(meeting: MismatchedCalls) -> tuple[int, ...]:
    """The ranks that receive more in a gather or a scatter than their buffer holds.

    Only members that have arrived count. Two members that are not the root exchange no data (run:
    two receivers of a scatter whose root never arrives wait, whatever their sizes).
    """
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
    """The consequence of calls that name different roots.

    Calls that name the same root are judged separately, except in a reduce: its ring includes all
    members, whatever root they name. `per_rank_needs` decides which members wait in vain. If none
    does, a reduce has given the right result at its root.
    """
    other_fields = tuple(name for name in meeting.fields if name != "root")
    ops = {call.op for call in meeting.calls}
    if not other_fields:
        # An operation without `needs` is a ring, in which the data of every rank reach all others.
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
    """The calls that name this root, with the fields in which they may differ."""
    indices = [index for index, call in enumerate(meeting.calls) if call.root == root]
    return MismatchedCalls(
        fields,
        tuple(meeting.calls[index] for index in indices),
        tuple(meeting.nbytes[index] for index in indices),
        False,
    )


def _outcome_of_different_rings(meeting: MismatchedCalls) -> MismatchOutcome:
    """The consequence of mismatched rings.

    `per_rank_needs` decides which members do not complete. Operations that add up the same inputs
    give the right result, whatever their names.
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
    """The ranks that receive more from their parent in a binomial tree than their buffer holds.

    Only members that have arrived count.
    """
    n = meeting.calls[0].group.size
    sizes = {
        call.group_rank: nbytes for call, nbytes in zip(meeting.calls, meeting.nbytes, strict=True)
    }
    crash = []
    for call in meeting.calls:
        me = call.group_rank
        root = call.group.group_rank(call.root) if call.root is not None else 0
        parent = binomial_parent_of(n, root, me)
        if sizes.get(parent, 0) > sizes[me]:
            crash.append(call.rank)
    return tuple(crash)


def neighbours(call: ResolvedCall) -> frozenset[int]:
    """The group ranks from which a member receives or to which it sends.

    They are its neighbours in a ring (`simulate_ring`) and its relatives in a binomial tree
    (`_overflowed_tree_children`), or the root, and for the root all members.
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
    """The consequence of an all_to_all whose members disagree on the splits (G14).

    Each part behaves like a message: one that is larger than its buffer aborts the receiver, a
    smaller one leaves the rest of the buffer unchanged. Both can occur in one call, also before all
    members have arrived (run: the last of three members sent 1200 bytes to the second, which
    expected 16).
    """
    calls = sorted(meeting.calls, key=lambda call: call.group_rank)
    sent: dict[int, list[int]] = {}
    room: dict[int, list[int]] = {}
    for call in calls:
        sent_item, room_item = (
            DTYPE_BYTES[buffers[0].dtype] for buffers in (call.inputs, call.outputs)
        )
        sent[call.group_rank] = [n * sent_item for n in AllToAllCollective.sent(call)]
        room[call.group_rank] = [n * room_item for n in AllToAllCollective.received(call)]

    def receives_too_much(me: int) -> bool:
        return any(parts[me] > room[me][sender] for sender, parts in sent.items())

    return _crash_or_wrong_data(
        tuple(call.rank for call in calls if receives_too_much(call.group_rank))
    )


def new_group(call: ResolvedCall, options: BackendOptions) -> NewGroupParticipants:
    """2.3: the members find each other in the store by the name of the group, and connect.

    Ranks that are not members pass through. The name of the group is each rank's own count of
    new_group calls, so calls in different orders make names collide
    (`distsim.semantics.form.group_creation`). With use_local_synchronization the name is a hash of
    the members (`group.members_only_local_sync`).
    """
    return "members" if call.local_sync else "named"


def invalid(call: ResolvedCall, code: str, options: BackendOptions) -> InvalidCallReaction:
    """The reaction of gloo to calls that the contract forbids.

    * A partner outside the world (DS101): gloo looks for the pair in the store until the timeout
      and 1 s more (`p2p.out_of_range.*`); it may also die of SIGSEGV, because the pair is looked up
      outside the memory for the world. In other groups torch's own lookup of ``src`` and ``dst``
      raises. It does not check ``group_src`` and ``group_dst``, so such a call also hangs (run
      for 5 s: ``group_dst=2`` and ``group_src=2`` in a group of two; send, recv, isend, irecv).
      The program has the calling rank in place of such a group rank.
    * A second wait (DS105) on the request of a message hangs
      (`p2p.irecv_not_waited_poll_is_completed`). On the request of a collective it returns, but
      ``call`` does not show which request is meant: the compiler turns "hangs" into "goes on" if
      only collectives are waited for again (`distsim.semantics.form.invalid_calls`).
    * A destroyed group (DS108) still executes collectives without a root if it was destroyed alone
      (run: all_reduce, barrier and all_gather complete if both members call them). torch refuses
      messages on it, and collectives with a root (run: broadcast). If a member does not join, its
      process closes the connection and torch raises ValueError
      (`distsim.semantics.form.invalid_calls`).
    * An all_to_all whose input does not divide evenly is executed: wrong data (2.2, "not refused on
      Gloo").
    """
    if code == "DS101" and (call.group.id == 0 or call.peer == call.rank):
        return "hangs"
    if code == "DS105":
        return "hangs"
    if code == "DS108" and _is_rootless_call_of_member_on_subgroup(call):
        return "goes on"
    if SUPPORT.overlooks(call, code):
        return "goes on"
    if code != "DS104" and _is_unevenly_divided(call):
        return "goes on"
    return torch_frontend_reaction(call, code, options)


def _is_rootless_call_of_member_on_subgroup(call: ResolvedCall) -> bool:
    operation = OPERATIONS[call.op]
    is_rootless = operation.kind == "collective" and operation.root_field is None
    if not call.group.id or not is_rootless:
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
    """Further outcomes that gloo may show in place of the predicted one.

    Values whose bits mean the same in both dtypes, such as zeros, arrive unharmed. A partner
    outside the world may end the process instead of blocking it, because the pair is looked up
    outside the memory for the world (`p2p.out_of_range.*`: SIGSEGV for rank 7 of 2).
    """
    if outcome == "hangs" and outside:
        return frozenset({"crashes"})
    if outcome == "wrong-data" and all(differing == ("dtype",) for differing in fields):
        return frozenset({"completes"})
    return frozenset()


GLOO = BackendProfile(
    name="gloo",
    about=(
        "Every send waits for its receive, at every size (G1). Tags and any-source receives work "
        "(G2). Collectives match by kind and number on the group (G5) and run on two worker "
        "threads per group (G7). A dropped request is cancelled (G4)."
    ),
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
    # The destructor of ProcessGroupGloo joins the worker threads (run and read).
    joins_collectives_at_exit=True,
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
    contact=contact,
)


def monitored_barrier_error(
    rank: int, missing: Sequence[int], all_of_them: bool, limit_ns: int
) -> str:
    """The error that a rank raises for the members missing in a ``monitored_barrier``.

    ``rank`` is the rank that checks the arrivals (ProcessGroupGloo.cpp).
    """
    who = f"Ranks {', '.join(map(str, missing))}" if all_of_them else f"Rank {missing[0]}"
    return f"[Rank {rank}]: {who} failed to pass monitoredBarrier in {limit_ns // 10**6} ms"
