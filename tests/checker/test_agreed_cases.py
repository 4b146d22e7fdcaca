"""Communication programs with agreed answers (tests/data/agreed): every answer is theirs, for all
of them.

Only id, world size, groups and programs are looked at to judge; tests/data/README.md defines the
words.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from distsim.checker.verdict import Verdict, verdict_of
from distsim.program.from_calls import build_program
from tests.support.agreed import CASES, Case, load_cases

Judged = list[tuple[Case, Verdict]]


def _is_open(case: Case) -> bool:
    calls = [
        call
        for program in case["programs"].values()
        for one in program
        for call in (one, *one.get("ops", ()))
    ]
    return any(call["op"] in ("recv", "irecv") and call["peer"] is None for call in calls)


def _judge(case: Case) -> Verdict:
    return verdict_of(
        build_program(
            case["world_size"],
            case["programs"],
            groups=case["groups"],
            name=case["id"],
            options={"stays_connected": True},
        )
    )


@pytest.fixture(scope="module")
def judged() -> Judged:
    """The cases, each with our verdict."""
    return [(case, _judge(case)) for case in load_cases()]


def _stated(judged: Judged, field: str) -> Iterator[tuple[Case, Any, Verdict]]:
    """(case, what it states, our verdict) of each case that states a field."""
    for case, ours in judged:
        if field in case["expect"]:
            yield case, case["expect"][field], ours


def test_there_are_enough_cases(judged: Judged) -> None:
    """Nothing is left out unnoticed: 267 cases, 52 of them with receives open to any source."""
    assert (len(judged), sum(_is_open(case) for case, _ in judged)) == (267, 52)


def test_every_verdict_is_as_agreed(judged: Judged) -> None:
    """Where several verdicts count as right, the first of them is ours all the same."""
    assert {
        c["id"]: (said, ours.verdict)
        for c, said, ours in _stated(judged, "verdict")
        if said != ours.verdict
    } == {}


@pytest.mark.parametrize("field", ["ranks", "core", "culprits"])
def test_affected_ranks_are_as_agreed(judged: Judged, field: str) -> None:
    """The ranks, the cause among them, and who is the odd one out."""
    wrong = {
        c["id"]: (said, getattr(ours, field))
        for c, said, ours in _stated(judged, field)
        if said != list(getattr(ours, field))
    }
    assert wrong == {}


def test_dependencies_of_a_verdict_are_as_agreed(judged: Judged) -> None:
    assert {
        c["id"]: (said, ours.depends_on)
        for c, said, ours in _stated(judged, "depends_on")
        if said != ours.depends_on
    } == {}


def test_every_backend_variant_is_as_agreed(judged: Judged) -> None:
    """Where a case says in which reading it goes wrong, and how often, we say the same."""
    wrong = {
        c["id"]: (said, ours.readings)
        for c, said, ours in _stated(judged, "modes")
        if said != {r: ours.readings[r] for r in said}
    }
    assert wrong == {}


def test_sets_of_blocked_ranks_are_as_agreed(judged: Judged) -> None:
    wrong = {}
    for case, said, ours in _stated(judged, "stuck_sets"):
        if sorted(said) != [list(ranks) for ranks in ours.stuck_sets]:
            wrong[case["id"]] = (said, ours.stuck_sets)
    assert wrong == {}


def test_a_single_set_of_blocked_ranks_contains_all_blocked_ranks(judged: Judged) -> None:
    """A deadlock for which a case states no sets has one, and it is its ranks."""
    deadlocks = [
        (case, ours)
        for case, ours in judged
        if case["expect"]["verdict"] == "deadlock" and "stuck_sets" not in case["expect"]
    ]
    assert {
        c["id"]: ours.stuck_sets
        for c, ours in deadlocks
        if ours.stuck_sets != (tuple(c["expect"]["ranks"]),)
    } == {}


def test_blocked_ranks_their_calls_and_their_peers_are_as_agreed(judged: Judged) -> None:
    """Positions in the programs and the ranks that are waited for."""
    wrong = {}
    for case, said, ours in _stated(judged, "blocked"):
        assert ours.final_state is not None
        found = {
            str(b.rank): {
                "op": b.position,
                "on": sorted({r for need in b.needs for r in need.ranks}),
            }
            for b in ours.final_state.blocked
        }
        if found != said:
            wrong[case["id"]] = (said, found)
    assert wrong == {}


def test_ranks_with_a_choice_of_senders_are_as_agreed(judged: Judged) -> None:
    """Every rank that a case calls nondeterministic has an open receive that may take more than one
    sender's message.
    """
    wrong = {}
    for case, ours in judged:
        said = case["expect"].get("nondeterministic", [])
        if said != list(ours.nondeterministic):
            wrong[case["id"]] = (said, ours.nondeterministic)
    assert wrong == {}


#: An edit of a sound program (planted.txt) -> codes of a first finding that names it.
EDITS = {
    "numel": ("DS202", "DS208"),
    "any": ("DS208",),
    "dtype": ("DS203", "DS209"),
    "rop": ("DS204",),
    "root": ("DS205",),
    "tag": ("DS304",),
    "peer": ("DS304",),
    "group": ("DS201",),
    "drop": ("DS301", "DS302", "DS304"),
    "dup": ("DS302", "DS304"),
    "swap": ("DS206", "DS301"),
    "swap2": ("DS206", "DS301"),
}
#: Who left out a send that any source may make can't be known.
UNKNOWABLE = {"dl0101"}


def test_the_first_finding_names_the_edit_that_broke_a_correct_program(judged: Judged) -> None:
    """What differs, by its code, and the rank on which it was changed; 50 programs."""
    planted = {
        case: (edit, rank)
        for case, edit, rank in map(
            str.split, (CASES.parent / "planted.txt").read_text().splitlines()
        )
    }
    wrong, seen = {}, 0
    for case, ours in judged:
        if case["id"] in planted and case["id"] not in UNKNOWABLE:
            edit, rank = planted[case["id"]]
            first = min(ours.findings, key=lambda f: f.severity != "error")
            named = {*map(str, first.ranks), *re.findall(r"\d+", first.message)}
            seen += 1
            if first.code not in EDITS[edit] or rank not in named:
                wrong[case["id"]] = (edit, rank, first.code, first.message)

    assert (wrong, seen) == ({}, 49)


def test_the_first_finding_states_the_cause_and_a_remedy(judged: Judged) -> None:
    """Of all faulty programs: ranks of the cause, the odd ones out of a mismatch, and what to
    do.
    """
    wrong = {}
    for case, ours in judged:
        if ours.verdict != "ok":
            first, said = min(ours.findings, key=lambda f: f.severity != "error"), case["expect"]
            off = set(said.get("culprits") or ()) - {*first.core}
            cause = set(said.get("core") or said["ranks"]) & {*first.ranks}
            if off or not cause or not first.help:
                wrong[case["id"]] = (first.code, first.ranks, first.core, first.help)

    assert wrong == {}


def test_no_case_hits_the_bound(judged: Judged) -> None:
    assert [case["id"] for case, ours in judged if not ours.complete] == []


def test_every_fault_has_a_finding(judged: Judged) -> None:
    """A verdict other than ok comes with a finding that says why, and a sound program has no error
    finding.
    """
    silent = []
    for case, ours in judged:
        worst = any(f.severity == "error" for f in ours.findings)
        if worst != (ours.verdict not in ("ok", "leak")):
            silent.append(case["id"])
    assert silent == []
