"""CPU time to start a command: `distsim simulate` of a file with one call, compared with a Python
process that only loads the same libraries.

    python benchmarks/startup.py

Both run alternately. The output shows their median CPU seconds and the ratio, which hardly depends
on the load of the machine. Bytecode files exist, as after an installation.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

TEXT = "name: tiny\nworld: 2\ntensors: {x: {shape: [4]}}\nprogram:\n  - all_reduce: {tensor: x}\n"
#: What any process takes that has these libraries and makes one model.
LIBRARIES = "import numpy, typer, yaml\nfrom pydantic import BaseModel\nclass One(BaseModel):\n    one: int\n"
ROUNDS = 9
_ENVIRONMENT = {
    name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"
}


def measure(arguments: list[str]) -> float:
    """Processor seconds of one process."""
    child = subprocess.Popen(
        [sys.executable, *arguments], stdout=subprocess.DEVNULL, env=_ENVIRONMENT
    )
    _, status, usage = os.wait4(child.pid, 0)
    child.returncode = os.waitstatus_to_exitcode(status)
    if child.returncode:
        sys.exit(f"python {' '.join(arguments)} ended with {child.returncode}")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    ).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tiny.yaml"
        file.write_text(TEXT, encoding="utf-8")
        commands = {
            "distsim simulate": ["-m", "distsim", "simulate", str(file)],
            "its libraries alone": ["-c", LIBRARIES],
        }
        for arguments in commands.values():
            measure(arguments)
        rounds = [
            {name: measure(arguments) for name, arguments in commands.items()}
            for _ in range(ROUNDS)
        ]
    for name in commands:
        sys.stdout.write(f"{name:20} {statistics.median(one[name] for one in rounds):6.3f} s\n")
    ratio = statistics.median(
        one["distsim simulate"] / one["its libraries alone"] for one in rounds
    )
    sys.stdout.write(f"{'ratio':20} {ratio:6.2f}\n")


if __name__ == "__main__":
    main()
