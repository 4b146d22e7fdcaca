"""Membership that changes at run time: a quorum for every step, groups made anew when it changes,
weights sent to who joins.

Source: torchft 0.1, `torchft/manager.py` (start_quorum: the process group is configured anew when
the quorum's id changes; a replica that is behind gets the state of one that is not; allreduce: one
that has just joined gives zeros, the sum is divided by the others; should_commit: fewer than
`min_replica_size` participants discard the step) and `torchft/checkpointing/pg_transport.py`
(PGTransport: the length of the pickled state, the state, then each tensor, by messages).
"""

from __future__ import annotations

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
    Refusal,
    block,
    compute,
    step,
    wait,
)
from distsim.scenario.strategies.field_types import (
    CostOrEntriesField,
    IntByRank,
    PositiveInt,
    integer_at_least,
)
from distsim.scenario.strategies.layers import LayeredModelStrategy
from distsim.scenario.strategies.rank_lists import RANK_LIST_SCHEMA, refuse_ranks_outside_world


def _parse_quorums(value: object, info: ValidationInfo) -> dict[int, tuple[int, ...]]:
    """`{0: [0, 1, 2], 3: [0, 2]}`: who takes part from an iteration on."""
    if not isinstance(value, dict) or 0 not in value:
        raise ValueError(
            f"expected the members from iteration 0 on, as {{0: [0, 1, 2], 3: [0, 2]}}, found {value_text(value)}"
        )
    found = {}
    for start, members in sorted(value.items()):
        if not isinstance(members, list | tuple) or not members:
            raise ValueError(
                f"expected the ranks of the quorum from iteration {start} on, found {value_text(members)}"
            )
        found[integer_at_least(0, "an iteration")(start, info)] = tuple(
            sorted({integer_at_least(0, "a rank")(rank, info) for rank in members})
        )
    return found


_QUORUMS_SCHEMA = {"type": "object", "minProperties": 1, "additionalProperties": RANK_LIST_SCHEMA}
Quorums = Annotated[
    dict[int, tuple[int, ...]], PlainValidator(_parse_quorums), WithJsonSchema(_QUORUMS_SCHEMA)
]


class FaultTolerant(LayeredModelStrategy):
    """Replicas that come and go; each has the whole model."""

    name: ClassVar[str] = "fault_tolerant"
    about: ClassVar[str] = (
        "Data parallel replicas whose number changes (torchft): a group for each quorum, weights to those who join."
    )

    #: Who takes part, from an iteration on; every rank is a replica.
    quorums: Quorums
    min_replicas: PositiveInt = 1
    #: The quorum is found beside the forward pass: who joins gives zeros in its first step.
    async_quorum: StrictBool = True
    #: What the lighthouse takes to tell a quorum, and a step's vote whether to commit.
    quorum: CostOrEntriesField = Field(default_factory=lambda: {"time": "0 ns"})
    commit: CostOrEntriesField = Field(default_factory=lambda: {"time": "0 ns"})
    optimizer: CostOrEntriesField | None = None
    #: Ranks that go on in the quorum before, from an iteration on: {2: 3}.
    stale: IntByRank = {}

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = [
            r
            for members in self.quorums.values()
            for r in refuse_ranks_outside_world(context, "quorums", members)
        ][:1]
        for start, members in self.quorums.items():
            if len(members) < self.min_replicas:
                found.append(
                    (
                        ("quorums", start),
                        f"{len(members)} replicas from iteration {start} on are fewer than min_replicas "
                        f"{self.min_replicas}: the lighthouse gives no such quorum, and all wait",
                    )
                )
        return found

    def expand(self, context: ExpansionContext) -> Expansion:
        return QuorumWriter(self, context).expansion()


class QuorumWriter(EntryWriter):
    """Entries of every quorum: its group, who heals, and its steps."""

    def __init__(self, fields: FaultTolerant, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype)
        self.f, self.context = fields, context
        layers = fields.model
        self.members = [len(members) for members in fields.quorums.values()]
        self.weights = [
            self.tensor(f"weights_{k}", prod(shape))
            for k, shape in enumerate(s for one in layers for s in one.params)
        ]
        self.grads = [
            self.tensor(f"grad_{k}", layer.numel) for k, layer in enumerate(reversed(layers))
        ]

    def expansion(self) -> Expansion:
        found: list[Entry] = []
        starts = list(self.f.quorums)
        before: tuple[int, ...] = ()
        for k, (start, members) in enumerate(self.f.quorums.items()):
            end = starts[k + 1] if k + 1 < len(starts) else self.context.iterations
            late = [
                rank
                for rank, when in self.f.stale.items()
                if k and when == start and rank in before
            ]
            here = [rank for rank in members if rank not in late]
            joined = [rank for rank in members if rank not in before] if before else []
            found.append(
                block(
                    self.configured(k, members, before, joined),
                    f"iteration == {start} and ({_rank_condition(here)})",
                )
            )
            span = f"{start} <= iteration < {end}"
            found += self.steps(k, here, span, joined if self.f.async_quorum else [], start)
            found += self.steps(k - 1, [int(rank) for rank in late], span, [], start)
            before = members
        return Expansion(found, self.tensors)

    def configured(
        self, k: int, members: tuple[int, ...], before: tuple[int, ...], joined: list[int]
    ) -> list[Entry]:
        """A new group, made by its members alone; then those who joined get the weights, each from
        one that has them.

        Who was in one before leaves it first, as the manager aborts its group when it is configured
        anew. Each quorum has a prefix of the store of its own (`_async_quorum`:
        `torchft/{quorum_id}/{group_rank}`), so that nobody finds addresses of before.
        """
        earlier = list(self.f.quorums.values())[:k]
        last = {
            rank: max((j for j, those in enumerate(earlier) if rank in those), default=-1)
            for rank in members
        }
        made = {"name": self.group_name(k), "ranks": list(members), "store": f"torchft/{k}"}
        found: list[Entry] = [compute("quorum", self.f.quorum)]
        for j in sorted(set(last.values()) - {-1}):
            left = [rank for rank in members if last[rank] == j]
            gone: Entry = {"destroy_process_group": {"group": self.group_name(j)}}
            found.append(
                gone if len(left) == len(members) else {**gone, "ranks": _rank_condition(left)}
            )
        found.append({"new_group": made})
        givers = [rank for rank in members if rank in before]
        for number, rank in enumerate(joined if givers else []):
            giver = givers[number % len(givers)]
            for name in self.weights:
                found.append(step("send", [giver], tensor=name, dst=rank, group=self.group_name(k)))
                found.append(step("recv", [rank], tensor=name, src=giver, group=self.group_name(k)))
        return found

    def steps(
        self, k: int, ranks: list[int], span: str, joined: list[int], start: int
    ) -> list[Entry]:
        """A training step of the ranks that hold this quorum's group."""
        if not ranks:
            return []
        f, layers = self.f, list(reversed(self.f.model))
        body: list[Entry] = [
            compute(f"forward {layer.name}", layer.forward, reads=self.weights) for layer in f.model
        ]
        for number, (layer, grad) in enumerate(zip(layers, self.grads, strict=True)):
            body += self.backward(f"backward {layer.name}", layer.backward, grad, joined, start)
            handle = f"{self.prefix}_{max(k, 0)}_sum_{number}"
            body.append(
                step(
                    "all_reduce",
                    tensor=grad,
                    op="sum",
                    group=self.group_name(k),
                    async_=True,
                    as_=handle,
                )
            )
        body += [wait(f"{self.prefix}_{max(k, 0)}_sum_{number}") for number in range(len(layers))]
        body += self.divided(self.members[max(k, 0)], joined, start)
        body.append(compute("commit", f.commit))
        body.append(
            compute(
                "optimizer", f.optimizer or {"time": "0 ns"}, reads=self.grads, writes=self.weights
            )
        )
        return [block(body, f"{span} and ({_rank_condition(ranks)})")]

    def backward(
        self, name: str, price: CostOrEntries, grad: str, joined: list[int], start: int
    ) -> list[Entry]:
        """Who has just joined gives zeros in its first step."""
        found: list[Entry] = [compute(name, price, writes=[grad])]
        if joined:
            zeros: Entry = {
                "assign": {"tensor": grad, "value": 0},
                "ranks": f"iteration == {start} and ({_rank_condition(joined)})",
            }
            found.append(zeros)
        return found

    def divided(self, members: int, joined: list[int], start: int) -> list[Entry]:
        """Sums as means of those who gave something."""

        def means(count: int) -> list[Entry]:
            return [
                {"assign": {"tensor": grad, "value": f"{grad} * {1 / count!r}"}}
                for grad in self.grads
            ]

        if not joined or len(joined) == members:
            return means(members)
        return [
            block(means(members - len(joined)), f"iteration == {start}"),
            block(means(members), f"iteration > {start}"),
        ]

    def group_name(self, k: int) -> str:
        return f"{self.prefix}_quorum_{k}"


def _rank_condition(ranks: list[int] | tuple[int, ...]) -> str:
    """A condition that these ranks meet."""
    return " or ".join(f"rank == {rank}" for rank in ranks) or "rank < 0"
