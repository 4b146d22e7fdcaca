"""The fields of `ddp:` (torch.nn.parallel.DistributedDataParallel), and the checks of its layout.

``DdpFields`` does not expand: the calls are in `distsim.scenario.strategies.ddp.calls`, and
`distsim.scenario.strategies.ddp.strategy` joins both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.strategies.base import ExpansionContext, GroupRef, ModelLayer, Refusal
from distsim.scenario.strategies.ddp.buckets import (
    DTYPE_BYTES,
    bucket_cap_bytes,
    model_parameters,
    rebuilt_buckets,
)
from distsim.scenario.strategies.ddp.comm_hooks import CommHookField
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


# --- field types ---
def _parse_layers_by_rank(value: object, info: ValidationInfo) -> dict[int, tuple[int, ...]]:
    """`{1: [3]}`: layer 3 on rank 1."""
    parse = integer_at_least(0, "a rank or the number of a layer, an integer")
    if not isinstance(value, dict):
        raise ValueError(
            "expected ranks, each with the numbers of the layers that it skips, such "
            f"as {{1: [3]}}, found {value_text(value)}"
        )
    layers_by_rank: dict[int, tuple[int, ...]] = {}
    for rank, given in value.items():
        layers = given if isinstance(given, list | tuple) else [given]
        layers_by_rank[parse(rank, info)] = tuple(parse(layer, info) for layer in layers)
    return layers_by_rank


LayersByRank = Annotated[
    dict[int, tuple[int, ...]],
    PlainValidator(_parse_layers_by_rank),
    WithJsonSchema({"type": "object"}),
]


def _parse_buffer_sizes(value: object, info: ValidationInfo) -> dict[str, int]:
    """`2048` (of float32), or `{float32: 96, int64: 1}` in the order of the model."""
    parse_count = integer_at_least(0, "a number of elements")
    if not isinstance(value, Mapping):
        count = parse_count(value, info)
        return {"float32": count} if count else {}
    for key in value:
        if key not in DTYPE_BYTES:
            raise ValueError(
                "expected dtypes with numbers of elements, such as "
                f"{{float32: 96, int64: 1}}, found "
                f"{value_text(key)}{did_you_mean(key, DTYPE_BYTES)}"
            )
    return {str(key): parse_count(item, info) for key, item in value.items()}


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
        "expected true, false, or one of them by rank, such as "
        f"{{1: false, else: true}}, found {value_text(value)}"
    )


BoolByRank = Annotated[
    dict[int | str, bool],
    PlainValidator(_parse_bool_by_rank),
    WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "object"}]}),
]


# --- the fields ---
class DdpLayerFields(TrainableLayerFields):
    """A layer of a replicated model, whose parameters may be of a dtype of their own."""

    dtype: Dtype | None = None


class DdpFields(LayeredModelStrategy):
    """The fields of `ddp:` and the checks of their layout."""

    name: ClassVar[str] = "ddp"
    about: ClassVar[str] = (
        "DistributedDataParallel (DDP). It broadcasts the model once and all-reduces "
        "gradients in buckets during each backward pass."
    )

    layers: tuple[DdpLayerFields, ...] = Field(
        description=(
            "Layers of the model: parameters and times of each; `count` repeats a layer. One "
            "layer or a list."
        ),
        examples=[[{"params": 1048576, "forward": "1 ms", "backward": "2 ms", "count": 4}]],
    )
    group: AxesOrGroup | None = Field(
        default=None,
        description=(
            "Data-parallel ranks [default: the axis `dp` if the mesh has one, else all ranks]."
        ),
        examples=["dp"],
    )
    bucket_cap_mb: NonNegativeFloat | None = Field(
        default=None,
        description=(
            "Size of DDP's gradient buckets in MiB [default: 25, and 1 for the first bucket]."
        ),
        examples=[25],
        json_schema_extra={"x-unit": "MiB"},
    )
    find_unused_parameters: StrictBool = Field(
        default=False,
        description=(
            "Search each forward pass for unused parameters, and share the result among the ranks."
        ),
        examples=[True],
    )
    static_graph: StrictBool = Field(
        default=False,
        description=(
            "Promise that the set of used parameters never changes. The first iteration "
            "reduces all gradients after its backward pass."
        ),
        examples=[True],
    )
    buffers: BufferSizes = Field(
        default={},
        description=(
            "Number of elements of all module buffers (such as running means) by dtype. Rank 0 "
            "broadcasts them before each forward pass."
        ),
        examples=[{"float32": 2048, "int64": 16}],
    )
    forward_sync_buffers: StrictBool = Field(
        default=True,
        description="Broadcast buffers before each forward pass; false: only at construction.",
        examples=[False],
    )
    comm_hook: CommHookField | None = Field(
        default=None,
        description=(
            "DDP communication hook for each bucket: allreduce, fp16_compress, bf16_compress, "
            "or `{powersgd: RANK, start: ITERATION}`."
        ),
        examples=[{"powersgd": 1, "start": 10}],
    )
    accumulate: PositiveInt = Field(
        default=1, description="Gradient accumulation: micro-batches per iteration.", examples=[4]
    )
    no_sync: BoolByRank = Field(
        default={"else": True},
        description=(
            "Use no_sync(): reduce gradients only after the last micro-batch. Can differ by "
            "rank, to test this mistake."
        ),
        examples=[False],
    )
    optimizer: CostOrEntriesField | None = Field(
        default=None,
        description=(
            "Cost of the optimizer step: a time, `{flops, bytes}`, or entries that replace it."
        ),
        examples=["1 ms"],
    )
    zero_redundancy_optimizer: StrictBool = Field(
        default=False,
        description=(
            "Use ZeroRedundancyOptimizer (ZeRO-1): each rank updates some parameters and "
            "broadcasts them."
        ),
        examples=[True],
    )
    evaluate: StrictBool = Field(
        default=False,
        description="Run forward passes only, as under torch.no_grad().",
        examples=[True],
    )
    inputs: IntByRank | None = Field(
        default=None,
        description="Number of batches of each rank. Uneven inputs need `join`.",
        examples=[{0: 3, "else": 2}],
    )
    join: StrictBool = Field(
        default=False,
        description="Use the Join context manager for uneven inputs.",
        examples=[True],
    )
    unused: LayersByRank = Field(
        default={},
        description=(
            "Layers whose parameters a rank's forward pass does not use (unused parameters)."
        ),
        examples=[{1: [0]}],
    )
    frozen: LayersByRank = Field(
        default={},
        description=(
            "Layers that are frozen on one rank only (requires_grad=False). DDP's constructor "
            "raises."
        ),
        examples=[{1: [2]}],
    )
    setup: StrictBool = Field(
        default=True,
        description=(
            "Include DDP's construction: the broadcast of the model and the buckets of the "
            "first iteration."
        ),
        examples=[False],
    )

    @property
    def model(self) -> tuple[ModelLayer, ...]:
        """The layers in the order of the forward pass, each with its dtype."""
        return tuple(layer._replace(dtype=layer.dtype or self.dtype) for layer in super().model)

    def reduces_once(self, rank: int) -> bool:
        """Whether a rank reduces only after the last micro-batch (`no_sync`)."""
        return self.no_sync.get(rank, self.no_sync.get("else", True))

    def batches_of(self, rank: int) -> int:
        """The number of batches of a rank, from `inputs`."""
        inputs = self.inputs or {}
        return inputs.get(rank, inputs.get("else", 0))

    def group_of(self, context: ExpansionContext) -> GroupRef | None:
        if self.group is not None:
            return self.group
        return "dp" if "dp" in context.mesh else None

    # --- checks of the layout ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = context.refuse_groups(group=self.group)
        if self.inputs is not None and context.iterations > 1:
            refusals.append(
                (
                    ("inputs",),
                    "`inputs` sets the number of batches of every rank: remove `iterations`",
                )
            )
        refusals += self._refuse_join(context, is_group_known=not refusals)
        if self.inputs is not None and self.accumulate > 1:
            refusals.append(
                (("accumulate",), "`inputs` counts single batches: remove `accumulate`")
            )
        if self._powersgd_reduces_repeatedly():
            text = (
                "powersgd supports one reduction per iteration: set `no_sync: true` or "
                "`accumulate: 1`"
            )
            refusals.append((("comm_hook",), text))
        if self.bucket_cap_mb == 0:
            refusals.append((("bucket_cap_mb",), "expected a bucket size above 0"))
        return [
            *refusals,
            *self._refuse_layers_by_rank(context),
            *self._refuse_untrainable_model(),
            *self._refuse_static_graph_in_no_sync(context),
            *self._refuse_powersgd_on_gloo(context),
            *self._refuse_no_sync(context),
            *self._refuse_inputs(context),
        ]

    def _refuse_join(self, context: ExpansionContext, is_group_known: bool) -> list[Refusal]:
        if not self.join:
            return []
        if self.inputs is None:
            text = "`join` is for uneven inputs: set `inputs`, such as {0: 3, else: 2}"
            return [(("join",), text)]
        if is_group_known and context.size_of(self.group_of(context)) < context.world_size:
            return [(("join",), "`join` supports only the group of all ranks")]
        return []

    def _powersgd_reduces_repeatedly(self) -> bool:
        """Whether PowerSGD is asked for more than one reduction per iteration."""
        if self.comm_hook is None or not self.comm_hook.rank:
            return False
        return self.accumulate > 1 and not self.reduces_once(0)

    def _refuse_layers_by_rank(self, context: ExpansionContext) -> list[Refusal]:
        """Ranks and layers in `unused` and `frozen` that do not exist."""
        n = context.world_size
        layer_count = len(self.model)
        refusals: list[Refusal] = []
        for field, layers_by_rank in (("unused", self.unused), ("frozen", self.frozen)):
            for rank, layers in layers_by_rank.items():
                if rank >= n:
                    text = f"rank {rank} is outside the world of {n} ranks"
                    refusals.append(((field, rank), text))
                for layer in layers:
                    if layer >= layer_count:
                        text = f"there is no layer {layer}; the layers are 0 to {layer_count - 1}"
                        refusals.append(((field, rank), text))
        return refusals

    def _refuse_untrainable_model(self) -> list[Refusal]:
        if any(layer.params for layer in self.model):
            return []
        text = (
            "no parameter is trainable: PyTorch raises, because "
            "DistributedDataParallel is not needed"
        )
        return [(("layers",), text)]

    def _refuse_static_graph_in_no_sync(self, context: ExpansionContext) -> list[Refusal]:
        """A static graph whose first backward pass is inside no_sync().

        Later passes may be: torch 2.13 raises only if the first one does not reduce.
        """
        runs_first_backward = self.setup and not self.evaluate
        if not (self.static_graph and runs_first_backward and self.accumulate > 1):
            return []
        if not any(self.reduces_once(rank) for rank in range(context.world_size)):
            return []
        text = (
            "with `accumulate` and no_sync(), PyTorch raises in the first backward pass "
            "(expect_autograd_hooks_ INTERNAL ASSERT FAILED): set `no_sync: false` or "
            "`static_graph: false`"
        )
        return [(("static_graph",), text)]

    def _refuse_powersgd_on_gloo(self, context: ExpansionContext) -> list[Refusal]:
        """PowerSGD with several buckets on gloo, from the iteration in which it starts.

        The hook waits for each of its all_reduces inside a callback, which occupies one of gloo's
        two threads. In runs of torch 2.13, two buckets block both threads, or the ranks issue
        their all_reduces in different orders and a process aborts.
        """
        hook = self.comm_hook
        if hook is None or not hook.rank or context.backend != "gloo" or self.evaluate:
            return []
        iterations = context.iterations
        if self.inputs is not None:
            iterations = max(self.inputs.values())
        if iterations <= hook.start:
            return []
        cap = bucket_cap_bytes(self.bucket_cap_mb)
        params = model_parameters(self.model)
        count = len(rebuilt_buckets(params, self.itemsize, cap))
        if count < 2:
            return []
        text = (
            f"PowerSGD with {count} buckets hangs or aborts on gloo from iteration {hook.start} "
            "on: use `backend: nccl`, or set a `bucket_cap_mb` that holds the whole model in one "
            "bucket"
        )
        return [(("comm_hook",), text)]

    def _refuse_no_sync(self, context: ExpansionContext) -> list[Refusal]:
        """Keys of `no_sync` that are neither a rank nor `else`."""
        n = context.world_size
        keys = [key for key in self.no_sync if key != "else"]
        unknown = [key for key in keys if not isinstance(key, int) or key >= n]
        if not unknown:
            return []
        text = f"expected ranks below {n}, or `else`, found {name_list(unknown)}"
        return [(("no_sync",), text)]

    def _refuse_inputs(self, context: ExpansionContext) -> list[Refusal]:
        """Ranks in `inputs` that do not exist, and ranks without an entry."""
        if self.inputs is None:
            return []
        n = context.world_size
        named = [rank for rank in self.inputs if isinstance(rank, int)]
        refusals: list[Refusal] = [
            (("inputs", rank), f"rank {rank} is outside the world of {n} ranks")
            for rank in named
            if rank >= n
        ]
        if "else" in self.inputs:
            return refusals
        missing = [rank for rank in range(n) if rank not in self.inputs]
        if missing:
            text = f"rank {missing[0]} has no entry, and there is no `else`"
            refusals.append((("inputs",), text))
        return refusals
