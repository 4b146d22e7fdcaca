"""For every hang of scenarios/zoo: the first finding, the repair in the original report, distsim's
repair, and the size after shrinking.

    python benchmarks/zoo.py             # writes docs/explanation/zoo.md; takes a minute
    python benchmarks/zoo.py --only z17  # prints the rows of these

A repair counts as equally good if it completes on all backends on which the reported repair
completes, in similar simulated time.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from distsim.common.units import show_ns  # noqa: E402
from distsim.repair.search import ScenarioRepair, find_repairs  # noqa: E402
from distsim.repair.shrink import shrink_scenario  # noqa: E402
from distsim.scenario import load  # noqa: E402
from distsim.simulation.check_scenario import check_scenario  # noqa: E402
from distsim.simulation.simulate_scenario import simulate  # noqa: E402

ZOO = ROOT / "scenarios" / "zoo"
KNOWN = json.loads((ROOT / "tests" / "data" / "zoo.json").read_text())
#: The beginning of the first line of a repaired file, before the words for the repair.
_CASE_NUMBER = r"^# (?:[fz]\d\d(?: and [fz]\d\d)?(?:, repaired)?:? )?"
HEAD = """\
# The zoo, case by case

<!-- Written by `python benchmarks/zoo.py`. -->

Each row of the table is a hang that users reported. [scenarios/zoo](../../scenarios/zoo/README.md) has the scenarios and the links to the
reports. The columns are:

- **first finding**: the first finding of `distsim check` on this backend (`tests/checker/test_zoo.py` checks it);
- **repair in the report**: what the authors of the report changed, if the report says it;
- **repair by distsim**: the first repair that `distsim check --fix` proposes;
- **calls**: the number of calls that `distsim shrink` keeps.

The time in brackets behind a repair is the simulated time of the repaired program.

| case | backend | first finding | repair in the report | repair by distsim | calls |
|---|---|---|---|---|---|
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="Run hangs whose names begin with this.")
    only = parser.parse_args().only
    rows, good, largest = [], [], 0
    for stem, known in KNOWN["faulty"].items():
        if not stem.startswith(only):
            continue
        row, as_good, calls = _row(stem, known)
        print(row, flush=True)
        rows.append(row)
        good.append(as_good)
        largest = max(largest, calls)
    told = (
        f"\nThe first finding names the fault in all {len(rows)} cases. In {sum(good)} cases, the repair by distsim is at least as good as "
        f"the repair in the report, or the report has none. In {len(KNOWN['nothing to repair'])} cases, there is nothing to repair. "
        f"`shrink` keeps at most {largest} calls.\n\nIn these reported cases, distsim reports no error:\n\n"
    )
    told += "".join(f"- `{stem}`: {why}\n" for stem, why in KNOWN["nothing to find"].items())
    if not only:
        (ROOT / "docs" / "explanation" / "zoo.md").write_text(HEAD + "\n".join(rows) + "\n" + told)


def _row(stem: str, known: dict[str, Any]) -> tuple[str, bool, int]:
    path, backend = ZOO / f"{stem}.yaml", known["backend"]
    scenario = load(str(path)).model_copy(update={"backend": backend})
    first = check_scenario(scenario).findings[0]
    found = find_repairs(path.read_text(), path.name, backend=backend)
    calls = shrink_scenario(scenario).calls[1]
    people, ours, as_good = (
        _people(known, backend),
        _ours(found, stem),
        stem not in KNOWN["nothing to repair"] and bool(found),
    )
    if people is not None and found:
        as_good = (
            set(people[1]) <= set(found[0].completes) and found[0].makespan_ns <= 1.25 * people[2]
        )
        ours += "" if as_good else " (slower, or on fewer backends)"
    message = first.message.partition("\n")[0].replace(f"{path}:", "line ")
    said = f"{people[0]} ({show_ns(people[2])})" if people is not None else ""
    return (
        f"| `{stem}` | {backend} | {first.code}: {message} | {said} | {ours} | {calls} |",
        as_good,
        calls,
    )


def _people(known: dict[str, Any], backend: str) -> tuple[str, tuple[str, ...], int] | None:
    """The title of the repaired file, the backends on which it completes, and its time."""
    if "people" not in known:
        return None
    path = ZOO / f"{known['people']}.yaml"
    checked = check_scenario(load(str(path)))
    completes = tuple(name for name, o in checked.profiles.items() if o.possible == ("completes",))
    done = simulate(load(str(path)), backend=backend, with_verdict=False, with_values=False)
    return (
        re.sub(_CASE_NUMBER, "", path.read_text().splitlines()[0].removesuffix(".")),
        completes,
        done.makespan_ns,
    )


def _ours(found: tuple[ScenarioRepair, ...], stem: str) -> str:
    if not found:
        return KNOWN["nothing to repair"].get(stem, "none found")
    changes = [words for words in found[0].words if "`expect`" not in words]
    return f"{'; then '.join(changes)} ({show_ns(found[0].makespan_ns)})"


if __name__ == "__main__":
    main()
