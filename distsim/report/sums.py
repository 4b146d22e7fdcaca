"""What a run comes to, for the page: who sends how much to whom, what memory holds over a step, which steps are equal."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from distsim.check.memory import Held
from distsim.trace import Trace
from distsim.views.folding import fold_steps
from distsim.views.holding import Filled, filled, one_step
from distsim.views.traffic import block_of, traffic_of

#: Kinds of ranks of which the memory is drawn, and points of a curve.
_MOST_CURVES, _MOST_POINTS = 8, 400


def traffic(trace: Trace) -> dict[str, object]:
    """``pairs``: [from, to, bytes] of blocks of ``block`` ranks, the most first; ``by``: the algorithm of each collective in them."""
    found = traffic_of(trace, block_of(trace))
    source, target = found.sent.nonzero()
    nbytes = found.sent[source, target]
    order = np.lexsort((target, source, -nbytes))
    columns = (column[order].tolist() for column in (source, target, nbytes))
    return {"block": found.block, "by": found.by, "pairs": [list(pair) for pair in zip(*columns, strict=True)]}


def equal_steps(trace: Trace) -> list[list[int]]:
    """[first, how many, start, end of the first] of equal neighbours; nothing where the run has no steps."""
    return [[s.first, s.times, s.start_ns, s.end_ns] for s in fold_steps(trace, range(trace.world_size))]


def memory_over_time(stated: Iterable[Held], trace: Trace) -> dict[str, object] | None:
    """What each kind of rank holds over one step, or over the run; None where no passes tell when anything comes or goes."""
    ranks = range(trace.world_size)
    step, words = one_step(trace, ranks)
    kinds = [one for one in filled(stated, trace, ranks, step) if one.share is not None and one.parts.get("activations")]
    if not kinds:
        return None
    start, end = step or (0, max(trace.makespan_ns, 1))
    curves = [[list(one.ranks), dict(one.parts), *_curve(one)] for one in kinds[:_MOST_CURVES]]
    return {
        "note": words,
        "from": start,
        "to": end,
        "curves": curves,
        "more": sum(len(one.ranks) for one in kinds[_MOST_CURVES:]),
    }


def _curve(one: Filled) -> tuple[list[int], list[float]]:
    """Instants and the activations' share of their peak there; of many points the highest and the lowest of a stretch."""
    assert one.share is not None
    at, share = one.share
    if len(at) > _MOST_POINTS:
        parts = np.array_split(np.arange(len(at)), _MOST_POINTS // 2)
        kept = np.unique([place for part in parts for place in (part[share[part].argmin()], part[share[part].argmax()])])
        at, share = at[kept], share[kept]
    return at.tolist(), [round(level, 4) for level in share.tolist()]
