"""Find calls that will mismatch if they meet.

Outside of any-source receives the program's text fixes which calls meet (the k-th call meets the
k-th call), so the candidates are known before any execution. Whether the ranks reach those calls
is a question for `terminal_states`.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from typing import NamedTuple

from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.call_mismatch import (
    CallMismatch,
    sequence_mismatch,
    uneven_all_to_alls,
)
from distsim.checker.matching.channel_layout import ChannelLayout

#: `PostedCall.assumed_source` of a call that does not rely on a sender.
NO_ASSUMED_SOURCE = -1


class PostedCall(NamedTuple):
    """A message, a receive or a rank's call of a collective.

    ``stop`` is the number of stops the rank passes before it posts the call; ``position`` and
    ``part`` identify the call. ``assumed_source`` is the sender that a receive relies on.
    """

    stop: int
    position: int
    part: int
    signature: int
    assumed_source: int = NO_ASSUMED_SOURCE


class DifferingSequence(NamedTuple):
    """The calls of one number on a sequence, as (rank, call); they may mismatch."""

    sequence: int
    number: int
    calls: list[tuple[int, PostedCall]]


class DifferingPair(NamedTuple):
    """The message and the receive of one number on a channel; their signatures differ."""

    channel: int
    number: int
    message: PostedCall
    receive: PostedCall


class PotentialMismatches:
    """The calls of a program that mismatch, or may mismatch, if they meet.

    ``sequences``: collective calls whose signatures differ or whose all-to-all splits are uneven.
    ``pairs``: messages and receives that differ, on channels that share no any-source receive.
    ``bad_sequences`` and ``bad_pairs`` number those that never match, even if all ranks arrive.
    """

    def __init__(
        self,
        layout: ChannelLayout,
        joins: Mapping[tuple[int, int], list[PostedCall]],
        sends: Mapping[int, list[PostedCall]],
        receives: Mapping[int, list[PostedCall]],
        any_source_channels: Container[int],
    ) -> None:
        self.layout = layout
        self.call_index = CallIndex(layout)
        self._known: dict[tuple[int, int, tuple[int, ...]], CallMismatch | None] = {}
        self.sequences = list(self._differing_sequences(joins))
        self.pairs: list[DifferingPair] = []
        for channel in sorted(sends):
            if channel not in any_source_channels:
                self.pairs += _differing_pairs(channel, sends[channel], receives.get(channel, []))
        self.bad_pairs = {(pair.channel, pair.number) for pair in self.pairs}
        self.bad_sequences: set[tuple[int, int]] = set()
        for sequence, number, calls in self.sequences:
            everyone = tuple(rank for rank, _ in calls)
            if self.mismatch_of(sequence, number, everyone):
                self.bad_sequences.add((sequence, number))

    def _differing_sequences(
        self, joins: Mapping[tuple[int, int], list[PostedCall]]
    ) -> Iterator[DifferingSequence]:
        uneven = uneven_all_to_alls(self.layout, self.call_index)
        for sequence in sorted({sequence for sequence, _ in joins}):
            calls_by_rank = {
                rank: joins[sequence, rank]
                for rank in self.layout.sequence_ranks[sequence]
                if (sequence, rank) in joins
            }
            longest = max(len(calls) for calls in calls_by_rank.values())
            for number in range(longest):
                meeting = [
                    (rank, calls[number])
                    for rank, calls in calls_by_rank.items()
                    if number < len(calls)
                ]
                signatures = {call.signature for _, call in meeting}
                if len(signatures) > 1 or (sequence, number) in uneven:
                    yield DifferingSequence(sequence, number, meeting)

    def mismatch_of(
        self, sequence: int, number: int, arrived: tuple[int, ...]
    ) -> CallMismatch | None:
        """How the calls of one number differ among the ranks that have arrived, if they do."""
        key = (sequence, number, arrived)
        if key not in self._known:
            self._known[key] = sequence_mismatch(
                self.layout, self.call_index, sequence, number, arrived
            )
        return self._known[key]


def _differing_pairs(
    channel: int, sends: list[PostedCall], receives: list[PostedCall]
) -> Iterator[DifferingPair]:
    pairs = zip(sends, receives, strict=False)
    for number, (message, receive) in enumerate(pairs):
        if message.signature != receive.signature:
            yield DifferingPair(channel, number, message, receive)
