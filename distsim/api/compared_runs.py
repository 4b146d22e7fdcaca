"""The runs that `distsim.compare` and `distsim.report` show: recorded, or simulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from distsim.api.inputs import is_scenario, is_yaml_text, load_scenario, load_trace
from distsim.scenario import Scenario

if TYPE_CHECKING:
    from distsim.output.page import ReportRun
    from distsim.trace.model import Trace


def read_two_runs(
    first: Trace | Scenario | str | Path,
    second: Trace | Scenario | str | Path,
    cluster: str | None,
) -> tuple[ReportRun, ReportRun]:
    """Both runs; a scenario that is compared with a trace is simulated under its backend."""
    from distsim.output.page import report_run_from_trace

    traces: dict[int, Trace] = {}
    for index, source in enumerate((first, second)):
        if not (isinstance(source, Scenario) or _is_scenario_path(source)):
            traces[index] = load_trace(source)
    backends = [trace.header.get("backend") for trace in traces.values()]
    backend = next((str(name) for name in backends if name), None)

    def read(index: int, source: Trace | Scenario | str | Path) -> ReportRun:
        if index in traces:
            name = source_name(source, ("first", "second")[index])
            return report_run_from_trace(traces[index], name, None)
        assert isinstance(source, Scenario | str | Path)
        return _simulated_run(load_scenario(source), backend, cluster)

    return read(0, first), read(1, second)


def source_name(source: object, default: str) -> str:
    """The file of a source, or the default if it has none."""
    if isinstance(source, Scenario):
        return source.file or default
    return str(source) if isinstance(source, str | Path) else default


def _is_scenario_path(source: object) -> bool:
    """Whether a source is the path of a scenario, or its text."""
    return isinstance(source, str | Path) and (is_yaml_text(source) or is_scenario(str(source)))


def _simulated_run(scenario: Scenario, backend: str | None, cluster: str | None) -> ReportRun:
    """The run of a scenario; its trace has the outcome and values of a recorded trace."""
    from dataclasses import replace

    from distsim.backends import BACKEND_PROFILES
    from distsim.output.json.tensor_values import trace_header_values
    from distsim.output.page import report_run_from_simulation
    from distsim.simulation.simulate_scenario import simulate
    from distsim.trace.model import Trace

    simulation = simulate(
        scenario,
        backend=backend if backend in BACKEND_PROFILES else None,
        cluster=cluster,
        with_verdict=False,
    )
    trace = simulation.run.trace
    header = {**trace.header, "outcome": simulation.outcome, **trace_header_values(simulation)}
    recorded = Trace(header, trace.tables, trace.columns)
    return replace(report_run_from_simulation(simulation, all_ranks=True), trace=recorded)
