"""Clusters, a measurement of this machine, its calibration, and the comparison of a cluster with
measured times, as text, YAML and JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from distsim.common.units import bandwidth_text, show_bytes, show_ns
from distsim.hardware.cluster import Cluster
from distsim.operations.registry import OPERATIONS
from distsim.output.report_record import (
    Column,
    Paragraph,
    Report,
    Section,
    paragraphs,
    table_of,
    text_column,
)
from distsim.output.report_text import write_text
from distsim.real.bench.measurement import BenchResult, BenchRow
from distsim.real.calibrate import CalibrationResult
from distsim.real.calibrate.fit_cluster import CostResidual

SCHEMA_VERSION = 1


_BENCH_COLUMNS = [
    text_column("operation"),
    *map(Column, ("ranks", "bytes", "median", "25 %", "75 %", "busbw")),
]


def bench_text(found: BenchResult) -> str:
    """A line per operation, number of ranks and size: median, quartiles, bus bandwidth as
    nccl-tests defines it.
    """
    machine = ", ".join(
        f"{value} {key}" if key == "cores" else f"{key} {value}"
        for key, value in found.machine.items()
    )
    samples = found.rows[0].samples if found.rows else 0
    head = (
        f"Measured on this machine in {found.seconds:.0f} s ({machine}); {samples} samples per row"
    )
    table = table_of(_BENCH_COLUMNS, map(_bench_cells, found.rows))
    return write_text(Report([Section([Paragraph(head)]), Section([table])]))


def _bench_cells(row: BenchRow) -> tuple[str, ...]:
    ranks = str(row.ranks) if row.group == row.ranks else f"{row.group} of {row.ranks}"
    size = show_bytes(row.nbytes) if row.nbytes else "-"
    times = (show_ns(row.median_ns), show_ns(row.low_ns), show_ns(row.high_ns))
    return (row.op, ranks, size, *times, _bus_bandwidth_text(row))


def _bus_bandwidth_text(row: BenchRow) -> str:
    busbw = 0.0
    if row.median_ns:
        busbw = row.nbytes / row.median_ns * OPERATIONS[row.op].busbw_factor(row.group)
    if busbw >= 0.1:
        return f"{busbw:.3g} GB/s"
    return f"{1000 * busbw:.3g} MB/s" if busbw else "-"


_ERROR_COLUMNS = [
    text_column("operation"),
    text_column("sizes"),
    Column("points"),
    Column("median error"),
    Column("worst error"),
    Column("model median", "model only:\nmedian error"),
    Column("model worst", "\nworst error"),
]


def calibration_text(found: CalibrationResult) -> str:
    """The whole report as text."""
    return write_text(calibration_report(found))


def calibration_report(found: CalibrationResult) -> Report:
    """The fitted parameters, and the errors of every operation by class of sizes."""
    c = found.cluster
    in_node = (
        f"within a node: {show_ns(c.call_overhead_ns)} per call, "
        f"{show_ns(c.intra.latency_ns)} per hop, {_rate_text(c.intra.attained_bytes_per_ns)}"
    )
    if c.reduce_bytes_per_ns is not None:
        in_node += f", reduction {_rate_text(c.reduce_bytes_per_ns)}"
    between_nodes = ""
    if any(curve.nodes > 1 for curve in c.measured):
        between_nodes = (
            f"between nodes: {show_ns(c.inter_latency_ns)} per hop, "
            f"{_rate_text(c.rank_inter_bytes_per_ns)} per rank"
        )
    rows = [
        (
            m.op,
            m.sizes,
            str(m.points),
            _percent_text(m.median),
            _percent_text(m.worst),
            _percent_text(m.model_median),
            _percent_text(m.model_worst),
        )
        for m in found.errors
    ]
    title = "Errors: each size predicted from the other sizes, and from the model parameters only"
    end = (
        f"All: {c.error_band}; median error of the model parameters only: "
        f"{_percent_text(found.model_median)}."
    )
    head = Paragraph(f"{c.name}: {found.points} points")
    return Report(
        [
            Section([head, *paragraphs((in_node, between_nodes), "  ")]),
            Section([table_of(_ERROR_COLUMNS, rows)], title),
            Section([Paragraph(end)]),
        ]
    )


def _rate_text(bytes_per_ns: float) -> str:
    return bandwidth_text(float(f"{bytes_per_ns:.3g}"))


def _percent_text(share: float) -> str:
    return f"{100 * share:.0f} %"


def calibration_json(found: CalibrationResult) -> dict[str, object]:
    """What `distsim calibrate --format json` prints. Errors are shares of the measured time."""
    return {
        "schema_version": SCHEMA_VERSION,
        "cluster": found.cluster.to_mapping(),
        "points": found.points,
        "median_error": found.median,
        "worst_error": found.worst,
        "model_median_error": found.model_median,
        "spread": found.spread,
        "errors": [m._asdict() for m in found.errors],
    }


# --- clusters ---
_CLUSTER_COLUMNS = [
    text_column(key) for key in ("cluster", "device", "inside a node", "between nodes", "net")
]


def cluster_table(clusters: Sequence[Cluster]) -> str:
    """One line each: the device, the links inside a node, and all network cards of a node."""
    rows = [
        (
            c.name,
            c.device.name,
            f"{c.intra.kind} {c.intra.bytes_per_ns:g} GB/s",
            f"{c.nics.count} x {c.nics.bytes_per_ns:g} GB/s",
            c.network.transport,
        )
        for c in clusters
    ]
    table = table_of(_CLUSTER_COLUMNS, rows)._replace(indent="")
    return write_text(Report([Section([table])]))


def cluster_yaml(cluster: Cluster) -> str:
    """The cluster as a scenario may have it under ``cluster:``, in units that are easy to read."""
    return "\n".join(_yaml_lines(cluster.to_mapping(), ""))


def _yaml_lines(mapping: Mapping[str, object], indent: str) -> Iterator[str]:
    """Block-style YAML of nested mappings of plain values. A JSON scalar is a YAML scalar, so texts
    are quoted as in JSON.
    """
    for key, value in mapping.items():
        if isinstance(value, Mapping):
            yield f"{indent}{key}:"
            yield from _yaml_lines(value, indent + "  ")
        else:
            yield f"{indent}{key}: {json.dumps(value, ensure_ascii=False)}"


# --- a cluster compared with measured times ---


_RESIDUAL_COLUMNS = [
    text_column("operation"),
    *map(Column, ("ranks", "nodes", "bytes", "measured", "predicted", "ratio")),
    text_column("range"),
]


def residuals_text(found: Sequence[CostResidual], cluster: str, log: str) -> str:
    """The whole report as text."""
    return write_text(residuals_report(found, cluster, log))


def residuals_report(found: Sequence[CostResidual], cluster: str, log: str) -> Report:
    """The median error, the operations outside the range, and a table of all measured times."""
    error = statistics.median(abs(1 / residual.ratio - 1) for residual in found)
    has_outside = any(residual.is_outside_range for residual in found)
    summary = [
        f"{cluster} compared with {log}: {len(found)} measured times, "
        f"median prediction error {100 * error:.0f} %"
    ]
    if all(residual.band is None for residual in found):
        summary.append("The costs of this cluster have no range.")
    elif not has_outside:
        summary.append("All measured times are within the predicted range.")
    for (op, group, nodes), same in groupby(found, key=_operation_of):
        outside = _outside_text(list(same))
        if outside:
            summary.append(f"{op} of {group} ranks on {nodes} node{'s' * (nodes > 1)}: {outside}")
    table = table_of(_RESIDUAL_COLUMNS, map(_residual_cells, found))
    legend = ""
    if has_outside:
        legend = "*: outside the range, which covers 90 % of measured times if the cluster is right"
    return Report([Section(paragraphs(summary)), Section([table, Paragraph(legend)])])


def _operation_of(residual: CostResidual) -> tuple[str, int, int]:
    point = residual.point
    return point.op, point.group, point.nodes


def _residual_cells(residual: CostResidual) -> tuple[str, ...]:
    point = residual.point
    band = "-"
    if residual.band is not None:
        low, high = residual.band
        band = f"{low:.2f}–{high:.2f}{' *' if residual.is_outside_range else ''}"
    return (
        point.op,
        str(point.group),
        str(point.nodes),
        show_bytes(point.nbytes),
        show_ns(point.ns),
        show_ns(residual.predicted_ns),
        f"{residual.ratio:.2f}",
        band,
    )


def _outside_text(residuals: list[CostResidual]) -> str:
    """Where the times of an operation first leave the range, and the farthest; else empty."""
    outside = [residual for residual in residuals if residual.is_outside_range]
    if not outside:
        return ""
    first = outside[0]
    farthest = max(outside, key=lambda residual: max(residual.ratio, 1 / residual.ratio))
    return (
        f"{len(outside)} of {len(residuals)} sizes are outside the range, "
        f"from {show_bytes(first.point.nbytes)} on; largest error at "
        f"{show_bytes(farthest.point.nbytes)}: {farthest.ratio:.2f} times the predicted time"
    )


def residuals_json(found: Sequence[CostResidual]) -> dict[str, object]:
    """What `distsim compare LOG --cluster C --format json` prints."""
    rows = [
        {
            "op": b.point.op,
            "group": b.point.group,
            "nodes": b.point.nodes,
            "bytes": b.point.nbytes,
            "measured_ns": b.point.ns,
            "predicted_ns": b.predicted_ns,
            "band": b.band,
            "parts": b.is_outside_range,
        }
        for b in found
    ]
    return {"schema_version": SCHEMA_VERSION, "times": rows}
