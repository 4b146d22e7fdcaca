"""The entries of `fsdp:`: the events of its hooks as calls, on streams under nccl.

``FsdpWriter`` runs the hooks (`distsim.scenario.strategies.fsdp.hook_events`) for each micro-batch
and writes an entry for each event. PyTorch issues blocking calls inside streams of its own. Under
nccl the writer reproduces them: each reduce_scatter is on one stream, HSDP's all_reduce after it on
another. Gathers are asynchronous instead: a gather waits for an event between two other gathers on
its stream, so it is issued where that event would let it start. The order on each communicator is
PyTorch's. Under gloo and mpi there are no streams: all calls block where PyTorch calls them.

Sources, torch 2.13: `_fsdp_collectives.py` (foreach_all_gather, foreach_reduce), `_fsdp_init.py`
(_get_post_forward_mesh_info), `torch/nn/utils/clip_grad.py` (the norms of all gradients as one
DTensor, an element each, reduced over the mesh).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distsim.scenario.strategies.base import (
    CostOrEntries,
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    GroupRef,
    block,
    compute,
    step,
    wait,
)
from distsim.scenario.strategies.fsdp.fields import FsdpFields
from distsim.scenario.strategies.fsdp.hook_events import (
    FsdpHooks,
    FsdpUnit,
    HookEvent,
    with_gathers_ahead,
)
from distsim.scenario.strategies.layers import equal_cost_shares

#: Gathers that are in flight while a unit computes, in the forward pass under nccl.
_GATHERS_AHEAD = 2


class FsdpWriter(EntryWriter):
    """Writes one model's entries.

    Tensors are numbered by the units that hold parameters: the root, if it does, then the units in
    the model's order. A unit has the tensors `shard`, `full` (gathered), `part` (kept between the
    passes), `grads` (all gradients), `grad` (their reduced shard) and `more` (what a further
    micro-batch adds to it).

    The flags ``first`` and ``last`` of many methods are about the micro-batch in its iteration.
    """

    def __init__(self, fsdp: FsdpFields, context: ExpansionContext, root: FsdpUnit) -> None:
        super().__init__(context.unused_prefix("fsdp"), fsdp.dtype, fsdp.shard_group(context))
        self.fsdp = fsdp
        self.context = context
        #: Copies of the sharded model (HSDP).
        self.copies = 1 if fsdp.replicate is None else context.size_of(fsdp.replicate)
        self.has_streams = context.has_streams
        self.hooks = FsdpHooks(root, fsdp.settings)
        self.units = self.hooks.units
        with_params = [k for k, unit in enumerate(self.units) if unit.all_params]
        #: The number of a unit in the names of its tensors.
        self.number = {k: number for number, k in enumerate(with_params)}
        self.trainable = [k for k in with_params if self.units[k].params]
        self.groups: dict[str, object] = {}
        self.declare_tensors()

    # --- the whole ---
    def expansion(self) -> Expansion:
        """An iteration; if the first differs from the rest, each of the two with its condition.

        They differ if units stay gathered from one iteration to the next.
        """
        first = self.iteration()
        later = self.iteration()
        if first == later or self.context.iterations < 2:
            steps = first
        else:
            steps = [block(first, "iteration == 0"), block(later, "iteration > 0")]
        return Expansion(steps, self.tensors, self.groups)

    def iteration(self) -> list[Entry]:
        if self.fsdp.evaluate:
            return self.evaluation()
        steps: list[Entry] = []
        count = self.fsdp.accumulate
        for micro_batch in range(count):
            first = micro_batch == 0
            last = micro_batch == count - 1
            steps += self.entries(self.forward_events(), first, last)
            backward = self.backward(first, last)
            if self.fsdp.skips_backward:
                steps.append(block(backward, self.ranks_with_backward()))
            else:
                steps += backward
        return steps + self.update()

    def evaluation(self) -> list[Entry]:
        """Forward passes only, under no_grad."""
        steps: list[Entry] = []
        count = self.fsdp.accumulate
        for micro_batch in range(count):
            first = micro_batch == 0
            last = micro_batch == count - 1
            steps += self.entries(self.forward_events(), first, last)
            self.hooks.post_forward_order.clear()
        return steps

    def forward_events(self) -> list[HookEvent]:
        events = self.hooks.forward()
        return with_gathers_ahead(events, _GATHERS_AHEAD) if self.has_streams else events

    def backward(self, first: bool, last: bool) -> list[Entry]:
        reduces = last or not self.fsdp.reduces_once
        events = self.hooks.backward(last or self.fsdp.frees_after_each_backward, reduces)
        steps = self.entries(events, first, last)
        return [*steps, *self.finish(first, last)] if reduces else steps

    def ranks_with_backward(self) -> str:
        """A selector of the ranks that do not skip this backward pass."""
        skips = [
            f"rank == {rank} and iteration == {k}" for rank, k in self.fsdp.skips_backward.items()
        ]
        return f"not ({' or '.join(skips)})"

    # --- tensors ---
    def declare_tensors(self) -> None:
        fsdp = self.fsdp
        gathered = fsdp.param_dtype or fsdp.dtype
        reduced = fsdp.reduce_dtype or gathered
        for k, number in self.number.items():
            unit = self.units[k]
            ranks = self.ranks_of(k)
            numel = unit.shard_numel(ranks, unit.all_params)
            self.tensor(f"shard_{number}", numel, gathered)
            self.tensor(f"full_{number}", numel * ranks, gathered)
            if not isinstance(unit.reshard, bool):
                self.tensor(f"part_{number}", numel * ranks // unit.reshard, gathered)
                group_key = fsdp.reshard_group_key(self.context, unit.reshard)
                self.groups[f"{self.prefix}_part_{unit.reshard}"] = {"by": group_key}
            if unit.params and not fsdp.evaluate:
                self.declare_gradients(k, reduced)

    def declare_gradients(self, k: int, dtype: str) -> None:
        unit = self.units[k]
        number = self.number[k]
        ranks = self.ranks_of(k)
        shard_numel = unit.shard_numel(ranks, unit.params)
        self.tensor(f"grads_{number}", shard_numel * ranks, dtype)
        self.tensor(f"grad_{number}", shard_numel, dtype)
        if self.adds_shards:
            self.tensor(f"more_{number}", shard_numel, dtype)

    def name(self, word: str, k: int) -> str:
        """The name of a unit's tensor."""
        return f"{self.prefix}_{word}_{self.number[k]}"

    def group_of(self, k: int) -> GroupRef | None:
        """The ranks over which a unit is sharded."""
        own = self.units[k].shard
        return self.group if own is None else own

    def ranks_of(self, k: int) -> int:
        return self.context.size_of(self.group_of(k))

    @property
    def adds_shards(self) -> bool:
        """Whether each micro-batch reduces its gradients, and the reduced shards are added."""
        return self.fsdp.accumulate > 1 and not self.fsdp.reduces_once

    # --- events as entries ---
    def entries(self, events: Sequence[HookEvent], first: bool, last: bool) -> list[Entry]:
        steps: list[Entry] = []
        seen: dict[HookEvent, int] = {}
        for event in events:
            occurrence = seen.get(event, 0)
            seen[event] = occurrence + 1
            steps += self.entries_of_event(event, occurrence, first, last)
        return steps

    def entries_of_event(
        self, event: HookEvent, occurrence: int, first: bool, last: bool
    ) -> list[Entry]:
        """``occurrence``: the number of equal events before it in this pass."""
        kind, k = event
        if kind == "gather":
            return [self.gather("shard", self.group_of(k), k)]
        if kind == "part":
            return [self.gather("part", f"{self.prefix}_part_{self.units[k].reshard}", k)]
        if kind == "wait":
            return [wait(f"{self.prefix}_gathered@{self.number[k]}")] if self.has_streams else []
        if kind == "settle":
            return self.wait_stream("reduce_scatter")
        if kind == "reduce":
            return self.reduce(k, first, last)
        unit = self.units[k]
        if not unit.all_params and not unit.forward:
            return []
        restarts = first or not self.fsdp.reduces_once
        if kind == "forward":
            return [self.unit_forward(k, occurrence)]
        return [self.unit_backward(k, occurrence, restarts)]

    def gather(self, word: str, group: GroupRef | None, k: int) -> Entry:
        handle: dict[str, object] = {}
        if self.has_streams:
            handle = {"async_": True, "as_": f"{self.prefix}_gathered@{self.number[k]}"}
        return step(
            "all_gather_into_tensor",
            input=self.name(word, k),
            output=self.name("full", k),
            group=group,
            **handle,
        )

    # --- computations ---
    def unit_forward(self, k: int, occurrence: int) -> Entry:
        unit = self.units[k]
        cost = unit.forward
        if self.computes_twice(k):
            cost = self.root_share("forward", cost, before_layers=occurrence == 0)
        return compute(f"forward {unit.name}", cost, reads=self.read_parameters(k))

    def unit_backward(self, k: int, occurrence: int, restarts: bool) -> Entry:
        """With ``restarts`` the gradients are overwritten, else added to those that are there."""
        unit = self.units[k]
        cost = unit.backward
        if self.computes_twice(k):
            cost = self.root_share("backward", cost, before_layers=occurrence == 1)
            restarts = restarts and occurrence == 0
        reads = self.read_parameters(k)
        if not unit.params:
            return compute(f"backward {unit.name}", cost, reads=reads)
        grads = [self.name("grads", k)]
        return compute(
            f"backward {unit.name}",
            cost,
            reads=reads,
            writes=grads if restarts else [],
            adds=[] if restarts else grads,
        )

    def computes_twice(self, k: int) -> bool:
        """Whether the unit is a root that computes before the layers and after them."""
        return k == 0 and self.fsdp.settings.at == "both"

    def read_parameters(self, k: int) -> list[str]:
        return [self.name("full", k)] if k in self.number else []

    def root_share(self, word: str, cost: CostOrEntries, before_layers: bool) -> CostOrEntries:
        """The cost of the root's computation before the layers, or after them."""
        before_cost: CostOrEntries | None = None
        root = self.fsdp.root
        if root is not None:
            before_cost = root.first_forward if word == "forward" else root.first_backward
        if before_cost is not None:
            return before_cost if before_layers else cost
        if isinstance(cost, Mapping):
            before_half, after_half = equal_cost_shares(cost, 2)
            return before_half if before_layers else after_half
        # Entries cannot be halved: all of them are after the layers.
        return [] if before_layers else cost

    # --- gradients ---
    def reduce(self, k: int, first: bool, last: bool) -> list[Entry]:
        """Average the gradients over the ranks; each rank gets its shard of them.

        With HSDP, the shard is then averaged over all copies of the model.
        """
        reduces_copies_once = self.fsdp.all_reduce_late
        target = self.name("more" if self.adds_shards and not first else "grad", k)
        steps = self.wait_stream("current", "reduce_scatter")
        steps.append(
            step(
                "reduce_scatter_tensor",
                input=self.name("grads", k),
                output=target,
                op="avg",
                **self.on_stream("reduce_scatter"),
                group=self.group_of(k),
            )
        )
        # The shards must be added before the copies are reduced; otherwise `finish` adds them.
        adds_now = reduces_copies_once and not first
        if adds_now:
            steps += [*self.wait_stream("reduce_scatter"), self.add_to_shard(k)]
            target = self.name("grad", k)
        if self.copies == 1 or (reduces_copies_once and not last):
            return steps
        steps += self.wait_stream("current" if adds_now else "reduce_scatter", "all_reduce")
        steps.append(
            step(
                "all_reduce",
                tensor=target,
                op="avg",
                **self.on_stream("all_reduce"),
                group=self.fsdp.replicate,
            )
        )
        return steps

    def add_to_shard(self, k: int) -> Entry:
        """Add what this micro-batch reduced to the shard's gradient."""
        grad = self.name("grad", k)
        return {"assign": {"tensor": grad, "value": f"{grad} + {self.name('more', k)}"}}

    def on_stream(self, stream: str) -> dict[str, str]:
        return {"on": f"{self.prefix}_{stream}"} if self.has_streams else {}

    def wait_stream(self, stream: str, waiter: str = "current") -> list[Entry]:
        """The stream ``waiter`` continues when ``stream`` has done all its present work."""
        if not self.has_streams:
            return []
        awaited = stream if stream == "current" else f"{self.prefix}_{stream}"
        on_waiter = {} if waiter == "current" else self.on_stream(waiter)
        return [{"wait_stream": {"stream": awaited, **on_waiter}}]

    def finish(self, first: bool, last: bool) -> list[Entry]:
        """The end of the backward pass waits for the open reductions (finalize_backward)."""
        if not self.trainable:
            return []
        reduces_copies_once = self.fsdp.all_reduce_late
        reduces_copies_now = self.copies > 1 and (last or not reduces_copies_once)
        steps = self.wait_stream("all_reduce" if reduces_copies_now else "reduce_scatter")
        if self.adds_shards and not first and not reduces_copies_once:
            steps += [self.add_to_shard(k) for k in reversed(self.trainable)]
        return steps

    # --- the update ---
    def update(self) -> list[Entry]:
        fsdp = self.fsdp
        steps = self.clip_gradients() if fsdp.clip_grad_norm else []
        if fsdp.optimizer is not None:
            reads = [self.name("grad", k) for k in self.trainable]
            writes = [self.name("shard", k) for k in self.trainable]
            steps.append(compute("optimizer", fsdp.optimizer, reads=reads, writes=writes))
        return steps

    def clip_gradients(self) -> list[Entry]:
        """Sum the norms of all gradients over the shards, and over further axes if given."""
        norms = sum(len(self.units[k].params) for k in self.trainable)
        name = self.tensor("norm", norms, "float32")
        steps = [self.call("all_reduce", tensor=name, op="sum")]
        if self.fsdp.clip_over is not None:
            steps.append(step("all_reduce", tensor=name, op="sum", group=self.fsdp.clip_over))
        return steps
