"""Where the messages of a schedule stand: rows of computations get the SEND and RECV that PyTorch
gives them.

Follows torch.distributed.pipelining 2.13, schedules.py: `_add_unshard_reshard`, `_add_reduce_grad`,
`_add_send_recv`, `_defer_recv_ops`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distsim.scenario.strategies.pipeline.actions import (
    PipelineAction,
    PipelineSchedule,
    ScheduleRows,
    has_messages,
)

#: How many stages of a rank hold their weights at once (`_add_unshard_reshard`).
_MAX_ACTIVE_STAGES = 3


def with_send_recv(schedule: PipelineSchedule, defer: bool = False) -> PipelineSchedule:
    """The schedule with its messages; unchanged where it has them. Raises ValueError where the
    ranks wait for each other in a circle.

    All ranks are walked in turn, each taking its next action where what it needs has been received.
    A sender's SEND and its partner's RECV are put down at the same moment, so no two ranks ever
    have them in another order. ``defer``: receives wait until just before their use
    (`defer_pp_recv`).
    """
    if schedule.issue != "runtime" or has_messages(schedule.rows):
        return schedule
    found = _SendRecvInserter(schedule).rows()
    return schedule._replace(rows=with_deferred_recv(schedule, found) if defer else found)


class _SendRecvInserter:
    def __init__(self, schedule: PipelineSchedule) -> None:
        self.schedule = schedule
        self.todo = [_with_sharding_actions(row, schedule.micro_batches) for row in schedule.rows]
        self.out: list[list[PipelineAction]] = [[] for _ in self.todo]
        self.done: list[set[tuple[int, str, int]]] = [set() for _ in self.todo]

    def rows(self) -> ScheduleRows:
        at = [0] * len(self.todo)
        left = [r for r, row in enumerate(self.todo) if row]
        while left:
            before = list(at)
            for rank in left:
                action = self.todo[rank][at[rank]]
                if (
                    self.ready(rank, action)
                    if not action.parts
                    else all(self.ready(rank, each) for each in action.parts)
                ):
                    self.take(rank, action)
                    at[rank] += 1
            if at == before:
                stuck = ", ".join(f"rank {r} at {self.todo[r][at[r]]}" for r in left[:4])
                raise ValueError(f"the schedule can't go on: {stuck}")
            left = [r for r in left if at[r] < len(self.todo[r])]
        return tuple(tuple(row) for row in self.out)

    def ready(self, rank: int, action: PipelineAction) -> bool:
        stage, kind, m, _ = action
        done = self.done[rank]
        if kind == "F" and stage > 0:
            return (stage, "RECV_F", m) in done or (stage - 1, "F", m) in done
        if kind in ("B", "I") and stage < self.schedule.stages - 1:
            return not done.isdisjoint(
                ((stage, "RECV_B", m), (stage + 1, "I", m), (stage + 1, "B", m))
            )
        return True

    def take(self, rank: int, action: PipelineAction) -> None:
        self.out[rank].append(action)
        rank_of = self.schedule.rank_of
        for stage, kind, m, _ in action.parts or (action,):
            self.done[rank].add((stage, kind, m))
            way = _RESULT_STAGE_OFFSET.get(kind, 0)
            if not way or not 0 <= stage + way < len(rank_of):
                continue
            peer, send, receive = (
                rank_of[stage + way],
                *(("SEND_F", "RECV_F") if way > 0 else ("SEND_B", "RECV_B")),
            )
            if peer != rank:
                self.put(rank, PipelineAction(stage, send, m))
                self.put(peer, PipelineAction(stage + way, receive, m))

    def put(self, rank: int, action: PipelineAction) -> None:
        self.out[rank].append(action)
        self.done[rank].add(action[:3])


#: To which neighbouring stage a computation's result goes.
_RESULT_STAGE_OFFSET = {"F": 1, "B": -1, "I": -1}


# --- actions that send nothing, but take a turn ---
def _with_sharding_actions(
    row: Sequence[PipelineAction], micro_batches: int
) -> list[PipelineAction]:
    """UNSHARD, RESHARD and REDUCE_GRAD added: each is a turn of its rank, so messages stand where
    PyTorch has them.
    """
    if any(action.kind in ("UNSHARD", "RESHARD", "REDUCE_GRAD") for action in row):
        return list(row)
    found: list[PipelineAction] = []
    active: list[int] = []
    backwards: Counter[int] = Counter()
    last: list[int] = []
    for action, soon in zip(row, _upcoming_stages(row), strict=True):
        if soon is not last:
            found += [PipelineAction(s, "RESHARD") for s in active if s not in soon]
            found += [PipelineAction(s, "UNSHARD") for s in soon if s not in active]
            active = [s for s in active if s in soon] + [s for s in soon if s not in active]
        last = soon
        found.append(action)
        for each in action.parts or (action,):
            if each.kind in ("B", "W"):
                backwards[each.stage] += 1
                if backwards[each.stage] == micro_batches:
                    found.append(PipelineAction(each.stage, "REDUCE_GRAD"))
    return found + [PipelineAction(s, "RESHARD") for s in active]


def _upcoming_stages(row: Sequence[PipelineAction]) -> list[list[int]]:
    """For each place of a row the next distinct stages from there on: three, or more where the
    third is one of a pair.
    """
    found: list[list[int]] = []
    ahead: list[int] = []  # all stages from here on, the next first
    place: dict[int, int] = {}  # of a stage, where it comes next
    for k in range(len(row) - 1, -1, -1):
        if not row[k].parts and ahead and ahead[0] == row[k].stage:  # the same again
            place[ahead[0]] = k
            found.append(found[-1])
            continue
        stages = list(dict.fromkeys(each.stage for each in row[k].each))
        place |= dict.fromkeys(stages, k)
        ahead = stages + [s for s in ahead if s not in stages]
        count = min(_MAX_ACTIVE_STAGES, len(ahead))
        while count < len(ahead) and place[ahead[count]] == place[ahead[count - 1]]:
            count += 1
        found.append(ahead[:count])
    return found[::-1]


# --- late receives ---
def with_deferred_recv(schedule: PipelineSchedule, rows: ScheduleRows) -> ScheduleRows:
    """Receives moved to just before their use, but on the lower rank of a pair never behind a send
    to the same peer.

    Without that exception two neighbours could both send first (pytorch#172668).
    """
    return tuple(
        tuple(_row_with_deferred_recv(schedule, rank, row)) for rank, row in enumerate(rows)
    )


def _row_with_deferred_recv(
    schedule: PipelineSchedule, rank: int, row: Sequence[PipelineAction]
) -> list[PipelineAction]:
    found: list[PipelineAction] = []
    held: dict[tuple[int, str, int], tuple[PipelineAction, int]] = {}
    for action in row:
        if action.kind in ("RECV_F", "RECV_B"):
            held[action[:3]] = (
                action,
                schedule.rank_of[action.stage + (-1 if action.kind == "RECV_F" else 1)],
            )
            continue
        if action.kind in ("SEND_F", "SEND_B"):
            peer = schedule.rank_of[action.stage + (1 if action.kind == "SEND_F" else -1)]
            early = (
                [key for key, (_, source) in held.items() if source == peer] if rank < peer else []
            )
            found += [held.pop(key)[0] for key in early]
        for stage, kind, m, _ in action.each:
            key = (stage, "RECV_F" if kind == "F" else "RECV_B", m)
            if kind in ("F", "B", "I") and key in held:
                found.append(held.pop(key)[0])
        found.append(action)
    return found
