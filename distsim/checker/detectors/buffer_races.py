"""Detect buffers that are accessed while a request, or another stream, still uses them.

Key idea: a rank's program is fixed, so one walk over its calls is enough; nothing is executed.

A request is open from the call that makes it to the call that waits for it (to the end, if none
does). While it only reads its buffer (isend, the contributing side of a collective), others may
read the buffer; while it writes the buffer, nothing may access it. A buffer is one copy of a named
tensor on one rank; tensors without a name have memory of their own.

If a program names streams, the work of one stream is open for the others until they wait for it
(`StreamOrder`). This rule applies to all backends, so that a program means the same on each.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.checker.matching.call_index import part_call
from distsim.checker.matching.channel_layout import WHOLE_CALL
from distsim.checker.wording import (
    aligned_columns,
    call_words,
    location_text,
    parenthesised,
    rank_list,
)
from distsim.common.expressions import Expression
from distsim.common.records import dataclass
from distsim.findings.finding_types import Finding
from distsim.operations.core.field_types import PerRank
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, SharedCode, at_row
from distsim.program.features import makes_request
from distsim.program.model import Program
from distsim.program.step_traits import field_names_of

#: What does the work: a stream by its name ("" is the default stream), or a request by the position
#: of its call.
StreamOrRequest = str | int
#: Name and index of a buffer.
BufferKey = tuple[str, int]
#: (buffer, whether it is written) for one request or local call.
BufferUses = tuple[tuple[BufferKey, bool], ...]


@dataclass(frozen=True, slots=True)
class DataRace:
    """A use of a buffer while a request is open.

    ``position`` and ``part`` are those of the use and ``opened`` is the request's position, for the
    first of ``ranks``. ``code`` is that of the finding: DS402 (written while in use) or DS403 (read
    while being written). ``streams``: it races with another stream's work, not with a request.
    """

    code: str
    label: str
    position: int
    part: int
    opened: int
    ranks: list[int] = field(default_factory=list)
    streams: bool = False


class _OpenUse(NamedTuple):
    """The use of a buffer by an open request, which is named by the position of its call."""

    request: int
    writes: bool


class _EarlierUse(NamedTuple):
    """A use of a buffer that may not be over yet."""

    actor: StreamOrRequest
    position: int
    writes: bool


# --- finding races ---
def find_data_races(program: Program, reached: Sequence[int]) -> tuple[DataRace, ...]:
    """All data races among calls that were reached, one per pair of places and buffer.

    ``reached[rank]`` is the position at which a rank ended.
    """
    found: dict[tuple[str, int, int, str], DataRace] = {}
    for code in program.codes:
        if not _may_race(code):
            continue
        for row, ranks in _rows_by_buffer_use(code):
            for race in BufferUseWalk(program, code, row).races():
                racing = [rank for rank in ranks if race.position <= reached[rank]]
                if racing:
                    first = found.setdefault(_race_key(code, race), race)
                    first.ranks.extend(rank for rank in racing if rank not in first.ranks)
    return tuple(found.values())


def _race_key(code: SharedCode, race: DataRace) -> tuple[str, int, int, str]:
    use, opened = code.calls[race.position], code.calls[race.opened]
    if race.part != WHOLE_CALL:
        use = use.parts[race.part]
    return race.code, opened.site, use.site, race.label


def _may_race(code: SharedCode) -> bool:
    """Whether some request of the code uses a named buffer, or the code uses streams."""
    if uses_streams(code):
        return True
    for call in code.distinct_calls(parts=False):
        if (makes_request(call) or call.parts) and _uses_named_buffer(call):
            return True
    return False


def _uses_named_buffer(call: CodeCall) -> bool:
    for part in (call, *call.parts):
        buffers = (*part.fields.get("inputs", ()), *part.fields.get("outputs", ()))
        if any(buffer.name for buffer in buffers):
            return True
    return False


def _rows_by_buffer_use(code: SharedCode) -> Iterator[tuple[int, list[int]]]:
    """Group the rows that use buffers in the same way: one row of each group, and its ranks."""
    vectors = _distinguishing_vectors(code)
    if not vectors:
        yield 0, list(code.ranks)
        return
    columns = [np.broadcast_to(each, len(code.ranks)).astype(np.int64) for each in vectors]
    table = np.stack(columns, axis=1)
    groups: dict[bytes, list[int]] = defaultdict(list)
    for row in range(len(code.ranks)):
        groups[table[row].tobytes()].append(row)
    for rows in groups.values():
        yield rows[0], [code.ranks[row] for row in rows]


def _distinguishing_vectors(code: SharedCode) -> list[NDArray[np.generic]]:
    """The vectors, one entry per row, that decide which buffers a row uses and how."""
    vectors: list[NDArray[np.generic]] = [guard for guard in code.guards or () if guard is not None]
    for call in code.distinct_calls(parts=False):
        for part in (call, *call.parts):
            indices = [buffer.index for buffer in _buffers(part)]
            vectors += [index for index in indices if isinstance(index, np.ndarray)]
            if part.invalid is not None:
                vectors.append(part.invalid.rows)
            if "root" in part.fields:
                vectors.append(np.asarray(part.fields["root"]) == np.asarray(code.ranks))
    return list({id(vector): vector for vector in vectors}.values())


def _buffers(call: CodeCall) -> Iterator[BufferVector]:
    for name in ("inputs", "outputs", "reads", "writes", "adds"):
        yield from call.fields.get(name, ())


class BufferUseWalk:
    """One walk over a code, for one of its rows."""

    def __init__(self, program: Program, code: SharedCode, row: int) -> None:
        self.program, self.code, self.row = program, code, row
        self.rank = code.ranks[row]
        self._uses: dict[int, list[BufferUses]] = {}

    def races(self) -> Iterator[DataRace]:
        """All races of this row."""
        return self._stream_races() if uses_streams(self.code) else self._request_races()

    def _calls_made(self) -> Iterator[tuple[int, CodeCall]]:
        """The calls that the row makes, up to the first invalid one."""
        for position in self.code.positions(self.row):
            call = self.code.calls[position]
            if call.invalid is not None and call.invalid.rows[self.row]:
                return
            yield position, call

    # --- with streams ---
    def _stream_races(self) -> Iterator[DataRace]:
        """Compare every use with the earlier uses that its stream does not know to be over.

        After a write, only the uses that are still open are kept: later uses either race with this
        write too, or know that it is over, and so everything that was over before it.
        """
        order = StreamOrder()
        earlier: dict[BufferKey, list[_EarlierUse]] = {}
        for position, call in self._calls_made():
            order.observe(position, call)
            stream = call.stream
            has_request = makes_request(call) or bool(call.parts)
            if has_request:
                order.open_request(stream, position)
            actor: StreamOrRequest = position if has_request else stream
            for part, uses in enumerate(self._uses_of(call)):
                for key, writes in uses:
                    before = earlier.get(key, [])
                    still_open = [
                        use for use in before if not order.is_over(stream, use.actor, use.position)
                    ]
                    for use in still_open:
                        if writes or use.writes:
                            yield DataRace(
                                "DS402" if writes else "DS403",
                                buffer_label(key),
                                position,
                                part if call.parts else WHOLE_CALL,
                                use.position,
                                [],
                                isinstance(use.actor, str),
                            )
                    if writes:
                        kept = still_open
                    else:
                        # Reads do not race with each other, and an actor works in order: when its
                        # newest read is over, its older ones are.
                        kept = [use for use in before if use.actor != actor or use.writes]
                    earlier[key] = [*kept, _EarlierUse(actor, position, writes)]
            if call.parts and not makes_request(call):
                order.join_request(stream, position)

    # --- without streams ---
    def _request_races(self) -> Iterator[DataRace]:
        """Compare every use with the requests that are open."""
        open_uses: dict[BufferKey, list[_OpenUse]] = {}
        keys_of: dict[int, list[BufferKey]] = {}
        for position, call in self._calls_made():
            for distance in call.waits:
                _close_request(position - distance, open_uses, keys_of)
            uses = self._uses.get(id(call))
            if uses is None:
                uses = self._uses[id(call)] = self._uses_of(call)
            if uses:
                yield from self._races_with_open(position, call, uses, open_uses, keys_of)

    def _races_with_open(
        self,
        position: int,
        call: CodeCall,
        uses: list[BufferUses],
        open_uses: dict[BufferKey, list[_OpenUse]],
        keys_of: dict[int, list[BufferKey]],
    ) -> Iterator[DataRace]:
        """Compare a call's uses with the open requests, and open its own."""
        stays_open = makes_request(call)
        for part, part_uses in enumerate(uses):
            for key, writes in part_uses:
                for opened, request_writes in open_uses.get(key, ()):
                    if writes or request_writes:
                        code = "DS402" if writes else "DS403"
                        number = part if call.parts else WHOLE_CALL
                        yield DataRace(code, buffer_label(key), position, number, opened)
            # The parts of a batch are open at the same time, so they can race with one another.
            if stays_open or call.parts:
                for key, writes in part_uses:
                    open_uses.setdefault(key, []).append(_OpenUse(position, writes))
                    keys_of.setdefault(position, []).append(key)
        if call.parts and not stays_open:
            _close_request(position, open_uses, keys_of)

    # --- uses of one call ---
    def _uses_of(self, call: CodeCall) -> list[BufferUses]:
        """The buffers used by each part of a batch, or by the call; a write outweighs a read."""
        found = []
        for part in call.parts or (call,):
            writes_by_key: dict[BufferKey, bool] = {}
            for buffer, writes in self.touches(part):
                if buffer.name:
                    key = (buffer.name, int(at_row(buffer.index, self.row)))
                    writes_by_key[key] = writes_by_key.get(key, False) or writes
            found.append(tuple(writes_by_key.items()))
        return found if any(found) else []

    def touches(self, call: CodeCall) -> Iterator[tuple[BufferVector, bool]]:
        """The buffers that a call accesses, and whether it writes them."""
        if OPERATIONS[call.op].kind == "local":
            yield from self._local_touches(call)
        else:
            yield from self._communication_touches(call)

    def _local_touches(self, call: CodeCall) -> Iterator[tuple[BufferVector, bool]]:
        fields = call.fields
        for buffer in fields.get("reads", ()):
            yield buffer, False
        for name in ("writes", "adds"):
            for buffer in fields.get(name, ()):
                yield buffer, True
        names = _tensor_names_in(fields.get("value"), self.rank)
        for name in sorted(names & self.program.tensors.keys()):
            yield BufferVector(name, 0, (), ""), False

    def _communication_touches(self, call: CodeCall) -> Iterator[tuple[BufferVector, bool]]:
        operation, fields = OPERATIONS[call.op], call.fields
        is_root = "root" in fields and at_row(fields["root"], self.row) == self.rank
        if operation.gives == "all" or (operation.gives == "root" and is_root):
            for buffer in fields.get("inputs", ()):
                yield buffer, False
        # The root of an in-place broadcast does not write its own buffer.
        in_place = "tensor" in field_names_of(operation)
        keeps_input = is_root and operation.gives == "root" and in_place
        if operation.gets == "root":
            writes = is_root
        else:
            writes = operation.gets == "all" and not keeps_input
        if writes:
            for buffer in fields.get("outputs", ()):
                yield buffer, True


def _close_request(
    request: int,
    open_uses: dict[BufferKey, list[_OpenUse]],
    keys_of: dict[int, list[BufferKey]],
) -> None:
    """Remove the uses of a request, named by its position, from those that are open."""
    for key in keys_of.pop(request, ()):
        open_uses[key] = [use for use in open_uses[key] if use.request != request]


def buffer_label(key: BufferKey) -> str:
    """The buffer's name as in a scenario: `x`, or `x@2` for a copy."""
    name, index = key
    return name if index == 0 else f"{name}@{index}"


def _tensor_names_in(value: object, rank: int) -> set[str]:
    """Names in the value of an assign: an expression, a list of them, or one per rank."""
    if isinstance(value, PerRank):
        return _tensor_names_in(value.get(rank), rank)
    if isinstance(value, (list, tuple)):
        return {name for item in value for name in _tensor_names_in(item, rank)}
    return set(value.names) if isinstance(value, Expression) else set()


# --- streams ---
def uses_streams(code: SharedCode) -> bool:
    """Whether any call names a stream."""
    calls = code.distinct_calls(parts=False)
    return any(call.stream or call.op == "wait_stream" for call in calls)


class StreamOrder:
    """Tracks which work is over for which stream of a rank.

    A stream runs its own work in order; in addition it knows the work that it has waited for.
    Everything else may still run. The caller passes every call of the rank, in order, to `observe`.
    """

    def __init__(self) -> None:
        #: Stream -> the newest position of each actor that is over for it.
        self._known: dict[str, dict[StreamOrRequest, int]] = {"": {}}
        #: Request -> what was over when it was made.
        self._known_to_request: dict[int, dict[StreamOrRequest, int]] = {}

    def is_over(self, stream: str, actor: StreamOrRequest, position: int) -> bool:
        """Whether an actor's work at a position is over before the stream's next work."""
        return actor == stream or self._known.get(stream, {}).get(actor, -1) >= position

    def open_request(self, stream: str, position: int) -> None:
        """A call made a request: it starts after the work in its stream.

        So a stream that waits for the request later knows all of that to be over, too.
        """
        known = self._known.setdefault(stream, {})
        self._known_to_request[position] = {**known, stream: position}

    def observe(self, position: int, call: CodeCall) -> None:
        """Record what a call makes its stream wait for."""
        stream = call.stream
        self._known.setdefault(stream, {})
        for distance in call.waits:
            self.join_request(stream, position - distance)
        if call.op == "wait_stream":
            other = str(call.fields.get("stream") or "")
            self._learn(stream, {**self._known.get(other, {}), other: position})
        elif call.op == "synchronize" and call.fields.get("stream"):
            # The host waits for one stream, and then issues all that follows on any stream.
            name = str(call.fields["stream"])
            awaited = "" if name == "current" else name
            over = {**self._known.get(awaited, {}), awaited: position}
            for other in self._known:
                self._learn(other, over)
        elif call.op == "synchronize":
            # The host waits for the whole device.
            everything: dict[StreamOrRequest, int] = {
                request: request for request in self._known_to_request
            }
            everything |= dict.fromkeys(self._known, position)
            for other in self._known:
                self._learn(other, everything)

    def join_request(self, stream: str, request: int) -> None:
        """A stream waits for a request, and so for everything that the request waited for."""
        known = self._known_to_request.get(request, {})
        self._learn(stream, {**known, request: request})

    def _learn(self, stream: str, over: dict[StreamOrRequest, int]) -> None:
        known = self._known.setdefault(stream, {})
        for actor, position in over.items():
            if known.get(actor, -1) < position:
                known[actor] = position


# --- findings ---
def data_race_findings(program: Program, races: Iterable[DataRace]) -> tuple[Finding, ...]:
    """DS402 and DS403, one per pair of places and buffer."""
    return tuple(_data_race_finding(program, race) for race in races)


def _data_race_finding(program: Program, race: DataRace) -> Finding:
    rank = race.ranks[0]
    opened = program.call(rank, race.opened)
    use = part_call(program, rank, race.position, race.part)
    opened_place = program.place(rank, race.opened)
    use_place = program.place(rank, race.position)
    access = "writes" if race.code == "DS402" else "reads"
    use_line = parenthesised(location_text(use_place))
    opened_line = parenthesised(location_text(opened_place))
    head = (
        f"{use.op} on {rank_list(race.ranks)}{use_line} {access} {race.label} while "
        f"{opened.op}{opened_line} still uses it"
    )
    if race.streams:
        head += " on another stream"
    opens = "is launched" if race.streams else "starts the request"
    rows = [
        (f"rank {rank}", call_words(opened), location_text(opened_place), opens),
        (f"rank {rank}", call_words(use), location_text(use_place), f"{access} the buffer"),
    ]
    if race.streams:
        advice = (
            f"let the stream of {use.op} wait for the other stream first (`wait_stream`), "
            "or give each call its own tensor (`copies:`)"
        )
    elif race.opened == race.position:
        advice = "give each message its own buffer, or make the calls one after the other"
    else:
        names = (f"the {opened.op}", f"the {use.op}")
        if opened.op == use.op:
            names = (f"the first {opened.op}", "the second")
        advice = (
            f"wait for {names[0]} before {names[1]}, or give each call its own tensor (`copies:`)"
        )
    return Finding(
        race.code,
        "error",
        "\n".join([head, *aligned_columns(rows)]),
        tuple(sorted(race.ranks)),
        (),
        (advice,),
        tuple(dict.fromkeys((opened_place, use_place))),
    )
