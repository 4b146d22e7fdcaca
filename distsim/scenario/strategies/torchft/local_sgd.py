"""The strategies `local_sgd` and `diloco`: local steps, and an average every few steps.

LocalSGD averages the weights, DiLoCo the changes of the weights since the last average. torch
divides before it sums, torchft after.

Sources:

- torch 2.13, `torch/distributed/algorithms/model_averaging/averagers.py`: PeriodicModelAverager
  counts steps from 0. It averages at `warmup_steps` and every `period` steps after that.
  `utils.py`: all parameters are one flat tensor, which is divided and then all-reduced once.
  `hierarchical_model_averager.py`: the group of the longest period that divides the step is used.
- torchft 0.1, `torchft/local_sgd.py`. LocalSGD makes one all_reduce per parameter after
  `sync_every` steps, and waits for all of them. DiLoCo does the same with pseudogradients: the
  weights before the local steps minus those after them. An outer optimizer applies them to the
  weights before the local steps. Streaming DiLoCo averages one fragment of the model at a time,
  and starts `fragment_sync_delay` steps before the result is used.
- Douillard et al., DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512); Lin et al.,
  post-local SGD (arXiv 1808.07217).
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.common.message_text import value_text
from distsim.scenario.strategies.base import (
    ZERO_COST,
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    GroupRef,
    Refusal,
    block,
    compute,
    wait,
)
from distsim.scenario.strategies.field_types import (
    AxesOrGroup,
    CostOrEntriesField,
    IntByRank,
    NonNegativeInt,
    PositiveInt,
    integer_at_least,
)
from distsim.scenario.strategies.layers import LayeredModelStrategy


def _parse_group_by_period(value: object, info: ValidationInfo) -> dict[int, str]:
    """`{4: machine, 16: world}`: a group for each period."""
    if not isinstance(value, dict) or not value:
        raise ValueError(
            f"expected a group for each period, such as {{4: machine, 16: world}}, "
            f"found {value_text(value)}"
        )
    parse_period = integer_at_least(1, "a period")
    groups = {parse_period(period, info): str(group) for period, group in value.items()}
    if list(groups) != sorted(groups):
        periods = ", ".join(map(str, groups))
        raise ValueError(f"expected periods in ascending order, found {periods}")
    return groups


_GROUP_BY_PERIOD_SCHEMA = {
    "type": "object",
    "minProperties": 1,
    "additionalProperties": {"x-def": "name"},
}
GroupByPeriod = Annotated[
    dict[int, str], PlainValidator(_parse_group_by_period), WithJsonSchema(_GROUP_BY_PERIOD_SCHEMA)
]


class LocalStepStrategy(LayeredModelStrategy):
    """What both have in common: every rank has the whole model, and steps on its own."""

    group: AxesOrGroup | None = Field(
        default=None,
        description="Data-parallel ranks [default: all ranks].",
        examples=["dp"],
    )
    every: PositiveInt = Field(
        default=1, description="Number of local steps between two averages.", examples=[4]
    )
    optimizer: CostOrEntriesField = Field(
        default_factory=lambda: ZERO_COST,
        description=(
            "Cost of the optimizer step: a time, `{flops, bytes}`, or entries that replace it."
        ),
        examples=["1 ms"],
    )

    def local_step(self, weights: list[str]) -> list[Entry]:
        """A training step without communication."""
        forward = [
            compute(f"forward {layer.name}", layer.forward, reads=weights) for layer in self.model
        ]
        backward = [
            compute(f"backward {layer.name}", layer.backward) for layer in reversed(self.model)
        ]
        return [
            *forward,
            *backward,
            compute("optimizer", self.optimizer, reads=weights, writes=weights),
        ]

    def parameter_sizes(self) -> list[int]:
        """Elements of each parameter, in the order of `module.parameters()`."""
        return [prod(shape) for layer in self.model for shape in layer.params]


class LocalSgd(LocalStepStrategy):
    """``every`` steps alone, then the mean of the weights."""

    name: ClassVar[str] = "local_sgd"
    about: ClassVar[str] = (
        "Local SGD, as with PyTorch's PeriodicModelAverager. Every rank steps on its own; "
        "every few steps an all_reduce averages the whole model."
    )

    warmup: NonNegativeInt = Field(
        default=0,
        description="Iterations before the first average.",
        examples=[100],
    )
    levels: GroupByPeriod | None = Field(
        default=None,
        description=(
            "Hierarchical averaging, instead of `every`: a group per period. The longest "
            "period that divides the step number is used."
        ),
        examples=[{4: "machine", 16: "world"}],
    )
    per_parameter: StrictBool = Field(
        default=False,
        description=(
            "Make one all_reduce per parameter, as torchft does. false: one all_reduce for the "
            "whole model."
        ),
        examples=[True],
    )
    skips_average: IntByRank = Field(
        default_factory=dict,
        description="Ranks that skip the average of one iteration: `{RANK: ITERATION}`.",
        examples=[{1: 4}],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = context.refuse_groups(group=self.group)
        levels = self.levels or {}
        for period, group in levels.items():
            unknown = context.unknown_group(group)
            if unknown is not None:
                refusals.append((("levels", period), unknown))
        if refusals or not levels:
            return refusals
        last = list(levels.values())[-1]
        size = context.size_of(last)
        n = context.size_of(self.group)
        if size != n:
            text = f"the longest period must average over all {n} ranks, but {last} has {size}"
            refusals.append((("levels",), text))
        return refusals

    def expand(self, context: ExpansionContext) -> Expansion:
        w = EntryWriter(context.unused_prefix(self.name), self.dtype, self.group)
        sizes = self.parameter_sizes()
        if not self.per_parameter:
            sizes = [sum(sizes)]
        names = [w.tensor(f"weights_{k}", size) for k, size in enumerate(sizes)]
        return Expansion([*self.local_step(names), *self.averages(w, names, context)], w.tensors)

    def averages(self, w: EntryWriter, names: list[str], context: ExpansionContext) -> list[Entry]:
        """The mean, in the iterations that have one."""
        participants = [
            f"not (rank == {rank} and iteration == {k})" for rank, k in self.skips_average.items()
        ]
        if self.per_parameter:
            conditions = [f"iteration % {self.every} == {self.every - 1}", *participants]
            return [block(self.mean_per_parameter(w, names, context), " and ".join(conditions))]

        levels: dict[int, GroupRef | None] = {self.every: self.group}
        step = f"(iteration - {self.warmup})"
        if self.levels:
            levels = {**self.levels}
            step = "iteration"
        (model,) = names
        steps: list[Entry] = []
        #: A step has only the average of the longest period that divides it.
        no_longer_period: list[str] = []
        for period, group in reversed(levels.items()):
            conditions = [
                f"iteration >= {self.warmup}",
                f"{step} % {period} == 0",
                *no_longer_period,
                *participants,
            ]
            divide = mean_of_sum(model, context.size_of(group))
            total = EntryWriter(w.prefix, w.dtype, group).call("all_reduce", tensor=model, op="sum")
            steps.append(block([divide, total], " and ".join(conditions)))
            no_longer_period.append(f"{step} % {period} != 0")
        return steps

    def mean_per_parameter(
        self, w: EntryWriter, names: list[str], context: ExpansionContext
    ) -> list[Entry]:
        """torchft: one all_reduce per parameter; all are started before the first wait."""
        handle = f"{w.prefix}_mean"
        size = context.size_of(self.group)
        sums = [
            w.call("all_reduce", tensor=name, op="sum", async_=True, as_=f"{handle}@{k}")
            for k, name in enumerate(names)
        ]
        waits = [wait(f"{handle}@{k}") for k in range(len(names))]
        return [*sums, *waits, *(mean_of_sum(name, size) for name in names)]


class DiLoCo(LocalStepStrategy):
    """``every`` inner steps, then an outer step along the mean of what they changed."""

    name: ClassVar[str] = "diloco"
    about: ClassVar[str] = (
        "DiLoCo: local steps on every rank, and an outer optimizer. Every few steps, the "
        "outer optimizer uses the average change of the weights as its gradient."
    )

    pseudogradient: CostOrEntriesField = Field(
        default_factory=lambda: ZERO_COST,
        description=(
            "Cost of the pseudogradient, which is the change of the weights since the last "
            "average: a time, or entries."
        ),
        examples=["1 ms"],
    )
    outer: CostOrEntriesField = Field(
        default_factory=lambda: ZERO_COST,
        description="Cost of the outer optimizer's step: a time, or entries.",
        examples=["1 ms"],
    )
    fragments: PositiveInt = Field(
        default=1,
        description="Streaming DiLoCo: number of model fragments, which are averaged in turn.",
        examples=[2],
    )
    delay: NonNegativeInt = Field(
        default=0,
        description=(
            "Streaming DiLoCo: number of steps between the start of an average and its use."
        ),
        examples=[1],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = context.refuse_groups(group=self.group)
        if self.every % self.fragments:
            text = (
                f"the {self.every} steps between two averages are not divisible by "
                f"{self.fragments} fragments"
            )
            refusals.append((("fragments",), text))
        layers = len(self.model)
        if self.fragments > layers:
            text = (
                f"there are {self.fragments} fragments but only {layers} layers, so some "
                "fragments would be empty"
            )
            refusals.append((("fragments",), text))
        interval = self.every // self.fragments
        if not refusals and self.delay >= interval:
            text = (
                f"the next fragment starts after {interval} steps, so `delay` must be "
                f"smaller, found {self.delay}"
            )
            refusals.append((("delay",), text))
        return refusals

    def expand(self, context: ExpansionContext) -> Expansion:
        w = EntryWriter(context.unused_prefix(self.name), self.dtype, self.group)
        sizes = self.fragment_sizes()
        interval = self.every // self.fragments
        weights = [w.tensor(f"weights_{k}", size) for k, size in enumerate(sizes)]
        steps = self.local_step(weights)
        for k, size in enumerate(sizes):
            before = w.tensor(f"before_{k}", size)
            delta = w.tensor(f"delta_{k}", size)
            handle = f"{w.prefix}_mean_{k}"
            start = [
                compute(
                    f"pseudogradient {k}",
                    self.pseudogradient,
                    reads=[before, weights[k]],
                    writes=[delta],
                ),
                w.call("all_reduce", tensor=delta, op="sum", async_=True, as_=handle),
            ]
            finish = [
                wait(handle),
                mean_of_sum(delta, context.size_of(self.group)),
                compute(
                    f"outer optimizer {k}", self.outer, reads=[delta], writes=[before, weights[k]]
                ),
            ]
            last = (k + 1) * interval - 1
            steps.append(block(start, f"iteration % {self.every} == {last - self.delay}"))
            steps.append(block(finish, f"iteration % {self.every} == {last}"))
        return Expansion(steps, w.tensors)

    def fragment_sizes(self) -> list[int]:
        """Elements of each fragment; a fragment is a contiguous part of the layers."""
        layers = self.model
        bounds = [len(layers) * k // self.fragments for k in range(self.fragments + 1)]
        return [sum(layer.numel for layer in layers[a:b]) for a, b in pairwise(bounds)]


def mean_of_sum(tensor: str, ranks: int) -> Entry:
    """Divide a sum by the number of ranks; the order of both is the caller's."""
    return {"assign": {"tensor": tensor, "value": f"{tensor} * {1 / ranks!r}"}}
