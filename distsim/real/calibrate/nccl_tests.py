"""Reads the output of nccl-tests: the text that its programs print, and the JSON file of ``-J``.

Format: src/util.cu of nccl-tests (writeResultHeader, writeBenchmarkLineBody, writePerIterReport,
writeDeviceReport, and the JSON next to them), versions 1 to 3 of the JSON, and older texts with
fewer columns. Each size has a row for times out of place and in place; `_without_setup_cost`
chooses between them.
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

#: Operations by the name of their program in file names and logs. Longer names come first, because
#: the first one that is contained in a name counts.
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
#: The program's name in the typed command.
_TYPED = re.compile(r"\b(\w+_perf)\b")
#: The option -S appends the time of day to a row.
_TIME_STAMP = re.compile(r"(?<!\s)\s+\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\s*$")
#: A time out of place that exceeds the one in place by this factor includes a one-time cost.
#: `benchmarks/accuracy` uses the same factor.
SETUP_RATIO = 1.5
_REMEDY = "give the output of a program of nccl-tests, or the file that its option -J writes"
_Json = Mapping[str, Any]
#: Half the distance between the quartiles of a normal distribution / its standard deviation.
_QUARTILE_OVER_SIGMA = 0.6745


#: Columns of the times of one place in a row: time, algbw, busbw, wrong; newer versions add min,
#: max, p99 and cv.
_COLUMNS_PER_PLACE = 4
_WIDE_COLUMNS_PER_PLACE = 8
#: Where a wide row has the coefficient of variation, in percent.
_CV_COLUMN = 7


class _LogDevice(NamedTuple):
    """A GPU, or a process of several GPUs. ``ranks``: how many ranks it has."""

    group: int
    host: str
    name: str
    ranks: int = 1


class _TimedRow(NamedTuple):
    nbytes: int
    ns: int
    spread: float = 0.0


class _RowPair(NamedTuple):
    """The times of one size. If there is only one, both fields are the same object."""

    out_of_place: _TimedRow
    in_place: _TimedRow


class LogMeasurements(NamedTuple):
    """The measurements in an output, and the name of its GPUs."""

    points: tuple[MeasuredPoint, ...]
    gpu: str


class _LogRun(NamedTuple):
    """One run of a program of nccl-tests. ``program``: its name, or ""."""

    program: str
    devices: list[_LogDevice]
    rows: list[_TimedRow]


def points_from_nccl_tests(text: str, file: str, op: str | None = None) -> LogMeasurements:
    """The measurements in an output of nccl-tests, text or JSON.

    A text may contain several runs, prefixes of launchers, and other lines, which are ignored. The
    operation is ``op`` if given; else the output names it (since version 2.17 it contains the name
    of its program, or it contains the typed command); else the file's name does. Raises UsageError
    for other files, and for CPU times.
    """
    if text.lstrip().startswith("{"):
        return _points_of_run(_parse_json(text, file), file, op)
    lines = strip_line_prefixes(text)
    row_numbers = [number for number, line in enumerate(lines) if _is_row(line)]
    runs = [_parse_text(run, file) for run in split_runs(lines, row_numbers)]
    # Without any measurement, the first run serves for the error message.
    measured_runs = [run for run in runs if run.rows] or runs[:1]
    by_run = [_points_of_run(run, file, op) for run in measured_runs]
    points = tuple(point for measured in by_run for point in measured.points)
    return LogMeasurements(points, by_run[0].gpu)


def _points_of_run(run: _LogRun, file: str, op: str | None) -> LogMeasurements:
    name = op or _operation(run.program) or _operation(PurePath(file).stem)
    if name is None:
        raise UsageError(
            f"{file}: the file name does not contain the operation",
            "name it with --op, for example --op all_reduce",
        )
    # All groups work at the same time; the first one gives the size of all.
    first_group = [device for device in run.devices if device.group == run.devices[0].group]
    group_size = sum(device.ranks for device in first_group)
    if not run.rows or group_size < 2:
        raise UsageError(f"{file} is not an nccl-tests log with two or more ranks", _REMEDY)
    ranks_by_host: Counter[str] = Counter()
    for device in run.devices:
        ranks_by_host[device.host] += device.ranks
    ranks = max(ranks_by_host.values())
    nodes = len({device.host for device in first_group})
    points = [
        MeasuredPoint(name, group_size, ranks, nodes, row.nbytes, row.ns, row.spread)
        for row in run.rows
        if row.nbytes > 0 and row.ns > 0
    ]
    return LogMeasurements(tuple(points), run.devices[0].name)


def _operation(name: str) -> str | None:
    plain = name.lower().replace("_", "").replace("-", "")
    return next((op for word, op in _PROGRAMS.items() if word in plain), None)


# --- text ---


def _parse_text(lines: list[str], file: str) -> _LogRun:
    devices: list[_LogDevice] = []
    pairs: list[_RowPair] = []
    columns = _COLUMNS_PER_PLACE
    for line in lines:
        if device := _RANK.match(line.rstrip()):
            devices.append(_LogDevice(int(device[1] or 0), device[2], device[3].strip()))
        if line.startswith("#") and "busbw" in line:  # the heading of the table
            if "cputime" in line:
                raise _cpu_times_error(file)
            columns = _WIDE_COLUMNS_PER_PLACE if "i_cv%" in line else _COLUMNS_PER_PLACE
        elif (pair := _row(line, columns)) is not None:
            pairs.append(pair)
    program = _first_match(_STARTING, lines) or _first_match(_TYPED, lines)
    return _LogRun(program, devices, _without_setup_cost(pairs))


def _first_match(pattern: re.Pattern[str], lines: list[str]) -> str:
    """The first group of the first match, or ""."""
    for line in lines:
        if found := pattern.search(line):
            return found[1]
    return ""


def _cpu_times_error(file: str) -> UsageError:
    return UsageError(
        f"{file} has times of the CPU (-C), not of the operation", "measure without -C"
    )


def _is_row(line: str) -> bool:
    return any(_row(line, columns) for columns in (_COLUMNS_PER_PLACE, _WIDE_COLUMNS_PER_PLACE))


def _row(line: str, columns: int) -> _RowPair | None:
    """The times in a row of the table; None for another line.

    A row is ``size count type [redop [root]]``, then ``time algbw busbw wrong [min max p99 cv]``
    once or twice (out of place, in place), then perhaps date and time. ``columns``: how many the
    times of one place have.
    """
    words = _TIME_STAMP.sub("", line).split()
    if len(words) < 7 or not _is_row_head(words[0], words[1], words[2]):
        return None
    rest = words[3:]
    start = _start_of_times(len(rest), columns)
    if start is None:
        return None
    places = [rest[k : k + columns] for k in range(start, len(rest), columns)]
    try:
        rows = [_timed_row(words[0], place) for place in places]
    except (ValueError, OverflowError):
        return None
    return _RowPair(rows[0], rows[-1])


def _is_row_head(size: str, count: str, dtype: str) -> bool:
    has_numbers = size.isdigit() and count.isdigit()
    return has_numbers and dtype.isalnum() and not dtype.isdigit()


def _start_of_times(words: int, columns: int) -> int | None:
    """How many of the optional words (redop, root) precede the times."""
    for start in (0, 1, 2):
        if words - start in (columns, 2 * columns):
            return start
    return None


def _timed_row(size: str, times: list[str]) -> _TimedRow:
    spread = 0.0
    if len(times) == _WIDE_COLUMNS_PER_PLACE:
        spread = _spread_from_cv(float(times[_CV_COLUMN]))
    return _TimedRow(int(size), round(float(times[0]) * 1000), spread)


def _without_setup_cost(pairs: list[_RowPair]) -> list[_TimedRow]:
    """The times out of place, or in place if the former include a one-time cost.

    The first call of a size whose connections are not set up yet takes longer (nccl-tests issue
    309: 68 us out of place and 25 in place, right after). It is recognised by `SETUP_RATIO`,
    compared with the usual ratio of the run.
    """
    ratios = [
        pair.out_of_place.ns / pair.in_place.ns
        for pair in pairs
        if pair.in_place is not pair.out_of_place and pair.in_place.ns > 0
    ]
    usual_ratio = max(float(np.median(ratios)), 1.0) if ratios else 1.0
    return [_representative(pair, usual_ratio) for pair in pairs]


def _representative(pair: _RowPair, usual_ratio: float) -> _TimedRow:
    limit_ns = pair.in_place.ns * usual_ratio * SETUP_RATIO
    has_setup_cost = 0 < limit_ns <= pair.out_of_place.ns
    return pair.in_place if has_setup_cost else pair.out_of_place


def _spread_from_cv(cv_percent: float) -> float:
    return cv_percent / 100 * _QUARTILE_OVER_SIGMA if isfinite(cv_percent) else 0.0


# --- JSON ---


def _parse_json(text: str, file: str) -> _LogRun:
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as fault:
        where = f" (line {fault.lineno})" if isinstance(fault, json.JSONDecodeError) else ""
        raise UsageError(
            f"{file} is cut short or damaged{where}", "run the measurement again"
        ) from None
    try:
        arguments = data.get("args") or [""]
        pairs = [_json_row(result, file) for result in data["results"]]
        return _LogRun(
            PurePath(str(arguments[0])).name,
            _json_devices(data["config"]),
            _without_setup_cost([pair for pair in pairs if pair is not None]),
        )
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError):
        raise UsageError(
            f"{file} is neither an output of `distsim bench` nor a JSON file of nccl-tests", _REMEDY
        ) from None


def _json_devices(config: _Json) -> list[_LogDevice]:
    """One entry for each process, because the file may name only the first device of each."""
    ranks_per_process = int(config["nthreads"]) * int(config["ngpus"])
    processes: dict[tuple[str, int], _LogDevice] = {}
    for device in config["devices"]:
        host, pid = str(device["hostname"]), int(device["pid"])
        group, name = int(device["group"]), str(device["device_info"]).strip()
        processes.setdefault((host, pid), _LogDevice(group, host, name, ranks_per_process))
    return list(processes.values())


def _json_row(result: _Json, file: str) -> _RowPair | None:
    """The times of one size; a test of a recorded list of operations has only those in place."""
    out_of_place = _json_times(result, "out_of_place", file)
    in_place = _json_times(result, "in_place", file)
    first = out_of_place or in_place
    if first is None:
        return None
    return _RowPair(first, in_place or first)


def _json_times(result: _Json, place: str, file: str) -> _TimedRow | None:
    measured = result.get(place)
    if not measured:
        return None
    if "cpu_time" in measured:
        raise _cpu_times_error(file)
    us = float(measured["time"])
    if not isfinite(us):
        return None
    spread = _json_spread(result.get(f"{place}_per_iter"))
    return _TimedRow(int(result["size"]), round(us * 1000), spread)


def _json_spread(report: _Json | None) -> float:
    """The spread of the times of single iterations (-I), as in `MeasuredPoint`."""
    times = [float(us) for us in report.get("times_us", ())] if report else []
    if len(times) < 2:
        return 0.0
    low, median, high = np.percentile(times, (25, 50, 75))
    return float((high - low) / 2 / median) if median > 0 else 0.0
