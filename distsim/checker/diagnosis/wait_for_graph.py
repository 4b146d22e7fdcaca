"""The wait-for graph of a hang: which ranks wait for which, and which of them are the cause.

Key idea: a hang has two kinds of cause. Ranks wait for each other in a cycle, or a rank waits for a
rank that has exited. All other blocked ranks are victims: they wait behind a cause.

The graph does not say which call a rank should have made; see `awaited_call`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from distsim.findings.final_state import BlockedRank, FinalState, WaitDependency

if TYPE_CHECKING:
    import networkx as nx


class WaitEdge(NamedTuple):
    """A blocked rank, one of its needs, and one of the ranks that would have to act."""

    rank: int
    need: WaitDependency
    awaited: int


@dataclass(frozen=True, slots=True)
class WaitCycle:
    """Ranks that all wait for each other, directly or through others.

    ``ranks`` are all ranks that lie on some cycle of the component. ``path`` is a shortest cycle,
    starting at its lowest rank. ``has_any_source``: an any-source receive takes part (a knot).
    """

    ranks: tuple[int, ...]
    path: tuple[int, ...]
    has_any_source: bool


@dataclass(frozen=True, slots=True)
class WaitForGraph:
    """The causes of a hang.

    ``waits_on_exited[rank]`` are the exited ranks that a blocked rank waits for directly. ``core``
    are the ranks on a cycle and those of ``waits_on_exited``; ``victims`` are the other blocked
    ranks.
    """

    circles: tuple[WaitCycle, ...]
    waits_on_exited: dict[int, tuple[int, ...]]
    core: tuple[int, ...]
    victims: tuple[int, ...]


def build_wait_for_graph(final_state: FinalState) -> WaitForGraph:
    """Find the causes of a hang.

    An AND edge leads to each rank of a need, an OR edge (`WaitDependency.any`) to each rank that
    could help.
    """
    blocked = {state.rank: state for state in final_state.blocked}
    waits_on_exited = _exited_ranks_awaited(blocked)
    cycles = _single_wait_cycles(blocked)
    if cycles is None:
        cycles = _wait_cycles(blocked)
    core = set(waits_on_exited)
    for cycle in cycles:
        core.update(cycle.ranks)
    victims = tuple(rank for rank in blocked if rank not in core)
    return WaitForGraph(cycles, waits_on_exited, tuple(sorted(core)), victims)


def _exited_ranks_awaited(blocked: dict[int, BlockedRank]) -> dict[int, tuple[int, ...]]:
    """The exited ranks that each blocked rank waits for, for ranks that wait for any."""
    # Thousands of ranks may share one tuple of awaited ranks: look at each tuple once.
    exited_of: dict[tuple[int, bool], tuple[int, ...]] = {}
    found = {}
    for rank, state in blocked.items():
        awaited = []
        for need in state.needs:
            key = id(need.ranks), need.any
            if key not in exited_of:
                exited_of[key] = _exited_ranks_of(need, blocked)
            if exited_of[key]:
                awaited.append(exited_of[key])
        if len(awaited) == 1:
            found[rank] = awaited[0]
        elif awaited:
            found[rank] = tuple(dict.fromkeys(other for ranks in awaited for other in ranks))
    return found


def _exited_ranks_of(need: WaitDependency, blocked: dict[int, BlockedRank]) -> tuple[int, ...]:
    """The exited ranks without which a need cannot be met."""
    # In an altered trace, a collective may have lost its root; its peer is then -1.
    exited = tuple(rank for rank in need.ranks if rank >= 0 and rank not in blocked)
    can_still_be_met = need.any and len(exited) < len(need.ranks)
    return () if can_still_be_met else exited


def _single_wait_cycles(blocked: dict[int, BlockedRank]) -> tuple[WaitCycle, ...] | None:
    """The cycles, if each rank waits for at most one other; None if some rank waits for more.

    Then every walk along the edges either returns to a rank it has visited, or ends. That avoids
    the import of networkx.
    """
    next_rank: dict[int, int] = {}
    for rank, state in blocked.items():
        if len(state.needs) > 1 or any(len(need.ranks) > 1 for need in state.needs):
            return None
        for need in state.needs:
            if need.ranks and need.ranks[0] in blocked:
                next_rank[rank] = need.ranks[0]

    cycles: list[WaitCycle] = []
    first_seen_from: dict[int, int] = {}
    for start in sorted(blocked):
        rank = start
        while rank in next_rank and rank not in first_seen_from:
            first_seen_from[rank] = start
            rank = next_rank[rank]
        # The walk from `start` returned to a rank of the same walk; a rank may wait for itself.
        if first_seen_from.get(rank) == start and next_rank[rank] != rank:
            cycles.append(_cycle_through(rank, next_rank, blocked))
    return tuple(sorted(cycles, key=lambda cycle: cycle.ranks))


def _cycle_through(
    rank: int, next_rank: dict[int, int], blocked: dict[int, BlockedRank]
) -> WaitCycle:
    walk = [rank]
    while next_rank[walk[-1]] != rank:
        walk.append(next_rank[walk[-1]])
    lowest = walk.index(min(walk))
    has_any_source = any(need.any for member in walk for need in blocked[member].needs)
    return WaitCycle(tuple(sorted(walk)), tuple(walk[lowest:] + walk[:lowest]), has_any_source)


def _wait_cycles(blocked: dict[int, BlockedRank]) -> tuple[WaitCycle, ...]:
    """Strongly connected components of two or more ranks, ordered by their lowest rank.

    Each set of awaited ranks becomes one intermediate node with a negative number, so that 512
    ranks that wait for 512 others need 1024 edges, not 262 144.
    """
    import networkx as nx  # takes a fifth of a second to import, and is needed only for a hang

    graph: nx.DiGraph[int] = nx.DiGraph()
    # By identity, because hashing a long tuple for each rank that waits for it is slow.
    node_of: dict[int, int] = {}
    node_of_set: dict[tuple[int, ...], int] = {}
    for rank, state in blocked.items():
        for need in state.needs:
            if id(need.ranks) not in node_of:
                node = node_of_set.setdefault(need.ranks, -1 - len(node_of_set))
                node_of[id(need.ranks)] = node
                graph.add_edges_from((node, other) for other in need.ranks if other in blocked)
            node = node_of[id(need.ranks)]
            if node in graph:  # otherwise none of the awaited ranks is blocked
                graph.add_edge(rank, node)

    cycles = []
    for component in nx.strongly_connected_components(graph):
        ranks = tuple(sorted(node for node in component if node >= 0))
        if len(ranks) < 2:
            continue
        path = ranks
        if len(ranks) > 2:
            path = _shortest_cycle(graph.subgraph(component), ranks[0])
        cycles.append(WaitCycle(ranks, path, _has_any_source(component, ranks, blocked)))
    return tuple(sorted(cycles, key=lambda cycle: cycle.ranks))


def _has_any_source(
    component: set[int], ranks: tuple[int, ...], blocked: dict[int, BlockedRank]
) -> bool:
    """Whether some rank waits for any one of several ranks, one of them in the component."""
    needs = (need for rank in ranks for need in blocked[rank].needs)
    return any(need.any and not component.isdisjoint(need.ranks) for need in needs)


def _shortest_cycle(graph: nx.DiGraph[int], start: int) -> tuple[int, ...]:
    """The ranks of a shortest cycle through a rank, without the intermediate nodes."""
    import networkx as nx

    predecessor: dict[int, int] = {}
    for node, before in nx.bfs_predecessors(graph, start):
        predecessor[node] = before
        if node >= 0 and any(graph.has_edge(middle, start) for middle in graph.successors(node)):
            path = [node]
            while path[-1] != start:
                path.append(predecessor[predecessor[path[-1]]])
            return tuple(reversed(path))
    return (start,)


def need_towards(state: BlockedRank, towards: int) -> WaitDependency:
    """The need of a blocked rank that leads to another rank (its first one if none does)."""
    return next((need for need in state.needs if towards in need.ranks), state.needs[0])
