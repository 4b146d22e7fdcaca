"""What the runs of `nccl.sh` came to, beside what the profile said: `python traces/nccl_table.py FOLDER`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

#: Longer than this inside isend, and the host waited for somebody.
_WAITED_NS = 500_000_000


def main(folder: Path) -> None:
    """A line for each run, in the order in which they were made."""
    rules = sorted(folder.glob("*.rule"), key=lambda path: path.stat().st_mtime_ns)
    rows = [("run", "rule", "predicted", "found", "verdict")]
    rows += [(rule.stem, rule.read_text().strip(), *judged(folder, rule.stem)) for rule in rules]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        sys.stdout.write("  ".join(f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
    verdicts = [row[4] for row in rows[1:]]
    asked = [verdict for row, verdict in zip(rows[1:], verdicts, strict=True) if row[1]]
    sys.stdout.write(
        f"\n{asked.count('as predicted')} of {len(asked)} rules as predicted, {asked.count('OTHERWISE')} otherwise, "
        f"{asked.count('left open')} left open by the profile, {sum(v.startswith('not run') for v in verdicts)} not run\n"
    )


def judged(folder: Path, name: str) -> tuple[str, str, str]:
    """(predicted, found, verdict) of one run."""
    try:
        report = json.loads((folder / f"{name}.json").read_text())
    except (OSError, ValueError):
        said = (folder / f"{name}.txt").read_text().strip().splitlines() if (folder / f"{name}.txt").exists() else []
        return "", "", f"not run: {said[0] if said else 'nothing was said'}"
    predicted, found = report["simulated"]["outcome"], report["outcome"]
    if predicted == "undefined":
        return predicted, found, "left open"
    waits = _host_waits(folder, name)
    agrees = bool(report["agrees"]) and not any(value["state"] == "differs" for value in report["values"])
    if waits is None:
        return predicted, found, "as predicted" if agrees else "OTHERWISE"
    texts = ["isend waits" if one else "isend returns" for one in waits]
    same = agrees and texts[0] == texts[1]
    return f"{predicted}, {texts[0]}", f"{found}, {texts[1]}", "as predicted" if same else "OTHERWISE"


def _host_waits(folder: Path, name: str) -> tuple[bool, bool] | None:
    """Whether the host waited in its first isend: as simulated, for real. None of runs that don't ask."""
    if not name.startswith("first_isend"):
        return None
    from distsim.scenario import load
    from distsim.simulation import simulate
    from distsim.trace_io import read_trace

    init = name.rpartition("_")[2]
    real = read_trace(folder / f"{name}.jsonl")
    report: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    simulated = simulate(load(report["file"], [f"options.init={init}"]), backend=report["backend"]).run.trace
    return _waits(simulated), _waits(real)


def _waits(trace: Any) -> bool:
    isend = trace.ops("isend")
    return bool((trace["returned_ns"] - trace["posted_ns"])[isend][0] > _WAITED_NS)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
