"""Find interchangeable ranks: states that differ only by exchanging them count as one state.

The criterion is kept simple: it may miss interchangeable ranks, but never takes others for them,
because a wrong class would hide states. Ranks are interchangeable if their programs are equal call
by call, no other rank names one of them as sender, receiver or root, and they receive no messages
themselves. Workers that all send the same to an any-source receive are such ranks.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence

from distsim.checker.explore.encoding import ProgramEncoding
from distsim.checker.matching.channel_layout import ANY_SOURCE

SymmetryClasses = tuple[tuple[int, ...], ...]


def symmetric_ranks(encoding: ProgramEncoding) -> SymmetryClasses:
    """Classes of two or more interchangeable ranks, each ascending."""
    distinguished = _distinguished_ranks(encoding)
    classes: dict[Hashable, list[int]] = {}
    for rank in range(encoding.size):
        if rank not in distinguished:
            classes.setdefault(_behaviour_of(encoding, rank), []).append(rank)
    return tuple(tuple(ranks) for ranks in classes.values() if len(ranks) > 1)


def _distinguished_ranks(encoding: ProgramEncoding) -> set[int]:
    """Ranks that receive, that some call of another rank names, or that a fault strikes.

    Exchanging such a rank with another one would change what a third rank waits for, or which rank
    a fault strikes.
    """
    layout = encoding.layout
    found = {layout.chan_dst[channel] for channel in (*encoding.sends, *encoding.receives)}
    sources = {layout.chan_src[channel] for channel in encoding.receives}
    found |= sources - {ANY_SOURCE}
    for box in encoding.boxes:
        found |= {receive.assumed_source for receive in box.any_source_receives}
    found |= {fault.rank for fault in layout.program.faults}
    found |= set(_single_awaited_ranks(encoding))
    found |= set(_roots(encoding))
    return found


def _single_awaited_ranks(encoding: ProgramEncoding) -> Iterator[int]:
    """Ranks that are the only one that some request waits for."""
    for stops in encoding.stops:
        for stop in stops:
            for request in stop.requests:
                if len(request.ranks) == 1:
                    yield request.ranks[0]


def _roots(encoding: ProgramEncoding) -> Iterator[int]:
    for code in encoding.layout.program.codes:
        for call in code.calls:
            root = call.fields.get("root")
            if root is None:
                continue
            # One root, or an array with a root for each rank that runs the code.
            if hasattr(root, "tolist"):
                yield from root.tolist()
            else:
                yield root


def _behaviour_of(encoding: ProgramEncoding, rank: int) -> Hashable:
    """Everything that a rank does, without its own number.

    A channel has the number of its sender, so it is replaced by its group, receiver and tag.
    """
    layout, rank_stops = encoding.layout, encoding.rank_stops[rank]
    own_channels = [
        channel for channel in sorted(encoding.sends) if layout.chan_src[channel] == rank
    ]
    messages = tuple(
        (
            layout.chan_group[channel],
            layout.chan_dst[channel],
            layout.chan_tag[channel],
            tuple(encoding.sends[channel]),
        )
        for channel in own_channels
    )
    joins = tuple(
        (sequence, tuple(calls))
        for (sequence, member), calls in sorted(encoding.joins.items())
        if member == rank
    )
    waits = tuple(
        (stop.position, tuple((request.position, request.part) for request in stop.requests))
        for stop in encoding.stops[rank]
    )
    return messages, joins, waits, rank_stops.status, rank_stops.end, rank_stops.message


def symmetric_images(
    ranks: Sequence[int], classes: SymmetryClasses, max_images: int
) -> list[tuple[int, ...]]:
    """The sets of ranks that exchanges within the classes make of one set, up to ``max_images``."""
    from itertools import combinations, islice, product

    chosen = set(ranks)
    affected = [cls for cls in classes if not chosen.isdisjoint(cls)]
    fixed = chosen.difference(*affected)
    options = [combinations(cls, len(chosen.intersection(cls))) for cls in affected]
    return [
        tuple(sorted(fixed.union(*replacements)))
        for replacements in islice(product(*options), max_images)
    ]


def orbit(ranks: Sequence[int], classes: SymmetryClasses) -> set[int]:
    """The ranks, with all ranks that are interchangeable with one of them."""
    chosen = set(ranks)
    affected = [cls for cls in classes if not chosen.isdisjoint(cls)]
    return chosen.union(*affected)
