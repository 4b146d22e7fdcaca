"""Compare a simulation with the `expect` section of its scenario: a scenario is a test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distsim.common.errors import RESOURCE_ERRORS, ScenarioErrors, UsageError, resource_error
from distsim.common.file_io import files_below
from distsim.common.units import duration_text, show_ns
from distsim.operations.core.field_types import PerRank

if TYPE_CHECKING:
    from distsim.scenario.format.models.expectations import DurationBounds, Expectations
    from distsim.simulation.simulate_scenario import Simulation

#: The path that stands for standard input.
STANDARD_INPUT = Path("-")


class UnmetExpectation(NamedTuple):
    """One difference between the expectations and the simulation, in words."""

    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}"


class ScenarioTestResult(NamedTuple):
    """The result of testing one file.

    ``simulation`` is None if the file could not be read; ``error`` then says why.
    """

    file: str
    simulation: Simulation | None
    differences: tuple[UnmetExpectation, ...] = ()
    error: ScenarioErrors | UsageError | None = None

    @property
    def status(self) -> str:
        """``passed``, ``failed``, ``unreadable``, or ``no expect`` if the file expects nothing."""
        if self.simulation is None:
            return "unreadable"
        if self.simulation.scenario.expect is None:
            return "no expect"
        return "failed" if self.differences else "passed"


def scenario_files(paths: list[Path]) -> tuple[Path, ...]:
    """The given files, and the ``.yaml`` files in the given folders at any depth, each once.

    They are sorted within a folder. Raises UsageError for a path that does not exist, and if no
    file is found.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path == STANDARD_INPUT:
            found[path] = None
        elif path.is_dir():
            scenarios = [file for file in files_below(path) if file.suffix in (".yaml", ".yml")]
            found |= dict.fromkeys(scenarios)
        elif path.exists():
            found[path] = None
        else:
            raise UsageError(
                f"{path} does not exist", "name scenario files, or folders with scenarios"
            )
    if not found:
        raise UsageError(
            f"no scenario (*.yaml) in {', '.join(map(str, paths))}", "name a folder with scenarios"
        )
    return tuple(found)


def check_expectations(path: Path) -> ScenarioTestResult:
    """Simulate a file and compare the result with its `expect`.

    A file that cannot be read gives a result with an error, not an exception.
    """
    from distsim.scenario import load, load_stdin
    from distsim.simulation.simulate_scenario import simulate

    try:
        simulation = simulate(load_stdin() if path == STANDARD_INPUT else load(str(path)))
        return ScenarioTestResult(str(path), simulation, unmet_expectations(simulation))
    except (ScenarioErrors, UsageError) as error:
        return ScenarioTestResult(str(path), None, (), error)
    except RESOURCE_ERRORS as error:
        return ScenarioTestResult(str(path), None, (), resource_error(error, str(path)))


def unmet_expectations(simulation: Simulation) -> tuple[UnmetExpectation, ...]:
    """The differences between a simulation and its scenario's `expect`."""
    expect = simulation.scenario.expect
    if expect is None:
        return ()
    return (
        *_check_verdict(expect, simulation),
        *_check_outcome(expect, simulation),
        *_check_findings(expect, simulation),
        *_check_values(expect, simulation),
        *_check_bounds("makespan", expect.makespan, simulation.makespan_ns),
        *_check_bounds("iteration", expect.iteration, simulation.iteration_ns),
    )


def _check_verdict(expect: Expectations, simulation: Simulation) -> Iterator[UnmetExpectation]:
    verdict = simulation.verdict
    for name in ("verdict", "depends_on", "ranks", "core"):
        if name not in expect.model_fields_set:
            continue
        expected, found = getattr(expect, name), getattr(verdict, name, None)
        if name in ("ranks", "core"):
            expected, found = sorted(expected or ()), sorted(found or ())
        if expected != found:
            yield UnmetExpectation(name, _yaml_text(expected), _yaml_text(found))


def _yaml_text(value: object) -> str:
    return "nothing" if value is None else str(value)


def _check_outcome(expect: Expectations, simulation: Simulation) -> Iterator[UnmetExpectation]:
    from distsim.simulation.simulate_scenario import simulate

    if isinstance(expect.outcome, str) and expect.outcome != simulation.outcome:
        yield UnmetExpectation("outcome", expect.outcome, simulation.outcome)
    elif isinstance(expect.outcome, dict):
        for backend, expected in expect.outcome.items():
            run = simulation
            if backend != simulation.run.profile:
                run = simulate(
                    simulation.scenario, backend=backend, with_verdict=False, with_values=False
                )
            if run.outcome != expected:
                yield UnmetExpectation(f"outcome under {backend}", expected, run.outcome)


def _check_findings(expect: Expectations, simulation: Simulation) -> Iterator[UnmetExpectation]:
    """Every listed code must be found, and no error that is not listed."""
    if expect.findings is None:
        return
    severities = {finding.code: finding.severity for finding in simulation.findings}
    found = set(severities)
    errors = {code for code, severity in severities.items() if severity == "error"}
    if not found.issuperset(expect.findings) or not errors.issubset(expect.findings):
        yield UnmetExpectation(
            "findings",
            ", ".join(expect.findings) or "no errors",
            ", ".join(sorted(found)) or "none",
        )


def _check_values(expect: Expectations, simulation: Simulation) -> Iterator[UnmetExpectation]:
    for label, expected in expect.values.items():
        for rank in range(simulation.program.world_size):
            wanted = expected.get(rank) if isinstance(expected, PerRank) else expected
            if wanted is None:
                continue
            found, close = _value_matches(simulation, rank, label, wanted)
            if not close:
                yield UnmetExpectation(f"{label} on rank {rank}", _expected_text(wanted), found)


def _value_matches(
    simulation: Simulation, rank: int, label: str, wanted: object
) -> tuple[str, bool]:
    """The short form of a buffer's value, and whether it is the wanted one."""
    values = simulation.values
    if values is None:
        return "values that were not computed", False
    try:
        return values.text(rank, label), values.agrees(rank, label, wanted)
    except KeyError:
        return "no such tensor", False


def _expected_text(wanted: object) -> str:
    if not isinstance(wanted, tuple):
        return str(wanted)
    # Nested tuples in the notation of YAML lists.
    return str([*wanted]).replace("(", "[").replace(",)", "]").replace(")", "]")


def _check_bounds(
    what: str, bounds: DurationBounds | None, found_ns: int | None
) -> Iterator[UnmetExpectation]:
    if bounds is None:
        return
    if found_ns is None:
        yield UnmetExpectation(what, "a duration", "none")
        return
    if bounds.at_least_ns is not None and found_ns < bounds.at_least_ns:
        yield UnmetExpectation(
            what, f"at least {duration_text(bounds.at_least_ns)}", show_ns(found_ns)
        )
    if bounds.at_most_ns is not None and found_ns > bounds.at_most_ns:
        yield UnmetExpectation(
            what, f"at most {duration_text(bounds.at_most_ns)}", show_ns(found_ns)
        )
