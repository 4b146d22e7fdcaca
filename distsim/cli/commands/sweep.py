"""`distsim sweep`: every point of a grid, on all cores or a cluster."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import (
    BackendOption,
    MaxCallsOption,
    ScenarioArgument,
    SetOption,
    command_with_arguments,
)
from distsim.cli.commands.simulate import FormatOption, OutputFormat
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.planning.sweep.run_sweep import SweepRequest, SweepResult
    from distsim.scenario.format.models.sections import SweepDecl as SweepBlock

Grid = Annotated[
    list[str] | None,
    typer.Option(
        "--grid", metavar="KEY=A,B", help="A var or a key of the file, and its values. Repeatable."
    ),
]
Clusters = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="A,B", help="Clusters: presets or files, in place of the file's."
    ),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F.csv",
        help="Keep the rows there as they come (.csv, .parquet); go on from it.",
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="F.svg",
        help="Draw time over what was swept, and over memory (.svg, .png, .pdf).",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option("--jobs", "-j", metavar="N", min=1, help="Processes; left out: one a core."),
]
Address = Annotated[
    str | None,
    typer.Option(
        "--address",
        metavar="ADDR",
        help="Workers elsewhere: tcp://… of a Dask scheduler, or ray://….",
    ),
]
Budget = Annotated[
    int | None,
    typer.Option(
        "--budget", metavar="N", min=1, help="A guided search that tries N points (Optuna)."
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", min=0, help="Where the guided search starts.")
]
Top = Annotated[int, typer.Option("--top", metavar="N", min=1, help="Rows that the table shows.")]


@dataclass(frozen=True)
class WorkerArguments:
    """Who computes, and what is tried."""

    jobs: Jobs = None
    address: Address = None
    budget: Budget = None
    seed: Seed = 0
    top: Top = 15


@dataclass(frozen=True)
class SweepArguments:
    """The arguments of `sweep`."""

    file: ScenarioArgument
    grid: Grid = None
    cluster: Clusters = None
    output: Output = None
    format: FormatOption = OutputFormat.text
    backend: BackendOption = None
    sets: SetOption = None
    max_calls: MaxCallsOption = None
    plot: Plot = None


@command_with_arguments(SweepArguments, WorkerArguments)
def command(given: SweepArguments, workers: WorkerArguments) -> None:
    """Simulate a scenario at every point of a grid; the fastest first.

    Without --grid and --cluster the grid is the file's `sweep:`. Equal points are computed once,
    and those that the output has already not again. Ends with 0 when a point completes, else with
    1.

    \b
    Example: distsim sweep scenarios/hybrid.yaml --cluster dgx-a100,dgx-h100
    Example: distsim sweep a.yaml --grid backend=gloo,nccl -o backends.csv
    """
    from distsim.cli.shared.progress import progress_bar
    from distsim.output.text.sweep_table import sweep_json, sweep_text
    from distsim.planning.sweep.run_sweep import run_sweep

    if given.plot is not None:
        check_plot_path(given.plot)
    with progress_bar("simulating") as tell:
        found = run_sweep(_sweep_request(given, workers), tell)
    console.out(
        console.to_json(sweep_json(found))
        if given.format is OutputFormat.json
        else sweep_text(found, workers.top)
    )
    if given.plot is not None:
        _write_plot(given, given.plot, found)
    raise typer.Exit(int(not any(row["outcome"] == "completes" for row in found.rows)))


def check_plot_path(path: Path) -> None:
    """Raises UsageError for a name that says no format, before anything runs."""
    from distsim.common.errors import UsageError

    if path.suffix not in (".svg", ".png", ".pdf"):
        raise UsageError(f"--plot {path}: what is it to be?", "end it in .svg, .png or .pdf")


def _write_plot(given: SweepArguments, path: Path, found: SweepResult) -> None:
    from distsim.output.pictures.drawing.svg_conversion import convert_svg
    from distsim.output.pictures.sweep_plot import sweep_svg

    svg = sweep_svg(found, "" if given.file == "-" else Path(given.file).stem)
    picture = (
        svg
        if path.suffix == ".svg"
        else convert_svg(svg, "png" if path.suffix == ".png" else "pdf")
    )
    console.write_file(path, picture)
    console.note(f"wrote {path}")


def _sweep_request(given: SweepArguments, workers: WorkerArguments) -> SweepRequest:
    """Raises UsageError where neither the command nor the file has a grid."""
    from distsim.common.errors import UsageError
    from distsim.planning.sweep.grid import parse_grid
    from distsim.planning.sweep.run_sweep import SweepRequest, grid_from_block
    from distsim.scenario import read_text

    text = read_text(given.file)
    grid, clusters = parse_grid(given.grid or ()), comma_separated_names(given.cluster)
    budget = workers.budget
    if not grid and not clusters:
        block = _sweep_block(text, given.file, given.sets)
        if block is not None:
            grid, clusters, budget = (
                grid_from_block(block.grid),
                tuple(block.cluster),
                budget or block.budget,
            )
    if not grid and not clusters:
        raise UsageError(
            f"{given.file}: there is nothing to sweep",
            "add --grid mesh.dp=1,2,4 or --cluster a,b, or `sweep:` in the file",
        )
    file = "<stdin>" if given.file == "-" else given.file
    return SweepRequest(
        text,
        file,
        grid,
        clusters,
        tuple(given.sets or ()),
        given.backend and str(given.backend),
        given.max_calls,
        given.output,
        workers.jobs,
        workers.address,
        budget,
        workers.seed,
    )


def _sweep_block(text: str, file: str, sets: list[str] | None) -> SweepBlock | None:
    """The file's `sweep:`, checked. Raises ScenarioErrors."""
    from distsim.scenario import loads

    return loads(text, file, tuple(sets or ())).sweep


def comma_separated_names(text: str | None) -> tuple[str, ...]:
    """`a,b` as names."""
    return tuple(dict.fromkeys(word.strip() for word in (text or "").split(",") if word.strip()))
