"""Repairs that use another name of the file: a var, a group, a peer or a copy of a tensor.

People declare names for what they mean, so a wrong name is one of the file's other names: the
unused ones first, then those of the steps nearby. Each function yields (words, changed data).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Final

from distsim.program.model import Program
from distsim.repair.declared_names import unused_names
from distsim.repair.expression_text import name_order, with_name_replaced
from distsim.repair.fix_messages import PEER_FIELD
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    call_name,
    calling_ranks,
    depends_on_rank,
    fields_of,
    group_members,
    is_collective,
    make_step,
    names_in,
    ranks_of,
    step_paths,
    times_of,
    value_at,
    value_by_rank,
    with_steps_replaced,
)

#: The field with the peer, of messages and of calls on another rank's memory.
_PEER_FIELD: Final = {
    **PEER_FIELD,
    "put_signal": "dst",
    "wait_signal": "src",
    "put": "dst",
    "get": "src",
}
#: Names that exist without a declaration. `rank` takes the place of `world_size` only, because
#: people write one for the other.
_RANK: Final = "rank"
_WORLD_SIZE: Final = "world_size"
_COPY_FIELDS: Final = ("tensor", "input", "output", "as", "handles")
_EXPRESSION_FIELDS: Final = ("src", "dst", "group_src", "group_dst", "tag")


def use_other_vars(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """An expression uses another var: a var's definition, a condition, a count or an argument."""
    unused = unused_names(data)
    names = [str(name) for name in data.get("vars") or {}]
    names.sort(key=lambda name: name not in unused)
    for other in (*names, _RANK):
        yield from _in_definitions(data, program, other, names)
        yield from _in_program(data, program, other, named)


def _in_definitions(
    data: ScenarioData, program: Program, other: str, names: list[str]
) -> Iterator[tuple[str, ScenarioData]]:
    """Other vars are defined with this var in place of one of their names."""
    variables = data.get("vars") or {}
    for name in names:
        # A var may use only those before it, so two vars that use each other are refused.
        for changed in _with_other_name(program, variables[name], other) if name != other else ():
            yield f"set the var {name} to {changed}", {**data, "vars": {**variables, name: changed}}


def _in_program(
    data: ScenarioData, program: Program, other: str, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """Conditions, counts of loops and arguments with this var in place of one of their names.

    A condition that names `rank` chooses ranks, so only a var that differs by rank,
    or that nothing uses yet, replaces it.
    """
    may_replace_rank = depends_on_rank(program, other) or other in unused_names(data)
    for path in step_paths(data):
        entry = value_at(data, path)
        for text in _with_other_name(program, ranks_of(entry), other):
            chooses_ranks = _RANK in names_in(str(ranks_of(entry)))
            if chooses_ranks and _RANK not in names_in(text) and not may_replace_rank:
                continue
            changed = copy.deepcopy(data)
            value_at(changed, path)["ranks"] = text
            name = call_name(entry)
            what = f"call {name}" if name else "run this block"
            yield f"{what} on the ranks where {text}", changed
        for text in _with_other_name(program, times_of(entry), other):
            changed = copy.deepcopy(data)
            value_at(changed, path)["repeat"]["times"] = text
            yield f"repeat {text} times instead of {times_of(entry)}", changed
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        for key in (key for key in _EXPRESSION_FIELDS if key in fields):
            for text in _with_other_name(program, fields[key], other):
                step = make_step(call_name(entry), {**fields, key: text}, ranks_of(entry))
                words = f"{call_name(entry)}: set {key} to {text}"
                yield words, with_steps_replaced(data, path, [step])


def _with_other_name(program: Program, written: object, other: str) -> list[str]:
    """The expression with another name in place of each of its names, if its values differ.

    A var takes the place of any name but `world_size`, and `rank` that of `world_size`.
    """
    if not isinstance(written, str):
        return []
    names = name_order(written)
    if other in names:
        return []
    before = value_by_rank(program, written)
    found = []
    for name in names:
        if (name == _WORLD_SIZE) != (other == _RANK):
            continue
        text = with_name_replaced(written, name, other)
        values = value_by_rank(program, text)
        # A condition that holds everywhere or nowhere is none.
        is_void = set(before) == {0, 1} and len(set(values)) == 1
        if not is_void and (not values or values != before):
            found.append(text)
    return found


def use_peers_nearby(
    data: ScenarioData, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A message gets the peer of another message in its list of steps.

    For example, a server answers the worker whose request it has received.
    """
    for path in named:
        entry = value_at(data, path)
        key = _PEER_FIELD.get(call_name(entry))
        if key is None or not isinstance(path[-1], int):
            continue
        fields = fields_of(entry)
        for peer in _peers_in(value_at(data, path[:-1])):
            if peer == str(fields.get(key)):
                continue
            step = make_step(call_name(entry), {**fields, key: peer}, ranks_of(entry))
            words = f"{call_name(entry)}: set {key} to {peer}, the peer of the other message"
            yield words, with_steps_replaced(data, path, [step])


def _peers_in(steps: list[object]) -> list[str]:
    """The peers that the messages of a list of steps name by an expression."""
    found: dict[str, None] = {}
    for entry in steps:
        key = _PEER_FIELD.get(call_name(entry))
        peer = fields_of(entry).get(key) if key else None
        if isinstance(peer, str):
            found[peer] = None
    return list(found)


def use_unused_groups(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A collective is called on a declared group that no step uses, by members of it only."""
    unused = unused_names(data)
    for path in named:
        entry = value_at(data, path)
        callers = calling_ranks(data, program, path)
        for group in data.get("groups") or {}:
            members = group_members(data, group)
            if group not in unused or not is_collective(entry) or not isinstance(members, list):
                continue
            if callers is not None and not set(callers) <= set(members):
                continue
            fields = {**fields_of(entry), "group": group}
            step = make_step(call_name(entry), fields, ranks_of(entry))
            words = f"{call_name(entry)}: set group to {group}, which no call uses yet"
            yield words, with_steps_replaced(data, path, [step])


def shift_copies(data: ScenarioData, named: list[DataPath]) -> Iterator[tuple[str, ScenarioData]]:
    """A call uses the copy of the iteration before or after, as in a double buffer."""
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        for key in _COPY_FIELDS:
            name, at, number = str(fields.get(key, "")).partition("@")
            for index in name_order(number) if at else ():
                for shifted in (f"{index} + 1", f"{index} - 1"):
                    text = f"{name}@({with_name_replaced(number, index, shifted)})"
                    step = make_step(call_name(entry), {**fields, key: text}, ranks_of(entry))
                    words = f"{call_name(entry)}: set {key} to {text}"
                    yield words, with_steps_replaced(data, path, [step])


__all__ = ["shift_copies", "use_other_vars", "use_peers_nearby", "use_unused_groups"]
