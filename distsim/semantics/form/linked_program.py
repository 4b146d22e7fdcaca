"""Who meets whom: the columns beside a program's form, for all ranks at once.

The k-th message of a channel goes to the k-th receive, and the n-th collective of a group meets the
n-th of its other members: both are fixed by the program, so they are numbered here once, by numpy,
before any driver runs. Only where a receive is open to any source is something left for a driver to
decide (`ANY_SOURCE`).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Iterator
from copy import copy
from dataclasses import replace
from functools import cached_property
from itertools import accumulate

import numpy as np

from distsim.backends.message_matching import ANY_SENDER
from distsim.backends.profile import BackendProfile
from distsim.common.arrays import IntArray, dense_row_ids, sorted_unique
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.program.code import CodeCall, SharedCode, Vec, at_row
from distsim.program.model import Program
from distsim.semantics.form.compilation_units import compile_units
from distsim.semantics.form.instructions import (
    INVALID_SIGNATURE,
    KIND_COLLECTIVE,
    KIND_RECEIVE,
    KIND_SEND,
    AwaitRendezvous,
    CompilationUnit,
    LaunchPart,
    OperationLaunch,
    PartKind,
)

#: Values of `LinkedProgram.mate` that are no row: the other side never comes; a driver finds out (a
#: receive from any source stands there).
NEVER_ARRIVES, ANY_SOURCE = -2, -3


class LinkedProgram:
    """A program under a profile: its units, and of every row what it is.

    ``base[r]``: the first row of rank r, ``base[-1]`` their number. Columns by row, -1 where a row
    is no part: ``kind`` (`PartKind`), ``rank``, ``peer`` (global; -1 any source), ``tag``,
    ``nbytes``, ``signature``, ``group`` (id), ``channel`` (one direction between two ranks, where
    order is kept), ``box`` (where a message's receive is looked for: one receiver and tag),
    ``instance`` (of a collective), ``root`` (group rank). ``parts[r]``, ``launches[r]``: a rank's,
    by row counted from its first. ``members[i]``: who comes to instance i; ``whole[i]``: all
    members of its group, those too whom others stand for. ``meets[r]``: the instance of each of a
    rank's meets.
    """

    def __init__(self, program: Program, profile: BackendProfile) -> None:
        self.program, self.profile = program, profile
        self.units = compile_units(program, profile)
        size = program.world_size
        self.unit_of: list[CompilationUnit] = [
            self.units[0]
        ] * size  # of ranks whose calls are there
        for unit in self.units:
            for rank in unit.ranks:
                self.unit_of[rank] = unit
        sizes = program.rows()
        self.base: list[int] = list(accumulate(sizes, initial=0))
        self.rows = self.base[-1]
        self.rank = np.repeat(np.arange(size, dtype=np.int64), sizes)
        self.kind, self.peer, self.tag, self.nbytes, self.signature, self.group, self.root = (
            np.full(self.rows, -1, dtype=np.int64) for _ in range(7)
        )
        self.channel, self.box, self.instance = (
            np.full(self.rows, -1, dtype=np.int64) for _ in range(3)
        )
        self._base = np.array(self.base, dtype=np.int64)
        self.mixes_batches = (
            False  # messages of two ranks travel in batches and outside, on two communicators
        )
        self._spaces = _MessageChannels(self)
        keys = _CollectiveKeys()
        for unit in self.units:
            self._fill(unit, keys)
        self._spaces.number()
        del self._spaces  # it leads back here: while nobody collects, all this would stay
        self._number_instances(keys)

    def under(self, profile: BackendProfile | None = None, **options: object) -> LinkedProgram:
        """The same under a profile, or with options, that compile programs alike, and differ in
        whom a row waits for.
        """
        other = copy(self)
        other.profile = profile or self.profile
        other.program = replace(self.program, options={**self.program.options, **options})
        return other

    # --- columns ---
    def _fill(self, unit: CompilationUnit, keys: _CollectiveKeys) -> None:
        """What the unit's parts are, on each of its ranks."""
        code, rows = self.program.codes[unit.code], np.array(unit.vector_rows, dtype=np.int64)
        base = self._base[list(unit.ranks)]
        parts = [part for launch in unit.launches for part in launch.parts]
        calls = list({id(part.call): part.call for part in parts}.values())
        numbers = {id(call): i for i, call in enumerate(calls)}
        index = np.array([part.row for part in parts], dtype=np.int64)[:, None] + base[None, :]
        which = np.array([numbers[id(part.call)] for part in parts], dtype=np.int64)
        for column, values in _column_values(code, calls, rows):
            column_of: IntArray = getattr(self, column)
            column_of[index] = (
                values[which]
                if values.shape[1] == len(rows)
                else np.broadcast_to(values[which], index.shape)
            )
        self.kind[index] = np.array([part.kind for part in parts], dtype=np.int64)[:, None]
        odd = np.array([part.odd for part in parts], dtype=np.bool_)
        if odd.any():
            self.signature[index[odd]] = INVALID_SIGNATURE
        self._spaces.add(unit, parts, index)
        self._add_collectives(
            unit,
            [(part, index[i]) for i, part in enumerate(parts) if part.kind is KIND_COLLECTIVE],
            keys,
        )

    # --- collectives ---
    def _add_collectives(
        self, unit: CompilationUnit, parts: list[tuple[LaunchPart, IntArray]], keys: _CollectiveKeys
    ) -> None:
        for part, rows in parts:
            if part.gathering is not None:
                members = part.gathering.members or tuple(self.program.present)
                keys.gather(part.gathering.key, members, rows)
                continue
            if part.call.fields.get("root") is not None:
                self._place_roots(rows)
            slot = keys.slot(self.profile.slot(part.call.op))
            if part.real is None:
                keys.plain(part.number, slot, rows)
            else:  # on a group that is really connected to another
                keys.gather(("collective", part.real.id, part.number, slot), part.real.ranks, rows)

    def _place_roots(self, rows: IntArray) -> None:
        """Roots as group ranks, 0 where one is no member."""
        groups, roots = self.group[rows], self.root[rows]
        for group, root in sorted(set(zip(groups.tolist(), roots.tolist(), strict=True))):
            self.root[rows[(groups == group) & (roots == root)]] = max(
                self.program.groups[group].group_rank(root), 0
            )

    def _number_instances(self, keys: _CollectiveKeys) -> None:
        """Give every collective's rows the number of the meeting that they belong to."""
        rows, number, slot = keys.columns()
        group = self.group[rows]
        order = np.lexsort((rows, slot, number, group))
        rows, group = rows[order], group[order]
        fresh = np.ones(len(rows), dtype=np.bool_)
        fresh[1:] = (
            (np.diff(group) != 0) | (np.diff(number[order]) != 0) | (np.diff(slot[order]) != 0)
        )
        self.instance[rows] = np.cumsum(fresh) - 1
        starts = np.flatnonzero(fresh)
        groups = self.program.groups
        present = {g: self.program.members(g) for g in sorted_unique(group[starts]).tolist()}
        self.members: list[tuple[int, ...]] = [present[g] for g in group[starts].tolist()]
        self.whole: list[tuple[int, ...]] = [groups[g].ranks for g in group[starts].tolist()]
        for (_, members), gathered in keys.gathered.items():
            for part in gathered:
                self.instance[part] = len(self.members)
            self.members.append(members)
            self.whole.append(members)
        self._meet_instances(keys)

    def _meet_instances(self, keys: _CollectiveKeys) -> None:
        """Meets are instances too, behind those of calls; ranks whose meet has one key and the same
        members come to one, and who has that key again, since the group was made anew, to the next
        one."""
        known: dict[Hashable, int] = {}
        before = Counter[tuple[int, Hashable]]()
        self.meets: list[list[int]] = [[] for _ in range(self.program.world_size)]
        for unit in self.units:
            for meet in (i for i in unit.instructions if isinstance(i, AwaitRendezvous)):
                alike = meet.gathering is not None
                for row, rank in (
                    [(unit.vector_rows[0], unit.ranks[0])]
                    if alike
                    else zip(unit.vector_rows, unit.ranks, strict=True)
                ):
                    for key, members in self._gatherings(meet, rank, row):
                        turn = key, before[rank, key]
                        before[rank, key] += 1
                        if turn not in known:
                            known[turn] = len(self.members)
                            self.members.append(members)
                        for one in unit.ranks if alike else (rank,):
                            self.meets[one].append(known[turn])

    def _gatherings(
        self, meet: AwaitRendezvous, rank: int, vector_row: int
    ) -> Iterator[tuple[Hashable, tuple[int, ...]]]:
        """The keys under which a rank meets others, and whom it expects."""
        if meet.gathering is not None:
            yield meet.gathering.key, meet.gathering.members or tuple(self.program.present)
        code = self.program.code(rank)
        for spot in meet.spots:
            group = at_row(code.groups[spot.group], vector_row)
            if spot.port < 0:
                yield (
                    ("group", spot.stage, group, at_row(spot.root, vector_row)),
                    self.program.members(group),
                )
                continue
            peer = at_row(code.ports[spot.port].peer, vector_row)
            pair = (min(rank, peer), max(rank, peer))
            source = -1 if not spot.stage else rank if spot.stage.endswith("send") else peer
            yield ("pair", spot.stage.partition(" ")[0], group, *pair, source), pair

    def parts(self, kind: PartKind) -> Iterator[tuple[CompilationUnit, list[LaunchPart], IntArray]]:
        """(unit, the parts that one call object makes, their rows on the unit's ranks: (parts,
        ranks)) of all parts of a kind.
        """
        for unit, by_call in zip(self.units, self._by_call, strict=True):
            base = self._base[list(unit.ranks)]
            for parts in by_call:
                if parts[0].kind is kind:
                    yield (
                        unit,
                        parts,
                        np.array([part.row for part in parts], dtype=np.int64)[:, None] + base,
                    )

    @cached_property
    def _by_call(self) -> list[list[list[LaunchPart]]]:
        """By unit the parts that one call object makes, in the order of their first ones."""
        found = []
        for unit in self.units:
            by_call: dict[int, list[LaunchPart]] = defaultdict(list)
            for launch in unit.launches:
                for part in launch.parts:
                    by_call[id(part.call)].append(part)
            found.append(list(by_call.values()))
        return found

    # --- who needs whom ---
    @cached_property
    def mate(self) -> IntArray:
        """For each message row the row of its other side; `NEVER_ARRIVES` where it has none,
        `ANY_SOURCE` where that is open.
        """
        found = np.full(self.rows, -1, dtype=np.int64)
        sends, receives = (self._by_channel(kind) for kind in (KIND_SEND, KIND_RECEIVE))
        found[sends], found[receives] = NEVER_ARRIVES, NEVER_ARRIVES
        out, into = self.channel[sends], self.channel[receives]
        if not np.array_equal(out, into):  # else a channel has as many of both
            sends, receives = _match_by_channel(
                sends, out, receives, into, int(self.channel.max(initial=-1)) + 1
            )
        found[sends], found[receives] = receives, sends
        if self.open_boxes.size:
            found[
                np.isin(self.box, self.open_boxes) & (self.kind >= 0) & (self.kind <= KIND_RECEIVE)
            ] = ANY_SOURCE
        return found

    def _by_channel(self, kind: PartKind) -> IntArray:
        rows = np.flatnonzero(self.kind == kind)
        return rows[np.argsort(self.channel[rows], kind="stable")]

    @cached_property
    def open_boxes(self) -> IntArray:
        """Boxes in which some receive is open to any source."""
        return sorted_unique(self.box[(self.kind == KIND_RECEIVE) & (self.peer == ANY_SENDER)])

    @cached_property
    def rows_of(self) -> list[IntArray]:
        """The rows that come to each instance, ascending; empty for meets."""
        rows = np.flatnonzero(self.instance >= 0)
        rows = rows[np.argsort(self.instance[rows], kind="stable")]
        counts = np.bincount(self.instance[rows], minlength=len(self.members))
        return list(np.split(rows, np.cumsum(counts)[:-1])) if len(self.members) else []

    # --- what a row is ---
    def place(self, row: int) -> tuple[int, int, int]:
        """(rank, position, part) of a row."""
        rank = int(self.rank[row])
        code = self.program.code(rank)
        position = self.positions(code)[row - self.base[rank]]
        return rank, position, row - self.base[rank] - code.offsets[position] - 1

    def positions(self, code: SharedCode) -> list[int]:
        """The call of each row of a code."""
        found = self._position_lists.get(id(code))
        if found is None:
            found = [p for p, call in enumerate(code.calls) for _ in range(1 + len(call.parts))]
            self._position_lists[id(code)] = found
        return found

    @cached_property
    def _position_lists(self) -> dict[int, list[int]]:
        return {}

    def code_call(self, row: int) -> CodeCall:
        rank, position, part = self.place(row)
        call = self.program.code_call(rank, position)
        return call if part < 0 else call.parts[part]

    def call(self, row: int) -> ResolvedCall:
        """The resolved call of a row."""
        return self.program.resolve(int(self.rank[row]), self.code_call(row))

    def queue_names(self) -> tuple[IntArray, list[str]]:
        """For each row the number of the queue that it ran on, -1 where none; and the queues'
        names.
        """
        numbers, names = np.full(self.rows, -1, dtype=np.int64), dict[str, int]()
        for unit in self.units:
            by_queue: dict[Hashable, list[OperationLaunch]] = {}
            for launch in unit.launches:
                if launch.queue is not None:
                    by_queue.setdefault(
                        (launch.queue.key, launch.queue.group, launch.queue.port), []
                    ).append(launch)
            base = self._base[list(unit.ranks)]
            for launches in by_queue.values():
                rows = np.array(
                    [part.row for launch in launches for part in launch.parts], dtype=np.int64
                )
                said = [
                    self._queue_name(launches[0], *where)
                    for where in zip(unit.ranks, unit.vector_rows, strict=True)
                ]
                values = np.array(
                    [names.setdefault(name, len(names)) for name in said], dtype=np.int64
                )
                numbers[rows[:, None] + base[None, :]] = values[None, :]
        return numbers, list(names)

    def _queue_name(self, launch: OperationLaunch, rank: int, vector_row: int) -> str:
        """The queue's name in a trace."""
        queue, code = launch.queue, self.program.code(rank)
        assert queue is not None
        if queue.group < 0:
            return queue.name
        group = self.program.groups[at_row(code.groups[queue.group], vector_row)].name
        if queue.port < 0:
            return f"group {group}"
        peer = at_row(code.ports[queue.port].peer, vector_row)
        return f"pair {min(rank, peer)}-{max(rank, peer)} of {group}"


def _match_by_channel(
    sends: IntArray, out: IntArray, receives: IntArray, into: IntArray, channels: int
) -> tuple[IntArray, IntArray]:
    """(sends, receives) that meet, of rows in the order of their channels, ``out`` and ``into``."""
    sent, starts = np.bincount(out, minlength=channels), np.zeros(channels, dtype=np.int64)
    np.cumsum(sent[:-1], out=starts[1:])
    taken, ends = np.bincount(into, minlength=channels), np.zeros(channels, dtype=np.int64)
    np.cumsum(taken[:-1], out=ends[1:])
    ordinal = np.arange(len(receives)) - ends[into]
    there = ordinal < sent[into]
    return sends[(starts[into] + ordinal)[there]], receives[there]


def _column_values(
    code: SharedCode, calls: list[CodeCall], rows: IntArray
) -> Iterable[tuple[str, IntArray]]:
    """Per column the values of each call: shape (calls, ranks), or (calls, 1) where they do not
    differ.
    """
    ports = [None if call.port < 0 else code.ports[call.port] for call in calls]
    groups: list[Vec] = [code.groups[call.group] if call.group >= 0 else 0 for call in calls]
    yield "nbytes", _stack_by_rank([call.nbytes for call in calls], rows)
    yield "signature", _stack_by_rank([call.signature for call in calls], rows)
    yield "group", _stack_by_rank(groups, rows)
    yield "peer", _stack_by_rank([-1 if port is None else port.peer for port in ports], rows)
    yield "tag", _stack_by_rank([0 if port is None else port.tag for port in ports], rows)
    roots: list[Vec] = [-1 if (root := call.fields.get("root")) is None else root for call in calls]
    yield "root", _stack_by_rank(roots, rows)


def _stack_by_rank(values: list[Vec], rows: IntArray) -> IntArray:
    if not any(isinstance(value, np.ndarray) for value in values):
        return np.array(values, dtype=np.int64).reshape(-1, 1)
    found = np.empty((len(values), len(rows)), dtype=np.int64)
    for i, value in enumerate(values):
        found[i] = value[rows] if isinstance(value, np.ndarray) else value
    return found


class _CollectiveKeys:
    """Under which keys collectives meet, as they are gathered from the units."""

    def __init__(self) -> None:
        self._slots: dict[Hashable, int] = {}
        self._rows: list[IntArray] = []
        self._numbers: list[tuple[int, int, int]] = []  # how many rows, number, slot
        self.gathered: dict[tuple[Hashable, tuple[int, ...]], list[IntArray]] = {}

    def slot(self, slot: Hashable) -> int:
        return self._slots.setdefault(slot, len(self._slots))

    def plain(self, number: int, slot: int, rows: IntArray) -> None:
        """The ``number``-th call of its group in a slot."""
        self._rows.append(rows)
        self._numbers.append((len(rows), number, slot))

    def gather(self, key: Hashable, members: tuple[int, ...], rows: IntArray) -> None:
        """Calls that meet under a key of their own."""
        self.gathered.setdefault((key, members), []).append(rows)

    def columns(self) -> tuple[IntArray, IntArray, IntArray]:
        """(rows, number, slot) of all plain ones."""
        if not self._rows:
            return (np.zeros(0, dtype=np.int64),) * 3
        counts, numbers, slots = np.array(self._numbers, dtype=np.int64).T
        return np.concatenate(self._rows), np.repeat(numbers, counts), np.repeat(slots, counts)


class _MessageChannels:
    """Channels and boxes, numbered by port: a code has few of these, and many messages."""

    def __init__(self, linked: LinkedProgram) -> None:
        self.linked = linked
        self.lazy = linked.profile.device and linked.program.options.get("init") != "eager"
        #: (ranks, 6): own communicator's low and high (-1: the group's), group, target, tag,
        #: source; (parts, ranks) of a port and way
        self._columns, self._rows = list[IntArray](), list[IntArray]()

    def add(self, unit: CompilationUnit, parts: list[LaunchPart], index: IntArray) -> None:
        by_port: dict[tuple[int, bool, bool], list[int]] = {}
        for i, part in enumerate(parts):
            if part.kind <= KIND_RECEIVE:
                by_port.setdefault(
                    (part.call.port, part.kind is KIND_SEND, self.lazy and not part.batched), []
                ).append(i)
        ranks = np.array(unit.ranks, dtype=np.int64)
        for (_, sends, paired), those in by_port.items():
            rows = index[those]
            peer, group, tag = (
                column[rows[0]] for column in (self.linked.peer, self.linked.group, self.linked.tag)
            )
            tag = tag * (self.linked.profile.tags | (tag >= FIRST_SIGNAL_TAG))
            paired &= bool(tag.max() < FIRST_SIGNAL_TAG)
            low, high = (
                (np.minimum(ranks, peer), np.maximum(ranks, peer))
                if paired
                else (np.full_like(peer, -1),) * 2
            )
            source, target = (ranks, peer) if sends else (peer, ranks)
            self._columns.append(np.stack([low, high, group, target, tag, source], axis=1))
            self._rows.append(rows)

    def number(self) -> None:
        """Write the columns `box` and `channel`."""
        if not self._columns:
            return
        keys = np.concatenate(self._columns)
        box = dense_row_ids((keys[:, i] for i in range(5)), len(keys))
        channel = dense_row_ids((box, keys[:, 5]), len(keys))
        directions = dense_row_ids((keys[:, i] for i in range(2, 6)), len(keys))
        self.linked.mixes_batches = bool(directions.max() < channel.max())
        start = 0
        for rows in self._rows:
            end = start + rows.shape[1]
            self.linked.box[rows] = box[start:end][None, :]
            self.linked.channel[rows] = channel[start:end][None, :]
            start = end
