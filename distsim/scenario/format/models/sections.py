"""The parts of a scenario that are no steps: world, groups, tensors, options, launch, faults,
sweep, expectations.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field, create_model, model_validator

from distsim.backends import BACKEND_PROFILES
from distsim.common import units
from distsim.common.expressions import Expression
from distsim.common.field_parsing import FieldSchema
from distsim.common.message_text import did_you_mean, value_text
from distsim.findings.codes import CODES
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
    to_plain_data,
)
from distsim.scenario.format.models.base_model import FormatModel, parse_mapping, parse_name_key
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
    expected_error,
    integer,
    list_parser,
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

    nodes: MachineCount
    ranks_per_node: MachineCount

    @property
    def size(self) -> int:
        return self.nodes * self.ranks_per_node

    @model_validator(mode="after")
    def _bounded(self) -> World:
        if self.size > MAX_WORLD:
            raise ValueError(
                f"a world of {self.size} ranks is too large; at most {MAX_WORLD} are simulated"
            )
        return self


class GroupDecl(FormatModel):
    """A group of `groups:`: one of ``ranks``, ``axes`` (the flattened sub-mesh), ``by`` (a group
    for each value).
    """

    ranks: Ranks | None = None
    axes: Names | None = None
    by: Annotated[Expression | None, *parsed_by(expression_field, expression_schema())] = None
    backend: Backend | None = None
    timeout_ns: Timeout | None = Field(default=None, alias="timeout")

    @model_validator(mode="after")
    def _one_way(self) -> GroupDecl:
        if sum(way is not None for way in (self.ranks, self.axes, self.by)) != 1:
            raise ValueError("expected one of `ranks`, `axes` and `by`")
        if self.ranks is not None and not self.ranks:
            raise FieldError("expected at least one rank, found an empty list", ("ranks",))
        if self.ranks is not None and len(set(self.ranks)) < len(self.ranks):
            raise FieldError("the group names a rank twice", ("ranks",))
        if self.axes is not None and (not self.axes or len(set(self.axes)) < len(self.axes)):
            raise FieldError("expected axes of the mesh, each once", ("axes",))
        return self


def _parse_shape(value: object) -> object:
    if value == "auto":
        return value
    if not isinstance(value, list | tuple):
        raise expected_error("a list of sizes as [8, 1024], or `auto`", value)
    return parse_shape(value)


class TensorDecl(FormatModel):
    """A tensor. The loader fills in what ``like`` gives, and from a list of values the shape where
    it is left out.
    """

    shape: Annotated[Any, *parsed_by(_parse_shape, _SHAPE_SCHEMA)] = None
    dtype: DtypeField = "float32"
    value: ValueField = None
    copies: Annotated[
        Any, *parsed_by(per_rank(expression_field), per_rank_schema(expression_schema()))
    ] = expression_field(1)
    like: Text | None = None

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

    ranks: SelectorField = None
    parameters_nbytes: Size = Field(default=0, alias="parameters")
    gradients_nbytes: Size = Field(default=0, alias="gradients")
    optimizer_nbytes: Size = Field(default=0, alias="optimizer")
    activations_nbytes: Size = Field(default=0, alias="activations")
    #: Full parameters of layers that are sharded at rest.
    gathered_nbytes: Size = Field(default=0, alias="gathered")
    #: The most that tensors hold at a time, where that is known to be less than the sum of the
    #: parts; 0: not known.
    allocated_nbytes: Size = Field(default=0, alias="allocated")

    @property
    def parts(self) -> dict[str, int]:
        """Bytes of each kind that there is."""
        found = {name: int(getattr(self, f"{name}_nbytes")) for name in MEMORY_PARTS}
        return {name: n for name, n in found.items() if n}


MEMORY_PARTS = ("parameters", "gradients", "optimizer", "activations", "gathered")


_NUMBERS_SCHEMA = {"x-def": "numbers"}


def _parse_factor(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value <= 1e6:
        raise expected_error("a factor above 0, as 1.3", value)
    return float(value)


class _ProcessGroupOptions(FormatModel):
    """What a user sets on torch.distributed or its back ends; each named after the argument or the
    variable it stands for.
    """

    #: nccl: communicators are made at first use (lazy), or all at once (init_process_group's
    #: device_id is given).
    init: Annotated[str, *parsed_by(choice("lazy", "eager"), {"enum": ["lazy", "eager"]})] = "lazy"
    #: TORCH_NCCL_BLOCKING_WAIT: wait() blocks the host.
    blocking_wait: Flag = False
    #: NCCL_LAUNCH_ORDER_IMPLICIT: communicators of a device launch in the order of the host's
    #: calls.
    launch_order_implicit: Flag = False
    #: init_process_group's timeout; None: the back end's default (nccl 10 min, else 30 min).
    timeout_ns: Timeout | None = Field(default=None, alias="timeout")
    #: init_process_group's init_method; None: env://.
    init_method: Text | None = None


if TYPE_CHECKING:
    ProcessGroupOptions = _ProcessGroupOptions
else:
    # Further fields: how far the sends of each backend may run ahead of their receives.
    _BUFFER_OPTIONS = {}
    for _profile in BACKEND_PROFILES.values():
        if _profile.buffer_option is not None:
            _option = _profile.buffer_option
            _BUFFER_OPTIONS[_option.name] = (Size, _option.default)
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

    kind: Annotated[str, *parsed_by(choice(*_FAULT_KINDS), {"enum": list(_FAULT_KINDS)})]
    rank: Rank | None = None
    ranks: SelectorField = None
    link: Annotated[str | None, *parsed_by(choice(*LINK_CLASSES), {"enum": list(LINK_CLASSES)})] = (
        None
    )
    nodes: Ranks | None = None
    iteration: Natural | None = None
    before_call: Natural | None = None
    at_ns: Duration | None = Field(default=None, alias="at")
    factor: Annotated[
        float, *parsed_by(_parse_factor, {"type": "number", "exclusiveMinimum": 0, "maximum": 1e6})
    ] = 1.0
    #: Exit status of the kind `exit`.
    code: Annotated[
        int, *parsed_by(integer(0, 255), {"type": "integer", "minimum": 0, "maximum": 255})
    ] = 1
    #: How much later than the others a rank of the kind `late` starts.
    delay_ns: Duration = Field(default=0, alias="delay")

    @model_validator(mode="after")
    def _fits(self) -> FaultDecl:
        if sum(who is not None for who in (self.rank, self.ranks, self.link)) != 1:
            raise ValueError("expected one of `rank`, `ranks` and `link`: who is hit")
        given = self.model_fields_set
        if self.link is not None and self.kind != "slow":
            raise FieldError(f"a link can only be slow, found {self.kind}", ("kind",))
        if self.nodes is not None and self.link is None:
            raise FieldError("`nodes` belongs to a `link`", ("nodes",))
        for kind, key, name in (
            ("slow", "factor", "factor"),
            ("late", "delay_ns", "delay"),
            ("exit", "code", "code"),
        ):
            if key in given and self.kind != kind:
                raise FieldError(f"`{name}` belongs to the kind {kind}, found {self.kind}", (name,))
        if self.kind == "slow" and "factor" not in given:
            raise ValueError("a slow rank or link needs its `factor`, as 1.3")
        if self.kind == "late" and "delay_ns" not in given:
            raise ValueError("a late rank needs its `delay`, as 50 ms")
        self._fits_when(given)
        return self

    def _fits_when(self, given: set[str]) -> None:
        if self.kind in ("slow", "late", "absent"):
            for key in ("iteration", "before_call", "at_ns"):
                if key in given:
                    raise FieldError(
                        f"the kind {self.kind} holds from the start on", (key.removesuffix("_ns"),)
                    )
        if self.at_ns is not None and (self.iteration is not None or self.before_call is not None):
            raise FieldError("expected either `at` or a call (`iteration`, `before_call`)", ("at",))


class DurationBounds(FormatModel):
    """``{at_least, at_most}``: bounds of a duration."""

    at_least_ns: Duration | None = Field(default=None, alias="at_least")
    at_most_ns: Duration | None = Field(default=None, alias="at_most")

    @model_validator(mode="after")
    def _some(self) -> DurationBounds:
        if self.at_least_ns is None and self.at_most_ns is None:
            raise ValueError("expected `at_least` or `at_most`, as `{at_most: 20 ms}`")
        if (
            self.at_least_ns is not None
            and self.at_most_ns is not None
            and self.at_least_ns > self.at_most_ns
        ):
            least, most = (
                units.duration_text(self.at_least_ns),
                units.duration_text(self.at_most_ns),
            )
            raise FieldError(
                f"nothing is at least {least} and at most {most}: swap them", ("at_least",)
            )
        return self


VERDICTS = ("invalid", "mismatch", "deadlock", "race", "leak", "ok")
OUTCOMES = ("completes", "hangs", "raises", "crashes", "wrong-data", "undefined")
_parse_outcome = choice(*OUTCOMES)


def _parse_outcomes(value: object) -> object:
    """One outcome, or one for each back end named."""
    if not isinstance(value, Mapping):
        return _parse_outcome(value)
    gather = FieldErrorCollector()
    for backend in value:
        gather.take(backend, choice(*BACKEND_PROFILES), backend)
    found = {
        backend: gather.take(backend, _parse_outcome, outcome) for backend, outcome in value.items()
    }
    gather.done()
    return found


def _parse_expected_value(value: object) -> object:
    """A number (which fills), `?` (unknown), or a nested list of them."""
    if isinstance(value, list | tuple):
        return list_parser(_parse_expected_value)(value)
    if value == "?" or isinstance(value, bool | int | float):
        return value
    raise ValueError(
        f"expected a number, a list of numbers, or `?` for unknown, found {value_text(value)}"
    )


def _parse_expected_values(value: object) -> Mapping[str, object]:
    return parse_mapping(
        value,
        "a mapping of tensors to numbers, as `{x: {0: 6, 1: 6}}`",
        per_rank(_parse_expected_value),
    )


def _parse_finding_code(value: object) -> str:
    if not isinstance(value, str) or value not in CODES:
        raise ValueError(
            f"expected the code of a finding, as DS301, found {value_text(value)}"
            f"{did_you_mean(str(value), CODES)}"
        )
    return value


def _plain_values(values: dict[str, object]) -> dict[str, object]:
    return {name: to_plain_data(numbers) for name, numbers in values.items()}


_parse_dependence = choice("buffering", "schedule")


_OUTCOME_SCHEMA = {
    "anyOf": [
        {"enum": list(OUTCOMES)},
        {
            "type": "object",
            "propertyNames": {"enum": [*BACKEND_PROFILES]},
            "additionalProperties": {"enum": list(OUTCOMES)},
        },
    ]
}
_FINDING_CODES_SCHEMA = {"type": "array", "items": {"enum": list(CODES)}}


class Expectations(FormatModel):
    """What must come out. What is left out is not checked (`model_fields_set`); ``depends_on:
    null`` says: on nothing.
    """

    verdict: Annotated[str | None, *parsed_by(choice(*VERDICTS), {"enum": list(VERDICTS)})] = None
    depends_on: Annotated[
        str | None,
        *parsed_by(
            lambda v: None if v is None else _parse_dependence(v),
            {"enum": ["buffering", "schedule", None]},
        ),
    ] = None
    outcome: Annotated[object, *parsed_by(_parse_outcomes, _OUTCOME_SCHEMA, lambda v: v)] = None
    ranks: Ranks | None = None
    core: Ranks | None = None
    findings: Annotated[
        tuple[str, ...] | None,
        *parsed_by(list_parser(_parse_finding_code, "a list of codes"), _FINDING_CODES_SCHEMA),
    ] = None
    values: Annotated[
        dict[str, Any],
        *parsed_by(
            _parse_expected_values,
            {"type": "object", "additionalProperties": _NUMBERS_SCHEMA},
            _plain_values,
        ),
    ] = Field(default_factory=dict)
    makespan: DurationBounds | None = None
    iteration: DurationBounds | None = None


def _parse_grid(value: object) -> dict[str, tuple[object, ...]]:
    if not isinstance(value, Mapping) or not value:
        raise expected_error("a mapping of keys to their values, as `{mesh.dp: [1, 2, 4]}`", value)
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
    ] = Field(default_factory=dict)
    cluster: Names = ()
    #: Points that a guided search tries; left out: all.
    budget: Count | None = None
