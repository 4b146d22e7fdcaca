"""The contract of torch.distributed, in three readings of what blocks. They have no queues, no
limits and refuse nothing.

A program is right when it is right under each of them. They differ in how far a call that only
gives may run ahead:

* ``rendezvous``: a send waits for its receive, a collective for all members;
* ``early``: as before, but in a rooted collective a rank leaves when its own data has moved;
* ``buffered``: a send never blocks, and ranks that only give leave at once.
"""

from __future__ import annotations

from collections.abc import Callable

from distsim.backends.profile import (
    BackendOptions,
    BackendProfile,
    InvalidCallReaction,
    MismatchedCalls,
    MismatchOutcome,
    NeedsRule,
    NewGroupParticipants,
    matched_by_number,
    needs_all,
    never_buffered,
    no_neighbours,
    no_workers,
)
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS


def needs_exchange_partners(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """Who takes a rank's data, and whose it takes: in a rooted collective the root needs all and
    the others the root alone.
    """
    gives, takes = OPERATIONS[op].gives_to(n, root, me), OPERATIONS[op].takes_from(n, root, me)
    return None if gives is None or takes is None else gives | takes


def needs_data_sources(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """The group ranks whose data a member receives. A member that only contributes data needs no
    other: the root of broadcast and scatter, and all ranks but the root of reduce and gather.
    """
    return OPERATIONS[op].takes_from(n, root, me)


def _always_buffered(nbytes: int, outstanding: int, options: BackendOptions) -> bool:
    return True


def _undefined_outcome(meeting: MismatchedCalls) -> MismatchOutcome:
    """The contract says nothing of what follows; going on shows what else is wrong."""
    return MismatchOutcome("undefined")


def _refuse_nothing(call: ResolvedCall) -> str | None:
    return None


def _whole_world(call: ResolvedCall, options: BackendOptions) -> NewGroupParticipants:
    """`new_group` is collective over the whole world, also for ranks that are not members
    (torch.distributed.new_group), unless the call says use_local_synchronization."""
    return "world"


def _raise_on_caller(call: ResolvedCall, code: str, options: BackendOptions) -> InvalidCallReaction:
    """A call that no program may make ends its rank; the others go on."""
    return "raises"


def _contract_reading(
    name: str, about: str, needs: NeedsRule, credit: Callable[[int, int, BackendOptions], bool]
) -> BackendProfile:
    return BackendProfile(
        name=name,
        about=about,
        needs=needs,
        credit=credit,
        mismatch=_undefined_outcome,
        refuse=_refuse_nothing,
        slot=matched_by_number,
        workers=no_workers,
        new_group=_whole_world,
        invalid=_raise_on_caller,
        neighbours=no_neighbours,
    )


RENDEZVOUS = _contract_reading(
    "rendezvous",
    "A send waits for its receive, and a collective waits for all members.",
    needs_all,
    never_buffered,
)
EARLY = _contract_reading(
    "early",
    "Like rendezvous, but in a rooted collective a rank returns when its own data has moved.",
    needs_exchange_partners,
    never_buffered,
)
BUFFERED = _contract_reading(
    "buffered",
    "A send never blocks; ranks that only contribute data return at once.",
    needs_data_sources,
    _always_buffered,
)
