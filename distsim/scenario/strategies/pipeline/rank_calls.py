"""From a schedule to the calls of a rank.

The module decides which messages are single, which ones share a batch, and where the rank waits.
How calls become entries is in `distsim.scenario.strategies.pipeline.rank_entries`.

Follows torch.distributed.pipelining 2.13, schedules.py: `ScheduleGPipe` and `Schedule1F1B`
(`_step_microbatches`), `_PipelineScheduleRuntime`, and `_batch_p2p`: a list that holds sends and
receives is one batch_isend_irecv, a list of one kind is plain isend or irecv.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from distsim.scenario.strategies.pipeline.actions import (
    COMPUTE_KINDS,
    MESSAGE_KINDS,
    PipelineAction,
    PipelineSchedule,
    compute_actions,
)


class StageMessage(NamedTuple):
    """A message of a stage.

    With ``way`` F it is an activation, to the next stage or from the one before; with B a gradient
    in the other direction.
    """

    sends: bool
    way: str
    stage: int
    micro_batch: int

    @property
    def peer_stage(self) -> int:
        return self.stage + (1 if (self.way == "F") == self.sends else -1)


class PipelineCall(NamedTuple):
    """One step of a rank; ``what`` is its kind.

    `compute`: an action. `start`: a message. `wait`: a wait for messages. `batch`: messages that
    are waited for immediately. `silent`: UNSHARD, RESHARD or REDUCE_GRAD, which have an effect only
    if stages are sharded. ``beside`` is the computation that overlaps with the action.
    """

    what: str
    messages: tuple[StageMessage, ...] = ()
    action: PipelineAction | None = None
    beside: PipelineAction | None = None


def calls_of_rank(
    schedule: PipelineSchedule, rank: int, waits_before_pairs: bool = False
) -> list[PipelineCall]:
    """The calls of a pipeline rank. A runtime schedule must have its messages.

    ``waits_before_pairs``: both inputs of an overlapped pair are waited for before the first of its
    computations, as a function that runs them at the same time needs it (torchtitan,
    distributed/dual_pipe_v.py). By default each computation waits for its own input.
    """
    builder = _RankCallBuilder(schedule, rank, waits_before_pairs)
    if schedule.issue == "fill_drain":
        builder.fill_drain()
        builder.reduce_grad()
    elif schedule.issue == "megatron":
        builder.megatron()
    elif schedule.issue == "one_f_one_b":
        builder.one_f_one_b()
        builder.reduce_grad()
    elif schedule.issue == "batched":
        builder.batched()
    else:
        builder.runtime()
    return builder.calls


class _RankCallBuilder:
    """Collects the calls of a rank; there is a method for each way to issue a schedule."""

    def __init__(
        self, schedule: PipelineSchedule, rank: int, waits_before_pairs: bool = False
    ) -> None:
        self.schedule = schedule
        self.rank = rank
        self.waits_before_pairs = waits_before_pairs
        self.calls: list[PipelineCall] = []
        #: Whether the stage before (-1) or after (1) a stage is on another rank; a cache.
        self.is_remote: dict[tuple[int, int], bool] = {}

    # --- parts ---
    def message(
        self, sends: bool, way: str, m: int, stage: int | None = None
    ) -> tuple[StageMessage, ...]:
        """The message in a tuple; empty if there is no such neighbour, or if it is on this rank."""
        stage = self.rank if stage is None else stage
        side = stage, 1 if (way == "F") == sends else -1
        is_remote = self.is_remote.get(side)
        if is_remote is None:
            peer = self.schedule.adjacent_stage(*side)
            is_remote = peer is not None and self.schedule.rank_of[peer] != self.rank
            self.is_remote[side] = is_remote
        return (StageMessage(sends, way, stage, m),) if is_remote else ()

    def start(self, messages: Sequence[StageMessage]) -> None:
        """`_batch_p2p` without the wait, for a list of one kind."""
        self.calls += [PipelineCall("start", (message,)) for message in messages]

    def wait(self, messages: Sequence[StageMessage]) -> None:
        if messages:
            self.calls.append(PipelineCall("wait", tuple(messages)))

    def exchange(self, messages: Sequence[StageMessage]) -> None:
        """`_wait_batch_p2p(_batch_p2p(…))`."""
        if len({message.sends for message in messages}) > 1:
            self.calls.append(PipelineCall("batch", tuple(messages)))
            return
        self.start(messages)
        self.wait(messages)

    def compute(self, action: PipelineAction, beside: PipelineAction | None = None) -> None:
        self.calls.append(PipelineCall("compute", (), action, beside))

    def reduce_grad(self) -> None:
        """`perform_reduce_grad` at the end of a schedule of one stage per rank."""
        self.calls.append(PipelineCall("silent", (), PipelineAction(self.rank, "REDUCE_GRAD")))

    # --- one stage per rank ---
    def fill_drain(self) -> None:
        """GPipe: all forwards, then all backwards, if there are any."""
        own_actions = compute_actions(self.schedule.rows[self.rank])
        has_backward = any(action.kind != "F" for action in own_actions)
        for way in "FB" if has_backward else "F":
            sent: tuple[StageMessage, ...] = ()
            for m in range(self.schedule.micro_batches):
                self.exchange(self.message(False, way, m))
                self.compute(PipelineAction(self.rank, way, m))
                out = self.message(True, way, m)
                self.start(out)
                sent += out
            self.wait(sent)

    def one_f_one_b(self) -> None:
        """1F1B: a send forward shares a batch with the receive of the next gradient, and so on."""
        count = self.schedule.micro_batches
        ahead = min(count, self.schedule.stages - self.rank)
        last_output = self.warm_up(ahead)
        for m in range(count):
            if m <= count - ahead:
                self.exchange((*last_output, *self.message(False, "B", m)))
            else:
                self.exchange(self.message(False, "B", m))
            self.compute(PipelineAction(self.rank, "B", m))
            if m < count - ahead:
                self.exchange((*self.message(True, "B", m), *self.message(False, "F", m + ahead)))
                self.compute(PipelineAction(self.rank, "F", m + ahead))
                last_output = self.message(True, "F", m + ahead)
            else:
                if m > count - ahead:
                    self.wait(self.message(True, "B", m - 1))
                self.start(self.message(True, "B", m))
        self.wait(self.message(True, "B", count - 1))

    def warm_up(self, ahead: int) -> tuple[StageMessage, ...]:
        """The forwards before the first backward.

        Returns the send of the last one, which is in a batch with the first gradient.
        """
        pending: tuple[StageMessage, ...] = ()
        for m in range(ahead):
            self.exchange(self.message(False, "F", m))
            self.compute(PipelineAction(self.rank, "F", m))
            self.wait(pending)
            pending = self.message(True, "F", m)
            if m < ahead - 1:
                self.start(pending)
        return pending

    def megatron(self) -> None:
        """1F1B as in Megatron-LM: each exchange is a batch that is waited for.

        Fewer micro-batches than stages are run through the warm-up. Source:
        core/pipeline_parallel/schedules.py, forward_backward_pipelining_without_interleaving, and
        p2p_communication.py.
        """
        count = self.schedule.micro_batches
        ahead = min(count, self.schedule.stages - self.rank - 1)
        for m in range(ahead):
            self.batch(self.message(False, "F", m))
            self.compute(PipelineAction(self.rank, "F", m))
            self.batch(self.message(True, "F", m))
        steady = count - ahead
        if steady:
            self.batch(self.message(False, "F", ahead))
        for m in range(steady):
            self.compute(PipelineAction(self.rank, "F", m + ahead))
            self.batch((*self.message(True, "F", m + ahead), *self.message(False, "B", m)))
            self.compute(PipelineAction(self.rank, "B", m))
            following = self.message(False, "F", m + ahead + 1) if m + 1 < steady else ()
            self.batch((*self.message(True, "B", m), *following))
        for m in range(steady, count):
            self.batch(self.message(False, "B", m))
            self.compute(PipelineAction(self.rank, "B", m))
            self.batch(self.message(True, "B", m))

    def batch(self, messages: Sequence[StageMessage]) -> None:
        if messages:
            self.calls.append(PipelineCall("batch", tuple(messages)))

    # --- schedules with messages of their own ---
    def batched(self) -> None:
        """DualPipe: messages are collected, and sent as one batch before each computation.

        The batch is waited for at once; what remains is sent at the end. Source: github
        deepseek-ai/DualPipe, dualpipe.py (`_commit_and_wait_comm`).
        """
        pending: list[StageMessage] = []
        for action in self.schedule.rows[self.rank]:
            if action.kind in MESSAGE_KINDS:
                pending += self.message(
                    action.kind.startswith("SEND"),
                    action.kind[-1],
                    action.micro_batch,
                    action.stage,
                )
                continue
            self.batch(pending)
            pending = []
            for each in compute_actions((action,)):
                self.compute(each, _overlap_partner(action, each))
        self.batch(pending)

    def runtime(self) -> None:
        """`_PipelineScheduleRuntime`: the rows have their own messages.

        A receive is waited for by the computation that needs it; sends are waited for at the end,
        the last one first.
        """
        open_receives: set[tuple[str, int, int]] = set()
        sent: list[StageMessage] = []

        def wait_for_input(one: PipelineAction) -> None:
            needed = "F" if one.kind == "F" else "B", one.stage, one.micro_batch
            if one.kind != "W" and needed in open_receives:
                self.wait((StageMessage(False, *needed),))
                open_receives.remove(needed)

        for action in self.schedule.rows[self.rank]:
            if self.waits_before_pairs:
                for each in action.parts:
                    wait_for_input(each)
            for each in action.parts or (action,):
                stage, kind, m, _ = each
                if kind in MESSAGE_KINDS:
                    sends = kind[0] == "S"
                    messages = self.message(sends, kind[-1], m, stage)
                    self.start(messages)
                    if sends:
                        sent += messages
                    elif messages:
                        open_receives.add((kind[-1], stage, m))
                elif kind in COMPUTE_KINDS:
                    wait_for_input(each)
                    self.compute(each, _overlap_partner(action, each) if action.parts else None)
                else:
                    self.calls.append(PipelineCall("silent", (), each))
        self.wait(sent[::-1])


def _overlap_partner(pair: PipelineAction, one: PipelineAction) -> PipelineAction | None:
    """The other action of an overlapped pair; None if it is not a pair."""
    return next((part for part in pair.parts if part != one), None)


def computes_before_recv(schedule: PipelineSchedule) -> Iterator[str]:
    """A sentence for each computation before its input is received; PyTorch's runtime raises."""
    if schedule.issue != "runtime":
        return
    for rank, row in enumerate(schedule.rows):
        seen: set[tuple[int, str, int]] = set()
        for action in row:
            for stage, kind, m, _ in action.each:
                if kind in ("F", "B", "I") and _has_remote_input(schedule, rank, stage, kind):
                    receive = "RECV_F" if kind == "F" else "RECV_B"
                    if (stage, receive, m) not in seen:
                        yield f"rank {rank}: {stage}{kind}{m} computes before it receives its input"
                seen.add((stage, kind, m))


def _has_remote_input(schedule: PipelineSchedule, rank: int, stage: int, kind: str) -> bool:
    """Whether the input of a computation comes from a stage on another rank."""
    source = schedule.adjacent_stage(stage, -1 if kind == "F" else 1)
    return source is not None and schedule.rank_of[source] != rank
