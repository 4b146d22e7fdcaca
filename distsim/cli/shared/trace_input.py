"""Traces where a scenario is expected: the calls that a trace tells of, judged as a scenario's are,
at the places that it names.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from distsim.common.file_io import escape_control_characters

if TYPE_CHECKING:
    from distsim.simulation.check_scenario import CheckResult
    from distsim.simulation.simulate_scenario import Simulation
    from distsim.trace.model import Trace


def check_trace(file: str, *, backend: str | None, max_states: int) -> CheckResult:
    """What `check` says of a trace's calls. A file that can't be read is no exception but a result
    with ``errors``.
    """
    from dataclasses import replace

    from distsim.common.errors import ScenarioProblem, UsageError
    from distsim.simulation.check_scenario import CheckResult, check_program
    from distsim.trace_replay import rebuild_program

    try:
        trace = _read_nonempty_trace(file)
        chosen = _backend_of_trace(file, backend or trace.header.get("backend"))
        program = rebuild_program(trace, backend=chosen, resolve=False).program
    except UsageError as error:
        return CheckResult(
            file,
            (
                ScenarioProblem(
                    file, 0, 0, without_file_name(error.message, file), hint=error.remedy
                ),
            ),
        )
    _note_partial_trace(file, trace)
    return replace(check_program(program, max_states=max_states), file=file)


def without_file_name(message: str, file: str) -> str:
    """The message of a refusal behind whose place it stands, without the name it begins with."""
    return re.sub(f"^{re.escape(escape_control_characters(file, one_line=True))}:? ", "", message)


def simulate_trace(file: str, *, backend: str | None, cluster: str | None) -> Simulation:
    """What `simulate` says of a trace's calls. Raises UsageError for a file that is no trace."""
    from distsim.cli.commands.replay import read_cluster
    from distsim.scenario import Scenario
    from distsim.simulation.simulate_scenario import cost_model, simulate_program
    from distsim.trace_replay import rebuild_program

    trace = _read_nonempty_trace(file)
    chosen = _backend_of_trace(file, backend or trace.header.get("backend"))
    program = rebuild_program(trace, backend=chosen, resolve=False).program
    _note_partial_trace(file, trace)
    world = (
        {"nodes": program.nodes, "ranks_per_node": program.local_size}
        if program.nodes > 1
        else program.world_size
    )
    scenario = Scenario(
        name=program.name, world=world, backend=chosen, program=[], file=program.file or file
    )
    named = cluster or (None if backend else trace.header.get("prices"))
    prices = cost_model(scenario, program, read_cluster(named) if isinstance(named, str) else named)
    return simulate_program(scenario, program, prices, with_values=False)


def _read_nonempty_trace(file: str) -> Trace:
    """A trace that tells of calls. Raises UsageError."""
    from distsim.common.errors import UsageError
    from distsim.trace.jsonl import read_trace
    from distsim.trace.run_end import is_partial

    trace = read_trace(file)
    if not len(trace) and is_partial(trace):
        raise UsageError(
            f"{file}: the trace stops before its first call, so there is nothing to judge",
            f"`distsim replay {file}` tells how the run ended",
        )
    return trace


def _note_partial_trace(file: str, trace: Trace) -> None:
    from distsim.cli.shared import console
    from distsim.trace.run_end import is_partial

    if is_partial(trace):
        console.note(
            f"{file}: the trace stops before its run did; judged are the calls it tells of. "
            f"How the run ended: `distsim replay {file}`"
        )


def _backend_of_trace(file: str, named: object) -> str:
    from distsim.backends import BACKEND_PROFILES, DEFAULT_BACKEND
    from distsim.common.errors import UsageError

    chosen = str(named or DEFAULT_BACKEND)
    if chosen not in BACKEND_PROFILES:
        raise UsageError(
            f"{file}: the trace is of back end `{chosen}`, which has no profile",
            "name one with --backend",
        )
    return chosen
