"""`distsim compare`: two runs side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from distsim.cli import console
from distsim.cli.app import ClusterOption, ReportOption, Sets, read_scenario
from distsim.cli.report import check_report_name, write_report
from distsim.cli.simulate import Format, FormatOption

if TYPE_CHECKING:
    from distsim.report import Told

First = Annotated[
    str, typer.Argument(metavar="A", help="A trace, or a scenario, which is simulated; alone, measured times beside --cluster.")
]
Second = Annotated[str | None, typer.Argument(metavar="B", help="The same; a scenario takes the other's back end.")]
Tolerance = Annotated[
    str, typer.Option("--tolerance", metavar="SHARE", help="Ends of calls may differ by this share of A's makespan: 0.05 or 5%.")
]
Picture = Annotated[Path | None, typer.Option("--output", "-o", metavar="F.svg", help="Draw both runs over one axis of time.")]


def command(
    a: First,
    b: Second = None,
    tolerance: Tolerance = "0",
    output: Picture = None,
    format: FormatOption = Format.text,
    cluster: ClusterOption = None,
    sets: Sets = None,
    report: ReportOption = None,
) -> None:
    """Lay two runs side by side: calls, values, order, times; where they first part, and what makes one longer.

    \b
    Example: distsim compare real.jsonl scenarios/hybrid.yaml --tolerance 25%
    Example: distsim compare before.jsonl after.jsonl -o both.svg
    Example: distsim compare all_reduce_perf.log --cluster dgx-h100
    """
    if b is None:
        _beside(a, cluster, format)
    from distsim.compare import compare
    from distsim.views.compareview import compare_json, compare_text

    allowed = _share(tolerance)
    check_report_name(report)
    names = (a, b)
    first, second = _runs(a, b, cluster, sets)
    found = compare(first.trace, second.trace, tolerance=allowed)
    if output is not None:
        from distsim.views.overlay import overlay_svg

        console.write_file(output, overlay_svg(found, names))
        console.note(f"wrote {output}")
    write_report(report, [first, second], found)
    console.out(console.to_json(compare_json(found, names)) if format is Format.json else compare_text(found, names))
    raise typer.Exit(int(not found.same))


def _beside(log: str, cluster: str | None, format: Format) -> NoReturn:
    """Measured times alone: they are laid beside a cluster's prices."""
    from distsim.calibrate.fit import beside
    from distsim.cli.calibrate import read_points
    from distsim.cli.replay import read_cluster
    from distsim.cluster import cluster_from
    from distsim.errors import UsageError
    from distsim.views.benchview import beside_json, beside_text

    if cluster is None:
        raise UsageError("one run has nothing to be laid beside", "give two runs, or measured times and --cluster NAME")
    if _is_scenario(log):
        raise UsageError(f"{log} has no measured times", "give a log of nccl-tests, a bench or a trace, or a second run")
    known = cluster_from(read_cluster(cluster) or cluster)
    found = beside(read_points(Path(log), None)[0], known)
    if not found:
        raise UsageError(f"{log} has no time that a cluster has a price for", "give a log of nccl-tests, a bench or a trace")
    console.out(console.to_json(beside_json(found)) if format is Format.json else beside_text(found, known.name, log))
    raise typer.Exit(int(any(b.parts for b in found)))


def _share(text: str) -> float:
    from distsim.errors import UsageError

    try:
        share = float(text.removesuffix("%").strip()) / (100 if text.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < (1e9 if text.endswith("%") else 1.0001):
        raise UsageError(f"--tolerance {text} is no share", "as --tolerance 0.05 or --tolerance 5%")
    return share


def _runs(a: str, b: str, cluster: str | None, sets: list[str] | None) -> tuple[Told, Told]:
    """Traces first: a scenario beside one is simulated under its back end."""
    from distsim.report import told_of_trace
    from distsim.trace_io import read_trace

    read = {file: read_trace(file) for file in (a, b) if not _is_scenario(file)}
    backend = next((str(trace.header["backend"]) for trace in read.values() if trace.header.get("backend")), None)
    first, second = (
        told_of_trace(read[file], file, None) if file in read else _simulated(file, backend, cluster, sets) for file in (a, b)
    )
    return first, second


def _is_scenario(file: str) -> bool:
    return file == "-" or Path(file).suffix in (".yaml", ".yml")


def _simulated(file: str, backend: str | None, cluster: str | None, sets: list[str] | None) -> Told:
    from dataclasses import replace

    from distsim.profiles import PROFILES
    from distsim.report import told_of
    from distsim.simulation import simulate
    from distsim.trace import Trace
    from distsim.views.values import values_header

    done = simulate(
        read_scenario(file, sets), backend=backend if backend in PROFILES else None, cluster=cluster, with_verdict=False
    )
    trace = done.run.trace
    whole = Trace({**trace.header, "outcome": done.outcome, **values_header(done)}, trace.tables, trace.columns)
    return replace(told_of(done), trace=whole)
