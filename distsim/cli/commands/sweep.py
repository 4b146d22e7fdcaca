"""`distsim sweep`: simulate every point of a grid, on all cores or a cluster of workers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    BackendOption,
    FormatOption,
    MaxCallsOption,
    OutputFormat,
    ScenarioArgument,
    SetOption,
    command_with_arguments,
)
from distsim.cli.shared.worker_arguments import WorkerArguments, comma_separated_names

if TYPE_CHECKING:
    from distsim.api.results import SweepAnswer

_PLOT_SUFFIXES = (".svg", ".png", ".pdf")

GridOption = Annotated[
    list[str] | None,
    typer.Option(
        "--grid",
        metavar="KEY=A,B",
        help="Variable or key of the scenario, and the values to try. Repeatable.",
    ),
]
ClustersOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="A,B",
        help="Hardware models (presets or files) to try; overrides the scenario.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F.csv",
        help="Save each result row as soon as it is known (.csv, .parquet). An existing file "
        "is continued.",
    ),
]
PlotOption = Annotated[
    Path | None,
    typer.Option(
        "--plot",
        metavar="F.svg",
        help="Draw two plots: time against the swept values, and time against memory "
        "(.svg, .png, .pdf).",
    ),
]


@dataclass(frozen=True)
class SweepArguments:
    """The arguments of `sweep`."""

    file: ScenarioArgument
    grid: GridOption = None
    cluster: ClustersOption = None
    output: OutputOption = None
    format: FormatOption = OutputFormat.text
    backend: BackendOption = None
    sets: SetOption = None
    max_calls: MaxCallsOption = None
    plot: PlotOption = None


@command_with_arguments(SweepArguments, WorkerArguments)
def command(arguments: SweepArguments, workers: WorkerArguments) -> None:
    """Simulate a scenario at every point of a grid, and list the fastest points first.

    Without --grid and --cluster, the grid is the `sweep:` block of the file. Each point is
    simulated once, even if it occurs twice. Points that the output file already contains are not
    simulated again. Exit status: 0 if at least one point completes, otherwise 1.

    \b
    Example: distsim sweep scenarios/hybrid.yaml --cluster dgx-a100,dgx-h100
    Example: distsim sweep a.yaml --grid backend=gloo,nccl -o backends.csv
    """
    from distsim.api.functions import sweep
    from distsim.cli.shared.progress import progress_bar
    from distsim.planning.sweep.grid import parse_grid

    if arguments.plot is not None:
        check_plot_path(arguments.plot)
    with progress_bar("simulating") as show_progress:
        answer = sweep(
            arguments.file,
            grid=parse_grid(arguments.grid or ()),
            clusters=comma_separated_names(arguments.cluster),
            sets=arguments.sets or (),
            backend=arguments.backend,
            max_calls=arguments.max_calls,
            output=arguments.output,
            jobs=workers.jobs,
            address=workers.address,
            budget=workers.budget,
            seed=workers.seed,
            top=workers.top,
            progress=show_progress,
        )
    if arguments.format is OutputFormat.json:
        console.out(console.to_json(answer.to_json()))
    else:
        console.out(answer.to_text())
    if arguments.plot is not None:
        _write_plot(arguments, arguments.plot, answer)
    raise typer.Exit(int(not answer.ok))


def check_plot_path(path: Path) -> None:
    """Check the suffix of a plot before anything runs. Raises UsageError."""
    from distsim.common.errors import UsageError

    if path.suffix not in _PLOT_SUFFIXES:
        raise UsageError(
            f"--plot {path}: unknown file type", "use a name that ends in .svg, .png or .pdf"
        )


def _write_plot(arguments: SweepArguments, path: Path, answer: SweepAnswer) -> None:
    from distsim.output.pictures.drawing.svg_conversion import convert_svg

    title = "" if arguments.file == "-" else Path(arguments.file).stem
    svg = str(answer.to_svg(title).content)
    if path.suffix == ".svg":
        console.write_file(path, svg)
    else:
        console.write_file(path, convert_svg(svg, "png" if path.suffix == ".png" else "pdf"))
    console.note(f"wrote {path}")
