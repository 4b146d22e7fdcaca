"""The strategy `hybrid`: several strategies on one mesh (3D parallelism).

It combines a pipeline, the strategies within its stages (tensor, context and expert parallelism),
and data parallelism over all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, ValidationError, WithJsonSchema

from distsim.common import units
from distsim.common.message_text import name_list
from distsim.scenario.strategies.base import (
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    Refusal,
    Strategy,
    block,
    compute,
    step,
)
from distsim.scenario.strategies.field_types import (
    AxesOrGroup,
    AxisOrGroup,
    ComputeCostField,
    PositiveInt,
    field_error_text,
)
from distsim.scenario.strategies.intra_layer.context_parallel import ContextParallel
from distsim.scenario.strategies.intra_layer.expert_parallel import ExpertParallel
from distsim.scenario.strategies.intra_layer.tensor_parallel import TensorParallel
from distsim.scenario.strategies.layers import IntraLayerStrategy, repeat_entries
from distsim.scenario.strategies.pipeline.strategy import Pipeline

#: Axes from the outermost in. Megatron-LM core/parallel_state.py, initialize_model_parallel: the
#: default order "tp-cp-ep-dp-pp" is given from the innermost out. torchtitan
#: torchtitan/distributed/parallel_dims.py, ParallelDims.build_mesh: pp, dp_replicate, dp_shard, cp,
#: tp.
MESH_AXIS_ORDERS = {
    "megatron": ("pp", "dp", "ep", "cp", "tp"),
    "torchtitan": ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"),
}


class PlainPipeline(BaseModel):
    """A pipeline as it is first written by hand: one micro-batch at a time, blocking calls.

    ``activation`` names a tensor of the file; its gradient is the tensor of that name with the
    suffix `_grad`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schedule: Literal["plain"]
    axis: AxisOrGroup = "pp"
    micro_batches: PositiveInt = 1
    activation: str
    forward: ComputeCostField | None = None
    backward: ComputeCostField | None = None


def _parse_gradient(value: object) -> int | str:
    if isinstance(value, str) and value.isidentifier():
        return value
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"expected a number of gradient elements, or a tensor of the scenario, found {value!r}"
        )
    return value


_GRADIENT_SCHEMA = {"anyOf": [{"type": "number"}, {"type": "string"}]}
GradientField = Annotated[
    int | str, PlainValidator(_parse_gradient), WithJsonSchema(_GRADIENT_SCHEMA)
]


class Hybrid(Strategy):
    """One training step on a mesh of several axes."""

    name: ClassVar[str] = "hybrid"
    about: ClassVar[str] = (
        "Hybrid (3D) parallelism on a device mesh: `pipeline` over one axis; `tensor`, "
        "`context` and `experts` within a stage; gradients all-reduced over `data`."
    )

    order: Literal["megatron", "torchtitan"] | None = Field(
        default=None,
        description="Require mesh axes in the order of Megatron-LM or torchtitan.",
        examples=["megatron"],
    )
    pipeline: dict[str, object] | None = Field(
        default=None,
        description=(
            "Fields of `pipeline`, or of a pipeline written by hand with blocking calls "
            "(`schedule: plain`)."
        ),
        examples=[{"micro_batches": 8}],
    )
    tensor: TensorParallel | None = Field(
        default=None,
        description="Fields of `tensor_parallel`, for the layers of a stage.",
        examples=[{"batch": 1, "sequence": 4096, "hidden": 4096}],
    )
    context: ContextParallel | None = Field(
        default=None,
        description="Fields of `context_parallel`, for the layers of a stage.",
        examples=[{"keys": [1, 8, 1024, 128]}],
    )
    experts: ExpertParallel | None = Field(
        default=None,
        description="Fields of `expert_parallel`, for the layers of a stage.",
        examples=[{"experts": 8, "tokens": 4096, "hidden": 1024}],
    )
    data: AxesOrGroup | None = Field(
        default=None, description="Mesh axes over which gradients are averaged.", examples=["dp"]
    )
    gradient: GradientField | None = Field(
        default=None,
        description=(
            "Number of gradient elements on a rank, or the tensor of the scenario that holds them."
        ),
        examples=[1048576],
    )
    optimizer: ComputeCostField | None = Field(
        default=None,
        description=(
            "Cost of the optimizer step: a time, `{flops, bytes}`, or entries that replace it."
        ),
        examples=["1 ms"],
    )

    @property
    def parts(self) -> list[tuple[str, IntraLayerStrategy]]:
        """The strategies of a stage's layers, each with the name of its field."""
        named = (("tensor", self.tensor), ("context", self.context), ("experts", self.experts))
        return [(word, part) for word, part in named if part is not None]

    @property
    def is_plain_pipeline(self) -> bool:
        """Whether the pipeline is a `PlainPipeline`."""
        return isinstance(self.pipeline, Mapping) and self.pipeline.get("schedule") == "plain"

    # --- checks of the layout ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = [
            *self._refuse_order(context),
            *self._refuse_data(context),
            *self._refuse_parts(context),
        ]
        if not self.parts and self.pipeline is None:
            text = "hybrid needs `pipeline`, or at least one of `tensor`, `context` and `experts`"
            refusals.append(((), text))
        return refusals or self._refuse_pipeline(context)

    def _refuse_order(self, context: ExpansionContext) -> list[Refusal]:
        """A mesh whose axes are not in the order that `order` demands."""
        if self.order is None:
            return []
        wanted = [axis for axis in MESH_AXIS_ORDERS[self.order] if axis in context.mesh]
        written = [axis for axis in context.mesh if axis in wanted]
        if wanted == written:
            return []
        order = name_list(MESH_AXIS_ORDERS[self.order])
        sizes = ", ".join(f"{axis}: {context.mesh[axis]}" for axis in wanted)
        text = (
            f"{self.order} orders mesh axes from outermost to innermost as {order}, but "
            f"the mesh has {name_list(written)}: write {{{sizes}}}"
        )
        return [(("order",), text)]

    def _refuse_data(self, context: ExpansionContext) -> list[Refusal]:
        refusals = context.refuse_groups(data=self.data)
        if isinstance(self.gradient, str):
            unknown = context.unknown_tensor(self.gradient)
            if unknown is not None:
                refusals.append((("gradient",), unknown))
        if (self.data is None) != (self.gradient is None):
            given = "data" if self.gradient is None else "gradient"
            refusals.append(((given,), "`data` and `gradient` need each other"))
        return refusals

    def _refuse_parts(self, context: ExpansionContext) -> list[Refusal]:
        refusals: list[Refusal] = []
        for word, part in self.parts:
            refusals += [((word, *path), text) for path, text in part.refuse(context)]
        for field in ("ends", "between", "clip_grad_norm"):
            if self.tensor is not None and getattr(self.tensor, field):
                text = (
                    f"hybrid uses only the layers of `tensor`: use {field} in a tensor_parallel "
                    "entry instead"
                )
                refusals.append((("tensor", field), text))
        return refusals

    def _refuse_pipeline(self, context: ExpansionContext) -> list[Refusal]:
        if self.pipeline is None:
            return []
        fields = dict(self.pipeline)
        if self.parts:
            extra = [key for key in ("forward", "backward") if key in fields]
            if extra:
                text = (
                    f"{name_list((word for word, _ in self.parts))} already gives the cost: "
                    f"remove {extra[0]}"
                )
                return [(("pipeline", extra[0]), text)]
            if not self.is_plain_pipeline:
                # The parts replace the passes; for the checks of the layout they can be empty.
                fields |= {"forward": [], "backward": []}
        model: type[PlainPipeline | Pipeline] = (
            PlainPipeline if self.is_plain_pipeline else Pipeline
        )
        try:
            pipeline = model.model_validate(fields, context=dict(context.known))
        except ValidationError as errors:
            return [
                (("pipeline", *error["loc"]), field_error_text(error, model, "pipeline"))
                for error in errors.errors()
            ]
        if isinstance(pipeline, Pipeline) and pipeline.two_copies:
            text = (
                "dualpipe has two copies of each stage, which hybrid does not support: use "
                "a `pipeline` entry, or dualpipe_v"
            )
            return [(("pipeline", "schedule"), text)]
        if isinstance(pipeline, PlainPipeline):
            refusals = _refuse_plain_pipeline(pipeline, context)
        else:
            refusals = pipeline.refuse(context)
        return [(("pipeline", *path), text) for path, text in refusals]

    def expand(self, context: ExpansionContext) -> Expansion:
        return HybridWriter(self, context).expansion()


def _refuse_plain_pipeline(pipeline: PlainPipeline, context: ExpansionContext) -> list[Refusal]:
    refusals: list[Refusal] = []
    unknown_axis = context.unknown_axis(pipeline.axis)
    if unknown_axis is not None:
        refusals.append((("axis",), unknown_axis))
    known = name_list(context.tensors)
    names = (pipeline.activation, f"{pipeline.activation}_grad")
    missing = [name for name in names if name not in context.tensors]
    return refusals + [
        (("activation",), f"unknown tensor {name}; the scenario declares {known}")
        for name in missing
    ]


class HybridWriter(EntryWriter):
    """Writes the entries of a step: the stages, the average of the gradients, the update."""

    def __init__(self, fields: Hybrid, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix("hybrid"), "float32", fields.data)
        self.fields = fields
        self.context = context
        self.gradient = fields.gradient
        if isinstance(fields.gradient, int):
            self.gradient = self.tensor("gradient", fields.gradient)
        #: A stage's passes. The backward pass runs the parts in reverse order.
        self.forward: list[Entry] = []
        self.backward: list[Entry] = []
        for _, part in fields.parts:
            writer = part.writer(context)
            passes = part.passes(writer)
            self.tensors |= writer.tensors
            self.forward = self.forward + passes.forward
            self.backward = passes.backward + self.backward

    def expansion(self) -> Expansion:
        stages = self._stages()
        steps = [*stages.steps]
        if self.gradient is not None and self.fields.data is not None:
            steps.append(self.call("all_reduce", tensor=self.gradient, op="avg"))
        if self.fields.optimizer is not None:
            reads = [self.gradient] if self.gradient is not None else []
            steps.append(compute("optimizer", self.fields.optimizer, reads=reads))
        return stages._replace(steps=steps, tensors={**self.tensors, **stages.tensors})

    def _stages(self) -> Expansion:
        """The passes of all stages and micro-batches."""
        if self.fields.pipeline is None:
            return Expansion(self._single_stage())
        if self.fields.is_plain_pipeline:
            pipeline = PlainPipeline.model_validate(
                self.fields.pipeline, context=dict(self.context.known)
            )
            return Expansion(self._plain_pipeline(pipeline))
        fields = dict(self.fields.pipeline)
        if self.fields.parts:
            fields |= {"forward": self.forward, "backward": self.backward}
        if self.gradient is not None:
            fields["gradient"] = self.gradient
        context = self.context._replace(tensors={**self.context.tensors, **self.tensors})
        return Pipeline.model_validate(fields, context=dict(context.known)).expand(context)

    def _single_stage(self) -> list[Entry]:
        """Both passes without a pipeline."""
        entries = [*self.forward, *self.backward]
        if isinstance(self.fields.gradient, int):
            # The parts' entries do not write the gradient, so this step does.
            entries.append(compute("gradients", {"time": "0 ns"}, writes=[self.gradient]))
        return entries

    # --- a pipeline written by hand ---
    def _plain_pipeline(self, pipeline: PlainPipeline) -> list[Entry]:
        """One micro-batch after the other, with blocking calls.

        The first stage starts each micro-batch, middle stages pass it on, and the last stage turns
        from forward to backward.
        """
        axis = pipeline.axis
        stages = self.context.mesh[axis]
        activation = pipeline.activation
        gradient = f"{pipeline.activation}_grad"

        def send(tensor: str, to: str) -> Entry:
            return step("send", tensor=tensor, group=axis, group_dst=to)

        def receive(tensor: str, source: str) -> Entry:
            return step("recv", tensor=tensor, group=axis, group_src=source)

        previous_stage = f"{axis} - 1"
        next_stage = f"{axis} + 1"
        first = [
            *self._forward(pipeline, reads=[], writes=[activation]),
            send(activation, next_stage),
            receive(gradient, next_stage),
            *self._backward(pipeline, reads=[gradient], writes=[]),
        ]
        middle = [
            receive(activation, previous_stage),
            *self._forward(pipeline, reads=[activation], writes=[activation]),
            send(activation, next_stage),
            receive(gradient, next_stage),
            *self._backward(pipeline, reads=[gradient], writes=[gradient]),
            send(gradient, previous_stage),
        ]
        last = [
            receive(activation, previous_stage),
            *self._forward_and_backward(pipeline, activation, gradient),
            send(gradient, previous_stage),
        ]
        blocks = [block(first, f"{axis} == 0")]
        if stages > 2:
            blocks.append(block(middle, f"{axis} > 0 and {axis} < {stages - 1}"))
        if stages > 1:
            blocks.append(block(last, f"{axis} == {stages - 1}"))
        if pipeline.micro_batches == 1:
            return blocks
        return repeat_entries(pipeline.micro_batches, blocks)

    def _forward(self, pipeline: PlainPipeline, reads: list[str], writes: list[str]) -> list[Entry]:
        """A stage's forward pass: its own cost, or the entries of the parts."""
        if pipeline.forward is None:
            return self.forward
        return [compute("forward", pipeline.forward, reads=reads, writes=writes)]

    def _backward(
        self, pipeline: PlainPipeline, reads: list[str], writes: list[str]
    ) -> list[Entry]:
        """A stage's backward pass: its own cost, or the entries of the parts."""
        if pipeline.backward is None:
            return self.backward
        return [compute("backward", pipeline.backward, reads=reads, writes=writes)]

    def _forward_and_backward(
        self, pipeline: PlainPipeline, activation: str, gradient: str
    ) -> list[Entry]:
        """Both passes of the last stage; as one compute step if both are given as times."""
        costs = [cost for cost in (pipeline.forward, pipeline.backward) if cost is not None]
        are_times = all("time" in cost for cost in costs)
        if len(costs) == 2 and are_times:
            total_ns = sum(units.parse_duration_ns(cost["time"]) for cost in costs)
            cost = {"time": units.duration_text(total_ns)}
            return [compute("forward and backward", cost, reads=[activation], writes=[gradient])]
        return [
            *self._forward(pipeline, reads=[activation], writes=[]),
            *self._backward(pipeline, reads=[], writes=[gradient]),
        ]
