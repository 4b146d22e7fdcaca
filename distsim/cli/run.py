"""`distsim run`: the launch plan of a scenario, and with ``--real`` the run itself on torch.distributed."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        asked = _words(file, sets, backend, timeout, launcher, init, trace, repeat, force, device)
        scenario = _started_as(scenario, nnodes, master_addr, master_port)
        console.out(_plan(scenario, asked, backend, device, format))
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


def _words(
    file: str, sets: list[str] | None, backend: RealBackend | None, timeout: str, launcher: Launcher | None, init: str,
    trace: Path | None, repeat: int, force: bool, device: RealDevice,
) -> list[str]:  # fmt: skip
    """The command that does for real what was asked; options left as they are by default are left out."""
    given = {
        "--backend": backend and backend.value, "--device": device.value if device is not RealDevice.auto else None,
        "--timeout": timeout if timeout != "10 s" else None, "--launcher": launcher and launcher.value,
        "--init": init if init != "env" else None, "--repeat": str(repeat) if repeat != 1 else None,
        "--trace": str(trace) if trace else None,
    }  # fmt: skip
    words = ["run", file, "--real", *(word for name, value in given.items() if value for word in (name, value))]
    return [*words, *(["--force"] if force else []), *(word for one in sets or () for word in ("--set", one))]


def _started_as(scenario: Scenario, nnodes: int, master_addr: str | None, master_port: int | None) -> Scenario:
    """The scenario on so many machines (1: as its file says), with the first one's address."""
    from distsim.errors import UsageError

    world, launch = scenario.world, scenario.launch
    if world.size % nnodes:
        raise UsageError(f"{world.size} ranks can't be cut into --nnodes {nnodes}", "give a number that divides the world")
    cut = {"nodes": nnodes, "ranks_per_node": world.size // nnodes} if nnodes > 1 else {}
    first = {"master_addr": master_addr or launch.master_addr, "master_port": master_port or launch.master_port}
    return scenario.model_copy(update={"world": world.model_copy(update=cut), "launch": launch.model_copy(update=first)})


def _plan(scenario: Scenario, words: list[str], backend: RealBackend | None, device: RealDevice, format: Format) -> str:
    from distsim.real.plan import plan
    from distsim.views.plan import plan_json, plan_text

    found = plan(scenario, tuple(words), backend.value if backend else scenario.backend, device.value)
    return console.to_json(plan_json(found)) if format is Format.json else plan_text(found)


def _run(scenario: Scenario, wish: Wish, trace: Path | None, format: Format) -> int:
    """Run it, write the trace, print the report; the exit status."""
    import os

    from distsim.real.plan import external_rank
    from distsim.real.run import Refused, real_run

    if trace is not None:
        check_trace_name(trace)
    launch = scenario.launch
    started = external_rank(os.environ, wish.master_addr or launch.master_addr, wish.master_port or launch.master_port)
    try:
        run, status = real_run(scenario, wish, started)
    except Refused as refused:
        tell_refused(refused, format)
        return 1
    if run is None:  # the first launcher reports
        return status
    deliver(trace, run.trace, lambda: _report(run, format))
    return status


def deliver(path: Path | None, trace: Trace, report: Callable[[], str]) -> None:
    """Write the trace, where one is wanted, and print the report, which a trace that can't be written does not cost.

    A second Ctrl-C does not cost them either: the run is over.
    """
    with _undisturbed():
        try:
            if path is not None:
                write_trace(path, trace)
        finally:
            console.out(report())


@contextmanager
def _undisturbed() -> Iterator[None]:
    names = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP) if threading.current_thread() is threading.main_thread() else ()
    before = {name: signal.signal(name, signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler or signal.SIG_DFL)


def check_trace_name(path: Path) -> None:
    """Raises UsageError before anything runs."""
    import tempfile

    from distsim.errors import UsageError

    if not path.parent.is_dir():
        raise UsageError(f"there is no folder {path.parent} for the trace", "name a file in a folder that exists")
    if path.suffix not in (".jsonl", ".json"):
        raise UsageError(f"{path} is no name for a trace", "end it in .jsonl (distsim's own form) or .json (for Perfetto)")
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # what can't be written later is said now
            pass
    except OSError as error:
        raise UsageError(
            f"can't write into {path.parent}: {error.strerror}", "name a file in a folder that may be written"
        ) from None


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
