"""Arguments of calls that a trace does not contain: tensors and roots, row by row."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from distsim.output.page.call_columns import InternTable
from distsim.output.page.data_encoding import Numbers
from distsim.program.code import BufferVector, CodeCall, Vec, at_row
from distsim.program.model import Program
from distsim.trace.model import Trace

#: The largest number of tensors named per call.
_MAX_TENSOR_NAMES = 4


class CallArguments:
    """``tensors``: the texts; ``tensor`` (an index of a text) and ``root``: a number for each row
    of the trace, -1 if there is none.
    """

    def __init__(self, program: Program, trace: Trace) -> None:
        self._program, self._table = program, InternTable()
        self._known: dict[int, tuple[int | None, Vec]] = {}
        self._whole: dict[int, tuple[Numbers, Numbers] | None] = {}
        self.tensor, self.root = (np.full(len(trace), -1, dtype=np.int64) for _ in range(2))
        first = np.concatenate(
            [[0], np.cumsum(np.bincount(trace["rank"], minlength=program.world_size))]
        ).tolist()
        for rank in program.present:
            self._rank(trace, rank, slice(first[rank], first[rank + 1]))
        self.tensors = self._table.things()

    def _rank(self, trace: Trace, rank: int, rows: slice) -> None:
        """A rank that makes all calls of its code shares the columns of its code; for other ranks,
        each call is looked up.
        """
        number = self._program.code_of[rank]
        if number not in self._whole:
            self._whole[number] = self._of_code(number)
        known = self._whole[number]
        if known is not None and rows.stop - rows.start == len(known[0]):
            self.tensor[rows], self.root[rows] = known
            return
        found = [
            self._row(rank, *row)
            for row in zip(*(trace[n][rows].tolist() for n in ("position", "part")), strict=True)
        ]
        if found:
            self.tensor[rows], self.root[rows] = np.array(found, dtype=np.int64).T

    def _of_code(self, number: int) -> tuple[Numbers, Numbers] | None:
        """Tensor and root of every row of a code; None if its ranks differ in one of them."""
        calls = [one for call in self._program.codes[number].calls for one in (call, *call.parts)]
        found = [self._known.setdefault(id(call), self._of(call)) for call in calls]
        if any(tensor is None or not isinstance(root, int) for tensor, root in found):
            return None
        tensor, root = np.array(found, dtype=np.int64).reshape(-1, 2).T
        return tensor, root

    def _row(self, rank: int, position: int, part: int) -> tuple[int, int]:
        calls = self._program.code(rank).calls
        if not 0 <= position < len(calls):
            return -1, -1
        call = calls[position]
        call = call.parts[part] if 0 <= part < len(call.parts) else call
        known = self._known.get(id(call))
        if known is None:
            known = self._known[id(call)] = self._of(call)
        tensor, root = known
        row = self._program.row_of[rank]
        return self._number(call, row) if tensor is None else tensor, root if isinstance(
            root, int
        ) else int(root[row])

    def _of(self, call: CodeCall) -> tuple[int | None, Vec]:
        """The index of its tensors' names (None if they differ between ranks), and its root."""
        root = call.fields.get("root")
        same = all(isinstance(b.index, int) for b in _buffer_fields(call.fields))
        return self._number(call, 0) if same else None, -1 if root is None else root

    def _number(self, call: CodeCall, row: int) -> int:
        buffers = _buffer_fields(call.fields)
        text = ", ".join(
            dict.fromkeys(_buffer_label(b, row) for b in buffers[:_MAX_TENSOR_NAMES] if b.name)
        )
        text += (
            f", {len(buffers) - _MAX_TENSOR_NAMES} more" if len(buffers) > _MAX_TENSOR_NAMES else ""
        )
        return self._table.add(text) if text else -1


def _buffer_label(buffer: BufferVector, row: int) -> str:
    index = at_row(buffer.index, row)
    return buffer.name if index == 0 else f"{buffer.name}@{index}"


def _buffer_fields(fields: Mapping[str, object]) -> list[BufferVector]:
    given = [fields.get(name) for name in ("inputs", "outputs", "reads", "writes", "adds")]
    return [
        one
        for some in given
        if isinstance(some, tuple)
        for one in some
        if isinstance(one, BufferVector)
    ]
