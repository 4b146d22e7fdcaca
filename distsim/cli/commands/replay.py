"""`distsim replay`: a trace again, on the simulator or on torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import ClusterOption, check_scenario_suffix, command_with_arguments
from distsim.cli.commands.run import (
    RealBackendName,
    RealRunArguments,
    check_trace_path,
    report_refused_run,
    with_trace_path,
    write_recording,
    write_trace_by_suffix,
)
from distsim.cli.commands.simulate import FormatOption, OutputFormat
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster
    from distsim.real.run import RealRunOptions
    from distsim.trace.model import Trace
    from distsim.trace_replay import ReplayScale

TraceFile = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE", help="A trace, as `simulate --trace F.jsonl` and `run --real` write it."
    ),
]
BackendOption = Annotated[
    RealBackendName | None,
    typer.Option("--backend", help="In place of the trace's; auto, with --real: what is here."),
]
ScaleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scale",
        metavar="WHAT=FACTOR",
        help="Multiply durations: compute, or gaps (a host between its calls).",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="F", help="Write the replay: F.jsonl native, F.json for Perfetto."
    ),
]
ScenarioFile = Annotated[
    Path | None,
    typer.Option(
        "-o",
        metavar="S.yaml",
        help="Write the calls as a scenario: loops, and one program for equal ranks.",
    ),
]
Real = Annotated[
    bool,
    typer.Option("--real", help="Run it on torch.distributed; the options below are for that."),
]


@dataclass(frozen=True)
class ReplayArguments:
    """The arguments of `replay` besides those of a real run."""

    trace: TraceFile
    cluster: ClusterOption = None
    backend: BackendOption = None
    scale: ScaleOption = None
    output: Output = None
    scenario: ScenarioFile = None
    format: FormatOption = OutputFormat.text
    real: Real = False


@command_with_arguments(ReplayArguments, RealRunArguments)
def command(given: ReplayArguments, how: RealRunArguments) -> None:
    """Run the calls of a trace again: simulated, at another speed, elsewhere, or for real.

    \b
    Example: distsim replay run.jsonl
    Example: distsim replay run.jsonl --cluster dgx-h100 --scale compute=0.5
    Example: distsim replay run.jsonl --real --trace again.jsonl
    Example: distsim replay run.jsonl -o run.yaml
    """
    if given.scenario is not None:
        _write_scenario(given.trace, given.scenario)
    factors = _parse_scale(given.scale)
    if given.output is not None:
        check_trace_path(given.output)
    if given.real:
        raise typer.Exit(
            _replay_real(given, with_trace_path(how.wish(given.backend), given.output), factors)
        )
    _refuse_real_options(
        [*how.given(), *(["--backend auto"] if given.backend is RealBackendName.auto else [])]
    )
    raise typer.Exit(_replay_simulated(given, factors))


def _write_scenario(trace: Path, file: Path) -> None:
    from distsim.common.errors import UsageError
    from distsim.common.file_io import write_file
    from distsim.trace.jsonl import read_trace
    from distsim.trace_replay.compact import compact_trace

    check_scenario_suffix(file)
    try:
        write_file(file, [compact_trace(read_trace(trace)).text])
    except UsageError as error:
        raise UsageError(f"{trace}: {error.message}", error.remedy) from None


def _refuse_real_options(given: list[str]) -> None:
    """Raises UsageError for options that say something about a real run where there is none."""
    from distsim.common.errors import UsageError

    if given:
        raise UsageError(
            f"{', '.join(given)}: for a run on torch.distributed only",
            "add --real, or leave it out",
        )


def _replay_simulated(given: ReplayArguments, scale: ReplayScale) -> int:
    from distsim.common.errors import UsageError
    from distsim.output.text.replay_report import replay_json, replay_text
    from distsim.trace.jsonl import read_trace
    from distsim.trace_replay import replay_trace

    trace, backend = given.trace, given.backend
    source, prices = read_trace(trace), read_cluster(given.cluster)
    try:
        found = replay_trace(source, cluster=prices, backend=backend and backend.value, scale=scale)
    except UsageError as error:
        raise UsageError(f"{trace}: {error.message}", error.remedy) from None
    if given.output is not None:
        write_trace_by_suffix(given.output, found.trace)
    in_json = given.format is OutputFormat.json
    console.out(
        console.to_json(replay_json(found, str(trace)))
        if in_json
        else replay_text(found, str(trace))
    )
    return int(found.outcome != "completes")


def _replay_real(given: ReplayArguments, wish: RealRunOptions, scale: ReplayScale) -> int:
    """Run it, write the recording, print the report; the exit status."""
    import os
    from dataclasses import replace

    from distsim.output.text.real_run import real_run_text
    from distsim.output.text.replay_report import real_replay_json, real_replay_lines
    from distsim.real.launch.external_launchers import external_rank
    from distsim.real.run import RealRunRefused, chosen_backend, run_simulation
    from distsim.trace.jsonl import read_trace
    from distsim.trace_replay import prepare_real_replay

    trace, format, source = given.trace, given.format, read_trace(given.trace)
    if not wish.force:
        _refuse_partial_trace(trace, source)
    started = external_rank(os.environ, wish.master_addr or "127.0.0.1", wish.master_port or 29500)
    backend = chosen_backend(
        wish, str(source.header.get("backend") or "gloo"), source.world_size, started
    )
    ready = prepare_real_replay(
        source, str(trace), backend=backend, cluster=read_cluster(given.cluster), scale=scale
    )
    try:
        run, status = run_simulation(ready.simulation, wish, started, ready.program)
    except RealRunRefused as refused:
        report_refused_run(refused, format)
        return 1
    if run is None:  # the first launcher reports
        return status
    told = real_replay_lines(source, str(trace), ready.rebuilt.untimed)
    run = replace(run, trace=ready.rows_of(run.trace), notes=(*told, *run.notes))
    done = run
    write_recording(
        given.output,
        done.trace,
        lambda: (
            console.to_json(real_replay_json(done, source, str(trace)))
            if format is OutputFormat.json
            else real_run_text(done)
        ),
    )
    return status


def _refuse_partial_trace(file: Path, source: Trace) -> None:
    """Raises UsageError for a trace whose last calls are missing: ranks that made them would wait
    for ranks that don't.
    """
    from distsim.common.errors import UsageError
    from distsim.output.trace_data.partial_run import partial_run_text

    if source.header.get("cut") or source.header.get("reason") == "under way":
        raise UsageError(
            f"{file} is not run: {partial_run_text(source)}",
            "--force runs the calls that are there",
        )


def _parse_scale(given: list[str] | None) -> ReplayScale:
    from distsim.common.errors import UsageError
    from distsim.trace_replay import ReplayScale

    factors: dict[str, float] = {}
    for text in given or ():
        name, _, value = text.partition("=")
        try:
            factors[name] = float(value)
        except ValueError:
            factors[name] = -1.0
        if name not in ReplayScale._fields or not 0 <= factors[name] < 1e9:
            raise UsageError(
                f"--scale {text} is not understood", "as --scale compute=0.5 or --scale gaps=0"
            )
    return ReplayScale(**factors)


def read_cluster(name: str | None) -> str | Cluster | None:
    """A preset's name as it is; what a file holds."""
    if name is None or Path(name).suffix not in (".yaml", ".yml"):
        return name
    from distsim.simulation.simulate_scenario import load_cluster

    return load_cluster(name)
