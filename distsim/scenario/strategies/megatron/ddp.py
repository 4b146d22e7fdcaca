"""The strategy `megatron_ddp`: Megatron-Core's DistributedDataParallel and distributed optimizer.

Gradients are scattered during the backward pass, and parameters are gathered during the next
forward pass.

Source: Megatron-Core 0.20.0 (NVIDIA/Megatron-LM, commit d98e8a64dd),
`distributed/param_and_grad_buffer.py` (start_param_sync, finish_param_sync, start_grad_sync,
finish_grad_sync, register_grad_ready), `distributed/distributed_data_parallel.py` (bucket_size,
hooks), `optimizer/param_layout.py` (padding). Each bucket's call is made inside a
_coalescing_manager.
"""

from __future__ import annotations

from math import lcm, prod
from typing import ClassVar, NamedTuple

from pydantic import Field, StrictBool

from distsim.scenario.strategies.base import (
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    Refusal,
    block,
    compute,
    step,
    tensor_declaration,
    wait,
)
from distsim.scenario.strategies.field_types import (
    AxesOrGroup,
    CostOrEntriesField,
    Dtype,
    IntByRank,
    PositiveInt,
)
from distsim.scenario.strategies.layers import LayeredModelStrategy

#: A parameter's start is padded to a multiple of this many elements (`pad_param_start`).
_PARAM_ALIGNMENT = 64
#: A bucket's end is padded to a multiple of the ranks and of these (`pad_bucket_end`).
_BUCKET_ALIGNMENT = 128
_HIGH_BUSBW_ALIGNMENT = 2**16
#: The default bucket_size in parameters is the larger of these, the second times the ranks.
_MIN_BUCKET_PARAMS = 40_000_000
_BUCKET_PARAMS_PER_RANK = 1_000_000


class _MegatronBucket(NamedTuple):
    """A bucket of ``numel`` elements; ``layers`` have parameters in it."""

    numel: int
    layers: frozenset[int]

    @property
    def last(self) -> int:
        """The layer whose gradients become ready last: the first one in the model."""
        return min(self.layers)


class MegatronDdp(LayeredModelStrategy):
    name: ClassVar[str] = "megatron_ddp"
    about: ClassVar[str] = (
        "Megatron-Core's DistributedDataParallel: gradient buckets and the distributed "
        "optimizer (ZeRO-1), both overlapped with compute."
    )

    group: AxesOrGroup | None = Field(
        default=None, description="Data-parallel ranks [default: all ranks].", examples=["dp"]
    )
    grad_dtype: Dtype = Field(
        default="float32",
        description=("Dtype in which gradients are accumulated and reduced (grad_reduce_in_fp32)."),
        examples=["float32"],
    )
    bucket_size: PositiveInt | None = Field(
        default=None,
        description=(
            "Number of parameters in a bucket [default: 40 million, or one million per rank if "
            "that is more]."
        ),
        examples=[40000000],
    )
    pad_buckets_for_high_nccl_busbw: StrictBool = Field(
        default=False, description="Pad buckets to a multiple of 65536 elements.", examples=[True]
    )
    use_distributed_optimizer: StrictBool = Field(
        default=True,
        description=(
            "Use the distributed optimizer (ZeRO-1): each rank updates its part of every "
            "bucket. false: all-reduce the gradients."
        ),
        examples=[False],
    )
    overlap_grad_reduce: StrictBool = Field(
        default=True,
        description=(
            "Reduce a bucket as soon as its gradients are ready. false: reduce one bucket at "
            "the end."
        ),
        examples=[False],
    )
    overlap_param_gather: StrictBool = Field(
        default=True,
        description=(
            "Gather parameters during the next forward pass. false: gather them after the "
            "optimizer step."
        ),
        examples=[False],
    )
    average_in_collective: StrictBool = Field(
        default=False,
        description=(
            "Average gradients in the collective (op avg) instead of scaling them before it."
        ),
        examples=[True],
    )
    accumulate: PositiveInt = Field(
        default=1, description="Gradient accumulation: micro-batches per iteration.", examples=[4]
    )
    clip_grad_norm: StrictBool = Field(
        default=True,
        description="Clip gradients: all-reduce their norms before the optimizer step.",
        examples=[True],
    )
    optimizer: CostOrEntriesField | None = Field(
        default=None,
        description=(
            "Cost of the optimizer step: a time, `{flops, bytes}`, or entries that replace it."
        ),
        examples=["1 ms"],
    )
    skips_layer: IntByRank = Field(
        default={},
        description="Ranks that skip one layer from the second iteration on: `{RANK: LAYER}`.",
        examples=[{1: 0}],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = context.refuse_groups(group=self.group)
        if refusals:
            return refusals
        if self.overlap_param_gather and not self.can_overlap_param_gather:
            if "overlap_param_gather" not in self.model_fields_set:
                return []
            # arguments.py: --overlap-param-gather needs both
            text = "overlap_param_gather needs use_distributed_optimizer and overlap_grad_reduce"
            return [(("overlap_param_gather",), text)]
        return self._refuse_skips_layer(context)

    def _refuse_skips_layer(self, context: ExpansionContext) -> list[Refusal]:
        ranks = range(context.world_size)
        layers = range(len(self.model))
        unknown = [
            rank
            for rank, layer in self.skips_layer.items()
            if rank not in ranks or layer not in layers
        ]
        if not unknown:
            return []
        text = f"layers are 0 to {len(self.model) - 1}, ranks 0 to {context.world_size - 1}"
        return [(("skips_layer", unknown[0]), text)]

    @property
    def can_overlap_param_gather(self) -> bool:
        return self.use_distributed_optimizer and self.overlap_grad_reduce

    def expand(self, context: ExpansionContext) -> Expansion:
        return _MegatronDdpWriter(self, context).expansion()


class _MegatronDdpWriter(EntryWriter):
    """Writes the entries of one model.

    Buckets are numbered in the order in which their gradients become ready, so the forward pass
    begins with the last one.
    """

    def __init__(self, fields: MegatronDdp, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.group)
        self.fields = fields
        self.context = context
        self.ranks = context.size_of(fields.group)
        self.model = fields.model
        #: Parameters are gathered during the forward pass, not after the update.
        self.overlaps_gathers = fields.overlap_param_gather and fields.can_overlap_param_gather
        self.buckets = self._buckets()
        for k, bucket in enumerate(self.buckets):
            self.tensor(f"grads_{k}", bucket.numel, fields.grad_dtype)
            self.tensor(f"params_{k}", bucket.numel)
            if fields.use_distributed_optimizer:
                self.tensor(f"grad_part_{k}", bucket.numel // self.ranks, fields.grad_dtype)
                self.tensor(f"param_part_{k}", bucket.numel // self.ranks)

    # --- buckets ---
    def _buckets(self) -> list[_MegatronBucket]:
        """`_compute_default_per_buffer_param_layout`, with the distributed optimizer's padding."""
        is_sharded = self.fields.use_distributed_optimizer
        capacity = self._bucket_capacity()
        buckets: list[_MegatronBucket] = []
        numel = 0
        layers: set[int] = set()
        for layer, param_numel in reversed(self._parameters()):
            if is_sharded:
                numel = _rounded_up(numel, _PARAM_ALIGNMENT)
            numel += param_numel
            layers.add(layer)
            if capacity is not None and numel >= capacity:
                buckets.append(self._closed_bucket(numel, layers))
                numel = 0
                layers = set()
        if layers:
            buckets.append(self._closed_bucket(numel, layers))
        return buckets

    def _parameters(self) -> list[tuple[int, int]]:
        """(layer, elements) of each parameter in the model's order."""
        return [(k, prod(shape)) for k, layer in enumerate(self.model) for shape in layer.params]

    def _bucket_capacity(self) -> int | None:
        """Parameters at which a bucket is closed; None: a single bucket."""
        if not self.fields.overlap_grad_reduce:
            return None
        default = max(_MIN_BUCKET_PARAMS, _BUCKET_PARAMS_PER_RANK * self.ranks)
        return self.fields.bucket_size or default

    def _closed_bucket(self, numel: int, layers: set[int]) -> _MegatronBucket:
        """A bucket whose end is padded if it is divided among the ranks."""
        if self.fields.use_distributed_optimizer:
            alignment = lcm(self.ranks, _BUCKET_ALIGNMENT)
            if self.fields.pad_buckets_for_high_nccl_busbw:
                alignment = lcm(alignment, _HIGH_BUSBW_ALIGNMENT)
            numel = _rounded_up(numel, alignment)
        return _MegatronBucket(numel, frozenset(layers))

    def tensors_of_layer(self, word: str, layer: int) -> list[str]:
        """The tensors of the buckets that hold parameters of a layer."""
        return [
            f"{self.prefix}_{word}_{k}"
            for k, bucket in enumerate(self.buckets)
            if layer in bucket.layers
        ]

    # --- the whole ---
    def expansion(self) -> Expansion:
        first = self.iteration(is_first=True, skipped=None)
        if self.context.iterations < 2:
            return Expansion(first, self.tensors)
        skips = self.fields.skips_layer
        others = "".join(f" and rank != {rank}" for rank in skips)
        later = self.iteration(is_first=False, skipped=None)
        steps = [block(first, "iteration == 0"), block(later, f"iteration > 0{others}")]
        for rank, layer in skips.items():
            own = self.iteration(is_first=False, skipped=layer)
            steps.append(block(own, f"iteration > 0 and rank == {rank}"))
        return Expansion(steps, self.tensors)

    def iteration(self, is_first: bool, skipped: int | None) -> list[Entry]:
        """An iteration of ranks that skip a layer, or of all others (None).

        In the first iteration no parameters are gathered, because the forward hooks are enabled
        after it, and gradients are reduced when all of them are ready.
        """
        overlaps = self.fields.overlap_grad_reduce
        steps: list[Entry] = []
        run = [k for k in range(len(self.model)) if k != skipped]
        for micro_batch in range(self.fields.accumulate):
            restarts = micro_batch == 0
            is_last = micro_batch == self.fields.accumulate - 1
            steps += self.forward(run, self.overlaps_gathers and not is_first and restarts)
            steps += self.backward(run, restarts, reduces=is_last and overlaps and not is_first)
        if overlaps and self.has_bucket_of(skipped):
            # A bucket that lacks gradients was never sent.
            message = "AssertionError: Communication call has not been issued for this bucket"
            return [*steps, {"fail": message}]
        return [*steps, *self.finish_gradients(is_first), *self.update()]

    def has_bucket_of(self, layer: int | None) -> bool:
        return any(layer in bucket.layers for bucket in self.buckets)

    # --- passes ---
    def forward(self, run: list[int], gathers: bool) -> list[Entry]:
        """finish_param_sync before each layer waits for its buckets and prefetches the next one.

        Buckets are gathered from the last to the first. ``requested`` and ``available`` are the
        lowest bucket that was asked for, and that was waited for.
        """
        steps: list[Entry] = []
        requested = len(self.buckets)
        available = len(self.buckets) if gathers else 0
        for k in run:
            for b in reversed(range(len(self.buckets))):
                if k not in self.buckets[b].layers or b >= available:
                    continue
                if b < requested:
                    steps.append(self.start_gather(b))
                    requested = b
                steps.append(wait(f"{self.prefix}_gathered@{b}"))
                available = b
                if b and b - 1 < requested:
                    steps.append(self.start_gather(b - 1))
                    requested = b - 1
            layer = self.model[k]
            params = self.tensors_of_layer("params", k)
            steps.append(compute(f"forward {layer.name}", layer.forward, reads=params))
        return steps

    def backward(self, run: list[int], restarts: bool, reduces: bool) -> list[Entry]:
        """A backward pass; with ``restarts`` it overwrites the gradients, else it adds to them."""
        steps: list[Entry] = []
        started: set[str] = set()
        for k in reversed(run):
            grads = self.tensors_of_layer("grads", k)
            overwritten = [name for name in grads if restarts and name not in started]
            started.update(grads)
            layer = self.model[k]
            steps.append(
                compute(
                    f"backward {layer.name}",
                    layer.backward,
                    reads=self.tensors_of_layer("params", k),
                    writes=overwritten,
                    adds=[name for name in grads if name not in overwritten],
                )
            )
            if reduces:
                ready = [b for b, bucket in enumerate(self.buckets) if bucket.last == k]
                steps += [self.start_reduction(b) for b in ready]
        return steps

    # --- collectives ---
    def start_gather(self, b: int) -> Entry:
        return self.gather(b, async_=True, as_=f"{self.prefix}_gathered@{b}")

    def gather(self, b: int, **handle: object) -> Entry:
        return self.call(
            "all_gather_into_tensor_coalesced",
            input=[f"{self.prefix}_param_part_{b}"],
            output=[f"{self.prefix}_params_{b}"],
            **handle,
        )

    def start_reduction(self, b: int) -> Entry:
        return self.reduce(b, async_=True, as_=f"{self.prefix}_reduced@{b}")

    def reduce(self, b: int, **handle: object) -> Entry:
        op = "avg" if self.fields.average_in_collective else "sum"
        grads = f"{self.prefix}_grads_{b}"
        if not self.fields.use_distributed_optimizer:
            return self.call("all_reduce_coalesced", tensor=[grads], op=op, **handle)
        return self.call(
            "reduce_scatter_tensor_coalesced",
            input=[grads],
            output=[f"{self.prefix}_grad_part_{b}"],
            op=op,
            **handle,
        )

    def finish_gradients(self, is_first: bool) -> list[Entry]:
        """finish_grad_sync of each bucket.

        In the first iteration buckets are sent here; without overlap they are reduced here, by
        blocking calls.
        """
        buckets = range(len(self.buckets))
        if not self.fields.overlap_grad_reduce:
            return [self.reduce(b) for b in buckets]
        steps: list[Entry] = []
        for b in buckets:
            if is_first:
                steps.append(self.start_reduction(b))
            steps.append(wait(f"{self.prefix}_reduced@{b}"))
        return steps

    def update(self) -> list[Entry]:
        """The norm of the gradients, the update of the rank's own part, and the gathers.

        With overlap, the next forward pass gathers instead.
        """
        is_sharded = self.fields.use_distributed_optimizer
        buckets = range(len(self.buckets))
        steps: list[Entry] = []
        if self.fields.clip_grad_norm and is_sharded:
            norm = tensor_declaration(1, "float32")
            steps.append(step("all_reduce", tensor=norm, op="sum", group=self.group))
        if self.fields.optimizer is not None:
            read, written = ("grad_part", "param_part") if is_sharded else ("grads", "params")
            reads = [f"{self.prefix}_{read}_{b}" for b in buckets]
            writes = [f"{self.prefix}_{written}_{b}" for b in buckets]
            steps.append(compute("optimizer", self.fields.optimizer, reads=reads, writes=writes))
        if is_sharded and not self.overlaps_gathers:
            steps += [self.gather(b) for b in buckets]
        return steps


def _rounded_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple
