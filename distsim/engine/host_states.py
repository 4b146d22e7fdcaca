"""The host of each rank in an event-driven run: where it is, and when it entered each of its calls.

The engine (`distsim.engine.event_driven`) changes these states; this module only keeps them, and
writes the host times of a trace from them when the run is over.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distsim.common.arrays import IntArray
from distsim.engine.run_record import RunColumns
from distsim.semantics.form.instructions import Instruction
from distsim.semantics.form.linked_program import LinkedProgram


class HostStates:
    """The state of every host, in lists by rank.

    - ``position``: the call that it is in; -1 before its first call.
    - ``entered``: when it entered each of its calls, in order.
    - ``since``: when it blocked, or ended.
    - ``blocked``: whether it is blocked; ``open``: the row that it was last seen waiting for.
    - ``yielded``: whether it has let other hosts continue first.
    - ``waiting``: the set of ranks that wait to be woken.
    """

    def __init__(self, size: int) -> None:
        self.position = [-1] * size
        self.open = [-1] * size
        self.since = [0] * size
        self.waiting: set[int] = set()
        self.blocked = [False] * size
        self.yielded = [False] * size
        self.entered: list[list[int]] = [[] for _ in range(size)]

    def write(self, linked: LinkedProgram, columns: RunColumns) -> None:
        """Write when calls were posted and returned.

        A host enters a call when the previous call returns, so one list has both times.
        """
        posted = np.frombuffer(columns.posted, dtype=np.int64)
        returned = np.frombuffer(columns.returned, dtype=np.int64)
        rows_by_unit: dict[int, _CallRows] = {}
        for rank in linked.program.present:
            unit = linked.unit_of[rank]
            if id(unit) not in rows_by_unit:
                offsets = linked.program.codes[unit.code].offsets
                rows_by_unit[id(unit)] = _call_rows(offsets, unit.instructions)
            rows, call_numbers = rows_by_unit[id(unit)]
            times = np.array(self.entered[rank], dtype=np.int64)
            was_entered = call_numbers < len(times)
            has_returned = call_numbers + 1 < len(times)
            base = linked.base[rank]
            posted[rows[was_entered] + base] = times[call_numbers[was_entered]]
            returned[rows[has_returned] + base] = times[call_numbers[has_returned] + 1]


class _CallRows(NamedTuple):
    """The trace rows of the calls that a unit makes, and for each row the number of its call.

    Calls are numbered in the order in which the unit makes them.
    """

    rows: IntArray
    call_numbers: IntArray


def _call_rows(offsets: list[int], instructions: list[Instruction]) -> _CallRows:
    rows: list[int] = []
    call_numbers: list[int] = []
    # A dictionary keeps the order; a call may have several instructions. Positions after the last
    # call belong to instructions at the end of the code, which have no row.
    called = dict.fromkeys(i.position for i in instructions if i.position < len(offsets) - 1)
    for number, position in enumerate(called):
        rows_of_call = range(offsets[position], offsets[position + 1])
        rows += rows_of_call
        call_numbers += [number] * len(rows_of_call)
    return _CallRows(np.array(rows, dtype=np.int64), np.array(call_numbers, dtype=np.int64))
