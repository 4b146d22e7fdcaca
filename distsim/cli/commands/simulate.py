"""`distsim simulate`: outcome, verdict, findings, times, values."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import OutputFormat, command_with_arguments, read_input
from distsim.cli.shared.simulate_arguments import SimulateArguments, WhatIfArguments
from distsim.cli.shared.trace_output import trace_writer

if TYPE_CHECKING:
    from distsim.api.results import SimulationAnswer
    from distsim.checker.replay_schedule import ReplaySchedule


@command_with_arguments(SimulateArguments, WhatIfArguments)
def command(arguments: SimulateArguments, what_if: WhatIfArguments) -> None:
    """Simulate a scenario; print its outcome, verdict, findings, times and values.

    \b
    Example: distsim simulate scenarios/hybrid.yaml
    Example: distsim simulate scenarios/ring_of_four.yaml --backend mpi
    Example: distsim simulate scenarios/hybrid.yaml --trace hybrid.json
    Example: distsim simulate a.yaml --compare-with b.yaml
    Example: distsim simulate scenarios/hybrid.yaml --what-if
    """
    asks_what_if = what_if != WhatIfArguments()
    if asks_what_if:
        from distsim.cli.shared.what_if_report import check_what_if_arguments

        check_what_if_arguments(arguments, what_if)
    trace_paths = arguments.trace or ()
    writers = [trace_writer(path) for path in trace_paths]
    if arguments.report is not None:
        from distsim.cli.shared.html_report import check_report_path

        check_report_path(arguments.report)

    with console.progress_phases(arguments.file != "-") as show_phase:
        show_phase(f"reading {arguments.file}")
        answer = _simulate_input(arguments, show_phase)
        show_phase("the report")
        for path, write_trace in zip(trace_paths, writers, strict=True):
            write_trace(answer.raw, path)
        if arguments.report is not None:
            from distsim.cli.shared.html_report import write_simulation_report

            write_simulation_report(arguments.report, answer.raw)
        if asks_what_if:
            from distsim.cli.shared.what_if_report import what_if_report

            report = what_if_report(arguments, what_if, answer.raw, show_phase)
        else:
            report = _report_text(answer, arguments.format)
    console.out(report)
    raise typer.Exit(int(not answer.ok))


def _simulate_input(
    arguments: SimulateArguments, show_phase: Callable[[str], None]
) -> SimulationAnswer:
    """Simulate the scenario, or the calls that a trace recorded."""
    from distsim.api.functions import simulate

    # None lets the simulation decide; the options can only switch values and folding off.
    answer = simulate(
        read_input(arguments.file, arguments.sets),
        backend=arguments.backend,
        cluster=arguments.cluster,
        verdict=not arguments.no_verdict,
        values=False if arguments.no_values else None,
        strict=arguments.strict,
        schedule=_schedule_of(arguments),
        max_calls=arguments.max_calls,
        fold=False if arguments.all_ranks else None,
        progress=show_phase,
    )
    for note in answer.notes:
        console.note(note)
    return answer


def _report_text(answer: SimulationAnswer, format: OutputFormat) -> str:
    if format is OutputFormat.json:
        return console.to_json(answer.to_json())
    return answer.to_text()


# --- the order of events that `check --format json` wrote ---
_SCHEDULE_REMEDY = (
    "write it with `distsim check FILE --format json > F`: "
    "a verdict that depends on the order of events has a `schedule`"
)


def _schedule_of(arguments: SimulateArguments) -> ReplaySchedule | None:
    if arguments.event_order is None:
        return None
    return read_schedule(arguments.event_order, arguments.file)


def read_schedule(path: Path, scenario: str) -> ReplaySchedule:
    """The schedule for a scenario file.

    The file may hold the whole output of a check, the part about one scenario, or the schedule
    alone. Raises UsageError if there is none.
    """
    import json

    from distsim.checker.replay_schedule import schedule_from_json
    from distsim.common.errors import UsageError
    from distsim.common.file_io import read_bytes
    from distsim.common.reading_limits import reading_limits

    try:
        with reading_limits(path):
            data = json.loads(read_bytes(path))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", _SCHEDULE_REMEDY) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not valid JSON", _SCHEDULE_REMEDY) from None
    return schedule_from_json(_schedule_in_json(data, path, scenario))


def _schedule_in_json(data: object, path: Path, scenario: str) -> object:
    """The schedule alone, taken out of the JSON of a check if there is one around it."""
    from distsim.common.errors import UsageError

    if isinstance(data, dict) and isinstance(data.get("files"), list):
        data = _result_of_file(data["files"], path, scenario)
    if not isinstance(data, dict) or "schedule" not in data:
        return data
    if data["schedule"] is None:
        raise UsageError(
            f"{path} has no schedule: every order of events gives the same verdict",
            "simulate without --event-order",
        )
    return data["schedule"]


def _result_of_file(files: list[object], path: Path, scenario: str) -> object:
    """The result for a scenario; if the check was of one file, its name need not match."""
    from distsim.common.errors import UsageError

    results = [one for one in files if isinstance(one, dict)]
    for result in results:
        if result.get("file") == scenario:
            return result
    if len(results) == 1:
        return results[0]
    raise UsageError(f"{path} contains no result for {scenario}", _SCHEDULE_REMEDY)
