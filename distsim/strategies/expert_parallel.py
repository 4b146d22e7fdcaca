"""Expert parallelism: tokens travel to the ranks of their experts and back.

Sources: Lepikhin et al., GShard (arXiv 2006.16668), capacity and its padding; Fedus et al., Switch Transformer (arXiv 2101.03961),
section 2.2, capacity factor. The calls are those of all-to-all dispatch as torchtitan and Megatron write it: counts first, then tokens
there, then results back; the backward pass makes the last two again, the other way round.
"""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import StrictBool

from distsim.strategies.base import Context, Entry, Expansion, Refusal, compute, step
from distsim.strategies.fields import Amount, Axis, Count, Dtype, Natural
from distsim.strategies.passes import Passes
from distsim.strategies.prices import scaled
from distsim.strategies.routing import coordinates, routed


class ExpertParallel(Passes):
    """Every rank has some of the experts, and tokens of its own. The price of a pass is that of an even share of the tokens; a rank with
    more takes longer."""

    name: ClassVar[str] = "expert_parallel"
    about: ClassVar[str] = (
        "Mixture of experts: counts by all_to_all_single, tokens out by another, results back by a third; uneven where the router is."
    )

    axis: Axis = "ep"
    experts: Count
    #: Tokens of a rank, and experts that each goes to.
    tokens: Count
    top_k: Count = 1
    hidden: Count
    dtype: Dtype = "bfloat16"
    #: 0: every expert gets as many tokens. Above: how unequal the router is, drawn with `seed`; 1 is strongly so.
    imbalance: Amount = 0.0
    seed: Natural = 0
    #: An expert takes so many times its even share from a rank at most; the rest of the tokens is dropped.
    capacity_factor: Amount | None = None
    #: Every rank sends each expert its full capacity, padded: all messages are equal, and no counts travel.
    pad_to_capacity: StrictBool = False

    def refuse(self, context: Context) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None or self.axis not in context.mesh:
            return [(("axis",), unknown or f"{self.axis} is no axis of the mesh")]
        found: list[Refusal] = []
        n = context.size_of(self.axis)
        if self.experts % n:
            found.append((("experts",), f"{self.experts} experts do not divide among the {n} ranks of {self.axis}"))
        if self.top_k > self.experts:
            found.append((("top_k",), f"a token goes to {self.top_k} experts, but there are {self.experts}"))
        if self.capacity_factor == 0:
            found.append((("capacity_factor",), "with capacity 0 every token is dropped: expected a factor above 0, as 1.25"))
        if self.pad_to_capacity and self.capacity_factor is None:
            found.append((("pad_to_capacity",), "there is nothing to pad to: give `capacity_factor`, as 1.25"))
        return found

    def expand(self, context: Context) -> Expansion:
        writer = ExpertWriter(self, context)
        return Expansion([*self.there(writer), *self.back(writer)], writer.tensors)


class ExpertWriter:
    """Entries of one layer's experts; other strategies put them in place of a compute step.

    ``sends[r][d]``: rows that global rank r sends to coordinate d of its group; ``takes[r]``: rows that it gets.
    """

    def __init__(self, fields: ExpertParallel, context: Context) -> None:
        self.f, self.p, self.n = fields, context.prefix(fields.name), context.size_of(fields.axis)
        self.members = coordinates(context.mesh, fields.axis)
        self.sends = routed(
            context.world_size, self.n, fields.experts, fields.tokens, fields.top_k, fields.imbalance, fields.seed,
            fields.capacity_factor, fields.pad_to_capacity,
        )  # fmt: skip
        self.takes = [sum(self.sends[other][mine] for other in group) for mine, group in self.members]
        self.even = all(len({*row}) == 1 and row == self.sends[0] for row in self.sends)
        gone, come = self.by_rank([sum(row) for row in self.sends]), self.by_rank(self.takes)
        shapes = {"tokens": gone, "routed": come, "results": come, "combined": gone}
        shapes |= {f"{word}_grad": rows for word, rows in shapes.items()} if fields.backward is not None else {}
        self.tensors: dict[str, Any] = {
            f"{self.p}_{word}": {"shape": [rows, fields.hidden], "dtype": fields.dtype} for word, rows in shapes.items()
        }
        if not fields.pad_to_capacity:
            self.tensors |= {f"{self.p}_{word}": {"shape": [fields.experts], "dtype": "int64"} for word in ("counts", "theirs")}

    def by_rank(self, numbers: list[Any]) -> Any:
        """One number where all are equal, else a mapping of ranks."""
        return numbers[0] if all(n == numbers[0] for n in numbers) else dict(enumerate(numbers))

    def moved(self, source: str, target: str, back: bool) -> Entry:
        """Tokens to their experts, or results back: what goes out one way comes in the other."""
        splits: Any = None
        if not self.even:
            splits = self.by_rank(self.taken() if back else [list(row) for row in self.sends])
        fields = {"input": f"{self.p}_{source}", "output": f"{self.p}_{target}", "input_splits": splits, "group": self.f.axis}
        return step("all_to_all_single", **fields)

    def taken(self) -> list[list[int]]:
        """Rows that each rank got from each coordinate of its group."""
        return [[self.sends[other][mine] for other in group] for mine, group in self.members]

    def forward(self, price: Any) -> list[Entry]:
        found: list[Entry] = [compute("router", {"time": "0 ns"}, writes=[f"{self.p}_tokens"])]
        if not self.f.pad_to_capacity:
            fields = {"input": f"{self.p}_counts", "output": f"{self.p}_theirs", "group": self.f.axis}
            found.append(step("all_to_all_single", **fields))
        return [
            *found,
            self.moved("tokens", "routed", back=False),
            *self.work("experts", price, "routed", "results"),
            self.moved("results", "combined", back=True),
        ]

    def backward(self, price: Any) -> list[Entry]:
        return [
            compute("combine backward", {"time": "0 ns"}, writes=[f"{self.p}_combined_grad"]),
            self.moved("combined_grad", "results_grad", back=False),
            *self.work("experts backward", price, "results_grad", "routed_grad"),
            self.moved("routed_grad", "tokens_grad", back=True),
        ]

    def work(self, name: str, price: Any, reads: str, writes: str) -> list[Entry]:
        """The experts' time follows their tokens; a rank without tokens computes nothing."""
        share = self.f.tokens * self.f.top_k
        words = {"reads": [f"{self.p}_{reads}"], "writes": [f"{self.p}_{writes}"]}
        ranks_of: dict[int, list[int]] = {}
        for rank, rows in enumerate(self.takes):
            ranks_of.setdefault(rows, []).append(rank)
        everybody = len(ranks_of) == 1
        return [
            compute(name, scaled(price, rows / share), None if everybody else ranks, **words)
            for rows, ranks in sorted(ranks_of.items())
        ]
