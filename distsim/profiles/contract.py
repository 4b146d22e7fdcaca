"""The contract of torch.distributed, in three readings of what blocks. They have no queues, no limits and refuse nothing.

A program is right when it is right under each of them. They differ in how far a call that only gives may run ahead:

* ``rendezvous``: a send waits for its receive, a collective for all members;
* ``early``: as before, but in a rooted collective a rank leaves when its own data has moved;
* ``buffered``: a send never blocks, and ranks that only give leave at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.ops.records import Call
from distsim.profiles.record import Meeting, Mishap, Parties, Profile, Reaction, by_number, needs_all, never, no_workers

_FROM_ROOT = ("broadcast", "scatter")
_TO_ROOT = ("reduce", "gather")


def leave_early(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """The root needs all; the others of a rooted collective need the root alone. Any other collective needs all."""
    return frozenset((root,)) if op in (*_FROM_ROOT, *_TO_ROOT) and me != root else None


def give_at_once(op: str, n: int, root: int, me: int) -> frozenset[int] | None:
    """Who only gives needs nobody: the root of broadcast and scatter, all but the root of reduce and gather."""
    if op in _FROM_ROOT:
        return frozenset() if me == root else frozenset((root,))
    if op in _TO_ROOT and me != root:
        return frozenset()
    return None


def _always(nbytes: int, outstanding: int, options: Mapping[str, Any]) -> bool:
    return True


def _note_only(meeting: Meeting) -> Mishap:
    """The contract says nothing of what follows; going on shows what else is wrong."""
    return Mishap("undefined")


def _refuse_nothing(call: Call) -> str | None:
    return None


def _world(call: Call, options: Mapping[str, Any]) -> Parties:
    """`new_group` is collective over the whole world, also for ranks that are not members (torch.distributed.new_group), unless
    the call says use_local_synchronization."""
    return "world"


def _raise(call: Call, code: str, options: Mapping[str, Any]) -> Reaction:
    """A call that no program may make ends its rank; the others go on."""
    return "raises"


def _reading(name: str, about: str, **rules: Any) -> Profile:
    shared: dict[str, Any] = {"mismatch": _note_only, "refuse": _refuse_nothing, "slot": by_number, "workers": no_workers,
                              "new_group": _world, "invalid": _raise}  # fmt: skip
    return Profile(name=name, about=about, **shared, **rules)


RENDEZVOUS = _reading("rendezvous", "A send waits for its receive, a collective for all members.", needs=needs_all, credit=never)
EARLY = _reading("early", "As rendezvous, but in a rooted collective a rank leaves when its own data has moved.",
                 needs=leave_early, credit=never)  # fmt: skip
BUFFERED = _reading("buffered", "A send never blocks; ranks that only give leave at once.", needs=give_at_once, credit=_always)
