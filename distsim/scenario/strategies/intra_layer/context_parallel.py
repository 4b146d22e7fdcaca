"""The strategy `context_parallel`: ring attention.

Every rank has a part of the sequence, and keys and values travel round a ring. In step i each rank
uses the part of the rank i places before it, while the next part is on its way.

Sources: Liu et al., Ring Attention (arXiv 2310.01889); torch 2.13,
`torch/distributed/tensor/experimental/_context_parallel/_attention.py` (_templated_ring_attention
and its backward; _AllToAllRotater, _AllGatherRotater). `alltoall` and `allgather` are the values of
torch's set_rotate_method; `p2p` sends messages, as ring attention is written by hand. torch's own
default is allgather.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar, Literal

from pydantic import Field, StrictBool

from distsim.scenario.strategies.base import (
    ZERO_COST,
    ComputeCost,
    Entry,
    ExpansionContext,
    Refusal,
    compute,
    step,
    wait,
)
from distsim.scenario.strategies.field_types import AxisOrGroup, Dtype, NonNegativeInt, Shape
from distsim.scenario.strategies.layers import (
    IntraLayerStrategy,
    IntraLayerWriter,
    equal_cost_shares,
    scaled_cost,
)


class ContextParallel(IntraLayerStrategy):
    """Attention over a sequence that no rank has whole."""

    name: ClassVar[str] = "context_parallel"
    about: ClassVar[str] = (
        "Context parallelism (ring attention) as in "
        "torch.distributed.tensor.experimental.context_parallel. Each rank has a part of "
        "the sequence; keys and values are sent around the ring while attention computes."
    )

    axis: AxisOrGroup = Field(
        default="cp", description="Mesh axis of this strategy.", examples=["pp"]
    )
    keys: Shape = Field(
        description=(
            "Shape of the keys (or values) of a rank's part of the sequence. A message holds both."
        ),
        examples=[[1, 8, 1024, 128]],
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )
    sequence: NonNegativeInt = Field(
        default=0,
        description="Tokens of the whole sequence, only for checks. 0: not checked.",
        examples=[4096],
    )
    rotate: Literal["alltoall", "allgather", "p2p"] = Field(
        default="alltoall",
        description=("How ranks exchange keys and values: alltoall (ring attention) or allgather."),
        examples=["allgather"],
    )
    causal: StrictBool = Field(
        default=False,
        description=(
            "Use causal attention. Without load balancing, a rank skips the parts of the "
            "sequence after its own."
        ),
        examples=[True],
    )
    load_balance: StrictBool = Field(
        default=True,
        description=(
            "Give each rank an early and a late part of the sequence, so that causal attention "
            "is balanced."
        ),
        examples=[True],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None or self.axis not in context.mesh:
            return [(("axis",), unknown or f"the mesh has no axis {self.axis}")]
        n = context.size_of(self.axis)
        parts = n
        divisor = f"the {n} ranks of {self.axis}"
        if self.causal and self.load_balance:
            # Each rank has an early and a late part of the sequence.
            parts = 2 * n
            divisor = f"twice the {n} ranks of {self.axis}, which load_balance needs"
        if self.sequence % parts:
            text = f"sequence {self.sequence} is not divisible by {divisor}"
            return [(("sequence",), text)]
        return []

    def writer(self, context: ExpansionContext) -> ContextParallelWriter:
        return ContextParallelWriter(self, context)


class ContextParallelWriter(IntraLayerWriter):
    """Entries of one layer's attention.

    The cost of a pass is that of one rank if all ranks have the same work.
    """

    def __init__(self, fields: ContextParallel, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.axis)
        self.fields = fields
        self.ranks = context.size_of(fields.axis)
        #: Elements of a part's keys and values.
        self.part_numel = 2 * prod(fields.keys)

    def key_value_tensor(self, word: str, parts: int = 1) -> str:
        """Declare a tensor of keys and values, or of their gradients."""
        return self.tensor(word, parts * self.part_numel)

    def forward(self, cost: ComputeCost) -> list[Entry]:
        own_part = self.key_value_tensor("kv_0")
        steps: list[Entry] = [compute("keys and values", ZERO_COST, writes=[own_part])]
        for i in range(self.ranks):
            steps += self.wait_for_part(i)
            steps += self.start_next_part(i)
            steps.append(self.attention("attention", i, cost, self.part_of_step(i)))
        return steps

    def backward(self, cost: ComputeCost) -> list[Entry]:
        """Keys and values go round once more, together with their gradients.

        The gradients go one step further, back to the rank that they belong to.
        """
        handle = f"{self.prefix}_grads_came"
        steps: list[Entry] = []
        for i in range(self.ranks):
            steps += self.wait_for_part(i)
            steps += self.start_next_part(i)
            steps.append(self.attention("attention backward", i, cost, self.part_of_step(i)))
            grads = self.key_value_tensor(f"grad_{i}")
            if i == 0:
                steps.append(compute("add gradients", ZERO_COST, writes=[grads]))
            else:
                steps.append(wait(handle))
                steps.append(compute("add gradients", ZERO_COST, adds=[grads]))
            if self.ranks > 1:
                next_grads = self.key_value_tensor(f"grad_{i + 1}")
                steps.append(self.start_rotation(grads, next_grads, "grads_came"))
        if self.ranks > 1:
            steps.append(wait(handle))
        return steps

    # --- the ring ---
    def part_of_step(self, i: int) -> str:
        """The tensor that step i reads."""
        if self.fields.rotate == "allgather" and i:
            return self.key_value_tensor("kv_all", self.ranks)
        return self.key_value_tensor(f"kv_{i}")

    def wait_for_part(self, i: int) -> list[Entry]:
        """The wait before step i; an all_gather brings all parts for step 1."""
        waits = i == 1 if self.fields.rotate == "allgather" else i > 0
        return [wait(f"{self.prefix}_kv_came")] if waits else []

    def start_next_part(self, i: int) -> list[Entry]:
        """Start the communication of what step i + 1 needs."""
        is_last = i == self.ranks - 1
        if is_last:
            return []
        if self.fields.rotate != "allgather":
            rotation = self.start_rotation(
                self.part_of_step(i), self.part_of_step(i + 1), "kv_came"
            )
            return [rotation]
        if i > 0:
            return []
        gather = self.call(
            "all_gather_into_tensor",
            input=self.part_of_step(0),
            output=self.part_of_step(1),
            async_=True,
            as_=f"{self.prefix}_kv_came",
        )
        return [gather]

    def start_rotation(self, sent: str, received: str, handle: str) -> Entry:
        """Send to the next rank of the ring, receive from the one before.

        torch's permute_tensor is an all_to_all in which only one part is not empty.
        """
        name = f"{self.prefix}_{handle}"
        if self.fields.rotate == "p2p":
            ops = [
                self.call("isend", tensor=sent, group_dst="(group_rank + 1) % group_size"),
                self.call("irecv", tensor=received, group_src="(group_rank - 1) % group_size"),
            ]
            return step("batch_isend_irecv", ops=ops, as_=name)
        splits = [
            f"{self.part_numel} if (group_rank + 1) % group_size == {j} else 0"
            for j in range(self.ranks)
        ]
        return self.call(
            "all_to_all_single",
            input=sent,
            output=received,
            input_splits=splits,
            async_=True,
            as_=name,
        )

    def attention(self, name: str, i: int, cost: ComputeCost, part: str) -> Entry:
        """Step i of a pass."""
        if not self.fields.causal or self.fields.load_balance:
            return compute(f"{name} {i}", equal_cost_shares(cost, self.ranks)[i], reads=[part])
        # Without balancing, step 0 is the rank's own part, half of which is masked. The other
        # parts are whole or, if they come after the rank's own, skipped.
        if i == 0:
            return compute(f"{name} 0", scaled_cost(cost, 1 / self.ranks), reads=[part])
        return compute(
            f"{name} {i}",
            scaled_cost(cost, 2 / self.ranks),
            f"{self.fields.axis} >= {i}",
            reads=[part],
        )
