"""The calls of a transformer's training step: micro-batches, gradients and parameters on their way,
the update; what ranks hold.

Source of what lies between the last gradient and the update: Megatron-LM
core/distributed/finalize_model_grads.py (_allreduce_word_embedding_grads, over the first and the
last stage) and core/optimizer/clip_grads.py (get_grad_norm_fp32: one float32, over all ranks with
the distributed optimizer, else over those that share a copy of the model).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from distsim.common import units
from distsim.scenario.strategies.base import (
    Entry,
    Expansion,
    ExpansionContext,
    GroupRef,
    blocks_by_rank,
    compute,
    step,
    tensor_declaration,
    wait,
)
from distsim.scenario.strategies.field_types import FLOAT_DTYPE_BYTES
from distsim.scenario.strategies.layers import repeat_entries
from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.training_step.layer_calls import (
    ParameterCounts,
    TransformerLayerWriter,
)
from distsim.scenario.strategies.training_step.memory_footprint import (
    BytesPerParameter,
    MemoryFootprint,
    model_states,
    peak_activation_bytes,
)
from distsim.scenario.strategies.training_step.transformer_fields import TransformerFields

#: DDP under autocast: float32 parameters, their gradients with the buckets that reduce them
#: (gradient_as_bucket_view is off), two moments.
_DDP_AUTOCAST_BYTES = BytesPerParameter(4, 8, 8)


class Transformer(TransformerFields):
    """One training step: micro-batches forward and backward, gradients reduced, parameters updated,
    as Megatron-LM lays it out.

    Axes: ``tensor``, ``pipeline``, ``context`` and ``experts`` are the mesh's `tp`, `pp`, `cp` and
    `ep` unless named otherwise; ``data`` is every other axis, with `cp` and `ep`, over which
    gradients of what all experts share are reduced. A layer is priced by its matrix products, by
    the bytes that its other operations move, and on the host by the operations that it launches.
    """

    def expand(self, context: ExpansionContext) -> Expansion:
        return TransformerStepWriter(self, context).expansion()


class TransformerStepWriter(TransformerLayerWriter):
    """Writes the entries of a step."""

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """Who computes what when, and which rank has which stages."""
        return self.train.pipeline_strategy(self.context).build_schedule(self.context)

    # --- the whole ---
    def expansion(self) -> Expansion:
        found = self.pipeline_step() if self.stages > 1 else self.alone()
        return found._replace(
            memory={f"{self.prefix}_{name}": value for name, value in self.memory().items()}
        )

    def pipeline_step(self) -> Expansion:
        """The passes of all stages as a pipeline; then each rank reduces and updates its stages."""
        stages = range(self.stages)
        forward = [self.stage_forward(stage) for stage in stages]
        backward = [self.stage_backward(stage) for stage in stages]
        has_gradient_group = self.shared is not None or self.apart is not None
        overlaps = self.train.overlap_grad_reduce and has_gradient_group
        last_backward = [self.reducing_stage(stage) for stage in stages] if overlaps else []
        pipeline = self.train.pipeline_strategy(self.context, forward, backward, last_backward)
        expansion = pipeline.expand(self.context)
        ends: list[list[Entry]] = []
        for rank in range(self.context.mesh[pipeline.axis]):
            own_stages = self.schedule.stages_of(rank)
            end: list[Entry] = []
            if overlaps:
                end.append(wait("all"))
            else:
                for stage in own_stages:
                    end += self.reduce(self.stage_weights(stage))
            ends.append(end + self.update(own_stages))
        return expansion._replace(
            steps=[*expansion.steps, *blocks_by_rank(ends, pipeline.axis)],
            groups={**expansion.groups, **self.ends()},
        )

    def alone(self) -> Expansion:
        """Without a pipeline: layer by layer, while gradients are reduced.

        With ZeRO 3 parameters are gathered meanwhile, too.
        """
        return Expansion([*self.without_pipeline(), *self.update((0,))], {})

    def without_pipeline(self) -> list[Entry]:
        """All micro-batches of a step.

        ZeRO 3 gathers and reduces in each of them (fully_shard); otherwise gradients are reduced in
        the last one.
        """
        count = self.train.micro_batches
        if self.train.zero == 3 and self.shared is not None:
            return self.times(count, [*self.sharded_forward(), *self.sharded_backward()])
        plain = [*self.stage_forward(0), *self.stage_backward(0)]
        if not self.train.overlap_grad_reduce:
            return [*self.times(count, plain), *self.reduce(self.stage_weights(0))]
        backward, ends = self.reducing_backward(0)
        waits: list[Entry] = [wait("all")] if ends else []
        return [*self.times(count - 1, plain), *self.stage_forward(0), *backward, *waits]

    def reducing_backward(self, stage: int, first: int = 0) -> tuple[list[Entry], list[Entry]]:
        """The last backward pass: each layer's gradients go out as soon as they are there; what
        goes out after all layers.

        ``first`` is the number of the first handle.
        """
        layers, handle, index = self.split[stage], f"{self.prefix}_reduced", f"{self.prefix}_l"
        numbered = f"({first} + {index})" if self.stages > 1 else index
        body = [*self.layer_backward(), *self.reduce(self.layer_weights(), handle, numbered)]
        ends = self.reduce(self.ends_weights(stage), handle, str(first + max(self.split)))
        passed = [
            *self.last_backward(stage),
            *(repeat_entries(layers, body, index) if layers else []),
            *self.first_backward(stage),
        ]
        return [*passed, *ends], ends

    def reducing_stage(self, stage: int) -> list[Entry]:
        """A pipeline stage's last backward pass; the step's end waits for the gradients. Handles
        are numbered over a rank's chunks.
        """
        chunk = self.schedule.stages_of(self.schedule.rank_of[stage]).index(stage)
        return self.reducing_backward(stage, chunk * (max(self.split) + 1))[0]

    def with_gathers_ahead(self, layer: list[Entry]) -> list[Entry]:
        """Layer by layer, the next layer's parameters on their way meanwhile."""
        layers, weights, index = self.split[0], self.layer_weights(), f"{self.prefix}_l"
        more = {"ranks": f"{index} + 1 < {layers}"}
        following = [
            {**entry, **more}
            for entry in self.gather_weights(weights, f"{self.prefix}_gathered", f"({index} + 1)")
        ]
        body = [*following, *self.wait_gathers(weights, index), *layer]
        return [
            *self.gather_weights(weights, f"{self.prefix}_gathered", "0"),
            *repeat_entries(layers, body, index),
        ]

    def wait_gathers(self, weights: ParameterCounts, index: str) -> list[Entry]:
        """Waits for gathered parameters."""
        waits: list[Entry] = []
        for word, elements, group in self.kinds(weights):
            if group is not None and elements:
                waits.append(wait(f"{self.prefix}_gathered_{word}@{index}"))
        return waits

    def sharded_forward(self) -> list[Entry]:
        """Embeddings, norm and head stay gathered from here to the end of the backward pass, as the
        root of fully_shard does.
        """
        layers, root = str(self.split[0]), self.ends_weights(0)
        begin = [
            *self.gather_weights(root, f"{self.prefix}_gathered", layers),
            *self.wait_gathers(root, layers),
        ]
        return [
            *begin,
            *self.embedding_forward(),
            *self.with_gathers_ahead(self.layer_forward()),
            *self.head_forward(),
        ]

    def sharded_backward(self) -> list[Entry]:
        handle = f"{self.prefix}_reduced"
        layers = self.with_gathers_ahead(
            [*self.layer_backward(), *self.reduce(self.layer_weights(), handle, f"{self.prefix}_l")]
        )
        ends = [
            *self.embedding_backward(),
            *self.reduce(self.ends_weights(0), handle, str(self.split[0])),
            wait("all"),
        ]
        return [*self.head_backward(), *layers, *ends]

    def update(self, stages: Sequence[int]) -> list[Entry]:
        """Adam over a rank's part; then, with ZeRO 1 and 2, the new parameters for all."""
        zero = self.train.zero
        total = self.rank_weights(stages)
        mine = sum(
            -(-n // (self.sharding_ranks(group) if zero else 1))
            for _, n, group in self.kinds(total)
        )
        touched = (
            24
            + FLOAT_DTYPE_BYTES[self.train.gradient_dtype]
            + (0 if self.train.autocast else FLOAT_DTYPE_BYTES[self.train.dtype])
        )
        found = [
            *self.embeddings(stages),
            *self.norm(),
            compute("optimizer", {"bytes": units.size_text(mine * touched)}),
        ]
        return found + (self.gather_weights(total) if zero in (1, 2) else [])

    def rank_weights(self, stages: Sequence[int]) -> ParameterCounts:
        """Parameters of several stages."""
        return ParameterCounts(
            *(sum(numbers) for numbers in zip(*map(self.stage_weights, stages), strict=True))
        )

    def sharding_ranks(self, group: GroupRef | None) -> int:
        """Ranks among which states are sharded."""
        given = self.train.data_ranks
        if given is None:
            return self.ranks[group]
        return given if group == self.shared else max(given // self.one.experts, 1)

    # --- memory ---
    def memory(self) -> dict[str, dict[str, str]]:
        """What each rank of the pipeline holds at its peak, as the scenario's `memory` states
        it.
        """
        if self.stages == 1:
            told = self.footprint((0,), [PipelineAction(0, "F", 0), PipelineAction(0, "B", 0)])
            if not self.train.autocast and (self.train.zero < 2 or not self.one.gathered):
                return {"rank": _nonzero_sizes(told)}
            most = (
                self.autocast_peak_bytes() if self.train.autocast else self.fully_shard_peak_bytes()
            )  # more than the parts where a layer's whole gradients are: no fit is judged by less
            told += MemoryFootprint(gathered=max(most - told.total, 0))
            return {"rank": {**_nonzero_sizes(told), "allocated": units.size_text(most)}}
        axis = self.train.axis("pipeline", self.context)
        held = [
            self.footprint(self.schedule.stages_of(rank), row)
            for rank, row in enumerate(self.schedule.rows)
        ]
        return {
            f"{axis}_{rank}": {"ranks": f"{axis} == {rank}", **_nonzero_sizes(one)}
            for rank, one in enumerate(held)
        }

    def footprint(self, stages: Sequence[int], row: Sequence[PipelineAction]) -> MemoryFootprint:
        total = self.rank_weights(stages)
        zero, bytes_ = (
            self.train.zero,
            BytesPerParameter(
                FLOAT_DTYPE_BYTES[self.train.dtype], FLOAT_DTYPE_BYTES[self.train.gradient_dtype]
            ),
        )
        bytes_ = _DDP_AUTOCAST_BYTES if self.train.autocast else bytes_
        held = model_states(total.dense, zero, self.sharding_ranks(self.shared), bytes_)
        held += model_states(total.expert, zero, self.sharding_ranks(self.apart), bytes_)
        activations = peak_activation_bytes(row, self.kept, self.working)
        layer = self.layer_weights()
        gathered = (
            (2 * sum(layer) + self.ends_weights(0).dense) * bytes_.parameters
            if zero == 3
            else self.cast_weights()
        )
        return held + MemoryFootprint(
            gradients=self.partial_sums(stages), activations=activations, gathered=gathered
        )

    def fully_shard_peak_bytes(self) -> int:
        """Bytes that torch's tensors hold at the fullest moment under fully_shard, whose parameters
        at rest are Adam's float32 copy.

        The moments: while the loss, the last layer, the first layer or the embedding is passed
        backward, as benchmarks/gpu/memory_h100.json has them; the logits' 16-bit copy is let go
        before (torchtitan's train.py: `del pred`).
        """
        one, model, parts = self.one, self.model, 2 if self.train.zero == 3 else 0
        wide, narrow = (
            FLOAT_DTYPE_BYTES[self.train.gradient_dtype],
            FLOAT_DTYPE_BYTES[self.train.dtype],
        )
        total, layer = self.rank_weights((0,)), sum(self.layer_weights())
        rest = sum(
            (
                model_states(n, 3, self.sharding_ranks(g), BytesPerParameter(0, wide))
                for _, n, g in self.kinds(total)
            ),
            MemoryFootprint(),
        )
        early = rest.gradients if self.train.micro_batches > 1 else 0
        kept, working = (
            self.split[0] * one.activation_bytes,
            max(one.peak_layer_bytes - one.activation_bytes, 0),
        )
        words = model.vocabulary * model.hidden
        head = words // one.tensor
        whole = sum(total) * narrow
        layers = parts * layer * narrow or whole
        loss = (
            early
            + kept
            + one.head_bytes
            + one.loss_bytes
            - one.logits * one.itemsize
            + (head * narrow if parts else whole)
        )
        last = early + kept + working + layers + head * wide + layer * narrow
        first = rest.gradients + one.activation_bytes + working + layers + layer * (narrow + wide)
        ends = rest.gradients + (words + head) * narrow + layer * wide
        return rest.optimizer + max(loss, last, first, ends + (0 if parts else whole))

    def cast_weights(self) -> int:
        """Bytes of the weights that products read under autocast, which stay for the backward pass;
        a recomputed layer's are made again.
        """
        layers = 1 if self.one.recompute == "full" else self.split[0]
        head = self.model.vocabulary * self.model.hidden
        return (
            (layers * sum(self.layer_weights()) + head) * FLOAT_DTYPE_BYTES[self.train.dtype]
            if self.train.autocast
            else 0
        )

    def autocast_peak_bytes(self) -> int:
        """Bytes that torch's tensors hold at the fullest moment under DDP and torch.autocast: while
        the loss is passed backward, or the layer that is left last, when all gradients are there
        beside DDP's buckets (benchmarks/gpu/memory_h100.json)."""
        one, held = self.one, self.footprint((0,), [])
        rest, gradients = (
            held.parameters + held.optimizer + held.gradients // 2,
            held.gradients // 2,
        )
        early = gradients if self.train.micro_batches > 1 else 0
        kept = self.split[0] * one.activation_bytes + one.head_bytes + self.cast_weights()
        loss = early + kept + one.loss_bytes - one.logits * one.itemsize
        layer = (
            one.peak_layer_bytes + sum(self.layer_weights()) * FLOAT_DTYPE_BYTES[self.train.dtype]
        )
        return rest + max(loss, gradients + layer)

    def partial_sums(self, stages: Sequence[int]) -> int:
        """Bytes by which the embedding's gradient is more than the rank's part.

        DTensor makes it a partial sum over the whole vocabulary, cut only when it is reduced over
        data ranks (torch 2.13, distributed/tensor/_ops/_embedding_ops.py,
        embedding_dense_backward_strategy; distributed/fsdp/_fully_shard/_fsdp_param.py,
        to_accumulated_grad_if_needed; read on an H100, benchmarks/gpu/memory_h100.json).
        """
        if self.train.zero > 1 or not self.one.gathered or 0 not in stages:
            return 0
        whole = self.model.vocabulary * self.model.hidden
        return (whole - whole // self.one.tensor) * FLOAT_DTYPE_BYTES[self.train.gradient_dtype]

    def kept(self, stage: int) -> int:
        """Bytes that a micro-batch's forward pass leaves on a stage."""
        head = self.one.head_bytes if stage == self.stages - 1 else 0
        return self.split[stage] * self.one.activation_bytes + head

    def working(self, stage: int) -> int:
        """Recomputed activations of one layer at a time, or, before any of these, what the loss
        holds.
        """
        layer = self.one.peak_layer_bytes - self.one.activation_bytes if self.split[stage] else 0
        return max(layer, self.one.loss_bytes) if stage == self.stages - 1 else layer

    # --- tied embeddings, the norm of the gradients ---
    @property
    def tied(self) -> bool:
        """The embeddings stand on two ranks."""
        asked = (
            self.model.tied
            if self.train.embedding_all_reduce is None
            else self.train.embedding_all_reduce
        )
        return asked and self.stages > 1 and self.schedule.rank_of[0] != self.schedule.rank_of[-1]

    def ends(self) -> dict[str, Entry]:
        """The first and the last stage of each pipeline; in between the others, who make no call of
        it.
        """
        if not self.tied:
            return {}
        mesh, axis = self.context.mesh, self.train.axis("pipeline", self.context)
        terms: list[str] = []
        stride = 1
        for other in reversed(tuple(mesh)):
            if other != axis:
                terms.append(f"{other} * {stride}")
                stride *= mesh[other]
        column = " + ".join(reversed(terms)) or "0"
        return {
            f"{self.prefix}_ends": {
                "by": f"{column} + (0 if {axis} == 0 or {axis} == {axis}_size - 1 else {stride})"
            }
        }

    def embeddings(self, stages: Sequence[int]) -> list[Entry]:
        if not self.tied or not {0, self.stages - 1} & set(stages):
            return []
        elements = self.model.vocabulary * self.model.hidden // self.one.tensor
        return [
            step(
                "all_reduce",
                tensor=tensor_declaration(elements, self.train.gradient_dtype),
                group=f"{self.prefix}_ends",
            )
        ]

    def norm(self) -> list[Entry]:
        if not self.train.clip_grad_norm or self.context.world_size == 1:
            return []
        one = tensor_declaration(1, "float32")
        if self.train.zero:
            return [step("all_reduce", tensor=one)]
        data = self.train.data_axes(self.context)
        group = self.joint(tuple(axis for axis in self.context.mesh if axis not in data))
        return [] if group is None else [step("all_reduce", tensor=one, group=group)]


def _nonzero_sizes(footprint: MemoryFootprint) -> dict[str, str]:
    return {word: units.size_text(n) for word, n in footprint._asdict().items() if n}
