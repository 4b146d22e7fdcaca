"""Fully sharded data parallelism (FSDP2's fully_shard, ZeRO 1 to 3): fields of `fsdp:`, and what they refuse."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.strategies.base import Context, Expansion, Refusal
from distsim.strategies.fields import Axes, Count, Doing, Dtype, PerRank, integer
from distsim.strategies.layers import Layered, LayerFields


def _stage(value: Any, info: ValidationInfo) -> int:
    found = integer(1, "ZeRO's stage, 1, 2 or 3, an integer")(value, info)
    if found > 3:
        raise ValueError(f"expected ZeRO's stage, 1, 2 or 3, found {found}")
    return found


Stage = Annotated[int, PlainValidator(_stage), WithJsonSchema({"enum": [1, 2, 3]})]


class Fsdp(Layered):
    """Every rank keeps a shard of each layer; layers are gathered when they are needed, gradients scattered as they come."""

    name: ClassVar[str] = "fsdp"
    about: ClassVar[str] = (
        "fully_shard of each layer: all_gather before forward and again before backward, reduce_scatter of the gradients after it."
    )

    #: The ranks that share one copy of the model; left out: the axis `dp_shard` or `dp` where the mesh has one, else all ranks.
    shard: Axes | None = None
    #: HSDP: the axis along which sharded copies are repeated; their gradients are reduced once more.
    replicate: Axes | None = None
    #: 3 gathers layers again for the backward pass, 2 keeps them, 1 keeps gradients whole too until the last micro-batch.
    zero: Stage = 3
    #: What the outermost module holds itself: gathered first, kept through the backward pass, reduced last.
    root: LayerFields | None = None
    #: MixedPrecisionPolicy: what is gathered, what is reduced.
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    accumulate: Count = 1
    #: set_requires_gradient_sync(False) before all micro-batches but the last; left out: under ZeRO 1.
    no_sync: StrictBool | None = None
    #: clip_grad_norm_: one number is reduced before the optimizer.
    clip_grad_norm: StrictBool = False
    optimizer: Doing | None = None
    #: Ranks that leave out the backward pass of one iteration: {1: 0}.
    skips_backward: PerRank = {}

    @property
    def late(self) -> bool:
        """Gradients are reduced once an iteration."""
        return self.zero == 1 if self.no_sync is None else self.no_sync

    def shard_group(self, context: Context) -> str | tuple[str, ...] | None:
        if self.shard is not None:
            return self.shard
        return next((axis for axis in ("dp_shard", "dp") if axis in context.mesh), None)

    def refuse(self, context: Context) -> list[Refusal]:
        found: list[Refusal] = []
        for key, group in (("shard", self.shard), ("replicate", self.replicate)):
            unknown = context.unknown_group(group)
            if unknown is not None:
                found.append(((key,), unknown))
        if found:
            return found
        shard, replicate = (_axes(group) for group in (self.shard_group(context), self.replicate))
        if self.replicate is not None and (not shard or set(shard) & set(replicate)):
            found.append((("replicate",), "sharded and repeated copies lie on different axes of the mesh: name one for each"))
        if context.size_of(self.shard_group(context)) == 1:
            found.append((("shard",), "the group has a single rank: there is nothing to shard"))
        n = context.world_size
        strange = [rank for rank in self.skips_backward if not isinstance(rank, int) or rank >= n]
        if "else" in strange:
            found.append((("skips_backward",), "expected ranks and the iteration that each leaves out, as `{2: 1}`"))
        found += [
            (("skips_backward",), f"expected ranks of the world of {n}, found {rank}") for rank in strange if rank != "else"
        ]
        return found

    def expand(self, context: Context) -> Expansion:
        from distsim.strategies.fsdp_steps import FsdpWriter

        return FsdpWriter(self, context).expansion()


def _axes(group: str | tuple[str, ...] | None) -> tuple[str, ...]:
    return () if group is None else (group,) if isinstance(group, str) else group
