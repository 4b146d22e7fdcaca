"""Products of strategies on one mesh: a pipeline, what its stages share among ranks, and data
parallelism over all of it.
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
    """Stages that hand on one micro-batch at a time with blocking calls: the way it is first
    written by hand.

    ``activation`` names a tensor of the file; its gradient is the tensor of that name with
    `_grad`.
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
            f"expected the gradients' elements, or a tensor of the file, found {value!r}"
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
        "A product on a mesh: `pipeline` over one axis; `tensor`, `context` and `experts` within a "
        "stage; gradients reduced over `data`."
    )

    #: Refuse a mesh whose axes do not stand in this order.
    order: Literal["megatron", "torchtitan"] | None = Field(
        default=None,
        description="Refuse a mesh whose axes do not stand in this order.",
        examples=["megatron"],
    )
    #: Fields of `pipeline`, or of a plain one (`schedule: plain`). `forward` and `backward` are
    #: left out where a stage's parts give them.
    pipeline: dict[str, object] | None = Field(
        default=None,
        description="Fields of `pipeline`, or `schedule: plain`.",
        examples=[{"micro_batches": 8}],
    )
    #: What one stage does for one micro-batch, in this order.
    tensor: TensorParallel | None = Field(
        default=None,
        description="Fields of `tensor_parallel`, for a stage's layers.",
        examples=[{"batch": 1, "sequence": 4096, "hidden": 4096}],
    )
    context: ContextParallel | None = Field(
        default=None,
        description="Fields of `context_parallel`, for a stage's layers.",
        examples=[{"keys": [1, 8, 1024, 128]}],
    )
    experts: ExpertParallel | None = Field(
        default=None,
        description="Fields of `expert_parallel`, for a stage's layers.",
        examples=[{"experts": 8, "tokens": 4096, "hidden": 1024}],
    )
    #: The axes over which gradients are averaged, and their elements on a rank or the file's tensor
    #: that holds them.
    data: AxesOrGroup | None = Field(
        default=None, description="The axes over which gradients are averaged.", examples=["dp"]
    )
    gradient: GradientField | None = Field(
        default=None,
        description="Elements of a rank's gradients, or the file's tensor that holds them.",
        examples=[1048576],
    )
    optimizer: ComputeCostField | None = Field(
        default=None,
        description=(
            "What the update takes: a time, `{flops, bytes}`, or the entries that stand for it."
        ),
        examples=["1 ms"],
    )

    @property
    def parts(self) -> list[tuple[str, IntraLayerStrategy]]:
        """What a stage consists of."""
        named = (("tensor", self.tensor), ("context", self.context), ("experts", self.experts))
        return [(word, part) for word, part in named if part is not None]

    # --- what can't be ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = [*self._order(context), *self._data(context)]
        for word, part in self.parts:
            found += [((word, *way), sentence) for way, sentence in part.refuse(context)]
        for field in ("ends", "between", "clip_grad_norm"):
            if self.tensor is not None and getattr(self.tensor, field):
                found.append(
                    (
                        ("tensor", field),
                        f"a product takes a stage's layers alone from `tensor`: give {field} in "
                        "tensor_parallel",
                    )
                )
        if not self.parts and self.pipeline is None:
            found.append(
                (
                    (),
                    "a hybrid needs a pipeline, or what a stage consists of: tensor, context, "
                    "experts",
                )
            )
        return found + (self._pipeline(context) if not found else [])

    def _order(self, context: ExpansionContext) -> list[Refusal]:
        if self.order is None:
            return []
        wanted = [axis for axis in MESH_AXIS_ORDERS[self.order] if axis in context.mesh]
        written = [axis for axis in context.mesh if axis in wanted]
        if wanted == written:
            return []
        order = name_list(MESH_AXIS_ORDERS[self.order])
        sizes = ", ".join(f"{axis}: {context.mesh[axis]}" for axis in wanted)
        said = (
            f"{self.order} orders axes from the outermost in as {order}; the mesh has "
            f"{name_list(written)}: write {{{sizes}}}"
        )
        return [(("order",), said)]

    def _data(self, context: ExpansionContext) -> list[Refusal]:
        refusals = context.refuse_groups(data=self.data)
        if isinstance(self.gradient, str):
            unknown = context.unknown_tensor(self.gradient)
            if unknown is not None:
                refusals.append((("gradient",), unknown))
        if (self.data is None) != (self.gradient is None):
            given = "data" if self.gradient is None else "gradient"
            refusals.append(((given,), "`data` and `gradient` belong together"))
        return refusals

    def _pipeline(self, context: ExpansionContext) -> list[Refusal]:
        if self.pipeline is None:
            return []
        fields = dict(self.pipeline)
        if self.parts:
            extra = [key for key in ("forward", "backward") if key in fields]
            if extra:
                text = f"{extra[0]} is given by {name_list(word for word, _ in self.parts)}"
                return [(("pipeline", extra[0]), text)]
            if not self.plain:
                # The parts replace the passes; for the checks of the layout they can be empty.
                fields |= {"forward": [], "backward": []}
        model: type[PlainPipeline | Pipeline] = PlainPipeline if self.plain else Pipeline
        try:
            made = model.model_validate(fields, context=dict(context.known))
        except ValidationError as errors:
            return [
                (("pipeline", *error["loc"]), field_error_text(error, model, "pipeline"))
                for error in errors.errors()
            ]
        if isinstance(made, Pipeline) and made.two_copies:
            text = (
                "dualpipe has two copies of each stage, a product one: "
                "take `pipeline`, or dualpipe_v here"
            )
            return [(("pipeline", "schedule"), text)]
        if isinstance(made, PlainPipeline):
            refusals = _refuse_plain_pipeline(made, context)
        else:
            refusals = made.refuse(context)
        return [(("pipeline", *path), text) for path, text in refusals]

    @property
    def plain(self) -> bool:
        return isinstance(self.pipeline, Mapping) and self.pipeline.get("schedule") == "plain"

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
        (("activation",), f"unknown tensor {name}; declared are {known}") for name in missing
    ]


class HybridWriter(EntryWriter):
    def __init__(self, fields: Hybrid, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix("hybrid"), "float32", fields.data)
        self.f, self.context = fields, context
        self.gradient = (
            self.tensor("gradient", fields.gradient)
            if isinstance(fields.gradient, int)
            else fields.gradient
        )
        self.forward: list[Entry] = []
        self.backward: list[Entry] = []
        for _, part in fields.parts:
            writer = part.writer(context)
            there, back = part.passes(writer)
            self.tensors |= writer.tensors
            self.forward += there
            self.backward = back + self.backward

    def expansion(self) -> Expansion:
        inner = self._stages()
        steps = [*inner.steps]
        if self.gradient is not None and self.f.data is not None:
            steps.append(self.call("all_reduce", tensor=self.gradient, op="avg"))
        if self.f.optimizer is not None:
            reads = [self.gradient] if self.gradient is not None else []
            steps.append(compute("optimizer", self.f.optimizer, reads=reads))
        return inner._replace(steps=steps, tensors={**self.tensors, **inner.tensors})

    def _stages(self) -> Expansion:
        if self.f.pipeline is None:
            done = (
                [compute("gradients", {"time": "0 ns"}, writes=[self.gradient])]
                if isinstance(self.f.gradient, int)
                else []
            )
            return Expansion([*self.forward, *self.backward, *done])
        if self.f.plain:
            return Expansion(
                self._plain(
                    PlainPipeline.model_validate(self.f.pipeline, context=dict(self.context.known))
                )
            )
        given = {"forward": self.forward, "backward": self.backward} if self.f.parts else {}
        own = {} if self.gradient is None else {"gradient": self.gradient}
        context = self.context._replace(tensors={**self.context.tensors, **self.tensors})
        return Pipeline.model_validate(
            {**self.f.pipeline, **given, **own}, context=dict(context.known)
        ).expand(context)

    # --- stages by hand ---
    def _plain(self, pipe: PlainPipeline) -> list[Entry]:
        """The first stage starts, the middle ones hand on, the last one turns round; each waits for
        its neighbours.
        """
        axis, count = pipe.axis, self.context.mesh[pipe.axis]
        act, grad = pipe.activation, f"{pipe.activation}_grad"
        below = (
            {"group": axis, "group_dst": f"{axis} - 1"},
            {"group": axis, "group_src": f"{axis} - 1"},
        )
        above = (
            {"group": axis, "group_dst": f"{axis} + 1"},
            {"group": axis, "group_src": f"{axis} + 1"},
        )
        send_up, recv_up = (
            step("send", tensor=act, **above[0]),
            step("recv", tensor=grad, **above[1]),
        )
        recv_down, send_down = (
            step("recv", tensor=act, **below[1]),
            step("send", tensor=grad, **below[0]),
        )
        first = [
            *self._work(pipe, "forward", [], [act]),
            send_up,
            recv_up,
            *self._work(pipe, "backward", [grad], []),
        ]
        middle = [
            recv_down,
            *self._work(pipe, "forward", [act], [act]),
            send_up,
            recv_up,
            *self._work(pipe, "backward", [grad], [grad]),
            send_down,
        ]
        last = [recv_down, *self._turn(pipe, act, grad), send_down]
        stages = [block(first, f"{axis} == 0")]
        if count > 2:
            stages.append(block(middle, f"{axis} > 0 and {axis} < {count - 1}"))
        if count > 1:
            stages.append(block(last, f"{axis} == {count - 1}"))
        return stages if pipe.micro_batches == 1 else repeat_entries(pipe.micro_batches, stages)

    def _work(
        self, pipe: PlainPipeline, word: str, reads: list[str], writes: list[str]
    ) -> list[Entry]:
        price, inner = (
            (pipe.forward, self.forward) if word == "forward" else (pipe.backward, self.backward)
        )
        return inner if price is None else [compute(word, price, reads=reads, writes=writes)]

    def _turn(self, pipe: PlainPipeline, act: str, grad: str) -> list[Entry]:
        """The last stage goes forward and backward in one piece."""
        prices = [price for price in (pipe.forward, pipe.backward) if price is not None]
        if len(prices) == 2 and all("time" in price for price in prices):
            total = units.duration_text(
                sum(units.parse_duration_ns(price["time"]) for price in prices)
            )
            return [compute("forward and backward", {"time": total}, reads=[act], writes=[grad])]
        return [*self._work(pipe, "forward", [act], []), *self._work(pipe, "backward", [], [grad])]
