"""Traces as files: JSON Lines, a header, then one object per call.

::

    {"format": "distsim-trace", "schema_version": 1, "calls": 2, "source": "simulated", "world_size": 2, …}
    {"rank": 0, "op": "send", "group": "world", "peer": 1, …, "posted_ns": 0, "returned_ns": 9, …, "position": 0, "part": -1, …}

Texts are written out, so a line can be read alone. ``calls`` in the header tells a file that was cut between two lines; a
recording that was still under way may leave it out. ``Trace.extras`` are not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from io import TextIOWrapper
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from distsim.errors import EnvironmentFault, UsageError
from distsim.findings.record import Place
from distsim.names import nearest
from distsim.output import visible, write_file
from distsim.reading import LongLine, bounded_lines, open_bytes, some_lines
from distsim.trace import COLUMNS, NOWHERE, OPTIONAL, TABLES, TRACE_SCHEMA_VERSION, Trace
from distsim.trace_values import readable

FORMAT: Final = "distsim-trace"
#: Lines that are parsed, or written, at a time: few enough to keep memory small, many enough to be fast.
_CHUNK: Final = 8192
#: Characters of a header, which holds groups and values, and of a call's line.
_LONGEST_HEADER: Final = 64 << 20
_LONGEST_LINE: Final = 8 << 20
#: A trace with more calls is not read.
_MOST_CALLS: Final = 50_000_000
#: A trace with more ranks is taken for a damaged one.
_MOST_RANKS: Final = 1 << 17
_REMEDY: Final = "traces are written by `distsim simulate FILE --trace FILE.jsonl` and `distsim run --real`"


#: Keys of a header, and what they are where they are there.
_KINDS: Final = {
    "options": dict, "mesh": dict, "group_options": dict, "prices": dict, "ends": list, "link_faults": list, "name": str, "file": str,
    "backend": str, "cluster": str,
}  # fmt: skip
#: Keys of a call's arguments, and what they are; of a list, what its items are.
_ARGS: Final = {
    "waits": [int], "input_parts": [int], "output_parts": [int], "coalesced": [int], "ranks": [int], "queue": str, "stream": str,
    "message": str, "backend": str, "init_method": str, "code": int, "timeout_ns": int, "assume_src": int,
}  # fmt: skip

# --- writing ---


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; a reader never sees half of it. Raises EnvironmentFault when it can't be written."""
    try:
        write_file(path, trace_lines(trace))
    except UsageError as fault:
        raise EnvironmentFault(f"the trace can't be written: {fault.message}", fault.remedy) from None


def trace_lines(trace: Trace) -> Iterator[str]:
    """The file's text in pieces, each of whole lines."""
    header = {"format": FORMAT, **trace.header, "schema_version": TRACE_SCHEMA_VERSION, "calls": len(trace)}
    yield json.dumps(header, ensure_ascii=False) + "\n"
    texts = {name: [_json(item) for item in [*trace.tables.get(name, []), NOWHERE if name == "place" else ""]] for name in TABLES}
    texts["args"] = [item or "null" for item in [*trace.tables.get("args", []), ""]]
    template = "{" + ", ".join(f'"{name}": %{"s" if name in TABLES or name == "peer" else "d"}' for name in COLUMNS) + "}\n"
    for start in range(0, len(trace), _CHUNK):
        columns: list[list[Any]] = []
        for name in COLUMNS:
            values = trace.columns[name][start : start + _CHUNK].tolist()
            if name in TABLES:
                table = texts[name]  # index -1, no text, is the last one
                values = [table[v] for v in values]
            elif name == "peer":
                values = ["null" if v < 0 else v for v in values]
            columns.append(values)
        yield "".join([template % row for row in zip(*columns, strict=True)])


def _json(item: Any) -> str:
    if isinstance(item, Place):
        item = {"file": item.file, "line": item.line, "column": item.column, "op": item.op, "rank": item.rank}
    return json.dumps(item, ensure_ascii=False)


# --- reading ---


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace. Raises UsageError, with the line, for a file that is damaged, cut short, newer, or no trace at all."""
    shown = visible(os.fspath(path), one_line=True)
    try:
        with open_bytes(path) as raw, TextIOWrapper(raw, encoding="utf-8") as lines:
            return _visible(parse_trace(bounded_lines(lines, _LONGEST_HEADER, _LONGEST_LINE), shown))
    except OSError as fault:
        raise UsageError(f"{shown} can't be read: {fault.strerror}", _near_file(os.fspath(path))) from None
    except LongLine as fault:
        raise UsageError(f"{shown}:{fault.number}: {fault}", _REMEDY) from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown}: this is no text, so no trace", _REMEDY) from None


def _visible(trace: Trace) -> Trace:
    """The trace with the control characters of its texts written out."""
    tables: dict[str, list[Any]] = {name: [_shown(item) for item in items] for name, items in trace.tables.items()}
    return Trace(_shown(trace.header), tables, trace.columns)


def _shown(item: Any) -> Any:
    if isinstance(item, str):
        return visible(item, one_line=True)
    if isinstance(item, Place):
        return replace(item, file=_shown(item.file), op=_shown(item.op))
    if isinstance(item, dict):
        return {_shown(key): _shown(value) for key, value in item.items()}
    return [_shown(value) for value in item] if isinstance(item, list) else item


def _near_file(file: str) -> str:
    folder, name = os.path.split(file)
    try:
        found = nearest(name, sorted(entry for entry in os.listdir(folder or ".") if entry.endswith(".jsonl")))
    except OSError:
        found = None
    return f"did you mean {os.path.join(folder, found)}?" if found and found != name else "give the path of a trace file"


def parse_trace(lines: Iterable[str], file: str = "<trace>") -> Trace:
    """A trace from its lines; see `read_trace`."""
    source = iter(lines)
    header = _header(next(source, ""), file)
    calls = header.pop("calls", None)
    most = _MOST_CALLS if calls is None else min(calls, _MOST_CALLS)
    reader = _Reader(file, header)
    number = 2
    while chunk := some_lines(source, _CHUNK, _LONGEST_HEADER):
        reader.take(chunk, number)
        number += len(chunk)
        if reader.count > most:
            raise UsageError(
                f"{file}:{most + 2}: more calls than the {most:,} that the header announces or distsim reads", _REMEDY
            )
    if calls is not None and calls != reader.count:
        said = f"the file is cut short: its header announces {calls} calls, {reader.count} are there"
        raise UsageError(f"{file}:{number}: {said}", "write the trace again")
    trace = reader.trace()
    _check_size(trace, file)
    return trace


def _check_size(trace: Trace, file: str) -> None:
    """Raise UsageError for more ranks than anybody has: whoever works on them all would run out of memory."""
    if trace.world_size > _MOST_RANKS:
        raise UsageError(f"{file}:1: {trace.world_size} ranks are more than distsim reads, {_MOST_RANKS}", _REMEDY)


def _header(line: str, file: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        scenario = file.endswith((".yaml", ".yml"))
        remedy = f"to run a scenario for real: `distsim run {file} --real`" if scenario else _REMEDY
        raise UsageError(f"{file}:1: expected the header of a trace, found {_short(line)}", remedy)
    version = header.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"{file}:1: the header has no schema_version", _REMEDY)
    if version > TRACE_SCHEMA_VERSION:
        raise UsageError(
            f"{file}:1: this trace has schema version {version}, this distsim reads up to {TRACE_SCHEMA_VERSION}",
            "use a newer distsim, or write the trace again with this one",
        )
    groups = header.get("groups", [])
    if not isinstance(groups, list) or not all(_is_group(g) for g in groups):
        raise UsageError(f"{file}:1: expected `groups` as a list of [name, [ranks]]", _REMEDY)
    if not all(_is_count(header.get(key, 0)) for key in ("world_size", "nodes", "local_size", "makespan_ns", "calls")):
        raise UsageError(f"{file}:1: expected world_size, nodes, local_size, makespan_ns and calls as whole numbers", _REMEDY)
    _check_facts(header, file)
    del header["format"]
    return header


def _check_facts(header: Mapping[str, Any], file: str) -> None:
    """Raise UsageError for keys of a header that a replay or a comparison could not read."""
    wrong = next((key for key, kind in _KINDS.items() if header.get(key) is not None and not isinstance(header[key], kind)), None)
    if wrong is None and not all(_is_link_fault(fault) for fault in header.get("link_faults") or ()):
        wrong = "link_faults"
    if wrong is None and not all(_is_end(end) for end in header.get("ends") or ()):
        wrong = "ends"
    if wrong is None and not all(_is_option(given) for given in (header.get("group_options") or {}).values()):
        wrong = "group_options"
    if wrong is None and not readable(header):
        wrong = "values"
    if wrong is not None:
        raise UsageError(f"{file}:1: `{wrong}` in the header is not as distsim writes it", _REMEDY)


def _is_link_fault(fault: object) -> bool:
    return (
        isinstance(fault, list) and len(fault) == 3 and isinstance(fault[0], str) and isinstance(fault[1], list)
        and isinstance(fault[2], (int, float)) and not isinstance(fault[2], bool)
    )  # fmt: skip


def _is(value: object, kind: type) -> bool:
    """true is no number."""
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _is_end(end: object) -> bool:
    return isinstance(end, list) and len(end) == 3 and type(end[0]) is type(end[2]) is int and isinstance(end[1], str)


def _is_option(given: object) -> bool:
    return isinstance(given, dict) and _is_count(given.get("timeout_ns")) and isinstance(given.get("backend", ""), str)


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**62)


def _is_group(group: object) -> bool:
    return (
        isinstance(group, list) and len(group) == 2 and isinstance(group[0], str) and isinstance(group[1], list)
        and all(type(rank) is int and rank >= 0 for rank in group[1])
    )  # fmt: skip


@dataclass
class _Reader:
    """Builds the columns, chunk by chunk."""

    file: str
    header: dict[str, Any]
    count: int = 0
    pieces: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in COLUMNS})
    index: dict[str, dict[Any, int]] = field(default_factory=lambda: {name: {} for name in TABLES})

    def __post_init__(self) -> None:
        #: Ranks of each group; names may repeat (one group per value of `by`), ids do not.
        self._by_name: dict[str, list[tuple[int, frozenset[Any]]]] = {}
        for number, (name, ranks) in enumerate(self.header.get("groups", [])):
            self._by_name.setdefault(name, []).append((number, frozenset(ranks)))
        self._plain: dict[Any, int] = {name: ids[0][0] for name, ids in self._by_name.items() if len(ids) == 1}
        self._others: dict[str, int] = {}  # groups that the header lacks

    def take(self, lines: list[str], number: int) -> None:
        """Add lines; ``number`` is the first one's. A chunk that can't be taken whole is gone through line by line."""
        try:
            rows = json.loads("[" + ",".join(lines) + "]")
            if len(rows) != len(lines):
                raise ValueError("a line holds several values")
            arrays = {name: self._column(name, rows) for name in COLUMNS}
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            self._blame(lines, number)
            raise UsageError(f"{self.file}:{number}: these lines can't be read", _REMEDY) from None
        for name, array in arrays.items():
            self.pieces[name].append(array)
        self.count += len(rows)

    def _column(self, name: str, rows: list[dict[str, Any]]) -> NDArray[Any]:
        values: list[Any] = [row.get(name, OPTIONAL[name]) for row in rows] if name in OPTIONAL else [row[name] for row in rows]
        if name == "group":
            plain = self._plain
            values = [plain[v] if v in plain else self._group(v, row["rank"]) for v, row in zip(values, rows, strict=True)]
        elif name == "place":
            values = self._places(values)
        elif name == "args":
            table = self.index[name]
            values = [table.setdefault(_args(value), len(table)) for value in values]
        elif name in TABLES:
            if not set(map(type, values)) <= {str}:
                raise ValueError(f"expected `{name}` as a text")
            table = self.index[name]
            values = [table.setdefault(value, len(table)) for value in values]
        elif name == "peer":
            values = [-1 if value is None else value for value in values]
        if not set(map(type, values)) <= {int}:
            raise ValueError(f"expected `{name}` as a whole number")
        array = np.array(values, dtype=COLUMNS[name])
        if name in ("rank", "nbytes") and len(array) and array.min() < 0:
            raise ValueError(f"expected `{name}` of zero or more")
        return array

    def _places(self, values: list[Any]) -> list[int]:
        known: dict[tuple[Any, ...], int] = {}  # of this chunk, by the values as they are written
        table, numbers = self.index["place"], []
        for value in values:
            key = (*value.items(),) if isinstance(value, dict) else (value,)
            number = known.get(key)
            if number is None:
                number = known[key] = table.setdefault(_place(value), len(table))
            numbers.append(number)
        return numbers

    def _group(self, name: Any, rank: Any) -> int:
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
                cut = not line.endswith("\n")
                what = "the file is cut short in this line" if cut else f"expected a call as a JSON object, found {_short(line)}"
                raise UsageError(f"{self.file}:{number}: {what}", "write the trace again, or remove the line") from None
            if not isinstance(row, dict):
                raise UsageError(f"{self.file}:{number}: expected a call as a JSON object, found {_short(line)}", _REMEDY)
            for name in COLUMNS:
                if name not in row and name not in OPTIONAL:
                    raise UsageError(f"{self.file}:{number}: the call has no `{name}`", _REMEDY)
                try:
                    self._column(name, [row])
                except (ValueError, TypeError, KeyError, OverflowError) as fault:
                    known = {OverflowError: f"`{name}` is too large", TypeError: f"`{name}` is of a wrong type"}
                    text = known.get(type(fault), str(fault))
                    raise UsageError(
                        f"{self.file}:{number}: {text}, found {_short(json.dumps(row.get(name)))}", _REMEDY
                    ) from None

    def trace(self) -> Trace:
        tables: dict[str, list[Any]] = {name: list(self.index[name]) for name in TABLES}
        tables["group"] = [name for name, _ in self.header.get("groups", [])] + list(self._others)
        empty = {name: np.empty(0, dtype=dtype) for name, dtype in COLUMNS.items()}
        columns = {name: np.concatenate(self.pieces[name]) if self.pieces[name] else empty[name] for name in COLUMNS}
        return Trace(self.header, tables, columns)


def _args(value: Any) -> str:
    if value is not None and not isinstance(value, dict):
        raise ValueError("expected `args` as an object or null")
    for name, given in (value or {}).items():
        kind: Any = _ARGS.get(name, object)
        items = given if isinstance(kind, list) else [given]
        if not isinstance(items, list) or not all(_is(item, kind[0] if isinstance(kind, list) else kind) for item in items):
            raise ValueError(f"expected `{name}` in `args` as distsim writes it")
    return json.dumps(value, ensure_ascii=False) if value else ""


def _place(value: Any) -> Place:
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
    return Place(file, line, column, op, rank)


def _short(text: str) -> str:
    text = " ".join(text.split()) or "nothing"
    return text if len(text) <= 60 else text[:57] + "..."


# --- comparing ---


def same_trace(a: Trace, b: Trace) -> bool:
    """Whether two traces say the same: headers and every call. The numbering of texts may differ; extras do not count."""
    if len(a) != len(b) or _plain(a.header) != _plain(b.header):
        return False
    return all(_same_column(name, a, b) for name in COLUMNS)


def _plain(header: Mapping[str, Any]) -> Any:
    return json.loads(json.dumps({**header, "schema_version": TRACE_SCHEMA_VERSION}))


def _same_column(name: str, a: Trace, b: Trace) -> bool:
    left, right = a.columns[name], b.columns[name]
    if name not in TABLES:
        return bool(
            np.array_equal(np.maximum(left, -1), np.maximum(right, -1)) if name == "peer" else np.array_equal(left, right)
        )
    common: dict[Any, int] = {}
    numbers = [
        np.array([common.setdefault(item, len(common)) for item in [*t.tables.get(name, []), t.text(name, -1)]], dtype=np.int64)
        for t in (a, b)
    ]  # fmt: skip
    return bool(np.array_equal(numbers[0][np.maximum(left, -1)], numbers[1][np.maximum(right, -1)]))
