"""The peak memory of the ranks in a transformer's training step.

`TransformerMemory` adds up parameters, gradients, optimizer states, activations and gathered
parameters of each rank. For two set-ups it also knows the moment at which torch's allocator is
fullest: fully_shard, and DDP under torch.autocast. The formulas of states and activations are in
`distsim.scenario.strategies.training_step.memory_footprint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from distsim.common import units
from distsim.scenario.strategies.base import GroupRef
from distsim.scenario.strategies.field_types import FLOAT_DTYPE_BYTES
from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.training_step.layer_calls import ParameterCounts
from distsim.scenario.strategies.training_step.memory_footprint import (
    BytesPerParameter,
    MemoryFootprint,
    model_states,
    peak_activation_bytes,
)
from distsim.scenario.strategies.training_step.split_backward import SplitBackwardWriter

#: DDP under autocast: float32 parameters; their gradients, together with the buckets that reduce
#: them (gradient_as_bucket_view is off); two moments.
_DDP_AUTOCAST_BYTES = BytesPerParameter(parameters=4, gradients=8, optimizer=8)


class TransformerMemory(SplitBackwardWriter):
    """Computes the peak memory of each rank of the pipeline."""

    @cached_property
    def schedule(self) -> PipelineSchedule:
        """The order of the passes on each rank of the pipeline, and the stages of each rank."""
        return self.train.pipeline_strategy(self.context).build_schedule(self.context)

    def memory(self) -> dict[str, dict[str, str]]:
        """The peak memory of each rank of the pipeline, in the form of the scenario's `memory`."""
        if self.stages == 1:
            return {"rank": self._memory_without_pipeline()}
        axis = self.train.axis("pipeline", self.context)
        memory: dict[str, dict[str, str]] = {}
        for rank, row in enumerate(self.schedule.rows):
            footprint = self.footprint(self.schedule.stages_of(rank), row)
            memory[f"{axis}_{rank}"] = {"ranks": f"{axis} == {rank}", **_nonzero_sizes(footprint)}
        return memory

    def _memory_without_pipeline(self) -> dict[str, str]:
        footprint = self.footprint((0,), [PipelineAction(0, "F", 0), PipelineAction(0, "B", 0)])
        if self.train.autocast:
            allocated = self.autocast_peak_bytes()
        elif self.train.zero >= 2 and self.cost.pytorch_modules:
            allocated = self.fully_shard_peak_bytes()
        else:
            return _nonzero_sizes(footprint)
        # The fullest moment may need more than the sum of the parts, when a layer's whole gradients
        # exist. The check whether a model fits uses the sum, so the difference is added to it.
        footprint += MemoryFootprint(gathered=max(allocated - footprint.total, 0))
        return {**_nonzero_sizes(footprint), "allocated": units.size_text(allocated)}

    def footprint(self, stages: Sequence[int], row: Sequence[PipelineAction]) -> MemoryFootprint:
        """The memory of a rank with some stages; ``row`` is its row of the schedule."""
        counts = self.parameters_of_stages(stages)
        zero = self.train.zero
        precision = BytesPerParameter(self._itemsize, self._gradient_itemsize)
        if self.train.autocast:
            precision = _DDP_AUTOCAST_BYTES
        states = model_states(
            counts.dense, zero, self.sharding_ranks(self.dense_group), precision
        ) + model_states(counts.expert, zero, self.sharding_ranks(self.expert_group), precision)
        if zero == 3:
            # The layer that computes, the next one, and the root of fully_shard.
            gathered_numel = 2 * sum(self.layer_parameters()) + self.end_parameters(0).dense
            gathered = gathered_numel * precision.parameters
        else:
            gathered = self.cast_parameter_bytes()
        return states + MemoryFootprint(
            gradients=self.partial_embedding_gradient_bytes(stages),
            activations=peak_activation_bytes(
                row, self.kept_activation_bytes, self.backward_working_bytes
            ),
            gathered=gathered,
        )

    # --- parameters ---
    @property
    def _itemsize(self) -> int:
        return FLOAT_DTYPE_BYTES[self.train.dtype]

    @property
    def _gradient_itemsize(self) -> int:
        return FLOAT_DTYPE_BYTES[self.train.gradient_dtype]

    def parameters_of_stages(self, stages: Sequence[int]) -> ParameterCounts:
        """The parameters of several stages together."""
        counts = [self.stage_parameters(stage) for stage in stages]
        return ParameterCounts(
            dense=sum(count.dense for count in counts),
            expert=sum(count.expert for count in counts),
        )

    def sharding_ranks(self, group: GroupRef | None) -> int:
        """The number of ranks among which states are sharded."""
        data_ranks = self.train.data_ranks
        if data_ranks is None:
            return self.group_size[group]
        if group == self.dense_group:
            return data_ranks
        return max(data_ranks // self.cost.expert_ranks, 1)

    def cast_parameter_bytes(self) -> int:
        """Bytes of the weights that autocast has cast for products.

        They stay for the backward pass, except that those of recomputed layers are cast again.
        """
        if not self.train.autocast:
            return 0
        layers = 1 if self.cost.recompute == "full" else self.layers_of_stage[0]
        head = self.model.vocabulary * self.model.hidden
        return (layers * sum(self.layer_parameters()) + head) * self._itemsize

    def partial_embedding_gradient_bytes(self, stages: Sequence[int]) -> int:
        """Bytes of the embedding's gradient beyond the rank's part of it.

        DTensor makes it a partial sum over the whole vocabulary, which is split only when it is
        reduced over data ranks (torch 2.13, distributed/tensor/_ops/_embedding_ops.py,
        embedding_dense_backward_strategy; distributed/fsdp/_fully_shard/_fsdp_param.py,
        to_accumulated_grad_if_needed; read on an H100, benchmarks/gpu/memory_h100.json).
        """
        has_embedding = any(self.model_stage(stage) == 0 for stage in stages)
        if self.train.zero > 1 or not self.cost.pytorch_modules or not has_embedding:
            return 0
        whole = self.model.vocabulary * self.model.hidden
        return (whole - whole // self.cost.tensor_ranks) * self._gradient_itemsize

    # --- activations ---
    @cached_property
    def _layer_activation_bytes(self) -> int:
        return self.cost.activation_bytes

    @cached_property
    def _recomputed_layer_bytes(self) -> int:
        """Bytes of a layer's activations that exist only during its backward pass."""
        return self.cost.peak_layer_bytes - self._layer_activation_bytes

    def kept_activation_bytes(self, stage: int) -> int:
        """Bytes that a micro-batch's forward pass leaves on a stage for its backward pass."""
        stage = self.model_stage(stage)
        head = self.cost.head_bytes if stage == self.stages - 1 else 0
        return self.layers_of_stage[stage] * self._layer_activation_bytes + head

    def backward_working_bytes(self, stage: int) -> int:
        """Bytes that a backward pass needs in addition.

        First the loss holds memory, then the recomputed activations of one layer at a time.
        """
        stage = self.model_stage(stage)
        layer = self._recomputed_layer_bytes if self.layers_of_stage[stage] else 0
        if stage == self.stages - 1:
            return max(layer, self.cost.loss_bytes)
        return layer

    # --- the fullest moment of torch's allocator ---
    def fully_shard_peak_bytes(self) -> int:
        """Bytes of torch's tensors at the fullest moment under fully_shard, whose parameters at
        rest are Adam's float32 copy.

        Candidates are the backward passes of the loss, the last layer, the first layer and the
        embedding, as in benchmarks/gpu/memory_h100.json. The 16-bit copy of the logits is freed
        before (torchtitan's train.py: `del pred`).
        """
        cost = self.cost
        frees_layers = self.train.zero == 3
        param_bytes = self._itemsize
        grad_bytes = self._gradient_itemsize
        all_params = self.parameters_of_stages((0,))
        all_param_bytes = sum(all_params) * param_bytes
        layer_numel = sum(self.layer_parameters())
        # With ZeRO 3 two layers are gathered at a time, otherwise the whole model.
        gathered_bytes = (2 * layer_numel * param_bytes if frees_layers else 0) or all_param_bytes

        states = MemoryFootprint()
        for kind in self.parameter_kinds(all_params):
            ranks = self.sharding_ranks(kind.group)
            states += model_states(kind.numel, 3, ranks, BytesPerParameter(0, grad_bytes))
        gradients_before = states.gradients if self.train.micro_batches > 1 else 0

        kept = self.layers_of_stage[0] * cost.activation_bytes
        working = max(cost.peak_layer_bytes - cost.activation_bytes, 0)
        embedding_numel = self.model.vocabulary * self.model.hidden
        head_numel = embedding_numel // cost.tensor_ranks

        in_loss = (
            gradients_before
            + kept
            + cost.head_bytes
            + self._loss_bytes_without_logits
            + (head_numel * param_bytes if frees_layers else all_param_bytes)
        )
        in_last_layer = (
            gradients_before
            + kept
            + working
            + gathered_bytes
            + head_numel * grad_bytes
            + layer_numel * param_bytes
        )
        in_first_layer = (
            states.gradients
            + cost.activation_bytes
            + working
            + gathered_bytes
            + layer_numel * (param_bytes + grad_bytes)
        )
        in_embedding = (
            states.gradients
            + (embedding_numel + head_numel) * param_bytes
            + layer_numel * grad_bytes
            + (0 if frees_layers else all_param_bytes)
        )
        return states.optimizer + max(in_loss, in_last_layer, in_first_layer, in_embedding)

    def autocast_peak_bytes(self) -> int:
        """Bytes of torch's tensors at the fullest moment under DDP and torch.autocast.

        That is the backward pass of the loss, or of the first layer, when all gradients exist in
        addition to DDP's buckets (benchmarks/gpu/memory_h100.json).
        """
        cost = self.cost
        states = self.footprint((0,), [])
        # Half of `gradients` are DDP's buckets, which always exist.
        gradients = states.gradients // 2
        always = states.parameters + states.optimizer + gradients
        gradients_before = gradients if self.train.micro_batches > 1 else 0
        kept = self.layers_of_stage[0] * cost.activation_bytes
        kept += cost.head_bytes + self.cast_parameter_bytes()
        in_loss = gradients_before + kept + self._loss_bytes_without_logits
        cast_layer = sum(self.layer_parameters()) * self._itemsize
        in_first_layer = gradients + cost.peak_layer_bytes + cast_layer
        return always + max(in_loss, in_first_layer)

    @property
    def _loss_bytes_without_logits(self) -> int:
        """Bytes that the loss holds when the 16-bit copy of the logits has been freed."""
        return self.cost.loss_bytes - self.cost.logits * self.cost.itemsize


def _nonzero_sizes(footprint: MemoryFootprint) -> dict[str, str]:
    return {word: units.size_text(nbytes) for word, nbytes in footprint._asdict().items() if nbytes}
