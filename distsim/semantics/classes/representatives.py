"""A program cut down to some of its ranks, such that each of them does the same at the same time as
in the whole.

Of the classes of a `distsim.semantics.classes.partition.RankPartition` some members are kept: with
a rank all whom its messages lead to, and of each of its groups, for each place that a class has
there, the lowest member. What a kept rank waits for is then kept as well, or equal to something
that is, and a meeting ends when the last of its *kinds* of members has come. Groups keep their true
size and members, for prices and words; ranks keep their numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np

from distsim.backends import CONTRACT_READINGS
from distsim.backends.profile import BackendProfile
from distsim.common.arrays import IntArray, sorted_unique
from distsim.hardware.cost import CostModel
from distsim.program.code import (
    BoolVector,
    BufferVector,
    ChannelEndpoint,
    CodeCall,
    SharedCode,
    collapse_uniform,
)
from distsim.program.model import Program
from distsim.semantics.classes.partition import RankPartition, partition_ranks
from distsim.semantics.classes.rank_keys import vectors_of_call

T = TypeVar("T")

#: A section is worth its while where it has at most one rank in so many of the world.
MIN_REDUCTION = 2


class FoldingError(Exception):
    """What was asked of a section cannot be told by it: the order of events decides."""


def representative_program(
    program: Program,
    costs: Sequence[CostModel],
    profiles: Sequence[BackendProfile],
    *,
    worth: float = MIN_REDUCTION,
    shared: bool = False,
) -> Program | None:
    """The program cut down to ranks that stand for all; None where that does not pay, or cannot be
    told.

    ``costs``, ``profiles``: under which it must hold; the readings of the contract are always among
    them. ``shared``: it holds where transfers share links, too.
    """
    classes = partition_ranks(
        program, costs, [*profiles, *CONTRACT_READINGS.values()], shared=shared
    )
    if classes is None or worth * (int(classes.of.max(initial=-1)) + 1) > program.world_size:
        return None
    kept = _kept_ranks(classes, program.world_size, program.world_size / worth)
    return (
        None
        if worth * len(kept) > program.world_size
        else restrict_to_ranks(program, kept, classes.of)
    )


def _kept_ranks(classes: RankPartition, size: int, most: float) -> IntArray:
    """The lowest rank of each class, and whom these draw in, ascending; not all of them where they
    are more than ``most``.
    """
    peers = _ValuesByKey(classes.ends.rank, classes.ends.peer, size)
    groups = _ValuesByKey(classes.slots.rank, classes.slots.group, size)
    needed = _lowest_members(classes)
    kept = np.zeros(size, dtype=np.bool_)
    seen = np.zeros(len(classes.slots.ids), dtype=np.bool_)
    fresh = np.unique(classes.of, return_index=True)[1]
    while len(fresh) and np.count_nonzero(kept) <= most:
        kept[fresh] = True
        those = sorted_unique(groups.of(fresh))
        those = those[~seen[those]]
        seen[those] = True
        wanted = sorted_unique(np.concatenate([peers.of(fresh), needed.of(those)]))
        fresh = wanted[~kept[wanted]]
    return np.flatnonzero(kept)


def _lowest_members(classes: RankPartition) -> _ValuesByKey:
    """By group the lowest member of each class in each place."""
    slots = classes.slots
    order = np.lexsort((slots.rank, classes.of[slots.rank], slots.slot, slots.group))
    rank, group = slots.rank[order], slots.group[order]
    same = np.stack([group, slots.slot[order], classes.of[rank]])
    fresh = np.ones(len(rank), dtype=np.bool_)
    fresh[1:] = (np.diff(same, axis=1) != 0).any(axis=0)
    return _ValuesByKey(group[fresh], rank[fresh], len(slots.ids))


class _ValuesByKey:
    """Some numbers for each of ``size`` keys."""

    def __init__(self, keys: IntArray, values: IntArray, size: int) -> None:
        order = np.argsort(keys, kind="stable")
        self._values = values[order]
        self._starts = np.searchsorted(keys[order], np.arange(size + 1))

    def of(self, keys: IntArray) -> IntArray:
        """Those of several keys."""
        parts = [self._values[self._starts[key] : self._starts[key + 1]] for key in keys.tolist()]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def restrict_to_ranks(program: Program, kept: IntArray, classes: IntArray) -> Program:
    """The program with the calls of some ranks alone, at least one of each class."""
    first = np.full(int(classes.max()) + 1, -1, dtype=np.int64)
    first[classes[kept[::-1]]] = kept[::-1]
    representative_of = first[classes]
    representative_of[kept] = kept
    codes, code_of, row_of = (
        [],
        np.array(program.code_of),
        np.zeros(program.world_size, dtype=np.int64),
    )
    for code in program.codes:
        rows = np.flatnonzero(np.isin(code.ranks, kept))
        codes.append(_RestrictedCode(code, rows).code())
        row_of[np.array(code.ranks, dtype=np.int64)[rows]] = np.arange(len(rows))
    return replace(
        program,
        codes=codes,
        code_of=code_of[representative_of].tolist(),
        row_of=row_of[representative_of].tolist(),
        representative_of=representative_of,
    )


class _RestrictedCode:
    """A code on some of its rows."""

    def __init__(self, code: SharedCode, rows: IntArray) -> None:
        self.old, self.rows = code, rows
        self._calls: dict[int, CodeCall] = {}

    def code(self) -> SharedCode:
        old = self.old
        ports = [
            ChannelEndpoint(self._of(port.peer), port.group, self._of(port.tag))
            for port in old.ports
        ]
        masks: dict[int, BoolVector | None] = {id(None): None}
        for mask in old.guards or ():
            if id(mask) not in masks:
                inside = mask[self.rows] if mask is not None else None
                masks[id(mask)] = None if inside is None or inside.all() else inside
        guards = None if old.guards is None else [masks[id(mask)] for mask in old.guards]
        ranks = tuple(old.ranks[row] for row in self.rows.tolist())
        calls = [self._call(call) for call in old.calls]
        return SharedCode(
            ranks,
            calls,
            ports,
            [self._of(group) for group in old.groups],
            guards if guards is not None and any(g is not None for g in guards) else None,
            old.iterations,
        )

    def _call(self, call: CodeCall) -> CodeCall:
        found = self._calls.get(id(call))
        if found is None and call.invalid is None and not call.parts and not vectors_of_call(call):
            found = self._calls[id(call)] = call  # nothing in it differs by rank
        if found is None:
            found = self._calls[id(call)] = replace(
                call,
                nbytes=self._of(call.nbytes),
                signature=self._of(call.signature),
                parts=tuple(map(self._call, call.parts)),
                invalid=None,
                fields={name: self._of(value) for name, value in call.fields.items()},
            )
        return found

    def _of(self, value: T) -> T:
        """A field's value on the rows."""
        found: object = value
        if isinstance(value, np.ndarray):
            found = collapse_uniform(value[self.rows])
        elif isinstance(value, BufferVector):
            found = BufferVector(
                value.name, self._of(value.index), self._of(value.shape), value.dtype
            )
        elif isinstance(value, tuple):
            found = tuple(map(self._of, value))
        return cast("T", found)


def representative_by_rank(section: Program) -> list[int]:
    """By rank the one that stands for it."""
    return (
        list(range(section.world_size))
        if section.representative_of is None
        else section.representative_of.tolist()
    )


def equivalent_groups(section: Program, program: Program) -> dict[int, list[tuple[int, int]]]:
    """By group of the ranks that stand for all: (lowest rank, group) of each group of the program
    that it stands for.
    """
    there = np.asarray(section.row_of)
    lowest: dict[int, tuple[int, int]] = {}
    for code, kept in zip(program.codes, section.codes, strict=True):
        ranks = np.array(code.ranks, dtype=np.int64)
        for ids, own in zip(code.groups, kept.groups, strict=True):
            ours = np.broadcast_to(np.asarray(ids), len(ranks))
            theirs = np.broadcast_to(np.asarray(own), len(kept.ranks))[there[ranks]]
            groups, first = np.unique(ours, return_index=True)
            for group, rank, of in zip(
                groups.tolist(), ranks[first].tolist(), theirs[first].tolist(), strict=True
            ):
                lowest[group] = min(lowest.get(group, (rank, of)), (rank, of))
    found: dict[int, list[tuple[int, int]]] = {}
    for group, (rank, of) in lowest.items():
        found.setdefault(of, []).append((rank, group))
    return found
