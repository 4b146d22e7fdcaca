"""Which ranks do the same, call by call, so that a code is compiled once for all of them.

A unit's key holds every value on which a compiler branches: which calls a rank makes, which of them
are invalid or open to any source, the shapes that a back end looks at, and which of the code's
ports and groups are one and the same (a communicator that was used before, a group's next number).
Ranks that a fault strikes, that make an invalid call or a new group stand alone.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import numpy as np

from distsim.backends.profile import SHAPE_CHECKED_OPS, BackendProfile
from distsim.common.arrays import IntArray, first_equal_columns
from distsim.program.code import BoolVector, SharedCode, Vec
from distsim.program.model import Program
from distsim.semantics.form.compiler import CompilationContext, UnitCompiler
from distsim.semantics.form.device_compiler import DeviceCompiler
from distsim.semantics.form.group_creation import divergent_new_groups
from distsim.semantics.form.instructions import CompilationUnit


def compile_units(program: Program, profile: BackendProfile) -> list[CompilationUnit]:
    """All units of a program under a profile, in the order of their first ranks."""
    struck = {f.rank for f in program.faults if f.kind not in ("slow", "late")}
    if program.startup is not None and program.startup.failed:
        struck |= set(program.startup.endings)
    found = [
        unit
        for number, code in enumerate(program.codes)
        for unit in _units_of(number, code, profile, struck)
    ]
    shared = CompilationContext(
        divergent_new_groups(program, profile) if "new groups" in program.features else {}
    )
    compiler = DeviceCompiler if profile.device else UnitCompiler
    return [
        compiler(program, profile, unit, shared).run()
        for unit in sorted(found, key=lambda u: u.ranks[0])
    ]


def _units_of(
    number: int, code: SharedCode, profile: BackendProfile, struck: set[int]
) -> Iterator[CompilationUnit]:
    columns = list(_key_columns(code, profile))
    alone = _alone(code, struck)
    if columns:
        _, kinds = np.unique(
            np.concatenate([c.reshape(len(code.ranks), -1) for c in columns], axis=1),
            axis=0,
            return_inverse=True,
        )
    else:
        kinds = np.zeros(len(code.ranks), dtype=np.int64)
    found: dict[Hashable, list[int]] = {}
    for row, kind in enumerate(kinds.reshape(-1).tolist()):
        found.setdefault(("alone", row) if alone[row] else kind, []).append(row)
    for rows in found.values():
        yield CompilationUnit(number, tuple(code.ranks[row] for row in rows), tuple(rows))


def _alone(code: SharedCode, struck: set[int]) -> BoolVector:
    """Ranks whose compilation depends on more than the key holds."""
    alone = np.array([rank in struck for rank in code.ranks], dtype=np.bool_)
    for call in code.distinct_calls():
        if call.invalid is not None:
            alone |= call.invalid[0]
        if call.op == "new_group" or any(
            isinstance(call.fields.get(name), np.ndarray) for name in ("code", "message")
        ):
            alone[:] = True
    return alone


def _key_columns(code: SharedCode, profile: BackendProfile) -> Iterator[IntArray]:
    """Shape (ranks, any): what must be equal in a unit."""
    size = len(code.ranks)
    for mask in {id(g): g for g in code.guards or () if g is not None}.values():
        yield mask.astype(np.int64)
    peers = [np.broadcast_to(np.asarray(port.peer, dtype=np.int64), size) for port in code.ports]
    groups = [np.broadcast_to(np.asarray(group, dtype=np.int64), size) for group in code.groups]
    if any(isinstance(port.peer, np.ndarray) for port in code.ports):
        yield np.stack([peer < 0 for peer in peers], axis=1).astype(np.int64)
    if sum(isinstance(group, np.ndarray) for group in code.groups):
        yield first_equal_columns(np.stack(groups, axis=1))
    if profile.device and len(peers) > 1:
        pairs = [
            peer * (1 << 31) + groups[port.group]
            for port, peer in zip(code.ports, peers, strict=True)
        ]
        yield first_equal_columns(np.stack(pairs, axis=1))
    yield from _root_columns(code, profile, peers)
    for call in code.distinct_calls():
        if call.op in SHAPE_CHECKED_OPS or (call.port >= 0 and (peers[call.port] < 0).any()):
            yield from (
                np.asarray(n, dtype=np.int64)
                for side in ("inputs", "outputs")
                for n in _sizes_that_vary(call.fields.get(side) or ())
            )


def _root_columns(
    code: SharedCode, profile: BackendProfile, peers: list[IntArray]
) -> Iterator[IntArray]:
    """Of collectives that travel as messages: is a root that of an earlier one, this rank, whom a
    message goes to or comes from.
    """
    roots = [
        call.fields.get("root") for call in code.distinct_calls() if call.op in profile.by_messages
    ]
    known = [
        np.broadcast_to(np.asarray(root, dtype=np.int64), len(code.ranks))
        for root in roots
        if root is not None
    ]
    own = np.array(code.ranks, dtype=np.int64)
    if any(isinstance(root, np.ndarray) for root in roots):
        yield first_equal_columns(np.stack([own, *known], axis=1))
    if known and peers:
        yield from (other == root for root in known for other in (own, *peers))


def _sizes_that_vary(buffers: tuple[object, ...]) -> Iterator[Vec]:
    for buffer in buffers:
        yield from (n for n in getattr(buffer, "shape", ()) if isinstance(n, np.ndarray))
