"""Calls that will not fit if they meet: known from the text of a program, for who meets whom by
count is fixed.
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


class PostedCall(NamedTuple):
    """A message, a receive or a collective's call: after which stop it is there, where it is
    written, its signature.
    """

    stop: int
    position: int
    part: int
    signature: int
    assume: int = -1  # the sender that a receive relies on


class PotentialMismatches:
    """``sequences``: (sequence, number, (rank, call) of all who make it) of calls that differ in
    signature or have uneven parts; ``pairs``: (channel, number, message, receive) that differ.
    ``bad_sequences`` and ``bad_pairs`` number those that never fit."""

    def __init__(
        self,
        layout: ChannelLayout,
        joins: Mapping[tuple[int, int], list[PostedCall]],
        sends: Mapping[int, list[PostedCall]],
        receives: Mapping[int, list[PostedCall]],
        open_channels: Container[int],
    ) -> None:
        self.layout = layout
        self.where = CallIndex(layout)
        self._judged: dict[tuple[int, int, tuple[int, ...]], CallMismatch | None] = {}
        self.sequences = list(self._sequences(joins))
        both = {
            c: zip(sends[c], receives.get(c, ()), strict=False)
            for c in sorted(sends)
            if c not in open_channels
        }
        self.pairs = [
            (c, k, s, r)
            for c, met in both.items()
            for k, (s, r) in enumerate(met)
            if s.signature != r.signature
        ]
        self.bad_pairs = {(channel, k) for channel, k, _, _ in self.pairs}
        self.bad_sequences = {
            (sequence, n)
            for sequence, n, calls in self.sequences
            if self.judge(sequence, n, tuple(r for r, _ in calls))
        }

    def _sequences(
        self, joins: Mapping[tuple[int, int], list[PostedCall]]
    ) -> Iterator[tuple[int, int, list[tuple[int, PostedCall]]]]:
        uneven = uneven_all_to_alls(self.layout, self.where)
        for sequence in sorted({sequence for sequence, _ in joins}):
            calls = [
                (rank, joins[sequence, rank])
                for rank in self.layout.sequence_ranks[sequence]
                if (sequence, rank) in joins
            ]
            for n in range(max(len(c) for _, c in calls)):
                came = [(rank, c[n]) for rank, c in calls if n < len(c)]
                if len({p.signature for _, p in came}) > 1 or (sequence, n) in uneven:
                    yield sequence, n, came

    def judge(self, sequence: int, n: int, came: tuple[int, ...]) -> CallMismatch | None:
        """What differs among ranks that came to a sequence's n-th call."""
        key = (sequence, n, came)
        if key not in self._judged:
            self._judged[key] = sequence_mismatch(self.layout, self.where, sequence, n, came)
        return self._judged[key]
