"""The process around a command: its three streams, Ctrl-C, how much memory it may take, and its
exit status.

From exceptions to exit statuses: 2 bad input, 3 our own fault, 4 the surroundings; a command itself
ends with 0 or 1.
"""

from __future__ import annotations

import codecs
import gc
import os
import signal
import sys
import time
from contextlib import suppress
from io import TextIOWrapper
from typing import TYPE_CHECKING, TextIO

from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.common.errors import DistsimError

#: What a process ends with that Ctrl-C has ended.
INTERRUPTED = 130
#: After Ctrl-C, work that does not end by itself is ended.
INTERRUPT_GRACE_S = 0.4
#: Memory that a command may take whatever is free, and what it leaves to others.
_MIN_MEMORY, _MEMORY_LEFT_FREE = 512 << 20, 0.05
#: Memory kept for the handling of "no more memory", and how often a look is taken (Python fills
#: some 100 MB a second).
_RESERVED_MEMORY, _MEMORY_CHECK_INTERVAL_S = 12 << 20, 0.02
#: Where a control group (version 2, version 1) says its limit and what it holds.
_CGROUP_MEMORY_FILES = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "anon "),
    (
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_rss ",
    ),
)
_ASCII_REPLACEMENTS = {
    "→": "->",
    "←": "<-",
    "×": "x",
    "·": ".",
    "…": "...",
    "–": "-",
    "—": "-",
    "≥": ">=",
    "≤": "<=",
    "µ": "u",
    "μ": "u",
    "±": "+-",
    "⇄": "<->",
    "‘": "'",
    "’": "'",
    "“": '"',
    "”": '"',
    "•": "*",
    "─": "-",
    "━": "-",
    "│": "|",
    "≈": "~",
    "∞": "inf",
    "≠": "!=",
}


def main() -> None:
    """Run the command line and end the process with its exit status."""
    try:
        prepare_streams()
        if not {"--real", "bench", "capture"} & set(
            sys.argv[1:]
        ):  # those start processes, which take what memory they need
            exit_on_interrupt()
            limit_memory()
            gc.set_threshold(
                100_000, 50, 100
            )  # modules and models are made by the ten thousand, and all live on
        status = _run_command()
    except KeyboardInterrupt:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
        os._exit(INTERRUPTED)  # a large heap takes seconds to tear down
    with suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said
    gc.freeze()  # the process ends: nothing is worth a last round of the collector
    sys.exit(status)


def _run_command() -> str | int | None:
    """Run the command; its status, or that of what it failed with."""
    from distsim.cli.application import application
    from distsim.common.errors import RESOURCE_ERRORS, DistsimError, resource_error

    try:
        words = sys.argv[2:] if sys.argv[1:2] == ["--debug"] else sys.argv[1:]
        application(words)(
            prog_name="distsim",
            terminal_width=min(max(console.terminal_columns() or 80, 40), 200) - 2,
        )
    except SystemExit as end:
        return end.code  # typer's own
    except DistsimError as error:
        return _report_error(error)
    except RESOURCE_ERRORS as error:
        return _report_error(resource_error(error, _input_files()))
    except OSError as error:
        return _report_os_error(error)
    except Exception as error:
        return _report_internal_error(error)
    return 0


def _report_error(error: DistsimError) -> int:
    from distsim.common.errors import InternalError

    if isinstance(error, InternalError):
        return _report_internal_error(error)
    console.note(error.render_for_width(console.note_columns()))
    return error.exit_code


def _input_files() -> str:
    """The files that the command was given, to say where."""
    found = [word for word in sys.argv[2:] if not word.startswith("-") and os.path.isfile(word)]
    return ", ".join(found)


def _report_os_error(error: OSError) -> int:
    """Say what the machine refused; what is still to be written to standard output is lost."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    where = f": {error.filename}" if error.filename else ""
    console.note(
        f"error: the system says: {error.strerror or error}{where}\n  help: see that files and streams are there and take data"
    )
    return 4


def _report_internal_error(error: Exception) -> int:
    """Say that distsim is wrong, not the user; the traceback only when it was asked for."""
    console.note(f"distsim failed, and it is not your fault: {type(error).__name__}: {error}")
    if "--debug" in sys.argv[1:2]:
        import traceback

        console.note("".join(traceback.format_exception(error)).rstrip())
    else:
        console.note("help: `distsim --debug …` shows where; please report that with your scenario")
    return 3


# --- streams, Ctrl-C, memory ---
def prepare_streams() -> None:
    """Closed streams get a stand-in, so that no file takes their number; what an encoding lacks
    becomes plain characters.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _replacement_stream(number))
    codecs.register_error("distsim", _ascii_replacement)
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, TextIOWrapper):  # a stream that a test put there
            continue
        with suppress(ValueError, OSError):
            if codecs.lookup(stream.encoding).name != "utf-8" or stream.errors == "strict":
                stream.reconfigure(errors="distsim")


def _replacement_stream(number: int) -> TextIO:
    """A stream for a closed one: reading gives nothing, writing fails as it would there; notes go
    nowhere.
    """
    handle = os.open(os.devnull, os.O_WRONLY if number == 2 else os.O_RDONLY)
    if handle != number:
        os.dup2(handle, number)
        os.close(handle)
    return os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)


def _ascii_replacement(error: UnicodeError) -> tuple[str, int]:
    """Plain characters for those that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(
        _ASCII_REPLACEMENTS.get(c) or c.encode("ascii", "backslashreplace").decode("ascii")
        for c in text
    ), error.end


def exit_on_interrupt() -> None:
    """See to it that Ctrl-C ends this process soon with 130, even where some library keeps the
    exception to itself.

    The interpreter writes the signal's number into a pipe at once; a thread reads it there and ends
    the process after a while. Not for commands that start processes of their own.
    """
    from threading import Thread, current_thread, main_thread

    if current_thread() is not main_thread():
        return
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    Thread(target=_exit_after_interrupt, args=(reader,), daemon=True).start()


def _exit_after_interrupt(reader: int) -> None:
    while True:
        if signal.SIGINT in os.read(reader, 64):
            break
    time.sleep(INTERRUPT_GRACE_S)
    with suppress(OSError):
        if os.isatty(2):
            os.write(2, b"\x1b[?25h")  # a bar may have hidden the cursor
    os._exit(INTERRUPTED)


def limit_memory() -> None:
    """Let this process take the memory that is free, and no more: MemoryError in place of the
    kernel's killer (Linux).
    """
    try:
        import resource
    except ImportError:
        return
    free = _available_bytes()
    if free is None:
        return
    bound = max(_MIN_MEMORY, int(free * (1 - _MEMORY_LEFT_FREE)))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    for other in (soft, hard):
        bound = bound if other == resource.RLIM_INFINITY else min(bound, other)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (bound, hard))
    _raise_before_limit(bound)


def _raise_before_limit(bound: int) -> None:
    """MemoryError in the main thread while there is still memory to handle it with.

    Where the last page is taken by an object of Python, CPython may find no room for the exception
    either, and aborts ("Cannot recover from MemoryErrors while normalizing exceptions"). So a
    thread looks now and then at what is taken.
    """
    import threading

    with suppress(OSError, RuntimeError, ValueError):
        taken = os.open("/proc/self/statm", os.O_RDONLY)
        before = threading.stack_size(256 << 10)  # a stack counts as data
        threading.Thread(
            target=_check_memory, args=(taken, bound - _RESERVED_MEMORY), daemon=True
        ).start()
        threading.stack_size(before)


def _check_memory(taken: int, most: int) -> None:
    """Raise MemoryError in the main thread each time that the process comes to hold more bytes of
    data than `most`.
    """
    import threading

    main, page, was_above = threading.main_thread().ident, os.sysconf("SC_PAGESIZE"), False
    while True:
        time.sleep(_MEMORY_CHECK_INTERVAL_S)
        above = int(os.pread(taken, 128, 0).split()[5]) * page > most
        if above and not was_above:
            import ctypes

            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(main or 0), ctypes.py_object(MemoryError)
            )
        was_above = above


def _available_bytes() -> int | None:
    """What the machine and this process's control group have left."""
    found: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        found.append(_number_after("/proc/meminfo", "MemAvailable:") * 1024)
    for limit, stat, word in _CGROUP_MEMORY_FILES:
        with suppress(OSError, ValueError, StopIteration):
            with open(limit, encoding="ascii") as file:
                most = int(file.read())
            found.append(most - _number_after(stat, word))
    return max(min(found), 0) if found else None


def _number_after(path: str, word: str) -> int:
    """The number behind a word at the start of a line."""
    with open(path, encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith(word)).split()[1])


__all__ = ["main"]
