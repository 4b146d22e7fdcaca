"""The fields of `transformer:`, and the layout that they describe.

`distsim.scenario.strategies.training_step.transformer_checks` checks the layout, and
`distsim.scenario.strategies.training_step.transformer` writes the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import Field, StrictBool, field_validator

from distsim.common.message_text import name_list, value_text
from distsim.scenario.strategies.base import CostOrEntries, ExpansionContext, Strategy
from distsim.scenario.strategies.field_types import (
    FLOAT_DTYPE_BYTES,
    AxesOrGroup,
    AxisOrGroup,
    Dtype,
    DurationNs,
    NonNegativeFloat,
    PositiveInt,
)
from distsim.scenario.strategies.pipeline.schedule_names import canonical_name
from distsim.scenario.strategies.pipeline.strategy import Pipeline
from distsim.scenario.strategies.training_step.architecture_fields import ArchitectureFields
from distsim.scenario.strategies.training_step.micro_batch_cost import (
    MicroBatchCost,
    RecomputePolicy,
)
from distsim.scenario.strategies.training_step.presets import PRESETS

#: The default axes, which are used if the mesh has them.
DEFAULT_AXES = {"tensor": "tp", "pipeline": "pp", "context": "cp", "experts": "ep"}
#: Schedules that compute the two halves of a backward pass at different times.
SPLIT_SCHEDULES = ("zb1p", "zbv", "dualpipe_v", "dualpipe")
#: Those that pair forward passes with backward passes of other micro-batches.
PAIR_SCHEDULES = ("dualpipe_v", "dualpipe")
#: Schedules that need several stages per rank; two if `chunks` is omitted.
_SCHEDULES_WITH_TWO_CHUNKS = ("interleaved_1f1b", "looped_bfs", "zbv", "dualpipe_v")


class TransformerFields(Strategy):
    """The fields of `transformer:` and the layout that they describe."""

    name: ClassVar[str] = "transformer"
    about: ClassVar[str] = (
        "One training step of a transformer as in Megatron-LM or torchtitan: tensor, "
        "sequence, pipeline, context, expert and data parallelism on a device mesh."
    )
    first_field: ClassVar[str | None] = "model"

    model: ArchitectureFields = Field(
        description="Preset, such as llama3-8b, or the sizes of the model.", examples=["llama3-8b"]
    )
    sequence: PositiveInt | None = Field(
        default=None,
        description="Tokens per sequence [default: the preset's training length].",
        examples=[4096],
    )
    micro_batch: PositiveInt = Field(
        default=1, description="Sequences per micro-batch.", examples=[1]
    )
    micro_batches: PositiveInt = Field(
        default=1,
        description=(
            "Micro-batches per optimizer step (gradient accumulation), for each pipeline."
        ),
        examples=[8],
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )
    gradient_dtype: Dtype = Field(
        default="float32",
        description="Dtype in which gradients are accumulated and reduced.",
        examples=["float32"],
    )
    autocast: StrictBool = Field(
        default=False,
        description=(
            "Use DDP under torch.autocast: parameters and gradients in float32, matrix "
            "products in `dtype`. With `zero: 1`, ZeroRedundancyOptimizer."
        ),
        examples=[True],
    )
    recompute: RecomputePolicy = Field(
        default="none",
        description=(
            "Activation checkpointing (recompute). full: whole layers. selective: the scores "
            "of plain attention. modules: norms, activation functions, up-projections of "
            "latent attention. op: every second matrix "
            "product and all other operations (torchtitan)."
        ),
        examples=["full"],
    )
    attention: Literal["flash", "plain"] = Field(
        default="flash",
        description=(
            "flash: fused attention, which never writes its scores to memory. plain: unfused "
            "attention."
        ),
        examples=["flash"],
    )
    # Published percentages of the data sheet's rate, forward and backward. A100, FlashAttention-2:
    # 50 to 73 and 44 to 63 (arXiv:2307.08691). H100, causal attention, heads of 128
    # (arXiv:2407.08608): FlashAttention-2 30 to 34 and 29 to 33, cuDNN 49 to 54 and 47 to 52. That
    # is 0.8 of the presets' rate of matrix products, but 0.5 for FlashAttention-2 on H100. A100,
    # the first FlashAttention: 25 to 40 %, which is 0.5.
    attention_efficiency: NonNegativeFloat = Field(
        default=0.8,
        description=(
            "Speed of fused attention as a fraction of the speed of a large matrix product."
        ),
        examples=[0.6],
    )
    matmul_dtype: Dtype | None = Field(
        default=None,
        description=(
            "Dtype of the layers' matrix products, such as FP8 [default: `dtype`]. Attention "
            "scores, logits and messages stay in `dtype`."
        ),
        examples=["float8_e4m3fn"],
    )
    # 5 to 25 us in eager PyTorch, from Python to cudaLaunchKernel; almost 0 if a layer is one CUDA
    # graph. 18 us fits published steps of small models, which are bound by launches.
    launch: DurationNs = Field(
        default=18_000,
        description=(
            "Host time to launch one kernel. It matters only if kernels are shorter than their "
            "launches."
        ),
        examples=["15 us"],
    )
    causal: StrictBool | None = Field(
        default=None,
        description=(
            "Causal attention: skip scores above the diagonal [default: true with flash attention]."
        ),
        examples=[True],
    )
    tensor: AxisOrGroup | None = Field(
        default=None,
        description="Mesh axis of tensor parallelism [default: `tp` if the mesh has it].",
        examples=["tp"],
    )
    sequence_parallel: StrictBool = Field(
        default=True,
        description=(
            "Use sequence parallelism: shard activations along the sequence between the matrices."
        ),
        examples=[True],
    )
    tensor_calls: Literal["dtensor", "megatron"] = Field(
        default="dtensor",
        description=(
            "Library whose tensor-parallel calls are made. dtensor: PyTorch. megatron: "
            "Megatron-LM, with fused matrices and overlapped gradients."
        ),
        examples=["megatron"],
    )
    # Transformer Engine's userbuffers (Megatron-LM's --tp-comm-overlap) and PyTorch's async TP
    # (torch.compile, _micro_pipeline_tp).
    tensor_overlap: StrictBool = Field(
        default=False,
        description=(
            "Overlap sequence-parallel all_gather and reduce_scatter with matrix products, "
            "piece by piece (--tp-comm-overlap, async TP)."
        ),
        examples=[True],
    )
    loss_parallel: StrictBool = Field(
        default=True,
        description=("Compute the loss on split logits (loss_parallel). false: gather the logits."),
        examples=[False],
    )
    pipeline: AxisOrGroup | None = Field(
        default=None,
        description="Mesh axis of the pipeline [default: `pp` if the mesh has it].",
        examples=["pp"],
    )
    schedule: str = Field(
        default="1f1b",
        description=(
            "Pipeline schedule: a name such as 1f1b, a CSV file in PyTorch's format, or the "
            "lines of one."
        ),
        examples=["1f1b"],
    )
    chunks: PositiveInt | None = Field(
        default=None,
        description=(
            "Stages per rank (virtual pipeline stages) [default: as the schedule requires]."
        ),
        examples=[2],
    )
    layers_per_stage: tuple[PositiveInt | Literal[0], ...] | None = Field(
        default=None,
        description=(
            "Number of layers of each stage [default: even if possible; otherwise embedding "
            "and head count as a layer each]."
        ),
        examples=[[8, 8, 8, 8]],
    )
    context: AxisOrGroup | None = Field(
        default=None,
        description="Mesh axis of context parallelism [default: `cp` if the mesh has it].",
        examples=["cp"],
    )
    experts: AxisOrGroup | None = Field(
        default=None,
        description="Mesh axis of expert parallelism [default: `ep` if the mesh has it].",
        examples=["ep"],
    )
    # DeepSeek-V3, arXiv:2412.19437, section 3.2.2, and github deepseek-ai/DeepEP: a token crosses
    # the network once for each node, NVLink distributes it there, and dispatch is in FP8 if the
    # products are. The option of Megatron-LM is --moe-enable-deepep.
    expert_dispatch: Literal["all_to_all", "deepep"] = Field(
        default="all_to_all",
        description=(
            "How tokens get to experts. all_to_all: one copy for each expert. deepep: only one "
            "copy for each other node, in FP8 if `matmul_dtype` is FP8."
        ),
        examples=["deepep"],
    )
    data: AxesOrGroup | None = Field(
        default=None,
        description=(
            "Mesh axes of data parallelism [default: all axes except those of tensor "
            "parallelism and the pipeline]."
        ),
        examples=["dp"],
    )
    zero: Literal[0, 1, 2, 3] = Field(
        default=1,
        description=(
            "ZeRO stage. 0: no sharding. 1 shards optimizer states, 2 also gradients, 3 also "
            "parameters (fully_shard)."
        ),
        examples=[3],
    )
    overlap_grad_reduce: StrictBool = Field(
        default=True,
        description=(
            "Reduce each layer's gradients during the backward pass of the next layer, in the "
            "last micro-batch. false: reduce all after the last backward pass."
        ),
        examples=[False],
    )
    # GPT-3 clips at 1.0 (arXiv:2005.14165, appendix B), and so do Llama (arXiv:2302.13971, section
    # 2.2) and Megatron-LM by default (--clip-grad).
    clip_grad_norm: StrictBool = Field(
        default=True,
        description="Clip gradients: all-reduce their norms before the optimizer step.",
        examples=[True],
    )
    # Megatron-LM, core/distributed/finalize_model_grads.py. GPT-3 ties embeddings as GPT-2 does
    # (github openai/gpt-2, src/model.py); Llama 3 and Mixtral do not.
    embedding_all_reduce: StrictBool | None = Field(
        default=None,
        description=(
            "All-reduce the gradients of tied embeddings over the first and the last stage "
            "[default: true if the model ties them]."
        ),
        examples=[True],
    )
    data_ranks: PositiveInt | None = Field(
        default=None,
        description=(
            "Number of ranks that share sharded states, if the mesh holds only some of them "
            "[default: as in the mesh]."
        ),
        examples=[64],
    )

    @field_validator("model", mode="before")
    @classmethod
    def _preset(cls, value: object) -> object:
        if not isinstance(value, str | dict | ArchitectureFields):
            raise ValueError(
                f"expected a preset ({name_list(PRESETS)}) or the model's sizes, found "
                f"{value_text(value)}"
            )
        return {"preset": value} if isinstance(value, str) else value

    # --- the layout ---
    def axis(self, field: str, context: ExpansionContext) -> str | None:
        """The axis of a kind of parallelism; None if the mesh has none."""
        named: str | None = getattr(self, field)
        if named is not None:
            return named
        default = DEFAULT_AXES[field]
        return default if default in context.mesh else None

    def axis_size(self, field: str, context: ExpansionContext) -> int:
        """The number of ranks along an axis; 1 if the mesh has none."""
        axis = self.axis(field, context)
        return 1 if axis is None else context.mesh.get(axis, 1)

    def data_axes(self, context: ExpansionContext) -> tuple[str, ...]:
        """The axes over which gradients are reduced."""
        if self.data is not None:
            return (self.data,) if isinstance(self.data, str) else self.data
        model_axes = (self.axis("tensor", context), self.axis("pipeline", context))
        return tuple(axis for axis in context.mesh if axis not in model_axes)

    def micro_batch_cost(self, context: ExpansionContext) -> MicroBatchCost:
        """The cost of a micro-batch on one rank of this layout."""
        model = self.model.architecture()
        tensor_ranks = self.axis_size("tensor", context)
        is_flash = self.attention == "flash"
        uses_dtensor = self.tensor_calls == "dtensor"
        return MicroBatchCost(
            model=model,
            micro_batch=self.micro_batch,
            sequence=self.sequence or model.sequence,
            itemsize=FLOAT_DTYPE_BYTES[self.dtype],
            tensor_ranks=tensor_ranks,
            sequence_parallel=self.sequence_parallel and tensor_ranks > 1,
            context_ranks=self.axis_size("context", context),
            expert_ranks=self.axis_size("experts", context),
            recompute=self.recompute,
            flash=is_flash,
            causal=is_flash if self.causal is None else self.causal,
            pytorch_modules=uses_dtensor,
            whole_logits=uses_dtensor and not self.loss_parallel,
            autocast=self.autocast,
            keeps_8_bit_inputs=self.has_8_bit_products and not uses_dtensor,
        )

    @property
    def has_8_bit_products(self) -> bool:
        """Whether the layers' matrix products are in FP8."""
        return self.matmul_dtype is not None and self.matmul_dtype.startswith("float8")

    def stages(self, context: ExpansionContext) -> int:
        """The number of stages of the pipeline; 1 without one."""
        return self.axis_size("pipeline", context) * self.chunk_count

    @property
    def canonical_schedule(self) -> str | None:
        """The name of the built-in schedule; None for a schedule from a file."""
        return canonical_name(self.schedule)

    @property
    def chunk_count(self) -> int:
        """The number of the model's stages on each rank of the pipeline.

        DualPipe has a second copy of another stage on each rank, which counts there.
        """
        if self.chunks is not None:
            return self.chunks
        return 2 if self.canonical_schedule in _SCHEDULES_WITH_TWO_CHUNKS else 1

    def layers_of_stages(self, context: ExpansionContext) -> tuple[int, ...]:
        """The number of layers of each stage."""
        if self.layers_per_stage is not None:
            return self.layers_per_stage
        stages = self.stages(context)
        layers = self.model.architecture().layers
        if layers % stages == 0 or layers + 2 < stages:
            share, remainder = divmod(layers, stages)
            return tuple(share + 1 if stage < remainder else share for stage in range(stages))
        # Embedding and head count as a layer each (Llama 3, arXiv:2407.21783, section 3.3.2;
        # torchtitan, distributed/pipeline_parallel.py, generate_llm_fqn_per_model_part).
        share, remainder = divmod(layers + 2, stages)
        counts = [share + 1 if stage < remainder else share for stage in range(stages)]
        counts[0] -= 1
        counts[-1] -= 1
        return tuple(counts)

    def pipeline_strategy(
        self,
        context: ExpansionContext,
        forward: Sequence[CostOrEntries] = (),
        backward: Sequence[CostOrEntries] = (),
        **further_costs: Sequence[CostOrEntries],
    ) -> Pipeline:
        """The `pipeline` strategy that runs the micro-batches; costs are by stage.

        ``further_costs``: those of the fields `last_backward`, `backward_input` and
        `backward_weight`, if there are any. Without costs the strategy serves only to check and to
        build the schedule.
        """
        boundary_numel = self.micro_batch_cost(context).boundary_numel
        fields: dict[str, object] = {
            "schedule": self.schedule,
            "axis": self.axis("pipeline", context),
            "micro_batches": self.micro_batches,
            "forward": dict(enumerate(forward)) or "1 ms",
            "backward": dict(enumerate(backward)) or "1 ms",
            "activation": {"shape": [boundary_numel], "dtype": self.dtype},
        }
        for name, costs in further_costs.items():
            if costs:
                fields[name] = dict(enumerate(costs))
        if self.canonical_schedule == "dualpipe":
            # The update sums the shards of both copies (`TransformerStepWriter`).
            fields["reduce_copies"] = False
        if self.chunks is not None:
            fields["chunks"] = self.chunks
        if self.schedule.lower() == "1f1b" and self.micro_batches < self.stages(context):
            # PyTorch's 1F1B refuses fewer micro-batches than stages, Megatron-LM's does not.
            fields["megatron"] = True
        return Pipeline.model_validate(fields)
