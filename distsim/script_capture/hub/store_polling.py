"""Recognise ranks that ask again and again whether a key of the store exists.

Such a loop is a wait that no system call shows, because the rank sleeps between two questions. If
no rank has done anything else since the first of many equal questions, and all others are blocked,
then the answer will never change.

The module also has two questions about all processes: are they blocked or asleep, and may they hold
calls that they have not sent yet.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from distsim.script_capture.hub.state import PendingReply, RankProcess
from distsim.script_capture.protocol.blocked_threads import (
    SLEEP_CALLS,
    ProcessSnapshot,
    active_system_calls,
    process_snapshot,
)

#: A loop is recognised after so many equal questions over at least so many seconds.
_MIN_REPEATS: Final = 10
_MIN_SECONDS: Final = 1.0


@dataclass
class RepeatedStoreCheck:
    """The last question of a process, and how often it was asked in a row."""

    process: RankProcess
    question: PendingReply
    since: float
    count: int = 1

    @property
    def is_polling_loop(self) -> bool:
        """Whether the process asked so often and so long that it counts as waiting."""
        return self.count >= _MIN_REPEATS and time.monotonic() - self.since > _MIN_SECONDS

    def is_same_question(self, question: PendingReply) -> bool:
        """Whether this is about the same keys."""
        return (self.question.keys, self.question.space) == (question.keys, question.space)


class StorePollTracker:
    """Unsuccessful questions for keys since the hub's last progress."""

    def __init__(self) -> None:
        self._checks: dict[int, RepeatedStoreCheck] = {}  # by process id
        self._progress = -1

    def add(self, process: RankProcess, question: PendingReply, progress: int) -> None:
        """A process asked, and got the answer that its keys do not exist."""
        if progress != self._progress:
            self._checks = {}
            self._progress = progress
        last = self._checks.get(process.pid)
        if last is not None and last.is_same_question(question):
            last.count += 1
        else:
            self._checks[process.pid] = RepeatedStoreCheck(process, question, time.monotonic())

    def polling_loops(self, progress: int) -> dict[int, RepeatedStoreCheck]:
        """The recognised loops, by process id."""
        if progress != self._progress:
            return {}
        return {pid: check for pid, check in self._checks.items() if check.is_polling_loop}


def process_snapshots(
    processes: Sequence[RankProcess], polling: Mapping[int, RepeatedStoreCheck]
) -> list[ProcessSnapshot]:
    """A snapshot of each process, without idle threads and threads that ask for a key."""
    snapshots = []
    for process in processes:
        ignored = process.idle_threads
        if process.pid in polling:
            ignored |= {polling[process.pid].question.connection.thread_id}
        snapshots.append(process_snapshot(process.pid, process.hub_descriptors(), ignored))
    return snapshots


def all_blocked_or_asleep(processes: Iterable[RankProcess]) -> bool:
    """Whether no thread computes, reads or waits for a child: each is blocked or sleeps."""
    for process in processes:
        active = active_system_calls(process.pid, process.hub_descriptors())
        if not set(active) <= SLEEP_CALLS:
            return False
    return True


def request_held_calls(
    all_processes: Iterable[RankProcess], running: Iterable[RankProcess], progress: int
) -> bool:
    """If some thread waits, ask each process that may hold calls to send them.

    A process is asked only once for the same progress. Returns whether one was asked.
    """
    if not any(process.waiting or process.futures for process in all_processes):
        return False
    silent = [
        process
        for process in running
        if process.asked_at_progress != progress and process.may_hold_calls()
    ]
    for process in silent:
        process.asked_at_progress = progress
        process.notify("held")
    return bool(silent)
