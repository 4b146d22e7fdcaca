"""`distsim replay`: a trace again, on the simulator or on torch.distributed."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.app import ClusterOption, check_scenario_name, taking
from distsim.cli.run import RealBackend, RealOptions, check_trace_name, deliver, recorded_in, tell_refused, write_trace
from distsim.cli.simulate import Format, FormatOption

if TYPE_CHECKING:
    from distsim.cluster import Cluster
    from distsim.real.run import Wish
    from distsim.replay import Scale
    from distsim.trace import Trace

TraceFile = Annotated[
    Path, typer.Argument(metavar="TRACE", help="A trace, as `simulate --trace F.jsonl` and `run --real` write it.")
]
BackendOption = Annotated[
    RealBackend | None, typer.Option("--backend", help="In place of the trace's; auto, with --real: what is here.")
]
ScaleOption = Annotated[
    list[str] | None,
    typer.Option("--scale", metavar="WHAT=FACTOR", help="Multiply durations: compute, or gaps (a host between its calls)."),
]
Output = Annotated[
    Path | None, typer.Option("--trace", metavar="F", help="Write the replay: F.jsonl native, F.json for Perfetto.")
]
Scenario = Annotated[
    Path | None,
    typer.Option("-o", metavar="S.yaml", help="Write the calls as a scenario: loops, and one program for equal ranks."),
]
Real = Annotated[bool, typer.Option("--real", help="Run it on torch.distributed; the options below are for that.")]


@dataclass(frozen=True)
class ReplayOptions:
    """The arguments of `replay` besides those of a real run."""

    trace: TraceFile
    cluster: ClusterOption = None
    backend: BackendOption = None
    scale: ScaleOption = None
    output: Output = None
    scenario: Scenario = None
    format: FormatOption = Format.text
    real: Real = False


@taking(ReplayOptions, RealOptions)
def command(given: ReplayOptions, how: RealOptions) -> None:
    """Run the calls of a trace again: simulated, at another speed, elsewhere, or for real.

    \b
    Example: distsim replay run.jsonl
    Example: distsim replay run.jsonl --cluster dgx-h100 --scale compute=0.5
    Example: distsim replay run.jsonl --real --trace again.jsonl
    Example: distsim replay run.jsonl -o run.yaml
    """
    if given.scenario is not None:
        _write_scenario(given.trace, given.scenario)
    factors = _scale(given.scale)
    if given.output is not None:
        check_trace_name(given.output)
    if given.real:
        raise typer.Exit(_for_real(given, recorded_in(how.wish(given.backend), given.output), factors))
    _alone([*how.given(), *(["--backend auto"] if given.backend is RealBackend.auto else [])])
    raise typer.Exit(_simulated(given, factors))


def _write_scenario(trace: Path, file: Path) -> None:
    from distsim.compact import compact
    from distsim.errors import UsageError
    from distsim.files import write_file
    from distsim.trace_io import read_trace

    check_scenario_name(file)
    try:
        write_file(file, [compact(read_trace(trace)).text])
    except UsageError as error:
        raise UsageError(f"{trace}: {error.message}", error.remedy) from None


def _alone(given: list[str]) -> None:
    """Raises UsageError for options that say something about a real run where there is none."""
    from distsim.errors import UsageError

    if given:
        raise UsageError(f"{', '.join(given)}: for a run on torch.distributed only", "add --real, or leave it out")


def _simulated(given: ReplayOptions, scale: Scale) -> int:
    from distsim.errors import UsageError
    from distsim.replay import replay
    from distsim.trace_io import read_trace
    from distsim.views.replayview import replay_json, replay_text

    trace, backend = given.trace, given.backend
    source, prices = read_trace(trace), read_cluster(given.cluster)
    try:
        found = replay(source, cluster=prices, backend=backend and backend.value, scale=scale)
    except UsageError as error:
        raise UsageError(f"{trace}: {error.message}", error.remedy) from None
    if given.output is not None:
        write_trace(given.output, found.trace)
    in_json = given.format is Format.json
    console.out(console.to_json(replay_json(found, str(trace))) if in_json else replay_text(found, str(trace)))
    return int(found.outcome != "completes")


def _for_real(given: ReplayOptions, wish: Wish, scale: Scale) -> int:
    """Run it, write the recording, print the report; the exit status."""
    import os
    from dataclasses import replace

    from distsim.real.plan import external_rank
    from distsim.real.run import Refused, chosen_backend, run_simulated
    from distsim.replay import prepared
    from distsim.trace_io import read_trace
    from distsim.views.real import real_text
    from distsim.views.replayview import real_replay_json, real_replay_lines

    trace, format, source = given.trace, given.format, read_trace(given.trace)
    if not wish.force:
        _refuse_cut(trace, source)
    started = external_rank(os.environ, wish.master_addr or "127.0.0.1", wish.master_port or 29500)
    backend = chosen_backend(wish, str(source.header.get("backend") or "gloo"), source.world_size, started)
    ready = prepared(source, str(trace), backend=backend, cluster=read_cluster(given.cluster), scale=scale)
    try:
        run, status = run_simulated(ready.simulation, wish, started, ready.program)
    except Refused as refused:
        tell_refused(refused, format)
        return 1
    if run is None:  # the first launcher reports
        return status
    told = real_replay_lines(source, str(trace), ready.rebuilt.untimed)
    run = replace(run, trace=ready.rows_of(run.trace), notes=(*told, *run.notes))
    done = run
    deliver(
        given.output,
        done.trace,
        lambda: console.to_json(real_replay_json(done, source, str(trace))) if format is Format.json else real_text(done),
    )
    return status


def _refuse_cut(file: Path, source: Trace) -> None:
    """Raises UsageError for a trace whose last calls are missing: ranks that made them would wait for ranks that don't."""
    from distsim.errors import UsageError
    from distsim.views.ending import how_it_ended

    if source.header.get("cut") or source.header.get("reason") == "under way":
        raise UsageError(f"{file} is not run: {how_it_ended(source)}", "--force runs the calls that are there")


def _scale(given: list[str] | None) -> Scale:
    from distsim.errors import UsageError
    from distsim.replay import Scale

    factors: dict[str, float] = {}
    for text in given or ():
        name, _, value = text.partition("=")
        try:
            factors[name] = float(value)
        except ValueError:
            factors[name] = -1.0
        if name not in Scale._fields or not 0 <= factors[name] < 1e9:
            raise UsageError(f"--scale {text} is not understood", "as --scale compute=0.5 or --scale gaps=0")
    return Scale(**factors)


def read_cluster(name: str | None) -> str | Cluster | None:
    """A preset's name as it is; what a file holds."""
    if name is None or Path(name).suffix not in (".yaml", ".yml"):
        return name
    from distsim.simulation import cluster_of_file

    return cluster_of_file(name)
