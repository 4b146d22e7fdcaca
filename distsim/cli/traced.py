"""Traces where a scenario is expected: the calls that a trace tells of, judged as a scenario's are, at the places that it names."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distsim.files import visible

if TYPE_CHECKING:
    from distsim.checking import CheckResult
    from distsim.simulation import Simulation
    from distsim.trace import Trace


def check_trace(file: str, *, backend: str | None, max_states: int) -> CheckResult:
    """What `check` says of a trace's calls. A file that can't be read is no exception but a result with ``errors``."""
    from dataclasses import replace

    from distsim.checking import CheckResult, check_program
    from distsim.errors import Problem, UsageError
    from distsim.replay import program_of

    try:
        trace = _told(file)
        chosen = _backend(file, backend or trace.header.get("backend"))
        program = program_of(trace, backend=chosen, resolve=False).program
    except UsageError as error:
        return CheckResult(file, (Problem(file, 0, 0, unnamed(error.message, file), hint=error.remedy),))
    _note_partial(file, trace)
    return replace(check_program(program, max_states=max_states), file=file)


def unnamed(message: str, file: str) -> str:
    """The message of a refusal behind whose place it stands, without the name it begins with."""
    return re.sub(f"^{re.escape(visible(file, one_line=True))}:? ", "", message)


def simulate_trace(file: str, *, backend: str | None, cluster: str | None) -> Simulation:
    """What `simulate` says of a trace's calls. Raises UsageError for a file that is no trace."""
    from distsim.cli.replay import read_cluster
    from distsim.replay import program_of
    from distsim.scenario import Scenario
    from distsim.simulation import cost_model, simulate_program

    trace = _told(file)
    chosen = _backend(file, backend or trace.header.get("backend"))
    program = program_of(trace, backend=chosen, resolve=False).program
    _note_partial(file, trace)
    world = {"nodes": program.nodes, "ranks_per_node": program.local_size} if program.nodes > 1 else program.world_size
    scenario = Scenario(name=program.name, world=world, backend=chosen, program=[], file=program.file or file)
    named = cluster or (None if backend else trace.header.get("prices"))
    prices = cost_model(scenario, program, read_cluster(named) if isinstance(named, str) else named)
    return simulate_program(scenario, program, prices, with_values=False)


def _told(file: str) -> Trace:
    """A trace that tells of calls. Raises UsageError."""
    from distsim.errors import UsageError
    from distsim.trace import is_partial
    from distsim.trace_io import read_trace

    trace = read_trace(file)
    if not len(trace) and is_partial(trace):
        raise UsageError(
            f"{file}: the trace stops before its first call, so there is nothing to judge",
            f"`distsim replay {file}` tells how the run ended",
        )
    return trace


def _note_partial(file: str, trace: Trace) -> None:
    from distsim.cli import console
    from distsim.trace import is_partial

    if is_partial(trace):
        console.note(
            f"{file}: the trace stops before its run did; judged are the calls it tells of. "
            f"How the run ended: `distsim replay {file}`"
        )


def _backend(file: str, named: object) -> str:
    from distsim.errors import UsageError
    from distsim.profiles import DEFAULT_BACKEND, PROFILES

    chosen = str(named or DEFAULT_BACKEND)
    if chosen not in PROFILES:
        raise UsageError(f"{file}: the trace is of back end `{chosen}`, which has no profile", "name one with --backend")
    return chosen
