"""Backward passes in two halves, and pairs of passes that overlap, for zero-bubble schedules.

The input's half (I) computes the gradients of activations and makes all messages; the weights' half
(W) has only matrix products. In a pair, the forward pass of one micro-batch and the backward pass
of another take turns layer by layer: while the tokens of one are sent to experts, the other
computes.

Sources: Qi et al., Zero Bubble Pipeline Parallelism, arXiv:2401.10241 (halves); DeepSeek-V3
Technical Report, arXiv:2412.19437, figure 4 (order of a pair's computations and messages).
"""

from __future__ import annotations

from distsim.scenario.strategies.base import Entry, wait
from distsim.scenario.strategies.training_step.layer_calls import TransformerLayerWriter


class SplitBackwardWriter(TransformerLayerWriter):
    """Writes the halves of a stage's backward pass, and pairs of overlapping passes."""

    # --- halves ---
    @property
    def _attention_weight_flops(self) -> int:
        """FLOPs of the gradients of attention's weights: as many as forward, without the scores."""
        return self.cost.attention_flops - self.cost.scores_flops

    @property
    def _mlp_weight_flops(self) -> int:
        return self.cost.mlp_flops + self.cost.padding_flops

    def stage_backward_input(self, stage: int) -> list[Entry]:
        """The input's half of a stage's backward pass."""
        layers = self.repeated(self.layers_of_stage[stage], self.layer_backward_input())
        return [*self.head_backward_of(stage), *layers, *self.embedding_backward_of(stage)]

    def stage_backward_weight(self, stage: int) -> list[Entry]:
        """The weights' half; that of the head is small and belongs to the input's half."""
        return self.repeated(self.layers_of_stage[stage], self.layer_backward_weight())

    def layer_backward_input(self) -> list[Entry]:
        cost = self.cost
        before = [*self.recomputation(), *self.kernel_launches(1)]
        before += self.scores_without_tensor_cores(self.score_backward_passes())
        traffic = self.memory_traffic("backward")
        attention_flops = self.attention_backward_flops() - self._attention_weight_flops
        mlp_flops = 2 * (cost.mlp_flops + cost.padding_flops) - self._mlp_weight_flops
        if self.is_layer_local:
            return [*before, self.matmul("backward", attention_flops + mlp_flops), traffic]
        mlp = self.block_backward(
            "mlp", mlp_flops, [0], self.dispatch_tokens(), self.combine_tokens()
        )
        attention = self.block_backward(
            "attention",
            attention_flops,
            [0],
            [*self.gather_keys(), *self.scatter_key_gradients()],
            [],
        )
        return [*before, traffic, *mlp, *attention]

    def layer_backward_weight(self) -> list[Entry]:
        flops = self._attention_weight_flops + self._mlp_weight_flops
        return [*self.kernel_launches(1), self.matmul("backward weights", flops)]

    # --- pairs ---
    @property
    def overlaps_experts(self) -> bool:
        """Whether the passes of a pair overlap: only the messages of experts can be hidden."""
        return self.expert_axis is not None

    def overlapped_stages(self, forward: int, backward: int) -> list[Entry]:
        """The forward pass of a stage and the backward pass of another on the same rank."""
        counts = self.layers_of_stage[forward], self.layers_of_stage[backward]
        pairs = min(counts)
        return [
            *(self.embedding_forward() if forward == 0 else []),
            *self.head_backward_of(backward),
            *self.repeated(pairs, self.overlapped_layers()),
            *self.repeated(counts[0] - pairs, self.layer_forward()),
            *self.repeated(counts[1] - pairs, self.layer_backward()),
            *self.head_forward_of(forward),
            *self.embedding_backward_of(backward),
        ]

    def overlapped_layers(self) -> list[Entry]:
        """One layer forward and one backward; each exchange overlaps with the other's block."""
        cost = self.cost
        forward_attention = self.block_forward(
            "attention",
            cost.attention_flops + self.attention_extra_flops(1),
            self.gather_keys(),
            self.scores_without_tensor_cores(1),
        )
        mlp_flops = cost.mlp_flops + cost.padding_flops
        forward_mlp = self.block_forward("mlp", mlp_flops, [], [])
        backward_mlp = self.block_backward("mlp", 2 * mlp_flops, self.mlp_column_flops(), [], [])
        backward_attention = self.block_backward(
            "attention",
            self.attention_backward_flops(),
            self.attention_column_flops(),
            [*self.gather_keys(), *self.scatter_key_gradients()],
            [],
        )
        names = [f"{self.prefix}_pair_{word}" for word in ("grad_out", "out", "grad_back", "back")]
        return [
            *self.recomputation(),
            *self.kernel_launches(3),
            *self.scores_without_tensor_cores(self.score_backward_passes()),
            *self.dispatch_tokens(names[0]),
            *forward_attention,
            self.memory_traffic("forward"),
            wait(names[0]),
            *self.dispatch_tokens(names[1]),
            *backward_mlp,
            wait(names[1]),
            *self.combine_tokens(names[2]),
            *forward_mlp,
            wait(names[2]),
            *self.combine_tokens(names[3]),
            self.memory_traffic("backward"),
            *backward_attention,
            wait(names[3]),
        ]


__all__ = ["SplitBackwardWriter"]
