"""`distsim compare`: compare two runs, or measured times with the costs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.api.inputs import is_scenario
from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    ClusterOption,
    FormatOption,
    OutputFormat,
    ReportOption,
    SetOption,
    parse_share,
    read_scenario,
)
from distsim.cli.shared.html_report import check_report_path

if TYPE_CHECKING:
    from distsim.scenario import Scenario

FirstRunArgument = Annotated[
    str,
    typer.Argument(
        metavar="A",
        help=(
            "Trace, or scenario to simulate. Without B, a file with measured times (nccl-tests, "
            "`distsim bench`), which is compared with the times predicted for --cluster."
        ),
    ),
]
SecondRunArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="B",
        help="Trace or scenario. If only one is a trace, the scenario runs on the trace's backend.",
    ),
]
ToleranceOption = Annotated[
    str,
    typer.Option(
        "--tolerance",
        metavar="SHARE",
        help="Accept calls whose end times differ by at most this share of A's total time: 0.05 "
        "or 5%.",
    ),
]
PictureOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="F.svg", help="Draw both runs over one time axis."),
]


def command(
    a: FirstRunArgument,
    b: SecondRunArgument = None,
    tolerance: ToleranceOption = "0",
    output: PictureOption = None,
    format: FormatOption = OutputFormat.text,
    cluster: ClusterOption = None,
    sets: SetOption = None,
    report: ReportOption = None,
) -> None:
    """Compare two runs (calls, values, order, timing) and report the first difference.

    The report also explains which parts make one run longer than the other.

    \b
    Example: distsim compare real.jsonl scenarios/hybrid.yaml --tolerance 25%
    Example: distsim compare before.jsonl after.jsonl -o both.svg
    Example: distsim compare all_reduce_perf.log --cluster dgx-h100
    """
    if b is None:
        raise typer.Exit(_compare_log_with_cluster(a, cluster, format))
    from distsim.api.functions import compare

    share = parse_share(tolerance, "--tolerance")
    check_report_path(report)
    answer = compare(_read_run(a, sets), _read_run(b, sets), tolerance=share, cluster=cluster)
    if output is not None:
        console.write_file(output, answer.to_svg().content)
        console.note(f"wrote {output}")
    if report is not None:
        console.write_file(report, answer.report().html)
        console.note(f"wrote {report}")
    if format is OutputFormat.json:
        console.out(console.to_json(answer.to_json()))
    else:
        console.out(answer.to_text())
    raise typer.Exit(int(not answer.same))


def _read_run(file: str, sets: list[str] | None) -> Scenario | str:
    """The scenario in a file; the name of any other file unchanged."""
    return read_scenario(file, sets) if is_scenario(file) else file


def _compare_log_with_cluster(log: str, cluster: str | None, format: OutputFormat) -> int:
    """Compare measured times with the costs of a cluster; return the exit status."""
    from distsim.api.inputs import read_cluster
    from distsim.cli.shared.measurement_input import read_measurements
    from distsim.common.errors import UsageError
    from distsim.hardware.cluster import cluster_from
    from distsim.output.text.calibration_tables import residuals_json, residuals_text
    from distsim.real.calibrate.fit_cluster import cost_residuals

    if cluster is None:
        raise UsageError(
            "only one run was given",
            "give two runs, or measured times and --cluster NAME",
        )
    if is_scenario(log):
        raise UsageError(
            f"{log} has no measured times",
            "give a log of nccl-tests, a bench or a trace, or a second run",
        )
    known = cluster_from(read_cluster(cluster) or cluster)
    residuals = cost_residuals(read_measurements(Path(log), None).points, known)
    if not residuals:
        raise UsageError(
            f"{log} has no measured time that the cost model predicts",
            "give a log of nccl-tests, a bench or a trace",
        )
    if format is OutputFormat.json:
        console.out(console.to_json(residuals_json(residuals)))
    else:
        console.out(residuals_text(residuals, known.name, log))
    return int(any(residual.is_outside_range for residual in residuals))
