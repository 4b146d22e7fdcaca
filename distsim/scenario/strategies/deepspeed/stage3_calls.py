"""The entries of DeepSpeed's ZeRO 3 and ZeRO++.

Parameters are gathered when the coordinator says so
(`distsim.scenario.strategies.deepspeed.param_coordinator`), gradients are scattered in buckets. The
first iterations differ from the rest, as the coordinator learns the order of the modules.

Sources: see `distsim.scenario.strategies.deepspeed.calls`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distsim.scenario.strategies.base import (
    Entry,
    ExpansionContext,
    GroupRef,
    compute,
    step,
    tensor_declaration,
    wait,
)
from distsim.scenario.strategies.deepspeed.buckets import BucketPlan
from distsim.scenario.strategies.deepspeed.calls import DeepSpeedWriter
from distsim.scenario.strategies.deepspeed.fields import DeepSpeedFields
from distsim.scenario.strategies.deepspeed.param_coordinator import (
    FetchLimits,
    ParameterCoordinator,
    ParameterGather,
)

#: qwZ: elements that share a scale (`CUDAQuantizer.target_group_size`).
_ELEMENTS_PER_SCALE = 8000


class _GatherGroup(NamedTuple):
    """The group of a gather, and the number of its ranks."""

    group: GroupRef | None
    ranks: int


class ZeroStage3Writer(DeepSpeedWriter):
    """Every parameter is split into equal parts, padded, on all ranks."""

    def __init__(
        self, fields: DeepSpeedFields, context: ExpansionContext, skipped: int | None = None
    ) -> None:
        super().__init__(fields, context, skipped)
        self.parts = [-(-numel // self.ranks) for numel in self.numel]
        self.hpz_ranks = fields.zero_hpz_partition_size
        self.coordinator = ParameterCoordinator(
            [[self.numel[p] for p in params] for params in self.params_of],
            self.run,
            FetchLimits(
                fields.stage3_prefetch_bucket_size,
                fields.stage3_max_reuse_distance,
                fields.stage3_max_live_parameters,
                fields.stage3_param_persistence_threshold,
            ),
            keeps_second_copy=self.hpz_ranks > 1,
        )
        self.order = [p for k in reversed(self.run) for p in self.params_of[k]]
        self.plan = BucketPlan(self.order, self.numel, fields.reduce_bucket_size)
        #: Gathers of this iteration so far; they number the handles.
        self.gather_count = 0
        #: The handles of each parameter's gathers that were not waited for.
        self.open_handles: dict[int, list[str]] = {}
        self.declare_tensors()

    def declare_tensors(self) -> None:
        for k, params in enumerate(self.params_of):
            part = sum(self.parts[p] for p in params)
            self.tensor(f"shard_{k}", part)
            self.tensor(f"whole_{k}", part * self.ranks)
            self.tensor(f"grads_{k}", part * self.ranks)
        for k, bucket in enumerate(self.plan.buckets):
            part = sum(self.parts[p] for p in bucket.params)
            self.tensor(f"bucket_{k}", part * self.ranks)
            self.tensor(f"scattered_{k}", part)
            if self.adds_shards:
                self.tensor(f"more_{k}", part)

    def groups(self) -> dict[str, Entry]:
        groups: dict[str, Entry] = {}
        if self.hpz_ranks > 1:
            groups[f"{self.prefix}_hpz"] = {"by": f"rank - rank % {self.hpz_ranks}"}
        if self.quantizes_gradients:
            groups[f"{self.prefix}_local"] = {"by": "node"}
            groups[f"{self.prefix}_global"] = {"by": "local_rank"}
        return groups

    @property
    def adds_shards(self) -> bool:
        """Whether the reduced shards of several micro-batches are added up.

        DeepSpeed adds them to the rank's partition (stage3.py, partition_grads). With qgZ the
        reductions have tensors of their own.
        """
        return self.fields.accumulate > 1 and not self.quantizes_gradients

    @property
    def quantizes_gradients(self) -> bool:
        """Whether gradients are sent with 4 bits.

        They are if there are several nodes; on one node they are scattered as without qgZ.
        """
        has_several_nodes = self.context.world_size > self.context.ranks_per_node
        return self.fields.zero_quantized_gradients and has_several_nodes

    # --- before the first iteration, and the trace ---
    def construction(self) -> list[Entry]:
        """The parameters from rank 0, twice; barriers; a gather of each for the float32 copies."""
        barriers = [self.call("barrier")] * 3
        gathers = [self.gather_master_copy(param) for param in range(len(self.numel))]
        return [*self.broadcast_parameters(), *self.broadcast_parameters(), *barriers, *gathers]

    def compare_traces(self) -> list[Entry]:
        """The check that all ranks have the same trace, during the first two passes.

        Lists of integers are broadcast, each after its length (`assert_ints_same_as_other_ranks`).
        """
        if self.coordinator.passes > 1:
            return []
        lengths = [0]
        if self.coordinator.passes == 1:
            modules = len(self.coordinator.trace)
            params = 2 * len(self.order)
            lengths = [modules, params, params]
        steps: list[Entry] = []
        for length in lengths:
            steps.append(self.broadcast(tensor_declaration(1, "int64")))
            steps.append(self.broadcast(tensor_declaration(length, "int64")))
        return steps

    # --- iterations ---
    def iterations(self, count: int) -> list[list[Entry]]:
        return [self.iteration() for _ in range(count)]

    def iteration(self) -> list[Entry]:
        self.gather_count = 0
        steps: list[Entry] = []
        for micro_batch in range(self.fields.accumulate):
            adds_to_shards = micro_batch > 0 and self.adds_shards
            steps += [*self.compare_traces(), *self.forward(), *self.backward(adds_to_shards)]
            self.coordinator.end_pass()
        return steps + self.update()

    def update(self) -> list[Entry]:
        steps: list[Entry] = []
        if self.fields.dtype == "float16":
            # Does any rank have an overflow?
            steps.append(self.all_reduce_scalar("uint8", "max"))
        # The norm of all gradients.
        steps.append(self.all_reduce_scalar("float64", "sum"))
        gradients = [f"{self.prefix}_scattered_{k}" for k in range(len(self.plan.buckets))]
        shards = [f"{self.prefix}_shard_{k}" for k in range(len(self.model))]
        steps += self.optimizer(gradients, shards)
        gathers = self.coordinator.after_optimizer()
        steps += self.start_gathers(gathers)
        return steps + self.wait_for([p for gather in gathers for p in gather.params])

    def forward(self) -> list[Entry]:
        steps = self.fetch_module(None)
        for k in self.run:
            layer = self.model[k]
            steps += self.fetch_module(k)
            steps.append(
                compute(f"forward {layer.name}", layer.forward, reads=[f"{self.prefix}_whole_{k}"])
            )
            self.coordinator.release(k)
        return steps

    def backward(self, adds_to_shards: bool) -> list[Entry]:
        """A backward pass with the reductions of its buckets.

        Every pass overwrites the buckets, even with gradient accumulation. With ``adds_to_shards``
        the reduced shards are added to those of the micro-batches before.
        """
        steps = self.fetch_module(None)
        started: set[int] = set()
        for k in reversed(self.run):
            buckets = self.plan.buckets_of(self.params_of[k])
            overwritten = [f"{self.prefix}_bucket_{b}" for b in buckets if b not in started]
            added = [f"{self.prefix}_bucket_{b}" for b in buckets if b in started]
            started.update(buckets)
            steps += self.fetch_module(k)
            steps.append(
                self.layer_backward(self.model[k], overwritten, added, [f"{self.prefix}_whole_{k}"])
            )
            for bucket in self.plan.sent_by(self.params_of[k]):
                steps += self.reduce(bucket, adds_to_shards)
            if k != self.run[0]:
                self.coordinator.release(k)
        self.coordinator.release_leftovers(self.run[0])
        if self.plan.buckets:
            steps += self.reduce(len(self.plan.buckets) - 1, adds_to_shards)
        steps += self.wait_for_reductions()
        if adds_to_shards:
            for k in range(len(self.plan.buckets)):
                shard = f"{self.prefix}_scattered_{k}"
                total = f"{shard} + {self.prefix}_more_{k}"
                steps.append({"assign": {"tensor": shard, "value": total}})
        return steps

    # --- parameters ---
    def fetch_module(self, layer: int | None) -> list[Entry]:
        """Gather what a module needs and wait for it; then prefetch."""
        fetch = self.coordinator.reach_next_module()
        steps = self.start_gathers(fetch.required)
        if layer is not None:
            steps += self.wait_for(self.params_of[layer])
        return steps + self.start_gathers(fetch.ahead)

    def wait_for(self, params: Iterable[int]) -> list[Entry]:
        """A wait for each open gather of some parameters."""
        handles = [handle for p in params for handle in self.open_handles.pop(p, [])]
        for param, others in list(self.open_handles.items()):
            # Parameters that were gathered together share their handles.
            self.open_handles[param] = [h for h in others if h not in handles]
        return [wait(handle) for handle in dict.fromkeys(handles)]

    def start_gathers(self, gathers: Sequence[ParameterGather]) -> list[Entry]:
        steps: list[Entry] = []
        for gather in gathers:
            number = self.gather_count
            self.gather_count += 1
            handles = [f"{self.prefix}_gathered@{number}"]
            steps.append(self.start_gather(gather, handles[0]))
            if self.fields.zero_quantized_weights:
                handles.append(f"{self.prefix}_scales@{number}")
                steps.append(self.start_gather_of_scales(gather, handles[1]))
            self.open_handles |= {p: list(handles) for p in gather.params}
        return steps

    def start_gather(self, gather: ParameterGather, handle: str) -> Entry:
        """Some parameters in one message, from equal parts."""
        group, ranks = self.group_of(gather)
        layer = self.layer_of[gather.params[0]]
        quantized = self.fields.zero_quantized_weights
        is_whole_layer = list(gather.params) == self.params_of[layer]
        tensors: dict[str, object]
        if is_whole_layer and not quantized and not gather.secondary:
            tensors = {
                "input": f"{self.prefix}_shard_{layer}",
                "output": f"{self.prefix}_whole_{layer}",
            }
        else:
            dtype = "int8" if quantized else self.fields.dtype
            part = self.part_numel(gather)
            tensors = {
                "input": tensor_declaration(part, dtype),
                "output": tensor_declaration(part * ranks, dtype),
            }
        return step("all_gather_into_tensor", **tensors, group=group, async_=True, as_=handle)

    def start_gather_of_scales(self, gather: ParameterGather, handle: str) -> Entry:
        """qwZ: the scales of the int8 parameters."""
        group, ranks = self.group_of(gather)
        count = scale_count(self.part_numel(gather))
        return step(
            "all_gather_into_tensor",
            input=tensor_declaration(count, "float32"),
            output=tensor_declaration(count * ranks, "float32"),
            group=group,
            async_=True,
            as_=handle,
        )

    def gather_master_copy(self, param: int) -> Entry:
        """A blocking gather of one parameter, never quantized."""
        part = self.parts[param]
        return step(
            "all_gather_into_tensor",
            input=tensor_declaration(part, self.fields.dtype),
            output=tensor_declaration(part * self.ranks, self.fields.dtype),
            group=self.group,
        )

    def group_of(self, gather: ParameterGather) -> _GatherGroup:
        if gather.secondary:
            return _GatherGroup(f"{self.prefix}_hpz", self.hpz_ranks)
        return _GatherGroup(self.group, self.ranks)

    def part_numel(self, gather: ParameterGather) -> int:
        """Elements that each rank contributes to a gather."""
        padded = sum(self.parts[p] for p in gather.params) * self.ranks
        return padded // self.group_of(gather).ranks

    # --- gradients ---
    def reduce(self, k: int, adds_to_shards: bool) -> list[Entry]:
        """The reduction of a bucket; with qgZ parameter by parameter."""
        steps = self.wait_before_bucket()
        if self.quantizes_gradients:
            for param in self.plan.buckets[k].params:
                steps += self.quantized_reduction(param)
            return steps
        scatter = self.call(
            "reduce_scatter_tensor",
            input=f"{self.prefix}_bucket_{k}",
            output=f"{self.prefix}_{'more' if adds_to_shards else 'scattered'}_{k}",
            op="sum",
            **self.on_reduction_stream(),
        )
        return [*steps, scatter]

    def quantized_reduction(self, param: int) -> list[Entry]:
        """all_to_all inside each node, sums, all_to_all between nodes.

        Vectors, and parameters that do not divide among the ranks, are scattered without
        quantization (`all_to_all_quant_reduce`).
        """
        shape = self.shapes[param]
        numel = self.numel[param]
        if len(shape) == 1 or numel % (2 * self.ranks):
            return [self.plain_scatter(param)]
        scales = max(shape[0], shape[1], self.ranks)
        # Two values of 4 bits share a byte.
        packed = numel // 2
        local = self.context.ranks_per_node
        return [
            self.exchange("local", packed, "int8"),
            self.exchange("local", scales, "float32"),
            self.exchange("global", packed // local, "int8"),
            self.exchange("global", scales // local, "float32"),
        ]

    def plain_scatter(self, param: int) -> Entry:
        part = self.parts[param]
        return self.call(
            "reduce_scatter_tensor",
            input=tensor_declaration(part * self.ranks, self.fields.dtype),
            output=tensor_declaration(part, self.fields.dtype),
            op="sum",
            **self.on_reduction_stream(),
        )

    def exchange(self, level: str, numel: int, dtype: str) -> Entry:
        """An all_to_all inside the nodes (`local`) or between them (`global`)."""
        return step(
            "all_to_all_single",
            input=tensor_declaration(numel, dtype),
            output=tensor_declaration(numel, dtype),
            group=f"{self.prefix}_{level}",
            **self.on_reduction_stream(),
        )


def scale_count(numel: int) -> int:
    """The number of scales: groups of at most 8000 elements, or slightly more, share one.

    The same search as in `CUDAQuantizer.quantize`.
    """
    groups = -(-numel // _ELEMENTS_PER_SCALE)
    while groups < numel and numel % (8 * groups):
        groups += 1
    while numel % (16 * groups) == 0 and numel / groups > _ELEMENTS_PER_SCALE:
        groups *= 2
    return groups
