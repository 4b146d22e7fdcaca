"""Times a pipeline's step: one rank per stage, one piece of work per pass of a micro-batch.

The ranks of a stage (tensor, context, expert parallel) and the replicas do the same at the same
time. So one of them represents all, and the time of their collectives is part of the pass
(`distsim.planning.rank_timer`), or overlaps with it on a stream of its own. Messages between the
stages follow `distsim.scenario.strategies.pipeline.rank_calls` and the rules of
`distsim.semantics.form.device_compiler`.

Every send waits for its receive, which is the strictest reading of what blocks. No receive accepts
any source, so a step that completes here completes in every order of events.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from distsim.scenario.strategies.pipeline.actions import PipelineAction, PipelineSchedule
from distsim.scenario.strategies.pipeline.rank_calls import (
    PipelineCall,
    StageMessage,
    calls_of_rank,
)

#: A stream next to the current one, for the gradients of dense layers or of experts.
StreamName = str


class MicroBatchPass(NamedTuple):
    """The work of a micro-batch on a stage: equal ``layers``, and work before and after them.

    The host launches each layer and runs ahead. ``host_ns``: for one layer.
    """

    layers: int = 0
    layer_ns: int = 0
    host_ns: int = 0
    before_ns: int = 0
    after_ns: int = 0
    #: What goes out on streams when it is done: (stream, ns).
    sent: tuple[tuple[StreamName, int], ...] = ()


class PipelineWork(NamedTuple):
    """The work between messages.

    ``last``: the last backward pass of a stage in pieces if gradients are sent during it, else
    None. ``halves``: the input's and the weights' half of a backward pass, by stage, if the
    schedule has halves. ``pairs``: a forward and a backward pass that overlap, by their stages;
    None if none overlap.
    """

    forward: Mapping[int, MicroBatchPass]
    backward: Mapping[int, MicroBatchPass]
    last: Mapping[int, Sequence[MicroBatchPass]] | None
    #: (one rank, the next) -> ns of a message.
    message_ns: Mapping[tuple[int, int], int]
    #: Messages of a channel that the backend buffers; 0: a send waits for its receive.
    ahead: int = 0
    halves: Mapping[int, Mapping[str, MicroBatchPass]] = MappingProxyType({})
    pairs: Mapping[tuple[int, int], MicroBatchPass] | None = None


class PipelineHang(Exception):
    """No rank can proceed; ``ranks`` are blocked."""

    def __init__(self, ranks: tuple[int, ...]) -> None:
        super().__init__(ranks)
        self.ranks = ranks


class PipelineRankClock:
    """Clocks of one rank of the pipeline, in ns."""

    def __init__(self, number: int, calls: Sequence[PipelineCall]) -> None:
        self.number, self.calls, self.at = number, calls, 0
        self.host = self.current = self.launch_ns = 0
        self.streams: dict[StreamName, int] = {}
        #: Communicator -> the newest message or batch on it.
        self.newest: dict[tuple[int, ...], tuple[StageMessage, ...]] = {}

    def work(self, one: MicroBatchPass) -> None:
        """A layer starts when the one before it is done and it is launched; the host goes on."""
        start = self.current
        if one.before_ns:
            self.current = max(self.current, self.host) + one.before_ns
        if one.layers:
            first, self.host = self.host + one.host_ns, self.host + one.layers * one.host_ns
            ahead = max(self.current, first) + (one.layers - 1) * one.layer_ns
            self.current = max(ahead, self.host) + one.layer_ns
        if one.after_ns:
            self.current = max(self.current, self.host) + one.after_ns
        self.launch_ns += (
            self.current - start - one.before_ns - one.layers * one.layer_ns - one.after_ns
        )
        for stream, ns in one.sent:
            self.streams[stream] = max(self.streams.get(stream, 0), self.current, self.host) + ns

    def join(self) -> None:
        """The current stream waits for the others."""
        self.current = max([self.current, *self.streams.values()])


class PipelineTimer:
    """Runs the calls of all ranks. Raises Stuck."""

    def __init__(
        self,
        calls: Sequence[Sequence[PipelineCall]],
        schedule: PipelineSchedule,
        work: PipelineWork,
    ) -> None:
        self.schedule, self.does = schedule, work
        self.ranks = [PipelineRankClock(r, found) for r, found in enumerate(calls)]
        #: What is posted: message -> when its rank was ready for it; and when what met has ended.
        self.ready: dict[StageMessage, int] = {}
        self.ended: dict[StageMessage, int] = {}
        self.left = dict.fromkeys(range(schedule.stages), schedule.micro_batches)
        #: Communicator -> when each host came to its first use of it (N8).
        self.met: dict[tuple[int, ...], dict[int, int]] = {}
        #: Sends of a channel in their order, and the number of completed ones; used if the
        #: backend buffers.
        self.sent: dict[tuple[int, int], list[StageMessage]] = {}
        self.taken: dict[tuple[int, int], int] = {}

    def run(self) -> PipelineTimer:
        todo = list(self.ranks)
        while todo:
            moved = [self.advance(rank) for rank in todo]
            todo = [rank for rank in todo if rank.at < len(rank.calls)]
            if todo and not any(moved):
                raise PipelineHang(tuple(rank.number for rank in todo))
        return self

    def advance(self, rank: PipelineRankClock) -> bool:
        """Run a rank until it needs a message that is not sent yet; return whether it advanced."""
        before = rank.at
        while rank.at < len(rank.calls) and self.step(rank, rank.calls[rank.at]):
            rank.at += 1
        return rank.at > before

    def step(self, rank: PipelineRankClock, call: PipelineCall) -> bool:
        if call.what == "compute":
            assert call.action is not None
            self.compute(rank, call.action, call.beside)
            return True
        if call.what == "start":
            return self.post(rank, call.messages, self.pair(rank, call.messages[0]))
        if call.what == "wait":
            return self.wait(rank, call.messages)
        if call.what == "batch":
            posted = all(message in self.ready for message in call.messages) or self.post(
                rank, call.messages, ()
            )
            return posted and self.wait(rank, call.messages)
        return True  # silent

    def compute(
        self, rank: PipelineRankClock, action: PipelineAction, beside: PipelineAction | None
    ) -> None:
        key = executed_pass(self.schedule, action, beside, self.does.pairs is not None)
        if key is None:
            return
        kind, *stages = key
        if kind == "pair":
            assert self.does.pairs is not None
            rank.work(self.does.pairs[stages[0], stages[1]])
        elif kind == "F":
            rank.work(self.does.forward[stages[0]])
        elif kind == "B":
            self._backward(rank, stages[0])
        else:
            rank.work(self.does.halves[stages[0]][kind])

    def _backward(self, rank: PipelineRankClock, stage: int) -> None:
        self.left[stage] -= 1
        if self.does.last is not None and not self.left[stage]:
            for piece in self.does.last[stage]:
                rank.work(piece)
        else:
            rank.work(self.does.backward[stage])

    # --- messages ---
    def pair(self, rank: PipelineRankClock, message: StageMessage) -> tuple[int, ...]:
        """The communicator of two ranks, which the first message between them makes (N7)."""
        return tuple(sorted((rank.number, self.schedule.rank_of[message.peer_stage])))

    def post(
        self, rank: PipelineRankClock, messages: tuple[StageMessage, ...], comm: tuple[int, ...]
    ) -> bool:
        """Launch on a communicator, which runs in order; () is that of the whole pipeline, where
        batches go. False: not known yet when.
        """
        before = rank.newest.get(comm, ())
        if any(message not in self.ended for message in before) or not self.first_use(rank, comm):
            return False
        start = max([rank.host, rank.current, *(self.ended[message] for message in before)])
        rank.newest[comm] = messages
        for message in messages:
            self.ready[message] = start
            self.meet(rank.number, message)
        return True

    def first_use(self, rank: PipelineRankClock, comm: tuple[int, ...]) -> bool:
        """Hosts meet where a communicator is made. False: somebody has not come."""
        if comm in rank.newest:
            return True
        came = self.met.setdefault(comm, {})
        came[rank.number] = rank.host
        if len(came) < (len(comm) or len(self.ranks)):
            return False
        rank.host = max(came.values())
        return True

    def meet(self, number: int, message: StageMessage) -> None:
        peer = message.peer_stage
        other = StageMessage(not message.sends, message.way, peer, message.micro_batch)
        there = self.schedule.rank_of[peer]
        if self.does.ahead:
            self._run_ahead(message, other, (number, there) if message.sends else (there, number))
        elif other in self.ready:
            ns = self.does.message_ns[number, there]
            self.ended[message] = self.ended[other] = (
                max(self.ready[message], self.ready[other]) + ns
            )

    def _run_ahead(
        self, message: StageMessage, other: StageMessage, channel: tuple[int, int]
    ) -> None:
        """A send that fits into the backend's buffer completes at once. Otherwise it waits until an
        earlier message is received (N10).
        """
        sent = self.sent.setdefault(channel, [])
        if message.sends:
            sent.append(message)
        ns, taken = self.does.message_ns[channel], self.taken.setdefault(channel, 0)
        while taken < len(sent):
            send = sent[taken]
            room = self._mate(sent[taken - self.does.ahead]) if taken >= self.does.ahead else None
            if room is not None and room not in self.ready:
                break
            self.ended[send] = max(self.ready[send], self.ready[room] if room is not None else 0)
            taken += 1
        self.taken[channel] = taken
        for one in (message if message.sends else other, *(sent[max(taken - 1, 0) : taken])):
            mate = self._mate(one)
            if one in self.ended and mate in self.ready:
                self.ended[mate] = max(self.ready[mate], self.ended[one] + ns)

    def _mate(self, message: StageMessage) -> StageMessage:
        return StageMessage(not message.sends, message.way, message.peer_stage, message.micro_batch)

    def wait(self, rank: PipelineRankClock, messages: Sequence[StageMessage]) -> bool:
        ends = [self.ended.get(message) for message in messages]
        known = [end for end in ends if end is not None]
        if len(known) < len(ends):
            return False
        rank.current = max([rank.current, *known])
        return True


#: A kind of pass and the model's stages: ("F", stage), ("B", …), ("I", …), ("W", …), or
#: ("pair", stage of the forward pass, stage of the backward pass).
ExecutedPass = tuple[str, int] | tuple[str, int, int]


def executed_pass(
    schedule: PipelineSchedule,
    action: PipelineAction,
    beside: PipelineAction | None,
    overlaps: bool,
) -> ExecutedPass | None:
    """The pass that an action runs, with its own time; None if it runs nothing.

    A pair that overlaps runs with its forward pass. Stage 0 has no gradient of its input, so
    PyTorch runs its whole backward pass at the weights' half, as
    `distsim.scenario.strategies.pipeline.rank_entries` does.
    """
    stage = action.stage % schedule.length
    if beside is not None and overlaps:
        return ("pair", stage, beside.stage % schedule.length) if action.kind == "F" else None
    if action.kind in "IW" and action.stage == 0 and schedule.issue != "batched":
        return None if action.kind == "I" else ("B", stage)
    return action.kind, stage


def executed_passes(
    calls: Sequence[Sequence[PipelineCall]], schedule: PipelineSchedule, overlaps: bool
) -> Counter[ExecutedPass]:
    """How often each pass runs on all ranks of the pipeline together."""
    count: Counter[ExecutedPass] = Counter()
    for row in calls:
        for call in row:
            if call.action is not None and call.what == "compute":
                done = executed_pass(schedule, call.action, call.beside, overlaps)
                count.update([] if done is None else [done])
    return count


def calls_by_rank(schedule: PipelineSchedule, overlaps: bool = False) -> list[list[PipelineCall]]:
    """The calls of every rank of the pipeline. ``overlaps``: passes of a pair overlap."""
    return [
        calls_of_rank(schedule, rank, waits_before_pairs=overlaps) for rank in range(schedule.ranks)
    ]


__all__ = [
    "ExecutedPass",
    "MicroBatchPass",
    "PipelineHang",
    "PipelineTimer",
    "PipelineWork",
    "calls_by_rank",
    "executed_passes",
]
