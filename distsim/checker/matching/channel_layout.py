"""Number the places where calls of a program meet: channels and sequences.

A *channel* is (group, sender, receiver, tag): the k-th message on it meets the k-th receive. A
*sequence* is a list of collective calls: those of a group, or the new_group or init_process_group
calls of the world; the k-th call of each member meets the k-th call of all others. A *member* is a
rank in a sequence.

The arrays are built for all ranks at once, because a pipeline has hundreds of thousands of
channels. This module does not look at single calls; see `call_index`.
"""

from __future__ import annotations

from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.backends import CONTRACT_READINGS
from distsim.common.records import dataclass
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, SharedCode, at_row
from distsim.program.model import Program
from distsim.semantics.form.linked_program import LinkedProgram

_IntArray = NDArray[np.int64]
SEND, RECV = 0, 1
#: The sender of a channel whose receives take messages from any source.
ANY_SOURCE = -1
#: The part number of a call that is not a part of a batch.
WHOLE_CALL = -1
#: Fills table entries that number no channel or member.
_UNUSED = -1


@dataclass(eq=False)
class ChannelLayout:
    """Channels, sequences and members of one program.

    ``chan_group, chan_src, chan_dst, chan_tag`` describe a channel.
    ``send_chan[rank][endpoint]`` and ``recv_chan[rank][endpoint]`` number channels.
    ``member[rank][slot]`` numbers members; the slots of a code are its groups, followed by
    those of `extra_slots`. ``sequence_of`` and ``rank_of`` describe a member.
    ``sequence_ranks`` are the ranks that meet in a sequence, in group order.
    """

    program: Program
    any_source: bool
    chan_group: list[int]
    chan_src: list[int]
    chan_dst: list[int]
    chan_tag: list[int]
    send_chan: list[list[int]]
    recv_chan: list[list[int]]
    member: list[list[int]]
    sequence_of: list[int]
    rank_of: list[int]
    sequence_ranks: list[tuple[int, ...]]
    sequence_names: list[str]
    extra_slots: list[dict[str, int]]  # per code: key of a sequence that is not a group -> slot

    @cached_property
    def linked(self) -> LinkedProgram:
        """The program compiled for the contract.

        Its readings differ only in which rows a row waits for (`LinkedProgram.under`).
        """
        return LinkedProgram(self.program, CONTRACT_READINGS["rendezvous"])

    def slot(self, code: int, call: CodeCall) -> int:
        """The slot of a collective call of a code."""
        key = sequence_key(call)
        return self.extra_slots[code][key] if key else call.group


def sequence_key(call: CodeCall) -> str:
    """The name of the call's sequence, if that is not a group; "" for a plain collective."""
    if call.op == "init_process_group":
        return "init_process_group"
    if call.op != "new_group":
        return ""
    # With local synchronization only the members of the new group meet.
    return f"new_group {call.fields.get('ranks')}" if call.fields.get("local_sync") else "new_group"


def joins_sequence(call: CodeCall) -> bool:
    """Whether the call meets other members of a sequence."""
    if OPERATIONS[call.op].kind == "collective":
        return True
    return call.op in ("new_group", "init_process_group")


def build_channel_layout(program: Program) -> ChannelLayout:
    """Number all channels, sequences and members of a program."""
    channels = _number_channels(program)
    sequences = _SequenceNumbering(program)
    members = [sequences.members_of(code) for code in program.codes]
    return ChannelLayout(
        program,
        channels.any_source,
        channels.groups,
        channels.sources,
        channels.targets,
        channels.tags,
        _table_by_rank(program, [tables[SEND] for tables in channels.tables]),
        _table_by_rank(program, [tables[RECV] for tables in channels.tables]),
        _table_by_rank(program, members),
        sequences.sequence_of,
        sequences.rank_of,
        sequences.ranks,
        sequences.names,
        sequences.extra_slots,
    )


def _table_by_rank(program: Program, tables: list[list[list[int]]]) -> list[list[int]]:
    """One entry per rank, from tables per code that have one entry per row."""
    ranks = range(program.world_size)
    return [tables[program.code_of[rank]][program.row_of[rank]] for rank in ranks]


def _endpoints_used(code: SharedCode) -> tuple[set[int], set[int]]:
    """The endpoints of a code that send and those that receive."""
    sends: set[int] = set()
    receives: set[int] = set()
    for call in code.distinct_calls():
        direction = OPERATIONS[call.op].direction
        if call.endpoint >= 0 and direction is not None:
            (sends if direction == "send" else receives).add(call.endpoint)
    return sends, receives


class _Channels(NamedTuple):
    """Numbered channels. ``tables[code][direction][row][endpoint]`` is a channel."""

    groups: list[int]
    sources: list[int]
    targets: list[int]
    tags: list[int]
    tables: list[list[list[list[int]]]]
    any_source: bool


class _EndpointUse(NamedTuple):
    """An endpoint of a code that sends or receives: one channel for each row of the code."""

    code: int
    direction: int
    endpoint: int


def _number_channels(program: Program) -> _Channels:
    # One row per (use, rank of the code), with the columns group, source, target and tag.
    columns: list[list[_IntArray]] = [[], [], [], []]
    uses: list[_EndpointUse] = []
    any_source = False
    for number, code in enumerate(program.codes):
        own = np.asarray(code.ranks, dtype=np.int64)
        endpoints_used = _endpoints_used(code)
        for direction in (SEND, RECV):
            for endpoint in sorted(endpoints_used[direction]):
                peer, group, tag = code.endpoints[endpoint]
                other = np.broadcast_to(np.asarray(peer, dtype=np.int64), own.shape)
                if direction == SEND:
                    source, target = own, other
                else:
                    source, target = other, own
                    any_source |= bool((other == ANY_SOURCE).any())
                fields = (code.groups[group], source, target, tag)
                for column, values in zip(columns, fields, strict=True):
                    vector = np.asarray(values, dtype=np.int64)
                    column.append(np.broadcast_to(vector, own.shape))
                uses.append(_EndpointUse(number, direction, endpoint))

    tables = [_unused_tables(code) for code in program.codes]
    if not uses:
        return _Channels([], [], [], [], tables, False)
    joined = [np.concatenate(column) for column in columns]
    first, number_of_row = _number_distinct_rows(joined)
    start = 0
    for use in uses:
        end = start + len(program.codes[use.code].ranks)
        for row, channel in enumerate(number_of_row[start:end].tolist()):
            tables[use.code][use.direction][row][use.endpoint] = channel
        start = end
    groups, sources, targets, tags = (column[first].tolist() for column in joined)
    return _Channels(groups, sources, targets, tags, tables, any_source)


def _unused_tables(code: SharedCode) -> list[list[list[int]]]:
    return [[[_UNUSED] * len(code.endpoints) for _ in code.ranks] for _ in (SEND, RECV)]


def _number_distinct_rows(columns: list[_IntArray]) -> tuple[_IntArray, _IntArray]:
    """The first row of each distinct combination, and the combination's number for every row."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        # Compress after every column, so that the product cannot overflow.
        _, key = np.unique(key * len(values) + inverse.reshape(-1), return_inverse=True)
        key = key.reshape(-1)
    _, first = np.unique(key, return_index=True)
    return first, key


class _SequenceNumbering:
    """Numbers sequences and members; the sequence of a plain group has the group's id."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks: list[tuple[int, ...]] = [program.members(g.id) for g in program.groups]
        self.names: list[str] = [group.name for group in program.groups]
        self.sequence_of: list[int] = []
        self.rank_of: list[int] = []
        self.extra_slots: list[dict[str, int]] = []
        self._members: dict[tuple[int, int], int] = {}
        self._sequences: dict[str, int] = {}
        #: The ranks of each sequence with a key.
        self._rank_sets: dict[int, frozenset[int]] = {}

    def members_of(self, code: SharedCode) -> list[list[int]]:
        """The members of a code, as a table row -> slot -> member."""
        joining = [call for call in code.distinct_calls() if joins_sequence(call)]
        group_slots = sorted(
            {call.group for call in joining if call.group >= 0 and not sequence_key(call)}
        )
        calls_by_key = {sequence_key(call): call for call in joining}
        calls_by_key.pop("", None)
        self.extra_slots.append({key: len(code.groups) + i for i, key in enumerate(calls_by_key)})
        sequences = [self._sequence(key, call) for key, call in calls_by_key.items()]
        table = []
        for row, rank in enumerate(code.ranks):
            members = [_UNUSED] * len(code.groups)
            extra = []
            for sequence in sequences:
                is_member = rank in self._rank_sets[sequence]
                own = sequence if is_member else self._sequence_alone(rank)
                extra.append(self._member(own, rank))
            for slot in group_slots:
                members[slot] = self._member(int(at_row(code.groups[slot], row)), rank)
            table.append(members + extra)
        return table

    def _sequence(self, key: str, call: CodeCall) -> int:
        """The sequence with a key; numbered when it is first seen."""
        if key not in self._sequences:
            self._sequences[key] = len(self.ranks)
            ranks: tuple[int, ...] = tuple(range(self.program.world_size))
            if call.fields.get("local_sync"):
                ranks = tuple(sorted(call.fields.get("ranks", ranks)))
            # A set: the world may have 100 000 ranks, and each of them is looked up.
            self._rank_sets[len(self.ranks)] = frozenset(ranks)
            self.ranks.append(ranks)
            self.names.append(call.op)
        return self._sequences[key]

    def _sequence_alone(self, rank: int) -> int:
        """A sequence with one member.

        A rank that calls new_group with local synchronization and is not a member waits for no
        other rank.
        """
        key = f"alone {rank}"
        if key not in self._sequences:
            self._sequences[key] = len(self.ranks)
            self.ranks.append((rank,))
            self.names.append("new_group")
        return self._sequences[key]

    def _member(self, sequence: int, rank: int) -> int:
        """The number of a member; numbered when it is first seen."""
        number = self._members.setdefault((sequence, rank), len(self.sequence_of))
        if number == len(self.sequence_of):
            self.sequence_of.append(sequence)
            self.rank_of.append(rank)
        return number
