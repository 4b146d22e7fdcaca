"""Expert parallelism: tokens travel to the ranks of their experts and back.

Sources: Lepikhin et al., GShard (arXiv 2006.16668), capacity and its padding; Fedus et al., Switch
Transformer (arXiv 2101.03961), section 2.2, capacity factor. The calls are those of all-to-all
dispatch as torchtitan and Megatron write it: counts first, then tokens there, then results back;
the backward pass makes the last two again, the other way round.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate, pairwise
from math import ceil, prod
from random import Random
from typing import ClassVar, NamedTuple

from pydantic import StrictBool

from distsim.scenario.strategies.base import ComputeCost, Entry, ExpansionContext, Refusal, compute
from distsim.scenario.strategies.field_types import (
    AxisOrGroup,
    ComputeCostField,
    Dtype,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
)
from distsim.scenario.strategies.intra_layer.hierarchical_all_to_all import (
    HierarchicalExpertWriter,
    expert_compute,
    uniform_or_by_rank,
)
from distsim.scenario.strategies.layers import IntraLayerStrategy, IntraLayerWriter

#: Experts of a layer that are simulated: tokens are counted for each.
_MAX_EXPERTS = 2**16


class ExpertParallel(IntraLayerStrategy):
    """Every rank has some of the experts, and tokens of its own. The price of a pass is that of an
    even share of the tokens; a rank with more takes longer."""

    name: ClassVar[str] = "expert_parallel"
    about: ClassVar[str] = (
        "Mixture of experts: counts by all_to_all_single, tokens out by another, results back by a third; uneven where the router is."
    )

    axis: AxisOrGroup = "ep"
    experts: PositiveInt
    #: Tokens of a rank, and experts that each goes to.
    tokens: PositiveInt
    top_k: PositiveInt = 1
    hidden: PositiveInt
    dtype: Dtype = "bfloat16"
    #: 0: every expert gets as many tokens. Above: how unequal the router is, drawn with `seed`; 1
    #: is strongly so.
    imbalance: NonNegativeFloat = 0.0
    seed: NonNegativeInt = 0
    #: An expert takes so many times its even share from a rank at most; the rest of the tokens is
    #: dropped.
    capacity_factor: NonNegativeFloat | None = None
    #: Every rank sends each expert its full capacity, padded: all messages are equal, and no counts
    #: travel.
    pad_to_capacity: StrictBool = False
    #: The axis of machines, `axis` being the ranks inside one: tokens go between machines first,
    #: then inside (`expert_stages`).
    between: AxisOrGroup | None = None
    #: A token crosses to a machine once, whatever number of its experts is there (DeepEP).
    once_per_machine: StrictBool = False
    #: Tokens travel in so many pieces: one inside the machine while the next one is between them.
    pieces: PositiveInt = 1
    #: What tokens are dispatched in; results come back in `dtype`.
    dispatch_dtype: Dtype | None = None
    #: What is computed while tokens are on their way out, as shared experts.
    beside: ComputeCostField | None = None

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None or self.axis not in context.mesh:
            return [(("axis",), unknown or f"{self.axis} is no axis of the mesh")]
        found: list[Refusal] = list(self._refused_stages(context))
        if found:
            return found
        n = context.size_of(self.axis) * (
            1 if self.between is None else context.size_of(self.between)
        )
        if self.experts > _MAX_EXPERTS:
            found.append(
                (
                    ("experts",),
                    f"at most {_MAX_EXPERTS} experts are simulated, found {self.experts}",
                )
            )
        if self.experts % n:
            found.append(
                (
                    ("experts",),
                    f"{self.experts} experts do not divide among the {n} ranks of {self.axis}",
                )
            )
        if self.top_k > self.experts:
            found.append(
                (("top_k",), f"a token goes to {self.top_k} experts, but there are {self.experts}")
            )
        if self.capacity_factor == 0:
            found.append(
                (
                    ("capacity_factor",),
                    "with capacity 0 every token is dropped: expected a factor above 0, as 1.25",
                )
            )
        if self.pad_to_capacity and self.capacity_factor is None:
            found.append(
                (
                    ("pad_to_capacity",),
                    "there is nothing to pad to: give `capacity_factor`, as 1.25",
                )
            )
        return found

    def _refused_stages(self, context: ExpansionContext) -> Iterator[Refusal]:
        staged = ("once_per_machine", "pieces", "dispatch_dtype", "beside")
        if self.between is None:
            fields = type(self).model_fields
            given = [word for word in staged if getattr(self, word) != fields[word].default]
            yield from (
                ((word,), "it belongs to two stages: name the axis of machines with `between`")
                for word in given
            )
        elif self.between not in context.mesh or self.between == self.axis:
            yield (
                ("between",),
                context.unknown_group(self.between, "between")
                or f"expected another axis of the mesh than {self.axis}",
            )
        elif self.pieces > self.tokens:
            yield (
                ("pieces",),
                f"a piece holds a token at least: expected at most {self.tokens}, found {self.pieces}",
            )
        elif self.once_per_machine and (self.imbalance or self.capacity_factor is not None):
            word = "imbalance" if self.imbalance else "capacity_factor"
            sentence = "how often a token crosses once for several experts is counted for an even router: leave one of the two out"
            yield (word,), sentence

    @property
    def router(self) -> ExpertRouter:
        return ExpertRouter(
            self.experts,
            self.tokens,
            self.top_k,
            self.imbalance,
            self.seed,
            self.capacity_factor,
            self.pad_to_capacity,
        )

    def writer(self, context: ExpansionContext) -> ExpertParallelWriter | HierarchicalExpertWriter:
        if self.between is None:
            return ExpertParallelWriter(self, context)
        nodes, local = context.size_of(self.between), context.size_of(self.axis)
        even = self.imbalance == 0 and self.capacity_factor is None
        rows = [] if even else routed_rows(self.router, context.world_size, nodes * local)
        places = (
            {}
            if even
            else {axis: axis_positions(context.mesh, axis) for axis in (self.between, self.axis)}
        )
        return HierarchicalExpertWriter(self, context, rows, places)


class ExpertParallelWriter(IntraLayerWriter):
    """Entries of one layer's experts.

    ``sends[r][d]``: rows that global rank r sends to coordinate d of its group; ``takes[r]``: rows
    that it gets from each.
    """

    def __init__(self, fields: ExpertParallel, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.axis)
        self.f, n = fields, context.size_of(fields.axis)
        self.sends = [list(row) for row in routed_rows(fields.router, context.world_size, n)]
        self.takes = [
            [self.sends[other][mine] for other in group]
            for mine, group in axis_positions(context.mesh, fields.axis)
        ]
        self.even = all(len({*row}) == 1 and row == self.sends[0] for row in self.sends)
        gone, come = (
            uniform_or_by_rank([sum(row) for row in rows]) for rows in (self.sends, self.takes)
        )
        for suffix in ("", "_grad") if fields.backward is not None else ("",):
            for word, rows in (
                ("tokens", gone),
                ("routed", come),
                ("results", come),
                ("combined", gone),
            ):
                self.tensor(word + suffix, [rows, fields.hidden])
        for word in () if fields.pad_to_capacity else ("counts", "theirs"):
            self.tensor(word, fields.experts, "int64")

    def moved(self, source: str, target: str, back: bool) -> Entry:
        """Tokens to their experts, or results back: what goes out one way comes in the other."""
        splits = None if self.even else uniform_or_by_rank(self.takes if back else self.sends)
        return self.call(
            "all_to_all_single",
            input=f"{self.prefix}_{source}",
            output=f"{self.prefix}_{target}",
            input_splits=splits,
        )

    def forward(self, price: ComputeCost) -> list[Entry]:
        found: list[Entry] = [compute("router", {"time": "0 ns"}, writes=[f"{self.prefix}_tokens"])]
        if not self.f.pad_to_capacity:
            found.append(
                self.call(
                    "all_to_all_single",
                    input=f"{self.prefix}_counts",
                    output=f"{self.prefix}_theirs",
                )
            )
        return [
            *found,
            self.moved("tokens", "routed", back=False),
            *self.work("experts", price, "routed", "results"),
            self.moved("results", "combined", back=True),
        ]

    def backward(self, price: ComputeCost) -> list[Entry]:
        return [
            compute("combine backward", {"time": "0 ns"}, writes=[f"{self.prefix}_combined_grad"]),
            self.moved("combined_grad", "results_grad", back=False),
            *self.work("experts backward", price, "results_grad", "routed_grad"),
            self.moved("routed_grad", "tokens_grad", back=True),
        ]

    def work(self, name: str, price: ComputeCost, reads: str, writes: str) -> list[Entry]:
        """The experts' time follows their tokens; a rank without tokens computes nothing."""
        words = {"reads": [f"{self.prefix}_{reads}"], "writes": [f"{self.prefix}_{writes}"]}
        return expert_compute(
            name, price, [sum(rows) for rows in self.takes], self.f.tokens * self.f.top_k, **words
        )


# --- which tokens go where, seeded: the same on any machine ---
def axis_positions(mesh: Mapping[str, int], axis: str) -> list[tuple[int, tuple[int, ...]]]:
    """Per global rank: its coordinate on the axis, and the global ranks of its group in order."""
    names = list(mesh)
    below = prod(mesh[name] for name in names[names.index(axis) + 1 :])
    world, n = prod(mesh.values()), mesh[axis]
    found = []
    for rank in range(world):
        mine = rank // below % n
        first = rank - mine * below
        found.append((mine, tuple(first + k * below for k in range(n))))
    return found


class ExpertRouter(NamedTuple):
    """``imbalance`` spreads the experts' popularity: each is weighed e**(imbalance * g) with g from
    a normal distribution, the same for all ranks; a rank's tokens are dealt out by weight.
    ``capacity_factor`` cuts every expert's rows to that many even shares (rounded up); ``pad``
    fills them up to it.
    """

    experts: int
    tokens: int
    top_k: int
    imbalance: float
    seed: int
    capacity_factor: float | None = None
    pad: bool = False


def routed_rows(router: ExpertRouter, world_size: int, ranks: int) -> list[tuple[int, ...]]:
    """``sends[r][d]``: rows that rank r sends to coordinate d, whose experts are d * experts/ranks
    and the following.
    """
    experts, tokens, top_k, imbalance, seed, capacity_factor, pad = router
    draw = Random(seed)
    weights = [2.718281828459045 ** (imbalance * draw.gauss(0.0, 1.0)) for _ in range(experts)]
    capacity = None if capacity_factor is None else ceil(capacity_factor * tokens * top_k / experts)
    rows = apportioned(tokens * top_k, weights, tokens)
    if capacity is not None:
        rows = [capacity if pad else min(n, capacity) for n in rows]
    each = experts // ranks
    by_rank = tuple(sum(rows[d * each : (d + 1) * each]) for d in range(ranks))
    if imbalance == 0 or pad:
        return [by_rank] * world_size
    return [
        _with_jitter(by_rank, Random(f"{seed}/{rank}"), imbalance) for rank in range(world_size)
    ]


def apportioned(total: int, weights: list[float], most: int) -> list[int]:
    """``total`` in whole parts of at most ``most`` (no token visits an expert twice), near to the
    weights, adding up exactly.
    """
    full: set[int] = set()
    while True:
        left, open_ = total - most * len(full), [k for k in range(len(weights)) if k not in full]
        sums = list(accumulate(weights[k] for k in open_))
        marks = [0, *(round(left * s / sums[-1]) for s in sums)] if open_ else [0]
        parts = {k: b - a for k, (a, b) in zip(open_, pairwise(marks), strict=True)}
        over = {k for k, part in parts.items() if part > most}
        if not over:
            return [most if k in full else parts[k] for k in range(len(weights))]
        full |= over


def _with_jitter(rows: tuple[int, ...], draw: Random, imbalance: float) -> tuple[int, ...]:
    """A rank's own batch differs from the average a little: part of its rows move to the next
    destination.
    """
    found = list(rows)
    for d in range(len(found)):
        moved = int(found[d] * min(imbalance, 1.0) * draw.random() / 4)
        found[d] -= moved
        found[(d + 1) % len(found)] += moved
    return tuple(found)
