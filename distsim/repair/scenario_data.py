"""Access to the calls in the data of a scenario (parsed YAML): paths, arguments, replacement."""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from typing import Any, Final

from distsim.common.expressions import ExpressionError, parse_expression
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.repair.expression_text import conjuncts

ScenarioData = dict[str, Any]
DataPath = tuple[str | int, ...]

_NAME: Final = re.compile(r"[^\W\d]\w*")
#: Calls that expand into several collectives, and the field that their short form sets.
_OBJECT_COLLECTIVES: Final = {
    "all_gather_object": "object",
    "broadcast_object_list": "objects",
    "gather_object": "object",
    "scatter_object_list": "objects",
}
#: The fields of calls that name tensors.
_TENSOR_FIELDS: Final = ("tensor", "tensors", "input", "inputs", "output", "outputs")


def step_paths(data: ScenarioData) -> list[DataPath]:
    """The path of every entry of the program, at any depth."""
    found: list[DataPath] = []

    def walk(entries: object, path: DataPath) -> None:
        if not isinstance(entries, list):
            return
        for k, entry in enumerate(entries):
            here = (*path, k)
            found.append(here)
            if isinstance(entry, dict):
                walk(entry.get("steps"), (*here, "steps"))
                if isinstance(entry.get("repeat"), dict):
                    walk(entry["repeat"].get("steps"), (*here, "repeat", "steps"))

    walk(data.get("program"), ("program",))
    return found


def times_of(entry: object) -> object:
    """How often a `repeat` entry runs its steps; None for any other entry."""
    repeat = entry.get("repeat") if isinstance(entry, dict) else None
    return repeat.get("times") if isinstance(repeat, dict) else None


def value_at(data: Any, path: DataPath) -> Any:
    """The value at a path of keys and indices."""
    for part in path:
        data = data[part]
    return data


def op_of(entry: object) -> str:
    """The operation of a step; empty for blocks, loops and everything else that is not a call."""
    if isinstance(entry, str):
        return entry if entry in OPERATIONS else ""
    if not isinstance(entry, dict):
        return ""
    return next((key for key in entry if key in OPERATIONS), "")


def is_block(entry: object) -> bool:
    """Whether an entry is a block or a loop, with steps of its own."""
    return isinstance(entry, dict) and ("steps" in entry or "repeat" in entry)


def object_collective_of(entry: object) -> str:
    """The object collective, such as `gather_object`, that a step calls; empty for others."""
    if not isinstance(entry, dict):
        return ""
    return next((key for key in entry if key in _OBJECT_COLLECTIVES), "")


def call_name(entry: object) -> str:
    """The operation or the object collective that a step calls; empty for everything else."""
    return op_of(entry) or object_collective_of(entry)


def is_collective(entry: object) -> bool:
    """Whether a step calls a collective, an object collective included."""
    op = op_of(entry)
    return OPERATIONS[op].kind == "collective" if op else bool(object_collective_of(entry))


def fields_of(entry: Any) -> ScenarioData:
    """A step's arguments; the short form (`op: value`) sets the operation's first field."""
    name = call_name(entry)
    given = entry.get(name) if isinstance(entry, dict) else None
    if isinstance(given, dict):
        return dict(given)
    if given is None:
        return {}
    first = _OBJECT_COLLECTIVES.get(name) or OPERATIONS[name].first_field
    return {} if first is None else {str(first): given}


def tensor_names(entry: Any) -> set[str]:
    """The tensors that a communication call names, without the numbers of their copies."""
    fields = fields_of(entry)
    named: set[str] = set()
    for key in _TENSOR_FIELDS:
        value = fields.get(key)
        for item in value if isinstance(value, list) else [value]:
            if isinstance(item, str):
                named.add(item.partition("@")[0])
    return named


class RankSelector(str):
    """A selector that is an expression, such as `rank > 0`, and the ranks that it selects."""

    ranks: tuple[int, ...]

    def __new__(cls, text: str, ranks: tuple[int, ...]) -> RankSelector:
        selector = super().__new__(cls, text)
        selector.ranks = ranks
        return selector

    def __deepcopy__(self, memo: dict[int, object]) -> RankSelector:
        return self


def with_selected_ranks(data: ScenarioData, program: Program) -> ScenarioData:
    """The data, in which each selector that depends on the rank alone knows its ranks."""
    found = copy.deepcopy(data)
    for path in step_paths(found):
        selector = ranks_of(value_at(found, path))
        if isinstance(selector, str):
            values = value_by_rank(program, selector)
            if len(values) == program.world_size:
                ranks = tuple(rank for rank, value in enumerate(values) if value)
                value_at(found, path)["ranks"] = RankSelector(selector, ranks)
    return found


def plain_data(data: ScenarioData) -> ScenarioData:
    """The data as plain dictionaries, lists and texts.

    Every proposal copies the data, and copying YAML nodes would be slow.
    """

    def plain(value: object) -> object:
        if isinstance(value, dict):
            return {key: plain(item) for key, item in value.items()}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return str(value) if isinstance(value, str) else value

    return {str(key): plain(value) for key, value in data.items()}


def selected_ranks(selector: object) -> list[int] | None:
    """The ranks of a selector; None if it is absent or depends on more than the rank."""
    if isinstance(selector, RankSelector):
        return list(selector.ranks)
    if isinstance(selector, int) and not isinstance(selector, bool):
        return [selector]
    if isinstance(selector, list) and all(isinstance(rank, int) for rank in selector):
        return list(selector)
    return None


def declared_tensor(data: ScenarioData, name: object) -> ScenarioData | None:
    """The declaration of a tensor; None for an inline tensor, a copy and an unknown name."""
    declared = data.get("tensors") or {}
    tensor = declared.get(name) if isinstance(name, str) else None
    return tensor if isinstance(tensor, dict) else None


def group_members(data: ScenarioData, group: object) -> object:
    """The members of a declared group; None for an axis, a list of axes and an unknown name."""
    declared = data.get("groups") or {}
    found = declared.get(group) if isinstance(group, str) else None
    return found.get("ranks") if isinstance(found, dict) else found


def names_in(text: str) -> set[str]:
    """The names in an expression or a reference, such as `x` and `i` in `x@i`."""
    return set(_NAME.findall(text))


def ranks_of(entry: object) -> object:
    """The `ranks:` selector of a program entry; None if it has none."""
    return entry.get("ranks") if isinstance(entry, dict) else None


def make_step(op: str, fields: ScenarioData, ranks: Any) -> ScenarioData:
    """A program entry with one call, with a selector unless ``ranks`` is None."""
    return {op: fields} if ranks is None else {op: fields, "ranks": ranks}


def with_steps_replaced(data: ScenarioData, path: DataPath, entries: list[Any]) -> ScenarioData:
    """The data with these entries in place of one; blocks that become empty are removed."""
    found = copy.deepcopy(data)
    within = value_at(found, path[:-1])
    within[path[-1] : int(path[-1]) + 1] = entries
    if not within and len(path) > 2:
        block = path[:-2] if path[-2] == "steps" and path[-3] != "repeat" else path[:-3]
        return with_steps_replaced(found, block, [])
    return found


def parenthesised_line(lines: Mapping[DataPath, int], path: DataPath) -> str:
    """` (line 7)` for the words of a proposal; empty if the line is not known."""
    line = lines.get(path, 0)
    return f" (line {line})" if line else ""


def values_as_words(keys: list[str], fields: ScenarioData) -> str:
    """What to do to get the values of ``fields``: `set tag to 5 and group to pp`, `remove tag`."""
    given = [f"{key} to {_value_as_yaml(fields[key])}" for key in keys if key in fields]
    absent = [key for key in keys if key not in fields]
    parts = [f"set {' and '.join(given)}"] if given else []
    if absent:
        parts.append(f"remove {' and '.join(absent)}")
    return " and ".join(parts)


def _value_as_yaml(value: object) -> str:
    """A value as a scenario file contains it, for example `{shape: [4], dtype: int32}`."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {_value_as_yaml(part)}' for key, part in value.items())}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value_as_yaml, value))}]"
    return str(value)


def paths_by_list(paths: list[DataPath]) -> dict[DataPath, list[DataPath]]:
    """The paths, grouped by the list that contains them."""
    found: dict[DataPath, list[DataPath]] = {}
    for path in paths:
        found.setdefault(path[:-1], []).append(path)
    return found


def batch_part_paths(data: ScenarioData, paths: list[DataPath]) -> list[DataPath]:
    """The messages of every batch."""
    found: list[DataPath] = []
    for path in paths:
        entry = value_at(data, path)
        if op_of(entry) != "batch_isend_irecv":
            continue
        ops = fields_of(entry).get("ops")
        if isinstance(ops, list):
            found += [(*path, "batch_isend_irecv", "ops", k) for k in range(len(ops))]
    return found


def owner_ranks(data: ScenarioData, path: DataPath) -> tuple[int, ...]:
    """The ranks of an entry and of the blocks around it; empty if no selector has known ranks."""
    owners: list[int] | None = None
    for end in range(2, len(path) + 1):
        chosen = None
        if isinstance(path[end - 1], int):
            chosen = selected_ranks(ranks_of(value_at(data, path[:end])))
        if chosen is not None:
            owners = chosen if owners is None else [rank for rank in owners if rank in chosen]
    return tuple(owners or ())


def calling_ranks(data: ScenarioData, program: Program, path: DataPath) -> list[int] | None:
    """The ranks that make a call in some iteration at least; None if this is not known."""
    callers = list(program.present)
    for end in range(2, len(path) + 1):
        chosen = ranks_of(value_at(data, path[:end])) if isinstance(path[end - 1], int) else None
        if isinstance(chosen, int):
            chosen = [chosen]
        for condition in conjuncts(chosen) if isinstance(chosen, str) else ():
            if not depends_on_rank(program, condition):
                continue
            values = value_by_rank(program, condition)
            if len(values) != len(program.present):
                return None
            selected = dict(zip(program.present, values, strict=True))
            callers = [rank for rank in callers if selected[rank]]
        if isinstance(chosen, list):
            callers = [rank for rank in callers if rank in chosen]
    return callers


def value_by_rank(program: Program, value: object) -> list[int]:
    """The value on each rank of an expression, or of a mapping from ranks to expressions.

    Empty if it depends on more than the rank.
    """
    if isinstance(value, dict):
        by_rank = [value.get(rank, value.get("else")) for rank in program.present]
    else:
        by_rank = [value for _ in program.present]
    try:
        expressions = map(parse_expression, by_rank)
        names = map(program.names_of, program.present)
        found = [expr.evaluate(known) for expr, known in zip(expressions, names, strict=True)]
        return [int(number) for number in found]
    except (ExpressionError, TypeError, ValueError):
        return []


def condition_for_all_ranks(program: Program, ranks: object) -> str:
    """The parts of a condition that do not depend on the rank, such as one on the iteration."""
    if not isinstance(ranks, str) or " or " in ranks or "(" in ranks:
        return ""
    parts = [part.strip() for part in ranks.split(" and ")]
    return " and ".join(part for part in parts if not depends_on_rank(program, part))


def depends_on_rank(program: Program, condition: str) -> bool:
    """Whether a condition names something whose value differs by rank."""
    for name in names_in(condition):
        values = [program.names_of(rank).get(name) for rank in program.present]
        if any(value != values[0] for value in values):
            return True
    return False


def step_list_of_rank(data: ScenarioData, rank: int) -> DataPath | None:
    """The list of steps that one rank alone has; the longest, if there are several."""
    return step_list_of_ranks(data, [rank])


def step_list_of_ranks(data: ScenarioData, ranks: list[int]) -> DataPath | None:
    """The list of steps that exactly these ranks have; the longest, if there are several."""
    lists: list[DataPath] = []
    for path in step_paths(data):
        entry = value_at(data, path)
        owners = selected_ranks(ranks_of(entry))
        if owners == ranks and isinstance(entry.get("steps"), list):
            lists.append((*path, "steps"))
    return max(lists, key=lambda path: len(value_at(data, path)), default=None)
