"""Aligns the programs of all ranks: steps that ranks share become one step of several ranks.

Ranks with equal forms are joined directly; the resulting classes are merged one after the other by
their longest matching blocks, so the result depends on the order of ranks and may not be minimal.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

from distsim.simulation.trace_replay.compact.call_forms import CallForm
from distsim.simulation.trace_replay.compact.loops import CallLeaf, CallLoop, LoopNode

#: Programs are not compared entry by entry if the product of their lengths is larger.
_MAX_COMPARISONS: Final = 4_000_000
#: The share of equal entries from which on two loops are merged.
_MIN_LOOP_SIMILARITY: Final = 0.5


@dataclass
class AlignedStep:
    """A call of several ranks, with the values of each rank."""

    form: CallForm
    ints: dict[int, tuple[int, ...]]
    times: dict[int, tuple[int, ...]]

    @property
    def ranks(self) -> set[int]:
        """The ranks that make this call."""
        return set(self.ints)


@dataclass
class AlignedLoop:
    """A loop of several ranks. ``times``: the number of repetitions by rank."""

    times: dict[int, int]
    body: list[AlignedStep | AlignedLoop]

    @property
    def ranks(self) -> set[int]:
        """The ranks that run this loop."""
        return set(self.times)


AlignedEntry = AlignedStep | AlignedLoop


def align_ranks(programs: Mapping[int, list[LoopNode]]) -> list[AlignedEntry]:
    """One program for all ranks, which keeps the order of each rank's calls."""
    classes: dict[Hashable, list[int]] = {}
    for rank, nodes in programs.items():
        classes.setdefault(tuple(_shape(node) for node in nodes), []).append(rank)
    merged: list[AlignedEntry] = []
    for ranks in classes.values():
        mine = [
            _entry(list(column), ranks)
            for column in zip(*(programs[rank] for rank in ranks), strict=True)
        ]
        merged = _merge_entries(merged, mine) if merged else mine
    return merged


def _shape(node: LoopNode) -> Hashable:
    return node.form if isinstance(node, CallLeaf) else ("loop", *map(_shape, node.body))


def _entry(column: Sequence[LoopNode], ranks: Sequence[int]) -> AlignedEntry:
    """The same node of several ranks."""
    if isinstance(column[0], CallLeaf):
        leaves = [node for node in column if isinstance(node, CallLeaf)]
        ints = {rank: leaf.ints for rank, leaf in zip(ranks, leaves, strict=True)}
        times = {rank: leaf.means for rank, leaf in zip(ranks, leaves, strict=True)}
        return AlignedStep(column[0].form, ints, times)
    loops = [node for node in column if isinstance(node, CallLoop)]
    body = [
        _entry(list(inner), ranks) for inner in zip(*(loop.body for loop in loops), strict=True)
    ]
    return AlignedLoop({rank: loop.times for rank, loop in zip(ranks, loops, strict=True)}, body)


def _key(entry: AlignedEntry) -> Hashable:
    return entry.form if isinstance(entry, AlignedStep) else ("loop", *map(_key, entry.body))


def _merge_entries(a: list[AlignedEntry], b: list[AlignedEntry]) -> list[AlignedEntry]:
    if len(a) * len(b) > _MAX_COMPARISONS:
        return a + b
    keys_a, keys_b = [_key(e) for e in a], [_key(e) for e in b]
    found: list[AlignedEntry] = []
    at_a = at_b = 0
    for i, j, size in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_matching_blocks():
        found += _merge_unequal(a[at_a:i], b[at_b:j])
        found += [
            _join_entries(x, y) for x, y in zip(a[i : i + size], b[j : j + size], strict=True)
        ]
        at_a, at_b = i + size, j + size
    return found


def _join_entries(a: AlignedEntry, b: AlignedEntry) -> AlignedEntry:
    if isinstance(a, AlignedStep) and isinstance(b, AlignedStep):
        return AlignedStep(a.form, a.ints | b.ints, a.times | b.times)
    if isinstance(a, AlignedLoop) and isinstance(b, AlignedLoop):
        return AlignedLoop(a.times | b.times, _merge_entries(a.body, b.body))
    raise TypeError("a step is not a loop")


def _merge_unequal(a: list[AlignedEntry], b: list[AlignedEntry]) -> list[AlignedEntry]:
    """Merge entries of which none are equal.

    Similar loops are still merged, and so are a loop and a single round of it.
    """
    for i, entry in enumerate(a):
        if isinstance(entry, AlignedLoop) and (pair := _matching_loop(entry, b)) is not None:
            start, end, other = pair
            return [
                *_merge_unequal(a[:i], b[:start]),
                _join_entries(entry, other),
                *_merge_unequal(a[i + 1 :], b[end:]),
            ]
    for j, entry in enumerate(b):
        if isinstance(entry, AlignedLoop) and (pair := _matching_loop(entry, a)) is not None:
            start, end, other = pair
            return [
                *_merge_unequal(a[:start], b[:j]),
                _join_entries(other, entry),
                *_merge_unequal(a[end:], b[j + 1 :]),
            ]
    return a + b


def _matching_loop(
    loop: AlignedLoop, others: Sequence[AlignedEntry]
) -> tuple[int, int, AlignedEntry] | None:
    """(start, end, loop) of the other entries that match a loop.

    They are another similar loop, or the same entries once, which are returned as a loop of one
    round if all of them belong to the same ranks.
    """
    keys = [_key(entry) for entry in loop.body]
    for start, other in enumerate(others):
        if isinstance(other, AlignedLoop):
            other_keys = [_key(entry) for entry in other.body]
            similarity = SequenceMatcher(None, keys, other_keys, autojunk=False).ratio()
            if similarity >= _MIN_LOOP_SIMILARITY:
                return start, start + 1, other
            continue
        end = start + len(keys)
        once = list(others[start:end])
        if [_key(entry) for entry in once] == keys:
            ranks = once[0].ranks
            if all(entry.ranks == ranks for entry in once):
                return start, end, AlignedLoop(dict.fromkeys(ranks, 1), once)
    return None
