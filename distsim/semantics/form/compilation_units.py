"""Groups the ranks of a code into units that are compiled once.

Key idea: ranks of one unit do the same, call by call. The unit's key holds every value on which a
compiler branches: which calls a rank makes; which of them are invalid or accept any source; the
shapes that a backend checks; and which of the code's endpoints and groups are identical (so that a
communicator was used before, or a group's numbers continue). Ranks that a fault strikes, and ranks
that make an invalid call or a new group, get a unit of their own.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from distsim.backends.profile import SHAPE_CHECKED_OPS, BackendProfile
from distsim.common.arrays import IntArray, first_equal_columns
from distsim.program.code import BoolVector, CodeCall, SharedCode, Vec
from distsim.program.model import Program
from distsim.semantics.form.compiler import CompilationContext, UnitCompiler
from distsim.semantics.form.device_compiler import DeviceCompiler
from distsim.semantics.form.group_creation import divergent_new_groups
from distsim.semantics.form.instructions import CompilationUnit

#: Larger than any group id, so that (peer, group) fits one number.
_GROUP_SPACE = 1 << 31


def compile_units(program: Program, profile: BackendProfile) -> list[CompilationUnit]:
    """All units of a program under a profile, in the order of their first ranks."""
    struck = {fault.rank for fault in program.faults if fault.kind not in ("slow", "late")}
    if program.startup is not None and program.startup.failed:
        struck |= set(program.startup.endings)
    units: list[CompilationUnit] = []
    for number, code in enumerate(program.codes):
        units += _units_of(number, code, profile, struck)
    creates_groups = "new groups" in program.features
    divergent = divergent_new_groups(program, profile) if creates_groups else {}
    context = CompilationContext(divergent)
    compiler = DeviceCompiler if profile.device else UnitCompiler
    units.sort(key=lambda unit: unit.ranks[0])
    return [compiler(program, profile, unit, context).run() for unit in units]


def _units_of(
    number: int, code: SharedCode, profile: BackendProfile, struck: set[int]
) -> Iterator[CompilationUnit]:
    size = len(code.ranks)
    kinds = np.zeros(size, dtype=np.int64)
    columns = [column.reshape(size, -1) for column in _key_columns(code, profile)]
    if columns:
        _, kinds = np.unique(np.concatenate(columns, axis=1), axis=0, return_inverse=True)
    alone = _alone(code, struck)
    rows_by_key: dict[Hashable, list[int]] = {}
    for row, kind in enumerate(kinds.reshape(-1).tolist()):
        rows_by_key.setdefault(("alone", row) if alone[row] else kind, []).append(row)
    for rows in rows_by_key.values():
        yield CompilationUnit(number, tuple(code.ranks[row] for row in rows), tuple(rows))


def _alone(code: SharedCode, struck: set[int]) -> BoolVector:
    """Ranks whose compilation depends on more than the key holds."""
    alone = np.array([rank in struck for rank in code.ranks], dtype=np.bool_)
    for call in code.distinct_calls():
        if call.invalid is not None:
            alone |= call.invalid.rows
        exit_values = (call.fields.get(name) for name in ("code", "message"))
        if call.op == "new_group" or any(isinstance(v, np.ndarray) for v in exit_values):
            alone[:] = True
    return alone


def _key_columns(code: SharedCode, profile: BackendProfile) -> Iterator[IntArray]:
    """What must be equal in a unit; each of shape (ranks,) or (ranks, any)."""
    size = len(code.ranks)
    distinct_guards = {id(guard): guard for guard in code.guards or () if guard is not None}
    for guard in distinct_guards.values():
        yield guard.astype(np.int64)
    peers = [
        np.broadcast_to(np.asarray(endpoint.peer, dtype=np.int64), size)
        for endpoint in code.endpoints
    ]
    groups = [np.broadcast_to(np.asarray(group, dtype=np.int64), size) for group in code.groups]
    if any(isinstance(endpoint.peer, np.ndarray) for endpoint in code.endpoints):
        yield np.stack([peer < 0 for peer in peers], axis=1).astype(np.int64)
    if any(isinstance(group, np.ndarray) for group in code.groups):
        yield first_equal_columns(np.stack(groups, axis=1))
    if profile.device and len(peers) > 1:
        # On a device, each pair of ranks of a group has a communicator or connections of its own.
        slots = [endpoint.group for endpoint in code.endpoints]
        pairs = [peer * _GROUP_SPACE + groups[k] for k, peer in zip(slots, peers, strict=True)]
        yield first_equal_columns(np.stack(pairs, axis=1))
    yield from _root_columns(code, profile, peers)
    for call in code.distinct_calls():
        from_any_source = call.endpoint >= 0 and (peers[call.endpoint] < 0).any()
        if call.op in SHAPE_CHECKED_OPS or from_any_source:
            for size_by_rank in _sizes_that_vary(call):
                yield np.asarray(size_by_rank, dtype=np.int64)


def _root_columns(
    code: SharedCode, profile: BackendProfile, peers: list[IntArray]
) -> Iterator[IntArray]:
    """Identity of roots, for collectives that are sent as messages.

    A root may be that of an earlier call, the rank itself, or a peer of its messages; all of these
    share connections.
    """
    calls = [call for call in code.distinct_calls() if call.op in profile.by_messages]
    roots: list[Vec] = [
        call.fields["root"] for call in calls if call.fields.get("root") is not None
    ]
    by_rank = [np.broadcast_to(np.asarray(r, dtype=np.int64), len(code.ranks)) for r in roots]
    own = np.array(code.ranks, dtype=np.int64)
    if any(isinstance(root, np.ndarray) for root in roots):
        yield first_equal_columns(np.stack([own, *by_rank], axis=1))
    if peers:
        for root in by_rank:
            for other in (own, *peers):
                yield (other == root).astype(np.int64)


def _sizes_that_vary(call: CodeCall) -> Iterator[Vec]:
    """The sizes of a call's buffers that differ by rank."""
    for side in ("inputs", "outputs"):
        for buffer in call.fields.get(side) or ():
            shape = getattr(buffer, "shape", ())
            yield from (size for size in shape if isinstance(size, np.ndarray))
