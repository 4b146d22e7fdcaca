"""What must be equal in a class of ranks (`distsim.semantics.classes.partition`), as columns of
numbers taken from the vectors of a code.

Key idea: a column has one entry per rank of the code. Only equality of entries counts, so vectors
of any type become numbers, and columns of different meaning can be stacked into one table.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.backends.profile import BackendProfile
from distsim.common.arrays import IntArray, dense_row_ids, first_equal_columns
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BoolVector, BufferVector, CodeCall, SharedCode, Vec
from distsim.program.model import Program

#: The group size for which a profile is asked whether an operation depends on group ranks.
_PROBED_GROUP_SIZE = 8
#: The roots, as group ranks, for which it is asked.
_PROBED_ROOTS = (0, 3)
#: Tables of more columns are sorted as rows of bytes, and not column by column.
_MAX_SORTED_COLUMNS = 8
#: The types of most fields of calls; they cannot hold a vector.
_SCALAR_TYPES = frozenset((int, str, bool, float, type(None)))


class EndpointColumns(NamedTuple):
    """One endpoint of a code: the peer, group and tag of each of its ranks."""

    peers: IntArray
    groups: IntArray
    tags: IntArray


class RankVectors:
    """A code with its vectors spread over its ranks.

    ``endpoints``: the distinct ones. Tags distinguish endpoints only if some tag differs by rank
    (``tagged``). ``groups``: by group slot, the group of each rank.
    """

    def __init__(self, code: SharedCode) -> None:
        self.code, self.ranks = code, np.array(code.ranks, dtype=np.int64)
        self.calls = list(code.distinct_calls())
        self.groups = [self._spread(group) for group in code.groups]
        self.tagged = any(isinstance(endpoint.tag, np.ndarray) for endpoint in code.endpoints)
        endpoints: dict[Hashable, EndpointColumns] = {}
        for endpoint, users in zip(code.endpoints, self._users(), strict=True):
            peers = self._spread(endpoint.peer)
            if users is not None:
                # The peer of a rank that makes no call there means nothing.
                peers = np.where(users, endpoint.peer, self.ranks)
            tags = self._spread(endpoint.tag)
            key = (peers.tobytes(), endpoint.group, tags.tobytes() if self.tagged else b"")
            endpoints.setdefault(key, EndpointColumns(peers, self.groups[endpoint.group], tags))
        self.endpoints = list(endpoints.values())

    def _users(self) -> list[BoolVector | None]:
        """By endpoint, the ranks that make a call there; None: all."""
        code = self.code
        if code.guards is None:
            return [None] * len(code.endpoints)
        users = [np.zeros(len(code.ranks), dtype=np.bool_) for _ in code.endpoints]
        for call, guard in zip(code.calls, code.guards, strict=True):
            for part in (call, *call.parts):
                if part.endpoint >= 0:
                    users[part.endpoint] |= True if guard is None else guard
        return list(users)

    def _spread(self, value: Vec) -> IntArray:
        return np.broadcast_to(np.asarray(value, dtype=np.int64), len(self.ranks))

    # --- what must be equal in a class ---
    def columns(self, program: Program) -> Iterator[IntArray]:
        """Tables of shape (any, ranks); ranks of one class have equal columns."""
        distinct_guards = {id(g): g for g in self.code.guards or () if g is not None}
        for guard in distinct_guards.values():
            yield guard.astype(np.int64)[None, :]
        yield from self._equal_endpoints(program)
        if len(self.groups) > 1:
            yield first_equal_columns(np.stack(self.groups, axis=1)).T
        for vector in self._call_vectors():
            yield _value_numbers(vector)[None, :]
        yield from self._roots(program)

    def _equal_endpoints(self, program: Program) -> Iterator[IntArray]:
        """Which of a rank's endpoints have the same peer, and perhaps the same group and tag."""
        if not self.endpoints:
            return
        peers = np.stack([endpoint.peers for endpoint in self.endpoints], axis=1)
        groups = np.stack([endpoint.groups for endpoint in self.endpoints], axis=1)
        tags = np.stack([endpoint.tags for endpoint in self.endpoints], axis=1)
        pairs = peers + np.int64(program.world_size) * groups
        keys = [peers, pairs]
        if self.tagged:
            keys += [_pair_numbers(peers, tags), _pair_numbers(pairs, tags)]
        for key in keys:
            yield first_equal_columns(key).T

    def _call_vectors(self) -> Iterable[NDArray[np.generic]]:
        """The distinct vectors of all calls, except for roots."""
        distinct: dict[int, NDArray[np.generic]] = {}
        for call in self.calls:
            root = call.fields.get("root")
            for vector in vectors_of_call(call):
                if vector is not root:
                    distinct[id(vector)] = vector
        return distinct.values()

    def _roots(self, program: Program) -> Iterator[IntArray]:
        """For calls with a root: whether the rank is the root, and the root's group rank."""
        seen: set[Hashable] = set()
        for call in self.calls:
            root = call.fields.get("root")
            if root is None:
                continue
            roots, groups = self._spread(root), self.groups[call.group]
            key = (roots.tobytes(), call.group)
            if key in seen:
                continue
            seen.add(key)
            yield (roots == self.ranks).astype(np.int64)[None, :]
            pairs = list(zip(groups.tolist(), roots.tolist(), strict=True))
            group_rank = {(g, rank): program.groups[g].group_rank(rank) for g, rank in set(pairs)}
            yield np.array([group_rank[pair] for pair in pairs], dtype=np.int64)[None, :]

    # --- collectives that do not treat all members equally ---
    def rooted(self) -> Iterator[tuple[IntArray, IntArray]]:
        """(groups, roots) by rank, for each combination among the code's calls."""
        with_root = [call for call in self.calls if call.fields.get("root") is not None]
        distinct = {(id(call.fields["root"]), call.group): call for call in with_root}
        for call in distinct.values():
            yield self.groups[call.group], self._spread(call.fields["root"])

    def by_place(self, profiles: Iterable[BackendProfile]) -> list[IntArray]:
        """By rank, the groups on which an operation of the code depends on group ranks."""
        calls = [call for call in self.calls if OPERATIONS[call.op].kind == "collective"]
        all_ops = {call.op for call in calls}
        ops: set[str] = set()
        for profile in profiles:
            ops |= {op for op in all_ops if _op_depends_on_group_rank(profile, op)}
        slots = {call.group for call in calls if call.op in ops}
        return [self.groups[slot] for slot in sorted(slots)]


def depends_on_group_rank(program: Program, profile: BackendProfile) -> bool:
    """Whether an operation of a program depends on group ranks, beyond who is the root."""
    calls = (call for code in program.codes for call in code.distinct_calls())
    ops = {call.op for call in calls if OPERATIONS[call.op].kind == "collective"}
    return any(_op_depends_on_group_rank(profile, op) for op in sorted(ops))


def _op_depends_on_group_rank(profile: BackendProfile, op: str) -> bool:
    """Whether a member waits for some of the other non-root members, but not for all of them."""
    size = _PROBED_GROUP_SIZE
    for root in _PROBED_ROOTS:
        for me in range(size):
            needed = profile.needs(op, size, root, me)
            others = frozenset(range(size)) - {root, me}
            if needed is not None and needed & others and not others <= needed:
                return True
    return False


def vectors_of_call(call: CodeCall) -> list[NDArray[np.generic]]:
    """All vectors of a call, except for its peers and groups."""
    found: list[NDArray[np.generic]] = []
    to_visit: list[object] = [call.nbytes, call.signature, *call.fields.values()]
    while to_visit:
        value = to_visit.pop()
        if type(value) in _SCALAR_TYPES:
            continue
        if isinstance(value, np.ndarray):
            found.append(value)
        elif isinstance(value, BufferVector):
            to_visit += [value.index, *value.shape]
        elif isinstance(value, tuple):
            to_visit += value
    return found


# --- numbers for equal values ---
def _value_numbers(vector: NDArray[np.generic]) -> IntArray:
    return np.asarray(np.unique(vector, return_inverse=True)[1], dtype=np.int64).reshape(-1)


def _pair_numbers(one: IntArray, other: IntArray) -> IntArray:
    """A number for each pair of entries."""
    return row_numbers(np.stack([one.reshape(-1), other.reshape(-1)], axis=1)).reshape(one.shape)


def row_numbers(table: IntArray) -> IntArray:
    """A number for each row of a table; equal rows have equal numbers."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    varying = np.ascontiguousarray(table[:, (table != table[:1]).any(axis=0)])
    if varying.shape[1] <= _MAX_SORTED_COLUMNS:
        return dense_row_ids(varying.T, len(table))
    row_type = np.dtype((np.void, varying.dtype.itemsize * varying.shape[1]))
    rows = varying.view(row_type).reshape(-1)
    return np.asarray(np.unique(rows, return_inverse=True)[1], dtype=np.int64).reshape(-1)
