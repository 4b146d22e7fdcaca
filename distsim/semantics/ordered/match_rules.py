"""Who meets whom in a run, and what comes of it: messages, collectives, and what becomes of calls
that meet and don't fit.
"""

from __future__ import annotations

from collections.abc import Iterable

from distsim.backends.message_matching import ANY_SENDER
from distsim.backends.profile import MismatchOutcome
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.operations.registry import OPERATIONS
from distsim.semantics.form.instructions import INVALID_SIGNATURE, PartKind
from distsim.semantics.form.mismatches import find_mismatch
from distsim.semantics.ordered.machine_tables import MachineTables, group_rank_in
from distsim.semantics.ordered.state import (
    DUE,
    HUNG,
    RUNNING,
    RowsMismatched,
    RunState,
    TransitionListener,
)

_SEND, _RECEIVE, _WORK = int(PartKind.SEND), int(PartKind.RECEIVE), int(PartKind.WORK)


class MatchRules(MachineTables):
    """The half of the rules that is about parts which have left their queues."""

    #: Ranks that a mismatch kills when the choice in hand is over (G14).
    ranks_to_crash: list[int]

    def arrive(self, state: RunState, row: int, out: TransitionListener) -> None:
        kind = self.kind[row]
        if kind == _WORK:
            state.phase[row] = DUE
            out.due(row)
        elif state.closed and (self.rank_of[row], self.group[row]) in state.closed:
            return  # G10: the connections are gone
        elif kind == _SEND:
            self._send(state, row, out)
        elif kind == _RECEIVE:
            self._receive(state, row, out)
        else:
            self._join(state, row, out)

    # --- messages ---
    def _send(self, state: RunState, row: int, out: TransitionListener) -> None:
        channel = self.channel[row]
        if self.open_boxes and self.box[row] in self.open_boxes:
            box, sender = self.box[row], self.rank_of[row]
            before = state.matcher.waiting_sends(box, sender) if self.buffers else []
            state.matcher.send(box, sender, row)
            self._run_ahead(state, row, before, out)
            self._meet_messages(state, box, sender, out)
            out.touched(box)
            return
        waiting = state.receives.get(channel)
        if waiting is None:
            earlier = state.sends.get(channel)
            if self.buffers:
                self._run_ahead(state, row, earlier or (), out)
            if earlier is None:
                state.sends[channel] = [row]
            else:
                earlier.append(row)
            return
        receive = waiting.pop(0)
        if not waiting:
            del state.receives[channel]
        if self.buffers:
            self._run_ahead(state, row, (), out)
        self.pair(state, row, receive, out)

    def _receive(self, state: RunState, row: int, out: TransitionListener) -> None:
        channel = self.channel[row]
        if self.open_boxes and self.box[row] in self.open_boxes:
            box, source = self.box[row], self.peer[row]
            state.matcher.receive(box, source, row)
            if source != ANY_SENDER:
                self._meet_messages(state, box, source, out)
            out.touched(box)
            return
        waiting = state.sends.get(channel)
        if waiting is None:
            if channel in state.receives:
                state.receives[channel].append(row)
            else:
                state.receives[channel] = [row]
            return
        send = waiting.pop(0)
        if not waiting:
            del state.sends[channel]
        self.pair(state, send, row, out)

    def _meet_messages(
        self, state: RunState, box: int, sender: int, out: TransitionListener
    ) -> None:
        while (pair := state.matcher.meet(box, sender)) is not None:
            self.pair(state, *pair, out)

    def settle_box(self, state: RunState, box: int, out: TransitionListener) -> None:
        """A receive of a box that is open to any source is gone: messages of other senders may now
        be settled.
        """
        place = state.matcher.boxes.get(box)
        named = place is not None and len(place.receives) > (ANY_SENDER in place.receives)
        for sender in sorted(place.sends) if place is not None and named else ():
            self._meet_messages(state, box, sender, out)
        out.touched(box)

    def withdraw(self, state: RunState, row: int, out: TransitionListener) -> None:
        """A message that has met nobody never will."""
        if self.box[row] in self.open_boxes:
            state.matcher.withdraw(self.box[row], row)
            self.settle_box(state, self.box[row], out)
            return
        of = state.sends if self.kind[row] == _SEND else state.receives
        rows = of.get(self.channel[row], [])
        if row in rows:
            rows.remove(row)
            if not rows:
                del of[self.channel[row]]

    def _run_ahead(
        self, state: RunState, row: int, earlier: list[int] | tuple[()], out: TransitionListener
    ) -> bool:
        """A send that the back end buffers is done with before its receive, if it has room and no
        ``earlier`` one waits for room.
        """
        if not (self.buffers and self.fits[row]):
            return False
        channel, nbytes = self.channel[row], self.nbytes[row]
        ahead = state.ahead.get(channel, 0)
        if ahead and (
            self.tag[row] >= FIRST_SIGNAL_TAG
            or not self.profile.credit(nbytes, ahead, self.program.options)
            or self._stalled(state, earlier)
        ):
            return False
        state.ahead[channel] = ahead + nbytes
        state.phase[row] = DUE
        out.due(row)
        return True

    def _stalled(self, state: RunState, earlier: list[int] | tuple[()]) -> bool:
        """The last of these sends that fits the window waits for room."""
        return next(
            (state.phase[row] == RUNNING for row in reversed(earlier) if self.fits[row]), False
        )

    def _make_room(self, state: RunState, send: int, out: TransitionListener) -> None:
        """A message that had run ahead is received: those that wait for room may go, in order."""
        channel = self.channel[send]
        left = state.ahead.pop(channel, 0) - self.nbytes[send]
        if left > 0:
            state.ahead[channel] = left
        if self.box[send] in self.open_boxes:
            waiting = state.matcher.waiting_sends(self.box[send], self.rank_of[send])
        else:
            waiting = list(state.sends.get(channel, ()))
        for row in waiting:
            if (
                state.phase[row] == RUNNING
                and self.fits[row]
                and not self._run_ahead(state, row, (), out)
            ):
                return

    def pair(self, state: RunState, send: int, receive: int, out: TransitionListener) -> None:
        phase = state.phase
        if not phase[receive]:  # its request was dropped: the data leave, and nobody reads on
            self._silence(state, send, held=False)
            if phase[send] == RUNNING:
                phase[send] = DUE
                out.due(send)
            return
        if (
            self.profile.dropped == "cancels" and not phase[send]
        ):  # its sender has nothing to send, and sends nothing else either
            self._silence(state, send, held=True)
            self._hang_on_peer(state, receive)
            return
        if state.silent and self._is_undeliverable(state, send, receive, out):
            return
        out.met((send, receive), -1)
        mishap = None
        if self.signature[send] != self.signature[receive] or self.tag[send] != self.tag[receive]:
            mishap = self._judge((send, receive), -1, out)
        if phase[send] == RUNNING:
            if (
                mishap is None or not mishap.crash
            ):  # else the data has left the sender: its send succeeds (G14)
                state.mates[send] = receive
            phase[send] = DUE
            out.due(send)
        else:
            self._make_room(state, send, out)
        phase[receive] = DUE
        out.due(receive)

    # --- pairs that have fallen silent (G4) ---
    def _silence(self, state: RunState, send: int, held: bool) -> None:
        """Nothing more arrives that the sender gives the receiver on their group: neither data nor
        the notices of its receives.
        """
        group, giver, getter = self.group[send], self.rank_of[send], self.peer[send]
        told = [
            row
            for rows in state.receives.values()
            for row in rows
            if (self.group[row], self.rank_of[row], self.peer[row]) == (group, giver, getter)
        ]
        state.silent.setdefault((group, giver, getter), (held, frozenset(told)))

    def _hang_on_peer(self, state: RunState, row: int) -> None:
        state.phase[row], state.hung_on[row] = (
            HUNG,
            (self.peer[row] if self.peer[row] >= 0 else self.rank_of[row],),
        )

    def _is_undeliverable(
        self, state: RunState, send: int, receive: int, out: TransitionListener
    ) -> bool:
        """Whether a message is stuck between two ranks: its data, or the notice of its receive
        without which they do not leave.
        """
        group, giver, getter = self.group[send], self.rank_of[send], self.rank_of[receive]
        there, back = (
            state.silent.get((group, giver, getter)),
            state.silent.get((group, getter, giver)),
        )
        noticed = back is None or receive in back[1]
        if there is None and noticed:
            return False
        if noticed and there is not None and not there[0]:
            state.phase[send] = DUE
            out.due(send)
        else:
            self._hang_on_peer(state, send)
        self._hang_on_peer(state, receive)
        return True

    def _silent_peers(self, state: RunState, row: int) -> tuple[int, ...]:
        """Who of a silent pair keeps a member from getting through a collective; nobody where its
        data do not pass between the two.
        """
        rank, members, op = (
            self.rank_of[row],
            self.members[self.instance[row]],
            self.part(row).call.op,
        )
        waits = {rank, *self.needs(row)}
        for group, *pair in state.silent:
            if (
                group == self.group[row]
                and waits.issuperset(pair)
                and (rank in pair or not OPERATIONS[op].pairwise)
            ):
                places = (group_rank_in(members, one) for one in pair)
                if self.profile.has_traffic(op, len(members), self.root(row), *places):
                    return tuple(one for one in pair if one != rank)
        return ()

    # --- collectives ---
    def _join(self, state: RunState, row: int, out: TransitionListener) -> None:
        instance, phase = self.instance[row], state.phase
        there = state.there.get(instance)
        if there is None:
            there = state.there[instance] = {}
        there[self.rank_of[row]] = row
        complete, suspect = len(there) == len(self.members[instance]), instance in self.suspects
        if not (complete or state.hung_on or row in self.early_rows or suspect):
            return
        if complete:
            out.met(tuple(there.values()), instance)
        mishap = self._judge_coming(state, row, there, complete, out) if suspect else None
        stuck = phase[next(iter(there.values()))] == HUNG and row not in self.per_rank_needs
        if stuck or (mishap is not None and mishap.hangs):
            self._hang_rows(state, (row,) if stuck and not complete else there.values())
        for one in self._ready(state, row, there, complete):
            if one in self.per_rank_needs and self.wants.in_vain(one):
                phase[one], state.hung_on[one] = HUNG, self.wants.in_vain(one)
                continue
            if state.silent and (lost := self._silent_peers(state, one)):
                phase[one], state.hung_on[one] = HUNG, lost
                continue
            phase[one] = DUE
            out.due(one)
        if complete:
            del state.there[instance]
            state.kinds.pop(instance, None)

    def _ready(self, state: RunState, row: int, there: dict[int, int], complete: bool) -> list[int]:
        """Rows of a collective that need wait no longer, by order of arrival."""
        phase = state.phase
        if complete:  # all that anybody can need
            return [one for one in there.values() if phase[one] == RUNNING]
        found = [
            one
            for one in self.wants.awaiting(self.rank_of[row], self.instance[row])
            if one != row
            and there.get(self.rank_of[one]) == one
            and phase[one] == RUNNING
            and self._has_all(one, there)
        ]
        if len(found) > 1:
            these = frozenset(found)
            found = [one for one in there.values() if one in these]
        return [*found, row] if phase[row] == RUNNING and self._has_all(row, there) else found

    def _has_all(self, row: int, there: dict[int, int]) -> bool:
        needs = self.wants.of(row)
        return (
            needs is not None and len(needs) <= len(there) and all(rank in there for rank in needs)
        )

    def _judge_coming(
        self,
        state: RunState,
        row: int,
        there: dict[int, int],
        complete: bool,
        out: TransitionListener,
    ) -> MismatchOutcome | None:
        """What comes of one more call that may not fit those who have come."""
        instance = self.instance[row]
        kinds, kind = state.kinds.setdefault(instance, {}), self.kind_of(row)
        known = kind in kinds
        kinds.setdefault(kind, {})[row] = None
        if any(OPERATIONS[op].pairwise for op, _, _ in kinds):
            return (
                self._judge(tuple(there.values()), instance, out)
                if self._may_differ(row, there, complete)
                else None
            )
        if len(kinds) == 1 and not (complete and self.signature[row] == INVALID_SIGNATURE):
            return None
        near = self.profile.neighbours
        if near is None or complete:
            return self._judge(tuple(there.values()), instance, out)
        members = self.members[instance]
        beside = {there.get(members[i], row) for i in near(self.call(row))}
        found = find_mismatch(
            self, tuple({row} | beside | {next(iter(rows)) for rows in kinds.values()}), instance
        )
        if found is not None and (
            found[1].crash or not known
        ):  # else nothing that was not told when the first of the kind came
            self._apply_mismatch(tuple(there.values()), found, instance, out)
        return None if found is None else found[1]

    def forget(self, state: RunState, row: int) -> None:
        """Whoever came to a collective is gone."""
        kinds = state.kinds.get(self.instance[row])
        if kinds is None:
            return
        kind = self.kind_of(row)
        del kinds[kind][row]
        if not kinds[kind]:
            del kinds[kind]
        if not kinds:
            del state.kinds[self.instance[row]]

    def kind_of(self, row: int) -> tuple[str, int, int]:
        """What a collective's call says and how many bytes it has: all that `differences` and most
        of what profiles go by.
        """
        return self.part(row).call.op, self.signature[row], self.nbytes[row]

    def _may_differ(self, row: int, there: dict[int, int], complete: bool) -> bool:
        """Who comes to a collective differs from who came first or, where parts are agreed on pair
        by pair, from anybody.
        """
        first = next(iter(there.values()))
        if complete and self._unlike(list(there.values())):
            return True
        differ, ops = (
            self.signature[first] != self.signature[row],
            {self.part(one).call.op for one in (first, row)},
        )
        if (
            len(ops) > 1
            or not OPERATIONS[ops.pop()].pairwise
            or INVALID_SIGNATURE in (self.signature[first], self.signature[row])
        ):
            return differ
        return (
            differ and self.call(first).inputs[0].dtype != self.call(row).inputs[0].dtype
        ) or self._crosses(row, there)

    def _crosses(self, row: int, there: dict[int, int]) -> bool:
        """A part that this rank exchanges with one who has come is not as large on both sides."""
        members, (sent, room) = self.members[self.instance[row]], self.cut(row)
        me = group_rank_in(members, self.rank_of[row])
        op = self.part(row).call.op
        for rank, other in there.items():
            if self.part(other).call.op != op or self.signature[other] == INVALID_SIGNATURE:
                continue
            at, (theirs, their_room) = group_rank_in(members, rank), self.cut(other)
            if sent[at] != their_room[me] or theirs[me] != room[at]:
                return True
        return False

    def _unlike(self, rows: list[int]) -> bool:
        """Some of those who came may differ."""
        signatures = {self.signature[row] for row in rows}
        return len(signatures) > 1 or INVALID_SIGNATURE in signatures or self._uneven(rows)

    def _uneven(self, rows: list[int]) -> bool:
        """A pairwise operation whose parts may differ in size."""
        first = rows[0]
        op = OPERATIONS[self.part(first).call.op]
        if not op.pairwise:
            return False
        differ = any(self.signature[other] != self.signature[first] for other in rows)
        return differ or "numel" not in op.agreement(self.call(first))

    def _hang_rows(self, state: RunState, rows: Iterable[int]) -> None:
        """These are stuck with whoever comes to their collective."""
        for row in rows:
            if state.phase[row] in (RUNNING, HUNG):
                state.phase[row] = HUNG
                state.hung_on[row] = ()

    # --- what does not fit ---
    def _judge(
        self, rows: tuple[int, ...], instance: int, out: TransitionListener
    ) -> MismatchOutcome | None:
        """What comes of calls that met, if they differ."""
        found = find_mismatch(self, rows, instance)
        return None if found is None else self._apply_mismatch(rows, found, instance, out)

    def _apply_mismatch(
        self,
        rows: tuple[int, ...],
        found: tuple[tuple[str, ...], MismatchOutcome],
        instance: int,
        out: TransitionListener,
    ) -> MismatchOutcome:
        fields, mishap = found
        out.mismatched(RowsMismatched(rows, fields, mishap.outcome, instance, mishap.crash))
        self.ranks_to_crash += mishap.crash
        return mishap
