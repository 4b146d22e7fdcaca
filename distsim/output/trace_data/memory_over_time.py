"""The memory of ranks over a run: the stated peaks, with activations that grow and shrink."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.checker.detectors.peak_memory import PeakMemory
from distsim.operations.registry import COMPUTE_OPS
from distsim.output.trace_data.activity import pass_letter
from distsim.output.trace_data.lanes import Ints, RankRows
from distsim.trace.model import Trace

Floats = NDArray[np.float64]


class ActivationCurve(NamedTuple):
    """The share of its peak (0 to 1) that a kind of memory has at each instant; linear between
    instants.
    """

    at_ns: Ints
    share: Floats


class MemoryProfile(NamedTuple):
    """Ranks with equal memory over time.

    ``parts``: bytes of each kind at the peak. ``share``: the curve of the activations; None if the
    ranks make no forward and backward passes.
    """

    name: str
    ranks: tuple[int, ...]
    parts: Mapping[str, int]
    share: ActivationCurve | None

    @property
    def total(self) -> int:
        """The bytes of all kinds at the peak."""
        return sum(self.parts.values())

    def levels(self) -> Iterator[tuple[int, dict[str, int]]]:
        """Bytes of each kind from each instant on, as an allocator counts them: a pass that makes
        activations allocates them at its start, and a pass that frees them does so at its end.
        Other kinds do not change.
        """
        most = self.parts.get("activations", 0)
        if self.share is None or not most:
            yield 0, dict(self.parts)
            return
        at_ns, share = self.share.at_ns.tolist(), self.share.share.tolist()
        if at_ns[0] > 0:
            yield 0, {**self.parts, "activations": 0}
        for at, now, later in zip(at_ns, share, [*share[1:], share[-1]], strict=True):
            yield at, {**self.parts, "activations": round(most * max(now, later))}


def memory_profiles(
    stated: Iterable[PeakMemory],
    trace: Trace,
    ranks: Iterable[int],
    inside: tuple[int, int] | None = None,
) -> list[MemoryProfile]:
    """The memory of these ranks, the fullest first; ranks with equal parts and passes are joined.

    Entries of one rank's peak add up. ``inside``: only passes that begin and end within this time
    range (ns) change the activations.
    """
    chosen, parts, names = set(ranks), dict[int, dict[str, int]](), dict[int, list[str]]()
    for one in stated:
        for rank in chosen & set(one.ranks):
            mine = parts.setdefault(rank, {})
            names.setdefault(rank, []).append(one.name)
            for kind, nbytes in one.parts.items():
                mine[kind] = mine.get(kind, 0) + nbytes
    rows, found = RankRows(trace), dict[object, list[int]]()
    shares: dict[object, ActivationCurve | None] = {}
    for rank in sorted(parts):
        mine_rows = rows(rank)
        if inside is not None:
            within = (trace["started_ns"][mine_rows] >= inside[0]) & (
                trace["finished_ns"][mine_rows] <= inside[1]
            )
            mine_rows = mine_rows[within]
        share = activation_curve(trace, mine_rows)
        curve = None if share is None else (share.at_ns.tobytes(), share.share.tobytes())
        key = (tuple(sorted(parts[rank].items())), curve)
        found.setdefault(key, []).append(rank)
        shares.setdefault(key, share)
    whole = [
        MemoryProfile(" + ".join(names[of[0]]), tuple(of), parts[of[0]], shares[key])
        for key, of in found.items()
    ]
    return sorted(whole, key=lambda one: (-one.total, one.ranks))


def activation_curve(trace: Trace, rows: Ints) -> ActivationCurve | None:
    """The activations of one rank, from its rows; None if it makes no forward and backward passes.

    They grow in proportion to the time in forward passes and shrink in proportion to the time in
    backward passes. If backward passes have two halves, the second half frees
    (`distsim.scenario.strategies.training_step.memory_footprint.peak_activation_bytes`).
    """
    names = [pass_letter(str(name)) for name in trace.tables["name"]] + [""]
    rows = rows[
        trace.ops(*COMPUTE_OPS)[rows]
        & (trace["started_ns"][rows] >= 0)
        & (trace["finished_ns"][rows] >= 0)
    ]
    kind = np.array(names)[trace["name"][rows]] if len(rows) else np.array([], dtype=str)
    freeing = np.isin(kind, ("B", "W")) if "W" in kind else kind == "B"
    making = kind == "F"
    if not making.any() or not freeing.any():
        return None
    start, end = trace["started_ns"][rows], trace["finished_ns"][rows]
    edges = np.unique(np.concatenate([start[making | freeing], end[making | freeing]]))
    level = _completed_share(start[making], end[making], edges) - _completed_share(
        start[freeing], end[freeing], edges
    )
    level = np.maximum(level, 0.0)
    return ActivationCurve(edges, level / level.max()) if level.max() > 0 else None


def _completed_share(start: Ints, end: Ints, edges: Ints) -> Floats:
    """The share of the passes' total time that is over at each edge; passes do not overlap."""
    order = np.argsort(start, kind="stable")
    start, end = start[order], end[order]
    total = np.concatenate([[0], np.cumsum(end - start)])
    begun = np.searchsorted(start, edges, side="right")
    last = np.maximum(begun - 1, 0)
    passed = total[last] + np.clip(edges - start[last], 0, end[last] - start[last])
    found: Floats = np.where(begun > 0, passed, 0) / max(int(total[-1]), 1)
    return found


__all__ = [
    "MemoryProfile",
    "ActivationCurve",
    "activation_curve",
    "memory_profiles",
]
