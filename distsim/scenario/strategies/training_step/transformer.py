"""The calls of a transformer's training step: micro-batches, gradients and parameters, the update.

A step runs all micro-batches, reduces the gradients, clips them, and updates the parameters. With a
pipeline the micro-batches follow its schedule; without one the layers run one by one.

Sources for the calls between the last gradient and the update: Megatron-LM
core/distributed/finalize_model_grads.py (_allreduce_word_embedding_grads, over the first and the
last stage) and core/optimizer/clip_grads.py (get_grad_norm_fp32: one float32, over all ranks with
the distributed optimizer, otherwise over the ranks that share one copy of the model).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.common import units
from distsim.scenario.strategies.base import (
    Entry,
    Expansion,
    ExpansionContext,
    blocks_by_rank,
    compute,
    step,
    tensor_declaration,
    wait,
)
from distsim.scenario.strategies.field_types import FLOAT_DTYPE_BYTES
from distsim.scenario.strategies.layers import repeat_entries
from distsim.scenario.strategies.pipeline.dualpipe import stage_copies_group
from distsim.scenario.strategies.training_step.layer_calls import ParameterCounts
from distsim.scenario.strategies.training_step.step_memory import TransformerMemory
from distsim.scenario.strategies.training_step.transformer_checks import CheckedTransformer
from distsim.scenario.strategies.training_step.transformer_fields import (
    PAIR_SCHEDULES,
    SPLIT_SCHEDULES,
)

#: Bytes that Adam moves per parameter: it reads and writes a float32 copy and two moments.
_ADAM_STATE_TRAFFIC = 24


class Transformer(CheckedTransformer):
    """One training step: micro-batches forward and backward, gradients reduced, parameters updated,
    as Megatron-LM lays it out.

    ``tensor``, ``pipeline``, ``context`` and ``experts`` are the axes `tp`, `pp`, `cp` and `ep` of
    the mesh unless named otherwise. Gradients of parameters outside of experts are reduced over
    ``data``, by default all axes except `tp` and `pp`. The cost of a layer consists of its matrix
    products, the bytes that its other operations move, and the host's time to launch kernels.
    """

    def expand(self, context: ExpansionContext) -> Expansion:
        return TransformerStepWriter(self, context).expansion()


class _ReducingBackward(NamedTuple):
    """The entries of a backward pass that reduces gradients.

    ``has_end_reductions``: it also reduces gradients of the embedding or the head.
    """

    entries: list[Entry]
    has_end_reductions: bool


class TransformerStepWriter(TransformerMemory):
    """Writes the entries of a step."""

    def expansion(self) -> Expansion:
        if self.stages > 1:
            expansion = self.step_with_pipeline()
        else:
            expansion = self.step_without_pipeline()
        memory = {f"{self.prefix}_{name}": value for name, value in self.memory().items()}
        return expansion._replace(memory=memory)

    # --- with a pipeline ---
    @property
    def splits_backward(self) -> bool:
        """Whether the schedule computes the halves of a backward pass at different times."""
        return self.train.canonical_schedule in SPLIT_SCHEDULES

    @property
    def reduces_in_last_backward(self) -> bool:
        """Whether gradients are reduced during each stage's last backward pass.

        If the schedule splits backward passes, they are reduced after all of them.
        """
        is_replicated = self.dense_group is not None or self.expert_group is not None
        return self.train.overlap_grad_reduce and is_replicated and not self.splits_backward

    @property
    def overlaps_pairs(self) -> bool:
        """Whether the schedule has pairs of passes, and the passes of a pair overlap."""
        return self.train.canonical_schedule in PAIR_SCHEDULES and self.overlaps_experts

    def step_with_pipeline(self) -> Expansion:
        """The passes of all stages as a pipeline; then each rank reduces and updates its stages."""
        stages = range(self.stages)
        overlaps = self.reduces_in_last_backward
        further_costs: dict[str, list[list[Entry]]] = {}
        if overlaps:
            further_costs["last_backward"] = [
                self.reducing_backward_of_stage(stage) for stage in stages
            ]
        if self.splits_backward:
            further_costs["backward_input"] = [self.stage_backward_input(s) for s in stages]
            further_costs["backward_weight"] = [self.stage_backward_weight(s) for s in stages]
        pipeline = self.train.pipeline_strategy(
            self.context,
            [self.stage_forward(stage) for stage in stages],
            [self.stage_backward(stage) for stage in stages],
            **further_costs,
        )
        expansion = pipeline.expand(self.context, self.pair_entries())
        entries_after: list[list[Entry]] = []
        for rank in range(self.context.mesh[pipeline.axis]):
            stages_of_rank = self.schedule.stages_of(rank)
            entries: list[Entry] = []
            if overlaps:
                entries.append(wait("all"))
            else:
                for stage in stages_of_rank:
                    entries += self.reduce_gradients(self.stage_parameters(stage))
            entries += self.sum_copies(stages_of_rank)
            entries_after.append(entries + self.update(stages_of_rank))
        groups = {**expansion.groups, **self.tied_embedding_group(), **self.copies_group()}
        return expansion._replace(
            steps=[*expansion.steps, *blocks_by_rank(entries_after, pipeline.axis)], groups=groups
        )

    def pair_entries(self) -> dict[tuple[int, int], list[Entry]] | None:
        """The entries of all pairs of passes that may overlap; None if none do."""
        if not self.overlaps_pairs:
            return None
        pairs: dict[tuple[int, int], list[Entry]] = {}
        for forward, backward in self.overlapped_stage_pairs():
            pairs[forward, backward] = self.overlapped_stages(forward, backward)
        return pairs

    def overlapped_stage_pairs(self) -> set[tuple[int, int]]:
        """The model's stages of the passes that overlap on some rank."""
        pairs: set[tuple[int, int]] = set()
        for rank in range(self.schedule.ranks):
            own = [self.model_stage(stage) for stage in self.schedule.stages_of(rank)]
            pairs |= {(forward, backward) for forward in own for backward in own}
        return pairs

    # --- DualPipe's second copies ---
    @property
    def _copies_group_name(self) -> str:
        return f"{self.prefix}_copies"

    @property
    def has_copies(self) -> bool:
        """Whether each stage is on two ranks of the pipeline (DualPipe)."""
        return self.train.canonical_schedule == "dualpipe"

    def copies_group(self) -> dict[str, Entry]:
        """The declaration of the group of a stage's two copies."""
        if not self.has_copies:
            return {}
        axis = str(self.train.axis("pipeline", self.context))
        return {self._copies_group_name: stage_copies_group(axis, self.context)}

    def sum_copies(self, stages: Sequence[int]) -> list[Entry]:
        """Sum the gradients of both copies of each stage, or the shards of them."""
        if not self.has_copies:
            return []
        entries: list[Entry] = []
        for kind in self.parameter_kinds(self.parameters_of_stages(stages)):
            ranks = self.group_size[kind.group] if self.train.zero else 1
            if kind.numel:
                tensor = tensor_declaration(-(-kind.numel // ranks), self.train.gradient_dtype)
                entries.append(step("all_reduce", tensor=tensor, group=self._copies_group_name))
        return entries

    def reducing_backward_of_stage(self, stage: int) -> list[Entry]:
        """A pipeline stage's last backward pass; the end of the step waits for the reductions.

        Handles are numbered over all chunks of a rank.
        """
        stages_of_rank = self.schedule.stages_of(self.schedule.rank_of[stage])
        handles_per_chunk = max(self.layers_of_stage) + 1
        first_handle = stages_of_rank.index(stage) * handles_per_chunk
        return self.reducing_backward(stage, first_handle).entries

    # --- without a pipeline ---
    def step_without_pipeline(self) -> Expansion:
        return Expansion([*self.all_micro_batches(), *self.update((0,))], {})

    def all_micro_batches(self) -> list[Entry]:
        """All micro-batches of a step without a pipeline, with the reductions of gradients.

        ZeRO 3 gathers parameters and reduces gradients in each micro-batch (fully_shard); otherwise
        gradients are reduced in the last one.
        """
        count = self.train.micro_batches
        if self.train.zero == 3 and self.dense_group is not None:
            return self.repeated(count, [*self.sharded_forward(), *self.sharded_backward()])
        micro_batch = [*self.stage_forward(0), *self.stage_backward(0)]
        if not self.train.overlap_grad_reduce:
            reductions = self.reduce_gradients(self.stage_parameters(0))
            return [*self.repeated(count, micro_batch), *reductions]
        last_backward = self.reducing_backward(0)
        waits: list[Entry] = [wait("all")] if last_backward.has_end_reductions else []
        return [
            *self.repeated(count - 1, micro_batch),
            *self.stage_forward(0),
            *last_backward.entries,
            *waits,
        ]

    def reducing_backward(self, stage: int, first_handle: int = 0) -> _ReducingBackward:
        """A stage's last backward pass, which reduces each layer's gradients as soon as they exist.

        The gradients of embedding and head are reduced after those of all layers.
        """
        layers = self.layers_of_stage[stage]
        handle = f"{self.prefix}_reduced"
        index = f"{self.prefix}_l"
        layer_number = f"({first_handle} + {index})" if self.stages > 1 else index
        layer = [
            *self.layer_backward(),
            *self.reduce_gradients(self.layer_parameters(), handle, layer_number),
        ]
        end_number = str(first_handle + max(self.layers_of_stage))
        end_reductions = self.reduce_gradients(self.end_parameters(stage), handle, end_number)
        entries = [
            *self.head_backward_of(stage),
            *(repeat_entries(layers, layer, index) if layers else []),
            *self.embedding_backward_of(stage),
            *end_reductions,
        ]
        return _ReducingBackward(entries, has_end_reductions=bool(end_reductions))

    # --- ZeRO 3: parameters are gathered layer by layer ---
    def sharded_forward(self) -> list[Entry]:
        """The forward pass under fully_shard.

        Embeddings, norm and head belong to the root, which stays gathered until the end of the
        backward pass.
        """
        root = self.end_parameters(0)
        root_number = str(self.layers_of_stage[0])
        return [
            *self.gather_parameters(root, self._gather_handle, root_number),
            *self.wait_for_parameters(root, root_number),
            *self.embedding_forward(),
            *self.layers_with_prefetch(self.layer_forward()),
            *self.head_forward(),
        ]

    def sharded_backward(self) -> list[Entry]:
        """The backward pass under fully_shard, which reduces gradients layer by layer."""
        handle = f"{self.prefix}_reduced"
        layer = [
            *self.layer_backward(),
            *self.reduce_gradients(self.layer_parameters(), handle, f"{self.prefix}_l"),
        ]
        root_number = str(self.layers_of_stage[0])
        return [
            *self.head_backward(),
            *self.layers_with_prefetch(layer),
            *self.embedding_backward(),
            *self.reduce_gradients(self.end_parameters(0), handle, root_number),
            wait("all"),
        ]

    @property
    def _gather_handle(self) -> str:
        return f"{self.prefix}_gathered"

    def layers_with_prefetch(self, layer: list[Entry]) -> list[Entry]:
        """Layer by layer; the parameters of the next layer are gathered while one computes."""
        layers = self.layers_of_stage[0]
        counts = self.layer_parameters()
        index = f"{self.prefix}_l"
        gather_next = self.gather_parameters(counts, self._gather_handle, f"({index} + 1)")
        unless_last = {"ranks": f"{index} + 1 < {layers}"}
        body = [
            *({**entry, **unless_last} for entry in gather_next),
            *self.wait_for_parameters(counts, index),
            *layer,
        ]
        return [
            *self.gather_parameters(counts, self._gather_handle, "0"),
            *repeat_entries(layers, body, index),
        ]

    def wait_for_parameters(self, counts: ParameterCounts, index: str) -> list[Entry]:
        """A wait for each gather that `gather_parameters` started."""
        kinds = self.replicated_kinds(counts)
        return [wait(f"{self._gather_handle}_{kind.name}@{index}") for kind in kinds]

    # --- the update ---
    def update(self, stages: Sequence[int]) -> list[Entry]:
        """Adam on the rank's part of the parameters; ZeRO 1 and 2 then gather the new ones."""
        zero = self.train.zero
        counts = self.parameters_of_stages(stages)
        own_numel = 0
        for kind in self.parameter_kinds(counts):
            own_numel += -(-kind.numel // (self.sharding_ranks(kind.group) if zero else 1))
        bytes_per_parameter = _ADAM_STATE_TRAFFIC + FLOAT_DTYPE_BYTES[self.train.gradient_dtype]
        if not self.train.autocast:
            # Adam writes the 16-bit parameters; under autocast there are none.
            bytes_per_parameter += FLOAT_DTYPE_BYTES[self.train.dtype]
        traffic = units.size_text(own_numel * bytes_per_parameter)
        entries = [
            *self.reduce_tied_embeddings(stages),
            *self.reduce_gradient_norm(),
            compute("optimizer", {"bytes": traffic}),
        ]
        if zero in (1, 2):
            entries += self.gather_parameters(counts)
        return entries

    @property
    def has_tied_embedding_copies(self) -> bool:
        """Whether two ranks of the pipeline have copies of the tied embeddings."""
        is_tied = self.train.embedding_all_reduce
        if is_tied is None:
            is_tied = self.model.tied
        if not is_tied or self.stages == 1:
            return False
        return self.schedule.rank_of[0] != self.schedule.rank_of[-1]

    @property
    def _tied_embedding_group_name(self) -> str:
        return f"{self.prefix}_ends"

    def tied_embedding_group(self) -> dict[str, Entry]:
        """The declaration of the group of the first and the last stage of each pipeline.

        `by:` puts every rank into some group, so the middle stages form another one, which makes no
        calls. The key of a rank is its position in the mesh without the pipeline axis; that of a
        middle stage is larger than all of these.
        """
        if not self.has_tied_embedding_copies:
            return {}
        mesh = self.context.mesh
        pipeline_axis = self.train.axis("pipeline", self.context)
        terms: list[str] = []
        stride = 1
        for axis in reversed(tuple(mesh)):
            if axis != pipeline_axis:
                terms.append(f"{axis} * {stride}")
                stride *= mesh[axis]
        position = " + ".join(reversed(terms)) or "0"
        is_end = f"{pipeline_axis} == 0 or {pipeline_axis} == {pipeline_axis}_size - 1"
        return {
            self._tied_embedding_group_name: {"by": f"{position} + (0 if {is_end} else {stride})"}
        }

    def reduce_tied_embeddings(self, stages: Sequence[int]) -> list[Entry]:
        """Sum the gradients of tied embeddings over the first and the last stage."""
        has_embeddings = 0 in stages or self.stages - 1 in stages
        if not self.has_tied_embedding_copies or not has_embeddings:
            return []
        numel = self.model.vocabulary * self.model.hidden // self.cost.tensor_ranks
        tensor = tensor_declaration(numel, self.train.gradient_dtype)
        return [step("all_reduce", tensor=tensor, group=self._tied_embedding_group_name)]

    def reduce_gradient_norm(self) -> list[Entry]:
        """Sum the norm of all gradients, to clip them."""
        if not self.train.clip_grad_norm or self.context.world_size == 1:
            return []
        norm = tensor_declaration(1, "float32")
        if self.train.zero:
            return [step("all_reduce", tensor=norm)]
        data_axes = self.train.data_axes(self.context)
        model_axes = tuple(axis for axis in self.context.mesh if axis not in data_axes)
        group = self.joint_group(model_axes)
        return [] if group is None else [step("all_reduce", tensor=norm, group=group)]
