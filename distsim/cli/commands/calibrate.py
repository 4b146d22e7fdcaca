"""`distsim calibrate`: fit a cluster file to measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.api.inputs import read_cluster
from distsim.cli.shared import console
from distsim.cli.shared.arguments import FormatOption, OutputFormat
from distsim.cli.shared.measurement_input import read_measurements

if TYPE_CHECKING:
    from distsim.real.calibrate import MeasuredPoint

_DEFAULT_PRESET = "cpu-10gbe"

SourcesArgument = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE",
        help="Outputs of `distsim bench`, traces (.jsonl), or nccl-tests output (text or JSON).",
    ),
]
OutputOption = Annotated[
    Path, typer.Option("--output", "-o", metavar="F.yaml", help="Write the cluster file here.")
]
BaseOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help=(
            "Cluster (preset or file) for values that the sources do not contain. [default: a "
            "preset that suits the sources]"
        ),
    ),
]
NameOption = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="Name of the cluster. [default: the name of its file]"
    ),
]
OpOption = Annotated[
    str | None,
    typer.Option(
        "--op",
        metavar="OP",
        help="Operation that an nccl-tests log measures. [default: read from the log's name]",
    ),
]


def command(
    sources: SourcesArgument,
    output: OutputOption,
    base: BaseOption = None,
    name: NameOption = None,
    op: OpOption = None,
    format: FormatOption = OutputFormat.text,
) -> None:
    """Fit a cluster file to measurements, and report the remaining error.

    \b
    Example: distsim calibrate here.json -o here.yaml
    Example: distsim calibrate nccl_allreduce.log nccl_alltoall.log -o dgx.yaml
    """
    from distsim.hardware.cluster import cluster_from
    from distsim.output.text.calibration_tables import calibration_json, calibration_text
    from distsim.real.calibrate import calibrate_cluster
    from distsim.scenario.format.source.yaml_nodes import dump_yaml

    points: list[MeasuredPoint] = []
    preset = _DEFAULT_PRESET
    for source in sources:
        measured = read_measurements(source, op)
        points += measured.points
        # The last source that reveals its machine decides.
        preset = measured.preset or preset
    source_names = ", ".join(source.name for source in sources)
    calibration = calibrate_cluster(
        points,
        cluster_from(read_cluster(base) or preset),
        name or output.stem,
        f"distsim calibrate {source_names}",
    )
    console.write_file(output, dump_yaml(calibration.cluster.to_mapping()))
    console.note(f"wrote {output}")
    if format is OutputFormat.json:
        console.out(console.to_json(calibration_json(calibration)))
    else:
        console.out(calibration_text(calibration))
