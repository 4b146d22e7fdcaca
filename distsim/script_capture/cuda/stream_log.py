"""What orders the streams of an emulated device: events, and waits for them.

The CPU has done all work when a call returns, so nothing has to wait here. On a GPU, streams run at
the same time unless they wait for each other. The extension logs each event and each wait, whoever
makes it (Python, FSDP, autograd's C++). The log is read before each call and each counted kernel,
so the steps of the log lie between the right calls.
"""

from __future__ import annotations

import ctypes
import linecache
import re
from collections.abc import Callable
from types import FrameType
from typing import Final, NamedTuple

#: Kinds of steps, by their number in the extension (`StepKind` in device.cpp).
STEP_KINDS: Final = ("record", "block", "sync event", "sync stream", "sync device")
#: The default stream, as the stream of calls that name none.
DEFAULT_STREAM: Final = ""
#: Steps that are read at once.
_CHUNK: Final = 256
#: The name to which a line of Python assigns: of ``self.copies = Stream()`` it is ``copies``.
_ASSIGNED_NAME: Final = re.compile(r"\s*(?:\w+\.)*([A-Za-z]\w*)\s*(?::[^=]*)?=[^=]")
#: Names that mean something else in a scenario.
_RESERVED_NAMES: Final = ("host", "current")

#: Names of streams, by the extension's number.
_names: Final[dict[int, str]] = {0: DEFAULT_STREAM}


class StreamStep(NamedTuple):
    """One entry of the log. ``event`` and ``stream`` mean nothing for kinds without them."""

    kind: str
    event: int
    stream: str


def name_new_stream(stream_id: int, creator: FrameType | None) -> None:
    """Name a stream after the variable that it is assigned to, if the line shows one."""
    name = ""
    if creator is not None:
        line = linecache.getline(creator.f_code.co_filename, creator.f_lineno)
        found = _ASSIGNED_NAME.match(line)
        name = found.group(1) if found else ""
    if not name or name in _RESERVED_NAMES:
        name = f"stream_{stream_id}"
    if name in _names.values():
        name = f"{name}_{stream_id}"
    _names[stream_id] = name


def stream_name(stream_id: int) -> str:
    """The name of a stream. Streams that C++ made are numbered."""
    return _names.setdefault(stream_id, f"stream_{stream_id}")


class StreamLog:
    """The log of this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._size = library.distsim_stream_log_size
        self._current = library.distsim_current_stream
        self._take = library.distsim_take_stream_log
        self._size.restype = self._current.restype = self._take.restype = ctypes.c_int64
        self._take.argtypes = [ctypes.POINTER(ctypes.c_int64), ctypes.c_int64]
        self._steps = (ctypes.c_int64 * (3 * _CHUNK))()
        self._set_on_host_wait = library.distsim_set_on_host_wait
        self._on_host_wait: object = None

    def call_on_host_wait(self, function: Callable[[], None]) -> None:
        """Call this where the host waits for a value, so that the log is read at that line."""
        # C++ has only its address, so it must stay alive.
        self._on_host_wait = ctypes.CFUNCTYPE(None)(function)
        self._set_on_host_wait(self._on_host_wait)

    def current(self) -> str:
        """The stream that is current in this thread."""
        stream_id = int(self._current())
        return stream_name(stream_id) if stream_id > 0 else DEFAULT_STREAM

    def take(self) -> list[StreamStep]:
        """The steps since the last time, in order."""
        steps: list[StreamStep] = []
        while self._size():
            count = int(self._take(self._steps, _CHUNK))
            for start in range(0, 3 * count, 3):
                kind, event, stream_id = self._steps[start : start + 3]
                steps.append(StreamStep(STEP_KINDS[kind], event, stream_name(stream_id)))
        return steps


__all__ = ["DEFAULT_STREAM", "STEP_KINDS", "StreamLog", "StreamStep", "name_new_stream"]
