"""What gloo makes of calls that match although they differ (G14).

Key idea: gloo matches collectives by operation and number, and then only moves bytes. It compares
neither dtypes nor roots, so most mismatches end in wrong data, in an abort of a receiver whose
buffer is too small, or in ranks that wait in vain (`distsim.backends.gloo_irregular`). Rings whose
members bring different sizes are simulated message by message (`distsim.backends.gloo_rings`).
"""

from __future__ import annotations

from distsim.backends.gloo_collectives import (
    binding_of,
    group_root,
    implementing_collective,
    is_ring,
    is_star,
    is_tree,
    waits_for_all,
)
from distsim.backends.gloo_irregular import ring_outcome
from distsim.backends.object_list_mismatch import receivers_of_wrong_lengths
from distsim.backends.profile import MismatchedCalls, MismatchOutcome
from distsim.operations.all_to_all_barrier import AllToAllCollective
from distsim.operations.core.algorithms import binomial_parent_of, binomial_path_and_children
from distsim.operations.core.resolved_call import DTYPE_BYTES, ResolvedCall
from distsim.operations.registry import OPERATIONS

#: The gloo collective behind all sums. Only for it can different operations match each other in one
#: slot and still give the right result.
_SUM_COLLECTIVE = "all_reduce"


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
    if all(map(is_ring, ops)):
        return _outcome_of_different_rings(meeting)
    if len(set(sizes)) == 1:
        return MismatchOutcome("wrong-data")
    if all(is_star(op) for op in ops):
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
        # The only rooted operation in which all wait for all is reduce. Its ring has collected all
        # data before the roots differ.
        has_collected_all = all(waits_for_all(op) for op in ops)
        return MismatchOutcome("completes" if has_collected_all else "wrong-data")

    crashed: set[int] = set()
    if any(waits_for_all(op) for op in ops):
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
    return meeting._replace(
        fields=fields,
        calls=tuple(meeting.calls[index] for index in indices),
        nbytes=tuple(meeting.nbytes[index] for index in indices),
    )


def _outcome_of_different_rings(meeting: MismatchedCalls) -> MismatchOutcome:
    """The consequence of mismatched rings.

    `per_rank_needs` decides which members do not complete. Operations that add up the same inputs
    give the right result, whatever their names.
    """
    calls = meeting.calls
    result = ring_outcome(calls)
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
    if any(implementing_collective(op) != _SUM_COLLECTIVE for op in ops):
        return False
    # Calls of one operation with equal sizes differ only in how they are cut into parts.
    return len(ops) > 1 or any(binding_of(op).part_by_part for op in ops)


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
        root = 0 if call.root is None else group_root(call)
        parent = binomial_parent_of(n, root, me)
        if sizes.get(parent, 0) > sizes[me]:
            crash.append(call.rank)
    return tuple(crash)


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


def neighbours(call: ResolvedCall) -> frozenset[int]:
    """The group ranks from which a member receives or to which it sends.

    They are its neighbours in a ring (`simulate_ring`) and its relatives in a binomial tree
    (`_overflowed_tree_children`), or the root, and for the root all members. The neighbours in a
    ring always count, because a ring may meet a tree or a star.
    """
    n, me = call.group.size, call.group_rank
    in_ring = frozenset({(me - 1) % n, (me + 1) % n})
    if call.root is None or waits_for_all(call.op):
        return in_ring
    root = group_root(call)
    if is_tree(call.op):
        return in_ring | binomial_path_and_children(n, root, me)
    in_star = range(n) if me == root else (root,)
    return in_ring | frozenset(in_star)
