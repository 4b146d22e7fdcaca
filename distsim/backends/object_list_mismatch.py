"""Which ranks raise because a broadcast_object_list gives them wrong lengths.

Key idea: the receivers of a broadcast_object_list allocate a buffer for the lengths that they have
received, and unpickle it. If their list is longer than the sender's, the last lengths are whatever
the memory contained: the rank fails to allocate the buffer (RuntimeError), or unpickles nothing
(EOFError). The same follows if the sender broadcasts a tensor instead (observed with torch 2.13).
"""

from __future__ import annotations

from distsim.backends.profile import MismatchedCalls
from distsim.operations.core.algorithms import binomial_parent_of
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.object_collectives import is_broadcast_of_lengths


def receivers_of_wrong_lengths(meeting: MismatchedCalls) -> tuple[int, ...]:
    """The ranks that receive something else than the lengths that they expect.

    Only members whose parent in the binomial tree has arrived count.
    """
    calls = {call.group_rank: call for call in meeting.calls}
    found = []
    for me, call in calls.items():
        if not is_broadcast_of_lengths(call) or call.root is None or call.rank == call.root:
            continue
        root = call.group.group_rank(call.root)
        parent = calls.get(binomial_parent_of(call.group.size, root, me))
        if parent is not None and not _gives_lengths(parent, call):
            found.append(call.rank)
    return tuple(found)


def _gives_lengths(parent: ResolvedCall, child: ResolvedCall) -> bool:
    is_same_length = parent.inputs[0].numel == child.inputs[0].numel
    return is_broadcast_of_lengths(parent) and is_same_length
