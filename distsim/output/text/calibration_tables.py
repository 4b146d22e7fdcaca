"""Clusters, a measurement of this machine, a calibration from one and a cluster beside one, as text
in 80 columns; as YAML and JSON.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from distsim.common.units import bandwidth_text, show_bytes, show_ns
from distsim.hardware.cluster import Cluster
from distsim.operations.registry import OPERATIONS
from distsim.output.text_layout import table_lines, wrapped_lines
from distsim.real.bench.measurement import BenchResult
from distsim.real.calibrate import CalibrationResult
from distsim.real.calibrate.fit_cluster import CostResidual

SCHEMA_VERSION = 1


def bench_text(found: BenchResult) -> str:
    """A line per operation, number of ranks and size: median, quartiles, bus bandwidth as
    nccl-tests defines it.
    """
    machine = ", ".join(
        f"{value} {key}" if key == "cores" else f"{key} {value}"
        for key, value in found.machine.items()
    )
    rows = []
    for r in found.rows:
        busbw = (
            r.nbytes / r.median_ns * OPERATIONS[r.op].busbw_factor(r.group) if r.median_ns else 0.0
        )
        ranks = str(r.ranks) if r.group == r.ranks else f"{r.group} of {r.ranks}"
        shown = (
            f"{busbw:.3g} GB/s" if busbw >= 0.1 else f"{1000 * busbw:.3g} MB/s" if busbw else "-"
        )
        size = show_bytes(r.nbytes) if r.nbytes else "-"
        rows.append(
            (r.op, ranks, size, *(show_ns(ns) for ns in (r.median_ns, r.low_ns, r.high_ns)), shown)
        )
    samples = found.rows[0].samples if found.rows else 0
    head = wrapped_lines(
        f"Measured here in {found.seconds:.0f} s ({machine}); medians of {samples} samples"
    )
    return "\n".join(
        [
            *head,
            "",
            *table_lines(("operation", "ranks", "bytes", "median", "25 %", "75 %", "busbw"), rows),
        ]
    )


def calibration_text(found: CalibrationResult) -> str:
    """The fitted parameters, and the errors of every operation by class of sizes."""
    c = found.cluster
    lines = [
        f"a call {show_ns(c.call_overhead_ns)}, a hop {show_ns(c.intra.latency_ns)}, "
        f"{_rate_text(c.intra.attained)} in a node"
    ]
    if c.reduce_bytes_per_ns is not None:
        lines[0] += f", combining {_rate_text(c.reduce_bytes_per_ns)}"
    if any(curve.nodes > 1 for curve in c.measured):
        lines.append(
            f"between nodes a hop {show_ns(c.inter_latency_ns)}, "
            f"{_rate_text(c.rank_inter_bytes_per_ns)} a rank"
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
    title = "Errors: each size predicted from the others; by the parameters alone"
    header = ("operation", "sizes", "points", "median", "worst", "alone", "worst")
    end = (
        f"All: {c.error_band}; by the parameters alone {_percent_text(found.model_median)} median."
    )
    head = [f"{c.name}: {found.points} points", *("  " + line for line in lines)]
    return "\n".join(
        [*head, "", title, *table_lines(header, rows, left=(0, 1)), "", *wrapped_lines(end)]
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
def cluster_table(clusters: Sequence[Cluster]) -> str:
    """One line each: the device, the way inside a node, the way between nodes (all cards of a node
    together).
    """
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
    return "\n".join(
        table_lines(
            ("cluster", "device", "inside a node", "between nodes", "net"),
            rows,
            left=(0, 1, 2, 3, 4),
            indent="",
        )
    )


def cluster_yaml(cluster: Cluster) -> str:
    """The cluster as a scenario may have it under ``cluster:``, in people's units."""
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


def residuals_text(found: Sequence[CostResidual], cluster: str, log: str) -> str:
    """The median error, the operations outside the range, and a table of all measured times."""
    error = statistics.median(abs(1 / residual.ratio - 1) for residual in found)
    has_outside = any(residual.is_outside_range for residual in found)
    summary = [
        f"{cluster} beside {log}: {len(found)} measured times, "
        f"the price {100 * error:.0f} % off in the median"
    ]
    if all(residual.band is None for residual in found):
        summary.append("This cluster's prices have no band.")
    elif not has_outside:
        summary.append("All are within the band.")
    for (op, group, nodes), same in groupby(found, key=_operation_of):
        outside = _outside_text(list(same))
        if outside:
            summary.append(f"{op} of {group} ranks on {nodes} node{'s' * (nodes > 1)}: {outside}")
    lines = [line for text in summary for line in wrapped_lines(text)]
    header = ("operation", "ranks", "nodes", "bytes", "measured", "priced", "ratio", "band")
    lines += ["", *table_lines(header, [_residual_cells(r) for r in found], left=(0, 7))]
    if has_outside:
        lines.append("* outside the band: nine of ten are inside where the cluster is right.")
    return "\n".join(lines)


def _operation_of(residual: CostResidual) -> tuple[str, int, int]:
    point = residual.point
    return point.op, point.group, point.nodes


def _residual_cells(residual: CostResidual) -> tuple[str, ...]:
    point = residual.point
    band = "-"
    if residual.band is not None:
        low, high = residual.band
        band = f"{low:.2f} to {high:.2f}{' *' if residual.is_outside_range else ''}"
    return (
        point.op,
        str(point.group),
        str(point.nodes),
        show_bytes(point.nbytes),
        show_ns(point.ns),
        show_ns(residual.priced_ns),
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
        f"{len(outside)} of {len(residuals)} sizes part, from {show_bytes(first.point.nbytes)} on; "
        f"most at {show_bytes(farthest.point.nbytes)}, "
        f"where it took {farthest.ratio:.2f} times the price"
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
            "priced_ns": b.priced_ns,
            "band": b.band,
            "parts": b.is_outside_range,
        }
        for b in found
    ]
    return {"schema_version": SCHEMA_VERSION, "times": rows}
