"""What nccl-tests writes: the text that its programs print, and the JSON file of ``-J``.

Format: src/util.cu of nccl-tests (writeResultHeader, writeBenchmarkLineBody, writePerIterReport,
writeDeviceReport, and the JSON next to them), versions 1 to 3 of the JSON, and the older texts that
lack columns.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from math import isfinite
from pathlib import PurePath
from typing import Any, NamedTuple

import numpy as np

from distsim.common.errors import UsageError
from distsim.real.calibrate.measured_points import MeasuredPoint
from distsim.real.calibrate.pasted_logs import split_runs, strip_line_prefixes

#: Operations by the name of their program, as file names and logs have it; longer names first.
_PROGRAMS = {
    "reducescatter": "reduce_scatter_tensor",
    "allreduce": "all_reduce",
    "allgather": "all_gather_into_tensor",
    "alltoall": "all_to_all_single",
    "sendrecv": "send",
    "broadcast": "broadcast",
    "scatter": "scatter",
    "gather": "gather",
    "reduce": "reduce",
}
_RANK = re.compile(
    r"^#\s+Rank\s+\d+\s+(?:Group\s+(\d+)\s+)?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s*(.*)$"
)
_STARTING = re.compile(r"^# Collective test starting: (\S+)")
#: The program's name in a line that was typed.
_TYPED = re.compile(r"\b(\w+_perf)\b")
#: -S puts the time of day behind a row.
_TIME_STAMP = re.compile(r"\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
#: A time out of place that is so many times the one in place has a one-time cost in it;
#: `benchmarks/accuracy` goes by it too.
SETUP_RATIO = 1.5
_REMEDY = "give the text that all_reduce_perf and its like print, or the file of their -J"
_Json = Mapping[str, Any]
#: Half the distance between quartiles of a normal distribution over its standard deviation.
_QUARTILE_OVER_SIGMA = 0.6745


class _LogDevice(NamedTuple):
    """``ranks``: how many ranks the entry stands for."""

    group: int
    host: str
    name: str
    ranks: int = 1


class _TimedRow(NamedTuple):
    nbytes: int
    ns: int
    spread: float = 0.0


#: Out of place and in place; twice the same where there is but one.
_RowPair = tuple[_TimedRow, _TimedRow]


def points_from_nccl_tests(
    text: str, file: str, op: str | None = None
) -> tuple[tuple[MeasuredPoint, ...], str]:
    """(times, the GPU's name) of an output of nccl-tests, text or JSON. Lines of others in the text
    are passed over.

    A text may hold several runs, with what launchers put before their lines. The operation is told
    by ``op``, else by the output itself (since 2.17 it names its program, or the line that was
    typed stands in it), else by the file's name. Raises UsageError for what is no such output, or
    has times of the CPU.
    """
    if text.lstrip().startswith("{"):
        return _measured(*_parse_json(text, file), file, op)
    lines = strip_line_prefixes(text)
    rows = [k for k, line in enumerate(lines) if _row(line, 4) or _row(line, 8)]
    parts = [_parse_text(run, file) for run in split_runs(lines, rows)]
    every = [_measured(*part, file, op) for part in ([p for p in parts if p[2]] or parts[:1])]
    return tuple(point for points, _ in every for point in points), every[0][1]


def _measured(
    program: str, devices: list[_LogDevice], rows: list[_TimedRow], file: str, op: str | None
) -> tuple[tuple[MeasuredPoint, ...], str]:
    """(points, the GPU's name) of one run."""
    name = op or _operation(program) or _operation(PurePath(file).stem)
    if name is None:
        raise UsageError(
            f"{file}: its name does not tell the operation that it measures",
            "add --op, as --op all_reduce",
        )
    first = [d for d in devices if d.group == devices[0].group] if devices else []
    group = sum(d.ranks for d in first)
    if not rows or group < 2:
        raise UsageError(f"{file} is no log of nccl-tests over two or more ranks", _REMEDY)
    hosts: Counter[str] = Counter()
    for device in devices:
        hosts[device.host] += device.ranks
    nodes = len({d.host for d in first})
    points = [
        MeasuredPoint(name, group, max(hosts.values()), nodes, r.nbytes, r.ns, r.spread)
        for r in rows
        if r.nbytes > 0 and r.ns > 0
    ]
    return tuple(points), devices[0].name


def _operation(name: str) -> str | None:
    plain = name.lower().replace("_", "").replace("-", "")
    return next((op for word, op in _PROGRAMS.items() if word in plain), None)


# --- text ---


def _parse_text(lines: list[str], file: str) -> tuple[str, list[_LogDevice], list[_TimedRow]]:
    devices = [
        _LogDevice(int(m[1] or 0), m[2], m[3].strip())
        for line in lines
        if (m := _RANK.match(line.rstrip()))
    ]
    starting = next((m[1] for line in lines if (m := _STARTING.match(line))), "")
    typed = next((m[1] for line in lines if (m := _TYPED.search(line))), "")
    wide, rows = False, list[_RowPair]()
    for line in lines:
        if line.startswith("#") and "busbw" in line:
            wide = "i_cv%" in line
            if "cputime" in line:
                raise UsageError(
                    f"{file} has times of the CPU (-C), not of the operation", "measure without -C"
                )
        elif (row := _row(line, 8 if wide else 4)) is not None:
            rows.append(row)
    return starting or typed, devices, _without_setup_cost(rows)


def _row(line: str, width: int) -> _RowPair | None:
    """A line ``size count type [redop [root]] time algbw busbw wrong [min max p99 cv] [the same in
    place] [date time]``.

    ``width``: columns of out-of-place. None for another line.
    """
    words = _TIME_STAMP.sub("", line).split()
    if len(words) < 7 or not (
        words[0].isdigit() and words[1].isdigit() and words[2].isalnum() and not words[2].isdigit()
    ):
        return None
    rest = words[3:]
    at = next((k for k in (0, 1, 2) if len(rest) - k in (width, 2 * width)), None)
    if at is None:
        return None
    sides = [rest[side : side + width] for side in range(at, len(rest), width)]
    try:
        both = [
            _TimedRow(
                int(words[0]),
                round(float(s[0]) * 1000),
                _spread_from_cv(float(s[7])) if width == 8 else 0.0,
            )
            for s in sides
        ]
        return both[0], both[-1]
    except (ValueError, OverflowError):
        return None


def _without_setup_cost(rows: list[_RowPair]) -> list[_TimedRow]:
    """The times out of place; in place where the former are `SETUP_RATIO` times as long, against
    what is usual in the run: a call of a size whose connections are not set up yet takes longer,
    once (nccl-tests issue 309: 68 us out of place and 25 in place, right after)."""
    ratios = [
        out.ns / in_place.ns for out, in_place in rows if in_place is not out and in_place.ns > 0
    ]
    usual = max(float(np.median(ratios)), 1.0) if ratios else 1.0
    return [
        in_place if 0 < in_place.ns * usual * SETUP_RATIO <= out.ns else out
        for out, in_place in rows
    ]


def _spread_from_cv(cv_percent: float) -> float:
    return cv_percent / 100 * _QUARTILE_OVER_SIGMA if isfinite(cv_percent) else 0.0


# --- JSON ---


def _parse_json(text: str, file: str) -> tuple[str, list[_LogDevice], list[_TimedRow]]:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as fault:
        where = f" (line {fault.lineno})" if isinstance(fault, json.JSONDecodeError) else ""
        raise UsageError(
            f"{file} is cut short or damaged{where}", "run the measurement again"
        ) from None
    try:
        arguments = data.get("args") or [""]
        rows = [row for result in data["results"] if (row := _json_row(result, file)) is not None]
        return (
            PurePath(str(arguments[0])).name,
            _json_devices(data["config"]),
            _without_setup_cost(rows),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise UsageError(
            f"{file} is neither of `distsim bench` nor a JSON file of nccl-tests", _REMEDY
        ) from None


def _json_devices(config: _Json) -> list[_LogDevice]:
    """One entry for each process: the file may name only the first device of each."""
    each = int(config["nthreads"]) * int(config["ngpus"])
    found: dict[tuple[str, int], _LogDevice] = {}
    for device in config["devices"]:
        key = (str(device["hostname"]), int(device["pid"]))
        found.setdefault(
            key, _LogDevice(int(device["group"]), key[0], str(device["device_info"]).strip(), each)
        )
    return list(found.values())


def _json_row(result: _Json, file: str) -> _RowPair | None:
    """Out of place and in place; a test of a recorded list of operations has only the latter."""
    out, in_place = (_json_side(result, side, file) for side in ("out_of_place", "in_place"))
    one = out or in_place
    return None if one is None else (one, in_place or one)


def _json_side(result: _Json, side: str, file: str) -> _TimedRow | None:
    measured = result.get(side)
    if not measured:
        return None
    if "cpu_time" in measured:
        raise UsageError(
            f"{file} has times of the CPU (-C), not of the operation", "measure without -C"
        )
    us = float(measured["time"])
    return (
        _TimedRow(
            int(result["size"]), round(us * 1000), _json_spread(result.get(f"{side}_per_iter"))
        )
        if isfinite(us)
        else None
    )


def _json_spread(report: _Json | None) -> float:
    """Half the distance between quartiles over the median, of the times of single iterations
    (-I).
    """
    times = [float(us) for us in report.get("times_us", ())] if report else []
    low, median, high = np.percentile(times, (25, 50, 75)) if len(times) > 1 else (0.0, 0.0, 0.0)
    return float((high - low) / 2 / median) if median > 0 else 0.0
