"""Context parallelism: every rank has a part of the sequence, and keys and values travel round a
ring.

Sources: Liu et al., Ring Attention (arXiv 2310.01889); torch 2.13,
`torch/distributed/tensor/experimental/_context_parallel/_attention.py` (_templated_ring_attention
and its backward; _AllToAllRotater, _AllGatherRotater). `alltoall` and `allgather` are the words of
torch's set_rotate_method; `p2p` sends messages, as ring attention is written by hand. torch's own
default is allgather.
"""

from __future__ import annotations

from math import prod
from typing import ClassVar, Literal

from pydantic import StrictBool

from distsim.scenario.strategies.base import (
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
        "Ring attention: as many steps as ranks; while one part of keys and values is used, the next is on its way, and so are gradients."
    )

    axis: AxisOrGroup = "cp"
    #: Keys (or values) of a rank's part of the sequence: the message holds both.
    keys: Shape
    dtype: Dtype = "bfloat16"
    #: Checked alone: the whole sequence; 0 is not given.
    sequence: NonNegativeInt = 0
    rotate: Literal["alltoall", "allgather", "p2p"] = "alltoall"
    #: Later positions do not see earlier ones: a rank then skips the parts that come after its own,
    #: unless the load is balanced.
    causal: StrictBool = False
    load_balance: StrictBool = True

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        unknown = context.unknown_group(self.axis, "axis")
        if unknown is not None or self.axis not in context.mesh:
            return [(("axis",), unknown or f"{self.axis} is no axis of the mesh")]
        n = context.size_of(self.axis)
        parts = 2 * n if self.causal and self.load_balance else n
        if self.sequence % parts:
            why = (
                f"twice the {n} ranks of {self.axis}, as a balanced load needs"
                if parts > n
                else f"the {n} ranks of {self.axis}"
            )
            return [(("sequence",), f"sequence {self.sequence} does not divide among {why}")]
        return []

    def writer(self, context: ExpansionContext) -> ContextParallelWriter:
        return ContextParallelWriter(self, context)


class ContextParallelWriter(IntraLayerWriter):
    """Entries of one layer's attention; a price is that of one rank, where all have the same to
    do.
    """

    def __init__(self, fields: ContextParallel, context: ExpansionContext) -> None:
        super().__init__(context.unused_prefix(fields.name), fields.dtype, fields.axis)
        self.f, self.n, self.numel = fields, context.size_of(fields.axis), 2 * prod(fields.keys)

    def keys(self, word: str, parts: int = 1) -> str:
        return self.tensor(word, parts * self.numel)

    def forward(self, price: ComputeCost) -> list[Entry]:
        found: list[Entry] = [
            compute("keys and values", {"time": "0 ns"}, writes=[self.keys("kv_0")])
        ]
        for i in range(self.n):
            found += self.arrive(i) + self.pass_on(i)
            found += self.attention("attention", i, price, [self.kv(i)])
        return found

    def backward(self, price: ComputeCost) -> list[Entry]:
        """Keys and values go round once more; their gradients go with them, and one step further,
        home to the rank they belong to.
        """
        found: list[Entry] = []
        for i in range(self.n):
            found += self.arrive(i) + self.pass_on(i)
            found += self.attention("attention backward", i, price, [self.kv(i)])
            grads = self.keys(f"grad_{i}")
            if i:
                found.append(wait(f"{self.prefix}_grads_came"))
            found.append(
                compute(
                    "add gradients",
                    {"time": "0 ns"},
                    **({"adds": [grads]} if i else {"writes": [grads]}),
                )
            )
            if self.n > 1:
                found += self.rotated(grads, self.keys(f"grad_{i + 1}"), "grads_came")
        return [*found, *([wait(f"{self.prefix}_grads_came")] if self.n > 1 else [])]

    def kv(self, i: int) -> str:
        """What step i reads."""
        return (
            self.keys("kv_all", self.n)
            if self.f.rotate == "allgather" and i
            else self.keys(f"kv_{i}")
        )

    def arrive(self, i: int) -> list[Entry]:
        waits = i == 1 if self.f.rotate == "allgather" else i > 0
        return [wait(f"{self.prefix}_kv_came")] if waits else []

    def pass_on(self, i: int) -> list[Entry]:
        if i == self.n - 1:
            return []
        if self.f.rotate != "allgather":
            return self.rotated(self.kv(i), self.kv(i + 1), "kv_came")
        if i:
            return []
        return [
            self.call(
                "all_gather_into_tensor",
                input=self.kv(0),
                output=self.kv(1),
                async_=True,
                as_=f"{self.prefix}_kv_came",
            )
        ]

    def rotated(self, gone: str, come: str, handle: str) -> list[Entry]:
        """To the next rank of the ring, from the one before. permute_tensor is an all_to_all with a
        single part.
        """
        name = f"{self.prefix}_{handle}"
        if self.f.rotate == "p2p":
            ops = [
                self.call("isend", tensor=gone, group_dst="(group_rank + 1) % group_size"),
                self.call("irecv", tensor=come, group_src="(group_rank - 1) % group_size"),
            ]
            return [step("batch_isend_irecv", ops=ops, as_=name)]
        splits = [
            f"{self.numel} if (group_rank + 1) % group_size == {j} else 0" for j in range(self.n)
        ]
        return [
            self.call(
                "all_to_all_single",
                input=gone,
                output=come,
                input_splits=splits,
                async_=True,
                as_=name,
            )
        ]

    def attention(self, name: str, i: int, price: ComputeCost, reads: list[str]) -> list[Entry]:
        if not self.f.causal or self.f.load_balance:
            return [compute(f"{name} {i}", equal_cost_shares(price, self.n)[i], reads=reads)]
        if i == 0:
            return [compute(f"{name} 0", scaled_cost(price, 1 / self.n), reads=reads)]
        return [
            compute(
                f"{name} {i}", scaled_cost(price, 2 / self.n), f"{self.f.axis} >= {i}", reads=reads
            )
        ]
