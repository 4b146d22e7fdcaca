"""Programs of ranks laid over each other: steps that ranks share become one, the others keep to whom they belong."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final

from distsim.compact.fold import Leaf, Loop, Node
from distsim.compact.items import Form

#: Two programs of which the lengths multiply to more are not compared entry by entry.
_MOST: Final = 4_000_000
#: Share of equal entries from which two loops are taken for one.
_ALIKE: Final = 0.5


@dataclass
class Step:
    """A call of several ranks: what each of them has in its places."""

    form: Form
    ints: dict[int, tuple[int, ...]]
    times: dict[int, tuple[int, ...]]

    @property
    def ranks(self) -> set[int]:
        return set(self.ints)


@dataclass
class Round:
    """A loop of several ranks, with how often each goes round."""

    times: dict[int, int]
    body: list[Step | Round]

    @property
    def ranks(self) -> set[int]:
        return set(self.times)


Entry = Step | Round


def aligned(programs: Mapping[int, list[Node]]) -> list[Entry]:
    """One program for all ranks. Each rank's calls stand in it in the rank's order."""
    classes: dict[Hashable, list[int]] = {}
    for rank, nodes in programs.items():
        classes.setdefault(tuple(_shape(node) for node in nodes), []).append(rank)
    merged: list[Entry] = []
    for ranks in classes.values():
        mine = [_entry(list(column), ranks) for column in zip(*(programs[rank] for rank in ranks), strict=True)]
        merged = _merged(merged, mine) if merged else mine
    return merged


def _shape(node: Node) -> Hashable:
    return node.form if isinstance(node, Leaf) else ("loop", *map(_shape, node.body))


def _entry(column: Sequence[Node], ranks: Sequence[int]) -> Entry:
    """The same node of several ranks."""
    if isinstance(column[0], Leaf):
        leaves = [node for node in column if isinstance(node, Leaf)]
        ints = {rank: leaf.ints for rank, leaf in zip(ranks, leaves, strict=True)}
        times = {rank: leaf.means for rank, leaf in zip(ranks, leaves, strict=True)}
        return Step(column[0].form, ints, times)
    loops = [node for node in column if isinstance(node, Loop)]
    body = [_entry(list(inner), ranks) for inner in zip(*(loop.body for loop in loops), strict=True)]
    return Round({rank: loop.times for rank, loop in zip(ranks, loops, strict=True)}, body)


def _key(entry: Entry) -> Hashable:
    return entry.form if isinstance(entry, Step) else ("loop", *map(_key, entry.body))


def _merged(a: list[Entry], b: list[Entry]) -> list[Entry]:
    if len(a) * len(b) > _MOST:
        return a + b
    keys_a, keys_b = [_key(e) for e in a], [_key(e) for e in b]
    found: list[Entry] = []
    at_a = at_b = 0
    for i, j, size in SequenceMatcher(None, keys_a, keys_b, autojunk=False).get_matching_blocks():
        found += _gap(a[at_a:i], b[at_b:j])
        found += [_joined(x, y) for x, y in zip(a[i : i + size], b[j : j + size], strict=True)]
        at_a, at_b = i + size, j + size
    return found


def _joined(a: Entry, b: Entry) -> Entry:
    if isinstance(a, Step) and isinstance(b, Step):
        return Step(a.form, a.ints | b.ints, a.times | b.times)
    if isinstance(a, Round) and isinstance(b, Round):
        return Round(a.times | b.times, _merged(a.body, b.body))
    raise TypeError("a step is no loop")


def _gap(a: list[Entry], b: list[Entry]) -> list[Entry]:
    """Where no entry is equal: loops that are alike still become one, and so does a single round of the other's loop."""
    for i, entry in enumerate(a):
        if isinstance(entry, Round) and (pair := _counterpart(entry, b)) is not None:
            start, end, other = pair
            return [*_gap(a[:i], b[:start]), _joined(entry, other), *_gap(a[i + 1 :], b[end:])]
    for j, entry in enumerate(b):
        if isinstance(entry, Round) and (pair := _counterpart(entry, a)) is not None:
            start, end, other = pair
            return [*_gap(a[:start], b[:j]), _joined(other, entry), *_gap(a[end:], b[j + 1 :])]
    return a + b


def _counterpart(loop: Round, others: Sequence[Entry]) -> tuple[int, int, Entry] | None:
    """The stretch of other entries that goes with a loop: another loop like it, or the same entries once."""
    keys = [_key(e) for e in loop.body]
    for k, other in enumerate(others):
        if isinstance(other, Round):
            theirs = [_key(e) for e in other.body]
            if SequenceMatcher(None, keys, theirs, autojunk=False).ratio() >= _ALIKE:
                return k, k + 1, other
        elif [_key(e) for e in others[k : k + len(keys)]] == keys:
            ranks = set.intersection(*(e.ranks for e in others[k : k + len(keys)]))
            if all(e.ranks == ranks for e in others[k : k + len(keys)]):
                return k, k + len(keys), Round(dict.fromkeys(ranks, 1), list(others[k : k + len(keys)]))
    return None
