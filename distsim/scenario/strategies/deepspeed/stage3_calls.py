"""The entries of DeepSpeed's ZeRO 3: parameters gathered as its coordinator says, gradients
scattered by buckets.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from distsim.scenario.strategies.base import (
    Entry,
    ExpansionContext,
    compute,
    step,
    tensor_declaration,
    wait,
)
from distsim.scenario.strategies.deepspeed.calls import DeepSpeedWriter
from distsim.scenario.strategies.deepspeed.param_coordinator import (
    FetchLimits,
    ParameterCoordinator,
    ParameterGather,
    gradient_buckets,
)

if TYPE_CHECKING:
    from distsim.scenario.strategies.deepspeed.fields import DeepSpeed

#: qwZ: elements that share a scale (`CUDAQuantizer.target_group_size`).
_ELEMENTS_PER_SCALE = 8000


class ZeroStage3Writer(DeepSpeedWriter):
    """A parameter lies in equal parts, padded, on all ranks."""

    def __init__(
        self, fields: DeepSpeed, context: ExpansionContext, skipped: int | None = None
    ) -> None:
        super().__init__(fields, context, skipped)
        self.parts = [-(-numel // self.n) for numel in self.numel]
        limits = FetchLimits(
            fields.stage3_prefetch_bucket_size,
            fields.stage3_max_reuse_distance,
            fields.stage3_max_live_parameters,
            fields.stage3_param_persistence_threshold,
        )
        self.hpz = fields.zero_hpz_partition_size
        sizes = [[self.numel[p] for p in mine] for mine in self.params_of]
        self.coordinator = ParameterCoordinator(sizes, self.run, limits, copies=self.hpz > 1)
        self.order = order = [p for k in reversed(self.run) for p in self.params_of[k]]
        self.buckets = gradient_buckets(
            [(p, self.numel[p]) for p in order], fields.reduce_bucket_size
        )
        self.handles = 0
        self.coming: dict[int, list[str]] = {}  # of each parameter the handles of its gather
        for k, mine in enumerate(self.params_of):
            numel = sum(self.parts[p] for p in mine)
            for word, size in (
                ("shard", numel),
                ("whole", numel * self.n),
                ("grads", numel * self.n),
            ):
                self.tensor(f"{word}_{k}", size)
        for k, (params, _) in enumerate(self.buckets):
            numel = sum(self.parts[p] for p in params)
            self.tensor(f"bucket_{k}", numel * self.n)
            self.tensor(f"scattered_{k}", numel)

    def groups(self) -> dict[str, Entry]:
        found: dict[str, Entry] = {}
        if self.hpz > 1:
            found[f"{self.prefix}_hpz"] = {"by": f"rank - rank % {self.hpz}"}
        if self.quantized:
            found |= {
                f"{self.prefix}_local": {"by": "node"},
                f"{self.prefix}_global": {"by": "local_rank"},
            }
        return found

    @property
    def quantized(self) -> bool:
        """Gradients of several machines go as 4 bits; on one they are scattered as ever."""
        return (
            self.f.zero_quantized_gradients
            and self.context.world_size > self.context.ranks_per_node
        )

    # --- before the first iteration, and the trace ---
    def construction(self) -> list[Entry]:
        """Parameters from the first rank, twice; barriers; each parameter gathered once for the
        float32 copies.
        """
        barriers = [self.call("barrier")] * 3
        whole = [self.gathered([p], None) for p in range(len(self.numel))]
        return [*self.broadcasts(), *self.broadcasts(), *barriers, *whole]

    def agreed(self) -> list[Entry]:
        """Do all ranks have the same trace? Lists of integers, each with its length first
        (`assert_ints_same_as_other_ranks`).
        """
        if self.coordinator.passes > 1:
            return []
        modules, params = len(self.coordinator.order), 2 * len(self.order)
        sizes = [0] if self.coordinator.passes == 0 else [modules, params, params]
        return [self.first(tensor_declaration(size, "int64")) for n in sizes for size in (1, n)]

    # --- iterations ---
    def iterations(self, count: int) -> list[list[Entry]]:
        return [self.iteration() for _ in range(count)]

    def iteration(self) -> list[Entry]:
        self.handles = 0
        steps: list[Entry] = []
        for micro in range(self.f.accumulate):
            steps += [*self.agreed(), *self.forward(), *self.backward_pass(fresh=micro == 0)]
            self.coordinator.ended()
        steps += [self.one("uint8", "max")] if self.f.dtype == "float16" else []
        scattered = [f"{self.prefix}_scattered_{k}" for k in range(len(self.buckets))]
        shards = [f"{self.prefix}_shard_{k}" for k in range(len(self.model))]
        steps += [self.one("float64", "sum"), *self.optimizer(scattered, shards)]
        kept = self.coordinator.updated()
        return [*steps, *self.gather(kept), *self.arrived(p for one in kept for p in one.params)]

    def forward(self) -> list[Entry]:
        steps = self.fetched(None)
        for k in self.run:
            layer = self.model[k]
            steps += [
                *self.fetched(k),
                compute(f"forward {layer.name}", layer.forward, reads=[f"{self.prefix}_whole_{k}"]),
            ]
            self.coordinator.release(k)
        return steps

    def backward_pass(self, fresh: bool) -> list[Entry]:
        """A bucket goes out when a gradient has come that it has no room for."""
        steps = self.fetched(None)
        at = {
            self.order[place]: k
            for k, (_, place) in enumerate(self.buckets)
            if place < len(self.order)
        }
        of = {p: k for k, (params, _) in enumerate(self.buckets) for p in params}
        begun: set[int] = set()
        for k in reversed(self.run):
            mine = list(dict.fromkeys(of[p] for p in self.params_of[k]))
            new, old = [b for b in mine if b not in begun], [b for b in mine if b in begun]
            begun.update(mine)
            names = [[f"{self.prefix}_bucket_{b}" for b in which] for which in (new, old)]
            steps += [
                *self.fetched(k),
                self.backward(self.model[k], names[0], names[1], [f"{self.prefix}_whole_{k}"]),
            ]
            steps += [entry for p in self.params_of[k] if p in at for entry in self.reduce(at[p])]
            if k != self.run[0]:
                self.coordinator.release(k)
        self.coordinator.left_over(self.run[0])
        return [
            *steps,
            *(self.reduce(len(self.buckets) - 1) if self.buckets else []),
            *self.settled(),
        ]

    # --- parameters ---
    def fetched(self, layer: int | None) -> list[Entry]:
        """What a module needs is gathered and waited for; then what comes after it is asked for."""
        now, ahead = self.coordinator.fetch()
        found = self.gather(now)
        found += self.arrived(self.params_of[layer]) if layer is not None else []
        return [*found, *self.gather(ahead)]

    def arrived(self, params: Iterable[int]) -> list[Entry]:
        """A wait for each gather that parameters are still on."""
        handles = [h for p in params for h in self.coming.pop(p, [])]
        for p, others in list(self.coming.items()):
            self.coming[p] = [h for h in others if h not in handles]
        return [wait(h) for h in dict.fromkeys(handles)]

    def gather(self, gathers: Sequence[ParameterGather]) -> list[Entry]:
        found: list[Entry] = []
        for one in gathers:
            handle = f"{self.prefix}_gathered@{self.handles}"
            self.handles += 1
            found.append(self.gathered(one.params, handle, one.secondary))
            handles = [handle]
            if self.f.zero_quantized_weights:
                handles.append(f"{self.prefix}_scales@{self.handles - 1}")
                found.append(self.scales(one, handles[1]))
            self.coming |= {p: list(handles) for p in one.params}
        return found

    def gathered(self, params: Sequence[int], handle: str | None, secondary: bool = False) -> Entry:
        """Parameters side by side, from equal parts."""
        ranks, group = (self.hpz, f"{self.prefix}_hpz") if secondary else (self.n, self.group)
        part = sum(self.parts[p] for p in params) * self.n // ranks
        dtype = "int8" if self.f.zero_quantized_weights and handle is not None else self.f.dtype
        later = {} if handle is None else {"async_": True, "as_": handle}
        layer = self.layer_of[params[0]]
        tensors: dict[str, object] = {
            "input": tensor_declaration(part, dtype),
            "output": tensor_declaration(part * ranks, dtype),
        }
        if (
            handle is not None
            and dtype == self.f.dtype
            and not secondary
            and list(params) == self.params_of[layer]
        ):
            tensors = {
                "input": f"{self.prefix}_shard_{layer}",
                "output": f"{self.prefix}_whole_{layer}",
            }
        return step("all_gather_into_tensor", **tensors, group=group, **later)

    def scales(self, one: ParameterGather, handle: str) -> Entry:
        ranks, group = (self.hpz, f"{self.prefix}_hpz") if one.secondary else (self.n, self.group)
        count = scale_count(sum(self.parts[p] for p in one.params) * self.n // ranks)
        tensors = {
            "input": tensor_declaration(count, "float32"),
            "output": tensor_declaration(count * ranks, "float32"),
        }
        return step("all_gather_into_tensor", **tensors, group=group, async_=True, as_=handle)

    # --- gradients ---
    def reduce(self, k: int) -> list[Entry]:
        whole, part = f"{self.prefix}_bucket_{k}", f"{self.prefix}_scattered_{k}"
        if not self.quantized:
            return [
                *self.around(),
                self.call("reduce_scatter_tensor", input=whole, output=part, op="sum", **self.on()),
            ]
        return [
            *self.around(),
            *(entry for p in self.buckets[k][0] for entry in self.quantized_reduce(p)),
        ]

    def quantized_reduce(self, p: int) -> list[Entry]:
        """Of one parameter: all_to_all inside the machine, sums, all_to_all between machines;
        vectors and what does not divide among the ranks are scattered
        (`all_to_all_quant_reduce`)."""
        shape = [shape for layer in self.model for shape in layer.params][p]
        numel, local = self.numel[p], self.context.ranks_per_node
        if len(shape) == 1 or numel % (2 * self.n):
            part = self.parts[p]
            names = {
                "input": tensor_declaration(part * self.n, self.f.dtype),
                "output": tensor_declaration(part, self.f.dtype),
            }
            return [self.call("reduce_scatter_tensor", **names, op="sum", **self.on())]
        groups = max(shape[0], shape[1], self.n)
        found: list[Entry] = []
        for word, parts in (("local", 1), ("global", local)):
            for size, dtype in ((numel // 2 // parts, "int8"), (groups // parts, "float32")):
                one = tensor_declaration(size, dtype)
                found.append(
                    step(
                        "all_to_all_single",
                        input=one,
                        output=dict(one),
                        group=f"{self.prefix}_{word}",
                        **self.on(),
                    )
                )
        return found


def scale_count(numel: int) -> int:
    """Groups of at most 8000 elements, or a little more, which share a scale
    (`CUDAQuantizer.quantize`).
    """
    groups = -(-numel // _ELEMENTS_PER_SCALE)
    while groups < numel and numel % (8 * groups):
        groups += 1
    while numel % (16 * groups) == 0 and numel / groups > _ELEMENTS_PER_SCALE:
        groups *= 2
    return groups
