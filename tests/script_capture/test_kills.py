"""However a capture is ended, nothing of it is left: no process, socket, shared memory, file.

``pytest -m slow tests/script_capture/test_kills.py`` ends twenty at random; the seed is printed, or
taken from DISTSIM_SEED.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("torch")

from distsim.script_capture.protocol.blocked_threads import is_supported

pytestmark = pytest.mark.skipif(not is_supported(), reason="hang detection reads Linux's /proc")

#: Ranks that compute, exchange large tensors through shared memory, have threads, forked workers
#: and children of another program.
BUSY = """\
import multiprocessing, subprocess, sys, threading, time
import torch, torch.distributed as dist

dist.init_process_group("gloo")
print("here", flush=True)
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"])
worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
worker.start()
threading.Thread(target=time.sleep, args=(600,), daemon=True).start()
for step in range(10_000):
    dist.all_reduce(torch.ones(1 << 18))
    time.sleep(0.002)
"""
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL)
MARK = "DISTSIM_TEST_OF_KILLS"


def marked(token: str) -> set[int]:
    """Processes that have a token in their environment."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={token}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def sockets(pid: int) -> set[str]:
    """Those of a hub."""
    return {
        line.split()[-1]
        for line in Path("/proc/net/unix").read_text().splitlines()
        if f"@distsim-{pid}-" in line
    }


def until(true: Callable[[], object], limit_s: float = 120) -> bool:
    end = time.monotonic() + limit_s
    while not true():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def left_after(
    folder: Path, token: str, how: signal.Signals, *, of_rank: bool, after_s: float
) -> list[str]:
    """Start a capture, end it or one of its ranks at a moment, and look at what is left."""
    (folder / "train.py").write_text(BUSY)
    (folder / "tmp").mkdir(exist_ok=True)
    environment = {**os.environ, MARK: token, "TMPDIR": str(folder / "tmp")}
    command = [
        sys.executable,
        "-m",
        "distsim",
        "capture",
        "--nproc",
        "3",
        "--",
        "python",
        "train.py",
    ]
    started = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    assert started.stdout is not None
    if of_rank or after_s > 0:
        started.stdout.readline()
    time.sleep(abs(after_s))
    others = sorted(marked(token) - {started.pid})
    pids = {str(pid) for pid in (started.pid, *others)}
    os.kill(random.choice(others) if of_rank and others else started.pid, how)
    started.stdout.close()
    ended = until(lambda: started.poll() is not None, 20 if of_rank else 120)
    if of_rank and not ended:  # the others go on without it for ever
        started.terminate()
    until(lambda: not marked(token), 30)
    found = [
        f"process {pid}: {Path(f'/proc/{pid}/cmdline').read_bytes()!r}" for pid in marked(token)
    ]
    found += [f"socket {name}" for name in sockets(started.pid)]
    found += [
        f"shared memory {name}"
        for name in os.listdir("/dev/shm")
        if pids & set(re.findall(r"\d+", name))
    ]
    found += [f"file {path}" for path in (folder / "tmp").rglob("*")]
    for pid in marked(token):
        os.kill(pid, signal.SIGKILL)
    started.wait()
    return found


def test_a_killed_capture_leaves_nothing_behind(tmp_path: Path):
    assert left_after(tmp_path, "one", signal.SIGKILL, of_rank=False, after_s=0.2) == []


@pytest.mark.slow
def test_twenty_captures_ended_at_random_moments_leave_nothing_behind(tmp_path: Path):
    seed = int(os.environ.get("DISTSIM_SEED", time.time_ns() % 10**6))
    sys.stdout.write(f"seed {seed}\n")
    random.seed(seed)
    found = []
    for k in range(20):
        how, of_rank = random.choice(SIGNALS), random.random() < 0.25
        after_s = random.uniform(-2, 2)  # before the ranks are there, or after
        left = left_after(
            tmp_path,
            f"{seed}-{k}",
            signal.SIGKILL if of_rank else how,
            of_rank=of_rank,
            after_s=after_s,
        )
        found += [
            f"{k} {how.name} {'rank' if of_rank else 'all'} {after_s:.2f}: {one}" for one in left
        ]
    assert found == []
