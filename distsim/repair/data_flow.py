"""Where the data of messages and local work come from, and where received data go.

Key idea: each write of a tensor on a rank has an *origin*: the operation, its partner, and its
number among the writes of this kind. A later read sees the origin of the latest write before it, in
program order. A receive and the output of a collective count as writes at the call that starts
them, because a program means to read the data that it has asked for.

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

_Buffer = tuple[str, int]
#: Operation, partner (a peer, members, or a name) and number of a write.
_Origin = tuple[str, object, int]
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

    ``lost_reads``: reads that no longer see the write that they saw. ``repeated_sends``: sends in
    addition to the original ones that send the same content to the same rank again.
    ``early_sends``: writes after an additional send whose content is not sent. ``unread``: received
    tensors that no later call uses. ``lost_deliveries``: messages that now reach another buffer.
    ``message_arguments``: different operations, peers and tags of the messages of each rank.
    """

    lost_reads: int
    repeated_sends: int
    early_sends: int
    unread: int
    lost_deliveries: int
    message_arguments: int


class DataFlow:
    """The reads, sends and deliveries of a program, in program order."""

    def __init__(self, program: Program) -> None:
        self._reads: Counter[_Read] = Counter()
        self._sent: Counter[_Sent] = Counter()
        self._writes: Counter[tuple[int, _Buffer]] = Counter()
        self._unread = 0
        self._arguments: set[tuple[object, ...]] = set()
        self._channels: dict[tuple[object, ...], tuple[list[_Buffer], list[_Buffer]]] = {}
        for rank in program.present:
            self._follow(rank, _calls_until_exit(program, rank))
        self._deliveries = Counter(self._paired())

    def change_in(self, changed: DataFlow) -> FlowChange:
        """How ``changed`` departs from this program."""
        lost_reads = self._reads - changed._reads
        repeated, early = changed._doubtful_sends(self)
        return FlowChange(
            sum(count for read, count in lost_reads.items() if read.origin != _INITIAL),
            repeated,
            early,
            changed._unread,
            (self._deliveries - changed._deliveries).total(),
            len(changed._arguments),
        )

    def _follow(self, rank: int, calls: Iterable[ResolvedCall]) -> None:
        origins: dict[_Buffer, _Origin] = {}
        numbers: Counter[tuple[str, object]] = Counter()
        received: set[_Buffer] = set()
        for call in calls:
            reads = [_key(buffer) for buffer in _read_buffers(call)]
            received.difference_update(reads)
            if call.op in _SENDS or OPERATIONS[call.op].kind == "local":
                for buffer in reads:
                    origin = origins.get(buffer, _INITIAL)
                    self._reads[_Read(rank, call.op, call.name, buffer, origin)] += 1
            self._add_message(rank, call, reads)
            written = [_key(buffer) for buffer in _written_buffers(call)]
            partner = call.name if call.peer is None else call.peer
            for buffer in written:
                numbers[call.op, partner] += 1
                origins[buffer] = (call.op, partner, numbers[call.op, partner])
                self._writes[rank, buffer] += 1
                if call.op in _RECEIVES:
                    self._unread += buffer in received
                    received.add(buffer)
        self._unread += len(received)

    def _add_message(self, rank: int, call: ResolvedCall, reads: list[_Buffer]) -> None:
        if call.op not in (*_SENDS, *_RECEIVES) or call.peer is None:
            return
        sends = call.op in _SENDS
        self._arguments.add((rank, call.op, call.peer, call.tag, call.group.ranks))
        self._arguments.add((rank, call.op, call.tag, call.group.ranks))
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

    def _sent_counts(self) -> Counter[tuple[int, int, _Buffer]]:
        counts: Counter[tuple[int, int, _Buffer]] = Counter()
        for sent, count in self._sent.items():
            counts[sent.rank, sent.peer, sent.buffer] += count
        return counts


def _calls_until_exit(program: Program, rank: int) -> Iterator[ResolvedCall]:
    """The calls of a rank, messages in batches one by one; those after an exit are not made."""
    for _, call in program.calls_of(rank):
        yield from call.parts or (call,)
        if call.op in ("exit", "fail"):
            return


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


__all__ = ["DataFlow", "FlowChange"]
