"""How many faulty programs `distsim check --fix` repairs.

    python benchmarks/repairs.py agreed [--only dl0001,…] [--texts DIR]
    python benchmarks/repairs.py programs [--only WORD] [--texts DIR]
    python benchmarks/repairs.py sets [--only h] [--texts DIR]

`agreed`: the programs of tests/data/agreed that deadlock or mismatch, each as a scenario. A program
counts as repaired if a changed file checks `ok` under every reading and completes under the
program's backend.

`programs`: benchmarks/repair_programs.yaml, programs with the repair that a person would make. The
first proposal is right if every rank then makes the same calls as after that repair. It must not
remove data that correct ranks exchange.

`sets`: benchmarks/repair_sets, programs whose authors did not know the code that proposes repairs.
A first proposal counts if every rank then makes the same calls as in the program that the author
meant. Other proposals may be as good, so this number is a lower bound.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from distsim.checker.wording import call_words  # noqa: E402
from distsim.operations.core.resolved_call import ResolvedCall  # noqa: E402
from distsim.program.lower import lower  # noqa: E402
from distsim.program.model import Program  # noqa: E402
from distsim.repair.exchanged_data import ExchangedData  # noqa: E402
from distsim.repair.search import ScenarioRepair, find_repairs  # noqa: E402
from distsim.scenario import loads  # noqa: E402
from tests.support.agreed import load_cases, scenario_of  # noqa: E402

FAULTS = ("deadlock", "mismatch")
PROGRAMS = ROOT / "benchmarks" / "repair_programs.yaml"
SETS = ROOT / "benchmarks" / "repair_sets"
#: Per rank, the calls that it makes; and the options of the process groups.
_Calls = tuple[tuple[tuple[Any, ...], ...], str]


class RepairTrial(NamedTuple):
    """A program of the benchmark after a search. ``fixes`` are the proposals, best first."""

    kind: str
    name: str
    faulty: str
    is_right: bool
    loses_data: bool
    fixes: tuple[ScenarioRepair, ...]
    seconds: float

    @property
    def words(self) -> str:
        """What the first proposal does."""
        return "; then ".join(self.fixes[0].words) if self.fixes else "NONE"


# --- programs with the repair that a person would make ---
def trials(only: str = "") -> Iterator[RepairTrial]:
    """Search for a repair of each program whose kind or name contains ``only``."""
    for entry in yaml.safe_load(PROGRAMS.read_text(encoding="utf-8")):
        if only in entry["kind"] or only in entry["name"]:
            yield _trial(entry)


def trials_of_sets(only: str = "") -> Iterator[RepairTrial]:
    """Search for a repair of each program of the sets whose file name starts with ``only``."""
    for path in sorted(SETS.glob(f"{only}*.yaml")):
        for entry in yaml.safe_load(path.read_text(encoding="utf-8")):
            yield _trial_of(path.stem, entry["name"], entry["faulty"], [entry["fixed"]])


def _trial(entry: dict[str, Any]) -> RepairTrial:
    faulty = entry["faulty"]
    wanted = [_replaced(faulty, edits) for edits in entry["repairs"]]
    return _trial_of(entry["kind"], entry["name"], faulty, wanted)


def _trial_of(kind: str, name: str, faulty: str, wanted: list[str]) -> RepairTrial:
    begun = time.process_time()
    fixes = find_repairs(faulty, "program.yaml")
    seconds = time.process_time() - begun
    is_right = loses_data = False
    if fixes:
        is_right = _calls_of(fixes[0].text) in map(_calls_of, wanted)
        loses_data = all(_loses_data(faulty, fixes[0].text, text) for text in wanted)
    return RepairTrial(kind, name, faulty, is_right, loses_data, fixes, seconds)


def _loses_data(faulty: str, proposed: str, wanted: str) -> bool:
    """Whether a proposal lacks data of the faulty program that the wanted repair keeps."""
    before, after, right = (
        Counter(chain(*ExchangedData(_lowered(text)).by_rank.values()))
        for text in (faulty, proposed, wanted)
    )
    return bool((before & right) - after)


def _lowered(text: str) -> Program:
    return lower(loads(text, "program.yaml"))


def _replaced(text: str, edits: dict[str, str]) -> str:
    for old, new in edits.items():
        if old not in text:
            raise ValueError(f"{old!r} does not occur in\n{text}")
        text = text.replace(old, new)
    return text


def _calls_of(text: str) -> _Calls:
    program = _lowered(text)
    ranks = tuple(tuple(_rank_calls(program, rank)) for rank in program.present)
    return ranks, repr(sorted(program.options.items()))


def _rank_calls(program: Program, rank: int) -> Iterator[tuple[Any, ...]]:
    """Each call with its arguments, and the numbers of the calls that it waits for."""
    numbers = {position: number for number, (position, _) in enumerate(program.calls_of(rank))}
    for position, call in program.calls_of(rank):
        waits = program.code_call(rank, position).waits
        awaited = sorted(numbers.get(position - distance, -1) for distance in waits)
        parts = sorted(_call_text(part) for part in call.parts)
        yield (_call_text(call), *parts, tuple(awaited))


def _call_text(call: ResolvedCall) -> str:
    buffers = [(each.label, each.shape, each.dtype) for each in (*call.inputs, *call.outputs)]
    return f"{call_words(call)} {buffers} {call.is_async}"


def measure_programs(only: str, texts: Path | None) -> None:
    """Print each program with its first proposal, and the share of right ones."""
    _measure(trials(only), texts)


def measure_sets(only: str, texts: Path | None) -> None:
    """The same for the programs of the sets."""
    _measure(trials_of_sets(only), texts)


def _measure(measured: Iterator[RepairTrial], texts: Path | None) -> None:
    right = lost = 0
    total = 0
    for trial in measured:
        total += 1
        right += trial.is_right
        lost += trial.loses_data
        mark = "right" if trial.is_right else "WRONG"
        mark += ", loses data" if trial.loses_data else ""
        print(f"{mark:6} {trial.seconds:5.1f} s  {trial.kind}: {trial.name}")
        print(f"                {trial.words}", flush=True)
        if texts is not None:
            patch = trial.fixes[0].patch if trial.fixes else ""
            _write(texts, trial.name.replace(" ", "_"), trial.faulty, patch)
    if total:
        print(f"{right} of {total} right, {100 * right / total:.0f} %; {lost} lose data")


# --- agreed cases ---
def measure_agreed(only: str, texts: Path | None) -> None:
    """Print each agreed case with its first proposal, and the share of repaired ones."""
    wanted = set(only.split(",")) if only else None
    chosen = [
        case
        for case in load_cases()
        if case["expect"]["verdict"] in FAULTS and (wanted is None or case["id"] in wanted)
    ]
    found: Counter[tuple[str, bool]] = Counter()
    for case in chosen:
        file = scenario_of(case)
        begun, verdict = time.process_time(), case["expect"]["verdict"]
        best = find_repairs(file, f"{case['id']}.yaml")
        found[verdict, bool(best)] += 1
        words = "; then ".join(best[0].words) if best else "NONE"
        seconds = time.process_time() - begun
        category = case["category"][:24]
        print(f"{case['id']:8} {category:24} {verdict:9} {seconds:5.1f} s  {words}", flush=True)
        if texts is not None:
            _write(texts, case["id"], file, best[0].patch if best else "")
    for verdict in FAULTS:
        good, bad = found[verdict, True], found[verdict, False]
        if good + bad:
            print(f"{verdict}: {good} of {good + bad} repaired, {100 * good / (good + bad):.0f} %")


def _write(folder: Path, name: str, faulty: str, patch: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(faulty)
    if patch:
        (folder / f"{name}.patch").write_text(patch)


_MEASURES = {"agreed": measure_agreed, "programs": measure_programs, "sets": measure_sets}


def main() -> None:
    """Run one of the measurements."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("what", choices=tuple(_MEASURES))
    parser.add_argument("--only", default="", help="Comma-separated ids, or part of a name.")
    parser.add_argument(
        "--texts", type=Path, help="Write each program and its repair to this folder."
    )
    given = parser.parse_args()
    measure = _MEASURES[given.what]
    measure(given.only, given.texts)


if __name__ == "__main__":
    main()
