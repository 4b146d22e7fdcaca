"""The calls of DistributedDataParallel, in PyTorch's order.

Sources, torch 2.13: `torch/nn/parallel/distributed.py` (`__init__`, `_pre_forward`, `_DDPJoinHook`),
`torch/distributed/algorithms/join.py`, `torch/csrc/distributed/c10d/reducer.cpp` (mark_bucket_ready, finalize_backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from distsim.strategies.base import Context, Entry, Expansion, block, compute, step
from distsim.strategies.buckets import Bucket, Param, initial, parameters, rebuilt
from distsim.strategies.ddp_calls import Replicas

if TYPE_CHECKING:
    from distsim.strategies.ddp import Ddp


class DdpWriter(Replicas):
    """Writes one model's entries. Tensors are named after the strategy: `ddp_bucket_0`, `ddp_weights_0`, …"""

    def __init__(self, ddp: Ddp, context: Context) -> None:
        group = ddp.group_of(context)
        super().__init__(context.prefix("ddp"), group, context.size_of(group), parameters(ddp.model), ddp.dtype, ddp.itemsize)
        self.ddp, self.context, self.model = ddp, context, ddp.model
        self.vars: dict[str, Any] = {}
        #: What counts iterations: the file's own word, or the index of the loop over `inputs`.
        self.now = "iteration" if ddp.inputs is None else f"{self.p}_batch"
        cap = None if ddp.bucket_cap_mb is None else int(ddp.bucket_cap_mb * 2**20)
        first = initial(self.params, ddp.itemsize, cap, ddp.find_unused_parameters)
        later = first if ddp.find_unused_parameters else rebuilt(self.params, ddp.itemsize, cap)
        self.layouts = {"initial": first, "bucket": later}

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
        return names + ([self.buffers()] if self.ddp.buffers and not joined else [])

    def buffers(self) -> str:
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
        """The new buckets' layout, once, at the first forward pass after a backward pass that reduced; then the buffers."""
        at = 1 if micro == 0 else 0
        every = not self.ddp.no_sync and self.ddp.accumulate > 1  # so that the first iteration's second micro-batch rebuilds
        found = self.unfinished() if micro == 0 else []
        if micro == int(every) and self.rebuilds(at):
            found += self.rebuild(f"{self.now} == {at}")
        if self.ddp.buffers and after_sync:
            found += self.coalesced([self.buffers()], "synced")
        return found

    def rebuilds(self, at: int) -> bool:
        runs = self.context.iterations if self.ddp.inputs is None else max(self.ddp.inputs.values())
        return self.ddp.setup and not self.ddp.find_unused_parameters and runs > at

    def rebuild(self, when: str | None) -> list[Entry]:
        return [block(self.layout(self.layouts["bucket"]), when)]

    def forward(self) -> list[Entry]:
        return [compute(f"forward {layer.name}", layer.forward) for layer in self.model]

    def phases(self) -> list[tuple[str, str | None]]:
        """The buckets in use, and when: the first ones, then the rebuilt ones. None: always."""
        if not self.ddp.setup or self.layouts["initial"] == self.layouts["bucket"]:
            return [("bucket", None)]
        if not self.rebuilds(1):
            return [("initial", None)]
        return [("initial", f"{self.now} == 0"), ("bucket", f"{self.now} > 0")]

    def by_layout(self, micro: int, synced: bool) -> list[Entry]:
        """The backward pass with the first buckets, and with the rebuilt ones."""
        phases = self.phases()
        if micro > 0 and not self.ddp.no_sync:
            phases = [("bucket", None)]
        if len(phases) == 1:
            return self.backward(phases[0][0], micro, synced)
        return [block(self.backward(word, micro, synced), when) for word, when in phases]

    def backward(self, word: str, micro: int, synced: bool) -> list[Entry]:
        """Layer by layer from the last; a bucket goes out when all of its gradients are there and those before it have gone."""
        buckets = self.layouts[word]
        names = [self.tensor(f"{word}_{k}", bucket.numel, self.ddp.dtype) for k, bucket in enumerate(buckets)]
        done: set[int] = set()
        seen: set[int] = set()
        found: list[Entry] = []
        sent = 0
        for layer in reversed(range(len(self.model))):
            found.append(self.backward_of(layer, buckets, names, seen, micro))
            done.add(layer)
            while synced and sent < len(buckets) and buckets[sent].layers <= done:
                ranks = self.excused(buckets, sent)
                found += [self.divided(names[sent], ranks), self.reduce(names[sent], f"{word}_reduced", sent, ranks)]
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

    def divided(self, name: str, ranks: str | None) -> Entry:
        """Gradients are divided by the number of ranks as they enter the bucket, so that the sum is the average."""
        entry: Entry = {"assign": {"tensor": name, "value": f"{name} * {1 / self.size!r}"}}
        return entry if ranks is None else {**entry, "ranks": ranks}

    def reduce(self, name: str, handle: str, k: int, ranks: str | None) -> Entry:
        """One bucket's all_reduce, under way."""
        return self.call("all_reduce", ranks, tensor=name, op="sum", async_=True, as_=f"{self.p}_{handle}@{k}")

    def excused(self, buckets: Sequence[Bucket], k: int) -> str | None:
        """Buckets go out in order, so a rank that has no gradient for one never sends it nor any after it."""
        if self.ddp.find_unused_parameters:
            return None
        before: set[int] = set().union(*(bucket.layers for bucket in buckets[: k + 1]))
        return _without([rank for rank, layers in self.ddp.unused.items() if before & set(layers)])

    def finish(self, word: str, buckets: Sequence[Bucket]) -> list[Entry]:
        """The end of the backward pass waits for all buckets. A rank that never sent some waits for none: it raises later."""
        stuck = None if self.ddp.find_unused_parameters else _without([r for r, layers in self.ddp.unused.items() if layers])
        found: list[Entry] = []
        if self.ddp.find_unused_parameters:
            used = self.tensor("used", len(self.params), "int32")
            found.append(self.call("all_reduce", tensor=used, op="sum", async_=True, as_=f"{self.p}_used_known"))
        waits = [{"wait": f"{self.p}_{word}_reduced@{k}"} for k in range(len(buckets))]
        if self.ddp.find_unused_parameters:
            waits.append({"wait": f"{self.p}_used_known"})
        return found + (waits if stuck is None else [block(waits, stuck)])

    def unfinished(self) -> list[Entry]:
        """What a rank with an unfinished reduction does at its next forward pass."""
        stuck = [] if self.ddp.find_unused_parameters else [rank for rank, layers in self.ddp.unused.items() if layers]
        runs = self.context.iterations if self.ddp.inputs is None else max(self.ddp.inputs.values())
        if not stuck or runs < 2:
            return []
        message = "Expected to have finished reduction in the prior iteration before starting a new one."
        who = " or ".join(f"rank == {rank}" for rank in stuck)
        return [step("fail", f"{self.now} > 0 and ({who})", message=message)]

    def optimizer(self) -> list[Entry]:
        if self.ddp.optimizer is None:
            return []
        price = self.ddp.optimizer
        names = {word: [f"{self.p}_{word}_{k}" for k in range(len(buckets))] for word, buckets in self.layouts.items()}
        used = [word for word in names if set(names[word]) <= self.tensors.keys()]
        if len(used) == 1:
            return [compute("optimizer", price, reads=names[used[0]])]
        first = compute("optimizer", price, f"{self.now} == 0", reads=names["initial"])
        return [first, compute("optimizer", price, f"{self.now} > 0", reads=names["bucket"])]

    # --- unequal numbers of batches ---
    def uneven(self) -> list[Entry]:
        """Every rank runs as many batches as it has; with `join` the early ones shadow the calls of the others until all are done."""
        from distsim.strategies.ddp_join import joined

        inputs = self.ddp.inputs or {}
        if self.ddp.join:
            return joined(self)
        return [{"repeat": {"times": inputs, "index": self.now, "steps": self.iteration()}}]


def _without(ranks: Sequence[int]) -> str | None:
    """A selector of all ranks but these; None selects all."""
    return " and ".join(f"rank != {rank}" for rank in sorted(set(ranks))) or None
