"""The strategy `expert_parallel`: tokens travel to the ranks of their experts and back.

The calls are those of all-to-all dispatch as torchtitan and Megatron write it: the counts first,
then the tokens out, then the results back. The backward pass makes the last two again, in the other
direction. How many tokens go where is computed in
`distsim.scenario.strategies.intra_layer.expert_router`.

Sources: Lepikhin et al., GShard (arXiv 2006.16668); Fedus et al., Switch Transformer
(arXiv 2101.03961).
"""

from __future__ import annotations

from distsim.scenario.strategies.base import (
    ZERO_COST,
    ComputeCost,
    Entry,
    ExpansionContext,
    compute,
)
from distsim.scenario.strategies.intra_layer.expert_fields import ExpertParallelFields
from distsim.scenario.strategies.intra_layer.expert_router import (
    AxisPosition,
    axis_positions,
    routed_rows,
)
from distsim.scenario.strategies.intra_layer.hierarchical_all_to_all import (
    HierarchicalExpertWriter,
    UnevenRouting,
    expert_compute,
    uniform_or_by_rank,
)
from distsim.scenario.strategies.layers import IntraLayerWriter


class ExpertParallel(ExpertParallelFields):
    """Every rank has some of the experts, and its own tokens.

    The cost of a pass is that of an even share of the tokens; a rank with more tokens takes longer.
    """

    def writer(self, context: ExpansionContext) -> ExpertParallelWriter | HierarchicalExpertWriter:
        if self.between is None:
            return ExpertParallelWriter(self, context)
        is_even = self.imbalance == 0 and self.capacity_factor is None
        if is_even:
            return HierarchicalExpertWriter(self, context)
        ranks = context.size_of(self.between) * context.size_of(self.axis)
        routing = UnevenRouting(
            routed_rows(self.router, context.world_size, ranks),
            between=axis_positions(context.mesh, self.between),
            inside=axis_positions(context.mesh, self.axis),
        )
        return HierarchicalExpertWriter(self, context, routing)


class ExpertParallelWriter(IntraLayerWriter):
    """Entries of one layer's experts.

    ``sends[r][d]``: rows that global rank r sends to coordinate d of its group; ``receives[r][d]``:
    rows that it receives from there.
    """

    def __init__(self, fields: ExpertParallelFields, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.axis)
        self.fields = fields
        group_size = context.size_of(fields.axis)
        self.sends = [
            list(row) for row in routed_rows(fields.router, context.world_size, group_size)
        ]
        positions = axis_positions(context.mesh, fields.axis)
        self.receives = [self.received_by(position) for position in positions]
        self.is_even = all(_is_uniform(row) and row == self.sends[0] for row in self.sends)
        self.declare_tensors()

    def received_by(self, position: AxisPosition) -> list[int]:
        return [self.sends[other][position.coordinate] for other in position.group]

    def declare_tensors(self) -> None:
        sent = uniform_or_by_rank([sum(row) for row in self.sends])
        received = uniform_or_by_rank([sum(row) for row in self.receives])
        suffixes = ("", "_grad") if self.fields.backward is not None else ("",)
        for suffix in suffixes:
            for word, rows in (
                ("tokens", sent),
                ("routed", received),
                ("results", received),
                ("combined", sent),
            ):
                self.tensor(word + suffix, [rows, self.fields.hidden])
        if not self.fields.pad_to_capacity:
            self.tensor("counts", self.fields.experts, "int64")
            self.tensor("theirs", self.fields.experts, "int64")

    def dispatch(self, source: str, target: str) -> Entry:
        """Tokens, or gradients of results, to the experts."""
        return self.exchange(source, target, self.sends)

    def combine(self, source: str, target: str) -> Entry:
        """Results, or gradients of tokens, back: each rank sends what it received before."""
        return self.exchange(source, target, self.receives)

    def exchange(self, source: str, target: str, rows: list[list[int]]) -> Entry:
        splits: list[int] | dict[int, list[int]] | None = None
        if not self.is_even:
            splits = uniform_or_by_rank(rows)
        return self.call(
            "all_to_all_single",
            input=f"{self.prefix}_{source}",
            output=f"{self.prefix}_{target}",
            input_splits=splits,
        )

    def forward(self, cost: ComputeCost) -> list[Entry]:
        steps: list[Entry] = [compute("router", ZERO_COST, writes=[f"{self.prefix}_tokens"])]
        if not self.fields.pad_to_capacity:
            steps.append(
                self.call(
                    "all_to_all_single",
                    input=f"{self.prefix}_counts",
                    output=f"{self.prefix}_theirs",
                )
            )
        return [
            *steps,
            self.dispatch("tokens", "routed"),
            *self.experts("experts", cost, "routed", "results"),
            self.combine("results", "combined"),
        ]

    def backward(self, cost: ComputeCost) -> list[Entry]:
        return [
            compute("combine backward", ZERO_COST, writes=[f"{self.prefix}_combined_grad"]),
            self.dispatch("combined_grad", "results_grad"),
            *self.experts("experts backward", cost, "results_grad", "routed_grad"),
            self.combine("routed_grad", "tokens_grad"),
        ]

    def experts(self, name: str, cost: ComputeCost, source: str, target: str) -> list[Entry]:
        """The experts' computation, whose time is proportional to their tokens."""
        return expert_compute(
            name,
            cost,
            [sum(rows) for rows in self.receives],
            self.fields.tokens * self.fields.top_k,
            reads=[f"{self.prefix}_{source}"],
            writes=[f"{self.prefix}_{target}"],
        )


def _is_uniform(numbers: list[int]) -> bool:
    return len({*numbers}) == 1
