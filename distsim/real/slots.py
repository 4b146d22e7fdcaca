"""What a rank records: a table of times in a mapped file, one line per row of the trace, written at the post and at the finish.

A line is written with plain stores into memory (a few hundred ns), and what is written survives the process, so a killed run still
shows the call that hung.
"""

from __future__ import annotations

import mmap
import os
from array import array
from pathlib import Path
from typing import Any, Final

#: Columns of a line. ``source``: the global rank whose message a receive from any source took. ``launched``: when a device came to the
#: work; -1 where the host does it.
COLUMNS: Final = ("posted", "returned", "finished", "waited", "source", "launched")
WIDTH: Final = len(COLUMNS)
POSTED, RETURNED, FINISHED, WAITED, SOURCE, LAUNCHED = range(WIDTH)


class Slots:
    """The table of one rank and one repetition; ``cells[row * WIDTH + column]``, -1 where nothing was written."""

    def __init__(self, path: Path, rows: int) -> None:
        self.rows = rows
        with open(path, "wb") as file:
            array("q", [-1] * (max(rows, 1) * WIDTH)).tofile(file)
        handle = os.open(path, os.O_RDWR)
        try:
            self._map: Any = mmap.mmap(handle, max(rows, 1) * WIDTH * 8)
        finally:
            os.close(handle)
        self._view = memoryview(self._map)
        self.cells = self._view.cast("q")

    def close(self) -> None:
        self.cells.release()
        self._view.release()
        self._map.close()


def read_slots(data: bytes) -> dict[str, array[int]]:
    """The columns of a table, from its bytes; an incomplete last line is left out."""
    whole = len(data) // (WIDTH * 8) * WIDTH * 8
    cells = array("q")
    cells.frombytes(data[:whole])
    return {name: cells[i::WIDTH] for i, name in enumerate(COLUMNS)}


__all__ = ["COLUMNS", "FINISHED", "LAUNCHED", "POSTED", "RETURNED", "SOURCE", "WAITED", "WIDTH", "Slots", "read_slots"]
