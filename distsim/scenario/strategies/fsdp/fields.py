"""The fields of `fsdp:` (FSDP2's fully_shard, ZeRO 1 to 3, HSDP), and the checks of its layout.

``FsdpFields`` does not expand: the hooks are in `distsim.scenario.strategies.fsdp.hook_events`, the
calls in `distsim.scenario.strategies.fsdp.calls`, and `distsim.scenario.strategies.fsdp.strategy`
joins all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import prod
from typing import Annotated, ClassVar, Literal

from pydantic import (
    Field,
    PlainValidator,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from distsim.scenario.strategies.base import ExpansionContext, GroupRef, Refusal
from distsim.scenario.strategies.field_types import (
    AxesOrGroup,
    CostOrEntriesField,
    Dtype,
    IntByRank,
    NonNegativeInt,
    PositiveInt,
    ZeroStage,
    integer_at_least,
)
from distsim.scenario.strategies.fsdp.hook_events import FsdpSettings, FsdpUnit
from distsim.scenario.strategies.layers import (
    LayeredModelStrategy,
    TrainableLayerFields,
    numbered_layers,
)

#: The path of a field inside the strategy's fields.
_FieldPath = tuple[str | int, ...]


def _parse_reshard(value: object, info: ValidationInfo) -> bool | int:
    if isinstance(value, bool):
        return value
    return integer_at_least(1, "true, false or a number of ranks")(value, info)


ReshardAfterForward = Annotated[
    bool | int,
    PlainValidator(_parse_reshard),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "number"}]}),
]


class FsdpUnitFields(TrainableLayerFields):
    """A layer that is wrapped. ``inner``: units inside it, which compute before what it holds
    itself.
    """

    inner: tuple[FsdpUnitFields, ...] = ()
    #: fully_shard's argument for this unit; default: the model's.
    reshard_after_forward: ReshardAfterForward | None = None
    #: The axes over which this unit is sharded, if they are not the model's: experts that are
    #: already spread over other axes (torchtitan 0.2, models/llama4/infra/parallelize.py:
    #: `fully_shard(experts, mesh=dp_mod_ep_mesh)`).
    shard: AxesOrGroup | None = None

    @field_validator("inner", mode="before")
    @classmethod
    def _one_or_several(cls, value: object) -> object:
        return [value] if isinstance(value, dict) else value


class FsdpRootFields(FsdpUnitFields):
    """The outermost module. ``at``: whether what it holds computes after the layers, before them
    (embeddings), or both.
    """

    at: Literal["last", "first", "both"] = "last"
    #: The cost of its computation before the layers (in the backward pass: after them); default:
    #: half of `forward` and `backward` if it computes at both places.
    first_forward: CostOrEntriesField | None = None
    first_backward: CostOrEntriesField | None = None


class FsdpFields(LayeredModelStrategy):
    """The fields of `fsdp:` and the checks of their layout."""

    name: ClassVar[str] = "fsdp"
    about: ClassVar[str] = (
        "Fully sharded data parallelism as in torch.distributed.fsdp.fully_shard (FSDP2). "
        "It all-gathers each layer before its forward pass and again before its backward "
        "pass, then reduce-scatters its gradients."
    )

    layers: tuple[FsdpUnitFields, ...] = Field(
        description=(
            "Layers of the model: parameters and times of each; `count` repeats a layer. One "
            "layer or a list."
        ),
        examples=[[{"params": 1048576, "forward": "1 ms", "backward": "2 ms", "count": 4}]],
    )
    shard: AxesOrGroup | None = Field(
        default=None,
        description=(
            "Ranks that shard one copy of the model [default: the axis `dp_shard` or `dp`, "
            "else all ranks]."
        ),
        examples=["dp"],
    )
    replicate: AxesOrGroup | None = Field(
        default=None,
        description=(
            "HSDP: mesh axis along which the sharded model is replicated. Gradients are also "
            "all-reduced along it."
        ),
        examples=["replica"],
    )
    zero: ZeroStage = Field(
        default=3,
        description=(
            "ZeRO stage. 3: reshard after forward. 2: keep parameters gathered until the "
            "backward pass ends. 1: also keep whole gradients until the last micro-batch."
        ),
        examples=[3],
    )
    root: FsdpRootFields | None = Field(
        default=None,
        description=(
            "Parameters and times of the root module itself. They are gathered first and kept "
            "through the backward pass. `at`: when the root computes (first, last or both)."
        ),
        examples=[{"params": 1048576, "forward": "1 ms", "backward": "2 ms", "at": "last"}],
    )
    reshard_after_forward: ReshardAfterForward | None = Field(
        default=None,
        description=(
            "reshard_after_forward of fully_shard: true, false, or the number of ranks among "
            "which layers stay sharded [default: set by `zero`]."
        ),
        examples=[2],
    )
    reshard_after_backward: StrictBool | None = Field(
        default=None,
        description=(
            "false: set_reshard_after_backward(False) for all micro-batches but the last."
        ),
        examples=[False],
    )
    all_reduce_late: StrictBool = Field(
        default=False,
        description=(
            "HSDP: all-reduce between replicas only after the last micro-batch "
            "(set_requires_all_reduce)."
        ),
        examples=[True],
    )
    input_grad: StrictBool = Field(
        default=False,
        description=(
            "The model's input requires a gradient, so FSDP reduces the first layer's "
            "gradients right after its backward pass."
        ),
        examples=[True],
    )
    forward_prefetch: NonNegativeInt = Field(
        default=0,
        description="Units to prefetch in the forward pass (set_modules_to_forward_prefetch).",
        examples=[1],
    )
    backward_prefetch: NonNegativeInt = Field(
        default=0,
        description=(
            "Units to prefetch in the backward pass (set_modules_to_backward_prefetch). 0: "
            "PyTorch's default, one unit."
        ),
        examples=[2],
    )
    evaluate: StrictBool = Field(
        default=False,
        description="Run forward passes only, as under torch.no_grad().",
        examples=[True],
    )
    param_dtype: Dtype | None = Field(
        default=None,
        description="MixedPrecisionPolicy: dtype of gathered parameters [default: `dtype`].",
        examples=["bfloat16"],
    )
    reduce_dtype: Dtype | None = Field(
        default=None,
        description=("MixedPrecisionPolicy: dtype of reduced gradients [default: `param_dtype`]."),
        examples=["float32"],
    )
    accumulate: PositiveInt = Field(
        default=1, description="Gradient accumulation: micro-batches per iteration.", examples=[4]
    )
    no_sync: StrictBool | None = Field(
        default=None,
        description=(
            "Reduce gradients only after the last micro-batch (set_requires_gradient_sync) "
            "[default: true with `zero: 1`]."
        ),
        examples=[False],
    )
    clip_grad_norm: StrictBool = Field(
        default=False,
        description="Clip gradients: all-reduce their norms before the optimizer step.",
        examples=[True],
    )
    clip_over: AxesOrGroup | None = Field(
        default=None,
        description=(
            "Further mesh axes over which the gradient norms are summed, because matrices are "
            "also split along them."
        ),
        examples=["tp"],
    )
    optimizer: CostOrEntriesField | None = Field(
        default=None,
        description=(
            "Cost of the optimizer step: a time, `{flops, bytes}`, or entries that replace it."
        ),
        examples=["1 ms"],
    )
    skips_backward: IntByRank = Field(
        default={},
        description="Ranks that skip the backward pass of one iteration: `{RANK: ITERATION}`.",
        examples=[{1: 0}],
    )

    @property
    def reduces_once(self) -> bool:
        """Whether gradients are reduced once per iteration, after the last micro-batch."""
        return self.zero == 1 if self.no_sync is None else self.no_sync

    @property
    def frees_after_each_backward(self) -> bool:
        """Whether gathered layers are freed after each backward pass, not only after the last."""
        if self.reshard_after_backward is None:
            return self.zero != 1
        return self.reshard_after_backward

    @property
    def settings(self) -> FsdpSettings:
        at = "last" if self.root is None else self.root.at
        return FsdpSettings(at, self.input_grad, self.forward_prefetch, self.backward_prefetch)

    def shard_group(self, context: ExpansionContext) -> GroupRef | None:
        if self.shard is not None:
            return self.shard
        return next((axis for axis in ("dp_shard", "dp") if axis in context.mesh), None)

    # --- checks of the layout ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = context.refuse_groups(
            shard=self.shard, replicate=self.replicate, clip_over=self.clip_over
        )
        if refusals:
            return refusals
        return [
            *self._refuse_unit_meshes(self.layers, ("layers",), context),
            *self._refuse_replicate(context),
            *self._refuse_single_rank(context),
            *self._refuse_untrainable_model(context),
            *self._refuse_reshard_sizes(context),
            *self._refuse_skips_backward(context),
        ]

    def _refuse_replicate(self, context: ExpansionContext) -> list[Refusal]:
        if self.replicate is None:
            return []
        shard = _axis_names(self.shard_group(context))
        if shard and not set(shard) & set(_axis_names(self.replicate)):
            return []
        text = "`shard` and `replicate` need different mesh axes"
        return [(("replicate",), text)]

    def _refuse_single_rank(self, context: ExpansionContext) -> list[Refusal]:
        if context.size_of(self.shard_group(context)) != 1:
            return []
        return [(("shard",), "the group has a single rank, so there is nothing to shard")]

    def _refuse_untrainable_model(self, context: ExpansionContext) -> list[Refusal]:
        """A backward pass through a model without trainable parameters."""
        if self.evaluate or self.input_grad:
            return []
        if _has_trainable_parameter(self.root_unit(context)):
            return []
        text = (
            "every parameter is frozen, so PyTorch's backward pass raises (the loss does not "
            "require grad): give a layer `params`, or set `evaluate: true`"
        )
        return [(("layers",), text)]

    def _refuse_unit_meshes(
        self, units: Sequence[FsdpUnitFields], path: _FieldPath, context: ExpansionContext
    ) -> Iterator[Refusal]:
        """Problems of units that are sharded over axes of their own, and of the units inside."""
        for k, unit in enumerate(units):
            unit_path = (*path, k)
            if unit.shard is not None:
                yield from self._refuse_own_mesh(unit, unit_path, context)
            yield from self._refuse_unit_meshes(unit.inner, (*unit_path, "inner"), context)

    def _refuse_own_mesh(
        self, unit: FsdpUnitFields, path: _FieldPath, context: ExpansionContext
    ) -> Iterator[Refusal]:
        for field, sentence in context.refuse_groups(shard=unit.shard):
            yield (*path, *field), sentence
        if self.clip_grad_norm:
            text = (
                "units on several meshes need one norm each: write their all_reduces as `optimizer`"
            )
            yield ("clip_grad_norm",), text
        stays_in_parts = not isinstance(unit.reshard_after_forward, bool | None)
        if self.replicate is not None or stays_in_parts:
            text = (
                "a unit with axes of its own supports neither `replicate` nor a number as "
                "reshard_after_forward"
            )
            yield (*path, "shard"), text

    def _refuse_reshard_sizes(self, context: ExpansionContext) -> list[Refusal]:
        """A number as reshard_after_forward must divide the ranks that shard the model.

        Unless it is all of them, it must also divide the last axis, whose ranks are neighbours.
        """
        group = self.shard_group(context)
        ranks = context.size_of(group)
        axes = _axis_names(group)
        last_axis = 1
        if all(axis in context.mesh for axis in axes):
            last_axis = context.size_of(axes[-1:] or None)

        refusals: list[Refusal] = []
        for path, size in self._reshard_sizes():
            if ranks % size or (size != ranks and last_axis % size):
                text = (
                    f"reshard_after_forward must be a divisor of the {ranks} ranks that shard "
                    f"the model, found {size}"
                )
                refusals.append((path, text))
        return refusals

    def _reshard_sizes(self) -> Iterator[tuple[_FieldPath, int]]:
        """The numbers that are given as reshard_after_forward, with their paths."""
        settings: list[tuple[_FieldPath, bool | int | None]] = [
            (("reshard_after_forward",), self.reshard_after_forward)
        ]
        for k, unit in enumerate(self.layers):
            path = ("layers", k, "reshard_after_forward")
            settings.append((path, unit.reshard_after_forward))
        for field_path, size in settings:
            if size is not None and not isinstance(size, bool):
                yield field_path, size

    def _refuse_skips_backward(self, context: ExpansionContext) -> list[Refusal]:
        n = context.world_size
        keys = self.skips_backward
        unknown = [rank for rank in keys if not isinstance(rank, int) or rank >= n]
        refusals: list[Refusal] = []
        if "else" in unknown:
            text = "expected ranks, each with the iteration that it skips, such as `{2: 1}`"
            refusals.append((("skips_backward",), text))
        for rank in unknown:
            if rank != "else":
                text = f"expected ranks below {n}, found {rank}"
                refusals.append((("skips_backward",), text))
        return refusals

    # --- the units ---
    def root_unit(self, context: ExpansionContext) -> FsdpUnit:
        """The root with all units inside it."""
        ranks = context.size_of(self.shard_group(context))
        reshard: bool | int = self.zero == 3
        if self.reshard_after_forward is not None:
            reshard = self.reshard_after_forward
        inner = fsdp_units(self.layers, ranks, reshard)
        if self.root is None:
            return FsdpUnit("root", (), (), {}, {}, False, inner)
        fields = self.root.model_copy(update={"name": self.root.name or "root", "count": 1})
        (root,) = fsdp_units([fields], ranks, False)
        return replace(root, inner=inner)

    def reshard_group_key(self, context: ExpansionContext, size: int) -> str:
        """An expression for the ranks that share a unit between its passes.

        Its value is the first of them; they are ``size`` neighbours along the last shard axis.
        """
        axes = _axis_names(self.shard_group(context))
        if not axes:
            return f"rank - rank % {size}"
        names = list(context.mesh)
        stride = prod(context.mesh[name] for name in names[names.index(axes[-1]) + 1 :])
        return f"rank - ({axes[-1]} % {size}) * {stride}"


def fsdp_units(
    fields: Sequence[FsdpUnitFields], ranks: int, default_reshard: bool | int, within: str = ""
) -> tuple[FsdpUnit, ...]:
    """The units of some layers, `count` equal ones one by one; ``within`` begins their names."""
    units = []
    for name, unit in numbered_layers(fields, within):
        reshard = default_reshard
        if unit.reshard_after_forward is not None:
            reshard = unit.reshard_after_forward
        if not isinstance(reshard, bool) and reshard in (1, ranks):
            # As in fully_shard: the number of all ranks means true, 1 means false.
            reshard = reshard > 1
        units.append(
            FsdpUnit(
                name,
                unit.params,
                unit.frozen,
                unit.forward,
                unit.backward,
                reshard,
                fsdp_units(unit.inner, ranks, default_reshard, f"{name} "),
                unit.shard,
            )
        )
    return tuple(units)


def _has_trainable_parameter(unit: FsdpUnit) -> bool:
    return bool(unit.params) or any(map(_has_trainable_parameter, unit.inner))


def _axis_names(group: GroupRef | None) -> tuple[str, ...]:
    if group is None:
        return ()
    return (group,) if isinstance(group, str) else group
