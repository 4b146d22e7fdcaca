"""A scenario as a file again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

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
from distsim.scenario.format.source.document import dump_yaml

if TYPE_CHECKING:
    from distsim.scenario.model import Scenario


def to_yaml(scenario: Scenario, flat: bool = False) -> str:
    """A text that reads as an equal scenario; keys that were never given are left out.

    ``flat``: blocks for all ranks are written as their entries, which lowers to the same calls.
    """
    return dump_yaml(to_data(scenario, flat))


def to_data(scenario: Scenario, flat: bool = False) -> dict[str, object]:
    """The same as plain data: what stands in the file, key by key."""
    data: dict[str, object] = {"name": scenario.name}
    if scenario.about:
        data["about"] = scenario.about
    data["world"] = scenario.world.size if scenario.world.nodes == 1 else scenario.world.plain()
    data["backend"] = scenario.backend
    if scenario.cluster is not None:
        data["cluster"] = scenario.cluster
    data |= {
        key: value
        for key in ("mesh", "vars", "groups", "tensors")
        if (value := _mapping_data(getattr(scenario, key)))
    }
    if scenario.memory:
        data["memory"] = {
            name: _data_with_own_selector(part) for name, part in scenario.memory.items()
        }
    program = [entry_data(entry) for entry in scenario.program]
    data["program"] = _without_unselective_blocks(program) if flat else program
    if scenario.iterations != 1:
        data["iterations"] = scenario.iterations
    data |= {
        key: value for key in ("options", "launch") if (value := getattr(scenario, key).plain())
    }
    if scenario.faults:
        data["faults"] = [_data_with_own_selector(fault) for fault in scenario.faults]
    data |= {key: value for key in ("seed", "jitter") if (value := getattr(scenario, key))}
    if scenario.sweep is not None:
        data["sweep"] = scenario.sweep.plain()
    if scenario.expect is not None:
        data["expect"] = scenario.expect.plain()
    return data


def _without_unselective_blocks(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for entry in entries:
        inner = _without_unselective_blocks(entry["steps"]) if "steps" in entry else []
        if "repeat" in entry:
            found.append(
                {
                    **entry,
                    "repeat": {
                        **entry["repeat"],
                        "steps": _without_unselective_blocks(entry["repeat"]["steps"]),
                    },
                }
            )
        elif "steps" in entry and "ranks" not in entry:
            found += inner
        else:
            found.append({**entry, "steps": inner} if "steps" in entry else entry)
    return found


def _mapping_data(values: Mapping[str, object]) -> dict[str, object]:
    return {name: _value_data(value) for name, value in values.items()}


def _value_data(value: object) -> object:
    if isinstance(value, GroupDecl) and value.model_fields_set == {"ranks"}:
        return list(value.ranks or ())
    return value.plain() if isinstance(value, FormatModel) else to_plain_data(value)


def _data_with_own_selector(part: Any) -> dict[str, Any]:
    """A fault or a memory: its keys, with the selector as the file has it."""
    data: dict[str, Any] = part.plain()
    if part.ranks is not None:
        data["ranks"] = _selector_data(part.ranks)
    return data


def entry_data(entry: Entry) -> dict[str, object]:
    """One entry as a mapping of the file."""
    if isinstance(entry, ScenarioBlock):
        return _with_selector(
            entry.ranks, {"steps": [entry_data(e) for e in entry.steps]}, first=True
        )
    if isinstance(entry, ScenarioRepeat):
        body: dict[str, object] = {"times": to_plain_data(entry.times)}
        if entry.index is not None:
            body["index"] = entry.index
        body["steps"] = [entry_data(e) for e in entry.steps]
        return _with_selector(entry.ranks, {"repeat": body})
    return _with_selector(entry.ranks, {type(entry.op).op: _step_fields(entry)})


def _step_fields(step: ScenarioStep) -> dict[str, object]:
    op = step.op
    fields = op.model_dump(by_alias=True, exclude_unset=True, exclude={"ops"})
    if type(op).kind == "batch":
        fields = {"ops": [entry_data(part) for part in getattr(op, "ops")], **fields}  # noqa: B009 - a field of that row alone
    return fields


def _with_selector(
    ranks: Selector, data: dict[str, object], first: bool = False
) -> dict[str, object]:
    if ranks is None:
        return data
    selector = {"ranks": _selector_data(ranks)}
    return {**selector, **data} if first else {**data, **selector}


def _selector_data(ranks: Selector) -> object:
    """A single rank as an integer, several as a list, a condition as its text."""
    if isinstance(ranks, Expression):
        return ranks.source
    return ranks[0] if ranks is not None and len(ranks) == 1 else list(ranks or ())


__all__ = ["entry_data", "to_data", "to_yaml"]
