"""Whether transfers of a finished run shared a link, or a device with a kernel.

Key idea: start from a run in which each row took its cost alone. It equals the event-driven run
until two transfers cross one port (`distsim.hardware.cost.max_min_fairness`), or a kernel and a
transfer of its rank overlap. If that never happens, both runs are equal to the nanosecond, and the
cheap run is right. If it happens, the caller simulates event by event.

The tests go from cheap to expensive, because most runs need only the cheap ones. They may err on
one side only: True for a run without sharing costs time, False for one with sharing is wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distsim.common.arrays import BoolArray, IntArray, sorted_unique
from distsim.engine.run_record import RunColumns
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.max_min_fairness import LinkPorts
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.linked_program import LinkedProgram

#: How many rows are tested before the rest: an overlap usually shows in the first rows.
_FIRST_ROWS = 4096


class _Spans(NamedTuple):
    """By row, when it was in progress.

    Both rows of a message have the time when its data were on the way. All rows of a collective
    have the same time.
    """

    begin: IntArray
    end: IntArray


class _LinkUse(NamedTuple):
    """By row, whether it uses the link inside the node, and whether it uses the network card."""

    link: BoolArray
    card: BoolArray


def has_overlap(conditions: CompletionConditions, columns: RunColumns, cost: CostModel) -> bool:
    """Whether two transfers cross a port at once, or a kernel and a transfer slow each other down.

    False if the cluster has no shared links.
    """
    if not cost.cluster.shared_links:
        return False
    linked = conditions.linked
    started = np.asarray(columns.started)
    device, ports = cost.cluster.device, LinkPorts(cost)
    work_matters = device.overlap_compute > 1 or device.overlap_transfers > 1
    only_ports_matter = not (work_matters or ports.shared_cards or ports.crossing)
    if only_ports_matter and not (linked.kind == PartKind.COLLECTIVE).any():
        # A quick test for programs of messages only.
        kinds = (PartKind.SEND, PartKind.RECEIVE)
        if all(_messages_are_sequential(conditions, started, kind) for kind in kinds):
            return False
    transfers = _started_transfers(linked, started)
    if _has_unreceived_message(conditions, started, transfers):
        return True  # its cost is not known here
    spans = _spans(conditions, columns, transfers)
    takes_time = spans.end > spans.begin
    transfers &= takes_time
    busy = transfers
    if work_matters:
        busy = transfers | ((linked.kind == PartKind.WORK) & (started >= 0) & takes_time)
    is_sequential = _are_sequential_per_rank(linked, np.flatnonzero(busy), spans)
    if is_sequential and not ports.shared_cards:
        return False
    if linked.program.representative_of is not None and ports.shared_cards:
        # The ranks that share a card with a representative may not be in the folded run.
        return True
    if not is_sequential and work_matters and _overlaps_work(linked, transfers, spans):
        return True
    if ports.pools.levels and _transfers_overlap(linked, transfers, spans):
        return True
    return _transfers_share_port(linked, ports, transfers, spans)


def _started_transfers(linked: LinkedProgram, started: IntArray) -> BoolArray:
    """By row, whether it is a transfer that started; signals use no port and do not count."""
    is_transfer = (linked.kind >= 0) & (linked.kind <= PartKind.COLLECTIVE)
    return is_transfer & (linked.tag < FIRST_SIGNAL_TAG) & (started >= 0)


def _has_unreceived_message(
    conditions: CompletionConditions, started: IntArray, transfers: BoolArray
) -> bool:
    """Whether a buffered message has no receive, or one that never started."""
    mate = conditions.mate[np.flatnonzero(transfers & conditions.buffered)]
    return bool(((mate < 0) | (started[np.maximum(mate, 0)] < 0)).any())


def _messages_are_sequential(
    conditions: CompletionConditions, started: IntArray, kind: PartKind
) -> bool:
    """Whether all messages matched, and no rank had two in one direction at the same time.

    ``kind``: SEND for outgoing messages, RECEIVE for incoming ones. Also False if a rank's messages
    were not in the order of its rows.
    """
    linked = conditions.linked
    rows = np.flatnonzero((linked.kind == kind) & (started >= 0))
    mate = conditions.mate[rows]
    if rows.size and int(mate.min()) < 0:
        return False
    sends = rows if kind is PartKind.SEND else mate
    begin = started[sends]
    end = begin + conditions.duration[rows]
    rank = linked.rank[rows]
    if kind is PartKind.SEND and rows.size and int(started[mate].min()) < 0:
        return False
    overlaps = (begin[1:] < end[:-1]) & (rank[1:] == rank[:-1])
    return not bool(overlaps.any())


def _transfers_overlap(linked: LinkedProgram, transfers: BoolArray, spans: _Spans) -> bool:
    """Whether two transfers are in progress at once, anywhere.

    They may then share the uplink of a switch.
    """
    rows = np.flatnonzero(transfers)
    _, first = np.unique(_transfer_numbers(linked, rows), return_index=True)
    rows = rows[first]
    rows = rows[np.argsort(spans.begin[rows], kind="stable")]
    latest_end = np.maximum.accumulate(spans.end[rows])
    return bool((spans.begin[rows][1:] < latest_end[:-1]).any())


def _spans(conditions: CompletionConditions, columns: RunColumns, transfers: BoolArray) -> _Spans:
    linked = conditions.linked
    begin = np.array(columns.started, dtype=np.int64)
    end = np.array(columns.finished, dtype=np.int64)
    has_mate = conditions.mate >= 0
    receives = np.flatnonzero(transfers & (linked.kind == PartKind.RECEIVE) & has_mate)
    begin[receives] = begin[conditions.mate[receives]]
    messages = np.flatnonzero(transfers & (linked.kind <= PartKind.RECEIVE))
    end[messages] = begin[messages] + conditions.duration[messages]
    rows = np.flatnonzero(transfers & (linked.kind == PartKind.COLLECTIVE))
    if rows.size and (conditions.partial_waits or conditions.uneven):
        # Members may start or finish at different times: use the time of all of them.
        instance, count = linked.instance[rows], len(linked.members)
        first_begin = np.full(count, np.iinfo(np.int64).max)
        last_end = np.full(count, -1)
        np.minimum.at(first_begin, instance, begin[rows])
        np.maximum.at(last_end, instance, end[rows])
        begin[rows] = first_begin[instance]
        end[rows] = last_end[instance]
    return _Spans(begin, end)


def _are_sequential_per_rank(linked: LinkedProgram, rows: IntArray, spans: _Spans) -> bool:
    """Whether the rows of each rank are in progress one after the other, in their order."""
    # The first rows usually decide. The second slice repeats one row, to compare it with the next.
    for part in (rows[:_FIRST_ROWS], rows[_FIRST_ROWS - 1 :]):
        previous, following = part[:-1], part[1:]
        overlaps = spans.begin[following] < spans.end[previous]
        same_rank = linked.rank[following] == linked.rank[previous]
        if bool((overlaps & same_rank).any()):
            return False
    return True


def _overlaps_work(linked: LinkedProgram, transfers: BoolArray, spans: _Spans) -> bool:
    """Whether a rank runs a kernel while it takes part in a transfer."""
    begin, end = spans
    work = np.flatnonzero((linked.kind == PartKind.WORK) & (end > begin))
    rows = np.flatnonzero(transfers)
    if not work.size or not rows.size:
        return False
    # Put the times of the ranks one after the other on one axis, so that one sorted search serves
    # all ranks.
    duration = int(end.max()) + 1
    offset = linked.rank * duration
    starts = offset[rows] + begin[rows]
    order = np.argsort(starts, kind="stable")
    starts = starts[order]
    latest_ends = np.maximum.accumulate((offset[rows] + end[rows])[order])
    # Of the transfers that begin before a kernel ends, does the last to end do so after the kernel
    # has begun?
    begun = np.searchsorted(starts, offset[work] + end[work], side="left")
    latest_end = np.where(begun > 0, latest_ends[np.maximum(begun - 1, 0)], -1)
    return bool((latest_end > offset[work] + begin[work]).any())


def _transfers_share_port(
    linked: LinkedProgram, ports: LinkPorts, transfers: BoolArray, spans: _Spans
) -> bool:
    """Whether two transfers cross one port at once."""
    node, local = np.divmod(np.arange(linked.program.world_size), ports.cost.local_size)
    # By rank, the outgoing port of its link and of its card. The incoming port is the next one.
    link_port = 2 * np.arange(len(node))
    card_port = ports.first_card + 2 * (node * ports.cards + local % ports.cards)
    # A collective uses both directions.
    for incoming, other_kind in enumerate((PartKind.RECEIVE, PartKind.SEND)):
        rows = np.flatnonzero(transfers & (linked.kind != other_kind))
        rank = linked.rank[rows]
        use = _link_and_card_use(linked, ports, rows, node)
        for is_used, port in ((use.link, link_port + incoming), (use.card, card_port + incoming)):
            if not is_used.any():
                continue
            if _overlaps_at_port(linked, port[rank[is_used]], rows[is_used], spans):
                return True
    if not ports.crossing:
        return False
    rows = np.flatnonzero(transfers)
    use = _link_and_card_use(linked, ports, rows, node)
    rows = rows[use.link | use.card]
    return _overlaps_at_port(linked, ports.threads + linked.rank[rows], rows, spans)


def _overlaps_at_port(linked: LinkedProgram, port: IntArray, rows: IntArray, spans: _Spans) -> bool:
    """Whether two different transfers are at one port at once; each row uses its ``port``."""
    begin, end = spans.begin[rows], spans.end[rows]
    same_port = port[1:] == port[:-1]
    # Rows are usually in the order of ports, and of time at each port: sort only if they are not.
    is_unordered = (port[1:] < port[:-1]) | (same_port & (begin[1:] < begin[:-1]))
    if bool(is_unordered.any()):
        order = np.lexsort((_transfer_numbers(linked, rows), begin, port))
        port, rows = port[order], rows[order]
        begin, end = begin[order], end[order]
        same_port = port[1:] == port[:-1]
    overlapping = np.flatnonzero(same_port & (begin[1:] < end[:-1]))
    transfer = _transfer_numbers(linked, rows[overlapping])
    next_transfer = _transfer_numbers(linked, rows[overlapping + 1])
    return bool((transfer != next_transfer).any())


def _transfer_numbers(linked: LinkedProgram, rows: IntArray) -> IntArray:
    """The number of each row's transfer, the same for all rows that take part in it."""
    instance = linked.instance[rows]
    message = np.minimum(rows, linked.mate[rows])
    return np.where(instance >= 0, linked.rows + instance, message)


def _link_and_card_use(
    linked: LinkedProgram, ports: LinkPorts, rows: IntArray, node: IntArray
) -> _LinkUse:
    """Which links and cards some rows use; ``node``: the node of each rank."""
    rank, peer = linked.rank[rows], linked.peer[rows]
    # The peer of a collective is no rank; its rows are set below.
    same_node = node[rank] == node[np.clip(peer, 0, len(node) - 1)]
    uses_card = ~same_node
    uses_link = same_node & (peer != rank)
    if len(linked.members):
        collectives = np.flatnonzero(linked.kind[rows] == PartKind.COLLECTIVE)
        instance = linked.instance[rows[collectives]]
        use_of_instance = _use_of_instances(linked, instance, node)
        uses_link[collectives], uses_card[collectives] = use_of_instance[instance].T
    if ports.through_intra:
        # The bytes for the network cross the link inside the node too.
        uses_link = uses_link | uses_card
    return _LinkUse(uses_link, uses_card)


def _use_of_instances(linked: LinkedProgram, instance: IntArray, node: IntArray) -> BoolArray:
    """By instance of a collective: (whether it uses links, whether it uses cards).

    Only the given instances are set.
    """
    use_of_members: dict[int, tuple[bool, bool]] = {}
    use = np.zeros((len(linked.members), 2), dtype=np.bool_)
    for number in sorted_unique(instance).tolist():
        members = linked.whole[number]
        if id(members) not in use_of_members:
            nodes = len(set(node[list(members)].tolist()))
            use_of_members[id(members)] = (len(members) > nodes, nodes > 1)
        use[number] = use_of_members[id(members)]
    return use
