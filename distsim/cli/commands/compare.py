"""`distsim compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from distsim.cli.application import ClusterOption, ReportOption, SetOption, read_scenario
from distsim.cli.commands.report import check_report_path, write_report
from distsim.cli.commands.simulate import FormatOption, OutputFormat
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.output.page import ReportRun

FirstRun = Annotated[
    str,
    typer.Argument(
        metavar="A",
        help="A trace, or a scenario, which is simulated; alone, measured times beside --cluster.",
    ),
]
SecondRun = Annotated[
    str | None, typer.Argument(metavar="B", help="The same; a scenario takes the other's back end.")
]
Tolerance = Annotated[
    str,
    typer.Option(
        "--tolerance",
        metavar="SHARE",
        help="Ends of calls may differ by this share of A's makespan: 0.05 or 5%.",
    ),
]
Picture = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="F.svg", help="Draw both runs over one axis of time."),
]


def command(
    a: FirstRun,
    b: SecondRun = None,
    tolerance: Tolerance = "0",
    output: Picture = None,
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
        _compare_log_with_cluster(a, cluster, format)
    from distsim.analysis.run_comparison import compare_runs
    from distsim.output.text.comparison import compare_json, compare_text

    allowed = _parse_share(tolerance)
    check_report_path(report)
    names = (a, b)
    first, second = _read_runs(a, b, cluster, sets)
    found = compare_runs(first.trace, second.trace, tolerance=allowed)
    if output is not None:
        from distsim.output.pictures.run_overlay import overlay_svg

        console.write_file(output, overlay_svg(found, names))
        console.note(f"wrote {output}")
    write_report(report, [first, second], found)
    console.out(
        console.to_json(compare_json(found, names))
        if format is OutputFormat.json
        else compare_text(found, names)
    )
    raise typer.Exit(int(not found.same))


def _compare_log_with_cluster(log: str, cluster: str | None, format: OutputFormat) -> NoReturn:
    """Measured times alone: they are laid beside a cluster's prices."""
    from distsim.cli.commands.calibrate import read_measured_points
    from distsim.cli.commands.replay import read_cluster
    from distsim.common.errors import UsageError
    from distsim.hardware.cluster import cluster_from
    from distsim.output.text.calibration_tables import residuals_json, residuals_text
    from distsim.real.calibrate.fit_cluster import cost_residuals

    if cluster is None:
        raise UsageError(
            "one run has nothing to be laid beside",
            "give two runs, or measured times and --cluster NAME",
        )
    if _is_scenario(log):
        raise UsageError(
            f"{log} has no measured times",
            "give a log of nccl-tests, a bench or a trace, or a second run",
        )
    known = cluster_from(read_cluster(cluster) or cluster)
    found = cost_residuals(read_measured_points(Path(log), None)[0], known)
    if not found:
        raise UsageError(
            f"{log} has no time that a cluster has a price for",
            "give a log of nccl-tests, a bench or a trace",
        )
    console.out(
        console.to_json(residuals_json(found))
        if format is OutputFormat.json
        else residuals_text(found, known.name, log)
    )
    raise typer.Exit(int(any(b.is_outside_range for b in found)))


def _parse_share(text: str) -> float:
    from distsim.common.errors import UsageError

    try:
        share = float(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < (1e9 if text.endswith("%") else 1.0001):
        raise UsageError(f"--tolerance {text} is no share", "as --tolerance 0.05 or --tolerance 5%")
    return share


def _read_runs(
    a: str, b: str, cluster: str | None, sets: list[str] | None
) -> tuple[ReportRun, ReportRun]:
    """Traces first: a scenario beside one is simulated under its back end."""
    from distsim.output.page import report_run_from_trace
    from distsim.trace.jsonl import read_trace

    read = {file: read_trace(file) for file in (a, b) if not _is_scenario(file)}
    backend = next(
        (str(trace.header["backend"]) for trace in read.values() if trace.header.get("backend")),
        None,
    )
    first, second = (
        report_run_from_trace(read[file], file, None)
        if file in read
        else _simulate_run(file, backend, cluster, sets)
        for file in (a, b)
    )
    return first, second


def _is_scenario(file: str) -> bool:
    return file == "-" or Path(file).suffix in (".yaml", ".yml")


def _simulate_run(
    file: str, backend: str | None, cluster: str | None, sets: list[str] | None
) -> ReportRun:
    from dataclasses import replace

    from distsim.backends import BACKEND_PROFILES
    from distsim.output.json.tensor_values import trace_header_values
    from distsim.output.page import report_run_from_simulation
    from distsim.simulation.simulate_scenario import simulate
    from distsim.trace.model import Trace

    done = simulate(
        read_scenario(file, sets),
        backend=backend if backend in BACKEND_PROFILES else None,
        cluster=cluster,
        with_verdict=False,
    )
    trace = done.run.trace
    whole = Trace(
        {**trace.header, "outcome": done.outcome, **trace_header_values(done)},
        trace.tables,
        trace.columns,
    )
    return replace(report_run_from_simulation(done), trace=whole)
