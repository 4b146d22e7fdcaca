"""Carries values through a finished run, and returns what every buffer contains at its end.

Key idea: calls read their inputs when they start and write their outputs when they finish, in the
order of `distsim.values.effect_order`. Numbers and lineage travel together, as contents
(`distsim.values.lineage`). Contents are immutable, so a read costs nothing and keeps its data.

What matched calls exchange is computed in `distsim.values.matched_calls`; the numbers of fills and
expressions in `distsim.values.numbers`.
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
from distsim.values.numbers import (
    LIMIT_ELEMENTS,
    broadcast_numbers,
    fill_numbers,
    numbers_of_content,
    widen_numbers,
)


def compute_values(
    program: Program, trace: Trace, *, limit_elements: int = LIMIT_ELEMENTS, at_calls: bool = False
) -> BufferValues:
    """What every buffer contains after a run: numbers and lineage.

    Matched calls exchange what their send buffers contain when the transfer starts. The results are
    written when it finishes. Calls that never started read nothing, and calls that never finished
    write nothing (for example in a run that hangs).

    Tensors of more than ``limit_elements`` elements have numbers only while they are uniform.
    ``at_calls`` also keeps what each call read and wrote (`BufferValues.at_call`), for pictures.
    """
    return _ValuePass(program, trace, limit_elements, at_calls).values()


class _ValuePass:
    """One pass over the reads and writes of a run.

    - ``buffers``: the state of each named buffer that has been used.
    - ``read``: by trace row, what the call read; emptied when it is not needed any more.
    - ``seen``: what calls read and wrote, if ``at_calls``.
    - ``open_matches``: matches with a call that has finished, and one that has yet to finish.
    """

    def __init__(self, program: Program, trace: Trace, limit: int, at_calls: bool) -> None:
        self.program = program
        self.trace = trace
        self.limit = limit
        self.at_calls = at_calls
        self.graph = LineageGraph()
        self.buffers: dict[tuple[int, str], BufferState] = {}
        self.seen: dict[tuple[int, int, int, str], BufferSnapshot] = {}
        self.read: dict[int, tuple[Content, ...]] = {}
        self.rank = trace["rank"].tolist()
        self.position = trace["position"].tolist()
        self.part = trace["part"].tolist()
        self.started = trace["started_ns"].tolist()
        self.finished = trace["finished_ns"].tolist()
        self.matches = match_table(trace)
        self.open_matches: dict[int, MatchedCalls] = {}
        self._calls: dict[tuple[int, int], ResolvedCall] = {}
        self._names: dict[int, dict[str, object]] = {}
        self._effects: dict[tuple[str, int, int], tuple[OutputEffect, ...]] = {}

    def values(self) -> BufferValues:
        """Run the pass."""
        for event in effect_events(self.program, self.trace, self.matches):
            if event.finishes:
                self.finish(event.row)
            else:
                self.start(event.row)
        return BufferValues(self.graph, self.buffers, self.initial, self.limit, self.seen)

    # --- calls and buffers ---
    def call(self, row: int) -> ResolvedCall:
        """The call of a trace row, or the part of a batch."""
        rank, part = self.rank[row], self.part[row]
        code_call = self.program.code_call(rank, self.position[row])
        key = (rank, id(code_call))
        call = self._calls.get(key)
        if call is None:
            call = self._calls[key] = self.program.resolve(rank, code_call)
        return call if part < 0 else call.parts[part]

    def names(self, rank: int) -> dict[str, object]:
        """The values of names in expressions on a rank."""
        if rank not in self._names:
            self._names[rank] = {"rank": rank, **self.program.names_of(rank)}
        return self._names[rank]

    def state(self, rank: int, buffer: TensorBuffer) -> BufferState:
        """The state of a buffer. An inline buffer has no name: its state is new each time."""
        state = self.buffers.get((rank, buffer.label))
        if state is None:
            state = self._initial_state(rank, buffer)
            if buffer.name:
                self.buffers[rank, buffer.label] = state
        return state

    def _initial_state(self, rank: int, buffer: TensorBuffer) -> BufferState:
        spec = self.program.tensors.get(buffer.name)
        numbers: Numbers = None
        if spec is not None and spec.value is not None:
            names = {**self.names(rank), "copy": buffer.index}
            numbers = self._fill(spec.value, names, buffer)
        node = self.graph.leaf("initial", TensorContribution(rank, buffer.label, 0), -1)
        content = (ContentPiece(buffer.numel, node, 0, numbers),)
        return BufferState(buffer.shape, buffer.dtype, content)

    def _fill(self, value: object, names: dict[str, object], buffer: TensorBuffer) -> Numbers:
        """The numbers of a buffer that is filled with a value from the scenario."""
        try:
            return fill_numbers(value, names, buffer.numel, buffer.dtype, self.limit)
        except ExpressionError as error:
            message = (
                f"{self.program.file}: cannot compute the value of tensor {buffer.label} on rank "
                f"{names['rank']}: {error}"
            )
            raise UsageError(
                message, "correct its expression, or skip values with --no-values"
            ) from None

    def initial(self, rank: int, label: str) -> BufferState:
        """The initial state of a declared tensor. Raises KeyError if it is not on the rank."""
        name, _, index = label.partition("@")
        spec = self.program.tensors.get(name)
        if spec is None or spec.shape is None or not 0 <= rank < self.program.world_size:
            raise KeyError((rank, label))
        copy = int(index) if index.isdigit() else 0
        if copy >= at_row(spec.copies, rank):
            raise KeyError((rank, label))
        shape = tuple(at_row(size, rank) for size in spec.shape)
        return self._initial_state(rank, TensorBuffer(name, copy, shape, spec.dtype))

    def write(
        self, rank: int, buffer: TensorBuffer, content: Content, row: int, offset: int = 0
    ) -> None:
        """Replace the elements from ``offset`` on, as far as the content goes.

        Elements after it keep their value. What does not fit into the buffer is lost.
        """
        if not buffer.name:
            return
        state = self.state(rank, buffer)
        size = numel_of(state.content)
        stop = min(offset + numel_of(content), size)
        if offset == 0 and stop == size:
            state.content = slice_content(content, 0, size)
        else:
            before = slice_content(state.content, 0, offset)
            written = slice_content(content, 0, stop - offset)
            after = slice_content(state.content, stop, size)
            state.content = concatenate_contents((before, written, after))
        state.version += 1
        state.row = row

    # --- reads ---
    def start(self, row: int) -> None:
        """Read the inputs of a call, unless that is done already."""
        if row in self.read:
            return
        buffers = self._read_buffers(self.call(row))
        rank = self.rank[row]
        self.read[row] = tuple(self.state(rank, buffer).content for buffer in buffers)
        if self.at_calls:
            self._keep(row, "in", buffers, self.read[row])

    def _read_buffers(self, call: ResolvedCall) -> Sequence[TensorBuffer]:
        """The buffers that a call reads on its own rank when it starts."""
        if call.op == "compute":
            return (*call.reads, *call.adds)
        if call.op == "assign":
            return tuple(self._tensors_in_value(call))
        operation = OPERATIONS[call.op]
        if operation.kind == "remote" and operation.gets == "all":
            return ()  # a get reads on the other rank, when it finishes
        return call.inputs

    def _keep(
        self, row: int, side: str, buffers: Sequence[TensorBuffer], contents: tuple[Content, ...]
    ) -> None:
        """Keep what a call read (``side`` "in") or wrote ("out")."""
        if not buffers:
            return
        key = (self.rank[row], self.position[row], self.part[row], side)
        shapes = tuple(buffer.shape for buffer in buffers)
        dtypes = tuple(buffer.dtype for buffer in buffers)
        self.seen[key] = BufferSnapshot(contents, shapes, dtypes)

    # --- writes ---
    def finish(self, row: int) -> None:
        """Write the outputs of a call."""
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
            self._finish_matched(row)
        if self.at_calls:
            contents = tuple(self.state(rank, buffer).content for buffer in written)
            self._keep(row, "out", written, contents)

    def _finish_matched(self, row: int) -> None:
        """Write what a call gets from the calls that matched it."""
        number = self.matches.match_of[row]
        match = self._match(number)
        for buffer, offset, content in match.results(row):
            self.write(self.rank[row], buffer, content, row, offset)
        match.unfinished -= 1
        if not match.unfinished:
            self._forget(number)

    def _remote(self, call: ResolvedCall, peer: int, row: int) -> Sequence[TensorBuffer]:
        """Carry out a one-sided call; returns the buffers that it writes on its own rank.

        A put writes what it read at its start on the other rank. A get writes what the other rank's
        buffer contains at its finish.
        """
        if OPERATIONS[call.op].gives == "all":
            self.write(peer, call.outputs[0], self.read[row][0], row)
            return ()
        self.write(call.rank, call.outputs[0], self.state(peer, call.inputs[0]).content, row)
        return call.outputs

    def _match(self, number: int) -> MatchedCalls:
        """The calls of a match, with what they read; created when the first of them finishes."""
        if number not in self.open_matches:
            rows = self.matches.members[number]
            # The first call to finish needs the inputs of all members, also of those that start
            # later in the order of effects.
            for row in rows:
                if self.started[row] >= 0:
                    self.start(row)
            calls = {row: self.call(row) for row in rows if row in self.read}
            read = {row: self.read[row] for row in calls}
            match = MatchedCalls(self.graph, self.effect, calls, read, self.limit)
            match.unfinished = sum(1 for row in rows if self.finished[row] >= 0)
            self.open_matches[number] = match
        return self.open_matches[number]

    def _forget(self, number: int) -> None:
        """Free what the calls of a match read."""
        del self.open_matches[number]
        for row in self.matches.members[number]:
            self.read[row] = ()

    def effect(self, op: str, size: int, root: int) -> tuple[OutputEffect, ...]:
        """The effect of an operation by group rank, in which equal entries are one object.

        So ranks with the same result can share it (see `MatchedCalls`).
        """
        key = (op, size, root)
        if key not in self._effects:
            effects = OPERATIONS[op].effect(size, root)
            distinct = {id(effect): effect for effect in effects}
            # Compare by value only once per object: many entries are one object already.
            shared: dict[OutputEffect, OutputEffect] = {}
            shared_by_id: dict[int, OutputEffect] = {}
            for number, effect in distinct.items():
                shared_by_id[number] = None if effect is None else shared.setdefault(effect, effect)
            self._effects[key] = tuple([shared_by_id[id(effect)] for effect in effects])
        return self._effects[key]

    def _new_leaf(self, kind: str, rank: int, buffer: TensorBuffer, row: int) -> int:
        """A node for the next version of a buffer, written by its own rank."""
        version = self.state(rank, buffer).version + 1
        return self.graph.leaf(kind, TensorContribution(rank, buffer.label, version), row)

    def _compute(self, call: ResolvedCall, row: int) -> None:
        for buffer in call.writes:
            node = self._new_leaf("write", call.rank, buffer, row)
            content = (ContentPiece(buffer.numel, node, 0, None),)
            self.write(call.rank, buffer, content, row)
        for buffer in call.adds:
            self._add(call, buffer, row)

    def _add(self, call: ResolvedCall, buffer: TensorBuffer, row: int) -> None:
        """Accumulate into a buffer, as gradients are accumulated.

        A buffer that was never written and has no initial value counts as zeros: its content
        contributes nothing to the sum.
        """
        state = self.state(call.rank, buffer)
        node = self._new_leaf("add", call.rank, buffer, row)
        content: Content = (ContentPiece(buffer.numel, node, 0, None),)
        spec = self.program.tensors.get(buffer.name)
        has_initial_value = spec is not None and spec.value is not None
        if state.version or has_initial_value:
            sums: list[ContentPiece] = []
            for column in align_contents([state.content, content]):
                node = self.graph.combine("add", _element_refs(column), row)
                sums.append(ContentPiece(column[0].numel, node, 0, None))
            content = tuple(sums)
        self.write(call.rank, buffer, content, row)

    # --- assign ---
    def _tensors_in_value(self, call: ResolvedCall) -> Iterator[TensorBuffer]:
        """The tensors whose names the value of an `assign` uses."""
        for name in sorted(_names_used_in(call.value, call.rank) & self.program.tensors.keys()):
            spec = self.program.tensors[name]
            if spec.shape is not None:
                shape = tuple(at_row(size, call.rank) for size in spec.shape)
                yield TensorBuffer(name, 0, shape, spec.dtype)

    def _assign(self, call: ResolvedCall, row: int) -> None:
        contents = self.read[row]
        names = {**self.names(call.rank), **dict(call.indices)}
        all_known = True
        for buffer, content in zip(self._tensors_in_value(call), contents, strict=True):
            numbers = numbers_of_content(content, buffer.dtype, self.limit)
            all_known = all_known and numbers is not None
            names[buffer.name] = None if numbers is None else widen_numbers(numbers)
        for target in _assigned_buffers(call):
            target_numbers: Numbers = None
            operands = {
                buffer.name: broadcast_numbers(names[buffer.name], buffer, target)
                for buffer in self._tensors_in_value(call)
            }
            if all_known and not any(numbers is None for numbers in operands.values()):
                environment = {**names, **operands, "copy": target.index}
                target_numbers = self._fill(call.value, environment, target)
            content = self._assigned_content(call, target, contents, target_numbers, row)
            self.write(call.rank, target, content, row)
        self.read[row] = ()

    def _assigned_content(
        self,
        call: ResolvedCall,
        target: TensorBuffer,
        contents: tuple[Content, ...],
        numbers: Numbers,
        row: int,
    ) -> Content:
        """The new content of a target.

        It is made element by element of the tensors in the value if all have the target's size;
        otherwise it counts as new data of the rank.
        """
        if not contents or any(numel_of(content) != target.numel for content in contents):
            node = self._new_leaf("assign", call.rank, target, row)
            return (ContentPiece(target.numel, node, 0, numbers),)
        pieces: list[ContentPiece] = []
        start = 0
        for column in align_contents(contents):
            size = column[0].numel
            piece_numbers = numbers
            if numbers is not None and numbers.size != 1:
                piece_numbers = numbers[start : start + size]
            node = self.graph.combine("assign", _element_refs(column), row)
            pieces.append(ContentPiece(size, node, 0, piece_numbers))
            start += size
        return tuple(pieces)


def _element_refs(column: Sequence[ContentPiece]) -> tuple[tuple[int, int], ...]:
    """The parents of a node that combines the pieces of a column."""
    return tuple((piece.node, piece.start) for piece in column)


def _assigned_buffers(call: ResolvedCall) -> tuple[TensorBuffer, ...]:
    """The buffers that an `assign` fills."""
    return call.outputs or call.writes


def _names_used_in(value: object, rank: int) -> frozenset[str]:
    """The names in the expressions of a value, as it is on one rank."""
    if isinstance(value, PerRank):
        return _names_used_in(value.get(rank), rank)
    if isinstance(value, Expression):
        return frozenset(value.names)
    if isinstance(value, (list, tuple)):
        return frozenset().union(*(_names_used_in(item, rank) for item in value))
    return frozenset()
