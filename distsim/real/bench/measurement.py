"""What communication costs on this machine: messages and every collective, over sizes and numbers
of ranks, with Gloo on loopback.

Each size is a sample of its own after a common start, as the simulator prices it. Rounds go through
the whole plan, and sessions with few and many ranks take turns, so that a slow minute of the
machine touches everything alike.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean, name_list
from distsim.operations.registry import OPERATIONS
from distsim.real.shared.device_selection import usable_cores

if TYPE_CHECKING:
    from distsim.real.bench.sampling import BenchItem

BENCH_FORMAT: Final = "distsim-bench"
SCHEMA_VERSION: Final = 1
#: What is measured when nothing else is asked for: one message, two that cross, and each collective
#: that gloo has. A coalesced launch costs what one of its parts would at the size of all.
BENCH_OPS: Final = (
    "send",
    "batch_isend_irecv",
    *(
        name
        for name, row in OPERATIONS.items()
        if row.kind == "collective" and row.coalesces is None
    ),
)
BENCH_SIZES: Final = tuple(4096 * 4**k for k in range(7))  # 4 KiB to 16 MiB
SESSIONS: Final = 3


class BenchRow(NamedTuple):
    """One operation at one size; ns. ``group`` ranks in each group, ``ranks`` on the machine.
    Quartiles are the spread.
    """

    op: str
    group: int
    ranks: int
    nbytes: int
    median_ns: int
    low_ns: int
    high_ns: int
    samples: int

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        return (self.high_ns - self.low_ns) / 2 / self.median_ns if self.median_ns else 0.0


@dataclass(frozen=True)
class BenchResult:
    """A whole measurement. ``machine`` says what it was made on, without names."""

    rows: tuple[BenchRow, ...]
    machine: Mapping[str, object]
    seconds: float = 0.0


def run_bench(
    ranks: Sequence[int] = (2, 4),
    sizes: Sequence[int] = BENCH_SIZES,
    ops: Sequence[str] = BENCH_OPS,
    *,
    rounds: int = 15,
    warmup: int = 2,
    timeout_s: float = 600.0,
) -> BenchResult:
    """Measure with Gloo. ``rounds`` are shared out among the sessions.

    Raises UsageError for an unknown operation or fewer than two ranks, EnvironmentFault when torch
    is missing or time runs out.
    """
    from distsim.real.bench.sampling import BenchItem, sample_durations

    _check_request(ranks, ops)
    began = time.monotonic()
    sessions = min(SESSIONS, rounds)
    found: dict[tuple[int, BenchItem], list[int]] = {}
    for session in range(sessions):
        for n in ranks:
            plan = [
                BenchItem(op, nbytes, group)
                for group in _group_sizes(n)
                for op in ops
                if OPERATIONS[op].kind == "collective" or group == 2
                for nbytes in (
                    sizes
                    if OPERATIONS[op].busbw_factor(2) or OPERATIONS[op].kind != "collective"
                    else (0,)
                )
            ]
            left = timeout_s - (time.monotonic() - began)
            times = sample_durations(
                n, plan, len(range(session, rounds, sessions)), warmup, max(left, 1.0)
            )
            for k, item in enumerate(plan):
                found.setdefault((n, item), []).extend(times[:, k].tolist())
    rows = tuple(_row(n, item, np.array(ns)) for (n, item), ns in found.items())
    return BenchResult(rows, _machine_facts(), time.monotonic() - began)


def _group_sizes(n: int) -> list[int]:
    """Groups of all ranks, and pairs."""
    return [n] if n == 2 else [n, 2]


def _check_request(ranks: Sequence[int], ops: Sequence[str]) -> None:
    if not ranks or min(ranks) < 2:
        raise UsageError("a measurement needs at least two ranks", "as --ranks 2,4")
    for op in ops:
        if op not in BENCH_OPS:
            raise UsageError(
                f"bench measures no `{op}`{did_you_mean(op, BENCH_OPS)}",
                f"it measures {name_list(BENCH_OPS)}",
            )


def _row(n: int, item: BenchItem, ns: NDArray[np.int64]) -> BenchRow:
    low, median, high = (int(q) for q in np.percentile(ns, (25, 50, 75)))
    return BenchRow(item.op, item.group, n, item.nbytes, median, low, high, len(ns))


def _machine_facts() -> dict[str, object]:
    import importlib.metadata

    return {
        "cores": usable_cores(),
        "processor": platform.machine(),
        "torch": importlib.metadata.version("torch"),
        "backend": "gloo",
    }


# --- files ---


def bench_to_json(found: BenchResult) -> str:
    """A bench as a file: a JSON object with a row per operation, group, number of ranks and
    size.
    """
    rows = [row._asdict() for row in found.rows]
    head = {
        "format": BENCH_FORMAT,
        "schema_version": SCHEMA_VERSION,
        "machine": dict(found.machine),
        "seconds": round(found.seconds, 1),
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return json.dumps(head)[:-1] + f', "rows": [\n  {lines}\n]}}\n'


def bench_from_json(text: str, file: str = "<bench>") -> BenchResult:
    """Read what `bench_to_json` wrote. Raises UsageError for anything else."""
    remedy = "`distsim bench --out FILE` writes one"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != BENCH_FORMAT:
        raise UsageError(f"{file} is no output of distsim bench", remedy)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{file} has schema version {data.get('schema_version')}, this distsim reads {SCHEMA_VERSION}",
            remedy,
        )
    try:
        rows = tuple(BenchRow(**row) for row in data["rows"])
        good = all(type(value) is int for row in rows for value in row[1:]) and all(
            row.op in OPERATIONS for row in rows
        )
    except (TypeError, KeyError):
        good, rows = False, ()
    if not good:
        raise UsageError(f"{file} has rows that are no measurements", remedy)
    return BenchResult(rows, data.get("machine") or {}, float(data.get("seconds") or 0.0))
