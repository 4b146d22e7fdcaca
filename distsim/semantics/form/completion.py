"""When a row is done: whom it needs, and how long what it does then takes. Columns over the rows of
a linked program.

The members of a collective wait for all, for those whom its data come from and go to, or, where
they disagree on the root, for those whom each would have by its own (`CollectiveNeeds`).

A message row i is done at ``max(A[i], A[need]) + lag`` where A is when a row was posted, or, with a
negative lag, at ``max(A[i], A[need] - lag)``: data that left before its receive was there arrives
on its own. A send that a back end buffers needs nobody, or, where the window is full, the receive
that makes room.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property

import numpy as np

from distsim.backends.profile import MemberNeeds
from distsim.common.arrays import BoolArray, IntArray, sorted_union, sorted_unique
from distsim.hardware.cost import CostModel
from distsim.operations.one_sided import FIRST_SIGNAL_TAG, SIGNAL_BYTES
from distsim.operations.registry import OPERATIONS
from distsim.program.code import Vec
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.linked_program import NEVER_ARRIVES, LinkedProgram
from distsim.semantics.form.work_durations import durations_ns

#: A row that its rank took back, as it left, before another row came that needs it; -1: before
#: anybody came.
WithdrawnRow = tuple[int, int]
#: More bytes than any program sends: a back end that buffers so many knows no window.
_UNLIMITED_BYTES = 1 << 60


class CompletionConditions:
    """Of a linked program, priced by ``cost`` or, without one, in no time.

    ``price``: how long each row takes once all it needs is there, ns. ``need``: the row of each
    message that must be posted, -1 nobody, `NEVER_ARRIVES`. ``room``: of a send, the receive
    whose coming makes room for it, -1 where none is needed. ``ahead``: sends that go before
    their receive is there. ``early``: of the collective rows that do not wait for all, the rows
    that they need.
    """

    def __init__(
        self,
        linked: LinkedProgram,
        cost: CostModel | None,
        misfits: tuple[Sequence[int], Sequence[int]] = ((), ()),
        withdrawn: Sequence[WithdrawnRow] = (),
    ) -> None:
        self.linked, self.cost, self.needs = linked, cost, CollectiveNeeds(linked)
        whole = [row for row, other in withdrawn if other < 0]
        self.mate, self.withdrawn = _partners_without_withdrawn(linked, whole), frozenset(withdrawn)
        gone = [int(linked.instance[row]) for row in whole if linked.instance[row] >= 0]
        self.never = sorted_unique(np.array([*misfits[1], *gone], dtype=np.int64))
        self.ahead = self._ahead()
        self.need = np.where(self.ahead, -1, self.mate)
        self.room = np.full(linked.rows, -1, dtype=np.int64)
        self._make_room()
        self.has_room = bool((self.room != -1).any())
        blocked = self.ahead & (self.room == NEVER_ARRIVES)
        self.need[blocked], self.room[blocked] = NEVER_ARRIVES, -1
        unfit = np.array(misfits[0], dtype=np.int64)
        self.need[unfit] = self.need[self.mate[unfit]] = NEVER_ARRIVES
        self.price = np.zeros(linked.rows, dtype=np.int64)
        if cost is not None:
            self._price_messages(cost)
            self._price_collectives(cost)
            self._price_work(cost)

    # --- buffers ---
    def _ahead(self) -> BoolArray:
        """Sends that the back end buffers while there is room."""
        linked, sends = self.linked, self.linked.kind == PartKind.SEND
        sizes = sorted_unique(linked.nbytes[sends])
        credit, options = linked.profile.credit, linked.program.options
        free = np.array([credit(int(n), 0, options) for n in sizes.tolist()], dtype=np.bool_)
        found = np.zeros(linked.rows, dtype=np.bool_)
        if free.any():
            found[sends] = free[np.searchsorted(sizes, linked.nbytes[sends])]
        found[sends & (linked.tag >= FIRST_SIGNAL_TAG)] = True
        return found

    @cached_property
    def window(self) -> int:
        """Bytes of a channel that may be sent and not yet received."""
        credit, options = self.linked.profile.credit, self.linked.program.options
        low, high = 0, _UNLIMITED_BYTES
        while low < high:
            middle = (low + high + 1) // 2
            low, high = (middle, high) if credit(0, middle, options) else (low, middle - 1)
        return low

    def _make_room(self) -> None:
        """A send that the window does not hold any more needs an earlier message of its channel to
        be taken.
        """
        tag = self.linked.tag
        rows = np.flatnonzero(
            self.ahead if self.window < _UNLIMITED_BYTES else self.ahead & (tag >= FIRST_SIGNAL_TAG)
        )
        if not rows.size:
            return
        channel, nbytes = self.linked.channel, self.linked.nbytes
        rows = rows[np.argsort(channel[rows], kind="stable")]
        for those in np.split(rows, np.flatnonzero(np.diff(channel[rows])) + 1):
            if tag[those[0]] >= FIRST_SIGNAL_TAG:  # a cell holds one
                self.room[those[1:]] = self.mate[those[:-1]]
                continue
            sent = np.cumsum(nbytes[those])
            full = sent > self.window
            if full.any():
                taken = np.searchsorted(
                    sent, sent[full] - self.window
                )  # the first message after which there is room
                self.room[those[full]] = self.mate[those[taken]]

    @cached_property
    def lag(self) -> IntArray:
        """By message row, see the module; negative where the data left before its receive was
        there.
        """
        found = self.price.copy()
        found[self.ahead] = 0
        taken = self.mate[self.ahead]
        taken = taken[taken >= 0]
        found[taken] = -found[taken]
        return found

    @cached_property
    def some_data_leaves_early(self) -> bool:
        """The data of some message may leave before its receive is there."""
        return bool((self.lag < 0).any())

    @cached_property
    def some_need_no_partner(self) -> bool:
        """Some message may be done without its other side, or never."""
        linked = self.linked
        return bool(
            (
                self.need[(linked.kind == PartKind.SEND) | (linked.kind == PartKind.RECEIVE)] < 0
            ).any()
        )

    # --- prices ---
    def _price_messages(self, cost: CostModel) -> None:
        linked, sends = (
            self.linked,
            np.flatnonzero((self.linked.kind == PartKind.SEND) & (self.mate >= 0)),
        )
        pad = linked.tag[sends] >= FIRST_SIGNAL_TAG
        if pad.any():
            cells = zip(
                linked.rank[sends[pad]].tolist(), linked.peer[sends[pad]].tolist(), strict=True
            )
            self.price[sends[pad]] = [cost.one_sided_ns(*pair, SIGNAL_BYTES) for pair in cells]
            self.price[self.mate[sends[pad]]] = self.price[sends[pad]]
            sends = sends[~pad]
        if not sends.size:
            return
        channel = linked.channel[sends]
        first = np.full(int(channel.max()) + 1, -1, dtype=np.int64)
        first[channel[::-1]] = sends[::-1]
        classes: dict[object, int] = {}
        numbers, ends_of = np.zeros(len(first), dtype=np.int64), list[tuple[int, int]]()
        used = np.flatnonzero(first >= 0)
        for of, row in zip(used.tolist(), first[used].tolist(), strict=True):
            ends = int(linked.rank[row]), int(linked.peer[row])
            link = (
                tuple(map(cost.node, ends))
                if linked.program.link_faults
                else cost.link_class(*ends)
            )
            if link not in classes:
                classes[link] = len(ends_of)
                ends_of.append(ends)
            numbers[of] = classes[link]
        nbytes = linked.nbytes[sends]
        sizes = sorted_unique(nbytes)
        key = numbers[channel] * len(sizes) + np.searchsorted(sizes, nbytes)
        keys = sorted_unique(key)
        pairs = [(*ends_of[k // len(sizes)], int(sizes[k % len(sizes)])) for k in keys.tolist()]
        prices = [cost.p2p_ns(src, dst, nbytes) for src, dst, nbytes in pairs]
        self.price[sends] = np.array(prices, dtype=np.int64)[np.searchsorted(keys, key)]
        self.price[self.mate[sends]] = self.price[sends]

    def _price_collectives(self, cost: CostModel) -> None:
        """By operation, members, bytes and root: each asked once."""
        linked, asked = self.linked, dict[object, int]()
        for _, parts, rows in linked.parts(PartKind.COLLECTIVE):
            op = OPERATIONS[parts[0].call.op]
            if op.kind != "collective":
                continue
            columns = (linked.instance[rows[0]], linked.nbytes[rows[0]], linked.root[rows[0]])
            prices = []
            for instance, nbytes, place in zip(
                *(column.tolist() for column in columns), strict=True
            ):
                members = linked.whole[instance]
                root = members[max(place, 0)] if op.root_field is not None else None
                what = (op.op, id(members), nbytes, root)
                if what not in asked:
                    asked[what] = cost.collective_ns(op, members, nbytes, root)
                prices.append(asked[what])
            self.price[rows] = prices

    def _price_work(self, cost: CostModel) -> None:
        linked, program = self.linked, self.linked.program
        known: dict[tuple[int, int], Vec] = {}
        for unit, parts, rows in linked.parts(PartKind.WORK):
            code, own = program.codes[unit.code], list(unit.vector_rows)
            for part, those in (
                zip(parts, rows, strict=True) if program.jitter else ((parts[0], rows),)
            ):
                key = (id(part.call), part.position if program.jitter else -1)
                if key not in known:
                    known[key] = (
                        0
                        if part.call.op == "assign"
                        else durations_ns(program, cost, code, part.position)
                    )
                ns = known[key]
                self.price[those] = ns[own] if isinstance(ns, np.ndarray) else ns

    @cached_property
    def uneven(self) -> bool:
        """Members of some collective pay different prices: it is under way, at all of them, until
        the last is done.
        """
        rows = np.flatnonzero(self.linked.instance >= 0)
        instance, price = self.linked.instance[rows], self.price[rows]
        last = np.zeros(len(self.linked.members), dtype=np.int64)
        last[instance] = price
        return bool((last[instance] != price).any())

    # --- ends, for many rows at once ---
    def message_ends(self, rows: IntArray, posted: IntArray) -> IntArray:
        """When messages are done that were posted and have what they need; ns. Shape of
        ``rows``.
        """
        mine, need, lag = posted[rows], self.need[rows], self.lag[rows]
        came = (
            np.where(need >= 0, posted[np.maximum(need, 0)], mine)
            if self.some_need_no_partner
            else posted[need]
        )
        if self.has_room:
            gate = np.where(need >= 0, self.room[np.maximum(need, 0)], self.room[rows])
            came = np.where(gate >= 0, np.maximum(came, posted[np.maximum(gate, 0)]), came)
        together = np.maximum(mine, came) + lag
        return (
            np.where(lag >= 0, together, np.maximum(mine, came - lag))
            if self.some_data_leaves_early
            else together
        )

    def collective_ends(self, rows: IntArray, posted: IntArray, latest: IntArray) -> IntArray:
        """When collectives are done whose members have come, ``latest`` by instance."""
        return self.collective_starts(rows, posted, latest) + self.price[rows]

    def collective_starts(self, rows: IntArray, posted: IntArray, latest: IntArray) -> IntArray:
        """When the last one came whom each row waits for."""
        found = latest[self.linked.instance[rows]]
        for k, row in enumerate(rows.tolist() if self.early else ()):
            if row in self.early:
                found[k] = max(int(posted[n]) for n in (row, *self.early[row]))
        return found

    # --- collectives that let members go early ---
    @cached_property
    def early(self) -> dict[int, tuple[int, ...]]:
        """Rows of collectives in which somebody does not wait for all -> the rows that each needs;
        `NEVER_ARRIVES` for one that is not there."""
        found: dict[int, tuple[int, ...]] = {}
        unfit, said = set(self.never.tolist()), self.linked.signature
        for instance in sorted_unique(self.linked.instance[self.needs.early]).tolist():
            rows = self.linked.rows_of[instance].tolist()
            of = {
                int(self.linked.rank[row]): row for row in rows if (row, -1) not in self.withdrawn
            }
            for row in rows:
                needed = self.needs.of(row)
                ranks = self.linked.members[instance] if needed is None else needed
                needs = (of.get(rank, NEVER_ARRIVES) for rank in ranks)
                found[row] = tuple(
                    NEVER_ARRIVES if (n, row) in self.withdrawn else n for n in needs
                )
                unlike = instance in unfit and any(
                    said[of[rank]] != said[row] for rank in ranks if rank in of
                )
                if unlike or self.needs.in_vain(row):
                    found[row] = (*found[row], NEVER_ARRIVES)
        return found


def _partners_without_withdrawn(linked: LinkedProgram, withdrawn: Sequence[int]) -> IntArray:
    """`LinkedProgram.mate` where these rows were taken back: they and their other sides have
    none.
    """
    if not withdrawn:
        return linked.mate
    mate, rows = (
        linked.mate.copy(),
        np.array([row for row in withdrawn if linked.mate[row] >= 0], dtype=np.int64),
    )
    mate[linked.mate[rows]] = NEVER_ARRIVES
    mate[rows] = NEVER_ARRIVES
    return mate


class CollectiveNeeds:
    """Whom the members of collectives wait for, in a linked program under its profile."""

    def __init__(self, linked: LinkedProgram) -> None:
        self.linked = linked
        self._known: dict[tuple[str, int, int, int], tuple[int, ...] | None] = {}
        self._rows: dict[int, tuple[int, ...] | None] = {}
        self._awaiting: dict[int, dict[int, list[int]]] = {}

    def of(self, row: int) -> tuple[int, ...] | None:
        """The ranks that must have come to a collective's row before it is done; None: all
        members.
        """
        if row not in self._rows:
            self._rows[row] = self._of(row)
        return self._rows[row]

    def _of(self, row: int) -> tuple[int, ...] | None:
        linked = self.linked
        rank, members = int(linked.rank[row]), linked.whole[int(linked.instance[row])]
        if row in self.per_rank_needs:
            awaited = self.per_rank_needs[row].ranks
            return None if len(awaited) == len(members) else tuple(sorted(awaited))
        me = rank if rank < len(members) and members[rank] == rank else members.index(rank)
        key = (linked.code_call(row).op, len(members), max(int(linked.root[row]), 0), me)
        if key not in self._known:
            needed = linked.profile.needs(*key)
            self._known[key] = None if needed is None else tuple(sorted(needed))
        places = self._known[key]
        if places is None:
            return None
        ranks, of = tuple(members[i] for i in places), linked.program.representative_of
        return ranks if of is None else tuple(one for one in ranks if of[one] == one)

    def awaiting(self, rank: int, instance: int) -> Sequence[int]:
        """Of the rows of a collective that need not all members those that need this rank."""
        if instance not in self._awaiting:
            found = self._awaiting[instance] = dict[int, list[int]]()
            for row in self.linked.rows_of[instance].tolist():
                for one in self.of(row) or ():
                    found.setdefault(one, []).append(row)
        return self._awaiting[instance].get(rank, ())

    def in_vain(self, row: int) -> tuple[int, ...]:
        """Of these the ranks that come and still do not do what the row waits for."""
        return tuple(sorted(self.per_rank_needs[row].in_vain)) if row in self.per_rank_needs else ()

    @cached_property
    def per_rank_needs(self) -> Mapping[int, MemberNeeds]:
        """The rows of collectives whose members name different roots or do not bring equally much
        to a ring, where the profile says what comes of that."""
        linked = self.linked
        if linked.profile.per_rank_needs is None:
            return {}
        rows = np.flatnonzero(
            (linked.kind == PartKind.COLLECTIVE) & (linked.root >= 0) & (linked.instance >= 0)
        )
        rings = self._rings
        unlike = sorted_union(
            _instances_that_differ(linked, rows, linked.root),
            _instances_that_differ(linked, rings, linked.signature),
        )
        found = dict[int, MemberNeeds]()
        for instance in sorted_union(
            unlike, linked.instance[rings[linked.nbytes[rings] == 0]]
        ).tolist():
            of = {int(linked.rank[row]): row for row in linked.rows_of[instance].tolist()}
            awaited = linked.profile.per_rank_needs([linked.call(row) for row in of.values()])
            found |= {of[rank]: one for rank, one in awaited.items()}
        return found

    @property
    def _rings(self) -> IntArray:
        """The rows of `Profile.ring`."""
        linked, found = self.linked, [np.zeros(0, dtype=np.int64)]
        for _, parts, rows in linked.parts(PartKind.COLLECTIVE):
            if linked.profile.ring(parts[0].call.op):
                found.append(rows[linked.instance[rows] >= 0])
        return np.concatenate(found)

    @cached_property
    def early(self) -> IntArray:
        """Rows of collectives of which some members may go before all have come, or wait although
        all have.
        """
        needs, known, found = (
            self.linked.profile.needs,
            dict[str, bool](),
            [np.array(sorted(self.per_rank_needs), dtype=np.int64)],
        )
        for _, parts, rows in self.linked.parts(PartKind.COLLECTIVE):
            op = parts[0].call.op
            if op not in known:
                known[op] = any(
                    needs(op, n, 0, me) is not None for n in (2, 3, 4) for me in range(n)
                )
            found += [rows.reshape(-1)] if known[op] else []
        return sorted_unique(np.concatenate(found))


def _instances_that_differ(linked: LinkedProgram, rows: IntArray, said: IntArray) -> IntArray:
    """The instances of rows that do not all say the same."""
    low, high = (
        np.full(len(linked.members), np.iinfo(np.int64).max),
        np.full(len(linked.members), np.iinfo(np.int64).min),
    )
    np.minimum.at(low, linked.instance[rows], said[rows])
    np.maximum.at(high, linked.instance[rows], said[rows])
    found: IntArray = np.flatnonzero(low < high)
    return found
