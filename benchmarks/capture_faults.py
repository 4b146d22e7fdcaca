"""Does capture report the mistakes of `planted_faults.py`, and does its first finding say where?

    python benchmarks/capture_faults.py [pattern] [--keep FOLDER]

Each mistake replaces text of a driver. Four questions are counted: is the mistake reported, does
any finding or the position of a waiting rank have the rank and the line, does the first finding
have them, and does its remedy have the words that were judged right. ``--keep`` writes the reports
into a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from capture_programs import DRIVERS, ENVIRONMENT, report_in, result
from planted_faults import FAULTS, Fault


class Answer(NamedTuple):
    """What capture says about one mistake."""

    reported: bool
    named: bool
    first_named: bool
    remedy_right: bool


def driver_of(fault: Fault) -> str:
    return next(word for word in fault.words if word.endswith(".py"))


def report_of(fault: Fault, folder: Path) -> dict[str, Any]:
    """What capture says of the driver with the mistake in it."""
    driver = driver_of(fault)
    text = (DRIVERS / driver).read_text()
    assert text.count(fault.old) == 1, fault.name
    (folder / driver).write_text(text.replace(fault.old, fault.new))
    words = [word for word in fault.words if word != "accelerate"]
    command = [
        *(sys.executable, "-m", "distsim", "capture", "--cuda", "--rerun", *fault.options),
        *("--nproc", str(fault.ranks), "--timeout", "900s", "--format", "json"),
        *("--", "python", *words),
    ]
    extra = {"ACCELERATE_USE_FSDP": "true"} if "accelerate" in fault.words else {}
    ended = subprocess.run(
        command, cwd=folder, env=os.environ | ENVIRONMENT | extra, capture_output=True, text=True
    )
    return report_in(ended.stdout) or {
        "outcome": f"no report: {ended.stderr[-300:]}",
        "verdict": "",
        "findings": [],
        "captured": {"ranks": []},
    }


def places_of(finding: dict[str, Any]) -> set[tuple[int, int]]:
    """Rank and line of each place; a place without a rank belongs to all ranks of the finding."""
    found = set()
    for place in finding["places"]:
        ranks = finding["ranks"] if place["rank"] is None else [place["rank"]]
        found |= {(rank, place["line"]) for rank in ranks}
    return found


def answer(fault: Fault, told: dict[str, Any], folder: Path) -> Answer:
    lines = (folder / driver_of(fault)).read_text().splitlines()

    def is_there(places: set[tuple[int, int]]) -> bool:
        return any(
            rank == fault.rank and line and fault.line in lines[line - 1] for rank, line in places
        )

    findings = told["findings"]
    waiting = {(r["rank"], r["line"]) for r in told["captured"]["ranks"] if r["state"] == "waits"}
    everywhere = waiting.union(*map(places_of, findings))
    first = findings[0] if findings else {"places": [], "ranks": []}
    remedy = " ".join(first.get("help", ()))
    return Answer(
        bool(findings) and result(told) != "ok",
        is_there(everywhere),
        is_there(places_of(first)),
        bool(fault.remedy) and fault.remedy in remedy,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("pattern", nargs="?", default="", help="part of a name or of a driver")
    parser.add_argument("--keep", type=Path)
    given = parser.parse_args()
    chosen = [f for f in FAULTS if re.search(given.pattern, f"{driver_of(f)} {f.name}")]
    answers = []
    for fault in chosen:
        with tempfile.TemporaryDirectory() as scratch:
            told = report_of(fault, Path(scratch))
            answers.append(answer(fault, told, Path(scratch)))
        if given.keep is not None:
            given.keep.mkdir(exist_ok=True, parents=True)
            (given.keep / f"{fault.name}.json").write_text(json.dumps(told, indent=1))
        missed = [name for name, good in answers[-1]._asdict().items() if not good]
        codes = [f["code"] for f in told["findings"]]
        print(
            f"{driver_of(fault)}, {fault.name}: {told['outcome']} {' '.join(codes)}"
            + (f"; not {', '.join(missed)}" if missed else ""),
            flush=True,
        )
    for name in Answer._fields:
        print(f"{name}: {sum(getattr(a, name) for a in answers)} of {len(answers)}")


if __name__ == "__main__":
    main()
