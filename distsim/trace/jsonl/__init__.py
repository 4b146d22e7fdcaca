"""Reads and writes traces as JSON Lines: a header, then one object per call.

::

    {"format": "distsim-trace", "schema_version": 1, "calls": 2, "source": "simulated", …}
    {"rank": 0, "op": "send", "group": "world", "peer": 1, …, "position": 0, "part": -1, …}

A file whose name ends in .gz is compressed. Texts are written out in every line, so a line can be
read alone. ``calls`` in the header reveals a file that was cut between two lines. A file that was
cut is read up to its last complete line; then ``cut`` in the header of the trace says how many
calls there should be, and how many there are. ``Trace.extras`` are not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import EnvironmentFault, UsageError
from distsim.common.file_io import (
    LineTooLong,
    escape_control_characters,
    open_bytes,
    read_lines,
    write_file,
)
from distsim.common.message_text import closest_name
from distsim.common.reading_limits import reading_limits
from distsim.findings.finding_types import SourceLocation
from distsim.trace.gzip_lines import decode_lines, encode_pieces, is_gzip
from distsim.trace.header import FORMAT, TRACE_REMEDY, read_header
from distsim.trace.model import COLUMN_TYPES, NO_LOCATION, TEXT_COLUMNS, TRACE_SCHEMA_VERSION, Trace
from distsim.trace.row_parser import TraceRowParser

#: Lines that are parsed or written at a time: few enough to save memory, many enough to be fast.
_LINES_PER_CHUNK: Final = 8192
#: The longest header (it contains groups and values), and the longest line of a call.
_MAX_HEADER_BYTES: Final = 64 << 20
_MAX_LINE_BYTES: Final = 8 << 20
#: A trace with more calls is refused.
_MAX_CALLS: Final = 50_000_000
#: The suffixes of traces. `PARTIAL_SUFFIX` is appended while the recording is still going on.
TRACE_SUFFIXES: Final = (".jsonl", ".jsonl.gz")
PARTIAL_SUFFIX: Final = ".partial"

# --- writing ---


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace. A reader never sees half of it.

    Raises EnvironmentFault if it cannot be written.
    """
    try:
        write_file(path, encode_pieces(path, trace_lines(trace)))
    except UsageError as fault:
        raise EnvironmentFault(
            f"the trace cannot be written: {fault.message}", fault.remedy
        ) from None


def trace_lines(trace: Trace) -> Iterator[str]:
    """The file's text in pieces of whole lines."""
    header = {
        "format": FORMAT,
        **trace.header,
        "schema_version": TRACE_SCHEMA_VERSION,
        "calls": len(trace),
    }
    yield json.dumps(header, ensure_ascii=False) + "\n"
    texts = _json_tables(trace)
    template = _line_template()
    for start in range(0, len(trace), _LINES_PER_CHUNK):
        columns: list[list[object]] = []
        for name in COLUMN_TYPES:
            values = trace.columns[name][start : start + _LINES_PER_CHUNK].tolist()
            if name in TEXT_COLUMNS:
                table = texts[name]
                values = [table[value] for value in values]
            elif name == "peer":
                values = ["null" if value < 0 else value for value in values]
            columns.append(values)
        yield "".join([template % row for row in zip(*columns, strict=True)])


def _json_tables(trace: Trace) -> dict[str, list[str]]:
    """The texts of each column as JSON. The last one stands for index -1, which means no text."""
    texts = {}
    for name in TEXT_COLUMNS:
        no_text = NO_LOCATION if name == "place" else ""
        texts[name] = [_table_entry_json(item) for item in [*trace.tables.get(name, []), no_text]]
    # Arguments are JSON already.
    texts["args"] = [item or "null" for item in [*trace.tables.get("args", []), ""]]
    return texts


def _line_template() -> str:
    """The line of a call as a %-format, because formatting is much faster than json.dumps."""
    text_columns = {*TEXT_COLUMNS, "peer"}
    items = [f'"{name}": %{"s" if name in text_columns else "d"}' for name in COLUMN_TYPES]
    return "{" + ", ".join(items) + "}\n"


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
    """Read a trace; of a file that was cut, its complete lines.

    Raises UsageError with the line for a file that is damaged, newer, or no trace at all.
    """
    shown = escape_control_characters(os.fspath(path), one_line=True)
    try:
        with reading_limits(path), open_bytes(path) as raw:
            lines = decode_lines(raw, _MAX_HEADER_BYTES, _MAX_LINE_BYTES)
            return _escape_trace(parse_trace(lines, shown))
    except OSError as fault:
        raise UsageError(
            f"{shown} cannot be read: {fault.strerror}", _file_remedy(os.fspath(path))
        ) from None
    except LineTooLong as fault:
        raise UsageError(f"{shown}:{fault.number}: {fault}", TRACE_REMEDY) from None
    except UnicodeDecodeError:
        raise UsageError(
            f"{shown}: this is not a text file, so it is not a trace", TRACE_REMEDY
        ) from None


def _escape_trace(trace: Trace) -> Trace:
    """The trace with the control characters of its texts escaped, so that it is safe to print."""
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
    if isinstance(item, list):
        return [_escape_item(value) for value in item]
    return item


def _file_remedy(file: str) -> str:
    """What to do about a file that cannot be read."""
    partial = file + PARTIAL_SUFFIX
    if os.path.exists(partial):
        return f"its recording did not come to an end: what there is of it is in {partial}"
    folder, name = os.path.split(file)
    try:
        entries = os.listdir(folder or ".")
    except OSError:
        entries = []
    traces = sorted(entry for entry in entries if entry.endswith(TRACE_SUFFIXES))
    similar = closest_name(name, traces)
    if similar and similar != name:
        return f"did you mean {os.path.join(folder, similar)}?"
    return "give the path of a trace file"


def parse_trace(lines: Iterable[str], file: str = "<trace>") -> Trace:
    """A trace from its lines; see `read_trace`."""
    source = iter(lines)
    header = read_header(next(source, ""), file)
    announced = header.pop("calls", None)
    limit = _MAX_CALLS if announced is None else min(announced, _MAX_CALLS)
    parser = TraceRowParser(file, header)
    number = 2  # of the next line in the file
    is_cut = False
    while chunk := read_lines(source, _LINES_PER_CHUNK, _MAX_HEADER_BYTES):
        if not _is_complete(chunk[-1]):
            is_cut = bool(chunk.pop())
        if chunk:
            parser.parse(chunk, number)
        number += len(chunk)
        if parser.count > limit:
            raise UsageError(
                f"{file}:{limit + 2}: more calls than the {limit:,} "
                "that the header announces or distsim reads",
                TRACE_REMEDY,
            )
    if is_cut or (announced is not None and announced != parser.count):
        header["cut"] = {"calls": announced, "read": parser.count}
        header["complete"] = False
    return parser.trace()


def _is_complete(line: str) -> bool:
    """The line ends with a newline, or is complete JSON without one."""
    if line.endswith("\n"):
        return True
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


# --- comparing ---


def same_trace(a: Trace, b: Trace) -> bool:
    """Whether two traces have the same headers and the same calls.

    The numbering of texts may differ, and extras do not count.
    """
    if len(a) != len(b) or _comparable_header(a) != _comparable_header(b):
        return False
    return all(_same_column(name, a, b) for name in COLUMN_TYPES)


def _comparable_header(trace: Trace) -> object:
    """The header after a round trip through JSON, which for example turns tuples into lists."""
    return json.loads(json.dumps({**trace.header, "schema_version": TRACE_SCHEMA_VERSION}))


def _same_column(name: str, a: Trace, b: Trace) -> bool:
    left, right = a.columns[name], b.columns[name]
    if name in TEXT_COLUMNS:
        common: dict[object, int] = {}
        left = _renumbered(a, name, common)
        right = _renumbered(b, name, common)
    elif name == "peer":
        left, right = np.maximum(left, -1), np.maximum(right, -1)
    return bool(np.array_equal(left, right))


def _renumbered(trace: Trace, name: str, common: dict[object, int]) -> NDArray[np.int64]:
    """A column of texts, with numbers in a table that both traces share."""
    items = [*trace.tables.get(name, []), trace.text(name, -1)]
    numbers = [common.setdefault(item, len(common)) for item in items]
    return np.array(numbers, dtype=np.int64)[np.maximum(trace.columns[name], -1)]


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
