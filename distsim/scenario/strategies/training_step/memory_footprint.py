"""Peak memory of a rank: parameters, gradients, optimizer states, activations, and parameters that
are gathered temporarily.

Sources: Rajbhandari et al., ZeRO: Memory Optimizations Toward Training Trillion Parameter Models,
arXiv:1910.02054, section 3 and figure 1 (states of mixed-precision Adam, and the ZeRO stages);
Korthikanti et al., arXiv:2205.05198 (activations). Allocator overhead, library workspaces and
fragmentation are not included, so real peaks are higher, often by a few GB.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Literal, NamedTuple

from distsim.scenario.strategies.pipeline.actions import PipelineAction, compute_actions

ZeroLevel = Literal[0, 1, 2, 3]


class BytesPerParameter(NamedTuple):
    """Bytes per parameter. The default is mixed-precision Adam: 16-bit parameters and gradients;
    float32 copy, momentum, variance.
    """

    parameters: int = 2
    gradients: int = 2
    optimizer: int = 12


MIXED_PRECISION_ADAM = BytesPerParameter()


class MemoryFootprint(NamedTuple):
    """Bytes on one rank. ``gathered``: full parameters of layers that are sharded at rest."""

    parameters: int = 0
    gradients: int = 0
    optimizer: int = 0
    activations: int = 0
    gathered: int = 0

    @property
    def total(self) -> int:
        return sum(self)

    def __add__(self, other: object) -> MemoryFootprint:
        if not isinstance(other, MemoryFootprint):
            return NotImplemented
        return MemoryFootprint(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


def model_states(
    numel: int,
    zero: ZeroLevel = 0,
    ranks: int = 1,
    precision: BytesPerParameter = MIXED_PRECISION_ADAM,
) -> MemoryFootprint:
    """Model states of ``numel`` parameters on each of ``ranks`` data-parallel ranks.

    Stage 1 shards the optimizer's states, 2 the gradients too, 3 the parameters too.
    Mixed-precision Adam takes 16 bytes per parameter, 4 + 12/N, 2 + 14/N and 16/N (ZeRO paper,
    figure 1). A shard is rounded up, as padding does.
    """

    def held(nbytes: int, from_stage: int) -> int:
        return -(-numel // ranks) * nbytes if zero >= from_stage else numel * nbytes

    return MemoryFootprint(
        held(precision.parameters, 3), held(precision.gradients, 2), held(precision.optimizer, 1)
    )


def peak_activation_bytes(
    row: Iterable[PipelineAction],
    kept: Callable[[int], int],
    working: Callable[[int], int] = lambda stage: 0,
) -> int:
    """Peak bytes of activations on a pipeline rank, over its row of a schedule.

    ``kept(stage)``: bytes that a forward pass leaves for its backward pass. ``working(stage)``:
    bytes that the backward pass needs in addition. A backward pass in two halves frees the
    activations after the second half.
    """
    held = most = 0
    for action in compute_actions(row):
        if action.kind == "F":
            held += kept(action.stage)
            most = max(most, held)
        else:
            most = max(most, held + working(action.stage))
            held -= 0 if action.kind == "I" else kept(action.stage)
    return most
