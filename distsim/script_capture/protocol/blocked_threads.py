"""Is a process stuck? Known from what each of its threads waits for, not from how long.

A thread waits for the hub, or for its own process (a private futex without a time-out), or it is
alive: it runs, sleeps, reads, waits for a child. Sources: proc(5) for /proc/PID/task/TID/syscall;
futex(2) for the operation's bits.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

#: Numbers of (recvfrom, futex) by machine: Linux's tables of system calls.
_SYSCALL_NUMBERS: Final = {"x86_64": (45, 202), "aarch64": (207, 98)}
_FUTEX_PRIVATE_FLAG: Final = 128
_FUTEX_COMMAND_MASK: Final = 127  # without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME
_FUTEX_WAIT_COMMANDS: Final = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
#: What a thread that sleeps is in, as `active_system_calls` says it.
SLEEP_CALLS: Final = frozenset({"nanosleep", "clock_nanosleep"})

#: What one look at a process gave: for each thread what it waits in and how often it was switched;
#: None where one is alive.
ProcessSnapshot = tuple[tuple[int, str, str], ...] | None


def is_supported() -> bool:
    """Can standstill be told on this machine?"""
    return platform.machine() in _SYSCALL_NUMBERS and os.path.exists("/proc/self/task")


def process_snapshot(
    pid: int, lines: Collection[int], idle: Collection[int] = ()
) -> ProcessSnapshot:
    """One look. ``lines``: descriptors on which a wait is one for the hub. ``idle``: threads that
    do not count.
    """
    seen = []
    try:
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            if int(task) in idle:
                continue
            folder = Path(f"/proc/{pid}/task/{task}")
            call = (folder / "syscall").read_text()
            if not _is_blocked(call, lines):
                return None
            switches = [
                line
                for line in (folder / "status").read_text().splitlines()
                if "ctxt_switches" in line
            ]
            seen.append((int(task), call, " ".join(switches)))
    except OSError:
        return None
    return tuple(seen)


def _is_blocked(call: str, lines: Collection[int]) -> bool:
    words = call.split()
    if not words or not words[0].isdigit():
        return False
    if int(words[0]) == _SYSCALL_NUMBERS[platform.machine()][0]:
        return int(words[1], 16) in lines
    return _in_private_futex(words) and int(words[4], 16) == 0


def _in_private_futex(words: Sequence[str]) -> bool:
    """Of a line of /proc/PID/task/TID/syscall: a private futex's wait."""
    if words[0] != str(_SYSCALL_NUMBERS[platform.machine()][1]):
        return False
    operation = int(words[2], 16)
    return (
        bool(operation & _FUTEX_PRIVATE_FLAG)
        and operation & _FUTEX_COMMAND_MASK in _FUTEX_WAIT_COMMANDS
    )


def threads_on_timer(pid: int) -> list[int]:
    """Threads that wait for their own process no longer than a time-out."""
    found: list[int] = []
    if not is_supported():
        return found
    with suppress(OSError):
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            words = Path(f"/proc/{pid}/task/{task}/syscall").read_text().split()
            if len(words) > 4 and _in_private_futex(words) and int(words[4], 16):
                found.append(int(task))
    return found


def active_system_calls(pid: int, lines: Collection[int]) -> list[str]:
    """What the threads do that are not stuck, for people."""
    names = {
        0: "read",
        7: "poll",
        35: "nanosleep",
        61: "wait4",
        202: "futex (timed or shared)",
        230: "clock_nanosleep",
        232: "epoll_wait",
        247: "waitid",
        270: "pselect",
        271: "ppoll",
    }
    found = []
    try:
        for task in sorted(os.listdir(f"/proc/{pid}/task"), key=int):
            call = Path(f"/proc/{pid}/task/{task}/syscall").read_text()
            if not _is_blocked(call, lines):
                first = call.split()[0] if call.split() else "gone"
                found.append(
                    names.get(int(first), f"system call {first}") if first.isdigit() else first
                )
    except OSError:
        return found
    return found
