"""Local steps and a rare average: LocalSGD and DiLoCo.

Sources: torch 2.13, `torch/distributed/algorithms/model_averaging/averagers.py`
(PeriodicModelAverager: counts steps from 0, averages at `warmup_steps` and every `period` after
it), `utils.py` (all parameters in one flat tensor, divided, then one all_reduce) and
`hierarchical_model_averager.py` (the group of the longest period that divides the step); torchft
0.1, `torchft/local_sgd.py` (LocalSGD: one all_reduce per parameter once `sync_every` steps are
done, all waited for; DiLoCo: the same of pseudogradients, the weights before the local steps less
those after them, with which an outer optimizer goes on from the former; Streaming DiLoCo: a
fragment of the model at a time, started `fragment_sync_delay` steps before it is used). Douillard
et al., DiLoCo (arXiv 2311.08105) and Streaming DiLoCo (arXiv 2501.18512); Lin et al., post-local
SGD (arXiv 1808.07217). torch divides before it sums, torchft after.
"""

from __future__ import annotations

from itertools import pairwise
from math import prod
from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.common.message_text import value_text
from distsim.scenario.strategies.base import (
    CostOrEntries,
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

_ZERO_COST: CostOrEntries = {"time": "0 ns"}


def _parse_group_by_period(value: object, info: ValidationInfo) -> dict[int, str]:
    """`{4: machine, 16: world}`: a group for each period."""
    if not isinstance(value, dict) or not value:
        raise ValueError(
            f"expected a group for each period, as {{4: machine, 16: world}}, found {value_text(value)}"
        )
    found = {
        integer_at_least(1, "a period")(period, info): str(group) for period, group in value.items()
    }
    if list(found) != sorted(found):
        raise ValueError(
            f"expected periods from the shortest to the longest, found {', '.join(map(str, found))}"
        )
    return found


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

    group: AxesOrGroup | None = None
    every: PositiveInt = 1
    optimizer: CostOrEntriesField = Field(default_factory=lambda: _ZERO_COST)

    def local(self, weights: list[str]) -> list[Entry]:
        """A step of one rank alone."""
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

    def shapes(self) -> list[int]:
        """Elements of each parameter, in the order of `module.parameters()`."""
        return [prod(shape) for layer in self.model for shape in layer.params]


class LocalSgd(LocalStepStrategy):
    """``every`` steps alone, then the mean of the weights."""

    name: ClassVar[str] = "local_sgd"
    about: ClassVar[str] = (
        "Every rank steps on its own; now and then the weights are averaged: one all_reduce of the whole model."
    )

    #: Iterations before the first average (torch's averager), which comes with the next one.
    warmup: NonNegativeInt = 0
    #: A group for each period, the longest that divides the step counts; in place of `every`.
    levels: GroupByPeriod | None = None
    #: One all_reduce per parameter after each `every` steps, as torchft has it.
    per_parameter: StrictBool = False
    #: Ranks that leave out the average of one iteration: {1: 4}.
    skips_average: IntByRank = Field(default_factory=dict)

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = context.refuse_groups(group=self.group)
        for period, group in (self.levels or {}).items():
            unknown = context.unknown_group(group)
            if unknown is not None:
                found.append((("levels", period), unknown))
        last = None if found or not self.levels else list(self.levels.values())[-1]
        if last is not None and context.size_of(last) != context.size_of(self.group):
            n = context.size_of(self.group)
            found.append(
                (
                    ("levels",),
                    f"the longest period averages over all {n} ranks, found {last} of {context.size_of(last)}",
                )
            )
        return found

    def expand(self, context: ExpansionContext) -> Expansion:
        w = EntryWriter(context.unused_prefix(self.name), self.dtype, self.group)
        sizes = self.shapes()
        names = [
            w.tensor(f"weights_{k}", size)
            for k, size in enumerate(sizes if self.per_parameter else [sum(sizes)])
        ]
        return Expansion([*self.local(names), *self.averages(w, names, context)], w.tensors)

    def averages(self, w: EntryWriter, names: list[str], context: ExpansionContext) -> list[Entry]:
        """The mean, in the iterations that have one."""
        skips = [
            f"not (rank == {rank} and iteration == {k})" for rank, k in self.skips_average.items()
        ]
        if self.per_parameter:
            mean = [
                w.call("all_reduce", tensor=n, op="sum", async_=True, as_=f"{w.prefix}_mean@{k}")
                for k, n in enumerate(names)
            ]
            mean += [wait(f"{w.prefix}_mean@{k}") for k in range(len(names))]
            mean += [mean_of_sum(name, context.size_of(self.group)) for name in names]
            return [
                block(mean, " and ".join([f"iteration % {self.every} == {self.every - 1}", *skips]))
            ]
        levels: dict[int, GroupRef | None] = (
            {**self.levels} if self.levels else {self.every: self.group}
        )
        found: list[Entry] = []
        longer: list[str] = []
        for period, group in reversed(levels.items()):
            step = "iteration" if self.levels else f"(iteration - {self.warmup})"
            chosen = [f"iteration >= {self.warmup}", f"{step} % {period} == 0", *longer, *skips]
            total = EntryWriter(w.prefix, w.dtype, group).call(
                "all_reduce", tensor=names[0], op="sum"
            )
            found.append(
                block([mean_of_sum(names[0], context.size_of(group)), total], " and ".join(chosen))
            )
            longer.append(f"{step} % {period} != 0")
        return found


class DiLoCo(LocalStepStrategy):
    """``every`` inner steps, then an outer step along the mean of what they changed."""

    name: ClassVar[str] = "diloco"
    about: ClassVar[str] = (
        "Every rank steps on its own; now and then the mean change of the weights is a gradient for an outer optimizer."
    )

    #: What it takes to subtract the weights from those before the local steps; and the outer step.
    pseudogradient: CostOrEntriesField = Field(default_factory=lambda: _ZERO_COST)
    outer: CostOrEntriesField = Field(default_factory=lambda: _ZERO_COST)
    #: Streaming: a fragment of the layers at a time, `every` steps apart each, and started so many
    #: steps before its outer step.
    fragments: PositiveInt = 1
    delay: NonNegativeInt = 0

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = context.refuse_groups(group=self.group)
        if self.every % self.fragments:
            found.append(
                (
                    ("fragments",),
                    f"{self.fragments} fragments do not divide the {self.every} steps between two averages",
                )
            )
        if self.fragments > len(self.model):
            found.append(
                (
                    ("fragments",),
                    f"{self.fragments} fragments of {len(self.model)} layers: some would hold nothing",
                )
            )
        if not found and self.delay >= self.every // self.fragments:
            found.append(
                (
                    ("delay",),
                    f"a fragment has {self.every // self.fragments} steps until the next one starts, found a delay "
                    f"of {self.delay}",
                )
            )
        return found

    def expand(self, context: ExpansionContext) -> Expansion:
        w = EntryWriter(context.unused_prefix(self.name), self.dtype, self.group)
        layers, parts, each = self.model, self.fragments, self.every // self.fragments
        bounds = [len(layers) * k // parts for k in range(parts + 1)]
        sizes = [sum(layer.numel for layer in layers[a:b]) for a, b in pairwise(bounds)]
        weights = [w.tensor(f"weights_{k}", size) for k, size in enumerate(sizes)]
        steps = self.local(weights)
        for k, size in enumerate(sizes):
            before, delta = w.tensor(f"before_{k}", size), w.tensor(f"delta_{k}", size)
            last = (k + 1) * each - 1
            start = f"iteration % {self.every} == {last - self.delay}"
            steps.append(block(self.started(w, k, delta, [before, weights[k]]), start))
            end = f"iteration % {self.every} == {last}"
            mean = [wait(f"{w.prefix}_mean_{k}"), mean_of_sum(delta, context.size_of(self.group))]
            steps.append(
                block(
                    [
                        *mean,
                        compute(
                            f"outer optimizer {k}",
                            self.outer,
                            reads=[delta],
                            writes=[before, weights[k]],
                        ),
                    ],
                    end,
                )
            )
        return Expansion(steps, w.tensors)

    def started(self, w: EntryWriter, k: int, delta: str, held: list[str]) -> list[Entry]:
        """The fragment's change, on its way to a mean."""
        change = compute(f"pseudogradient {k}", self.pseudogradient, reads=held, writes=[delta])
        return [
            change,
            w.call("all_reduce", tensor=delta, op="sum", async_=True, as_=f"{w.prefix}_mean_{k}"),
        ]


def mean_of_sum(tensor: str, ranks: int) -> Entry:
    """A sum as a mean."""
    return {"assign": {"tensor": tensor, "value": f"{tensor} * {1 / ranks!r}"}}
