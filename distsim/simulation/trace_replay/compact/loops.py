"""Finds loops in the items of one rank.

Loops are maximal tandem repeats. The shortest periods are replaced first, so that loops nest: after
that an inner loop is a single item of the outer one.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from distsim.simulation.trace_replay.compact.call_forms import UNKNOWN_TIME, CallForm, CallItem

#: Longer loop bodies are not searched for, to limit the time for long traces.
_MAX_LOOP_BODY: Final = 4096


@dataclass
class CallLeaf:
    """A call, possibly repeated. ``times``: for each duration (sum, number of known durations)."""

    form: CallForm
    ints: tuple[int, ...]
    times: list[tuple[int, int]]

    @property
    def means(self) -> tuple[int, ...]:
        """The mean durations in ns; `UNKNOWN_TIME` if no call reached them."""
        return tuple(round(total / count) if count else UNKNOWN_TIME for total, count in self.times)


@dataclass
class CallLoop:
    """A loop: its body, repeated ``times`` times."""

    times: int
    body: list[CallLeaf | CallLoop] = field(default_factory=list)


LoopNode = CallLeaf | CallLoop


def find_loops(items: Sequence[CallItem], exact: bool) -> list[LoopNode]:
    """The items as calls and loops.

    Unless ``exact``, calls that differ only in durations are equal, and take their mean.
    """
    keys: dict[Hashable, int] = {}
    items = _fill_unknown_times(items) if exact else items
    nodes: list[LoopNode] = []
    ids: list[int] = []
    for item in items:
        nodes.append(
            CallLeaf(
                item.form, item.ints, [(0, 0) if t == UNKNOWN_TIME else (t, 1) for t in item.times]
            )
        )
        ids.append(keys.setdefault(item if exact else item[:2], len(keys)))
    period = 1
    while period <= min(len(ids) // 2, _MAX_LOOP_BODY):
        runs = _repeated_spans(ids, period)
        if runs:
            nodes, ids = _replace_with_loops(nodes, ids, period, runs, keys)
        period += 1
    return nodes


def _fill_unknown_times(items: Sequence[CallItem]) -> list[CallItem]:
    """Items in which unknown durations are those that the same call had before."""
    last: dict[Hashable, tuple[int, ...]] = {}
    found = []
    for item in items:
        before = last.get(item[:2], item.times)
        times = tuple(
            b if t == UNKNOWN_TIME else t for t, b in zip(item.times, before, strict=True)
        )
        last[item[:2]] = times
        found.append(item._replace(times=times))
    return found


def _repeated_spans(ids: Sequence[int], period: int) -> list[tuple[int, int]]:
    """(start, count) of the tandem repeats of this period that are worth a loop.

    They do not overlap.
    """
    array = np.asarray(ids)
    same = np.concatenate(([False], array[period:] == array[:-period], [False]))
    edges = np.flatnonzero(same[1:] != same[:-1]).tolist()
    found, free = [], 0
    for start, end in zip(edges[::2], edges[1::2], strict=True):
        start = max(start, free)
        times = (end - start) // period + 1
        if times >= 2 and (times - 1) * period >= 2:
            found.append((start, times))
            free = start + times * period
    return found


def _replace_with_loops(
    nodes: list[LoopNode],
    ids: list[int],
    period: int,
    runs: Sequence[tuple[int, int]],
    keys: dict[Hashable, int],
) -> tuple[list[LoopNode], list[int]]:
    new_nodes, new_ids, at = list[LoopNode](), list[int](), 0
    for start, times in runs:
        new_nodes += nodes[at:start]
        new_ids += ids[at:start]
        body = nodes[start : start + period]
        for copy in range(1, times):
            for kept, other in zip(body, nodes[start + copy * period :], strict=False):
                _add_repetition(kept, other)
        new_nodes.append(CallLoop(times, body))
        new_ids.append(
            keys.setdefault(("loop", times, tuple(ids[start : start + period])), len(keys))
        )
        at = start + times * period
    return new_nodes + nodes[at:], new_ids + ids[at:]


def _add_repetition(kept: LoopNode, other: LoopNode) -> None:
    """Add the durations of an equal node to the one that represents both."""
    if isinstance(kept, CallLeaf) and isinstance(other, CallLeaf):
        kept.times = [
            (a + b, n + m) for (a, n), (b, m) in zip(kept.times, other.times, strict=True)
        ]
    elif isinstance(kept, CallLoop) and isinstance(other, CallLoop):
        for mine, theirs in zip(kept.body, other.body, strict=True):
            _add_repetition(mine, theirs)
