"""Strategies for layers that go forward and backward: alone both ways, in a stage's `forward:` or `backward:` one of them."""

from __future__ import annotations

from typing import Any, Protocol

from pydantic import model_validator

from distsim.strategies.base import Entry, Strategy
from distsim.strategies.fields import Count, Work


class LayerWriter(Protocol):
    """Entries of one layer."""

    def forward(self, price: Any) -> list[Entry]: ...

    def backward(self, price: Any) -> list[Entry]: ...


class Passes(Strategy):
    """``layers`` equal layers, each with the price of its passes; a pass without a price is left out."""

    layers: Count = 1
    #: One layer's compute on one rank.
    forward: Work | None = None
    backward: Work | None = None

    @model_validator(mode="after")
    def _goes_somewhere(self) -> Passes:
        if self.forward is None and self.backward is None:
            raise ValueError(f"expected `forward`, `backward` or both: the price of a pass of {self.name}")
        return self

    def there(self, writer: LayerWriter) -> list[Entry]:
        """The forward pass of all layers."""
        return [] if self.forward is None else [{"repeat": {"times": self.layers, "steps": writer.forward(self.forward)}}]

    def back(self, writer: LayerWriter) -> list[Entry]:
        """Their backward pass."""
        return [] if self.backward is None else [{"repeat": {"times": self.layers, "steps": writer.backward(self.backward)}}]
