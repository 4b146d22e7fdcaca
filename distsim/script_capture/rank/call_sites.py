"""Find where in the user's own files a call was made, and through which library.

The search walks up the stack to the innermost frame of a file that the user wrote. It runs for each
call of the script, so kinds of files and places of code are cached.
"""

from __future__ import annotations

import linecache
import os
import site
import sys
import sysconfig
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Final

from distsim.script_capture.folders import PACKAGE_FOLDER
from distsim.script_capture.protocol.message_types import (
    BACKWARD_PREFIX,
    NO_CALL_SITE,
    CallOrigin,
)
from distsim.script_capture.rank.line_trace import StackFrame

#: Files of torch and of distsim that only forward a call, and are never its ``via``.
_FORWARDING_FILES: Final = (
    "distributed_c10d.py",
    "c10d_logger.py",
    "_functional_collectives.py",
    "_ops.py",
    "_contextlib.py",
    "contextlib.py",
)
_PACKAGE_FOLDERS: Final = ("site-packages", "dist-packages")


# Kinds of files. Plain constants, because looking up an enum's member costs more for each frame.
_USER: Final = "user"
_FORWARDING: Final = "forwarding"
_LIBRARY: Final = "library"


def library_folders() -> tuple[str, ...]:
    """Folders of files that were not written for this program.

    The standard library, installed packages, and distsim itself; each with and without symbolic
    links.
    """
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    folders = {paths[name] for name in names if name in paths}
    folders.update(site.getsitepackages())
    folders.add(site.getusersitepackages())
    folders.add(os.path.dirname(PACKAGE_FOLDER))
    folders.update(p for p in sys.path if p.rstrip(os.sep).endswith(_PACKAGE_FOLDERS))
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        folders.add(os.path.dirname(torch.__file__))
    as_named = {os.path.join(folder, "") for folder in folders}
    resolved = {os.path.realpath(folder) + os.sep for folder in folders}
    return tuple(sorted(as_named | resolved))


class CallSiteFinder:
    """Call sites of one process. The user's files are ``main_files``, and others outside libraries.

    ``forward_line`` returns the forward line whose backward is running in this thread.
    ``backward_passes`` counts the backward passes that are running in the process. ``on_call`` gets
    the stack of each call: the frames of the user's files and of libraries except torch, the
    outermost first.
    """

    def __init__(self, main: str = "") -> None:
        self.main_files = {os.path.abspath(main)} if main else set()
        self.forward_line: Callable[[], CallOrigin] | None = None
        self.on_call: Callable[[Sequence[StackFrame]], None] | None = None
        self.backward_passes = 0
        self._backward_lock = threading.Lock()
        self._library_folders = library_folders()
        self._working_folder = os.getcwd()
        self._kinds: dict[str, str] = {}
        self._shown: dict[str, str] = {}
        #: Origins by code position. The code objects are kept too, because a key has only their
        #: ids, which Python would give to new objects.
        self._origins: dict[tuple[object, ...], tuple[CallOrigin, CodeType, CodeType | None]] = {}

    def add_main(self, file: str) -> None:
        """Count a file as the user's, wherever it lies."""
        self.main_files.add(os.path.abspath(file))
        self._kinds.clear()

    def is_own(self, file: str) -> bool:
        """Whether the user wrote this file."""
        return self._kind(file) == _USER

    def _kind(self, file: str) -> str:
        known = self._kinds.get(file)
        if known is None:
            known = self._kinds[file] = self._determine_kind(file)
        return known

    def _determine_kind(self, file: str) -> str:
        path = os.path.abspath(file)
        is_library = file.startswith("<") or path.startswith(self._library_folders)
        if path in self.main_files or not is_library:
            return _USER
        if file.endswith(_FORWARDING_FILES) or path.startswith(PACKAGE_FOLDER):
            return _FORWARDING
        return _LIBRARY

    def where(self, depth: int = 2) -> CallOrigin:
        """The innermost frame of the user's, ``depth`` frames up or more.

        In a thread that has none, that of the main thread. A call of a backward pass also names the
        line of the forward pass that it is for.
        """
        found = self.running(depth + 1)
        if self.on_call is not None:
            self.on_call(self._stack(sys._getframe(1)))
        forward = NO_CALL_SITE
        # The count comes first: torch takes long to say that no backward is running.
        if self.backward_passes and self.forward_line is not None:
            forward = self.forward_line()
        if forward is NO_CALL_SITE or forward[:3] == found[:3]:
            return found
        origin = f"{BACKWARD_PREFIX}{forward.file}:{forward.line} {forward.function}"
        via = f"{found.via}, {origin}" if found.via else origin
        return found._replace(via=via)

    @contextmanager
    def backward(self) -> Iterator[None]:
        """While a backward pass runs, in any thread."""
        with self._backward_lock:
            self.backward_passes += 1
        try:
            yield
        finally:
            with self._backward_lock:
                self.backward_passes -= 1

    def running(self, depth: int = 2) -> CallOrigin:
        """As `where`, without the forward pass."""
        frame: FrameType | None = sys._getframe(1)
        for _ in range(depth - 1):
            if frame is None:  # autograd's thread of a device has no Python below the call
                break
            frame = frame.f_back
        found = self._innermost_own(frame)
        if found is NO_CALL_SITE and threading.current_thread() is not threading.main_thread():
            main_frame = sys._current_frames().get(threading.main_thread().ident or 0)
            if main_frame is not None:
                found = self._innermost_own(main_frame)
        return found

    def _stack(self, frame: FrameType | None) -> list[StackFrame]:
        if self._innermost_own(frame) is NO_CALL_SITE:
            frame = sys._current_frames().get(threading.main_thread().ident or 0)
        found = []
        while frame is not None:
            file = frame.f_code.co_filename
            if self._kind(file) != _FORWARDING and f"{os.sep}torch{os.sep}" not in file:
                found.append(StackFrame(file, frame.f_lineno, frame.f_code.co_name))
            frame = frame.f_back
        return found[::-1]

    def _innermost_own(self, frame: FrameType | None) -> CallOrigin:
        library_frame: FrameType | None = None
        while frame is not None:
            file = frame.f_code.co_filename
            kind = self._kinds.get(file)  # inlined `_kind`: this is the hot loop
            if kind is None:
                kind = self._kind(file)
            if kind == _USER:
                return self._origin(frame, library_frame)
            if library_frame is None and kind == _LIBRARY:
                library_frame = frame
            frame = frame.f_back
        return NO_CALL_SITE

    def _origin(self, frame: FrameType, library_frame: FrameType | None) -> CallOrigin:
        """The origin of a frame: made once, since loops come back to the same place."""
        code = frame.f_code
        library_code = None
        library_position = None
        if library_frame is not None:
            library_code = library_frame.f_code
            library_position = library_frame.f_lasti
        key = (id(code), frame.f_lasti, id(library_code), library_position)
        known = self._origins.get(key)
        if known is None:
            via = _library_caller(library_frame)
            origin = CallOrigin(self.shown(code.co_filename), frame.f_lineno, code.co_name, via)
            known = self._origins[key] = (origin, code, library_code)
        return known[0]

    def of_traceback(self, error: BaseException) -> CallOrigin:
        """The user's innermost line that an exception passed."""
        found = NO_CALL_SITE
        trace = error.__traceback__
        while trace is not None:
            code = trace.tb_frame.f_code
            if self.is_own(code.co_filename):
                file = self.shown(code.co_filename)
                found = CallOrigin(file, trace.tb_lineno, code.co_name, "")
            trace = trace.tb_next
        return found

    def shown(self, file: str) -> str:
        """A path as the user would type it in the working folder."""
        known = self._shown.get(file)
        if known is None:
            known = os.path.abspath(file)
            if known.startswith(self._working_folder + os.sep):
                known = os.path.relpath(known, self._working_folder)
            self._shown[file] = known
        return known

    def is_busy(self, frame: FrameType | None) -> bool:
        """Whether a frame of the user's is on this stack."""
        return frame is not None and self._innermost_own(frame) is not NO_CALL_SITE


def _library_caller(frame: FrameType | None) -> str:
    """The frame of a library, its file from the package's folder on."""
    if frame is None:
        return ""
    return f"{package_path(frame.f_code.co_filename)}:{frame.f_lineno} {frame.f_code.co_name}"


def package_path(file: str) -> str:
    """The path of a library's file from the package's folder on."""
    parts = file.split(os.sep)
    start = len(parts) - 1
    for k in range(len(parts) - 1, -1, -1):
        if parts[k] in _PACKAGE_FOLDERS:
            start = k + 1
            break
    return os.sep.join(parts[start:])


def source_text(file: str, line: int) -> str:
    """The stripped source text of a line; "" for line 0, which means no place."""
    return linecache.getline(file, line).strip() if line else ""
