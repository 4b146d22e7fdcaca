"""How processes ended, according to a log: Python tracebacks, and torchrun's summary.

An error counts as a *consequence* if its text says that a connection was lost or a wait timed out:
then the cause is with another rank.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, field

from distsim.hang_doctor.model.evidence import MAX_RANKS
from distsim.hang_doctor.model.evidence_records import ProcessEnd, StackFrame
from distsim.hang_doctor.readers.log_context import LogContext

_ROOT_CAUSE = re.compile(r"^Root Cause \(first observed failure\):")
_ROOT_CAUSE_FIELD = re.compile(r"^\s*(rank|exitcode|time|traceback)\s*: (.*)$")
_TRACE_HEAD = re.compile(r"^\s*Traceback \(most recent call last\):\s*$")
#: A line before a traceback that ends no process.
_HARMLESS_TRACEBACK = re.compile(
    r"^\s*(Exception ignored (?:in|on)|--- Logging error ---|Exception in thread |Error in atexit)"
)
_TRACE_FILE = re.compile(r'^\s+File "(.*?)", line (\d+), in (.*)$')
_ERROR = re.compile(
    r"^((?:\w+\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Exit|Timeout|Warning)\b)(?::\s?(.*))?$"
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
            return
        file = _TRACE_FILE.match(line)
        if file is not None:
            trace.frames.append(StackFrame(file[3], file[1], int(file[2])))
            return
        if trace.frames and _is_error(line):
            del self._open[rank]
            self._end_traceback(rank, line.strip(), trace)

    def _end_traceback(self, rank: int | None, error: str, trace: _PythonTraceback) -> None:
        if trace.harmless:
            process = "a process" if rank is None else f"rank {rank}"
            self._log.evidence.add_note(
                f"{process} raised {error[:_MAX_NOTE_LENGTH]}; this ends at most a thread, not the "
                "process"
            )
            return
        is_consequence = any(text in error for text in _CONSEQUENCE_TEXTS)
        if rank is None or rank >= MAX_RANKS:
            if not is_consequence:
                self._log.evidence.add_note(
                    f"a process of unknown rank raised {error[:_MAX_NOTE_LENGTH]}"
                )
            return
        self._log.found.add("tracebacks")
        self._log.ranks.add(rank)
        frames = tuple(reversed(trace.frames))
        self._log.evidence.add_end(
            rank,
            ProcessEnd(
                "raised",
                error[:_MAX_ERROR_LENGTH],
                is_consequence,
                frames,
                source=self._log.source,
            ),
        )


def _is_error(line: str) -> bool:
    """Whether this is the last line of a traceback, which is not indented."""
    return line[:1] not in (" ", "\t") and _ERROR.match(line.strip()) is not None


# --- torchrun ---


class TorchrunSummaryReader:
    """Takes lines of torchrun's summary: which process it saw fail first, and how."""

    def __init__(self, log: LogContext) -> None:
        self._log = log
        #: The fields of the first failure, None outside of a summary.
        self._fields: dict[str, str] | None = None

    def take(self, line: str) -> None:
        """Take the next line."""
        if _ROOT_CAUSE.match(line.strip()):
            self.close()
            self._fields = {}
            return
        if self._fields is None:
            return
        match = _ROOT_CAUSE_FIELD.match(line)
        if match is None:
            return
        self._fields.setdefault(match[1], match[2])
        if match[1] == "traceback":  # the last field
            self.close()

    def close(self) -> None:
        """End the summary and enter the failure, if it is complete."""
        fields, self._fields = self._fields, None
        if fields is None:
            return
        rank = re.match(r"(\d{1,7})", fields.get("rank", ""))
        exit_code = re.match(r"(-?\d+)", fields.get("exitcode", ""))
        if rank is None or exit_code is None or int(rank[1]) >= MAX_RANKS:
            return
        self._log.found.add("torchrun's summary")
        self._log.ranks.add(int(rank[1]))
        self._log.evidence.add_end(
            int(rank[1]), self._first_failure(int(exit_code[1]), fields.get("time", ""))
        )

    def _first_failure(self, exit_code: int, time: str) -> ProcessEnd:
        """``exit_code``: negative for a signal, as in Python's subprocess."""
        if exit_code < 0:
            is_consequence = -exit_code in _CONSEQUENCE_SIGNALS
            text = f"ended first, by signal {-exit_code} (torchrun's summary)"
            return ProcessEnd("killed", text, is_consequence, at=time, source=self._log.source)
        text = f"ended first, with exit status {exit_code} (torchrun's summary)"
        return ProcessEnd("raised", text, False, at=time, source=self._log.source, unexplained=True)
