"""Who is blocked, on whom: a state in which nothing can happen any more, told as a `FinalState`."""

from __future__ import annotations

import numpy as np

from distsim.findings.final_state import BlockedRank, FinalState, RankEnd, WaitDependency
from distsim.semantics.form.instructions import (
    AcquireLock,
    AwaitRendezvous,
    BlockForever,
    Instruction,
    PostLaunch,
    SyncDevice,
    WaitForRows,
)
from distsim.semantics.ordered.queue_rules import MissingRanks
from distsim.semantics.ordered.state import QUEUED, RunState
from distsim.semantics.ordered.transitions import TransitionRules


def blocked_state_at(rules: TransitionRules, state: RunState) -> FinalState:
    """What a state that has stopped leaves behind. Ranks that have not ended are blocked at their
    present call.
    """
    told = _OrderedBlockedStateBuilder(rules, state)
    blocked = tuple(told.blocked(rank) for rank, end in enumerate(state.ends) if end is None)
    ends = []
    for rank in rules.program.present:
        end, position = state.ends[rank], rules.position(state, rank)
        ends.append(
            RankEnd(rank, "blocked", position)
            if end is None
            else RankEnd(rank, end.status, position, 0, end.message)
        )
    return FinalState(tuple(ends), blocked, tuple(_unreceived_messages(rules, state)))


def _unreceived_messages(rules: TransitionRules, state: RunState) -> list[tuple[int, int, int]]:
    """Messages that no receive has met, sent or still being sent; not those that were given up."""
    open_sends = [row for rows in state.sends.values() for row in rows] + list(
        state.matcher.open_sends()
    )
    if rules.profile.dropped == "cancels":
        open_sends = [row for row in open_sends if state.phase[row]]
    return [
        (rules.rank_of[row], rules.part(row).position, rules.part(row).part)
        for row in sorted(open_sends)
    ]


def _begun_launches(rules: TransitionRules, state: RunState) -> dict[int, list[int]]:
    """The launches that have begun, by rank: whatever queues stands behind one of these."""
    found: dict[int, list[int]] = {}
    for row in np.flatnonzero(np.frombuffer(bytes(state.phase), dtype=np.uint8) > QUEUED).tolist():
        if rules.is_launch(row):
            found.setdefault(rules.rank_of[row], []).append(row)
    return found


class _OrderedBlockedStateBuilder:
    """What is found of one state once, for all ranks."""

    def __init__(self, rules: TransitionRules, state: RunState) -> None:
        self.rules, self.state, self.begun = rules, state, _begun_launches(rules, state)
        self._met: dict[tuple[int, int], tuple[int, ...]] = {}
        self._lacks: MissingRanks = {}

    def blocked(self, rank: int) -> BlockedRank:
        instruction: Instruction = self.rules.instruction(self.state, rank)
        if isinstance(instruction, AwaitRendezvous):
            return BlockedRank(
                rank,
                instruction.position,
                (WaitDependency(instruction.position, -1, self._not_met(rank, instruction)),),
            )
        if isinstance(instruction, BlockForever):
            return BlockedRank(
                rank,
                instruction.position,
                (WaitDependency(instruction.position, -1, instruction.ranks),),
            )
        found: dict[WaitDependency, None] = {}
        for row in self._waited_for(rank):
            for need in self._needs(row):
                found[need] = None
        return BlockedRank(
            rank, instruction.position, tuple(found), device=self.rules.profile.device
        )

    def _not_met(self, rank: int, meet: AwaitRendezvous) -> tuple[int, ...]:
        """Whom a rank still expects; one tuple for all who expect the same."""
        found: dict[int, None] = {}
        for instance, members in self.rules.meetings(rank, meet):
            if meet.lost:
                return tuple(r for r in members if r >= 0 and r != rank)
            there = self.state.meets.get(instance, {})
            if rank not in there:  # everybody has come
                continue
            key = instance, id(members)
            if key not in self._met:
                self._met[key] = tuple(r for r in members if r >= 0 and r not in there)
            if len(meet.spots) <= 1:
                return self._met[key]
            found |= dict.fromkeys(self._met[key])
        return tuple(found)

    def _waited_for(self, rank: int) -> list[int]:
        """Open rows that the rank's host waits for, batches by their parts."""
        rules, phase = self.rules, self.state.phase
        instruction, base, begun = (
            rules.instruction(self.state, rank),
            rules.base[rank],
            self.begun.get(rank, []),
        )
        if isinstance(instruction, SyncDevice):
            rows = begun
        elif isinstance(
            instruction, (AcquireLock, PostLaunch)
        ):  # the lock is with a collective of the rank's worker
            rows = [row for row in begun if rules.task(row).queue >= 0]
        else:
            rows = (
                [base + row for row in instruction.rows if phase[base + row]]
                if isinstance(instruction, WaitForRows)
                else []
            )
        return [base + part for row in rows for part in rules.task(row).parts if phase[base + part]]

    def _needs(self, row: int) -> list[WaitDependency]:
        """What must come before a row can finish: its own partners, or, while it queues, those of
        the rows ahead of it.
        """
        rules = self.rules
        if self.state.phase[row] != QUEUED:
            return [self._need(row)]
        task, rank = rules.task(row), rules.rank_of[row]
        if task.queue >= 0:
            ahead = [
                self._need(other)
                for other in self.state.queues[rank * rules.most_queues + task.queue][: task.width]
            ]
            if len(ahead) == 1:
                return ahead
            ranks = tuple(sorted({rank for need in ahead for rank in need.ranks}))
            return [WaitDependency(ahead[0].position, ahead[0].part, ranks, any=True)]
        return [
            need
            for other in _running_parts_ahead(rules, self.state, rank, task.after)
            for need in self._needs(other)
        ]

    def _need(self, row: int) -> WaitDependency:
        part = self.rules.part(row)
        ranks, any_one = self.rules.lacking(self.state, row, self._lacks)
        return WaitDependency(part.position, part.part, ranks, any_one)


def _running_parts_ahead(
    rules: TransitionRules, state: RunState, rank: int, after: tuple[int, ...]
) -> list[int]:
    """The running parts that stand before a launch, over all launches between."""
    base, seen, found, todo = rules.base[rank], set[int](), list[int](), list(after)
    while todo:
        row = base + todo.pop()
        if row in seen or not state.phase[row]:
            continue
        seen.add(row)
        task = rules.task(row)
        if state.phase[row] == QUEUED:
            todo.extend(task.after)
        else:
            found.extend(base + part for part in task.parts if state.phase[base + part])
    return sorted(found)
