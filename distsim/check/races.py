"""Buffers touched while a request still uses them. A rank's program is fixed, so no run is needed to see it.

A request is open from the call that makes it to the call that waits for it (to the end, where none does). While it only reads its
buffer (isend, the giving side of a collective), others may read it; while it writes it, nobody may touch it. A buffer is one copy
of a named tensor on one rank; what has no name is memory of its own. Where a program names streams, what one of them does is open for
the others until they wait for it (`distsim.check.streams`), whatever the back end: a program means the same under all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from distsim.check.leaks import makes_request
from distsim.check.streams import Actor, StreamOrder, uses_streams
from distsim.expr import Expression
from distsim.ops.fields import PerRank
from distsim.ops.table import OPS
from distsim.program.records import BufferVec, Code, CodeCall, Program, at

Key = tuple[str, int]
#: (buffer, does it write) of one request or local call.
Uses = tuple[tuple[Key, bool], ...]


@dataclass(frozen=True, slots=True)
class Clash:
    """A buffer's use while a request is open. ``position`` and ``part`` are the use's, ``opened`` the request's position, for the
    first of ``ranks``. ``code`` is that of the finding: DS402 (written while in use) or DS403 (read while being filled).
    ``streams``: what it clashes with is another stream's work, not a request."""

    code: str
    label: str
    position: int
    part: int
    opened: int
    ranks: list[int] = field(default_factory=list)
    streams: bool = False


def clashes(program: Program, reached: Sequence[int]) -> tuple[Clash, ...]:
    """All clashes of calls that were reached (``reached[rank]`` is a position), one per pair of places and buffer."""
    found: dict[tuple[str, int, int, str], Clash] = {}
    for code in program.codes:
        if not _may_clash(code):
            continue
        for row, ranks in _variants(program, code):
            for clash in _Walk(program, code, row).clashes():
                late = [r for r in ranks if clash.position <= reached[r]]
                call, opened = code.calls[clash.position], code.calls[clash.opened]
                key = (clash.code, opened.site, (call.parts[clash.part] if clash.part >= 0 else call).site, clash.label)
                if late:
                    found.setdefault(key, clash).ranks.extend(r for r in late if r not in found[key].ranks)
    return tuple(found.values())


def _may_clash(code: Code) -> bool:
    """Some request of the code uses a named buffer, or there are streams."""
    calls = [call for call in code.distinct_calls(parts=False) if makes_request(call) or call.parts]
    return uses_streams(code) or any(_named(call) for call in calls)


def _named(call: CodeCall) -> bool:
    return any(
        buffer.name for part in (call, *call.parts) for name in ("inputs", "outputs") for buffer in part.fields.get(name, ())
    )


def _variants(program: Program, code: Code) -> Iterator[tuple[int, list[int]]]:
    """Rows that use buffers alike: (one of them, their ranks)."""
    masks: list[Any] = [g for g in code.guards or () if g is not None]
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
    table = np.stack([np.broadcast_to(m, len(code.ranks)).astype(np.int64) for m in distinct], axis=1)
    groups: dict[bytes, list[int]] = {}
    for row in range(len(code.ranks)):
        groups.setdefault(table[row].tobytes(), []).append(row)
    for rows in groups.values():
        yield rows[0], [code.ranks[row] for row in rows]


def _buffers(call: CodeCall) -> Iterator[BufferVec]:
    for name in ("inputs", "outputs", "reads", "writes", "adds"):
        yield from call.fields.get(name, ())


class _Walk:
    """One walk over a code for one row."""

    def __init__(self, program: Program, code: Code, row: int) -> None:
        self.program, self.code, self.row = program, code, row
        self.rank = code.ranks[row]
        self._uses: dict[int, list[Uses]] = {}

    def clashes(self) -> Iterator[Clash]:
        return self._on_streams() if uses_streams(self.code) else self._of_requests()

    def _made(self) -> Iterator[tuple[int, CodeCall]]:
        """The calls that the row makes, up to one that may not be made."""
        for position in self.code.positions(self.row):
            call = self.code.calls[position]
            if call.invalid is not None and call.invalid[0][self.row]:
                return
            yield position, call

    def _on_streams(self) -> Iterator[Clash]:
        """Every use against those before it that its stream does not know to be over."""
        order = StreamOrder()
        earlier: dict[Key, list[tuple[Actor, int, bool]]] = {}
        for position, call in self._made():
            order.told(position, call)
            stream, asks = call.stream, makes_request(call) or bool(call.parts)
            if asks:
                order.opened(stream, position)
            actor: Actor = position if asks else stream
            for part, one in enumerate(self._uses_of(call)):
                for key, writes in one:
                    left = [use for use in earlier.get(key, ()) if not order.over(stream, use[0], use[1])]
                    for other, opened, filling in left:
                        if writes or filling:
                            code, number = "DS402" if writes else "DS403", part if call.parts else -1
                            yield Clash(code, _label(key), position, number, opened, [], isinstance(other, str))
                    kept = left if writes else [use for use in earlier.get(key, ()) if use[0] != actor or use[2]]
                    earlier[key] = [*kept, (actor, position, writes)]
            if call.parts and not makes_request(call):
                order.joined(stream, position)

    def _of_requests(self) -> Iterator[Clash]:
        open_uses: dict[Key, list[tuple[int, bool]]] = {}
        keys_of: dict[int, list[Key]] = {}
        for position, call in self._made():
            for distance in call.waits:
                for key in keys_of.pop(position - distance, ()):
                    open_uses[key] = [use for use in open_uses[key] if use[0] != position - distance]
            uses = self._uses.get(id(call))
            if uses is None:
                uses = self._uses[id(call)] = self._uses_of(call)
            if uses:
                yield from self._meet(position, call, uses, open_uses, keys_of)

    def _meet(self, position: int, call: CodeCall, uses: list[Uses], open_uses: dict[Key, list[tuple[int, bool]]],
              keys_of: dict[int, list[Key]]) -> Iterator[Clash]:  # fmt: skip
        """Hold a call's uses against what is open, and open its own."""
        stays = makes_request(call)
        for part, one in enumerate(uses):
            for key, writes in one:
                for opened, filling in open_uses.get(key, ()):
                    if writes or filling:
                        yield Clash("DS402" if writes else "DS403", _label(key), position, part if call.parts else -1, opened)
            if stays or call.parts:
                for key, writes in one:
                    open_uses.setdefault(key, []).append((position, writes))
                    keys_of.setdefault(position, []).append(key)
        if call.parts and not stays:
            for key in keys_of.pop(position, ()):
                open_uses[key] = [use for use in open_uses[key] if use[0] != position]

    def _uses_of(self, call: CodeCall) -> list[Uses]:
        """Per part of a batch (or once) what is used, each buffer with its gravest use."""
        out = []
        for part in call.parts or (call,):
            gravest: dict[Key, bool] = {}
            for buffer, writes in self._touches(part):
                if buffer.name:
                    key = (buffer.name, int(at(buffer.index, self.row)))
                    gravest[key] = gravest.get(key, False) or writes
            out.append(tuple(gravest.items()))
        return out if any(out) else []

    def _touches(self, call: CodeCall) -> Iterator[tuple[BufferVec, bool]]:
        row, fields = OPS[call.op], call.fields
        if row.kind == "local":
            yield from ((buffer, False) for buffer in fields.get("reads", ()))
            yield from ((buffer, True) for name in ("writes", "adds") for buffer in fields.get(name, ()))
            names = sorted(_names_in(fields.get("value"), self.rank) & self.program.tensors.keys())
            yield from ((BufferVec(name, 0, (), ""), False) for name in names)
            return
        root = at(fields["root"], self.row) == self.rank if "root" in fields else False
        if row.gives == "all" or (row.gives == "root" and root):
            yield from ((buffer, False) for buffer in fields.get("inputs", ()))
        in_place = "tensor" in row.model_fields
        if (row.gets == "root" and root) or (row.gets == "all" and not (root and row.gives == "root" and in_place)):
            yield from ((buffer, True) for buffer in fields.get("outputs", ()))


def _label(key: Key) -> str:
    return key[0] if key[1] == 0 else f"{key[0]}@{key[1]}"


def _names_in(value: Any, rank: int) -> set[str]:
    """Names in an assign's value: an expression, a list of them, or one per rank."""
    if isinstance(value, PerRank):
        return _names_in(value.get(rank), rank)
    if isinstance(value, (list, tuple)):
        return {name for item in value for name in _names_in(item, rank)}
    return set(value.names) if isinstance(value, Expression) else set()
