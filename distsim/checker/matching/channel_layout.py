"""Where the calls of a program meet, as plain numbers: channels for messages, sequences for
collectives.

A *channel* is (group, sender, receiver, tag): its k-th message goes to its k-th receive. A
*sequence* is the collectives of a group, or the world's new_group calls or its init_process_group
calls: the k-th call of each member meets the k-th of all others. A *member* is a rank in a
sequence. The arrays are built at once for all ranks, because a pipeline has hundreds of thousands
of channels.
"""

from __future__ import annotations

from functools import cached_property

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


@dataclass(eq=False)
class ChannelLayout:
    """Channels, sequences and members of one program.

    ``chan_group, chan_src, chan_dst, chan_tag`` describe channel c; a source of -1 is a receive
    from any source. ``send_chan[rank][port]`` and ``recv_chan[rank][port]`` number channels.
    ``member[rank][slot]`` numbers members, where the slots of a code are its groups, then those of
    `extra_slots`. ``sequence_of[m]`` and ``rank_of[m]`` describe member m,
    ``sequence_ranks[sequence]`` who meets there.
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
    extra_slots: list[dict[str, int]]  # per code: key of a sequence that is no group -> slot

    @cached_property
    def linked(self) -> LinkedProgram:
        """The program compiled for the contract; its readings differ only in whom a row waits for
        (`LinkedProgram.under`).
        """
        return LinkedProgram(self.program, CONTRACT_READINGS["rendezvous"])

    def slot(self, code: int, call: CodeCall) -> int:
        """The slot of a collective call of a code."""
        key = sequence_key(call)
        return self.extra_slots[code][key] if key else call.group


def sequence_key(call: CodeCall) -> str:
    """The name of the sequence where it is not the call's group: "" for a plain collective."""
    if call.op == "new_group":
        return (
            f"new_group {call.fields.get('ranks')}"
            if call.fields.get("local_sync")
            else "new_group"
        )
    return "init_process_group" if call.op == "init_process_group" else ""


def joins_sequence(call: CodeCall) -> bool:
    """The call meets the other members of a sequence."""
    return OPERATIONS[call.op].kind == "collective" or call.op in (
        "new_group",
        "init_process_group",
    )


def build_channel_layout(program: Program) -> ChannelLayout:
    """Number everything that can meet."""
    ends = [_ports_used(code) for code in program.codes]
    (groups, sources, targets, tags), tables, any_source = _number_channels(program, ends)
    send_chan, recv_chan = (
        _table_by_rank(program, [t[way] for t in tables]) for way in (SEND, RECV)
    )
    sequences = _SequenceNumbering(program)
    members = [sequences.code(code) for code in program.codes]
    return ChannelLayout(
        program,
        any_source,
        groups,
        sources,
        targets,
        tags,
        send_chan,
        recv_chan,
        _table_by_rank(program, members),
        sequences.sequence_of,
        sequences.rank_of,
        sequences.ranks,
        sequences.names,
        sequences.extra,
    )


def _table_by_rank(program: Program, tables: list[list[list[int]]]) -> list[list[int]]:
    return [tables[program.code_of[r]][program.row_of[r]] for r in range(program.world_size)]


def _ports_used(code: SharedCode) -> tuple[set[int], set[int]]:
    uses: tuple[set[int], set[int]] = (set(), set())
    for call in code.distinct_calls():
        direction = OPERATIONS[call.op].direction
        if call.port >= 0 and direction is not None:
            uses[SEND if direction == "send" else RECV].add(call.port)
    return uses


def _number_channels(
    program: Program, ends: list[tuple[set[int], set[int]]]
) -> tuple[list[list[int]], list[list[list[list[int]]]], bool]:
    """(group, src, dst, tag of each channel; per code and direction a table row -> port -> channel;
    is any source open).
    """
    columns: list[list[_IntArray]] = [[], [], [], []]
    where: list[tuple[int, int, int]] = []
    any_source = False
    for number, code in enumerate(program.codes):
        me = np.asarray(code.ranks, dtype=np.int64)
        for way in (SEND, RECV):
            for port in sorted(ends[number][way]):
                peer, group, tag = code.ports[port]
                other = np.broadcast_to(np.asarray(peer, dtype=np.int64), me.shape)
                any_source |= bool(way == RECV and (other == -1).any())
                found = (code.groups[group], *((me, other) if way == SEND else (other, me)), tag)
                for column, values in zip(columns, found, strict=True):
                    column.append(np.broadcast_to(np.asarray(values, dtype=np.int64), me.shape))
                where.append((number, way, port))
    tables = [
        [[[-1] * len(code.ports) for _ in code.ranks] for _ in (SEND, RECV)]
        for code in program.codes
    ]
    if not where:
        return [[], [], [], []], tables, False
    whole = [np.concatenate(column) for column in columns]
    first, number_of = _number_distinct_rows(whole)
    start = 0
    for number, way, port in where:
        rows = len(program.codes[number].ranks)
        for row, channel in enumerate(number_of[start : start + rows].tolist()):
            tables[number][way][row][port] = channel
        start += rows
    return [column[first].tolist() for column in whole], tables, any_source


def _number_distinct_rows(columns: list[_IntArray]) -> tuple[_IntArray, _IntArray]:
    """(first row of each distinct combination, the combination's number for every row)."""
    key = np.zeros(len(columns[0]), dtype=np.int64)
    for column in columns:
        values, inverse = np.unique(column, return_inverse=True)
        _, key = np.unique(key * len(values) + inverse.reshape(-1), return_inverse=True)
        key = key.reshape(-1)
    _, first = np.unique(key, return_index=True)
    return first, key


class _SequenceNumbering:
    """Numbers sequences and members; plain groups keep their ids as sequences."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.ranks: list[tuple[int, ...]] = [program.members(g.id) for g in program.groups]
        self.names: list[str] = [g.name for g in program.groups]
        self.sequence_of: list[int] = []
        self.rank_of: list[int] = []
        self.extra: list[dict[str, int]] = []
        self._members: dict[tuple[int, int], int] = {}
        self._keys: dict[str, int] = {}

    def code(self, code: SharedCode) -> list[list[int]]:
        """The table row -> slot -> member of one code."""
        used = sorted(
            {
                c.group
                for c in code.distinct_calls()
                if c.group >= 0 and joins_sequence(c) and not sequence_key(c)
            }
        )
        keys = {sequence_key(c): c for c in code.distinct_calls() if sequence_key(c)}
        self.extra.append({key: len(code.groups) + i for i, key in enumerate(keys)})
        sequences = [self._sequence(key, call) for key, call in keys.items()]
        table = []
        for row, rank in enumerate(code.ranks):
            own = [
                sequence if rank in self.ranks[sequence] else self._alone(rank)
                for sequence in sequences
            ]
            members = [-1] * len(code.groups) + [self._member(sequence, rank) for sequence in own]
            for slot in used:
                members[slot] = self._member(int(at_row(code.groups[slot], row)), rank)
            table.append(members)
        return table

    def _sequence(self, key: str, call: CodeCall) -> int:
        if key not in self._keys:
            self._keys[key] = len(self.ranks)
            ranks: tuple[int, ...] = tuple(range(self.program.world_size))
            if call.fields.get("local_sync"):
                ranks = tuple(sorted(call.fields.get("ranks", ranks)))
            self.ranks.append(ranks)
            self.names.append(call.op)
        return self._keys[key]

    def _alone(self, rank: int) -> int:
        """A sequence for a rank that makes a new_group with local synchronization and is no member:
        it waits for nobody.
        """
        key = f"alone {rank}"
        if key not in self._keys:
            self._keys[key] = len(self.ranks)
            self.ranks.append((rank,))
            self.names.append("new_group")
        return self._keys[key]

    def _member(self, sequence: int, rank: int) -> int:
        number = self._members.setdefault((sequence, rank), len(self.sequence_of))
        if number == len(self.sequence_of):
            self.sequence_of.append(sequence)
            self.rank_of.append(rank)
        return number
