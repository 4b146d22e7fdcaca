"""Groups of a trace as a file names them: axes of the mesh, one declaration for groups that cut the
world into parts, or one each.
"""

from __future__ import annotations

import keyword
import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from distsim.operations.core.resolved_call import RankGroup
from distsim.program.model import Program
from distsim.scenario.format.models.entries import RESERVED_NAMES
from distsim.trace_replay.compact.rank_expressions import RankVariables, fit_expression


@dataclass
class _GroupFamily:
    """Groups without a common rank that one name stands for. ``made``: by new_group steps."""

    name: str
    groups: list[RankGroup]
    made: bool = False
    axes: tuple[str, ...] = ()

    @property
    def ranks(self) -> set[int]:
        return {rank for group in self.groups for rank in group.ranks}


@dataclass
class GroupNames:
    """Which name a rank has for a group. ``family_of``: by the group's number; the world is family
    0.

    ``mesh``: the axes, from the outermost in. ``declared``: name -> what `groups:` says of it.
    """

    program: Program
    mesh: dict[str, int]
    families: list[_GroupFamily] = field(default_factory=list)
    family_of: dict[int, int] = field(default_factory=dict)
    declared: dict[str, object] = field(default_factory=dict)
    _made: dict[tuple[str, tuple[int, ...]], int] = field(default_factory=dict)

    def name(self, group: int) -> str | tuple[str, ...] | None:
        """None for the world."""
        if group == 0:
            return None
        family = self.families[self.family_of[group]]
        if family.axes:
            return family.axes if len(family.axes) > 1 else family.axes[0]
        return family.name

    def name_made(self, rank: int, ranks: Iterable[int], given: str) -> str:
        """What a new_group step of a rank calls the group: the name by which that rank uses it,
        where it is in it.
        """
        members = tuple(sorted(ranks))
        number = self._made.get((given, members))
        if number is None:
            return identifier(given, (*self.mesh, *self.declared, *(f.name for f in self.families)))
        family = self.families[self.family_of[number]]
        return family.name if rank in members or len(family.groups) == 1 else f"{family.name}_other"

    def ranks_in_group(self, family: int) -> dict[int, tuple[int, ...]]:
        """rank -> the ranks of its group of a family."""
        return {rank: group.ranks for group in self.families[family].groups for rank in group.ranks}


def name_groups(program: Program, mesh: Mapping[str, int]) -> GroupNames:
    """The groups that the calls of a program use, put together where one name can stand for
    several.
    """
    found = GroupNames(program, dict(mesh))
    found.families.append(_GroupFamily("world", [program.groups[0]]))
    found.family_of[0] = 0
    callers, made = _callers_and_created(program)
    names = {"world", *mesh}
    for group in program.groups[1:]:
        if group.id not in callers:
            found.family_of[group.id] = 0
            continue
        _add_to_family(found, group, group.id in made, callers[group.id] <= set(group.ranks), names)
    for family in found.families[1:]:
        if family.made:
            for group in family.groups:
                found._made[group.name, group.ranks] = group.id
        else:
            _declare_family(found, family)
    return found


def _has_own_options(group: RankGroup) -> bool:
    return group.backend is not None or group.timeout_ns is not None


def _callers_and_created(program: Program) -> tuple[dict[int, set[int]], set[int]]:
    """Who calls on each group, and the groups that new_group steps make."""
    callers: dict[int, set[int]] = {}
    told: dict[tuple[str, tuple[int, ...]], int] = {}
    for rank in range(program.world_size):
        code = program.code(rank)
        count: dict[tuple[str, tuple[int, ...]], int] = {}
        for call in code.distinct_calls():
            if call.group >= 0:
                group = code.groups[call.group]
                callers.setdefault(
                    int(group if isinstance(group, int) else group.flat[0]), set()
                ).add(rank)
        for call in code.calls:
            if call.op == "new_group":
                key = (
                    str(call.fields.get("name") or ""),
                    tuple(sorted(call.fields.get("ranks") or ())),
                )
                count[key] = count.get(key, 0) + 1
        for key, times in count.items():
            told[key] = max(told.get(key, 0), times)
    like = Counter((group.name, group.ranks) for group in program.groups[1:])
    made = {
        g.id
        for g in program.groups[1:]
        if g.id in callers and told.get((g.name, g.ranks)) == like[g.name, g.ranks] == 1
    }
    return callers, made


def _add_to_family(
    found: GroupNames, group: RankGroup, made: bool, only_members: bool, names: set[str]
) -> None:
    """Put a group to the last family that it fits, or start one."""
    base = group.name.partition("[")[0]
    last = found.families[-1]
    fits = (
        only_members
        and len(found.families) > 1
        and last.made == made
        and len(last.groups[0].ranks) == len(group.ranks)
        and not last.ranks & set(group.ranks)
        and not _has_own_options(group)
        and not _has_own_options(last.groups[0])
        and ("[" not in group.name or last.groups[0].name.partition("[")[0] == base)
    )
    if not fits:
        name = identifier(base, names)
        names |= {name, f"{name}_other"}
        found.families.append(_GroupFamily(name, [], made))
    found.families[-1].groups.append(group)
    found.family_of[group.id] = len(found.families) - 1


def _declare_family(found: GroupNames, family: _GroupFamily) -> None:
    """Say in `groups:` what a family is: axes of the mesh, a condition, or ranks; taken apart where
    nothing fits.
    """
    size = found.program.world_size
    family.axes = _mesh_axes(found.mesh, size, family)
    if family.axes:
        return
    options = {
        key: value
        for key, value in (
            ("backend", family.groups[0].backend),
            ("timeout", _timeout(family.groups[0])),
        )
        if value
    }
    if len(family.groups) == 1:
        ranks = list(family.groups[0].ranks)
        found.declared[family.name] = {"ranks": ranks, **options} if options else ranks
        return
    by = _by_expression(found.mesh, size, family)
    if by is not None:
        found.declared[family.name] = {"by": by}
        return
    for number, group in enumerate(family.groups[1:], 1):
        name = f"{family.name}_{number}"
        found.families.append(_GroupFamily(name, [group]))
        found.family_of[group.id] = len(found.families) - 1
        found.declared[name] = list(group.ranks)
    del family.groups[1:]
    found.declared[family.name] = list(family.groups[0].ranks)


def _timeout(group: RankGroup) -> str | None:
    from distsim.common.units import duration_text

    return None if group.timeout_ns is None else duration_text(group.timeout_ns)


def _mesh_axes(mesh: Mapping[str, int], size: int, family: _GroupFamily) -> tuple[str, ...]:
    """The axes along which the groups lie; empty where they are no sub-mesh. The name of the groups
    tells which are meant.
    """
    given = tuple(family.groups[0].name.partition("[")[0].split("-"))
    if not mesh or not set(given) <= set(mesh) or _has_own_options(family.groups[0]):
        return ()
    names = RankVariables.of(size, mesh)
    key = np.zeros(size, dtype=np.int64)
    for axis in mesh:
        if axis not in given:
            key = key * mesh[axis] + names.axes[axis]
    parts = {tuple(np.flatnonzero(key == value).tolist()) for value in np.unique(key).tolist()}
    return given if {g.ranks for g in family.groups} <= parts else ()


def _by_expression(mesh: Mapping[str, int], size: int, family: _GroupFamily) -> str | None:
    """An expression that has one value on each group, and another on every other."""
    if family.ranks != set(range(size)):
        return None
    for label in (_label_by_number, _label_by_first_rank):
        values = np.zeros(size, dtype=np.int64)
        for number, group in enumerate(sorted(family.groups, key=lambda g: g.ranks)):
            values[list(group.ranks)] = label(number, group)
        text = fit_expression(values, np.arange(size), RankVariables.of(size, mesh))
        if isinstance(text, str):
            return text
    return None


def _label_by_number(number: int, group: RankGroup) -> int:
    return number


def _label_by_first_rank(number: int, group: RankGroup) -> int:
    return min(group.ranks)


def identifier(text: str, taken: Iterable[str]) -> str:
    """A name that a file may use, like the given one."""
    base = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_") or "group"
    if base[0].isdigit():
        base = f"group_{base}"
    if base in RESERVED_NAMES or keyword.iskeyword(base):
        base = f"{base}_group"
    name, number = base, 1
    while name in set(taken):
        number += 1
        name = f"{base}_{number}"
    return name


def infer_mesh(program: Program) -> dict[str, int]:
    """A mesh of which the groups are the axes; empty where they are none. Strides and sizes must
    nest, as those of a DeviceMesh do.
    """
    if len(program.groups) < 3:
        return {}
    lines: dict[tuple[int, int], str] = {}
    for group in program.groups[1:]:
        steps = set(np.diff(group.ranks).tolist())
        if len(steps) == 1 and 1 < group.size < program.world_size:
            lines.setdefault((steps.pop(), group.size), group.name.partition("[")[0])
    below, mesh = 1, list[tuple[str, int]]()
    taken: set[str] = set()
    for (stride, size), name in sorted(lines.items()):
        if stride != below:
            return {}
        mesh.append((identifier(name if name.isidentifier() else f"axis_{len(mesh)}", taken), size))
        taken.add(mesh[-1][0])
        below *= size
    return dict(reversed(mesh)) if below == program.world_size else {}
