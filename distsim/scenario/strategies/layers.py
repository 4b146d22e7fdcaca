"""The model that a strategy spreads over ranks: layers by sizes and times; what their passes cost,
and strategies for one layer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from distsim.common import units
from distsim.common.message_text import value_text
from distsim.scenario.strategies.base import (
    ComputeCost,
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    ModelLayer,
    Strategy,
)
from distsim.scenario.strategies.field_types import (
    FLOAT_DTYPE_BYTES,
    ComputeCostField,
    CostOrEntriesField,
    Dtype,
    ParamShapes,
    PositiveInt,
)

L = TypeVar("L", bound="LayerFields")


class LayerFields(BaseModel):
    """``{name, params, forward, backward, count}``: one layer, or ``count`` equal ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str = ""
    #: Elements, or a list of parameters, each a number of elements or a shape.
    params: ParamShapes
    forward: CostOrEntriesField
    backward: CostOrEntriesField
    count: PositiveInt = 1


class TrainableLayerFields(LayerFields):
    """A layer some of whose parameters may not learn: ``frozen``, beside those that do. ``dtype``:
    of its parameters.
    """

    params: ParamShapes = ()
    frozen: ParamShapes = ()
    forward: CostOrEntriesField = ()
    backward: CostOrEntriesField = ()

    @model_validator(mode="after")
    def _holds_something(self) -> TrainableLayerFields:
        given = self.model_fields_set
        missing = [key for key in ("forward", "backward") if key not in given]
        if not given & {"inner"} and not given & {"params", "frozen"}:
            raise ValueError("a layer needs `params`, or `frozen` parameters, or both")
        if missing and not given & {"inner"}:
            raise ValueError(f"a layer needs `{missing[0]}`: a time, or {{flops, bytes}}")
        return self


class LayeredModelStrategy(Strategy):
    """A strategy for a model of layers."""

    layers: tuple[LayerFields, ...]
    dtype: Dtype = "float32"

    @field_validator("layers", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        if isinstance(value, list | tuple) and not value:
            raise ValueError("expected at least one layer, found an empty list")
        if not isinstance(value, list | tuple | dict):
            raise ValueError(
                f"expected a layer, `{{params, forward, backward}}`, or a list of them, found {value_text(value)}"
            )
        return [value] if isinstance(value, dict) else value

    @property
    def model(self) -> tuple[ModelLayer, ...]:
        """The layers in the order of the forward pass, each with a name of its own."""
        return named_layers(self.layers)

    @property
    def itemsize(self) -> int:
        return FLOAT_DTYPE_BYTES[self.dtype]


def named_layers(fields: Iterable[LayerFields]) -> tuple[ModelLayer, ...]:
    """Layers laid out one by one; equal or missing names are told apart by number."""
    return tuple(
        ModelLayer(
            name,
            one.params,
            one.forward,
            one.backward,
            getattr(one, "frozen", ()),
            getattr(one, "dtype", None) or "",
        )
        for name, one in numbered_layers(fields)
    )


def numbered_layers(fields: Iterable[L], within: str = "") -> list[tuple[str, L]]:
    """Each layer with its name, `count` equal ones one by one."""
    found: list[tuple[str, L]] = []
    for one in fields:
        for k in range(one.count):
            word = one.name or "layer"
            name = (
                f"{word} {k}"
                if one.name and one.count > 1
                else word
                if one.name
                else f"layer {len(found)}"
            )
            found.append((within + name, one))
    return found


# --- one layer, alone or in a stage ---
class IntraLayerWriter(EntryWriter, ABC):
    """Entries of one layer; other strategies put them in place of a compute step."""

    @abstractmethod
    def forward(self, price: ComputeCost) -> list[Entry]: ...

    @abstractmethod
    def backward(self, price: ComputeCost) -> list[Entry]: ...


class IntraLayerStrategy(Strategy):
    """``layers`` equal layers, each with the price of its passes; a pass without a price is left
    out. In a stage's `forward:` or `backward:` one of them has a price, alone both."""

    layers: PositiveInt = 1
    #: One layer's compute on one rank.
    forward: ComputeCostField | None = None
    backward: ComputeCostField | None = None

    @model_validator(mode="after")
    def _goes_somewhere(self) -> IntraLayerStrategy:
        if self.forward is None and self.backward is None:
            raise ValueError(
                f"expected `forward`, `backward` or both: the price of a pass of {self.name}"
            )
        return self

    def writer(self, context: ExpansionContext) -> IntraLayerWriter:
        """What writes a layer's entries."""
        raise AssertionError(f"{self.name} has no writer")

    def passes(self, writer: IntraLayerWriter) -> tuple[list[Entry], list[Entry]]:
        """The forward pass of all layers, and their backward pass."""
        given = ((self.forward, writer.forward), (self.backward, writer.backward))
        there, back = (
            [] if price is None else repeat_entries(self.layers, write(price))
            for price, write in given
        )
        return there, back

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = self.writer(context)
        there, back = self.passes(writer)
        return Expansion([*there, *back], writer.tensors)


def repeat_entries(times: int, steps: list[Entry], index: str | None = None) -> list[Entry]:
    """A loop over entries; ``index`` names its counter."""
    return [
        {"repeat": {"times": times, **({} if index is None else {"index": index}), "steps": steps}}
    ]


# --- prices, cut and scaled ---
def scaled_cost(price: ComputeCost, factor: float) -> ComputeCost:
    """The price of ``factor`` times the work. Quantities that are expressions, without a unit, are
    multiplied as such.
    """
    return {
        key: value if key == "dtype" or factor == 1 else _scaled_quantity(key, value, factor)
        for key, value in price.items()
    }


def _scaled_quantity(key: str, value: str | float, factor: float) -> str:
    if key == "time":
        return units.duration_text(round(units.parse_duration_ns(value) * factor))
    try:
        if key == "flops":
            return units.flops_text(units.parse_flops(value) * factor)
        return units.size_text(round(units.parse_size_bytes(value) * factor))
    except ValueError:
        return f"({value}) * {factor!r}"


def equal_cost_shares(price: ComputeCost, parts: int) -> list[ComputeCost]:
    """The price in equal parts that add up to it; a time's remainder goes to the first ones, a
    nanosecond each.
    """
    if "time" not in price or parts == 1:
        return [scaled_cost(price, 1 / parts)] * parts
    whole, rest = divmod(units.parse_duration_ns(price["time"]), parts)
    return [{**price, "time": units.duration_text(whole + (k < rest))} for k in range(parts)]
