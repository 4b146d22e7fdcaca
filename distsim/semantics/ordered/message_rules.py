"""How messages match in a run, what buffering allows, and which directions between two ranks fall
silent.

Key idea: without any-source receives, the k-th send of a channel matches its k-th receive, so a
plain list per channel is enough. Only boxes with an any-source receive (``open_boxes``) go through
`distsim.backends.message_matching.MessageMatcher`, and only there the driver chooses.

Sources: the rules G4 and G14 of Gloo are described in docs/explanation/semantics.md.
"""

from __future__ import annotations

from distsim.backends.message_matching import ANY_SENDER
from distsim.backends.profile import MismatchOutcome
from distsim.findings.final_state import RankEndStatus
from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.semantics.form.instructions import PartKind
from distsim.semantics.form.mismatches import find_mismatch
from distsim.semantics.ordered.machine_tables import MachineTables
from distsim.semantics.ordered.state import (
    DUE,
    HUNG,
    RUNNING,
    RowsMismatched,
    RunState,
    SilencedPair,
    TransitionListener,
)

_SEND = int(PartKind.SEND)
#: The instance that stands for "a send and its receive".
_NO_INSTANCE = -1


class MessageRules(MachineTables):
    """Rules for sends and receives that have left their queues."""

    #: Ranks that a mismatch ends after the current transition, and with which status (G14).
    ranks_to_end: list[tuple[int, RankEndStatus]]

    # --- posting ---
    def _send(self, state: RunState, row: int, out: TransitionListener) -> None:
        channel = self.channel[row]
        if self.open_boxes and self.box[row] in self.open_boxes:
            self._send_to_open_box(state, row, out)
            return
        receives = state.receives.get(channel)
        if receives is None:
            earlier = state.sends.get(channel)
            if self.buffers_sends:
                self._try_buffer(state, row, earlier or (), out)
            if earlier is None:
                state.sends[channel] = [row]
            else:
                earlier.append(row)
            return
        receive = receives.pop(0)
        if not receives:
            del state.receives[channel]
        if self.buffers_sends:
            self._try_buffer(state, row, (), out)
        self.pair(state, row, receive, out)

    def _send_to_open_box(self, state: RunState, row: int, out: TransitionListener) -> None:
        box, sender = self.box[row], self.rank_of[row]
        earlier = state.matcher.waiting_sends(box, sender) if self.buffers_sends else []
        state.matcher.send(box, sender, row)
        self._try_buffer(state, row, earlier, out)
        self._match_named_receives(state, box, sender, out)
        out.touched(box)

    def _receive(self, state: RunState, row: int, out: TransitionListener) -> None:
        channel = self.channel[row]
        if self.open_boxes and self.box[row] in self.open_boxes:
            self._receive_from_open_box(state, row, out)
            return
        sends = state.sends.get(channel)
        if sends is None:
            if channel in state.receives:
                state.receives[channel].append(row)
            else:
                state.receives[channel] = [row]
            return
        send = sends.pop(0)
        if not sends:
            del state.sends[channel]
        self.pair(state, send, row, out)

    def _receive_from_open_box(self, state: RunState, row: int, out: TransitionListener) -> None:
        box, source = self.box[row], self.peer[row]
        state.matcher.receive(box, source, row)
        if source != ANY_SENDER:
            self._match_named_receives(state, box, source, out)
        out.touched(box)

    def _match_named_receives(
        self, state: RunState, box: int, sender: int, out: TransitionListener
    ) -> None:
        """Match what has no alternative: messages of ``sender`` with receives that name it."""
        while (match := state.matcher.meet(box, sender)) is not None:
            self.pair(state, *match, out)

    def settle_box(self, state: RunState, box: int, out: TransitionListener) -> None:
        """Match again in a box that has lost a receive: other messages may now have only one."""
        queues = state.matcher.boxes.get(box)
        if queues is not None:
            named_sources = len(queues.receives) - (ANY_SENDER in queues.receives)
            if named_sources > 0:
                for sender in sorted(queues.sends):
                    self._match_named_receives(state, box, sender, out)
        out.touched(box)

    def withdraw(self, state: RunState, row: int, out: TransitionListener) -> None:
        """Remove an unmatched message, so that it never matches."""
        if self.box[row] in self.open_boxes:
            state.matcher.withdraw(self.box[row], row)
            self.settle_box(state, self.box[row], out)
            return
        channel = self.channel[row]
        by_channel = state.sends if self.kind[row] == _SEND else state.receives
        rows = by_channel.get(channel, [])
        if row in rows:
            rows.remove(row)
            if not rows:
                del by_channel[channel]

    # --- buffering ---
    def _try_buffer(
        self, state: RunState, row: int, earlier: list[int] | tuple[()], out: TransitionListener
    ) -> bool:
        """Complete a send before its receive, if the backend buffers it and has room.

        ``earlier``: sends of the same channel without a receive. A send never overtakes one of
        these that waits for room.
        """
        if not (self.buffers_sends and self.fits_buffer[row]):
            return False
        channel, nbytes = self.channel[row], self.nbytes[row]
        buffered = state.buffered_bytes.get(channel, 0)
        if buffered:
            if self.tag[row] >= FIRST_SIGNAL_TAG:  # a cell of the signal pad holds one signal
                return False
            if not self.profile.credit(nbytes, buffered, self.program.options):
                return False
            if self._waits_for_room(state, earlier):
                return False
        state.buffered_bytes[channel] = buffered + nbytes
        state.phase[row] = DUE
        out.due(row)
        return True

    def _waits_for_room(self, state: RunState, sends: list[int] | tuple[()]) -> bool:
        """Whether the last of ``sends`` that could be buffered at all is not buffered yet."""
        for row in reversed(sends):
            if self.fits_buffer[row]:
                return state.phase[row] == RUNNING
        return False

    def _make_room(self, state: RunState, send: int, out: TransitionListener) -> None:
        """A buffered message is received: later sends that wait for room are buffered in order."""
        channel = self.channel[send]
        remaining = state.buffered_bytes.pop(channel, 0) - self.nbytes[send]
        if remaining > 0:
            state.buffered_bytes[channel] = remaining
        if self.box[send] in self.open_boxes:
            unmatched = state.matcher.waiting_sends(self.box[send], self.rank_of[send])
        else:
            unmatched = list(state.sends.get(channel, ()))
        for row in unmatched:
            if state.phase[row] != RUNNING or not self.fits_buffer[row]:
                continue
            if not self._try_buffer(state, row, (), out):
                return

    # --- matching ---
    def pair(self, state: RunState, send: int, receive: int, out: TransitionListener) -> None:
        """Let a send and a receive meet: both become due, unless one was dropped or is silenced."""
        phase = state.phase
        if not phase[receive]:
            # The receive's request was dropped: the data leave the sender, but the receiver does
            # not read them, and never reads anything behind them either.
            self._silence(state, send, data_withheld=False)
            if phase[send] == RUNNING:
                phase[send] = DUE
                out.due(send)
            return
        if self.profile.dropped == "cancels" and not phase[send]:
            # The send's request was dropped: its place in the sender's queue stays occupied, so
            # nothing behind it leaves. No profile that cancels buffers sends, so it is not a
            # buffered send that has finished.
            self._silence(state, send, data_withheld=True)
            self._hang_on_peer(state, receive)
            return
        if state.silenced and self._is_undeliverable(state, send, receive, out):
            return
        out.met((send, receive), _NO_INSTANCE)
        mismatch = None
        if self.signature[send] != self.signature[receive] or self.tag[send] != self.tag[receive]:
            mismatch = self._judge((send, receive), _NO_INSTANCE, out)
        if phase[send] == RUNNING:
            if mismatch is None or not mismatch.crash:
                # Otherwise the receiver dies after the data have left: the send succeeds (G14), so
                # it must not be recorded as one that a dying receiver interrupts.
                state.receive_of[send] = receive
            phase[send] = DUE
            out.due(send)
        else:
            self._make_room(state, send, out)
        phase[receive] = DUE
        out.due(receive)

    # --- pairs that have become silent (G4) ---
    def _silence(self, state: RunState, send: int, data_withheld: bool) -> None:
        """From now on nothing arrives from the sender at the receiver on their group.

        That concerns the sender's data as well as the notices of its own receives. Notices of
        receives that are already open have arrived before.
        """
        direction = (self.group[send], self.rank_of[send], self.peer[send])
        if direction in state.silenced:
            return
        noticed: list[int] = []
        # Only the sender's own channels: a program that drops each of its requests silences each
        # of its directions, and all pending receives would be looked at for each of them.
        for channel in self.receive_channels.get(direction, ()):
            noticed += state.receives.get(channel, ())
        state.silenced[direction] = SilencedPair(data_withheld, frozenset(noticed))

    def _hang_on_peer(self, state: RunState, row: int) -> None:
        peer = self.peer[row] if self.peer[row] >= 0 else self.rank_of[row]
        state.phase[row] = HUNG
        state.hung_on[row] = (peer,)

    def _is_undeliverable(
        self, state: RunState, send: int, receive: int, out: TransitionListener
    ) -> bool:
        """Hang a message that cannot be delivered between silenced ranks; whether that is so.

        Either its data do not arrive, or the notice of its receive does not, without which the data
        never leave.
        """
        group, sender, receiver = self.group[send], self.rank_of[send], self.rank_of[receive]
        forward = state.silenced.get((group, sender, receiver))
        backward = state.silenced.get((group, receiver, sender))
        notice_arrives = backward is None or receive in backward.noticed
        if forward is None and notice_arrives:
            return False
        if notice_arrives and forward is not None and not forward.data_withheld:
            state.phase[send] = DUE
            out.due(send)
        else:
            self._hang_on_peer(state, send)
        self._hang_on_peer(state, receive)
        return True

    # --- mismatches ---
    def _judge(
        self, rows: tuple[int, ...], instance: int, out: TransitionListener
    ) -> MismatchOutcome | None:
        """Compare calls that met; apply and return the consequence if they differ."""
        found = find_mismatch(self, rows, instance)
        return None if found is None else self._apply_mismatch(rows, found, instance, out)

    def _apply_mismatch(
        self,
        rows: tuple[int, ...],
        found: tuple[tuple[str, ...], MismatchOutcome],
        instance: int,
        out: TransitionListener,
    ) -> MismatchOutcome:
        fields, mismatch = found
        out.mismatched(RowsMismatched(rows, fields, mismatch.outcome, instance, mismatch.crash))
        self.ranks_to_end += [(rank, "crashed") for rank in mismatch.crash]
        self.ranks_to_end += [(rank, "raised") for rank in mismatch.raises]
        return mismatch
