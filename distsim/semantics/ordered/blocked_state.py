"""Which ranks are blocked, and on which ranks, in a state in which nothing more can happen."""

from __future__ import annotations

import numpy as np

from distsim.findings.final_state import BlockedRank, FinalState, RankEnd, WaitDependency
from distsim.semantics.form.blocked_state_builder import BlockedStateBuilder
from distsim.semantics.form.instructions import (
    AcquireLock,
    AwaitRendezvous,
    BlockForever,
    Instruction,
    OperationLaunch,
    PostLaunch,
    SyncDevice,
    WaitForRows,
)
from distsim.semantics.ordered.queue_rules import MissingRanks
from distsim.semantics.ordered.state import QUEUED, RunState
from distsim.semantics.ordered.transitions import TransitionRules


def blocked_state_at(rules: TransitionRules, state: RunState) -> FinalState:
    """The result of a state that has stopped.

    Ranks that have not ended are blocked in their current call.
    """
    builder = _OrderedBlockedStateBuilder(rules, state)
    blocked = tuple(
        builder.blocked(rank)
        for rank, end in enumerate(state.ends)
        if end is None or _is_blocked_in_exit(rules, state, rank)
    )
    ends = tuple(_end_of_rank(rules, state, rank) for rank in rules.program.present)
    return FinalState(ends, blocked, tuple(_unreceived_messages(rules, state)))


def _end_of_rank(rules: TransitionRules, state: RunState, rank: int) -> RankEnd:
    end, position = state.ends[rank], rules.position(state, rank)
    if _is_blocked_in_exit(rules, state, rank):
        position = rules.part(rules.open_collectives(state, rank)[0]).position
        return RankEnd(rank, "blocked", position)
    if end is None:
        return RankEnd(rank, "blocked", position)
    return RankEnd(rank, end.status, position, 0, end.message)


def _is_blocked_in_exit(rules: TransitionRules, state: RunState, rank: int) -> bool:
    """Whether a process cannot end, because it waits for a collective. A failed rank counts as
    failed. A process without open collectives can end: the state is then not the last one.
    """
    end = state.ends[rank]
    if rank not in state.exiting or end is None or end.status != "ended":
        return False
    return bool(rules.open_collectives(state, rank))


def _unreceived_messages(rules: TransitionRules, state: RunState) -> list[tuple[int, int, int]]:
    """(rank, position, part) of messages that no receive has matched, sent or still being sent.

    Messages that were cancelled are not among them.
    """
    open_sends = [row for rows in state.sends.values() for row in rows]
    open_sends += state.matcher.open_sends()
    if rules.profile.dropped == "cancels":
        # A cancelled send keeps its place in the queue (G4), but is closed.
        open_sends = [row for row in open_sends if state.phase[row]]
    return [
        (rules.rank_of[row], rules.part(row).position, rules.part(row).part)
        for row in sorted(open_sends)
    ]


def _started_launches(rules: TransitionRules, state: RunState) -> dict[int, list[int]]:
    """The open launches that have started, by rank. Every queued launch is behind one of these."""
    phase = np.frombuffer(bytes(state.phase), dtype=np.uint8)
    by_rank: dict[int, list[int]] = {}
    for row in np.flatnonzero(phase > QUEUED).tolist():
        if rules.is_launch(row):
            by_rank.setdefault(rules.rank_of[row], []).append(row)
    return by_rank


class _OrderedBlockedStateBuilder(BlockedStateBuilder):
    """Answers the questions of `BlockedStateBuilder` from a `RunState`."""

    def __init__(self, rules: TransitionRules, state: RunState) -> None:
        self.rules, self.state, self.linked = rules, state, rules.linked
        self.started_launches = _started_launches(rules, state)
        self._missing_at_rendezvous: dict[tuple[int, int], tuple[int, ...]] = {}
        self._missing: MissingRanks = {}

    def blocked(self, rank: int) -> BlockedRank:
        if self.state.ends[rank] is not None:
            rows = self.rules.open_collectives(self.state, rank)
            dependencies = self._distinct_dependencies(rows)
            return BlockedRank(rank, self.rules.part(rows[0]).position, dependencies)
        instruction: Instruction = self.rules.instruction(self.state, rank)
        position = instruction.position
        if isinstance(instruction, AwaitRendezvous):
            missing = self._expected_by(rank, instruction)
            return BlockedRank(rank, position, (WaitDependency(position, -1, missing),))
        if isinstance(instruction, BlockForever):
            return BlockedRank(rank, position, (WaitDependency(position, -1, instruction.ranks),))
        dependencies = self._distinct_dependencies(self._rows_waited_for(rank))
        return BlockedRank(rank, position, dependencies, device=self.rules.profile.device)

    def _expected_by(self, rank: int, rendezvous: AwaitRendezvous) -> tuple[int, ...]:
        """Ranks that a rank still expects at a rendezvous.

        Ranks that expect the same share one tuple.
        """
        expected: dict[int, None] = {}
        for instance, members in self.rules.meetings(rank, rendezvous):
            if rendezvous.lost:
                return tuple(member for member in members if member >= 0 and member != rank)
            arrived = self.state.at_rendezvous.get(instance, {})
            if rank not in arrived:  # all members have arrived there
                continue
            key = instance, id(members)
            if key not in self._missing_at_rendezvous:
                missing = tuple(m for m in members if m >= 0 and m not in arrived)
                self._missing_at_rendezvous[key] = missing
            if len(rendezvous.points) <= 1:
                return self._missing_at_rendezvous[key]
            expected |= dict.fromkeys(self._missing_at_rendezvous[key])
        return tuple(expected)

    def _rows_waited_for(self, rank: int) -> list[int]:
        """The open parts of the launches that the rank's host waits for."""
        rules, phase, base = self.rules, self.state.phase, self.rules.base[rank]
        parts = [
            base + part for row in self._launches_waited_for(rank) for part in rules.task(row).parts
        ]
        return [part for part in parts if phase[part]]

    def _launches_waited_for(self, rank: int) -> list[int]:
        instruction = self.rules.instruction(self.state, rank)
        started = self.started_launches.get(rank, [])
        if isinstance(instruction, SyncDevice):
            return started
        if isinstance(instruction, (AcquireLock, PostLaunch)):
            # A collective of the rank's worker holds the process's lock.
            return [row for row in started if self.rules.task(row).queue >= 0]
        if isinstance(instruction, WaitForRows):
            rows = [self.rules.base[rank] + row for row in instruction.rows]
            return [row for row in rows if self.state.phase[row]]
        return []

    # --- the questions of the base class ---
    def _launch_of(self, row: int) -> OperationLaunch:
        return self.rules.task(row).launch

    def _is_open(self, row: int) -> bool:
        return bool(self.state.phase[row])

    def _has_started(self, row: int) -> bool:
        return self.state.phase[row] != QUEUED

    def _own_dependencies(self, row: int) -> list[WaitDependency]:
        return [self._dependency(row)]

    def _dependency(self, row: int) -> WaitDependency:
        part = self.rules.part(row)
        ranks, any_rank_suffices = self.rules.lacking(self.state, row, self._missing)
        return WaitDependency(part.position, part.part, ranks, any_rank_suffices)

    def _dependencies_ahead(self, row: int) -> list[WaitDependency]:
        """For a queue with workers: any of the launches that occupy them must end."""
        rules, rank = self.rules, self.rules.rank_of[row]
        task = rules.task(row)
        if task.queue < 0:
            return super()._dependencies_ahead(row)
        queue = self.state.queues[rank * rules.queues_per_rank + task.queue]
        ahead = [self._dependency(other) for other in queue[: task.width]]
        if len(ahead) == 1:
            return ahead
        ranks = {rank for dependency in ahead for rank in dependency.ranks}
        first = ahead[0]
        return [WaitDependency(first.position, first.part, tuple(sorted(ranks)), any=True)]
