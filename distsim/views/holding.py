"""How full a rank's memory is over a run: what is stated as a peak, with activations as they come and go."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.timeline import COMPUTE_OPS
from distsim.trace import Trace
from distsim.views.drawing.ranklane import letter
from distsim.views.folding import Ints

Floats = NDArray[np.float64]


class Share(NamedTuple):
    """How much of its peak a kind has at each instant, 0 to 1; linear between instants."""

    at_ns: Ints
    share: Floats


def activations(trace: Trace, rows: Ints) -> Share | None:
    """The activations of the rank whose rows these are; None where it makes no forward and backward passes.

    They grow with the time of forward passes and shrink with that of backward ones, as many as there are of each; where a backward
    pass comes in two halves, the second one frees (`distsim.strategies.memory.peak_activations`).
    """
    names = [letter(str(name)) for name in trace.tables["name"]] + [""]
    rows = rows[trace.ops(*COMPUTE_OPS)[rows] & (trace["started_ns"][rows] >= 0) & (trace["finished_ns"][rows] >= 0)]
    kind = np.array(names)[trace["name"][rows]] if len(rows) else np.array([], dtype=str)
    freeing = np.isin(kind, ("B", "W")) if "W" in kind else kind == "B"
    making = kind == "F"
    if not making.any() or not freeing.any():
        return None
    start, end = trace["started_ns"][rows], trace["finished_ns"][rows]
    edges = np.unique(np.concatenate([start[making | freeing], end[making | freeing]]))
    level = _done(start[making], end[making], edges) - _done(start[freeing], end[freeing], edges)
    level = np.maximum(level, 0.0)
    return Share(edges, level / level.max()) if level.max() > 0 else None


def _done(start: Ints, end: Ints, edges: Ints) -> Floats:
    """Which share of the time of some passes is over at each edge; passes of a rank don't overlap."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    total = np.concatenate([[0], np.cumsum(end - start)])
    begun = np.searchsorted(start, edges, side="right")
    last = np.maximum(begun - 1, 0)
    passed = total[last] + np.clip(edges - start[last], 0, end[last] - start[last])
    found: Floats = np.where(begun > 0, passed, 0) / max(int(total[-1]), 1)
    return found


__all__ = ["Share", "activations"]
