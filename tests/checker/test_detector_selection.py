"""Detectors are asked only about what concerns them; what they would have said of the rest is
nothing.
"""

from __future__ import annotations

import importlib.util

from hypothesis import given, settings

from distsim.backends import BACKEND_PROFILES
from distsim.checker.checked_program import DETECTOR_FEATURES, CheckedProgram
from distsim.checker.detectors.backend_support import backend_findings
from distsim.checker.detectors.lint import lint_findings
from distsim.checker.verdict import verdict_of
from distsim.common.errors import UserError
from distsim.findings.finding_types import Finding
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate, swap_findings
from tests.support import generator
from tests.support.harness import draws


class Concerned(CheckedProgram):
    """As if the program used everything."""

    def concerns(self, detector: str) -> bool:
        return True


def told(program: Program, subject: CheckedProgram) -> list[Finding]:
    """All that detectors say of a program's text."""
    found = [*verdict_of(program, 2000, subject=subject).findings, *swap_findings(subject)]
    asked = BACKEND_PROFILES.values() if subject.concerns("lint") else ()
    return [
        *found,
        *(one for profile in asked for one in lint_findings(program, profile, subject.layout)),
    ]


@given(generator.scenarios())
@settings(max_examples=draws(60))
def test_a_detector_that_was_skipped_would_have_found_nothing(mapping: generator.Mapping) -> None:
    program = generator.program_of(mapping)

    assert told(program, CheckedProgram(program)) == told(program, Concerned(program))


@given(generator.scenarios(generator.FEATURES - {"timed_faults"}))
@settings(max_examples=draws(40))
def test_a_run_in_which_every_rank_makes_all_calls_has_no_refused_call(
    mapping: generator.Mapping,
) -> None:
    """Back ends are asked what they refuse only where a rank stops, or a call may be made by
    nobody.
    """
    try:
        done = simulate(generator.Scenario(**mapping), with_values=False)
    except UserError:
        return
    profile = BACKEND_PROFILES[done.program.backend]
    refused = {
        one.code for one in backend_findings(done.program, profile) if one.severity == "error"
    }

    assert refused <= {one.code for one in done.findings}


def test_every_detector_is_a_module_of_its_name_and_none_applies_to_an_empty_program() -> None:
    plain = lower(loads("world: 2\nprogram:\n  - all_reduce: {tensor: {shape: [4]}}\n"))

    assert [
        name
        for name in DETECTOR_FEATURES
        if importlib.util.find_spec(f"distsim.checker.detectors.{name}") is None
    ] == []
    assert [name for name in DETECTOR_FEATURES if CheckedProgram(plain).concerns(name)] == []
