"""Repeated stretches of one rank's items as loops: maximal tandem repeats, the shortest first, so that loops nest."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from distsim.compact.items import UNKNOWN, Form, Item

#: A loop body of more entries is not looked for, so that long traces are done in time.
_LONGEST: Final = 4096


@dataclass
class Leaf:
    """A call. ``times``: for each duration its sum, and over how many of the calls that it stands for."""

    form: Form
    ints: tuple[int, ...]
    times: list[tuple[int, int]]

    @property
    def means(self) -> tuple[int, ...]:
        """Nanoseconds; UNKNOWN where none of the calls came to that."""
        return tuple(round(total / count) if count else UNKNOWN for total, count in self.times)


@dataclass
class Loop:
    times: int
    body: list[Leaf | Loop] = field(default_factory=list)


Node = Leaf | Loop


def fold(items: Sequence[Item], exact: bool) -> list[Node]:
    """The items as calls and loops. Without ``exact`` calls that differ in durations alone are the same, and last the mean of them."""
    keys: dict[Hashable, int] = {}
    items = _filled(items) if exact else items
    nodes: list[Node] = []
    ids: list[int] = []
    for item in items:
        nodes.append(Leaf(item.form, item.ints, [(0, 0) if t == UNKNOWN else (t, 1) for t in item.times]))
        ids.append(keys.setdefault(item if exact else item[:2], len(keys)))
    period = 1
    while period <= min(len(ids) // 2, _LONGEST):
        runs = _runs(ids, period)
        if runs:
            nodes, ids = _replaced(nodes, ids, period, runs, keys)
        period += 1
    return nodes


def _filled(items: Sequence[Item]) -> list[Item]:
    """Calls that the run did not come to, with the durations that the same call had before."""
    last: dict[Hashable, tuple[int, ...]] = {}
    found = []
    for item in items:
        before = last.get(item[:2], item.times)
        times = tuple(b if t == UNKNOWN else t for t, b in zip(item.times, before, strict=True))
        last[item[:2]] = times
        found.append(item._replace(times=times))
    return found


def _runs(ids: Sequence[int], period: int) -> list[tuple[int, int]]:
    """(start, how often) of stretches of this period that come again at once and are worth a loop; none overlaps another."""
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


def _replaced(
    nodes: list[Node], ids: list[int], period: int, runs: Sequence[tuple[int, int]], keys: dict[Hashable, int]
) -> tuple[list[Node], list[int]]:
    new_nodes, new_ids, at = list[Node](), list[int](), 0
    for start, times in runs:
        new_nodes += nodes[at:start]
        new_ids += ids[at:start]
        body = nodes[start : start + period]
        for copy in range(1, times):
            for kept, other in zip(body, nodes[start + copy * period :], strict=False):
                _absorb(kept, other)
        new_nodes.append(Loop(times, body))
        new_ids.append(keys.setdefault(("loop", times, tuple(ids[start : start + period])), len(keys)))
        at = start + times * period
    return new_nodes + nodes[at:], new_ids + ids[at:]


def _absorb(kept: Node, other: Node) -> None:
    """Let an equal node stand for another one too."""
    if isinstance(kept, Leaf) and isinstance(other, Leaf):
        kept.times = [(a + b, n + m) for (a, n), (b, m) in zip(kept.times, other.times, strict=True)]
    elif isinstance(kept, Loop) and isinstance(other, Loop):
        for mine, theirs in zip(kept.body, other.body, strict=True):
            _absorb(mine, theirs)
