"""What must be equal in a class of ranks (`distsim.semantics.classes.partition`), as the vectors of
a code hold it.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from distsim.backends.profile import BackendProfile
from distsim.common.arrays import IntArray, first_equal_columns
from distsim.common.arrays import dense_row_ids as by_columns
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BoolVector, BufferVector, CodeCall, SharedCode, Vec
from distsim.program.model import Program

#: Group ranks beside which a rule is tried, to see whether it goes by their places.
_PROBED_GROUP_SIZE = 8
#: Tables of more columns are sorted as rows of bytes, and not column by column.
_MAX_SORTED_COLUMNS = 8
#: What most fields of calls are.
_SCALAR_TYPES = frozenset((int, str, bool, float, type(None)))


class RankVectors:
    """A code, its vectors spread over its ranks."""

    def __init__(self, code: SharedCode) -> None:
        self.code, self.ranks = code, np.array(code.ranks, dtype=np.int64)
        self.calls = list(code.distinct_calls())
        self.groups = [self._spread(group) for group in code.groups]
        self.tagged = any(isinstance(port.tag, np.ndarray) for port in code.ports)
        used = self._users()
        ports: dict[Hashable, tuple[IntArray, IntArray, IntArray]] = {}
        for number, port in enumerate(code.ports):
            mask = used[number]
            peer = (
                self._spread(port.peer) if mask is None else np.where(mask, port.peer, self.ranks)
            )
            key = (
                peer.tobytes(),
                port.group,
                self._spread(port.tag).tobytes() if self.tagged else b"",
            )
            ports.setdefault(key, (peer, self.groups[port.group], self._spread(port.tag)))
        #: (peers, groups, tags) of all that differ; tags alone tell none apart where each is one
        #: number for all ranks of its code.
        self.ports = list(ports.values())

    def _users(self) -> list[BoolVector | None]:
        """By port the ranks that make a call there, None: all. Where a guard shuts a rank out its
        peer means nothing.
        """
        code = self.code
        if code.guards is None:
            return [None] * len(code.ports)
        users = [np.zeros(len(code.ranks), dtype=np.bool_) for _ in code.ports]
        for call, guard in zip(code.calls, code.guards, strict=True):
            for part in (call, *call.parts):
                if part.port >= 0:
                    users[part.port] |= True if guard is None else guard
        return list(users)

    def _spread(self, value: Vec) -> IntArray:
        return np.broadcast_to(np.asarray(value, dtype=np.int64), len(self.ranks))

    def facts(self, program: Program) -> Iterator[IntArray]:
        """Shape (any, ranks): what must be equal in a class."""
        for mask in {id(g): g for g in self.code.guards or () if g is not None}.values():
            yield mask.astype(np.int64)[None, :]
        if self.ports:
            peers, groups, tags = (
                np.stack([port[k] for port in self.ports], axis=1) for k in range(3)
            )
            wide = np.int64(program.world_size)
            for keys in (
                peers,
                peers + wide * groups,
                *(
                    (_pair_numbers(peers, tags), _pair_numbers(peers + wide * groups, tags))
                    if self.tagged
                    else ()
                ),
            ):
                yield first_equal_columns(keys).T
        if len(self.groups) > 1:
            yield first_equal_columns(np.stack(self.groups, axis=1)).T
        found = {
            id(v): v
            for call in self.calls
            for v in vectors_of_call(call)
            if v is not call.fields.get("root")
        }
        for vector in found.values():
            yield _value_numbers(vector)[None, :]
        yield from self._roots(program)

    def _roots(self, program: Program) -> Iterator[IntArray]:
        """Of calls with a root: is it the rank itself, and where in the group it stands."""
        seen: set[Hashable] = set()
        for call in self.calls:
            root = call.fields.get("root")
            if root is None:
                continue
            roots, groups = self._spread(root), self.groups[call.group]
            key = (roots.tobytes(), call.group)
            if key not in seen:
                seen.add(key)
                places = {
                    pair: program.groups[pair[0]].group_rank(pair[1])
                    for pair in set(zip(groups.tolist(), roots.tolist(), strict=True))
                }
                yield (roots == self.ranks).astype(np.int64)[None, :]
                yield np.array(
                    [places[pair] for pair in zip(groups.tolist(), roots.tolist(), strict=True)],
                    dtype=np.int64,
                )[None, :]

    def rooted(self) -> Iterator[tuple[IntArray, IntArray]]:
        """By rank (groups, roots) of all that differ among the code's calls."""
        found = {
            (id(call.fields["root"]), call.group): call
            for call in self.calls
            if call.fields.get("root") is not None
        }
        for call in found.values():
            yield self.groups[call.group], self._spread(call.fields["root"])

    def by_place(self, profiles: Iterable[BackendProfile]) -> list[IntArray]:
        """By rank the groups on which some operation of the code lets members go by where they
        stand, beyond being its root or not.
        """
        calls = [call for call in self.calls if OPERATIONS[call.op].kind == "collective"]
        ops = {
            op
            for profile in profiles
            for op in {c.op for c in calls}
            if _op_depends_on_group_rank(profile, op)
        }
        return [self.groups[k] for k in sorted({call.group for call in calls if call.op in ops})]


def depends_on_group_rank(program: Program, profile: BackendProfile) -> bool:
    """Some operation of a program lets members go by where they stand in the group, beyond being
    its root or not.
    """
    ops = {
        call.op
        for code in program.codes
        for call in code.distinct_calls()
        if OPERATIONS[call.op].kind == "collective"
    }
    return any(_op_depends_on_group_rank(profile, op) for op in sorted(ops))


def _op_depends_on_group_rank(profile: BackendProfile, op: str) -> bool:
    n, everybody = _PROBED_GROUP_SIZE, frozenset(range(_PROBED_GROUP_SIZE))
    for root in (0, 3):
        for me in range(n):
            needed = profile.needs(op, n, root, me)
            rest = everybody - {root, me}
            if needed is not None and needed & rest and not rest <= needed:
                return True
    return False


def vectors_of_call(call: CodeCall) -> list[NDArray[np.generic]]:
    """All vectors of a call but its peers and groups."""
    found: list[NDArray[np.generic]] = []
    todo: list[object] = [
        value
        for value in (call.nbytes, call.signature, *call.fields.values())
        if type(value) not in _SCALAR_TYPES
    ]
    while todo:
        value = todo.pop()
        if type(value) in _SCALAR_TYPES:
            continue
        if isinstance(value, np.ndarray):
            found.append(value)
        elif isinstance(value, BufferVector):
            todo += [value.index, *value.shape]
        elif isinstance(value, tuple):
            todo += value
    return found


def _value_numbers(vector: NDArray[np.generic]) -> IntArray:
    return np.asarray(np.unique(vector, return_inverse=True)[1], dtype=np.int64).reshape(-1)


def _pair_numbers(one: IntArray, other: IntArray) -> IntArray:
    """One number for each pair."""
    return row_numbers(np.stack([one.reshape(-1), other.reshape(-1)], axis=1)).reshape(one.shape)


def row_numbers(table: IntArray) -> IntArray:
    """By row of a table its number: equal rows have equal ones."""
    if not len(table):
        return np.zeros(0, dtype=np.int64)
    plain = np.ascontiguousarray(table[:, (table != table[:1]).any(axis=0)])
    if plain.shape[1] <= _MAX_SORTED_COLUMNS:
        return by_columns(plain.T, len(table))
    rows = plain.view(np.dtype((np.void, plain.dtype.itemsize * plain.shape[1]))).reshape(-1)
    return np.asarray(np.unique(rows, return_inverse=True)[1], dtype=np.int64).reshape(-1)
