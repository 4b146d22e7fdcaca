"""`distsim compare`: compare two runs, or measured times with the costs of a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    ClusterOption,
    FormatOption,
    OutputFormat,
    ReportOption,
    SetOption,
)
from distsim.cli.shared.html_report import check_report_path, write_report
from distsim.cli.shared.input_files import is_scenario, read_cluster, read_scenario

if TYPE_CHECKING:
    from distsim.output.page import ReportRun

FirstRunArgument = Annotated[
    str,
    typer.Argument(
        metavar="A",
        help="A trace, or a scenario, which is simulated; alone, measured times beside --cluster.",
    ),
]
SecondRunArgument = Annotated[
    str | None, typer.Argument(metavar="B", help="The same; a scenario takes the other's back end.")
]
ToleranceOption = Annotated[
    str,
    typer.Option(
        "--tolerance",
        metavar="SHARE",
        help="Ends of calls may differ by this share of A's makespan: 0.05 or 5%.",
    ),
]
PictureOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="F.svg", help="Draw both runs over one axis of time."),
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
    """Lay two runs side by side: calls, values, order, times; where they first part, and what makes
    one longer.

    \b
    Example: distsim compare real.jsonl scenarios/hybrid.yaml --tolerance 25%
    Example: distsim compare before.jsonl after.jsonl -o both.svg
    Example: distsim compare all_reduce_perf.log --cluster dgx-h100
    """
    if b is None:
        raise typer.Exit(_compare_log_with_cluster(a, cluster, format))
    from distsim.analysis.run_comparison import compare_runs
    from distsim.output.text.comparison import compare_json, compare_text

    share = _parse_tolerance(tolerance)
    check_report_path(report)
    names = (a, b)
    first, second = _read_runs(a, b, cluster, sets)
    comparison = compare_runs(first.trace, second.trace, tolerance=share)
    if output is not None:
        from distsim.output.pictures.run_overlay import overlay_svg

        console.write_file(output, overlay_svg(comparison, names))
        console.note(f"wrote {output}")
    write_report(report, [first, second], comparison)
    if format is OutputFormat.json:
        console.out(console.to_json(compare_json(comparison, names)))
    else:
        console.out(compare_text(comparison, names))
    raise typer.Exit(int(not comparison.same))


def _compare_log_with_cluster(log: str, cluster: str | None, format: OutputFormat) -> int:
    """Compare measured times with the costs of a cluster; return the exit status."""
    from distsim.cli.shared.measurement_input import read_measurements
    from distsim.common.errors import UsageError
    from distsim.hardware.cluster import cluster_from
    from distsim.output.text.calibration_tables import residuals_json, residuals_text
    from distsim.real.calibrate.fit_cluster import cost_residuals

    if cluster is None:
        raise UsageError(
            "one run has nothing to be laid beside",
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
            f"{log} has no time that a cluster has a price for",
            "give a log of nccl-tests, a bench or a trace",
        )
    if format is OutputFormat.json:
        console.out(console.to_json(residuals_json(residuals)))
    else:
        console.out(residuals_text(residuals, known.name, log))
    return int(any(residual.is_outside_range for residual in residuals))


def _parse_tolerance(text: str) -> float:
    """The share in `0.05` or `5%`. Raises UsageError for anything else."""
    from distsim.common.errors import UsageError

    is_percentage = text.endswith("%")
    divisor, limit = (100, 1e9) if is_percentage else (1, 1.0001)
    try:
        share = float(text.removesuffix("%").strip()) / divisor
    except ValueError:
        share = -1.0
    if not 0 <= share < limit:
        raise UsageError(f"--tolerance {text} is no share", "as --tolerance 0.05 or --tolerance 5%")
    return share


# --- reading the runs ---


def _read_runs(
    a: str, b: str, cluster: str | None, sets: list[str] | None
) -> tuple[ReportRun, ReportRun]:
    """Both runs; a scenario that is compared with a trace is simulated under its backend."""
    from distsim.output.page import report_run_from_trace
    from distsim.trace.jsonl import read_trace

    traces = {file: read_trace(file) for file in (a, b) if not is_scenario(file)}
    backends = [trace.header.get("backend") for trace in traces.values()]
    backend = next((str(name) for name in backends if name), None)

    def read(file: str) -> ReportRun:
        if file in traces:
            return report_run_from_trace(traces[file], file, None)
        return _simulate_run(file, backend, cluster, sets)

    return read(a), read(b)


def _simulate_run(
    file: str, backend: str | None, cluster: str | None, sets: list[str] | None
) -> ReportRun:
    """The run of a scenario; its trace has the outcome and values of a recorded trace."""
    from dataclasses import replace

    from distsim.backends import BACKEND_PROFILES
    from distsim.output.json.tensor_values import trace_header_values
    from distsim.output.page import report_run_from_simulation
    from distsim.simulation.simulate_scenario import simulate
    from distsim.trace.model import Trace

    simulation = simulate(
        read_scenario(file, sets),
        backend=backend if backend in BACKEND_PROFILES else None,
        cluster=cluster,
        with_verdict=False,
    )
    trace = simulation.run.trace
    header = {**trace.header, "outcome": simulation.outcome, **trace_header_values(simulation)}
    recorded = Trace(header, trace.tables, trace.columns)
    return replace(report_run_from_simulation(simulation), trace=recorded)
