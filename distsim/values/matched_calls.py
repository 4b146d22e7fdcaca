"""What comes out of calls that met: messages, and collectives by the effect column of their row."""

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
    TensorContribution,
    align_contents,
    concatenate_contents,
    numel_of,
    slice_content,
)
from distsim.values.numbers import reduce_numbers, reinterpret

#: Operation, size of a group, the root's group rank -> the row's effect, equal entries one object.
EffectLookup = Callable[[str, int, int], tuple[OutputEffect, ...]]
#: (buffer, offset of the first element written, what is written there).
BufferWrite = tuple[TensorBuffer, int, Content]


class MatchedCalls:
    """Calls with one match id, by trace row, and what each read. ``left`` counts those that still
    have to finish.
    """

    def __init__(
        self,
        graph: LineageGraph,
        effect: EffectLookup,
        calls: Mapping[int, ResolvedCall],
        read: Mapping[int, tuple[Content, ...]],
        limit: int,
    ) -> None:
        self.graph, self.effect, self.calls, self.read, self.limit = (
            graph,
            effect,
            calls,
            read,
            limit,
        )
        self.left = 0
        first = next(iter(calls.values()))
        self.row: type[Operation] = OPERATIONS[first.op]
        self.kinds = {OPERATIONS[c.op].kind for c in calls.values()}
        self.agreed = len({(c.op, c.reduce_op, c.root) for c in calls.values()}) == 1
        self._launch: list[MatchedCalls] = (
            self._apart() if self.row.coalesces is not None and self.agreed else []
        )
        self.group = first.group
        self.by_rank = {c.rank: row for row, c in calls.items()}
        self._parts: dict[int, list[Content]] = {}
        self._combined: dict[tuple[int, str], Content] = {}

    def results(self, row: int) -> Iterator[BufferWrite]:
        """What one call writes."""
        call = self.calls[row]
        if self.kinds == {"p2p"}:
            yield from self._message(row, call)
        elif not self.agreed:
            for buffer in call.outputs:
                yield buffer, 0, self._undefined(call, buffer, row)
        elif self._launch:
            for part in self._launch:
                yield from part.results(row)
        else:
            yield from self._collective(row, call)

    def _apart(self) -> list[MatchedCalls]:
        """The parts of a coalesced launch, each as a match of its own; none where the members'
        lists differ.
        """
        parts_of = {row: self.row.separate(call) for row, call in self.calls.items()}
        self.agreed = len({self.row.agreement(call)["numel"] for call in self.calls.values()}) == 1
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
        sender = self._sender(row, call)
        if sender is not None and call.outputs:
            content, buffer = self.read[sender][0], call.outputs[0]
            yield buffer, 0, self._as_dtype(content, self.calls[sender].inputs[0], buffer, row)

    def _sender(self, row: int, call: ResolvedCall) -> int | None:
        """The send that a receive gets: the k-th of a rank gets the k-th, if a match holds several.

        None if there is no such send.
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
        """Whether a row has the rank and the peer of a call."""
        other = self.calls[row]
        return other.rank == call.rank and other.peer == call.peer

    def _as_dtype(
        self, content: Content, source: TensorBuffer, target: TensorBuffer, row: int
    ) -> Content:
        """What arrives in a buffer of another dtype: the same bits."""
        if source.dtype == target.dtype:
            return content
        found = []
        for piece in content:
            numel = (
                piece.numel
                * source.nbytes
                // max(source.numel, 1)
                * target.numel
                // max(target.nbytes, 1)
            )
            numbers = reinterpret(piece.numbers, piece.numel, target.dtype, self.limit)
            found.append(
                ContentPiece(
                    numel, self.graph.combine("bits", ((piece.node, piece.start),), row), 0, numbers
                )
            )
        return tuple(found)

    def _undefined(self, call: ResolvedCall, buffer: TensorBuffer, row: int) -> Content:
        node = self.graph.leaf(
            "undefined", TensorContribution(call.rank, f"{buffer.label} (undefined)", 0), row
        )
        return (ContentPiece(buffer.numel, node, 0, None),)

    # --- collectives ---
    def _collective(self, row: int, call: ResolvedCall) -> Iterator[BufferWrite]:
        root = -1 if call.root is None else self.group.group_rank(call.root)
        effects = self.effect(call.op, self.group.size, root)
        mine = effects[self.group.group_rank(call.rank)] if effects else None
        if mine is None or not call.outputs:
            return
        contents = [self._gathered(sources, call, row) for sources in mine]
        if len(contents) > 1 and len(call.outputs) == len(contents):
            yield from (
                (buffer, 0, content) for buffer, content in zip(call.outputs, contents, strict=True)
            )
            return
        buffer = call.outputs[0]
        for offset, content in zip(self._offsets(call, contents), contents, strict=False):
            yield buffer, offset, content

    def _offsets(self, call: ResolvedCall, contents: list[Content]) -> Iterator[int]:
        """Where each part of the output starts: by the splits given, else one after the other."""
        sizes = [numel_of(c) for c in contents]
        if call.output_splits is not None and len(call.output_splits) == len(contents):
            sizes = list(part_sizes(call.outputs[:1], len(contents), call.output_splits))
        return accumulate(sizes[:-1], initial=0)

    def _gathered(self, sources: tuple[InputPart, ...], call: ResolvedCall, row: int) -> Content:
        key = (
            id(sources),
            call.outputs[0].dtype,
        )  # equal entries of an effect are one object, see `_Execution.effect`
        if key not in self._combined:
            parts = [self._input_part(source.rank, source.part) for source in sources]
            if any(part is None for part in parts):
                self._combined[key] = self._undefined(call, call.outputs[0], row)
            else:
                self._combined[key] = self._reduce(
                    [p for p in parts if p is not None], sources, call, row
                )
        return self._combined[key]

    def _reduce(
        self, parts: list[Content], sources: tuple[InputPart, ...], call: ResolvedCall, row: int
    ) -> Content:
        dtypes = {self._dtype(source.rank) for source in sources}
        if len(parts) == 1:
            giver = self.calls[self.by_rank[self.group.ranks[sources[0].rank]]]
            return self._as_dtype(parts[0], giver.inputs[0], call.outputs[0], row)
        op, found = call.reduce_op or "sum", []
        for column in align_contents(parts):
            node = self.graph.combine(op, tuple((p.node, p.start) for p in column), row)
            numbers = reduce_numbers(op, [p.numbers for p in column]) if len(dtypes) == 1 else None
            found.append(ContentPiece(column[0].numel, node, 0, numbers))
        return tuple(found)

    def _dtype(self, group_rank: int) -> str:
        return self.calls[self.by_rank[self.group.ranks[group_rank]]].inputs[0].dtype

    def _input_part(self, group_rank: int, part: int) -> Content | None:
        row = self.by_rank.get(self.group.ranks[group_rank])
        if row is None or not self.read[row]:
            return None
        if row not in self._parts:
            self._parts[row] = self._split(self.calls[row], self.read[row])
        parts = self._parts[row]
        return parts[part] if part < len(parts) else None

    def _split(self, call: ResolvedCall, contents: tuple[Content, ...]) -> list[Content]:
        """The input's parts: its buffers, or the rows of the leading axis, or as many of them as
        the splits say.
        """
        n = self.group.size
        if self.row.input_parts == "one":
            return [concatenate_contents(contents)]
        if len(contents) == n and n > 1:
            return list(contents)
        marks = list(accumulate(part_sizes(call.inputs[:1], n, call.input_splits), initial=0))
        return [slice_content(contents[0], a, b) for a, b in pairwise(marks)]
