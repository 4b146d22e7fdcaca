"""The explorer against brute force: random programs, every answer of `verdict_of` held to every
interleaving of their events.

The brute force (`tests.support.brute_force`) knows no reduction, so programs are small. What is
compared: the verdict, its ranks, what it depends on, each reading, the sets of stuck ranks, the
core and the ranks that have a choice of senders.
"""

from __future__ import annotations

from itertools import islice, product
from typing import Any

import pytest

from distsim.checker.verdict import Verdict, verdict_of
from distsim.program.from_calls import build_program
from tests.support.brute_force import BruteForce, Found, TooLarge
from tests.support.small_programs import Small, small_program

READINGS = ("rendezvous", "early", "buffered", "mixed")
#: States that the brute force may need for one reading; larger programs are passed over.
MOST = 1500


def brute(small: Small) -> dict[str, Found]:
    """What all executions end in, by reading, if processes stay connected. Raises TooLarge."""
    return {r: BruteForce(small.programs, small.groups, r, MOST).explore() for r in READINGS}


def ours(small: Small) -> Verdict:
    """The verdict if processes stay connected. `tests/semantics/test_agreement.py` compares
    programs whose processes end.
    """
    stays = {"stays_connected": True}
    return verdict_of(
        build_program(small.world, small.programs, groups=small.groups, options=stays)
    )


def unwaited(small: Small) -> set[int]:
    """Ranks with a request that no call waits for."""
    found = set()
    for rank, calls in small.programs.items():
        waited = {handle for call in calls if call["op"] == "wait" for handle in call["handles"]}
        for call in calls:
            makes = (
                call["op"] in ("isend", "irecv")
                or call.get("async")
                or (call["op"] == "batch" and call.get("handle"))
            )
            if makes and call.get("handle") not in waited:
                found.add(rank)
    return found


def expected(small: Small, found: dict[str, Found]) -> dict[str, Any]:
    """The answer that the definitions give."""
    hows = {
        kind: {r: found[r].how(kind) for r in READINGS} for kind in ("mismatch", "deadlock", "race")
    }
    kind = next((k for k, said in hows.items() if set(said.values()) != {"never"}), None)
    leaking = unwaited(small) | found["rendezvous"].unreceived
    answer: dict[str, Any] = {
        "verdict": kind or ("leak" if leaking else "ok"),
        "depends_on": None,
        "ranks": (),
        "stuck_sets": (),
    }
    if kind is None:
        answer["ranks"] = tuple(sorted(leaking))
        return answer
    said = hows[kind]
    first = found[next(r for r in READINGS if said[r] != "never")]
    plain = [said[r] for r in READINGS[:3]]
    answer["depends_on"] = (
        "schedule" if "sometimes" in plain else "buffering" if len(set(said.values())) > 1 else None
    )
    if kind == "deadlock":
        answer["stuck_sets"] = tuple(sorted(first.stuck))
        answer["ranks"] = tuple(sorted({r for ranks in first.stuck for r in ranks}))
    else:
        answer["ranks"] = tuple(
            sorted(first.unfit if kind == "mismatch" else {receive[0] for receive in first.wrong})
        )
    if kind != "race":
        answer["readings"] = said
    return answer


def cores(found: dict[str, Found]) -> set[tuple[int, ...]]:
    """Every core that may be told: one execution stands for each set of stuck ranks."""
    first = next(found[r] for r in READINGS if found[r].stuck)
    choices = islice(product(*first.stuck.values()), 5000)
    return {tuple(sorted({rank for core in chosen for rank in core})) for chosen in choices}


def disagreement(seed: int) -> str | None:
    """What differs for one seed, "" where nothing does, None where the program is too large."""
    small = small_program(seed)
    try:
        found = brute(small)
    except TooLarge:
        return None
    verdict, answer = ours(small), expected(small, found)
    wrong = {
        name: (said, getattr(verdict, name))
        for name, said in answer.items()
        if said != getattr(verdict, name)
    }
    if verdict.verdict == "deadlock" and verdict.core not in cores(found):
        wrong["core"] = (cores(found), verdict.core)
    chosen = {
        receive[0]
        for one in found.values()
        for receive, senders in one.takers.items()
        if len(senders) > 1
    }
    if answer["verdict"] != "mismatch" and tuple(sorted(chosen)) != verdict.nondeterministic:
        wrong["nondeterministic"] = (sorted(chosen), verdict.nondeterministic)
    if not verdict.complete:
        wrong["complete"] = (True, False)
    return "" if not wrong else f"seed {seed}: {wrong}\n{small}"


def compare(start: int, count: int) -> list[str]:
    """Disagreements of ``count`` programs that are small enough, from a seed on."""
    compared, seed, wrong = 0, start, []
    while compared < count and len(wrong) < 5:
        one = disagreement(seed)
        compared += one is not None
        wrong += [one] if one else []
        seed += 1
    return wrong


#: The first random programs, and the first of kinds that are rare.
SEEDS = (*range(120), 135, 162, 171, 225, 1280, 1325, 1848)


def test_some_random_programs_get_the_verdict_over_all_interleavings() -> None:
    answers = [disagreement(seed) for seed in SEEDS]

    assert [answer for answer in answers if answer] == []
    assert answers.count("") > 0.6 * len(SEEDS)  # the others are too large


@pytest.mark.slow
def test_ten_thousand_random_programs_get_the_verdict_over_all_interleavings() -> None:
    assert compare(1_000_000, 10_000) == []


def test_random_programs_cover_every_kind_of_outcome() -> None:
    """The comparison is worth something: each verdict, each dependence and deadlocks that only
    `mixed` has are among them.
    """
    verdicts = [ours(small_program(seed)) for seed in SEEDS]

    assert {v.verdict for v in verdicts} == {"ok", "leak", "race", "deadlock", "mismatch"}
    assert {v.depends_on for v in verdicts if v.verdict == "deadlock"} == {
        None,
        "buffering",
        "schedule",
    }
    assert {v.depends_on for v in verdicts if v.verdict == "mismatch"} == {
        None,
        "buffering",
        "schedule",
    }
    assert any(
        v.readings["mixed"] == "sometimes"
        and v.readings["buffered"] == v.readings["rendezvous"] == "never"
        for v in verdicts
    )
