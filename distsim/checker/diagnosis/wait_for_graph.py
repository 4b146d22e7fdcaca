"""The wait-for graph at a standstill: who waits for whom, which ranks are the cause, which merely
wait behind them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from distsim.findings.final_state import BlockedRank, FinalState, WaitDependency

if TYPE_CHECKING:
    import networkx as nx


@dataclass(frozen=True, slots=True)
class WaitCycle:
    """Ranks that all wait for each other, directly or through others. ``path`` is a shortest way
    round, from its lowest rank.

    ``ranks`` are all ranks that lie on some way round. ``by_choice``: a receive from any source
    belongs to it (a knot).
    """

    ranks: tuple[int, ...]
    path: tuple[int, ...]
    has_any_source: bool


@dataclass(frozen=True, slots=True)
class WaitForGraph:
    """What the graph shows. ``on_gone[rank]``: those whom a blocked rank waits for directly and who
    have left.

    ``core`` are the ranks on a circle and those of ``on_gone``; ``victims`` are the other blocked
    ranks.
    """

    circles: tuple[WaitCycle, ...]
    waits_on_exited: dict[int, tuple[int, ...]]
    core: tuple[int, ...]
    victims: tuple[int, ...]


def build_wait_for_graph(final_state: FinalState) -> WaitForGraph:
    """Read the graph of a standstill. An AND edge leads to each rank of a need, an OR edge
    (`WaitDependency.any`) to each that could help."""
    blocked = {b.rank: b for b in final_state.blocked}
    circles, waits_on_exited = _single_wait_cycles(blocked), _exited_ranks_awaited(blocked)
    circles = _wait_cycles(blocked) if circles is None else circles
    core = sorted({r for c in circles for r in c.ranks} | waits_on_exited.keys())
    inside = set(core)
    return WaitForGraph(
        circles, waits_on_exited, tuple(core), tuple(r for r in blocked if r not in inside)
    )


def _exited_ranks_awaited(blocked: dict[int, BlockedRank]) -> dict[int, tuple[int, ...]]:
    """Those who have left, per rank that waits for them. Ranks that share a set of awaited ranks
    share what is said of it.
    """
    said: dict[tuple[int, bool], tuple[int, ...]] = {}
    found = {}
    for rank, state in blocked.items():
        left = []
        for need in state.needs:
            key = id(need.ranks), need.any
            if key not in said:
                gone = tuple(r for r in need.ranks if r not in blocked)
                said[key] = () if need.any and len(gone) < len(need.ranks) else gone
            left += [said[key]] if said[key] else []
        if left:
            found[rank] = (
                left[0]
                if len(left) == 1
                else tuple(dict.fromkeys(r for gone in left for r in gone))
            )
    return found


def _single_wait_cycles(blocked: dict[int, BlockedRank]) -> tuple[WaitCycle, ...] | None:
    """Where each rank waits for one other at most: whoever is followed from comes back to himself,
    or nowhere. Else None.
    """
    following: dict[int, int] = {}
    for rank, state in blocked.items():
        if len(state.needs) > 1 or any(len(need.ranks) > 1 for need in state.needs):
            return None
        following.update(
            (rank, other) for need in state.needs for other in need.ranks if other in blocked
        )
    found, seen = [], dict[int, int]()  # rank -> from where it was first come to
    for start in sorted(blocked):
        rank = start
        while rank in following and rank not in seen:
            seen[rank] = start
            rank = following[rank]
        if seen.get(rank) == start and following[rank] != rank:
            way = [rank]
            while following[way[-1]] != rank:
                way.append(following[way[-1]])
            low = way.index(min(way))
            path = tuple(way[low:] + way[:low])
            found.append(
                WaitCycle(
                    tuple(sorted(way)),
                    path,
                    any(need.any for one in way for need in blocked[one].needs),
                )
            )
    return tuple(sorted(found, key=lambda c: c.ranks))


def _wait_cycles(blocked: dict[int, BlockedRank]) -> tuple[WaitCycle, ...]:
    """Strongly connected components of two ranks or more, by their lowest rank.

    Equal sets of awaited ranks are one node between, a negative number, so that 512 ranks waiting
    for 512 others are 1024 edges, not 262 144.
    """
    import networkx as nx  # a fifth of a second to import, needed only at a standstill

    graph: nx.DiGraph[int] = nx.DiGraph()
    nodes: dict[
        int, int
    ] = {}  # a tuple's identity -> its node: it is hashed once, however many wait for it
    sets: dict[tuple[int, ...], int] = {}
    for rank, state in blocked.items():
        for need in state.needs:
            if id(need.ranks) not in nodes:
                node = nodes[id(need.ranks)] = sets.setdefault(need.ranks, -1 - len(sets))
                graph.add_edges_from((node, other) for other in need.ranks if other in blocked)
            if nodes[id(need.ranks)] in graph:  # else nobody there waits in turn
                graph.add_edge(rank, nodes[id(need.ranks)])
    found = []
    for component in nx.strongly_connected_components(graph):
        ranks = sorted(r for r in component if r >= 0)
        if len(ranks) > 1:
            has_any_source = any(
                need.any and not component.isdisjoint(need.ranks)
                for r in ranks
                for need in blocked[r].needs
            )
            path = (
                tuple(ranks)
                if len(ranks) == 2
                else _shortest_cycle(graph.subgraph(component), ranks[0])
            )
            found.append(WaitCycle(tuple(ranks), path, has_any_source))
    return tuple(sorted(found, key=lambda c: c.ranks))


def _shortest_cycle(graph: nx.DiGraph[int], start: int) -> tuple[int, ...]:
    """A shortest path of ranks from one back to itself."""
    import networkx as nx

    before: dict[int, int] = {}
    for node, last in nx.bfs_predecessors(graph, start):
        before[node] = last
        if node >= 0 and any(graph.has_edge(between, start) for between in graph.successors(node)):
            path = [node]
            while path[-1] != start:
                path.append(before[before[path[-1]]])
            return tuple(reversed(path))
    return (start,)


def need_towards(state: BlockedRank, towards: int) -> WaitDependency:
    """The need of a blocked rank that leads to another rank (its first one if none does)."""
    return next((need for need in state.needs if towards in need.ranks), state.needs[0])
