"""A run, or two, as the text that the page unpacks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from distsim.compare import Comparison
from distsim.critical_path import path_pieces
from distsim.report.columns import columns_of
from distsim.report.facts import facts
from distsim.report.holdings import holdings
from distsim.report.named import Named
from distsim.report.packing import Numbers, packed, steps
from distsim.report.prices import Priced, curves
from distsim.report.rounds import animations
from distsim.report.sources import sources
from distsim.report.subject import Told
from distsim.timeline import timeline
from distsim.trace import Trace
from distsim.views.compareview import compare_json

FORMAT = 1
#: Why a piece of the critical path takes its time, as the page numbers it.
_WHY = ("compute", "transfer", "sleep", "wait")
#: Differences of two runs that are listed.
_MOST_PARTINGS = 500


def page_data(runs: Sequence[Told], comparison: Comparison | None) -> str:
    """Everything that the page shows."""
    columns: dict[str, Numbers] = {}
    heads = [_run(told, f"{number}.", columns) for number, told in enumerate(runs)]
    files = [place.file for told in runs for place in told.trace.tables["place"]]
    head: dict[str, object] = {
        "format": FORMAT,
        "runs": heads,
        "sources": sources(runs[0].file, [*(t.file for t in runs), *files]),
    }
    if comparison is not None:
        found = compare_json(comparison, (runs[0].name, runs[1].name))
        partings = found["partings"]
        shown = partings[:_MOST_PARTINGS] if isinstance(partings, list) else []
        head["comparison"] = {**found, "partings": shown, "more_partings": len(comparison.partings) - len(shown)}
        if comparison.pairs:
            a, b = np.array(comparison.pairs, dtype=np.int64).T
            columns |= {"pair_a": steps(a), "pair_b": steps(b)}
    return packed(head, columns)


def _run(told: Told, prefix: str, columns: dict[str, Numbers]) -> dict[str, Any]:
    """A run's facts; its columns go into ``columns``."""
    trace, simulation = told.trace, told.simulation
    own = simulation is not None and trace.columns is simulation.run.trace.columns
    time = simulation.timeline if simulation is not None and own else timeline(trace)
    head = facts(told, time) | {"tables": _tables(trace), "animations": animations(trace)}
    more: dict[str, Numbers] = {}
    if simulation is not None and own:
        named = Named(simulation.program, trace)
        more |= {"tensor": named.tensor, "root": named.root}
        head["tables"]["tensor"] = named.tensors
        held = holdings(simulation.program, trace)
        if held is not None:
            head["holdings"] = held.tables
            columns |= {prefix + name: numbers for name, numbers in held.columns.items()}
    if simulation is not None and simulation.cost.world_size >= trace.world_size:
        priced = Priced(simulation.cost, trace, more.get("root", np.full(len(trace), -1)))
        more["price"] = np.array(priced.price, dtype=np.int64)
        head |= {"prices": priced.prices, "curves": curves(simulation.cost, trace, time.collectives)}
    columns |= {prefix + name: numbers for name, numbers in columns_of(trace, more).items()}
    columns |= {prefix + name: numbers for name, numbers in _path(trace).items()}
    return head


def _tables(trace: Trace) -> dict[str, list[object]]:
    tables: dict[str, list[object]] = {
        name: list(trace.tables[name]) for name in ("op", "group", "dtype", "reduce_op", "queue", "name")
    }
    tables["place"] = [[place.file, place.line, place.column] for place in trace.tables["place"]]
    return tables


def _path(trace: Trace) -> dict[str, Numbers]:
    """The critical path, piece by piece."""
    pieces = path_pieces(trace, trace.makespan_ns)
    numbers = np.array([(p.row, p.rank, p.start_ns, p.end_ns, _WHY.index(p.why)) for p in pieces], dtype=np.int64).reshape(-1, 5)
    row, rank, start, end, why = numbers.T
    return {"path_row": row + 1, "path_rank": rank, "path_start": steps(start), "path_end": steps(end), "path_why": why}
