"""`distsim capture`: an unmodified script of torch.distributed, run on forked processes, judged by the rules of a back end."""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.app import BackendOption, ClusterOption, ReportOption, check_scenario_name, taking
from distsim.cli.check import Format, FormatOption
from distsim.cli.report import check_report_name, report_simulation
from distsim.cli.simulate import Traces

if TYPE_CHECKING:
    from distsim.capture.command import Command
    from distsim.capture.judge import Judged
    from distsim.capture.launch import Wish
    from distsim.simulation import Simulation

Words = Annotated[
    list[str] | None, typer.Argument(metavar="-- COMMAND", help="As you would type it: python train.py …, torchrun … train.py.")
]
Nproc = Annotated[int | None, typer.Option("--nproc", metavar="N", help="Ranks of a node; left out, the script starts them.")]
Nnodes = Annotated[int | None, typer.Option("--nnodes", metavar="M", help="Nodes, for the cluster's prices and LOCAL_RANK.")]
Limit = Annotated[str | None, typer.Option("--timeout", metavar="D", help="End it after so long, if it still runs: 30 s, 5 min.")]
Cuda = Annotated[
    bool | None, typer.Option("--cuda/--no-cuda", help="GPUs over this memory; left out: where the script speaks of cuda.")
]
ScenarioFile = Annotated[
    Path | None,
    typer.Option("-o", metavar="S.yaml", help="Write the calls as a scenario: loops, and one program for equal ranks."),
]
Compute = Annotated[
    bool | None,
    typer.Option(
        "--compute/--no-compute", help="Price what the script computes by the cluster's device; left out: with --cluster."
    ),
]
Fake = Annotated[bool, typer.Option("--fake", help="Sizes in place of numbers: models larger than this machine.")]
Strict = Annotated[bool, typer.Option("--strict", help="A leak counts as an error.")]


@dataclass(frozen=True)
class CaptureOptions:
    """The arguments of `capture`."""

    words: Words = None
    nproc: Nproc = None
    nnodes: Nnodes = None
    backend: BackendOption = None
    cluster: ClusterOption = None
    trace: Traces = None
    report: ReportOption = None
    format: FormatOption = Format.text
    timeout: Limit = None
    strict: Strict = False
    scenario: ScenarioFile = None
    cuda: Cuda = None
    compute: Compute = None
    fake: Fake = False


@taking(CaptureOptions)
def command(given: CaptureOptions) -> None:
    """Run a script on N ranks without network or GPU, and judge what it calls.

    Its calls are matched by the rules of the back end that it asks for, or of another. A hang is known, not timed out.

    \b
    Example: distsim capture --nproc 4 -- python train.py --epochs 1
    Example: distsim capture --backend nccl -- torchrun --nproc-per-node 2 t.py
    Example: distsim capture --nproc 2 --trace run.jsonl -- -m package.train
    """
    from distsim.capture.child import Ways
    from distsim.capture.command import parse
    from distsim.capture.judge import judge
    from distsim.capture.launch import capture
    from distsim.capture.preload import preload
    from distsim.cli.simulate import status, trace_writer

    backend = given.backend and str(given.backend)
    wish = _wish(parse(given.words or ()), given.nproc, given.nnodes, backend, given.timeout)
    priced = given.cluster is not None if given.compute is None else given.compute
    wish = replace(wish, ways=Ways(counts=priced, fakes=given.fake))
    check_scenario_name(given.scenario)
    check_report_name(given.report)
    writers = [trace_writer(path) for path in given.trace or ()]
    _need_torch()
    file = wish.target.home or wish.target.name
    _devices(given.cuda, file, wish)
    preload(file, wish.target.args)
    captured = capture(wish, lambda: _ahead(wish.ranks))
    if not captured.world:
        console.note(_no_ranks(captured.others[0].ended.how if captured.others and captured.others[0].ended else "ended"))
        raise typer.Exit(1 if captured.others and captured.others[0].ended and captured.others[0].ended.code else 0)
    judged = judge(captured, backend=backend, cluster=given.cluster)
    for path, write in zip(given.trace or (), writers, strict=True):
        write(judged.simulation, path)
    report_simulation(given.report, judged.simulation)
    if given.scenario is not None:
        _write_scenario(judged.simulation, given.scenario)
    sys.stdout.flush()
    console.out(_report(judged, given.format), commands=given.format is Format.github)
    raise typer.Exit(int(judged.outcome != "completes") or status(judged.simulation, given.strict))


#: What a report of a hang needs, small first. networkx takes longer than all else, and two ranks that stand need no graph.
_AT_A_HANG = ("distsim.check.waitfor", "distsim.check.diagnose", "distsim.views.captureview", "distsim.figures")


def _ahead(ranks: int) -> None:
    """Load what a report of a hang needs while the ranks run: the half of a second after they stand would go into it."""
    for name in (*_AT_A_HANG, *(("networkx",) if ranks != 2 else ())):
        with suppress(ImportError):
            import_module(name)


def _report(judged: Judged, format: Format) -> str:
    from distsim.views.captureview import capture_json, capture_text

    if format is Format.json:
        return console.to_json(capture_json(judged))
    if format is Format.text:
        return capture_text(judged)
    from distsim.checking import CheckResult
    from distsim.cli.check import report_of

    return report_of([CheckResult(judged.simulation.program.file, findings=judged.simulation.findings)], format)


def _wish(found: Command, nproc: int | None, nnodes: int | None, backend: str | None, timeout: str | None) -> Wish:
    from distsim.capture.launch import Wish
    from distsim.errors import UsageError
    from distsim.units import parse_duration_ns

    nodes = nnodes or found.nodes or 1
    each = nproc or found.ranks or (1 if found.nodes else 0)
    if each < 0 or nodes < 1 or each * nodes > _MOST_RANKS:
        raise UsageError(f"{each} ranks on each of {nodes} nodes", f"take 1 to {_MOST_RANKS} ranks in all")
    if nodes > 1 and not each:
        raise UsageError("--nnodes says nothing without --nproc", "give both: --nnodes 2 --nproc 4")
    limit_s = None if timeout is None else parse_duration_ns(timeout) / 1e9
    return Wish(found.target, each * nodes, nodes, backend, limit_s)


#: Ranks of one capture: each is a process.
_MOST_RANKS = 1024


def _write_scenario(simulation: Simulation, file: Path) -> None:
    from distsim.compact import compact
    from distsim.files import write_file

    write_file(file, [compact(simulation.run.trace).text])


#: torch counts the devices of a machine in 8 bits with a sign (c10/core/Device.h).
_MOST_DEVICES = 127
#: GPUs that a script finds which starts its ranks itself: many start one for each.
_OWN_RANKS = 4


def _devices(cuda: bool | None, file: str, wish: Wish) -> None:
    """Let torch have a GPU for each rank of a node, where the script asks for some, else none. Before torch is loaded."""
    from distsim.capture.cuda import REAL, asks_for_cuda, prepare
    from distsim.capture.cuda.hidden import hide

    if cuda or (cuda is None and asks_for_cuda(file)):
        layer, each = prepare(), wish.ranks // wish.nodes or _OWN_RANKS
        layer.install(min(each, _MOST_DEVICES))
        if layer.name != REAL:
            console.note(f"{layer.name}: {layer.reason}")
    else:
        hide()


def _need_torch() -> None:
    from importlib.util import find_spec

    from distsim.errors import EnvironmentFault

    if find_spec("torch") is None:
        raise EnvironmentFault(
            "torch is not installed here, so no script of torch.distributed runs", "pip install 'distsim[real]'"
        )


def _no_ranks(how: str) -> str:
    """Nobody called init_process_group."""
    hint = "did it expect a launcher? give --nproc N, which sets RANK and WORLD_SIZE as torchrun does"
    return f"no rank called init_process_group, so there is nothing to judge; the script {how}\n  help: {hint}"
