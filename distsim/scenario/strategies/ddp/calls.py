"""The calls of DistributedDataParallel, in PyTorch's order.

The model's layers are computed one after the other. During the last backward pass of an iteration
each bucket is reduced as soon as all its gradients are ready and all buckets before it were sent.
The first iterations use another bucket layout than the rest: buckets are rebuilt once the order of
the gradients is known. So most methods write entries for one layout, and ``phases_of`` gives the
conditions under which each layout applies.

Which bucket holds which parameter is in `distsim.scenario.strategies.ddp.buckets`, the context
manager Join in `distsim.scenario.strategies.ddp.join`.

Sources, torch 2.13: `torch/nn/parallel/distributed.py` (`__init__`, `_pre_forward`),
`torch/csrc/distributed/c10d/reducer.cpp` (mark_bucket_ready, finalize_backward,
verify_params_across_processes).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.scenario.strategies.base import (
    ZERO_COST,
    Entry,
    Expansion,
    ExpansionContext,
    block,
    compute,
    step,
    wait,
    waits_for_copies,
)
from distsim.scenario.strategies.ddp.buckets import (
    GradientBucket,
    LayoutPhase,
    ModelParameter,
    ReplicaWriter,
    model_parameters,
)
from distsim.scenario.strategies.ddp.comm_hooks import (
    CommHook,
    cast_entry,
    partition_parameters,
    powersgd_factors,
)
from distsim.scenario.strategies.ddp.fields import DdpFields
from distsim.scenario.strategies.ddp.replica_errors import parameter_count_error


class _MicroBatchPosition(NamedTuple):
    """A micro-batch by its iteration and its number in that iteration."""

    iteration: int
    micro_batch: int


class DdpWriter(ReplicaWriter):
    """Writes the entries of one model.

    Tensors are named after the strategy: `ddp_bucket_0`, `ddp_weights_0`, …

    Two flags occur in many methods. ``reduces_once``: the rank reduces only after the last
    micro-batch of an iteration (`no_sync`), else after each. ``synced``: this backward pass reduces
    its gradients.
    """

    def __init__(self, ddp: DdpFields, context: ExpansionContext) -> None:
        group = ddp.group_of(context)
        super().__init__(
            context.unused_prefix("ddp"),
            ddp.dtype,
            group,
            context.size_of(group),
            model_parameters(ddp.model),
        )
        self.ddp = ddp
        self.context = context
        self.model = ddp.model
        self.vars: dict[str, object] = {}
        #: What counts iterations in conditions, and their number: the file's own word, or the index
        #: of the loop over `inputs`.
        if ddp.inputs is None:
            self.iteration_name = "iteration"
            self.iterations = context.iterations
        else:
            self.iteration_name = f"{self.prefix}_batch"
            self.iterations = max(ddp.inputs.values())
        #: With find_unused_parameters buckets are never rebuilt, and unused parameters are known,
        #: so that no rank waits for gradients that are never computed. A static graph overrules it.
        self.finds_unused = ddp.find_unused_parameters and not ddp.static_graph
        self.buckets = self.bucket_layouts(ddp.bucket_cap_mb, "bucket", self.finds_unused)
        self.state = model_parameters(ddp.model, frozen=True)
        self.hook = ddp.comm_hook or CommHook()
        #: No layer before it has a backward pass.
        self.first_trainable_layer = next(
            (k for k, layer in enumerate(ddp.model) if layer.params), 0
        )
        #: Ranks that skip a layer whose gradients others wait for: their reduction never ends.
        self.unfinished_ranks: list[int] = []
        if not self.finds_unused:
            self.unfinished_ranks = sorted(rank for rank, layers in ddp.unused.items() if layers)

    def expansion(self) -> Expansion:
        construction = self.construction_block() if self.ddp.setup else []
        return Expansion([*construction, *self.body()], self.tensors, {}, self.vars)

    def body(self) -> list[Entry]:
        """All iterations; if ranks reduce at different times, each kind of rank has its own."""
        ranks_by_kind: dict[bool, list[int]] = {True: [], False: []}
        for rank in range(self.context.world_size):
            ranks_by_kind[self.ddp.reduces_once(rank)].append(rank)
        is_same_on_all_ranks = not all(ranks_by_kind.values())
        if is_same_on_all_ranks or self.ddp.accumulate == 1:
            return self.iteration(self.ddp.reduces_once(0))
        return [
            block(self.iteration(reduces_once), " or ".join(f"rank == {r}" for r in ranks))
            for reduces_once, ranks in ranks_by_kind.items()
        ]

    # --- messages of weights and buffers ---
    def declare_weight_messages(self) -> list[str]:
        """The model's state in messages of 250 MiB: parameters, then buffers, by dtype."""
        return self.declare_broadcast_messages("weights", [*self.state, *self.module_buffers()])

    def module_buffers(self) -> list[ModelParameter]:
        """The module's buffers (such as running means), all of one dtype as one."""
        first = len(self.state)
        return [
            ModelParameter(first + k, -1, numel, (numel,), dtype)
            for k, (dtype, numel) in enumerate(self.ddp.buffers.items())
            if numel
        ]

    def broadcast_buffers(self, src: int | str = 0) -> list[Entry]:
        """The broadcast of the module's buffers before a forward pass."""
        messages = self.declare_broadcast_messages("buffers", self.module_buffers())
        return self.coalesced_broadcast(messages, "synced", src)

    # --- before the first iteration ---
    def construction_block(self) -> list[Entry]:
        dims = sum(len(shape) for layer in self.model for shape in layer.params)
        steps = self.construction(dims)
        if any(self.ddp.frozen.values()):
            gather_counts, *others = steps
            steps = [gather_counts, *self.frozen_mismatch_errors(), *others]
        # With `inputs` the construction is outside the loop that counts iterations.
        condition = None if self.ddp.inputs is not None else f"{self.iteration_name} == 0"
        return [block(steps, condition)]

    def frozen_mismatch_errors(self) -> list[Entry]:
        """Errors of ranks that count different trainable parameters, as layers are frozen there.

        Each rank reports the first other rank that differs (verify_params_across_processes).
        """
        ranks = range(self.context.world_size)
        counts = {rank: self.trainable_count(rank) for rank in ranks}
        errors = (parameter_count_error(rank, counts) for rank in ranks)
        return [error for error in errors if error is not None]

    def trainable_count(self, rank: int) -> int:
        frozen = self.ddp.frozen.get(rank, ())
        return sum(len(layer.params) for k, layer in enumerate(self.model) if k not in frozen)

    # --- an iteration ---
    def iteration(self, reduces_once: bool) -> list[Entry]:
        if self.ddp.evaluate:
            return self.evaluation(reduces_once)
        steps: list[Entry] = []
        for micro_batch in range(self.ddp.accumulate):
            is_last = micro_batch == self.ddp.accumulate - 1
            # Buffers are broadcast only after a backward pass that was synchronised.
            follows_sync = micro_batch == 0 or not reduces_once
            steps += self.before_forward(micro_batch, follows_sync, reduces_once)
            steps += self.forward()
            steps += self.backward_in_phases(micro_batch, is_last or not reduces_once, reduces_once)
        return steps + self.optimizer(reduces_once)

    def evaluation(self, reduces_once: bool) -> list[Entry]:
        """A forward pass under no_grad: after the first one nothing is synchronised again."""
        preparation = self.before_forward(0, True, reduces_once)
        if not preparation:
            return self.forward()
        return [block(preparation, f"{self.iteration_name} == 0"), *self.forward()]

    def before_forward(
        self, micro_batch: int, follows_sync: bool, reduces_once: bool
    ) -> list[Entry]:
        """The rebuilt bucket layout, once, and the module's buffers.

        Buckets are rebuilt at the first forward pass after a backward pass that reduced.
        """
        steps = self.unfinished_reduction_error() if micro_batch == 0 else []
        rebuild = self.rebuild_position(reduces_once)
        if micro_batch == rebuild.micro_batch:
            steps += self.rebuild(rebuild.iteration)
        if self.ddp.buffers and self.ddp.forward_sync_buffers and follows_sync:
            steps += self.broadcast_buffers()
        return steps

    def rebuild_position(self, reduces_once: bool) -> _MicroBatchPosition:
        """The micro-batch before which buckets are rebuilt.

        It is the second synchronised pass, or with static_graph the third.
        """
        passes_before = 2 if self.ddp.static_graph else 1
        passes_per_iteration = 1 if reduces_once else self.ddp.accumulate
        return _MicroBatchPosition(*divmod(passes_before, passes_per_iteration))

    def rebuild(self, iteration: int) -> list[Entry]:
        """The broadcast of the rebuilt layout in that iteration; empty if buckets never change."""
        never_rebuilds = not self.ddp.setup or self.finds_unused or self.ddp.evaluate
        if never_rebuilds or self.iterations <= iteration:
            return []
        sync = self.sync_layout(self.buckets["bucket"])
        return [block(sync, f"{self.iteration_name} == {iteration}")]

    def forward(self) -> list[Entry]:
        return [compute(f"forward {layer.name}", layer.forward) for layer in self.model]

    def phases_of(self, micro_batch: int, reduces_once: bool) -> list[LayoutPhase]:
        """The bucket layouts of a micro-batch's backward pass, and the iterations that use them."""
        first, later = self.buckets
        if not self.ddp.setup or self.buckets[first] == self.buckets[later]:
            return [LayoutPhase(later, None)]
        rebuild = self.rebuild_position(reduces_once)
        # Iterations in which this micro-batch runs before the rebuilding.
        before = rebuild.iteration + (micro_batch < rebuild.micro_batch)
        if not before:
            return [LayoutPhase(later, None)]
        if before >= self.iterations:
            return [LayoutPhase(first, None)]
        return [
            LayoutPhase(first, f"{self.iteration_name} < {before}"),
            LayoutPhase(later, f"{self.iteration_name} >= {before}"),
        ]

    def backward_in_phases(self, micro_batch: int, synced: bool, reduces_once: bool) -> list[Entry]:
        """The backward pass with the initial buckets and with the rebuilt ones."""
        phases = self.phases_of(micro_batch, reduces_once)
        if self.ddp.static_graph and self.ddp.setup and micro_batch == 0 and synced:
            return self._static_graph_backward(phases, reduces_once)
        steps: list[Entry] = []
        for layout, condition in phases:
            backward = self.backward(layout, micro_batch, synced, reduces_once)
            steps += backward if condition is None else [block(backward, condition)]
        return steps

    def _static_graph_backward(
        self, phases: Sequence[LayoutPhase], reduces_once: bool
    ) -> list[Entry]:
        """The first backward pass of an iteration under static_graph.

        In the very first iteration the reduction is delayed until the pass is over.
        """
        name = self.iteration_name
        has_more = self.iterations > 1
        delayed = self.delayed_backward(phases[0].layout)
        steps = [block(delayed, f"{name} == 0" if has_more else None)]
        if not has_more:
            return steps
        first, *others = phases
        condition = f"{name} > 0" + (f" and {first.condition}" if first.condition else "")
        for layout, when in (LayoutPhase(first.layout, condition), *others):
            steps.append(block(self.backward(layout, 0, True, reduces_once), when))
        return steps

    # --- a backward pass ---
    def backward(
        self, layout: str, micro_batch: int, synced: bool, reduces_once: bool
    ) -> list[Entry]:
        """Layer by layer from the last, with the reductions of the buckets that become full.

        Buckets are sent in order: a full bucket waits for those before it.
        """
        buckets = self.buckets[layout]
        names = self.declare_buckets(layout)
        restarts = micro_batch == 0 or not reduces_once
        started: set[int] = set()
        computed: set[int] = set()
        sent = 0
        steps: list[Entry] = []
        for layer in self.backward_layers():
            steps.append(self.layer_backward(layer, buckets, names, started, restarts))
            computed.add(layer)
            while synced and sent < len(buckets) and buckets[sent].layers <= computed:
                steps += self.send_bucket(layout, sent, self.ranks_that_send(buckets, sent))
                sent += 1
        return steps + (self.finish(layout) if synced else [])

    def delayed_backward(self, layout: str) -> list[Entry]:
        """The first pass of a static graph, which reduces when it is over (delay_all_reduce).

        It also determines which parameters are used.
        """
        buckets = self.buckets[layout]
        names = self.declare_buckets(layout)
        started: set[int] = set()
        layers = [
            self.layer_backward(layer, buckets, names, started, restarts=True)
            for layer in self.backward_layers()
        ]
        sent = [entry for k in range(len(buckets)) for entry in self.send_bucket(layout, k)]
        return [*layers, *self.with_used_parameters([*sent, *self.finish(layout)])]

    def backward_layers(self) -> range:
        """The layers that have a backward pass, in its order."""
        return range(len(self.model) - 1, self.first_trainable_layer - 1, -1)

    def declare_buckets(self, layout: str) -> list[str]:
        return [
            self.tensor(f"{layout}_{k}", bucket.numel, bucket.dtype)
            for k, bucket in enumerate(self.buckets[layout])
        ]

    def bucket_names(self, layout: str) -> list[str]:
        return [f"{self.prefix}_{layout}_{k}" for k in range(len(self.buckets[layout]))]

    def layer_backward(
        self,
        layer: int,
        buckets: Sequence[GradientBucket],
        names: Sequence[str],
        started: set[int],
        restarts: bool,
    ) -> Entry:
        """One layer's backward pass, which writes its gradients into their buckets.

        With ``restarts`` the first gradients of a bucket overwrite it; otherwise all gradients are
        added, because they are accumulated over micro-batches. ``started`` are the buckets that
        have gradients of this pass; the method updates it.
        """
        own = [k for k, bucket in enumerate(buckets) if layer in bucket.layers]
        overwritten = [names[k] for k in own if k not in started and restarts]
        started.update(own)
        added = [names[k] for k in own if names[k] not in overwritten]
        skipping = [rank for rank, layers in self.ddp.unused.items() if layer in layers]
        return compute(
            f"backward {self.model[layer].name}",
            self.model[layer].backward,
            _all_ranks_except(skipping),
            writes=overwritten,
            adds=added,
        )

    def ranks_that_send(self, buckets: Sequence[GradientBucket], k: int) -> str | None:
        """A selector of the ranks that send bucket ``k``; None selects all.

        Buckets go out in order, so a rank that has no gradient for one sends neither that bucket
        nor any after it.
        """
        if self.finds_unused:
            return None
        needed: set[int] = set().union(*(bucket.layers for bucket in buckets[: k + 1]))
        blocked = [rank for rank, layers in self.ddp.unused.items() if needed & set(layers)]
        return _all_ranks_except(blocked)

    def finish(self, layout: str) -> list[Entry]:
        """The end of the backward pass waits for all buckets.

        A rank that never sent some of them waits for none: it raises at its next forward pass.
        """
        handle = f"{self.prefix}_{layout}_reduced"
        steps = [
            *waits_for_copies(handle, range(len(self.buckets[layout]))),
            *self.unpack_buckets(layout),
        ]
        if self.finds_unused:
            return self.with_used_parameters(steps)
        if self.unfinished_ranks:
            return [block(steps, _all_ranks_except(self.unfinished_ranks))]
        return steps

    def with_used_parameters(self, steps: Sequence[Entry]) -> list[Entry]:
        """``steps`` while the ranks agree on which parameters this pass used.

        The ranks do so in every iteration with find_unused_parameters, and in the first one with
        static_graph.
        """
        used = self.tensor("used", len(self.params), "int32")
        handle = f"{self.prefix}_used_known"
        start = self.call("all_reduce", tensor=used, op="sum", async_=True, as_=handle)
        return [start, *steps, wait(handle)]

    def unfinished_reduction_error(self) -> list[Entry]:
        """The error at the next forward pass of ranks whose reduction never finished."""
        if not self.unfinished_ranks or self.iterations < 2:
            return []
        message = (
            "Expected to have finished reduction in the prior iteration before starting a new one."
        )
        failing = [rank for rank in self.ddp.unused if rank in self.unfinished_ranks]
        selector = " or ".join(f"rank == {rank}" for rank in failing)
        return [step("fail", f"{self.iteration_name} > 0 and ({selector})", message=message)]

    # --- the reduction of a bucket ---
    def send_bucket(self, layout: str, k: int, ranks: str | None = None) -> list[Entry]:
        """What the communication hook does with a bucket that is full."""
        bucket = self.buckets[layout][k]
        name = f"{self.prefix}_{layout}_{k}"
        handle = f"{self.prefix}_{layout}_reduced"
        if self.hook.dtype:
            compressed = self.tensor(f"{layout}_{k}_compressed", bucket.numel, self.hook.dtype)
            return [
                cast_entry(compressed, f"{name} * {1 / self.size!r}", ranks),
                self.reduce(compressed, handle, k, ranks),
            ]
        plain = [self.divide_by_size(name, ranks), self.reduce(name, handle, k, ranks)]
        uses_powersgd = self.hook.rank and self.iterations > self.hook.start
        # PowerSGD starts at iteration 2 at the earliest, after the initial buckets.
        if not uses_powersgd or layout == "initial":
            return plain
        return [
            block(plain, f"{self.iteration_name} < {self.hook.start}"),
            block(
                self.powersgd_reduction(layout, k), f"{self.iteration_name} >= {self.hook.start}"
            ),
        ]

    def powersgd_reduction(self, layout: str, k: int) -> list[Entry]:
        """PowerSGD: up to three sums, each of which waits for the one before."""
        bucket = self.buckets[layout][k]
        name = f"{self.prefix}_{layout}_{k}"
        handle = f"{self.prefix}_{layout}_reduced@{k}"
        steps: list[Entry] = []
        for part, numel in powersgd_factors(bucket, self.hook)._asdict().items():
            if not numel:
                continue
            tensor = self.tensor(f"{layout}_{k}_{part}", numel, bucket.dtype)
            if steps:
                steps.append(wait(handle))
            steps.append(compute(f"powersgd {part}", ZERO_COST, reads=[name], writes=[tensor]))
            steps.append(self.call("all_reduce", tensor=tensor, op="sum", async_=True, as_=handle))
        return steps

    def unpack_buckets(self, layout: str) -> list[Entry]:
        """What a hook does with the buckets when they are reduced: it casts them back."""
        if not self.hook.dtype:
            return []
        return [cast_entry(name, f"{name}_compressed") for name in self.bucket_names(layout)]

    # --- the update ---
    def optimizer(self, reduces_once: bool = True) -> list[Entry]:
        broadcasts: list[Entry] = []
        if self.ddp.zero_redundancy_optimizer:
            broadcasts = self.broadcast_updated_parameters()
        if self.ddp.optimizer is None:
            return broadcasts
        updates = [
            compute("optimizer", self.ddp.optimizer, condition, reads=self.bucket_names(layout))
            for layout, condition in self.phases_of(self.ddp.accumulate - 1, reduces_once)
        ]
        return [*updates, *broadcasts]

    def broadcast_updated_parameters(self) -> list[Entry]:
        """ZeroRedundancyOptimizer: each parameter from the rank that updated it, rank by rank.

        All broadcasts are started before the first wait.
        """
        handle = f"{self.prefix}_updated"
        broadcasts = [
            self.broadcast_parameter(param, rank, handle)
            for rank, owned in enumerate(partition_parameters(self.params, self.size))
            for param in owned
        ]
        return [*broadcasts, *waits_for_copies(handle, range(len(self.params)))]

    def broadcast_parameter(self, param: ModelParameter, owner: int, handle: str) -> Entry:
        return self.call(
            "broadcast",
            tensor=self.tensor(f"param_{param.number}", param.numel, param.dtype),
            group_src=owner,
            async_=True,
            as_=f"{handle}@{param.number}",
        )


def _all_ranks_except(ranks: Sequence[int]) -> str | None:
    """A selector of all ranks except ``ranks``; None selects all."""
    return " and ".join(f"rank != {rank}" for rank in sorted(set(ranks))) or None
