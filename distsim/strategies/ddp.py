"""torch.nn.parallel.DistributedDataParallel: fields of `ddp:`, and what they refuse."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.strategies.base import Context, Expansion, Refusal
from distsim.strategies.fields import Amount, Axes, Count, Doing, Natural, PerRank, integer, shown
from distsim.strategies.layers import Layered


def _unused(value: Any, info: ValidationInfo) -> dict[int, tuple[int, ...]]:
    """`{1: [3]}`: on rank 1 the forward pass leaves out layer 3."""
    one = integer(0, "a rank or the number of a layer, an integer")
    if not isinstance(value, dict):
        raise ValueError(
            f"expected ranks, each with the numbers of the layers it leaves out, as {{1: [3]}}, found {shown(value)}"
        )
    return {
        one(rank, info): tuple(one(k, info) for k in (ks if isinstance(ks, list | tuple) else [ks])) for rank, ks in value.items()
    }


Unused = Annotated[dict[int, tuple[int, ...]], PlainValidator(_unused), WithJsonSchema({"type": "object"})]


class Ddp(Layered):
    """Data parallel training: every rank has the whole model and reduces gradients in buckets while the backward pass goes on."""

    name: ClassVar[str] = "ddp"
    about: ClassVar[str] = (
        "DistributedDataParallel: the model is broadcast once; every iteration reduces gradients in buckets, beside the backward pass."
    )

    #: Left out: the axis `dp` where the mesh has one, else all ranks.
    group: Axes | None = None
    #: MiB; left out: 25, and 1 for the first bucket.
    bucket_cap_mb: Amount | None = None
    find_unused_parameters: StrictBool = False
    #: Elements of all buffers (running means and the like); they are broadcast before every forward pass.
    buffers: Natural = 0
    #: Micro-batches of an iteration; `no_sync` reduces only after the last.
    accumulate: Count = 1
    no_sync: StrictBool = True
    optimizer: Doing | None = None
    #: Batches that each rank has; `join` is the context manager for unequal numbers.
    inputs: PerRank | None = None
    join: StrictBool = False
    #: Layers that a rank's forward pass leaves out.
    unused: Unused = {}
    #: false: without construction, and with the buckets that hold from the second iteration on.
    setup: StrictBool = True

    def group_of(self, context: Context) -> str | tuple[str, ...] | None:
        return self.group if self.group is not None else "dp" if "dp" in context.mesh else None

    def refuse(self, context: Context) -> list[Refusal]:
        found: list[Refusal] = []
        unknown = context.unknown_group(self.group)
        if unknown is not None:
            found.append((("group",), unknown))
        if self.inputs is not None and context.iterations > 1:
            found.append((("inputs",), "`inputs` counts the batches of every rank; leave `iterations` at 1"))
        if self.join and self.inputs is None:
            found.append((("join",), "`join` is for unequal numbers of batches: give `inputs`, as {0: 3, else: 2}"))
        if self.join and not found and context.size_of(self.group_of(context)) < context.world_size:
            found.append((("join",), "`join` is laid out for one group of all ranks"))
        if self.inputs is not None and self.accumulate > 1:
            found.append((("accumulate",), "`inputs` counts single batches; leave `accumulate` at 1"))
        if self.bucket_cap_mb == 0:
            found.append((("bucket_cap_mb",), "expected a cap above 0"))
        return [*found, *self._refuse_ranks(context)]

    def _refuse_ranks(self, context: Context) -> list[Refusal]:
        found: list[Refusal] = []
        n, layers = context.world_size, len(self.model)
        for rank, numbers in self.unused.items():
            if rank >= n:
                found.append((("unused", rank), f"rank {rank} is outside the world of {n} ranks"))
            found += [
                (("unused", rank), f"there is no layer {k}; the model has layers 0 to {layers - 1}")
                for k in numbers
                if k >= layers
            ]
        named = [rank for rank in self.inputs or () if isinstance(rank, int)]
        found += [(("inputs", rank), f"rank {rank} is outside the world of {n} ranks") for rank in named if rank >= n]
        missing = [] if self.inputs is None or "else" in self.inputs else [r for r in range(n) if r not in self.inputs]
        if missing:
            found.append((("inputs",), f"rank {missing[0]} has no entry, and there is no `else`"))
        return found

    def expand(self, context: Context) -> Expansion:
        from distsim.strategies.ddp_steps import DdpWriter

        return DdpWriter(self, context).expansion()
