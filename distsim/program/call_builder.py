"""A call before it joins a code: its draft, reasons why it is invalid, and its requests.

Key idea: which request a handle refers to is decided in program order, as Python binds names.
Making a call binds its handle, waiting uses the handle up, and binding the name again drops the old
request.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from typing import NamedTuple

from distsim.common.records import dataclass
from distsim.operations.core.operation_base import Operation
from distsim.program.code import BoolVector, CallFields, CodeCall, Vec

#: A name and its index; the index is None for a name without one.
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


NO_REQUESTS = CallRequests()


@dataclass
class CallDraft:
    """A call without validity, endpoint and signature: vectors over its code's ranks."""

    row: type[Operation]
    site: int
    group: Vec = 0  # group ids
    peer: Vec | None = None  # p2p: global rank or ANY_SOURCE
    tag: Vec = 0
    is_async: bool = False
    invalid: list[InvalidCall] = field(default_factory=list)
    fields: CallFields = field(default_factory=dict)
    parts: tuple[CodeCall, ...] = ()
    guard: BoolVector | None = None


class OpenHandles:
    """The handles of one code: those whose request is open, and those that were waited for.

    Both map a handle to the position of the call that made its request.
    """

    def __init__(self) -> None:
        self.open: dict[Handle, int] = {}
        self.waited: dict[Handle, int] = {}

    def bind(self, handle: Handle | None, position: int) -> CallRequests:
        """The call at ``position`` makes a request and binds it to ``handle`` (None: drops it)."""
        if handle is None:
            return NO_REQUESTS
        overwritten = self.open.pop(handle, None)
        self.open[handle] = position
        drops = () if overwritten is None else (position - overwritten,)
        return CallRequests(handled=True, drops=drops)

    def wait(
        self, handles: Iterable[Handle] | None, position: int, invalid: list[InvalidCall]
    ) -> CallRequests:
        """The call at ``position`` waits for these handles (None: for all open ones).

        A handle that was waited for before, or never bound, is appended to ``invalid``.
        """
        waits: list[int] = []
        repeated: list[int] = []
        for handle in tuple(self.open) if handles is None else handles:
            request = self.open.pop(handle, None)
            if request is not None:
                waits.append(position - request)
                self.waited[handle] = request
                continue
            invalid.append(self._unusable(handle))
            if handle in self.waited:
                repeated.append(position - self.waited[handle])
        return CallRequests(waits=tuple(waits), again=tuple(repeated))

    def _unusable(self, handle: Handle) -> InvalidCall:
        name, index = handle
        shown = name if index is None else f"{name}@{index}"
        if handle in self.waited:
            return InvalidCall(
                True,
                "DS105",
                (
                    f"second wait for handle `{shown}`\n"
                    "remove this wait: a handle is valid for one wait"
                ),
            )
        return InvalidCall(
            True,
            "DS106",
            (
                f"the call waits for {shown}, but no earlier call on this rank creates {shown}\n"
                f"wait for {shown} only on the ranks that start this request, or start a request "
                f"with `as: {shown}` on this rank first"
            ),
        )
