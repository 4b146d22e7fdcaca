"""A process that outlives the hub's by a moment: where that one is killed, nobody else could end
what its ranks have started.

Ranks and what they fork die with their parent (prctl(2), PR_SET_PDEATHSIG). Programs that they
start do not; they are known by a word in their environment.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

#: The variable whose value tells a capture's programs from all others.
CAPTURE_VARIABLE = "DISTSIM_CAPTURE"
#: Looks at what is left, and seconds between two.
_LOOKS, _PAUSE_S = 40, 0.05


class OrphanReaper:
    """Starts with the first line of a capture, ends with `let_go`. ``token``: what its ranks have
    as `CAPTURE_VARIABLE`.
    """

    def __init__(self) -> None:
        self.token = f"{os.getpid()}-{os.urandom(4).hex()}"
        reads, self._writes = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                _reap_when_hub_dies(reads, self.token)
            finally:
                os._exit(0)
        os.close(reads)

    def close_in_child(self) -> None:
        """In a rank: the pipe must end with the hub alone."""
        os.close(self._writes)

    def let_go(self) -> None:
        """The hub has ended everything itself."""
        with suppress(OSError):
            os.write(self._writes, b"x")
        os.close(self._writes)
        with suppress(OSError):
            os.waitpid(self._pid, 0)


def _reap_when_hub_dies(reads: int, token: str) -> None:
    for name in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(name, signal.SIG_IGN)
    os.setsid()
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd != reads:
            with suppress(OSError):
                os.close(fd)
    if not os.read(reads, 1):
        _kill_started(token)


def _kill_started(token: str) -> None:
    for _ in range(_LOOKS):
        for pid in processes_started_by(token):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(_PAUSE_S)
        if not processes_started_by(token):
            return


def processes_started_by(token: str) -> list[int]:
    """Programs that were started from a capture's ranks."""
    word, found = f"{CAPTURE_VARIABLE}={token}".encode(), list[int]()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if word in (folder / "environ").read_bytes().split(b"\0"):
                found.append(int(folder.name))
    return found
