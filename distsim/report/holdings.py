"""What each rank's tensors hold, and from when on."""

from __future__ import annotations

import numpy as np

from distsim.ops.records import Buffer, Call
from distsim.program.records import Program
from distsim.report.columns import Table
from distsim.report.packing import Numbers, steps
from distsim.trace import Trace
from distsim.values import compute_values
from distsim.values.numbers import show
from distsim.values.record import Values

#: Programs with more calls than this are not followed value by value, and no more changes than this are told.
MOST_CALLS, MOST_CHANGES = 20_000, 100_000
#: Characters of a text.
_MOST_TEXT = 300


class Holdings:
    """``labels``, ``texts``: tables; ``columns``: a row for each change (rank, label, text, row of the call, -1 before the first)."""

    def __init__(self) -> None:
        self._labels, self._texts = Table(), Table()
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, rank: int, label: str, text: str, row: int) -> None:
        short = text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "…"
        self._rows.append((rank, self._labels.add(label), self._texts.add(short), row))

    @property
    def tables(self) -> dict[str, list[object]]:
        return {"labels": self._labels.things(), "texts": self._texts.things()}

    @property
    def columns(self) -> dict[str, Numbers]:
        rank, label, text, row = np.array(self._rows[:MOST_CHANGES], dtype=np.int64).reshape(-1, 4).T
        return {"held_rank": steps(rank), "held_label": label, "held_text": text, "held_row": steps(row + 1)}


def holdings(program: Program, trace: Trace) -> Holdings | None:
    """What tensors hold through a run; None where no numbers are known, or the program has more than `MOST_CALLS` calls."""
    if program.call_count > MOST_CALLS or "numbers" not in program.features:
        return None
    values, found = compute_values(program, trace, at_calls=True), Holdings()
    for rank, label in values.buffers:
        state = _initial(values, rank, label)
        if state:
            found.add(rank, label, state, -1)
    rows = {key: row for row, key in enumerate(zip(*(trace[n].tolist() for n in ("rank", "position", "part")), strict=True))}
    for (rank, position, part, side), seen in values.seen.items():
        row = rows.get((rank, position, part))
        if side == "out" and row is not None:
            call = program.call(rank, position)
            written = _written(call.parts[part] if part >= 0 else call)
            for buffer, content, shape, dtype in zip(written, seen.contents, seen.shapes, seen.dtypes, strict=False):
                if buffer.name:
                    found.add(rank, buffer.label, show(content, shape, dtype), row)
    return found


def _written(call: Call) -> tuple[Buffer, ...]:
    """As `distsim.values` keeps them: what a compute writes and adds to, an assignment's targets, else the outputs."""
    if call.op == "compute":
        return (*call.writes, *call.adds)
    return call.outputs or (call.writes if call.op == "assign" else ())


def _initial(values: Values, rank: int, label: str) -> str:
    """What a tensor held before the first call; nothing for one that is not declared."""
    try:
        state = values.initial(rank, label)
    except KeyError:
        return ""
    return show(state.content, state.shape, state.dtype)
