"""The hosts of a run in the order of time: where each is, and when it came to each of its calls."""

from __future__ import annotations

import numpy as np

from distsim.common.arrays import IntArray
from distsim.engine.run_record import RunColumns
from distsim.semantics.form.instructions import Instruction
from distsim.semantics.form.linked_program import LinkedProgram


class HostStates:
    """By rank: the call that a host is in (``position``), when it came to each of its calls
    (``entered``), when it blocked, or ended (``since``); whether it is ``blocked``, lets others go
    first (``yielded``), and the row that it was last seen waiting for (``open``). ``waiting``:
    those who wait to be roused."""

    def __init__(self, size: int) -> None:
        self.position, self.open = [-1] * size, [-1] * size
        self.since = [0] * size
        self.waiting: set[int] = set()
        self.blocked, self.yielded = ([False] * size for _ in range(2))
        self.entered: list[list[int]] = [[] for _ in range(size)]

    def write(self, linked: LinkedProgram, columns: RunColumns) -> None:
        """When calls were posted and returned: a host comes to a call when the one before has
        returned.
        """
        posted, returned = (
            np.frombuffer(column, dtype=np.int64) for column in (columns.posted, columns.returned)
        )
        known: dict[int, tuple[IntArray, IntArray]] = {}
        for rank in linked.program.present:
            unit = linked.unit_of[rank]
            if id(unit) not in known:
                known[id(unit)] = _entered_rows(
                    linked.program.codes[unit.code].offsets, unit.instructions
                )
            rows, which = known[id(unit)]
            times = np.array(self.entered[rank], dtype=np.int64)
            here, back = which < len(times), which + 1 < len(times)
            posted[rows[here] + linked.base[rank]] = times[which[here]]
            returned[rows[back] + linked.base[rank]] = times[which[back] + 1]


def _entered_rows(offsets: list[int], instructions: list[Instruction]) -> tuple[IntArray, IntArray]:
    """(rows of the calls that a unit makes, the how-manieth of its calls each belongs to)."""
    positions = list(
        dict.fromkeys(i.position for i in instructions if i.position < len(offsets) - 1)
    )
    pairs = [
        (row, k)
        for k, position in enumerate(positions)
        for row in range(offsets[position], offsets[position + 1])
    ]
    rows, which = zip(*pairs, strict=True) if pairs else ((), ())
    return np.array(rows, dtype=np.int64), np.array(which, dtype=np.int64)
