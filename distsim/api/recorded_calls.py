"""Traces where a function expects a scenario: the recorded calls are checked or simulated.

The calls are rebuilt as a program, so that the verdict and the findings are those of a scenario
with the same calls. Findings name the places that the trace recorded.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from distsim.common.file_io import escape_control_characters

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster
    from distsim.program.model import Program
    from distsim.simulation.check_scenario import CheckResult
    from distsim.simulation.simulate_scenario import Simulation
    from distsim.trace.model import Trace


class _RebuiltProgram(NamedTuple):
    """The calls of a trace as a program under a backend."""

    trace: Trace
    backend: str
    program: Program


class CheckedTrace(NamedTuple):
    """The check of a trace's calls, and notes about the trace."""

    result: CheckResult
    notes: tuple[str, ...]


class SimulatedTrace(NamedTuple):
    """The simulation of a trace's calls, and notes about the trace."""

    simulation: Simulation
    notes: tuple[str, ...]


def check_trace(file: str, *, backend: str | None, max_states: int) -> CheckedTrace:
    """Check the calls of a trace. Raises UsageError for a file that is not a trace."""
    from dataclasses import replace

    from distsim.simulation.check_scenario import check_program

    rebuilt = _rebuild_program(file, backend)
    result = replace(check_program(rebuilt.program, max_states=max_states), file=file)
    return CheckedTrace(result, _partial_trace_notes(file, rebuilt.trace))


def simulate_trace(
    file: str, *, backend: str | None, cluster: str | Mapping[str, Any] | Cluster | None
) -> SimulatedTrace:
    """Simulate the calls of a trace. Raises UsageError for a file that is not a trace."""
    from distsim.api.inputs import read_cluster
    from distsim.scenario import Scenario
    from distsim.simulation.simulate_scenario import cost_model, simulate_program

    trace, chosen_backend, program = _rebuild_program(file, backend)
    world: object = program.world_size
    if program.nodes > 1:
        world = {"nodes": program.nodes, "ranks_per_node": program.local_size}
    scenario = Scenario(
        name=program.name,
        world=world,
        backend=chosen_backend,
        program=[],
        file=program.file or file,
    )
    # The header has the cluster that the trace was simulated on. Under another backend, the default
    # cluster of that backend is right instead.
    chosen_cluster = cluster or None
    if chosen_cluster is None and not backend:
        chosen_cluster = trace.header.get("prices")
    costs = cost_model(scenario, program, read_cluster(chosen_cluster))
    simulation = simulate_program(scenario, program, costs, with_values=False)
    return SimulatedTrace(simulation, _partial_trace_notes(file, trace))


def without_file_name(message: str, file: str) -> str:
    """A message without the file name that it begins with, for a place that already names it."""
    name = re.escape(escape_control_characters(file, one_line=True))
    return re.sub(f"^{name}:? ", "", message)


def _rebuild_program(file: str, backend: str | None) -> _RebuiltProgram:
    """Read a trace, and rebuild its calls under ``backend`` or its own. Raises UsageError."""
    from distsim.simulation.trace_replay import rebuild_program

    trace = _read_nonempty_trace(file)
    chosen_backend = _backend_of_trace(file, backend or trace.header.get("backend"))
    rebuilt = rebuild_program(trace, backend=chosen_backend, resolve=False)
    return _RebuiltProgram(trace, chosen_backend, rebuilt.program)


def _read_nonempty_trace(file: str) -> Trace:
    """Read a trace. Raises UsageError for a partial trace without calls."""
    from distsim.api.inputs import load_trace
    from distsim.common.errors import UsageError
    from distsim.trace.run_end import is_partial

    trace = load_trace(file)
    if not len(trace) and is_partial(trace):
        raise UsageError(
            f"{file}: the trace ends before its first call, so there is nothing to check",
            f"`distsim replay {file}` shows how the run ended",
        )
    return trace


def _partial_trace_notes(file: str, trace: Trace) -> tuple[str, ...]:
    from distsim.trace.run_end import is_partial

    if not is_partial(trace):
        return ()
    return (
        f"{file}: the trace ends before the run did, so only the recorded calls are checked. "
        f"`distsim replay {file}` shows how the run ended",
    )


def _backend_of_trace(file: str, named: object) -> str:
    """The backend of that name, or the default. Raises UsageError for an unknown one."""
    from distsim.backends import BACKEND_PROFILES, DEFAULT_BACKEND
    from distsim.common.errors import UsageError

    backend = str(named or DEFAULT_BACKEND)
    if backend not in BACKEND_PROFILES:
        raise UsageError(
            f"{file}: distsim does not know the backend `{backend}` of this trace",
            "choose a backend with --backend",
        )
    return backend
