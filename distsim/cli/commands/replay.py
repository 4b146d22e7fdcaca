"""`distsim replay`: run the calls of a trace again, on the simulator or on torch.distributed."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.api.inputs import load_trace, read_cluster
from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    ClusterOption,
    FormatOption,
    OutputFormat,
    choice_option,
    command_with_arguments,
)
from distsim.cli.shared.backend_names import RealBackendName
from distsim.cli.shared.real_run_arguments import RealRunArguments
from distsim.cli.shared.scenario_output import check_scenario_suffix
from distsim.cli.shared.trace_output import (
    check_trace_path,
    report_refused_run,
    with_trace_path,
    write_recording,
    write_trace_by_suffix,
)

if TYPE_CHECKING:
    from distsim.real.run import RealRun, RealRunOptions
    from distsim.simulation.trace_replay import ReplayScale
    from distsim.trace.model import Trace

TraceArgument = Annotated[
    Path,
    typer.Argument(
        metavar="TRACE",
        help="Trace written by `simulate --trace F.jsonl` or `run --real`, or a folder with the "
        "PyTorch profiles of all ranks (Gloo only).",
    ),
]
BackendOption = Annotated[
    RealBackendName | None,
    choice_option(
        RealBackendName,
        "--backend",
        help="Backend; overrides the trace. auto (with --real): a backend that is available here.",
    ),
]
ScaleOption = Annotated[
    list[str] | None,
    typer.Option(
        "--scale",
        metavar="WHAT=FACTOR",
        help="Multiply durations: compute=0.5, or gaps=2 (host time between calls). Repeatable.",
    ),
]
AsRecordedOption = Annotated[
    bool,
    typer.Option(
        "--as-recorded",
        help="Keep the recorded times, except for what --scale, --what-if and --cluster change.",
    ),
]
WhatIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="CHANGE",
        help="With --as-recorded, change the replay: like-peers=2 (rank 2 computes like its "
        "peers), or compute@6-7=0.8 (compute times of ranks 6 and 7, multiplied by 0.8). "
        "Repeatable.",
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="F",
        help="Write a trace of the replay: F.jsonl (distsim's format) or F.json (for Perfetto).",
    ),
]
ScenarioOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="S.yaml",
        help="Write the calls as a compact scenario.",
    ),
]
RealOption = Annotated[
    bool,
    typer.Option("--real", help="Run on torch.distributed; the options below need --real."),
]


@dataclass(frozen=True)
class ReplayArguments:
    """The arguments of `replay` besides those of a real run."""

    trace: TraceArgument
    cluster: ClusterOption = None
    backend: BackendOption = None
    scale: ScaleOption = None
    as_recorded: AsRecordedOption = False
    what_if: WhatIfOption = None
    output: TraceOption = None
    scenario: ScenarioOption = None
    format: FormatOption = OutputFormat.text
    real: RealOption = False


@command_with_arguments(ReplayArguments, RealRunArguments)
def command(arguments: ReplayArguments, real: RealRunArguments) -> None:
    """Run the calls of a trace again, on the simulator or on torch.distributed.

    The simulator can use other hardware, another backend or another compute speed.

    \b
    Example: distsim replay run.jsonl
    Example: distsim replay run.jsonl --cluster dgx-h100 --scale compute=0.5
    Example: distsim replay run.jsonl --as-recorded --what-if like-peers=2
    Example: distsim replay run.jsonl --real --trace again.jsonl
    Example: distsim replay run.jsonl -o run.yaml
    """
    _refuse_contradicting_options(arguments)
    if arguments.scenario is not None:
        _write_scenario(arguments.trace, arguments.scenario)
    scale = _parse_scale(arguments.scale)
    if arguments.output is not None:
        check_trace_path(arguments.output)
    if arguments.real:
        options = with_trace_path(real.options(arguments.backend), arguments.output)
        raise typer.Exit(_replay_real(arguments, options, scale))
    _refuse_real_options(arguments, real)
    raise typer.Exit(_replay_simulated(arguments, scale))


def _refuse_contradicting_options(arguments: ReplayArguments) -> None:
    """Raises UsageError for options that contradict --as-recorded, or that need it."""
    from distsim.common.errors import UsageError

    if not arguments.as_recorded:
        if arguments.what_if:
            raise UsageError("--what-if needs --as-recorded", "add --as-recorded")
        return
    given = {"--backend": arguments.backend, "--real": arguments.real}
    changed = [name for name, value in given.items() if value]
    if changed:
        raise UsageError(
            f"--as-recorded keeps the recorded order of calls, but {changed[0]} changes it",
            "omit one of them",
        )


def _write_scenario(trace: Path, file: Path) -> None:
    from distsim.common.errors import UsageError
    from distsim.common.file_io import write_file
    from distsim.simulation.trace_replay.compact import compact_trace

    check_scenario_suffix(file)
    try:
        write_file(file, [compact_trace(load_trace(trace)).text])
    except UsageError as error:
        raise UsageError(f"{trace}: {error.message}", error.remedy) from None


def _parse_scale(texts: list[str] | None) -> ReplayScale:
    from distsim.common.errors import UsageError
    from distsim.simulation.trace_replay import ReplayScale

    factors: dict[str, float] = {}
    for text in texts or ():
        name, _, value = text.partition("=")
        factor = _number_or_nan(value)
        if name not in ReplayScale._fields or not 0 <= factor < 1e9:
            raise UsageError(
                f"--scale {text}: expected compute=FACTOR or gaps=FACTOR",
                "for example --scale compute=0.5",
            )
        factors[name] = factor
    return ReplayScale(**factors)


def _number_or_nan(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


# --- on the simulator ---


def _refuse_real_options(arguments: ReplayArguments, real: RealRunArguments) -> None:
    """Raises UsageError for options of a real run, if the replay is simulated."""
    from distsim.common.errors import UsageError

    options = real.changed_options()
    if arguments.backend is RealBackendName.auto:
        options.append("--backend auto")
    if options:
        raise UsageError(
            f"{', '.join(options)}: only valid for a run on torch.distributed",
            "add --real, or omit the option",
        )


def _replay_simulated(arguments: ReplayArguments, scale: ReplayScale) -> int:
    """Simulate the calls, write the trace, print the report; return the exit status."""
    from distsim.api.functions import replay

    answer = replay(
        arguments.trace,
        cluster=arguments.cluster,
        backend=arguments.backend and arguments.backend.value,
        compute=scale.compute,
        gaps=scale.gaps,
        as_recorded=arguments.as_recorded,
        what_if=arguments.what_if or (),
    )
    if arguments.output is not None:
        write_trace_by_suffix(arguments.output, answer.trace)
    if arguments.format is OutputFormat.json:
        console.out(console.to_json(answer.to_json()))
    else:
        console.out(answer.to_text())
    return int(answer.outcome != "completes")


# --- on torch.distributed ---


def _replay_real(arguments: ReplayArguments, options: RealRunOptions, scale: ReplayScale) -> int:
    """Run the calls, write the recording, print the report; return the exit status."""
    from dataclasses import replace

    from distsim.output.text.replay_report import real_replay_lines
    from distsim.real.launch.external_launchers import external_rank
    from distsim.real.run import RealRunRefused, chosen_backend, run_simulation
    from distsim.simulation.trace_replay import prepare_real_replay

    name = str(arguments.trace)
    source = load_trace(arguments.trace)
    if not options.force:
        _refuse_partial_trace(arguments.trace, source)
    started_by_launcher = external_rank(
        os.environ, options.master_addr or "127.0.0.1", options.master_port or 29500
    )
    trace_backend = str(source.header.get("backend") or "gloo")
    backend = chosen_backend(options, trace_backend, source.world_size, started_by_launcher)
    cluster = read_cluster(arguments.cluster)
    prepared = prepare_real_replay(source, name, backend=backend, cluster=cluster, scale=scale)
    try:
        run, status = run_simulation(
            prepared.simulation, options, started_by_launcher, prepared.program
        )
    except RealRunRefused as refused:
        report_refused_run(refused, arguments.format)
        return 1
    if run is None:
        # One of several launchers: the first one reports.
        return status
    notes = real_replay_lines(source, name, prepared.rebuilt.untimed)
    recorded = replace(run, trace=prepared.rows_of(run.trace), notes=(*notes, *run.notes))
    write_recording(
        arguments.output,
        recorded.trace,
        lambda: _real_report(recorded, source, name, arguments.format),
    )
    return status


def _real_report(run: RealRun, source: Trace, name: str, format: OutputFormat) -> str:
    from distsim.output.text.real_run import real_run_text
    from distsim.output.text.replay_report import real_replay_json

    if format is OutputFormat.json:
        return console.to_json(real_replay_json(run, source, name))
    return real_run_text(run)


def _refuse_partial_trace(file: Path, source: Trace) -> None:
    """Raises UsageError for a trace that lacks the last calls of some ranks.

    The other ranks would wait for those calls.
    """
    from distsim.common.errors import UsageError
    from distsim.output.trace_data.partial_run import partial_run_text

    if source.header.get("cut") or source.header.get("reason") == "under way":
        raise UsageError(
            f"cannot run {file}: {partial_run_text(source)}",
            "use --force to run the recorded calls",
        )
