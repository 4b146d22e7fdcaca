"""The fields of `expert_parallel:`, and the checks of its layout.

``ExpertParallelFields`` has no writer: the calls are in
`distsim.scenario.strategies.intra_layer.expert_parallel` (one all-to-all) and
`distsim.scenario.strategies.intra_layer.hierarchical_all_to_all` (two stages).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

from pydantic import Field, StrictBool

from distsim.scenario.strategies.base import ExpansionContext, Refusal
from distsim.scenario.strategies.field_types import (
    AxisOrGroup,
    ComputeCostField,
    Dtype,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from distsim.scenario.strategies.intra_layer.expert_router import ExpertRouter
from distsim.scenario.strategies.layers import IntraLayerStrategy

#: The largest number of experts in a layer: tokens are counted for each expert.
_MAX_EXPERTS = 2**16
#: Fields that need two stages (`between`).
_TWO_STAGE_FIELDS = ("once_per_machine", "pieces", "dispatch_dtype", "beside")


class ExpertParallelFields(IntraLayerStrategy):
    """The fields of `expert_parallel:` and the checks of their layout."""

    name: ClassVar[str] = "expert_parallel"
    about: ClassVar[str] = (
        "Expert parallelism for mixture of experts (MoE). All_to_all_single exchanges the "
        "token counts, dispatches tokens to experts, and combines the results; message "
        "sizes are uneven if the router is imbalanced."
    )

    axis: AxisOrGroup = Field(
        default="ep", description="Mesh axis of this strategy.", examples=["pp"]
    )
    experts: PositiveInt = Field(description="Number of experts.", examples=[8])
    tokens: PositiveInt = Field(description="Tokens per rank.", examples=[4096])
    top_k: PositiveInt = Field(
        default=1, description="Number of experts that process each token.", examples=[2]
    )
    hidden: PositiveInt = Field(description="Hidden size of the model.", examples=[4096])
    dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )
    imbalance: NonNegativeFloat = Field(
        default=0.0,
        description=(
            "Imbalance of the router. 0: all experts get the same number of tokens. 1: strong "
            "imbalance."
        ),
        examples=[0.5],
    )
    seed: NonNegativeInt = Field(
        default=0, description="Random seed of the router's imbalance.", examples=[7]
    )
    capacity_factor: NonNegativeFloat | None = Field(
        default=None,
        description=(
            "Maximum number of tokens per expert and rank, as a multiple of the even share. "
            "Further tokens are dropped."
        ),
        examples=[1.25],
    )
    pad_to_capacity: StrictBool = Field(
        default=False,
        description=(
            "Pad the tokens for each expert to its full capacity. All messages are equal, and "
            "no counts are exchanged."
        ),
        examples=[True],
    )
    between: AxisOrGroup | None = Field(
        default=None,
        description=(
            "Mesh axis of the nodes: tokens are first exchanged between nodes, then along "
            "`axis` within a node."
        ),
        examples=["machine"],
    )
    once_per_machine: StrictBool = Field(
        default=False,
        description=(
            "Send a token to each node at most once, as DeepEP does, however many of its "
            "experts are there."
        ),
        examples=[True],
    )
    pieces: PositiveInt = Field(
        default=1,
        description=(
            "Split the tokens into this many pieces. One piece is exchanged within nodes while "
            "the next one is exchanged between nodes."
        ),
        examples=[2],
    )
    dispatch_dtype: Dtype | None = Field(
        default=None,
        description=(
            "Dtype of dispatched tokens; FP8 adds scales. Results are sent back in `dtype`."
        ),
        examples=["float8_e4m3fn"],
    )
    beside: ComputeCostField | None = Field(
        default=None,
        description="Cost of work that overlaps with the dispatch, such as shared experts.",
        examples=["1 ms"],
    )

    @property
    def router(self) -> ExpertRouter:
        return ExpertRouter(
            self.experts,
            self.tokens,
            self.top_k,
            self.imbalance,
            self.seed,
            self.capacity_factor,
            self.pad_to_capacity,
        )

    # --- checks of the layout ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None or self.axis not in context.mesh:
            return [(("axis",), unknown or f"the mesh has no axis {self.axis}")]
        refusals = [*self._refuse_two_stage_fields(), *self._refuse_two_stages(context)]
        if refusals:
            return refusals
        return [*self._refuse_experts(context), *self._refuse_capacity()]

    def _refuse_experts(self, context: ExpansionContext) -> Iterator[Refusal]:
        ranks = context.size_of(self.axis)
        if self.between is not None:
            ranks *= context.size_of(self.between)
        if self.experts > _MAX_EXPERTS:
            text = f"distsim simulates at most {_MAX_EXPERTS} experts, found {self.experts}"
            yield ("experts",), text
        if self.experts % ranks:
            text = f"{self.experts} experts are not divisible by the {ranks} ranks of {self.axis}"
            yield ("experts",), text
        if self.top_k > self.experts:
            text = f"top_k is {self.top_k}, but there are only {self.experts} experts"
            yield ("top_k",), text

    def _refuse_capacity(self) -> Iterator[Refusal]:
        if self.capacity_factor == 0:
            text = "capacity 0 drops every token: expected a factor above 0, such as 1.25"
            yield ("capacity_factor",), text
        if self.pad_to_capacity and self.capacity_factor is None:
            text = "pad_to_capacity needs a capacity: set `capacity_factor`, such as 1.25"
            yield ("pad_to_capacity",), text

    def _refuse_two_stage_fields(self) -> list[Refusal]:
        """Fields of two stages without an axis of nodes."""
        if self.between is not None:
            return []
        fields = type(self).model_fields
        text = "this field needs two-level exchange: set `between` to the mesh axis of the nodes"
        return [
            ((field,), text)
            for field in _TWO_STAGE_FIELDS
            if getattr(self, field) != fields[field].default
        ]

    def _refuse_two_stages(self, context: ExpansionContext) -> list[Refusal]:
        """The first problem of a layout in two stages."""
        if self.between is None:
            return []
        if self.between not in context.mesh or self.between == self.axis:
            unknown = context.unknown_group(self.between, "between")
            other_axis = f"expected a mesh axis other than {self.axis}"
            return [(("between",), unknown or other_axis)]
        if self.pieces > self.tokens:
            text = (
                f"each piece needs at least one token: expected at most {self.tokens} "
                f"pieces, found {self.pieces}"
            )
            return [(("pieces",), text)]
        if self.once_per_machine and (self.imbalance or self.capacity_factor is not None):
            field = "imbalance" if self.imbalance else "capacity_factor"
            text = (
                "once_per_machine supports only an even router: remove `once_per_machine` "
                "or `imbalance`"
            )
            return [((field,), text)]
        return []
