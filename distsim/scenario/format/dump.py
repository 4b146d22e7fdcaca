"""The fields of a scenario as a file again: the inverse of reading.

Takes the fields rather than the `Scenario`, which offers this as `Scenario.to_yaml`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.common.expressions import Expression
from distsim.operations.core.field_types import to_plain_data
from distsim.scenario.format.models.base_model import FormatModel
from distsim.scenario.format.models.entries import (
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
    Selector,
)
from distsim.scenario.format.models.sections import GroupDecl
from distsim.scenario.format.source.yaml_nodes import dump_yaml


def to_yaml(fields: Mapping[str, Any], flat: bool = False) -> str:
    """A text that reads as an equal scenario; keys that were never given are omitted.

    ``fields``: those of the scenario (`dict(scenario)`). ``flat``: blocks for all ranks are written
    as their entries, which lower to the same calls.
    """
    return dump_yaml(to_data(fields, flat))


def to_data(  # noqa: PLR0912  (one branch per optional key of a file, in the file's order)
    fields: Mapping[str, Any], flat: bool = False
) -> dict[str, object]:
    """The same as plain data: the content of the file, key by key."""
    data: dict[str, object] = {"name": fields["name"]}
    if fields["about"]:
        data["about"] = fields["about"]
    world = fields["world"]
    data["world"] = world.size if world.nodes == 1 else world.plain()
    data["backend"] = fields["backend"]
    if fields["cluster"] is not None:
        data["cluster"] = fields["cluster"]
    for key in ("mesh", "vars", "groups", "tensors"):
        if fields[key]:
            data[key] = _mapping_data(fields[key])
    if fields["memory"]:
        data["memory"] = {
            name: _data_with_own_selector(memory) for name, memory in fields["memory"].items()
        }
    program = [entry_data(entry) for entry in fields["program"]]
    data["program"] = _without_unselective_blocks(program) if flat else program
    if fields["iterations"] != 1:
        data["iterations"] = fields["iterations"]
    for key in ("options", "launch"):
        section = fields[key].plain()
        if section:
            data[key] = section
    if fields["faults"]:
        data["faults"] = [_data_with_own_selector(fault) for fault in fields["faults"]]
    for key in ("seed", "jitter"):
        if fields[key]:
            data[key] = fields[key]
    for key in ("sweep", "expect"):
        if fields[key] is not None:
            data[key] = fields[key].plain()
    return data


def _without_unselective_blocks(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The entries, at any depth, with blocks that have no selector replaced by their steps."""
    found: list[dict[str, Any]] = []
    for entry in entries:
        if "repeat" in entry:
            body = entry["repeat"]
            steps = _without_unselective_blocks(body["steps"])
            found.append({**entry, "repeat": {**body, "steps": steps}})
        elif "steps" in entry:
            steps = _without_unselective_blocks(entry["steps"])
            if "ranks" in entry:
                found.append({**entry, "steps": steps})
            else:
                found += steps
        else:
            found.append(entry)
    return found


def _mapping_data(values: Mapping[str, object]) -> dict[str, object]:
    return {name: _value_data(value) for name, value in values.items()}


def _value_data(value: object) -> object:
    if isinstance(value, GroupDecl) and value.model_fields_set == {"ranks"}:
        return list(value.ranks or ())
    return value.plain() if isinstance(value, FormatModel) else to_plain_data(value)


def _data_with_own_selector(section: Any) -> dict[str, Any]:
    """A fault or a memory: its keys, with the selector in the file's form."""
    data: dict[str, Any] = section.plain()
    if section.ranks is not None:
        data["ranks"] = _selector_data(section.ranks)
    return data


def entry_data(entry: Entry) -> dict[str, object]:
    """One entry as a mapping of the file; a selector comes first in a block, else last."""
    selector = {} if entry.ranks is None else {"ranks": _selector_data(entry.ranks)}
    if isinstance(entry, ScenarioBlock):
        return {**selector, "steps": [entry_data(step) for step in entry.steps]}
    if isinstance(entry, ScenarioRepeat):
        return {"repeat": _repeat_data(entry), **selector}
    return {type(entry.op).op: _step_fields(entry), **selector}


def _repeat_data(entry: ScenarioRepeat) -> dict[str, object]:
    body: dict[str, object] = {"times": to_plain_data(entry.times)}
    if entry.index is not None:
        body["index"] = entry.index
    body["steps"] = [entry_data(step) for step in entry.steps]
    return body


def _step_fields(step: ScenarioStep) -> dict[str, object]:
    op: Any = step.op
    fields: dict[str, object] = op.model_dump(by_alias=True, exclude_unset=True, exclude={"ops"})
    if type(op).kind == "batch":
        return {"ops": [entry_data(part) for part in op.ops], **fields}
    return fields


def _selector_data(ranks: Selector) -> object:
    """A single rank as an integer, several as a list, a condition as its text."""
    if isinstance(ranks, Expression):
        return ranks.source
    numbers = list(ranks or ())
    return numbers[0] if len(numbers) == 1 else numbers
