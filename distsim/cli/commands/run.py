"""`distsim run`: print a scenario's launch plan; with ``--real`` run it on torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    FormatOption,
    OutputFormat,
    ReportOption,
    ScenarioArgument,
    SetOption,
    choice_option,
    command_with_arguments,
    read_scenario,
)
from distsim.cli.shared.backend_names import RealBackendName
from distsim.cli.shared.html_report import check_report_path, write_real_run_report
from distsim.cli.shared.real_run_arguments import RealDeviceName, RealRunArguments
from distsim.cli.shared.trace_output import (
    check_trace_path,
    report_refused_run,
    with_trace_path,
    write_recording,
)

if TYPE_CHECKING:
    from distsim.real.run import RealRun, RealRunOptions
    from distsim.scenario import Scenario

RealOption = Annotated[bool, typer.Option("--real", help="Run on torch.distributed.")]
BackendOption = Annotated[
    RealBackendName | None,
    choice_option(
        RealBackendName,
        "--backend",
        help=(
            "Backend of the run; overrides the scenario. auto chooses a backend that works on "
            "this machine."
        ),
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="F",
        help="Write the recording: F.jsonl (distsim's format) or F.json (for Perfetto).",
    ),
]


@dataclass(frozen=True)
class RunArguments:
    """The arguments of `run` besides those of a real run."""

    file: ScenarioArgument
    real: RealOption = False
    backend: BackendOption = None
    trace: TraceOption = None
    sets: SetOption = None
    format: FormatOption = OutputFormat.text
    report: ReportOption = None


@command_with_arguments(RunArguments, RealRunArguments)
def command(arguments: RunArguments, real: RealRunArguments) -> None:
    """Print the launch plan of a scenario; with --real, run and record it on torch.distributed.

    Exit status: 0 if the run completes, 1 if the scenario hangs or fails, 4 if this machine lacks
    something that the run needs.

    \b
    Example: distsim run scenarios/hybrid.yaml
    Example: distsim run scenarios/hybrid.yaml --real --backend gloo
    Example: distsim run scenarios/hybrid.yaml --real --trace hybrid.jsonl
    """
    options = real.options(arguments.backend)
    _check_report_options(arguments)
    scenario = read_scenario(arguments.file, arguments.sets)
    if arguments.real:
        options = with_trace_path(options, arguments.trace)
        raise typer.Exit(_run_real(scenario, options, arguments))
    console.out(_launch_plan_text(_with_launch_options(scenario, real), arguments, real))


def _check_report_options(arguments: RunArguments) -> None:
    """Raises UsageError for a report that cannot be written."""
    from distsim.common.errors import UsageError

    check_report_path(arguments.report)
    if arguments.report is not None and not arguments.real:
        raise UsageError(
            "--report needs a run, but this command prints a launch plan",
            "add --real, or use `distsim report`",
        )


# --- the launch plan ---


def _with_launch_options(scenario: Scenario, real: RealRunArguments) -> Scenario:
    """The scenario spread over ``--nnodes`` machines, with the address of the first one.

    With one launcher, the nodes stay as the file has them.
    """
    from distsim.common.errors import UsageError

    world = scenario.world
    if world.size % real.nnodes:
        raise UsageError(
            f"{world.size} ranks cannot be divided by --nnodes {real.nnodes}",
            "give a number of nodes that divides the number of ranks",
        )
    nodes = {}
    if real.nnodes > 1:
        nodes = {"nodes": real.nnodes, "ranks_per_node": world.size // real.nnodes}
    master: dict[str, str | int] = {}
    if real.master_addr is not None:
        master["master_addr"] = real.master_addr
    if real.master_port is not None:
        master["master_port"] = real.master_port
    changed = {
        "world": world.model_copy(update=nodes),
        "launch": scenario.launch.model_copy(update=master),
    }
    return scenario.model_copy(update=changed)


def _launch_plan_text(scenario: Scenario, arguments: RunArguments, real: RealRunArguments) -> str:
    from distsim.output.text.launch_plan import launch_plan_json, launch_plan_text
    from distsim.real.launch.external_launchers import launch_plan

    command_line = tuple(_real_run_command_line(arguments, real))
    backend = arguments.backend.value if arguments.backend else scenario.backend
    plan = launch_plan(scenario, command_line, backend, real.device.value)
    if arguments.format is OutputFormat.json:
        return console.to_json(launch_plan_json(plan))
    return launch_plan_text(plan)


def _real_run_command_line(arguments: RunArguments, real: RealRunArguments) -> list[str]:
    """The words of the command that makes the planned run; options with default values are omitted.

    The options of the launch itself (``--nnodes`` ...) are not part of it: the plan adds them.
    """
    words = ["run", arguments.file, "--real"]
    if arguments.backend:
        words += ["--backend", arguments.backend.value]
    if real.device is not RealDeviceName.auto:
        words += ["--device", real.device.value]
    if real.timeout and real.timeout != RealRunArguments.timeout:
        words += ["--timeout", real.timeout]
    if real.launcher:
        words += ["--launcher", real.launcher.value]
    if real.init_method and real.init_method != RealRunArguments.init_method:
        words += ["--init-method", real.init_method]
    if real.repeat != RealRunArguments.repeat:
        words += ["--repeat", str(real.repeat)]
    if arguments.trace:
        words += ["--trace", str(arguments.trace)]
    if real.force:
        words.append("--force")
    for text in arguments.sets or ():
        words += ["--set", text]
    return words


# --- the real run ---


def _run_real(scenario: Scenario, options: RealRunOptions, arguments: RunArguments) -> int:
    """Run the scenario, write the recording, print the report; return the exit status."""
    import os

    from distsim.real.launch.external_launchers import external_rank
    from distsim.real.run import RealRunRefused, run_scenario

    if arguments.trace is not None:
        check_trace_path(arguments.trace)
    launch = scenario.launch
    started_by_launcher = external_rank(
        os.environ,
        options.master_addr or launch.master_addr,
        options.master_port or launch.master_port,
    )
    try:
        run, status = run_scenario(scenario, options, started_by_launcher)
    except RealRunRefused as refused:
        report_refused_run(refused, arguments.format)
        return 1
    if run is None:
        # One of several launchers: the first one reports.
        return status
    write_recording(arguments.trace, run.trace, lambda: _report(run, arguments.format))
    write_real_run_report(arguments.report, run)
    return status


def _report(run: RealRun, format: OutputFormat) -> str:
    from distsim.output.text.real_run import real_run_json, real_run_text

    if format is OutputFormat.json:
        return console.to_json(real_run_json(run))
    return real_run_text(run)
