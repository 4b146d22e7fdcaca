"""`distsim calibrate`: a cluster's file from measurements."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.simulate import Format, FormatOption

if TYPE_CHECKING:
    from distsim.calibrate import Point

Sources = Annotated[
    list[Path],
    typer.Argument(metavar="SOURCE…", help="Outputs of `distsim bench`, traces (.jsonl), or nccl-tests' text or JSON."),
]
Output = Annotated[Path, typer.Option("--output", "-o", metavar="F.yaml", help="The cluster's file to write.")]
Base = Annotated[
    str | None, typer.Option("--cluster", metavar="NAME", help="What the sources don't tell is taken from this cluster.")
]
Name = Annotated[str | None, typer.Option("--name", metavar="NAME", help="What the cluster is called; left out: as its file.")]
OpOption = Annotated[
    str | None, typer.Option("--op", metavar="OP", help="What an nccl-tests log measures, if its name does not tell.")
]


#: A word of a GPU's name -> the preset whose machines have it; longer words first.
_FITTING = {
    "GB200": "gb200-nvl72", "GH200": "gh200", "B200": "dgx-b200", "H200": "dgx-h200", "H100": "dgx-h100", "H800": "dgx-h100",
    "A100-PCI": "a100-pcie", "V100": "dgx1-v100", "MI300X": "mi300x", "L40S": "l40s-pcie", "L4": "l4-pcie",
}  # fmt: skip
#: Larger logs are none of nccl-tests.
_MOST = 64 * 2**20


def command(
    sources: Sources,
    output: Output,
    base: Base = None,
    name: Name = None,
    op: OpOption = None,
    format: FormatOption = Format.text,
) -> None:
    """Fit a cluster's file to measurements, and say how far off it is.

    \b
    Example: distsim calibrate here.json -o here.yaml
    Example: distsim calibrate nccl_allreduce.log nccl_alltoall.log -o dgx.yaml
    """
    from distsim.calibrate import calibrate
    from distsim.cli.replay import read_cluster
    from distsim.cluster import cluster_from
    from distsim.scenario.document import write
    from distsim.views.benchview import calibration_json, calibration_text

    points: list[Point] = []
    preset = "cpu-10gbe"
    for source in sources:
        found, fits = read_points(source, op)
        points += found
        preset = fits or preset
    told = ", ".join(source.name for source in sources)
    done = calibrate(points, cluster_from(read_cluster(base) or preset), name or output.stem, f"distsim calibrate {told}")
    console.write_file(output, write(done.cluster.to_mapping()))
    console.note(f"wrote {output}")
    console.out(console.to_json(calibration_json(done)) if format is Format.json else calibration_text(done))


def read_points(source: Path, op: str | None) -> tuple[tuple[Point, ...], str | None]:
    """(points, the preset that fits the machine they come from)."""
    from distsim.bench import FORMAT, from_json
    from distsim.calibrate import from_bench, from_nccl_log, from_trace
    from distsim.errors import UsageError
    from distsim.files import read_bytes
    from distsim.trace_io import read_trace

    if source.suffix == ".jsonl":
        trace = read_trace(source)
        return from_trace(trace), "dgx-a100" if trace.header.get("backend") == "nccl" else None
    try:
        text = read_bytes(source, _MOST).decode("utf-8", errors="replace")
    except OSError as fault:
        raise UsageError(f"{source} can't be read: {fault.strerror}", "give a bench, a trace or a log") from None
    if text.lstrip().startswith("{") and f'"{FORMAT}"' in text[:200]:
        return from_bench(from_json(text, str(source))), None
    points, device = from_nccl_log(text, str(source), op)
    return points, next((preset for word, preset in _FITTING.items() if word in device), "dgx-a100")
