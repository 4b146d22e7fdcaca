"""The strategy `fault_tolerant` (torchft): replicas whose number changes at run time.

Every step has a quorum. When the quorum changes, its members create a new group, and ranks that
join are sent the weights.

Sources, torchft 0.1:

- `torchft/manager.py`. start_quorum: a new quorum id configures the process group again, and an
  up-to-date replica sends its state to replicas that are behind. allreduce: a replica that has just
  joined contributes zeros, and the sum is divided by the number of the other replicas.
  should_commit: fewer than `min_replica_size` participants discard the step.
- `torchft/checkpointing/pg_transport.py` (PGTransport): messages carry the length of the pickled
  state, the state, then each tensor.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field, PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.common.message_text import value_text
from distsim.scenario.strategies.base import (
    ZERO_COST,
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
    """`{0: [0, 1, 2], 3: [0, 2]}`: the members from an iteration on."""
    if not isinstance(value, dict) or 0 not in value:
        raise ValueError(
            "expected the members of the quorum from iteration 0 on, such as "
            f"{{0: [0, 1, 2], 3: [0, 2]}}, found {value_text(value)}"
        )
    parse_iteration = integer_at_least(0, "an iteration")
    parse_rank = integer_at_least(0, "a rank")
    quorums = {}
    for start, members in sorted(value.items()):
        if not isinstance(members, list | tuple) or not members:
            raise ValueError(
                f"expected the ranks of the quorum from iteration {start} on, "
                f"found {value_text(members)}"
            )
        iteration = parse_iteration(start, info)
        quorums[iteration] = tuple(sorted({parse_rank(rank, info) for rank in members}))
    return quorums


_QUORUMS_SCHEMA = {"type": "object", "minProperties": 1, "additionalProperties": RANK_LIST_SCHEMA}
Quorums = Annotated[
    dict[int, tuple[int, ...]], PlainValidator(_parse_quorums), WithJsonSchema(_QUORUMS_SCHEMA)
]


class FaultTolerant(LayeredModelStrategy):
    """Replicas that come and go; each has the whole model."""

    name: ClassVar[str] = "fault_tolerant"
    about: ClassVar[str] = (
        "Fault-tolerant data parallelism as in torchft. The number of replicas changes: "
        "each quorum has a new group, and ranks that join receive the weights."
    )

    quorums: Quorums = Field(
        description="Ranks in the quorum from an iteration on: `{ITERATION: RANKS}`.",
        examples=[{0: [0, 1, 2, 3], 3: [0, 1, 3]}],
    )
    min_replicas: PositiveInt = Field(
        default=1, description="Minimum size of a quorum.", examples=[2]
    )
    async_quorum: StrictBool = Field(
        default=True,
        description=(
            "Compute the quorum during the forward pass. A rank that joins contributes zeros "
            "in its first step."
        ),
        examples=[False],
    )
    quorum: CostOrEntriesField = Field(
        default_factory=lambda: {"time": "0 ns"},
        description="Time until the lighthouse reports the quorum.",
        examples=["10 ms"],
    )
    commit: CostOrEntriesField = Field(
        default_factory=lambda: {"time": "0 ns"},
        description="Time of the vote whether to commit a step.",
        examples=["1 ms"],
    )
    optimizer: CostOrEntriesField | None = Field(
        default=None,
        description=(
            "Cost of the optimizer step: a time, `{flops, bytes}`, or entries that replace it."
        ),
        examples=["1 ms"],
    )
    stale: IntByRank = Field(
        default={},
        description=(
            "Ranks that stay in the old quorum from an iteration on: `{RANK: ITERATION}`."
        ),
        examples=[{2: 3}],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        all_members = [rank for members in self.quorums.values() for rank in members]
        refusals = refuse_ranks_outside_world(context, "quorums", all_members)
        for start, members in self.quorums.items():
            if len(members) < self.min_replicas:
                text = (
                    f"{len(members)} replicas from iteration {start} on are fewer than "
                    f"min_replicas {self.min_replicas}: the lighthouse would return no quorum, "
                    "and all ranks would wait"
                )
                refusals.append((("quorums", start), text))
        return refusals

    def expand(self, context: ExpansionContext) -> Expansion:
        return QuorumWriter(self, context).expansion()


class _Quorum(NamedTuple):
    """One quorum of the run.

    ``members`` have its group; those in ``present`` train with it from iteration ``start`` on,
    while ``late`` ranks still use the group before. ``joined`` were in no quorum just before.
    """

    number: int
    start: int
    end: int
    members: tuple[int, ...]
    present: list[int]
    late: list[int]
    joined: list[int]

    @property
    def span(self) -> str:
        return f"{self.start} <= iteration < {self.end}"


class QuorumWriter(EntryWriter):
    """Entries of every quorum: its group, the healing of new ranks, and its training steps."""

    def __init__(self, fields: FaultTolerant, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype)
        self.fields = fields
        self.context = context
        self.quorums = list(self._quorums())
        shapes = [shape for layer in fields.model for shape in layer.params]
        self.weights = [self.tensor(f"weights_{k}", prod(s)) for k, s in enumerate(shapes)]
        self.layers_backward = list(reversed(fields.model))
        self.grads = [
            self.tensor(f"grad_{k}", layer.numel) for k, layer in enumerate(self.layers_backward)
        ]

    def _quorums(self) -> Iterator[_Quorum]:
        starts = list(self.fields.quorums)
        ends = [*starts[1:], self.context.iterations]
        before: tuple[int, ...] = ()
        for k, (start, members) in enumerate(self.fields.quorums.items()):
            late = [
                int(rank)
                for rank, iteration in self.fields.stale.items()
                if k and iteration == start and rank in before
            ]
            present = [rank for rank in members if rank not in late]
            joined = [rank for rank in members if rank not in before] if before else []
            yield _Quorum(k, start, ends[k], members, present, late, joined)
            before = members

    def expansion(self) -> Expansion:
        steps: list[Entry] = []
        before: tuple[int, ...] = ()
        for quorum in self.quorums:
            condition = f"iteration == {quorum.start} and ({_rank_condition(quorum.present)})"
            steps.append(block(self.configuration(quorum, before), condition))
            # Without async_quorum a rank heals before its first step, so it contributes gradients.
            healing = quorum.joined if self.fields.async_quorum else []
            steps += self.training_step(quorum.number, quorum.present, quorum, healing)
            steps += self.training_step(quorum.number - 1, quorum.late, quorum, [])
            before = quorum.members
        return Expansion(steps, self.tensors)

    # --- the group of a quorum ---
    def configuration(self, quorum: _Quorum, before: tuple[int, ...]) -> list[Entry]:
        """A new group, created by its members only; then ranks that joined get the weights.

        A rank that was in a group leaves it first, as the manager aborts its group when it is
        configured again. Each quorum has a prefix of the store of its own (`_async_quorum`:
        `torchft/{quorum_id}/{group_rank}`), so that no rank finds addresses of an earlier one.
        """
        steps: list[Entry] = [compute("quorum", self.fields.quorum)]
        steps += self.destroy_earlier_groups(quorum)
        group: Entry = {
            "name": self.group_name(quorum.number),
            "ranks": list(quorum.members),
            "store": f"torchft/{quorum.number}",
        }
        steps.append({"new_group": group})
        return [*steps, *self.heal(quorum, before)]

    def destroy_earlier_groups(self, quorum: _Quorum) -> list[Entry]:
        """Each member destroys the group of its latest earlier quorum."""
        leaving: dict[int, list[int]] = {}
        for rank in quorum.members:
            earlier = [q.number for q in self.quorums[: quorum.number] if rank in q.members]
            if earlier:
                leaving.setdefault(earlier[-1], []).append(rank)
        steps: list[Entry] = []
        for number, ranks in sorted(leaving.items()):
            destroy: Entry = {"destroy_process_group": {"group": self.group_name(number)}}
            if len(ranks) < len(quorum.members):
                destroy["ranks"] = _rank_condition(ranks)
            steps.append(destroy)
        return steps

    def heal(self, quorum: _Quorum, before: tuple[int, ...]) -> list[Entry]:
        """Each rank that joined gets the weights from a rank that has them, in turn."""
        sources = [rank for rank in quorum.members if rank in before]
        if not sources:
            return []
        group = self.group_name(quorum.number)
        steps: list[Entry] = []
        for number, rank in enumerate(quorum.joined):
            source = sources[number % len(sources)]
            for name in self.weights:
                steps.append(step("send", [source], tensor=name, dst=rank, group=group))
                steps.append(step("recv", [rank], tensor=name, src=source, group=group))
        return steps

    # --- training ---
    def training_step(
        self, number: int, ranks: list[int], quorum: _Quorum, healing: list[int]
    ) -> list[Entry]:
        """A training step of ``ranks`` with the group of quorum ``number``, while ``quorum`` lasts.

        ``healing`` ranks contribute zeros in the first iteration.
        """
        if not ranks:
            return []
        fields = self.fields
        group = self.group_name(number)
        handle = f"{self.prefix}_{number}_sum"
        body: list[Entry] = [
            compute(f"forward {layer.name}", layer.forward, reads=self.weights)
            for layer in fields.model
        ]
        for k, (layer, grad) in enumerate(zip(self.layers_backward, self.grads, strict=True)):
            body.append(compute(f"backward {layer.name}", layer.backward, writes=[grad]))
            if healing:
                condition = f"iteration == {quorum.start} and ({_rank_condition(healing)})"
                body.append({"assign": {"tensor": grad, "value": 0}, "ranks": condition})
            body.append(
                step(
                    "all_reduce",
                    tensor=grad,
                    op="sum",
                    group=group,
                    async_=True,
                    as_=f"{handle}_{k}",
                )
            )
        body += [wait(f"{handle}_{k}") for k in range(len(self.grads))]
        members = len(self.quorums[number].members)
        body += self.average(members, len(healing), quorum.start)
        body.append(compute("commit", fields.commit))
        optimizer = fields.optimizer or ZERO_COST
        body.append(compute("optimizer", optimizer, reads=self.grads, writes=self.weights))
        return [block(body, f"{quorum.span} and ({_rank_condition(ranks)})")]

    def average(self, members: int, healing: int, start: int) -> list[Entry]:
        """Sums become means over the ranks that contributed gradients."""
        if not healing or healing == members:
            return self.divide_by(members)
        return [
            block(self.divide_by(members - healing), f"iteration == {start}"),
            block(self.divide_by(members), f"iteration > {start}"),
        ]

    def divide_by(self, count: int) -> list[Entry]:
        return [
            {"assign": {"tensor": grad, "value": f"{grad} * {1 / count!r}"}} for grad in self.grads
        ]

    def group_name(self, number: int) -> str:
        return f"{self.prefix}_quorum_{number}"


def _rank_condition(ranks: list[int] | tuple[int, ...]) -> str:
    """A condition that selects some ranks."""
    return " or ".join(f"rank == {rank}" for rank in ranks) or "rank < 0"
