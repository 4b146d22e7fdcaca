"""The parts of a scenario that are no steps: world, groups, tensors, options, launch, faults,
sweep.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model, model_validator

from distsim.backends import BACKEND_PROFILES
from distsim.common.expressions import Expression
from distsim.common.field_parsing import FieldSchema, expected_error
from distsim.operations.core.field_schemas import expression_schema, per_rank_schema
from distsim.operations.core.field_types import (
    DtypeField,
    FieldError,
    FieldErrorCollector,
    SelectorField,
    ValueField,
    expression_field,
    parse_shape,
    per_rank,
)
from distsim.scenario.format.models.base_model import FormatModel, parse_name_key
from distsim.scenario.format.models.scalars import (
    MAX_WORLD,
    Backend,
    Count,
    Duration,
    Flag,
    Names,
    Natural,
    Rank,
    Ranks,
    Size,
    Text,
    Timeout,
    choice,
    integer,
    parsed_by,
)

_SHAPE_SCHEMA: FieldSchema = {
    "anyOf": [{"const": "auto"}, {"type": "array", "items": per_rank_schema(expression_schema())}]
}
_parse_machine_count = integer(1, MAX_WORLD)
MachineCount = Annotated[
    int, *parsed_by(_parse_machine_count, {"type": "integer", "minimum": 1, "maximum": MAX_WORLD})
]


class World(FormatModel):
    """``{nodes, ranks_per_node}``; an integer is short for that many ranks on one machine."""

    nodes: MachineCount = Field(description="Number of nodes.", examples=[2])
    ranks_per_node: MachineCount = Field(
        description="Number of ranks on each node; `local_rank` counts them.", examples=[8]
    )

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.nodes * self.ranks_per_node

    @model_validator(mode="after")
    def _bounded(self) -> World:
        if self.size > MAX_WORLD:
            raise ValueError(f"a world of {self.size} ranks is too large; the limit is {MAX_WORLD}")
        return self


class GroupDecl(FormatModel):
    """A group of `groups:`: one of ``ranks``, ``axes`` (the flattened sub-mesh), ``by`` (a group
    for each value).
    """

    ranks: Ranks | None = Field(
        default=None, description="Global ranks of the members.", examples=[[0, 2]]
    )
    axes: Names | None = Field(
        default=None,
        description="Axes of the mesh: one group for each line or plane along these axes.",
        examples=[["dp", "cp"]],
    )
    by: Annotated[Expression | None, *parsed_by(expression_field, expression_schema())] = Field(
        default=None,
        description="Expression that splits the ranks: ranks with the same value form one group.",
        examples=["rank % 2"],
    )
    backend: Backend | None = Field(
        default=None,
        description="Backend of the group [default: the scenario's backend].",
        examples=["gloo"],
    )
    timeout_ns: Timeout | None = Field(
        default=None,
        alias="timeout",
        description=(
            "Timeout of calls on the group. A group does not inherit the timeout of the world."
        ),
        examples=["10 min"],
    )

    @model_validator(mode="after")
    def _one_way(self) -> GroupDecl:
        if sum(way is not None for way in (self.ranks, self.axes, self.by)) != 1:
            raise ValueError("expected one of `ranks`, `axes` and `by`")
        if self.ranks is not None and not self.ranks:
            raise FieldError("expected at least one rank, found an empty list", ("ranks",))
        if self.ranks is not None and len(set(self.ranks)) < len(self.ranks):
            raise FieldError("the group lists a rank twice", ("ranks",))
        if self.axes is not None and (not self.axes or len(set(self.axes)) < len(self.axes)):
            raise FieldError("expected axes of the mesh, each once", ("axes",))
        return self


def _parse_shape(value: object) -> object:
    if value == "auto":
        return value
    if not isinstance(value, list | tuple):
        raise expected_error("a list of sizes such as [8, 1024], or `auto`", value)
    return parse_shape(value)


class TensorDecl(FormatModel):
    """A tensor. The loader fills in the keys from ``like``, and takes a missing shape from a list
    of values.
    """

    shape: Annotated[Any, *parsed_by(_parse_shape, _SHAPE_SCHEMA)] = Field(
        default=None,
        description=(
            "Sizes, as numbers or expressions, by rank if they differ. `auto`: the shape of the "
            "first value written."
        ),
        examples=[[8, 1024]],
    )
    dtype: DtypeField = Field(
        default="float32",
        description="Data type of the elements; `torch.float32` is also accepted.",
        examples=["bfloat16"],
    )
    value: ValueField = Field(
        default=None,
        description=(
            "Initial content: a number that fills the tensor, a (nested) list, or an expression "
            "over rank, `index` (of the element) and `copy` [default: unknown]."
        ),
        examples=["rank + 1"],
    )
    copies: Annotated[
        Any, *parsed_by(per_rank(expression_field), per_rank_schema(expression_schema()))
    ] = Field(
        default=expression_field(1),
        description="Number of copies, for example one for each micro-batch; `x@2` is copy 2.",
        examples=["micro_batches"],
    )
    like: Text | None = Field(
        default=None,
        description="Tensor that provides the keys omitted here.",
        examples=["grad"],
    )

    @model_validator(mode="after")
    def _sized(self) -> TensorDecl:
        if self.shape is None and self.like is None and not isinstance(self.value, tuple):
            raise ValueError(
                "expected `shape` (a list of sizes, or auto), or `like` (another tensor)"
            )
        return self


class MemoryDecl(FormatModel):
    """What ranks hold at their peak. A rank that several entries select is judged by each: they are
    not added up.
    """

    ranks: SelectorField = Field(
        default=None,
        description="Ranks that this entry describes [default: all].",
        examples=["stage == 0"],
    )
    parameters_nbytes: Size = Field(
        default=0,
        alias="parameters",
        description="Memory of the model's parameters.",
        examples=["4 GiB"],
    )
    gradients_nbytes: Size = Field(
        default=0, alias="gradients", description="Memory of the gradients.", examples=["4 GiB"]
    )
    optimizer_nbytes: Size = Field(
        default=0,
        alias="optimizer",
        description="Memory of the optimizer states.",
        examples=["8 GiB"],
    )
    activations_nbytes: Size = Field(
        default=0,
        alias="activations",
        description="Memory that the forward pass keeps for the backward pass.",
        examples=["10 GiB"],
    )
    gathered_nbytes: Size = Field(
        default=0,
        alias="gathered",
        description="Memory of full parameters that are gathered from shards (FSDP).",
        examples=["1 GiB"],
    )
    allocated_nbytes: Size = Field(
        default=0,
        alias="allocated",
        description=(
            "Largest amount of tensor memory in use at one time, if it is less than the sum of "
            "the parts."
        ),
        examples=["20 GiB"],
    )

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each kind that there is."""
        found = {name: int(getattr(self, f"{name}_nbytes")) for name in MEMORY_PARTS}
        return {name: n for name, n in found.items() if n}


MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered")


def _parse_factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise expected_error("a factor above 0, such as 1.3", value)
    return float(value)


class _ProcessGroupOptions(FormatModel):
    """Settings of torch.distributed and its backends, each named after the argument or environment
    variable that sets it.
    """

    init: Annotated[str, *parsed_by(choice("lazy", "eager"), {"enum": ["lazy", "eager"]})] = Field(
        default="lazy",
        description=(
            "nccl: create communicators at their first use (lazy) or at init_process_group "
            "(eager, as with device_id)."
        ),
        examples=["eager"],
    )
    blocking_wait: Flag = Field(
        default=False,
        description="TORCH_NCCL_BLOCKING_WAIT: wait() blocks the host until the work is done.",
        examples=[True],
    )
    launch_order_implicit: Flag = Field(
        default=False,
        description=(
            "NCCL_LAUNCH_ORDER_IMPLICIT: communicators launch in the order of the host's calls."
        ),
        examples=[True],
    )
    timeout_ns: Timeout | None = Field(
        default=None,
        alias="timeout",
        description="Timeout of init_process_group [default: 10 min on nccl, otherwise 30 min].",
        examples=["30 s"],
    )
    init_method: Text | None = Field(
        default=None,
        description="init_method of init_process_group [default: `env://`].",
        examples=["env://"],
    )
    stays_connected: Flag = Field(
        default=False,
        description=(
            "Keep each process running after its last call, so that its connections stay open "
            "[default: the process ends, and closes them]."
        ),
        examples=[True],
    )


if TYPE_CHECKING:
    ProcessGroupOptions = _ProcessGroupOptions
else:
    # Further fields: how far the sends of each backend may run ahead of their receives.
    _BUFFER_OPTIONS = {}
    for _profile in BACKEND_PROFILES.values():
        if _profile.buffer_option is not None:
            _option = _profile.buffer_option
            _BUFFER_OPTIONS[_option.name] = (
                Size,
                Field(
                    default=_option.default,
                    description=_option.description,
                    examples=[_option.example],
                ),
            )
    ProcessGroupOptions = create_model(
        "ProcessGroupOptions",
        __base__=_ProcessGroupOptions,
        __doc__=_ProcessGroupOptions.__doc__,
        **_BUFFER_OPTIONS,
    )


#: Classes of links: between machines, inside one, and the kinds of those
#: (`distsim.hardware.cluster`).
LINK_CLASSES = ("nic", "network", "inter", "intra", "nvlink", "pcie", "shm")
_FAULT_KINDS = ("kill", "raise", "exit", "slow", "late", "absent")


class FaultDecl(FormatModel):
    """A fault: who (``rank``, ``ranks`` or ``link``), what (``kind``), when (``iteration``,
    ``before_call``, ``at``).
    """

    kind: Annotated[str, *parsed_by(choice(*_FAULT_KINDS), {"enum": list(_FAULT_KINDS)})] = Field(
        description=(
            "Kind of fault. `kill`, `raise` and `exit` end a rank; `slow` also applies to links; "
            "`late` starts later; `absent` never starts."
        ),
        examples=["kill"],
    )
    rank: Rank | None = Field(default=None, description="Rank with the fault.", examples=[3])
    ranks: SelectorField = Field(
        default=None, description="Ranks with the fault.", examples=["node == 1"]
    )
    link: Annotated[str | None, *parsed_by(choice(*LINK_CLASSES), {"enum": list(LINK_CLASSES)})] = (
        Field(
            default=None,
            description=(
                "Kind of link that is slow: `nic` or `network` between nodes, `intra` (nvlink, "
                "pcie, shm) inside a node."
            ),
            examples=["nic"],
        )
    )
    nodes: Ranks | None = Field(
        default=None,
        description="Nodes whose links are slow [default: all].",
        examples=[[1]],
    )
    iteration: Natural | None = Field(
        default=None,
        description="Iteration in which the fault occurs, counted from 0.",
        examples=[3],
    )
    before_call: Natural | None = Field(
        default=None,
        description="The fault occurs before this call of the rank, counted from 0.",
        examples=[2],
    )
    at_ns: Duration | None = Field(
        default=None,
        alias="at",
        description="Time of the fault, after the start.",
        examples=["3 ms"],
    )
    factor: Annotated[
        float, *parsed_by(_parse_factor, {"type": "number", "exclusiveMinimum": 0, "maximum": 1e6})
    ] = Field(
        default=1.0,
        description="Factor by which the time of a `slow` rank or link grows.",
        examples=[1.3],
    )
    code: Annotated[
        int, *parsed_by(integer(0, 255), {"type": "integer", "minimum": 0, "maximum": 255})
    ] = Field(default=1, description="Exit status of a fault of kind `exit`.", examples=[1])
    delay_ns: Duration = Field(
        default=0,
        alias="delay",
        description="Delay of the start, for kind `late`.",
        examples=["50 ms"],
    )

    @model_validator(mode="after")
    def _fits(self) -> FaultDecl:
        if sum(who is not None for who in (self.rank, self.ranks, self.link)) != 1:
            raise ValueError("expected one of `rank`, `ranks` and `link`")
        given = self.model_fields_set
        if self.link is not None and self.kind != "slow":
            raise FieldError(f"a link can only be slow, found {self.kind}", ("kind",))
        if self.nodes is not None and self.link is None:
            raise FieldError("`nodes` is only valid with `link`", ("nodes",))
        for kind, key, name in (
            ("slow", "factor", "factor"),
            ("late", "delay_ns", "delay"),
            ("exit", "code", "code"),
        ):
            if key in given and self.kind != kind:
                raise FieldError(
                    f"`{name}` is only valid with the kind {kind}, found {self.kind}", (name,)
                )
        if self.kind == "slow" and "factor" not in given:
            raise ValueError("the kind slow needs its `factor`, such as 1.3")
        if self.kind == "late" and "delay_ns" not in given:
            raise ValueError("the kind late needs its `delay`, such as 50 ms")
        self._fits_when(given)
        return self

    def _fits_when(self, given: set[str]) -> None:
        if self.kind in ("slow", "late", "absent"):
            for key in ("iteration", "before_call", "at_ns"):
                if key in given:
                    raise FieldError(
                        f"the kind {self.kind} applies from the start and has no time or call",
                        (key.removesuffix("_ns"),),
                    )
        if self.at_ns is not None and (self.iteration is not None or self.before_call is not None):
            raise FieldError("expected either `at` or a call (`iteration`, `before_call`)", ("at",))


def _parse_grid(value: object) -> dict[str, tuple[object, ...]]:
    if not isinstance(value, Mapping) or not value:
        raise expected_error(
            "a mapping of keys to lists of values, such as `{mesh.dp: [1, 2, 4]}`", value
        )
    gather = FieldErrorCollector()
    for name, values in value.items():
        gather.take(name, parse_name_key, name)
        gather.take(name, _parse_non_empty_list, values)
    gather.done()
    return {name: tuple(values) for name, values in value.items()}


def _parse_non_empty_list(value: object) -> object:
    if not isinstance(value, list | tuple) or not value:
        raise expected_error("a list of values", value)
    return value


class SweepDecl(FormatModel):
    """What `distsim sweep` runs: every point of a grid."""

    grid: Annotated[
        dict[str, Any],
        *parsed_by(
            _parse_grid,
            {
                "type": "object",
                "minProperties": 1,
                "additionalProperties": {"type": "array", "minItems": 1},
            },
        ),
    ] = Field(
        default_factory=dict,
        description=(
            "Keys of the file (or variables), each with a list of values. Every combination is "
            "one point."
        ),
        examples=[{"mesh.dp": [1, 2, 4]}],
    )
    cluster: Names = Field(
        default=(),
        description="Clusters on which every point is simulated.",
        examples=[["dgx-a100", "dgx-h100"]],
    )
    budget: Count | None = Field(
        default=None,
        description=(
            "Number of points that a guided search tries, for large grids [default: all points]."
        ),
        examples=[100],
    )
