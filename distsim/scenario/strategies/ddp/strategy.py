"""The strategy `ddp`: torch.nn.parallel.DistributedDataParallel.

The fields and their checks are in `distsim.scenario.strategies.ddp.fields`, the calls in
`distsim.scenario.strategies.ddp.calls` and `distsim.scenario.strategies.ddp.join`. This module only
joins them, so that fields and writers do not import each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from distsim.scenario.strategies.base import Entry, Expansion, ExpansionContext, Strategy
from distsim.scenario.strategies.ddp.calls import DdpWriter
from distsim.scenario.strategies.ddp.fields import DdpFields
from distsim.scenario.strategies.ddp.join import DdpJoinWriter
from distsim.scenario.strategies.ddp.replica_errors import with_model_mismatch_errors


class Ddp(DdpFields):
    """Data parallel training: every rank has the whole model and reduces gradients in buckets while
    the backward pass goes on.
    """

    def with_errors_between_ranks(
        self, ranks: Sequence[int], all_ranks: Mapping[int, Strategy], steps: list[Entry]
    ) -> list[Entry]:
        """Errors of models that differ between ranks; DDP's constructor raises them."""
        replicas = {rank: ddp for rank, ddp in all_ranks.items() if isinstance(ddp, Ddp)}
        if len(replicas) < len(all_ranks):
            return steps
        if not all(_is_compared(ddp) for ddp in replicas.values()):
            return steps
        models = {rank: ddp.model for rank, ddp in replicas.items()}
        return with_model_mismatch_errors(ranks, models, steps)

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = DdpWriter if self.inputs is None else DdpJoinWriter
        return writer(self, context).expansion()


def _is_compared(ddp: Ddp) -> bool:
    """Whether the constructor runs, among all ranks."""
    return ddp.group is None and ddp.setup
