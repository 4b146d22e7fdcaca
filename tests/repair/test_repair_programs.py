"""The first proposal for a faulty program is the repair that a person would make.

The programs and their repairs are those of benchmarks/repair_programs.yaml.
"""

from __future__ import annotations

from functools import cache

import pytest
import yaml

from benchmarks.repairs import PROGRAMS, SETS, RepairTrial, trials
from distsim.repair.proposals import REMOVES_CALLS
from distsim.scenario import loads
from distsim.simulation.check_scenario import check_scenario

ENTRIES = yaml.safe_load(PROGRAMS.read_text(encoding="utf-8"))
#: A search takes a third of a second, so the fast tests look at every fourth program.
CHOSEN = [
    pytest.param(ENTRIES[::4], id="some"),
    pytest.param(ENTRIES, id="all", marks=pytest.mark.slow),
]
Entries = list[dict[str, str]]


@cache
def trial_of(kind: str, name: str) -> RepairTrial:
    return next(trial for trial in trials(name) if trial.kind == kind)


def trials_of(entries: Entries) -> list[RepairTrial]:
    return [trial_of(entry["kind"], entry["name"]) for entry in entries]


def of_kind(kind: str) -> list[RepairTrial]:
    return trials_of([entry for entry in ENTRIES if entry["kind"] == kind])


def test_the_benchmark_has_many_programs_of_many_kinds() -> None:
    assert len({(entry["kind"], entry["name"]) for entry in ENTRIES}) == len(ENTRIES) >= 80
    assert len({entry["kind"] for entry in ENTRIES}) >= 20


@pytest.mark.parametrize("entries", CHOSEN)
def test_nine_of_ten_first_repairs_are_right(entries: Entries) -> None:
    found = trials_of(entries)
    wrong = [trial.name for trial in found if not trial.is_right]

    assert len(wrong) <= len(found) // 10, wrong


@pytest.mark.parametrize("entries", CHOSEN)
def test_no_first_repair_removes_data_that_the_right_repair_keeps(entries: Entries) -> None:
    assert [trial.name for trial in trials_of(entries) if trial.loses_data] == []


@pytest.mark.parametrize("kind", ["uneven batches", "wrong group", "request"])
def test_a_repair_names_line_rank_and_group(kind: str) -> None:
    for trial in of_kind(kind):
        words = trial.fixes[0].words[0]
        assert "line " in words, trial.name
        assert "rank" in words, trial.name


#: What the first repair says: the place, then the call, its arguments and where calls move.
_WORDS = {
    "a stage computes its output and does not send it": (
        "line 11: after this line, add send(out, dst=2) on rank 1"
    ),
    "the parameter server skips the last worker": (
        "line 7, rank 0: repeat 4 times instead of 3 (`times: world_size - 1`)"
    ),
    "the optimizer reads gradients of a pending reduction": (
        "line 6, all ranks: after this line, wait for work"
    ),
    "a rank waits for one request and reads the data of two": (
        "line 14, rank 1: wait for r2 before assign uses rb"
    ),
    "one rank skips validation": "line 6: run this block on all ranks, so that all call all_reduce",
    "only rank zero reduces the metrics that it logs": (
        "line 8: call all_reduce on all ranks, outside of this block"
    ),
    "one member destroys a subgroup between two reductions": (
        "line 9, rank 1, group tp: move this destroy_process_group after the barrier (line 14)"
    ),
    "every rank receives from the rank that it sends to": (
        "line 5, all ranks, irecv: set src to (rank - 1) % world_size"
    ),
    "a rank reads what another puts, without a signal": (
        "line 6: after this line, call symm_mem_barrier on all ranks"
    ),
}


@pytest.mark.parametrize("name", _WORDS)
def test_a_repair_names_its_place_the_values_and_the_lines_of_moved_calls(name: str) -> None:
    (trial,) = trials_of([entry for entry in ENTRIES if entry["name"] == name])

    assert trial.words == _WORDS[name]


@pytest.mark.parametrize("kind", ["missing wait", "skipped block", "loop of messages"])
def test_no_repair_offered_for_skipped_work_removes_data_or_calls(kind: str) -> None:
    for trial in of_kind(kind):
        assert [fix.loss.lost for fix in trial.fixes] == [0] * len(trial.fixes), trial.name
        assert all(fix.kind < REMOVES_CALLS for fix in trial.fixes), trial.name


@pytest.mark.parametrize("name", ["f", "g", "h"])
def test_in_a_set_the_faulty_programs_fail_and_the_meant_programs_are_ok(name: str) -> None:
    entries = yaml.safe_load((SETS / f"{name}.yaml").read_text(encoding="utf-8"))

    # A sample: a check of every program takes too long.
    for entry in entries[::8]:
        assert check_scenario(loads(entry["faulty"])).status() == 1, entry["name"]
        assert check_scenario(loads(entry["fixed"])).status() == 0, entry["name"]
