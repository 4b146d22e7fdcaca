"""`distsim calibrate`: a cluster's file from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.commands.simulate import FormatOption, OutputFormat
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.real.calibrate import MeasuredPoint

Sources = Annotated[
    list[Path],
    typer.Argument(
        metavar="SOURCE…",
        help="Outputs of `distsim bench`, traces (.jsonl), or nccl-tests' text or JSON.",
    ),
]
Output = Annotated[
    Path, typer.Option("--output", "-o", metavar="F.yaml", help="The cluster's file to write.")
]
Base = Annotated[
    str | None,
    typer.Option(
        "--cluster", metavar="NAME", help="What the sources don't tell is taken from this cluster."
    ),
]
Name = Annotated[
    str | None,
    typer.Option(
        "--name", metavar="NAME", help="What the cluster is called; left out: as its file."
    ),
]
OpOption = Annotated[
    str | None,
    typer.Option(
        "--op", metavar="OP", help="What an nccl-tests log measures, if its name does not tell."
    ),
]


#: A word of a GPU's name -> the preset whose machines have it; longer words first.
_PRESET_BY_GPU = {
    "GB200": "gb200-nvl72",
    "GH200": "gh200",
    "B200": "dgx-b200",
    "H200": "dgx-h200",
    "H100": "dgx-h100",
    "H800": "dgx-h100",
    "A100-PCI": "a100-pcie",
    "V100": "dgx1-v100",
    "MI300X": "mi300x",
    "L40S": "l40s-pcie",
    "L4": "l4-pcie",
}
#: Larger logs are none of nccl-tests.
_MAX_LOG_BYTES = 64 * 2**20


def command(
    sources: Sources,
    output: Output,
    base: Base = None,
    name: Name = None,
    op: OpOption = None,
    format: FormatOption = OutputFormat.text,
) -> None:
    """Fit a cluster's file to measurements, and say how far off it is.

    \b
    Example: distsim calibrate here.json -o here.yaml
    Example: distsim calibrate nccl_allreduce.log nccl_alltoall.log -o dgx.yaml
    """
    from distsim.cli.commands.replay import read_cluster
    from distsim.hardware.cluster import cluster_from
    from distsim.output.text.calibration_tables import calibration_json, calibration_text
    from distsim.real.calibrate import calibrate_cluster
    from distsim.scenario.format.source.yaml_nodes import dump_yaml

    points: list[MeasuredPoint] = []
    preset = "cpu-10gbe"
    for source in sources:
        found, fits = read_measured_points(source, op)
        points += found
        preset = fits or preset
    told = ", ".join(source.name for source in sources)
    done = calibrate_cluster(
        points,
        cluster_from(read_cluster(base) or preset),
        name or output.stem,
        f"distsim calibrate {told}",
    )
    console.write_file(output, dump_yaml(done.cluster.to_mapping()))
    console.note(f"wrote {output}")
    console.out(
        console.to_json(calibration_json(done))
        if format is OutputFormat.json
        else calibration_text(done)
    )


def read_measured_points(
    source: Path, op: str | None
) -> tuple[tuple[MeasuredPoint, ...], str | None]:
    """(points, the preset that fits the machine they come from)."""
    from distsim.common.errors import UsageError
    from distsim.common.file_io import read_bytes
    from distsim.real.bench.measurement import BENCH_FORMAT, bench_from_json
    from distsim.real.calibrate import points_from_bench, points_from_nccl_tests, points_from_trace
    from distsim.trace.jsonl import read_trace

    if source.suffix == ".jsonl":
        trace = read_trace(source)
        return points_from_trace(trace), "dgx-a100" if trace.header.get(
            "backend"
        ) == "nccl" else None
    try:
        text = read_bytes(source, _MAX_LOG_BYTES).decode("utf-8", errors="replace")
    except OSError as fault:
        raise UsageError(
            f"{source} can't be read: {fault.strerror}", "give a bench, a trace or a log"
        ) from None
    if text.lstrip().startswith("{") and f'"{BENCH_FORMAT}"' in text[:200]:
        return points_from_bench(bench_from_json(text, str(source))), None
    points, device = points_from_nccl_tests(text, str(source), op)
    return points, next(
        (preset for word, preset in _PRESET_BY_GPU.items() if word in device), "dgx-a100"
    )
