"""Buffers touched while a request still uses them. A rank's program is fixed, so no run is needed
to see it.

A request is open from the call that makes it to the call that waits for it (to the end, where none
does). While it only reads its buffer (isend, the giving side of a collective), others may read it;
while it writes it, nobody may touch it. A buffer is one copy of a named tensor on one rank; what
has no name is memory of its own. Where a program names streams, what one of them does is open for
the others until they wait for it (`StreamOrder`), whatever the back end: a program means the same
under all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import field

import numpy as np
from numpy.typing import NDArray

from distsim.common.expressions import Expression
from distsim.common.records import dataclass
from distsim.operations.core.field_types import PerRank
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, SharedCode, at_row
from distsim.program.features import makes_request
from distsim.program.model import Program
from distsim.program.step_traits import field_names_of

#: Who works: a stream by its name ("" is the default one), or a request by the position of its
#: call.
StreamOrRequest = str | int
BufferKey = tuple[str, int]
#: (buffer, does it write) of one request or local call.
BufferUses = tuple[tuple[BufferKey, bool], ...]


@dataclass(frozen=True, slots=True)
class DataRace:
    """A buffer's use while a request is open. ``position`` and ``part`` are the use's, ``opened``
    the request's position, for the first of ``ranks``. ``code`` is that of the finding: DS402
    (written while in use) or DS403 (read while being filled). ``streams``: what it races with is
    another stream's work, not a request."""

    code: str
    label: str
    position: int
    part: int
    opened: int
    ranks: list[int] = field(default_factory=list)
    streams: bool = False


def find_data_races(program: Program, reached: Sequence[int]) -> tuple[DataRace, ...]:
    """All data races of calls that were reached (``reached[rank]`` is a position), one per pair of
    places and buffer.
    """
    found: dict[tuple[str, int, int, str], DataRace] = {}
    for code in program.codes:
        if not _may_race(code):
            continue
        for row, ranks in _rows_by_buffer_use(code):
            for race in BufferUseWalk(program, code, row).races():
                late = [r for r in ranks if race.position <= reached[r]]
                call, opened = code.calls[race.position], code.calls[race.opened]
                key = (
                    race.code,
                    opened.site,
                    (call.parts[race.part] if race.part >= 0 else call).site,
                    race.label,
                )
                if late:
                    found.setdefault(key, race).ranks.extend(
                        r for r in late if r not in found[key].ranks
                    )
    return tuple(found.values())


def _may_race(code: SharedCode) -> bool:
    """Some request of the code uses a named buffer, or there are streams."""
    calls = [call for call in code.distinct_calls(parts=False) if makes_request(call) or call.parts]
    return uses_streams(code) or any(_uses_named_buffer(call) for call in calls)


def _uses_named_buffer(call: CodeCall) -> bool:
    return any(
        buffer.name
        for part in (call, *call.parts)
        for name in ("inputs", "outputs")
        for buffer in part.fields.get(name, ())
    )


def _rows_by_buffer_use(code: SharedCode) -> Iterator[tuple[int, list[int]]]:
    """Rows that use buffers alike: (one of them, their ranks)."""
    masks: list[NDArray[np.generic]] = [g for g in code.guards or () if g is not None]
    for call in code.distinct_calls(parts=False):
        for part in (call, *call.parts):
            masks += [b.index for b in _buffers(part) if isinstance(b.index, np.ndarray)]
            masks += [part.invalid[0]] if part.invalid is not None else []
            if "root" in part.fields:
                masks.append(np.asarray(part.fields["root"]) == np.asarray(code.ranks))
    distinct = list({id(m): m for m in masks}.values())
    if not distinct:
        yield 0, list(code.ranks)
        return
    table = np.stack(
        [np.broadcast_to(m, len(code.ranks)).astype(np.int64) for m in distinct], axis=1
    )
    groups: dict[bytes, list[int]] = {}
    for row in range(len(code.ranks)):
        groups.setdefault(table[row].tobytes(), []).append(row)
    for rows in groups.values():
        yield rows[0], [code.ranks[row] for row in rows]


def _buffers(call: CodeCall) -> Iterator[BufferVector]:
    for name in ("inputs", "outputs", "reads", "writes", "adds"):
        yield from call.fields.get(name, ())


class BufferUseWalk:
    """One walk over a code for one row."""

    def __init__(self, program: Program, code: SharedCode, row: int) -> None:
        self.program, self.code, self.row = program, code, row
        self.rank = code.ranks[row]
        self._uses: dict[int, list[BufferUses]] = {}

    def races(self) -> Iterator[DataRace]:
        return self._on_streams() if uses_streams(self.code) else self._of_requests()

    def _made(self) -> Iterator[tuple[int, CodeCall]]:
        """The calls that the row makes, up to one that may not be made."""
        for position in self.code.positions(self.row):
            call = self.code.calls[position]
            if call.invalid is not None and call.invalid[0][self.row]:
                return
            yield position, call

    def _on_streams(self) -> Iterator[DataRace]:
        """Every use against those before it that its stream does not know to be over."""
        order = StreamOrder()
        earlier: dict[BufferKey, list[tuple[StreamOrRequest, int, bool]]] = {}
        for position, call in self._made():
            order.told(position, call)
            stream, asks = call.stream, makes_request(call) or bool(call.parts)
            if asks:
                order.opened(stream, position)
            actor: StreamOrRequest = position if asks else stream
            for part, one in enumerate(self._uses_of(call)):
                for key, writes in one:
                    left = [
                        use
                        for use in earlier.get(key, ())
                        if not order.over(stream, use[0], use[1])
                    ]
                    for other, opened, filling in left:
                        if writes or filling:
                            code, number = (
                                "DS402" if writes else "DS403",
                                part if call.parts else -1,
                            )
                            yield DataRace(
                                code,
                                buffer_label(key),
                                position,
                                number,
                                opened,
                                [],
                                isinstance(other, str),
                            )
                    kept = (
                        left
                        if writes
                        else [use for use in earlier.get(key, ()) if use[0] != actor or use[2]]
                    )
                    earlier[key] = [*kept, (actor, position, writes)]
            if call.parts and not makes_request(call):
                order.joined(stream, position)

    def _of_requests(self) -> Iterator[DataRace]:
        open_uses: dict[BufferKey, list[tuple[int, bool]]] = {}
        keys_of: dict[int, list[BufferKey]] = {}
        for position, call in self._made():
            for distance in call.waits:
                for key in keys_of.pop(position - distance, ()):
                    open_uses[key] = [
                        use for use in open_uses[key] if use[0] != position - distance
                    ]
            uses = self._uses.get(id(call))
            if uses is None:
                uses = self._uses[id(call)] = self._uses_of(call)
            if uses:
                yield from self._meet(position, call, uses, open_uses, keys_of)

    def _meet(
        self,
        position: int,
        call: CodeCall,
        uses: list[BufferUses],
        open_uses: dict[BufferKey, list[tuple[int, bool]]],
        keys_of: dict[int, list[BufferKey]],
    ) -> Iterator[DataRace]:
        """Hold a call's uses against what is open, and open its own."""
        stays = makes_request(call)
        for part, one in enumerate(uses):
            for key, writes in one:
                for opened, filling in open_uses.get(key, ()):
                    if writes or filling:
                        yield DataRace(
                            "DS402" if writes else "DS403",
                            buffer_label(key),
                            position,
                            part if call.parts else -1,
                            opened,
                        )
            if stays or call.parts:
                for key, writes in one:
                    open_uses.setdefault(key, []).append((position, writes))
                    keys_of.setdefault(position, []).append(key)
        if call.parts and not stays:
            for key in keys_of.pop(position, ()):
                open_uses[key] = [use for use in open_uses[key] if use[0] != position]

    def _uses_of(self, call: CodeCall) -> list[BufferUses]:
        """Per part of a batch (or once) what is used, each buffer with its gravest use."""
        out = []
        for part in call.parts or (call,):
            gravest: dict[BufferKey, bool] = {}
            for buffer, writes in self.touches(part):
                if buffer.name:
                    key = (buffer.name, int(at_row(buffer.index, self.row)))
                    gravest[key] = gravest.get(key, False) or writes
            out.append(tuple(gravest.items()))
        return out if any(out) else []

    def touches(self, call: CodeCall) -> Iterator[tuple[BufferVector, bool]]:
        row, fields = OPERATIONS[call.op], call.fields
        if row.kind == "local":
            yield from ((buffer, False) for buffer in fields.get("reads", ()))
            yield from (
                (buffer, True) for name in ("writes", "adds") for buffer in fields.get(name, ())
            )
            names = sorted(
                _tensor_names_in(fields.get("value"), self.rank) & self.program.tensors.keys()
            )
            yield from ((BufferVector(name, 0, (), ""), False) for name in names)
            return
        root = at_row(fields["root"], self.row) == self.rank if "root" in fields else False
        if row.gives == "all" or (row.gives == "root" and root):
            yield from ((buffer, False) for buffer in fields.get("inputs", ()))
        in_place = "tensor" in field_names_of(row)
        if (row.gets == "root" and root) or (
            row.gets == "all" and not (root and row.gives == "root" and in_place)
        ):
            yield from ((buffer, True) for buffer in fields.get("outputs", ()))


def buffer_label(key: BufferKey) -> str:
    return key[0] if key[1] == 0 else f"{key[0]}@{key[1]}"


def _tensor_names_in(value: object, rank: int) -> set[str]:
    """Names in an assign's value: an expression, a list of them, or one per rank."""
    if isinstance(value, PerRank):
        return _tensor_names_in(value.get(rank), rank)
    if isinstance(value, (list, tuple)):
        return {name for item in value for name in _tensor_names_in(item, rank)}
    return set(value.names) if isinstance(value, Expression) else set()


# --- streams: a stream runs its work in order, and knows besides what it was told to wait for; all else may still run ---
def uses_streams(code: SharedCode) -> bool:
    """Does any call name a stream?"""
    return any(call.stream or call.op == "wait_stream" for call in code.distinct_calls(parts=False))


class StreamOrder:
    """Told every call of a rank in order, it says which earlier work is over for one that
    follows.
    """

    def __init__(self) -> None:
        self._known: dict[str, dict[StreamOrRequest, int]] = {
            "": {}
        }  # stream -> the newest position of each actor that is over for it
        self._before: dict[
            int, dict[StreamOrRequest, int]
        ] = {}  # request -> what was over when it was made

    def over(self, stream: str, actor: StreamOrRequest, position: int) -> bool:
        """Is an actor's work at a position over before what the stream does next?"""
        return actor == stream or self._known.get(stream, {}).get(actor, -1) >= position

    def opened(self, stream: str, position: int) -> None:
        """A call made a request: it starts after what the stream holds."""
        self._before[position] = {**self._known.setdefault(stream, {}), stream: position}

    def told(self, position: int, call: CodeCall) -> None:
        """A stream learns by this call that other work is over."""
        stream = call.stream
        self._known.setdefault(stream, {})
        for distance in call.waits:
            self.joined(stream, position - distance)
        if call.op == "wait_stream":
            other = str(call.fields.get("stream") or "")
            self._learn(stream, {**self._known.get(other, {}), other: position})
        elif call.op == "synchronize":
            everything: dict[StreamOrRequest, int] = {request: request for request in self._before}
            everything |= dict.fromkeys(self._known, position)
            for other in self._known:
                self._learn(other, everything)

    def joined(self, stream: str, request: int) -> None:
        """A stream waits for a request."""
        self._learn(stream, {**self._before.get(request, {}), request: request})

    def _learn(self, stream: str, news: dict[StreamOrRequest, int]) -> None:
        known = self._known.setdefault(stream, {})
        for actor, position in news.items():
            if known.get(actor, -1) < position:
                known[actor] = position
