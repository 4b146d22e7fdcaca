"""What the calls of a program name that a trace does not keep: tensors and roots, row by row."""

from __future__ import annotations

from collections.abc import Mapping

from distsim.program.records import BufferVec, CodeCall, Program, at
from distsim.report.columns import Table
from distsim.trace import Trace

#: Tensors of one call that are named.
_MOST_NAMES = 4


class Named:
    """``tensors``: the texts; ``tensor``, ``root``: a number for each row of the trace, -1 where there is none."""

    def __init__(self, program: Program, trace: Trace) -> None:
        self._program, self._table = program, Table()
        self._of_call: dict[int, str | None] = {}
        self.tensor: list[int] = []
        self.root: list[int] = []
        for rank, position, part in zip(*(trace[n].tolist() for n in ("rank", "position", "part")), strict=True):
            self._row(rank, position, part)
        self.tensors = self._table.things()

    def _row(self, rank: int, position: int, part: int) -> None:
        calls = self._program.code(rank).calls
        if not 0 <= position < len(calls):
            self.tensor.append(-1)
            self.root.append(-1)
            return
        call, row = calls[position], self._program.row_of[rank]
        call = call.parts[part] if 0 <= part < len(call.parts) else call
        text = self._text(call, row)
        self.tensor.append(self._table.add(text) if text else -1)
        root = call.fields.get("root")
        self.root.append(-1 if root is None else int(at(root, row)))

    def _text(self, call: CodeCall, row: int) -> str:
        """The names of a call's tensors, kept where they are the same on every rank."""
        kept = self._of_call.get(id(call), "")
        if kept:
            return kept
        buffers = _buffers(call.fields)
        text = ", ".join(dict.fromkeys(_label(b, row) for b in buffers[:_MOST_NAMES] if b.name))
        text += f", {len(buffers) - _MOST_NAMES} more" if len(buffers) > _MOST_NAMES else ""
        if all(isinstance(b.index, int) for b in buffers):
            self._of_call[id(call)] = text
        return text


def _label(buffer: BufferVec, row: int) -> str:
    index = at(buffer.index, row)
    return buffer.name if index == 0 else f"{buffer.name}@{index}"


def _buffers(fields: Mapping[str, object]) -> list[BufferVec]:
    given = [fields.get(name) for name in ("inputs", "outputs", "reads", "writes", "adds")]
    return [one for some in given if isinstance(some, tuple) for one in some if isinstance(one, BufferVec)]
