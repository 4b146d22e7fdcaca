"""Ranks that ask again and again whether a key of the store is there: a wait that no system call
shows, for there is a sleep in it.

Where nobody has done anything else since the first of many equal questions, and all others stand,
the answer stays the same for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from distsim.script_capture.protocol.blocked_threads import (
    SLEEP_CALLS,
    ProcessSnapshot,
    active_system_calls,
    process_snapshot,
)

if TYPE_CHECKING:
    from distsim.script_capture.hub.state import PendingReply, RankProcess

#: So many equal questions, over at least so many seconds.
_MIN_REPEATS: Final = 10
_MIN_SECONDS: Final = 1.0


@dataclass
class RepeatedStoreCheck:
    """What a member asked last, and how often in a row."""

    member: RankProcess
    question: PendingReply
    since: float
    count: int = 1

    @property
    def is_over(self) -> bool:
        return self.count >= _MIN_REPEATS and time.monotonic() - self.since > _MIN_SECONDS


class StorePollTracker:
    """Questions since the last thing that anybody did. ``progress`` counts these things."""

    def __init__(self) -> None:
        self._asked: dict[int, RepeatedStoreCheck] = {}
        self._progress = -1

    def heard(self, member: RankProcess, question: PendingReply, progress: int) -> None:
        """A member was told that its keys are not there."""
        if progress != self._progress:
            self._asked, self._progress = {}, progress
        last = self._asked.get(member.pid)
        if last is None or (last.question.keys, last.question.space) != (
            question.keys,
            question.space,
        ):
            self._asked[member.pid] = RepeatedStoreCheck(member, question, time.monotonic())
        else:
            last.count += 1

    def over(self, progress: int) -> dict[int, RepeatedStoreCheck]:
        """By process: who has asked often enough."""
        if progress != self._progress:
            return {}
        return {pid: asked for pid, asked in self._asked.items() if asked.is_over}


def process_snapshots(
    members: Sequence[RankProcess], asked: Mapping[int, RepeatedStoreCheck]
) -> list[ProcessSnapshot]:
    """One look at each; the thread that asks for a key does not count."""
    aside = {
        m.pid: m.idle | {asked[m.pid].question.line.tid} if m.pid in asked else m.idle
        for m in members
    }
    return [process_snapshot(m.pid, m.hub_descriptors(), aside[m.pid]) for m in members]


def all_blocked_or_asleep(members: Iterable[RankProcess]) -> bool:
    """Nobody computes, reads or waits for a child: all stand, or sleep from one look at something
    to the next.
    """
    return all(set(active_system_calls(m.pid, m.hub_descriptors())) <= SLEEP_CALLS for m in members)


def request_held_calls(
    all_members: Iterable[RankProcess], members: Iterable[RankProcess], progress: int
) -> bool:
    """Where somebody waits: ask those who may have made calls and not said them since the last
    thing that anybody did. Was one asked?
    """
    if not any(m.waiting or m.futures for m in all_members):
        return False
    silent = [m for m in members if m.asked_at_progress != progress and m.may_hold_calls()]
    for member in silent:
        member.asked_at_progress = progress
        member.ask("held")
    return bool(silent)
