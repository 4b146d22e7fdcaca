"""All ways to run a program agree on random scenarios with every feature
(`tests.support.generator`, `tests.support.agreement`).

``pytest -m slow tests/semantics/test_agreement.py`` runs 20 000; its first seed is drawn and
printed, or taken from DISTSIM_SEED.
"""

from __future__ import annotations

import os
from collections import Counter
from random import SystemRandom
from typing import Any

import pytest

from distsim.common.errors import ScenarioErrors
from distsim.scenario import loads
from distsim.scenario.format.source.yaml_nodes import dump_yaml
from tests.support.agreement import EXECUTORS, EXPECTED, Case, differences, rules, surprises
from tests.support.generator import BACKENDS, CORRECT, FEATURES, program_of, scenario
from tests.support.harness import draws
from tests.support.shrinking import shrink

#: Seeds by the chunk, so that a short run of some tests has some of them.
QUICK, MANY, CHUNK = draws(400), 20_000, 20
#: Where only the answer counts, and not what shows it, time is better spent on other seeds
#: (tests/support/mutation.py).
SHRINKS = os.environ.get("DISTSIM_SHRINK") != "0"


def told(seeds: range, most: int = 3) -> list[str]:
    """The first surprises, each with a scenario made small that shows it."""
    found: list[str] = []
    for seed in seeds:
        if surprises(scenario(seed)):
            small = (
                shrink(scenario(seed), lambda mapping: bool(surprises(mapping)))
                if SHRINKS
                else scenario(seed)
            )
            found.append(f"seed {seed}: {surprises(small)}\n{dump_yaml(small)}")
            if len(found) == most:
                break
    return found


@pytest.mark.parametrize("first", range(0, QUICK, CHUNK))
def test_all_ways_to_run_some_hundred_random_scenarios_agree(first: int) -> None:
    """The same ones everywhere; where two differ, a settled question says so."""
    assert told(range(first, first + CHUNK)) == []


@pytest.mark.slow
def test_all_ways_to_run_twenty_thousand_random_scenarios_agree(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = int(os.environ.get("DISTSIM_SEED") or SystemRandom().randrange(10**9))
    with capsys.disabled():
        os.write(1, f"\nseeds {first} to {first + MANY - 1}\n".encode())

    assert told(range(first, first + MANY)) == []


def test_random_scenarios_cover_the_features_and_outcomes() -> None:
    """About half complete, on each back end; every outcome and verdict is among them, and every
    executor has its share.
    """
    cases = [Case(scenario(seed)) for seed in range(100)]
    ended = Counter(case.run.outcome for case in cases)
    answered = Counter(name for case in cases[:40] for name, ask in EXECUTORS.items() if ask(case))

    by_backend = Counter((case.program.backend, case.run.outcome) for case in cases)
    assert 0.35 <= ended["completes"] / len(cases) <= 0.7, by_backend
    assert set(ended) >= {"completes", "hangs", "raises", "crashes", "wrong-data", "undefined"}
    assert {case.program.backend for case in cases} == set(BACKENDS)
    assert {case.verdict.verdict for case in cases} >= {
        "ok",
        "leak",
        "deadlock",
        "mismatch",
        "invalid",
    }
    assert {name for name in EXECUTORS if answered[name] < 3} == set()


def test_a_seed_gives_one_scenario_that_a_file_can_express() -> None:
    for seed in range(40):
        mapping = scenario(seed)

        assert scenario(seed) == mapping
        assert program_of(mapping).call_count == program_of_text(dump_yaml(mapping)).call_count


def program_of_text(text: str) -> Any:
    from distsim.program.lower import lower

    return lower(loads(text))


def test_programs_without_injected_faults_have_no_finding() -> None:
    """Programs drawn of right features alone hang under no reading of the contract."""
    found = {
        seed: Case(scenario(seed, CORRECT - {"any_source"}, "gloo")).verdict.verdict
        for seed in range(60)
    }

    assert {seed: verdict for seed, verdict in found.items() if verdict not in ("ok", "race")} == {}


@pytest.mark.parametrize(
    "feature", ["any_source", "batches", "coalesced", "rooted", "new_group", "repeat"]
)
def test_an_excluded_feature_is_never_drawn(feature: str) -> None:
    words = {
        "batches": ("batch_isend_irecv",),
        "coalesced": ("_coalesced",),
        "rooted": ("broadcast", "gather'", "scatter'"),
        "new_group": ("new_group",),
        "repeat": ("repeat",),
        "any_source": ("assume_src",),
    }[feature]
    texts = [str(scenario(seed, FEATURES - {feature})["program"]) for seed in range(150)]
    if feature == "rooted":
        texts = [text.replace("all_gather'", "").replace("reduce_scatter'", "") for text in texts]

    assert [text for text in texts if any(word in text for word in words)] == []
    assert any(word in str(scenario(seed)["program"]) for seed in range(300) for word in words)


def test_a_disagreement_is_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an executor that sees no hang: what is left shows it still, and every part of it is
    needed.
    """

    def blind(case: Case) -> dict[str, Any]:
        said = rules(case) or {}
        return {**said, "rendezvous stuck": ()} if "rendezvous stuck" in said else said

    monkeypatch.setitem(EXECUTORS, "rules", blind)

    def shows(mapping: dict[str, Any]) -> bool:
        try:
            return any(
                d.question == "rendezvous stuck"
                for d in differences(mapping, (("passes", "rules"),))
            )
        except ScenarioErrors:  # what is taken away is needed by what is left
            return False

    seed = next(seed for seed in range(5000) if shows(scenario(seed)))
    small = shrink(scenario(seed), shows)

    assert shows(small)
    assert len(small["program"]) <= len(scenario(seed)["program"])
    for k in range(len(small["program"])):
        assert not shows({**small, "program": small["program"][:k] + small["program"][k + 1 :]})


def test_every_expected_difference_has_its_settled_scenario(root: Any) -> None:
    assert [
        name
        for name in EXPECTED
        if not (root / "tests" / "data" / "settled" / f"{name}.yaml").exists()
    ] == []
