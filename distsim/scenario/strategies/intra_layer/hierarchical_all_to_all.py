"""Expert parallelism in two stages: tokens go between nodes first, then inside the node.

The first exchange is between the ranks of the same place on each node, over the network; the
second one is inside the node. DeepEP's own kernels run both stages at once. `pieces`
approximates this: one piece is exchanged inside the node while the next one crosses the network.

Sources: DeepEP 2.0 (deepseek-ai/DeepEP, commit dd758ca, README: RDMA between nodes, NVLink
inside, FP8 dispatch and BF16 combine) and DeepSeek-V3 Technical Report (arXiv:2412.19437), section
3.2.2: a token is sent to a node once, however many of its experts are there, and 3.3.2: the
dispatch is in FP8, with a scale for each 128 elements, the combine in BF16; Rajbhandari et al.,
DeepSpeed-MoE (arXiv:2201.05596), section 5.3, hierarchical all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, comb
from typing import NamedTuple, TypeVar

from distsim.scenario.strategies.base import (
    ZERO_COST,
    ComputeCost,
    Entry,
    ExpansionContext,
    compute,
    step,
    wait,
)
from distsim.scenario.strategies.intra_layer.expert_fields import ExpertParallelFields
from distsim.scenario.strategies.intra_layer.expert_router import AxisPosition
from distsim.scenario.strategies.layers import IntraLayerWriter, scaled_cost

T = TypeVar("T")

#: Elements that share a float32 scale in an FP8 dispatch.
_ELEMENTS_PER_SCALE = 128
_SCALE_BYTES = 4


def uniform_or_by_rank(numbers: Sequence[T]) -> T | dict[int, T]:
    """One number if all are equal, else a mapping of ranks."""
    return numbers[0] if all(n == numbers[0] for n in numbers) else dict(enumerate(numbers))


def expert_compute(
    name: str, cost: ComputeCost, rows: Sequence[int], share: int, **fields: list[str]
) -> list[Entry]:
    """Computations of the experts, whose time is proportional to their tokens.

    ``rows`` are the tokens of each rank, or one number for all ranks; ``cost`` is for ``share``
    tokens. Ranks with equally many tokens share an entry.
    """
    ranks_by_count: dict[int, list[int]] = {}
    for rank, count in enumerate(rows):
        ranks_by_count.setdefault(count, []).append(rank)
    is_uniform = len(ranks_by_count) == 1
    return [
        compute(name, scaled_cost(cost, count / share), None if is_uniform else ranks, **fields)
        for count, ranks in sorted(ranks_by_count.items())
    ]


def hit_probability(experts: int, experts_of_place: int, top_k: int) -> float:
    """The probability that a place has at least one of a token's ``top_k`` experts."""
    return 1 - comb(experts - experts_of_place, top_k) / comb(experts, top_k)


class ExchangeStage(NamedTuple):
    """One of the two exchanges of a dispatch, for one piece.

    ``sends[r][d]`` and ``receives[r][d]`` are the rows that rank r sends to place d and receives
    from there. A combine sends what the dispatch received. An even stage has one row of numbers for
    all ranks.
    """

    sends: list[list[int]]
    receives: list[list[int]]

    def splits(self, direction: str) -> list[int] | dict[int, list[int]] | None:
        """input_splits on the way `out` (dispatch) or `back` (combine); None if all are equal."""
        rows = self.sends if direction == "out" else self.receives
        return None if len(rows) == 1 else uniform_or_by_rank(rows)

    def row_count(self, direction: str, side: str) -> int | dict[int, int]:
        """The rows of a message that is `sent`, or `got`, on the way `out` or `back`."""
        is_dispatch = direction == "out"
        rows = self.sends if is_dispatch == (side == "sent") else self.receives
        return uniform_or_by_rank([sum(row) for row in rows])


class _Stages(NamedTuple):
    """Both stages of a dispatch."""

    between: ExchangeStage
    inside: ExchangeStage


class UnevenRouting(NamedTuple):
    """How an imbalanced router distributes tokens.

    ``rows[r][d]`` are tokens of rank r for place d, where places are numbered node after
    node. ``between`` and ``inside`` are the positions of all ranks on the two axes.
    """

    rows: Sequence[Sequence[int]]
    between: Sequence[AxisPosition]
    inside: Sequence[AxisPosition]

    @property
    def local_size(self) -> int:
        """Ranks of a node."""
        return len(self.inside[0].group)

    def place_of(self, rank: int) -> int:
        """The number of a rank among all places."""
        node = self.between[rank].coordinate
        return node * self.local_size + self.inside[rank].coordinate

    def sources_of(self, rank: int) -> list[int]:
        """All ranks whose tokens reach a rank, through each rank of its node."""
        node = self.inside[rank].group
        return [source for local in node for source in self.between[local].group]

    def tokens_of(self, rank: int) -> int:
        """All tokens that a rank's experts receive."""
        place = self.place_of(rank)
        return sum(self.rows[source][place] for source in self.sources_of(rank))

    def stages(self, pieces: int) -> _Stages:
        """The rows of both exchanges for one of ``pieces`` pieces."""
        local = self.local_size
        ranks = range(len(self.rows))
        piece = [[ceil(n / pieces) for n in row] for row in self.rows]

        to_machines = [_sums_of_chunks(row, local) for row in piece]
        from_machines = [
            [to_machines[source][position.coordinate] for source in position.group]
            for position in self.between
        ]

        # Each rank forwards what it received for all ranks of its node.
        forwarded = [self._forwarded_by(rank, piece) for rank in ranks]
        arriving = [
            [forwarded[source][position.coordinate] for source in position.group]
            for position in self.inside
        ]
        return _Stages(
            ExchangeStage(to_machines, from_machines), ExchangeStage(forwarded, arriving)
        )

    def _forwarded_by(self, rank: int, piece: Sequence[Sequence[int]]) -> list[int]:
        """Rows that a rank sends to each rank of its node."""
        node, sources = self.between[rank]
        first_place = node * self.local_size
        return [
            sum(piece[source][first_place + local] for source in sources)
            for local in range(self.local_size)
        ]


def _sums_of_chunks(numbers: Sequence[int], size: int) -> list[int]:
    return [sum(numbers[start : start + size]) for start in range(0, len(numbers), size)]


class HierarchicalExpertWriter(IntraLayerWriter):
    """Entries of one layer's experts; without ``routing`` the router is even.

    Tensors are named by stage (`tokens` between nodes, `forwarded` inside), direction (`out`,
    `back`) and side (`sent`, `got`).
    """

    def __init__(
        self,
        fields: ExpertParallelFields,
        context: ExpansionContext,
        routing: UnevenRouting | None = None,
    ) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype)
        assert fields.between is not None
        self.fields = fields
        self.between_axis = fields.between
        self.inside_axis = fields.axis
        self.nodes = context.size_of(self.between_axis)
        self.local_size = context.size_of(self.inside_axis)
        #: Tokens that each rank's experts get; one number if the router is even.
        self.expert_tokens = [fields.tokens * fields.top_k]
        stages = self.even_stages()
        if routing is not None:
            stages = routing.stages(fields.pieces)
            self.expert_tokens = [routing.tokens_of(rank) for rank in range(len(routing.rows))]
        self.stages = {"tokens": stages.between, "forwarded": stages.inside}
        self.declare_tensors()

    def even_stages(self) -> _Stages:
        """Both stages if every expert gets equally many tokens."""
        fields = self.fields
        places = self.nodes * self.local_size
        if fields.once_per_machine:
            per_node = fields.experts // self.nodes
            per_place = fields.experts // places
            to_node = fields.tokens * hit_probability(fields.experts, per_node, fields.top_k)
            to_place = fields.tokens * hit_probability(fields.experts, per_place, fields.top_k)
        else:
            to_node = fields.tokens * fields.top_k / self.nodes
            to_place = fields.tokens * fields.top_k / places
        between = [[ceil(to_node / fields.pieces)] * self.nodes]
        inside = [[self.nodes * ceil(to_place / fields.pieces)] * self.local_size]
        return _Stages(ExchangeStage(between, between), ExchangeStage(inside, inside))

    # --- tensors ---
    def declare_tensors(self) -> None:
        fields = self.fields
        if not fields.pad_to_capacity:
            self.tensor("counts", fields.experts, "int64")
            self.tensor("theirs", fields.experts, "int64")
        dispatch_dtype = fields.dispatch_dtype or fields.dtype
        suffixes = ("", "_grad") if fields.backward is not None else ("",)
        for suffix in suffixes:
            for word in self.stages:
                self.declare_messages(word, "out", dispatch_dtype, suffix)
                self.declare_messages(word, "back", fields.dtype, suffix)

    def declare_messages(self, stage: str, direction: str, dtype: str, suffix: str) -> None:
        """The two messages of a stage in one direction; FP8 rows also hold their scales."""
        hidden = self.fields.hidden
        scale_bytes = 0
        if dtype.startswith("float8"):
            scale_bytes = _SCALE_BYTES * hidden // _ELEMENTS_PER_SCALE
        for side in ("sent", "got"):
            rows = self.stages[stage].row_count(direction, side)
            name = self.tensor(
                f"{stage}_{direction}_{side}{suffix}", [rows, hidden + scale_bytes], dtype
            )
            if self.fields.pieces > 1:
                self.tensors[name]["copies"] = self.fields.pieces

    def name(self, word: str, piece: int) -> str:
        """The name of a piece's tensor."""
        return f"{self.prefix}_{word}" + (f"@{piece}" if piece else "")

    # --- passes ---
    def forward(self, cost: ComputeCost) -> list[Entry]:
        counts = step(
            "all_to_all_single",
            input=f"{self.prefix}_counts",
            output=f"{self.prefix}_theirs",
            group=(self.between_axis, self.inside_axis),
        )
        return [
            *([] if self.fields.pad_to_capacity else [counts]),
            *self.dispatch("", self.fields.beside),
            *self.experts("experts", cost, ""),
            *self.combine(""),
        ]

    def backward(self, cost: ComputeCost) -> list[Entry]:
        """The backward pass of a combine is a dispatch, that of a dispatch a combine."""
        return [
            *self.dispatch("_grad", None),
            *self.experts("experts backward", cost, "_grad"),
            *self.combine("_grad"),
        ]

    def experts(self, name: str, cost: ComputeCost, suffix: str) -> list[Entry]:
        pieces = range(self.fields.pieces)
        return expert_compute(
            name,
            cost,
            self.expert_tokens,
            self.fields.tokens * self.fields.top_k,
            reads=[self.name(f"forwarded_out_got{suffix}", k) for k in pieces],
            writes=[self.name(f"forwarded_back_sent{suffix}", k) for k in pieces],
        )

    def dispatch(self, suffix: str, overlapped: ComputeCost | None) -> list[Entry]:
        """Tokens to their experts; ``overlapped`` is computed while the first stage is running."""
        pieces = range(self.fields.pieces)
        sent = [self.name(f"tokens_out_sent{suffix}", k) for k in pieces]
        steps: list[Entry] = [compute("router", ZERO_COST, writes=sent)]
        steps += [self.start_exchange("tokens", "out", suffix, k) for k in pieces]
        if overlapped is not None:
            steps.append(compute("overlapped with dispatch", overlapped))
        return steps + self.second_stage("tokens", "forwarded", "out", suffix)

    def combine(self, suffix: str) -> list[Entry]:
        """Results back to the ranks of their tokens: the stages in reverse order."""
        steps = [
            self.start_exchange("forwarded", "back", suffix, k) for k in range(self.fields.pieces)
        ]
        return steps + self.second_stage("forwarded", "tokens", "back", suffix)

    def second_stage(self, first: str, second: str, direction: str, suffix: str) -> list[Entry]:
        """Each piece goes into the second stage when it has passed the first one."""
        pieces = range(self.fields.pieces)
        steps: list[Entry] = []
        for k in pieces:
            steps.append(wait(f"{self.prefix}_{first}@{k}"))
            reads = [self.name(f"{first}_{direction}_got{suffix}", k)]
            writes = [self.name(f"{second}_{direction}_sent{suffix}", k)]
            steps.append(compute("permute", ZERO_COST, reads=reads, writes=writes))
            steps.append(self.start_exchange(second, direction, suffix, k))
        return [*steps, *(wait(f"{self.prefix}_{second}@{k}") for k in pieces)]

    def start_exchange(self, stage: str, direction: str, suffix: str, piece: int) -> Entry:
        return step(
            "all_to_all_single",
            input=self.name(f"{stage}_{direction}_sent{suffix}", piece),
            output=self.name(f"{stage}_{direction}_got{suffix}", piece),
            input_splits=self.stages[stage].splits(direction),
            group=self.between_axis if stage == "tokens" else self.inside_axis,
            async_=True,
            as_=f"{self.prefix}_{stage}@{piece}",
        )
