"""Choose which choices of a state to branch over now; all others may wait.

Executions differ only in which sender an any-source receive takes (and, under ``mixed``, in which
waiting calls are buffered). Choices at different boxes are independent: taking a message never
disables a choice elsewhere, it only enables some. So it is enough to branch over one box at a time
(a *persistent set*). The condition: no rank that has not sent yet can send to the box before its
oldest any-source receive is served.

To find such ranks, follow what each sender waits for that has not posted its next message. Every
box met on the way, and every call that may turn out to be buffered, belongs to the set too. The set
then contains every choice that could change what this receive can take, and no hang is missed.

Source: P. Godefroid, Partial-Order Methods for the Verification of Concurrent Systems, LNCS 1032,
chapter 4.
"""

from __future__ import annotations

from typing import NamedTuple

from distsim.checker.explore.steps import SearchState, StateMachine


class BranchSet(NamedTuple):
    """The choices to branch over: pairs to take and ranks to release.

    No pair means that no receive can take a message any more: an execution ends here.
    """

    pairs: list[int]
    releases: list[int]

    @property
    def size(self) -> int:
        """The number of choices."""
        return len(self.pairs) + len(self.releases)


class BranchChooser:
    """Chooses the branches of a state."""

    def __init__(self, machine: StateMachine) -> None:
        self.machine, self.encoding = machine, machine.encoding
        self.is_mixed = machine.encoding.reading == "mixed"
        self.boxes = range(len(machine.encoding.boxes))

    def branches(self, state: SearchState) -> BranchSet:
        """A persistent set of the state: the smallest of those that start from one box."""
        takes: dict[int, list[int]] = {}
        for box in self.boxes:
            pairs = self.machine.takes(state, box)
            if pairs:
                takes[box] = pairs
        if not takes:
            return BranchSet([], [])
        if len(takes) == 1 and not self.is_mixed:
            return BranchSet(next(iter(takes.values())), [])
        for box, pairs in takes.items():
            if not self._late_senders(state, box):
                return BranchSet(pairs, [])
        candidates = [self._persistent_set(state, box, takes) for box in takes]
        return min(candidates, key=lambda candidate: candidate.size)

    def _late_senders(self, state: SearchState, box: int) -> list[int]:
        """Senders that have no message in the box now and may send one later."""
        machine, consumed = self.machine, self.encoding.consumed
        late = []
        for pair in machine.pairs_of[box]:
            sender = machine.sender_of[pair]
            sent = machine.sent[pair][state[sender]]
            if sent <= state[consumed + pair] and machine.total[pair] > sent:
                late.append(sender)
        return late

    def _persistent_set(
        self, state: SearchState, start: int, takes: dict[int, list[int]]
    ) -> BranchSet:
        """All choices that can influence what the oldest any-source receive of a box takes."""
        boxes, releases, seen = {start}, set(), set()
        todo = self._late_senders(state, start)
        while todo:
            rank = todo.pop()
            if rank in seen:
                continue
            seen.add(rank)
            if self.is_mixed and self.machine.can_release(state, rank):
                releases.add(rank)
            box = self._blocking_box(state, rank)
            todo += self._blocking_ranks(state, rank)
            if box is not None and box not in boxes:
                boxes.add(box)
                todo += self._late_senders(state, box)
        pairs = [pair for box in sorted(boxes) for pair in takes.get(box, ())]
        return BranchSet(pairs, sorted(releases))

    # A rank waits for the first number of the state that fails its tests. The ranges below are the
    # sections of the state's layout; see `ProgramEncoding`.
    def _blocking_ranks(self, state: SearchState, rank: int) -> list[int]:
        """The ranks without which a rank cannot proceed."""
        encoding, machine = self.encoding, self.machine
        index = state[encoding.awaited + rank]
        if index < machine.size:
            return [index]
        if index < encoding.named_served:
            return []
        if index < encoding.consumed:
            pair = index - encoding.named_served
            return [] if self._has_message(state, pair) else [machine.sender_of[pair]]
        if index < encoding.zero:
            box = machine.box_of_pair[index - encoding.consumed]
            return [machine.receiver[box]]
        return []

    def _blocking_box(self, state: SearchState, rank: int) -> int | None:
        """The box whose choices decide whether a rank can proceed."""
        encoding, machine = self.encoding, self.machine
        index = state[encoding.awaited + rank]
        if index < machine.size:
            return None
        if index < encoding.named_served:
            return index - encoding.served
        if index < encoding.consumed:
            pair = index - encoding.named_served
            return machine.box_of_pair[pair] if self._has_message(state, pair) else None
        if index < encoding.zero:
            return machine.box_of_pair[index - encoding.consumed]
        return None

    def _has_message(self, state: SearchState, pair: int) -> bool:
        """Whether the pair's sender has a message in the box."""
        sent = self.machine.sent[pair][state[self.machine.sender_of[pair]]]
        return sent > state[self.encoding.consumed + pair]
