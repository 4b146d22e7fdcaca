"""`distsim capture`: run an unmodified torch.distributed script and check its calls.

The ranks are forked processes of this machine, without network or GPU; `distsim.script_capture`
runs them and matches their calls by the rules of a backend.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.api.inputs import load_machines
from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    ReportOption,
    TraceOutputs,
    choice_option,
    command_with_arguments,
)
from distsim.cli.shared.backend_names import BackendName
from distsim.cli.shared.findings_output import FindingsFormat, FindingsFormatOption
from distsim.cli.shared.html_report import check_report_path, write_simulation_report
from distsim.cli.shared.scenario_output import check_scenario_suffix
from distsim.cli.shared.trace_output import check_output_folder, trace_writer

if TYPE_CHECKING:
    from distsim.script_capture.launch.command_hook import WrappedCommand
    from distsim.script_capture.launch.command_line import LaunchCommand
    from distsim.script_capture.launch.parent_process import CapturedRun, CaptureRunOptions
    from distsim.script_capture.result.evaluation import CaptureResult
    from distsim.simulation.simulate_scenario import Simulation

#: Ranks of one capture: each is a process.
_MAX_RANKS = 1024
#: torch counts the devices of a machine in a signed 8-bit integer (c10/core/Device.h).
_MAX_DEVICES = 127
#: GPUs of a node if nothing says how many: scripts and launchers start one rank for each.
_DEFAULT_DEVICES = 4
#: A script that took longer is not run again unless the user asks for it.
_MAX_RERUN_S = 60
#: The second run may take this much longer, because its lines are traced, and these seconds.
_RERUN_SLOWDOWN = 5
_RERUN_START_S = 10
#: What the report of a hang needs, cheapest first.
_HANG_REPORT_MODULES = (
    "distsim.checker.diagnosis.wait_for_graph",
    "distsim.checker.diagnosis.hang_findings",
    "distsim.output.text.capture_report",
    "distsim.simulation.training_metrics",
)

CommandArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND",
        help="Command to run, as in a shell: python, torchrun, accelerate launch, srun, bash.",
    ),
]
ScriptBackendOption = Annotated[
    BackendName | None,
    choice_option(BackendName, "--backend", help="Backend semantics; overrides the script."),
]
ScriptClusterOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Hardware model (preset or file) for predicted times. "
        "[default: a preset for the backend]",
    ),
]
NprocOption = Annotated[
    int | None,
    typer.Option(
        "--nproc",
        metavar="N",
        help="Number of ranks per node. "
        "[default: that of the launcher, or of mp.spawn in the script; "
        "without both, one process without RANK]",
    ),
]
NnodesOption = Annotated[
    int | None,
    typer.Option(
        "--nnodes",
        metavar="M",
        help="Number of nodes; sets LOCAL_RANK and the communication costs. [default: 1]",
    ),
]
TimeoutOption = Annotated[
    str | None,
    typer.Option("--timeout", metavar="D", help="Stop after this long, for example 30 s or 5 min."),
]
CudaOption = Annotated[
    bool | None,
    typer.Option(
        "--cuda/--no-cuda",
        help="Emulate one GPU per rank in CPU memory. [default: on if the script uses CUDA]",
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
ComputeOption = Annotated[
    bool | None,
    typer.Option(
        "--compute/--no-compute",
        help="Predict compute times from the cluster's device. [default: on if --cluster is given]",
    ),
]
FakeOption = Annotated[
    bool,
    typer.Option(
        "--fake",
        help="Track tensor sizes only, without data; allows models larger than this "
        "machine's memory.",
    ),
]
PrefixOption = Annotated[
    bool, typer.Option("--prefix", help="Begin each line of output with the rank that printed it.")
]
CheckValuesOption = Annotated[
    bool,
    typer.Option(
        "--check-values",
        help="Also compare values: report replicas, gradients, FSDP units and random states that "
        "differ between ranks.",
    ),
]
RerunOption = Annotated[
    bool | None,
    typer.Option(
        "--rerun/--no-rerun",
        help="If calls do not match, run the script a second time to find the line at which "
        "ranks diverge. [default: on if the first run took less than a minute]",
    ),
]
StrictOption = Annotated[
    bool,
    typer.Option(
        "--strict",
        help="Fail also on leaks: requests without a wait, and messages without a receive.",
    ),
]


@dataclass(frozen=True)
class CaptureArguments:
    """The arguments of `capture`."""

    words: CommandArgument = None
    nproc: NprocOption = None
    nnodes: NnodesOption = None
    backend: ScriptBackendOption = None
    cluster: ScriptClusterOption = None
    trace: TraceOutputs = None
    report: ReportOption = None
    format: FindingsFormatOption = FindingsFormat.text
    timeout: TimeoutOption = None
    strict: StrictOption = False
    scenario: ScenarioOption = None
    cuda: CudaOption = None
    compute: ComputeOption = None
    fake: FakeOption = False
    prefix: PrefixOption = False
    check_values: CheckValuesOption = False
    rerun: RerunOption = None


@command_with_arguments(CaptureArguments)
def command(arguments: CaptureArguments) -> None:
    """Run an unmodified script on N ranks without network or GPU, and check its calls.

    The rules of the script's backend, or of --backend, decide which calls block. Hangs are detected
    immediately; there is no timeout to wait for.

    \b
    Example: distsim capture --nproc 4 -- python train.py --epochs 1
    Example: distsim capture --backend nccl -- torchrun --nproc-per-node 2 t.py
    Example: distsim capture --nproc 2 --trace run.jsonl -- bash run.sh
    """
    from distsim.script_capture.launch.command_line import parse_command
    from distsim.script_capture.result.evaluation import evaluate_capture

    command = parse_command(arguments.words or ())
    check_scenario_suffix(arguments.scenario)
    check_report_path(arguments.report)
    writers = [trace_writer(path) for path in arguments.trace or ()]
    # Before the script runs: a mistake must not cost its results.
    for path in (*(arguments.trace or ()), arguments.report, arguments.scenario):
        if path is not None:
            check_output_folder(path)
    cluster = None if arguments.cluster is None else load_machines(arguments.cluster)
    _require_torch()
    folder = os.getcwd()
    with _script_output(arguments.format):
        options, captured, duration_s = _run(command, arguments)
    if not captured.world:
        os.chdir(folder)
        raise typer.Exit(_report_no_ranks(captured))

    result = evaluate_capture(captured, backend=options.backend, cluster=cluster)
    if arguments.rerun is not False and _may_name_divergence(result):
        if arguments.rerun or duration_s < _MAX_RERUN_S:
            result = _with_divergence(result, duration_s)
        else:
            console.note(_skipped_rerun_note(duration_s))
    os.chdir(folder)
    for path, write_trace in zip(arguments.trace or (), writers, strict=True):
        write_trace(result.simulation, path)
    write_simulation_report(arguments.report, result.simulation)
    if arguments.scenario is not None:
        _write_scenario(result.simulation, arguments.scenario)
    sys.stdout.flush()
    for_github = arguments.format is FindingsFormat.github
    console.out(_report(result, arguments.format), commands=for_github)
    raise typer.Exit(result.simulation.status(arguments.strict))


def _run(
    command: LaunchCommand, arguments: CaptureArguments
) -> tuple[CaptureRunOptions, CapturedRun, float]:
    """Run the program: how it was run, what its ranks did, and how many seconds it took."""
    from distsim.script_capture.launch.parent_process import run_capture
    from distsim.script_capture.launch.preload import preload

    wrapped = _start_wrapped_command(command)
    if wrapped is not None:
        command = _program_of(wrapped)
    options = _capture_options(command, arguments)
    script = options.target.home or options.target.name
    # Before torch is loaded: it looks for devices when it is imported.
    options = replace(options, devices=_choose_devices(arguments.cuda, script, options))
    _silence_interpreter_exit()
    preload(script, options.target.args)
    started_s = time.monotonic()
    captured = run_capture(options, lambda: _preload_hang_report(options.ranks))
    duration_s = time.monotonic() - started_s
    if wrapped is not None:
        wrapped.finish(int(not captured.ended_normally), console.note)
    return options, captured, duration_s


def _script_output(format: FindingsFormat) -> AbstractContextManager[None]:
    """Where the script's standard output goes: not into a report that a program reads."""
    from distsim.script_capture.launch.rank_output import output_on_stderr

    is_for_programs = format in (FindingsFormat.json, FindingsFormat.sarif)
    return output_on_stderr() if is_for_programs else nullcontext()


# --- commands that start the program themselves ---


def _start_wrapped_command(command: LaunchCommand) -> WrappedCommand | None:
    """Start a command such as ``bash run.sh``; None if the command line names the program."""
    if command.target is not None:
        return None
    from distsim.script_capture.launch.command_hook import WrappedCommand

    return WrappedCommand(command)


def _program_of(wrapped: WrappedCommand) -> LaunchCommand:
    """The program that the command starts. This process takes its folder and environment."""
    program = wrapped.program()
    os.chdir(program.folder)
    os.environ.clear()
    os.environ.update(program.environment)
    words = " ".join(program.words)
    console.note(f"capturing the program that the command started: {words}")
    return program.command


# --- options ---


def _capture_options(command: LaunchCommand, arguments: CaptureArguments) -> CaptureRunOptions:
    """How the script is run. Raises UsageError for impossible numbers of ranks."""
    from distsim.common.errors import UsageError
    from distsim.script_capture.launch.parent_process import CaptureRunOptions
    from distsim.script_capture.launch.rank_process import ChildOptions

    if arguments.nproc is not None and arguments.nproc < 1:
        raise UsageError(
            f"--nproc {arguments.nproc}: expected at least one rank per node",
            "omit --nproc if the script starts its ranks itself",
        )
    nodes = arguments.nnodes or command.nodes or 1
    ranks_per_node = arguments.nproc or command.ranks
    if not ranks_per_node:
        ranks_per_node = _default_ranks_per_node(command)
    if ranks_per_node < 0 or nodes < 1 or ranks_per_node * nodes > _MAX_RANKS:
        raise UsageError(
            f"{ranks_per_node} ranks on each of {nodes} nodes",
            f"use 1 to {_MAX_RANKS} ranks in total",
        )
    if nodes > 1 and not ranks_per_node:
        raise UsageError("--nnodes needs --nproc", "give both: --nnodes 2 --nproc 4")
    timeout_s = None
    if arguments.timeout is not None:
        timeout_s = _parse_timeout_s(arguments.timeout)
    assert command.target is not None
    counts_compute = arguments.compute
    if counts_compute is None:
        counts_compute = arguments.cluster is not None
    return CaptureRunOptions(
        target=command.target,
        ranks=ranks_per_node * nodes,
        nodes=nodes,
        backend=arguments.backend and str(arguments.backend),
        timeout_s=timeout_s,
        environment=command.environment,
        launcher=command.launcher,
        local_rank_argument=command.local_rank_argument,
        child_options=ChildOptions(
            counts=counts_compute,
            fakes=arguments.fake,
            prefixes=arguments.prefix,
            checks_values=arguments.check_values,
        ),
    )


def _parse_timeout_s(text: str) -> float:
    from distsim.common.errors import UsageError
    from distsim.common.units import parse_timeout_ns

    try:
        return parse_timeout_ns(text) / 1e9
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", "for example --timeout '5 min'") from None


def _default_ranks_per_node(command: LaunchCommand) -> int:
    """The number that a launcher starts if nothing says it; 0 if the script starts its ranks."""
    if command.one_per_gpu:
        return _DEFAULT_DEVICES
    return 1 if command.is_launched else 0


# --- preparing this process, which the ranks are forked from ---


def _require_torch() -> None:
    from importlib.util import find_spec

    from distsim.common.errors import EnvironmentFault
    from distsim.common.installation import install_command

    if find_spec("torch") is None:
        raise EnvironmentFault(
            "torch is not installed, so scripts that use torch.distributed cannot run",
            install_command("real"),
        )


def _choose_devices(cuda: bool | None, script: str, options: CaptureRunOptions) -> str:
    """Give torch one emulated GPU per rank of a node if the script uses CUDA, else none.

    Returns which devices the ranks have, and why.
    """
    from distsim.script_capture.cuda.emulation import CPU_BACKED, select_emulation
    from distsim.script_capture.cuda.hide_gpus import hide_gpus
    from distsim.script_capture.cuda.script_scan import CudaUse, find_cuda_use

    if cuda is None:
        use = find_cuda_use(script, options.target.args)
    else:
        use = CudaUse(cuda, "of --cuda" if cuda else "of --no-cuda")
    if not use.needed:
        hide_gpus()
        return f"no GPU, because {use.reason}"
    emulation = select_emulation()
    devices = options.ranks // options.nodes or _DEFAULT_DEVICES
    emulation.install(min(devices, _MAX_DEVICES))
    if emulation.name != CPU_BACKED:
        console.note(f"{emulation.name}: {emulation.reason}")
    return f"one emulated GPU per rank, because {use.reason}"


def _silence_interpreter_exit() -> None:
    """Hide what C++ extensions print while this process's interpreter ends.

    Triton's says which of its objects Python has not freed (nanobind's leak warnings), 20 lines
    after the report that say nothing about the script.
    """

    def silence() -> None:
        if "triton" in sys.modules:
            with suppress(OSError):
                sys.stderr.flush()
                os.dup2(os.open(os.devnull, os.O_WRONLY), 2)

    # Handlers run in reverse order: this one runs after those of the modules loaded later.
    atexit.register(silence)


def _preload_hang_report(ranks: int) -> None:
    """Load what the report of a hang needs while the ranks run.

    Loading takes half a second, which would otherwise pass between the hang and its report.
    """
    names = list(_HANG_REPORT_MODULES)
    if ranks != 2:
        # networkx takes longer than everything else, and two blocked ranks need no graph.
        names.append("networkx")
    for name in names:
        with suppress(ImportError):
            import_module(name)


# --- the line at which ranks diverge ---


def _may_name_divergence(result: CaptureResult) -> bool:
    """Whether a second run may show at which line the ranks diverge."""
    from distsim.script_capture.result.divergence_point import (
        divergent_finding,
        waits_for_failed_rank,
    )
    from distsim.script_capture.result.message_divergence import is_about_messages

    found = result.simulation.findings
    if divergent_finding(found) is None and not is_about_messages(found):
        return False
    return not waits_for_failed_rank(found, result.captured.evaluated_ranks)


def _skipped_rerun_note(duration_s: float) -> str:
    """What a second run would show, and why there is none."""
    return (
        f"the run took {duration_s:.0f} s, more than {_MAX_RERUN_S} s, so it was not repeated to "
        "find the line at which ranks diverge; add --rerun to repeat it"
    )


def _with_divergence(result: CaptureResult, duration_s: float) -> CaptureResult:
    """The result; its first finding names the line at which the ranks diverge, if there is one."""
    from distsim.script_capture.launch.parent_process import run_with_line_traces
    from distsim.script_capture.result.divergence_point import collective_lines, with_divergence
    from distsim.script_capture.result.message_divergence import (
        posted_messages,
        with_message_divergence,
    )
    from distsim.script_capture.result.stack_divergence import with_stack_divergence

    simulation = result.simulation
    found = simulation.findings
    ranks = result.captured.evaluated_ranks
    traces = run_with_line_traces(
        result.captured, timeout_s=_RERUN_SLOWDOWN * duration_s + _RERUN_START_S
    )
    findings = with_divergence(found, traces.lines, collective_lines(ranks))
    if findings == found:
        findings = with_message_divergence(found, traces.lines, posted_messages(ranks))
    if findings == found:
        findings = with_stack_divergence(found, traces.stacks)
    return replace(result, simulation=replace(simulation, findings=findings))


# --- output ---


def _report_no_ranks(captured: CapturedRun) -> int:
    """Say that no rank called init_process_group; return the exit status, which is never 0.

    A capture that checked nothing must not look like one that found nothing.
    """
    end = captured.others[0].ended if captured.others else None
    console.note(
        "no rank called init_process_group, so there is nothing to check; "
        f"the script {end.how if end else 'ended'}\n"
        "  help: if the script expects a launcher, add --nproc N, "
        "which sets RANK and WORLD_SIZE as torchrun does"
    )
    return 1


def _write_scenario(simulation: Simulation, file: Path) -> None:
    from distsim.common.file_io import write_file
    from distsim.simulation.trace_replay.compact import compact_trace

    write_file(file, [compact_trace(simulation.run.trace).text])


def _report(result: CaptureResult, format: FindingsFormat) -> str:
    from distsim.output.text.capture_report import capture_json, capture_text

    if format is FindingsFormat.json:
        return console.to_json(capture_json(result))
    if format is FindingsFormat.text:
        return capture_text(result)
    from distsim.cli.shared.findings_output import findings_report
    from distsim.simulation.check_scenario import CheckResult

    simulation = result.simulation
    as_check = CheckResult(simulation.program.file, findings=simulation.findings)
    return findings_report([as_check], format)
