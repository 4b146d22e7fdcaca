"""A program under a reading of the contract, run once without a clock: who is blocked on whom, and
what met and does not fit.

Without a receive from any source the matching is fixed by the program, so every order of events
ends in the same standstill and a single run of the one form is exact (with one, see `explore`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Literal

from distsim.backends import CONTRACT_READINGS
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.call_mismatch import CallMismatch, message_mismatch, sequence_mismatch
from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.checker.reading_result import ReadingResult
from distsim.common.arrays import sorted_union
from distsim.common.records import dataclass
from distsim.findings.final_state import FinalState, RankEnd
from distsim.semantics.classes.representatives import FoldingError
from distsim.semantics.form.completion import CompletionConditions, WithdrawnRow
from distsim.semantics.form.instructions import ExitRank
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.form.mismatches import mismatched_receives, suspect_instances
from distsim.semantics.local.blocked_ranks import blocked_state_of_run as standstill_of
from distsim.semantics.local.rank_clocks import RunProgress
from distsim.semantics.local.run import run_local_clocks

#: What blocks: a send waits for its receive and a collective for all (rendezvous); in rooted
#: collectives a rank leaves when its own data moved (early); a send never blocks and giving ranks
#: leave at once (buffered).
Reading = Literal["rendezvous", "early", "buffered"]


@dataclass(frozen=True)
class MismatchRows:
    """What will not fit if it meets: receives that another message reaches, and instances of
    collectives (`LinkedProgram`).
    """

    receives: tuple[int, ...]
    instances: tuple[int, ...]


class ContractProgram:
    """A program compiled for the contract: once, for all readings."""

    def __init__(self, layout: ChannelLayout, where: CallIndex) -> None:
        self.layout, self.where = layout, where
        self.linked = layout.linked
        self._misfits: MismatchRows | None = None
        self._known: dict[Reading, CompletionConditions] = {}

    def under(self, reading: str) -> LinkedProgram:
        """The same program, with the rules of a reading."""
        return self.linked.under(CONTRACT_READINGS[reading])

    def has_same_result(self, one: Reading, other: Reading, left: ReadingResult) -> bool:
        """What is ``left`` under one reading is so under another: they let the same collectives go,
        and no message waits in vain that the other would let go, be it behind what does not fit."""
        mine, theirs = self._conditions(one), self._conditions(other)
        waits = (
            left.example("end").final_state.unreceived
            or len(left.mismatches) > 1
            or early_exit_ranks(self.linked)
        )
        return mine.early == theirs.early and (
            not waits or bool((mine.ahead == theirs.ahead).all())
        )

    @property
    def misfits(self) -> MismatchRows:
        if self._misfits is None:
            unlike, uneven = suspect_instances(self.linked)
            if self.linked.program.representative_of is not None and (unlike.size or uneven.size):
                raise FoldingError
            receives = mismatched_receives(self.linked)
            self._misfits = MismatchRows(
                tuple(receives.tolist()), tuple(sorted_union(unlike, uneven).tolist())
            )
        return self._misfits

    def run(self, reading: Reading) -> ReadingRun:
        """The program's one run under a reading."""
        return ReadingRun(
            self, run_local_clocks(self.under(reading), self._conditions(reading)), reading
        )

    def _conditions(self, reading: Reading) -> CompletionConditions:
        if reading not in self._known:
            self._known[reading] = CompletionConditions(self.under(reading), None)
        return self._known[reading]


class ReadingRun:
    """A finished run under a reading. ``withdrawn``: rows that some or all did not meet before
    their ranks left.
    """

    def __init__(
        self,
        contract: ContractProgram,
        left: RunProgress,
        reading: Reading,
        withdrawn: tuple[WithdrawnRow, ...] = (),
    ) -> None:
        self.contract, self.left, self.reading, self.withdrawn = contract, left, reading, withdrawn
        self.layout, self.where = contract.layout, contract.where

    def final_state(self) -> FinalState:
        found = standstill_of(self.left)
        return replace(found, ends=tuple(map(_with_fault_message, found.ends)))

    def mismatches(self) -> tuple[CallMismatch, ...]:
        """Of what met and differs that before which nothing else did: the first of each sequence,
        the first of each channel.

        An execution ends for those whose calls don't fit; what they would have done afterwards says
        nothing more.
        """
        misfits = self.contract.misfits
        if not misfits.receives and not misfits.instances:
            return ()
        rows = {row for row, _ in self.withdrawn}
        gone = {int(self.contract.linked.mate[row]) for row in rows} | rows
        misfits = MismatchRows(
            tuple(row for row in misfits.receives if row not in gone), misfits.instances
        )
        found = tuple(self._met(self.left, misfits))
        if len(found) < 2:
            return found
        linked = self.contract.under(self.reading)
        bad = self._confirmed_mismatches(misfits)
        halted = run_local_clocks(
            linked,
            CompletionConditions(
                linked, None, mismatches=(bad.receives, bad.instances), withdrawn=self.withdrawn
            ),
        )
        first = {_mismatch_key(m) for m in self._met(halted, bad)}
        return tuple(m for m in found if _mismatch_key(m) in first) or found

    def _confirmed_mismatches(self, misfits: MismatchRows) -> MismatchRows:
        """Collectives whose signatures differ and that agree all the same, as pairs, are left
        out.
        """
        instances = (
            i for i in misfits.instances if self._judge(i, self._came(None, i)) is not None
        )
        return MismatchRows(misfits.receives, tuple(instances))

    def _met(self, left: RunProgress, misfits: MismatchRows) -> Iterator[CallMismatch]:
        yield from self._collectives(left, misfits.instances)
        yield from self._messages(left, misfits.receives)

    def _collectives(self, left: RunProgress, instances: Sequence[int]) -> Iterator[CallMismatch]:
        """The first of each sequence, with how many later calls of it differ too."""
        came = {i: rows for i in instances if len(rows := self._came(left, i)) > 1}
        by_sequence: dict[int, list[int]] = {}
        for instance in came:
            by_sequence.setdefault(self._sequence(instance), []).append(instance)
        for sequence in sorted(by_sequence):
            those = sorted(by_sequence[sequence], key=self._number)
            for k, instance in enumerate(those):
                found = self._judge(instance, came[instance])
                if found is not None:
                    unlike = [i for i in those[k + 1 :] if self._signatures_differ(came[i])]
                    yield replace(found, later=len(unlike))
                    break

    def _came(self, left: RunProgress | None, instance: int) -> list[int]:
        """The rows of an instance that were posted in a run; without one, all that the program
        has.
        """
        rows = self.contract.linked.rows_of[instance].tolist()
        return [row for row in rows if left is None or left.posted[row] >= 0]

    def _signatures_differ(self, rows: list[int]) -> bool:
        return len(set(self.contract.linked.signature[rows].tolist())) > 1

    def _sequence(self, instance: int) -> int:
        rank, position, _ = self.contract.linked.place(
            int(self.contract.linked.rows_of[instance][0])
        )
        return self.where.sequence(rank, self.layout.program.code_call(rank, position))

    def _number(self, instance: int) -> int:
        rank, position, _ = self.contract.linked.place(
            int(self.contract.linked.rows_of[instance][0])
        )
        return self.where.joins(rank, self._sequence(instance)).index(position)

    def _judge(self, instance: int, rows: list[int]) -> CallMismatch | None:
        ranks = {int(self.contract.linked.rank[row]) for row in rows}
        sequence = self._sequence(instance)
        came = [rank for rank in self.layout.sequence_ranks[sequence] if rank in ranks]
        return sequence_mismatch(self.layout, self.where, sequence, self._number(instance), came)

    def _messages(self, left: RunProgress, receives: Sequence[int]) -> Iterator[CallMismatch]:
        linked, by_channel = self.contract.linked, dict[int, list[int]]()
        for row in receives:
            if left.posted[row] >= 0 and left.posted[int(linked.mate[row])] >= 0:
                channel = self.where.channel(int(linked.rank[row]), linked.code_call(row))
                by_channel.setdefault(channel, []).append(row)
        for channel, rows in sorted(by_channel.items()):
            receive, send = linked.place(rows[0]), linked.place(int(linked.mate[rows[0]]))
            number = self.where.ordinal(receive[0], channel, *receive[1:], sends=False)
            yield message_mismatch(self.layout.program, number, send, receive, len(rows) - 1)


def _mismatch_key(mismatch: CallMismatch) -> object:
    return (mismatch.sequence, mismatch.number) if mismatch.sequence >= 0 else mismatch.calls


def _with_fault_message(end: RankEnd) -> RankEnd:
    """Findings know a fault of the file by this word."""
    return end._replace(message="fault") if end.message.endswith("by a fault") else end


def early_exit_ranks(linked: LinkedProgram) -> list[int]:
    """The ranks that leave before their end."""
    return [
        r
        for r, unit in enumerate(linked.unit_of)
        if isinstance(last := unit.instructions[-1], ExitRank) and last.gone
    ]
