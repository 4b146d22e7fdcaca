"""Which request a handle stands for: names bound, spent and dropped, in program order of one code."""

from __future__ import annotations

from collections.abc import Iterable

from distsim.program.assemble import Flaw

#: A name and its index; None where the name stands alone.
Handle = tuple[str, int | None]


class Handles:
    """Open handles of one code."""

    def __init__(self) -> None:
        self.open: dict[Handle, int] = {}  # handle -> position of the call that made the request
        self.spent: dict[Handle, int] = {}
        self.again: tuple[int, ...] = ()  # of the last `wait`: distances back to requests that had been waited for

    def bind(self, handle: Handle | None, here: int) -> tuple[bool, tuple[int, ...]]:
        """(is the request kept, distances back to the request that lost its name)."""
        if handle is None:
            return False, ()
        old = self.open.pop(handle, None)
        self.open[handle] = here
        return True, () if old is None else (here - old,)

    def wait(self, handles: Iterable[Handle] | None, here: int, invalid: list[Flaw]) -> tuple[int, ...]:
        """Distances back to the requests waited for (None: all open ones); a spent or never bound handle goes to ``invalid``."""
        found, again = [], []
        for handle in tuple(self.open) if handles is None else handles:
            position = self.open.pop(handle, None)
            if position is None:
                invalid.append(Flaw(True, *self._missing(handle)))
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
        return "DS106", f"wait for {name}, which no call before it on this rank bound\nbind it with `as: {name}` first"
