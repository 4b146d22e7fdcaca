"""Megatron-Core's DistributedDataParallel with its distributed optimizer: gradients are scattered
as the backward pass goes, parameters gathered beside the next forward pass.

Source: Megatron-Core 0.20.0 (NVIDIA/Megatron-LM, commit d98e8a64dd),
`distributed/param_and_grad_buffer.py` (start_param_sync, finish_param_sync, start_grad_sync,
finish_grad_sync, register_grad_ready), `distributed/distributed_data_parallel.py` (bucket_size,
hooks), `optimizer/param_layout.py` (padding). Each bucket's call is made inside a
_coalescing_manager.
"""

from __future__ import annotations

from math import lcm, prod
from typing import ClassVar, NamedTuple

from pydantic import StrictBool

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

#: Elements to a multiple of which a parameter's start, and (with the ranks) a bucket's end, is
#: moved (`pad_param_start`, `pad_bucket_end`).
_PARAM_ALIGNMENT, _BUCKET_ALIGNMENT, _HIGH_BUSBW_ALIGNMENT = 64, 128, 2**16
#: bucket_size, in parameters: at least the first, and the second times the ranks.
_MIN_BUCKET_PARAMS, _BUCKET_PARAMS_PER_RANK = 40_000_000, 1_000_000


class _MegatronBucket(NamedTuple):
    """``layers``: which have parameters in it; ``last`` is the first of them in the model, whose
    gradients come last.
    """

    numel: int
    layers: frozenset[int]

    @property
    def last(self) -> int:
        return min(self.layers)


class MegatronDdp(LayeredModelStrategy):
    name: ClassVar[str] = "megatron_ddp"
    about: ClassVar[str] = (
        "Megatron-Core's data parallelism: buckets of gradients and parameters, distributed optimizer, both overlapped."
    )

    group: AxesOrGroup | None = None
    #: What gradients are reduced in (grad_reduce_in_fp32); left out, float32.
    grad_dtype: Dtype = "float32"
    #: Parameters in a bucket; left out: 40 million, or a million for each rank.
    bucket_size: PositiveInt | None = None
    pad_buckets_for_high_nccl_busbw: StrictBool = False
    use_distributed_optimizer: StrictBool = True
    overlap_grad_reduce: StrictBool = True
    overlap_param_gather: StrictBool = True
    average_in_collective: StrictBool = False
    accumulate: PositiveInt = 1
    clip_grad_norm: StrictBool = True
    optimizer: CostOrEntriesField | None = None
    #: {1: 2}: from iteration 1 on rank 1's passes leave out layer 2, whose gradients never come.
    skips_layer: IntByRank = {}

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = context.refuse_groups(group=self.group)
        if found:
            return found
        if self.overlap_param_gather and not (
            self.use_distributed_optimizer and self.overlap_grad_reduce
        ):
            # arguments.py: --overlap-param-gather needs both
            return (
                [
                    (
                        ("overlap_param_gather",),
                        "it needs use_distributed_optimizer and overlap_grad_reduce",
                    )
                ]
                if ("overlap_param_gather" in self.model_fields_set)
                else []
            )
        strange = [
            r
            for r, k in self.skips_layer.items()
            if r not in range(context.world_size) or k not in range(len(self.model))
        ]
        if strange:
            return [
                (
                    ("skips_layer", strange[0]),
                    f"layers are 0 to {len(self.model) - 1}, ranks 0 to {context.world_size - 1}",
                )
            ]
        return []

    def expand(self, context: ExpansionContext) -> Expansion:
        return _MegatronDdpWriter(self, context).expansion()


class _MegatronDdpWriter(EntryWriter):
    """Buckets are numbered in the order in which their gradients come, so that the forward pass
    begins with the last.
    """

    def __init__(self, fields: MegatronDdp, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.group)
        self.f, self.context, self.n, self.model = (
            fields,
            context,
            context.size_of(fields.group),
            fields.model,
        )
        self.gathers = (
            fields.use_distributed_optimizer
            and fields.overlap_param_gather
            and fields.overlap_grad_reduce
        )
        self.buckets = self._buckets()
        for k, bucket in enumerate(self.buckets):
            self.tensor(f"grads_{k}", bucket.numel, fields.grad_dtype)
            self.tensor(f"params_{k}", bucket.numel)
            if fields.use_distributed_optimizer:
                self.tensor(f"grad_part_{k}", bucket.numel // self.n, fields.grad_dtype)
                self.tensor(f"param_part_{k}", bucket.numel // self.n)

    def _buckets(self) -> list[_MegatronBucket]:
        """`_compute_default_per_buffer_param_layout`, with the distributed optimizer's padding."""
        f, found, start, layers = self.f, list[_MegatronBucket](), 0, set[int]()
        most = (
            (f.bucket_size or max(_MIN_BUCKET_PARAMS, _BUCKET_PARAMS_PER_RANK * self.n))
            if f.overlap_grad_reduce
            else None
        )
        ends = lcm(
            self.n,
            _BUCKET_ALIGNMENT,
            _HIGH_BUSBW_ALIGNMENT if f.pad_buckets_for_high_nccl_busbw else 1,
        )
        shards = f.use_distributed_optimizer
        numels = [(k, prod(shape)) for k, layer in enumerate(self.model) for shape in layer.params]
        for k, numel in numels[::-1]:
            start = -(-start // _PARAM_ALIGNMENT) * _PARAM_ALIGNMENT if shards else start
            start, layers = start + numel, {*layers, k}
            if most is not None and start >= most:
                found.append(
                    _MegatronBucket(
                        -(-start // ends) * ends if shards else start, frozenset(layers)
                    )
                )
                start, layers = 0, set()
        if layers:
            found.append(
                _MegatronBucket(-(-start // ends) * ends if shards else start, frozenset(layers))
            )
        return found

    def names(self, word: str, layer: int) -> list[str]:
        return [
            f"{self.prefix}_{word}_{k}"
            for k, bucket in enumerate(self.buckets)
            if layer in bucket.layers
        ]

    # --- the whole ---
    def expansion(self) -> Expansion:
        first, later = self.iteration(True, None), self.iteration(False, None)
        if self.context.iterations < 2:
            return Expansion(first, self.tensors)
        rows = [block(first, "iteration == 0")]
        skips = self.f.skips_layer
        others = "".join(f" and rank != {rank}" for rank in skips)
        rows.append(block(later, f"iteration > 0{others}"))
        rows += [
            block(self.iteration(False, layer), f"iteration > 0 and rank == {rank}")
            for rank, layer in skips.items()
        ]
        return Expansion(rows, self.tensors)

    def iteration(self, first: bool, skipped: int | None) -> list[Entry]:
        """In the first one nothing is gathered, as the forward hooks are enabled after it, and
        gradients go out when all have come.
        """
        steps: list[Entry] = []
        run = [k for k in range(len(self.model)) if k != skipped]
        for micro in range(self.f.accumulate):
            steps += self.forward(run, gathers=self.gathers and not first and micro == 0)
            last = micro == self.f.accumulate - 1
            steps += self.backward(
                run, fresh=micro == 0, sends=last and self.f.overlap_grad_reduce and not first
            )
        lacking = (
            [] if skipped is None or first else [b for b in self.buckets if skipped in b.layers]
        )
        if lacking and self.f.overlap_grad_reduce:
            return [
                *steps,
                {"fail": "AssertionError: Communication call has not been issued for this bucket"},
            ]
        return [*steps, *self.settled(first), *self.updated()]

    # --- parts ---
    def forward(self, run: list[int], gathers: bool) -> list[Entry]:
        """finish_param_sync before each layer: its buckets are waited for, and the next one is sent
        for.
        """
        steps: list[Entry] = []
        coming = len(self.buckets)  # buckets down to this one are there or on their way
        there = len(self.buckets) if gathers else 0
        for k in run:
            for b in reversed(range(len(self.buckets))):
                if k not in self.buckets[b].layers or b >= there:
                    continue
                if b < coming:
                    steps.append(self.gather(b, True))
                    coming = b
                steps.append(wait(f"{self.prefix}_gathered@{b}"))
                there = b
                if b and b - 1 < coming:
                    steps.append(self.gather(b - 1, True))
                    coming = b - 1
            steps.append(
                compute(
                    f"forward {self.model[k].name}",
                    self.model[k].forward,
                    reads=self.names("params", k),
                )
            )
        return steps

    def backward(self, run: list[int], fresh: bool, sends: bool) -> list[Entry]:
        steps, begun = list[Entry](), set[str]()
        for k in reversed(run):
            mine, word = self.names("grads", k), "writes" if fresh else "adds"
            new = [name for name in mine if fresh and name not in begun]
            begun.update(mine)
            sums = (
                {word: new, "adds": [name for name in mine if name not in new]}
                if fresh
                else {"adds": mine}
            )
            steps.append(
                compute(
                    f"backward {self.model[k].name}",
                    self.model[k].backward,
                    reads=self.names("params", k),
                    **sums,
                )
            )
            steps += (
                [self.reduce(b, True) for b, bucket in enumerate(self.buckets) if bucket.last == k]
                if sends
                else []
            )
        return steps

    def gather(self, b: int, overlapped: bool) -> Entry:
        handle = {"async_": True, "as_": f"{self.prefix}_gathered@{b}"} if overlapped else {}
        part, whole = f"{self.prefix}_param_part_{b}", f"{self.prefix}_params_{b}"
        return self.call("all_gather_into_tensor_coalesced", input=[part], output=[whole], **handle)

    def reduce(self, b: int, overlapped: bool) -> Entry:
        handle = {"async_": True, "as_": f"{self.prefix}_reduced@{b}"} if overlapped else {}
        op, grads = "avg" if self.f.average_in_collective else "sum", f"{self.prefix}_grads_{b}"
        if not self.f.use_distributed_optimizer:
            return self.call("all_reduce_coalesced", tensor=[grads], op=op, **handle)
        return self.call(
            "reduce_scatter_tensor_coalesced",
            input=[grads],
            output=[f"{self.prefix}_grad_part_{b}"],
            op=op,
            **handle,
        )

    def settled(self, first: bool) -> list[Entry]:
        """finish_grad_sync of each bucket: in the first iteration it is sent here; without overlap
        it is sent and waited for.
        """
        steps: list[Entry] = []
        for b in range(len(self.buckets)):
            if first or not self.f.overlap_grad_reduce:
                steps.append(self.reduce(b, self.f.overlap_grad_reduce))
            steps += [wait(f"{self.prefix}_reduced@{b}")] if self.f.overlap_grad_reduce else []
        return steps

    def updated(self) -> list[Entry]:
        """The norm of the gradients, the update of the own part, and without overlap the
        gathering.
        """
        shards, count = self.f.use_distributed_optimizer, len(self.buckets)
        norm = (
            [
                step(
                    "all_reduce",
                    tensor=tensor_declaration(1, "float32"),
                    op="sum",
                    group=self.group,
                )
            ]
            if self.f.clip_grad_norm and shards
            else []
        )
        words = ("grad_part", "param_part") if shards else ("grads", "params")
        reads, writes = ([f"{self.prefix}_{word}_{b}" for b in range(count)] for word in words)
        update = (
            []
            if self.f.optimizer is None
            else [compute("optimizer", self.f.optimizer, reads=reads, writes=writes)]
        )
        gathered = (
            [self.gather(b, False) for b in range(count)] if shards and not self.gathers else []
        )
        return [*norm, *update, *gathered]
