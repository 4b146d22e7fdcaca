"""The calls of ranks with unequal numbers of batches, with and without the context manager Join.

With Join, a rank that has run out of batches shadows the collectives of the others: it makes the
same calls with zeros, until no rank has a batch. Without Join each rank runs as many iterations as
it has batches, which hangs when the numbers differ.

Sources, torch 2.13: `torch/distributed/algorithms/join.py` (Join.__exit__, notify_join_context; the
default divide_by_initial_world_size is assumed), `torch/nn/parallel/distributed.py` (_DDPJoinHook,
_sync_final_model).
"""

from __future__ import annotations

from distsim.scenario.strategies.base import Entry, block, tensor_declaration, waits_for_copies
from distsim.scenario.strategies.ddp.calls import DdpWriter
from distsim.scenario.strategies.layers import repeat_entries


class DdpJoinWriter(DdpWriter):
    """Every rank runs as many batches as it has, in a loop of its own (`inputs`)."""

    def body(self) -> list[Entry]:
        inputs = self.ddp.inputs or {}
        if not self.ddp.join:
            loop = {
                "times": inputs,
                "index": self.iteration_name,
                "steps": self.iteration(reduces_once=True),
            }
            return [{"repeat": loop}]
        own_inputs = f"{self.prefix}_inputs"
        self.vars[own_inputs] = _expression_by_rank(inputs)
        rounds = [
            block(self.active_round(), f"{self.iteration_name} < {own_inputs}"),
            block(self.shadow_round(), f"{self.iteration_name} >= {own_inputs}"),
        ]
        loop_entries = repeat_entries(self.iterations, rounds, self.iteration_name)
        return [*loop_entries, *self.end(own_inputs)]

    def active_round(self) -> list[Entry]:
        """A rank with a batch first counts itself as active, then announces that it will reduce.

        It waits for neither call.
        """
        # DDP makes a new tensor for every call.
        notify = self.call("all_reduce", tensor=tensor_declaration(1, "float32"), async_=True)
        rebuild = self.rebuild(self.rebuild_position(reduces_once=True).iteration)
        return [
            notify,
            *rebuild,
            *self.common_buffers("rank"),
            notify,
            *self.forward(),
            *self.backward_in_phases(0, synced=True, reduces_once=True),
            *self.optimizer(),
        ]

    def shadow_round(self) -> list[Entry]:
        """A rank without batches asks how many ranks are active, then shadows an iteration."""
        active = self.tensor("left", 1, "float32", 0)
        must_reduce = self.tensor("must_reduce", 1, "float32", 0)
        steps = [
            self.call("all_reduce", tensor=active),
            *self.rebuild(self.rebuild_position(reduces_once=True).iteration),
            *self.common_buffers("-1"),
            self.call("all_reduce", tensor=must_reduce),
        ]
        for layout, condition in self.phases_of(0, reduces_once=True):
            zeros = self.shadow_reductions(layout)
            steps += zeros if condition is None else [block(zeros, condition)]
        if self.ddp.zero_redundancy_optimizer:
            steps += self.broadcast_updated_parameters()
        return steps

    def shadow_reductions(self, layout: str) -> list[Entry]:
        """_match_all_reduce_for_bwd_pass: zeros of each bucket's size.

        All reductions are started before the first wait.
        """
        names = [
            self.tensor(f"zeros_{layout}_{k}", bucket.numel, bucket.dtype, 0)
            for k, bucket in enumerate(self.buckets[layout])
        ]
        handle = f"{self.prefix}_shadowed"
        steps: list[Entry] = [{"assign": {"tensor": name, "value": 0}} for name in names]
        steps += [self.reduce(name, handle, k) for k, name in enumerate(names)]
        if self.ddp.find_unused_parameters:
            used = tensor_declaration(len(self.params), "int32")
            steps.append(self.call("all_reduce", tensor=used, async_=True))
        return steps + waits_for_copies(handle, range(len(names)))

    def common_buffers(self, own_vote: str) -> list[Entry]:
        """Broadcast the module's buffers from the highest rank that still has a batch.

        The ranks find it by a maximum over ``own_vote``: the rank, or -1 without a batch.
        """
        if not self.ddp.buffers or not self.ddp.forward_sync_buffers:
            return []
        common = self.tensor("common", 1, "int64")
        return [
            {"assign": {"tensor": common, "value": own_vote}},
            self.call("all_reduce", tensor=common, op="max"),
            *self.broadcast_buffers(self.highest_active_rank()),
        ]

    def highest_active_rank(self) -> str | int:
        """The highest rank that has a batch in this round, as an expression of the round."""
        # From the highest rank down: each rank counts only with more batches than all before.
        most_batches = 0
        candidates: list[tuple[int, int]] = []
        for rank in reversed(range(self.context.world_size)):
            batches = self.ddp.batches_of(rank)
            if batches > most_batches:
                most_batches = batches
                candidates.append((batches, rank))
        if not candidates:
            return 0
        expression = str(candidates[-1][1])
        for batches, rank in reversed(candidates[:-1]):
            expression = f"{rank} if {self.iteration_name} < {batches} else {expression}"
        return expression

    def end(self, own_inputs: str) -> list[Entry]:
        """The last query, to which no rank is active, and the broadcast of the final model.

        The source is the highest of the ranks that joined last.
        """
        active = self.tensor("left", 1, "float32", 0)
        vote = f"rank if {own_inputs} == {self.iterations} else -1"
        last_joiner = self.tensor("last", 1, "int64", vote)
        joined_last = [
            rank
            for rank in range(self.context.world_size)
            if self.ddp.batches_of(rank) == self.iterations
        ]
        source = max(joined_last, default=0)
        return [
            self.call("all_reduce", tensor=active),
            self.call("all_reduce", tensor=last_joiner, op="max"),
            *self.coalesced_broadcast(self.declare_weight_messages(), "final", source),
        ]


def _expression_by_rank(inputs: dict[int | str, int]) -> str | int:
    """Numbers by rank as an expression, because a variable takes no mapping."""
    named = sorted((key, value) for key, value in inputs.items() if isinstance(key, int))
    default = named[-1][1] if named else 0
    expression = str(inputs.get("else", default))
    for rank, value in reversed(named):
        expression = f"{value} if rank == {rank} else {expression}"
    return expression
