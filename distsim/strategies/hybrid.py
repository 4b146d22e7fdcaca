"""Products of strategies on one mesh: a pipeline, what its stages share among ranks, and data parallelism over all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, field_validator

from distsim.names import listing, near
from distsim.strategies.base import Context, Expansion, Refusal, Strategy
from distsim.strategies.context_parallel import ContextParallel
from distsim.strategies.expert_parallel import ExpertParallel
from distsim.strategies.fields import Axes, Axis, Count, Work
from distsim.strategies.pipeline import Pipeline
from distsim.strategies.tensor_parallel import TensorParallel
from distsim.strategies.wording import sentence

#: Axes from the outermost in. Megatron-LM core/parallel_state.py, initialize_model_parallel: the default order "tp-cp-ep-dp-pp" is given
#: from the innermost out. torchtitan torchtitan/distributed/parallel_dims.py, ParallelDims.build_mesh: pp, dp_replicate, dp_shard, cp, tp.
ORDERS = {
    "megatron": ("pp", "dp", "ep", "cp", "tp"),
    "torchtitan": ("pp", "dp_replicate", "dp_shard", "ep", "cp", "tp"),
}


class PlainPipeline(BaseModel):
    """Stages that hand on one micro-batch at a time with blocking calls: the way it is first written by hand.

    ``activation`` names a tensor of the file; its gradient is the tensor of that name with `_grad`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", defer_build=True)

    schedule: Literal["plain"]
    axis: Axis = "pp"
    micro_batches: Count = 1
    activation: str
    forward: Work | None = None
    backward: Work | None = None


class Hybrid(Strategy):
    """One training step on a mesh of several axes."""

    name: ClassVar[str] = "hybrid"
    about: ClassVar[str] = (
        "A product on a mesh: `pipeline` over one axis; `tensor`, `context` and `experts` within a stage; gradients reduced over `data`."
    )

    #: Refuse a mesh whose axes do not stand in this order.
    order: Literal["megatron", "torchtitan"] | None = None
    #: Fields of `pipeline`, or of a plain one (`schedule: plain`). `forward` and `backward` are left out where a stage's parts give them.
    pipeline: dict[str, Any] | None = None
    #: What one stage does for one micro-batch, in this order.
    tensor: TensorParallel | None = None
    context: ContextParallel | None = None
    experts: ExpertParallel | None = None
    #: The axes over which gradients are averaged, and their elements on a rank or the file's tensor that holds them.
    data: Axes | None = None
    gradient: Count | str | None = None
    optimizer: Work | None = None

    @field_validator("gradient", mode="plain")
    @classmethod
    def _gradient(cls, value: Any) -> Any:
        if value is None or (isinstance(value, str) and value.isidentifier()):
            return value
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"expected the gradients' elements, or a tensor of the file, found {value!r}")
        return value

    @property
    def parts(self) -> list[tuple[str, Strategy]]:
        """What a stage consists of."""
        named = (("tensor", self.tensor), ("context", self.context), ("experts", self.experts))
        return [(word, part) for word, part in named if part is not None]

    # --- what can't be ---
    def refuse(self, context: Context) -> list[Refusal]:
        found = [*self._order(context), *self._data(context)]
        for word, part in self.parts:
            found += [((word, *way), sentence) for way, sentence in part.refuse(context)]
        if not self.parts and self.pipeline is None:
            found.append(((), "a hybrid needs a pipeline, or what a stage consists of: tensor, context, experts"))
        return found + (self._pipeline(context) if not found else [])

    def _order(self, context: Context) -> list[Refusal]:
        if self.order is None:
            return []
        wanted = [axis for axis in ORDERS[self.order] if axis in context.mesh]
        written = [axis for axis in context.mesh if axis in wanted]
        if wanted == written:
            return []
        order = listing(ORDERS[self.order])
        sizes = ", ".join(f"{axis}: {context.mesh[axis]}" for axis in wanted)
        said = f"{self.order} orders axes from the outermost in as {order}; the mesh has {listing(written)}: write {{{sizes}}}"
        return [(("order",), said)]

    def _data(self, context: Context) -> list[Refusal]:
        unknown = context.unknown_group(self.data)
        found: list[Refusal] = [] if unknown is None else [(("data",), unknown)]
        if isinstance(self.gradient, str) and self.gradient not in context.tensors:
            known = context.tensors
            found.append(
                (("gradient",), f"unknown tensor {self.gradient}; declared are {listing(known)}{near(self.gradient, known)}")
            )
        if (self.data is None) != (self.gradient is None):
            found.append((("data" if self.gradient is None else "gradient",), "`data` and `gradient` belong together"))
        return found

    def _pipeline(self, context: Context) -> list[Refusal]:
        if self.pipeline is None:
            return []
        extra = [key for key in ("forward", "backward") if key in self.pipeline and self.parts]
        if extra:
            return [(("pipeline", extra[0]), f"{extra[0]} is given by {listing(word for word, _ in self.parts)}")]
        model: type[BaseModel] = PlainPipeline if self.plain else Pipeline
        given: dict[str, Any] = {"forward": [], "backward": []} if self.parts and not self.plain else {}
        fields = {**self.pipeline, **given}
        try:
            made = model.model_validate(fields, context={"names": {}})
        except ValidationError as errors:
            return [(("pipeline", *error["loc"]), sentence(error, model, "pipeline")) for error in errors.errors()]
        if isinstance(made, PlainPipeline):
            return _refused_plain(made, context)
        return [(("pipeline", *way), sentence) for way, sentence in made.refuse(context)] if isinstance(made, Pipeline) else []

    @property
    def plain(self) -> bool:
        return isinstance(self.pipeline, Mapping) and self.pipeline.get("schedule") == "plain"

    def expand(self, context: Context) -> Expansion:
        from distsim.strategies.hybrid_steps import HybridWriter

        return HybridWriter(self, context).expansion()


def _refused_plain(pipeline: PlainPipeline, context: Context) -> list[Refusal]:
    found: list[Refusal] = []
    if pipeline.axis not in context.mesh:
        message = f"unknown axis {pipeline.axis}; the mesh has {listing(context.mesh)}{near(pipeline.axis, context.mesh)}"
        found.append((("pipeline", "axis"), message))
    missing = [name for name in (pipeline.activation, f"{pipeline.activation}_grad") if name not in context.tensors]
    known = listing(context.tensors)
    found += [(("pipeline", "activation"), f"unknown tensor {name}; declared are {known}") for name in missing]
    return found
