"""Fully sharded data parallelism (FSDP2's fully_shard, ZeRO 1 to 3): fields of `fsdp:` and what
they refuse.

The hooks are in `distsim.scenario.strategies.fsdp.hook_events`, the calls in
`distsim.scenario.strategies.fsdp.calls`.

PyTorch issues blocking calls inside streams of its own. Gradients are reduced so under nccl: each
reduce_scatter on one stream, HSDP's all_reduce after it on another. What a gather waits for is an
event between two others on its stream; so under nccl gathers are asynchronous and stand where that
event would let them start. The order on each communicator is PyTorch's. Under gloo and mpi there
are no streams: all calls block, each where PyTorch calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar, Literal

from pydantic import PlainValidator, StrictBool, ValidationInfo, WithJsonSchema, field_validator

from distsim.scenario.strategies.base import Expansion, ExpansionContext, GroupRef, Refusal
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
from distsim.scenario.strategies.fsdp.calls import FsdpWriter, reshard_group_key
from distsim.scenario.strategies.fsdp.hook_events import FsdpSettings, FsdpUnit
from distsim.scenario.strategies.layers import (
    LayeredModelStrategy,
    TrainableLayerFields,
    numbered_layers,
)


def _parse_reshard(value: object, info: ValidationInfo) -> bool | int:
    return (
        value
        if isinstance(value, bool)
        else integer_at_least(1, "true, false or a number of ranks")(value, info)
    )


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
    #: fully_shard's argument for this unit; left out, that of all.
    reshard_after_forward: ReshardAfterForward | None = None
    #: The axes over which this unit is sharded, where they are not those of the model: experts that
    #: are already spread over others (torchtitan 0.2, models/llama4/infra/parallelize.py:
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
    #: What it does before the layers (after them, in the backward pass); left out, half of
    #: `forward` and `backward` where it does both.
    first_forward: CostOrEntriesField | None = None
    first_backward: CostOrEntriesField | None = None


class Fsdp(LayeredModelStrategy):
    """Every rank keeps a shard of each layer; layers are gathered when they are needed, gradients
    scattered as they come.
    """

    name: ClassVar[str] = "fsdp"
    about: ClassVar[str] = (
        "fully_shard of each layer: all_gather before forward and again before backward, reduce_scatter of the gradients after it."
    )

    layers: tuple[FsdpUnitFields, ...]
    #: The ranks that share one copy of the model; left out: the axis `dp_shard` or `dp` where the
    #: mesh has one, else all ranks.
    shard: AxesOrGroup | None = None
    #: HSDP: the axis along which sharded copies are repeated; their gradients are reduced once
    #: more.
    replicate: AxesOrGroup | None = None
    #: 3 gathers layers again for the backward pass, 2 keeps them, 1 keeps gradients whole too until
    #: the last micro-batch.
    zero: ZeroStage = 3
    #: What the outermost module holds itself: gathered first, kept through the backward pass,
    #: reduced last.
    root: FsdpRootFields | None = None
    #: fully_shard's argument: true, false, or the number of ranks among which layers stay spread;
    #: left out, by `zero`.
    reshard_after_forward: ReshardAfterForward | None = None
    #: false: set_reshard_after_backward(False) before all micro-batches but the last.
    reshard_after_backward: StrictBool | None = None
    #: HSDP: set_requires_all_reduce(False) before all micro-batches but the last.
    all_reduce_late: StrictBool = False
    #: The model's input wants a gradient, so that the first layer is reduced as soon as it is done.
    input_grad: StrictBool = False
    #: Units that are gathered ahead by hand (set_modules_to_forward_prefetch,
    #: set_modules_to_backward_prefetch).
    forward_prefetch: NonNegativeInt = 0
    backward_prefetch: NonNegativeInt = 0
    #: Forward passes alone, under no_grad.
    evaluate: StrictBool = False
    #: MixedPrecisionPolicy: what is gathered, what is reduced.
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    accumulate: PositiveInt = 1
    #: set_requires_gradient_sync(False) before all micro-batches but the last; left out: under ZeRO
    #: 1.
    no_sync: StrictBool | None = None
    #: clip_grad_norm_: a norm for each parameter is reduced before the optimizer.
    clip_grad_norm: StrictBool = False
    #: Axes over which the norms are summed as well, as the matrices are cut there too.
    clip_over: AxesOrGroup | None = None
    optimizer: CostOrEntriesField | None = None
    #: Ranks that leave out the backward pass of one iteration: {1: 0}.
    skips_backward: IntByRank = {}

    @property
    def late(self) -> bool:
        """Gradients are reduced once an iteration."""
        return self.zero == 1 if self.no_sync is None else self.no_sync

    @property
    def frees(self) -> bool:
        """Layers are freed after each backward pass."""
        return (
            self.zero != 1 if self.reshard_after_backward is None else self.reshard_after_backward
        )

    @property
    def settings(self) -> FsdpSettings:
        at = "last" if self.root is None else self.root.at
        return FsdpSettings(at, self.input_grad, self.forward_prefetch, self.backward_prefetch)

    def shard_group(self, context: ExpansionContext) -> GroupRef | None:
        if self.shard is not None:
            return self.shard
        return next((axis for axis in ("dp_shard", "dp") if axis in context.mesh), None)

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = context.refuse_groups(
            shard=self.shard, replicate=self.replicate, clip_over=self.clip_over
        )
        if found:
            return found
        shard, replicate = (
            _axis_names(group) for group in (self.shard_group(context), self.replicate)
        )
        found += self._refuse_meshes(self.layers, ("layers",), context)
        if self.replicate is not None and (not shard or set(shard) & set(replicate)):
            found.append(
                (
                    ("replicate",),
                    "sharded and repeated copies lie on different axes of the mesh: name one for each",
                )
            )
        if context.size_of(self.shard_group(context)) == 1:
            found.append((("shard",), "the group has a single rank: there is nothing to shard"))
        found += self._refuse_parts(context)
        n = context.world_size
        strange = [rank for rank in self.skips_backward if not isinstance(rank, int) or rank >= n]
        if "else" in strange:
            found.append(
                (
                    ("skips_backward",),
                    "expected ranks and the iteration that each leaves out, as `{2: 1}`",
                )
            )
        found += [
            (("skips_backward",), f"expected ranks of the world of {n}, found {rank}")
            for rank in strange
            if rank != "else"
        ]
        return found

    def _refuse_meshes(
        self,
        layers: Sequence[FsdpUnitFields],
        way: tuple[str | int, ...],
        context: ExpansionContext,
    ) -> list[Refusal]:
        """Units that are sharded over axes of their own."""
        found: list[Refusal] = []
        for k, one in enumerate(layers):
            here = (*way, k)
            if one.shard is not None:
                found += [
                    ((*here, *rest), sentence)
                    for rest, sentence in context.refuse_groups(shard=one.shard)
                ]
                if self.clip_grad_norm:
                    found.append(
                        (
                            ("clip_grad_norm",),
                            "units on several meshes have a norm each: write their all_reduces as `optimizer`",
                        )
                    )
                if self.replicate is not None or not isinstance(
                    one.reshard_after_forward, bool | None
                ):
                    found.append(
                        (
                            (*here, "shard"),
                            "a unit with axes of its own is neither repeated nor kept in parts",
                        )
                    )
            found += self._refuse_meshes(one.inner, (*here, "inner"), context)
        return found

    def _refuse_parts(self, context: ExpansionContext) -> list[Refusal]:
        """reshard_after_forward as an int: a factor of the ranks that share the model, which lie on
        an axis.
        """
        ranks, group = context.size_of(self.shard_group(context)), self.shard_group(context)
        asked: list[tuple[tuple[str | int, ...], bool | int | None]] = [
            (("reshard_after_forward",), self.reshard_after_forward)
        ]
        asked += [
            (("layers", k, "reshard_after_forward"), one.reshard_after_forward)
            for k, one in enumerate(self.layers)
        ]
        sizes = [
            (way, size) for way, size in asked if size is not None and not isinstance(size, bool)
        ]
        last = (
            context.size_of(_axis_names(group)[-1:] or None)
            if all(axis in context.mesh for axis in _axis_names(group))
            else 1
        )
        return [
            (
                way,
                f"reshard_after_forward as a number is a factor of the {ranks} ranks that share the model, found {size}",
            )
            for way, size in sizes
            if ranks % size or (size != ranks and last % size)
        ]

    # --- the units ---
    def whole(self, context: ExpansionContext) -> FsdpUnit:
        """The root with all units inside it."""
        ranks = context.size_of(self.shard_group(context))
        given = self.zero == 3 if self.reshard_after_forward is None else self.reshard_after_forward
        inner = fsdp_units(self.layers, ranks, given)
        if self.root is None:
            return FsdpUnit("root", (), (), {}, {}, False, inner)
        made = fsdp_units(
            [self.root.model_copy(update={"name": self.root.name or "root", "count": 1})],
            ranks,
            False,
        )
        return FsdpUnit(**{**vars(made[0]), "inner": inner})

    def part_of(self, context: ExpansionContext, size: int) -> str:
        """Who shares a layer between its passes: a number for each set of ranks."""
        return reshard_group_key(
            context, next(iter(_axis_names(self.shard_group(context))[-1:]), None), size
        )

    def expand(self, context: ExpansionContext) -> Expansion:
        return FsdpWriter(self, context, self.whole(context)).expansion()


def fsdp_units(
    fields: Sequence[FsdpUnitFields], ranks: int, given: bool | int, within: str = ""
) -> tuple[FsdpUnit, ...]:
    """Units laid out one by one. A number of all ranks is true, a number of one is false, as
    fully_shard has it.
    """
    found = []
    for name, one in numbered_layers(fields, within):
        asked = given if one.reshard_after_forward is None else one.reshard_after_forward
        reshard = asked if isinstance(asked, bool) else asked > 1 if asked in (1, ranks) else asked
        inner = fsdp_units(one.inner, ranks, given, f"{name} ")
        found.append(
            FsdpUnit(
                name, one.params, one.frozen, one.forward, one.backward, reshard, inner, one.shard
            )
        )
    return tuple(found)


def _axis_names(group: GroupRef | None) -> tuple[str, ...]:
    return () if group is None else (group,) if isinstance(group, str) else group
