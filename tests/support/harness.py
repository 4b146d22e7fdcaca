"""What tests and their helpers share: the project's folder, the number of random examples, a
command line's type.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from hypothesis import HealthCheck, settings

#: How long an example takes says nothing: other programs may be running.
UNHURRIED = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
#: A change is judged by the same random programs on every machine; at home each run draws new ones.
settings.register_profile("ci", UNHURRIED, derandomize=True)
settings.register_profile("home", UNHURRIED)
settings.load_profile("ci" if os.environ.get("CI") else "home")
#: How many random examples a property is tried on, as a part of the number beside it:
#: `DISTSIM_DRAWS=20` looks for long.
DRAWS = float(os.environ.get("DISTSIM_DRAWS", "0.25"))
#: For a process that would otherwise hang a run of the tests for ever; no test comes near it,
#: however busy the machine.
LIMIT_S = 900

#: A shell starts what runs in its background with Ctrl-C ignored, which the processes of tests
#: would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[2]
Cli = Callable[..., subprocess.CompletedProcess[str]]


def draws(number: int) -> int:
    """So many random examples of a property, or the part of them that is asked for."""
    return max(10, round(number * DRAWS))


def work(act: Callable[[], object]) -> int:
    """How many function calls an act takes: a measure of work that no other load on the machine can
    change.
    """
    counted = 0

    def count(frame: object, event: str, arg: object) -> None:
        nonlocal counted
        counted += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        act()
    finally:
        sys.setprofile(before)
    return counted


def instructions(act: Callable[[], object]) -> int:
    """How many bytecode instructions an act takes in Python code.

    Like `work`, but it also counts loops that call nothing. It does not see loops inside C functions,
    such as a search in a tuple.
    """
    counted = 0

    def count(frame: FrameType, event: str, arg: object) -> object:
        nonlocal counted
        counted += event == "opcode"
        frame.f_trace_lines = False
        frame.f_trace_opcodes = True
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        act()
    finally:
        sys.settrace(before)
    return counted
