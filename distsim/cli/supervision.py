"""The process that watches a command: each command runs in a child process, forked early.

Key idea: a Python process cannot end itself while C code runs, such as the hash of a nested tuple.
The parent can. It imports nothing that the child does not need, and forks before any module of the
command is loaded, which costs a few milliseconds.

- Ctrl-C and other signals are passed on. A child that does not end soon after Ctrl-C is killed.
- If the parent is killed, the child ends too.
- The parent ends with the exit status of the child, or reports why the child was ended.

The child has the terminal, the streams and the process group of the parent, so that colours, width,
pipes and job control work as without a parent.
"""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from mmap import mmap
from types import FrameType
from typing import Final, NoReturn

from distsim.common.reading_limits import (
    NOTE_BYTES,
    LimitNote,
    activate,
    exceeded_limits,
    factor_of_user,
)

__all__ = ["INTERRUPTED", "continue_in_child"]

#: The exit status of a process that Ctrl-C (SIGINT, 2) has ended.
INTERRUPTED: Final = 130
#: The time that a command has after Ctrl-C to end by itself.
_INTERRUPT_GRACE_S: Final = 0.4
_PASSED_ON: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
#: Signals that only a fault in C code sends.
_CRASHES: Final = (
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGBUS,
    signal.SIGILL,
    signal.SIGFPE,
)


def continue_in_child() -> None:
    """Fork. Return in the child; watch it in the parent, and end with its exit status.

    Raises UsageError for an invalid factor of the limits.
    """
    factor = factor_of_user()
    shared = mmap(-1, NOTE_BYTES)
    parent_is_alive, held_by_parent = os.pipe()
    # The shell may have left SIGCHLD ignored; then no exit status would be kept.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # No signal may arrive before both processes have their handlers.
    earlier_mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)
    child = os.fork()
    if child:
        os.close(parent_is_alive)
        _Watch(child, shared).end_like_child(earlier_mask)
    os.close(held_by_parent)
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupt_once)
    _end_with_parent(parent_is_alive)
    activate(factor, shared)
    signal.pthread_sigmask(signal.SIG_SETMASK, earlier_mask)


# --- the child ---


def _interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    """Raise KeyboardInterrupt for the first Ctrl-C only.

    A terminal sends SIGINT to both processes, and the parent passes its own on. The second one must
    not disturb the cleaning up.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if "threading" in sys.modules:
        import threading

        # The threads of a pool fail when its work is dropped, and would print tracebacks.
        threading.excepthook = _ignore_failure
    raise KeyboardInterrupt


def _ignore_failure(failure: object) -> None:
    pass


def _end_with_parent(parent_is_alive: int) -> None:
    """End this process when the other end of a pipe is closed.

    On Linux, the kernel then sends SIGKILL, even while C code runs. Elsewhere a thread waits.
    """
    if os.uname().sysname == "Linux":
        import fcntl

        fcntl.fcntl(parent_is_alive, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(parent_is_alive, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(parent_is_alive, fcntl.F_GETFL)
        fcntl.fcntl(parent_is_alive, fcntl.F_SETFL, flags | os.O_ASYNC)
        if _is_closed(parent_is_alive):  # the parent has ended in the meantime
            os._exit(INTERRUPTED)
        return
    from threading import Thread

    def wait() -> None:
        os.read(parent_is_alive, 1)
        os._exit(INTERRUPTED)

    Thread(target=wait, daemon=True).start()


def _is_closed(pipe: int) -> bool:
    """Whether no process holds the other end of a pipe, into which nothing is written."""
    poll = select.poll()
    poll.register(pipe, select.POLLHUP)
    return bool(poll.poll(0))


# --- the parent ---


class _Watch:
    """Waits for the child, and passes signals on to it."""

    def __init__(self, child: int, shared: mmap) -> None:
        self.child = child
        self.shared = shared
        self.was_interrupted = False

    def end_like_child(self, signal_mask: set[int]) -> NoReturn:
        """Wait for the child, and end with its exit status."""
        for number in _PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self._pass_on)
        signal.signal(signal.SIGALRM, self._kill_child)
        signal.pthread_sigmask(signal.SIG_SETMASK, signal_mask)
        _, status = os.waitpid(self.child, 0)
        code = os.waitstatus_to_exitcode(status)
        # Nothing is buffered in this process, and a fork must not run the handlers at exit.
        os._exit(code if code >= 0 else self._status_after_signal(-code))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        self._signal_child(number)
        if number == signal.SIGINT:
            self.was_interrupted = True
            signal.setitimer(signal.ITIMER_REAL, _INTERRUPT_GRACE_S)

    def _kill_child(self, number: int, frame: FrameType | None) -> None:
        self._signal_child(signal.SIGKILL)

    def _signal_child(self, number: int) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.child, number)

    def _status_after_signal(self, number: int) -> int:
        """The exit status for a child that a signal has ended; reports what it means."""
        if self.was_interrupted:
            _show_cursor()
            return _report_interrupt()
        note = LimitNote.read(self.shared)
        if number == signal.SIGPROF and note is not None:
            return _report_exceeded_deadline(note)
        if number in _CRASHES:
            return _report_crash(number, note)
        if number == signal.SIGKILL:
            return _report_kill()
        _end_by_signal(number)


def _show_cursor() -> None:
    """Show the cursor, which a progress bar may have hidden."""
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")


def _report_interrupt() -> int:
    from distsim.cli.shared import console

    console.note("interrupted")
    return INTERRUPTED


def _report_exceeded_deadline(note: LimitNote) -> int:
    from distsim.cli.shared import console

    error = exceeded_limits(note.place, f"{note.cpu_s:.2g} s of processor time")
    console.note(error.render_for_width(console.note_columns()))
    sys.stderr.flush()
    return error.exit_code


def _report_crash(number: int, note: LimitNote | None) -> int:
    from distsim.cli.shared import console
    from distsim.common.errors import InternalError

    where = f" while it read {note.place}" if note is not None else ""
    console.note(
        f"internal error of distsim: {signal.Signals(number).name} ended the process{where}\n"
        "  help: report it with your input; `python -X faulthandler -m distsim …` shows the place"
    )
    sys.stderr.flush()
    return InternalError.exit_code


def _report_kill() -> int:
    from distsim.cli.shared import console
    from distsim.common.errors import EnvironmentFault

    console.note(
        "error: SIGKILL ended the command\n"
        "  help: if you did not send it, the kernel did because memory ran out: take "
        "fewer ranks, iterations or repeats"
    )
    sys.stderr.flush()
    return EnvironmentFault.exit_code


def _end_by_signal(number: int) -> NoReturn:
    """End this process by the signal that ended the child, so that the caller sees the same."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)
    os._exit(128 + number)
