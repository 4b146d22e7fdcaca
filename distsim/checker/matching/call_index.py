"""Where in a rank's program its k-th message on a channel or its n-th call on a sequence stands.
Built on demand, for findings.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

from distsim.checker.matching.channel_layout import ChannelLayout, joins_sequence
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, at_row


class MessageCall(NamedTuple):
    """A call that sends or receives: its position, its part of a batch (-1: none), its call and
    signature.
    """

    position: int
    part: int
    call: CodeCall
    signature: int


class CallIndex:
    """Looks calls up by channel and sequence."""

    def __init__(self, layout: ChannelLayout) -> None:
        self.layout = layout
        self._ports: dict[int, dict[tuple[int, bool], list[tuple[int, int, CodeCall]]]] = {}
        self._slots: dict[int, dict[int, list[int]]] = {}
        self._joins: dict[tuple[int, int], list[int]] = {}
        self._shared: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._signatures: dict[int, list[int]] = {}
        self._plain: dict[int, bool] = {}
        self._channels: dict[tuple[int, bool], dict[int, list[int]]] = {}

    def messages(self, rank: int, channel: int, *, sends: bool) -> list[MessageCall]:
        """All sends (or receives) that the rank's program has on a channel, in program order,
        reached or not.
        """
        program = self.layout.program
        if not 0 <= rank < program.world_size:  # a peer that an invalid call names
            return []
        row = program.row_of[rank]
        by_port = self._by_port(program.code_of[rank])
        found = [
            m
            for port in self._ports_of(rank, sends).get(channel, ())
            for m in by_port.get((port, sends), ())
        ]
        found.sort(key=lambda m: m[:2])
        return [
            MessageCall(p, part, call, int(at_row(call.signature, row)))
            for p, part, call in found
            if self.makes(rank, p, call)
        ]

    def count(self, rank: int, channel: int, *, sends: bool) -> int:
        """How many messages (or receives) the rank's program has on a channel."""
        if self.layout.program.code(rank).guards:
            return len(self.messages(rank, channel, sends=sends))
        by_port = self._by_port(self.layout.program.code_of[rank])
        return sum(
            len(by_port.get((port, sends), ()))
            for port in self._ports_of(rank, sends).get(channel, ())
        )

    def ordinal(self, rank: int, channel: int, position: int, part: int, *, sends: bool) -> int:
        """Which of the rank's messages on a channel this one is, from 0."""
        if self.layout.program.code(rank).guards:
            return sum(m[:2] < (position, part) for m in self.messages(rank, channel, sends=sends))
        by_port = self._by_port(self.layout.program.code_of[rank])
        ports = self._ports_of(rank, sends).get(channel, ())
        return sum(
            bisect_left(by_port.get((port, sends), ()), (position, part), key=lambda m: m[:2])
            for port in ports
        )

    def joins(self, rank: int, sequence: int) -> list[int]:
        """Positions of all calls that the rank's program makes on a sequence, reached or not. Not
        to be changed: ranks that run the same code without a guard share one list."""
        if (rank, sequence) not in self._joins:
            number = self.layout.program.code_of[rank]
            slots = tuple(
                slot
                for slot, m in enumerate(self.layout.member[rank])
                if m >= 0 and self.layout.sequence_of[m] == sequence
            )
            if (number, slots) not in self._shared:
                by_slot = self._by_slot(number)
                self._shared[number, slots] = sorted(
                    p for slot in slots for p in by_slot.get(slot, ())
                )
            found = self._shared[number, slots]
            if not self._is_plain(number):
                found = [
                    p for p in found if self.makes(rank, p, self.layout.program.code_call(rank, p))
                ]
            self._joins[rank, sequence] = found
        return self._joins[rank, sequence]

    def signatures(self, rank: int, sequence: int) -> list[int]:
        """Signatures of all calls that the rank's program makes on a sequence; shared as their
        positions are, where no rank differs.
        """
        program = self.layout.program
        positions = self.joins(rank, sequence)
        if id(positions) not in self._signatures:
            vectors = [program.code_call(rank, p).signature for p in positions]
            row = program.row_of[rank]
            found = [int(at_row(v, row)) for v in vectors]
            if not all(isinstance(v, int) for v in vectors):
                return found
            self._signatures[id(positions)] = found
        return self._signatures[id(positions)]

    def _is_plain(self, number: int) -> bool:
        """All ranks of a code make all of its calls."""
        if number not in self._plain:
            code = self.layout.program.codes[number]
            self._plain[number] = code.guards is None and all(
                call.invalid is None for call in code.calls
            )
        return self._plain[number]

    def sequence(self, rank: int, call: CodeCall) -> int:
        """The sequence of a collective call."""
        return self.layout.sequence_of[
            self.layout.member[rank][self.layout.slot(self.layout.program.code_of[rank], call)]
        ]

    def is_join(self, rank: int, position: int) -> bool:
        """The call at a position meets others on a sequence."""
        return joins_sequence(self.layout.program.code_call(rank, position))

    def channel(self, rank: int, call: CodeCall) -> int:
        """The channel of a message call."""
        table = (
            self.layout.send_chan
            if OPERATIONS[call.op].direction == "send"
            else self.layout.recv_chan
        )
        return table[rank][call.port]

    def makes(self, rank: int, position: int, call: CodeCall) -> bool:
        """The rank really makes the call: no guard shuts it out and it is not invalid."""
        program = self.layout.program
        row, guards = program.row_of[rank], program.code(rank).guards
        guard = guards[position] if guards else None
        return (guard is None or bool(guard[row])) and (
            call.invalid is None or not call.invalid[0][row]
        )

    def _ports_of(self, rank: int, sends: bool) -> dict[int, list[int]]:
        """Channel -> ports of a rank."""
        if (rank, sends) not in self._channels:
            found: dict[int, list[int]] = defaultdict(list)
            for port, channel in enumerate(
                (self.layout.send_chan if sends else self.layout.recv_chan)[rank]
            ):
                if channel >= 0:
                    found[channel].append(port)
            self._channels[rank, sends] = found
        return self._channels[rank, sends]

    def _by_port(self, number: int) -> dict[tuple[int, bool], list[tuple[int, int, CodeCall]]]:
        if number not in self._ports:
            found: dict[tuple[int, bool], list[tuple[int, int, CodeCall]]] = defaultdict(list)
            for position, call in enumerate(self.layout.program.codes[number].calls):
                for part, message in enumerate(call.parts) if call.parts else ((-1, call),):
                    if message.port >= 0:
                        found[message.port, OPERATIONS[message.op].direction == "send"].append(
                            (position, part, message)
                        )
            self._ports[number] = found
        return self._ports[number]

    def _by_slot(self, number: int) -> dict[int, list[int]]:
        if number not in self._slots:
            found: dict[int, list[int]] = defaultdict(list)
            code = self.layout.program.codes[number]
            slots = {
                id(call): self.layout.slot(number, call)
                for call in code.distinct_calls(parts=False)
                if joins_sequence(call)
            }
            for position, call in enumerate(code.calls):
                if (slot := slots.get(id(call))) is not None:
                    found[slot].append(position)
            self._slots[number] = found
        return self._slots[number]
