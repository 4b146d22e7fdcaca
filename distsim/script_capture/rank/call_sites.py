"""Where in the user's own files a call was made, and through which library."""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Final

#: Files of torch and of distsim that only hand a call on; they are no "via".
_PASS_THROUGH_FILES: Final = (
    "distributed_c10d.py",
    "c10d_logger.py",
    "_functional_collectives.py",
    "_ops.py",
    "_contextlib.py",
    "contextlib.py",
)

#: What a file is: the user's, one that only hands a call on, any other.
_OWN, _PASSES, _LIBRARY = range(3)
#: File, line, function and the library's frame in between ("" where the script calls by itself).
CallOrigin = tuple[str, int, str, str]
#: How "via" speaks of the line that a backward pass is for.
BACKWARD_PREFIX: Final = "backward of "
NO_CALL_SITE: Final[CallOrigin] = ("", 0, "", "")


def library_folders() -> tuple[str, ...]:
    """Folders whose files nobody wrote for this program: the standard library, installed packages,
    distsim itself.
    """
    paths = sysconfig.get_paths()
    found = {
        paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib") if name in paths
    }
    found |= {
        *site.getsitepackages(),
        site.getusersitepackages(),
        os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))),
    }
    found |= {
        path
        for path in sys.path
        if path.rstrip(os.sep).endswith(("site-packages", "dist-packages"))
    }
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        found.add(os.path.dirname(torch.__file__))
    return tuple(
        sorted(
            {os.path.join(folder, "") for folder in found}
            | {os.path.realpath(f) + os.sep for f in found}
        )
    )


class CallSiteFinder:
    """Call sites of one process. ``main`` is the user's file wherever it lies."""

    def __init__(self, main: str = "") -> None:
        self.main = os.path.abspath(main) if main else ""
        self._folders = library_folders()
        self._kinds: dict[str, int] = {}
        self._shown: dict[str, str] = {}
        self._places: dict[tuple[object, ...], tuple[CallOrigin, CodeType, CodeType | None]] = {}
        self.forward: Callable[[], CallOrigin] | None = (
            None  # the line whose backward is running in this thread
        )
        self.passes = 0  # backward passes that are running
        self._counts = threading.Lock()
        self._here = os.getcwd()

    def is_own(self, file: str) -> bool:
        """Did the user write this file?"""
        return self._kind(file) == _OWN

    def _kind(self, file: str) -> int:
        known = self._kinds.get(file)
        if known is None:
            path = os.path.abspath(file)
            if path == self.main or not (file.startswith("<") or path.startswith(self._folders)):
                known = _OWN
            else:
                known = (
                    _PASSES if file.endswith(_PASS_THROUGH_FILES) or "distsim" in file else _LIBRARY
                )
            self._kinds[file] = known
        return known

    def where(self, depth: int = 2) -> CallOrigin:
        """The innermost frame of the user's; of a thread that has none, that of the main thread. A
        call of a backward pass says which line of the forward pass it is for."""
        found = self.running(depth + 1)
        made = NO_CALL_SITE
        if self.passes and self.forward is not None:  # torch takes long to say that none is running
            made = self.forward()
        if made is NO_CALL_SITE or made[:3] == found[:3]:
            return found
        file, line, function, via = found
        return (
            file,
            line,
            function,
            f"{via}{', ' if via else ''}{BACKWARD_PREFIX}{made[0]}:{made[1]} {made[2]}",
        )

    @contextmanager
    def backward(self) -> Iterator[None]:
        """While a backward pass runs, in any thread."""
        with self._counts:
            self.passes += 1
        try:
            yield
        finally:
            with self._counts:
                self.passes -= 1

    def running(self, depth: int = 2) -> CallOrigin:
        """As `where`, without the forward pass."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(depth - 1):  # a device's autograd thread has no Python below the call
            frame = frame.f_back if frame is not None else None
        found = self._from(frame)
        if found is NO_CALL_SITE and threading.current_thread() is not threading.main_thread():
            main = sys._current_frames().get(threading.main_thread().ident or 0)
            found = self._from(main) if main is not None else found
        return found

    def _from(self, frame: FrameType | None) -> CallOrigin:
        via: FrameType | None = None
        while frame is not None:
            file = frame.f_code.co_filename
            kind = self._kinds.get(file)
            if kind is None:
                kind = self._kind(file)
            if kind == _OWN:
                return self._place(frame, via)
            if via is None and kind == _LIBRARY:
                via = frame
            frame = frame.f_back
        return NO_CALL_SITE

    def _place(self, frame: FrameType, via: FrameType | None) -> CallOrigin:
        """What is said of a frame: made once, as loops come back to it."""
        code, through = frame.f_code, via.f_code if via is not None else None
        key = (id(code), frame.f_lasti, id(through), via and via.f_lasti)
        known = self._places.get(key)
        if known is None:
            where = (
                self.shown(code.co_filename),
                frame.f_lineno,
                code.co_name,
                _library_caller(via),
            )
            known = self._places[key] = (
                where,
                code,
                through,
            )  # kept, so that no other code gets its number
        return known[0]

    def of_traceback(self, error: BaseException) -> CallOrigin:
        """Where an exception left the user's code."""
        found, trace = NO_CALL_SITE, error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if self.is_own(code.co_filename):
                found = (self.shown(code.co_filename), trace.tb_lineno, code.co_name, "")
            trace = trace.tb_next
        return found

    def shown(self, file: str) -> str:
        """A path as the user would type it from here."""
        known = self._shown.get(file)
        if known is None:
            path = os.path.abspath(file)
            known = self._shown[file] = (
                os.path.relpath(path, self._here) if path.startswith(self._here + os.sep) else path
            )
        return known

    def is_busy(self, frame: FrameType | None) -> bool:
        """Is a frame of the user's on this stack?"""
        return frame is not None and self._from(frame) is not NO_CALL_SITE


def _library_caller(frame: FrameType | None) -> str:
    if frame is None:
        return ""
    parts = frame.f_code.co_filename.split(os.sep)
    start = next(
        (
            k + 1
            for k in range(len(parts) - 1, -1, -1)
            if parts[k] in ("site-packages", "dist-packages")
        ),
        len(parts) - 1,
    )
    return f"{os.sep.join(parts[start:])}:{frame.f_lineno} {frame.f_code.co_name}"


def source_text(file: str, line: int) -> str:
    """The source text of a line, without what surrounds it."""
    return linecache.getline(file, line).strip() if line else ""
