"""The checks of a layout that `transformer:` describes.

Each problem is reported at its field, with its cause and a remedy.
"""

from __future__ import annotations

from collections.abc import Iterator

from distsim.scenario.strategies.base import ExpansionContext, Refusal
from distsim.scenario.strategies.training_step.micro_batch_cost import MicroBatchCost
from distsim.scenario.strategies.training_step.presets import Architecture
from distsim.scenario.strategies.training_step.transformer_fields import (
    DEFAULT_AXES,
    SPLIT_SCHEDULES,
    TransformerFields,
)


def _nearest_divisors(size: int, ranks: int) -> str:
    """The numbers of ranks next to this one that divide a size."""
    fewer = max(n for n in range(1, ranks) if size % n == 0)
    more = next((n for n in range(ranks + 1, min(size, 8 * ranks) + 1) if size % n == 0), None)
    return f"; use {fewer}" if more is None else f"; use {fewer} or {more}"


class CheckedTransformer(TransformerFields):
    """`transformer:` with the checks of its layout."""

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown_axes = list(self._refuse_unknown_axes(context))
        if unknown_axes:
            return unknown_axes
        cost = self.micro_batch_cost(context)
        return [
            *self._refuse_model(cost.model),
            *self._refuse_tensor_axis(cost),
            *self._refuse_sequence(cost),
            *self._refuse_experts(cost, context),
            *self._refuse_stages(context),
            *self._refuse_autocast(context),
        ]

    def _refuse_unknown_axes(self, context: ExpansionContext) -> Iterator[Refusal]:
        axes = [(field, getattr(self, field)) for field in DEFAULT_AXES]
        axes += [("data", axis) for axis in self.data_axes(context)]
        for field, axis in axes:
            unknown = None if axis is None else context.unknown_axis(axis)
            if unknown is not None:
                yield (field,), unknown

    def _refuse_model(self, model: Architecture) -> Iterator[Refusal]:
        """Sizes of a model that contradict each other."""
        if not model.head and model.hidden % model.heads:
            yield ("model",), f"hidden {model.hidden} is not divisible by heads {model.heads}"
        if model.heads % model.kv_heads:
            yield ("model",), f"heads {model.heads} is not divisible by kv_heads {model.kv_heads}"

    def _refuse_tensor_axis(self, cost: MicroBatchCost) -> Iterator[Refusal]:
        """Sizes of the model that the tensor ranks cannot share equally."""
        model, ranks = cost.model, cost.tensor_ranks
        sizes = {
            "heads": model.heads,
            "kv_heads": model.kv_heads,
            "hidden": model.hidden,
            "ffn": model.ffn,
        }
        for name, size in sizes.items():
            if size % ranks:
                yield (
                    ("model",),
                    f"{name} {size} is not divisible by the tensor axis of {ranks} "
                    f"ranks{_nearest_divisors(size, ranks)}",
                )

    def _refuse_sequence(self, cost: MicroBatchCost) -> Iterator[Refusal]:
        """Sequences that context and tensor ranks cannot share equally."""
        if cost.sequence % cost.context_ranks:
            yield (
                ("sequence",),
                f"sequence {cost.sequence} is not divisible by the context axis of "
                f"{cost.context_ranks} ranks",
            )
        elif cost.sequence_parallel and cost.sequence // cost.context_ranks % cost.tensor_ranks:
            part = cost.sequence // cost.context_ranks
            sequence = f"the part of {part} tokens on a context rank"
            if cost.context_ranks == 1:
                sequence = f"sequence {part}"
            yield (
                ("sequence",),
                (
                    f"{sequence} is not divisible by the tensor axis of {cost.tensor_ranks} ranks, "
                    "which sequence_parallel needs"
                ),
            )
        if self.tensor_overlap and cost.tensor_ranks > 1 and not cost.sequence_parallel:
            yield (
                ("tensor_overlap",),
                (
                    "tensor_overlap hides the calls of sequence parallelism: set "
                    "`sequence_parallel: true`"
                ),
            )

    def _refuse_experts(self, cost: MicroBatchCost, context: ExpansionContext) -> Iterator[Refusal]:
        model, ranks = cost.model, cost.expert_ranks
        if ranks > 1 and model.experts == 0:
            axis = self.axis("experts", context)
            yield (
                ("experts",),
                (
                    f"the model has no experts for the axis {axis} of {ranks} ranks: remove "
                    f"{axis} from the mesh"
                ),
            )
        elif model.experts % ranks:
            text = f"{model.experts} experts are not divisible by the expert axis of {ranks} ranks"
            yield ("experts",), f"{text}{_nearest_divisors(model.experts, ranks)}"
        if self.attention_efficiency == 0:
            yield ("attention_efficiency",), "expected a number above 0"
        if model.experts and not 1 <= model.top_k <= model.experts:
            yield (
                ("model",),
                (f"top_k must be between 1 and the {model.experts} experts, found {model.top_k}"),
            )

    def _refuse_autocast(self, context: ExpansionContext) -> Iterator[Refusal]:
        """Fields that exclude autocast, or whose costs are not known under it."""
        if not self.autocast:
            return
        tensor_ranks = self.axis_size("tensor", context)
        pipeline_ranks = self.axis_size("pipeline", context)
        requirements = {
            "zero: 0 or 1 (fully_shard has its own mixed precision)": self.zero < 2,
            "no tensor axis and no pipeline": tensor_ranks == pipeline_ranks == 1,
            "a model without experts": not self.model.architecture().experts,
            "attention: flash": self.attention == "flash",
            "recompute: none or full": self.recompute in ("none", "full"),
            "tensor_calls: dtensor": self.tensor_calls == "dtensor",
            "gradient_dtype: float32": self.gradient_dtype == "float32",
            "no matmul_dtype": self.matmul_dtype is None,
        }
        for requirement, is_met in requirements.items():
            if not is_met:
                yield ("autocast",), f"autocast needs {requirement}"

    def _refuse_stages(self, context: ExpansionContext) -> Iterator[Refusal]:
        """Pipelines that do not fit to the model or to other fields."""
        if self.axis_size("pipeline", context) == 1:
            if self.chunks is not None and self.chunks > 1:
                yield ("chunks",), "there is no pipeline, so `chunks` has no effect: remove it"
            return
        yield from self._refuse_layers_of_stages(context)
        if self.zero == 3:
            yield (
                ("zero",),
                (
                    "with a pipeline, parameters stay gathered between micro-batches: set zero "
                    "to 0, 1 or 2"
                ),
            )
        yield from self._refuse_split_backward(context)
        for path, text in self.pipeline_strategy(context).refuse(context):
            # The field `axis` of `pipeline:` is `pipeline` here.
            field = str(path[0]) if path else ""
            field = "pipeline" if field == "axis" else field
            if field in type(self).model_fields:
                yield (field,), text

    def _refuse_split_backward(self, context: ExpansionContext) -> Iterator[Refusal]:
        """Fields that exclude a schedule with a split backward pass, or DualPipe's two copies."""
        schedule = self.canonical_schedule
        if schedule not in SPLIT_SCHEDULES:
            return
        if self.tensor_calls == "megatron" and self.axis_size("tensor", context) > 1:
            yield (
                ("schedule",),
                (
                    f"{schedule} splits the backward pass, but Megatron-LM's tensor parallelism "
                    "overlaps its halves: set `tensor_calls: dtensor`"
                ),
            )
        is_tied = self.embedding_all_reduce
        if is_tied is None:
            is_tied = self.model.architecture().tied
        if schedule == "dualpipe" and is_tied:
            yield (
                ("schedule",),
                (
                    "dualpipe does not support tied embeddings, because both ends of the pipeline "
                    "have copies of them: use dualpipe_v"
                ),
            )

    def _refuse_layers_of_stages(self, context: ExpansionContext) -> Iterator[Refusal]:
        layers = self.model.architecture().layers
        layers_of_stages = self.layers_of_stages(context)
        stages = self.stages(context)
        if len(layers_of_stages) != stages:
            yield (
                ("layers_per_stage",),
                f"expected {stages} numbers, one for each stage, found {len(layers_of_stages)}",
            )
        elif sum(layers_of_stages) != layers:
            yield (
                ("layers_per_stage",),
                f"the stages have {sum(layers_of_stages)} layers, but the model has {layers}",
            )
        elif max(layers_of_stages) == 0 or layers + 2 < stages:
            yield ("chunks",), f"{layers} layers are too few for {stages} stages"
