"""The calls of ranks with unequal numbers of batches, with and without the context manager Join.

Sources, torch 2.13: `torch/distributed/algorithms/join.py` (Join.__exit__, notify_join_context; the
default divide_by_initial_world_size is meant), `torch/nn/parallel/distributed.py` (_DDPJoinHook,
_sync_final_model).
"""

from __future__ import annotations

from distsim.scenario.strategies.base import Entry, block, tensor_declaration, waits_for_copies
from distsim.scenario.strategies.ddp.calls import DdpWriter
from distsim.scenario.strategies.layers import repeat_entries


class DdpJoinWriter(DdpWriter):
    """Every rank runs as many batches as it has; with `join` the early ones shadow the calls of the
    others until all are done.
    """

    def body(self) -> list[Entry]:
        inputs = self.ddp.inputs or {}
        if not self.ddp.join:
            return [{"repeat": {"times": inputs, "index": self.now, "steps": self.iteration(True)}}]
        mine = f"{self.p}_inputs"
        self.vars[mine] = _expression_by_rank(inputs)
        rounds = [
            block(self.live(), f"{self.now} < {mine}"),
            block(self.shadow(), f"{self.now} >= {mine}"),
        ]
        return [*repeat_entries(self.runs, rounds, self.now), *self.end(mine)]

    def live(self) -> list[Entry]:
        """A rank with a batch tells that it is still there, and that it will reduce. Nobody waits
        for either call.
        """
        told = self.call(
            "all_reduce", tensor=tensor_declaration(1, "float32"), async_=True
        )  # a new tensor of every call
        before = [told, *self.rebuild(self.rebuilt_at(True)[0]), *self.common("rank"), told]
        return [*before, *self.forward(), *self.by_layout(0, True, True), *self.optimizer()]

    def shadow(self) -> list[Entry]:
        """A rank without batches asks who is left, then makes every call of an iteration with
        zeros.
        """
        left, sync = (
            self.tensor("left", 1, "float32", 0),
            self.tensor("must_reduce", 1, "float32", 0),
        )
        asked, told = (self.call("all_reduce", tensor=name) for name in (left, sync))
        steps = [asked, *self.rebuild(self.rebuilt_at(True)[0]), *self.common("-1"), told]
        for word, when in self.in_use(0, True):
            steps += self.zeros(word) if when is None else [block(self.zeros(word), when)]
        return steps + (self.shared() if self.ddp.zero_redundancy_optimizer else [])

    def zeros(self, word: str) -> list[Entry]:
        """_match_all_reduce_for_bwd_pass: zeros of each bucket's size, all sent, then all waited
        for.
        """
        names = [
            self.tensor(f"zeros_{word}_{k}", bucket.numel, bucket.dtype, 0)
            for k, bucket in enumerate(self.buckets[word])
        ]
        steps: list[Entry] = [{"assign": {"tensor": name, "value": 0}} for name in names]
        steps += [self.reduce(name, f"{self.p}_shadowed", k) for k, name in enumerate(names)]
        if self.ddp.find_unused_parameters:
            steps.append(
                self.call(
                    "all_reduce", tensor=tensor_declaration(len(self.params), "int32"), async_=True
                )
            )
        return steps + waits_for_copies(f"{self.p}_shadowed", range(len(names)))

    def common(self, mine: str) -> list[Entry]:
        """Whose buffers hold: the highest rank that still has a batch; then they are broadcast."""
        if not self.ddp.buffers or not self.ddp.forward_sync_buffers:
            return []
        common = self.tensor("common", 1, "int64")
        return [
            {"assign": {"tensor": common, "value": mine}},
            self.call("all_reduce", tensor=common, op="max"),
            *self.synced(self.highest()),
        ]

    def highest(self) -> str | int:
        """The highest rank that has a batch in this round, as an expression of the round."""
        most, steps = 0, []
        for rank in reversed(range(self.context.world_size)):
            if self.ddp.rounds(rank) > most:
                most = self.ddp.rounds(rank)
                steps.append((most, rank))
        if not steps:
            return 0
        text = str(steps[-1][1])
        for rounds, rank in reversed(steps[:-1]):
            text = f"{rank} if {self.now} < {rounds} else {text}"
        return text

    def end(self, mine: str) -> list[Entry]:
        """The last question, who is left: nobody. The highest of the ranks that joined last gives
        its model to all.
        """
        left, last = (
            self.tensor("left", 1, "float32", 0),
            self.tensor("last", 1, "int64", f"rank if {mine} == {self.runs} else -1"),
        )
        src = max(
            (r for r in range(self.context.world_size) if self.ddp.rounds(r) == self.runs),
            default=0,
        )
        return [
            self.call("all_reduce", tensor=left),
            self.call("all_reduce", tensor=last, op="max"),
            *self.coalesced(self.weights(), "final", src),
        ]


def _expression_by_rank(inputs: dict[int | str, int]) -> str | int:
    """Per-rank numbers as an expression, since a var takes no mapping."""
    named = sorted((key, value) for key, value in inputs.items() if isinstance(key, int))
    text = str(inputs.get("else", named[-1][1] if named else 0))
    for rank, value in reversed(named):
        text = f"{value} if rank == {rank} else {text}"
    return text
