"""Which calls match: columns by row over the instructions of all ranks.

Key idea: the k-th send of a channel matches its k-th receive, and the n-th collective of a rank on
a group matches the n-th of its other members. Both are fixed by the program, so they are numbered
here by numpy, before any driver runs: channels, boxes and instances for every driver, and the pairs
of messages (`LinkedProgram.mate`) for local clocks. Ordered drivers use the channels, but pair
messages one by one (`distsim.semantics.ordered.message_rules`), because there requests may be
dropped and any-source receives (`ANY_SOURCE`) leave a choice.

What each row needs before it completes, and how long it takes, is in
`distsim.semantics.form.completion`.
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

#: Values of `LinkedProgram.mate` that are not rows: the other side is never posted; or the driver
#: decides, because the message's box has an any-source receive. Rows other than messages have -1.
NEVER_ARRIVES, ANY_SOURCE = -2, -3


class LinkedProgram:
    """A program under a profile: its units, and what every row is.

    ``base[r]`` is the first row of rank r; ``base[-1]`` is the number of rows.

    Columns by row, -1 where a row is no part:

    - ``kind`` (`PartKind`), ``rank``, ``peer`` (global rank; -1 for any source), ``tag``,
      ``nbytes``, ``signature``, ``group`` (id), ``root`` (group rank).
    - ``channel``: one direction between two ranks, in which messages keep their order.
    - ``box``: one receiver and tag, from any sender: the channels among which an any-source receive
      chooses.
    - ``instance``: of a collective. The calls that match share one instance.

    By instance: ``members``: the ranks that arrive there; ``whole``: all members of its group,
    including those that another rank represents.

    ``meets[r]``: the instance of each rendezvous of rank r; these are numbered behind the
    instances of calls.

    ``mixes_batches``: messages between two ranks travel both in batches and outside of them, which
    are two communicators.
    """

    def __init__(self, program: Program, profile: BackendProfile) -> None:
        self.program, self.profile = program, profile
        self.units = compile_units(program, profile)
        size = program.world_size
        # Ranks that another represents have no unit; theirs is a placeholder.
        self.unit_of: list[CompilationUnit] = [self.units[0]] * size
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
        self.mixes_batches = False
        self._channels = _MessageChannels(self)
        keys = _CollectiveKeys()
        for unit in self.units:
            self._fill(unit, keys)
        self._channels.assign_numbers()
        # A reference cycle: without a run of the garbage collector it would keep everything alive.
        del self._channels
        self._number_instances(keys)

    def under(self, profile: BackendProfile | None = None, **options: object) -> LinkedProgram:
        """The same program under another profile or with other options.

        These must compile the program to the same instructions, and may differ only in which ranks
        a row waits for.
        """
        other = copy(self)
        other.profile = profile or self.profile
        other.program = replace(self.program, options={**self.program.options, **options})
        return other

    # --- columns ---
    def _fill(self, unit: CompilationUnit, keys: _CollectiveKeys) -> None:
        """Write the columns of the unit's parts, on each of its ranks."""
        code, vector_rows = self.program.codes[unit.code], np.array(unit.vector_rows, np.int64)
        base = self._base[list(unit.ranks)]
        parts = [part for launch in unit.launches for part in launch.parts]
        calls = list({id(part.call): part.call for part in parts}.values())
        number_of_call = {id(call): i for i, call in enumerate(calls)}
        #: Rows of shape (parts, ranks), and the number of each part's call.
        rows = np.array([part.row for part in parts], dtype=np.int64)[:, None] + base[None, :]
        call_of_part = np.array([number_of_call[id(part.call)] for part in parts], dtype=np.int64)
        for name, values in _column_values(code, calls, vector_rows):
            column: IntArray = getattr(self, name)
            column[rows] = np.broadcast_to(values[call_of_part], rows.shape)
        self.kind[rows] = np.array([part.kind for part in parts], dtype=np.int64)[:, None]
        breaks_contract = np.array([part.breaks_contract for part in parts], dtype=np.bool_)
        if breaks_contract.any():
            self.signature[rows[breaks_contract]] = INVALID_SIGNATURE
        self._channels.add(unit, parts, rows)
        for number, part in enumerate(parts):
            if part.kind is KIND_COLLECTIVE:
                self._add_collective(part, rows[number], keys)

    # --- collectives ---
    def _add_collective(self, part: LaunchPart, rows: IntArray, keys: _CollectiveKeys) -> None:
        if part.keyed is not None:
            members = part.keyed.members or tuple(self.program.present)
            keys.add_keyed(part.keyed.key, members, rows)
            return
        if part.call.fields.get("root") is not None:
            self._convert_roots(rows)
        slot = keys.slot_number(self.profile.slot(part.call.op))
        if part.real_group is None:
            keys.add_numbered(part.number, slot, rows)
        else:  # its group is really connected to another
            key = ("collective", part.real_group.id, part.number, slot)
            keys.add_keyed(key, part.real_group.ranks, rows)

    def _convert_roots(self, rows: IntArray) -> None:
        """Replace roots by their group ranks, and by 0 where a root is no member."""
        groups, roots = self.group[rows], self.root[rows]
        for group, root in sorted(set(zip(groups.tolist(), roots.tolist(), strict=True))):
            group_rank = self.program.groups[group].group_rank(root)
            self.root[rows[(groups == group) & (roots == root)]] = max(group_rank, 0)

    def _number_instances(self, keys: _CollectiveKeys) -> None:
        """Give the rows of collectives that match the number of their instance."""
        rows, number, slot = keys.numbered_columns()
        group = self.group[rows]
        order = np.lexsort((rows, slot, number, group))
        rows, number, slot, group = rows[order], number[order], slot[order], group[order]
        is_first = np.ones(len(rows), dtype=np.bool_)
        is_first[1:] = (np.diff(group) != 0) | (np.diff(number) != 0) | (np.diff(slot) != 0)
        self.instance[rows] = np.cumsum(is_first) - 1
        groups = self.program.groups
        group_of_instance = group[is_first].tolist()
        # Instances of one group share one tuple.
        present = {g: self.program.members(g) for g in sorted_unique(group[is_first]).tolist()}
        self.members: list[tuple[int, ...]] = [present[g] for g in group_of_instance]
        self.whole: list[tuple[int, ...]] = [groups[g].ranks for g in group_of_instance]
        for (_, members), keyed_rows in keys.keyed.items():
            for rows_of_part in keyed_rows:
                self.instance[rows_of_part] = len(self.members)
            self.members.append(members)
            self.whole.append(members)
        self._number_rendezvous()

    def _number_rendezvous(self) -> None:
        """Number rendezvous as instances, behind those of calls.

        Ranks that use one key share an instance. A rank that uses a key again, because the group
        was created again, arrives at the key's next instance.
        """
        instance_of: dict[Hashable, int] = {}
        uses = Counter[tuple[int, Hashable]]()
        self.rendezvous_of: list[list[int]] = [[] for _ in range(self.program.world_size)]

        def instance_at(rank: int, key: Hashable, members: tuple[int, ...]) -> int:
            numbered_key = key, uses[rank, key]
            uses[rank, key] += 1
            if numbered_key not in instance_of:
                instance_of[numbered_key] = len(self.members)
                self.members.append(members)
            return instance_of[numbered_key]

        for unit in self.units:
            for rendezvous in unit.instructions:
                if not isinstance(rendezvous, AwaitRendezvous):
                    continue
                if rendezvous.keyed is not None:
                    # All ranks of the unit use the same key, so the first one is enough.
                    rank, vector_row = unit.ranks[0], unit.vector_rows[0]
                    for key, members in self._rendezvous_keys(rendezvous, rank, vector_row):
                        instance = instance_at(rank, key, members)
                        for member in unit.ranks:
                            self.rendezvous_of[member].append(instance)
                    continue
                for rank, vector_row in zip(unit.ranks, unit.vector_rows, strict=True):
                    for key, members in self._rendezvous_keys(rendezvous, rank, vector_row):
                        self.rendezvous_of[rank].append(instance_at(rank, key, members))

    def _rendezvous_keys(
        self, rendezvous: AwaitRendezvous, rank: int, vector_row: int
    ) -> Iterator[tuple[Hashable, tuple[int, ...]]]:
        """(key, expected ranks) for each instance of a rank's rendezvous."""
        keyed = rendezvous.keyed
        if keyed is not None:
            yield keyed.key, keyed.members or tuple(self.program.present)
        code = self.program.code(rank)
        for point in rendezvous.points:
            group = at_row(code.groups[point.group], vector_row)
            if point.endpoint < 0:
                root = at_row(point.root, vector_row)
                yield ("group", point.stage, group, root), self.program.members(group)
                continue
            peer = at_row(code.endpoints[point.endpoint].peer, vector_row)
            pair = (min(rank, peer), max(rank, peer))
            source = -1  # a communicator has no direction; a connection is known by its sender
            if point.stage:
                source = rank if point.stage.endswith("send") else peer
            yield ("pair", point.stage.partition(" ")[0], group, *pair, source), pair

    def parts(self, kind: PartKind) -> Iterator[tuple[CompilationUnit, list[LaunchPart], IntArray]]:
        """(unit, parts of one call object, their rows) for all parts of a kind.

        Rows have the shape (parts, ranks of the unit).
        """
        for unit, by_call in zip(self.units, self._parts_by_call, strict=True):
            base = self._base[list(unit.ranks)]
            for parts in by_call:
                if parts[0].kind is kind:
                    rows = np.array([part.row for part in parts], dtype=np.int64)
                    yield unit, parts, rows[:, None] + base

    @cached_property
    def _parts_by_call(self) -> list[list[list[LaunchPart]]]:
        """By unit, the parts of each call object, in the order of their first parts."""
        found = []
        for unit in self.units:
            by_call: dict[int, list[LaunchPart]] = defaultdict(list)
            for launch in unit.launches:
                for part in launch.parts:
                    by_call[id(part.call)].append(part)
            found.append(list(by_call.values()))
        return found

    # --- matches ---
    @cached_property
    def mate(self) -> IntArray:
        """By message row, the row of its other side; or `NEVER_ARRIVES` or `ANY_SOURCE`."""
        mate = np.full(self.rows, -1, dtype=np.int64)
        sends, receives = self._rows_by_channel(KIND_SEND), self._rows_by_channel(KIND_RECEIVE)
        mate[sends] = mate[receives] = NEVER_ARRIVES
        send_channels, receive_channels = self.channel[sends], self.channel[receives]
        if not np.array_equal(send_channels, receive_channels):
            # Otherwise every channel has as many sends as receives, and all match in order.
            channels = int(self.channel.max(initial=-1)) + 1
            sends, receives = _match_by_channel(
                sends, send_channels, receives, receive_channels, channels
            )
        mate[sends], mate[receives] = receives, sends
        if self.open_boxes.size:
            is_message = (self.kind >= 0) & (self.kind <= KIND_RECEIVE)
            mate[is_message & np.isin(self.box, self.open_boxes)] = ANY_SOURCE
        return mate

    def _rows_by_channel(self, kind: PartKind) -> IntArray:
        rows = np.flatnonzero(self.kind == kind)
        return rows[np.argsort(self.channel[rows], kind="stable")]

    @cached_property
    def open_boxes(self) -> IntArray:
        """Boxes with an any-source receive."""
        return sorted_unique(self.box[(self.kind == KIND_RECEIVE) & (self.peer == ANY_SENDER)])

    @cached_property
    def rows_of(self) -> list[IntArray]:
        """The rows of each instance, ascending; empty for a rendezvous."""
        if not self.members:
            return []
        rows = np.flatnonzero(self.instance >= 0)
        rows = rows[np.argsort(self.instance[rows], kind="stable")]
        counts = np.bincount(self.instance[rows], minlength=len(self.members))
        return list(np.split(rows, np.cumsum(counts)[:-1]))

    # --- what a row is ---
    def place(self, row: int) -> tuple[int, int, int]:
        """(rank, position, part) of a row."""
        rank = int(self.rank[row])
        code = self.program.code(rank)
        position = self.positions(code)[row - self.base[rank]]
        return rank, position, row - self.base[rank] - code.offsets[position] - 1

    def positions(self, code: SharedCode) -> list[int]:
        """The position of the call of each row of a code."""
        positions = self._position_lists.get(id(code))
        if positions is None:
            positions = []
            for position, call in enumerate(code.calls):
                positions += [position] * (1 + len(call.parts))
            self._position_lists[id(code)] = positions
        return positions

    @cached_property
    def _position_lists(self) -> dict[int, list[int]]:
        return {}

    def code_call(self, row: int) -> CodeCall:
        """The call of a row, as in its rank's code."""
        rank, position, part = self.place(row)
        call = self.program.code_call(rank, position)
        return call if part < 0 else call.parts[part]

    def call(self, row: int) -> ResolvedCall:
        """The resolved call of a row."""
        return self.program.resolve(int(self.rank[row]), self.code_call(row))

    def queue_names(self) -> tuple[IntArray, list[str]]:
        """(by row, the number of the queue that it ran on, or -1; the names of the queues)."""
        numbers = np.full(self.rows, -1, dtype=np.int64)
        number_of: dict[str, int] = {}
        for unit in self.units:
            base = self._base[list(unit.ranks)]
            for launches in _launches_by_queue(unit).values():
                parts = [part for launch in launches for part in launch.parts]
                rows = np.array([part.row for part in parts], dtype=np.int64)
                by_rank = []
                for rank, vector_row in zip(unit.ranks, unit.vector_rows, strict=True):
                    name = self._queue_name(launches[0], rank, vector_row)
                    by_rank.append(number_of.setdefault(name, len(number_of)))
                numbers[rows[:, None] + base[None, :]] = np.array(by_rank, dtype=np.int64)[None, :]
        return numbers, list(number_of)

    def _queue_name(self, launch: OperationLaunch, rank: int, vector_row: int) -> str:
        """The queue's name in a trace."""
        queue, code = launch.queue, self.program.code(rank)
        assert queue is not None
        if queue.group < 0:
            return queue.name
        group = self.program.groups[at_row(code.groups[queue.group], vector_row)].name
        if queue.endpoint < 0:
            return f"group {group}"
        peer = at_row(code.endpoints[queue.endpoint].peer, vector_row)
        return f"pair {min(rank, peer)}-{max(rank, peer)} of {group}"


def _launches_by_queue(unit: CompilationUnit) -> dict[Hashable, list[OperationLaunch]]:
    by_queue: dict[Hashable, list[OperationLaunch]] = {}
    for launch in unit.launches:
        queue = launch.queue
        if queue is not None:
            by_queue.setdefault((queue.key, queue.group, queue.endpoint), []).append(launch)
    return by_queue


def _match_by_channel(
    sends: IntArray,
    send_channels: IntArray,
    receives: IntArray,
    receive_channels: IntArray,
    channels: int,
) -> tuple[IntArray, IntArray]:
    """(sends, receives) that match: the k-th of a channel with the k-th.

    Rows must be in the order of their channels.
    """
    send_counts = np.bincount(send_channels, minlength=channels)
    receive_counts = np.bincount(receive_channels, minlength=channels)
    first_send, first_receive = (np.zeros(channels, dtype=np.int64) for _ in range(2))
    np.cumsum(send_counts[:-1], out=first_send[1:])
    np.cumsum(receive_counts[:-1], out=first_receive[1:])
    #: By receive, its number within its channel.
    number = np.arange(len(receives)) - first_receive[receive_channels]
    has_send = number < send_counts[receive_channels]
    send_index = (first_send[receive_channels] + number)[has_send]
    return sends[send_index], receives[has_send]


def _column_values(
    code: SharedCode, calls: list[CodeCall], rows: IntArray
) -> Iterable[tuple[str, IntArray]]:
    """(name, values by call) of each column.

    Values have the shape (calls, ranks), or (calls, 1) if they do not differ by rank.
    """
    endpoints = [None if call.endpoint < 0 else code.endpoints[call.endpoint] for call in calls]
    groups: list[Vec] = [code.groups[call.group] if call.group >= 0 else 0 for call in calls]
    yield "nbytes", _stack_by_rank([call.nbytes for call in calls], rows)
    yield "signature", _stack_by_rank([call.signature for call in calls], rows)
    yield "group", _stack_by_rank(groups, rows)
    yield (
        "peer",
        _stack_by_rank([-1 if endpoint is None else endpoint.peer for endpoint in endpoints], rows),
    )
    yield (
        "tag",
        _stack_by_rank([0 if endpoint is None else endpoint.tag for endpoint in endpoints], rows),
    )
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
    """By what collectives match, collected from the units.

    Most match by their number on the group (and by a *slot*, if the backend separates operations);
    ``keyed``: those that match by a key instead, by (key, members).
    """

    def __init__(self) -> None:
        self._slots: dict[Hashable, int] = {}
        self._rows: list[IntArray] = []
        self._numbers: list[tuple[int, int, int]] = []  # count of rows, number, slot
        self.keyed: dict[tuple[Hashable, tuple[int, ...]], list[IntArray]] = {}

    def slot_number(self, slot: Hashable) -> int:
        return self._slots.setdefault(slot, len(self._slots))

    def add_numbered(self, number: int, slot: int, rows: IntArray) -> None:
        """Add the ``number``-th call of its group in a slot."""
        self._rows.append(rows)
        self._numbers.append((len(rows), number, slot))

    def add_keyed(self, key: Hashable, members: tuple[int, ...], rows: IntArray) -> None:
        self.keyed.setdefault((key, members), []).append(rows)

    def numbered_columns(self) -> tuple[IntArray, IntArray, IntArray]:
        """(rows, number, slot) of all calls that match by number."""
        if not self._rows:
            return (np.zeros(0, dtype=np.int64),) * 3
        counts, numbers, slots = np.array(self._numbers, dtype=np.int64).T
        return np.concatenate(self._rows), np.repeat(numbers, counts), np.repeat(slots, counts)


class _MessageChannels:
    """Numbers channels and boxes, by endpoint: a code has few endpoints and many messages.

    A message's key has six columns: the lower and the higher rank of its pair's communicator (-1
    for the group's), group, receiver, tag, sender. Without the sender it is the key of a box.
    """

    def __init__(self, linked: LinkedProgram) -> None:
        self.linked = linked
        self.lazy = linked.profile.device and linked.program.options.get("init") != "eager"
        self._keys: list[IntArray] = []  # for each endpoint and direction of a unit: (ranks, 6)
        self._rows: list[IntArray] = []  # (parts, ranks)

    def add(self, unit: CompilationUnit, parts: list[LaunchPart], rows: IntArray) -> None:
        """Add the messages among a unit's parts; ``rows``: (parts, ranks)."""
        by_endpoint: dict[tuple[int, bool, bool], list[int]] = {}
        for number, part in enumerate(parts):
            if part.kind <= KIND_RECEIVE:
                sends, of_pair = part.kind is KIND_SEND, self.lazy and not part.batched
                by_endpoint.setdefault((part.call.endpoint, sends, of_pair), []).append(number)
        ranks = np.array(unit.ranks, dtype=np.int64)
        linked = self.linked
        for (_, sends, of_pair), numbers in by_endpoint.items():
            message_rows = rows[numbers]
            first = message_rows[0]  # all messages of an endpoint have the same peer, group and tag
            peer, group, tag = linked.peer[first], linked.group[first], linked.tag[first]
            # Backends that ignore tags still tell signals apart, whose channel is their tag.
            tag = tag * (linked.profile.tags | (tag >= FIRST_SIGNAL_TAG))
            has_signals = bool(tag.max() >= FIRST_SIGNAL_TAG)
            low = high = np.full_like(peer, -1)
            if of_pair and not has_signals:  # no communicator is involved in a signal
                low, high = np.minimum(ranks, peer), np.maximum(ranks, peer)
            sender, receiver = (ranks, peer) if sends else (peer, ranks)
            self._keys.append(np.stack([low, high, group, receiver, tag, sender], axis=1))
            self._rows.append(message_rows)

    def assign_numbers(self) -> None:
        """Write the columns `box` and `channel`."""
        if not self._keys:
            return
        keys = np.concatenate(self._keys)
        box = dense_row_ids((keys[:, i] for i in range(5)), len(keys))
        channel = dense_row_ids((box, keys[:, 5]), len(keys))
        # Without the communicator, fewer keys differ if one direction uses several of them.
        directions = dense_row_ids((keys[:, i] for i in range(2, 6)), len(keys))
        self.linked.mixes_batches = bool(directions.max() < channel.max())
        start = 0
        for rows in self._rows:
            end = start + rows.shape[1]
            self.linked.box[rows] = box[start:end][None, :]
            self.linked.channel[rows] = channel[start:end][None, :]
            start = end
