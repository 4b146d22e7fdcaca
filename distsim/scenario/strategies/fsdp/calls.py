"""The entries of `fsdp:`: what its hooks do (`distsim.scenario.strategies.fsdp.hook_events`) as
calls, on streams under nccl.

Sources, torch 2.13: `_fsdp_collectives.py` (foreach_all_gather, foreach_reduce), `_fsdp_init.py`
(_get_post_forward_mesh_info), `torch/nn/utils/clip_grad.py` (the norms of all gradients as one
DTensor, an element each, reduced over the mesh).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING

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
from distsim.scenario.strategies.fsdp.hook_events import (
    FsdpHooks,
    FsdpUnit,
    HookEvent,
    with_gathers_ahead,
)
from distsim.scenario.strategies.layers import equal_cost_shares

if TYPE_CHECKING:
    from distsim.scenario.strategies.fsdp.fields import Fsdp


class FsdpWriter(EntryWriter):
    """Writes one model's entries. Tensors are numbered by unit: the root, if it holds anything,
    then the units in the model's order.
    """

    def __init__(self, fsdp: Fsdp, context: ExpansionContext, root: FsdpUnit) -> None:
        super().__init__(context.unused_prefix("fsdp"), fsdp.dtype, fsdp.shard_group(context))
        self.fsdp, self.n, self.context = fsdp, context.size_of(self.group), context
        self.copies = 1 if fsdp.replicate is None else context.size_of(fsdp.replicate)
        self.free = context.backend == "nccl"
        self.root = root
        self.hooks = self.fresh()
        self.units = self.hooks.units
        held = [k for k, unit in enumerate(self.units) if unit.held]
        self.number = {k: number for number, k in enumerate(held)}
        self.learning = [k for k in held if self.units[k].params]
        self.groups: dict[str, object] = {}
        self.declare()

    def fresh(self) -> FsdpHooks:
        return FsdpHooks(self.root, self.fsdp.settings)

    # --- the whole ---
    def expansion(self) -> Expansion:
        """An iteration; where the first differs from the rest (units that stay gathered), each with
        its condition.
        """
        first, later = self.iteration(), self.iteration()
        if first == later or self.context.iterations < 2:
            steps = first
        else:
            steps = [block(first, "iteration == 0"), block(later, "iteration > 0")]
        return Expansion(steps, self.tensors, self.groups)

    def iteration(self) -> list[Entry]:
        steps: list[Entry] = []
        fsdp, count = self.fsdp, self.fsdp.accumulate
        for micro in range(count):
            first, last = micro == 0, micro == count - 1
            steps += self.written(self.forward(), first, last)
            if fsdp.evaluate:
                self.hooks.order.clear()
                continue
            events = self.hooks.backward(last or fsdp.frees, last or not fsdp.late)
            backward = [
                *self.written(events, first, last),
                *(self.finish(first, last) if last or not fsdp.late else []),
            ]
            steps += [block(backward, self.present())] if fsdp.skips_backward else backward
        return steps + ([] if fsdp.evaluate else self.update())

    def forward(self) -> list[HookEvent]:
        events = self.hooks.forward()
        return with_gathers_ahead(events, 2) if self.free else events

    def present(self) -> str:
        """Everybody but the ranks that skip this backward pass."""
        skips = [
            f"rank == {rank} and iteration == {k}" for rank, k in self.fsdp.skips_backward.items()
        ]
        return f"not ({' or '.join(skips)})"

    # --- tensors ---
    def declare(self) -> None:
        fsdp = self.fsdp
        gathered, reduced = (
            fsdp.param_dtype or fsdp.dtype,
            fsdp.reduce_dtype or fsdp.param_dtype or fsdp.dtype,
        )
        for k, number in self.number.items():
            unit, n = self.units[k], self.ranks_of(k)
            rows = unit.rows(n, unit.held)
            self.tensor(f"shard_{number}", rows, gathered)
            self.tensor(f"full_{number}", rows * n, gathered)
            if unit.reshard is not True and unit.reshard is not False:
                self.tensor(f"part_{number}", rows * n // unit.reshard, gathered)
                self.groups[f"{self.prefix}_part_{unit.reshard}"] = {
                    "by": self.fsdp.part_of(self.context, unit.reshard)
                }
            if unit.params and not fsdp.evaluate:
                mine = unit.rows(n, unit.params)
                for word, numel in (
                    ("grads", mine * n),
                    ("grad", mine),
                    *([("more", mine)] if self.adds else []),
                ):
                    self.tensor(f"{word}_{number}", numel, reduced)

    def group_of(self, k: int) -> GroupRef | None:
        """The ranks among which a unit is sharded."""
        return self.group if self.units[k].shard is None else self.units[k].shard

    def ranks_of(self, k: int) -> int:
        return self.context.size_of(self.group_of(k))

    @property
    def adds(self) -> bool:
        """Gradients of several micro-batches are reduced one by one, and added."""
        return self.fsdp.accumulate > 1 and not self.fsdp.late

    # --- events as entries ---
    def written(self, events: Sequence[HookEvent], first: bool, last: bool) -> list[Entry]:
        found: list[Entry] = []
        seen: dict[HookEvent, int] = {}
        for event in events:
            again = seen[event] = seen.get(event, -1) + 1
            found += self.entries(event, again, first, last)
        return found

    def entries(self, event: HookEvent, again: int, first: bool, last: bool) -> list[Entry]:
        kind, k = event
        if kind in ("gather", "part"):
            return self.gather(k, kind)
        if kind == "wait":
            return [wait(f"{self.prefix}_gathered@{self.number[k]}")] if self.free else []
        if kind == "settle":
            return self.behind("reduce_scatter")
        if kind == "reduce":
            return self.reduce(k, first, last)
        unit = self.units[k]
        if not unit.held and not unit.forward:
            return []
        return self.work(kind, k, again, fresh=first or not self.fsdp.late)

    def gather(self, k: int, kind: str) -> list[Entry]:
        number = self.number[k]
        handle = {"async_": True, "as_": f"{self.prefix}_gathered@{number}"} if self.free else {}
        word, group = (
            ("shard", self.group_of(k))
            if kind == "gather"
            else ("part", f"{self.prefix}_part_{self.units[k].reshard}")
        )
        names = {
            "input": f"{self.prefix}_{word}_{number}",
            "output": f"{self.prefix}_full_{number}",
        }
        return [step("all_gather_into_tensor", **names, group=group, **handle)]

    def work(self, word: str, k: int, again: int, fresh: bool) -> list[Entry]:
        unit, at = self.units[k], self.fsdp.settings.at
        price = unit.forward if word == "forward" else unit.backward
        if k == 0 and at == "both":
            price, fresh = (
                self.half(word, price, first=again == (word == "backward")),
                fresh and again == 0,
            )
        reads = [f"{self.prefix}_full_{self.number[k]}"] if k in self.number else []
        if word == "forward" or not unit.params:
            return [compute(f"{word} {unit.name}", price, reads=reads)]
        grads = [f"{self.prefix}_grads_{self.number[k]}"]
        return [
            compute(
                f"backward {unit.name}",
                price,
                reads=reads,
                writes=grads if fresh else [],
                adds=[] if fresh else grads,
            )
        ]

    def half(self, word: str, price: CostOrEntries, first: bool) -> CostOrEntries:
        """What the root does before the layers, or after them."""
        root = self.fsdp.root
        given = (
            None
            if root is None
            else root.first_forward
            if word == "forward"
            else root.first_backward
        )
        if given is not None:
            return given if first else price
        if isinstance(price, Mapping):
            return equal_cost_shares(price, 2)[1 - first]
        return [] if first else price

    # --- gradients ---
    def reduce(self, k: int, first: bool, last: bool) -> list[Entry]:
        """The average of the gradients, cut up, one of n parts for each rank; then, HSDP, of that
        part over all copies of the model.
        """
        number, once = self.number[k], self.fsdp.all_reduce_late
        part = f"{self.prefix}_{'more' if self.adds and not first else 'grad'}_{number}"
        names = {"input": f"{self.prefix}_grads_{number}", "output": part}
        found = self.behind("current", "reduce_scatter")
        found.append(
            step(
                "reduce_scatter_tensor",
                **names,
                op="avg",
                **self.on("reduce_scatter"),
                group=self.group_of(k),
            )
        )
        if self.copies == 1 or (once and not last):
            return found + (self.summed(k) if once and not first else [])
        if once and not first:
            found += self.summed(k)
            part = f"{self.prefix}_grad_{number}"
        found += self.behind("current" if once and not first else "reduce_scatter", "all_reduce")
        found.append(
            step(
                "all_reduce",
                tensor=part,
                op="avg",
                **self.on("all_reduce"),
                group=self.fsdp.replicate,
            )
        )
        return found

    def summed(self, k: int) -> list[Entry]:
        """What this micro-batch reduced is added to the shard's gradient."""
        grad, more = (f"{self.prefix}_{word}_{self.number[k]}" for word in ("grad", "more"))
        return [
            *self.behind("reduce_scatter"),
            {"assign": {"tensor": grad, "value": f"{grad} + {more}"}},
        ]

    def on(self, stream: str) -> dict[str, str]:
        return {"on": f"{self.prefix}_{stream}"} if self.free else {}

    def behind(self, stream: str, other: str = "current") -> list[Entry]:
        """The other stream goes on when this one has done what it holds."""
        waited = {"stream": stream if stream == "current" else f"{self.prefix}_{stream}"}
        waiting = {} if other == "current" else self.on(other)
        return [{"wait_stream": {**waited, **waiting}}] if self.free else []

    def finish(self, first: bool, last: bool) -> list[Entry]:
        """The end of the backward pass waits for what is still reduced (finalize_backward)."""
        if not self.learning:
            return []
        once = self.fsdp.all_reduce_late
        found = self.behind(
            "all_reduce" if self.copies > 1 and (last or not once) else "reduce_scatter"
        )
        if self.adds and not first and not once:
            found += [
                entry
                for k in reversed(self.learning)
                for entry in self.summed(k)
                if "assign" in entry
            ]
        return found

    # --- the update ---
    def update(self) -> list[Entry]:
        found: list[Entry] = []
        fsdp = self.fsdp
        if fsdp.clip_grad_norm:
            norms = sum(len(self.units[k].params) for k in self.learning)
            name = self.tensor("norm", norms, "float32")
            found.append(self.call("all_reduce", tensor=name, op="sum"))
            found += (
                [step("all_reduce", tensor=name, op="sum", group=fsdp.clip_over)]
                if fsdp.clip_over is not None
                else []
            )
        if fsdp.optimizer is not None:
            reads, writes = (
                [f"{self.prefix}_{word}_{self.number[k]}" for k in self.learning]
                for word in ("grad", "shard")
            )
            found.append(compute("optimizer", fsdp.optimizer, reads=reads, writes=writes))
        return found


def reshard_group_key(context: ExpansionContext, axis: str | None, size: int) -> str:
    """The first rank of those among which a unit is spread after its forward pass: so many
    neighbours along the last axis of shards.
    """
    if axis is None:
        return f"rank - rank % {size}"
    names = list(context.mesh)
    stride = prod(context.mesh[name] for name in names[names.index(axis) + 1 :])
    return f"rank - ({axis} % {size}) * {stride}"
