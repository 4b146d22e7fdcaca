"""torch.nn.parallel.DistributedDataParallel: fields of `ddp:`, what they refuse, and the calls in PyTorch's order.

Sources, torch 2.13: `torch/nn/parallel/distributed.py` (`__init__`, `_pre_forward`, `_DDPJoinHook`),
`torch/distributed/algorithms/join.py` (Join.__exit__, notify_join_context; the default divide_by_initial_world_size is meant),
`torch/csrc/distributed/c10d/reducer.cpp` (mark_bucket_ready, finalize_backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, ClassVar

from pydantic import PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.names import shown
from distsim.strategies.base import Context, Entry, Expansion, Group, Refusal, block, compute, declared, step, wait, waits
from distsim.strategies.buckets import Bucket, Param, Replicas, parameters, phases
from distsim.strategies.fields import Amount, Axes, CostField, Count, Natural, PerRank, integer
from distsim.strategies.layers import Layered, repeated


def _unused(value: object, info: ValidationInfo) -> dict[int, tuple[int, ...]]:
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
    optimizer: CostField | None = None
    #: Batches that each rank has; `join` is the context manager for unequal numbers.
    inputs: PerRank | None = None
    join: StrictBool = False
    #: Layers that a rank's forward pass leaves out.
    unused: Unused = {}
    #: false: without construction, and with the buckets that hold from the second iteration on.
    setup: StrictBool = True

    def group_of(self, context: Context) -> Group | None:
        return self.group if self.group is not None else "dp" if "dp" in context.mesh else None

    def refuse(self, context: Context) -> list[Refusal]:
        found = context.refused(group=self.group)
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

    def rounds(self, rank: int) -> int:
        """Batches that a rank has, by `inputs`."""
        inputs = self.inputs or {}
        return inputs.get(rank, inputs.get("else", 0))

    def expand(self, context: Context) -> Expansion:
        return DdpWriter(self, context).expansion()


class DdpWriter(Replicas):
    """Writes one model's entries. Tensors are named after the strategy: `ddp_bucket_0`, `ddp_weights_0`, …"""

    def __init__(self, ddp: Ddp, context: Context) -> None:
        group = ddp.group_of(context)
        super().__init__(context.prefix("ddp"), ddp.dtype, group, context.size_of(group), parameters(ddp.model))
        self.ddp, self.context, self.model = ddp, context, ddp.model
        self.vars: dict[str, object] = {}
        #: What counts iterations: the file's own word, or the index of the loop over `inputs`; and how many there are.
        self.now = "iteration" if ddp.inputs is None else f"{self.p}_batch"
        self.runs = context.iterations if ddp.inputs is None else max(ddp.inputs.values())
        self.buckets = self.layouts(ddp.bucket_cap_mb, "bucket", ddp.find_unused_parameters)
        self.phases = phases(self.buckets, ddp.setup, self.runs, self.now)
        #: Ranks that leave out a layer that others wait for.
        self.stuck = [] if ddp.find_unused_parameters else sorted(rank for rank, layers in ddp.unused.items() if layers)

    def expansion(self) -> Expansion:
        steps = self.construction() if self.ddp.setup else []
        steps += self.uneven() if self.ddp.inputs is not None else self.iteration()
        return Expansion(steps, self.tensors, {}, self.vars)

    # --- pieces ---
    def weights(self) -> list[str]:
        """The model's state in messages of 250 MiB: parameters, and buffers of the same dtype with them."""
        joined = self.ddp.buffers > 0 and self.ddp.dtype == "float32"
        state = [*self.params, Param(len(self.params), len(self.model), self.ddp.buffers)] if joined else self.params
        names = self.messages(state)
        return names + ([self.running()] if self.ddp.buffers and not joined else [])

    def running(self) -> str:
        return self.tensor("buffers", self.ddp.buffers, "float32")

    # --- before the first iteration ---
    def construction(self) -> list[Entry]:
        steps = self.built(sum(len(shape) for layer in self.model for shape in layer.params))
        return [block(steps, None if self.ddp.inputs is not None else f"{self.now} == 0")]

    # --- an iteration ---
    def iteration(self) -> list[Entry]:
        found: list[Entry] = []
        for k in range(self.ddp.accumulate):
            last = k == self.ddp.accumulate - 1
            synced = last or not self.ddp.no_sync
            after_sync = k == 0 or not self.ddp.no_sync  # buffers travel where the pass before was synchronised
            found += self.before_forward(k, after_sync)
            found += self.forward()
            found += self.by_layout(k, synced)
        return found + self.optimizer()

    def before_forward(self, micro: int, after_sync: bool) -> list[Entry]:
        """The new buckets, once, at the first forward pass after a backward pass that reduced; then the buffers."""
        at = 1 if micro == 0 else 0
        every = not self.ddp.no_sync and self.ddp.accumulate > 1  # so that the first iteration's second micro-batch rebuilds
        found = self.unfinished() if micro == 0 else []
        if micro == int(every):
            found += self.rebuild(at)
        if self.ddp.buffers and after_sync:
            found += self.coalesced([self.running()], "synced")
        return found

    def rebuild(self, at: int) -> list[Entry]:
        """The layout of the buckets that hold from now on, in one iteration; empty where they never change."""
        if not self.ddp.setup or self.ddp.find_unused_parameters or self.runs <= at:
            return []
        return [block(self.layout(self.buckets["bucket"]), f"{self.now} == {at}")]

    def forward(self) -> list[Entry]:
        return [compute(f"forward {layer.name}", layer.forward) for layer in self.model]

    def by_layout(self, micro: int, synced: bool) -> list[Entry]:
        """The backward pass with the first buckets, and with the rebuilt ones."""
        used = self.phases if micro == 0 or self.ddp.no_sync else [("bucket", None)]
        if len(used) == 1:
            return self.backward(used[0][0], micro, synced)
        return [block(self.backward(word, micro, synced), when) for word, when in used]

    def backward(self, word: str, micro: int, synced: bool) -> list[Entry]:
        """Layer by layer from the last; a bucket goes out when all of its gradients are there and those before it have gone."""
        buckets = self.buckets[word]
        names = [self.tensor(f"{word}_{k}", bucket.numel) for k, bucket in enumerate(buckets)]
        done: set[int] = set()
        seen: set[int] = set()
        found: list[Entry] = []
        sent = 0
        for layer in reversed(range(len(self.model))):
            found.append(self.backward_of(layer, buckets, names, seen, micro))
            done.add(layer)
            while synced and sent < len(buckets) and buckets[sent].layers <= done:
                ranks = self.excused(buckets, sent)
                found += [self.averaged(names[sent], ranks), self.reduce(names[sent], f"{self.p}_{word}_reduced", sent, ranks)]
                sent += 1
        return found + (self.finish(word, buckets) if synced else [])

    def backward_of(self, layer: int, buckets: Sequence[Bucket], names: Sequence[str], seen: set[int], micro: int) -> Entry:
        """One layer's gradients: the first into a bucket start it anew, unless gradients are accumulated."""
        mine = [k for k, bucket in enumerate(buckets) if layer in bucket.layers]
        fresh = [names[k] for k in mine if k not in seen and (micro == 0 or not self.ddp.no_sync)]
        seen.update(mine)
        adds = [names[k] for k in mine if names[k] not in fresh]
        skipping = [rank for rank, layers in self.ddp.unused.items() if layer in layers]
        ranks = _without(skipping)
        return compute(f"backward {self.model[layer].name}", self.model[layer].backward, ranks, writes=fresh, adds=adds)

    def excused(self, buckets: Sequence[Bucket], k: int) -> str | None:
        """Buckets go out in order, so a rank that has no gradient for one never sends it nor any after it."""
        if self.ddp.find_unused_parameters:
            return None
        before: set[int] = set().union(*(bucket.layers for bucket in buckets[: k + 1]))
        return _without([rank for rank, layers in self.ddp.unused.items() if before & set(layers)])

    def finish(self, word: str, buckets: Sequence[Bucket]) -> list[Entry]:
        """The end of the backward pass waits for all buckets. A rank that never sent some waits for none: it raises later."""
        ends = waits(f"{self.p}_{word}_reduced", range(len(buckets)))
        if not self.ddp.find_unused_parameters:
            return [block(ends, _without(self.stuck))] if self.stuck else ends
        used, handle = self.tensor("used", len(self.params), "int32"), f"{self.p}_used_known"
        return [self.call("all_reduce", tensor=used, op="sum", async_=True, as_=handle), *ends, wait(handle)]

    def unfinished(self) -> list[Entry]:
        """What a rank with an unfinished reduction does at its next forward pass."""
        if not self.stuck or self.runs < 2:
            return []
        message = "Expected to have finished reduction in the prior iteration before starting a new one."
        who = " or ".join(f"rank == {rank}" for rank in self.ddp.unused if rank in self.stuck)
        return [step("fail", f"{self.now} > 0 and ({who})", message=message)]

    def optimizer(self) -> list[Entry]:
        if self.ddp.optimizer is None:
            return []
        price = self.ddp.optimizer
        names = {word: [f"{self.p}_{word}_{k}" for k in range(len(buckets))] for word, buckets in self.buckets.items()}
        used = [word for word in names if set(names[word]) <= self.tensors.keys()]
        if len(used) == 1:
            return [compute("optimizer", price, reads=names[used[0]])]
        first = compute("optimizer", price, f"{self.now} == 0", reads=names["initial"])
        return [first, compute("optimizer", price, f"{self.now} > 0", reads=names["bucket"])]

    # --- unequal numbers of batches ---
    def uneven(self) -> list[Entry]:
        """Every rank runs as many batches as it has; with `join` the early ones shadow the calls of the others until all are done."""
        inputs = self.ddp.inputs or {}
        if not self.ddp.join:
            return [{"repeat": {"times": inputs, "index": self.now, "steps": self.iteration()}}]
        mine = f"{self.p}_inputs"
        self.vars[mine] = _expression(inputs)
        rounds = [block(self.live(), f"{self.now} < {mine}"), block(self.shadow(), f"{self.now} >= {mine}")]
        return [*repeated(self.runs, rounds, self.now), *self.end(mine)]

    def live(self) -> list[Entry]:
        """A rank with a batch tells that it is still there, and that it will reduce. Nobody waits for either call."""
        told = self.call("all_reduce", tensor=declared(1, "float32"), async_=True)  # a new tensor of every call
        before = [told, *self.rebuild(1), *self.common("rank"), told]
        return [*before, *self.forward(), *self.by_layout(0, synced=True), *self.optimizer()]

    def shadow(self) -> list[Entry]:
        """A rank without batches asks who is left, then makes every call of an iteration with zeros."""
        left, sync = self.tensor("left", 1, "float32", 0), self.tensor("must_reduce", 1, "float32", 0)
        asked, told = (self.call("all_reduce", tensor=name) for name in (left, sync))
        steps = [asked, *self.rebuild(1), *self.common("-1"), told]
        for word, when in self.phases:
            steps += self.zeros(word) if when is None else [block(self.zeros(word), when)]
        return steps

    def zeros(self, word: str) -> list[Entry]:
        """_match_all_reduce_for_bwd_pass: zeros of each bucket's size, all sent, then all waited for."""
        names = [self.tensor(f"zeros_{word}_{k}", bucket.numel, value=0) for k, bucket in enumerate(self.buckets[word])]
        steps: list[Entry] = [{"assign": {"tensor": name, "value": 0}} for name in names]
        steps += [self.reduce(name, f"{self.p}_shadowed", k) for k, name in enumerate(names)]
        if self.ddp.find_unused_parameters:
            steps.append(self.call("all_reduce", tensor=declared(len(self.params), "int32"), async_=True))
        return steps + waits(f"{self.p}_shadowed", range(len(names)))

    def common(self, mine: str) -> list[Entry]:
        """Whose buffers hold: the highest rank that still has a batch; then they are broadcast."""
        if not self.ddp.buffers:
            return []
        common = self.tensor("common", 1, "int64")
        return [
            {"assign": {"tensor": common, "value": mine}},
            self.call("all_reduce", tensor=common, op="max"),
            *self.coalesced([self.running()], "synced", self.highest()),
        ]

    def highest(self) -> str | int:
        """The highest rank that has a batch in this round, as an expression of the round."""
        most, steps = 0, []
        for rank in reversed(range(self.context.world_size)):
            if self.ddp.rounds(rank) > most:
                most = self.ddp.rounds(rank)
                steps.append((most, rank))
        if not steps:
            return 0
        text = str(steps[-1][1])
        for rounds, rank in reversed(steps[:-1]):
            text = f"{rank} if {self.now} < {rounds} else {text}"
        return text

    def end(self, mine: str) -> list[Entry]:
        """The last question, who is left: nobody. The highest of the ranks that joined last gives its model to all."""
        left, last = (
            self.tensor("left", 1, "float32", 0),
            self.tensor("last", 1, "int64", f"rank if {mine} == {self.runs} else -1"),
        )
        src = max((r for r in range(self.context.world_size) if self.ddp.rounds(r) == self.runs), default=0)
        return [
            self.call("all_reduce", tensor=left),
            self.call("all_reduce", tensor=last, op="max"),
            *self.coalesced(self.weights(), "final", src),
        ]


def _expression(inputs: dict[int | str, int]) -> str | int:
    """Per-rank numbers as an expression, since a var takes no mapping."""
    named = sorted((key, value) for key, value in inputs.items() if isinstance(key, int))
    text = str(inputs.get("else", named[-1][1] if named else 0))
    for rank, value in reversed(named):
        text = f"{value} if rank == {rank} else {text}"
    return text


def _without(ranks: Sequence[int]) -> str | None:
    """A selector of all ranks but these; None selects all."""
    return " and ".join(f"rank != {rank}" for rank in sorted(set(ranks))) or None
