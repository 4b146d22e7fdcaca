"""The calls of a transformer's training step.

Sources: Shoeybi et al., Megatron-LM, arXiv:1909.08053 (the two all_reduces of a tensor-parallel layer); Korthikanti et al.,
arXiv:2205.05198, section 4.2.2 (sequence parallelism: gathered before, reduce-scattered after each block; in the backward pass the
block's input is gathered again); Megatron-LM core/tensor_parallel/layers.py (the input's gradient travels while the weights' is
computed); Llama 3, arXiv:2407.21783, section 3.3.2 (context parallelism by all_gather of keys and values); PyTorch fully_shard (ZeRO 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

from distsim import units
from distsim.strategies.base import Context, Entry, Expansion, block, compute, step
from distsim.strategies.fields import DTYPES
from distsim.strategies.memory import Footprint, Precision, peak_activations, states
from distsim.strategies.models import numel
from distsim.strategies.pipeline import Pipeline
from distsim.strategies.pipeline_actions import Action, Schedule
from distsim.strategies.train_ends import Ends

if TYPE_CHECKING:
    from distsim.strategies.train import Transformer


class Weights(NamedTuple):
    """Parameters of a stage on one rank: those that all experts share, and the rank's experts'."""

    dense: int = 0
    expert: int = 0

    def plus(self, other: Weights, times: int = 1) -> Weights:
        return Weights(self.dense + times * other.dense, self.expert + times * other.expert)


def pipeline_of(
    train: Transformer, context: Context, forward: Sequence[Any], backward: Sequence[Any], last: Sequence[Any] = ()
) -> Pipeline:
    """The `pipeline` strategy that carries the micro-batches; costs by stage. ``last``: of the last backward pass, if it is another."""
    one = train.one_pass(context)
    fields: dict[str, Any] = {
        "schedule": train.schedule,
        "axis": train.axis("pipeline", context),
        "micro_batches": train.micro_batches,
        "forward": dict(enumerate(forward)) or "1 ms",
        "backward": dict(enumerate(backward)) or "1 ms",
        "activation": {"shape": [one.boundary_numel], "dtype": train.dtype},
    }
    if last:
        fields["last_backward"] = dict(enumerate(last))
    if train.chunks is not None:
        fields["chunks"] = train.chunks
    return Pipeline.model_validate(fields)


class TrainWriter:
    """Writes the entries. Buffers of messages inside a layer are fresh ones; `<prefix>_grad` carries the gradients."""

    def __init__(self, train: Transformer, context: Context) -> None:
        self.train, self.context, self.p = train, context, context.prefix("transformer")
        self.one, self.split = train.one_pass(context), train.split(context)
        self.model = self.one.model
        self.stages = train.stages(context)
        self.tensor, self.cp = train.axis("tensor", context), train.axis("context", context)
        self.ep = train.axis("experts", context) if self.one.experts > 1 else None
        data = train.data_axes(context)
        self.shared = self.group(data)
        self.apart = self.group(tuple(axis for axis in data if axis != self.ep))
        #: Ranks of each of the two groups.
        self.ranks = {group: 1 if group is None else context.size_of(group) for group in (self.shared, self.apart)}

    def group(self, axes: tuple[str, ...]) -> str | tuple[str, ...] | None:
        """Axes of more than one rank, as one group; None where there is none."""
        real = tuple(axis for axis in axes if self.context.mesh[axis] > 1)
        return None if not real else real[0] if len(real) == 1 else real

    @cached_property
    def schedule(self) -> Schedule:
        """Who computes what when, and which rank has which stages."""
        return pipeline_of(self.train, self.context, [], []).made(self.context)

    # --- the whole ---
    def expansion(self) -> Expansion:
        pipeline = self.stages > 1
        found = self.pipelined() if pipeline else self.alone()
        return found._replace(memory={f"{self.p}_{name}": value for name, value in self.memory().items()})

    def pipelined(self) -> Expansion:
        from distsim.strategies.train_layers import reducing_stage

        there, back = ([one(s) for s in range(self.stages)] for one in (self.stage_forward, self.stage_backward))
        early = self.train.overlap_grad_reduce and any(group is not None for group in (self.shared, self.apart))
        last = [reducing_stage(self, s) for s in range(self.stages)] if early else []
        inner = pipeline_of(self.train, self.context, there, back, last)
        found = inner.expand(self.context)
        mine = [self.schedule.stages_of(r) for r in range(self.context.mesh[inner.axis])]
        waits: list[Entry] = [{"wait": "all"}]
        ends = [(waits if early else [e for s in stages for e in self.reduce(s)]) + self.update(stages) for stages in mine]
        return found._replace(steps=[*found.steps, *_by_rank(ends, inner.axis)], groups={**found.groups, **self.ends.groups()})

    def alone(self) -> Expansion:
        """Without a pipeline: layer by layer, gradients (and with ZeRO 3 parameters) on their way meanwhile."""
        from distsim.strategies.train_layers import micro_batches

        steps = micro_batches(self)
        return Expansion([*steps, *self.update((0,))], {})

    @cached_property
    def ends(self) -> Ends:
        return Ends(self)

    # --- a stage's micro-batch ---
    def stage_forward(self, stage: int) -> list[Entry]:
        found = self.times(self.split[stage], self.layer_forward())
        return found + ([self.priced("forward head", self.one.head_flops)] if stage == self.stages - 1 else [])

    def stage_backward(self, stage: int) -> list[Entry]:
        head = [self.priced("backward head", 2 * self.one.head_flops)] if stage == self.stages - 1 else []
        return head + self.times(self.split[stage], self.layer_backward())

    def times(self, count: int, steps: list[Entry]) -> list[Entry]:
        """Layers one after the other."""
        return steps if count == 1 else [{"repeat": {"times": count, "steps": steps}}] if count else []

    # --- a layer ---
    def layer_forward(self) -> list[Entry]:
        one = self.one
        if self.tensor is None and self.cp is None and self.ep is None:
            whole = self.priced("forward", one.layer_flops + self.lag(1))
            return [*self.launched(1), whole, *self.scores(1), self.moved("forward", 1)]
        attention = [*self.keys(), self.priced("forward attention", one.attention_flops + self.lag(1)), *self.scores(1)]
        experts = [*self.routed(), self.priced("forward mlp", one.mlp_flops), *self.routed()]
        blocks = [*self.before(), *attention, *self.after(), *self.before(), *experts, *self.after()]
        return [*self.launched(1), *blocks, self.moved("forward", 1)]

    def lag(self, passes: float) -> int:
        """The floating-point operations that would take as long as fused attention takes beyond its own at their rate; less those that
        `scores` prices."""
        if self.one.misaligned:
            return -round(passes * self.one.scores_flops)
        return round(passes * self.one.scores_flops * (1 / self.train.attention_efficiency - 1)) if self.one.flash else 0

    def scores(self, passes: float) -> list[Entry]:
        """Scores that miss the tensor cores, at float32's rate."""
        if not self.one.misaligned:
            return []
        return [compute("scores", {"flops": units.flops_text(passes * self.one.scores_flops), "dtype": "float32"})]

    def launched(self, passes: int) -> list[Entry]:
        """The host's time to launch a layer's operations: some 50 in eager PyTorch forward, two for each of them backward (counted in
        Megatron-LM's transformer layer: norms, projections, views, softmax, dropout, residual sums)."""
        launch_ns = self.train.launch * 50 * passes
        return [compute("launches", {"time": units.duration_text(launch_ns)}, on="host")] if launch_ns else []

    def layer_backward(self) -> list[Entry]:
        one = self.one
        again = self.layer_forward() if one.recompute == "full" else []
        extra = one.flash_flops + (one.again_flops if one.recompute == "selective" else 0)
        passes = 2.5 if one.flash else 3 if one.recompute == "selective" else 2
        extra += self.lag(passes)
        again = [*again, *self.launched(2), *self.scores(passes)]
        if self.tensor is None and self.cp is None and self.ep is None:
            return [*again, self.priced("backward", 2 * one.layer_flops + extra), self.moved("backward", 2)]
        columns = 2 * one.tokens * self.model.hidden * (self.model.hidden + 2 * self.model.kv_hidden) // one.tensor
        mlp_columns = one.mlp_flops * (self.model.matrices - 1) // self.model.matrices
        mlp = self.block_backward("mlp", 2 * one.mlp_flops, mlp_columns, self.routed(), self.routed())
        keys = [*self.keys(), *self.key_gradients()]
        return [
            *again,
            self.moved("backward", 2),
            *mlp,
            *self.block_backward("attention", 2 * one.attention_flops + extra, columns, keys, []),
        ]

    def block_backward(self, word: str, flops: int, columns: int, first: list[Entry], last: list[Entry]) -> list[Entry]:
        """``columns``: FLOPs of the weights' gradient of the block's first matrix: the input's gradient travels beside them."""
        whole = self.priced(f"backward {word}", flops)
        if self.tensor is None or self.one.tensor == 1:
            return [*first, whole, *last]
        handle = f"{self.p}_{word}"
        gathered = [self.gather(f"{handle}_input")] if self.one.sequence_parallel else []
        waited: list[Entry] = [{"wait": f"{handle}_input"}] if gathered else []
        sent = self.scatter(f"{handle}_grad") if self.one.sequence_parallel else self.reduced(f"{handle}_grad")
        begin = [*([self.gather()] if gathered else []), *gathered]
        end = [self.priced(f"weight gradients {word}", columns), {"wait": f"{handle}_grad"}]
        return [*begin, *first, self.priced(f"backward {word}", flops - columns), *last, *waited, sent, *end]

    # --- its messages ---
    def buffer(self, elements: int) -> dict[str, Any]:
        return {"shape": [elements], "dtype": self.train.dtype}

    def before(self) -> list[Entry]:
        return [self.gather()] if self.one.sequence_parallel else []

    def after(self) -> list[Entry]:
        if self.one.sequence_parallel:
            return [self.scatter()]
        return [self.reduced()] if self.one.tensor > 1 else []

    def gather(self, handle: str | None = None) -> Entry:
        whole = self.one.hidden_numel
        asked = {} if handle is None else {"async_": True, "as_": handle}
        part, full = self.buffer(whole // self.one.tensor), self.buffer(whole)
        return step("all_gather_into_tensor", input=part, output=full, group=self.tensor, **asked)

    def scatter(self, handle: str | None = None) -> Entry:
        whole = self.one.hidden_numel
        asked = {} if handle is None else {"async_": True, "as_": handle}
        part, full = self.buffer(whole // self.one.tensor), self.buffer(whole)
        return step("reduce_scatter_tensor", input=full, output=part, group=self.tensor, **asked)

    def reduced(self, handle: str | None = None) -> Entry:
        asked = {} if handle is None else {"async_": True, "as_": handle}
        return step("all_reduce", tensor=self.buffer(self.one.hidden_numel), group=self.tensor, **asked)

    def keys(self) -> list[Entry]:
        """Keys and values of the whole sequence."""
        if self.one.context == 1:
            return []
        part, full = self.buffer(self.one.kv_numel), self.buffer(self.one.kv_numel * self.one.context)
        return [step("all_gather_into_tensor", input=part, output=full, group=self.cp)]

    def key_gradients(self) -> list[Entry]:
        if self.one.context == 1:
            return []
        part, full = self.buffer(self.one.kv_numel), self.buffer(self.one.kv_numel * self.one.context)
        return [step("reduce_scatter_tensor", input=full, output=part, group=self.cp)]

    def routed(self) -> list[Entry]:
        """Tokens to their experts, or back; spread evenly."""
        if self.ep is None:
            return []
        size = -(-self.one.routed_numel // self.one.experts) * self.one.experts
        return [step("all_to_all_single", input=self.buffer(size), output=self.buffer(size), group=self.ep)]

    def priced(self, name: str, flops: int) -> Entry:
        return compute(name, {"flops": units.flops_text(float(flops)), "dtype": self.train.dtype})

    def moved(self, word: str, times: int) -> Entry:
        """Norms, sums, dropout, non-linearities: bound by memory."""
        return compute(f"{word}, elementwise", {"bytes": units.size_text(times * self.one.layer_traffic)})

    # --- weights ---
    def layer_weights(self) -> Weights:
        """Matrices are cut among tensor ranks, experts among expert ranks too; norms and the router are whole on each."""
        model, t = self.model, self.one.tensor
        whole = 2 * numel(model.norm_shapes()) + model.experts * model.hidden
        matrices = model.layer_parameters - model.expert_parameters - whole
        return Weights(whole + matrices // t, model.expert_parameters // (t * self.one.experts))

    def ends_weights(self, stage: int) -> Weights:
        """Embeddings on the first stage, the head on the last (tied embeddings stand on both)."""
        model, t = self.model, self.one.tensor
        first = model.embedding_parameters // t if stage == 0 else 0
        again = model.vocabulary * model.hidden if model.tied and self.stages > 1 else 0
        last = (model.head_parameters + again) // t if stage == self.stages - 1 else 0
        return Weights(first + last)

    def stage_weights(self, stage: int) -> Weights:
        return self.ends_weights(stage).plus(self.layer_weights(), self.split[stage])

    # --- gradients and update ---
    def reduce(self, stage: int) -> list[Entry]:
        weights = self.stage_weights(stage)
        return [*self.reduce_one(weights.dense, self.shared), *self.reduce_one(weights.expert, self.apart)]

    def reduce_one(self, elements: int, group: Any, **asked: Any) -> list[Entry]:
        """Gradients of so many parameters: all_reduce, or with ZeRO a reduce_scatter, padded to equal shards."""
        if group is None or not elements:
            return []
        ranks, dtype = self.ranks[group], self.train.gradient_dtype
        where = list(group) if isinstance(group, tuple) else group
        if self.train.zero == 0:
            return [step("all_reduce", tensor={"shape": [elements], "dtype": dtype}, op="avg", group=where, **asked)]
        part = -(-elements // ranks)
        full = {"shape": [part * ranks], "dtype": dtype}
        shard = {"shape": [part], "dtype": dtype}
        return [step("reduce_scatter_tensor", input=full, output=shard, op="avg", group=where, **asked)]

    def gather_weights(self, elements: int, group: Any, **asked: Any) -> list[Entry]:
        if group is None or not elements:
            return []
        part = -(-elements // self.ranks[group])
        where = list(group) if isinstance(group, tuple) else group
        shard, full = self.buffer(part), self.buffer(part * self.ranks[group])
        return [step("all_gather_into_tensor", input=shard, output=full, group=where, **asked)]

    def update(self, stages: Sequence[int]) -> list[Entry]:
        """Adam over a rank's part; then, with ZeRO 1 and 2, the new parameters for all."""
        zero = self.train.zero
        total = Weights()
        for stage in stages:
            total = total.plus(self.stage_weights(stage))
        mine = sum(
            -(-n // (self.sharers(group) if zero else 1)) for n, group in ((total.dense, self.shared), (total.expert, self.apart))
        )
        touched = 24 + DTYPES[self.train.gradient_dtype] + DTYPES[self.train.dtype]
        found = [*self.ends.before_update(stages), compute("optimizer", {"bytes": units.size_text(mine * touched)})]
        if zero in (1, 2):
            found += [*self.gather_weights(total.dense, self.shared), *self.gather_weights(total.expert, self.apart)]
        return found

    def sharers(self, group: Any) -> int:
        """Ranks among which states are sharded."""
        given = self.train.data_ranks
        if given is None:
            return self.ranks[group]
        return given if group == self.shared else max(given // self.one.experts, 1)

    # --- memory ---
    def memory(self) -> dict[str, Any]:
        """What each rank of the pipeline holds at its peak, as the scenario's `memory` states it."""
        if self.stages == 1:
            return {"rank": _plain(self.footprint((0,), [Action(0, "F", 0), Action(0, "B", 0)]))}
        axis = self.train.axis("pipeline", self.context)
        held = [self.footprint(self.schedule.stages_of(rank), row) for rank, row in enumerate(self.schedule.rows)]
        return {f"{axis}_{rank}": {"ranks": f"{axis} == {rank}", **_plain(one)} for rank, one in enumerate(held)}

    def footprint(self, stages: Sequence[int], row: Sequence[Action]) -> Footprint:
        total = Weights()
        for stage in stages:
            total = total.plus(self.stage_weights(stage))
        zero, bytes_ = self.train.zero, Precision(DTYPES[self.train.dtype], DTYPES[self.train.gradient_dtype])
        held = states(total.dense, zero, self.sharers(self.shared), bytes_)
        held += states(total.expert, zero, self.sharers(self.apart), bytes_)
        activations = peak_activations(row, self.kept, self.working)
        layer = self.layer_weights()
        gathered = (2 * sum(layer) + self.ends_weights(0).dense) * bytes_.parameters if zero == 3 else 0
        return held + Footprint(activations=activations, gathered=gathered)

    def kept(self, stage: int) -> int:
        """Bytes that a micro-batch's forward pass leaves on a stage."""
        head = self.one.head_bytes if stage == self.stages - 1 else 0
        return self.split[stage] * self.one.activation_bytes + head

    def working(self, stage: int) -> int:
        """Recomputed activations of one layer at a time."""
        return self.one.peak_layer_bytes - self.one.activation_bytes if self.split[stage] else 0


def _by_rank(rows: Sequence[list[Entry]], axis: str) -> list[Entry]:
    """Blocks for the ranks of an axis; ranks with the same entries share one."""
    same: list[tuple[list[Entry], list[int]]] = []
    for rank, row in enumerate(rows):
        known = next((ranks for entries, ranks in same if entries == row), None)
        same += [(row, [rank])] if known is None else []
        (known or []).append(rank)
    whole = len(same) == 1
    return [block(entries, None if whole else " or ".join(f"{axis} == {rank}" for rank in ranks)) for entries, ranks in same]


def _plain(footprint: Footprint) -> dict[str, str]:
    return {word: units.size_text(n) for word, n in footprint._asdict().items() if n}


__all__ = ["TrainWriter", "Weights", "pipeline_of"]
