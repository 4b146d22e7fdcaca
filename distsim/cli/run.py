"""`distsim run`: the launch plan of a scenario, and with ``--real`` the run itself on torch.distributed."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.options import File, Sets, read_scenario
from distsim.cli.simulate import Format, FormatOption

if TYPE_CHECKING:
    from distsim.real.run import RealRun, Refused, Wish
    from distsim.scenario import Scenario
    from distsim.trace import Trace


class RealBackend(StrEnum):
    """What torch.distributed can run on."""

    gloo = "gloo"
    nccl = "nccl"
    mpi = "mpi"
    auto = "auto"


class RealDevice(StrEnum):
    """Where the tensors of a run lie."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Launcher(StrEnum):
    """Who starts the processes of this machine."""

    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"
    elastic = "elastic"


Real = Annotated[bool, typer.Option("--real", help="Run it on torch.distributed.")]
BackendOption = Annotated[RealBackend | None, typer.Option("--backend", help="In place of the file's; auto: what is here.")]
Timeout = Annotated[str, typer.Option("--timeout", metavar="TIME", help="Nothing moves for so long: a standstill.")]
LauncherOption = Annotated[
    Launcher | None, typer.Option("--launcher", help="Who starts the processes; elastic: torch's own. Else fork; on GPUs spawn.")
]
DeviceOption = Annotated[RealDevice, typer.Option("--device", help="Where tensors lie; auto: on GPUs for nccl, else on the CPU.")]
Init = Annotated[str, typer.Option("--init", metavar="HOW", help="How ranks meet: env, tcp, file, or a URL as file:///tmp/x.")]
TraceOption = Annotated[
    Path | None, typer.Option("--trace", metavar="F", help="Write the recording: F.jsonl, or F.json for Perfetto.")
]
Repeat = Annotated[int, typer.Option("--repeat", min=1, max=1000, help="Runs that count, after one to warm up.")]
Force = Annotated[bool, typer.Option("--force", help="Run it although the simulation says that it fails.")]
Nnodes = Annotated[int, typer.Option("--nnodes", min=1, help="Launchers that share the ranks: one per machine.")]
NodeRank = Annotated[int, typer.Option("--node-rank", min=0, help="Which of them this is.")]
MasterAddr = Annotated[str | None, typer.Option("--master-addr", metavar="HOST", help="Machine 0.")]
MasterPort = Annotated[int | None, typer.Option("--master-port", min=1, max=65535, help="Its port for the store.")]


def command(
    file: File,
    real: Real = False,
    backend: BackendOption = None,
    timeout: Timeout = "10 s",
    launcher: LauncherOption = None,
    init: Init = "env",
    trace: TraceOption = None,
    repeat: Repeat = 1,
    force: Force = False,
    sets: Sets = None,
    format: FormatOption = Format.text,
    nnodes: Nnodes = 1,
    node_rank: NodeRank = 0,
    master_addr: MasterAddr = None,
    master_port: MasterPort = None,
    device: DeviceOption = RealDevice.auto,
) -> None:
    """Print how to start a scenario for real; with --real, run and record it.

    Ends with 0 when it completes, 1 when the scenario hangs or fails, 4 when the machine lacks something.

    \b
    Example: distsim run scenarios/hybrid.yaml
    Example: distsim run scenarios/hybrid.yaml --real --backend gloo
    Example: distsim run scenarios/hybrid.yaml --real --trace hybrid.jsonl
    """
    scenario = read_scenario(file, sets)
    if not real:
        console.out(_plan(scenario, file, sets, backend, device, format))
        return
    wish = wish_of(backend, launcher, init, timeout, repeat, nnodes, node_rank, master_addr, master_port, force, device)
    raise typer.Exit(_run(scenario, wish, trace, format))


def wish_of(
    backend: RealBackend | None, launcher: Launcher | None, init: str, timeout: str, repeat: int, nnodes: int, node_rank: int,
    master_addr: str | None, master_port: int | None, force: bool, device: RealDevice = RealDevice.auto,
) -> Wish:  # fmt: skip
    """The options of a real run. Raises UsageError for a timeout that is none."""
    from distsim.real.run import Wish

    return Wish(
        backend.value if backend else None, launcher.value if launcher else None, init, _timeout_ns(timeout), repeat, nnodes,
        node_rank, master_addr, master_port, force, device.value,
    )  # fmt: skip


def _timeout_ns(text: str) -> int:
    from distsim.errors import UsageError
    from distsim.units import parse_duration_ns

    try:
        return max(parse_duration_ns(text), 1)
    except ValueError as error:
        raise UsageError(f"--timeout: {error}", "as --timeout '10 s'") from None


def _plan(
    scenario: Scenario, file: str, sets: list[str] | None, backend: RealBackend | None, device: RealDevice, format: Format
) -> str:
    from distsim.real.plan import plan
    from distsim.views.plan import plan_json, plan_text

    chosen = backend.value if backend else scenario.backend
    words = ["run", file, "--real", *(("--backend", chosen) if backend else ())]
    words += ["--device", device.value] if device is not RealDevice.auto else []
    for one in sets or ():
        words += ["--set", one]
    found = plan(scenario, tuple(words), chosen, device.value)
    return console.to_json(plan_json(found)) if format is Format.json else plan_text(found)


def _run(scenario: Scenario, wish: Wish, trace: Path | None, format: Format) -> int:
    """Run it, write the trace, print the report; the exit status."""
    import os

    from distsim.real.place import found
    from distsim.real.run import Refused, real_run

    if trace is not None:
        check_trace_name(trace)
    launch = scenario.launch
    started = found(os.environ, wish.master_addr or launch.master_addr, wish.master_port or launch.master_port)
    try:
        run, status = real_run(scenario, wish, started)
    except Refused as refused:
        tell_refused(refused, format)
        return 1
    if run is None:  # the first launcher reports
        return status
    if trace is not None:
        write_trace(trace, run.trace)
    console.out(_report(run, format))
    return status


def check_trace_name(path: Path) -> None:
    """Raises UsageError before anything runs."""
    from distsim.errors import UsageError

    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the trace", "name a file in a folder that exists")
    if path.suffix not in (".jsonl", ".json"):
        raise UsageError(f"{path} is no name for a trace", "end it in .jsonl (distsim's own form) or .json (for Perfetto)")


def write_trace(path: Path, trace: Trace) -> None:
    """Write a trace in the form that the file's name asks for."""
    from distsim.trace_io import trace_lines
    from distsim.views.chrome import chrome_trace

    console.write_file(path, trace_lines(trace) if path.suffix == ".jsonl" else chrome_trace(trace))


def _report(run: RealRun, format: Format) -> str:
    from distsim.views.real import real_json, real_text

    return console.to_json(real_json(run)) if format is Format.json else real_text(run)


def tell_refused(refused: Refused, format: Format) -> None:
    """Why a run was not made: what the simulation found."""
    from distsim.views.findings import findings_lines
    from distsim.views.jsonview import simulation_json

    if format is Format.json:
        console.out(console.to_json({"refused": True, **simulation_json(refused.simulation)}))
    elif lines := findings_lines(refused.simulation.findings, refused.simulation.scenario.file):
        console.out("\n".join(lines))
    console.note(str(refused))
