"""Fully sharded data parallelism (FSDP2's fully_shard, ZeRO 1 to 3): fields of `fsdp:`, what they refuse, the calls in PyTorch's order.

Sources, torch 2.13, `torch/distributed/fsdp/_fully_shard/`: `_fsdp_state.py` (_pre_forward, _pre_backward), `_fsdp_param_group.py`
(unshard, post_backward, _backward_prefetch), `_fsdp_collectives.py` (foreach_all_gather, foreach_reduce).

PyTorch issues blocking calls inside streams of its own. Gradients are reduced so under nccl: each reduce_scatter on one stream, HSDP's
all_reduce after it on another. What a gather waits for is an event between two others on its stream; so under nccl gathers are
asynchronous and stand where that event would let them start. The order on each communicator is PyTorch's. Under gloo and mpi there are
no streams: all calls block, each where PyTorch calls it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Annotated, ClassVar

from pydantic import PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.strategies.base import Context, Entry, Expansion, Group, Layer, Refusal, Writer, block, compute, step, wait
from distsim.strategies.fields import Axes, CostField, Count, Dtype, PerRank, integer
from distsim.strategies.layers import Layered, LayerFields, named_layers


def _stage(value: object, info: ValidationInfo) -> int:
    found = integer(1, "ZeRO's stage, 1, 2 or 3, an integer")(value, info)
    if found > 3:
        raise ValueError(f"expected ZeRO's stage, 1, 2 or 3, found {found}")
    return found


Stage = Annotated[int, PlainValidator(_stage), WithJsonSchema({"enum": [1, 2, 3]})]


class Fsdp(Layered):
    """Every rank keeps a shard of each layer; layers are gathered when they are needed, gradients scattered as they come."""

    name: ClassVar[str] = "fsdp"
    about: ClassVar[str] = (
        "fully_shard of each layer: all_gather before forward and again before backward, reduce_scatter of the gradients after it."
    )

    #: The ranks that share one copy of the model; left out: the axis `dp_shard` or `dp` where the mesh has one, else all ranks.
    shard: Axes | None = None
    #: HSDP: the axis along which sharded copies are repeated; their gradients are reduced once more.
    replicate: Axes | None = None
    #: 3 gathers layers again for the backward pass, 2 keeps them, 1 keeps gradients whole too until the last micro-batch.
    zero: Stage = 3
    #: What the outermost module holds itself: gathered first, kept through the backward pass, reduced last.
    root: LayerFields | None = None
    #: MixedPrecisionPolicy: what is gathered, what is reduced.
    param_dtype: Dtype | None = None
    reduce_dtype: Dtype | None = None
    accumulate: Count = 1
    #: set_requires_gradient_sync(False) before all micro-batches but the last; left out: under ZeRO 1.
    no_sync: StrictBool | None = None
    #: clip_grad_norm_: one number is reduced before the optimizer.
    clip_grad_norm: StrictBool = False
    optimizer: CostField | None = None
    #: Ranks that leave out the backward pass of one iteration: {1: 0}.
    skips_backward: PerRank = {}

    @property
    def late(self) -> bool:
        """Gradients are reduced once an iteration."""
        return self.zero == 1 if self.no_sync is None else self.no_sync

    def shard_group(self, context: Context) -> Group | None:
        if self.shard is not None:
            return self.shard
        return next((axis for axis in ("dp_shard", "dp") if axis in context.mesh), None)

    def refuse(self, context: Context) -> list[Refusal]:
        found = context.refused(shard=self.shard, replicate=self.replicate)
        if found:
            return found
        shard, replicate = (_axes(group) for group in (self.shard_group(context), self.replicate))
        if self.replicate is not None and (not shard or set(shard) & set(replicate)):
            found.append((("replicate",), "sharded and repeated copies lie on different axes of the mesh: name one for each"))
        if context.size_of(self.shard_group(context)) == 1:
            found.append((("shard",), "the group has a single rank: there is nothing to shard"))
        n = context.world_size
        strange = [rank for rank in self.skips_backward if not isinstance(rank, int) or rank >= n]
        if "else" in strange:
            found.append((("skips_backward",), "expected ranks and the iteration that each leaves out, as `{2: 1}`"))
        found += [
            (("skips_backward",), f"expected ranks of the world of {n}, found {rank}") for rank in strange if rank != "else"
        ]
        return found

    def expand(self, context: Context) -> Expansion:
        return FsdpWriter(self, context).expansion()


def _axes(group: Group | None) -> tuple[str, ...]:
    return () if group is None else (group,) if isinstance(group, str) else group


class FsdpWriter(Writer):
    """Writes one model's entries. Units are gathered as one: the root's own parameters, if any, then the layers."""

    def __init__(self, fsdp: Fsdp, context: Context) -> None:
        super().__init__(context.prefix("fsdp"), fsdp.dtype, fsdp.shard_group(context))
        self.fsdp, self.n = fsdp, context.size_of(self.group)
        self.copies = 1 if fsdp.replicate is None else context.size_of(fsdp.replicate)
        self.free = context.backend == "nccl"
        root = () if fsdp.root is None else named_layers([fsdp.root.model_copy(update={"name": fsdp.root.name or "root"})])
        self.root = 0 if root else -1
        self.units: tuple[Layer, ...] = (*root, *fsdp.model)
        self.declare()

    def expansion(self) -> Expansion:
        steps: list[Entry] = []
        for micro in range(self.fsdp.accumulate):
            first, last = micro == 0, micro == self.fsdp.accumulate - 1
            steps += self.forward(gathers=first or self.fsdp.zero > 1)
            backward = self.backward(first, last or not self.fsdp.late)
            steps.append(block(backward, self.present())) if self.fsdp.skips_backward else steps.extend(backward)
        return Expansion(steps + self.update(), self.tensors)

    def present(self) -> str:
        """Everybody but the ranks that skip this backward pass."""
        skips = [f"rank == {rank} and iteration == {k}" for rank, k in self.fsdp.skips_backward.items()]
        return f"not ({' or '.join(skips)})"

    # --- tensors ---
    def declare(self) -> None:
        """Shards are cut along the first axis of each parameter and padded to equal lengths (_get_dim0_padded_size)."""
        fsdp, n = self.fsdp, self.n
        gathered, reduced = fsdp.param_dtype or fsdp.dtype, fsdp.reduce_dtype or fsdp.param_dtype or fsdp.dtype
        for k, unit in enumerate(self.units):
            rows = sum(-(-shape[0] // n) * prod(shape[1:]) for shape in unit.params)
            for word, numel, dtype in (
                ("shard", rows, gathered), ("full", rows * n, gathered), ("grads", rows * n, reduced), ("grad", rows, reduced),
            ):  # fmt: skip
                self.tensor(f"{word}_{k}", numel, dtype)
            if fsdp.accumulate > 1 and not fsdp.late:
                self.tensor(f"more_{k}", rows, reduced)

    def gather(self, k: int) -> list[Entry]:
        handle = {"async_": True, "as_": f"{self.p}_gathered@{k}"} if self.free else {}
        return [self.call("all_gather_into_tensor", input=f"{self.p}_shard_{k}", output=f"{self.p}_full_{k}", **handle)]

    def gathered(self, k: int) -> list[Entry]:
        return [wait(f"{self.p}_gathered@{k}")] if self.free else []

    def scatter(self, k: int, into: str) -> list[Entry]:
        """The average of the gradients, cut up, one of n parts for each rank; then, HSDP, of that part over all copies of the model."""
        whole, part = f"{self.p}_grads_{k}", f"{self.p}_{into}_{k}"
        found = self.behind("current", "reduce_scatter")
        found.append(self.call("reduce_scatter_tensor", input=whole, output=part, op="avg", **self.on("reduce_scatter")))
        if self.copies > 1:
            found += self.behind("reduce_scatter", "all_reduce")
            found.append(step("all_reduce", tensor=part, op="avg", **self.on("all_reduce"), group=self.fsdp.replicate))
        return found

    def on(self, stream: str) -> dict[str, str]:
        return {"on": f"{self.p}_{stream}"} if self.free else {}

    def behind(self, stream: str, other: str = "current") -> list[Entry]:
        """The other stream goes on when this one has done what it holds."""
        waited = {"stream": stream if stream == "current" else f"{self.p}_{stream}"}
        waiting = {} if other == "current" else self.on(other)
        return [{"wait_stream": {**waited, **waiting}}] if self.free else []

    # --- passes ---
    def forward(self, gathers: bool) -> list[Entry]:
        """Under nccl two units are under way ahead of the one that computes: the next copy-in overlaps the current all_gather."""
        found: list[Entry] = []
        count, ahead = len(self.units), 2 if self.free else 0
        if gathers:
            for k in range(min(ahead, count)):
                found += self.gather(k)
        for k in range(count):
            if gathers and not self.free:
                found += self.gather(k)
            if gathers:
                found += self.gathered(k)
            if gathers and self.free and k + ahead < count:
                found += self.gather(k + ahead)
            if k != self.root:
                found.append(self.work("forward", k))
        return found + ([self.work("forward", self.root)] if self.root >= 0 else [])

    def work(self, word: str, k: int, fresh: bool = True) -> Entry:
        unit, grads = self.units[k], [f"{self.p}_grads_{k}"]
        reads = [f"{self.p}_full_{k}"]
        if word == "forward":
            return compute(f"forward {unit.name}", unit.forward, reads=reads)
        return compute(
            f"backward {unit.name}", unit.backward, reads=reads, writes=grads if fresh else [], adds=[] if fresh else grads
        )

    def backward(self, first: bool, reduces: bool) -> list[Entry]:
        """From the last layer to the first; while one computes, the next is gathered (_backward_prefetch) and the last one reduced."""
        order = ([self.root] if self.root >= 0 else []) + [k for k in reversed(range(len(self.units))) if k != self.root]
        again = [k for k in order if self.fsdp.zero == 3 and k != self.root]
        into = "grad" if first or self.fsdp.late else "more"
        found: list[Entry] = []
        reduced = False
        for i, k in enumerate(order):
            if k in again and i == 0:
                found += self.gather(k)
            found += self.gathered(k) if k in again else []
            if i + 1 < len(order) and order[i + 1] in again:
                found += self.gather(order[i + 1])
            found.append(self.work("backward", k, fresh=first or not self.fsdp.late))
            if reduces and k != self.root:
                found += self.reduce(k, into, reduced)
                reduced = True
        if reduces and self.root >= 0:
            found += self.reduce(self.root, into, reduced)
        return found + (self.finish(order, into) if reduces else [])

    def reduce(self, k: int, into: str, reduced: bool) -> list[Entry]:
        """One reduce_scatter is in flight at a time: the compute stream waits for the last one's input before the next (post_backward)."""
        return [*(self.behind("reduce_scatter") if reduced else []), *self.scatter(k, into)]

    def finish(self, order: Sequence[int], into: str) -> list[Entry]:
        """The end of the backward pass waits for what is still reduced (finalize_backward)."""
        found = self.behind("all_reduce" if self.copies > 1 else "reduce_scatter")
        if into == "more":
            found += [
                {"assign": {"tensor": f"{self.p}_grad_{k}", "value": f"{self.p}_grad_{k} + {self.p}_more_{k}"}} for k in order
            ]
        return found

    def update(self) -> list[Entry]:
        found: list[Entry] = []
        if self.fsdp.clip_grad_norm:
            found.append(self.call("all_reduce", tensor=self.tensor("norm", 1, "float32"), op="sum"))
        if self.fsdp.optimizer is not None:
            words = {word: [f"{self.p}_{word}_{k}" for k in range(len(self.units))] for word in ("grad", "shard")}
            found.append(compute("optimizer", self.fsdp.optimizer, reads=words["grad"], writes=words["shard"]))
        return found
