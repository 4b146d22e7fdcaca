"""Which choices of a state must be branched over now; all others may wait.

Only a receive from any source that may take more than one sender's message makes executions differ
(and, under ``mixed``, a send that is buffered or not). Two choices at different boxes do not
disturb each other: taking a message never takes away a choice elsewhere, it only adds some. So it
is enough to branch over one box at a time (a *persistent set*), as long as nobody who has still to
come could send to it before its oldest receive is served. Who could is found by following, from
each sender that has not posted its next message, what it waits for; every box (and every send that
may turn out buffered) met on the way belongs to the set too. The set then holds every choice that
could change what this receive can take, and no standstill is missed (Godefroid, Partial-Order
Methods for the Verification of Concurrent Systems, LNCS 1032, chapter 4).
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.checker.explore.steps import SearchState, StateMachine


class BranchSet(NamedTuple):
    """Pairs that may be taken, ranks that may be released. No pair: nothing is left to take."""

    pairs: list[int]
    releases: list[int]


class BranchChooser:
    """Finds the branches of a state."""

    def __init__(self, machine: StateMachine) -> None:
        self.machine, self.tables = machine, machine.tables
        self.mixed = machine.tables.reading == "mixed"
        self.boxes = range(len(machine.tables.boxes))

    def branches(self, state: SearchState) -> BranchSet:
        """A persistent set of the state, the smallest of those that start from one box."""
        machine = self.machine
        found = [(box, pairs) for box in self.boxes if (pairs := machine.takes(state, box))]
        if not found or (len(found) == 1 and not self.mixed):
            return BranchSet(found[0][1] if found else [], [])
        for box, pairs in found:
            if not self._absent(state, box):
                return BranchSet(pairs, [])
        takes, best = dict(found), None
        for box, _ in found:
            boxes, releases = self._closure(state, box)
            branch = BranchSet(
                [pair for b in sorted(boxes) for pair in takes.get(b, ())], sorted(releases)
            )
            if best is None or len(branch.pairs) + len(branch.releases) < len(best.pairs) + len(
                best.releases
            ):
                best = branch
        assert best is not None
        return best

    def _absent(self, state: SearchState, box: int) -> list[int]:
        """Senders that have no message in the box now and may send one later."""
        machine, gone = self.machine, self.tables.gone
        out = []
        for pair in machine.pairs_of[box]:
            sender = machine.sender_of[pair]
            count = machine.sent[pair][state[sender]]
            if count <= state[gone + pair] and machine.total[pair] > count:
                out.append(sender)
        return out

    def _closure(self, state: SearchState, box: int) -> tuple[set[int], set[int]]:
        """Boxes and releases that can have a say in what a box's oldest open receive takes."""
        boxes, releases, seen = {box}, set(), set()
        todo = self._absent(state, box)
        while todo:
            rank = todo.pop()
            if rank in seen:
                continue
            seen.add(rank)
            if self.mixed and self.machine.can_release(state, rank):
                releases.add(rank)
            more, into = self._held_by(state, rank)
            todo += more
            if into >= 0 and into not in boxes:
                boxes.add(into)
                todo += self._absent(state, into)
        return boxes, releases

    def _held_by(self, state: SearchState, rank: int) -> tuple[list[int], int]:
        """(ranks, box or -1) without one of which a rank cannot go on: what the first number it
        waits for depends on.
        """
        tables, machine = self.tables, self.machine
        i = state[tables.watch + rank]
        if i < self.machine.size:
            return [i], -1
        if i < tables.by_name:
            return [], i - tables.served
        if i < tables.gone:
            pair = i - tables.by_name
            sender = machine.sender_of[pair]
            there = machine.sent[pair][state[sender]] > state[tables.gone + pair]
            return ([], machine.box_of_pair[pair]) if there else ([sender], -1)
        if i < tables.zero:
            box = machine.box_of_pair[i - tables.gone]
            return [machine.receiver[box]], box
        return [], -1
