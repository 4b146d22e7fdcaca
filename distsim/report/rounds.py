"""The collectives of a run as rounds of transfers, small enough to watch."""

from __future__ import annotations

from typing import Any

from distsim.ops.base import Op
from distsim.ops.table import OPS
from distsim.schedules import Algorithm, play, start
from distsim.trace import Trace

#: Ranks of an animation, and operations that have one.
MOST_RANKS, MOST_OPS = 8, 8


def animations(trace: Trace) -> list[dict[str, Any]]:
    """For every collective of the run and each of its algorithms: what ranks hold at first, and who sends which chunk in each round.

    ``rounds``: [source, destination, chunk, 1 where it is combined with what is there]. A larger group is shown with `MOST_RANKS`.
    """
    sizes: dict[str, int] = {}
    groups = trace.header.get("groups", ())
    rows = trace["match"] >= 0
    met = set(zip(trace["op"][rows].tolist(), trace["group"][rows].tolist(), strict=True))
    for op, group in sorted(met):
        name, n = trace.tables["op"][op], len(groups[group][1]) if 0 <= group < len(groups) else 0
        row = OPS.get(name)
        if row is not None and row.kind == "collective" and row.algorithms and n > 1:
            sizes[name] = max(sizes.get(name, 0), n)
    return [one for name, n in list(sizes.items())[:MOST_OPS] for one in _animated(OPS[name], n)]


def _animated(row: type[Op], full: int) -> list[dict[str, object]]:
    n = min(full, MOST_RANKS)
    found = []
    for name, algorithm in row.algorithms.items():
        rounds, givers = algorithm.rounds(n, 0), range(n) if row.gives != "root" else (0,)
        held = start(algorithm.chunking, n, givers)
        if _plays(algorithm, n, givers):
            found.append({
                "op": row.op, "algorithm": name, "n": n, "full": full, "chunking": algorithm.chunking,
                "held": [[[chunk, [list(one) for one in what]] for chunk, what in chunks.items()] for chunks in held],
                "rounds": [[[t.src, t.dst, t.chunk, int(t.reduce)] for t in round_] for round_ in rounds],
            })  # fmt: skip
    return found


def _plays(algorithm: Algorithm, n: int, givers: Any) -> bool:
    """Whether the schedule runs from the root 0 with these givers."""
    try:
        play(algorithm.rounds(n, 0), start(algorithm.chunking, n, givers))
    except ValueError:
        return False
    return True
