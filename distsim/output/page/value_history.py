"""The values of each rank's tensors over time."""

from __future__ import annotations

import numpy as np

from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.output.page.call_columns import InternTable
from distsim.output.page.data_encoding import Numbers, zigzag_deltas
from distsim.program.model import Program
from distsim.trace.model import Trace
from distsim.values import compute_values
from distsim.values.buffer_values import BufferValues
from distsim.values.numbers import format_content

#: Programs with more calls than this have no history of values; a history has at most this many
#: changes.
MAX_CALLS, MAX_CHANGES = 20_000, 100_000
#: Characters of a text.
_MAX_TEXT_LENGTH = 300


class ValueHistory:
    """``labels``, ``texts``: tables; ``columns``: a row for each change (rank, label, text, row of
    the call, -1 before the first).
    """

    def __init__(self) -> None:
        self._labels, self._texts = InternTable(), InternTable()
        self._rows: list[tuple[int, int, int, int]] = []

    def add(self, rank: int, label: str, text: str, row: int) -> None:
        """Record that a tensor has a new value from the end of the call in ``row`` on."""
        short = text if len(text) <= _MAX_TEXT_LENGTH else text[:_MAX_TEXT_LENGTH] + "…"
        self._rows.append((rank, self._labels.add(label), self._texts.add(short), row))

    @property
    def tables(self) -> dict[str, list[object]]:
        """The labels and texts that the columns refer to."""
        return {"labels": self._labels.things(), "texts": self._texts.things()}

    @property
    def columns(self) -> dict[str, Numbers]:
        """The changes as encoded columns."""
        rank, label, text, row = np.array(self._rows[:MAX_CHANGES], dtype=np.int64).reshape(-1, 4).T
        return {
            "held_rank": zigzag_deltas(rank),
            "held_label": label,
            "held_text": text,
            "held_row": zigzag_deltas(row + 1),
        }


def record_value_history(program: Program, trace: Trace) -> ValueHistory | None:
    """The values of tensors during a run; None if no values are known, or if the program has more
    than `MAX_CALLS` calls.
    """
    if program.call_count > MAX_CALLS or "numbers" not in program.features:
        return None
    values, found = compute_values(program, trace, at_calls=True), ValueHistory()
    for rank, label in values.buffers:
        state = _initial_value_text(values, rank, label)
        if state:
            found.add(rank, label, state, -1)
    rows = {
        key: row
        for row, key in enumerate(
            zip(*(trace[n].tolist() for n in ("rank", "position", "part")), strict=True)
        )
    }
    for (rank, position, part, side), seen in values.seen.items():
        row = rows.get((rank, position, part))
        if side == "out" and row is not None:
            call = program.call(rank, position)
            written = _written_buffers(call.parts[part] if part >= 0 else call)
            for buffer, content, shape, dtype in zip(
                written, seen.contents, seen.shapes, seen.dtypes, strict=False
            ):
                if buffer.name:
                    found.add(rank, buffer.label, format_content(content, shape, dtype), row)
    return found


def _written_buffers(call: ResolvedCall) -> tuple[TensorBuffer, ...]:
    """The buffers in the order of `distsim.values`: those that a compute writes and adds to, the
    targets of an assignment, else the outputs.
    """
    if call.op == "compute":
        return (*call.writes, *call.adds)
    return call.outputs or (call.writes if call.op == "assign" else ())


def _initial_value_text(values: BufferValues, rank: int, label: str) -> str:
    """The value of a tensor before the first call; empty if it is not declared."""
    try:
        state = values.initial(rank, label)
    except KeyError:
        return ""
    return format_content(state.content, state.shape, state.dtype)
