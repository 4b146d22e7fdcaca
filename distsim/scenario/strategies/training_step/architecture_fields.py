"""The field `model:` of `transformer:`: a preset, or the sizes of a transformer."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, StrictBool, model_validator

from distsim.common.message_text import did_you_mean, name_list
from distsim.scenario.strategies.field_types import NonNegativeInt, PositiveInt
from distsim.scenario.strategies.training_step.presets import PRESETS, Architecture


class ArchitectureFields(BaseModel):
    """A preset, a preset with changed sizes, or all sizes of a transformer."""

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    preset: str | None = None
    layers: PositiveInt | None = None
    hidden: PositiveInt | None = None
    heads: PositiveInt | None = None
    kv_heads: PositiveInt | None = None
    ffn: PositiveInt | None = None
    vocabulary: PositiveInt | None = None
    mlp: Literal["gelu", "swiglu"] | None = None
    experts: NonNegativeInt | None = None
    top_k: NonNegativeInt | None = None
    #: Number of learned position embeddings.
    positions: NonNegativeInt | None = None
    #: Whether the output projection shares the embeddings' weights.
    tied: StrictBool | None = None
    bias: StrictBool | None = None
    dropout: StrictBool | None = None

    @model_validator(mode="after")
    def _complete(self) -> ArchitectureFields:
        if self.preset is not None and self.preset not in PRESETS:
            raise ValueError(
                f"unknown model {self.preset}; presets: "
                f"{name_list(PRESETS)}{did_you_mean(self.preset, PRESETS)}"
            )
        missing = [
            key
            for key in ("layers", "hidden", "heads", "ffn", "vocabulary")
            if getattr(self, key) is None
        ]
        if self.preset is None and missing:
            raise ValueError(f"expected {name_list(missing)}, or a preset ({name_list(PRESETS)})")
        return self

    def architecture(self) -> Architecture:
        """The model's sizes; keys that are given replace the preset's."""
        given = {
            key: value
            for key, value in self.model_dump(exclude={"preset"}).items()
            if value is not None
        }
        if self.preset is not None:
            return PRESETS[self.preset]._replace(**given)
        if given.get("mlp") == "gelu":
            given = {"bias": True, "dropout": True, **given}
        return Architecture(**{"kv_heads": given["heads"], "sequence": 2048, **given})
