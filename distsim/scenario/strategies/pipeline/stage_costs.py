"""The costs of a pipeline's stages: the field type, and the arithmetic of split backward passes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, NamedTuple

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from distsim.common import units
from distsim.scenario.strategies.base import CostOrEntries
from distsim.scenario.strategies.field_types import (
    COST_OR_ENTRIES_SCHEMA,
    parse_cost_or_entries,
    parse_keyed,
)

#: Stage -> cost; `else` stands for all stages that are not named.
StageCosts = dict[int | str, CostOrEntries]


def _parse_stage_costs(value: object, info: ValidationInfo) -> StageCosts:
    """`5 ms`, `{flops, bytes}`, a list of entries, or one of these per stage.

    Per stage: `{0: 1 ms, else: 5 ms}`.
    """
    if _is_by_stage(value):
        assert isinstance(value, Mapping)
        return parse_keyed(
            value, lambda item: parse_cost_or_entries(item, info), "a stage or `else` as the key"
        )
    return {"else": parse_cost_or_entries(value, info)}


def _is_by_stage(value: object) -> bool:
    if not isinstance(value, Mapping):
        return False
    return any(key == "else" or isinstance(key, int) for key in value)


_STAGE_COSTS_SCHEMA = {
    "anyOf": [
        COST_OR_ENTRIES_SCHEMA,
        {
            "type": "object",
            "propertyNames": {"pattern": "^([0-9]+|else)$"},
            "additionalProperties": COST_OR_ENTRIES_SCHEMA,
        },
    ]
}
StageCostsField = Annotated[
    StageCosts, PlainValidator(_parse_stage_costs), WithJsonSchema(_STAGE_COSTS_SCHEMA)
]


def cost_of_stage(costs: StageCosts, stage: int) -> CostOrEntries:
    """The cost of one stage: its own, or that of all stages without their own (`else`)."""
    return costs[stage] if stage in costs else costs["else"]


class HalfCosts(NamedTuple):
    """The costs of the two halves of a backward pass: the input's gradient, the weights'."""

    input: CostOrEntries
    weight: CostOrEntries


def half_costs(cost: CostOrEntries) -> HalfCosts | None:
    """A time in two halves; None if the cost is not a time."""
    if not isinstance(cost, Mapping) or "time" not in cost:
        return None
    whole = units.parse_duration_ns(cost["time"])
    first = whole // 2
    return HalfCosts(
        {**cost, "time": units.duration_text(first)},
        {**cost, "time": units.duration_text(whole - first)},
    )
