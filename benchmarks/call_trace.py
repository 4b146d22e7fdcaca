"""How much code one cold `distsim simulate` runs: modules, functions, calls between packages.

    python benchmarks/call_trace.py [SCENARIO]

The counts show how much a reader of one simulation has to follow. They are exact and do not depend
on the load of the machine. Module bodies and class bodies are not counted. Python's profiler also
reports each value that a generator of another package yields. These resumptions are not calls that
a reader has to follow, so they are counted separately.
"""

from __future__ import annotations

import argparse
import contextlib
import dis
import io
import os
import sys
from collections import Counter
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = str(ROOT / "distsim") + os.sep
sys.path.insert(0, str(ROOT))


def package_of(file: str) -> str:
    return file.removeprefix(PACKAGE).split(os.sep)[0]


def is_resumption(frame: FrameType) -> bool:
    """Whether a frame continues after a yield.

    Every frame starts and continues with a RESUME instruction, whose lowest bits are 0 at the start.
    """
    instruction = frame.f_code.co_code[frame.f_lasti : frame.f_lasti + 2]
    return dis.opname[instruction[0]] == "RESUME" and instruction[1] & 3 != 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="?", default=str(ROOT / "scenarios" / "hybrid.yaml"))
    scenario = parser.parse_args().scenario
    modules: set[str] = set()
    functions: set[tuple[str, str]] = set()
    crossings: Counter[tuple[str, str]] = Counter()
    resumed = 0

    def note(frame: FrameType, event: str, argument: object) -> None:
        file = frame.f_code.co_filename
        nonlocal resumed
        if event != "call" or not file.startswith(PACKAGE) or frame.f_code.co_name == "<module>":
            return
        modules.add(file)
        functions.add((file, frame.f_code.co_qualname))
        caller = frame.f_back
        if caller is not None and caller.f_code.co_filename.startswith(PACKAGE):
            pair = (package_of(caller.f_code.co_filename), package_of(file))
            if pair[0] != pair[1] and is_resumption(frame):
                resumed += 1
            elif pair[0] != pair[1]:
                crossings[pair] += 1

    from distsim.__main__ import main as command

    sys.argv = ["distsim", "simulate", scenario]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        sys.setprofile(note)
        try:
            command()
        finally:
            sys.setprofile(None)
    print(
        f"{len(modules)} modules, {len(functions)} functions, "
        f"{crossings.total()} calls between packages, {resumed} resumptions of generators"
    )
    for (caller, called), count in crossings.most_common(25):
        print(f"{count:6}  {caller} -> {called}")


if __name__ == "__main__":
    main()
