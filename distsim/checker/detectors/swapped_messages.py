"""Detect equal messages that were probably received in the wrong order (DS610).

Two messages of one channel with the same size and dtype meet their receives by order alone. If the
tensors' names suggest another pairing, the data may be wrong although nothing fails.

Names differ between sender and receiver (`activation` goes to `input`), so a name alone proves
nothing. Two messages x -> v and y -> u of one channel count as swapped if x -> u and y -> v would
have been possible and

- the rest of the program supports it: other messages go from x's name to u's and from y's to v's
  (for equal names: from copy k to copy k + d), at least twice as many as go the way of the two; or
- there is no other evidence and they cross by their own labels: a -> b and b -> a, or p@0 -> q@1
  and p@1 -> q@0, while nothing on the receiver prevents the two receives from changing places.

In both cases, after exchanging the two every name of the channel must go to one name, and its
copies must have one distance.

There is no finding in two cases. The channel back crosses in the same way: a naming convention, as
for the two edges of a halo. Or a tensor meets several others on a channel: buffers used in turn.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from distsim.checker.matching.call_index import CallIndex, MessageCall
from distsim.checker.matching.channel_layout import (
    ANY_SOURCE,
    RECV,
    SEND,
    WHOLE_CALL,
    ChannelLayout,
    build_channel_layout,
)
from distsim.checker.wording import (
    aligned_columns,
    buffer_label,
    call_words,
    location_text,
    plural,
)
from distsim.findings.finding_types import Finding
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, Vec, at_row
from distsim.program.model import Program
from distsim.trace.model import Trace

#: Name and copy of a tensor.
TensorLabel = tuple[str, int]
#: Sender's name, receiver's name and, if both messages have the same names, the distance between
#: their copies.
PairKind = tuple[str, str, int | None]


class MessagePair(NamedTuple):
    """The k-th message of a channel and its receive, with the labels of their tensors."""

    source: TensorLabel
    target: TensorLabel
    send: MessageCall
    recv: MessageCall

    @property
    def labels(self) -> tuple[TensorLabel, TensorLabel]:
        """The tensors of the sender and of the receiver."""
        return self.source, self.target

    @property
    def names(self) -> tuple[str, str]:
        """The names of these tensors, without their copies."""
        return self.source[0], self.target[0]


#: (sender's name, receiver's name) -> pairs that are not of a channel's usual kind, in order.
UnusualPairs = dict[tuple[str, str], list[MessagePair]]
#: With more pairs of names than this on one channel, there is no convention that two of them could
#: break.
_MAX_PAIR_KINDS = 64


class CrossedMessages(NamedTuple):
    """Two pairs of a channel, the earlier one first."""

    channel: int
    one: MessagePair
    two: MessagePair

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        """The pairs of names of the two messages."""
        return frozenset((self.one.names, self.two.names))

    @property
    def have_same_names(self) -> bool:
        """Whether only the copies distinguish the two messages."""
        return len(self.names) == 1

    @property
    def sources(self) -> set[TensorLabel]:
        """The sender's tensors of the two messages."""
        return {self.one.source, self.two.source}

    @property
    def exchanged(self) -> dict[TensorLabel, TensorLabel]:
        """Source -> target, if the two had met the other way."""
        return {self.one.source: self.two.target, self.two.source: self.one.target}


def swapped_message_findings(
    program: Program, trace: Trace | None = None, layout: ChannelLayout | None = None
) -> tuple[Finding, ...]:
    """DS610: one finding for each kind of channel with two swapped messages.

    ``trace``: only messages that met in this run count; by default, all messages of the program do.
    """
    layout = layout or build_channel_layout(program)
    return _SwapSearch(program, layout, trace).findings()


class _SwapSearch:
    """The search in one program.

    Channels that carry the same messages are searched once: ``channels_like[representative]`` are
    all channels that a representative stands for.
    """

    def __init__(self, program: Program, layout: ChannelLayout, trace: Trace | None) -> None:
        self.program, self.layout, self.trace = program, layout, trace
        self.call_index = CallIndex(layout)
        self.channels_like: dict[int, list[int]] = defaultdict(list)
        self.representative_of: dict[int, int] = {}
        self.pairs: dict[int, list[MessagePair]] = {}
        self.crossed: dict[int, list[CrossedMessages]] = {}

    def findings(self) -> tuple[Finding, ...]:
        self._group_channels()
        for channel in self.channels_like:
            self.pairs[channel] = self._pairs(channel)
            self.crossed[channel] = list(_crossed_messages(channel, self.pairs[channel]))
        if not any(self.crossed.values()):
            return ()
        frequency = self._frequency_of_kinds()
        found = []
        for channel, candidates in self.crossed.items():
            swapped = next((each for each in candidates if self._is_swapped(each, frequency)), None)
            if swapped is not None:
                found.append(self._finding(swapped, len(self.channels_like[channel])))
        return tuple(found)

    # --- channels ---
    def _group_channels(self) -> None:
        """Group channels that carry the same messages.

        They have the same endpoints of the same codes, unless the ranks of a code name different
        tensors.
        """
        senders = self._end_keys(self.layout.send_chan, SEND)
        receivers = self._end_keys(self.layout.recv_chan, RECV)
        layout = self.layout
        # Any-source receives choose among channels, so those have no fixed order of messages.
        with_any_source = {
            (layout.chan_group[channel], layout.chan_dst[channel])
            for channel, source in enumerate(layout.chan_src)
            if source == ANY_SOURCE
        }
        representatives: dict[object, int] = {}
        for channel in sorted(senders.keys() & receivers.keys()):
            if (layout.chan_group[channel], layout.chan_dst[channel]) in with_any_source:
                continue
            key = (senders[channel], receivers[channel])
            representative = representatives.setdefault(key, channel)
            self.channels_like[representative].append(channel)
            self.representative_of[channel] = representative

    def _end_keys(self, table: list[list[int]], way: int) -> dict[int, object]:
        """Channel -> what its end looks like.

        Ends with fewer than two tensors are omitted: nothing can be swapped there.
        """
        codes = range(len(self.program.codes))
        labels_by_endpoint = [_labels_by_endpoint(self.program, number, way) for number in codes]
        found: dict[int, object] = {}
        is_plain = [
            all(tensors is not None and len(tensors) < 2 for tensors in labels.values())
            for labels in labels_by_endpoint
        ]
        for rank in self.program.present:
            code_number = self.program.code_of[rank]
            labels = labels_by_endpoint[code_number]
            if is_plain[code_number] and not _has_duplicates(table[rank]):
                continue
            endpoints_of: dict[int, list[int]] = defaultdict(list)
            for endpoint, channel in enumerate(table[rank]):
                if channel >= 0 and endpoint in labels:
                    endpoints_of[channel].append(endpoint)
            for channel, endpoints in endpoints_of.items():
                tensors: set[TensorLabel] = set()
                for endpoint in endpoints:
                    tensors |= labels[endpoint] or set()
                if any(labels[endpoint] is None for endpoint in endpoints):
                    found[channel] = (rank, *endpoints)
                elif len(tensors) > 1:
                    # A negative number, so that a code cannot be mistaken for a rank.
                    found[channel] = (-1 - code_number, *endpoints)
        return found

    def _pairs(self, channel: int) -> list[MessagePair]:
        """The messages of a channel that have names on both sides, in order."""
        src, dst = self.layout.chan_src[channel], self.layout.chan_dst[channel]
        sends = self.call_index.messages(src, channel, sends=True)
        receives = self.call_index.messages(dst, channel, sends=False)
        found = []
        for send, receive in zip(sends, receives, strict=False):
            source, target = self._label(src, send), self._label(dst, receive)
            if source is None or target is None or send.signature != receive.signature:
                continue
            found.append(MessagePair(source, target, send, receive))
        return found

    def _label(self, rank: int, message: MessageCall) -> TensorLabel | None:
        buffer = buffer_of(message.call)
        if buffer is None:
            return None
        return buffer.name, int(at_row(buffer.index, self.program.row_of[rank]))

    # --- evidence ---
    def _frequency_of_kinds(self) -> Counter[PairKind]:
        """How many distinct pairs of the program have each kind, with and without distance."""
        found: Counter[PairKind] = Counter()
        for pairs in self.pairs.values():
            for source, target in {pair.labels for pair in pairs}:
                found[_pair_kind(source, target, with_distance=False)] += 1
                found[_pair_kind(source, target, with_distance=True)] += 1
        return found

    def _is_swapped(self, crossed: CrossedMessages, frequency: Counter[PairKind]) -> bool:
        if not self._exchange_makes_regular(crossed) or self._is_mirrored(crossed):
            return False
        return self._has_evidence(crossed, frequency) and self._met_in_trace(crossed)

    def _has_evidence(self, crossed: CrossedMessages, frequency: Counter[PairKind]) -> bool:
        """Whether other pairs, or the labels of the two, suggest the other pairing."""
        one, two, with_distance = crossed.one, crossed.two, crossed.have_same_names
        exchanged = [
            frequency[_pair_kind(one.source, two.target, with_distance)],
            frequency[_pair_kind(two.source, one.target, with_distance)],
        ]
        as_it_is = [
            frequency[_pair_kind(one.source, one.target, with_distance)],
            frequency[_pair_kind(two.source, two.target, with_distance)],
        ]
        if min(exchanged) >= 2 * max(as_it_is):
            return True
        if any(exchanged) or not _crosses_by_label(crossed):
            return False
        if not (self._are_only_two(crossed) or self._all_copies_cross(crossed)):
            return False
        return self._receives_can_change_places(crossed)

    def _exchange_makes_regular(self, crossed: CrossedMessages) -> bool:
        """Whether exchanging the two, or all such pairs of the channel, makes the channel regular.

        Every name then goes to one name, at one distance.
        """
        disjoint, used = [], set(crossed.sources)
        for other in self.crossed[self.representative_of[crossed.channel]]:
            if used.isdisjoint(other.sources):
                disjoint.append(other)
                used |= other.sources
        targets = {pair.source: pair.target for pair in self.pairs[crossed.channel]}
        if _is_regular(targets | crossed.exchanged):
            return True
        for other in (crossed, *disjoint):
            targets |= other.exchanged
        return _is_regular(targets)

    def _is_mirrored(self, crossed: CrossedMessages) -> bool:
        """Whether two messages on the channels back cross by the same names."""
        layout, channel = self.layout, crossed.channel
        back = (layout.chan_group[channel], layout.chan_dst[channel], layout.chan_src[channel])
        for other, representative in self.representative_of.items():
            ends = (layout.chan_group[other], layout.chan_src[other], layout.chan_dst[other])
            if ends != back:
                continue
            if any(each.names == crossed.names for each in self.crossed[representative]):
                return True
        return False

    def _are_only_two(self, crossed: CrossedMessages) -> bool:
        """Whether no third tensor goes between the names of the two.

        Three tensors in reverse order may well be intended.
        """
        pairs = self.pairs[crossed.channel]
        return len({pair.labels for pair in pairs if pair.names in crossed.names}) == 2

    def _all_copies_cross(self, crossed: CrossedMessages) -> bool:
        """Whether a@i -> b@i and b@i -> a@i for the same copies i, as in a loop over layers."""
        if crossed.have_same_names:
            return False
        labels = {
            pair.labels for pair in self.pairs[crossed.channel] if pair.names in crossed.names
        }
        return all(
            source[1] == target[1] and (target, source) in labels for source, target in labels
        )

    def _receives_can_change_places(self, crossed: CrossedMessages) -> bool:
        """Whether nothing on the receiver uses the tensors from the first to the second receive."""
        rank = self.layout.chan_dst[crossed.channel]
        first, second = crossed.one.recv, crossed.two.recv
        labels = {_label_text(crossed.one.target), _label_text(crossed.two.target)}
        own = {first[:2], second[:2]}
        for position, call in self.program.calls_of(rank):
            if position > second.position:
                continue
            if position >= first.position and call.op == "assign":
                return False
            for part_number, part in [(WHOLE_CALL, call), *enumerate(call.parts)]:
                if (position, part_number) in own or labels.isdisjoint(_buffer_labels(part)):
                    continue
                if position >= first.position or self._is_open(rank, position, first.position):
                    return False
        return True

    def _is_open(self, rank: int, position: int, until: int) -> bool:
        """Whether a request posted at one position is not waited for before another position."""
        if not self.program.code_call(rank, position).handled:
            return False
        return not any(
            later - position in self.program.code_call(rank, later).waits
            for later in range(position + 1, until)
        )

    def _met_in_trace(self, crossed: CrossedMessages) -> bool:
        """Whether both messages were received in the run."""
        if self.trace is None:
            return True
        src, dst = self.layout.chan_src[crossed.channel], self.layout.chan_dst[crossed.channel]
        wanted = {(rank, *message[:2]) for rank, message in self._calls_of(crossed)}
        of_ranks = np.isin(self.trace["rank"], (src, dst))
        rows = np.flatnonzero((self.trace["match"] >= 0) & of_ranks)
        columns = [self.trace[name][rows].tolist() for name in ("rank", "position", "part")]
        return wanted <= set(zip(*columns, strict=True))

    # --- words ---
    def _calls_of(self, crossed: CrossedMessages) -> list[tuple[int, MessageCall]]:
        """The send and the receive of both messages, each with its rank."""
        src, dst = self.layout.chan_src[crossed.channel], self.layout.chan_dst[crossed.channel]
        one, two = crossed.one, crossed.two
        return [(src, one.send), (dst, one.recv), (src, two.send), (dst, two.recv)]

    def _finding(self, crossed: CrossedMessages, channels: int) -> Finding:
        src, dst = self.layout.chan_src[crossed.channel], self.layout.chan_dst[crossed.channel]
        rows, places = [], []
        for rank, message in self._calls_of(crossed):
            call = self.program.call(rank, message.position)
            if message.part != WHOLE_CALL:
                call = call.parts[message.part]
            place = self.program.place(rank, message.position)
            rows.append((f"rank {rank}", call_words(call, self.program), location_text(place)))
            places.append(place)
        source, one, two = (
            buffer_label(TensorBuffer(*label, (), ""), self.program)
            for label in (crossed.one.source, crossed.one.target, crossed.two.target)
        )
        head = (
            f"{source} of rank {src} arrives in {one} of rank {dst}: rank {src} sends messages of "
            f"the same size, dtype and tag in one order, and rank {dst} receives them in another"
        )
        more = [f"the same on {plural(channels, 'pair')} of ranks"] if channels > 1 else []
        help_line = (
            f"receive {two} before {one} on rank {dst}, in the order in which rank {src} sends, "
            "or give the two messages different tags"
        )
        return Finding(
            "DS610",
            "warning",
            "\n".join([head, *aligned_columns(rows), *more]),
            tuple(sorted({src, dst})),
            (),
            (help_line,),
            tuple(dict.fromkeys(places)),
        )


# --- crossed messages of one channel ---
def _crossed_messages(channel: int, pairs: list[MessagePair]) -> Iterator[CrossedMessages]:
    """Two equal messages that could have met the other way.

    Only on irregular channels where every tensor meets one other.
    """
    first_pair = {pair.labels: pair for pair in reversed(pairs)}
    target_of = dict(first_pair.keys())
    is_one_to_one = len(target_of) == len(set(target_of.values())) == len(first_pair)
    if not is_one_to_one or _is_regular(target_of):
        return
    ordered = sorted(first_pair.values(), key=_receive_order)
    kinds = Counter(_pair_kind(pair.source, pair.target, True) for pair in ordered)
    usual = _most_common_kind(kinds)
    unusual: UnusualPairs = defaultdict(list)
    for pair in ordered:
        if _pair_kind(pair.source, pair.target, True) != usual:
            unusual[pair.names].append(pair)
    for one, two in (*_crossed_copies(unusual), *_crossed_names(unusual)):
        if one.send.signature == two.send.signature:
            earlier, later = sorted((one, two), key=_receive_order)
            yield CrossedMessages(channel, earlier, later)


def _most_common_kind(kinds: Counter[PairKind]) -> PairKind | None:
    """The kind of most pairs; None if two kinds are equally common, or each occurs once."""
    (kind, times), *others = kinds.most_common(2)
    if others and others[0][1] == times:
        return None
    return kind


def _receive_order(pair: MessagePair) -> tuple[int, int]:
    return pair.recv.position, pair.recv.part


def _crossed_copies(unusual: UnusualPairs) -> Iterator[tuple[MessagePair, MessagePair]]:
    """i -> j + d and j -> i + d, from one name to one name.

    The sums of their copies are equal. If more than two pairs have that sum, it is a reversal.
    """
    for pairs in unusual.values():
        by_sum: dict[int, list[MessagePair]] = defaultdict(list)
        for pair in pairs:
            by_sum[pair.source[1] + pair.target[1]].append(pair)
        for same in by_sum.values():
            if len(same) == 2:
                yield same[0], same[1]


def _crossed_names(unusual: UnusualPairs) -> Iterator[tuple[MessagePair, MessagePair]]:
    """The k-th message from x to v and the k-th from y to u, for all names."""
    if len(unusual) > _MAX_PAIR_KINDS:
        return
    for (source, target), pairs in unusual.items():
        for (other_source, other_target), other_pairs in unusual.items():
            if source < other_source and target != other_target:
                yield from zip(pairs, other_pairs, strict=False)


def _is_regular(target_of: Mapping[TensorLabel, TensorLabel]) -> bool:
    """Whether every name goes to one name, copies at one distance, and no two tensors cross."""
    for source, target in target_of.items():
        if source != target and target_of.get(target) == source:
            return False
    kinds = {_pair_kind(source, target, True) for source, target in target_of.items()}
    sources = {source for source, _, _ in kinds}
    targets = {target for _, target, _ in kinds}
    return len(sources) == len(kinds) == len(targets)


def _crosses_by_label(crossed: CrossedMessages) -> bool:
    """a -> b and b -> a, or p@i -> q@j and p@j -> q@i."""
    one, two = crossed.one, crossed.two
    if crossed.have_same_names:
        return one.source[1] == two.target[1] and two.source[1] == one.target[1]
    return one.source == two.target and two.source == one.target


def _pair_kind(source: TensorLabel, target: TensorLabel, with_distance: bool) -> PairKind:
    return source[0], target[0], target[1] - source[1] if with_distance else None


def _label_text(label: TensorLabel) -> str:
    return TensorBuffer(label[0], label[1], (), "").label


def _buffer_labels(call: ResolvedCall) -> set[str]:
    buffers = (*call.inputs, *call.outputs, *call.reads, *call.writes, *call.adds)
    return {buffer.label for buffer in buffers}


def buffer_of(call: CodeCall) -> BufferVector | None:
    """The declared tensor of a message; None for an inline one."""
    for buffer in (*call.fields.get("inputs", ()), *call.fields.get("outputs", ())):
        if isinstance(buffer, BufferVector) and buffer.name:
            return buffer
    return None


# --- ends of channels ---
def _labels_by_endpoint(
    program: Program, number: int, way: int
) -> dict[int, frozenset[TensorLabel] | None]:
    """Port of a code -> the tensors of its messages in one direction.

    Copies are counted from that of the endpoint's first message. None if ranks of the code differ.
    """
    code = program.codes[number]
    direction = "send" if way == SEND else "recv"
    labels: dict[int, set[TensorLabel]] = {}
    first_copy: dict[int, Vec] = {}
    differing: set[int] = set()
    for call in code.distinct_calls():
        if call.endpoint < 0 or OPERATIONS[call.op].direction != direction:
            continue
        endpoint_labels, buffer = labels.setdefault(call.endpoint, set()), buffer_of(call)
        is_selective = code.guards is not None or call.invalid is not None
        if is_selective or _common_value(call.signature) is None:
            differing.add(call.endpoint)
        elif buffer is not None:
            first = first_copy.setdefault(call.endpoint, buffer.index)
            copy = _common_value(buffer.index - first)
            if copy is None:
                differing.add(call.endpoint)
            else:
                endpoint_labels.add((buffer.name, copy))
    return {
        endpoint: None if endpoint in differing else frozenset(found)
        for endpoint, found in labels.items()
    }


def _has_duplicates(channels: list[int]) -> bool:
    """Whether some channel occurs twice; -1 stands for none."""
    distinct = set(channels)
    distinct.discard(-1)
    return len(distinct) < len(channels) - channels.count(-1)


def _common_value(value: Vec) -> int | None:
    """The value that all ranks of a code have, if they have one."""
    if isinstance(value, int):
        return value
    if not value.size or not (value == value.flat[0]).all():
        return None
    return int(value.flat[0])
