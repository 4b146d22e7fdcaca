"""From a schedule to the calls of a rank: which messages are single, which share a batch, and where
the rank waits.

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
    """A message of a stage: its activation to the next stage or from the one before (``way`` F), or
    a gradient, the other way (B).
    """

    sends: bool
    way: str
    stage: int
    micro_batch: int

    @property
    def peer_stage(self) -> int:
        return self.stage + (1 if (self.way == "F") == self.sends else -1)


class PipelineCall(NamedTuple):
    """One step of a rank: ``compute`` an action, ``start`` a message, ``wait`` for messages, a
    ``batch`` that is waited for at once, or a ``silent`` action (UNSHARD, RESHARD, REDUCE_GRAD),
    which means something where stages are sharded. ``beside``: the computation that overlaps it."""

    what: str
    messages: tuple[StageMessage, ...] = ()
    action: PipelineAction | None = None
    beside: PipelineAction | None = None


def calls_of_rank(schedule: PipelineSchedule, rank: int) -> list[PipelineCall]:
    """The calls of a pipeline rank. A runtime schedule must have its messages."""
    writer = _RankCallBuilder(schedule, rank)
    if schedule.issue == "fill_drain":
        writer.fill_drain()
        writer.reduced()
    elif schedule.issue == "megatron":
        writer.megatron()
    elif schedule.issue == "one_f_one_b":
        writer.one_f_one_b()
        writer.reduced()
    elif schedule.issue == "batched":
        writer.batched()
    else:
        writer.runtime()
    return writer.calls


class _RankCallBuilder:
    def __init__(self, schedule: PipelineSchedule, rank: int) -> None:
        self.schedule, self.rank = schedule, rank
        self.calls: list[PipelineCall] = []
        #: Whether a stage's neighbour on a way (1 after it, -1 before) is on another rank.
        self.apart: dict[tuple[int, int], bool] = {}

    # --- parts ---
    def message(
        self, sends: bool, way: str, m: int, stage: int | None = None
    ) -> tuple[StageMessage, ...]:
        """The message in a tuple; empty where there is no such neighbour, or it is on this rank."""
        stage = self.rank if stage is None else stage
        side = stage, 1 if (way == "F") == sends else -1
        apart = self.apart.get(side)
        if apart is None:
            peer = self.schedule.beside(*side)
            apart = self.apart[side] = peer is not None and self.schedule.rank_of[peer] != self.rank
        return (StageMessage(sends, way, stage, m),) if apart else ()

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

    def reduced(self) -> None:
        """`perform_reduce_grad` at the end of a schedule of one stage per rank."""
        self.calls.append(PipelineCall("silent", (), PipelineAction(self.rank, "REDUCE_GRAD")))

    # --- one stage per rank ---
    def fill_drain(self) -> None:
        ways = (
            "FB"
            if any(action.kind != "F" for action in compute_actions(self.schedule.rows[self.rank]))
            else "F"
        )
        for way in ways:
            sent: tuple[StageMessage, ...] = ()
            for m in range(self.schedule.micro_batches):
                self.exchange(self.message(False, way, m))
                self.compute(PipelineAction(self.rank, way, m))
                out = self.message(True, way, m)
                self.start(out)
                sent += out
            self.wait(sent)

    def one_f_one_b(self) -> None:
        count = self.schedule.micro_batches
        ahead = min(count, self.schedule.stages - self.rank)
        held = self.warm_up(ahead)
        for m in range(count):
            if m <= count - ahead:
                self.exchange((*held, *self.message(False, "B", m)))
            else:
                self.exchange(self.message(False, "B", m))
            self.compute(PipelineAction(self.rank, "B", m))
            if m < count - ahead:
                self.exchange((*self.message(True, "B", m), *self.message(False, "F", m + ahead)))
                self.compute(PipelineAction(self.rank, "F", m + ahead))
                held = self.message(True, "F", m + ahead)
            else:
                self.wait(self.message(True, "B", m - 1) if m > count - ahead else ())
                self.start(self.message(True, "B", m))
        self.wait(self.message(True, "B", count - 1))

    def warm_up(self, ahead: int) -> tuple[StageMessage, ...]:
        """The forwards before the first backward; the last one's send is left for the batch with
        the first gradient.
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
        """Megatron-LM core/pipeline_parallel/schedules.py,
        forward_backward_pipelining_without_interleaving, and p2p_communication.py: each exchange
        is a batch that is waited for, and fewer micro-batches than stages are run through the
        warm-up."""
        count = self.schedule.micro_batches
        ahead = min(count, self.schedule.stages - self.rank - 1)
        for m in range(ahead):
            self.batch(self.message(False, "F", m))
            self.compute(PipelineAction(self.rank, "F", m))
            self.batch(self.message(True, "F", m))
        left = count - ahead
        self.batch(self.message(False, "F", ahead) if left else ())
        for m in range(left):
            self.compute(PipelineAction(self.rank, "F", m + ahead))
            self.batch((*self.message(True, "F", m + ahead), *self.message(False, "B", m)))
            self.compute(PipelineAction(self.rank, "B", m))
            following = self.message(False, "F", m + ahead + 1) if m + 1 < left else ()
            self.batch((*self.message(True, "B", m), *following))
        for m in range(left, count):
            self.batch(self.message(False, "B", m))
            self.compute(PipelineAction(self.rank, "B", m))
            self.batch(self.message(True, "B", m))

    def batch(self, messages: Sequence[StageMessage]) -> None:
        if messages:
            self.calls.append(PipelineCall("batch", tuple(messages)))

    # --- schedules with messages of their own ---
    def batched(self) -> None:
        """github deepseek-ai/DualPipe, dualpipe.py (`_commit_and_wait_comm`): sends and receives
        are gathered in a list, which goes out as one batch, waited for at once, before each
        computation and at the end."""
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
        """Receives are waited for by the computation that needs them, sends at the end, the last
        one first.
        """
        open_receives: set[tuple[str, int, int]] = set()
        sent: list[StageMessage] = []
        for action in self.schedule.rows[self.rank]:
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
                    need = "F" if kind == "F" else "B", stage, m
                    if kind != "W" and need in open_receives:
                        self.wait((StageMessage(False, *need),))
                        open_receives.remove(need)
                    self.compute(each, _overlap_partner(action, each) if action.parts else None)
                else:
                    self.calls.append(PipelineCall("silent", (), each))
        self.wait(sent[::-1])


def _overlap_partner(pair: PipelineAction, one: PipelineAction) -> PipelineAction | None:
    """The other of an overlapped pair."""
    return next((part for part in pair.parts if part != one), None)


def computes_before_recv(schedule: PipelineSchedule) -> Iterator[str]:
    """Computations whose input is neither on their rank nor received before them there: PyTorch's
    runtime raises at them.
    """
    if schedule.issue != "runtime":
        return
    for rank, row in enumerate(schedule.rows):
        seen: set[tuple[int, str, int]] = set()
        for action in row:
            for stage, kind, m, _ in action.each:
                before = schedule.beside(stage, -1 if kind == "F" else 1)
                there = (
                    before is not None
                    and kind in ("F", "B", "I")
                    and schedule.rank_of[before] != rank
                )
                if there and (stage, f"RECV_{'F' if kind == 'F' else 'B'}", m) not in seen:
                    yield f"rank {rank}: {stage}{kind}{m} computes before it receives its input"
                seen.add((stage, kind, m))
