"""torch.nn.parallel.DistributedDataParallel: fields of `ddp:` and what they refuse; the calls are
in `distsim.scenario.strategies.ddp.calls`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from pydantic import PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.strategies.base import (
    Entry,
    Expansion,
    ExpansionContext,
    GroupRef,
    ModelLayer,
    Refusal,
    Strategy,
)
from distsim.scenario.strategies.ddp.buckets import DTYPE_BYTES
from distsim.scenario.strategies.ddp.calls import DdpWriter, with_model_mismatch_errors
from distsim.scenario.strategies.ddp.comm_hooks import CommHookField
from distsim.scenario.strategies.ddp.join import DdpJoinWriter
from distsim.scenario.strategies.field_types import (
    AxesOrGroup,
    CostOrEntriesField,
    Dtype,
    IntByRank,
    NonNegativeFloat,
    PositiveInt,
    integer_at_least,
)
from distsim.scenario.strategies.layers import LayeredModelStrategy, TrainableLayerFields


def _parse_layers_by_rank(value: object, info: ValidationInfo) -> dict[int, tuple[int, ...]]:
    """`{1: [3]}`: on rank 1 the forward pass leaves out layer 3."""
    one = integer_at_least(0, "a rank or the number of a layer, an integer")
    if not isinstance(value, dict):
        raise ValueError(
            f"expected ranks, each with the numbers of the layers it leaves out, as {{1: [3]}}, found {value_text(value)}"
        )
    return {
        one(rank, info): tuple(one(k, info) for k in (ks if isinstance(ks, list | tuple) else [ks]))
        for rank, ks in value.items()
    }


LayersByRank = Annotated[
    dict[int, tuple[int, ...]],
    PlainValidator(_parse_layers_by_rank),
    WithJsonSchema({"type": "object"}),
]


def _parse_buffer_sizes(value: object, info: ValidationInfo) -> dict[str, int]:
    """`2048` (of float32), or `{float32: 96, int64: 1}` in the order in which the model has
    them.
    """
    count = integer_at_least(0, "a number of elements")
    if not isinstance(value, Mapping):
        found = count(value, info)
        return {"float32": found} if found else {}
    for key in value:
        if key not in DTYPE_BYTES:
            raise ValueError(
                f"expected dtypes with their elements, as {{float32: 96, int64: 1}}, found {value_text(key)}{did_you_mean(key, DTYPE_BYTES)}"
            )
    return {str(key): count(item, info) for key, item in value.items()}


BufferSizes = Annotated[
    dict[str, int],
    PlainValidator(_parse_buffer_sizes),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "object"}]}),
]


def _parse_bool_by_rank(value: object) -> dict[int | str, bool]:
    if isinstance(value, bool):
        return {"else": value}
    if isinstance(value, Mapping) and all(isinstance(v, bool) for v in value.values()):
        return {key: item for key, item in value.items() if isinstance(key, int | str)}
    raise ValueError(
        f"expected true, false, or one of them by rank, as {{1: false, else: true}}, found {value_text(value)}"
    )


BoolByRank = Annotated[
    dict[int | str, bool],
    PlainValidator(_parse_bool_by_rank),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "object"}]}),
]


class DdpLayerFields(TrainableLayerFields):
    """A layer of a replicated model, whose parameters may be of a dtype of their own."""

    dtype: Dtype | None = None


class Ddp(LayeredModelStrategy):
    """Data parallel training: every rank has the whole model and reduces gradients in buckets while
    the backward pass goes on.
    """

    name: ClassVar[str] = "ddp"
    about: ClassVar[str] = (
        "DistributedDataParallel: the model is broadcast once; every iteration reduces gradients in buckets, beside the backward pass."
    )

    layers: tuple[DdpLayerFields, ...]
    #: Left out: the axis `dp` where the mesh has one, else all ranks.
    group: AxesOrGroup | None = None
    #: MiB; left out: 25, and 1 for the first bucket.
    bucket_cap_mb: NonNegativeFloat | None = None
    find_unused_parameters: StrictBool = False
    #: The graph never changes: the first iteration reduces when its backward pass is over, and
    #: tells what was used.
    static_graph: StrictBool = False
    #: Elements of all buffers (running means and the like), by dtype; they are broadcast before
    #: every forward pass.
    buffers: BufferSizes = {}
    #: false: buffers are broadcast at construction alone.
    forward_sync_buffers: StrictBool = True
    #: What reduces a bucket in the place of all_reduce.
    comm_hook: CommHookField | None = None
    #: Micro-batches of an iteration; `no_sync` reduces only after the last.
    accumulate: PositiveInt = 1
    no_sync: BoolByRank = {"else": True}
    optimizer: CostOrEntriesField | None = None
    #: ZeroRedundancyOptimizer: each rank updates some parameters, and broadcasts them.
    zero_redundancy_optimizer: StrictBool = False
    #: Forward passes alone, under no_grad.
    evaluate: StrictBool = False
    #: Batches that each rank has; `join` is the context manager for unequal numbers.
    inputs: IntByRank | None = None
    join: StrictBool = False
    #: Layers that a rank's forward pass leaves out.
    unused: LayersByRank = {}
    #: Layers that are frozen on a rank, and not on the others.
    frozen: LayersByRank = {}
    #: false: without construction, and with the buckets that hold from the second iteration on.
    setup: StrictBool = True

    @property
    def model(self) -> tuple[ModelLayer, ...]:
        """The layers in the order of the forward pass, each with its dtype."""
        return tuple(layer._replace(dtype=layer.dtype or self.dtype) for layer in super().model)

    def late(self, rank: int) -> bool:
        """Does a rank reduce after the last micro-batch alone?"""
        return self.no_sync.get(rank, self.no_sync.get("else", True))

    def group_of(self, context: ExpansionContext) -> GroupRef | None:
        return self.group if self.group is not None else "dp" if "dp" in context.mesh else None

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = context.refused(group=self.group)
        if self.inputs is not None and context.iterations > 1:
            found.append(
                (("inputs",), "`inputs` counts the batches of every rank; leave `iterations` at 1")
            )
        if self.join and self.inputs is None:
            found.append(
                (
                    ("join",),
                    "`join` is for unequal numbers of batches: give `inputs`, as {0: 3, else: 2}",
                )
            )
        if self.join and not found and context.size_of(self.group_of(context)) < context.world_size:
            found.append((("join",), "`join` is laid out for one group of all ranks"))
        if self.inputs is not None and self.accumulate > 1:
            found.append(
                (("accumulate",), "`inputs` counts single batches; leave `accumulate` at 1")
            )
        if (
            self.comm_hook is not None
            and self.comm_hook.rank
            and self.accumulate > 1
            and not self.late(0)
        ):
            found.append(
                (
                    ("comm_hook",),
                    "powersgd is laid out for one reduction an iteration: no_sync, or accumulate: 1",
                )
            )
        if self.bucket_cap_mb == 0:
            found.append((("bucket_cap_mb",), "expected a cap above 0"))
        return [*found, *self._refuse_ranks(context)]

    def compared(
        self, ranks: Sequence[int], all_ranks: Mapping[int, Strategy], steps: list[Entry]
    ) -> list[Entry]:
        """Models that differ by rank: who sees it raises where DistributedDataParallel is made."""
        models = {rank: made for rank, made in all_ranks.items() if isinstance(made, Ddp)}
        if len(models) < len(all_ranks) or any(
            made.group is not None or not made.setup for made in models.values()
        ):
            return steps
        return with_model_mismatch_errors(
            ranks, {rank: made.model for rank, made in models.items()}, steps
        )

    def _refuse_ranks(self, context: ExpansionContext) -> list[Refusal]:
        found: list[Refusal] = []
        n, layers = context.world_size, len(self.model)
        for key, rank, numbers in [
            (k, r, ns) for k in ("unused", "frozen") for r, ns in getattr(self, k).items()
        ]:
            if rank >= n:
                found.append(((key, rank), f"rank {rank} is outside the world of {n} ranks"))
            found += [
                ((key, rank), f"there is no layer {k}; the model has layers 0 to {layers - 1}")
                for k in numbers
                if k >= layers
            ]
        if not any(layer.params for layer in self.model):
            found.append(
                (
                    ("layers",),
                    "nothing learns: DistributedDataParallel is not needed, and PyTorch raises",
                )
            )
        strange = [
            key for key in self.no_sync if key != "else" and (not isinstance(key, int) or key >= n)
        ]
        found += (
            [
                (
                    ("no_sync",),
                    f"expected ranks of the world of {n}, or `else`, found {name_list(strange)}",
                )
            ]
            if strange
            else []
        )
        named = [rank for rank in self.inputs or () if isinstance(rank, int)]
        found += [
            (("inputs", rank), f"rank {rank} is outside the world of {n} ranks")
            for rank in named
            if rank >= n
        ]
        missing = (
            []
            if self.inputs is None or "else" in self.inputs
            else [r for r in range(n) if r not in self.inputs]
        )
        if missing:
            found.append((("inputs",), f"rank {missing[0]} has no entry, and there is no `else`"))
        return found

    def rounds(self, rank: int) -> int:
        """Batches that a rank has, by `inputs`."""
        inputs = self.inputs or {}
        return inputs.get(rank, inputs.get("else", 0))

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = DdpWriter if self.inputs is None else DdpJoinWriter
        return writer(self, context).expansion()
