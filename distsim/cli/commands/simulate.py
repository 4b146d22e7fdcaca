"""`distsim simulate`: outcome, verdict, findings, times, values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import (
    BackendOption,
    ClusterOption,
    MaxCallsOption,
    NoFoldOption,
    ReportOption,
    ScenarioArgument,
    SetOption,
    command_with_arguments,
    is_trace,
    read_scenario,
)
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.checker.replay_schedule import ReplaySchedule
    from distsim.simulation.simulate_scenario import Simulation


class OutputFormat(StrEnum):
    """How the report is printed."""

    text = "text"
    json = "json"


TraceOutputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--trace", metavar="F", help="Write the run: F.jsonl native, F.json for Perfetto."
    ),
]
FormatOption = Annotated[
    OutputFormat, typer.Option("--format", help="A report to read, or JSON for programs.")
]
NoVerdict = Annotated[bool, typer.Option("--no-verdict", help="Skip the verdict: this run alone.")]
NoValues = Annotated[bool, typer.Option("--no-values", help="Skip what the tensors hold.")]
Strict = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="A leak counts as an error, and a search that stopped at its bound as a failure.",
    ),
]
ScheduleOption = Annotated[
    Path | None,
    typer.Option(
        "--schedule",
        metavar="F",
        help="Follow the order of events in F, which `check --format json` wrote.",
    ),
]

AgainstOption = Annotated[
    str | None,
    typer.Option(
        "--against",
        metavar="B",
        help="Beside the scenario B as it stands: one table of differences.",
    ),
]
WhatIfOption = Annotated[
    bool,
    typer.Option(
        "--what-if", help="Every resource twice as fast, in turn; the critical path by kind."
    ),
]
DrawsOption = Annotated[
    int | None,
    typer.Option(
        "--draws",
        metavar="N",
        min=2,
        help="As many runs with seeds from the file's on: the spread.",
    ),
]
StragglersOption = Annotated[
    str | None,
    typer.Option(
        "--stragglers",
        metavar="SHARExFACTOR",
        help="With --draws: ranks that are slow by chance, as 1%x1.3.",
    ),
]


@dataclass(frozen=True)
class SimulateArguments:
    """The arguments of `simulate`."""

    file: ScenarioArgument
    trace: TraceOutputs = None
    report: ReportOption = None
    format: FormatOption = OutputFormat.text
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: SetOption = None
    schedule: ScheduleOption = None
    no_verdict: NoVerdict = False
    no_values: NoValues = False
    strict: Strict = False
    max_calls: MaxCallsOption = None
    no_fold: NoFoldOption = False


@dataclass(frozen=True)
class WhatIfArguments:
    """The further questions of `simulate`."""

    against: AgainstOption = None
    what_if: WhatIfOption = False
    draws: DrawsOption = None
    stragglers: StragglersOption = None


@command_with_arguments(SimulateArguments, WhatIfArguments)
def command(given: SimulateArguments, more: WhatIfArguments) -> None:
    """Simulate a scenario: outcome, verdict, findings, times, values.

    \b
    Example: distsim simulate scenarios/hybrid.yaml
    Example: distsim simulate scenarios/ring_of_four.yaml --backend mpi
    Example: distsim simulate scenarios/hybrid.yaml --trace hybrid.json
    Example: distsim simulate a.yaml --against b.yaml
    Example: distsim simulate scenarios/hybrid.yaml --what-if
    """
    asked = more != WhatIfArguments()
    if asked:
        from distsim.cli.shared import what_if_report

        what_if_report.check_what_if_arguments(given, more)
    traces, file = given.trace or (), given.file
    writers = [trace_writer(path) for path in traces]
    if given.report is not None:
        from distsim.cli.commands.report import check_report_path

        check_report_path(given.report)
    with console.progress_phases(file != "-") as tell:
        tell(f"reading {file}")
        simulation = _simulate_input(given, tell)
        tell("the report")
        for path, write in zip(traces, writers, strict=True):
            write(simulation, path)
        if given.report is not None:
            from distsim.cli.commands.report import write_simulation_report

            write_simulation_report(given.report, simulation)
        report = (
            what_if_report.what_if_report(given, more, simulation, tell)
            if asked
            else _report_text(simulation, given.format)
        )
    console.out(report)
    raise typer.Exit(simulation_exit_status(simulation, given.strict))


def _simulate_input(given: SimulateArguments, tell: Callable[[str], None]) -> Simulation:
    """Of a scenario, or of the calls that a trace tells of."""
    file, backend = given.file, given.backend
    if is_trace(file):
        from distsim.cli.shared.trace_input import simulate_trace

        return simulate_trace(file, backend=backend and str(backend), cluster=given.cluster)
    from distsim.simulation.simulate_scenario import simulate

    return simulate(
        read_scenario(file, given.sets),
        backend=backend,
        cluster=given.cluster,
        with_verdict=not given.no_verdict,
        with_values=False if given.no_values else None,
        schedule=_schedule_or_none(given.schedule, file),
        max_calls=given.max_calls,
        fold=False if given.no_fold else None,
        tell=tell,
    )


def _schedule_or_none(schedule: Path | None, file: str) -> ReplaySchedule | None:
    if schedule is None:
        return None
    return read_schedule(schedule, file)


def simulation_exit_status(simulation: Simulation, strict: bool = False) -> int:
    """The exit status: 0 when the outcome is `completes`, no finding is an error (``strict``: nor a
    leak, and all orders were looked at), and what ranks hold fits their device (DS806); else 1."""
    verdict = simulation.verdict
    leaks = strict and verdict is not None and (verdict.verdict == "leak" or not verdict.complete)
    errors = any(
        finding.severity == "error" or finding.code == "DS806" for finding in simulation.findings
    )
    return int(errors or leaks or simulation.outcome != "completes")


def trace_writer(path: Path) -> Callable[[Simulation, Path], None]:
    """How a trace is written, by the file's name. Raises UsageError for a name that says neither,
    before anything runs.
    """
    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream

    writers = {".jsonl": _write_native, ".json": _write_chrome}
    ending = Path(path.name.removesuffix(".gz")).suffix
    if is_stream(path):
        return writers.get(ending, _write_native)
    if not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {path.parent} for the trace", "name a file in a folder that exists"
        )
    if ending not in writers:
        raise UsageError(
            f"{path} is no name for a trace",
            "end it in .jsonl (distsim's own form) or .json (for Perfetto)",
        )
    return writers[ending]


def _write_native(simulation: Simulation, path: Path) -> None:
    from distsim.output.json.tensor_values import trace_header_values
    from distsim.trace.jsonl import encode_pieces, trace_lines
    from distsim.trace.model import Trace

    trace = simulation.run.trace
    whole = Trace({**trace.header, **trace_header_values(simulation)}, trace.tables, trace.columns)
    console.write_file(path, encode_pieces(path, trace_lines(whole)))


def _write_chrome(simulation: Simulation, path: Path) -> None:
    from distsim.checker.detectors.peak_memory import peak_memory
    from distsim.output.json.chrome_trace import chrome_trace_lines
    from distsim.output.trace_data.memory_over_time import memory_profiles
    from distsim.trace.jsonl import encode_pieces

    trace = simulation.run.trace
    memory = memory_profiles(
        peak_memory(simulation.scenario, simulation.program), trace, range(trace.world_size)
    )
    console.write_file(path, encode_pieces(path, chrome_trace_lines(trace, memory)))


def _report_text(simulation: Simulation, format: OutputFormat) -> str:
    if format is OutputFormat.json:
        from distsim.output.json.simulation_result import simulation_json

        return console.to_json(simulation_json(simulation))
    from distsim.output.text.simulation_report import simulation_report_text

    return simulation_report_text(simulation)


# --- the order of events that `check --format json` wrote ---
_SCHEDULE_REMEDY = "write it with `distsim check FILE --format json > F`: a verdict that depends on the order of events has a `schedule`"


def read_schedule(path: Path, scenario: str) -> ReplaySchedule:
    """The schedule for a scenario file: the whole output of a check, one file's part of it, or the
    schedule alone.

    Raises UsageError where there is none.
    """
    import json

    from distsim.checker.replay_schedule import schedule_from_json
    from distsim.common.errors import UsageError
    from distsim.common.file_io import read_bytes

    try:
        data = json.loads(read_bytes(path))
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}", _SCHEDULE_REMEDY) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON", _SCHEDULE_REMEDY) from None
    return schedule_from_json(_schedule_in_json(data, path, scenario))


def _schedule_in_json(data: object, path: Path, scenario: str) -> object:
    from distsim.common.errors import UsageError

    if isinstance(data, dict) and isinstance(data.get("files"), list):
        files = [one for one in data["files"] if isinstance(one, dict)]
        named = [one for one in files if one.get("file") == scenario] or (
            files if len(files) == 1 else []
        )
        if not named:
            raise UsageError(f"{path} says nothing of {scenario}", _SCHEDULE_REMEDY)
        data = named[0]
    if isinstance(data, dict) and "schedule" in data:
        if data["schedule"] is None:
            raise UsageError(
                f"{path} has no schedule: any order of events leads to its verdict",
                "simulate without --schedule",
            )
        data = data["schedule"]
    return data
