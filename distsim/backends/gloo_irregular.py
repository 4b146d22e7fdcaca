"""Which members of an irregular gloo collective complete, and which wait in vain.

A collective is irregular if its members name different roots, or if the members of a ring bring
different sizes. gloo compares neither, so each member sends and receives as its own call says.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from distsim.backends.gloo_collectives import (
    binding_of,
    group_root,
    implementing_collective,
    is_ring,
)
from distsim.backends.gloo_rings import NO_ROOT, RingContribution, RingOutcome, simulate_ring
from distsim.backends.profile import MemberNeeds
from distsim.operations.core.operation_base import MemberRoute
from distsim.operations.core.resolved_call import (
    COMPLEX_DTYPES,
    DTYPE_BYTES,
    ResolvedCall,
    part_sizes,
)
from distsim.operations.registry import OPERATIONS


def per_rank_needs(calls: Sequence[ResolvedCall]) -> Mapping[int, MemberNeeds]:
    """The needs of each member if roots differ, or if sizes differ in a ring.

    Members that name different roots each send and receive according to their own root. A message
    is transferred if it exists on both sides (run: a rank completes a gather, a scatter or, after
    the ring, a reduce if the root that it names takes itself for the root as well).

    If the members of a ring bring different sizes, a member completes if all segments that it
    expects reach it.
    """
    needs_in_ring = _ring_needs(calls) if is_ring(calls[0].op) else {}
    if needs_in_ring or calls[0].root is None:
        return needs_in_ring
    return _needs_with_different_roots(calls)


def _needs_with_different_roots(calls: Sequence[ResolvedCall]) -> dict[int, MemberNeeds]:
    """The needs of each member that has arrived, by global rank."""
    members = calls[0].group.ranks
    routes = {call.group_rank: _route_of_call(call) for call in calls}
    receptions = _ReceptionByRoute(routes)
    found: dict[int, MemberNeeds] = {}
    for me, route in routes.items():
        reception = receptions.of(me)
        not_receiving = _receivers_that_expect_nothing(me, routes)
        in_vain = (reception.missing | not_receiving) - {me}
        if route.ring:
            # The ring before the root's transfers synchronises all members.
            needed = frozenset(members)
        else:
            needed = _global_ranks((reception.needed | route.sends) - {me}, members)
        found[members[me]] = MemberNeeds(needed, _global_ranks(in_vain, members))
    return found


def _receivers_that_expect_nothing(me: int, routes: Mapping[int, MemberRoute]) -> set[int]:
    """The members to which ``me`` sends, and that have arrived without expecting its data."""
    arrived_receivers = routes[me].sends & routes.keys()
    return {peer for peer in arrived_receivers if me not in routes[peer].receives}


def _global_ranks(group_ranks: Iterable[int], members: Sequence[int]) -> frozenset[int]:
    return frozenset(members[rank] for rank in group_ranks)


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
    route = binding_of(call.op).route
    assert route is not None
    return route(call, group_root(call), call.group_rank)


# --- rings whose members bring different sizes ---
def ring_outcome(calls: Sequence[ResolvedCall]) -> RingOutcome:
    """The outcome of a ring of the members that have arrived, in group ranks."""
    group = calls[0].group
    shares = sorted((call.group_rank, _ring_contributions(call)) for call in calls)
    return simulate_ring(implementing_collective(calls[0].op), group.size, tuple(shares))


def _ring_contributions(call: ResolvedCall) -> tuple[RingContribution, ...]:
    """What a call brings to each ring that it consists of.

    A coalesced reduce_scatter is one ring for each part (run: the parts [2, 3] and [3, 2] abort
    both of two ranks; two plain calls of 2 and 3 complete). A reduce_scatter of a list is one ring
    for each rank. Complex numbers travel as pairs of real numbers.
    """
    root = NO_ROOT if call.root is None else group_root(call)
    dtype = call.inputs[0].dtype
    item = DTYPE_BYTES[dtype]
    if not binding_of(call.op).part_by_part:
        sizes = [call.input_nbytes]
    elif OPERATIONS[call.op].coalesces is not None:
        sizes = [part.nbytes for part in call.inputs]
    else:
        sizes = [numel * item for numel in part_sizes(call.inputs, call.group.size)]
    travelling_item = item // 2 if dtype in COMPLEX_DTYPES else item
    return tuple(RingContribution(nbytes, travelling_item, root) for nbytes in sizes)


def _ring_needs(calls: Sequence[ResolvedCall]) -> Mapping[int, MemberNeeds]:
    """The needs of the members of a ring; empty if all complete once all have arrived."""
    ranks = calls[0].group.ranks
    all_members = frozenset(ranks)
    # A member without data skips the ring, so it needs no other member.
    exceptions = {call.rank: MemberNeeds(frozenset()) for call in calls if not call.input_nbytes}
    if len(calls) == len(ranks):
        for me, peer in ring_outcome(calls).waits.items():
            exceptions[ranks[me]] = MemberNeeds(all_members, frozenset({ranks[peer]}))
    if not exceptions:
        return {}
    return {call.rank: MemberNeeds(all_members) for call in calls} | exceptions
