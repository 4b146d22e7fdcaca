"""The process around a command: standard streams, the memory limit, and the exit status.

Exceptions become exit statuses: 2 for bad input, 3 for a bug of distsim, 4 for a fault of the
environment. A command itself ends with 0 or 1. The commands are in `distsim.cli.commands`.
"""

from __future__ import annotations

import codecs
import errno
import gc
import itertools
import os
import signal
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from io import TextIOWrapper
from typing import NamedTuple, NoReturn, TextIO

from distsim.cli.shared import console
from distsim.cli.supervision import INTERRUPTED, continue_in_child
from distsim.common.errors import DistsimError
from distsim.common.reading_limits import factor_of_user, trial_reads

#: Words of a command line that starts processes of its own.
_COMMANDS_WITH_PROCESSES = {"--real", "bench", "capture", "mcp"}
#: Memory that a command may always take, whatever is free.
_MIN_MEMORY = 512 << 20
#: The share of the free memory that is left to other processes.
_MEMORY_LEFT_FREE = 0.05
#: Memory that is kept for handling MemoryError. Python fills about 100 MB in a second, so a check
#: every 20 ms notices the limit in time.
_RESERVED_MEMORY = 12 << 20
_MEMORY_CHECK_INTERVAL_S = 0.02
#: The stack of the checking thread; it counts as data and must be small.
_CHECK_STACK_BYTES = 256 << 10


class _CgroupFiles(NamedTuple):
    """Where a control group reports its memory limit and the memory in use."""

    limit: str
    usage: str
    usage_key: str


_CGROUP_FILES = (
    # version 2, version 1
    _CgroupFiles("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.stat", "anon "),
    _CgroupFiles(
        "/sys/fs/cgroup/memory/memory.limit_in_bytes",
        "/sys/fs/cgroup/memory/memory.stat",
        "total_rss ",
    ),
)
_OUTPUT_OPTIONS = ("-o", "--output", "--trace", "--report")
#: Errors of a name that the user gave, not of the machine.
_NAME_ERRORS = (errno.ENAMETOOLONG, errno.ENOTDIR, errno.EISDIR, errno.ELOOP)
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
        limits = _reading_limits()
    except DistsimError as error:
        sys.exit(_report_error(error))
    except KeyboardInterrupt:
        _end_interrupted()
    with limits:
        run_and_exit()


def _reading_limits() -> AbstractContextManager[None]:
    """Return in a process that may be ended, or else with trials of each file to read."""
    if not hasattr(os, "fork"):
        return nullcontext()
    if not _starts_processes():
        continue_in_child()
        return nullcontext()
    # Commands that start processes handle Ctrl-C and the end of those processes themselves.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    return trial_reads(factor_of_user())


def run_and_exit() -> None:
    """Run the command line in this process, and end it with the exit status."""
    try:
        # Processes that a command starts would inherit the limits.
        if not _starts_processes():
            limit_memory()
            # Tens of thousands of modules and models are made, and all stay alive: frequent
            # collections would find nothing.
            gc.set_threshold(100_000, 50, 100)
        status = _run_command()
    except KeyboardInterrupt:
        _end_interrupted()
    with suppress(ValueError):  # raised outside of the main thread
        # The report is complete, so a late Ctrl-C must not change the exit status.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Skips the last collection before the exit.
    gc.freeze()
    sys.exit(status)


def _end_interrupted() -> NoReturn:
    """End this process after Ctrl-C."""
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    console.stop_progress()
    console.note("interrupted")
    # Without cleaning up: a large heap takes seconds to tear down.
    os._exit(INTERRUPTED)


def _starts_processes() -> bool:
    return not _COMMANDS_WITH_PROCESSES.isdisjoint(sys.argv[1:])


def _run_command() -> str | int | None:
    """Run the command; return its exit status, or that of the error that ended it."""
    from distsim.cli.application import application
    from distsim.common.errors import (
        RESOURCE_ERRORS,
        DistsimError,
        is_out_of_memory,
        resource_error,
    )

    words = sys.argv[2:] if sys.argv[1:2] == ["--debug"] else sys.argv[1:]
    help_width = min(max(console.terminal_columns() or 80, 40), 200) - 2
    try:
        application(words)(prog_name="distsim", terminal_width=help_width)
    except SystemExit as end:  # raised by typer
        if _was_interrupted(end):
            raise KeyboardInterrupt from None
        return end.code
    except DistsimError as error:
        return _report_error(error)
    except Exception as error:
        if isinstance(error, RESOURCE_ERRORS) or is_out_of_memory(error):
            return _report_error(resource_error(error, _input_files()))
        if isinstance(error, OSError):
            return _report_os_error(error)
        return _report_internal_error(error)
    return 0


def _was_interrupted(end: BaseException) -> bool:
    """Whether typer ended the command because of Ctrl-C."""
    cause: BaseException | None = end
    while cause is not None and not isinstance(cause, KeyboardInterrupt):
        cause = cause.__context__
    return cause is not None


def _report_error(error: DistsimError) -> int:
    from distsim.common.errors import InternalError

    if isinstance(error, InternalError):
        return _report_internal_error(error)
    console.note(error.render_for_width(console.note_columns()))
    return error.exit_code


def _input_files() -> str:
    """The files on the command line: one of them caused a resource error."""
    names = [
        word
        for option, word in itertools.pairwise(sys.argv[1:])
        if not word.startswith("-") and option not in _OUTPUT_OPTIONS
    ]
    return ", ".join(name for name in names if os.path.isfile(name))


def _report_os_error(error: OSError) -> int:
    """Report what the operating system refused."""
    # Standard output may be the broken file: its buffer must not fail again at exit.
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    if error.errno in _NAME_ERRORS and error.filename:
        name = os.fsdecode(os.path.basename(error.filename))[-80:]
        console.note(f"{name}: {error.strerror}\n  help: correct the name")
        return 2
    where = f": {error.filename}" if error.filename else ""
    console.note(
        f"error: {error.strerror or error}{where}\n"
        "  help: check that files and streams exist and are writable"
    )
    return 4


def _report_internal_error(error: Exception) -> int:
    """Report a bug of distsim, with the traceback only after ``--debug``."""
    console.note(f"internal error of distsim: {type(error).__name__}: {error}")
    if "--debug" in sys.argv[1:2]:
        import traceback

        console.note("".join(traceback.format_exception(error)).rstrip())
    else:
        console.note(
            "help: run `distsim --debug …` for the traceback, and report it with your scenario"
        )
    return 3


# --- streams ---


def prepare_streams() -> None:
    """Make the standard streams safe to use.

    A closed stream gets a replacement, so that no file that is opened later takes its descriptor.
    Characters that the encoding of a stream lacks are written as ASCII.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            setattr(sys, name, _replacement_stream(number))
    codecs.register_error("distsim", _ascii_replacement)
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, TextIOWrapper):
            # A test has replaced the stream.
            continue
        with suppress(ValueError, OSError):
            if codecs.lookup(stream.encoding).name != "utf-8" or stream.errors == "strict":
                stream.reconfigure(errors="distsim")


def _replacement_stream(number: int) -> TextIO:
    """A stream for the closed descriptor ``number``.

    Reading finds nothing, and writing data fails as it would on the closed stream. Notes to
    standard error vanish.
    """
    mode = os.O_WRONLY if number == 2 else os.O_RDONLY
    handle = os.open(os.devnull, mode)
    if handle != number:
        os.dup2(handle, number)
        os.close(handle)
    return os.fdopen(number, "r" if number == 0 else "w", encoding="utf-8", closefd=False)


def _ascii_replacement(error: UnicodeError) -> tuple[str, int]:
    """An error handler of codecs: ASCII text for characters that an encoding lacks."""
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end]
    return "".join(map(_ascii_text, text)), error.end


def _ascii_text(character: str) -> str:
    replacement = _ASCII_REPLACEMENTS.get(character)
    return replacement or character.encode("ascii", "backslashreplace").decode("ascii")


# --- memory ---


def limit_memory() -> None:
    """Limit this process to the free memory (Linux).

    Exceeding it then raises MemoryError, instead of making the kernel kill some process.
    """
    try:
        import resource
    except ImportError:
        return
    available = _available_bytes()
    if available is None:
        return
    limit = max(_MIN_MEMORY, int(available * (1 - _MEMORY_LEFT_FREE)))
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    for present_limit in (soft, hard):
        if present_limit != resource.RLIM_INFINITY:
            limit = min(limit, present_limit)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    _raise_before_limit()


def _raise_before_limit() -> None:
    """Raise MemoryError in the main thread while there is still memory to handle it.

    If a Python object takes the last page, CPython may find no room for the exception either, and
    aborts ("Cannot recover from MemoryErrors while normalizing exceptions"). So a thread checks
    the memory in use periodically.
    """
    import threading

    with suppress(OSError, RuntimeError, ValueError):
        statm = os.open("/proc/self/statm", os.O_RDONLY)
        stack_size = threading.stack_size(_CHECK_STACK_BYTES)
        threading.Thread(target=_check_memory, args=(statm,), daemon=True).start()
        threading.stack_size(stack_size)


def _check_memory(statm: int) -> None:
    """Raise MemoryError in the main thread each time that its data comes close to the limit.

    ``statm``: a descriptor of /proc/self/statm, whose sixth number is the size of the data in
    pages. The limit is lower while a file is read (`distsim.common.reading_limits`).
    """
    import resource
    import threading

    main_thread = threading.main_thread().ident
    page_bytes = os.sysconf("SC_PAGESIZE")
    was_above = False
    while True:
        time.sleep(_MEMORY_CHECK_INTERVAL_S)
        data_pages = int(os.pread(statm, 128, 0).split()[5])
        limit, _ = resource.getrlimit(resource.RLIMIT_DATA)
        is_above = 0 < limit - _RESERVED_MEMORY < data_pages * page_bytes
        if is_above and not was_above:
            import ctypes

            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(main_thread or 0), ctypes.py_object(MemoryError)
            )
        was_above = is_above


def _available_bytes() -> int | None:
    """The memory that the machine and the control group of this process have left."""
    left: list[int] = []
    with suppress(OSError, ValueError, StopIteration):
        left.append(_number_after("/proc/meminfo", "MemAvailable:") * 1024)
    for files in _CGROUP_FILES:
        # ValueError: the limit is "max".
        with suppress(OSError, ValueError, StopIteration):
            with open(files.limit, encoding="ascii") as file:
                limit = int(file.read())
            left.append(limit - _number_after(files.usage, files.usage_key))
    return max(min(left), 0) if left else None


def _number_after(path: str, key: str) -> int:
    """The number after a key at the start of a line."""
    with open(path, encoding="ascii") as lines:
        return int(next(line for line in lines if line.startswith(key)).split()[1])


__all__ = ["main", "run_and_exit"]
