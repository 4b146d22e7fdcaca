"""Wait-for cycles: ranks that wait for each other.

The shortest cycle through each rank is searched in the graph of waits, first in the proved waits
alone. Two special cases get a text of their own: one rank against many in the same call, and a send
and a receive with different tags. If the graph is incomplete, two observations still prove a cycle:
all other ranks wait for a rank in a group with unknown members, or all ranks are in receives (or
all in sends).
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.hang_doctor.analysis.hang_cause import CauseLine, HangCause
from distsim.hang_doctor.analysis.wait_chains import (
    WaitEdges,
    same_call,
    verdict_of_waits,
    wait_edges,
)
from distsim.hang_doctor.analysis.wait_state import EvidenceWait, JobWaitState
from distsim.hang_doctor.model.evidence_records import EvidenceCall
from distsim.hang_doctor.model.phrases import call_text, ranks_text

#: How many ranks a title lists, and how many lines a cause shows.
_MAX_RANKS_IN_TITLE = 12
_MAX_LINES = 8


def wait_cycles(job: JobWaitState) -> list[HangCause]:
    """The cycles of proved waits, or, if there are none, those that include doubtful waits."""
    proved = _cycles_in(job, wait_edges(job, doubtful=False))
    return proved or _cycles_in(job, wait_edges(job))


def _cycles_in(job: JobWaitState, graph: WaitEdges) -> list[HangCause]:
    cycles = _shortest_cycles(graph)
    opposition = _one_against_many(graph, cycles)
    if opposition is not None:
        return [_one_against_many_cause(job, graph, opposition)]
    if cycles:
        return [_cycle_cause(job, graph, cycle) for cycle in cycles]
    return _cycle_through_unknown_group(job, graph) or _all_in_same_direction(job)


def _shortest_cycles(graph: WaitEdges) -> list[list[int]]:
    """The shortest cycle through each rank that is not in a cycle found before."""
    cycles: list[list[int]] = []
    covered: set[int] = set()
    for start in sorted(graph):
        if start in covered:
            continue
        cycle = _shortest_cycle(graph, start)
        if cycle:
            cycles.append(cycle)
            covered.update(cycle)
    return [cycle for cycle in cycles if not _contains_another(cycle, cycles)]


def _contains_another(cycle: list[int], cycles: list[list[int]]) -> bool:
    """Whether a smaller cycle is part of this one, which then only leads to it."""
    return any(set(other) < set(cycle) for other in cycles)


def _shortest_cycle(graph: WaitEdges, start: int) -> list[int]:
    """The shortest path from a rank back to itself, by breadth-first search; empty if none."""
    predecessor: dict[int, int] = {}
    queue = [start]
    for rank in queue:  # the loop extends the queue
        for other in sorted(graph.get(rank, {})):
            if other == start:
                return _path_to(rank, start, predecessor)
            if other in graph and other not in predecessor:
                predecessor[other] = rank
                queue.append(other)
    return []


def _path_to(rank: int, start: int, predecessor: dict[int, int]) -> list[int]:
    path = [rank]
    while path[-1] != start:
        path.append(predecessor[path[-1]])
    path.reverse()
    return path


# --- cycles of known waits ---


class _Opposition(NamedTuple):
    """One rank waits for many, which are in the same call and wait for it."""

    one: int
    many: list[int]


def _one_against_many(graph: WaitEdges, cycles: list[list[int]]) -> _Opposition | None:
    """Whether all cycles consist of the same rank and one of the others each."""
    if len(cycles) < 2 or any(len(cycle) != 2 for cycle in cycles):
        return None
    common = set(cycles[0]).intersection(*cycles[1:])
    if len(common) != 1:
        return None
    one = common.pop()
    many = sorted(set().union(*cycles) - {one})
    first = graph[many[0]][one]
    for rank in many:
        wait = graph[rank][one]
        if not same_call(wait, first) or wait.call.op != first.call.op:
            return None
    return _Opposition(one, many)


def _one_against_many_cause(
    job: JobWaitState, graph: WaitEdges, opposition: _Opposition
) -> HangCause:
    one, many = opposition
    own_wait = graph[one][many[0]]
    their_wait = graph[many[0]][one]
    own_call = call_text(job.evidence, own_wait.call)
    their_call = call_text(job.evidence, their_wait.call)
    ranks = tuple(sorted([one, *many]))
    grade, culprits = verdict_of_waits((own_wait, their_wait), ranks)
    return HangCause(
        "wait_for_cycle",
        grade,
        f"rank {one} and {ranks_text(many)} wait for each other: rank {one} is in {own_call}, "
        f"the others in {their_call}",
        culprits=culprits,
        ranks=ranks,
        lines=[
            CauseLine((one,), own_call, own_wait.frame),
            CauseLine(tuple(many), their_call, their_wait.frame),
        ],
    )


def _cycle_cause(job: JobWaitState, graph: WaitEdges, cycle: list[int]) -> HangCause:
    successors = [*cycle[1:], cycle[0]]
    waits = [graph[rank][other] for rank, other in zip(cycle, successors, strict=True)]
    calls = [wait.call for wait in waits]
    lines = [
        CauseLine((rank,), call_text(job.evidence, wait.call), wait.frame)
        for rank, wait in zip(cycle, waits, strict=True)
    ]
    if _have_different_tags(calls):
        return HangCause(
            "tag_mismatch", "proved", _tags_title(calls), ranks=tuple(cycle), lines=lines
        )

    ranks = tuple(sorted(cycle))
    if len(cycle) == 1:
        title = f"rank {cycle[0]} waits for itself in {call_text(job.evidence, calls[0])}"
        return HangCause(
            "wait_for_cycle", "proved", title, culprits=ranks, ranks=ranks, lines=lines
        )

    path = " → ".join(str(rank) for rank in [*cycle[:_MAX_RANKS_IN_TITLE], cycle[0]])
    title = f"{ranks_text(cycle)} are in a wait-for cycle ({path}): {_kind_text(calls)}"
    grade, culprits = verdict_of_waits(waits, ranks)
    return HangCause("wait_for_cycle", grade, title, culprits=culprits, ranks=ranks, lines=lines)


def _have_different_tags(calls: list[EvidenceCall]) -> bool:
    """Whether this is a send and a receive that would match, but for their tags."""
    if len(calls) != 2 or {call.op for call in calls} != {"send", "recv"}:
        return False
    first, second = calls
    return first.tag is not None and second.tag is not None and first.tag != second.tag


def _tags_title(calls: list[EvidenceCall]) -> str:
    first, second = calls
    return (
        f"a send and a receive have different tags: {first.op} of rank {first.rank} has tag "
        f"{first.tag}, {second.op} of rank {second.rank} has tag {second.tag}"
    )


def _kind_text(calls: list[EvidenceCall]) -> str:
    """What the ranks of a cycle did in different orders."""
    if all(call.p2p for call in calls):
        return "each waits for a message that its peer would post only later"
    if any(call.p2p for call in calls):
        return (
            "they issue messages and collectives in different orders, or one of them omits a "
            "message"
        )
    if len({call.group for call in calls}) > 1:
        return "they use several groups in different orders"
    return "each waits in a call that the next one has not made"


# --- cycles that incomplete records still prove ---


def _cycle_through_unknown_group(job: JobWaitState, graph: WaitEdges) -> list[HangCause]:
    """A rank is in a call of a group with unknown members, while all other ranks wait for it.

    Whichever members that group has, they wait for the rank, so there is a cycle.
    """
    all_ranks = set(job.ranks)
    if len(all_ranks) < max(job.evidence.world, 2):
        return []
    for rank in job.ranks:
        wait = _wait_in_unknown_group(job, rank)
        if wait is None:
            continue
        others = sorted(all_ranks - {rank})
        if all(rank in graph.get(other, {}) for other in others):
            return [_unknown_group_cause(job, wait, others, graph[others[0]][rank])]
    return []


def _wait_in_unknown_group(job: JobWaitState, rank: int) -> EvidenceWait | None:
    """The first open-ended collective of a rank, if its group is known but not its members."""
    for wait in job.ranks[rank].waits:
        if wait.open_ended and wait.call.number >= 0 and not wait.call.p2p:
            group = job.evidence.groups[wait.call.group]
            return wait if group.sure and group.members is None else None
    return None


def _unknown_group_cause(
    job: JobWaitState, wait: EvidenceWait, others: list[int], their_wait: EvidenceWait
) -> HangCause:
    own_call = call_text(job.evidence, wait.call)
    their_call = call_text(job.evidence, their_wait.call)
    return HangCause(
        "wait_for_cycle",
        "proved",
        f"wait-for cycle: rank {wait.rank} is in {own_call}, and all other ranks wait for it in "
        f"{their_call}; they use the groups in different orders",
        ranks=(wait.rank, *others),
        lines=[
            CauseLine((wait.rank,), own_call, wait.frame),
            CauseLine(tuple(others), their_call, their_wait.frame),
        ],
        details=[f"the dumps do not list the members of the group that rank {wait.rank} uses"],
    )


def _all_in_same_direction(job: JobWaitState) -> list[HangCause]:
    """Every rank is in a receive, so no rank can send; or every rank is in a send.

    Stacks without local variables do not name the peer, so the graph has no edges here.
    """
    states = list(job.ranks.values())
    if len(states) < max(job.evidence.world, 2):
        return []
    if not all(state.waits for state in states):
        return []
    ops = {wait.call.op for state in states for wait in state.waits}
    if ops not in ({"recv"}, {"send"}):
        return []
    op = ops.pop()
    ranks = tuple(sorted(job.ranks))
    return [
        HangCause(
            "wait_for_cycle",
            "proved",
            f"every rank is blocked in a {op}, so no rank {'sends' if op == 'recv' else 'receives'}"
            "",
            culprits=ranks,
            ranks=ranks,
            lines=[CauseLine((state.rank,), op, state.frame) for state in states[:_MAX_LINES]],
        )
    ]
