"""The wait-for graph at a standstill: who waits for whom, which ranks are the cause, which merely wait behind them."""

from __future__ import annotations

from dataclasses import dataclass

from distsim.standstill import Blocked, Need, Standstill


@dataclass(frozen=True, slots=True)
class Circle:
    """Ranks that all wait for each other, directly or through others. ``path`` is a shortest way round, from its lowest rank.

    ``ranks`` are all ranks that lie on some way round. ``by_choice``: a receive from any source belongs to it (a knot).
    """

    ranks: tuple[int, ...]
    path: tuple[int, ...]
    by_choice: bool


@dataclass(frozen=True, slots=True)
class WaitFor:
    """What the graph shows. ``on_gone[rank]``: those whom a blocked rank waits for directly and who have left.

    ``core`` are the ranks on a circle and those of ``on_gone``; ``victims`` are the other blocked ranks.
    """

    circles: tuple[Circle, ...]
    on_gone: dict[int, tuple[int, ...]]
    core: tuple[int, ...]
    victims: tuple[int, ...]


def wait_for(standstill: Standstill) -> WaitFor:
    """Read the graph of a standstill. An AND edge leads to each rank of a need, an OR edge (`Need.any`) to each that could
    help."""
    blocked = {b.rank: b for b in standstill.blocked}
    circles = _circles(blocked)
    on_gone = {}
    for rank, state in blocked.items():
        gone = [r for need in state.needs if not need.any or not any(r in blocked for r in need.ranks)
                for r in need.ranks if r not in blocked]  # fmt: skip
        if gone:
            on_gone[rank] = tuple(dict.fromkeys(gone))
    core = sorted({r for c in circles for r in c.ranks} | on_gone.keys())
    inside = set(core)
    return WaitFor(circles, on_gone, tuple(core), tuple(r for r in blocked if r not in inside))


def _circles(blocked: dict[int, Blocked]) -> tuple[Circle, ...]:
    """Strongly connected components of two ranks or more, by their lowest rank.

    Equal sets of awaited ranks are one node between, so that 512 ranks waiting for 512 others are 1024 edges, not 262 144.
    """
    import networkx as nx  # a fifth of a second to import, needed only at a standstill

    graph: nx.DiGraph[int | tuple[int, ...]] = nx.DiGraph()
    graph.add_nodes_from(blocked)
    seen: set[tuple[int, ...]] = set()
    for rank, state in blocked.items():
        for need in state.needs:
            graph.add_edge(rank, need.ranks)
            if need.ranks not in seen:
                seen.add(need.ranks)
                graph.add_edges_from((need.ranks, other) for other in need.ranks if other in blocked)
    found = []
    for component in nx.strongly_connected_components(graph):
        ranks = sorted(r for r in component if isinstance(r, int))
        if len(ranks) > 1:
            inside = frozenset(ranks)
            by_choice = any(need.any and inside & set(need.ranks) for r in ranks for need in blocked[r].needs)
            found.append(Circle(tuple(ranks), _shortest(blocked, ranks[0], inside), by_choice))
    return tuple(sorted(found, key=lambda c: c.ranks))


def _shortest(blocked: dict[int, Blocked], start: int, inside: frozenset[int]) -> tuple[int, ...]:
    """A shortest path from a rank back to itself among the ranks of its component."""
    before: dict[int, int] = {}
    done: set[tuple[int, ...]] = set()
    queue = [start]
    for rank in queue:
        for need in blocked[rank].needs:
            if start in need.ranks and rank != start:
                return _path(before, start, rank)
            if need.ranks in done:
                continue
            done.add(need.ranks)
            for other in need.ranks:
                if other in inside and other != start and other not in before:
                    before[other] = rank
                    queue.append(other)
    return (start,)


def _path(before: dict[int, int], start: int, end: int) -> tuple[int, ...]:
    path = [end]
    while path[-1] != start:
        path.append(before[path[-1]])
    return tuple(reversed(path))


def edge(state: Blocked, towards: int) -> Need:
    """The need of a blocked rank that leads to another rank (its first one if none does)."""
    return next((need for need in state.needs if towards in need.ranks), state.needs[0])
