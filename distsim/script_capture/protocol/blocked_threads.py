"""Decide from /proc whether a process is blocked, without waiting for a timeout.

What matters is the system call that each thread is in, not how long it has been in it. A thread is
blocked if it waits for the hub, or for its own process (a private futex without a timeout). Any
other thread is active: it runs, sleeps, reads, or waits for a child.

Sources: proc(5) for /proc/PID/task/TID/syscall; futex(2) for the bits of the operation.
"""

from __future__ import annotations

import os
import platform
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, NamedTuple


class _SyscallNumbers(NamedTuple):
    recvfrom: int
    futex: int


#: By machine, from Linux's tables of system calls.
_SYSCALL_NUMBERS: Final = {
    "x86_64": _SyscallNumbers(recvfrom=45, futex=202),
    "aarch64": _SyscallNumbers(recvfrom=207, futex=98),
}
_FUTEX_PRIVATE_FLAG: Final = 128
_FUTEX_COMMAND_MASK: Final = 127  # without FUTEX_PRIVATE_FLAG and FUTEX_CLOCK_REALTIME
_FUTEX_WAIT_COMMANDS: Final = (0, 9)  # FUTEX_WAIT, FUTEX_WAIT_BITSET
#: Names that `active_system_calls` uses for a thread that sleeps.
SLEEP_CALLS: Final = frozenset({"nanosleep", "clock_nanosleep"})
#: System calls of x86_64 by number.
_SYSCALL_NAMES: Final = {
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

#: For each thread: its id, its system call with arguments, and how often it was switched. Two
#: equal snapshots mean that no thread ran in between. None if a thread is active.
ProcessSnapshot = tuple[tuple[int, str, str], ...] | None


def is_supported() -> bool:
    """Whether blocked threads can be recognised on this machine."""
    return platform.machine() in _SYSCALL_NUMBERS and os.path.exists("/proc/self/task")


def process_snapshot(
    pid: int, hub_descriptors: Collection[int], idle: Collection[int] = ()
) -> ProcessSnapshot:
    """The threads of a process if all are blocked, else None.

    A thread that reads from one of ``hub_descriptors`` waits for the hub. Threads in ``idle`` are
    ignored.
    """
    threads = []
    try:
        for thread_id in _thread_ids(pid):
            if thread_id in idle:
                continue
            folder = Path(f"/proc/{pid}/task/{thread_id}")
            system_call = (folder / "syscall").read_text()
            if not _is_blocked(system_call, hub_descriptors):
                return None
            status = (folder / "status").read_text().splitlines()
            switches = [line for line in status if "ctxt_switches" in line]
            threads.append((thread_id, system_call, " ".join(switches)))
    except OSError:  # the process, or one of its threads, has ended meanwhile
        return None
    return tuple(threads)


def _thread_ids(pid: int) -> list[int]:
    return sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))


def _is_blocked(system_call: str, hub_descriptors: Collection[int]) -> bool:
    words = system_call.split()
    if not words or not words[0].isdigit():  # "running", or empty for a thread that has ended
        return False
    if int(words[0]) == _SYSCALL_NUMBERS[platform.machine()].recvfrom:
        descriptor = int(words[1], 16)
        return descriptor in hub_descriptors
    return _waits_in_private_futex(words) and not _has_timeout(words)


def _waits_in_private_futex(words: Sequence[str]) -> bool:
    """Whether a line of /proc/PID/task/TID/syscall is a wait in a futex of its own process."""
    if words[0] != str(_SYSCALL_NUMBERS[platform.machine()].futex):
        return False
    operation = int(words[2], 16)
    is_private = bool(operation & _FUTEX_PRIVATE_FLAG)
    return is_private and operation & _FUTEX_COMMAND_MASK in _FUTEX_WAIT_COMMANDS


def _has_timeout(futex_words: Sequence[str]) -> bool:
    """The fourth argument of futex(2) points to its timeout."""
    return int(futex_words[4], 16) != 0


def threads_on_timer(pid: int) -> list[int]:
    """Threads that wait for their own process, but with a timeout."""
    found: list[int] = []
    if not is_supported():
        return found
    with suppress(OSError):
        for thread_id in _thread_ids(pid):
            words = Path(f"/proc/{pid}/task/{thread_id}/syscall").read_text().split()
            if len(words) > 4 and _waits_in_private_futex(words) and _has_timeout(words):
                found.append(thread_id)
    return found


def active_system_calls(pid: int, hub_descriptors: Collection[int]) -> list[str]:
    """The system calls, by name, of the threads that are not blocked."""
    found: list[str] = []
    try:
        for thread_id in _thread_ids(pid):
            system_call = Path(f"/proc/{pid}/task/{thread_id}/syscall").read_text()
            if not _is_blocked(system_call, hub_descriptors):
                found.append(_syscall_name(system_call))
    except OSError:
        return found
    return found


def _syscall_name(system_call: str) -> str:
    words = system_call.split()
    if not words:
        return "gone"
    if not words[0].isdigit():
        return words[0]
    return _SYSCALL_NAMES.get(int(words[0]), f"system call {words[0]}")
