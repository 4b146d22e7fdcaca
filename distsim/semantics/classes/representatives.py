"""A program restricted to representative ranks, each of which does the same at the same time as in
the whole program.

Key idea: some members of each class of a `distsim.semantics.classes.partition.RankPartition` are
kept. With a rank, all peers of its messages are kept; and for each of its groups, and each slot
that a class has there, the lowest member. Then everything that a kept rank waits for is kept too,
or equal to something that is kept, and a collective completes when the last *kind* of its members
has arrived.

Groups keep their true size and members, for costs and messages. Ranks keep their numbers.
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

#: Restricting a program pays if it keeps at most one in so many ranks.
MIN_REDUCTION = 2


class FoldingError(Exception):
    """A restricted program cannot answer the question: the order of events decides."""


def representative_program(
    program: Program,
    costs: Sequence[CostModel],
    profiles: Sequence[BackendProfile],
    *,
    worth: float = MIN_REDUCTION,
    shared: bool = False,
) -> Program | None:
    """The program restricted to representatives of all ranks.

    None if that does not pay, or if classes cannot describe the program. ``costs``, ``profiles``:
    under which it must hold; the readings of the contract are always added to them. ``shared``: it
    must also hold if transfers share links.
    """
    all_profiles = [*profiles, *CONTRACT_READINGS.values()]
    classes = partition_ranks(program, costs, all_profiles, shared=shared)
    if classes is None:
        return None
    class_count = int(classes.of.max(initial=-1)) + 1
    if worth * class_count > program.world_size:
        return None
    kept = _kept_ranks(classes, program.world_size, program.world_size / worth)
    if worth * len(kept) > program.world_size:
        return None
    return restrict_to_ranks(program, kept, classes.of)


def _kept_ranks(classes: RankPartition, size: int, most: float) -> IntArray:
    """The lowest rank of each class, and all ranks that these need, ascending.

    The search stops early once there are more than ``most``.
    """
    peers_of = _ValuesByKey(classes.ends.rank, classes.ends.peer, size)
    groups_of = _ValuesByKey(classes.slots.rank, classes.slots.group, size)
    lowest_members = _lowest_members(classes)
    kept = np.zeros(size, dtype=np.bool_)
    seen_groups = np.zeros(len(classes.slots.ids), dtype=np.bool_)
    added = np.unique(classes.of, return_index=True)[1]
    while len(added) and np.count_nonzero(kept) <= most:
        kept[added] = True
        groups = sorted_unique(groups_of.of(added))
        new_groups = groups[~seen_groups[groups]]
        seen_groups[new_groups] = True
        needed = np.concatenate([peers_of.of(added), lowest_members.of(new_groups)])
        needed = sorted_unique(needed)
        added = needed[~kept[needed]]
    return np.flatnonzero(kept)


def _lowest_members(classes: RankPartition) -> _ValuesByKey:
    """By group, the lowest member of each class in each slot."""
    slots = classes.slots
    order = np.lexsort((slots.rank, classes.of[slots.rank], slots.slot, slots.group))
    rank, group = slots.rank[order], slots.group[order]
    key = np.stack([group, slots.slot[order], classes.of[rank]])
    is_first = np.ones(len(rank), dtype=np.bool_)
    is_first[1:] = (np.diff(key, axis=1) != 0).any(axis=0)
    return _ValuesByKey(group[is_first], rank[is_first], len(slots.ids))


class _ValuesByKey:
    """Any number of values for each of the keys 0 to ``size`` - 1."""

    def __init__(self, keys: IntArray, values: IntArray, size: int) -> None:
        order = np.argsort(keys, kind="stable")
        self._values = values[order]
        self._starts = np.searchsorted(keys[order], np.arange(size + 1))

    def of(self, keys: IntArray) -> IntArray:
        """The values of several keys."""
        parts = [self._values[self._starts[key] : self._starts[key + 1]] for key in keys.tolist()]
        return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def restrict_to_ranks(program: Program, kept: IntArray, classes: IntArray) -> Program:
    """The program with the calls of the ranks ``kept`` only, at least one of each class."""
    first_kept = np.full(int(classes.max()) + 1, -1, dtype=np.int64)  # by class
    first_kept[classes[kept[::-1]]] = kept[::-1]
    representative_of = first_kept[classes]
    representative_of[kept] = kept
    codes = []
    code_of = np.array(program.code_of)
    row_of = np.zeros(program.world_size, dtype=np.int64)
    for code in program.codes:
        rows = np.flatnonzero(np.isin(code.ranks, kept))
        codes.append(_RestrictedCode(code, rows).restricted())
        row_of[np.array(code.ranks, dtype=np.int64)[rows]] = np.arange(len(rows))
    return replace(
        program,
        codes=codes,
        code_of=code_of[representative_of].tolist(),
        row_of=row_of[representative_of].tolist(),
        representative_of=representative_of,
    )


class _RestrictedCode:
    """A code restricted to some of its rows.

    Call objects that a loop repeats stay shared, because compilers cache by their identity.
    """

    def __init__(self, code: SharedCode, rows: IntArray) -> None:
        self.code, self.rows = code, rows
        self._calls: dict[int, CodeCall] = {}

    def restricted(self) -> SharedCode:
        code = self.code
        endpoints = [
            ChannelEndpoint(self._value(endpoint.peer), endpoint.group, self._value(endpoint.tag))
            for endpoint in code.endpoints
        ]
        return SharedCode(
            tuple(code.ranks[row] for row in self.rows.tolist()),
            [self._call(call) for call in code.calls],
            endpoints,
            [self._value(group) for group in code.groups],
            self._guards(),
            code.iterations,
        )

    def _guards(self) -> list[BoolVector | None] | None:
        """The guards on the rows; None if all of them are always true there."""
        if self.code.guards is None:
            return None
        restricted: dict[int, BoolVector | None] = {id(None): None}
        for guard in self.code.guards:
            if guard is not None and id(guard) not in restricted:
                on_rows = guard[self.rows]
                restricted[id(guard)] = None if on_rows.all() else on_rows
        guards = [restricted[id(guard)] for guard in self.code.guards]
        return guards if any(guard is not None for guard in guards) else None

    def _call(self, call: CodeCall) -> CodeCall:
        restricted = self._calls.get(id(call))
        if restricted is not None:
            return restricted
        is_uniform = call.invalid is None and not call.parts
        if is_uniform and not vectors_of_call(call):
            restricted = call  # nothing in it differs by rank
        else:
            restricted = replace(
                call,
                nbytes=self._value(call.nbytes),
                signature=self._value(call.signature),
                parts=tuple(map(self._call, call.parts)),
                invalid=None,
                fields={name: self._value(value) for name, value in call.fields.items()},
            )
        self._calls[id(call)] = restricted
        return restricted

    def _value(self, value: T) -> T:
        """A field's value on the rows."""
        restricted: object = value
        if isinstance(value, np.ndarray):
            restricted = collapse_uniform(value[self.rows])
        elif isinstance(value, BufferVector):
            index, shape = self._value(value.index), self._value(value.shape)
            restricted = BufferVector(value.name, index, shape, value.dtype)
        elif isinstance(value, tuple):
            restricted = tuple(map(self._value, value))
        return cast("T", restricted)


def representative_by_rank(section: Program) -> list[int]:
    """By rank, its representative in a restricted program."""
    if section.representative_of is None:
        return list(range(section.world_size))
    representatives: list[int] = section.representative_of.tolist()
    return representatives


def equivalent_groups(section: Program, program: Program) -> dict[int, list[tuple[int, int]]]:
    """By group of the restricted program ``section``, the groups that it represents.

    Each is given as (its lowest rank with calls on it, group).
    """
    row_of = np.asarray(section.row_of)
    #: By group of the program: (lowest rank, representing group).
    lowest: dict[int, tuple[int, int]] = {}
    for code, kept in zip(program.codes, section.codes, strict=True):
        ranks = np.array(code.ranks, dtype=np.int64)
        for all_groups, kept_groups in zip(code.groups, kept.groups, strict=True):
            group_of = np.broadcast_to(np.asarray(all_groups), len(ranks))
            kept_group_of = np.broadcast_to(np.asarray(kept_groups), len(kept.ranks))
            representing = kept_group_of[row_of[ranks]]
            groups, first = np.unique(group_of, return_index=True)
            for group, index in zip(groups.tolist(), first.tolist(), strict=True):
                candidate = (int(ranks[index]), int(representing[index]))
                lowest[group] = min(lowest.get(group, candidate), candidate)
    represented: dict[int, list[tuple[int, int]]] = {}
    for group, (rank, representing_group) in lowest.items():
        represented.setdefault(representing_group, []).append((rank, group))
    return represented
