"""Do capture and simulation agree? Runs scenarios through the real worker on the hub of capture, and
the agreed programs as torch scripts.

    python benchmarks/capture_truth.py scenarios [pattern]
    python benchmarks/capture_truth.py cases [pattern] [gloo] [nccl]

The output lists each difference, with its reason if one is known (`tests/support/hub_truth.py`,
`tests/support/case_scripts.py`), and the number of programs that agree.
"""

from __future__ import annotations

import argparse
import re
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

import case_scripts  # noqa: E402
import hub_truth  # noqa: E402
import torch.distributed  # noqa: E402, F401 - the ranks are forked from this process

from tests.support.agreed import load_cases  # noqa: E402


def scenarios(pattern: str) -> int:
    """How many differ without a reason."""
    alike = unexplained = 0
    chosen = hub_truth.scenarios(pattern)
    for name, path in chosen:
        found = hub_truth.compared(path)
        alike += not found
        unexplained += bool(found) and not hub_truth.reason(name)
        if found:
            print(
                f"{name}: {hub_truth.reason(name) or 'UNEXPLAINED'}",
                *found[:4],
                sep="\n    ",
                flush=True,
            )
    print(f"{alike} of {len(chosen)} scenarios agree, {unexplained} differ without a known reason")
    return unexplained


def cases(pattern: str, backends: Sequence[str]) -> int:
    """How many differ without a reason."""
    chosen = [
        case for case in load_cases() if re.search(pattern, f"{case['id']} {case['category']}")
    ]
    unexplained = 0
    with tempfile.TemporaryDirectory() as folder:
        for backend in backends:
            alike = 0
            for case in chosen:
                found = case_scripts.difference(case, backend, Path(folder))
                why = case_scripts.reason(case, backend) if found else ""
                alike, unexplained = alike + (not found), unexplained + bool(found and not why)
                if found:
                    print(
                        f"{case['id']} {case['category']} {backend}: {found}: {why or 'UNEXPLAINED'}",
                        flush=True,
                    )
            print(f"{backend}: {alike} of {len(chosen)} cases agree", flush=True)
    return unexplained


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=["scenarios", "cases"])
    parser.add_argument(
        "pattern",
        nargs="?",
        default="",
        help="Regular expression that selects programs. [default: all]",
    )
    parser.add_argument("backends", nargs="*", help="Backends for cases. [default: gloo and nccl]")
    given = parser.parse_args()
    return (
        scenarios(given.pattern)
        if given.what == "scenarios"
        else cases(given.pattern, given.backends or ["gloo", "nccl"])
    )


if __name__ == "__main__":
    sys.exit(bool(main()))
