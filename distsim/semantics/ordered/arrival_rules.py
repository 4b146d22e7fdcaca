"""What happens when a part leaves its queue: it arrives where its partners match it.

The rules for messages and for collectives are in the two base modules; this one only chooses
between them.
"""

from __future__ import annotations

from distsim.semantics.form.instructions import PartKind
from distsim.semantics.ordered.collective_rules import CollectiveRules
from distsim.semantics.ordered.machine_tables import is_member
from distsim.semantics.ordered.state import DUE, HUNG, RunState, TransitionListener

_SEND, _RECEIVE, _WORK = int(PartKind.SEND), int(PartKind.RECEIVE), int(PartKind.WORK)


class ArrivalRules(CollectiveRules):
    """The half of the rules about parts that have left their queues."""

    def arrive(self, state: RunState, row: int, out: TransitionListener) -> None:
        """Handle a row that has reached the point where it is matched."""
        kind = self.kind[row]
        if kind == _WORK:
            state.phase[row] = DUE
            out.due(row)
        elif state.closed_groups and (self.rank_of[row], self.group[row]) in state.closed_groups:
            return  # G10: a timeout has closed this group's connections
        elif kind == _SEND:
            self._send(state, row, out)
        elif kind == _RECEIVE:
            self._receive(state, row, out)
        elif state.lost_ranks and (lost := self._posts_in_vain_to(state, row)):
            state.phase[row], state.hung_on[row] = HUNG, lost
        else:
            self._join(state, row, out)

    def _posts_in_vain_to(self, state: RunState, row: int) -> tuple[int, ...]:
        """The ranks to which a collective fails to post a transfer, because their processes have
        ended (G13). It then moves no data.
        """
        if not self.detects_peer_death:
            return ()
        lost = []
        for rank in self.lost_peers(state, row):
            contact = self.contact(row, rank) if is_member(self.needs(row), rank) else None
            if contact is not None and self.have_arrived(state, row, contact.posts_after):
                lost.append(rank)
        return tuple(lost)
