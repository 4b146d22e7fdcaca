"""Cases of communication programs with agreed answers, kept beside the project: the verdict, its ranks and core are theirs.

Held here: every case in which no receive is open to any source, but one. Left for the exploration of orders and the race checks: the 52
cases with a receive from any source (27 sound ones, 17 deadlocks, 8 mismatches), and the one that writes a buffer in use (a race).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from distsim.check.verdict import Verdict, verdict_of
from distsim.program.build import build_program

CASES = Path(__file__).parent.parent.parent / "shared" / "cases" / "cases.jsonl"
Case = dict[str, Any]

pytestmark = pytest.mark.skipif(not CASES.exists(), reason="the cases are not beside this checkout (../shared/cases)")


def _calls(case: Case) -> Iterator[dict[str, Any]]:
    for program in case["programs"].values():
        for call in program:
            yield call
            yield from call.get("ops", ())


def _is_open(case: Case) -> bool:
    return any(call["op"] in ("recv", "irecv") and call["peer"] is None for call in _calls(case))


@pytest.fixture(scope="module")
def judged() -> list[tuple[Case, Verdict]]:
    """The cases that a single pass answers exactly, each with our verdict. Only id, groups, world and programs are looked at."""
    found = []
    for line in CASES.read_text().splitlines():
        case = json.loads(line)
        if not _is_open(case) and case["expect"]["verdict"] != "race":
            programs = {int(rank): calls for rank, calls in case["programs"].items()}
            found.append((case, verdict_of(build_program(case["world_size"], programs, groups=case["groups"], name=case["id"]))))
    return found


def _wrong(judged: list[tuple[Case, Verdict]], field: str, of: str | None = None) -> dict[str, tuple[object, object]]:
    """id -> (expected, found) where a field differs; cases that don't state it are left out."""
    wrong = {}
    for case, ours in judged:
        if (of or field) in case["expect"]:
            expected, found = case["expect"][of or field], getattr(ours, field)
            found = list(found) if isinstance(found, tuple) else found
            if expected != found:
                wrong[case["id"]] = (expected, found)
    return wrong


def test_there_are_enough_cases(judged: list[tuple[Case, Verdict]]) -> None:
    """Nothing is left out unnoticed: 214 of the 267 cases are held."""
    assert len(judged) == 214


@pytest.mark.parametrize("field", ["verdict", "ranks", "core", "depends_on", "culprits"])
def test_every_case_gets_its_answer(judged: list[tuple[Case, Verdict]], field: str) -> None:
    """The verdict, who is affected, who is the cause, what it depends on and who is the odd one out are as agreed."""
    assert _wrong(judged, field) == {}


def test_every_reading_is_as_agreed(judged: list[tuple[Case, Verdict]]) -> None:
    """Where a case says in which reading it goes wrong, we say the same."""
    wrong = {}
    for case, ours in judged:
        modes = case["expect"].get("modes", {})
        if any(ours.readings[reading] != how for reading, how in modes.items()):
            wrong[case["id"]] = (modes, ours.readings)
    assert wrong == {}


def test_single_passes_are_exact_without_open_receives(judged: list[tuple[Case, Verdict]]) -> None:
    """No held case is called incomplete."""
    assert [case["id"] for case, ours in judged if not ours.complete] == []


def test_every_fault_has_a_finding(judged: list[tuple[Case, Verdict]]) -> None:
    """A verdict other than ok comes with a finding that says why, and a sound program has no error finding."""
    silent = []
    for case, ours in judged:
        worst = any(f.severity == "error" for f in ours.findings)
        if worst != (ours.verdict not in ("ok", "leak")):
            silent.append(case["id"])
    assert silent == []
