"""The model that a strategy distributes: layers given by sizes and times.

The module has the fields of layers, the base classes of strategies for a whole model
(``LayeredModelStrategy``) and for one layer (``IntraLayerStrategy``), and the arithmetic of costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

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
    #: A number of elements, or a list of parameters, each a number of elements or a shape.
    params: ParamShapes
    forward: CostOrEntriesField
    backward: CostOrEntriesField
    count: PositiveInt = 1


class TrainableLayerFields(LayerFields):
    """A layer with trainable parameters (``params``), ``frozen`` parameters, or both."""

    params: ParamShapes = ()
    frozen: ParamShapes = ()
    forward: CostOrEntriesField = ()
    backward: CostOrEntriesField = ()

    @model_validator(mode="after")
    def _has_parameters_and_costs(self) -> TrainableLayerFields:
        given = self.model_fields_set
        if "inner" in given:
            # The units inside it have parameters and costs of their own.
            return self
        if not given & {"params", "frozen"}:
            raise ValueError("a layer needs `params`, `frozen` parameters, or both")
        for field in ("forward", "backward"):
            if field not in given:
                raise ValueError(f"a layer needs `{field}`: a time, or {{flops, bytes}}")
        return self


class LayeredModelStrategy(Strategy):
    """A strategy for a model of layers."""

    layers: tuple[LayerFields, ...] = Field(
        description=(
            "Layers of the model: parameters and times of each; `count` repeats a layer. One "
            "layer or a list."
        ),
        examples=[[{"params": 1048576, "forward": "1 ms", "backward": "2 ms", "count": 4}]],
    )
    dtype: Dtype = Field(
        default="float32",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )

    @field_validator("layers", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        if isinstance(value, list | tuple) and not value:
            raise ValueError("expected at least one layer, found an empty list")
        if not isinstance(value, list | tuple | dict):
            raise ValueError(
                "expected a layer, `{params, forward, backward}`, or a list of them, "
                f"found {value_text(value)}"
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
    """The layers one by one; equal or missing names get numbers."""
    return tuple(
        ModelLayer(
            name,
            layer.params,
            layer.forward,
            layer.backward,
            getattr(layer, "frozen", ()),
            getattr(layer, "dtype", None) or "",
        )
        for name, layer in numbered_layers(fields)
    )


def numbered_layers(fields: Iterable[L], within: str = "") -> list[tuple[str, L]]:
    """Each layer with its name, `count` equal ones one by one; ``within`` begins all names."""
    layers: list[tuple[str, L]] = []
    for layer in fields:
        for k in range(layer.count):
            if not layer.name:
                name = f"layer {len(layers)}"
            elif layer.count > 1:
                name = f"{layer.name} {k}"
            else:
                name = layer.name
            layers.append((within + name, layer))
    return layers


# --- one layer, alone or in a stage ---
class IntraLayerWriter(EntryWriter, ABC):
    """Entries of one layer; other strategies use them instead of a compute step."""

    @abstractmethod
    def forward(self, cost: ComputeCost) -> list[Entry]: ...

    @abstractmethod
    def backward(self, cost: ComputeCost) -> list[Entry]: ...


class LayerPasses(NamedTuple):
    """The entries of all layers in both passes; a pass without a cost has none."""

    forward: list[Entry]
    backward: list[Entry]


class IntraLayerStrategy(Strategy):
    """``layers`` equal layers, with the cost of each layer's passes.

    A pass without a cost is skipped. An entry of the program usually has both passes; inside a
    stage's `forward:` or `backward:` it has one.
    """

    layers: PositiveInt = Field(default=1, description="Number of equal layers.", examples=[4])
    forward: ComputeCostField | None = Field(
        default=None,
        description=("Cost of one layer's forward pass on one rank: a time, or `{flops, bytes}`."),
        examples=["2 ms"],
    )
    backward: ComputeCostField | None = Field(
        default=None,
        description="Cost of one layer's backward pass on one rank.",
        examples=["4 ms"],
    )

    @model_validator(mode="after")
    def _has_a_pass(self) -> IntraLayerStrategy:
        if self.forward is None and self.backward is None:
            raise ValueError(
                f"expected `forward`, `backward` or both: the cost of a pass of {self.name}"
            )
        return self

    def writer(self, context: ExpansionContext) -> IntraLayerWriter:
        """The writer of one layer's entries."""
        raise AssertionError(f"{self.name} has no writer")

    def passes(self, writer: IntraLayerWriter) -> LayerPasses:
        """The forward pass of all layers, and their backward pass."""
        forward: list[Entry] = []
        backward: list[Entry] = []
        if self.forward is not None:
            forward = repeat_entries(self.layers, writer.forward(self.forward))
        if self.backward is not None:
            backward = repeat_entries(self.layers, writer.backward(self.backward))
        return LayerPasses(forward, backward)

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = self.writer(context)
        passes = self.passes(writer)
        return Expansion([*passes.forward, *passes.backward], writer.tensors)


def repeat_entries(times: int, steps: list[Entry], index: str | None = None) -> list[Entry]:
    """A loop over entries; ``index`` is the name of its counter."""
    body: Entry = {"times": times}
    if index is not None:
        body["index"] = index
    body["steps"] = steps
    return [{"repeat": body}]


# --- costs, split and scaled ---
def scaled_cost(cost: ComputeCost, factor: float) -> ComputeCost:
    """The cost of ``factor`` times the work.

    Quantities that are expressions without a unit become a product.
    """
    if factor == 1:
        return dict(cost)
    return {
        key: value if key == "dtype" else _scaled_quantity(key, value, factor)
        for key, value in cost.items()
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


def equal_cost_shares(cost: ComputeCost, parts: int) -> list[ComputeCost]:
    """The cost in equal parts that add up to it.

    The remainder of a time goes to the first parts, a nanosecond each.
    """
    if "time" not in cost or parts == 1:
        return [scaled_cost(cost, 1 / parts)] * parts
    share, remainder = divmod(units.parse_duration_ns(cost["time"]), parts)
    return [
        {**cost, "time": units.duration_text(share + 1 if k < remainder else share)}
        for k in range(parts)
    ]
