"""A scenario as a test: what its `expect` says, beside what came out (design: a scenario is a
test).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from distsim.common.errors import RESOURCE_ERRORS, ScenarioErrors, UsageError, resource_error
from distsim.common.units import duration_text, show_ns
from distsim.operations.core.field_types import PerRank

if TYPE_CHECKING:
    from distsim.scenario.format.models.sections import DurationBounds, Expectations
    from distsim.simulation.simulate_scenario import Simulation


class UnmetExpectation(NamedTuple):
    """One thing that did not come out as expected, in words."""

    what: str
    expected: str
    found: str

    def __str__(self) -> str:
        return f"{self.what}: expected {self.expected}, found {self.found}"


class ScenarioTestResult(NamedTuple):
    """A file and how it did. ``simulation`` is None when it could not be read; ``error`` then says
    why.
    """

    file: str
    simulation: Simulation | None
    differences: tuple[UnmetExpectation, ...] = ()
    error: ScenarioErrors | UsageError | None = None

    @property
    def status(self) -> str:
        """``passed``, ``failed``, ``unreadable``, or ``no expect`` where the file says nothing to
        check.
        """
        if self.simulation is None:
            return "unreadable"
        if self.simulation.scenario.expect is None:
            return "no expect"
        return "failed" if self.differences else "passed"


def scenario_files(paths: list[Path]) -> tuple[Path, ...]:
    """The files named and the ``.yaml`` files in the folders named (at any depth), each once,
    sorted within a folder.

    Raises UsageError for a path that is not there and when no file is found.
    """
    found: dict[Path, None] = {}
    for path in paths:
        if path.is_dir():
            found |= dict.fromkeys(
                sorted(p for p in path.rglob("*") if p.suffix in (".yaml", ".yml") and p.is_file())
            )
        elif path.exists():
            found[path] = None
        else:
            raise UsageError(
                f"{path} is not there", "name scenario files, or folders that hold some"
            )
    if not found:
        raise UsageError(
            f"no scenario (*.yaml) in {', '.join(map(str, paths))}", "name a folder with scenarios"
        )
    return tuple(found)


def check_expectations(path: Path) -> ScenarioTestResult:
    """Simulate a file and hold the result against its `expect`. A file that can't be read is no
    exception but a result.
    """
    from distsim.scenario import load
    from distsim.simulation.simulate_scenario import simulate

    try:
        simulation = simulate(load(str(path)))
        return ScenarioTestResult(str(path), simulation, unmet_expectations(simulation))
    except (ScenarioErrors, UsageError) as error:
        return ScenarioTestResult(str(path), None, (), error)
    except RESOURCE_ERRORS as error:
        return ScenarioTestResult(str(path), None, (), resource_error(error, str(path)))


def unmet_expectations(simulation: Simulation) -> tuple[UnmetExpectation, ...]:
    """What a finished simulation has otherwise than its scenario's `expect`; empty when all is as
    expected or nothing was.
    """
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
            same = backend == simulation.run.profile
            run = (
                simulation
                if same
                else simulate(
                    simulation.scenario, backend=backend, with_verdict=False, with_values=False
                )
            )
            if run.outcome != expected:
                yield UnmetExpectation(f"outcome under {backend}", expected, run.outcome)


def _check_findings(expect: Expectations, simulation: Simulation) -> Iterator[UnmetExpectation]:
    """Every code listed must be found; an error that is not listed must not."""
    if expect.findings is None:
        return
    found = {f.code: f.severity for f in simulation.findings}
    missing = [code for code in expect.findings if code not in found]
    extra = sorted(
        code
        for code, severity in found.items()
        if severity == "error" and code not in expect.findings
    )
    if missing or extra:
        yield UnmetExpectation(
            "findings",
            ", ".join(expect.findings) or "no errors",
            ", ".join(sorted(found)) or "none",
        )


def _check_values(expect: Expectations, simulation: Simulation) -> Iterator[UnmetExpectation]:
    for label, expected in expect.values.items():
        ranks = range(simulation.program.world_size)
        by_rank = (
            dict.fromkeys(ranks, expected)
            if not isinstance(expected, PerRank)
            else {r: expected.get(r) for r in ranks}
        )
        for rank, wanted in by_rank.items():
            if wanted is None:
                continue
            found, close = _value_matches(simulation, rank, label, wanted)
            if not close:
                yield UnmetExpectation(f"{label} on rank {rank}", _expected_text(wanted), found)


def _value_matches(
    simulation: Simulation, rank: int, label: str, wanted: object
) -> tuple[str, bool]:
    """The short form of what a buffer holds, and whether that is what is wanted."""
    values = simulation.values
    if values is None:
        return "values that were not computed", False
    try:
        return values.text(rank, label), values.agrees(rank, label, wanted)
    except KeyError:
        return "no such tensor", False


def _expected_text(wanted: object) -> str:
    return (
        str([*wanted]).replace("(", "[").replace(",)", "]").replace(")", "]")
        if isinstance(wanted, tuple)
        else str(wanted)
    )


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
