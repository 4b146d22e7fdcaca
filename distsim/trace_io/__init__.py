"""Traces as files: JSON Lines, a header, then one object per call; through gzip where the name ends in .gz.

::

    {"format": "distsim-trace", "schema_version": 1, "calls": 2, "source": "simulated", "world_size": 2, …}
    {"rank": 0, "op": "send", "group": "world", "peer": 1, …, "posted_ns": 0, "returned_ns": 9, …, "position": 0, "part": -1, …}

Texts are written out, so a line can be read alone. ``calls`` in the header tells a file that was cut between two lines. A file that was
cut is read up to its last whole line; ``cut`` in the header then says how many calls there were to be, and how many are there.
``Trace.extras`` are not written.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from distsim.errors import EnvironmentFault, UsageError
from distsim.files import LongLine, open_bytes, some_lines, visible, write_file
from distsim.findings.record import Place
from distsim.names import nearest
from distsim.trace import COLUMNS, NOWHERE, TABLES, TRACE_SCHEMA_VERSION, Trace
from distsim.trace_io.files import is_gzip, lines_of, packed
from distsim.trace_io.header import FORMAT, REMEDY, read_header
from distsim.trace_io.rows import Rows

#: Lines that are parsed, or written, at a time: few enough to keep memory small, many enough to be fast.
_CHUNK: Final = 8192
#: Bytes of a header, which holds groups and values, and of a call's line.
_LONGEST_HEADER: Final = 64 << 20
_LONGEST_LINE: Final = 8 << 20
#: A trace with more calls is not read.
_MOST_CALLS: Final = 50_000_000
#: How the names of traces end; `UNDER_WAY` is put behind one while its recording is still under way.
ENDINGS: Final = (".jsonl", ".jsonl.gz")
UNDER_WAY: Final = ".partial"

# --- writing ---


def write_trace(trace: Trace, path: str | os.PathLike[str]) -> None:
    """Write a trace; a reader never sees half of it. Raises EnvironmentFault when it can't be written."""
    try:
        write_file(path, packed(path, trace_lines(trace)))
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
        columns: list[list[object]] = []
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
    """Read a trace, of a file that was cut what is whole of it.

    Raises UsageError, with the line, for a file that is damaged, newer, or no trace at all.
    """
    shown = visible(os.fspath(path), one_line=True)
    try:
        with open_bytes(path) as raw:
            return _visible(parse_trace(lines_of(raw, _LONGEST_HEADER, _LONGEST_LINE), shown))
    except OSError as fault:
        raise UsageError(f"{shown} can't be read: {fault.strerror}", _near_file(os.fspath(path))) from None
    except LongLine as fault:
        raise UsageError(f"{shown}:{fault.number}: {fault}", REMEDY) from None
    except UnicodeDecodeError:
        raise UsageError(f"{shown}: this is no text, so no trace", REMEDY) from None


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
    if os.path.exists(file + UNDER_WAY):
        return f"its recording did not come to an end: what there is of it is in {file + UNDER_WAY}"
    try:
        found = nearest(name, sorted(entry for entry in os.listdir(folder or ".") if entry.endswith(ENDINGS)))
    except OSError:
        found = None
    return f"did you mean {os.path.join(folder, found)}?" if found and found != name else "give the path of a trace file"


def parse_trace(lines: Iterable[str], file: str = "<trace>") -> Trace:
    """A trace from its lines; see `read_trace`."""
    source = iter(lines)
    header = read_header(next(source, ""), file)
    calls = header.pop("calls", None)
    most = _MOST_CALLS if calls is None else min(calls, _MOST_CALLS)
    reader = Rows(file, header)
    number, is_cut = 2, False
    while chunk := some_lines(source, _CHUNK, _LONGEST_HEADER):
        if not _is_whole(chunk[-1]):
            is_cut = bool(chunk.pop())
        if chunk:
            reader.take(chunk, number)
        number += len(chunk)
        if reader.count > most:
            raise UsageError(
                f"{file}:{most + 2}: more calls than the {most:,} that the header announces or distsim reads", REMEDY
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
    """Whether two traces say the same: headers and every call. The numbering of texts may differ; extras do not count."""
    if len(a) != len(b) or _plain(a.header) != _plain(b.header):
        return False
    return all(_same_column(name, a, b) for name in COLUMNS)


def _plain(header: Mapping[str, object]) -> object:
    return json.loads(json.dumps({**header, "schema_version": TRACE_SCHEMA_VERSION}))


def _same_column(name: str, a: Trace, b: Trace) -> bool:
    left, right = a.columns[name], b.columns[name]
    if name not in TABLES:
        return bool(
            np.array_equal(np.maximum(left, -1), np.maximum(right, -1)) if name == "peer" else np.array_equal(left, right)
        )
    common: dict[object, int] = {}
    numbers = [
        np.array([common.setdefault(item, len(common)) for item in [*t.tables.get(name, []), t.text(name, -1)]], dtype=np.int64)
        for t in (a, b)
    ]  # fmt: skip
    return bool(np.array_equal(numbers[0][np.maximum(left, -1)], numbers[1][np.maximum(right, -1)]))


__all__ = [
    "ENDINGS", "FORMAT", "UNDER_WAY", "is_gzip", "packed", "parse_trace", "read_trace", "same_trace", "trace_lines", "write_trace",
]  # fmt: skip
