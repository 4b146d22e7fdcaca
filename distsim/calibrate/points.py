"""Measured durations from where they come: a bench, a trace, a log of nccl-tests."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import PurePath
from typing import NamedTuple

import numpy as np

from distsim.bench import Bench
from distsim.errors import UsageError
from distsim.ops.table import OPS
from distsim.trace import Trace, TraceCall

#: Operations by the name of their nccl-tests program, as file names have it; longer names first.
_PROGRAMS = {
    "reducescatter": "reduce_scatter_tensor", "allreduce": "all_reduce", "allgather": "all_gather_into_tensor",
    "alltoall": "all_to_all_single", "sendrecv": "send", "broadcast": "broadcast", "scatter": "scatter", "gather": "gather",
    "reduce": "reduce",
}  # fmt: skip
_RANK_LINE = re.compile(r"^#\s+Rank\s+\d+\s.*?Pid\s+\d+\s+on\s+(\S+)\s+device\s+\d+\s+\[\S+\]\s*(.*)$")


class Point(NamedTuple):
    """``ns``: the median over ``samples``. ``group`` ranks in each group over ``nodes`` nodes, ``ranks`` busy on each node."""

    op: str
    group: int
    ranks: int
    nodes: int
    nbytes: int
    ns: int
    spread: float = 0.0  # half the distance between quartiles over the median
    samples: int = 1


def from_bench(found: Bench) -> tuple[Point, ...]:
    """Everything that was measured, on one node."""
    return tuple(
        Point(r.op, r.group, r.ranks, 1, r.nbytes, r.median_ns, r.spread, r.samples) for r in found.rows if r.median_ns > 0
    )


def from_trace(trace: Trace) -> tuple[Point, ...]:
    """Medians over the calls that met: from when the last one was there to the last finish. Calls that other work delayed are in it too."""
    met: dict[int, list[TraceCall]] = defaultdict(list)
    for call in trace.rows():
        if call.match >= 0 and call.op in OPS and OPS[call.op].kind in ("p2p", "collective"):
            met[call.match].append(call)
    local = int(trace.header.get("local_size") or trace.world_size) or 1
    samples: dict[tuple[str, int, int, int], list[int]] = defaultdict(list)
    for calls in met.values():
        if len(calls) < 2 or min(min(c.posted_ns, c.finished_ns) for c in calls) < 0:
            continue
        op = calls[0].op if OPS[calls[0].op].kind == "collective" else "send"
        nodes = len({c.rank // local for c in calls})
        took = max(c.finished_ns for c in calls) - max(max(c.posted_ns, c.started_ns) for c in calls)
        if took > 0:
            samples[op, len(calls), nodes, max(c.nbytes for c in calls)].append(took)
    busy = min(local, trace.world_size)
    return tuple(_point(op, n, busy, nodes, nbytes, took) for (op, n, nodes, nbytes), took in samples.items())


def _point(op: str, group: int, ranks: int, nodes: int, nbytes: int, took: Sequence[int]) -> Point:
    low, median, high = np.percentile(took, (25, 50, 75))
    return Point(op, group, ranks, nodes, nbytes, int(median), float((high - low) / 2 / median), len(took))


def from_nccl_log(text: str, file: str, op: str | None = None) -> tuple[tuple[Point, ...], str]:
    """(out-of-place times, the GPU's name) of an nccl-tests log. Lines of others between its own are passed over.

    The operation is told by ``op`` or by the file's name (the log itself does not have it). Raises UsageError for no such log.
    """
    name = op or _operation(file)
    devices = [found for line in text.splitlines() if (found := _RANK_LINE.match(line.rstrip()))]
    hosts = Counter(found[1] for found in devices)
    rows = [row for line in text.splitlines() if (row := _row(line)) is not None]
    if not rows or len(devices) < 2:
        raise UsageError(
            f"{file} is no log of nccl-tests over two or more ranks", "give the text that all_reduce_perf and its like print"
        )
    group, ranks = len(devices), max(hosts.values())
    points = {nbytes: Point(name, group, ranks, len(hosts), nbytes, ns) for nbytes, ns in rows if nbytes > 0 and ns > 0}
    return tuple(points.values()), devices[0][2].strip()


def _operation(file: str) -> str:
    plain = PurePath(file).stem.lower().replace("_", "").replace("-", "")
    found = next((op for word, op in _PROGRAMS.items() if word in plain), None)
    if found is None:
        raise UsageError(f"{file}: its name does not tell the operation that it measures", "add --op, as --op all_reduce")
    return found


def _row(line: str) -> tuple[int, int] | None:
    """(bytes, ns) of a row ``size count type [redop [root]] time algbw busbw wrong [the same in place]``; None for another line."""
    words = line.split()
    if len(words) < 7 or not (words[0].isdigit() and words[1].isdigit() and words[2].isalnum() and not words[2].isdigit()):
        return None
    rest = words[3:]
    more = next((k for k in (0, 1, 2) if len(rest) - k in (4, 8)), None)
    try:
        return (int(words[0]), round(float(rest[more]) * 1000)) if more is not None else None
    except ValueError:
        return None


def pooled(points: Iterable[Point]) -> tuple[Point, ...]:
    """One point for each circumstance: the median of those that several sources have."""
    found: dict[tuple[str, int, int, int, int], list[Point]] = defaultdict(list)
    for point in points:
        found[point[:5]].append(point)
    return tuple(
        Point(*key, int(np.median([p.ns for p in same])), max(p.spread for p in same), sum(p.samples for p in same))
        for key, same in sorted(found.items())
    )


__all__ = ["Point", "from_bench", "from_nccl_log", "from_trace", "pooled"]
