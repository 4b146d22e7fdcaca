"""What matched calls write: messages, and collectives by the effect of their operation.

Key idea: the effect of a collective (`Operation.effect`) lists, for each group rank, the parts of
inputs that make up its output. Ranks with the same entry get the same content object, so a
reduction is computed once and not per rank.

Calls that matched but differ in operation, reduction or root have undefined results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, pairwise

from distsim.operations.core.operation_base import InputPart, Operation, OutputEffect
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer, part_sizes
from distsim.operations.registry import OPERATIONS
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
from distsim.values.numbers import reduce_numbers, reinterpret

#: (operation, group size, group rank of the root or -1) -> the effect by group rank; equal entries
#: are one object.
EffectLookup = Callable[[str, int, int], tuple[OutputEffect, ...]]
#: (buffer, offset of the first element to write, new content from there on).
BufferWrite = tuple[TensorBuffer, int, Content]


class MatchedCalls:
    """The calls of one match by trace row, and what each of them read.

    - ``unfinished``: how many of the calls have yet to finish.
    - ``agreed``: all calls have the same operation, reduction and root (and, for a coalesced
      launch, the same sizes).
    - ``_parts_of_launch``: for a coalesced launch, each part as a match of its own.
    """

    def __init__(
        self,
        graph: LineageGraph,
        effect: EffectLookup,
        calls: Mapping[int, ResolvedCall],
        read: Mapping[int, tuple[Content, ...]],
        limit: int,
    ) -> None:
        self.graph = graph
        self.effect = effect
        self.calls = calls
        self.read = read
        self.limit = limit
        self.unfinished = 0
        first = next(iter(calls.values()))
        self.operation: type[Operation] = OPERATIONS[first.op]
        self.kinds = {OPERATIONS[call.op].kind for call in calls.values()}
        self.agreed = len({(call.op, call.reduce_op, call.root) for call in calls.values()}) == 1
        self._parts_of_launch: list[MatchedCalls] = []
        if self.operation.coalesces is not None and self.agreed:
            self._parts_of_launch = self._separate()
        self.group = first.group
        self.row_of_rank = {call.rank: row for row, call in calls.items()}
        self._input_parts: dict[int, list[Content]] = {}
        self._outputs: dict[tuple[int, str], Content] = {}

    def results(self, row: int) -> Iterator[BufferWrite]:
        """What one call writes."""
        call = self.calls[row]
        if self.kinds == {"p2p"}:
            yield from self._message(row, call)
        elif not self.agreed:
            for buffer in call.outputs:
                yield buffer, 0, self._undefined(call, buffer, row)
        elif self._parts_of_launch:
            for part in self._parts_of_launch:
                yield from part.results(row)
        else:
            yield from self._collective(row, call)

    def _separate(self) -> list[MatchedCalls]:
        """The parts of a coalesced launch, each as a match of its own.

        None if the lists of the members differ; then the calls do not agree.
        """
        operation = self.operation
        parts_of = {row: operation.separate(call) for row, call in self.calls.items()}
        sizes = {operation.agreement(call)["numel"] for call in self.calls.values()}
        self.agreed = len(sizes) == 1
        if not self.agreed:
            return []
        count = len(next(iter(parts_of.values())))
        matches = []
        for k in range(count):
            calls = {row: parts[k] for row, parts in parts_of.items()}
            read = {row: self.read[row][k : k + 1] for row in parts_of}
            matches.append(MatchedCalls(self.graph, self.effect, calls, read, self.limit))
        return matches

    # --- messages ---
    def _message(self, row: int, call: ResolvedCall) -> Iterator[BufferWrite]:
        if OPERATIONS[call.op].direction != "recv":
            return
        send = self._send_for(row, call)
        if send is not None and call.outputs:
            source, target = self.calls[send].inputs[0], call.outputs[0]
            yield target, 0, self._as_dtype(self.read[send][0], source, target, row)

    def _send_for(self, row: int, call: ResolvedCall) -> int | None:
        """The row of the send whose message a receive gets; None if there is none.

        If a match contains several messages, the k-th receive of a rank gets the k-th send to it.
        """
        sends = self._rows_of("send")
        if len(sends) == 1:
            return sends[0]
        to_receiver = [other for other in sends if self.calls[other].peer == call.rank]
        from_peer = [other for other in to_receiver if call.peer in (None, self.calls[other].rank)]
        own_receives = [
            other for other in self._rows_of("recv") if self._has_same_ends(other, call)
        ]
        k = own_receives.index(row)
        return from_peer[k] if k < len(from_peer) else None

    def _rows_of(self, direction: str) -> list[int]:
        calls = self.calls.items()
        return [row for row, call in calls if OPERATIONS[call.op].direction == direction]

    def _has_same_ends(self, row: int, call: ResolvedCall) -> bool:
        """Whether the call of a row has the same rank and peer as another call."""
        other = self.calls[row]
        return other.rank == call.rank and other.peer == call.peer

    def _as_dtype(
        self, content: Content, source: TensorBuffer, target: TensorBuffer, row: int
    ) -> Content:
        """What arrives in a buffer of another dtype: the same bits, read as that dtype."""
        if source.dtype == target.dtype:
            return content
        pieces: list[ContentPiece] = []
        for piece in content:
            # Integer division after each factor: do not reorder.
            nbytes = piece.numel * source.nbytes // max(source.numel, 1)
            numel = nbytes * target.numel // max(target.nbytes, 1)
            numbers = reinterpret(piece.numbers, piece.numel, target.dtype, self.limit)
            node = self.graph.combine("bits", ((piece.node, piece.start),), row)
            pieces.append(ContentPiece(numel, node, 0, numbers))
        return tuple(pieces)

    def _undefined(self, call: ResolvedCall, buffer: TensorBuffer, row: int) -> Content:
        """Content that no contribution explains, because the calls do not fit each other."""
        own = TensorContribution(call.rank, f"{buffer.label} (undefined)", 0)
        node = self.graph.leaf("undefined", own, row)
        return (ContentPiece(buffer.numel, node, 0, None),)

    # --- collectives ---
    def _collective(self, row: int, call: ResolvedCall) -> Iterator[BufferWrite]:
        root = -1 if call.root is None else self.group.group_rank(call.root)
        effects = self.effect(call.op, self.group.size, root)
        effect = effects[self.group.group_rank(call.rank)] if effects else None
        if effect is None or not call.outputs:
            return
        contents = [self._output_part(sources, call, row) for sources in effect]
        if len(contents) > 1 and len(call.outputs) == len(contents):
            for buffer, content in zip(call.outputs, contents, strict=True):
                yield buffer, 0, content
            return
        buffer = call.outputs[0]
        for offset, content in zip(self._offsets(call, contents), contents, strict=False):
            yield buffer, offset, content

    def _offsets(self, call: ResolvedCall, contents: list[Content]) -> Iterator[int]:
        """Where each part of the output starts: by the output splits, or one after the other."""
        sizes = [numel_of(content) for content in contents]
        if call.output_splits is not None and len(call.output_splits) == len(contents):
            sizes = list(part_sizes(call.outputs[:1], len(contents), call.output_splits))
        return accumulate(sizes[:-1], initial=0)

    def _output_part(self, sources: tuple[InputPart, ...], call: ResolvedCall, row: int) -> Content:
        """One part of a call's output, made of parts of inputs. Ranks share it by dtype."""
        # By identity: equal entries of an effect are one object (see `EffectLookup`).
        key = (id(sources), call.outputs[0].dtype)
        if key not in self._outputs:
            parts = [self._input_part(source.rank, source.part) for source in sources]
            present = [part for part in parts if part is not None]
            if len(present) < len(parts):
                self._outputs[key] = self._undefined(call, call.outputs[0], row)
            else:
                self._outputs[key] = self._reduce(present, sources, call, row)
        return self._outputs[key]

    def _reduce(
        self, parts: list[Content], sources: tuple[InputPart, ...], call: ResolvedCall, row: int
    ) -> Content:
        """The reduction of some parts; a single part is only moved.

        Members with different dtypes have unknown numbers, but a known lineage.
        """
        dtypes = {self._call_of(source.rank).inputs[0].dtype for source in sources}
        if len(parts) == 1:
            source_buffer = self._call_of(sources[0].rank).inputs[0]
            return self._as_dtype(parts[0], source_buffer, call.outputs[0], row)
        op = call.reduce_op or "sum"
        pieces: list[ContentPiece] = []
        for column in align_contents(parts):
            node = self.graph.combine(op, tuple((p.node, p.start) for p in column), row)
            numbers: Numbers = None
            if len(dtypes) == 1:
                numbers = reduce_numbers(op, [piece.numbers for piece in column])
            pieces.append(ContentPiece(column[0].numel, node, 0, numbers))
        return tuple(pieces)

    def _call_of(self, group_rank: int) -> ResolvedCall:
        return self.calls[self.row_of_rank[self.group.ranks[group_rank]]]

    def _input_part(self, group_rank: int, part: int) -> Content | None:
        """A part of a member's input; None if the member did not arrive or has no such part."""
        row = self.row_of_rank.get(self.group.ranks[group_rank])
        if row is None or not self.read[row]:
            return None
        if row not in self._input_parts:
            self._input_parts[row] = self._split(self.calls[row], self.read[row])
        parts = self._input_parts[row]
        return parts[part] if part < len(parts) else None

    def _split(self, call: ResolvedCall, contents: tuple[Content, ...]) -> list[Content]:
        """The parts of a call's input, one per member of the group.

        They are its buffers, or ranges along the leading axis of its only buffer (equal ones, or
        those of the input splits). For some operations the whole input is one part.
        """
        size = self.group.size
        if self.operation.input_parts == "one":
            return [concatenate_contents(contents)]
        if len(contents) == size and size > 1:
            return list(contents)
        sizes = part_sizes(call.inputs[:1], size, call.input_splits)
        borders = accumulate(sizes, initial=0)
        return [slice_content(contents[0], start, stop) for start, stop in pairwise(borders)]
