"""The entries of `deepspeed:`. DeepSpeed 0.19.8: `runtime/engine.py`,
`runtime/zero/stage_1_and_2.py`, `stage3.py`, `runtime/comm/coalesced_collectives.py` (qgZ),
`partition_parameters.py` (CUDAQuantizer: qwZ).

Under nccl, gradients that overlap are reduced on a stream of their own, which the current stream
waits for before the next bucket (`average_tensor`) and at the end; parameters are gathered
asynchronously under every back end.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from math import prod
from typing import TYPE_CHECKING

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
from distsim.scenario.strategies.deepspeed.param_coordinator import (
    gradient_buckets,
    large_gradient_pieces,
)
from distsim.scenario.strategies.field_types import FLOAT_DTYPE_BYTES

if TYPE_CHECKING:
    from distsim.scenario.strategies.deepspeed.fields import DeepSpeed

#: Elements of a rank's flat part are a multiple of it (`nccl_start_alignment_factor`).
_PART_ALIGNMENT = 2


class DeepSpeedWriter(EntryWriter, ABC):
    """What the stages have in common. Parameters are numbered through all layers."""

    def __init__(
        self, fields: DeepSpeed, context: ExpansionContext, skipped: int | None = None
    ) -> None:
        more = "" if skipped is None else f"_without_{skipped}"
        super().__init__(
            context.unused_prefix("deepspeed") + more, fields.dtype, fields.over(context)
        )
        self.f, self.context, self.model = fields, context, fields.model
        #: The layers that are run, in order.
        self.run = [k for k in range(len(self.model)) if k != skipped]
        self.n = context.size_of(self.group)
        self.free = context.backend == "nccl"
        self.numel = [prod(shape) for layer in self.model for shape in layer.params]
        self.layer_of = [k for k, layer in enumerate(self.model) for _ in layer.params]
        self.params_of = [
            [p for p, k in enumerate(self.layer_of) if k == layer]
            for layer in range(len(self.model))
        ]

    # --- the whole ---
    def expansion(self) -> Expansion:
        """What the engine does when it is made; then the iterations, of which those that differ
        stand apart.
        """
        start = self.construction()
        rows = self.iterations(min(self.context.iterations, 4))
        differ = len(rows)
        while differ > 1 and rows[differ - 1] == rows[differ - 2]:
            differ -= 1
        steps: list[Entry] = (
            [block(start, "iteration == 0")] if self.context.iterations > 1 else [block(start)]
        )
        for k, row in enumerate(rows[:differ]):
            last = k == differ - 1
            which = f"iteration >= {k}" if last else f"iteration == {k}"
            steps += row if differ == 1 else [block(row, which)]
        return Expansion(steps, self.tensors, self.groups())

    def groups(self) -> dict[str, Entry]:
        return {}

    @abstractmethod
    def construction(self) -> list[Entry]: ...

    @abstractmethod
    def iterations(self, count: int) -> list[list[Entry]]:
        """The entries of the first iterations."""

    # --- parts ---
    def broadcasts(self) -> list[Entry]:
        """Parameters from the first rank to all, as bytes."""
        return [
            self.first(tensor_declaration(numel * FLOAT_DTYPE_BYTES[self.f.dtype], "uint8"))
            for numel in self.numel
        ]

    def first(self, tensor: Entry) -> Entry:
        """From group rank 0."""
        return self.call("broadcast", tensor=tensor, group_src=0)

    def one(self, dtype: str, op: str) -> Entry:
        return self.call("all_reduce", tensor=tensor_declaration(1, dtype), op=op)

    def optimizer(self, reads: Sequence[str], writes: Sequence[str]) -> list[Entry]:
        cost = self.f.optimizer
        return (
            []
            if cost is None
            else [compute("optimizer", cost, reads=list(reads), writes=list(writes))]
        )

    @property
    def streams(self) -> bool:
        """Gradients are reduced on a stream of their own."""
        return self.free and self.f.overlaps

    def on(self) -> dict[str, str]:
        return {"on": f"{self.prefix}_reduce"} if self.streams else {}

    def around(self) -> list[Entry]:
        """Before a bucket goes out: its stream waits for what was computed, and the current one for
        the buckets before.
        """
        if not self.streams:
            return []
        return [{"wait_stream": {"stream": "current", **self.on()}}, *self.settled()]

    def settled(self) -> list[Entry]:
        return [{"wait_stream": {"stream": f"{self.prefix}_reduce"}}] if self.streams else []

    def backward(
        self,
        layer: ModelLayer,
        fresh: Sequence[str],
        added: Sequence[str],
        reads: Sequence[str] = (),
    ) -> Entry:
        return compute(
            f"backward {layer.name}",
            layer.backward,
            reads=list(reads),
            writes=list(fresh),
            adds=list(added),
        )


class ZeroStage12Writer(DeepSpeedWriter):
    """ZeRO 1 and 2: all parameters in one flat tensor, of which each rank updates a part."""

    def __init__(
        self, fields: DeepSpeed, context: ExpansionContext, skipped: int | None = None
    ) -> None:
        super().__init__(fields, context, skipped)
        cut = _PART_ALIGNMENT * self.n
        self.part = -(-sum(self.numel) // cut) * cut // self.n
        self.early = fields.overlaps or fields.stage == 2
        backward = [p for k in reversed(self.run) for p in reversed(self.params_of[k])]
        self.order = order = backward if self.early else sorted(backward)
        self.buckets = gradient_buckets(
            [(p, self.numel[p]) for p in order], fields.reduce_bucket_size
        )
        for k, (params, _) in enumerate(self.buckets):
            for j, numel in enumerate(self.calls_of(params)):
                self.tensor(f"bucket_{k}_{j}", numel)
        self.flat = self.tensor("parameters", self.part * self.n)
        self.mine = self.tensor("part", self.part)

    def calls_of(self, params: Sequence[int]) -> list[int]:
        """Elements of each call of a bucket: one, but for a gradient that is larger than a
        bucket.
        """
        numel, most = sum(self.numel[p] for p in params), self.f.reduce_bucket_size
        if numel <= most or not self.f.reduce_scatter:
            return [numel]
        (param,) = params
        return large_gradient_pieces(sum(self.numel[:param]), numel, self.part, most)

    def names(self, k: int) -> list[str]:
        return [
            f"{self.prefix}_bucket_{k}_{j}" for j in range(len(self.calls_of(self.buckets[k][0])))
        ]

    def construction(self) -> list[Entry]:
        return self.broadcasts()

    def iterations(self, count: int) -> list[list[Entry]]:
        return [self.iteration()]

    def iteration(self) -> list[Entry]:
        steps: list[Entry] = []
        for micro in range(self.f.accumulate):
            last = micro == self.f.accumulate - 1
            steps += [
                compute(f"forward {self.model[k].name}", self.model[k].forward, reads=[self.flat])
                for k in self.run
            ]
            steps += self.passed(
                fresh=micro == 0 or self.f.stage == 2,
                sends=self.early and (last or self.f.stage == 2),
            )
        steps += (
            []
            if self.early
            else [entry for k in range(len(self.buckets)) for entry in self.reduce(k)]
        )
        steps += [self.one("uint8", "max")] if self.f.dtype != "float32" else []
        grads = [name for k in range(len(self.buckets)) for name in self.names(k)]
        steps += [self.one("float32", "sum"), *self.optimizer(grads, [self.mine])]
        return [*steps, self.call("all_gather_into_tensor", input=self.mine, output=self.flat)]

    def passed(self, fresh: bool, sends: bool) -> list[Entry]:
        """A backward pass. A bucket goes out when a gradient has come that it has no room for."""
        steps: list[Entry] = []
        of = {p: k for k, (params, _) in enumerate(self.buckets) for p in params}
        begun: set[int] = set()
        at = {
            self.order[place]: k
            for k, (_, place) in enumerate(self.buckets)
            if place < len(self.order)
        }
        for layer in reversed(self.run):
            mine = list(dict.fromkeys(of[p] for p in self.params_of[layer]))
            new = [k for k in mine if fresh and k not in begun]
            begun.update(mine)
            fresh_names, added = (
                [n for k in ks for n in self.names(k)]
                for ks in (new, [k for k in mine if k not in new])
            )
            steps.append(self.backward(self.model[layer], fresh_names, added, [self.flat]))
            ready = sorted(at[p] for p in self.params_of[layer] if p in at)
            steps += [entry for k in ready for entry in self.reduce(k)] if sends else []
        if sends:
            steps += [*self.reduce(len(self.buckets) - 1), *self.settled()]
        return steps

    def reduce(self, k: int) -> list[Entry]:
        """The gradients are divided before: sums."""
        return [
            *self.around(),
            *(
                self.call("all_reduce", tensor=name, op="sum", **self.on())
                for name in self.names(k)
            ),
        ]
