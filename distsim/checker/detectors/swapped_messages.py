"""Equal messages that met by their order although the tensors' names say that others were meant:
DS610.

Names differ between sender and receiver (`activation` goes to `input`), so that a name alone proves
nothing. Two messages x -> v and y -> u of one channel are taken for swapped where x -> u and y -> v
would have been possible and

- the rest of the program says so: other messages go from x's name to u's and from y's to v's (with names alike, from copy k to copy
  k + d), at least twice as many as go the way of the two; or
- nothing else is to be seen, and they cross by their own labels: a -> b and b -> a, or p@0 -> q@1 and p@1 -> q@0, while nothing on the
  receiver keeps the two receives from changing places.

Either way, once the two are exchanged every name of the channel goes to one name, its copies at one
distance.

No alarm where the channel back crosses in the same way (a naming convention, as of the two edges of
a halo), nor where a tensor meets several others on a channel (buffers used in turn).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from distsim.checker.matching.call_index import CallIndex, MessageCall
from distsim.checker.matching.channel_layout import RECV, SEND, ChannelLayout, build_channel_layout
from distsim.checker.wording import aligned_columns, call_words, location_text, plural
from distsim.findings.finding_types import Finding
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, Vec, at_row
from distsim.program.model import Program
from distsim.trace.model import Trace

TensorLabel = tuple[str, int]
#: From a name to a name; with a distance of the copies where the two messages have the same names.
PairKind = tuple[str, str, int | None]


class MessagePair(NamedTuple):
    """The k-th message of a channel and its receive, with the labels of their tensors."""

    source: TensorLabel
    target: TensorLabel
    send: MessageCall
    recv: MessageCall


#: (name of the sender's tensor, name of the receiver's) -> pairs that are not of a channel's usual
#: kind, in order.
UnusualPairs = dict[tuple[str, str], list[MessagePair]]
#: More name pairs than this on one channel are no convention that two of them could break.
_MAX_PAIR_KINDS = 64


class CrossedMessages(NamedTuple):
    """Two pairs of a channel, the earlier first."""

    channel: int
    one: MessagePair
    two: MessagePair

    @property
    def names(self) -> frozenset[tuple[str, str]]:
        return frozenset((p.source[0], p.target[0]) for p in (self.one, self.two))

    @property
    def alike(self) -> bool:
        """Both messages go from one name to one name: copies alone tell them apart."""
        return len(self.names) == 1


def swapped_message_findings(
    program: Program, trace: Trace | None = None, layout: ChannelLayout | None = None
) -> tuple[Finding, ...]:
    """DS610: one finding for each kind of channel on which two equal messages are taken for one
    another.

    ``trace``: only messages that met in this run count; left out, all of the program do.
    """
    layout = layout or build_channel_layout(program)
    return _SwapSearch(program, layout, trace).findings()


class _SwapSearch:
    def __init__(self, program: Program, layout: ChannelLayout, trace: Trace | None) -> None:
        self.program, self.layout, self.trace = program, layout, trace
        self.where = CallIndex(layout)
        self.same: dict[int, list[int]] = {}  # a channel that stands for others -> all of them
        self.pairs: dict[int, list[MessagePair]] = {}
        self.representative_of: dict[int, int] = {}

    def findings(self) -> tuple[Finding, ...]:
        self._group()
        self.pairs = {channel: self._pairs(channel) for channel in self.same}
        found = {
            channel: list(_crossed_messages(channel, pairs))
            for channel, pairs in self.pairs.items()
        }
        if not any(found.values()):
            return ()
        kinds = self._kinds()
        told = []
        for channel, crosses in found.items():
            meant = [
                c
                for c in crosses
                if self._mends(c, crosses) and self._meant(c, found, kinds) and self._met(c)
            ]
            if meant:
                told.append(self._finding(meant[0], len(self.same[channel])))
        return tuple(told)

    # --- channels, one for all that are equal ---
    def _group(self) -> None:
        """Channels whose ends are the same ports of the same codes carry the same messages, unless
        ranks of a code name other tensors.
        """
        ends = self._ends(self.layout.send_chan, SEND), self._ends(self.layout.recv_chan, RECV)
        open_ends = {
            (g, d)
            for g, s, d in zip(
                self.layout.chan_group, self.layout.chan_src, self.layout.chan_dst, strict=True
            )
            if s < 0
        }
        first: dict[object, int] = {}
        for channel in sorted(ends[SEND].keys() & ends[RECV].keys()):
            if (self.layout.chan_group[channel], self.layout.chan_dst[channel]) in open_ends:
                continue
            chosen = first.setdefault((ends[SEND][channel], ends[RECV][channel]), channel)
            self.same.setdefault(chosen, []).append(channel)
            self.representative_of[channel] = chosen

    def _ends(self, table: list[list[int]], way: int) -> dict[int, object]:
        """Channel -> what its end looks like; ends with fewer than two tensors are left out,
        nothing can be swapped there.
        """
        labels = [
            _labels_by_port(self.program, number, way) for number in range(len(self.program.codes))
        ]
        found: dict[int, object] = {}
        for rank in self.program.present:
            channels, code = table[rank], self.program.code_of[rank]
            ports: dict[int, list[int]] = {}
            for port, channel in enumerate(channels):
                if channel >= 0 and port in labels[code]:
                    ports.setdefault(channel, []).append(port)
            for channel, numbers in ports.items():
                seen = [labels[code][port] for port in numbers]
                if any(s is None for s in seen):
                    found[channel] = (rank, *numbers)
                elif len(frozenset().union(*(s for s in seen if s is not None))) > 1:
                    found[channel] = (-1 - code, *numbers)
        return found

    def _pairs(self, channel: int) -> list[MessagePair]:
        """The messages of a channel that have names on both sides, in order."""
        src, dst = self.layout.chan_src[channel], self.layout.chan_dst[channel]
        sends, recvs = (
            self.where.messages(src, channel, sends=True),
            self.where.messages(dst, channel, sends=False),
        )
        found = []
        for send, recv in zip(sends, recvs, strict=False):
            source, target = self._label(src, send), self._label(dst, recv)
            if source is not None and target is not None and send.signature == recv.signature:
                found.append(MessagePair(source, target, send, recv))
        return found

    def _label(self, rank: int, message: MessageCall) -> TensorLabel | None:
        buffer = buffer_of(message.call)
        return (
            None
            if buffer is None
            else (buffer.name, int(at_row(buffer.index, self.program.row_of[rank])))
        )

    # --- evidence ---
    def _kinds(self) -> Counter[PairKind]:
        """How many distinct pairs of the whole program are of each kind, by names alone and by
        names and distance.
        """
        found: Counter[PairKind] = Counter()
        for pairs in self.pairs.values():
            for source, target in {p[:2] for p in pairs}:
                found[source[0], target[0], None] += 1
                found[source[0], target[0], target[1] - source[1]] += 1
        return found

    def _meant(
        self,
        cross: CrossedMessages,
        found: dict[int, list[CrossedMessages]],
        kinds: Counter[PairKind],
    ) -> bool:
        if self._mirrored(cross, found):
            return False
        one, two = cross.one, cross.two
        straight = (
            _pair_kind(one.source, two.target, cross.alike),
            _pair_kind(two.source, one.target, cross.alike),
        )
        crossed = (
            _pair_kind(one.source, one.target, cross.alike),
            _pair_kind(two.source, two.target, cross.alike),
        )
        often = [kinds[k] for k in straight]
        if min(often) >= 2 * max(kinds[k] for k in crossed):
            return True
        return (
            not any(often) and _crosses_by_label(cross) and self._alone(cross) and self._free(cross)
        )

    def _mends(self, cross: CrossedMessages, crosses: list[CrossedMessages]) -> bool:
        """With the two received the other way round (or all such pairs of the channel) every name
        goes to one name, at one distance.
        """
        apart, taken = [], {cross.one.source, cross.two.source}
        for other in crosses:
            if taken.isdisjoint((other.one.source, other.two.source)):
                apart.append(other)
                taken |= {other.one.source, other.two.source}
        met = {p.source: p.target for p in self.pairs[cross.channel]}
        for chosen in ((cross,), (cross, *apart)):
            mended = dict(met)
            for one in chosen:
                mended |= {one.one.source: one.two.target, one.two.source: one.one.target}
            if _is_regular(mended):
                return True
        return False

    def _mirrored(self, cross: CrossedMessages, found: dict[int, list[CrossedMessages]]) -> bool:
        """The channels back hold two messages that cross by the same names."""
        layout, channel = self.layout, cross.channel
        back = (layout.chan_group[channel], layout.chan_dst[channel], layout.chan_src[channel])
        for other, chosen in self.representative_of.items():
            here = (layout.chan_group[other], layout.chan_src[other], layout.chan_dst[other])
            if here == back and any(c.names == cross.names for c in found[chosen]):
                return True
        return False

    def _alone(self, cross: CrossedMessages) -> bool:
        """No third tensor goes between the names of the two: three in reverse order may well be
        meant so.
        """
        return (
            len(
                {
                    p[:2]
                    for p in self.pairs[cross.channel]
                    if (p.source[0], p.target[0]) in cross.names
                }
            )
            == 2
        )

    def _free(self, cross: CrossedMessages) -> bool:
        """The two receives could change places: nothing on the receiver uses their tensors from the
        first to the second.
        """
        rank = self.layout.chan_dst[cross.channel]
        first, second = cross.one.recv, cross.two.recv
        labels = {_label_text(cross.one.target), _label_text(cross.two.target)}
        calls = [(p, call) for p, call in self.program.calls_of(rank) if p <= second.position]
        own = {first[:2], second[:2]}
        for position, call in calls:
            for k, part in [(-1, call), *enumerate(call.parts)]:
                if (position, k) in own or not labels & _buffer_labels(part):
                    continue
                if position >= first.position or self._open(rank, position, first.position):
                    return False
        return not any(call.op == "assign" for p, call in calls if p >= first.position)

    def _open(self, rank: int, position: int, until: int) -> bool:
        """A request posted at a position is not waited for before another position."""
        call = self.program.code_call(rank, position)
        if not call.handled:
            return False
        waited = [
            p
            for p in range(position + 1, until)
            if position in [p - back for back in self.program.code_call(rank, p).waits]
        ]
        return not waited

    def _met(self, cross: CrossedMessages) -> bool:
        if self.trace is None:
            return True
        src, dst = self.layout.chan_src[cross.channel], self.layout.chan_dst[cross.channel]
        wanted = {(src, *p.send[:2]) for p in cross[1:]} | {(dst, *p.recv[:2]) for p in cross[1:]}
        rows = np.flatnonzero((self.trace["match"] >= 0) & np.isin(self.trace["rank"], (src, dst)))
        met = zip(
            *(self.trace[name][rows].tolist() for name in ("rank", "position", "part")), strict=True
        )
        return wanted <= set(met)

    # --- words ---
    def _finding(self, cross: CrossedMessages, count: int) -> Finding:
        src, dst = self.layout.chan_src[cross.channel], self.layout.chan_dst[cross.channel]
        calls = [(rank, m) for p in cross[1:] for rank, m in ((src, p.send), (dst, p.recv))]
        rows = []
        for rank, m in calls:
            call = self.program.call(rank, m.position)
            words = call_words(call if m.part < 0 else call.parts[m.part])
            rows.append(
                (f"rank {rank}", words, location_text(self.program.place(rank, m.position)))
            )
        one, two = (_label_text(p.target) for p in cross[1:])
        head = f"{_label_text(cross.one.source)} of rank {src} arrives in {one} of rank {dst}: equal messages received in another order"
        more = [f"so on {plural(count, 'pair')} of ranks"] if count > 1 else []
        order = f"in the order in which rank {src} sends"
        help_line = f"receive {two} before {one} on rank {dst}, {order}, or give the two messages tags of their own"
        places = tuple(dict.fromkeys(self.program.place(rank, m.position) for rank, m in calls))
        return Finding(
            "DS610",
            "warning",
            "\n".join([head, *aligned_columns(rows), *more]),
            tuple(sorted({src, dst})),
            (),
            (help_line,),
            places,
        )


def _crossed_messages(channel: int, pairs: list[MessagePair]) -> Iterator[CrossedMessages]:
    """Pairs of equal messages that could have met the other way, on a channel where every tensor
    meets one other.
    """
    met = {p[:2]: p for p in reversed(pairs)}
    to = dict(met.keys())
    if len(to) != len(met) or len(set(to.values())) != len(met) or _is_regular(to):
        return
    ordered = sorted(met.values(), key=lambda p: p.recv[:2])
    ((usual, times),) = Counter(_pair_kind(p.source, p.target, True) for p in ordered).most_common(
        1
    )
    odd: dict[tuple[str, str], list[MessagePair]] = {}
    for pair in ordered:
        if times == 1 or _pair_kind(pair.source, pair.target, True) != usual:
            odd.setdefault((pair.source[0], pair.target[0]), []).append(pair)
    for one, two in (*_crossed_copies(odd), *_crossed_names(odd)):
        if one.send.signature == two.send.signature:
            yield CrossedMessages(channel, *sorted((one, two), key=lambda p: p.recv[:2]))


def _crossed_copies(odd: UnusualPairs) -> Iterator[tuple[MessagePair, MessagePair]]:
    """i -> j + d and j -> i + d, from one name to one name: of all pairs with that sum they are the
    only two (more are a reversal).
    """
    for pairs in odd.values():
        sums: dict[int, list[MessagePair]] = {}
        for pair in pairs:
            sums.setdefault(pair.source[1] + pair.target[1], []).append(pair)
        yield from ((same[0], same[1]) for same in sums.values() if len(same) == 2)


def _crossed_names(odd: UnusualPairs) -> Iterator[tuple[MessagePair, MessagePair]]:
    """The k-th message from x to v and the k-th from y to u, for all names; where there are too
    many, names say nothing.
    """
    if len(odd) > _MAX_PAIR_KINDS:
        return
    for (source, target), one in odd.items():
        for (other, goal), two in odd.items():
            if source < other and target != goal:
                yield from zip(one, two, strict=False)


def _is_regular(met: Mapping[TensorLabel, TensorLabel]) -> bool:
    """Every name goes to one name, copies at one distance, and no tensor to one that comes back."""
    if any(met.get(target) == source for source, target in met.items() if source != target):
        return False
    kinds = {_pair_kind(source, target, True) for source, target in met.items()}
    return len({k[0] for k in kinds}) == len(kinds) == len({k[1] for k in kinds})


def _crosses_by_label(cross: CrossedMessages) -> bool:
    """a -> b and b -> a, or p@i -> q@j and p@j -> q@i."""
    one, two = cross.one, cross.two
    if cross.alike:
        return one.source[1] == two.target[1] and two.source[1] == one.target[1]
    return one.source == two.target and two.source == one.target


def _pair_kind(source: TensorLabel, target: TensorLabel, alike: bool) -> PairKind:
    return (source[0], target[0], target[1] - source[1] if alike else None)


def _label_text(label: TensorLabel) -> str:
    return TensorBuffer(label[0], label[1], (), "").label


def _buffer_labels(call: ResolvedCall) -> set[str]:
    return {
        b.label
        for side in (call.inputs, call.outputs, call.reads, call.writes, call.adds)
        for b in side
    }


def buffer_of(call: CodeCall) -> BufferVector | None:
    """The declared tensor of a message; None for an inline one."""
    buffers = (
        b
        for side in ("inputs", "outputs")
        for b in call.fields.get(side, ())
        if isinstance(b, BufferVector)
    )
    return next((b for b in buffers if b.name), None)


def _labels_by_port(
    program: Program, number: int, way: int
) -> dict[int, frozenset[TensorLabel] | None]:
    """Port of a code -> the tensors of its messages one way, copies counted from that of the first;
    None where ranks of the code differ.
    """
    code = program.codes[number]
    found: dict[int, set[TensorLabel]] = {}
    first: dict[int, Vec] = {}
    differing: set[int] = set()
    for call in code.distinct_calls():
        if call.port < 0 or OPERATIONS[call.op].direction != ("send" if way == SEND else "recv"):
            continue
        seen, buffer = found.setdefault(call.port, set()), buffer_of(call)
        if (
            code.guards is not None
            or call.invalid is not None
            or _common_value(call.signature) is None
        ):
            differing.add(call.port)
        elif buffer is not None:
            copy = _common_value(buffer.index - first.setdefault(call.port, buffer.index))
            if copy is None:
                differing.add(call.port)
            else:
                seen.add((buffer.name, copy))
    return {
        port: None if port in differing else frozenset(labels) for port, labels in found.items()
    }


def _common_value(value: Vec) -> int | None:
    """The number that all ranks of a code have."""
    if isinstance(value, int):
        return value
    return int(value.flat[0]) if value.size and (value == value.flat[0]).all() else None
