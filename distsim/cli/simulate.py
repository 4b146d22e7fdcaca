"""`distsim simulate`: outcome, verdict, findings, times, values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.app import (
    BackendOption,
    ClusterOption,
    File,
    MaxCalls,
    NoFold,
    ReportOption,
    Sets,
    is_trace,
    read_scenario,
    taking,
)

if TYPE_CHECKING:
    from distsim.check.schedule import Schedule
    from distsim.simulation import Simulation


class Format(StrEnum):
    """How the report is printed."""

    text = "text"
    json = "json"


Traces = Annotated[
    list[Path] | None, typer.Option("--trace", metavar="F", help="Write the run: F.jsonl native, F.json for Perfetto.")
]
FormatOption = Annotated[Format, typer.Option("--format", help="A report to read, or JSON for programs.")]
NoVerdict = Annotated[bool, typer.Option("--no-verdict", help="Skip the verdict: this run alone.")]
NoValues = Annotated[bool, typer.Option("--no-values", help="Skip what the tensors hold.")]
Strict = Annotated[
    bool, typer.Option("--strict", help="A leak counts as an error, and a search that stopped at its bound as a failure.")
]
ScheduleOption = Annotated[
    Path | None,
    typer.Option("--schedule", metavar="F", help="Follow the order of events in F, which `check --format json` wrote."),
]

Against = Annotated[
    str | None,
    typer.Option("--against", metavar="B", help="Beside the scenario B as it stands: one table of differences."),
]
WhatIf = Annotated[bool, typer.Option("--what-if", help="Every resource twice as fast, in turn; the critical path by kind.")]
Draws = Annotated[
    int | None, typer.Option("--draws", metavar="N", min=2, help="As many runs with seeds from the file's on: the spread.")
]
Stragglers = Annotated[
    str | None,
    typer.Option("--stragglers", metavar="SHARExFACTOR", help="With --draws: ranks that are slow by chance, as 1%x1.3."),
]


@dataclass(frozen=True)
class SimulateOptions:
    """The arguments of `simulate`."""

    file: File
    trace: Traces = None
    report: ReportOption = None
    format: FormatOption = Format.text
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: Sets = None
    schedule: ScheduleOption = None
    no_verdict: NoVerdict = False
    no_values: NoValues = False
    strict: Strict = False
    max_calls: MaxCalls = None
    no_fold: NoFold = False


@dataclass(frozen=True)
class WhatIfOptions:
    """The further questions of `simulate`."""

    against: Against = None
    what_if: WhatIf = False
    draws: Draws = None
    stragglers: Stragglers = None


@taking(SimulateOptions, WhatIfOptions)
def command(given: SimulateOptions, more: WhatIfOptions) -> None:
    """Simulate a scenario: outcome, verdict, findings, times, values.

    \b
    Example: distsim simulate scenarios/hybrid.yaml
    Example: distsim simulate scenarios/ring_of_four.yaml --backend mpi
    Example: distsim simulate scenarios/hybrid.yaml --trace hybrid.json
    Example: distsim simulate a.yaml --against b.yaml
    Example: distsim simulate scenarios/hybrid.yaml --what-if
    """
    asked = more != WhatIfOptions()
    if asked:
        from distsim.cli import whatif

        whatif.check(given, more)
    traces, file = given.trace or (), given.file
    writers = [trace_writer(path) for path in traces]
    if given.report is not None:
        from distsim.cli.report import check_report_name

        check_report_name(given.report)
    with console.phases(file != "-") as tell:
        tell(f"reading {file}")
        simulation = _simulated(given, tell)
        tell("the report")
        for path, write in zip(traces, writers, strict=True):
            write(simulation, path)
        if given.report is not None:
            from distsim.cli.report import report_simulation

            report_simulation(given.report, simulation)
        report = whatif.answer(given, more, simulation, tell) if asked else _report(simulation, given.format)
    console.out(report)
    raise typer.Exit(status(simulation, given.strict))


def _simulated(given: SimulateOptions, tell: Callable[[str], None]) -> Simulation:
    """Of a scenario, or of the calls that a trace tells of."""
    file, backend = given.file, given.backend
    if is_trace(file):
        from distsim.cli.traced import simulate_trace

        return simulate_trace(file, backend=backend and str(backend), cluster=given.cluster)
    from distsim.simulation import simulate

    return simulate(
        read_scenario(file, given.sets), backend=backend, cluster=given.cluster, with_verdict=not given.no_verdict,
        with_values=False if given.no_values else None, schedule=_order(given.schedule, file), max_calls=given.max_calls,
        fold=False if given.no_fold else None, tell=tell,
    )  # fmt: skip


def _order(schedule: Path | None, file: str) -> Schedule | None:
    if schedule is None:
        return None
    return read_schedule(schedule, file)


def status(simulation: Simulation, strict: bool = False) -> int:
    """The exit status: 0 when the outcome is `completes`, no finding is an error (``strict``: nor a leak, and all orders were looked at),
    and what ranks hold fits their device (DS806); else 1."""
    verdict = simulation.verdict
    leaks = strict and verdict is not None and (verdict.verdict == "leak" or not verdict.complete)
    errors = any(finding.severity == "error" or finding.code == "DS806" for finding in simulation.findings)
    return int(errors or leaks or simulation.outcome != "completes")


def trace_writer(path: Path) -> Callable[[Simulation, Path], None]:
    """How a trace is written, by the file's name. Raises UsageError for a name that says neither, before anything runs."""
    from distsim.errors import UsageError
    from distsim.files import is_stream

    writers = {".jsonl": _write_native, ".json": _write_chrome}
    ending = Path(path.name.removesuffix(".gz")).suffix
    if is_stream(path):
        return writers.get(ending, _write_native)
    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the trace", "name a file in a folder that exists")
    if ending not in writers:
        raise UsageError(f"{path} is no name for a trace", "end it in .jsonl (distsim's own form) or .json (for Perfetto)")
    return writers[ending]


def _write_native(simulation: Simulation, path: Path) -> None:
    from distsim.trace import Trace
    from distsim.trace_io import packed, trace_lines
    from distsim.views.values import values_header

    trace = simulation.run.trace
    whole = Trace({**trace.header, **values_header(simulation)}, trace.tables, trace.columns)
    console.write_file(path, packed(path, trace_lines(whole)))


def _write_chrome(simulation: Simulation, path: Path) -> None:
    from distsim.check.memory import held
    from distsim.trace_io import packed
    from distsim.views.chrome import chrome_lines
    from distsim.views.holding import filled

    trace = simulation.run.trace
    memory = filled(held(simulation.scenario, simulation.program), trace, range(trace.world_size))
    console.write_file(path, packed(path, chrome_lines(trace, memory)))


def _report(simulation: Simulation, format: Format) -> str:
    if format is Format.json:
        from distsim.views.jsonview import simulation_json

        return console.to_json(simulation_json(simulation))
    from distsim.views.text import report

    return report(simulation)


# --- the order of events that `check --format json` wrote ---
_REMEDY = "write it with `distsim check FILE --format json > F`: a verdict that depends on the order of events has a `schedule`"


def read_schedule(path: Path, scenario: str) -> Schedule:
    """The schedule for a scenario file: the whole output of a check, one file's part of it, or the schedule alone.

    Raises UsageError where there is none.
    """
    import json

    from distsim.check.schedule import schedule_from_json
    from distsim.errors import UsageError
    from distsim.files import read_bytes

    try:
        data = json.loads(read_bytes(path))
    except OSError as error:
        raise UsageError(f"can't read {path}: {error.strerror}", _REMEDY) from None
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is no JSON", _REMEDY) from None
    return schedule_from_json(_schedule(data, path, scenario))


def _schedule(data: object, path: Path, scenario: str) -> object:
    from distsim.errors import UsageError

    if isinstance(data, dict) and isinstance(data.get("files"), list):
        files = [one for one in data["files"] if isinstance(one, dict)]
        named = [one for one in files if one.get("file") == scenario] or (files if len(files) == 1 else [])
        if not named:
            raise UsageError(f"{path} says nothing of {scenario}", _REMEDY)
        data = named[0]
    if isinstance(data, dict) and "schedule" in data:
        if data["schedule"] is None:
            raise UsageError(f"{path} has no schedule: any order of events leads to its verdict", "simulate without --schedule")
        data = data["schedule"]
    return data
