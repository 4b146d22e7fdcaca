"""Measures the cost of messages and collectives with Gloo over loopback.

Each sample is one operation after a common start, as the cost model defines its time. A round goes
through the whole plan, and sessions with few and with many ranks take turns, so that a slow minute
of the machine affects all results in the same way. `sampling` runs the ranks.
"""

from __future__ import annotations

import json
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

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
#: The default: one message, two crossing messages, and each collective that gloo has. A coalesced
#: launch is not measured; it costs as much as one part of the size of all parts.
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
#: Ranks of one measurement: each is a process.
_MAX_RANKS: Final = 1024


class BenchRow(NamedTuple):
    """One operation at one size. ``low_ns`` and ``high_ns`` are the quartiles.

    ``group``: ranks in each group; ``ranks``: ranks on the machine.
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
    """A whole measurement. ``machine`` describes the machine, without names."""

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
    """Measure with Gloo. ``rounds`` are distributed over the sessions.

    Raises UsageError for an unknown operation or fewer than two ranks, EnvironmentFault if torch is
    missing or the time runs out.
    """
    from distsim.real.bench.sampling import sample_durations

    _check_request(ranks, ops)
    began_s = time.monotonic()
    sessions = min(SESSIONS, rounds)
    durations: dict[tuple[int, BenchItem], list[int]] = {}
    for session in range(sessions):
        session_rounds = len(range(session, rounds, sessions))
        for world_size in ranks:
            plan = _bench_plan(world_size, sizes, ops)
            remaining_s = max(timeout_s - (time.monotonic() - began_s), 1.0)
            times = sample_durations(world_size, plan, session_rounds, warmup, remaining_s)
            for column, item in enumerate(plan):
                samples = durations.setdefault((world_size, item), [])
                samples.extend(times[:, column].tolist())
    rows = tuple(
        _row(world_size, item, np.array(samples))
        for (world_size, item), samples in durations.items()
    )
    return BenchResult(rows, _machine_facts(), time.monotonic() - began_s)


def _bench_plan(world_size: int, sizes: Sequence[int], ops: Sequence[str]) -> list[BenchItem]:
    """What is measured in a world: collectives of all ranks and of pairs, messages in pairs."""
    from distsim.real.bench.sampling import BenchItem

    plan = []
    for group in _group_sizes(world_size):
        for op in ops:
            operation = OPERATIONS[op]
            is_collective = operation.kind == "collective"
            if not is_collective and group != 2:
                continue
            # A barrier moves no bytes, so it has a single size.
            has_size = bool(operation.busbw_factor(2)) or not is_collective
            plan += [BenchItem(op, nbytes, group) for nbytes in (sizes if has_size else (0,))]
    return plan


def _group_sizes(world_size: int) -> list[int]:
    """All ranks, and pairs."""
    return [2] if world_size == 2 else [world_size, 2]


def _check_request(ranks: Sequence[int], ops: Sequence[str]) -> None:
    if not ranks or min(ranks) < 2:
        raise UsageError("a measurement needs at least two ranks", "for example --ranks 2,4")
    if max(ranks) > _MAX_RANKS:
        raise UsageError(
            f"{max(ranks)} ranks: each is a process, and bench starts at most {_MAX_RANKS}",
            "for example --ranks 2,4",
        )
    for op in ops:
        if op not in BENCH_OPS:
            raise UsageError(
                f"bench cannot measure `{op}`{did_you_mean(op, BENCH_OPS)}",
                f"it measures {name_list(BENCH_OPS)}",
            )


def _row(world_size: int, item: BenchItem, samples: NDArray[np.int64]) -> BenchRow:
    low, median, high = (int(quartile) for quartile in np.percentile(samples, (25, 50, 75)))
    return BenchRow(item.op, item.group, world_size, item.nbytes, median, low, high, len(samples))


def _machine_facts() -> dict[str, object]:
    import importlib.metadata

    return {
        "cores": usable_cores(),
        "processor": platform.machine(),
        "torch": importlib.metadata.version("torch"),
        "backend": "gloo",
    }


# --- files ---


def bench_to_json(result: BenchResult) -> str:
    """The file of a bench: JSON with a line per operation, group, number of ranks and size."""
    rows = [row._asdict() for row in result.rows]
    head = {
        "format": BENCH_FORMAT,
        "schema_version": SCHEMA_VERSION,
        "machine": dict(result.machine),
        "seconds": round(result.seconds, 1),
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return json.dumps(head)[:-1] + f', "rows": [\n  {lines}\n]}}\n'


def bench_from_json(text: str, file: str = "<bench>") -> BenchResult:
    """Read what `bench_to_json` wrote. Raises UsageError for anything else."""
    remedy = "`distsim bench --output FILE` writes one"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != BENCH_FORMAT:
        raise UsageError(f"{file} is not an output of distsim bench", remedy)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(
            f"{file} has schema version {data.get('schema_version')}, "
            f"but this distsim reads {SCHEMA_VERSION}",
            remedy,
        )
    rows = _rows_from_json(data)
    if rows is None:
        raise UsageError(f"{file} has rows that are not measurements", remedy)
    return BenchResult(rows, data.get("machine") or {}, float(data.get("seconds") or 0.0))


def _rows_from_json(data: dict[str, Any]) -> tuple[BenchRow, ...] | None:
    """The rows of a bench file; None if any of them is invalid."""
    try:
        rows = tuple(BenchRow(**row) for row in data["rows"])
        return rows if all(_is_valid_row(row) for row in rows) else None
    except (TypeError, KeyError):
        return None


def _is_valid_row(row: BenchRow) -> bool:
    return row.op in OPERATIONS and all(type(value) is int for value in row[1:])
