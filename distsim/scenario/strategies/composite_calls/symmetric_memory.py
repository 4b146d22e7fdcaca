"""The strategy `symm_mem_barrier`: the barrier of symmetric memory, which consists of signals.

Source: torch 2.13, `torch/csrc/distributed/c10d/symm_mem/CUDASymmetricMemoryOps.cu`
(barrier_kernel): one thread per other rank sends a signal and waits for the signal of that rank. It
uses the same cells as put_signal and wait_signal of the same channel.
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field

from distsim.scenario.strategies.base import (
    Entry,
    Expansion,
    ExpansionContext,
    Refusal,
    Strategy,
    step,
)
from distsim.scenario.strategies.field_types import AxesOrGroup, NonNegativeInt


class SymmMemBarrier(Strategy):
    name: ClassVar[str] = "symm_mem_barrier"
    about: ClassVar[str] = (
        "Barrier of symmetric memory (torch.distributed._symmetric_memory). Each rank "
        "signals every other rank and waits for all signals."
    )
    first_field: ClassVar[str | None] = "group"

    group: AxesOrGroup | None = Field(
        default=None, description="Ranks that take part [default: all ranks].", examples=["tp"]
    )
    channel: NonNegativeInt = Field(
        default=0,
        description=(
            "Channel of the signal pad. put_signal and wait_signal on the same channel use the "
            "same cells."
        ),
        examples=[1],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        return context.refuse_groups(group=self.group)

    def expand(self, context: ExpansionContext) -> Expansion:
        n = context.size_of(self.group)
        if n < 2:
            return Expansion([])
        others = [f"(group_rank + {k}) % {n}" for k in range(1, n)]
        given: list[Entry] = [
            step("put_signal", group_dst=one, channel=self.channel, group=self.group or "world")
            for one in others
        ]
        taken: list[Entry] = [
            step("wait_signal", group_src=one, channel=self.channel, group=self.group or "world")
            for one in others
        ]
        return Expansion([*given, *taken])
