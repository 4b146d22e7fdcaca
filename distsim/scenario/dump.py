"""A scenario as a file again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from distsim.expr import Expression
from distsim.ops.fields import plain
from distsim.scenario.document import write
from distsim.scenario.entries import Block, Entry, Repeat, Selector, Step
from distsim.scenario.part import Part
from distsim.scenario.parts import GroupDecl

if TYPE_CHECKING:
    from distsim.scenario.model import Scenario


def to_yaml(scenario: Scenario, flat: bool = False) -> str:
    """A text that reads as an equal scenario; keys that were never given are left out.

    ``flat``: blocks for all ranks are written as their entries, which lowers to the same calls.
    """
    return write(to_data(scenario, flat))


def to_data(scenario: Scenario, flat: bool = False) -> dict[str, object]:
    """The same as plain data: what stands in the file, key by key."""
    data: dict[str, object] = {"name": scenario.name}
    if scenario.about:
        data["about"] = scenario.about
    data["world"] = scenario.world.size if scenario.world.nodes == 1 else scenario.world.plain()
    data["backend"] = scenario.backend
    if scenario.cluster is not None:
        data["cluster"] = scenario.cluster
    data |= {key: value for key in ("mesh", "vars", "groups", "tensors") if (value := _named(getattr(scenario, key)))}
    if scenario.memory:
        data["memory"] = {name: _chooses(part) for name, part in scenario.memory.items()}
    program = [entry_data(entry) for entry in scenario.program]
    data["program"] = _flat(program) if flat else program
    if scenario.iterations != 1:
        data["iterations"] = scenario.iterations
    data |= {key: value for key in ("options", "launch") if (value := getattr(scenario, key).plain())}
    if scenario.faults:
        data["faults"] = [_chooses(fault) for fault in scenario.faults]
    data |= {key: value for key in ("seed", "jitter") if (value := getattr(scenario, key))}
    if scenario.sweep is not None:
        data["sweep"] = scenario.sweep.plain()
    if scenario.expect is not None:
        data["expect"] = scenario.expect.plain()
    return data


def _flat(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for entry in entries:
        inner = _flat(entry["steps"]) if "steps" in entry else []
        if "repeat" in entry:
            found.append({**entry, "repeat": {**entry["repeat"], "steps": _flat(entry["repeat"]["steps"])}})
        elif "steps" in entry and "ranks" not in entry:
            found += inner
        else:
            found.append({**entry, "steps": inner} if "steps" in entry else entry)
    return found


def _named(values: Mapping[str, object]) -> dict[str, object]:
    return {name: _one(value) for name, value in values.items()}


def _one(value: object) -> object:
    if isinstance(value, GroupDecl) and value.model_fields_set == {"ranks"}:
        return list(value.ranks or ())
    return value.plain() if isinstance(value, Part) else plain(value)


def _chooses(part: Any) -> dict[str, Any]:
    """A fault or a memory: its keys, with the selector as the file has it."""
    data: dict[str, Any] = part.plain()
    if part.ranks is not None:
        data["ranks"] = _selector(part.ranks)
    return data


def entry_data(entry: Entry) -> dict[str, object]:
    """One entry as a mapping of the file."""
    if isinstance(entry, Block):
        return _chosen(entry.ranks, {"steps": [entry_data(e) for e in entry.steps]}, first=True)
    if isinstance(entry, Repeat):
        body: dict[str, object] = {"times": plain(entry.times)}
        if entry.index is not None:
            body["index"] = entry.index
        body["steps"] = [entry_data(e) for e in entry.steps]
        return _chosen(entry.ranks, {"repeat": body})
    return _chosen(entry.ranks, {type(entry.op).op: _fields(entry)})


def _fields(step: Step) -> dict[str, object]:
    op = step.op
    fields = op.model_dump(by_alias=True, exclude_unset=True, exclude={"ops"})
    if type(op).kind == "batch":
        fields = {"ops": [entry_data(part) for part in getattr(op, "ops")], **fields}  # noqa: B009 - a field of that row alone
    return fields


def _chosen(ranks: Selector, data: dict[str, object], first: bool = False) -> dict[str, object]:
    if ranks is None:
        return data
    selector = {"ranks": _selector(ranks)}
    return {**selector, **data} if first else {**data, **selector}


def _selector(ranks: Selector) -> object:
    """A single rank as an integer, several as a list, a condition as its text."""
    if isinstance(ranks, Expression):
        return ranks.source
    return ranks[0] if ranks is not None and len(ranks) == 1 else list(ranks or ())


__all__ = ["entry_data", "to_data", "to_yaml"]
