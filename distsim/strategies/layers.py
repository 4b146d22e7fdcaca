"""The model that a strategy spreads over ranks: layers by sizes and times."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel, ConfigDict, field_validator

from distsim.strategies.base import Layer, Strategy
from distsim.strategies.fields import DTYPES, Count, Doing, Dtype, Params, shown


class LayerFields(BaseModel):
    """``{name, params, forward, backward, count}``: one layer, or ``count`` equal ones."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    name: str = ""
    #: Elements, or a list of parameters, each a number of elements or a shape.
    params: Params
    forward: Doing
    backward: Doing
    count: Count = 1


class Layered(Strategy):
    """A strategy for a model of layers."""

    layers: tuple[LayerFields, ...]
    dtype: Dtype = "float32"

    @field_validator("layers", mode="before")
    @classmethod
    def _one_or_several(cls, value: Any) -> Any:
        if isinstance(value, list | tuple) and not value:
            raise ValueError("expected at least one layer, found an empty list")
        if not isinstance(value, list | tuple | dict):
            raise ValueError(f"expected a layer, `{{params, forward, backward}}`, or a list of them, found {shown(value)}")
        return [value] if isinstance(value, dict) else value

    @property
    def model(self) -> tuple[Layer, ...]:
        """The layers in the order of the forward pass, each with a name of its own."""
        return named_layers(self.layers)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype]


def named_layers(fields: Iterable[LayerFields]) -> tuple[Layer, ...]:
    """Layers laid out one by one; equal or missing names are told apart by number."""
    found: list[Layer] = []
    for one in fields:
        for k in range(one.count):
            word = one.name or "layer"
            name = f"{word} {k}" if one.name and one.count > 1 else word if one.name else f"layer {len(found)}"
            found.append(Layer(name, one.params, one.forward, one.backward))
    return tuple(found)
