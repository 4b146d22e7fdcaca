"""Run a program once, without a clock, under one reading of the contract.

Key idea: without any-source receives the program fixes which calls meet, so every order of events
ends in the same state, and a single run is exact. Programs with any-source receives are searched
instead (`explore`).

The result says which ranks are blocked and which calls met and mismatch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Literal

import numpy as np

from distsim.backends import CONTRACT_READINGS
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.call_mismatch import CallMismatch, message_mismatch, sequence_mismatch
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.checker.reading_result import ReadingResult
from distsim.common.arrays import BoolArray, IntArray, sorted_union
from distsim.common.records import dataclass
from distsim.findings.final_state import FinalState, RankEnd
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.completion import CompletionConditions, WithdrawnRow
from distsim.semantics.form.instructions import (
    CompilationUnit,
    ExitRank,
    LaunchPart,
    PartKind,
    WaitForRows,
)
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import mismatched_receives, suspect_instances
from distsim.semantics.form.order_dependence import requests_open_at_end
from distsim.semantics.local.blocked_ranks import blocked_state_of_run
from distsim.semantics.local.rank_clocks import RunProgress
from distsim.semantics.local.run import run_local_clocks

# Plain integers: a comparison with a member of an enumeration is slow.
_SEND, _RECEIVE, _COLLECTIVE, _ = (int(kind) for kind in PartKind)
#: The readings that a single run can follow; `reading_result` explains them.
Reading = Literal["rendezvous", "early", "buffered"]


@dataclass(frozen=True)
class MismatchRows:
    """Rows of a `LinkedProgram` that mismatch if they meet.

    ``receives``: receives that a different message reaches. ``instances``: instances of
    collectives whose members differ, or may differ.
    """

    receives: tuple[int, ...]
    instances: tuple[int, ...]


class ContractProgram:
    """A program compiled for the contract: once, for all readings."""

    def __init__(self, layout: ChannelLayout, call_index: CallIndex) -> None:
        self.layout, self.call_index = layout, call_index
        self.linked = layout.linked
        self._mismatch_rows: MismatchRows | None = None
        self._conditions_by_reading: dict[Reading, CompletionConditions] = {}

    def under(self, reading: str) -> LinkedProgram:
        """The same program with the rules of a reading."""
        return self.linked.under(CONTRACT_READINGS[reading])

    def has_same_result(self, known: Reading, other: Reading, result: ReadingResult) -> bool:
        """Whether another reading surely has the known result of a reading.

        It does if the two release the same collectives early and no message waits that only one of
        them would release. A message may also wait behind a mismatch, or at the exit of its rank.
        """
        known_rules, other_rules = self._conditions(known), self._conditions(other)
        if known_rules.partial_waits != other_rules.partial_waits:
            return False
        message_may_wait = (
            result.example("end").final_state.unreceived
            or len(result.mismatches) > 1
            or early_exit_ranks(self.linked)
        )
        return not message_may_wait or bool((known_rules.buffered == other_rules.buffered).all())

    @property
    def mismatch_rows(self) -> MismatchRows:
        """What mismatches if it meets, found from the program alone.

        Raises FoldingError if ranks are folded and a collective is suspect: its members then have
        to be compared one by one.
        """
        if self._mismatch_rows is None:
            unlike, uneven = suspect_instances(self.linked)
            is_folded = self.linked.program.representative_of is not None
            if is_folded and (unlike.size or uneven.size):
                raise FoldingError
            receives = mismatched_receives(self.linked)
            instances = sorted_union(unlike, uneven)
            self._mismatch_rows = MismatchRows(tuple(receives.tolist()), tuple(instances.tolist()))
        return self._mismatch_rows

    def run(self, reading: Reading) -> ReadingRun:
        """The program's one run under a reading."""
        progress = run_local_clocks(self.under(reading), self._conditions(reading))
        return ReadingRun(self, progress, reading)

    def _conditions(self, reading: Reading) -> CompletionConditions:
        if reading not in self._conditions_by_reading:
            conditions = CompletionConditions(self.under(reading), None)
            self._conditions_by_reading[reading] = conditions
        return self._conditions_by_reading[reading]


class ReadingRun:
    """A finished run under a reading.

    ``withdrawn``: rows that met none, or not all, of their partners before their rank exited.
    """

    def __init__(
        self,
        contract: ContractProgram,
        progress: RunProgress,
        reading: Reading,
        withdrawn: tuple[WithdrawnRow, ...] = (),
    ) -> None:
        self.contract, self.progress = contract, progress
        self.reading, self.withdrawn = reading, withdrawn
        self.linked = contract.linked
        self.layout, self.call_index = contract.layout, contract.call_index

    def final_state(self) -> FinalState:
        """How the ranks ended, and which are blocked."""
        state = blocked_state_of_run(self.progress)
        return replace(state, ends=tuple(_with_fault_message(end) for end in state.ends))

    def mismatches(self) -> tuple[CallMismatch, ...]:
        """The mismatches that no other mismatch precedes: the first per sequence and channel.

        An execution ends for ranks whose calls mismatch; what they would have done afterwards
        carries no information.
        """
        rows = self._rows_not_withdrawn(self.contract.mismatch_rows)
        if not rows.receives and not rows.instances:
            return ()
        found = tuple(self._mismatches_in(self.progress, rows))
        if len(found) < 2:
            return found

        # A second run, in which mismatching calls never complete, shows which mismatches are
        # reached without passing another one.
        linked = self.contract.under(self.reading)
        halting = self._confirmed_mismatches(rows)
        conditions = CompletionConditions(
            linked,
            None,
            mismatches=(halting.receives, halting.instances),
            withdrawn=self.withdrawn,
        )
        halted = run_local_clocks(linked, conditions)
        first = {_mismatch_key(mismatch) for mismatch in self._mismatches_in(halted, halting)}
        return tuple(each for each in found if _mismatch_key(each) in first) or found

    def _rows_not_withdrawn(self, rows: MismatchRows) -> MismatchRows:
        withdrawn = {row for row, _ in self.withdrawn}
        withdrawn |= {int(self.linked.mate[row]) for row in withdrawn}
        receives = tuple(row for row in rows.receives if row not in withdrawn)
        return MismatchRows(receives, rows.instances)

    def _confirmed_mismatches(self, rows: MismatchRows) -> MismatchRows:
        """Without the collectives whose signatures differ but whose pairs of ranks all agree."""
        instances = tuple(
            instance
            for instance in rows.instances
            if self._instance_mismatch(instance, self._rows_of(instance)) is not None
        )
        return MismatchRows(rows.receives, instances)

    def _mismatches_in(self, progress: RunProgress, rows: MismatchRows) -> Iterator[CallMismatch]:
        yield from self._collective_mismatches(progress, rows.instances)
        yield from self._message_mismatches(progress, rows.receives)

    # --- collectives ---
    def _collective_mismatches(
        self, progress: RunProgress, instances: Sequence[int]
    ) -> Iterator[CallMismatch]:
        """The first mismatch of each sequence, with the number of later calls that differ too."""
        by_sequence: dict[int, list[int]] = defaultdict(list)
        for instance in instances:
            if len(self._posted_rows(progress, instance)) > 1:
                by_sequence[self._sequence_of(instance)].append(instance)
        for sequence in sorted(by_sequence):
            in_order = sorted(by_sequence[sequence], key=self._number_of)
            for index, instance in enumerate(in_order):
                arrived = self._posted_rows(progress, instance)
                mismatch = self._instance_mismatch(instance, arrived)
                if mismatch is not None:
                    later = [
                        each
                        for each in in_order[index + 1 :]
                        if self._signatures_differ(self._posted_rows(progress, each))
                    ]
                    yield replace(mismatch, later=len(later))
                    break

    def _rows_of(self, instance: int) -> list[int]:
        """The rows of all calls that the program has for an instance of a collective."""
        rows: list[int] = self.linked.rows_of[instance].tolist()
        return rows

    def _posted_rows(self, progress: RunProgress, instance: int) -> list[int]:
        """The rows of an instance that were posted in a run."""
        return [row for row in self._rows_of(instance) if progress.posted[row] >= 0]

    def _signatures_differ(self, rows: list[int]) -> bool:
        return len(set(self.linked.signature[rows].tolist())) > 1

    def _first_place(self, instance: int) -> tuple[int, int]:
        """Rank and position of an instance's first call."""
        rank, position, _ = self.linked.place(int(self.linked.rows_of[instance][0]))
        return rank, position

    def _sequence_of(self, instance: int) -> int:
        rank, position = self._first_place(instance)
        return self.call_index.sequence(rank, self.layout.program.code_call(rank, position))

    def _number_of(self, instance: int) -> int:
        """The number of an instance in its sequence."""
        rank, position = self._first_place(instance)
        return self.call_index.joins(rank, self._sequence_of(instance)).index(position)

    def _instance_mismatch(self, instance: int, rows: list[int]) -> CallMismatch | None:
        """How the calls in these rows of an instance differ, if they do."""
        ranks = {int(self.linked.rank[row]) for row in rows}
        sequence, number = self._sequence_of(instance), self._number_of(instance)
        arrived = [rank for rank in self.layout.sequence_ranks[sequence] if rank in ranks]
        return sequence_mismatch(self.layout, self.call_index, sequence, number, arrived)

    # --- messages ---
    def _message_mismatches(
        self, progress: RunProgress, receives: Sequence[int]
    ) -> Iterator[CallMismatch]:
        """The first mismatch of each channel, with the number of later ones."""
        linked = self.linked
        by_channel: dict[int, list[int]] = defaultdict(list)
        for row in receives:
            mate = int(linked.mate[row])
            if progress.posted[row] >= 0 and progress.posted[mate] >= 0:
                channel = self.call_index.channel(int(linked.rank[row]), linked.code_call(row))
                by_channel[channel].append(row)
        for channel, rows in sorted(by_channel.items()):
            receive, send = linked.place(rows[0]), linked.place(int(linked.mate[rows[0]]))
            rank, position, part = receive
            number = self.call_index.ordinal(rank, channel, position, part, sends=False)
            yield message_mismatch(self.layout.program, number, send, receive, len(rows) - 1)


def _mismatch_key(mismatch: CallMismatch) -> object:
    if mismatch.is_collective:
        return (mismatch.sequence, mismatch.number)
    return mismatch.calls


def _with_fault_message(end: RankEnd) -> RankEnd:
    """Findings recognize a fault that the scenario injects by the message "fault"."""
    return end._replace(message="fault") if end.message.endswith("by a fault") else end


def early_exit_ranks(linked: LinkedProgram) -> list[int]:
    """The ranks that fail, are killed, or whose process ends while requests of it are open.

    Requests that change nothing if they are lost do not count (`OpenRequestFilter`).
    """
    found: list[int] = []
    request_filter = OpenRequestFilter(linked)
    for unit in linked.units:
        last = unit.instructions[-1]
        if not isinstance(last, ExitRank) or not last.gone:
            continue
        if last.status != "ended":
            found += unit.ranks
            continue
        open_parts = _requests_open_at_exit(linked, unit)
        if not open_parts:
            continue
        for rank in unit.ranks:
            rows = [linked.base[rank] + part.row for part in open_parts]
            if request_filter.can_any_matter(rows):
                found.append(rank)
    return sorted(found)


def _requests_open_at_exit(linked: LinkedProgram, unit: CompilationUnit) -> list[LaunchPart]:
    if "requests" not in linked.program.features:
        return []
    return requests_open_at_end(unit)


class OpenRequestFilter:
    """Finds the open requests whose loss may change the result of a program.

    The loss of a collective changes nothing if no member waits for it and the calls of all members
    are the same: it is only a leak. A lost message changes which messages the later receives of its
    channel match, so all messages of a channel are judged together.
    """

    def __init__(self, linked: LinkedProgram) -> None:
        self.linked = linked

    def can_matter(self, row: int) -> bool:
        """Whether the loss of a row may change the result."""
        return self.can_any_matter([row])

    def can_any_matter(self, rows: Sequence[int]) -> bool:
        """Whether the loss of one of some rows may change the result."""
        linked = self.linked
        chosen = np.array(rows, dtype=np.int64)
        kind, instance = linked.kind[chosen], linked.instance[chosen]
        is_message = (kind >= _SEND) & (kind <= _RECEIVE)
        if self._channel_matters[linked.channel[chosen[is_message]]].any():
            return True
        is_in_collective = (kind == _COLLECTIVE) & (instance >= 0)
        if not (is_message | is_in_collective).all():
            return True
        instances = instance[~is_message].tolist()
        return bool(instances) and not self._instances.isdisjoint(instances)

    @cached_property
    def _channel_matters(self) -> BoolArray:
        """For each channel of messages, whether a rank waits for one or their sizes may differ."""
        linked = self.linked
        messages = np.flatnonzero((linked.kind >= _SEND) & (linked.kind <= _RECEIVE))
        channel, signature = linked.channel[messages], linked.signature[messages]
        order = np.lexsort((signature, channel))
        channel, signature = channel[order], signature[order]
        changes = (channel[1:] == channel[:-1]) & (signature[1:] != signature[:-1])
        # One more, for rows without a channel (-1).
        matters = np.zeros(linked.channel.max(initial=-1) + 2, dtype=np.bool_)
        matters[channel[1:][changes]] = True
        matters[linked.channel[self._waited_rows]] = True
        if linked.open_boxes.size:
            matters[channel] = True
        return matters

    @cached_property
    def _waited_rows(self) -> IntArray:
        """The rows for which some host waits."""
        found = [np.zeros(0, dtype=np.int64)]
        for unit in self.linked.units:
            own_rows = np.array(sorted(_waited_rows_of(unit)), dtype=np.int64)
            found += [self.linked.base[rank] + own_rows for rank in unit.ranks]
        return np.concatenate(found)

    @cached_property
    def _instances(self) -> set[int]:
        """The collectives for which some member waits, or whose calls may differ."""
        linked = self.linked
        unlike, uneven = suspect_instances(linked)
        waited = linked.instance[self._waited_rows].tolist()
        return {*unlike.tolist(), *uneven.tolist(), *waited}


def _waited_rows_of(unit: CompilationUnit) -> set[int]:
    """The rows for which the hosts of a unit wait; of a batch, those of its messages too."""
    waited: set[int] = set()
    for instruction in unit.instructions:
        if isinstance(instruction, WaitForRows):
            waited.update(instruction.rows)
    launches = [launch for launch in unit.launches if launch.row in waited]
    return waited.union(*([part.row for part in launch.parts] for launch in launches))
