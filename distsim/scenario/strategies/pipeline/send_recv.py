"""Adds the SEND and RECV actions to a schedule's rows of computations, where PyTorch has them.

All ranks are walked in turn. A rank takes its next action if its input is there; a sender's SEND
and its partner's RECV are added at the same moment, so two ranks never have them in different
orders.

Follows torch.distributed.pipelining 2.13, schedules.py: `_add_unshard_reshard`, `_add_reduce_grad`,
`_add_send_recv`, `_defer_recv_ops`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distsim.scenario.strategies.pipeline.actions import (
    SHARDING_KINDS,
    PipelineAction,
    PipelineSchedule,
    ScheduleRows,
    has_messages,
)

#: The number of a rank's stages that hold their weights at once (`_add_unshard_reshard`).
_MAX_ACTIVE_STAGES = 3
#: Offset of the neighbouring stage that gets a computation's result.
_RESULT_STAGE_OFFSET = {"F": 1, "B": -1, "I": -1}

#: (stage, kind, micro-batch) of an action.
_ActionKey = tuple[int, str, int]


def with_send_recv(schedule: PipelineSchedule, defer: bool = False) -> PipelineSchedule:
    """The schedule with its messages; unchanged if it has them.

    Raises ValueError if the ranks wait for each other in a cycle. With ``defer``, receives are
    moved to just before their use (`defer_pp_recv`).
    """
    if schedule.issue != "runtime" or has_messages(schedule.rows):
        return schedule
    rows = _SendRecvInserter(schedule).rows()
    if defer:
        rows = with_deferred_recv(schedule, rows)
    return schedule._replace(rows=rows)


class _SendRecvInserter:
    """Walks through the rows and builds new ones; ``done`` are the actions taken by each rank."""

    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        self.todo = [_with_sharding_actions(row, schedule.micro_batches) for row in schedule.rows]
        self.out: list[list[PipelineAction]] = [[] for _ in self.todo]
        self.done: list[set[_ActionKey]] = [set() for _ in self.todo]

    def rows(self) -> ScheduleRows:
        positions = [0] * len(self.todo)
        unfinished = [rank for rank, row in enumerate(self.todo) if row]
        while unfinished:
            before = list(positions)
            for rank in unfinished:
                action = self.todo[rank][positions[rank]]
                if self.is_ready(rank, action):
                    self.take(rank, action)
                    positions[rank] += 1
            if positions == before:
                blocked = ", ".join(
                    f"rank {rank} at {self.todo[rank][positions[rank]]}" for rank in unfinished[:4]
                )
                raise ValueError(f"the schedule hangs: {blocked}")
            unfinished = [r for r in unfinished if positions[r] < len(self.todo[r])]
        return tuple(tuple(row) for row in self.out)

    def is_ready(self, rank: int, action: PipelineAction) -> bool:
        """Whether the inputs of an action, or of both parts of a pair, are on the rank."""
        if action.parts:
            return all(self.is_ready(rank, part) for part in action.parts)
        stage, kind, m, _ = action
        done = self.done[rank]
        if kind == "F" and stage > 0:
            return (stage, "RECV_F", m) in done or (stage - 1, "F", m) in done
        if kind in ("B", "I") and stage < self.schedule.stages - 1:
            sources = ((stage, "RECV_B", m), (stage + 1, "I", m), (stage + 1, "B", m))
            return not done.isdisjoint(sources)
        return True

    def take(self, rank: int, action: PipelineAction) -> None:
        """Take an action, and add the messages that carry its result to another rank."""
        self.out[rank].append(action)
        rank_of = self.schedule.rank_of
        for stage, kind, m, _ in action.parts or (action,):
            self.done[rank].add((stage, kind, m))
            offset = _RESULT_STAGE_OFFSET.get(kind)
            if offset is None or not 0 <= stage + offset < len(rank_of):
                continue
            peer = rank_of[stage + offset]
            if peer == rank:
                continue
            direction = "F" if offset > 0 else "B"
            self.add(rank, PipelineAction(stage, f"SEND_{direction}", m))
            self.add(peer, PipelineAction(stage + offset, f"RECV_{direction}", m))

    def add(self, rank: int, action: PipelineAction) -> None:
        self.out[rank].append(action)
        self.done[rank].add(action[:3])


# --- actions that send nothing, but take a turn ---
def _with_sharding_actions(
    row: Sequence[PipelineAction], micro_batches: int
) -> list[PipelineAction]:
    """A row with UNSHARD, RESHARD and REDUCE_GRAD added.

    Each of them is a turn of its rank, so without them messages would be in other places than
    PyTorch's.
    """
    if any(action.kind in SHARDING_KINDS for action in row):
        return list(row)
    actions: list[PipelineAction] = []
    active: list[int] = []
    backwards: Counter[int] = Counter()
    previous: list[int] = []
    for action, upcoming in zip(row, _upcoming_stages(row), strict=True):
        # `_upcoming_stages` returns the same list object while nothing changes.
        if upcoming is not previous:
            added = [stage for stage in upcoming if stage not in active]
            actions += [PipelineAction(s, "RESHARD") for s in active if s not in upcoming]
            actions += [PipelineAction(s, "UNSHARD") for s in added]
            active = [stage for stage in active if stage in upcoming] + added
        previous = upcoming
        actions.append(action)
        for part in action.each:
            if part.kind in ("B", "W"):
                backwards[part.stage] += 1
                if backwards[part.stage] == micro_batches:
                    actions.append(PipelineAction(part.stage, "REDUCE_GRAD"))
    return actions + [PipelineAction(stage, "RESHARD") for stage in active]


def _upcoming_stages(row: Sequence[PipelineAction]) -> list[list[int]]:
    """For each position of a row, the next distinct stages from there on.

    They are three, or more if the third is part of a pair. The row is walked from its end.
    """
    upcoming: list[list[int]] = []
    #: All stages from here on, the next first, and the position at which each comes next.
    ahead: list[int] = []
    next_position: dict[int, int] = {}
    for k in range(len(row) - 1, -1, -1):
        is_same_stage = bool(ahead) and ahead[0] == row[k].stage
        if is_same_stage and not row[k].parts:
            next_position[ahead[0]] = k
            upcoming.append(upcoming[-1])
            continue
        stages = list(dict.fromkeys(part.stage for part in row[k].each))
        next_position |= dict.fromkeys(stages, k)
        ahead = stages + [stage for stage in ahead if stage not in stages]
        count = min(_MAX_ACTIVE_STAGES, len(ahead))
        while count < len(ahead) and next_position[ahead[count]] == next_position[ahead[count - 1]]:
            count += 1
        upcoming.append(ahead[:count])
    return upcoming[::-1]


# --- deferred receives ---
def with_deferred_recv(schedule: PipelineSchedule, rows: ScheduleRows) -> ScheduleRows:
    """Receives moved to just before their use.

    On the lower rank of a pair a receive is never moved behind a send to the same peer. Without
    that exception two neighbours could both send first (pytorch#172668).
    """
    return tuple(
        tuple(_row_with_deferred_recv(schedule, rank, row)) for rank, row in enumerate(rows)
    )


def _row_with_deferred_recv(
    schedule: PipelineSchedule, rank: int, row: Sequence[PipelineAction]
) -> list[PipelineAction]:
    actions: list[PipelineAction] = []
    deferred: dict[_ActionKey, PipelineAction] = {}
    for action in row:
        if action.kind in ("RECV_F", "RECV_B"):
            deferred[action[:3]] = action
            continue
        if action.kind in ("SEND_F", "SEND_B"):
            peer = _peer_rank(schedule, action)
            if rank < peer:
                same_peer = [r for r in deferred.values() if _peer_rank(schedule, r) == peer]
                actions += [deferred.pop(receive[:3]) for receive in same_peer]
        for stage, kind, m, _ in action.each:
            if kind in ("F", "B", "I"):
                key = (stage, "RECV_F" if kind == "F" else "RECV_B", m)
                if key in deferred:
                    actions.append(deferred.pop(key))
        actions.append(action)
    return actions


def _peer_rank(schedule: PipelineSchedule, message: PipelineAction) -> int:
    """The rank at the other end of a SEND or RECV."""
    offset = 1 if message.kind in ("SEND_F", "RECV_B") else -1
    return schedule.rank_of[message.stage + offset]
