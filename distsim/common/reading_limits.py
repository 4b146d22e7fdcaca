"""Limits of processor time and memory while a file is read that may come from a stranger.

Key idea: nothing inside a process can interrupt C code, such as the hash of a nested tuple or a
regular expression. So the kernel ends the process at the deadline (a timer of processor time whose
signal, SIGPROF, has no handler), and another process reports it: the command line runs each command
in a child process (`distsim.cli.supervision`). Processor time is counted because a loaded machine,
a slow disk or Ctrl-Z must not count against a file.

A program that imports distsim, and a command that starts processes of its own, must not be ended.
They can ask for a *trial* (`trial_reads`): a forked child reads each file first, under the limits,
and ends. The program reads the file only after this trial has succeeded. Files are read twice, but
no result has to pass from one process to the other.

The limits grow with the size of the file. They apply only after a call of `activate` or in a block
of `trial_reads`. macOS enforces the deadline, but no limit on memory.
"""

from __future__ import annotations

import os
import signal
import stat
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from mmap import mmap
from typing import Final, NamedTuple

from distsim.common.errors import UsageError

__all__ = [
    "NOTE_BYTES",
    "LimitNote",
    "activate",
    "current_factor",
    "exceeded_limits",
    "factor_of_user",
    "reading_limits",
    "trial_reads",
]

#: Multiplies both limits; `off` removes them.
_VARIABLE: Final = "DISTSIM_READ_LIMITS"
#: Limits of an empty file, and what each byte adds. The largest need measured was 1 s and 10 MB for
#: each MB (scenarios of 20 000 steps; compressed traces and dumps).
_BASE_CPU_S: Final = 30.0
_CPU_S_PER_BYTE: Final = 60 / 2**20
_BASE_MEMORY_BYTES: Final = 2 << 30
_MEMORY_PER_BYTE: Final = 2000
#: A pipe or a device counts as a file of this size.
_STREAM_BYTES: Final = 64 << 20
#: Bytes of the note for the supervisor.
NOTE_BYTES: Final = 4096
#: The exit status of a trial that has used up its memory.
_OUT_OF_MEMORY: Final = 1


class _Limits(NamedTuple):
    """What reading one input may take."""

    cpu_s: float
    memory_bytes: int

    def exceeded_time(self) -> str:
        return f"{self.cpu_s:.2g} s of processor time"

    def exceeded_memory(self) -> str:
        return f"{self.memory_bytes >> 20} MiB of memory"


class LimitNote(NamedTuple):
    """The file that a process reads, and its deadline; shared with the supervisor.

    The supervisor reads the note when the process has been ended.
    """

    place: str
    cpu_s: float

    def write(self, shared: mmap) -> None:
        text = f"{self.cpu_s}\0{self.place}".encode(errors="replace")[: NOTE_BYTES - 1]
        shared[:] = text.ljust(NOTE_BYTES, b"\0")

    @classmethod
    def read(cls, shared: mmap) -> LimitNote | None:
        """The note, or None if the process was not reading."""
        cpu_s, _, place = bytes(shared).rstrip(b"\0").decode(errors="replace").partition("\0")
        return cls(place, float(cpu_s)) if cpu_s else None


class _State:
    """What applies in this process."""

    factor: float | None = None
    shared: mmap | None = None
    is_reading = False
    tries_first = False


def factor_of_user() -> float | None:
    """The factor that the user has set for the limits (default 1); None: no limits.

    Raises UsageError for anything else.
    """
    text = os.environ.get(_VARIABLE, "1").strip().lower()
    if text == "off":
        return None
    with suppress(ValueError):
        factor = float(text)
        if 0 < factor < 1e6:
            return factor
    raise UsageError(
        f"{_VARIABLE}={text[:40]!r}: expected a positive number",
        "give a factor such as 10, or `off`",
    )


def activate(factor: float | None, shared: mmap | None = None) -> None:
    """Apply the limits in this process from now on, multiplied by ``factor`` (None: do not).

    ``shared``: where the process notes what it reads.
    """
    _State.factor = factor
    _State.shared = shared
    _State.is_reading = False
    _State.tries_first = False


@contextmanager
def trial_reads(factor: float | None) -> Iterator[None]:
    """Read each file in a forked child first. The limits, multiplied by ``factor``, end only it."""
    earlier = _State.factor, _State.tries_first
    # A process with limits of its own needs no trials: somebody watches it.
    if _State.factor is None:
        _State.factor, _State.tries_first = factor, True
    try:
        yield
    finally:
        _State.factor, _State.tries_first = earlier


def current_factor() -> float | None:
    """The factor in this process, for processes that it starts; None if no limits apply."""
    return _State.factor


@contextmanager
def reading_limits(place: str | os.PathLike[str], size: int | None = None) -> Iterator[None]:
    """Limit the processor time and the memory of a block that reads ``place``.

    ``size``: bytes of the input, if ``place`` is not the name of a file. The process ends when its
    time is used up; UsageError is raised when its memory is. In a process with trials, UsageError
    is raised for both, and the block must have no effects outside of this process. An inner block
    changes nothing.
    """
    factor = _State.factor
    if factor is None or _State.is_reading:
        yield
        return
    shown = os.fspath(place)
    if _State.tries_first and size is None:
        _refuse_stream(shown)
    input_bytes = _size_of(shown) if size is None else size
    limits = _Limits(
        factor * (_BASE_CPU_S + _CPU_S_PER_BYTE * input_bytes),
        int(factor * (_BASE_MEMORY_BYTES + _MEMORY_PER_BYTE * input_bytes)),
    )
    block = _after_trial if _State.tries_first else _limited
    _State.is_reading = True
    try:
        with block(shown, limits):
            yield
    finally:
        _State.is_reading = False


class _MemoryExceeded(UsageError):
    """Reading takes more memory than it may."""


@contextmanager
def _limited(place: str, limits: _Limits) -> Iterator[None]:
    """Let this process take only so much from now on; it ends at the deadline."""
    if _State.shared is not None:
        LimitNote(place, limits.cpu_s).write(_State.shared)
    earlier_limit = _lower_memory_limit(limits.memory_bytes)
    signal.setitimer(signal.ITIMER_PROF, limits.cpu_s)
    try:
        yield
    except MemoryError:
        if earlier_limit is None:
            raise
        error = exceeded_limits(place, limits.exceeded_memory())
        raise _MemoryExceeded(error.message, error.remedy) from None
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        if earlier_limit is not None:
            _set_memory_limit(earlier_limit)
        if _State.shared is not None:
            _State.shared[:] = bytes(NOTE_BYTES)


# --- trials ---


@contextmanager
def _after_trial(place: str, limits: _Limits) -> Iterator[None]:
    """Run the block in a child, under limits, and then in this process if the child has ended."""
    child = _fork()
    if child == 0:
        status = 0
        try:
            with _limited(place, limits):
                yield
        except _MemoryExceeded:
            status = _OUT_OF_MEMORY
        finally:
            # Other errors do not matter: the parent meets them as well, when it reads the file.
            os._exit(status)
    _await_trial(child, place, limits)
    yield


def _refuse_stream(path: str) -> None:
    """Raises UsageError for a pipe or a device, which delivers its data only once."""
    with suppress(OSError, ValueError):
        mode = os.stat(path).st_mode
        if not stat.S_ISREG(mode) and not stat.S_ISDIR(mode):
            raise UsageError(
                f"{path} is not a regular file, and its data can be read only once",
                "copy the data to a file, and give that file",
            )


def _fork() -> int:
    with warnings.catch_warnings():
        # Python warns of threads, also of those of numerical libraries, which a trial does not use.
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    return child


def _await_trial(child: int, place: str, limits: _Limits) -> None:
    """Wait for the end of a trial. Raises UsageError if a limit ended it."""
    status = None
    try:
        _, status = os.waitpid(child, 0)
    finally:
        if status is None:  # Ctrl-C
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    if code == -signal.SIGPROF:
        raise exceeded_limits(place, limits.exceeded_time())
    if code:  # without memory, CPython may also abort
        raise exceeded_limits(place, limits.exceeded_memory())


def exceeded_limits(place: str, amount: str) -> UsageError:
    """The error of a file whose reading takes more than ``amount``."""
    return UsageError(
        f"{place}: reading takes more than {amount}: the file is damaged, or made to do harm",
        f"if you trust it, raise the limits of time and memory tenfold: {_VARIABLE}=10",
    )


def _size_of(path: str) -> int:
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return 0
    return status.st_size if stat.S_ISREG(status.st_mode) else _STREAM_BYTES


def _lower_memory_limit(more_bytes: int) -> int | None:
    """Let this process take ``more_bytes`` beyond its present data (Linux).

    Returns the earlier limit, or None if that is lower or the limit cannot be set.
    """
    try:
        import resource

        with open("/proc/self/statm", encoding="ascii") as statm:
            used = int(statm.read().split()[5]) * os.sysconf("SC_PAGESIZE")
    except (ImportError, OSError, ValueError):
        return None
    earlier = resource.getrlimit(resource.RLIMIT_DATA)[0]
    if earlier != resource.RLIM_INFINITY and earlier <= used + more_bytes:
        return None
    return earlier if _set_memory_limit(used + more_bytes) else None


def _set_memory_limit(limit: int) -> bool:
    import resource

    try:
        hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (limit, hard))
    except (ValueError, OSError):
        return False
    return True
