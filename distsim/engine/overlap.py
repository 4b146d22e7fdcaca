"""Does anything in a run share a link, or a device, with something else? If not, each took what it
takes alone, and the run is right.

A run with prices of their own is the run in the order of time up to the first instant at which two
transfers cross one port (`distsim.hardware.cost.max_min_fairness`), or a kernel runs beside a
transfer of its rank. So where that never happens both are one to the nanosecond, and where it does
the run in the order of time is made.
"""

from __future__ import annotations

import numpy as np

from distsim.common.arrays import BoolArray, IntArray, sorted_unique
from distsim.engine.run_record import RunColumns
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.max_min_fairness import LinkPorts
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.linked_program import LinkedProgram

#: Rows that are looked at before all of them.
_FIRST_ROWS = 4096


def has_overlap(conditions: CompletionConditions, columns: RunColumns, cost: CostModel) -> bool:
    """Whether two transfers of a run cross a port at once, or a kernel runs beside a transfer where
    that slows anything down.
    """
    if not cost.cluster.shared_links:
        return False
    linked, started = conditions.linked, np.asarray(columns.started)
    device, ports = cost.cluster.device, LinkPorts(cost)
    works = device.overlap_compute > 1 or device.overlap_transfers > 1
    only_ports_matter = not (works or ports.shared_cards or ports.crossing)
    if only_ports_matter and not (linked.kind == PartKind.COLLECTIVE).any():
        # A quick test for programs of messages only.
        kinds = (PartKind.SEND, PartKind.RECEIVE)
        if all(_in_turn(conditions, started, kind) for kind in kinds):
            return False
    transfers = (
        (linked.kind >= 0)
        & (linked.kind <= PartKind.COLLECTIVE)
        & (linked.tag < FIRST_SIGNAL_TAG)
        & (started >= 0)
    )
    mate = conditions.mate[np.flatnonzero(transfers & conditions.ahead)]
    if bool(((mate < 0) | (started[np.maximum(mate, 0)] < 0)).any()):
        return True  # what nobody receives, or not yet, has no price here
    busy = transfers | ((linked.kind == PartKind.WORK) & (started >= 0)) if works else transfers
    begin, end = _spans(conditions, columns, transfers)
    transfers, busy = transfers & (end > begin), busy & (end > begin)
    one_by_one = _are_sequential_per_rank(linked, np.flatnonzero(busy), begin, end)
    if one_by_one and not ports.shared_cards:
        return False
    if linked.program.representative_of is not None and ports.shared_cards:
        return True  # those who have cards in common with the ranks of a section need not be there
    if not one_by_one and works and _overlaps_work(linked, transfers, begin, end):
        return True
    return (
        bool(ports.pools.levels) and _transfers_overlap(linked, transfers, begin, end)
    ) or _transfers_share_port(linked, ports, transfers, begin, end)


def _in_turn(conditions: CompletionConditions, started: IntArray, kind: PartKind) -> bool:
    """Whether all messages that began met, and each rank's out, or in, were under way one after the
    other, in the order of its rows.
    """
    linked = conditions.linked
    rows = np.flatnonzero((linked.kind == kind) & (started >= 0))
    mate = conditions.mate[rows]
    if rows.size and int(mate.min()) < 0:
        return False
    begin = started[rows if kind is PartKind.SEND else mate]
    end, rank = begin + conditions.price[rows], linked.rank[rows]
    if kind is PartKind.SEND and rows.size and int(started[mate].min()) < 0:
        return False
    return not bool(((begin[1:] < end[:-1]) & (rank[1:] == rank[:-1])).any())


def _transfers_overlap(
    linked: LinkedProgram, transfers: BoolArray, begin: IntArray, end: IntArray
) -> bool:
    """Whether two transfers are under way at once, anywhere: they may have a switch's way up in
    common.
    """
    rows = np.flatnonzero(transfers)
    _, first = np.unique(_transfer_numbers(linked, rows), return_index=True)
    rows = rows[first]
    order = np.argsort(begin[rows], kind="stable")
    return bool((begin[rows[order]][1:] < np.maximum.accumulate(end[rows[order]])[:-1]).any())


def _spans(
    conditions: CompletionConditions, columns: RunColumns, transfers: BoolArray
) -> tuple[IntArray, IntArray]:
    """By row when it began and ended; of a message both ends when its data was under way, of a
    collective all rows the same.
    """
    linked = conditions.linked
    begin, end = (
        np.array(columns.started, dtype=np.int64),
        np.array(columns.finished, dtype=np.int64),
    )
    receives = np.flatnonzero(
        transfers & (linked.kind == PartKind.RECEIVE) & (conditions.mate >= 0)
    )
    begin[receives] = begin[conditions.mate[receives]]
    messages = np.flatnonzero(transfers & (linked.kind <= PartKind.RECEIVE))
    end[messages] = begin[messages] + conditions.price[messages]
    rows = np.flatnonzero(transfers & (linked.kind == PartKind.COLLECTIVE))
    instance, count = linked.instance[rows], len(linked.members)
    if rows.size and (conditions.early or conditions.uneven):
        first, last = np.full(count, np.iinfo(np.int64).max), np.full(count, -1)
        np.minimum.at(first, instance, begin[rows])
        np.maximum.at(last, instance, end[rows])
        begin[rows], end[rows] = first[instance], last[instance]
    return begin, end


def _are_sequential_per_rank(
    linked: LinkedProgram, rows: IntArray, begin: IntArray, end: IntArray
) -> bool:
    """Whether each rank does these rows one after the other, in their order. Where not, the first
    of them mostly tell.
    """
    return not any(
        bool(
            (
                (begin[part[1:]] < end[part[:-1]])
                & (linked.rank[part[1:]] == linked.rank[part[:-1]])
            ).any()
        )
        for part in (rows[:_FIRST_ROWS], rows[_FIRST_ROWS - 1 :])
    )


def _overlaps_work(
    linked: LinkedProgram, transfers: BoolArray, begin: IntArray, end: IntArray
) -> bool:
    """Whether a rank works while it takes part in a transfer."""
    work = np.flatnonzero((linked.kind == PartKind.WORK) & (end > begin))
    rows = np.flatnonzero(transfers)
    if not work.size or not rows.size:
        return False
    span = int(end.max()) + 1
    starts, rank = linked.rank[rows] * span + begin[rows], linked.rank
    order = np.argsort(starts, kind="stable")
    starts, ends = starts[order], np.maximum.accumulate((rank[rows] * span + end[rows])[order])
    before = np.searchsorted(
        starts, rank[work] * span + end[work], side="left"
    )  # so many begin before the work ends
    latest = np.where(before > 0, ends[np.maximum(before - 1, 0)], -1)
    return bool((latest > rank[work] * span + begin[work]).any())


def _transfers_share_port(
    linked: LinkedProgram, ports: LinkPorts, transfers: BoolArray, begin: IntArray, end: IntArray
) -> bool:
    """Whether two transfers cross a port at once."""
    node, local = np.divmod(np.arange(linked.program.world_size), ports.cost.local_size)
    link, card = (
        2 * np.arange(len(node)),
        ports.first_card + 2 * (node * ports.cards + local % ports.cards),
    )
    for into, other in enumerate((PartKind.RECEIVE, PartKind.SEND)):
        rows = np.flatnonzero(transfers & (linked.kind != other))
        rank, ways = linked.rank[rows], _link_and_card_use(linked, ports, rows, node)
        for used, port in zip(ways, (link + into, card + into), strict=True):
            if used.any() and _overlaps_at_port(linked, port[rank[used]], rows[used], begin, end):
                return True
    if not ports.crossing:
        return False
    rows = np.flatnonzero(transfers)
    inside, across = _link_and_card_use(linked, ports, rows, node)
    rows = rows[inside | across]
    return _overlaps_at_port(linked, ports.threads + linked.rank[rows], rows, begin, end)


def _overlaps_at_port(
    linked: LinkedProgram, port: IntArray, rows: IntArray, begin: IntArray, end: IntArray
) -> bool:
    """Whether two transfers, each of these rows a use of its port, are at one port at once. Most
    come in the order of ports and, at each, of time: as ranks do them."""
    first, last, same = begin[rows], end[rows], port[1:] == port[:-1]
    if bool(((port[1:] < port[:-1]) | (same & (first[1:] < first[:-1]))).any()):
        order = np.lexsort((_transfer_numbers(linked, rows), first, port))
        port, first, last, rows = port[order], first[order], last[order], rows[order]
        same = port[1:] == port[:-1]
    met = np.flatnonzero(same & (first[1:] < last[:-1]))
    return bool(
        (_transfer_numbers(linked, rows[met]) != _transfer_numbers(linked, rows[met + 1])).any()
    )


def _transfer_numbers(linked: LinkedProgram, rows: IntArray) -> IntArray:
    """A number of what each row takes part in, the same for all who do."""
    return np.where(
        linked.instance[rows] >= 0,
        linked.rows + linked.instance[rows],
        np.minimum(rows, linked.mate[rows]),
    )


def _link_and_card_use(
    linked: LinkedProgram, ports: LinkPorts, rows: IntArray, node: IntArray
) -> tuple[BoolArray, BoolArray]:
    """(whether each row uses its rank's link, whether its card); ``node``: by rank."""
    rank, peer = linked.rank[rows], linked.peer[rows]
    near = node[rank] == node[np.clip(peer, 0, len(node) - 1)]
    grouped = (
        np.flatnonzero(linked.kind[rows] == PartKind.COLLECTIVE)
        if len(linked.members)
        else np.zeros(0, dtype=np.int64)
    )
    apart, inside = ~near, near & (peer != rank)
    instance = linked.instance[rows[grouped]]
    known: dict[int, tuple[bool, bool]] = {}
    of_instance = np.zeros((len(linked.members), 2), dtype=np.bool_)
    for one in sorted_unique(instance).tolist():
        members = linked.whole[one]
        if id(members) not in known:
            nodes = len(set(node[list(members)].tolist()))
            known[id(members)] = (len(members) > nodes, nodes > 1)
        of_instance[one] = known[id(members)]
    inside[grouped], apart[grouped] = of_instance[instance].T
    return inside | apart if ports.through_intra else inside, apart
