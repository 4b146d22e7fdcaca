"""A call on its way into a code: its draft, why it may be invalid, and the requests that it makes,
waits for and loses.

Which request a handle stands for is told in program order: names are bound, spent and dropped.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import NamedTuple

from distsim.common.records import dataclass
from distsim.operations.core.operation_base import Operation
from distsim.program.code import BoolVector, CallFields, CodeCall, Vec

#: A name and its index; None where the name stands alone.
Handle = tuple[str, int | None]


class InvalidCall(NamedTuple):
    """Why a call is invalid on some rows of its code (True: on all), by a finding's code."""

    rows: BoolVector | bool
    code: str
    reason: str


class CallRequests(NamedTuple):
    """What a call does with requests: see the fields of `CodeCall`."""

    waits: tuple[int, ...] = ()
    again: tuple[int, ...] = ()
    handled: bool = False
    drops: tuple[int, ...] = ()


@dataclass
class CallDraft:
    """A call on its way into a code: vectors over the code's ranks, before validity, port and
    signature are known.
    """

    row: type[Operation]
    site: int
    group: Vec = 0  # group ids
    peer: Vec | None = None  # p2p: global rank, -1 any source
    tag: Vec = 0
    is_async: bool = False
    invalid: list[InvalidCall] = field(default_factory=list)
    fields: CallFields = field(default_factory=dict)
    parts: tuple[CodeCall, ...] = ()
    guard: BoolVector | None = None


class OpenHandles:
    """Open handles of one code."""

    def __init__(self) -> None:
        self.open: dict[Handle, int] = {}  # handle -> position of the call that made the request
        self.spent: dict[Handle, int] = {}
        self.again: tuple[
            int, ...
        ] = ()  # of the last `wait`: distances back to requests that had been waited for

    def bind(self, handle: Handle | None, here: int) -> tuple[bool, tuple[int, ...]]:
        """(is the request kept, distances back to the request that lost its name)."""
        if handle is None:
            return False, ()
        old = self.open.pop(handle, None)
        self.open[handle] = here
        return True, () if old is None else (here - old,)

    def wait(
        self, handles: Iterable[Handle] | None, here: int, invalid: list[InvalidCall]
    ) -> tuple[int, ...]:
        """Distances back to the requests waited for (None: all open ones); a spent or never bound
        handle goes to ``invalid``.
        """
        found, again = [], []
        for handle in tuple(self.open) if handles is None else handles:
            position = self.open.pop(handle, None)
            if position is None:
                invalid.append(InvalidCall(True, *self._missing(handle)))
                again += [here - self.spent[handle]] if handle in self.spent else []
            else:
                found.append(here - position)
                self.spent[handle] = position
        self.again = tuple(again)
        return tuple(found)

    def _missing(self, handle: Handle) -> tuple[str, str]:
        name = handle[0] if handle[1] is None else f"{handle[0]}@{handle[1]}"
        if handle in self.spent:
            return (
                "DS105",
                f"wait for {name}, whose request was waited for before\na handle is spent by its first wait; drop this one",
            )
        return (
            "DS106",
            f"wait for {name}, which no call before it on this rank bound\nbind it with `as: {name}` first",
        )
