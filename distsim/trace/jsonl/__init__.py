"""Traces as files: JSON Lines, a header, then one object per call; through gzip where the name ends
in .gz.

::

    {"format": "distsim-trace", "schema_version": 1, "calls": 2, "source": "simulated", "world_size": 2, …}
    {"rank": 0, "op": "send", "group": "world", "peer": 1, …, "posted_ns": 0, "returned_ns": 9, …, "position": 0, "part": -1, …}

Texts are written out, so a line can be read alone. ``calls`` in the header tells a file that was
cut between two lines. A file that was cut is read up to its last whole line; ``cut`` in the
header then says how many calls there were to be, and how many are there. ``Trace.extras`` are
not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.common.file_io import (
    LineTooLong,
    escape_control_characters,
    open_bytes,
    read_lines,
    write_file,
)
from distsim.common.message_text import closest_name
from distsim.findings.finding_types import SourceLocation
from distsim.trace.gzip_lines import decode_lines, encode_pieces, is_gzip
from distsim.trace.header import FORMAT, TRACE_REMEDY, read_header
from distsim.trace.model import COLUMN_TYPES, NO_LOCATION, TEXT_COLUMNS, TRACE_SCHEMA_VERSION, Trace
from distsim.trace.row_parser import TraceRowParser

#: Lines that are parsed, or written, at a time: few enough to keep memory small, many enough to be
#: fast.
_LINES_PER_CHUNK: Final = 8192
#: Bytes of a header, which holds groups and values, and of a call's line.
_MAX_HEADER_BYTES: Final = 64 << 20
_MAX_LINE_BYTES: Final = 8 << 20
#: A trace with more calls is not read.
_MAX_CALLS: Final = 50_000_000
#: How the names of traces end; `PARTIAL_SUFFIX` is put behind one while its recording is still
#: under way.
TRACE_SUFFIXES: Final = (".jsonl", ".jsonl.gz")
PARTIAL_SUFFIX: Final = ".partial"

# --- writing ---


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; a reader never sees half of it. Raises EnvironmentFault when it can't be
    written.
    """
    try:
        write_file(path, encode_pieces(path, trace_lines(trace)))
    except UsageError as fault:
        raise EnvironmentFault(
            f"the trace can't be written: {fault.message}", fault.remedy
        ) from None


def trace_lines(trace: Trace) -> Iterator[str]:
    """The file's text in pieces, each of whole lines."""
    header = {
        "format": FORMAT,
        **trace.header,
        "schema_version": TRACE_SCHEMA_VERSION,
        "calls": len(trace),
    }
    yield json.dumps(header, ensure_ascii=False) + "\n"
    texts = {
        name: [
            _table_entry_json(item)
            for item in [*trace.tables.get(name, []), NO_LOCATION if name == "place" else ""]
        ]
        for name in TEXT_COLUMNS
    }
    texts["args"] = [item or "null" for item in [*trace.tables.get("args", []), ""]]
    template = (
        "{"
        + ", ".join(
            f'"{name}": %{"s" if name in TEXT_COLUMNS or name == "peer" else "d"}'
            for name in COLUMN_TYPES
        )
        + "}\n"
    )
    for start in range(0, len(trace), _LINES_PER_CHUNK):
        columns: list[list[object]] = []
        for name in COLUMN_TYPES:
            values = trace.columns[name][start : start + _LINES_PER_CHUNK].tolist()
            if name in TEXT_COLUMNS:
                table = texts[name]  # index -1, no text, is the last one
                values = [table[v] for v in values]
            elif name == "peer":
                values = ["null" if v < 0 else v for v in values]
            columns.append(values)
        yield "".join([template % row for row in zip(*columns, strict=True)])


def _table_entry_json(item: Any) -> str:
    if isinstance(item, SourceLocation):
        item = {
            "file": item.file,
            "line": item.line,
            "column": item.column,
            "op": item.op,
            "rank": item.rank,
        }
    return json.dumps(item, ensure_ascii=False)


# --- reading ---


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read a trace, of a file that was cut what is whole of it.

    Raises UsageError, with the line, for a file that is damaged, newer, or no trace at all.
    """
    shown = escape_control_characters(os.fspath(path), one_line=True)
    try:
        with open_bytes(path) as raw:
            return _escape_trace(
                parse_trace(decode_lines(raw, _MAX_HEADER_BYTES, _MAX_LINE_BYTES), shown)
            )
    except OSError as fault:
        raise UsageError(
            f"{shown} can't be read: {fault.strerror}", _file_remedy(os.fspath(path))
        ) from None
    except LineTooLong as fault:
        raise UsageError(f"{shown}:{fault.number}: {fault}", TRACE_REMEDY) from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown}: this is no text, so no trace", TRACE_REMEDY) from None


def _escape_trace(trace: Trace) -> Trace:
    """The trace with the control characters of its texts written out."""
    tables: dict[str, list[Any]] = {
        name: [_escape_item(item) for item in items] for name, items in trace.tables.items()
    }
    return Trace(_escape_item(trace.header), tables, trace.columns)


def _escape_item(item: Any) -> Any:
    if isinstance(item, str):
        return escape_control_characters(item, one_line=True)
    if isinstance(item, SourceLocation):
        return replace(item, file=_escape_item(item.file), op=_escape_item(item.op))
    if isinstance(item, dict):
        return {_escape_item(key): _escape_item(value) for key, value in item.items()}
    return [_escape_item(value) for value in item] if isinstance(item, list) else item


def _file_remedy(file: str) -> str:
    folder, name = os.path.split(file)
    if os.path.exists(file + PARTIAL_SUFFIX):
        return f"its recording did not come to an end: what there is of it is in {file + PARTIAL_SUFFIX}"
    try:
        found = closest_name(
            name,
            sorted(entry for entry in os.listdir(folder or ".") if entry.endswith(TRACE_SUFFIXES)),
        )
    except OSError:
        found = None
    return (
        f"did you mean {os.path.join(folder, found)}?"
        if found and found != name
        else "give the path of a trace file"
    )


def parse_trace(lines: Iterable[str], file: str = "<trace>") -> Trace:
    """A trace from its lines; see `read_trace`."""
    source = iter(lines)
    header = read_header(next(source, ""), file)
    calls = header.pop("calls", None)
    most = _MAX_CALLS if calls is None else min(calls, _MAX_CALLS)
    reader = TraceRowParser(file, header)
    number, is_cut = 2, False
    while chunk := read_lines(source, _LINES_PER_CHUNK, _MAX_HEADER_BYTES):
        if not _is_whole(chunk[-1]):
            is_cut = bool(chunk.pop())
        if chunk:
            reader.take(chunk, number)
        number += len(chunk)
        if reader.count > most:
            raise UsageError(
                f"{file}:{most + 2}: more calls than the {most:,} that the header announces or distsim reads",
                TRACE_REMEDY,
            )
    if is_cut or (calls is not None and calls != reader.count):
        header["cut"] = {"calls": calls, "read": reader.count}
        header["complete"] = False
    return reader.trace()


def _is_whole(line: str) -> bool:
    """A line that has its end, or needs none."""
    if line.endswith("\n"):
        return True
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


# --- comparing ---


def same_trace(a: Trace, b: Trace) -> bool:
    """Whether two traces say the same: headers and every call. The numbering of texts may differ;
    extras do not count.
    """
    if len(a) != len(b) or _json_plain(a.header) != _json_plain(b.header):
        return False
    return all(_same_column(name, a, b) for name in COLUMN_TYPES)


def _json_plain(header: Mapping[str, object]) -> object:
    return json.loads(json.dumps({**header, "schema_version": TRACE_SCHEMA_VERSION}))


def _same_column(name: str, a: Trace, b: Trace) -> bool:
    left, right = a.columns[name], b.columns[name]
    if name not in TEXT_COLUMNS:
        return bool(
            np.array_equal(np.maximum(left, -1), np.maximum(right, -1))
            if name == "peer"
            else np.array_equal(left, right)
        )
    common: dict[object, int] = {}
    numbers = [
        np.array(
            [
                common.setdefault(item, len(common))
                for item in [*t.tables.get(name, []), t.text(name, -1)]
            ],
            dtype=np.int64,
        )
        for t in (a, b)
    ]
    return bool(np.array_equal(numbers[0][np.maximum(left, -1)], numbers[1][np.maximum(right, -1)]))


__all__ = [
    "TRACE_SUFFIXES",
    "FORMAT",
    "PARTIAL_SUFFIX",
    "is_gzip",
    "encode_pieces",
    "parse_trace",
    "read_trace",
    "same_trace",
    "trace_lines",
    "write_trace",
]
