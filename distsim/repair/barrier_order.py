"""Which local work waits at a barrier for the work of other ranks.

Key idea: a barrier without data exists for the order of work. In the idiom
`if rank != 0: barrier(); load(); if rank == 0: barrier()`, all other ranks load after rank 0. A
repair of the number of barriers should keep such an order. Only barriers that all members make are
compared: the others never completed.
"""

from __future__ import annotations

from typing import Final, NamedTuple

from distsim.program.model import Program

_BARRIERS: Final = ("barrier", "monitored_barrier")
_WORK: Final = ("assign", "compute", "sleep")


class _Work(NamedTuple):
    """Local work: what it is, and the barriers of one group that its rank made before."""

    what: tuple[str, str, tuple[str, ...]]
    barriers: int


class BarrierOrder:
    """For each group with barriers, the local work of its members in program order."""

    def __init__(self, program: Program) -> None:
        self._work: dict[tuple[int, ...], dict[int, list[_Work]]] = {}
        groups = _groups_with_barriers(program)
        for members in groups:
            by_rank = {rank: _work_of(program, rank, members) for rank in members}
            completed = min(made for _, made in by_rank.values())
            self._work[members] = {
                rank: [each._replace(barriers=min(each.barriers, completed)) for each in work]
                for rank, (work, _) in by_rank.items()
            }

    def lost_in(self, changed: BarrierOrder) -> int:
        """How many pieces of work wait for less work of other ranks than before."""
        lost = 0
        for members, by_rank in self._work.items():
            after = changed._work.get(members, {})
            for rank, work in by_rank.items():
                others = [each for other in members if other != rank for each in by_rank[other]]
                changed_others = [each for other in after if other != rank for each in after[other]]
                changed_work = after.get(rank, [])
                if [each.what for each in work] == [each.what for each in changed_work]:
                    pairs = zip(work, changed_work, strict=True)
                    lost += sum(_before(a, others) > _before(b, changed_others) for a, b in pairs)
        return lost


def _before(work: _Work, others: list[_Work]) -> int:
    """How much work of other ranks is complete when this work starts."""
    return sum(each.barriers < work.barriers for each in others)


def _groups_with_barriers(program: Program) -> list[tuple[int, ...]]:
    calls = (call for rank in program.present for _, call in program.calls_of(rank))
    groups = {call.group.ranks: None for call in calls if call.op in _BARRIERS}
    present = set(program.present)
    return [members for members in groups if present.issuperset(members)]


def _work_of(program: Program, rank: int, members: tuple[int, ...]) -> tuple[list[_Work], int]:
    """The local work of a rank, and the number of its barriers on a group."""
    barriers = 0
    work = []
    for _, call in program.calls_of(rank):
        if call.op in _BARRIERS and call.group.ranks == members:
            barriers += 1
        elif call.op in _WORK:
            names = tuple(buffer.label for buffer in (*call.outputs, *call.writes, *call.adds))
            work.append(_Work((call.op, call.name, names), barriers))
    return work, barriers


__all__ = ["BarrierOrder"]
