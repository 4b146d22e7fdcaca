"""Is a process stuck? Known from what each of its threads waits for, not from how long.

A thread waits for the hub, or for its own process (a private futex without a time-out), or it is alive: it runs, sleeps, reads, waits
for a child. Sources: proc(5) for /proc/PID/task/TID/syscall; futex(2) for the operation's bits.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Numbers of (recvfrom, futex) by machine: Linux's tables of system calls.
_CALLS: Final = {"x86_64": (45, 202), "aarch64": (207, 98)}
_PRIVATE: Final = 128
_COMMAND: Final = 127  # without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME
_WAITS: Final = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
#: What a thread that sleeps is in, as `alive_in` says it.
SLEEPS: Final = frozenset({"nanosleep", "clock_nanosleep"})

#: What one look at a process gave: for each thread what it waits in and how often it was switched; None where one is alive.
Look = tuple[tuple[int, str, str], ...] | None


def is_known() -> bool:
    """Can standstill be told on this machine?"""
    return platform.machine() in _CALLS and os.path.exists("/proc/self/task")


def look(pid: int, lines: Collection[int], idle: Collection[int] = ()) -> Look:
    """One look. ``lines``: descriptors on which a wait is one for the hub. ``idle``: threads that do not count."""
    seen = []
    try:
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            if int(task) in idle:
                continue
            folder = Path(f"/proc/{pid}/task/{task}")
            call = (folder / "syscall").read_text()
            if not _waits(call, lines):
                return None
            switches = [line for line in (folder / "status").read_text().splitlines() if "ctxt_switches" in line]
            seen.append((int(task), call, " ".join(switches)))
    except OSError:
        return None
    return tuple(seen)


def _waits(call: str, lines: Collection[int]) -> bool:
    words = call.split()
    if not words or not words[0].isdigit():
        return False
    if int(words[0]) == _CALLS[platform.machine()][0]:
        return int(words[1], 16) in lines
    return _in_own_futex(words) and int(words[4], 16) == 0


def _in_own_futex(words: Sequence[str]) -> bool:
    """Of a line of /proc/PID/task/TID/syscall: a private futex's wait."""
    if words[0] != str(_CALLS[platform.machine()][1]):
        return False
    operation = int(words[2], 16)
    return bool(operation & _PRIVATE) and operation & _COMMAND in _WAITS


def on_a_timer(pid: int) -> list[int]:
    """Threads that wait for their own process no longer than a time-out."""
    found: list[int] = []
    if not is_known():
        return found
    with suppress(OSError):
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            words = Path(f"/proc/{pid}/task/{task}/syscall").read_text().split()
            if len(words) > 4 and _in_own_futex(words) and int(words[4], 16):
                found.append(int(task))
    return found


def alive_in(pid: int, lines: Collection[int]) -> list[str]:
    """What the threads do that are not stuck, for people."""
    names = {0: "read", 7: "poll", 35: "nanosleep", 61: "wait4", 202: "futex (timed or shared)", 230: "clock_nanosleep",
             232: "epoll_wait", 247: "waitid", 270: "pselect", 271: "ppoll"}  # fmt: skip
    found = []
    try:
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            call = Path(f"/proc/{pid}/task/{task}/syscall").read_text()
            if not _waits(call, lines):
                first = call.split()[0] if call.split() else "gone"
                found.append(names.get(int(first), f"system call {first}") if first.isdigit() else first)
    except OSError:
        return found
    return found
