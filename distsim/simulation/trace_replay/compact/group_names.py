"""Names the groups of a trace as a scenario would: by axes of a mesh, or by declarations.

A trace lists each group by its ranks. A scenario uses one name for a whole *family* of disjoint
groups, for example an axis of the mesh or `by: rank % 4`; each rank then means its own group. So
groups are put into families first, and each family gets the most readable declaration that fits.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from distsim.operations.core.resolved_call import RankGroup
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import Program
from distsim.scenario.format.models.entries import RESERVED_NAMES
from distsim.simulation.trace_replay.compact.rank_expressions import RankVariables, fit_expression

#: torch describes a group of a DeviceMesh as ``mesh_`` and the name of its axis
#: (`DeviceMesh._init_process_groups` in torch/distributed/device_mesh.py).
_DEVICE_MESH_PREFIX: Final = "mesh_"


@dataclass
class _GroupFamily:
    """Disjoint groups that share one name. ``by_steps``: new_group steps create them."""

    name: str
    groups: list[RankGroup]
    by_steps: bool = False
    axes: tuple[str, ...] = ()

    @property
    def ranks(self) -> set[int]:
        return {rank for group in self.groups for rank in group.ranks}


@dataclass
class GroupNames:
    """The names of all groups.

    ``family_of``: the family of each group, by its id; the world is family 0. ``mesh``: the axes,
    the outermost first. ``declared``: name -> its declaration in `groups:`.
    """

    program: Program
    mesh: dict[str, int]
    families: list[_GroupFamily] = field(default_factory=list)
    family_of: dict[int, int] = field(default_factory=dict)
    declared: dict[str, object] = field(default_factory=dict)
    _ids_of_steps: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)
    _device_mesh_groups: set[tuple[str, tuple[int, ...]]] = field(default_factory=set)

    def name(self, group: int) -> str | tuple[str, ...] | None:
        """The name of a group: a name, or several axes; None for the world."""
        if group == 0:
            return None
        family = self.families[self.family_of[group]]
        if family.axes:
            return family.axes if len(family.axes) > 1 else family.axes[0]
        return family.name

    def name_in_step(self, rank: int, ranks: Iterable[int], original: str) -> str:
        """What a new_group step of a rank calls the group.

        For a member it is the name of the family, by which the rank uses the group later.
        """
        members = tuple(sorted(ranks))
        group = self._ids_of_steps.get((original, members))
        if group is None:
            families = [family.name for family in self.families]
            return identifier(original, (*self.mesh, *self.declared, *families))
        family = self.families[self.family_of[group]]
        if rank in members or len(family.groups) == 1:
            return family.name
        return f"{family.name}_other"

    def is_axis(self, call: CodeCall) -> bool:
        """Whether a new_group call creates a group of a DeviceMesh that an axis of the mesh is."""
        name, ranks = _step_key(call)
        return (name, ranks) in self._device_mesh_groups

    def ranks_in_group(self, family: int) -> dict[int, tuple[int, ...]]:
        """rank -> the ranks of its group of a family."""
        return {rank: group.ranks for group in self.families[family].groups for rank in group.ranks}


def name_groups(program: Program, mesh: Mapping[str, int]) -> GroupNames:
    """Name the groups that the calls of a program use, in families where that is possible."""
    names = GroupNames(program, dict(mesh))
    names.families.append(_GroupFamily("world", [program.groups[0]]))
    names.family_of[0] = 0
    callers = _callers_by_group(program)
    created = _groups_created_by_steps(program, callers)
    names._device_mesh_groups = _device_mesh_groups(program, mesh)
    created -= {
        group.id
        for group in program.groups
        if (group.name, group.ranks) in names._device_mesh_groups
    }
    taken = {"world", *mesh}
    for group in program.groups[1:]:
        if group.id not in callers:
            names.family_of[group.id] = 0
            continue
        only_members_call = callers[group.id] <= set(group.ranks)
        _add_to_family(names, group, group.id in created, only_members_call, taken)
    # Over a copy: a family that no declaration fits is split, which appends families.
    for family in names.families[1:]:
        if family.by_steps:
            for group in family.groups:
                names._ids_of_steps[group.name, group.ranks] = group.id
        else:
            _declare_family(names, family)
    return names


def _device_mesh_groups(
    program: Program, mesh: Mapping[str, int]
) -> set[tuple[str, tuple[int, ...]]]:
    """Name and ranks of the groups of a DeviceMesh that are axes of the mesh.

    A scenario with this mesh has them without a step, if every rank creates all of them in the same
    order, and before all communication, as init_device_mesh does.
    """
    found: set[tuple[str, tuple[int, ...]]] = set()
    for group in program.groups[1:]:
        family = _GroupFamily(group.name, [group])
        is_named = group.name.startswith(_DEVICE_MESH_PREFIX)
        if is_named and _mesh_axes(mesh, program.world_size, family):
            found.add((group.name, group.ranks))
    if not found:
        return set()
    orders = {_first_steps(program, rank) for rank in range(program.world_size)}
    is_created_first = len(orders) == 1 and found <= set(next(iter(orders)))
    return found if is_created_first else set()


def _first_steps(program: Program, rank: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """The groups that a rank creates before its first call on a group, in order."""
    created = []
    for call in program.code(rank).calls:
        if call.op == "new_group":
            created.append(_step_key(call))
        elif OPERATIONS[call.op].kind not in ("local", "group"):
            break
    return tuple(created)


def _has_own_options(group: RankGroup) -> bool:
    return group.backend is not None or group.timeout_ns is not None


def _callers_by_group(program: Program) -> dict[int, set[int]]:
    """The ranks that make calls on each group; groups without calls are missing."""
    callers: dict[int, set[int]] = defaultdict(set)
    for rank in range(program.world_size):
        code = program.code(rank)
        for call in code.distinct_calls():
            if call.group >= 0:
                group = code.groups[call.group]
                group_id = group if isinstance(group, int) else group.flat[0]
                callers[int(group_id)].add(rank)
    return callers


def _groups_created_by_steps(program: Program, callers: Mapping[int, set[int]]) -> set[int]:
    """The groups that are created by new_group steps.

    A group counts only if exactly one step of any rank, and no other group, has its name and ranks:
    otherwise it is unclear which step creates which group.
    """
    steps: dict[tuple[str, tuple[int, ...]], int] = defaultdict(int)
    for rank in range(program.world_size):
        new_groups = [call for call in program.code(rank).calls if call.op == "new_group"]
        for key, count in Counter(map(_step_key, new_groups)).items():
            steps[key] = max(steps[key], count)
    namesakes = Counter((group.name, group.ranks) for group in program.groups[1:])
    return {
        group.id
        for group in program.groups[1:]
        if group.id in callers
        and steps.get((group.name, group.ranks)) == namesakes[group.name, group.ranks] == 1
    }


def _step_key(call: CodeCall) -> tuple[str, tuple[int, ...]]:
    name, ranks = call.fields.get("name"), call.fields.get("ranks")
    return str(name or ""), tuple(sorted(ranks or ()))


def _add_to_family(
    names: GroupNames, group: RankGroup, by_steps: bool, only_members_call: bool, taken: set[str]
) -> None:
    """Add a group to the last family if it fits there, or start a new one."""
    last = names.families[-1]
    can_join = only_members_call and len(names.families) > 1 and last.by_steps == by_steps
    if not (can_join and _fits_family(group, last)):
        name = identifier(_base_name(group), taken)
        taken |= {name, f"{name}_other"}
        names.families.append(_GroupFamily(name, [], by_steps))
    names.families[-1].groups.append(group)
    names.family_of[group.id] = len(names.families) - 1


def _base_name(group: RankGroup) -> str:
    """The name without an index, and of a DeviceMesh's group that of its axis: `dp` for `dp[3]`."""
    return group.name.partition("[")[0].removeprefix(_DEVICE_MESH_PREFIX)


def _fits_family(group: RankGroup, family: _GroupFamily) -> bool:
    """Equal size, disjoint, without options; an indexed name must have the same base."""
    first = family.groups[0]
    if _has_own_options(group) or _has_own_options(first):
        return False
    if len(first.ranks) != len(group.ranks) or family.ranks & set(group.ranks):
        return False
    return "[" not in group.name or _base_name(first) == _base_name(group)


def _declare_family(names: GroupNames, family: _GroupFamily) -> None:
    """Find the axes of a family, or declare it in `groups:` by a condition or by ranks.

    A family that no declaration fits is split into its groups.
    """
    world_size = names.program.world_size
    family.axes = _mesh_axes(names.mesh, world_size, family)
    if family.axes:
        return
    first = family.groups[0]
    if len(family.groups) == 1:
        options = _group_options(first)
        ranks = list(first.ranks)
        names.declared[family.name] = {"ranks": ranks, **options} if options else ranks
        return
    expression = _by_expression(names.mesh, world_size, family)
    if expression is not None:
        names.declared[family.name] = {"by": expression}
        return
    for number, group in enumerate(family.groups[1:], 1):
        name = f"{family.name}_{number}"
        names.families.append(_GroupFamily(name, [group]))
        names.family_of[group.id] = len(names.families) - 1
        names.declared[name] = list(group.ranks)
    del family.groups[1:]
    names.declared[family.name] = list(first.ranks)


def _group_options(group: RankGroup) -> dict[str, object]:
    options = {"backend": group.backend, "timeout": _timeout(group)}
    return {key: value for key, value in options.items() if value}


def _timeout(group: RankGroup) -> str | None:
    from distsim.common.units import duration_text

    return None if group.timeout_ns is None else duration_text(group.timeout_ns)


def _mesh_axes(mesh: Mapping[str, int], size: int, family: _GroupFamily) -> tuple[str, ...]:
    """The axes along which the groups extend, or () if they are no sub-mesh.

    The name of the groups says which axes are meant: `dp-cp` for two.
    """
    first = family.groups[0]
    axes = tuple(_base_name(first).split("-"))
    if not mesh or not set(axes) <= set(mesh) or _has_own_options(first):
        return ()
    # The ranks of a sub-mesh have the same coordinates along all other axes.
    coordinates = RankVariables.of(size, mesh).axes
    key = np.zeros(size, dtype=np.int64)
    for axis in mesh:
        if axis not in axes:
            key = key * mesh[axis] + coordinates[axis]
    sub_meshes = {tuple(np.flatnonzero(key == value).tolist()) for value in np.unique(key).tolist()}
    return axes if all(group.ranks in sub_meshes for group in family.groups) else ()


def _by_expression(mesh: Mapping[str, int], size: int, family: _GroupFamily) -> str | None:
    """An expression that has another value on each group; None if none is found."""
    if family.ranks != set(range(size)):
        return None
    groups = sorted(family.groups, key=lambda group: group.ranks)
    for label in (_label_by_number, _label_by_first_rank):
        values = np.zeros(size, dtype=np.int64)
        for number, group in enumerate(groups):
            values[list(group.ranks)] = label(number, group)
        expression = fit_expression(values, np.arange(size), RankVariables.of(size, mesh))
        if isinstance(expression, str):
            return expression
    return None


def _label_by_number(number: int, group: RankGroup) -> int:
    return number


def _label_by_first_rank(number: int, group: RankGroup) -> int:
    return min(group.ranks)


def identifier(text: str, taken: Iterable[str]) -> str:
    """A valid name for a scenario, similar to the text, that is not taken."""
    base = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "group"
    if base[0].isdigit():
        base = f"group_{base}"
    if base in RESERVED_NAMES or keyword.iskeyword(base):
        base = f"{base}_group"
    taken = set(taken)
    name, number = base, 1
    while name in taken:
        number += 1
        name = f"{base}_{number}"
    return name


def infer_mesh(program: Program) -> dict[str, int]:
    """A mesh whose axes are the groups; empty if there is none.

    Strides and sizes of the groups must nest, as those of a DeviceMesh do.
    """
    if len(program.groups) < 3:
        return {}
    names: dict[tuple[int, int], str] = {}  # by (stride, size)
    for group in program.groups[1:]:
        strides = set(np.diff(group.ranks).tolist())
        if len(strides) == 1 and 1 < group.size < program.world_size:
            names.setdefault((strides.pop(), group.size), _base_name(group))
    expected_stride = 1
    axes: list[tuple[str, int]] = []  # the innermost first
    for (stride, size), name in sorted(names.items()):
        if stride != expected_stride:
            return {}
        axis = name if name.isidentifier() else f"axis_{len(axes)}"
        axes.append((identifier(axis, [taken for taken, _ in axes]), size))
        expected_stride *= size
    return dict(reversed(axes)) if expected_stride == program.world_size else {}
