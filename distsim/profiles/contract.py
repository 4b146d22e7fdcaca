"""The contract of torch.distributed, in three readings of what blocks. They have no queues, no limits and refuse nothing.

A program is right when it is right under each of them. They differ in how far a call that only gives may run ahead:

* ``rendezvous``: a send waits for its receive, a collective for all members;
* ``early``: as before, but in a rooted collective a rank leaves when its own data has moved;
* ``buffered``: a send never blocks, and ranks that only give leave at once.
"""

from __future__ import annotations

from collections.abc import Callable

from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.profiles.record import (
    Meeting,
    Mishap,
    Needs,
    Options,
    Parties,
    Profile,
    Reaction,
    by_number,
    needs_all,
    never,
    no_neighbours,
    no_workers,
)


def leave_early(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """Who takes a rank's data, and whose it takes: in a rooted collective the root needs all and the others the root alone."""
    gives, takes = OPS[op].gives_to(n, root, me), OPS[op].takes_from(n, root, me)
    return None if gives is None or takes is None else gives | takes


def give_at_once(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """Whose data it takes: who only gives needs nobody, as the root of broadcast and scatter, all but the root of reduce and gather."""
    return OPS[op].takes_from(n, root, me)


def _always(nbytes: int, outstanding: int, options: Options) -> bool:
    return True


def _note_only(meeting: Meeting) -> Mishap:
    """The contract says nothing of what follows; going on shows what else is wrong."""
    return Mishap("undefined")


def _refuse_nothing(call: Call) -> str | None:
    return None


def _world(call: Call, options: Options) -> Parties:
    """`new_group` is collective over the whole world, also for ranks that are not members (torch.distributed.new_group), unless
    the call says use_local_synchronization."""
    return "world"


def _raise(call: Call, code: str, options: Options) -> Reaction:
    """A call that no program may make ends its rank; the others go on."""
    return "raises"


def _reading(name: str, about: str, needs: Needs, credit: Callable[[int, int, Options], bool]) -> Profile:
    return Profile(name=name, about=about, needs=needs, credit=credit, mismatch=_note_only, refuse=_refuse_nothing, slot=by_number,
                   workers=no_workers, new_group=_world, invalid=_raise, neighbours=no_neighbours)  # fmt: skip


RENDEZVOUS = _reading("rendezvous", "A send waits for its receive, a collective for all members.", needs_all, never)
EARLY = _reading(
    "early", "As rendezvous, but in a rooted collective a rank leaves when its own data has moved.", leave_early, never
)
BUFFERED = _reading("buffered", "A send never blocks; ranks that only give leave at once.", give_at_once, _always)
