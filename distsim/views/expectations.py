"""How scenarios did as tests, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from distsim.expectations import Checked
from distsim.units import show_ns
from distsim.views.tables import folded, table

#: Differences of one file that are printed; the rest is counted.
MOST_DIFFERENCES = 8


def table_of(checked: Sequence[Checked]) -> str:
    """A line per file, and under it what differs."""
    rows = [(one.status, one.file, *_result(one)) for one in checked]
    lines = table(("", "scenario", "verdict", "outcome", "makespan"), rows, left=(0, 1, 2, 3), indent="")
    out = [lines[0]]
    for one, line in zip(checked, lines[1:], strict=True):
        out.append(line)
        for difference in one.differences[:MOST_DIFFERENCES]:
            out += folded(str(difference), "    ", "      ")
        if len(one.differences) > MOST_DIFFERENCES:
            out.append(f"    … and {len(one.differences) - MOST_DIFFERENCES} more")
    return "\n".join(out)


def _result(one: Checked) -> tuple[str, str, str]:
    if one.simulation is None:
        return "", "", ""
    verdict = one.simulation.verdict
    return (verdict.verdict if verdict is not None else "-", one.simulation.outcome, show_ns(one.simulation.makespan_ns))


def summary(checked: Sequence[Checked]) -> str:
    """``12 passed, 1 failed`` and the like."""
    counts = Counter(one.status for one in checked)
    return ", ".join(f"{counts[s]} {s}" for s in ("passed", "failed", "unreadable", "no expect") if counts[s])
