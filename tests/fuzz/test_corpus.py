"""Inputs that once failed are given to their fuzz targets in every test run."""

from __future__ import annotations

import os
import random
import traceback
from pathlib import Path

import pytest

from tests.fuzz import campaign
from tests.fuzz.mutations import mutant
from tests.fuzz.targets import TARGETS, Target

CORPUS = Path(__file__).parent / "corpus"
INPUTS = sorted(path for path in CORPUS.glob("*/*") if path.is_file())
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="runs cases in forked processes")


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_a_past_failure_stays_mended(path: Path) -> None:
    assert _failure(TARGETS[path.parent.name], path.read_bytes()) == ""


@pytest.mark.parametrize("name", TARGETS)
def test_every_target_accepts_a_valid_input_and_a_damaged_one(name: str) -> None:
    target = TARGETS[name]
    seed = min(target.seeds(), key=len)

    assert _failure(target, seed) == ""
    assert _failure(target, mutant(seed, target.suffix, random.Random(name))) == ""


def _failure(target: Target, data: bytes) -> str:
    """The traceback of a target, which raises for all but a result or a refusal with a reason."""
    try:
        target.fuzz(data)
    except Exception:
        return traceback.format_exc()
    return ""


def _fails_on_some(data: bytes) -> None:
    if len(data) % 5 == 0:
        raise KeyError(data)


def _never_ends_on_some(data: bytes) -> None:
    while len(data) % 5 == 0:
        pass


@needs_fork
@pytest.mark.parametrize("fuzz", [_fails_on_some, _never_ends_on_some])
def test_a_campaign_reports_each_failing_case_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, fuzz: object
) -> None:
    monkeypatch.setitem(TARGETS, "made", Target(fuzz, ".bin", lambda: [b"abcde" * 9]))  # type: ignore[arg-type]
    monkeypatch.setattr(campaign, "CPU_S", 0.05)
    expected = [case for case in range(12) if len(campaign.input_of("made", 3, case)) % 5 == 0]

    failures = campaign.run("made", 3, 12, found=lambda failure: None)

    assert expected
    assert [failure.case for failure in failures] == expected
    assert {failure.data for failure in failures} == {
        campaign.input_of("made", 3, case) for case in expected
    }


@needs_fork
@pytest.mark.slow
def test_20_000_damaged_inputs_with_a_fresh_seed_cause_no_failure() -> None:
    seed = random.SystemRandom().randrange(10**9)
    cases = 20_000 // len(TARGETS)

    failures = [failure for name in TARGETS for failure in campaign.run(name, seed, cases)]

    assert [str(failure) for failure in failures] == []
