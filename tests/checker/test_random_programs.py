"""Checks of random programs, right and wrong ones, under every back end: all of it can be told, and
what is told agrees.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from distsim.findings.codes import CODES
from distsim.output.json.sarif import check_sarif, github_annotations
from distsim.output.text.check_results import check_json, check_text
from distsim.program.from_calls import build_program
from distsim.simulation.check_scenario import check_program
from tests.support.harness import draws
from tests.support.random_programs import Plain, any_programs, valid_programs

BACKENDS = st.sampled_from(("gloo", "nccl", "mpi"))
few = settings(max_examples=draws(60), deadline=None, suppress_health_check=list(HealthCheck))
many = settings(max_examples=draws(400), deadline=None, suppress_health_check=list(HealthCheck))


def holds(plain: Plain, backend: str) -> None:
    """Every format tells the result, and verdict, findings and status agree."""
    program = build_program(plain.world_size, plain.programs, groups=plain.groups, backend=backend)
    result = check_program(program, max_states=2000)
    verdict = result.verdict
    assert verdict is not None
    assert max(map(len, check_text([result]).splitlines())) <= 80
    json.dumps([check_json([result]), check_sarif([result], "1")])
    assert github_annotations([result]).count("\n") == max(len(result.findings) - 1, 0)
    classes = {CODES[f.code].verdict for f in result.findings}
    assert verdict.verdict == "ok" or verdict.verdict in classes
    worse = (
        verdict.verdict in ("invalid", "mismatch", "deadlock", "race")
        or result.profiles[backend].outcome != "completes"
    )
    assert result.status() == int(worse)
    assert set(verdict.core) <= set(range(plain.world_size))


@few
@given(any_programs(), BACKENDS)
def test_any_program_can_be_checked_and_reported(plain: Plain, backend: str) -> None:
    holds(plain, backend)


@few
@given(valid_programs())
def test_a_correct_program_gets_no_error(plain: Plain) -> None:
    """Under gloo, whose rules these programs keep."""
    program = build_program(plain.world_size, plain.programs, groups=plain.groups)
    result = check_program(program)

    assert result.verdict is not None
    assert result.verdict.verdict == "ok"
    assert [
        f for f in result.findings if f.severity == "error" and f.code[:3] in ("DS1", "DS2", "DS4")
    ] == []


@pytest.mark.slow
@many
@given(any_programs(), BACKENDS)
def test_many_programs_can_be_checked_and_reported(plain: Plain, backend: str) -> None:
    holds(plain, backend)
