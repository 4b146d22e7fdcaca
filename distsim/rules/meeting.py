"""Who meets whom, and what comes of it: messages, collectives, and what becomes of calls that meet and don't fit."""

from __future__ import annotations

from collections.abc import Hashable

from distsim.match import ANY
from distsim.ops.records import Call
from distsim.ops.table import OPS
from distsim.profiles.record import Meeting, Mishap
from distsim.rules.code import ODD, Part, PartKind
from distsim.rules.state import Due, Event, Met, Mismatched, Phase, State
from distsim.rules.tables import Tables


class Meetings(Tables):
    """The half of the rules that is about parts which have left their queues."""

    def _arrive(self, state: State, part: Part, events: list[Event]) -> None:
        if part.kind is PartKind.WORK:
            self._due(state, part.row, events)
        elif (part.rank, part.group) in state.closed:
            return  # G10: the connections are gone
        elif part.kind is PartKind.COLLECTIVE:
            self._join(state, part, events)
        elif part.kind is PartKind.SEND:
            state.matcher.send(part.box, part.rank, part.row)
            self._run_ahead(state, part, events)
            self._meet_messages(state, part.box, part.rank, events)
        else:
            state.matcher.receive(part.box, part.peer, part.row)
            if part.peer != ANY:
                self._meet_messages(state, part.box, part.peer, events)

    def _meet_messages(self, state: State, box: Hashable, sender: int, events: list[Event]) -> None:
        while (pair := state.matcher.meet(box, sender)) is not None:
            self._pair(state, *pair, events)

    def _settle_box(self, state: State, box: Hashable, events: list[Event]) -> None:
        """An any-source receive is gone: messages of other senders may now be settled."""
        place = state.matcher.boxes.get(box)
        for sender in sorted(place.sends) if place is not None else ():
            self._meet_messages(state, box, sender, events)

    def _run_ahead(self, state: State, part: Part, events: list[Event]) -> None:
        """A send that the back end buffers is done with before its receive."""
        lane = (part.box, part.rank)
        ahead = state.ahead.get(lane, 0)
        if self.profile.credit(part.nbytes, ahead, self.program.options):
            state.ahead[lane] = ahead + part.nbytes
            self._due(state, part.row, events)

    def _pair(self, state: State, send: int, receive: int, events: list[Event]) -> None:
        sender, receiver = self.parts[send], self.parts[receive]
        if receive not in state.phase:  # its request was dropped: the data is lost
            if state.phase.get(send) is Phase.RUNNING:
                self._due(state, send, events)
            return
        events.append(Met((send, receive), None))
        same = sender.signature == receiver.signature and sender.tag == receiver.tag
        mishap = None if same else self._judge((send, receive), None, events)
        if state.phase.get(send) is Phase.RUNNING:
            state.mates[send], state.mates[receive] = receive, send
            self._due(state, send, events)
        else:
            lane = (sender.box, sender.rank)
            left = state.ahead.pop(lane, 0) - sender.nbytes
            if left > 0:
                state.ahead[lane] = left
            for row in state.matcher.waiting_sends(sender.box, sender.rank):
                if state.phase.get(row) is Phase.RUNNING:
                    self._run_ahead(state, self.parts[row], events)
        self._due(state, receive, events)
        if mishap is not None and mishap.crash:
            state.mates.pop(send, None)  # the data has left the sender: its send succeeds (G14)
            state.mates.pop(receive, None)

    def _join(self, state: State, part: Part, events: list[Event]) -> None:
        there = state.matcher.join(part.box, part.rank, part.row)
        complete = len(there) == len(part.members)
        if complete:
            events.append(Met(tuple(there.values()), part.box))
        first = next(iter(there.values()))
        mishap = None
        if self.parts[first].signature != part.signature or (complete and self._unlike(there)):
            mishap = self._judge(tuple(there.values()), part.box, events)
        if state.phase.get(first) is Phase.JAMMED or (mishap is not None and mishap.hangs):
            self._jam(state, there)
        for row in self._ready(state, part, there, complete):
            self._due(state, row, events)
        if complete:
            state.matcher.close(part.box)

    def _ready(self, state: State, part: Part, there: dict[int, int], complete: bool) -> list[int]:
        """Rows of a collective that need wait no longer."""
        if self.plain(part) and not complete:
            return []
        running = [row for row in there.values() if state.phase.get(row) is Phase.RUNNING]
        return running if complete else [row for row in running if not self.lacking(state, row)[0]]

    def _unlike(self, there: dict[int, int]) -> bool:
        """Some of those who came may differ."""
        signatures = {self.parts[row].signature for row in there.values()}
        return len(signatures) > 1 or ODD in signatures or self._uneven(there)

    def _uneven(self, there: dict[int, int]) -> bool:
        """A pairwise operation whose parts may differ in size."""
        first = next(iter(there.values()))
        row = OPS[self.parts[first].op]
        if not row.pairwise:
            return False
        differ = any(self.parts[other].signature != self.parts[first].signature for other in there.values())
        return differ or "numel" not in row.agreement(self.call(first))

    def _jam(self, state: State, there: dict[int, int]) -> None:
        for rank, row in there.items():
            if state.phase.get(row) in (Phase.RUNNING, Phase.JAMMED):
                state.phase[row] = Phase.JAMMED
                state.jams[row] = tuple(sorted(r for r in there if r != rank))

    def _judge(self, rows: tuple[int, ...], key: Hashable, events: list[Event]) -> Mishap | None:
        """Do calls that met differ, in what, and what comes of it."""
        parts = [self.parts[row] for row in rows]
        calls = tuple(self.call(row) for row in rows)
        fields = differences(calls, key is None, len(rows) == len(parts[0].members))
        if key is None and parts[0].tag != parts[1].tag:
            fields += ("tag",)
        if any(part.signature == ODD for part in parts):
            fields = ("splits",)
            events.append(Mismatched(rows, fields, "wrong-data", key, ()))
            return Mishap("wrong-data")
        if not fields:
            return None
        nbytes = tuple(part.nbytes for part in parts)
        mishap = self.profile.mismatch(Meeting(fields, calls, nbytes, key is None))
        events.append(Mismatched(rows, fields, mishap.outcome, key, mishap.crash))
        return mishap

    def _due(self, state: State, row: int, events: list[Event]) -> None:
        state.phase[row] = Phase.DUE
        events.append(Due(row))


def differences(calls: tuple[Call, ...], is_message: bool, complete: bool) -> tuple[str, ...]:
    """The words in which calls that met differ (`agreement` of their rows).

    Of operations that agree pair by pair (all_to_all) the sizes are compared when all are there.
    """
    said = [OPS[c.op].agreement(c) if is_message else {"op": c.op, **OPS[c.op].agreement(c)} for c in calls]
    names = dict.fromkeys(name for words in said for name in words)
    fields = tuple(name for name in names if any(words.get(name) != said[0].get(name) for words in said))
    row = OPS[calls[0].op]
    if not row.pairwise or "op" in fields:
        return fields
    uneven = complete and ("numel" in fields or "numel" not in said[0])
    fields = tuple(name for name in fields if name not in ("numel", "splits"))
    return (*fields, "splits") if uneven and row.cross_faults(sorted(calls, key=lambda c: c.group_rank)) else fields
