"""Protection of a program that reads untrusted files with the public functions."""

from __future__ import annotations

import os
import threading
from contextlib import AbstractContextManager

from distsim.common.errors import UsageError
from distsim.common.reading_limits import factor_of_user, trial_reads


def limited_reading() -> AbstractContextManager[None]:
    """Limit processor time and memory for reading each file in a block.

    For untrusted files: ``with distsim.limited_reading(): distsim.doctor("dumps/")``. A forked
    process reads each file first. Raises UsageError if it exceeds a limit (SECURITY.md), and in a
    process with several threads.
    """
    if not hasattr(os, "fork"):
        raise UsageError("this system cannot fork a process", "use Linux or macOS")
    if threading.active_count() > 1:
        raise UsageError(
            f"limited_reading cannot fork a process with {threading.active_count()} threads",
            "run the command in a process, for example `distsim doctor --format json dumps/`",
        )
    return trial_reads(factor_of_user())
