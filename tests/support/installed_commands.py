"""Run the main commands of an installed distsim, outside the checkout and without any extra.

    python -m tests.support.installed_commands ENVIRONMENT/bin/distsim

Prints a line for each command, and exits with 1 if one has an unexpected exit status or prints a
traceback. It finds files that are missing in the wheel, and dependencies that only an extra installs.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple


class Expected(NamedTuple):
    words: str
    status: int = 0
    #: A file that the command must write.
    output: str = ""


COMMANDS = (
    Expected("simulate hybrid --trace t.jsonl", output="t.jsonl"),
    Expected("simulate hybrid --format json"),
    Expected("check ring_of_four", 1),
    Expected("render hybrid --view timeline -o timeline.svg", output="timeline.svg"),
    Expected("render hybrid --view dataflow -o dataflow.svg", output="dataflow.svg"),
    Expected("report hybrid -o report.html", output="report.html"),
    Expected("replay t.jsonl"),
    Expected("compare t.jsonl t.jsonl"),
    Expected("doctor t.jsonl"),
    Expected("shrink ring_of_four -o small.yaml", output="small.yaml"),
    Expected("sweep hybrid --grid seed=1,2 -o table.csv", output="table.csv"),
    Expected("plan llama3-8b --gpus 8 --cluster dgx-h100 --global-batch 64"),
    Expected("expand hybrid"),
    Expected("explain all_gather"),
    Expected("clusters"),
    Expected("learn ranks"),
    Expected("new mine.yaml --kind ring", output="mine.yaml"),
    Expected("schema"),
    Expected("demo", output="distsim-demo/ring.html"),
)


def problem(command: Path, expected: Expected, folder: Path) -> str:
    """What is wrong with the run of a command, or an empty text."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [command, *expected.words.split()],
        cwd=folder,
        env={**environment, "NO_COLOR": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != expected.status or "Traceback" in done.stderr:
        return f"exit status {done.returncode}, expected {expected.status}: {done.stderr[-500:]}"
    if expected.output and not (folder / expected.output).is_file():
        return f"did not write {expected.output}"
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", type=Path, help="The installed command.")
    command = parser.parse_args().command.absolute()
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        for expected in COMMANDS:
            found = problem(command, expected, Path(folder))
            failures += bool(found)
            print(f"distsim {expected.words}: {found or 'ok'}", flush=True)
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main())
