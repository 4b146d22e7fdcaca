"""The calls of a trace's file: from lines to columns, each line held against the header and the
line before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.findings.finding_types import SourceLocation
from distsim.trace.header import MAX_RANKS, TRACE_REMEDY, has_type, shortened_line
from distsim.trace.model import COLUMN_TYPES, OPTIONAL_COLUMNS, TEXT_COLUMNS, Trace

#: What calls are in the order of: rank by rank, in a rank as its program has them, of a batch first
#: the batch.
_ORDER_COLUMNS: Final = ("rank", "position", "part")
#: Keys of a call's arguments, and what they are; of a list, what its items are.
_ARG_TYPES: Final = {
    "waits": [int],
    "input_parts": [int],
    "output_parts": [int],
    "coalesced": [int],
    "ranks": [int],
    "queue": str,
    "stream": str,
    "message": str,
    "backend": str,
    "init_method": str,
    "code": int,
    "timeout_ns": int,
    "assume_src": int,
    "alone_ns": int,
}


@dataclass
class TraceRowParser:
    """Builds the columns, chunk by chunk."""

    file: str
    header: dict[str, Any]
    count: int = 0
    pieces: dict[str, list[NDArray[Any]]] = field(
        default_factory=lambda: {name: [] for name in COLUMN_TYPES}
    )
    index: dict[str, dict[Any, int]] = field(
        default_factory=lambda: {name: {} for name in TEXT_COLUMNS}
    )

    def __post_init__(self) -> None:
        #: Ranks of each group; names may repeat (one group per value of `by`), ids do not.
        self._by_name: dict[str, list[tuple[int, frozenset[object]]]] = {}
        for number, (name, ranks) in enumerate(self.header.get("groups", [])):
            self._by_name.setdefault(name, []).append((number, frozenset(ranks)))
        self._plain: dict[object, int] = {
            name: ids[0][0] for name, ids in self._by_name.items() if len(ids) == 1
        }
        self._others: dict[str, int] = {}  # groups that the header lacks
        self.size = int(self.header.get("world_size") or 0)
        self.last = (-1, 0, 0)  # of the last call: see `_ORDER_COLUMNS`

    def take(self, lines: list[str], number: int) -> None:
        """Add lines; ``number`` is the first one's. A chunk that can't be taken whole is gone
        through line by line.
        """
        try:
            rows = json.loads("[" + ",".join(lines) + "]")
            if len(rows) != len(lines):
                raise ValueError("a line holds several values")
            arrays = {name: self._column(name, rows) for name in COLUMN_TYPES}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._blame(lines, number)
            raise UsageError(
                f"{self.file}:{number}: these lines can't be read", TRACE_REMEDY
            ) from None
        self._check(arrays, number)
        for name, array in arrays.items():
            self.pieces[name].append(array)
        self.count += len(rows)

    def _check(self, arrays: Mapping[str, NDArray[Any]], number: int) -> None:
        """Raise UsageError for the first call of a rank that the world does not have, or that
        stands before one it follows.
        """
        limit = self.size or MAX_RANKS
        for name in ("rank", "peer"):
            outside = np.flatnonzero(arrays[name] >= limit)
            if len(outside):
                said = f"`{name}` {arrays[name][outside[0]]} is outside the world of {limit}"
                raise UsageError(f"{self.file}:{number + int(outside[0])}: {said}", TRACE_REMEDY)
        keys = [
            np.concatenate(([last], arrays[name]))
            for name, last in zip(_ORDER_COLUMNS, self.last, strict=True)
        ]
        (rank, position, part), (rank_0, position_0, part_0) = (
            [k[1:] for k in keys],
            [k[:-1] for k in keys],
        )
        follows = (position > position_0) | ((position == position_0) & (part > part_0))
        odd = np.flatnonzero((rank < rank_0) | ((rank == rank_0) & ~follows))
        if len(odd):
            i = int(odd[0])
            here, there = (
                f"rank {r[i]}, position {p[i]}, part {q[i]}"
                for r, p, q in ((rank, position, part), (rank_0, position_0, part_0))
            )
            raise UsageError(
                f"{self.file}:{number + i}: the calls are not in order: {here}, after {there}",
                "write the trace again",
            )
        self.last = (int(rank[-1]), int(position[-1]), int(part[-1]))

    def _column(self, name: str, rows: list[dict[str, Any]]) -> NDArray[Any]:
        values: list[Any] = (
            [row.get(name, OPTIONAL_COLUMNS[name]) for row in rows]
            if name in OPTIONAL_COLUMNS
            else [row[name] for row in rows]
        )
        if name == "group":
            plain = self._plain
            values = [
                plain[v] if v in plain else self._group(v, row["rank"])
                for v, row in zip(values, rows, strict=True)
            ]
        elif name == "place":
            values = self._places(values)
        elif name == "args":
            table = self.index[name]
            values = [table.setdefault(_parse_args(value), len(table)) for value in values]
        elif name in TEXT_COLUMNS:
            if not set(map(type, values)) <= {str}:
                raise ValueError(f"expected `{name}` as a text")
            table = self.index[name]
            values = [table.setdefault(value, len(table)) for value in values]
        elif name == "peer":
            values = [-1 if value is None else value for value in values]
        if not set(map(type, values)) <= {int}:
            raise ValueError(f"expected `{name}` as a whole number")
        array = np.array(values, dtype=COLUMN_TYPES[name])
        if name in ("rank", "nbytes") and len(array) and array.min() < 0:
            raise ValueError(f"expected `{name}` of zero or more")
        return array

    def _places(self, values: list[object]) -> list[int]:
        known: dict[
            tuple[object, ...], int
        ] = {}  # of this chunk, by the values as they are written
        table, numbers = self.index["place"], []
        for value in values:
            key = (*value.items(),) if isinstance(value, dict) else (value,)
            number = known.get(key)
            if number is None:
                number = known[key] = table.setdefault(_parse_place(value), len(table))
            numbers.append(number)
        return numbers

    def _group(self, name: object, rank: object) -> int:
        """The id of a group, by its name and a member."""
        if not isinstance(name, str):
            raise ValueError("expected `group` as a text")
        namesakes = self._by_name.get(name, [])
        if namesakes:
            return next((number for number, ranks in namesakes if rank in ranks), namesakes[0][0])
        return self._others.setdefault(name, len(self.header.get("groups", [])) + len(self._others))

    def _blame(self, lines: list[str], first: int) -> None:
        """Raise UsageError for the first line that can't be taken."""
        for number, line in enumerate(lines, first):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                what = f"expected a call as a JSON object, found {shortened_line(line)}"
                raise UsageError(
                    f"{self.file}:{number}: {what}", "write the trace again, or remove the line"
                ) from None
            if not isinstance(row, dict):
                raise UsageError(
                    f"{self.file}:{number}: expected a call as a JSON object, found {shortened_line(line)}",
                    TRACE_REMEDY,
                )
            for name in COLUMN_TYPES:
                if name not in row and name not in OPTIONAL_COLUMNS:
                    raise UsageError(
                        f"{self.file}:{number}: the call has no `{name}`", TRACE_REMEDY
                    )
                try:
                    self._column(name, [row])
                except (ValueError, TypeError, KeyError, OverflowError) as fault:
                    known = {
                        OverflowError: f"`{name}` is too large",
                        TypeError: f"`{name}` is of a wrong type",
                    }
                    text = known.get(type(fault), str(fault))
                    raise UsageError(
                        f"{self.file}:{number}: {text}, found {shortened_line(json.dumps(row.get(name)))}",
                        TRACE_REMEDY,
                    ) from None

    def trace(self) -> Trace:
        tables: dict[str, list[Any]] = {name: list(self.index[name]) for name in TEXT_COLUMNS}
        tables["group"] = [name for name, _ in self.header.get("groups", [])] + list(self._others)
        empty = {name: np.empty(0, dtype=dtype) for name, dtype in COLUMN_TYPES.items()}
        columns = {
            name: np.concatenate(self.pieces[name]) if self.pieces[name] else empty[name]
            for name in COLUMN_TYPES
        }
        return Trace(self.header, tables, columns)


def _parse_args(value: Any) -> str:
    if value is not None and not isinstance(value, dict):
        raise ValueError("expected `args` as an object or null")
    for name, given in (value or {}).items():
        kind: Any = _ARG_TYPES.get(name, object)
        items = given if isinstance(kind, list) else [given]
        if not isinstance(items, list) or not all(
            has_type(item, kind[0] if isinstance(kind, list) else kind) for item in items
        ):
            raise ValueError(f"expected `{name}` in `args` as distsim writes it")
    return json.dumps(value, ensure_ascii=False) if value else ""


def _parse_place(value: object) -> SourceLocation:
    if not isinstance(value, dict):
        raise ValueError("expected `place` as an object")
    file, op, rank = value.get("file", ""), value.get("op", ""), value.get("rank")
    line, column = value.get("line", 0), value.get("column", 0)
    if not (
        isinstance(file, str)
        and isinstance(op, str)
        and type(line) is type(column) is int
        and (rank is None or type(rank) is int)
    ):
        raise ValueError("expected `place` as {file, line, column, op, rank}")
    return SourceLocation(file, line, column, op, rank)
