"""Parses the calls of a trace file into columns, and checks them.

Key idea: speed. A chunk of lines is parsed as one JSON array and checked column by column. Only if
that fails, the lines are parsed one by one to find the first bad one (`_raise_for_bad_line`).
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
from distsim.operations.core.resolved_call import DTYPE_BYTES, KernelWork
from distsim.trace.header import MAX_RANKS, TRACE_REMEDY, has_type, shortened_line
from distsim.trace.model import COLUMN_TYPES, OPTIONAL_COLUMNS, TEXT_COLUMNS, Trace

#: The sort key of calls: by rank, then in program order; a batch precedes its parts.
_ORDER_COLUMNS: Final = ("rank", "position", "part")
#: Types of a call's arguments; [type]: a list of items of this type.
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

#: Larger FLOP, bytes and numbers of kernels are considered damage.
_MAX_AMOUNT: Final = 1 << 80


@dataclass
class TraceRowParser:
    """Builds the columns, chunk by chunk: call `parse` for each chunk, then `trace`.

    ``pieces``: the arrays of each column by chunk. ``index``: the number of each text in the table
    of its column.
    """

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
        #: (id, ranks) of the groups of each name. Names may repeat (one group per value of `by`).
        self._groups_by_name: dict[str, list[tuple[int, frozenset[object]]]] = {}
        for number, (name, ranks) in enumerate(self.header.get("groups", [])):
            self._groups_by_name.setdefault(name, []).append((number, frozenset(ranks)))
        self._ids_of_unique_names: dict[object, int] = {
            name: groups[0][0] for name, groups in self._groups_by_name.items() if len(groups) == 1
        }
        self._world_size = int(self.header.get("world_size") or 0)
        #: The sort key of the last call, see `_ORDER_COLUMNS`.
        self._last_key = (-1, 0, 0)

    def parse(self, lines: list[str], first_number: int) -> None:
        """Add a chunk of lines; ``first_number``: the number of its first line in the file."""
        try:
            rows = json.loads("[" + ",".join(lines) + "]")
            if len(rows) != len(lines):
                raise ValueError("a line holds several values")
            arrays = {name: self._column(name, rows) for name in COLUMN_TYPES}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._raise_for_bad_line(lines, first_number)
            raise UsageError(
                f"{self.file}:{first_number}: these lines cannot be read", TRACE_REMEDY
            ) from None
        self._check_ranks(arrays, first_number)
        self._check_order(arrays, first_number)
        for name, array in arrays.items():
            self.pieces[name].append(array)
        self.count += len(rows)

    def _check_ranks(self, arrays: Mapping[str, NDArray[Any]], first_number: int) -> None:
        """Raise UsageError for the first call that names a rank outside the world."""
        limit = self._world_size or MAX_RANKS
        for name in ("rank", "peer"):
            outside = np.flatnonzero(arrays[name] >= limit)
            if len(outside):
                row = int(outside[0])
                raise UsageError(
                    f"{self.file}:{first_number + row}: "
                    f"`{name}` {arrays[name][row]} is outside the world of {limit}",
                    TRACE_REMEDY,
                )

    def _check_order(self, arrays: Mapping[str, NDArray[Any]], first_number: int) -> None:
        """Raise UsageError for the first call that does not follow the one before it."""
        keys = np.stack(
            [
                np.concatenate(([last], arrays[name]))
                for name, last in zip(_ORDER_COLUMNS, self._last_key, strict=True)
            ]
        )
        rank, position, part = keys[:, 1:]
        previous_rank, previous_position, previous_part = keys[:, :-1]
        same_position = position == previous_position
        follows = (position > previous_position) | (same_position & (part > previous_part))
        is_wrong = (rank < previous_rank) | ((rank == previous_rank) & ~follows)
        wrong = np.flatnonzero(is_wrong)
        if len(wrong):
            row = int(wrong[0])
            call, previous = _key_text(keys[:, row + 1]), _key_text(keys[:, row])
            raise UsageError(
                f"{self.file}:{first_number + row}: "
                f"the calls are not in order: {call}, after {previous}",
                "write the trace again",
            )
        self._last_key = (int(rank[-1]), int(position[-1]), int(part[-1]))

    def _column(self, name: str, rows: list[dict[str, Any]]) -> NDArray[Any]:
        """One column of a chunk. Raises ValueError, TypeError, KeyError or OverflowError."""
        values: list[Any]
        if name in OPTIONAL_COLUMNS:
            default = OPTIONAL_COLUMNS[name]
            values = [row.get(name, default) for row in rows]
        else:
            values = [row[name] for row in rows]
        if name == "group":
            unique = self._ids_of_unique_names
            values = [
                unique[value] if value in unique else self._group_id(value, row["rank"])
                for value, row in zip(values, rows, strict=True)
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
        # Most places repeat, so each one is parsed once per chunk, keyed by its JSON values.
        known: dict[tuple[object, ...], int] = {}
        table = self.index["place"]
        numbers = []
        for value in values:
            key = (*value.items(),) if isinstance(value, dict) else (value,)
            number = known.get(key)
            if number is None:
                number = known[key] = table.setdefault(_parse_place(value), len(table))
            numbers.append(number)
        return numbers

    def _group_id(self, name: object, rank: object) -> int:
        """The id of a group, by its name and a member."""
        if not isinstance(name, str):
            raise ValueError("expected `group` as a text")
        namesakes = self._groups_by_name.get(name, [])
        for number, ranks in namesakes:
            if rank in ranks:
                return number
        if namesakes:
            return namesakes[0][0]
        raise ValueError("the header has no such `group`")

    def _raise_for_bad_line(self, lines: list[str], first_number: int) -> None:
        """Raise UsageError for the first line that cannot be parsed."""
        for number, line in enumerate(lines, first_number):
            where = f"{self.file}:{number}"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                raise UsageError(
                    f"{where}: expected a call as a JSON object, found {shortened_line(line)}",
                    "write the trace again, or remove the line",
                ) from None
            if not isinstance(row, dict):
                raise UsageError(
                    f"{where}: expected a call as a JSON object, found {shortened_line(line)}",
                    TRACE_REMEDY,
                )
            self._check_row(row, where)

    def _check_row(self, row: dict[str, Any], where: str) -> None:
        """Raise UsageError for the first value of a call that cannot be parsed."""
        for name in COLUMN_TYPES:
            if name not in row and name not in OPTIONAL_COLUMNS:
                raise UsageError(f"{where}: the call has no `{name}`", TRACE_REMEDY)
            try:
                self._column(name, [row])
            except (ValueError, TypeError, KeyError, OverflowError) as fault:
                texts = {
                    OverflowError: f"`{name}` is too large",
                    TypeError: f"`{name}` is of a wrong type",
                }
                text = texts.get(type(fault), str(fault))
                value = shortened_line(json.dumps(row.get(name)))
                raise UsageError(f"{where}: {text}, found {value}", TRACE_REMEDY) from None

    def trace(self) -> Trace:
        """The trace of all parsed chunks."""
        tables: dict[str, list[Any]] = {name: list(self.index[name]) for name in TEXT_COLUMNS}
        tables["group"] = [name for name, _ in self.header.get("groups", [])]
        empty = {name: np.empty(0, dtype=dtype) for name, dtype in COLUMN_TYPES.items()}
        columns = {
            name: np.concatenate(self.pieces[name]) if self.pieces[name] else empty[name]
            for name in COLUMN_TYPES
        }
        return Trace(self.header, tables, columns)


def _key_text(key: NDArray[Any]) -> str:
    rank, position, part = key
    return f"rank {rank}, position {position}, part {part}"


def _parse_args(value: Any) -> str:
    """The arguments of a call, as the text in which a trace keeps them."""
    if value is not None and not isinstance(value, dict):
        raise ValueError("expected `args` as an object or null")
    if not value:
        return ""
    for name, argument in value.items():
        if not _is_valid_argument(name, argument):
            raise ValueError(f"expected `{name}` in `args` as distsim writes it")
    return json.dumps(value, ensure_ascii=False)


def _is_valid_argument(name: str, value: object) -> bool:
    if name == "work":
        return isinstance(value, list) and all(map(_is_kernel_work, value))
    kind: Any = _ARG_TYPES.get(name, object)
    if not isinstance(kind, list):
        return has_type(value, kind)
    return isinstance(value, list) and all(has_type(item, kind[0]) for item in value)


def _is_kernel_work(value: object) -> bool:
    """Whether a value is [FLOP, bytes, kernels, dtype], as `KernelWork` has them."""
    if not isinstance(value, list) or len(value) != len(KernelWork._fields):
        return False
    flops, nbytes, kernels, dtype = value
    for amount in (flops, nbytes):
        if type(amount) not in (int, float) or not 0 <= amount < _MAX_AMOUNT:
            return False
    return type(kernels) is int and 0 < kernels < _MAX_AMOUNT and dtype in DTYPE_BYTES


def _parse_place(value: object) -> SourceLocation:
    if not isinstance(value, dict):
        raise ValueError("expected `place` as an object")
    file, op, rank = value.get("file", ""), value.get("op", ""), value.get("rank")
    line, column = value.get("line", 0), value.get("column", 0)
    has_texts = isinstance(file, str) and isinstance(op, str)
    has_numbers = type(line) is int and type(column) is int
    has_rank = rank is None or type(rank) is int
    if not (has_texts and has_numbers and has_rank):
        raise ValueError("expected `place` as {file, line, column, op, rank}")
    return SourceLocation(file, line, column, op, rank)
