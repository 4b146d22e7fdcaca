"""Ranks that may change places: states that differ by such an exchange alone are one state.

Kept simple: ranks whose programs are equal call by call, whom no other rank names as sender,
receiver or root, and who receive nothing from any source themselves. Senders that all do the same
towards an open receive are such ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from distsim.checker.explore.encoding import ProgramEncoding

SymmetryClasses = tuple[tuple[int, ...], ...]


def symmetric_ranks(tables: ProgramEncoding) -> SymmetryClasses:
    """Classes of two ranks or more that may change places, ascending."""
    named = _distinguished_ranks(tables)
    classes: dict[Hashable, list[int]] = {}
    for rank in range(tables.size):
        if rank not in named:
            classes.setdefault(_behaviour_of(tables, rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in classes.values() if len(ranks) > 1)


def _distinguished_ranks(tables: ProgramEncoding) -> set[int]:
    """Ranks that some call of another names, that a fault strikes, or that receive."""
    layout = tables.layout
    found = {layout.chan_dst[c] for c in (*tables.sends, *tables.receives)}
    found |= {layout.chan_src[c] for c in tables.receives if layout.chan_src[c] >= 0}
    found |= {p.assume for box in tables.boxes for p in box.any_source_receives}
    found |= {fault.rank for fault in layout.program.faults}
    for stops in tables.stops:
        found |= {
            request.ranks[0]
            for stop in stops
            for request in stop.requests
            if len(request.ranks) == 1
        }
    for code in layout.program.codes:
        for call in code.calls:
            root = call.fields.get("root")
            if root is not None:
                found |= set(root.tolist() if hasattr(root, "tolist") else [root])
    return found


def _behaviour_of(tables: ProgramEncoding, rank: int) -> Hashable:
    """All that a rank does, without its own number."""
    layout, posts = tables.layout, tables.posts[rank]
    messages = tuple(
        (layout.chan_group[c], layout.chan_dst[c], layout.chan_tag[c], tuple(tables.sends[c]))
        for c in sorted(tables.sends)
        if layout.chan_src[c] == rank
    )
    calls = tuple(
        (sequence, tuple(p)) for (sequence, who), p in sorted(tables.joins.items()) if who == rank
    )
    waits = tuple(
        (stop.position, tuple(q[:2] for q in stop.requests)) for stop in tables.stops[rank]
    )
    return messages, calls, waits, posts.status, posts.end, posts.message


def symmetric_images(
    ranks: Sequence[int], classes: SymmetryClasses, most: int
) -> list[tuple[int, ...]]:
    """Every set of ranks that an exchange within classes makes of one, at most ``most`` of them."""
    from itertools import combinations, islice, product

    mine = set(ranks)
    fixed = mine - {r for c in classes for r in c}
    options = [combinations(c, len(mine & set(c))) for c in classes if mine & set(c)]
    return [
        tuple(sorted({*fixed, *(r for part in parts for r in part)}))
        for parts in islice(product(*options), most)
    ]


def orbit(ranks: Sequence[int], classes: SymmetryClasses) -> set[int]:
    """The ranks and all that may stand in their place."""
    found = set(ranks)
    return found.union(*(c for c in classes if found & set(c)))
