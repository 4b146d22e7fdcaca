"""Programs of ranks laid over each other: steps that ranks share become one, the others keep to
whom they belong.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

from distsim.trace_replay.compact.call_forms import CallForm
from distsim.trace_replay.compact.loops import CallLeaf, CallLoop, LoopNode

#: Two programs of which the lengths multiply to more are not compared entry by entry.
_MAX_COMPARISONS: Final = 4_000_000
#: Share of equal entries from which two loops are taken for one.
_MIN_LOOP_SIMILARITY: Final = 0.5


@dataclass
class AlignedStep:
    """A call of several ranks: what each of them has in its places."""

    form: CallForm
    ints: dict[int, tuple[int, ...]]
    times: dict[int, tuple[int, ...]]

    @property
    def ranks(self) -> set[int]:
        return set(self.ints)


@dataclass
class AlignedLoop:
    """A loop of several ranks, with how often each goes round."""

    times: dict[int, int]
    body: list[AlignedStep | AlignedLoop]

    @property
    def ranks(self) -> set[int]:
        return set(self.times)


AlignedEntry = AlignedStep | AlignedLoop


def align_ranks(programs: Mapping[int, list[LoopNode]]) -> list[AlignedEntry]:
    """One program for all ranks. Each rank's calls stand in it in the rank's order."""
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
    raise TypeError("a step is no loop")


def _merge_unequal(a: list[AlignedEntry], b: list[AlignedEntry]) -> list[AlignedEntry]:
    """Where no entry is equal: loops that are alike still become one, and so does a single round of
    the other's loop.
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
    """The stretch of other entries that goes with a loop: another loop like it, or the same entries
    once.
    """
    keys = [_key(e) for e in loop.body]
    for k, other in enumerate(others):
        if isinstance(other, AlignedLoop):
            theirs = [_key(e) for e in other.body]
            if SequenceMatcher(None, keys, theirs, autojunk=False).ratio() >= _MIN_LOOP_SIMILARITY:
                return k, k + 1, other
        elif [_key(e) for e in others[k : k + len(keys)]] == keys:
            ranks = set.intersection(*(e.ranks for e in others[k : k + len(keys)]))
            if all(e.ranks == ranks for e in others[k : k + len(keys)]):
                return (
                    k,
                    k + len(keys),
                    AlignedLoop(dict.fromkeys(ranks, 1), list(others[k : k + len(keys)])),
                )
    return None
