"""The calls of DistributedDataParallel, in PyTorch's order.

Sources, torch 2.13: `torch/nn/parallel/distributed.py` (`__init__`, `_pre_forward`),
`torch/csrc/distributed/c10d/reducer.cpp` (mark_bucket_ready, finalize_backward,
verify_params_across_processes).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from distsim.scenario.strategies.base import (
    Entry,
    Expansion,
    ExpansionContext,
    ModelLayer,
    block,
    compute,
    step,
    wait,
    waits_for_copies,
)
from distsim.scenario.strategies.ddp.buckets import (
    GradientBucket,
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

if TYPE_CHECKING:
    from distsim.scenario.strategies.ddp.fields import Ddp


def with_model_mismatch_errors(
    ranks: Sequence[int], models: Mapping[int, Sequence[ModelLayer]], steps: list[Entry]
) -> list[Entry]:
    """The entries of some ranks, with what torch raises at construction where the ranks wrap
    different ``models`` (run, torch 2.13): with other numbers of parameters all of them raise, with
    other shapes those that differ from rank 0. Shapes of other dimensions don't fit into the
    broadcast that compares them, and abort before."""
    counts = {
        rank: sum(len(layer.params) for layer in model) for rank, model in sorted(models.items())
    }
    shapes = {
        rank: [shape for layer in model for shape in layer.params] for rank, model in models.items()
    }
    dims = {sum(map(len, shape)) for shape in shapes.values()}
    after = {0: list[Entry](), 1: list[Entry]()}  # how many of the comparisons have been made
    for rank in ranks:
        other = next((r for r, n in counts.items() if n != counts[rank]), None)
        place = next(
            (
                k
                for k, (mine, first) in enumerate(zip(shapes[rank], shapes[0], strict=False))
                if mine != first
            ),
            None,
        )
        if other is not None:
            after[0].append(
                step(
                    "fail",
                    [rank],
                    message=_PARAM_COUNT_ERROR.format(rank, counts[rank], other, counts[other]),
                )
            )
        elif place is not None and len(dims) == 1:
            sizes = list(shapes[rank][place])
            after[1].append(
                step("fail", [rank], message=_PARAM_SHAPE_ERROR.format(rank, place, sizes))
            )
    if not any(after.values()):
        return steps
    built = steps[0]["steps"]
    assert isinstance(built, list)
    return [
        {**steps[0], "steps": [built[0], *after[0], built[1], *after[1], *built[2:]]},
        *steps[1:],
    ]


#: What torch 2.13 raises where DistributedDataParallel compares the parameters of all ranks
#: (verify_params_across_processes).
_PARAM_COUNT_ERROR = "DDP expects same model across all ranks, but Rank {} has {} params, while rank {} has inconsistent {} params."
_PARAM_SHAPE_ERROR = "[{0}]: params[{1}] in this process with sizes {2} appears not to match sizes of the same param in process 0."


class DdpWriter(ReplicaWriter):
    """Writes one model's entries. Tensors are named after the strategy: `ddp_bucket_0`,
    `ddp_weights_0`, …
    """

    def __init__(self, ddp: Ddp, context: ExpansionContext) -> None:
        group = ddp.group_of(context)
        super().__init__(
            context.prefix("ddp"),
            ddp.dtype,
            group,
            context.size_of(group),
            model_parameters(ddp.model),
        )
        self.ddp, self.context, self.model = ddp, context, ddp.model
        self.vars: dict[str, object] = {}
        #: What counts iterations: the file's own word, or the index of the loop over `inputs`; and
        #: how many there are.
        self.now = "iteration" if ddp.inputs is None else f"{self.p}_batch"
        self.runs = context.iterations if ddp.inputs is None else max(ddp.inputs.values())
        self.fixed = ddp.find_unused_parameters and not ddp.static_graph
        self.buckets = self.layouts(ddp.bucket_cap_mb, "bucket", self.fixed)
        self.state = model_parameters(ddp.model, frozen=True)
        self.hook = ddp.comm_hook or CommHook()
        #: The first layer that learns: nothing before it has a backward pass.
        self.begins = next((k for k, layer in enumerate(ddp.model) if layer.params), 0)
        #: Ranks that leave out a layer that others wait for.
        self.stuck = (
            [] if self.fixed else sorted(rank for rank, layers in ddp.unused.items() if layers)
        )

    def expansion(self) -> Expansion:
        steps = self.construction() if self.ddp.setup else []
        return Expansion([*steps, *self.body()], self.tensors, {}, self.vars)

    def body(self) -> list[Entry]:
        """All iterations; ranks that reduce when others do not have an iteration of their own."""
        kinds = {
            late: [r for r in range(self.context.world_size) if self.ddp.late(r) == late]
            for late in (True, False)
        }
        if not all(kinds.values()) or self.ddp.accumulate == 1:
            return self.iteration(self.ddp.late(0))
        return [
            block(self.iteration(late), " or ".join(f"rank == {r}" for r in ranks))
            for late, ranks in kinds.items()
        ]

    # --- pieces ---
    def weights(self) -> list[str]:
        """The model's state in messages of 250 MiB, each dtype apart: parameters, then buffers."""
        return self.messages([*self.state, *self.running()])

    def running(self) -> list[ModelParameter]:
        """All buffers of a dtype as one."""
        first = len(self.state)
        return [
            ModelParameter(first + k, -1, n, (n,), dtype)
            for k, (dtype, n) in enumerate(self.ddp.buffers.items())
            if n
        ]

    def synced(self, src: int | str = 0) -> list[Entry]:
        """The buffers' broadcast before a forward pass."""
        return self.coalesced(self.parted("buffers", self.running()), "synced", src)

    # --- before the first iteration ---
    def construction(self) -> list[Entry]:
        steps = self.built(sum(len(shape) for layer in self.model for shape in layer.params))
        if any(self.ddp.frozen.values()):
            steps = [steps[0], *self.inconsistent(), *steps[1:]]
        return [block(steps, None if self.ddp.inputs is not None else f"{self.now} == 0")]

    def inconsistent(self) -> list[Entry]:
        """Ranks that count different parameters raise, each with the first that differs from it
        (verify_params_across_processes).
        """
        counts = [self.counted(rank) for rank in range(self.context.world_size)]
        found: list[Entry] = []
        for rank, mine in enumerate(counts):
            other = next((r for r, n in enumerate(counts) if n != mine), None)
            if other is not None:
                found.append(
                    step(
                        "fail",
                        [rank],
                        message=_PARAM_COUNT_ERROR.format(rank, mine, other, counts[other]),
                    )
                )
        return found

    def counted(self, rank: int) -> int:
        return sum(
            len(layer.params)
            for k, layer in enumerate(self.model)
            if k not in self.ddp.frozen.get(rank, ())
        )

    # --- an iteration ---
    def iteration(self, late: bool) -> list[Entry]:
        found: list[Entry] = []
        if self.ddp.evaluate:
            found = self.before_forward(
                0, True, late
            )  # under no_grad nothing is synchronised again
            return [*([block(found, f"{self.now} == 0")] if found else []), *self.forward()]
        for k in range(self.ddp.accumulate):
            last = k == self.ddp.accumulate - 1
            after_sync = k == 0 or not late  # buffers travel where the pass before was synchronised
            found += self.before_forward(k, after_sync, late)
            found += self.forward()
            found += self.by_layout(k, last or not late, late)
        return found + self.optimizer(late)

    def before_forward(self, micro: int, after_sync: bool, late: bool) -> list[Entry]:
        """The new buckets, once, at the first forward pass after a backward pass that reduced; then
        the buffers.
        """
        found = self.unfinished() if micro == 0 else []
        at, when = self.rebuilt_at(late)
        if micro == when:
            found += self.rebuild(at)
        if self.ddp.buffers and after_sync and self.ddp.forward_sync_buffers:
            found += self.synced()
        return found

    def rebuilt_at(self, late: bool) -> tuple[int, int]:
        """The iteration and micro-batch before which buckets are rebuilt: the second synchronised
        pass, with static_graph the third.
        """
        passes = 2 if self.ddp.static_graph else 1
        each = 1 if late else self.ddp.accumulate
        return passes // each, passes % each

    def rebuild(self, at: int) -> list[Entry]:
        """The layout of the buckets that hold from now on, in one iteration; empty where they never
        change.
        """
        if not self.ddp.setup or self.fixed or self.ddp.evaluate or self.runs <= at:
            return []
        return [block(self.layout(self.buckets["bucket"]), f"{self.now} == {at}")]

    def forward(self) -> list[Entry]:
        return [compute(f"forward {layer.name}", layer.forward) for layer in self.model]

    def in_use(self, micro: int, late: bool) -> list[tuple[str, str | None]]:
        """The buckets of a micro-batch's backward pass, the first ones and the rebuilt ones, and
        when; None: always.
        """
        first, later = self.buckets
        if not self.ddp.setup or self.buckets[first] == self.buckets[later]:
            return [(later, None)]
        at, when = self.rebuilt_at(late)
        before = at + (
            micro < when
        )  # iterations whose micro-batch of this number has the first buckets
        if not before or before >= self.runs:
            return [(first if before else later, None)]
        return [(first, f"{self.now} < {before}"), (later, f"{self.now} >= {before}")]

    def by_layout(self, micro: int, synced: bool, late: bool) -> list[Entry]:
        """The backward pass with the first buckets, and with the rebuilt ones."""
        found: list[Entry] = []
        delays = self.ddp.static_graph and self.ddp.setup and micro == 0 and synced
        for k, (word, condition) in enumerate(self.in_use(micro, late)):
            if delays and k == 0:
                first = self.backward(word, micro, synced, late, delays)
                found.append(block(first, f"{self.now} == 0" if self.runs > 1 else None))
                condition = f"{self.now} > 0" + (f" and {condition}" if condition else "")
            if not delays or self.runs > 1:
                steps = self.backward(word, micro, synced, late)
                found += steps if condition is None else [block(steps, condition)]
        return found

    def backward(
        self, word: str, micro: int, synced: bool, late: bool, delays: bool = False
    ) -> list[Entry]:
        """Layer by layer from the last; a bucket goes out when all of its gradients are there and
        those before it have gone.

        ``delays``: the first pass of a static graph, which tells what was used and reduces when it
        is over (delay_all_reduce).
        """
        buckets = self.buckets[word]
        names = [
            self.tensor(f"{word}_{k}", bucket.numel, bucket.dtype)
            for k, bucket in enumerate(buckets)
        ]
        done: set[int] = set()
        seen: set[int] = set()
        found: list[Entry] = []
        sent = 0
        for layer in reversed(range(self.begins, len(self.model))):
            found.append(self.backward_of(layer, buckets, names, seen, micro == 0 or not late))
            done.add(layer)
            while synced and not delays and sent < len(buckets) and buckets[sent].layers <= done:
                ranks = self.ranks_that_reduce(buckets, sent)
                found += self.sent(word, buckets[sent], sent, ranks)
                sent += 1
        if delays:
            return [
                *found,
                *self.used(
                    [e for k, bucket in enumerate(buckets) for e in self.sent(word, bucket, k)],
                    word,
                ),
            ]
        return found + (self.finish(word, buckets) if synced else [])

    # --- a bucket on its way ---
    def sent(
        self, word: str, bucket: GradientBucket, k: int, ranks: str | None = None
    ) -> list[Entry]:
        """What the hook calls for a bucket that is full."""
        name, handle = f"{self.p}_{word}_{k}", f"{self.p}_{word}_reduced"
        if self.hook.dtype:
            less = self.tensor(f"{word}_{k}_compressed", bucket.numel, self.hook.dtype)
            return [
                cast_entry(less, f"{name} * {1 / self.size!r}", ranks),
                self.reduce(less, handle, k, ranks),
            ]
        plain = [self.averaged(name, ranks), self.reduce(name, handle, k, ranks)]
        if not self.hook.rank or self.runs <= self.hook.start:
            return plain
        if word == "initial":
            return plain
        return [
            block(plain, f"{self.now} < {self.hook.start}"),
            block(self.factored(word, bucket, k), f"{self.now} >= {self.hook.start}"),
        ]

    def factored(self, word: str, bucket: GradientBucket, k: int) -> list[Entry]:
        """PowerSGD: each of the three sums waits for the one before."""
        parts, name = powersgd_factors(bucket, self.hook), f"{self.p}_{word}_{k}"
        handle, found = f"{self.p}_{word}_reduced@{k}", list[Entry]()
        for part, numel in parts._asdict().items():
            if not numel:
                continue
            tensor = self.tensor(f"{word}_{k}_{part}", numel, bucket.dtype)
            found += [wait(handle)] if found else []
            found += [compute(f"powersgd {part}", {"time": "0 ns"}, reads=[name], writes=[tensor])]
            found += [self.call("all_reduce", tensor=tensor, op="sum", async_=True, as_=handle)]
        return found

    def unpacked(self, word: str, buckets: Sequence[GradientBucket]) -> list[Entry]:
        """What a hook does to the buckets when they have come."""
        names = [f"{self.p}_{word}_{k}" for k in range(len(buckets))]
        if self.hook.dtype:
            return [cast_entry(name, f"{name}_compressed") for name in names]
        return []

    def backward_of(
        self,
        layer: int,
        buckets: Sequence[GradientBucket],
        names: Sequence[str],
        seen: set[int],
        anew: bool,
    ) -> Entry:
        """One layer's gradients: the first into a bucket start it ``anew``, unless gradients are
        accumulated.
        """
        mine = [k for k, bucket in enumerate(buckets) if layer in bucket.layers]
        fresh = [names[k] for k in mine if k not in seen and anew]
        seen.update(mine)
        adds = [names[k] for k in mine if names[k] not in fresh]
        skipping = [rank for rank, layers in self.ddp.unused.items() if layer in layers]
        ranks = _all_ranks_except(skipping)
        return compute(
            f"backward {self.model[layer].name}",
            self.model[layer].backward,
            ranks,
            writes=fresh,
            adds=adds,
        )

    def ranks_that_reduce(self, buckets: Sequence[GradientBucket], k: int) -> str | None:
        """Buckets go out in order, so a rank that has no gradient for one never sends it nor any
        after it.
        """
        if self.fixed:
            return None
        before: set[int] = set().union(*(bucket.layers for bucket in buckets[: k + 1]))
        return _all_ranks_except(
            [rank for rank, layers in self.ddp.unused.items() if before & set(layers)]
        )

    def finish(self, word: str, buckets: Sequence[GradientBucket]) -> list[Entry]:
        """The end of the backward pass waits for all buckets. A rank that never sent some waits for
        none: it raises later.
        """
        ends = [
            *waits_for_copies(f"{self.p}_{word}_reduced", range(len(buckets))),
            *self.unpacked(word, buckets),
        ]
        if self.fixed:
            return self.used([], word, ends)
        return [block(ends, _all_ranks_except(self.stuck))] if self.stuck else ends

    def used(
        self, sent: list[Entry], word: str, ends: Sequence[Entry] | None = None
    ) -> list[Entry]:
        """Which parameters a pass used: every iteration with find_unused_parameters, the first with
        static_graph.
        """
        used, handle = self.tensor("used", len(self.params), "int32"), f"{self.p}_used_known"
        given = self.call("all_reduce", tensor=used, op="sum", async_=True, as_=handle)
        last = self.finish(word, self.buckets[word]) if ends is None else ends
        return [given, *sent, *last, wait(handle)]

    def unfinished(self) -> list[Entry]:
        """What a rank with an unfinished reduction does at its next forward pass."""
        if not self.stuck or self.runs < 2:
            return []
        message = (
            "Expected to have finished reduction in the prior iteration before starting a new one."
        )
        who = " or ".join(f"rank == {rank}" for rank in self.ddp.unused if rank in self.stuck)
        return [step("fail", f"{self.now} > 0 and ({who})", message=message)]

    def optimizer(self, late: bool = True) -> list[Entry]:
        parts = self.shared() if self.ddp.zero_redundancy_optimizer else []
        if self.ddp.optimizer is None:
            return parts
        price = self.ddp.optimizer
        names = {
            word: [f"{self.p}_{word}_{k}" for k in range(len(buckets))]
            for word, buckets in self.buckets.items()
        }
        used = self.in_use(self.ddp.accumulate - 1, late)
        return [
            *(compute("optimizer", price, when, reads=names[word]) for word, when in used),
            *parts,
        ]

    def shared(self) -> list[Entry]:
        """ZeroRedundancyOptimizer: rank by rank, each parameter from the rank that updated it; then
        all are waited for.
        """
        found: list[Entry] = []
        handle = f"{self.p}_updated"
        for rank, mine in enumerate(partition_parameters(self.params, self.size)):
            for param in mine:
                name = self.tensor(f"param_{param.number}", param.numel, param.dtype)
                found.append(
                    self.call(
                        "broadcast",
                        tensor=name,
                        group_src=rank,
                        async_=True,
                        as_=f"{handle}@{param.number}",
                    )
                )
        return found + waits_for_copies(handle, range(len(self.params)))


def _all_ranks_except(ranks: Sequence[int]) -> str | None:
    """A selector of all ranks but these; None selects all."""
    return " and ".join(f"rank != {rank}" for rank in sorted(set(ranks))) or None
