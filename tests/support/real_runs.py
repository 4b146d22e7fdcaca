"""How the tests of real runs start one, and what must be gone after it."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from distsim.real.run import RealRun, RealRunOptions, run_scenario
from distsim.scenario import Scenario, load, loads
from tests.support import warm

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = ROOT / "scenarios"
SECOND = 1_000_000_000


def scenario(name: str) -> Scenario:
    return load(str(SCENARIOS / f"{name}.yaml"))


def written(text: str) -> Scenario:
    return loads(text, file="written.yaml")


def run(what: Scenario, *, timeout_s: float = 20, **wish: Any) -> RealRun:
    """Run a scenario on gloo in processes forked from this one; whatever the simulation says."""
    found, status = run_scenario(
        what,
        RealRunOptions(backend="gloo", force=True, timeout_ns=round(timeout_s * SECOND), **wish),
    )
    assert found is not None
    assert status == (0 if found.outcome == "completes" else 1), (
        found.outcome,
        found.differences,
        found.notes,
    )
    return found


def deaf() -> None:
    """For a process that is to start as a shell's background and nohup would have it: Ctrl-C and a
    closed terminal ignored.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)


def until(true: Callable[[], object], limit_s: float = 300) -> None:
    """Wait until something is true; it must come true in time."""
    end = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.05)


#: Helpers of other tests that live on in this process: multiprocessing's resource tracker and fork
#: server.
_OTHERS: set[int] = set()


def forget_others() -> None:
    """What runs now was not started by the test that begins."""
    _OTHERS.clear()
    _OTHERS.update(_children())


def children() -> set[int]:
    """Processes that the test started and that are still there, the dead that nobody has looked at
    included.
    """
    return _children() - _OTHERS - warm.servers()


def _children() -> set[int]:
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == os.getpid():
            found.add(int(stat.parent.name))
    return found


def folders() -> list[Path]:
    """What runs of this process keep in the temporary folder."""
    return list(Path(tempfile.gettempdir()).glob(f"distsim-run-{os.getpid()}-*"))
