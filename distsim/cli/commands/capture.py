"""`distsim capture`: an unmodified script of torch.distributed, run on forked processes, judged by
the rules of a back end.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import (
    BackendOption,
    ClusterOption,
    ReportOption,
    check_scenario_suffix,
    command_with_arguments,
)
from distsim.cli.commands.check import FindingsFormat, FormatOption
from distsim.cli.commands.report import check_report_path, write_simulation_report
from distsim.cli.commands.simulate import TraceOutputs
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.script_capture.launch.command_line import LaunchCommand
    from distsim.script_capture.launch.parent_process import CaptureRunOptions
    from distsim.script_capture.result.evaluation import CaptureResult
    from distsim.simulation.simulate_scenario import Simulation

CommandWords = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="-- COMMAND", help="As you would type it: python train.py …, torchrun … train.py."
    ),
]
Nproc = Annotated[
    int | None,
    typer.Option("--nproc", metavar="N", help="Ranks of a node; left out, the script starts them."),
]
Nnodes = Annotated[
    int | None,
    typer.Option("--nnodes", metavar="M", help="Nodes, for the cluster's prices and LOCAL_RANK."),
]
TimeoutOption = Annotated[
    str | None,
    typer.Option(
        "--timeout", metavar="D", help="End it after so long, if it still runs: 30 s, 5 min."
    ),
]
Cuda = Annotated[
    bool | None,
    typer.Option(
        "--cuda/--no-cuda", help="GPUs over this memory; left out: where the script speaks of cuda."
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
Compute = Annotated[
    bool | None,
    typer.Option(
        "--compute/--no-compute",
        help="Price what the script computes by the cluster's device; left out: with --cluster.",
    ),
]
Fake = Annotated[
    bool, typer.Option("--fake", help="Sizes in place of numbers: models larger than this machine.")
]
Strict = Annotated[bool, typer.Option("--strict", help="A leak counts as an error.")]


@dataclass(frozen=True)
class CaptureArguments:
    """The arguments of `capture`."""

    words: CommandWords = None
    nproc: Nproc = None
    nnodes: Nnodes = None
    backend: BackendOption = None
    cluster: ClusterOption = None
    trace: TraceOutputs = None
    report: ReportOption = None
    format: FormatOption = FindingsFormat.text
    timeout: TimeoutOption = None
    strict: Strict = False
    scenario: ScenarioFile = None
    cuda: Cuda = None
    compute: Compute = None
    fake: Fake = False


@command_with_arguments(CaptureArguments)
def command(given: CaptureArguments) -> None:
    """Run a script on N ranks without network or GPU, and judge what it calls.

    Its calls are matched by the rules of the back end that it asks for, or of another. A hang is
    known, not timed out.

    \b
    Example: distsim capture --nproc 4 -- python train.py --epochs 1
    Example: distsim capture --backend nccl -- torchrun --nproc-per-node 2 t.py
    Example: distsim capture --nproc 2 --trace run.jsonl -- -m package.train
    """
    from distsim.cli.commands.simulate import simulation_exit_status, trace_writer
    from distsim.script_capture.launch.command_line import parse_command
    from distsim.script_capture.launch.parent_process import run_capture
    from distsim.script_capture.launch.preload import preload
    from distsim.script_capture.launch.rank_process import ChildOptions
    from distsim.script_capture.result.evaluation import evaluate_capture

    backend = given.backend and str(given.backend)
    capture_options = _capture_options(
        parse_command(given.words or ()), given.nproc, given.nnodes, backend, given.timeout
    )
    priced = given.cluster is not None if given.compute is None else given.compute
    capture_options = replace(
        capture_options, child_options=ChildOptions(counts=priced, fakes=given.fake)
    )
    check_scenario_suffix(given.scenario)
    check_report_path(given.report)
    writers = [trace_writer(path) for path in given.trace or ()]
    _need_torch()
    file = capture_options.target.home or capture_options.target.name
    _choose_devices(given.cuda, file, capture_options)
    preload(file, capture_options.target.args)
    captured = run_capture(capture_options, lambda: _preload_hang_report(capture_options.ranks))
    if not captured.world:
        console.note(
            _no_ranks_message(
                captured.others[0].ended.how
                if captured.others and captured.others[0].ended
                else "ended"
            )
        )
        raise typer.Exit(
            1
            if captured.others and captured.others[0].ended and captured.others[0].ended.code
            else 0
        )
    judged = evaluate_capture(captured, backend=backend, cluster=given.cluster)
    for path, write in zip(given.trace or (), writers, strict=True):
        write(judged.simulation, path)
    write_simulation_report(given.report, judged.simulation)
    if given.scenario is not None:
        _write_scenario(judged.simulation, given.scenario)
    sys.stdout.flush()
    console.out(_report(judged, given.format), commands=given.format is FindingsFormat.github)
    raise typer.Exit(
        int(judged.outcome != "completes")
        or simulation_exit_status(judged.simulation, given.strict)
    )


#: What a report of a hang needs, small first. networkx takes longer than all else, and two ranks
#: that stand need no graph.
_HANG_REPORT_MODULES = (
    "distsim.checker.diagnosis.wait_for_graph",
    "distsim.checker.diagnosis.hang_findings",
    "distsim.output.text.capture_report",
    "distsim.simulation.training_metrics",
)


def _preload_hang_report(ranks: int) -> None:
    """Load what a report of a hang needs while the ranks run: the half of a second after they stand
    would go into it.
    """
    for name in (*_HANG_REPORT_MODULES, *(("networkx",) if ranks != 2 else ())):
        with suppress(ImportError):
            import_module(name)


def _report(judged: CaptureResult, format: FindingsFormat) -> str:
    from distsim.output.text.capture_report import capture_json, capture_text

    if format is FindingsFormat.json:
        return console.to_json(capture_json(judged))
    if format is FindingsFormat.text:
        return capture_text(judged)
    from distsim.cli.commands.check import findings_report
    from distsim.simulation.check_scenario import CheckResult

    return findings_report(
        [CheckResult(judged.simulation.program.file, findings=judged.simulation.findings)], format
    )


def _capture_options(
    found: LaunchCommand,
    nproc: int | None,
    nnodes: int | None,
    backend: str | None,
    timeout: str | None,
) -> CaptureRunOptions:
    from distsim.common.errors import UsageError
    from distsim.common.units import parse_duration_ns
    from distsim.script_capture.launch.parent_process import CaptureRunOptions

    nodes = nnodes or found.nodes or 1
    each = nproc or found.ranks or (1 if found.nodes else 0)
    if each < 0 or nodes < 1 or each * nodes > _MOST_RANKS:
        raise UsageError(
            f"{each} ranks on each of {nodes} nodes", f"take 1 to {_MOST_RANKS} ranks in all"
        )
    if nodes > 1 and not each:
        raise UsageError("--nnodes says nothing without --nproc", "give both: --nnodes 2 --nproc 4")
    limit_s = None if timeout is None else parse_duration_ns(timeout) / 1e9
    return CaptureRunOptions(found.target, each * nodes, nodes, backend, limit_s)


#: Ranks of one capture: each is a process.
_MOST_RANKS = 1024


def _write_scenario(simulation: Simulation, file: Path) -> None:
    from distsim.common.file_io import write_file
    from distsim.trace_replay.compact import compact_trace

    write_file(file, [compact_trace(simulation.run.trace).text])


#: torch counts the devices of a machine in 8 bits with a sign (c10/core/Device.h).
_MOST_DEVICES = 127
#: GPUs that a script finds which starts its ranks itself: many start one for each.
_DEFAULT_DEVICES = 4


def _choose_devices(cuda: bool | None, file: str, capture_options: CaptureRunOptions) -> None:
    """Let torch have a GPU for each rank of a node, where the script asks for some, else none.
    Before torch is loaded.
    """
    from distsim.script_capture.cuda.emulation import CPU_BACKED, select_emulation
    from distsim.script_capture.cuda.hide_gpus import hide_gpus
    from distsim.script_capture.cuda.script_scan import script_mentions_cuda

    if cuda or (cuda is None and script_mentions_cuda(file)):
        layer, each = (
            select_emulation(),
            capture_options.ranks // capture_options.nodes or _DEFAULT_DEVICES,
        )
        layer.install(min(each, _MOST_DEVICES))
        if layer.name != CPU_BACKED:
            console.note(f"{layer.name}: {layer.reason}")
    else:
        hide_gpus()


def _need_torch() -> None:
    from importlib.util import find_spec

    from distsim.common.errors import EnvironmentFault

    if find_spec("torch") is None:
        raise EnvironmentFault(
            "torch is not installed here, so no script of torch.distributed runs",
            "pip install 'distsim[real]'",
        )


def _no_ranks_message(how: str) -> str:
    """Nobody called init_process_group."""
    hint = (
        "did it expect a launcher? give --nproc N, which sets RANK and WORLD_SIZE as torchrun does"
    )
    return f"no rank called init_process_group, so there is nothing to judge; the script {how}\n  help: {hint}"
