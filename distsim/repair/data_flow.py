"""Where the data of messages and local work come from, and where received data go.

Key idea: each write of a tensor on a rank has an *origin*: the operation, its partner (of a
collective, its tensor), and its number among the writes of this kind. A later read sees the origin
of the latest write before it, in program order. A receive and the output of a collective count as
writes at the call that starts them, because a program means to read the data that it has asked for.

A repair should keep what reads see. If it adds a send, the send should stand after the last write
of its tensor. If it adds a receive, the messages before and after it should still reach the same
buffers. Reads by collectives are not compared: `exchanged_data` covers what collectives exchange.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.program.step_traits import expression_names

_SENDS: Final = ("send", "isend")
_RECEIVES: Final = ("recv", "irecv")
#: Calls after which a rank makes no other.
_ENDS: Final = ("exit", "fail")

_Buffer = tuple[str, int]
#: Operation, partner (a peer, a name, or the tensor of a collective) and number of a write.
_Origin = tuple[str, object, int]
#: Operation, name, members, peer and written tensors of a call, wherever it stands.
_Step = tuple[str, str, tuple[int, ...], int | None, tuple[_Buffer, ...]]
_INITIAL: Final[_Origin] = ("", None, 0)


class _Read(NamedTuple):
    """What local work or a send reads."""

    rank: int
    op: str
    name: str
    buffer: _Buffer
    origin: _Origin


class _Sent(NamedTuple):
    """A tensor that a rank sends, and the number of writes of it before that."""

    rank: int
    peer: int
    buffer: _Buffer
    version: int


class _Delivery(NamedTuple):
    """A tensor of the sender that reaches a tensor of the receiver."""

    source: int
    sent: _Buffer
    target: int
    received: _Buffer


class FlowChange(NamedTuple):
    """How the data flow of a changed program departs from the original one; less is better.

    ``lost_reads``: reads that no longer see the write that they saw. ``edited_ranks``: ranks whose
    calls, other than waits and calls that create or destroy groups, differ or have another order.
    ``repeated_sends``: sends in addition to the original ones that send the same content to the
    same rank again. ``early_sends``: writes after an additional send whose content is not sent.
    ``unread``: tensors that are received or computed, and that no later call uses.
    ``lost_deliveries``: messages that now reach another buffer. ``message_arguments``: different
    directions, peers and tags of the messages of each rank. ``hasty_sends``: sends that no longer
    wait for as many receives, whose data they may need. ``renamed``: messages from one tensor to
    another of a different name, or between copies of different numbers. ``edited_before_exit``:
    ranks that exit early and whose calls up to that exit are no longer their first calls.
    ``empty_sends``: additional sends of a tensor without content, if the original sends of the rank
    have some. ``overwritten``: additional messages that a later message overwrites before any call
    reads them. ``duplicate_sends``: sends of the same content to the same rank as an earlier send.
    ``undefined_reads``: reads of tensors without content by local work. ``uneven_reads``: reads by
    local work that see an initial value, and the result of a collective on most ranks.
    """

    lost_reads: int
    edited_ranks: int
    repeated_sends: int
    early_sends: int
    unread: int
    lost_deliveries: int
    message_arguments: int
    hasty_sends: int
    renamed: int
    edited_before_exit: int
    empty_sends: int
    overwritten: int
    duplicate_sends: int
    undefined_reads: int
    uneven_reads: int = 0


NO_FLOW_CHANGE: Final = FlowChange(*[0] * len(FlowChange._fields))


class DataFlow:
    """The reads, sends and deliveries of a program, in program order."""

    def __init__(self, program: Program) -> None:
        self._reads: Counter[_Read] = Counter()
        self._sent: Counter[_Sent] = Counter()
        self._writes: Counter[tuple[int, _Buffer]] = Counter()
        self._receives_before: dict[tuple[object, ...], int] = {}
        self._order: dict[int, list[_Step]] = {}
        self._exiting: set[int] = set()
        specs = program.tensors.items()
        self._with_value = {name for name, spec in specs if spec.value is not None}
        self._without_value = {name for name, _ in specs} - self._with_value
        self._unread = 0
        self._overwritten = 0
        self._arguments: set[tuple[object, ...]] = set()
        self._channels: dict[tuple[object, ...], tuple[list[_Buffer], list[_Buffer]]] = {}
        for rank in program.present:
            self._follow(rank, _calls_until_exit(program, rank))
            self._count_receives_before_sends(program, rank)
        self._deliveries = Counter(self._paired())

    def change_in(self, changed: DataFlow) -> FlowChange:
        """How ``changed`` departs from this program."""
        lost_reads = self._lost_reads(changed)
        repeated, early = changed._doubtful_sends(self)
        return FlowChange(
            lost_reads,
            sum(steps != changed._order.get(rank) for rank, steps in self._order.items()),
            repeated,
            early,
            changed._unread,
            (self._deliveries - changed._deliveries).total(),
            len(changed._arguments),
            sum(
                changed._receives_before.get(sent, count) < count
                for sent, count in self._receives_before.items()
            ),
            sum(n * _differences(each) for each, n in changed._deliveries.items()),
            sum(
                changed._order.get(rank, [])[: len(self._order[rank])] != self._order[rank]
                for rank in self._exiting
            ),
            changed._empty_sends(self),
            max(0, changed._overwritten - self._overwritten),
            sum(count - 1 for count in changed._sent.values()),
            changed.undefined_reads(),
            changed._uneven_reads(),
        )

    def undefined_reads(self) -> int:
        """How many reads by local work are of tensors without content."""
        return sum(
            count
            for read, count in self._reads.items()
            if OPERATIONS[read.op].kind == "local"
            and read.origin == _INITIAL
            and read.buffer[0] in self._without_value
        )

    def _uneven_reads(self) -> int:
        """How many reads by local work miss a collective whose result most ranks read there."""
        results = self._reads_of_results()
        return sum(
            count
            for read, count in self._reads.items()
            if read.origin == _INITIAL and _place(read) in results
        )

    def _reads_of_results(self) -> set[tuple[str, str, _Buffer]]:
        """The reads by local work that see the result of a collective on most ranks."""
        seen: dict[tuple[str, str, _Buffer], Counter[bool]] = defaultdict(Counter)
        for read, count in self._reads.items():
            if OPERATIONS[read.op].kind == "local":
                op = read.origin[0]
                seen[_place(read)][bool(op) and OPERATIONS[op].kind == "collective"] += count
        return {place for place, counts in seen.items() if counts[True] > counts[False]}

    def _lost_reads(self, changed: DataFlow) -> int:
        """How many reads no longer see the write that they saw.

        A receive that lacks its send may be one from another rank.
        """
        lost = self._reads - changed._reads
        found = Counter(_without_source(read) for read in (changed._reads - self._reads).elements())
        computed = {
            (read.rank, read.buffer)
            for read in changed._reads - self._reads
            if read.origin != _INITIAL and read.origin[0] not in _RECEIVES
        }
        total, results = 0, self._reads_of_results()
        for read in lost.elements():
            if read.origin == _INITIAL and _place(read) in results:
                continue
            if read.origin == _INITIAL and not self._needs_initial_value(read, computed):
                continue
            key = _without_source(read)
            if self._lacks_send(read) and found[key]:
                found[key] -= 1
                continue
            total += 1
        return total

    def _needs_initial_value(self, read: _Read, computed: set[tuple[int, _Buffer]]) -> bool:
        """Whether a declared value is meant that a call no longer reads.

        ``computed``: tensors of which calls now read a computed value. A send may have lacked the
        receive before it, but not the local work.
        """
        if read.buffer[0] not in self._with_value:
            return False
        is_local = OPERATIONS[read.op].kind == "local"
        return is_local or (read.rank, read.buffer) in computed

    def _lacks_send(self, read: _Read) -> bool:
        """Whether a read sees a receive from a rank that sends less than is received from it."""
        op, source, _ = read.origin
        if op not in _RECEIVES:
            return False
        channels = [
            lists for (a, b, *_), lists in self._channels.items() if (a, b) == (source, read.rank)
        ]
        return sum(len(sent) - len(received) for sent, received in channels) < 0

    def _follow(self, rank: int, calls: Iterable[ResolvedCall]) -> None:
        origins: dict[_Buffer, _Origin] = {}
        numbers: Counter[tuple[str, object]] = Counter()
        unused: set[_Buffer] = set()
        received: set[_Buffer] = set()
        steps = self._order.setdefault(rank, [])
        for call in calls:
            if call.op in _ENDS:
                self._exiting.add(rank)
            if OPERATIONS[call.op].kind not in ("group", "wait") and call.op not in _ENDS:
                op = call.op.removeprefix("i") if call.op in ("isend", "irecv") else call.op
                outputs = tuple(_key(buffer) for buffer in _written_buffers(call))
                step = (op, call.name, call.group.ranks, call.peer, outputs)
                steps.append(step)
            reads = [_key(buffer) for buffer in _read_buffers(call)]
            unused.difference_update(reads)
            received.difference_update(reads)
            if call.op in _SENDS or OPERATIONS[call.op].kind == "local":
                # An isend in place of a send reads the same data.
                op = "send" if call.op in _SENDS else call.op
                for buffer in reads:
                    origin = origins.get(buffer, _INITIAL)
                    self._reads[_Read(rank, op, call.name, buffer, origin)] += 1
            self._add_message(rank, call, reads)
            written = [_key(buffer) for buffer in _written_buffers(call)]
            partner = call.name if call.peer is None else call.peer
            for buffer in written:
                # A collective gives the same result in another order of calls, a message does not.
                source = buffer if OPERATIONS[call.op].kind == "collective" else partner
                numbers[call.op, source] += 1
                origins[buffer] = (call.op, source, numbers[call.op, source])
                self._writes[rank, buffer] += 1
                if call.op in _RECEIVES:
                    self._overwritten += buffer in received
                    received.add(buffer)
                if call.op in _RECEIVES or OPERATIONS[call.op].kind == "local":
                    self._unread += buffer in unused
                    unused.add(buffer)
        self._unread += len(unused)

    def _count_receives_before_sends(self, program: Program, rank: int) -> None:
        """For each send, the receives that are complete before it starts."""
        complete = 0
        pending: Counter[int] = Counter()
        numbers: Counter[tuple[object, ...]] = Counter()
        for position, call in program.calls_of(rank):
            complete += sum(pending.pop(position - d, 0) for d in _waits(program, rank, position))
            parts = call.parts or (call,)
            for part in parts:
                if part.op in _SENDS:
                    key = (rank, part.peer, tuple(buffer.name for buffer in part.inputs))
                    numbers[key] += 1
                    self._receives_before[*key, numbers[key]] = complete
            received = sum(part.op in _RECEIVES for part in parts)
            if call.op == "irecv" or call.is_async:
                pending[position] = received
            else:
                complete += received

    def _add_message(self, rank: int, call: ResolvedCall, reads: list[_Buffer]) -> None:
        if call.op not in (*_SENDS, *_RECEIVES) or call.peer is None:
            return
        sends = call.op in _SENDS
        self._arguments.add((rank, sends, call.peer, call.tag, call.group.ranks))
        self._arguments.add((rank, sends, call.tag, call.group.ranks))
        source, target = (rank, call.peer) if sends else (call.peer, rank)
        channel = (source, target, call.tag, call.group.id)
        sent, received = self._channels.setdefault(channel, ([], []))
        if not sends:
            received += [_key(buffer) for buffer in call.outputs]
            return
        sent += reads
        for buffer in reads:
            self._sent[_Sent(rank, call.peer, buffer, self._writes[rank, buffer])] += 1

    def _paired(self) -> Iterator[_Delivery]:
        for (source, target, *_), (sent, received) in self._channels.items():
            assert isinstance(source, int)
            assert isinstance(target, int)
            for given, taken in zip(sent, received, strict=False):
                yield _Delivery(source, given, target, taken)

    def _doubtful_sends(self, original: DataFlow) -> tuple[int, int]:
        """How many sends repeat content, and how many later writes the additional sends miss."""
        before = original._sent_counts()
        additional = {
            key for key, count in self._sent_counts().items() if count > before.get(key, 0)
        }
        versions: dict[tuple[int, int, _Buffer], set[int]] = defaultdict(set)
        repeated = early = 0
        for sent, count in self._sent.items():
            key = (sent.rank, sent.peer, sent.buffer)
            if key in additional:
                versions[key].add(sent.version)
                repeated += count - 1
        for (rank, _, buffer), found in versions.items():
            written = range(1, self._writes[rank, buffer] + 1)
            earliest = min(found)
            early += sum(version > earliest and version not in found for version in written)
        return repeated, early

    def _empty_sends(self, original: DataFlow) -> int:
        """How many additional sends are of a tensor without content.

        Many programs declare no values. So only ranks count whose original sends all have content.
        """
        counts, before = self._sent_counts(), original._sent_counts()
        ranks_without: set[int] = set()
        for sent in original._sent:
            if not original._has_content(sent):
                ranks_without.add(sent.rank)
        ranks = {sent.rank for sent in original._sent} - ranks_without
        return sum(
            counts[sent.rank, sent.peer, sent.buffer] > before[sent.rank, sent.peer, sent.buffer]
            for sent in self._sent
            if sent.rank in ranks and not self._has_content(sent)
        )

    def _has_content(self, sent: _Sent) -> bool:
        return sent.version > 0 or sent.buffer[0] in self._with_value

    def _sent_counts(self) -> Counter[tuple[int, int, _Buffer]]:
        counts: Counter[tuple[int, int, _Buffer]] = Counter()
        for sent, count in self._sent.items():
            counts[sent.rank, sent.peer, sent.buffer] += count
        return counts


def _calls_until_exit(program: Program, rank: int) -> Iterator[ResolvedCall]:
    """The calls of a rank, messages in batches one by one; those after an exit are not made."""
    for _, call in program.calls_of(rank):
        yield from call.parts or (call,)
        if call.op in _ENDS:
            return


def _place(read: _Read) -> tuple[str, str, _Buffer]:
    """The same for the reads of all ranks by one piece of work."""
    return read.op, read.name, read.buffer


def _differences(delivery: _Delivery) -> int:
    """In how many of name and copy the sent and the received tensor differ."""
    pairs = zip(delivery.sent, delivery.received, strict=True)
    return sum(sent != received for sent, received in pairs)


def _without_source(read: _Read) -> _Read:
    """The read, if the rank is not known from which its data come."""
    op = read.origin[0]
    return read._replace(origin=(op.removeprefix("i"), None, 0)) if op in _RECEIVES else read


def _waits(program: Program, rank: int, position: int) -> tuple[int, ...]:
    """How many positions before a call the requests started that it waits for."""
    return program.code_call(rank, position).waits


def _key(buffer: TensorBuffer) -> _Buffer:
    return buffer.name, buffer.index


def _read_buffers(call: ResolvedCall) -> Iterable[TensorBuffer]:
    if call.op == "assign":
        names = expression_names(call.value)
        return [TensorBuffer(name, 0, (), "") for name in sorted(names)]
    if call.op in _RECEIVES:
        return ()
    return (*call.inputs, *call.reads, *call.adds)


def _written_buffers(call: ResolvedCall) -> Iterable[TensorBuffer]:
    if call.op in _SENDS or OPERATIONS[call.op].kind == "remote":
        return ()
    return (*call.outputs, *call.writes, *call.adds)


__all__ = ["NO_FLOW_CHANGE", "DataFlow", "FlowChange"]
