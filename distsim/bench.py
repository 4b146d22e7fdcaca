"""What communication costs on this machine: messages and every collective, over sizes and numbers of ranks, with Gloo on loopback.

Each size is a sample of its own after a common start, as the simulator prices it. Rounds go through the whole plan, and sessions with
few and many ranks take turns, so that a slow minute of the machine touches everything alike.
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

from distsim.errors import UsageError
from distsim.names import listing, near
from distsim.ops.table import OPS
from distsim.real.device import cores

if TYPE_CHECKING:
    from distsim.real.measure import Item

FORMAT: Final = "distsim-bench"
SCHEMA_VERSION: Final = 1
#: What is measured when nothing else is asked for: one message, two that cross, and each collective that gloo has. A coalesced launch
#: costs what one of its parts would at the size of all.
OPS_MEASURED: Final = (
    "send", "batch_isend_irecv", *(name for name, row in OPS.items() if row.kind == "collective" and row.coalesces is None)
)  # fmt: skip
SIZES: Final = tuple(4096 * 4**k for k in range(7))  # 4 KiB to 16 MiB
SESSIONS: Final = 3


class Measured(NamedTuple):
    """One operation at one size; ns. ``group`` ranks in each group, ``ranks`` on the machine. Quartiles are the spread."""

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
class Bench:
    """A whole measurement. ``machine`` says what it was made on, without names."""

    rows: tuple[Measured, ...]
    machine: Mapping[str, object]
    seconds: float = 0.0


def bench(
    ranks: Sequence[int] = (2, 4), sizes: Sequence[int] = SIZES, ops: Sequence[str] = OPS_MEASURED, *, rounds: int = 15,
    warmup: int = 2, timeout_s: float = 600.0,
) -> Bench:  # fmt: skip
    """Measure with Gloo. ``rounds`` are shared out among the sessions.

    Raises UsageError for an unknown operation or fewer than two ranks, EnvironmentFault when torch is missing or time runs out.
    """
    from distsim.real.measure import Item, measure

    _check(ranks, ops)
    began = time.monotonic()
    sessions = min(SESSIONS, rounds)
    found: dict[tuple[int, Item], list[int]] = {}
    for session in range(sessions):
        for n in ranks:
            plan = [
                Item(op, nbytes, group)
                for group in _groups(n) for op in ops
                if OPS[op].kind == "collective" or group == 2
                for nbytes in (sizes if OPS[op].busbw_factor(2) or OPS[op].kind != "collective" else (0,))
            ]  # fmt: skip
            left = timeout_s - (time.monotonic() - began)
            times = measure(n, plan, len(range(session, rounds, sessions)), warmup, max(left, 1.0))
            for k, item in enumerate(plan):
                found.setdefault((n, item), []).extend(times[:, k].tolist())
    rows = tuple(_row(n, item, np.array(ns)) for (n, item), ns in found.items())
    return Bench(rows, _machine(), time.monotonic() - began)


def _groups(n: int) -> list[int]:
    """Groups of all ranks, and pairs."""
    return [n] if n == 2 else [n, 2]


def _check(ranks: Sequence[int], ops: Sequence[str]) -> None:
    if not ranks or min(ranks) < 2:
        raise UsageError("a measurement needs at least two ranks", "as --ranks 2,4")
    for op in ops:
        if op not in OPS_MEASURED:
            raise UsageError(f"bench measures no `{op}`{near(op, OPS_MEASURED)}", f"it measures {listing(OPS_MEASURED)}")


def _row(n: int, item: Item, ns: NDArray[np.int64]) -> Measured:
    low, median, high = (int(q) for q in np.percentile(ns, (25, 50, 75)))
    return Measured(item.op, item.group, n, item.nbytes, median, low, high, len(ns))


def _machine() -> dict[str, object]:
    import importlib.metadata

    return {"cores": cores(), "processor": platform.machine(), "torch": importlib.metadata.version("torch"), "backend": "gloo"}


# --- files ---


def to_json(found: Bench) -> str:
    """A bench as a file: a JSON object with a row per operation, group, number of ranks and size."""
    rows = [row._asdict() for row in found.rows]
    head = {
        "format": FORMAT,
        "schema_version": SCHEMA_VERSION,
        "machine": dict(found.machine),
        "seconds": round(found.seconds, 1),
    }
    lines = ",\n  ".join(json.dumps(row) for row in rows)
    return json.dumps(head)[:-1] + f', "rows": [\n  {lines}\n]}}\n'


def from_json(text: str, file: str = "<bench>") -> Bench:
    """Read what `to_json` wrote. Raises UsageError for anything else."""
    remedy = "`distsim bench --out FILE` writes one"
    try:
        data = json.loads(text)
    except (ValueError, RecursionError):
        data = None
    if not isinstance(data, dict) or data.get("format") != FORMAT:
        raise UsageError(f"{file} is no output of distsim bench", remedy)
    if data.get("schema_version") != SCHEMA_VERSION:
        raise UsageError(f"{file} has schema version {data.get('schema_version')}, this distsim reads {SCHEMA_VERSION}", remedy)
    try:
        rows = tuple(Measured(**row) for row in data["rows"])
        good = all(type(value) is int for row in rows for value in row[1:]) and all(row.op in OPS for row in rows)
    except (TypeError, KeyError):
        good, rows = False, ()
    if not good:
        raise UsageError(f"{file} has rows that are no measurements", remedy)
    return Bench(rows, data.get("machine") or {}, float(data.get("seconds") or 0.0))
