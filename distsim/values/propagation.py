"""The pass that carries values through a finished run: reads at a call's start, writes at its end,
in order of effect.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from distsim.common.errors import UsageError
from distsim.common.expressions import Expression, ExpressionError
from distsim.operations.core.field_types import PerRank
from distsim.operations.core.operation_base import OutputEffect
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS
from distsim.program.code import at_row
from distsim.program.model import Program
from distsim.trace.model import Trace
from distsim.values.buffer_values import BufferSnapshot, BufferState, BufferValues
from distsim.values.effect_order import effect_events, match_table
from distsim.values.lineage import (
    Content,
    ContentPiece,
    LineageGraph,
    Numbers,
    TensorContribution,
    align_contents,
    concatenate_contents,
    numel_of,
    slice_content,
)
from distsim.values.matched_calls import MatchedCalls
from distsim.values.numbers import LIMIT_ELEMENTS, fill_numbers, numbers_of_content, widen_numbers


def compute_values(
    program: Program, trace: Trace, *, limit_elements: int = LIMIT_ELEMENTS, at_calls: bool = False
) -> BufferValues:
    """What every buffer holds after a run, numbers and lineage.

    Calls that met exchange what their send buffers hold when the transfer starts; results are there
    when it finishes. Calls that never started or never finished, as in a run that stood still, read
    or write nothing.

    Tensors of more than ``limit_elements`` elements carry numbers only while they are uniform.
    ``at_calls`` also keeps what each call read and wrote (`BufferValues.at_call`), for pictures.
    """
    return _ValuePass(program, trace, limit_elements, at_calls).values()


class _ValuePass:
    """Carries out the reads and writes of a run."""

    def __init__(self, program: Program, trace: Trace, limit: int, at_calls: bool) -> None:
        self.program, self.trace, self.limit, self.at_calls = program, trace, limit, at_calls
        self.graph = LineageGraph()
        self.buffers: dict[tuple[int, str], BufferState] = {}
        self.seen: dict[tuple[int, int, int, str], BufferSnapshot] = {}
        self.read: dict[int, tuple[Content, ...]] = {}  # trace row -> what it read
        self.rank, self.position, self.part = (
            trace[name].tolist() for name in ("rank", "position", "part")
        )
        self.started, self.finished = (
            trace[name].tolist() for name in ("started_ns", "finished_ns")
        )
        self.matches = match_table(trace)
        self.match: dict[int, MatchedCalls] = {}
        self._calls: dict[tuple[int, int], ResolvedCall] = {}
        self._names: dict[int, dict[str, object]] = {}
        self._effects: dict[tuple[str, int, int], tuple[OutputEffect, ...]] = {}

    def values(self) -> BufferValues:
        for event in effect_events(self.program, self.trace, self.matches):
            if event.finishes:
                self.finish(event.row)
            else:
                self.start(event.row)
        return BufferValues(self.graph, self.buffers, self.initial, self.limit, self.seen)

    # --- calls and buffers ---
    def call(self, row: int) -> ResolvedCall:
        rank, part = self.rank[row], self.part[row]
        code_call = self.program.code_call(rank, self.position[row])
        key = (rank, id(code_call))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self.program.resolve(rank, code_call)
        return call if part < 0 else call.parts[part]

    def names(self, rank: int) -> dict[str, object]:
        if rank not in self._names:
            self._names[rank] = {"rank": rank, **self.program.names_of(rank)}
        return self._names[rank]

    def state(self, rank: int, buffer: TensorBuffer) -> BufferState:
        """The buffer's state; an inline buffer's is fresh and forgotten."""
        found = self.buffers.get((rank, buffer.label))
        if found is None:
            found = self._state(rank, buffer)
            if buffer.name:
                self.buffers[rank, buffer.label] = found
        return found

    def _state(self, rank: int, buffer: TensorBuffer) -> BufferState:
        spec = self.program.tensors.get(buffer.name)
        env = {**self.names(rank), "copy": buffer.index}
        numbers = (
            None if spec is None or spec.value is None else self._fill(spec.value, env, buffer)
        )
        node = self.graph.leaf("initial", TensorContribution(rank, buffer.label, 0), -1)
        return BufferState(
            buffer.shape, buffer.dtype, (ContentPiece(buffer.numel, node, 0, numbers),)
        )

    def _fill(self, value: object, env: dict[str, object], buffer: TensorBuffer) -> Numbers:
        try:
            return fill_numbers(value, env, buffer.numel, buffer.dtype, self.limit)
        except ExpressionError as error:
            message = (
                f"{self.program.file}: the value of tensor {buffer.label} can't be worked out "
                f"on rank {env['rank']}: {error}"
            )
            raise UsageError(
                message, "mend its expression, or leave the numbers away with --no-values"
            ) from None

    def initial(self, rank: int, label: str) -> BufferState:
        name, _, index = label.partition("@")
        spec = self.program.tensors.get(name)
        if spec is None or spec.shape is None or not 0 <= rank < self.program.world_size:
            raise KeyError((rank, label))
        copy = int(index) if index.isdigit() else 0
        if copy >= at_row(spec.copies, rank):
            raise KeyError((rank, label))
        return self._state(
            rank, TensorBuffer(name, copy, tuple(at_row(n, rank) for n in spec.shape), spec.dtype)
        )

    def write(
        self, rank: int, buffer: TensorBuffer, content: Content, row: int, offset: int = 0
    ) -> None:
        """Replace elements from ``offset`` on; what the content does not reach keeps its old value,
        what does not fit is lost.
        """
        if not buffer.name:
            return
        state = self.state(rank, buffer)
        size = numel_of(state.content)
        stop = min(offset + numel_of(content), size)
        if offset == 0 and stop == size:
            state.content = slice_content(content, 0, size)
        else:
            state.content = concatenate_contents(
                (
                    slice_content(state.content, 0, offset),
                    slice_content(content, 0, stop - offset),
                    slice_content(state.content, stop, size),
                )
            )
        state.version += 1
        state.row = row

    # --- reads ---
    def start(self, row: int) -> None:
        if row in self.read:
            return
        call, rank = self.call(row), self.rank[row]
        buffers: Sequence[TensorBuffer] = call.inputs
        if call.op == "compute":
            buffers = (*call.reads, *call.adds)
        elif call.op == "assign":
            buffers = tuple(self._named(call))
        elif OPERATIONS[call.op].kind == "remote" and OPERATIONS[call.op].gets == "all":
            buffers = ()  # read over there, when it is done
        self.read[row] = tuple(self.state(rank, b).content for b in buffers)
        if self.at_calls:
            self._keep(row, "in", buffers, self.read[row])

    def _keep(
        self, row: int, side: str, buffers: Sequence[TensorBuffer], contents: tuple[Content, ...]
    ) -> None:
        if buffers:
            key = (self.rank[row], self.position[row], self.part[row], side)
            self.seen[key] = BufferSnapshot(
                contents, tuple(b.shape for b in buffers), tuple(b.dtype for b in buffers)
            )

    # --- writes ---
    def finish(self, row: int) -> None:
        call, rank = self.call(row), self.rank[row]
        written: Sequence[TensorBuffer] = call.outputs
        if call.op == "compute":
            self._compute(call, row)
            written = (*call.writes, *call.adds)
        elif call.op == "assign":
            self._assign(call, row)
            written = _assigned_buffers(call)
        elif OPERATIONS[call.op].kind == "remote" and call.peer is not None:
            written = self._remote(call, call.peer, row)
        elif self.matches.match_of[row] >= 0:
            match = self._match(self.matches.match_of[row])
            for buffer, offset, content in match.results(row):
                self.write(rank, buffer, content, row, offset)
            match.left -= 1
            if not match.left:
                self._forget(self.matches.match_of[row])
        if self.at_calls:
            self._keep(row, "out", written, tuple(self.state(rank, b).content for b in written))

    def _remote(self, call: ResolvedCall, peer: int, row: int) -> Sequence[TensorBuffer]:
        """A put writes what it read here on the other rank; a get writes here what the other rank
        holds. Returns what is written here.
        """
        if OPERATIONS[call.op].gives == "all":
            self.write(peer, call.outputs[0], self.read[row][0], row)
            return ()
        self.write(call.rank, call.outputs[0], self.state(peer, call.inputs[0]).content, row)
        return call.outputs

    def _match(self, match: int) -> MatchedCalls:
        if match not in self.match:
            rows = self.matches.members[match]
            for row in rows:
                if self.started[row] >= 0:
                    self.start(row)
            present = [row for row in rows if row in self.read]
            calls = {row: self.call(row) for row in present}
            self.match[match] = MatchedCalls(
                self.graph, self.effect, calls, {r: self.read[r] for r in present}, self.limit
            )
            self.match[match].left = sum(1 for row in rows if self.finished[row] >= 0)
        return self.match[match]

    def _forget(self, match: int) -> None:
        del self.match[match]
        for row in self.matches.members[match]:
            self.read[row] = ()

    def effect(self, op: str, size: int, root: int) -> tuple[OutputEffect, ...]:
        """The row's effect with equal entries made one object, so that ranks with the same result
        share it.
        """
        key = (op, size, root)
        if key not in self._effects:
            effects = OPERATIONS[op].effect(size, root)
            shared: dict[OutputEffect, OutputEffect] = {}
            by_id: dict[int, OutputEffect] = {}
            for effect in {id(effect): effect for effect in effects}.values():
                by_id[id(effect)] = None if effect is None else shared.setdefault(effect, effect)
            self._effects[key] = tuple([by_id[id(effect)] for effect in effects])
        return self._effects[key]

    def _new(self, kind: str, rank: int, buffer: TensorBuffer, row: int) -> int:
        version = self.state(rank, buffer).version + 1
        return self.graph.leaf(kind, TensorContribution(rank, buffer.label, version), row)

    def _compute(self, call: ResolvedCall, row: int) -> None:
        for buffer in call.writes:
            content = (
                ContentPiece(buffer.numel, self._new("write", call.rank, buffer, row), 0, None),
            )
            self.write(call.rank, buffer, content, row)
        for buffer in call.adds:
            self._add(call, buffer, row)

    def _add(self, call: ResolvedCall, buffer: TensorBuffer, row: int) -> None:
        """Accumulate. Memory that nothing wrote and no value filled counts as zeros, as gradients
        start: it adds nothing.
        """
        state = self.state(call.rank, buffer)
        new: Content = (
            ContentPiece(buffer.numel, self._new("add", call.rank, buffer, row), 0, None),
        )
        spec = self.program.tensors.get(buffer.name)
        if state.version or (spec is not None and spec.value is not None):
            columns = align_contents([state.content, new])
            new = tuple(
                ContentPiece(c[0].numel, self.graph.combine("add", _element_refs(c), row), 0, None)
                for c in columns
            )
        self.write(call.rank, buffer, new, row)

    # --- assign ---
    def _named(self, call: ResolvedCall) -> Iterator[TensorBuffer]:
        """The tensors whose names the value uses."""
        for name in sorted(_names_used_in(call.value, call.rank) & self.program.tensors.keys()):
            spec = self.program.tensors[name]
            if spec.shape is not None:
                yield TensorBuffer(
                    name, 0, tuple(at_row(n, call.rank) for n in spec.shape), spec.dtype
                )

    def _assign(self, call: ResolvedCall, row: int) -> None:
        sources = list(self._named(call))
        contents = self.read[row]
        env = {**self.names(call.rank), **dict(call.indices)}
        known = True
        for buffer, content in zip(sources, contents, strict=True):
            numbers = numbers_of_content(content, buffer.dtype, self.limit)
            known = known and numbers is not None
            env[buffer.name] = None if numbers is None else widen_numbers(numbers)
        for target in _assigned_buffers(call):
            here = {**env, "copy": target.index}
            numbers = self._fill(call.value, here, target) if known else None
            self.write(call.rank, target, self._assigned(call, target, contents, numbers, row), row)
        self.read[row] = ()

    def _assigned(
        self,
        call: ResolvedCall,
        target: TensorBuffer,
        contents: tuple[Content, ...],
        numbers: Numbers,
        row: int,
    ) -> Content:
        if not contents or any(numel_of(c) != target.numel for c in contents):
            return (
                ContentPiece(target.numel, self._new("assign", call.rank, target, row), 0, numbers),
            )
        columns = align_contents(contents)
        found, start = [], 0
        for column in columns:
            size = column[0].numel
            mine = (
                numbers if numbers is None or numbers.size == 1 else numbers[start : start + size]
            )
            found.append(
                ContentPiece(
                    size, self.graph.combine("assign", _element_refs(column), row), 0, mine
                )
            )
            start += size
        return tuple(found)


def _element_refs(column: Sequence[ContentPiece]) -> tuple[tuple[int, int], ...]:
    return tuple((piece.node, piece.start) for piece in column)


def _assigned_buffers(call: ResolvedCall) -> tuple[TensorBuffer, ...]:
    return call.outputs or call.writes


def _names_used_in(value: object, rank: int) -> frozenset[str]:
    if isinstance(value, PerRank):
        return _names_used_in(value.get(rank), rank)
    if isinstance(value, Expression):
        return frozenset(value.names)
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(_names_used_in(item, rank) for item in value))
    return frozenset()
