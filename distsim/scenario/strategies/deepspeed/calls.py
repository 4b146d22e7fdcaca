"""The entries of `deepspeed:`: what all stages have in common, and the calls of ZeRO 1 and 2.

Gradients are reduced in buckets (`distsim.scenario.strategies.deepspeed.buckets`). Under nccl, with
overlap_comm, they are reduced on a stream of their own, which the current stream waits for before
the next bucket (`average_tensor`) and at the end. Parameters are gathered asynchronously under
every backend. ZeRO 3 is in `distsim.scenario.strategies.deepspeed.stage3_calls`.

Sources: DeepSpeed 0.19.8: `runtime/engine.py`, `runtime/zero/stage_1_and_2.py`, `stage3.py`,
`runtime/comm/coalesced_collectives.py` (qgZ), `partition_parameters.py` (CUDAQuantizer: qwZ).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod

from distsim.scenario.strategies.base import (
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    ModelLayer,
    block,
    compute,
    tensor_declaration,
)
from distsim.scenario.strategies.deepspeed.buckets import BucketPlan, large_gradient_pieces
from distsim.scenario.strategies.deepspeed.fields import DeepSpeedFields
from distsim.scenario.strategies.field_types import FLOAT_DTYPE_BYTES

#: The size of a rank's part of the flat parameters is a multiple of it
#: (`nccl_start_alignment_factor`).
_PART_ALIGNMENT = 2
#: Iterations that are written and compared; those after them equal the last one.
_DIFFERENT_ITERATIONS = 4


class DeepSpeedWriter(EntryWriter, ABC):
    """What the stages have in common. Parameters are numbered through all layers.

    ``skipped`` is a layer that some ranks do not run; their tensors have names of their own.
    """

    def __init__(
        self, fields: DeepSpeedFields, context: ExpansionContext, skipped: int | None = None
    ) -> None:
        suffix = "" if skipped is None else f"_without_{skipped}"
        super().__init__(
            context.unused_prefix("deepspeed") + suffix,
            fields.dtype,
            fields.data_parallel_group,
        )
        self.fields = fields
        self.context = context
        self.model = fields.model
        #: The layers that run, in order.
        self.run = [k for k in range(len(self.model)) if k != skipped]
        self.ranks = context.size_of(self.group)
        self.has_streams = context.has_streams
        self.shapes = [shape for layer in self.model for shape in layer.params]
        self.numel = [prod(shape) for shape in self.shapes]
        self.layer_of = [k for k, layer in enumerate(self.model) for _ in layer.params]
        self.params_of: list[list[int]] = [[] for _ in self.model]
        for param, layer in enumerate(self.layer_of):
            self.params_of[layer].append(param)

    # --- the whole ---
    def expansion(self) -> Expansion:
        """The engine's construction, then the iterations; different ones each with a condition."""
        construction = self.construction()
        iterations = self.iterations(min(self.context.iterations, _DIFFERENT_ITERATIONS))
        different = len(iterations)
        while different > 1 and iterations[different - 1] == iterations[different - 2]:
            different -= 1

        condition = "iteration == 0" if self.context.iterations > 1 else None
        steps = [block(construction, condition)]
        if different == 1:
            steps += iterations[0]
        else:
            last = different - 1
            for k, entries in enumerate(iterations[:last]):
                steps.append(block(entries, f"iteration == {k}"))
            steps.append(block(iterations[last], f"iteration >= {last}"))
        return Expansion(steps, self.tensors, self.groups())

    def groups(self) -> dict[str, Entry]:
        """Declarations of groups that the entries use."""
        return {}

    @abstractmethod
    def construction(self) -> list[Entry]:
        """The calls of the engine's constructor."""

    @abstractmethod
    def iterations(self, count: int) -> list[list[Entry]]:
        """The entries of the first ``count`` iterations; fewer if those after them are equal."""

    # --- calls of all stages ---
    def broadcast_parameters(self) -> list[Entry]:
        """Each parameter from group rank 0, as bytes."""
        itemsize = FLOAT_DTYPE_BYTES[self.fields.dtype]
        return [
            self.broadcast(tensor_declaration(numel * itemsize, "uint8")) for numel in self.numel
        ]

    def broadcast(self, tensor: Entry) -> Entry:
        """A broadcast from group rank 0."""
        return self.call("broadcast", tensor=tensor, group_src=0)

    def all_reduce_scalar(self, dtype: str, op: str) -> Entry:
        return self.call("all_reduce", tensor=tensor_declaration(1, dtype), op=op)

    def optimizer(self, reads: Sequence[str], writes: Sequence[str]) -> list[Entry]:
        cost = self.fields.optimizer
        if cost is None:
            return []
        return [compute("optimizer", cost, reads=list(reads), writes=list(writes))]

    def layer_backward(
        self,
        layer: ModelLayer,
        overwritten: Sequence[str],
        added: Sequence[str],
        reads: Sequence[str] = (),
    ) -> Entry:
        return compute(
            f"backward {layer.name}",
            layer.backward,
            reads=list(reads),
            writes=list(overwritten),
            adds=list(added),
        )

    # --- the stream of the reductions ---
    @property
    def has_reduction_stream(self) -> bool:
        """Whether gradients are reduced on a stream of their own."""
        return self.has_streams and self.fields.overlaps

    def on_reduction_stream(self) -> dict[str, str]:
        return {"on": f"{self.prefix}_reduce"} if self.has_reduction_stream else {}

    def wait_before_bucket(self) -> list[Entry]:
        """Before a bucket is reduced: its stream waits for the gradients that were computed.

        The current stream also waits for the buckets before.
        """
        if not self.has_reduction_stream:
            return []
        wait_for_gradients: Entry = {
            "wait_stream": {"stream": "current", **self.on_reduction_stream()}
        }
        return [wait_for_gradients, *self.wait_for_reductions()]

    def wait_for_reductions(self) -> list[Entry]:
        """The current stream waits for all reductions before."""
        if not self.has_reduction_stream:
            return []
        return [{"wait_stream": {"stream": f"{self.prefix}_reduce"}}]


class ZeroStage12Writer(DeepSpeedWriter):
    """ZeRO 1 and 2: all parameters in one flat tensor, of which each rank updates a part.

    ``reduces_early``: buckets are reduced during the backward pass, not only after the last one.
    """

    def __init__(
        self, fields: DeepSpeedFields, context: ExpansionContext, skipped: int | None = None
    ) -> None:
        super().__init__(fields, context, skipped)
        alignment = _PART_ALIGNMENT * self.ranks
        padded = -(-sum(self.numel) // alignment) * alignment
        self.part = padded // self.ranks
        self.reduces_early = fields.overlaps or fields.stage == 2
        #: Stage 2 reduces after each micro-batch and adds the results up (stage_1_and_2.py,
        #: independent_gradient_partition_epilogue).
        self.adds_reductions = fields.stage == 2 and fields.accumulate > 1
        order = [p for k in reversed(self.run) for p in reversed(self.params_of[k])]
        if not self.reduces_early:
            order.sort()
        self.plan = BucketPlan(order, self.numel, fields.reduce_bucket_size)
        for k, bucket in enumerate(self.plan.buckets):
            for j, numel in enumerate(self.call_sizes(bucket.params)):
                self.tensor(f"bucket_{k}_{j}", numel)
                if self.adds_reductions:
                    self.tensor(f"sum_{k}_{j}", numel)
        self.flat = self.tensor("parameters", padded)
        self.own_part = self.tensor("part", self.part)

    def call_sizes(self, params: Sequence[int]) -> list[int]:
        """Elements of each call that reduces a bucket.

        It is one call, except for a gradient that is larger than a bucket.
        """
        numel = sum(self.numel[p] for p in params)
        capacity = self.fields.reduce_bucket_size
        if numel <= capacity or not self.fields.reduce_scatter:
            return [numel]
        (param,) = params
        start = sum(self.numel[:param])
        return large_gradient_pieces(start, numel, self.part, capacity)

    def tensors_of_bucket(self, k: int, word: str = "bucket") -> list[str]:
        """The tensors of a bucket; with the word `sum` those that add up its reductions."""
        calls = len(self.call_sizes(self.plan.buckets[k].params))
        return [f"{self.prefix}_{word}_{k}_{j}" for j in range(calls)]

    def tensors_of_buckets(self, buckets: Sequence[int]) -> list[str]:
        return [name for k in buckets for name in self.tensors_of_bucket(k)]

    def construction(self) -> list[Entry]:
        return self.broadcast_parameters()

    def iterations(self, count: int) -> list[list[Entry]]:
        return [self.iteration()]

    def iteration(self) -> list[Entry]:
        all_buckets = range(len(self.plan.buckets))
        # Stage 2 reduces after each micro-batch, stage 1 only after the last.
        reduces_each = self.fields.stage == 2
        steps: list[Entry] = []
        for micro_batch in range(self.fields.accumulate):
            is_last = micro_batch == self.fields.accumulate - 1
            steps += self.forward()
            steps += self.backward(
                restarts=micro_batch == 0 or reduces_each,
                reduces=self.reduces_early and (is_last or reduces_each),
            )
            if self.adds_reductions:
                steps += self.add_reductions(is_first=micro_batch == 0)
        if not self.reduces_early:
            for k in all_buckets:
                steps += self.reduce(k)
        if self.fields.dtype != "float32":
            # Does any rank have an overflow?
            steps.append(self.all_reduce_scalar("uint8", "max"))
        word = "sum" if self.adds_reductions else "bucket"
        gradients = [name for k in all_buckets for name in self.tensors_of_bucket(k, word)]
        # The norm of all gradients.
        steps.append(self.all_reduce_scalar("float32", "sum"))
        steps += self.optimizer(gradients, [self.own_part])
        steps.append(self.call("all_gather_into_tensor", input=self.own_part, output=self.flat))
        return steps

    def add_reductions(self, is_first: bool) -> list[Entry]:
        """Add the reduced buckets of a micro-batch to those before."""
        steps: list[Entry] = []
        for k in range(len(self.plan.buckets)):
            buckets = self.tensors_of_bucket(k)
            totals = self.tensors_of_bucket(k, "sum")
            for bucket, total in zip(buckets, totals, strict=True):
                value = bucket if is_first else f"{total} + {bucket}"
                steps.append({"assign": {"tensor": total, "value": value}})
        return steps

    def forward(self) -> list[Entry]:
        layers = [self.model[k] for k in self.run]
        return [compute(f"forward {one.name}", one.forward, reads=[self.flat]) for one in layers]

    def backward(self, restarts: bool, reduces: bool) -> list[Entry]:
        """A backward pass; with ``restarts`` it overwrites the gradients, else it adds to them."""
        steps: list[Entry] = []
        started: set[int] = set()
        for k in reversed(self.run):
            buckets = self.plan.buckets_of(self.params_of[k])
            overwritten = [b for b in buckets if restarts and b not in started]
            added = [b for b in buckets if b not in overwritten]
            started.update(buckets)
            steps.append(
                self.layer_backward(
                    self.model[k],
                    self.tensors_of_buckets(overwritten),
                    self.tensors_of_buckets(added),
                    [self.flat],
                )
            )
            if reduces:
                for bucket in self.plan.sent_by(self.params_of[k]):
                    steps += self.reduce(bucket)
        if reduces:
            steps += [*self.reduce(len(self.plan.buckets) - 1), *self.wait_for_reductions()]
        return steps

    def reduce(self, k: int) -> list[Entry]:
        """The sum of a bucket; DeepSpeed divides the gradients before."""
        stream = self.on_reduction_stream()
        sums = [
            self.call("all_reduce", tensor=name, op="sum", **stream)
            for name in self.tensors_of_bucket(k)
        ]
        return [*self.wait_before_bucket(), *sums]
