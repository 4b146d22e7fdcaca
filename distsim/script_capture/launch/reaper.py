"""A helper process that cleans up if the hub's process is killed.

Ranks and what they fork die with their parent (prctl(2), PR_SET_PDEATHSIG). Programs that they
start do not, and if the hub's process is killed, no other process could end them. They are
recognised by a variable in their environment.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

#: The environment variable whose value identifies the programs of one capture.
CAPTURE_VARIABLE: Final = "DISTSIM_CAPTURE"
#: How often the helper looks for programs that are left, and the seconds in between.
_MAX_ATTEMPTS: Final = 40
_PAUSE_S: Final = 0.05


class OrphanReaper:
    """The helper process: it runs from here until `release`.

    It waits on a pipe whose other end only the hub's process has. If the pipe is closed without a
    message, that process has died. ``token`` is the value of `CAPTURE_VARIABLE` for the ranks.
    """

    def __init__(self) -> None:
        self.token = f"{os.getpid()}-{os.urandom(4).hex()}"
        read_end, self._write_end = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _reap_when_hub_dies(read_end, self.token)
            finally:
                os._exit(0)
        os.close(read_end)

    def close_in_child(self) -> None:
        """In a rank: close its copy of the pipe, which must end with the hub's process."""
        os.close(self._write_end)

    def release(self) -> None:
        """The hub's process has ended everything itself."""
        with suppress(OSError):
            os.write(self._write_end, b"x")
        os.close(self._write_end)
        with suppress(OSError):
            os.waitpid(self._pid, 0)


def _reap_when_hub_dies(read_end: int, token: str) -> None:
    """The main function of the helper process."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    os.setsid()
    for descriptor in map(int, os.listdir("/proc/self/fd")):
        if descriptor != read_end:
            with suppress(OSError):
                os.close(descriptor)
    if not os.read(read_end, 1):
        _kill_started(token)


def _kill_started(token: str) -> None:
    for _ in range(_MAX_ATTEMPTS):
        for pid in processes_started_by(token):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
        if not processes_started_by(token):
            return


def processes_started_by(token: str) -> list[int]:
    """Programs that the ranks of a capture have started."""
    variable = f"{CAPTURE_VARIABLE}={token}".encode()
    found: list[int] = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if variable in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
