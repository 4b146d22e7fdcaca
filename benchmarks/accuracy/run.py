"""How far off prices on GPUs are, beside 57 published nccl-tests tables: all tables of errors, in
one command.

    python benchmarks/accuracy/run.py [--tables] [--fit]

A table's error is the mean of ``|priced / measured - 1|`` over its sizes; given are mean and median
over tables, then the means within three classes of sizes. Lines: latency and bandwidth alone
(`collectives: rails`, which distsim priced GPUs by before); the constants as they come; fitted anew
without the scored table, and without any table of its system; measured at every fourth size and
predicted at the others; from both sizes next to each; the same run's times in place, which no
prediction can be expected to beat by much; measured at two rank counts and predicted at a third;
beside parts of tables that threads quote (`nccl_quoted.csv`), in no fit; and how often the band of
`distsim.hardware.cost.prediction_range` holds what was measured. `--tables` adds a line for each
table, `--fit` prints the constants again.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable

import fit
import numpy as np
from numpy.typing import NDArray
from tables import Table, quoted, tables

from distsim.hardware.cluster import MeasuredCurve, cluster_from
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.prediction_range import range_of_prediction
from distsim.operations.registry import OPERATIONS

Array = NDArray[np.float64]
CLASSES = ((0, (1 << 16) - 1), (1 << 16, 1 << 24), ((1 << 24) + 1, 1 << 62))
OP = {
    "all_gather": "all_gather_into_tensor",
    "reduce_scatter": "reduce_scatter_tensor",
    "all_to_all": "all_to_all_single",
    "send": "send",
}
#: What the presets had when they were priced by latency and bandwidth alone: by architecture the
#: share of the link, its latency.
RAILS = {
    "blackwell": (0.8, "0.6 us"),
    "volta": (0.78, "0.8 us"),
    "ampere": (0.78, "0.8 us"),
    "hopper": (0.81, "0.6 us"),
    "ada": (0.78, "0.8 us"),
}


def cluster_of(
    table: Table, rails: bool = False, measured: tuple[MeasuredCurve, ...] = (), driven: int = 0
) -> CostModel:
    """The table's machines as a cluster file would tell them; ``driven``: GPUs that a process
    drives, if more than in this table.
    """
    at = table.at
    cards = 1 if at.nodes == 1 else max(round(at.sheet_inter / (at.nic_gbs / 0.96)), 1)
    bandwidth = at.sheet_inter / cards if at.nodes > 1 else 12.5
    memory = {"memory_bandwidth": "1 TB/s", "memory_size": "80 GB"}  # not asked for
    share, latency = RAILS[at.architecture]
    cluster = {
        "name": table.id,
        "collectives": "rails" if rails else "nccl",
        "call_overhead": "6.6 us" if rails else "3.1 us",
        "device": {"name": at.architecture, "architecture": at.architecture, "peak": {}, **memory},
        "intra": {
            "kind": at.intra,
            "latency": latency if rails else "0.6 us",
            "bandwidth": f"{at.sheet_intra} GB/s",
            "efficiency": share if rails else at.intra_gbs / at.sheet_intra,
            "switch": at.switch,
            "peer_access": at.peer_access,
        },
        "nics": {
            "count": cards,
            "latency": "1 us",
            "bandwidth": f"{bandwidth} GB/s",
            "efficiency": 0.93 if rails else 0.96,
        },
        "network": {"latency": "4 us", "transport": at.transport},
        "gpus_per_process": driven or at.driven,
    }
    found = cluster_from(cluster).model_copy(update={"measured": measured})
    return CostModel(found, at.n if at.nodes == 1 else at.nodes * at.per_node, at.per_node)


def priced(table: Table, cost: CostModel) -> Array:
    """us at every size of the table, through the front door."""
    op = OPERATIONS[OP.get(table.kind, table.kind)]
    if table.kind == "send":
        prices = [
            cost.p2p_ns(0, cost.local_size if table.at.nodes > 1 else 1, int(b))
            for b in table.nbytes
        ]
    else:
        prices = [cost.collective_ns(op, tuple(range(table.at.n)), int(b), 0) for b in table.nbytes]
    return np.array(prices) / 1000


def curve_of(table: Table, rows: NDArray[np.int64]) -> MeasuredCurve:
    times = {int(table.nbytes[k]): round(1000 * table.us[k]) for k in rows}
    at = table.at
    group, ranks, nodes = (
        (2, 2, at.nodes)
        if table.kind == "send" and at.nodes == 1
        else (at.n, at.per_node, at.nodes)
    )
    return MeasuredCurve.model_construct(
        op=OP.get(table.kind, table.kind), group=group, ranks=ranks, nodes=nodes, times=times
    )


def left_between(table: Table, given: Iterable[int]) -> tuple[Array, Array]:
    """(sizes that a calibration was not given, errors there); the last size is given too."""
    known = np.array(sorted({*given, len(table.us) - 1}))
    left = np.setdiff1d(np.arange(len(table.us)), known)
    cost = cluster_of(table, measured=(curve_of(table, known),))
    return table.nbytes[left], np.abs(priced(table, cost)[left] / table.us[left] - 1)


def fourth(table: Table) -> tuple[Array, Array]:
    return left_between(table, range(0, len(table.us), 4))


def beside(table: Table) -> tuple[Array, Array]:
    """The same of every size but the first and the last, from both sizes next to it and all others
    as far away as they.
    """
    parts = [left_between(table, {0, *range(phase, len(table.us), 2)}) for phase in (0, 1)]
    sizes, errors = (np.concatenate([part[k] for part in parts]) for k in (0, 1))
    return sizes, errors


def again(table: Table) -> tuple[Array, Array]:
    """How far the same run's times in place are from those that are scored: what a reading is
    worth.
    """
    known = np.flatnonzero(~np.isnan(table.again))
    return table.nbytes[known], np.abs(table.again[known] / table.us[known] - 1)


def thirds(every: list[Table]) -> list[tuple[Table, Array]]:
    """Of systems with three rank counts of an operation, each predicted from the other two:
    errors.
    """
    groups: dict[tuple[str, str, int], list[Table]] = defaultdict(list)
    for table in every:
        if table.kind != "send":
            groups[table.system, table.kind, table.at.per_node if table.at.nodes > 1 else 0].append(
                table
            )
    found = []
    for same in groups.values():
        if len({t.at.n for t in same}) < 3:
            continue
        for table in same:
            others = tuple(curve_of(t, np.arange(len(t.us))) for t in same if t.at.n != table.at.n)
            cost = cluster_of(table, measured=others, driven=max(t.at.driven for t in same))
            found.append((table, np.abs(priced(table, cost) / table.us - 1)))
    return found


def line(name: str, errors: Iterable[tuple[Table, Array, Array]]) -> str:
    """Mean and median over tables; means in classes of sizes. ``errors``: (table, sizes, errors
    there).
    """
    every = [(sizes, off) for _, sizes, off in errors]
    means = [100 * off.mean() for _, off in every if len(off)]
    classes = []
    for low, high in CLASSES:
        inside = [
            100 * off[k].mean()
            for sizes, off in every
            if (k := (sizes >= low) & (sizes <= high)).any()
        ]
        classes.append(
            f"{np.mean(inside):5.1f} / {np.median(inside):4.1f}" if inside else "      -     "
        )
    return f"{name:34} {len(means):3} {np.mean(means):6.1f} / {np.median(means):4.1f}   {'   '.join(classes)}"


def left_out(d: fit.Data, start: Array, label: Callable[[Table], str]) -> Array:
    """log us of every row, by constants that were fitted without the rows of its label."""
    labels = np.array([label(t) for t in d.tables])[d.table]
    found = np.zeros(len(d.us))
    for name in dict.fromkeys(labels):
        out = labels == name
        found[out] = fit.predict(d, fit.fit(d, np.flatnonzero(~out), start, 8))[0][out]
    return found


def split(d: fit.Data, off: Array) -> list[tuple[Table, Array, Array]]:
    return [(table, d.nbytes[d.table == k], off[d.table == k]) for k, table in enumerate(d.tables)]


def coverage(d: fit.Data, log_us: Array, known: bool) -> tuple[float, int]:
    """How many of the times of tables whose class other systems have (or do not have) are in the
    band.
    """
    systems: dict[object, set[str]] = defaultdict(set)
    for table in d.tables:
        systems[table.family].add(table.system)
    inside = []
    for k, table in enumerate(d.tables):
        if (len(systems[table.family]) > 1) != known:
            continue
        for b, ratio in zip(
            d.nbytes[d.table == k], np.exp(np.log(d.us) - log_us)[d.table == k], strict=True
        ):
            band = range_of_prediction(table.at, int(b), known)
            inside.append(band.low <= ratio <= band.high)
    return 100 * float(np.mean(inside)), len(inside)


def quantiles(d: fit.Data, log_us: Array) -> str:
    """The 5 % and 95 % quantiles of measured over predicted, by one node or several and size: what
    `distsim.hardware.cost.prediction_range` has.
    """
    rows = []
    several = np.array([t.at.nodes > 1 for t in d.tables])[d.table]
    systems: dict[object, set[str]] = defaultdict(set)
    for table in d.tables:
        systems[table.family].add(table.system)
    known = np.array([len(systems[t.family]) > 1 for t in d.tables])[d.table]
    weight = np.array([1 / (d.table == k).sum() for k in range(len(d.tables))])[d.table]
    for many in (False, True):
        for low, high in CLASSES:
            rows.append(
                _weighted(
                    (np.log(d.us) - log_us),
                    weight,
                    known & (several == many) & (d.nbytes >= low) & (d.nbytes <= high),
                )
            )
    return "\n".join(
        f"  {'several nodes' if k > 2 else 'one node':14} {low:.2f} {high:.2f}"
        for k, (low, high) in enumerate(rows)
    )


def _weighted(log_ratio: Array, weight: Array, rows: NDArray[np.bool_]) -> tuple[float, float]:
    order = np.argsort(log_ratio[rows])
    at = np.cumsum(weight[rows][order]) / weight[rows].sum()
    low, high = (
        float(np.exp(log_ratio[rows][order][np.searchsorted(at, q)])) for q in (0.05, 0.95)
    )
    return low, high


def write(text: str) -> None:
    sys.stdout.write(text + "\n")


def _off(d: fit.Data, log_us: Array) -> Array:
    return np.asarray(np.abs(np.exp(log_us) / d.us - 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tables", action="store_true", help="a line for each table as well")
    parser.add_argument("--fit", action="store_true", help="print the constants, fitted anew")
    asked, start = parser.parse_args(), time.perf_counter()
    every = tables()
    both = fit.data([*every, *quoted(fitted=True)])
    x = fit.fit(both)
    if asked.fit:
        sys.stdout.write(fit.module(x))
        return
    write(
        f"{'errors in %, mean / median':34} {'tables':>3} {'all':>8}      to 64 KiB      to 16 MiB      above"
    )
    write(
        line(
            "latency and bandwidth alone",
            ((t, t.nbytes, np.abs(priced(t, cluster_of(t, rails=True)) / t.us - 1)) for t in every),
        )
    )
    front = [(t, t.nbytes, np.abs(priced(t, cluster_of(t)) / t.us - 1)) for t in every]
    write(line("constants as they come (in sample)", front))
    d = fit.data(every)
    by_table, by_system = (
        left_out(both, x, label)[: len(d.us)] for label in (lambda t: t.id, lambda t: t.system)
    )
    write(line("fitted without the scored table", split(d, _off(d, by_table))))
    write(line("fitted without the scored system", split(d, _off(d, by_system))))
    long = [t for t in every if len(t.us) > 8]
    slingshot = [t for t in long if t.at.transport == "slingshot"]
    write(line("measured at every fourth size", ((t, *fourth(t)) for t in long)))
    write(line("  of these, Slingshot", ((t, *fourth(t)) for t in slingshot)))
    write(line("  of these, all others", ((t, *fourth(t)) for t in long if t not in slingshot)))
    write(line("measured at both sizes beside", ((t, *beside(t)) for t in long)))
    write(line("the same run in place", ((t, *again(t)) for t in long)))
    write(line("measured at two rank counts", ((t, t.nbytes, off) for t, off in thirds(every))))
    elsewhere = [
        (t, t.nbytes, np.abs(priced(t, cluster_of(t)) / t.us - 1)) for t in quoted(fitted=False)
    ]
    write(line("quoted elsewhere, in no fit", elsewhere))
    for known in (True, False):
        share, rows = coverage(d, by_system, known)
        write(
            f"90 % band of systems left out holds {share:.0f} % of {rows} times, of {'known' if known else 'new'} classes"
        )
    write(
        "quantiles .05 and .95 of measured over predicted, systems left out, by size:\n"
        + quantiles(d, by_system)
    )
    if asked.tables:
        for table, _, off in elsewhere:
            write(f"  {table.id:42} {100 * off.mean():5.1f} in no fit")
        for (table, _, off), (_, _, out) in zip(front, split(d, _off(d, by_system)), strict=True):
            write(
                f"  {table.id:42} {100 * off.mean():5.1f} in sample, {100 * out.mean():5.1f} without its system"
            )
    write(f"in {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
