"""Worker processes that end with the process that started them.

A pool ends its workers when it is closed. If its process is killed, they would wait for further
tasks for minutes or for ever.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

__all__ = ["end_with_parent", "starting_workers"]

_CHECK_INTERVAL_S: Final = 0.5
#: An option `-W` of Python, which new processes inherit.
_NO_TRACKER_WARNING: Final = "ignore:resource_tracker"
_watched_parents: Final[set[int]] = set()


@contextmanager
def starting_workers() -> Iterator[None]:
    """Make worker processes that are started in the block ignore Ctrl-C.

    A terminal sends it to all processes, and only the one that started the others reports it. That
    one ignores it in the block, too: a blocked signal would not do, because starting a process of
    the standard library unblocks it. The resource tracker of a pool frees what an interrupted
    process leaves, without a warning.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGINT, signal.SIG_IGN)
    sys.warnoptions.append(_NO_TRACKER_WARNING)
    try:
        yield
    finally:
        sys.warnoptions.remove(_NO_TRACKER_WARNING)
        signal.signal(signal.SIGINT, earlier)


def end_with_parent(parent: int) -> None:
    """End this process soon after process ``parent``, which must have started it, has ended."""
    if parent in _watched_parents:
        return
    _watched_parents.add(parent)
    threading.Thread(target=_end_without, args=(parent,), daemon=True).start()


def _end_without(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_CHECK_INTERVAL_S)
    os._exit(1)
