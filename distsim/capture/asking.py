"""Ranks that ask again and again whether a key of the store is there: a wait that no system call shows, for there is a sleep in it.

Where nobody has done anything else since the first of many equal questions, and all others stand, the answer stays the same for ever.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from distsim.capture.stall import SLEEPS, Look, alive_in, look

if TYPE_CHECKING:
    from distsim.capture.members import Member, Question

#: So many equal questions, over at least so many seconds.
_TIMES: Final = 10
_SECONDS: Final = 1.0


@dataclass
class Asked:
    """What a member asked last, and how often in a row."""

    member: Member
    question: Question
    since: float
    count: int = 1

    @property
    def is_over(self) -> bool:
        return self.count >= _TIMES and time.monotonic() - self.since > _SECONDS


class Asking:
    """Questions since the last thing that anybody did. ``progress`` counts these things."""

    def __init__(self) -> None:
        self._asked: dict[int, Asked] = {}
        self._progress = -1

    def heard(self, member: Member, question: Question, progress: int) -> None:
        """A member was told that its keys are not there."""
        if progress != self._progress:
            self._asked, self._progress = {}, progress
        last = self._asked.get(member.pid)
        if last is None or (last.question.keys, last.question.space) != (question.keys, question.space):
            self._asked[member.pid] = Asked(member, question, time.monotonic())
        else:
            last.count += 1

    def over(self, progress: int) -> dict[int, Asked]:
        """By process: who has asked often enough."""
        if progress != self._progress:
            return {}
        return {pid: asked for pid, asked in self._asked.items() if asked.is_over}


def looks_at(members: Sequence[Member], asked: Mapping[int, Asked]) -> list[Look]:
    """One look at each; the thread that asks for a key does not count."""
    aside = {m.pid: m.idle | {asked[m.pid].question.line.tid} if m.pid in asked else m.idle for m in members}
    return [look(m.pid, m.remotes(), aside[m.pid]) for m in members]


def only_sleep(members: Iterable[Member]) -> bool:
    """Nobody computes, reads or waits for a child: all stand, or sleep from one look at something to the next."""
    return all(set(alive_in(m.pid, m.remotes())) <= SLEEPS for m in members)


def ask_held(all_members: Iterable[Member], members: Iterable[Member], progress: int) -> bool:
    """Where somebody waits: ask those who may have made calls and not said them since the last thing that anybody did. Was one asked?"""
    if not any(m.waiting or m.futures for m in all_members):
        return False
    silent = [m for m in members if m.asked_at != progress and m.may_hold()]
    for member in silent:
        member.asked_at = progress
        member.ask("held")
    return bool(silent)
