"""The `sweep:` block of a scenario."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import Field

from distsim.ops.fields import Gather
from distsim.scenario.part import Part, text_key
from distsim.scenario.scalars import Count, Names, field, wrong


def _grid(value: object) -> dict[str, tuple[object, ...]]:
    if not isinstance(value, Mapping) or not value:
        raise wrong("a mapping of keys to their values, as `{mesh.dp: [1, 2, 4]}`", value)
    gather = Gather()
    for name, values in value.items():
        gather.take(name, text_key, name)
        gather.take(name, _some, values)
    gather.done()
    return {name: tuple(values) for name, values in value.items()}


def _some(value: object) -> object:
    if not isinstance(value, list | tuple) or not value:
        raise wrong("a list of values", value)
    return value


class Sweep(Part):
    """What `distsim sweep` runs: every point of a grid."""

    grid: Annotated[
        dict[str, Any],
        *field(_grid, {"type": "object", "minProperties": 1, "additionalProperties": {"type": "array", "minItems": 1}}),
    ] = Field(default_factory=dict)
    cluster: Names = ()
    #: Points that a guided search tries; left out: all.
    budget: Count | None = None
