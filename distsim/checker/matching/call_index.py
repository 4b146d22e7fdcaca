"""Look up the k-th message of a rank on a channel, or its n-th call on a sequence.

The tables are built on demand and per code, because only findings need them. The lookups cover the
whole program of a rank, whether an execution reaches the calls or not.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from typing import NamedTuple

from distsim.checker.matching.channel_layout import WHOLE_CALL, ChannelLayout, joins_sequence
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, at_row
from distsim.program.model import Program


class MessageCall(NamedTuple):
    """A call that sends or receives; ``part`` is its part of a batch, or `WHOLE_CALL`."""

    position: int
    part: int
    call: CodeCall
    signature: int


#: (position, part, call) of a message, as all ranks of a code share it.
_CodeMessage = tuple[int, int, CodeCall]
#: (endpoint, whether it sends) -> the messages of a code, in program order.
_MessagesByEndpoint = dict[tuple[int, bool], list[_CodeMessage]]


class CallIndex:
    """Looks up the calls of a program by channel and sequence."""

    def __init__(self, layout: ChannelLayout) -> None:
        self.layout = layout
        self._messages_by_endpoint: dict[int, _MessagesByEndpoint] = {}
        self._positions_by_slot: dict[int, dict[int, list[int]]] = {}
        self._joins: dict[tuple[int, int], list[int]] = {}
        self._shared_joins: dict[tuple[int, tuple[int, ...]], list[int]] = {}
        self._signatures: dict[int, list[int]] = {}
        self._uniform: dict[int, bool] = {}
        self._channel_endpoints: dict[tuple[int, bool], dict[int, list[int]]] = {}

    # --- messages ---
    def messages(self, rank: int, channel: int, *, sends: bool) -> list[MessageCall]:
        """All sends (or receives) of a rank's program on a channel, in program order."""
        program = self.layout.program
        if not 0 <= rank < program.world_size:  # a peer that an invalid call names
            return []
        row = program.row_of[rank]
        found: list[_CodeMessage] = []
        for messages in self._code_messages(rank, channel, sends):
            found += messages
        found.sort(key=_place_of)
        return [
            MessageCall(position, part, call, int(at_row(call.signature, row)))
            for position, part, call in found
            if self.makes(rank, position, call)
        ]

    def count(self, rank: int, channel: int, *, sends: bool) -> int:
        """How many sends (or receives) the rank's program has on a channel."""
        if self.layout.program.code(rank).guards:
            return len(self.messages(rank, channel, sends=sends))
        return sum(len(messages) for messages in self._code_messages(rank, channel, sends))

    def ordinal(self, rank: int, channel: int, position: int, part: int, *, sends: bool) -> int:
        """The number of a message among the rank's messages on a channel, from 0."""
        place = (position, part)
        if self.layout.program.code(rank).guards:
            messages = self.messages(rank, channel, sends=sends)
            return sum((message.position, message.part) < place for message in messages)
        return sum(
            bisect_left(messages, place, key=_place_of)
            for messages in self._code_messages(rank, channel, sends)
        )

    def channel(self, rank: int, call: CodeCall) -> int:
        """The channel of a message call."""
        sends = OPERATIONS[call.op].direction == "send"
        table = self.layout.send_chan if sends else self.layout.recv_chan
        return table[rank][call.endpoint]

    def _code_messages(self, rank: int, channel: int, sends: bool) -> list[list[_CodeMessage]]:
        """The messages of the rank's code on a channel, one list per endpoint, guards ignored."""
        by_endpoint = self._by_endpoint(self.layout.program.code_of[rank])
        endpoints = self._endpoints_of(rank, sends).get(channel, ())
        return [by_endpoint.get((endpoint, sends), []) for endpoint in endpoints]

    def _endpoints_of(self, rank: int, sends: bool) -> dict[int, list[int]]:
        """Channel -> the rank's endpoints on it."""
        key = (rank, sends)
        if key not in self._channel_endpoints:
            channels = (self.layout.send_chan if sends else self.layout.recv_chan)[rank]
            endpoints: dict[int, list[int]] = defaultdict(list)
            for endpoint, channel in enumerate(channels):
                if channel >= 0:
                    endpoints[channel].append(endpoint)
            self._channel_endpoints[key] = endpoints
        return self._channel_endpoints[key]

    def _by_endpoint(self, code_number: int) -> _MessagesByEndpoint:
        if code_number not in self._messages_by_endpoint:
            found: _MessagesByEndpoint = defaultdict(list)
            for position, call in enumerate(self.layout.program.codes[code_number].calls):
                messages = enumerate(call.parts) if call.parts else ((WHOLE_CALL, call),)
                for part, message in messages:
                    if message.endpoint >= 0:
                        sends = OPERATIONS[message.op].direction == "send"
                        found[message.endpoint, sends].append((position, part, message))
            self._messages_by_endpoint[code_number] = found
        return self._messages_by_endpoint[code_number]

    # --- sequences ---
    def joins(self, rank: int, sequence: int) -> list[int]:
        """Positions of all calls that the rank's program makes on a sequence.

        The caller must not change the list: ranks that run the same code without guards share it.
        """
        key = (rank, sequence)
        if key not in self._joins:
            code_number = self.layout.program.code_of[rank]
            positions = self._code_joins(code_number, self._slots_of(rank, sequence))
            if not self._is_uniform(code_number):
                positions = [
                    position for position in positions if self._makes_call_at(rank, position)
                ]
            self._joins[key] = positions
        return self._joins[key]

    def _slots_of(self, rank: int, sequence: int) -> tuple[int, ...]:
        """The rank's slots that lead to a sequence."""
        sequence_of = self.layout.sequence_of
        return tuple(
            slot
            for slot, member in enumerate(self.layout.member[rank])
            if member >= 0 and sequence_of[member] == sequence
        )

    def _code_joins(self, code_number: int, slots: tuple[int, ...]) -> list[int]:
        """Positions of a code's calls on some slots, guards ignored."""
        key = (code_number, slots)
        if key not in self._shared_joins:
            by_slot = self._by_slot(code_number)
            positions: list[int] = []
            for slot in slots:
                positions += by_slot.get(slot, ())
            self._shared_joins[key] = sorted(positions)
        return self._shared_joins[key]

    def signatures(self, rank: int, sequence: int) -> list[int]:
        """Signatures of all calls that the rank's program makes on a sequence.

        The lists are shared like those of `joins`, if no rank's signature differs.
        """
        program = self.layout.program
        positions = self.joins(rank, sequence)
        # `joins` keeps its lists, so an id is never reused.
        key = id(positions)
        if key not in self._signatures:
            vectors = [program.code_call(rank, position).signature for position in positions]
            row = program.row_of[rank]
            signatures = [int(at_row(vector, row)) for vector in vectors]
            if not all(isinstance(vector, int) for vector in vectors):
                return signatures
            self._signatures[key] = signatures
        return self._signatures[key]

    def _is_uniform(self, code_number: int) -> bool:
        """Whether all ranks of a code make all of its calls."""
        if code_number not in self._uniform:
            code = self.layout.program.codes[code_number]
            all_valid = all(call.invalid is None for call in code.calls)
            self._uniform[code_number] = code.guards is None and all_valid
        return self._uniform[code_number]

    def sequence(self, rank: int, call: CodeCall) -> int:
        """The sequence of a collective call."""
        slot = self.layout.slot(self.layout.program.code_of[rank], call)
        return self.layout.sequence_of[self.layout.member[rank][slot]]

    def is_join(self, rank: int, position: int) -> bool:
        """Whether the call at a position meets others on a sequence."""
        return joins_sequence(self.layout.program.code_call(rank, position))

    def _by_slot(self, code_number: int) -> dict[int, list[int]]:
        if code_number not in self._positions_by_slot:
            code = self.layout.program.codes[code_number]
            joining = [call for call in code.distinct_calls(parts=False) if joins_sequence(call)]
            slots = {id(call): self.layout.slot(code_number, call) for call in joining}
            found: dict[int, list[int]] = defaultdict(list)
            for position, call in enumerate(code.calls):
                slot = slots.get(id(call))
                if slot is not None:
                    found[slot].append(position)
            self._positions_by_slot[code_number] = found
        return self._positions_by_slot[code_number]

    # --- guards ---
    def makes(self, rank: int, position: int, call: CodeCall) -> bool:
        """Whether the rank really makes the call: no guard skips it, and it is valid."""
        program = self.layout.program
        row, guards = program.row_of[rank], program.code(rank).guards
        guard = guards[position] if guards else None
        if guard is not None and not guard[row]:
            return False
        return call.invalid is None or not call.invalid.rows[row]

    def _makes_call_at(self, rank: int, position: int) -> bool:
        return self.makes(rank, position, self.layout.program.code_call(rank, position))


def _place_of(message: _CodeMessage) -> tuple[int, int]:
    """Position and part: the order of messages in a rank's program."""
    return message[:2]


def part_call(program: Program, rank: int, position: int, part: int) -> ResolvedCall:
    """The resolved call at a position, or one part of the batch there."""
    call = program.call(rank, position)
    return call.parts[part] if part >= 0 and call.parts else call
