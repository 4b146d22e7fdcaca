"""What each row needs before it is done, and how long it then takes: columns over the rows of a
linked program.

Key idea: a row is done at a simple function of the times at which other rows are posted.

A message row i is done at ``max(A[i], A[need]) + lag``, where A is the time at which a row is
posted; or, with a negative lag, at ``max(A[i], A[need] - lag)``: data that left before their
receive was posted arrive on their own. A send that the backend buffers needs no receive, or, if
the window is full, the receive that frees space.

A collective row waits for all members; for those that its data come from and go to; or, if members
disagree on the root, for those that each would wait for by its own root (`CollectiveNeeds`).

Sharing of links is not considered here: costs are those of a transfer that runs alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from distsim.common.arrays import BoolArray, IntArray, sorted_unique
from distsim.hardware.cost import CostModel
from distsim.operations.one_sided import FIRST_SIGNAL_TAG, SIGNAL_BYTES
from distsim.operations.registry import OPERATIONS
from distsim.program.code import Vec
from distsim.semantics.form.collective_needs import CollectiveNeeds
from distsim.semantics.form.instructions import LaunchPart, PartKind
from distsim.semantics.form.linked_program import NEVER_ARRIVES, LinkedProgram
from distsim.semantics.form.work_durations import durations_ns

#: (row, other): ``row`` was withdrawn, because its rank exited, before the row ``other`` that needs
#: it was posted; other = `ALL_PARTNERS`: before any was.
WithdrawnRow = tuple[int, int]
ALL_PARTNERS = -1
#: More bytes than any program sends: a backend that buffers so many has no window.
_UNLIMITED_BYTES = 1 << 60


class CompletionConditions:
    """The conditions of a linked program, with the costs of ``cost``, or without any.

    By row:

    - ``duration``: how long it takes once everything that it needs has happened, ns.
    - ``need``: of a message, the row that must be posted; -1 for none, or `NEVER_ARRIVES`.
    - ``buffered``: sends that may leave before their receive is posted.
    - ``freed_by``: of a send, the receive that frees space for it in the window; -1 if it needs
      none.
    - ``lag``: of a message, the time from the later posting to its end (see the module).
    - ``partial_waits``: for rows of collectives that do not wait for all members, the rows that
      they need.

    ``needs``: the rule from which ``partial_waits`` follows, for collectives; ``need`` is for
    messages.

    ``never``: instances of collectives that never complete.

    ``mismatches``: (receives, instances) of calls that mismatch so that none of them completes.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        cost: CostModel | None,
        mismatches: tuple[Sequence[int], Sequence[int]] = ((), ()),
        withdrawn: Sequence[WithdrawnRow] = (),
    ) -> None:
        self.linked, self.cost, self.needs = linked, cost, CollectiveNeeds(linked)
        mismatched_receives, mismatched_instances = mismatches
        from_all = [row for row, other in withdrawn if other == ALL_PARTNERS]
        instances = [int(linked.instance[row]) for row in from_all]
        withdrawn_instances = [instance for instance in instances if instance >= 0]
        self.withdrawn = frozenset(withdrawn)
        self.mate = _partners_without_withdrawn(linked, from_all)
        never = [*mismatched_instances, *withdrawn_instances]
        self.never = sorted_unique(np.array(never, dtype=np.int64))
        self.buffered = self._buffered_sends()
        self.need = np.where(self.buffered, -1, self.mate)
        self.freed_by = np.full(linked.rows, -1, dtype=np.int64)
        self._limit_to_window()
        self.some_wait_for_space = bool((self.freed_by != -1).any())
        # A buffered send whose window is never emptied waits for ever.
        blocked = self.buffered & (self.freed_by == NEVER_ARRIVES)
        self.need[blocked], self.freed_by[blocked] = NEVER_ARRIVES, -1
        receives = np.array(mismatched_receives, dtype=np.int64)
        self.need[receives] = self.need[self.mate[receives]] = NEVER_ARRIVES
        self.duration = np.zeros(linked.rows, dtype=np.int64)
        if cost is not None:
            self._set_message_durations(cost)
            self._set_collective_durations(cost)
            self._set_work_durations(cost)

    # --- buffers ---
    def _buffered_sends(self) -> BoolArray:
        """Sends that the backend buffers while there is room."""
        linked, is_send = self.linked, self.linked.kind == PartKind.SEND
        sizes = sorted_unique(linked.nbytes[is_send])
        credit, options = linked.profile.credit, linked.program.options
        is_free = np.array([credit(int(n), 0, options) for n in sizes.tolist()], dtype=np.bool_)
        buffered = np.zeros(linked.rows, dtype=np.bool_)
        if is_free.any():
            buffered[is_send] = is_free[np.searchsorted(sizes, linked.nbytes[is_send])]
        buffered[is_send & (linked.tag >= FIRST_SIGNAL_TAG)] = True
        return buffered

    @cached_property
    def window(self) -> int:
        """Bytes of a channel that may be sent and not yet received.

        A profile answers whether a message has room (`BackendProfile.credit`), so a limit
        between the two extremes is found by bisection.
        """
        credit, options = self.linked.profile.credit, self.linked.program.options
        if not credit(0, 1, options):
            return 0
        if credit(0, _UNLIMITED_BYTES, options):
            return _UNLIMITED_BYTES
        low, high = 1, _UNLIMITED_BYTES - 1
        while low < high:
            middle = (low + high + 1) // 2
            if credit(0, middle, options):
                low = middle
            else:
                high = middle - 1
        return low

    def _limit_to_window(self) -> None:
        """Set ``freed_by``: a send beyond the window needs an earlier message of its channel to be
        received.
        """
        tag, channel, nbytes = self.linked.tag, self.linked.channel, self.linked.nbytes
        limited = self.buffered
        if self.window >= _UNLIMITED_BYTES:
            limited = self.buffered & (tag >= FIRST_SIGNAL_TAG)
        rows = np.flatnonzero(limited)
        if not rows.size:
            return
        rows = rows[np.argsort(channel[rows], kind="stable")]
        for sends in np.split(rows, np.flatnonzero(np.diff(channel[rows])) + 1):
            if tag[sends[0]] >= FIRST_SIGNAL_TAG:  # a cell of the signal pad holds one signal
                self.freed_by[sends[1:]] = self.mate[sends[:-1]]
                continue
            sent = np.cumsum(nbytes[sends])
            beyond = sent > self.window
            if beyond.any():
                # The first message after whose receive there is room.
                makes_room = np.searchsorted(sent, sent[beyond] - self.window)
                self.freed_by[sends[beyond]] = self.mate[sends[makes_room]]

    @cached_property
    def lag(self) -> IntArray:
        """By message row, see the module; negative if the data leave before their receive."""
        lag = self.duration.copy()
        lag[self.buffered] = 0
        receives = self.mate[self.buffered]
        receives = receives[receives >= 0]
        lag[receives] = -lag[receives]
        return lag

    @cached_property
    def some_data_leaves_early(self) -> bool:
        """Whether the data of any message may leave before its receive is posted."""
        return bool((self.lag < 0).any())

    @cached_property
    def some_need_no_partner(self) -> bool:
        """Whether any message may be done without its other side, or never."""
        kind = self.linked.kind
        is_message = (kind == PartKind.SEND) | (kind == PartKind.RECEIVE)
        return bool((self.need[is_message] < 0).any())

    # --- costs ---
    def _set_message_durations(self, cost: CostModel) -> None:
        sends = np.flatnonzero((self.linked.kind == PartKind.SEND) & (self.mate >= 0))
        is_signal = self.linked.tag[sends] >= FIRST_SIGNAL_TAG
        if is_signal.any():
            self._set_signal_durations(cost, sends[is_signal])
            sends = sends[~is_signal]
        if sends.size:
            self._set_transfer_durations(cost, sends)

    def _set_signal_durations(self, cost: CostModel, sends: IntArray) -> None:
        linked = self.linked
        pairs = zip(linked.rank[sends].tolist(), linked.peer[sends].tolist(), strict=True)
        self.duration[sends] = [cost.one_sided_ns(src, dst, SIGNAL_BYTES) for src, dst in pairs]
        self.duration[self.mate[sends]] = self.duration[sends]

    def _set_transfer_durations(self, cost: CostModel, sends: IntArray) -> None:
        """Ask for the cost once per route and size, because programs send many messages."""
        linked = self.linked
        rank, peer, nbytes = linked.rank[sends], linked.peer[sends], linked.nbytes[sends]
        sizes = sorted_unique(nbytes)
        key = cost.route_numbers(rank, peer) * len(sizes) + np.searchsorted(sizes, nbytes)
        keys = sorted_unique(key)
        number = np.searchsorted(keys, key)
        # For each key, one of its sends: they all cost the same.
        example = np.empty(len(keys), dtype=np.int64)
        example[number] = np.arange(len(sends))
        examples = (column[example].tolist() for column in (rank, peer, nbytes))
        durations = [cost.p2p_ns(*message) for message in zip(*examples, strict=True)]
        self.duration[sends] = np.array(durations, dtype=np.int64)[number]
        self.duration[self.mate[sends]] = self.duration[sends]

    def _set_collective_durations(self, cost: CostModel) -> None:
        """Ask for the cost once per operation, members, size and root."""
        linked = self.linked
        known: dict[object, int] = {}
        for _, parts, rows in linked.parts(PartKind.COLLECTIVE):
            op = OPERATIONS[parts[0].call.op]
            if op.kind != "collective":
                continue
            # All parts of one call object have the same size and root.
            first = rows[0]
            columns = (linked.instance[first], linked.nbytes[first], linked.root[first])
            durations = []
            for instance, nbytes, place in zip(*(c.tolist() for c in columns), strict=True):
                members = linked.whole[instance]
                root = members[max(place, 0)] if op.root_field is not None else None
                key = (op.op, id(members), nbytes, root)
                if key not in known:
                    known[key] = cost.collective_ns(op, members, nbytes, root)
                durations.append(known[key])
            self.duration[rows] = durations

    def _set_work_durations(self, cost: CostModel) -> None:
        linked, program = self.linked, self.linked.program
        known: dict[tuple[int, int], Vec] = {}
        for unit, parts, rows in linked.parts(PartKind.WORK):
            vector_rows = list(unit.vector_rows)
            # Jitter draws again at every position; without it the parts of one call are equal.
            rows_by_part: list[tuple[LaunchPart, IntArray]] = [(parts[0], rows)]
            if program.jitter:
                rows_by_part = list(zip(parts, rows, strict=True))
            for part, part_rows in rows_by_part:
                key = (id(part.call), part.position if program.jitter else -1)
                if key not in known:
                    code = program.codes[unit.code]
                    is_free = part.call.op == "assign"
                    known[key] = 0 if is_free else durations_ns(program, cost, code, part.position)
                ns = known[key]
                self.duration[part_rows] = ns[vector_rows] if isinstance(ns, np.ndarray) else ns

    @cached_property
    def uneven(self) -> bool:
        """Whether members of any collective have different costs.

        Such a collective occupies its links, for all members, until the last one is done.
        """
        rows = np.flatnonzero(self.linked.instance >= 0)
        instance, duration = self.linked.instance[rows], self.duration[rows]
        last_duration = np.zeros(len(self.linked.members), dtype=np.int64)
        last_duration[instance] = duration
        return bool((last_duration[instance] != duration).any())

    # --- ends, for many rows at once ---
    def message_ends(self, rows: IntArray, posted: IntArray) -> IntArray:
        """When messages are done that are posted and have what they need, ns.

        The same as `RunProgress.done`, for columns. The result has the shape of ``rows``.
        """
        own, need, lag = posted[rows], self.need[rows], self.lag[rows]
        if self.some_need_no_partner:
            other = np.where(need >= 0, posted[np.maximum(need, 0)], own)
        else:
            other = posted[need]
        if self.some_wait_for_space:
            freed_by = np.where(need >= 0, self.freed_by[np.maximum(need, 0)], self.freed_by[rows])
            freed = np.maximum(other, posted[np.maximum(freed_by, 0)])
            other = np.where(freed_by >= 0, freed, other)
        ends = np.maximum(own, other) + lag
        if self.some_data_leaves_early:
            return np.where(lag >= 0, ends, np.maximum(own, other - lag))
        return ends

    def collective_ends(self, rows: IntArray, posted: IntArray, latest: IntArray) -> IntArray:
        """When collectives are done whose members have arrived; ``latest``: by instance."""
        return self.collective_starts(rows, posted, latest) + self.duration[rows]

    def collective_starts(self, rows: IntArray, posted: IntArray, latest: IntArray) -> IntArray:
        """When the last rank arrived that each row waits for."""
        starts = latest[self.linked.instance[rows]]
        if self.partial_waits:
            for k, row in enumerate(rows.tolist()):
                if row in self.partial_waits:
                    starts[k] = max(
                        int(posted[needed]) for needed in (row, *self.partial_waits[row])
                    )
        return starts

    # --- collectives in which members finish early ---
    @cached_property
    def partial_waits(self) -> dict[int, tuple[int, ...]]:
        """Rows of collectives in which some member does not wait for all -> the rows it needs.

        A needed row that is never posted is `NEVER_ARRIVES`.
        """
        partial_waits: dict[int, tuple[int, ...]] = {}
        mismatched = set(self.never.tolist())
        for instance in sorted_unique(self.linked.instance[self.needs.partial_wait_rows]).tolist():
            rows = self.linked.rows_of[instance].tolist()
            remaining = [row for row in rows if (row, ALL_PARTNERS) not in self.withdrawn]
            row_of = {int(self.linked.rank[row]): row for row in remaining}
            for row in rows:
                partial_waits[row] = self._rows_waited_for(
                    row, instance, row_of, instance in mismatched
                )
        return partial_waits

    def _rows_waited_for(
        self, row: int, instance: int, row_of: Mapping[int, int], is_mismatched: bool
    ) -> tuple[int, ...]:
        needed = self.needs.of(row)
        ranks = self.linked.members[instance] if needed is None else needed
        rows = [row_of.get(rank, NEVER_ARRIVES) for rank in ranks]
        needs = [NEVER_ARRIVES if (other, row) in self.withdrawn else other for other in rows]
        signature = self.linked.signature
        present = [row_of[rank] for rank in ranks if rank in row_of]
        differs = is_mismatched and any(signature[other] != signature[row] for other in present)
        if differs or self.needs.in_vain(row):
            needs.append(NEVER_ARRIVES)
        return tuple(needs)


def _partners_without_withdrawn(linked: LinkedProgram, withdrawn: Sequence[int]) -> IntArray:
    """`LinkedProgram.mate`, except that withdrawn rows and their other sides have no partner."""
    if not withdrawn:
        return linked.mate
    mate = linked.mate.copy()
    matched = [row for row in withdrawn if linked.mate[row] >= 0]
    rows = np.array(matched, dtype=np.int64)
    mate[linked.mate[rows]] = NEVER_ARRIVES
    mate[rows] = NEVER_ARRIVES
    return mate
