"""No finding describes a consequence of the first one: after the first is repaired, every other
finding must still be reported.

Notes on when the first one shows (with which buffers, backends and orders of events) are no
consequences: they belong to it.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.repair.scenario_data import fields_of, make_step, op_of, ranks_of
from distsim.scenario import Scenario, loads
from distsim.simulation.check_scenario import check_file, check_scenario
from tests.support.generator import CORRECT, scenario

SCENARIOS = Path(__file__).resolve().parents[2] / "scenarios"
CONDITIONS = ("DS603", "DS604", "DS605", "DS609")
#: Files with two independent faults, of which the repaired twin has none: the edits that repair the
#: first finding alone.
FIRST_REPAIRED = {
    "ds502_never_received": [
        ("dst: 1}\n    ranks: 0", "dst: 1, as: h}\n    ranks: 0\n  - {wait: h, ranks: 0}")
    ],
    "ds607_handle_dropped": [
        (
            "- recv: {tensor: y, src: 1 - rank}\n      - send: {tensor: y, dst: 1 - rank}",
            "- batch_isend_irecv: {ops: [{irecv: {tensor: x, src: 1 - rank}}, "
            "{isend: {tensor: y, dst: 1 - rank}}]}",
        )
    ],
    "ds608_under_a_selector": [
        ("async: true}\n    ranks: 0", "async: true, as: h}\n    ranks: 0\n  - {wait: h, ranks: 0}")
    ],
}


def _in_order_of_report(findings: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Errors first, then warnings, then notes."""
    order = ("error", "warning", "note")
    return tuple(sorted(findings, key=lambda finding: order.index(finding.severity)))


def _pairs() -> list[tuple[Path, Path]]:
    """Faulty programs with their repaired twins."""
    found = []
    for folder in ("findings", "zoo"):
        for repaired in sorted((SCENARIOS / folder).glob("*_repaired.yaml")):
            prefix = repaired.name.removesuffix("repaired.yaml")
            faulty = sorted(set(repaired.parent.glob(f"{prefix}*.yaml")) - {repaired})
            found += [(path, repaired) for path in faulty]
    return found


def _consequences(faulty: tuple[Finding, ...], remaining: tuple[Finding, ...]) -> list[str]:
    """The findings after the first that the repaired program no longer has."""
    faulty = _in_order_of_report(faulty)
    codes = {finding.code for finding in remaining}
    first = faulty[0].code if faulty else ""
    return [
        finding.message.partition("\n")[0]
        for finding in faulty[1:]
        if finding.code not in {first, *CONDITIONS, *codes}
    ]


@pytest.mark.parametrize(("faulty", "repaired"), _pairs(), ids=lambda path: path.stem)
def test_findings_after_the_first_remain_when_the_first_is_repaired(
    faulty: Path, repaired: Path
) -> None:
    found = check_file(faulty, max_states=1000).findings
    if faulty.stem not in FIRST_REPAIRED:
        assert _consequences(found, check_file(repaired, max_states=1000).findings) == []
        return
    text = faulty.read_text(encoding="utf-8")
    for old, new in FIRST_REPAIRED[faulty.stem]:
        assert old in text
        text = text.replace(old, new)
    remaining = check_scenario(loads(text), max_states=1000).findings
    # The second fault remains; what it leads to may now have another code.
    second = _in_order_of_report(found)[1]
    assert set(second.ranks) & {place.rank for finding in remaining for place in finding.places}


# --- random programs with one fault ---
_Program = dict[str, Any]
#: Puts one fault into a program; False if it has no place for it.
_Fault = Callable[[Random, list[Any], int], bool]


def _own_calls(random: Random, steps: list[Any], world: int) -> tuple[int, int] | None:
    """A step that several ranks make, and one of these ranks."""
    shared = [k for k, step in enumerate(steps) if op_of(step) and _ranks(step, world)]
    collectives = [k for k in shared if OPERATIONS[op_of(steps[k])].kind == "collective"]
    if not collectives:
        return None
    k = random.choice(collectives)
    return k, random.choice(_ranks(steps[k], world))


def _ranks(step: Any, world: int) -> list[int]:
    chosen = ranks_of(step)
    if chosen is None:
        return list(range(world))
    if isinstance(chosen, int):
        return [chosen]
    return list(chosen) if isinstance(chosen, list) else []


def _without(step: Any, rank: int, world: int) -> list[Any]:
    """The step on the other ranks."""
    rest = [other for other in _ranks(step, world) if other != rank]
    return [make_step(op_of(step), fields_of(step), rest)] if rest else []


def _skip(random: Random, steps: list[Any], world: int) -> bool:
    found = _own_calls(random, steps, world)
    if found is None:
        return False
    k, rank = found
    steps[k : k + 1] = _without(steps[k], rank, world)
    return True


def _repeat(random: Random, steps: list[Any], world: int) -> bool:
    found = _own_calls(random, steps, world)
    if found is None:
        return False
    k, rank = found
    fields = {
        key: value for key, value in fields_of(steps[k]).items() if key not in ("as", "async")
    }
    steps.insert(k, make_step(op_of(steps[k]), fields, rank))
    return True


def _other_operation(random: Random, steps: list[Any], world: int) -> bool:
    found = _own_calls(random, steps, world)
    if found is None:
        return False
    k, rank = found
    group = {key: value for key, value in fields_of(steps[k]).items() if key == "group"}
    other = make_step("barrier", group, rank)
    steps[k : k + 1] = [*_without(steps[k], rank, world), other]
    return True


def _later(random: Random, steps: list[Any], world: int) -> bool:
    found = _own_calls(random, steps, world)
    if found is None:
        return False
    k, rank = found
    own = make_step(op_of(steps[k]), fields_of(steps[k]), rank)
    place = random.randint(k + 1, len(steps))
    steps.insert(place, own)
    steps[k : k + 1] = _without(steps[k], rank, world)
    return True


def _fail(random: Random, steps: list[Any], world: int) -> bool:
    steps.insert(
        random.randint(0, len(steps)),
        make_step("fail", {"message": "bug"}, random.randrange(world)),
    )
    return True


def _exit(random: Random, steps: list[Any], world: int) -> bool:
    steps.insert(
        random.randint(0, len(steps)),
        make_step("exit", {"code": random.randrange(2)}, random.randrange(world)),
    )
    return True


def _lost_message(random: Random, steps: list[Any], world: int) -> bool:
    messages = [k for k, step in enumerate(steps) if op_of(step) in ("send", "recv")]
    if not messages:
        return False
    del steps[random.choice(messages)]
    return True


def _other_peer(random: Random, steps: list[Any], world: int) -> bool:
    messages = [
        k
        for k, step in enumerate(steps)
        if op_of(step) == "send" and isinstance(ranks_of(step), int)
    ]
    if not messages:
        return False
    k = random.choice(messages)
    fields = fields_of(steps[k])
    key = "dst" if "dst" in fields else "group_dst"
    steps[k] = make_step("send", {**fields, key: random.randrange(world + 1)}, ranks_of(steps[k]))
    return True


FAULTS: tuple[_Fault, ...] = (
    _skip,
    _repeat,
    _other_operation,
    _later,
    _fail,
    _exit,
    _lost_message,
    _other_peer,
)
DRAWS = 40 * int(os.environ.get("DISTSIM_DRAWS", "1"))


def _faulty_programs(seed: int) -> Iterator[tuple[_Program, _Program]]:
    """A correct program, and the same program with each fault."""
    right = scenario(seed, CORRECT - {"any_source"})
    size = Scenario(**right).world.size
    for number, put in enumerate(FAULTS):
        faulty = copy.deepcopy(right)
        if put(Random(f"{seed} {number}"), faulty["program"], size):
            yield right, faulty


@pytest.mark.parametrize("seed", range(DRAWS))
def test_one_fault_in_a_program_adds_one_finding(seed: int) -> None:
    """Repaired, the program has all findings that followed the first."""
    known: tuple[Finding, ...] | None = None
    for right, faulty in _faulty_programs(seed):
        if known is None:
            known = check_scenario(Scenario(**right), max_states=1000).findings
        if any(finding.severity == "error" for finding in known):
            return
        try:
            found = check_scenario(Scenario(**faulty), max_states=1000).findings
        except ScenarioErrors:  # for example, a wait for a request that is no longer made
            continue
        assert _consequences(found, known) == [], faulty
