"""`distsim run`: the launch plan of a scenario, and with ``--real`` the run itself on
torch.distributed.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import (
    ReportOption,
    ScenarioArgument,
    SetOption,
    command_with_arguments,
    read_scenario,
)
from distsim.cli.commands.report import check_report_path, write_real_run_report
from distsim.cli.commands.simulate import FormatOption, OutputFormat
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.real.run import RealRun, RealRunOptions, RealRunRefused
    from distsim.scenario import Scenario
    from distsim.trace.model import Trace


class RealBackendName(StrEnum):
    """What torch.distributed can run on."""

    gloo = "gloo"
    nccl = "nccl"
    mpi = "mpi"
    auto = "auto"


class RealDeviceName(StrEnum):
    """Where the tensors of a run lie."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class LauncherName(StrEnum):
    """Who starts the processes of this machine."""

    fork = "fork"
    spawn = "spawn"
    forkserver = "forkserver"
    elastic = "elastic"


Real = Annotated[bool, typer.Option("--real", help="Run it on torch.distributed.")]
BackendOption = Annotated[
    RealBackendName | None,
    typer.Option("--backend", help="In place of the file's; auto: what is here."),
]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="Nothing moves for so long: a standstill.")
]
LauncherOption = Annotated[
    LauncherName | None,
    typer.Option(
        "--launcher",
        help="Who starts the processes; elastic: torch's own. Else fork; spawn where a forked rank can't use its GPU.",
    ),
]
DeviceOption = Annotated[
    RealDeviceName,
    typer.Option("--device", help="Where tensors lie; auto: on GPUs for nccl, else on the CPU."),
]
Init = Annotated[
    str,
    typer.Option(
        "--init", metavar="HOW", help="How ranks meet: env, tcp, file, or a URL as file:///tmp/x."
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace", metavar="F", help="Write the recording: F.jsonl, or F.json for Perfetto."
    ),
]
Repeat = Annotated[
    int, typer.Option("--repeat", min=1, max=1000, help="Runs that count, after one to warm up.")
]
Force = Annotated[
    bool, typer.Option("--force", help="Run it although the simulation says that it fails.")
]
Nnodes = Annotated[
    int, typer.Option("--nnodes", min=1, help="Launchers that share the ranks: one per machine.")
]
NodeRank = Annotated[int, typer.Option("--node-rank", min=0, help="Which of them this is.")]
MasterAddr = Annotated[str | None, typer.Option("--master-addr", metavar="HOST", help="Machine 0.")]
MasterPort = Annotated[
    int | None, typer.Option("--master-port", min=1, max=65535, help="Its port for the store.")
]


@dataclass(frozen=True)
class RealRunArguments:
    """How a run on torch.distributed is made; of `run` and `replay`."""

    timeout: Timeout = "10 s"
    launcher: LauncherOption = None
    init: Init = "env"
    repeat: Repeat = 1
    force: Force = False
    nnodes: Nnodes = 1
    node_rank: NodeRank = 0
    master_addr: MasterAddr = None
    master_port: MasterPort = None
    device: DeviceOption = RealDeviceName.auto

    @property
    def timeout_ns(self) -> int:
        """Raises UsageError for a timeout that is none."""
        from distsim.common.errors import UsageError
        from distsim.common.units import parse_timeout_ns

        try:
            return parse_timeout_ns(self.timeout)
        except ValueError as error:
            raise UsageError(f"--timeout: {error}", "as --timeout '10 s'") from None

    def wish(self, backend: RealBackendName | None) -> RealRunOptions:
        """The same for `distsim.real`. Raises UsageError for a timeout that is none."""
        from distsim.real.run import RealRunOptions

        return RealRunOptions(
            backend.value if backend else None,
            self.launcher.value if self.launcher else None,
            self.init,
            self.timeout_ns,
            self.repeat,
            self.nnodes,
            self.node_rank,
            self.master_addr,
            self.master_port,
            self.force,
            self.device.value,
        )

    def given(self) -> list[str]:
        """The options that are not as they are by default."""
        return [
            f"--{one.name.replace('_', '-')}"
            for one in fields(self)
            if getattr(self, one.name) != one.default
        ]


@dataclass(frozen=True)
class RunArguments:
    """The arguments of `run` besides."""

    file: ScenarioArgument
    real: Real = False
    backend: BackendOption = None
    trace: TraceOption = None
    sets: SetOption = None
    format: FormatOption = OutputFormat.text
    report: ReportOption = None


@command_with_arguments(RunArguments, RealRunArguments)
def command(given: RunArguments, how: RealRunArguments) -> None:
    """Print how to start a scenario for real; with --real, run and record it.

    Ends with 0 when it completes, 1 when the scenario hangs or fails, 4 when the machine lacks
    something.

    \b
    Example: distsim run scenarios/hybrid.yaml
    Example: distsim run scenarios/hybrid.yaml --real --backend gloo
    Example: distsim run scenarios/hybrid.yaml --real --trace hybrid.jsonl
    """
    wish = how.wish(given.backend)
    _refuse_impossible_report(given)
    scenario = read_scenario(given.file, given.sets)
    if given.real:
        raise typer.Exit(_run_real(scenario, with_trace_path(wish, given.trace), given))
    scenario = _with_launch_options(scenario, how)
    console.out(
        _launch_plan_text(
            scenario, _real_run_command_line(given, how), given.backend, how.device, given.format
        )
    )


def _real_run_command_line(given: RunArguments, how: RealRunArguments) -> list[str]:
    """The command that does for real what was asked; options left as they are by default are left
    out.
    """
    values = {
        "--backend": given.backend and given.backend.value,
        "--device": how.device.value if how.device is not RealDeviceName.auto else None,
        "--timeout": how.timeout if how.timeout != "10 s" else None,
        "--launcher": how.launcher and how.launcher.value,
        "--init": how.init if how.init != "env" else None,
        "--repeat": str(how.repeat) if how.repeat != 1 else None,
        "--trace": str(given.trace) if given.trace else None,
    }
    words = [
        "run",
        given.file,
        "--real",
        *(word for name, value in values.items() if value for word in (name, value)),
    ]
    return [
        *words,
        *(["--force"] if how.force else []),
        *(word for one in given.sets or () for word in ("--set", one)),
    ]


def _with_launch_options(scenario: Scenario, how: RealRunArguments) -> Scenario:
    """The scenario on so many machines (1: as its file says), with the first one's address."""
    from distsim.common.errors import UsageError

    world, launch, nnodes = scenario.world, scenario.launch, how.nnodes
    if world.size % nnodes:
        raise UsageError(
            f"{world.size} ranks can't be cut into --nnodes {nnodes}",
            "give a number that divides the world",
        )
    cut = {"nodes": nnodes, "ranks_per_node": world.size // nnodes} if nnodes > 1 else {}
    asked = {"master_addr": how.master_addr, "master_port": how.master_port}
    first = {key: value for key, value in asked.items() if value is not None}
    return scenario.model_copy(
        update={"world": world.model_copy(update=cut), "launch": launch.model_copy(update=first)}
    )


def _launch_plan_text(
    scenario: Scenario,
    words: list[str],
    backend: RealBackendName | None,
    device: RealDeviceName,
    format: OutputFormat,
) -> str:
    from distsim.output.text.launch_plan import launch_plan_json, launch_plan_text
    from distsim.real.launch.external_launchers import launch_plan

    found = launch_plan(
        scenario, tuple(words), backend.value if backend else scenario.backend, device.value
    )
    return (
        console.to_json(launch_plan_json(found))
        if format is OutputFormat.json
        else launch_plan_text(found)
    )


def _refuse_impossible_report(given: RunArguments) -> None:
    from distsim.common.errors import UsageError

    check_report_path(given.report)
    if given.report is not None and not given.real:
        raise UsageError(
            "--report is of a run, and this is the plan of one",
            "add --real, or use `distsim report`",
        )


def _run_real(scenario: Scenario, wish: RealRunOptions, given: RunArguments) -> int:
    """Run it, write the trace, print the report; the exit status."""
    import os

    from distsim.real.launch.external_launchers import external_rank
    from distsim.real.run import RealRunRefused, run_scenario

    trace, format = given.trace, given.format
    if trace is not None:
        check_trace_path(trace)
    launch = scenario.launch
    started = external_rank(
        os.environ, wish.master_addr or launch.master_addr, wish.master_port or launch.master_port
    )
    try:
        run, status = run_scenario(scenario, wish, started)
    except RealRunRefused as refused:
        report_refused_run(refused, format)
        return 1
    if run is None:  # the first launcher reports
        return status
    write_recording(trace, run.trace, lambda: _report(run, format))
    write_real_run_report(given.report, run)
    return status


def write_recording(path: Path | None, trace: Trace, report: Callable[[], str]) -> None:
    """Write the trace, where one is wanted, and print the report, which a trace that can't be
    written does not cost.

    A second Ctrl-C does not cost them either: the run is over.
    """
    with _signals_ignored():
        try:
            if path is not None:
                write_trace_by_suffix(path, trace)
                _remove_partial(path)
        finally:
            console.out(report())


def with_trace_path(wish: RealRunOptions, trace: Path | None) -> RealRunOptions:
    """The wish, with the file beside which the recording is written as it goes."""
    from dataclasses import replace

    return replace(wish, trace=str(trace)) if trace is not None else wish


def _remove_partial(path: Path) -> None:
    """The whole recording is there, so what was written of it while it was under way is not
    needed.
    """
    from distsim.real.results.partial_trace import partial_trace_path

    partial = partial_trace_path(path)
    if partial is not None:
        partial.unlink(missing_ok=True)


@contextmanager
def _signals_ignored() -> Iterator[None]:
    names = (
        (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if threading.current_thread() is threading.main_thread()
        else ()
    )
    before = {name: signal.signal(name, signal.SIG_IGN) for name in names}
    try:
        yield
    finally:
        for name, handler in before.items():
            signal.signal(name, handler or signal.SIG_DFL)


def check_trace_path(path: Path) -> None:
    """Raises UsageError before anything runs."""
    import tempfile

    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream

    if is_stream(path):
        return
    if not path.parent.is_dir():
        raise UsageError(
            f"there is no folder {path.parent} for the trace", "name a file in a folder that exists"
        )
    if not path.name.endswith((".jsonl", ".json", ".jsonl.gz", ".json.gz")):
        raise UsageError(
            f"{path} is no name for a trace",
            "end it in .jsonl (distsim's own form) or .json (for Perfetto), with .gz or without",
        )
    try:
        with tempfile.TemporaryFile(dir=path.parent):  # what can't be written later is said now
            pass
    except OSError as error:
        raise UsageError(
            f"can't write into {path.parent}: {error.strerror}",
            "name a file in a folder that may be written",
        ) from None


def write_trace_by_suffix(path: Path, trace: Trace) -> None:
    """Write a trace in the form that the file's name asks for."""
    from distsim.output.json.chrome_trace import chrome_trace_lines
    from distsim.trace.jsonl import encode_pieces, trace_lines

    is_chrome = path.name.endswith((".json", ".json.gz"))
    console.write_file(
        path, encode_pieces(path, chrome_trace_lines(trace) if is_chrome else trace_lines(trace))
    )


def _report(run: RealRun, format: OutputFormat) -> str:
    from distsim.output.text.real_run import real_run_json, real_run_text

    return (
        console.to_json(real_run_json(run)) if format is OutputFormat.json else real_run_text(run)
    )


def report_refused_run(refused: RealRunRefused, format: OutputFormat) -> None:
    """Why a run was not made: what the simulation found."""
    from distsim.output.json.simulation_result import simulation_json
    from distsim.output.text.finding_list import findings_lines

    if format is OutputFormat.json:
        console.out(console.to_json({"refused": True, **simulation_json(refused.simulation)}))
    elif lines := findings_lines(refused.simulation.findings, refused.simulation.scenario.file):
        console.out("\n".join(lines))
    console.note(str(refused))
