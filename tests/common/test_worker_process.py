"""Worker processes end with the process that started them, and leave Ctrl-C to it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from distsim.common.worker_process import starting_workers

pytestmark = pytest.mark.skipif(os.name != "posix", reason="needs POSIX signals")

_WORKER = """
import os, time
from distsim.common.worker_process import end_with_parent
end_with_parent(os.getppid())
print("started", flush=True)
time.sleep(60)
"""
_PARENT = f"""
import subprocess, sys
subprocess.run([sys.executable, "-c", {_WORKER!r}])
"""


def test_a_worker_ends_after_its_parent_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", _PARENT], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"started\n"
        parent.kill()

        # The worker holds the other end of the pipe.
        assert parent.stdout.read() == b""


def test_a_worker_inherits_that_ctrl_c_is_ignored() -> None:
    asks = "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"
    before = signal.getsignal(signal.SIGINT)
    with starting_workers():
        done = subprocess.run([sys.executable, "-c", asks], capture_output=True, text=True)

    assert done.stdout == "True\n"
    assert signal.getsignal(signal.SIGINT) is before
