"""Detectors are asked only about what concerns them; what they would have said of the rest is nothing."""

from __future__ import annotations

import importlib.util

from conftest import draws
from hypothesis import given, settings

from distsim.check.backends import backend_findings
from distsim.check.remarks import remarks
from distsim.check.verdict import CONCERNS, Subject, verdict_of
from distsim.errors import UserError
from distsim.findings.record import Finding
from distsim.profiles import PROFILES
from distsim.program.lower import lower
from distsim.program.records import Program
from distsim.scenario import loads
from distsim.simulation import simulate, swaps_of
from tests import generator


class Concerned(Subject):
    """As if the program used everything."""

    def concerns(self, detector: str) -> bool:
        return True


def told(program: Program, subject: Subject) -> list[Finding]:
    """All that detectors say of a program's text."""
    found = [*verdict_of(program, 2000, subject=subject).findings, *swaps_of(subject)]
    asked = PROFILES.values() if subject.concerns("remarks") else ()
    return [*found, *(one for profile in asked for one in remarks(program, profile, subject.layout))]


@given(generator.scenarios())
@settings(max_examples=draws(60))
def test_a_detector_that_is_not_asked_would_have_found_nothing(mapping: generator.Mapping) -> None:
    program = generator.program_of(mapping)

    assert told(program, Subject(program)) == told(program, Concerned(program))


@given(generator.scenarios(generator.FEATURES - {"timed_faults"}))
@settings(max_examples=draws(40))
def test_of_a_run_in_which_every_rank_makes_all_calls_nothing_was_refused(mapping: generator.Mapping) -> None:
    """Back ends are asked what they refuse only where a rank stops, or a call may be made by nobody."""
    try:
        done = simulate(generator.Scenario(**mapping), with_values=False)
    except UserError:
        return
    profile = PROFILES[done.program.backend]
    refused = {one.code for one in backend_findings(done.program, profile) if one.severity == "error"}

    assert refused <= {one.code for one in done.findings}


def test_a_detector_is_a_module_of_its_name_and_a_program_of_nothing_concerns_none() -> None:
    plain = lower(loads("world: 2\nprogram:\n  - all_reduce: {tensor: {shape: [4]}}\n"))

    assert [name for name in CONCERNS if importlib.util.find_spec(f"distsim.check.{name}") is None] == []
    assert [name for name in CONCERNS if Subject(plain).concerns(name)] == []
