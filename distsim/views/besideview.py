"""A cluster beside measured times, as text and as JSON."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import groupby

from distsim.calibrate.beside import Beside
from distsim.units import show_bytes, show_ns
from distsim.views.benchview import SCHEMA_VERSION
from distsim.views.tables import folded, table


def beside_text(found: Sequence[Beside], cluster: str, log: str) -> str:
    """How far off the cluster is, where the log first leaves its band, and every size."""
    off = statistics.median(abs(1 / b.ratio - 1) for b in found)
    outside = sum(b.parts for b in found)
    told = [f"{cluster} beside {log}: {len(found)} measured times, the price {100 * off:.0f} % off in the median"]
    if all(b.band is None for b in found):
        told.append("This cluster's prices have no band.")
    elif not outside:
        told.append("All are within the band.")
    for (op, group, nodes), same in groupby(found, key=lambda b: (b.point.op, b.point.group, b.point.nodes)):
        told += [line for line in [_parting(list(same), f"{op} of {group} ranks on {nodes} node{'s' * (nodes > 1)}")] if line]
    rows = [
        (b.point.op, str(b.point.group), str(b.point.nodes), show_bytes(b.point.nbytes), show_ns(b.point.ns), show_ns(b.priced_ns),
         f"{b.ratio:.2f}", "-" if b.band is None else f"{b.band[0]:.2f} to {b.band[1]:.2f}{' *' if b.parts else ''}")
        for b in found
    ]  # fmt: skip
    header = ("operation", "ranks", "nodes", "bytes", "measured", "priced", "ratio", "band")
    end = ["* outside the band: nine of ten are inside where the cluster is right."] if outside else []
    return "\n".join([*(line for text in told for line in folded(text)), "", *table(header, rows, left=(0, 7)), *end])


def _parting(same: list[Beside], what: str) -> str:
    """Where an operation's times first leave the band, and the furthest one."""
    away = [b for b in same if b.parts]
    if not away:
        return ""
    first, most = away[0], max(away, key=lambda b: max(b.ratio, 1 / b.ratio))
    said = f"{what}: {len(away)} of {len(same)} sizes part, from {show_bytes(first.point.nbytes)} on"
    return f"{said}; most at {show_bytes(most.point.nbytes)}, where it took {most.ratio:.2f} times the price"


def beside_json(found: Sequence[Beside]) -> dict[str, object]:
    """What `distsim compare LOG --cluster C --format json` prints."""
    rows = [
        {"op": b.point.op, "group": b.point.group, "nodes": b.point.nodes, "bytes": b.point.nbytes, "measured_ns": b.point.ns,
         "priced_ns": b.priced_ns, "band": b.band, "parts": b.parts}
        for b in found
    ]  # fmt: skip
    return {"schema_version": SCHEMA_VERSION, "times": rows}
