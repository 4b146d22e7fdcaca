"""Tokens to experts in two stages: over the network to the rank of the same place on each machine,
and from there inside the machine.

Sources: DeepEP 2.0 (deepseek-ai/DeepEP, commit dd758ca, README: RDMA between machines, NVLink
inside, FP8 dispatch and BF16 combine) and DeepSeek-V3 Technical Report (arXiv:2412.19437), section
3.2.2: a token is sent to a machine once, whatever number of its experts is there, and 3.3.2: what
is dispatched is FP8, with a scale for each 128 elements, what is combined BF16; Rajbhandari et al.,
DeepSpeed-MoE (arXiv:2201.05596), section 5.3, hierarchical all-to-all. The library's own kernels
move both stages at once, which `pieces` comes near to: one piece goes round inside while the next
one crosses the network.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, comb
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from distsim.scenario.strategies.base import (
    ComputeCost,
    Entry,
    ExpansionContext,
    compute,
    step,
    wait,
)
from distsim.scenario.strategies.layers import IntraLayerWriter, scaled_cost

if TYPE_CHECKING:
    from distsim.scenario.strategies.intra_layer.expert_parallel import ExpertParallel

T = TypeVar("T")
#: A rank's coordinate on an axis, and the ranks of its group in order.
AxisPosition = tuple[int, tuple[int, ...]]

#: Elements that share a float32 scale in an FP8 dispatch.
_ELEMENTS_PER_SCALE = 128


def uniform_or_by_rank(numbers: list[T]) -> T | dict[int, T]:
    """One number where all are equal, else a mapping of ranks."""
    return numbers[0] if all(n == numbers[0] for n in numbers) else dict(enumerate(numbers))


def expert_compute(
    name: str, price: ComputeCost, rows: Sequence[int], share: int, **words: list[str]
) -> list[Entry]:
    """Experts' time follows their tokens: ``rows`` of each rank, or of all, where ``price`` is for
    a ``share``.
    """
    ranks_of: dict[int, list[int]] = {}
    for rank, count in enumerate(rows):
        ranks_of.setdefault(count, []).append(rank)
    everybody = len(ranks_of) == 1
    return [
        compute(name, scaled_cost(price, count / share), None if everybody else ranks, **words)
        for count, ranks in sorted(ranks_of.items())
    ]


def hit_probability(experts: int, of_place: int, top_k: int) -> float:
    """How likely it is that one of the ``top_k`` experts of a token is among the ``of_place`` that
    a place has.
    """
    return 1 - comb(experts - of_place, top_k) / comb(experts, top_k)


class ExchangeStage(NamedTuple):
    """One of the two exchanges on the way out: rows of a piece that each rank sends to each place,
    and gets from it.

    On the way back what was got is sent. An even stage has one row of numbers for all ranks.
    """

    sends: list[list[int]]
    gets: list[list[int]]

    def splits(self, way: str) -> list[int] | dict[int, list[int]] | None:
        rows = self.sends if way == "out" else self.gets
        return None if len(rows) == 1 else uniform_or_by_rank(rows)

    def rows(self, way: str, side: str) -> int | dict[int, int]:
        return uniform_or_by_rank(
            [sum(row) for row in (self.sends if (way == "out") == (side == "sent") else self.gets)]
        )


def uneven_stages(
    rows: Sequence[Sequence[int]], pieces: int, local: int, places: Sequence[Sequence[AxisPosition]]
) -> tuple[ExchangeStage, ExchangeStage]:
    """Both stages of an uneven router. ``rows[r][d]``: tokens of rank r for place d of all, machine
    after machine; ``places``: each rank's coordinate and group, between machines and inside."""
    each = [[ceil(n / pieces) for n in row] for row in rows]
    between, inside = places
    across = [[sum(row[d : d + local]) for d in range(0, len(row), local)] for row in each]
    came = [[across[other][machine] for other in group] for machine, group in between]
    first = [machine * local for machine, _ in between]
    onward = [
        [sum(each[other][first[r] + q] for other in between[r][1]) for q in range(local)]
        for r in range(len(each))
    ]
    got = [[onward[other][place] for other in group] for place, group in inside]
    return ExchangeStage(across, came), ExchangeStage(onward, got)


class HierarchicalExpertWriter(IntraLayerWriter):
    """Entries of one layer's experts. ``rows``, ``places``: of an uneven router, as `uneven` takes
    them; empty where it is even.
    """

    def __init__(
        self,
        fields: ExpertParallel,
        context: ExpansionContext,
        rows: Sequence[Sequence[int]] = (),
        places: Mapping[str, list[AxisPosition]] = {},
    ) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype)
        assert fields.between is not None
        self.f, self.axes = fields, (fields.between, fields.axis)
        self.nodes, self.local = (context.size_of(axis) for axis in self.axes)
        both = (
            uneven_stages(rows, fields.pieces, self.local, [places[axis] for axis in self.axes])
            if rows
            else self.even()
        )
        self.stages = dict(zip(("tokens", "forwarded"), both, strict=True))
        #: Tokens that each rank's experts get; one number where the router is even.
        self.taken = [
            sum(rows[r][self.place(places, rank)] for r in self.others(places, rank))
            for rank in range(len(rows))
        ]
        for word in () if fields.pad_to_capacity else ("counts", "theirs"):
            self.tensor(word, fields.experts, "int64")
        for suffix in ("", "_grad") if fields.backward is not None else ("",):
            for word, stage in self.stages.items():
                for way, dtype in (
                    ("out", fields.dispatch_dtype or fields.dtype),
                    ("back", fields.dtype),
                ):
                    scales = (
                        4 * fields.hidden // _ELEMENTS_PER_SCALE
                        if dtype.startswith("float8")
                        else 0
                    )
                    for side in ("sent", "got"):
                        self.room(
                            f"{word}_{way}_{side}{suffix}",
                            [stage.rows(way, side), fields.hidden + scales],
                            dtype,
                        )

    def even(self) -> tuple[ExchangeStage, ExchangeStage]:
        """Both stages where every expert gets as many tokens."""
        fields, everywhere = self.f, self.nodes * self.local
        if fields.once_per_machine:
            across = fields.tokens * hit_probability(
                fields.experts, fields.experts // self.nodes, fields.top_k
            )
            inside = fields.tokens * hit_probability(
                fields.experts, fields.experts // everywhere, fields.top_k
            )
        else:
            across, inside = (
                fields.tokens * fields.top_k / self.nodes,
                fields.tokens * fields.top_k / everywhere,
            )
        first = [[ceil(across / fields.pieces)] * self.nodes]
        second = [[self.nodes * ceil(inside / fields.pieces)] * self.local]
        return ExchangeStage(first, first), ExchangeStage(second, second)

    def place(self, places: Mapping[str, list[AxisPosition]], rank: int) -> int:
        """The number of a rank's experts among all places, machine after machine."""
        machine, place = (places[axis][rank][0] for axis in self.axes)
        return machine * self.local + place

    def others(self, places: Mapping[str, list[AxisPosition]], rank: int) -> list[int]:
        """All ranks whose tokens come to a rank: those of each machine that it exchanges with."""
        between, inside = (places[axis] for axis in self.axes)
        return [other for inner in inside[rank][1] for other in between[inner][1]]

    def room(self, word: str, shape: list[object], dtype: str) -> None:
        name = self.tensor(word, shape, dtype)
        if self.f.pieces > 1:
            self.tensors[name]["copies"] = self.f.pieces

    def name(self, word: str, piece: int) -> str:
        return f"{self.prefix}_{word}" + (f"@{piece}" if piece else "")

    # --- passes ---
    def forward(self, price: ComputeCost) -> list[Entry]:
        axes = list(self.axes)
        counts: Entry = {
            "all_to_all_single": {
                "input": f"{self.prefix}_counts",
                "output": f"{self.prefix}_theirs",
                "group": axes,
            }
        }
        out = self.moved("out", "", self.f.beside)
        told = [] if self.f.pad_to_capacity else [counts]
        return [*told, *out, *self.work("experts", price, ""), *self.moved("back", "", None)]

    def backward(self, price: ComputeCost) -> list[Entry]:
        """The backward pass of a combine is a dispatch, that of a dispatch a combine."""
        return [
            *self.moved("out", "_grad", None),
            *self.work("experts backward", price, "_grad"),
            *self.moved("back", "_grad", None),
        ]

    def work(self, name: str, price: ComputeCost, suffix: str) -> list[Entry]:
        pieces, share = range(self.f.pieces), self.f.tokens * self.f.top_k
        reads = [self.name(f"forwarded_out_got{suffix}", k) for k in pieces]
        writes = [self.name(f"forwarded_back_sent{suffix}", k) for k in pieces]
        return expert_compute(name, price, self.taken or [share], share, reads=reads, writes=writes)

    def moved(self, way: str, suffix: str, beside: ComputeCost | None) -> list[Entry]:
        """All pieces by both stages; what is computed ``beside`` begins when the first stage is
        under way.
        """
        stages = [("tokens", self.axes[0]), ("forwarded", self.axes[1])]
        (first, one), (second, other) = stages if way == "out" else stages[::-1]
        pieces, begin = range(self.f.pieces), "combined" if way == "back" else "dispatched"
        started = "" if way == "back" else f"{first}_{way}_sent{suffix}"
        steps: list[Entry] = []
        if started:
            steps.append(
                compute("router", {"time": "0 ns"}, writes=[self.name(started, k) for k in pieces])
            )
        steps += [self.exchange(first, way, suffix, one, k) for k in pieces]
        steps += [] if beside is None else [compute(f"beside {begin}", beside)]
        for k in pieces:
            steps.append(wait(f"{self.prefix}_{first}@{k}"))
            reads, writes = (
                [self.name(f"{first}_{way}_got{suffix}", k)],
                [self.name(f"{second}_{way}_sent{suffix}", k)],
            )
            steps += [
                compute("permute", {"time": "0 ns"}, reads=reads, writes=writes),
                self.exchange(second, way, suffix, other, k),
            ]
        return [*steps, *(wait(f"{self.prefix}_{second}@{k}") for k in pieces)]

    def exchange(self, word: str, way: str, suffix: str, axis: str, k: int) -> Entry:
        sent, got = (self.name(f"{word}_{way}_{side}{suffix}", k) for side in ("sent", "got"))
        splits = self.stages[word].splits(way)
        return step(
            "all_to_all_single",
            input=sent,
            output=got,
            input_splits=splits,
            group=axis,
            async_=True,
            as_=f"{self.prefix}_{word}@{k}",
        )
