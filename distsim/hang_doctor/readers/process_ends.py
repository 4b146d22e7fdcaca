"""How processes ended, according to a log: Python tracebacks, and torchrun's summary.

An error counts as a *consequence* if its text says that a connection was lost or a wait timed out:
then the cause is with another rank.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field, replace

from distsim.hang_doctor.model.evidence import MAX_RANKS
from distsim.hang_doctor.model.evidence_records import ProcessEnd, StackFrame
from distsim.hang_doctor.model.phrases import signal_name
from distsim.hang_doctor.readers.log_context import LogContext, local_seconds

_ROOT_CAUSE = re.compile(r"^Root Cause \(first observed failure\):")
_FAILURE_HEAD = re.compile(r"^\[\d{1,7}\]:$")
_FAILURE_FIELD = re.compile(r"^\s{0,16}(rank|exitcode|time|traceback)\s{0,16}: (.*)$")
_TRACE_HEAD = re.compile(r"^\s*Traceback \(most recent call last\):\s*$")
#: A line before a traceback that ends no process.
_HARMLESS_TRACEBACK = re.compile(
    r"^\s*(Exception ignored (?:in|on)|--- Logging error ---|Exception in thread |Error in atexit)"
)
_TRACE_FILE = re.compile(r'^\s+File "([^"]*)", line (\d+), in (.*)$')
_ERROR = re.compile(
    r"^((?:\w+\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Warning)\b)(?::\s?(.*))?$"
)
_LAUNCHER_TIME = re.compile(r"^\d{4}-(\d\d)-(\d\d)_(\d\d):(\d\d):(\d\d)")
#: Gloo's errors begin with a place in its sources (``gloo/common/logging.h``: ``MakeString``).
_GLOO_ERROR = re.compile(
    r"(?:(\w{1,40}(?:Error|Exception)): |what\(\):\s{1,4}|^\s{0,8})"
    r"(\[[^\]\s]{0,200}gloo/[^\]\s]{1,200}:\d{1,6}\] .{1,400})"
)
#: Texts of errors that follow from a wait, or from another rank's end.
_CONSEQUENCE_TEXTS = (
    "Watchdog caught collective operation timeout",
    "Timed out waiting",
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Wait timeout",
    "Application timeout caused pair closure",
    "NCCL communicator was aborted",
    "ncclRemoteError",
    "remote process exited",
    "monitoredBarrier",
    "recv, 0 bytes",
    "Read error",
    "store->get",
    "wait timeout after",
    "ProcessGroupNCCL's watchdog",
    "collective timeout",
    "Detected mismatch between collectives",
    "SIGTERM",
    "SignalException",
    "ChildFailedError",
    "DistNetworkError",
    "Process group watchdog thread terminated",
    "KeyboardInterrupt",
    "NCCL timeout",
    "BrokenPipeError",
    "DistStoreError",
    "Stop_waiting response",
    "ConnectionResetError",
    "Resource temporarily",
)
#: Signals by which a launcher, a user or torch's watchdog ends a process. They explain no hang.
_CONSEQUENCE_SIGNALS = (signal.SIGABRT, signal.SIGTERM, signal.SIGINT)
_MAX_ERROR_LENGTH = 300
_MAX_NOTE_LENGTH = 160


# --- tracebacks ---


@dataclass
class _PythonTraceback:
    """A Python traceback that is being read. ``harmless``: it ends no process."""

    frames: list[StackFrame] = field(default_factory=list)
    harmless: bool = False


class TracebackReader:
    """Takes lines, and enters the error at the end of each traceback as the end of a process.

    The lines of several ranks may be interleaved, so each rank has a traceback of its own.
    """

    def __init__(self, log: LogContext) -> None:
        self._log = log
        self._open: dict[int | None, _PythonTraceback] = {}

    def take(self, line: str, rank: int | None) -> None:
        """Take the next line, which belongs to this rank (None if unknown)."""
        if _HARMLESS_TRACEBACK.match(line):
            self._open[rank] = _PythonTraceback(harmless=True)
            return
        trace = self._open.get(rank)
        if _TRACE_HEAD.match(line):
            # The line before announced it as harmless.
            is_harmless = trace is not None and trace.harmless and not trace.frames
            self._open[rank] = _PythonTraceback(harmless=is_harmless)
            return
        if trace is None:
            self._take_bare_error(line, rank)
            return
        file = _TRACE_FILE.match(line)
        if file is not None:
            trace.frames.append(StackFrame(file[3], file[1], int(file[2])))
            return
        if trace.frames and _is_error(line):
            del self._open[rank]
            self._end_traceback(rank, line.strip(), trace)

    def _take_bare_error(self, line: str, rank: int | None) -> None:
        """An error of Gloo without its traceback, as C++ or a title of an issue shows it."""
        if "gloo/" not in line:
            return
        match = _GLOO_ERROR.search(line)
        if match is None:
            return
        error = match[1] or "RuntimeError"
        self._end_traceback(rank, f"{error}: {match[2]}".strip(), _PythonTraceback())

    def _end_traceback(self, rank: int | None, error: str, trace: _PythonTraceback) -> None:
        if trace.harmless:
            process = "a process" if rank is None else f"rank {rank}"
            self._log.evidence.add_note(
                f"{process} raised {error[:_MAX_NOTE_LENGTH]}; this ends at most a thread, not the "
                "process"
            )
            return
        is_consequence = any(text in error for text in _CONSEQUENCE_TEXTS)
        self._log.found.add("tracebacks")
        frames = tuple(reversed(trace.frames))
        end = ProcessEnd(
            "raised", error[:_MAX_ERROR_LENGTH], is_consequence, frames, source=self._log.source
        )
        if rank is None or rank >= MAX_RANKS:
            self._log.evidence.add_end(None, end)
            return
        self._log.ranks.add(rank)
        self._log.evidence.add_end(rank, end)


def _is_error(line: str) -> bool:
    """Whether this is the last line of a traceback, which is not indented."""
    return line[:1] not in (" ", "\t") and _ERROR.match(line.strip()) is not None


# --- torchrun ---


class TorchrunSummaryReader:
    """Takes lines of torchrun's summary: which processes failed, which one first, and how.

    Format: ``ChildFailedError.format_msg`` in ``torch/distributed/elastic/multiprocessing/errors``.
    The time is that of the process's error file. Without such a file it is the time at which
    torchrun noticed the end, which is at most its polling interval later. Torchrun ends the other
    ranks by SIGTERM at once, and by SIGKILL only 30 s later (``SubprocessContext._close``).
    """

    def __init__(self, log: LogContext) -> None:
        self._log = log
        #: Whether the lines are inside a summary.
        self._is_inside = False
        #: Whether the current failure is the first that torchrun saw.
        self._is_first = False
        #: The fields of the current failure, None outside of one.
        self._fields: dict[str, str] | None = None

    def take(self, line: str) -> None:
        """Take the next line."""
        stripped = line.strip()
        if stripped == "Failures:" or _ROOT_CAUSE.match(stripped):
            self.close()
            self._is_inside = True
            self._is_first = stripped != "Failures:"
            return
        if not self._is_inside:
            return
        if _FAILURE_HEAD.match(stripped):
            self._end_failure()
            self._fields = {}
            return
        match = _FAILURE_FIELD.match(line)
        if match is None or self._fields is None:
            return
        self._fields.setdefault(match[1], match[2])
        if match[1] == "traceback":  # the last field
            self._end_failure()

    def close(self) -> None:
        """End the summary and enter the failure that is open."""
        self._end_failure()
        self._is_inside = False

    def _end_failure(self) -> None:
        """Enter the failure, if it is complete."""
        fields, self._fields = self._fields, None
        if fields is None:
            return
        rank = re.match(r"(\d{1,7})", fields.get("rank", ""))
        exit_code = re.match(r"(-?\d{1,4})(?: \(pid: (\d{1,9})\))?", fields.get("exitcode", ""))
        if rank is None or exit_code is None or int(rank[1]) >= MAX_RANKS:
            return
        self._log.found.add("torchrun's summary")
        self._log.ranks.add(int(rank[1]))
        end = _end_of_failure(int(exit_code[1]), self._is_first)
        self._log.evidence.add_end(
            int(rank[1]),
            replace(
                end,
                time_s=time_of_launcher(fields.get("time", "")),
                pid=int(exit_code[2] or 0),
                source=self._log.source,
            ),
        )


def _end_of_failure(exit_code: int, is_first: bool) -> ProcessEnd:
    """``exit_code``: negative for a signal, as in Python's subprocess."""
    first = " first" if is_first else ""
    if exit_code >= 0:
        text = f"ended{first}, with exit status {exit_code} (torchrun's summary)"
        # Torchrun ended the ranks that it did not see fail first.
        return ProcessEnd("raised", text, not is_first, seen_first=is_first, unexplained=True)
    number = -exit_code
    text = f"ended{first}, by {signal_name(number)} (torchrun's summary)"
    follows = number in _CONSEQUENCE_SIGNALS
    return ProcessEnd("killed", text, follows, seen_first=is_first, signal=number)


def time_of_launcher(text: str) -> float | None:
    """A local time of torchrun's summary in seconds; None if it is damaged."""
    match = _LAUNCHER_TIME.match(text.strip())
    return local_seconds(*map(int, match.groups())) if match is not None else None
