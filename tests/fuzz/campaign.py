"""Run fuzz targets on mutants, in processes with limits, and collect what fails.

A process runs many cases, because forking for each would take longer than the cases. It notes the
number of its case in shared memory. When it ends early, the case is recorded, and another process
goes on with the next one.
"""

from __future__ import annotations

import mmap
import os
import resource
import signal
import struct
import sys
import tempfile
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Final, NamedTuple

from tests.fuzz.mutations import mutant
from tests.fuzz.targets import TARGETS, Target

CPU_S: Final = 10.0
MEMORY_BYTES: Final = 1 << 30
#: Cases that one process runs, so that what it keeps does not add up.
_CASES_PER_PROCESS: Final = 200


class Failure(NamedTuple):
    target: str
    seed: int
    case: int
    reason: str
    data: bytes

    def __str__(self) -> str:
        return f"{self.target} {self.seed} {self.case}: {self.reason}"


def input_of(target: str, seed: int, case: int, seeds: list[bytes] | None = None) -> bytes:
    """The input of a case."""
    draw = Random(f"{target} {seed} {case}")
    valid = draw.choice(TARGETS[target].seeds() if seeds is None else seeds)
    return mutant(valid, TARGETS[target].suffix, draw)


def run(
    target: str, seed: int, cases: int, first: int = 0, found: Callable[[Failure], None] = print
) -> list[Failure]:
    """The failures among so many cases; ``found`` is called with each at once."""
    seeds = TARGETS[target].seeds()
    failures = []
    case, end = first, first + cases
    while case < end:
        stop = min(case + _CASES_PER_PROCESS, end)
        inputs = {number: input_of(target, seed, number, seeds) for number in range(case, stop)}
        last, reason = _run_in_process(TARGETS[target], inputs)
        if reason:
            failures.append(Failure(target, seed, last, reason, inputs[last]))
            found(failures[-1])
        case = last + 1
    return failures


def _run_in_process(target: Target, inputs: dict[int, bytes]) -> tuple[int, str]:
    """The last case that ran, and why the process ended there ("": it ran all cases)."""
    current = mmap.mmap(-1, 8)
    with tempfile.TemporaryFile() as report:
        child = os.fork()
        if child == 0:
            _run_cases(target, inputs, current, report.fileno())
        _, status = os.waitpid(child, 0)
        report.seek(0)
        text = report.read().decode(errors="replace")
    (case,) = struct.unpack("q", current[:])
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        too_long = number == signal.SIGPROF
        reason = f"more than {CPU_S} s" if too_long else signal.Signals(number).name
        return case, reason
    return case, text


def _run_cases(target: Target, inputs: dict[int, bytes], current: mmap.mmap, report: int) -> None:
    """In the child: run the cases up to the first failure."""
    status = 1
    try:
        # Refusals of large jobs print nothing here, but the commands may.
        quiet = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(quiet, stream)
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY_BYTES, MEMORY_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for case, data in inputs.items():
            current[:] = struct.pack("q", case)
            signal.setitimer(signal.ITIMER_PROF, CPU_S)
            target.fuzz(data)
        status = 0
    except BaseException as error:
        text = "".join(traceback.format_exception(error)[-12:])
        os.write(report, text.encode(errors="replace"))
    finally:
        os._exit(status)


def save(failure: Failure, folder: Path) -> Path:
    """Write the input of a failure, as a file for the corpus."""
    path = folder / failure.target / f"{failure.seed}-{failure.case}"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(failure.data)
    return path


def show(text: object) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
