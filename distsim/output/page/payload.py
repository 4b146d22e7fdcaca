"""The data of one or two runs, encoded as the text that the script of the page decodes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from distsim.analysis.critical_path import path_pieces
from distsim.analysis.run_comparison import RunComparison
from distsim.analysis.timeline import build_timeline
from distsim.operations.core.algorithms import CollectiveAlgorithm, apply_rounds, initial_chunks
from distsim.operations.core.operation_base import Operation
from distsim.operations.registry import OPERATIONS
from distsim.output.page.call_arguments import CallArguments
from distsim.output.page.call_columns import encoded_call_columns
from distsim.output.page.call_costs import CallCosts, bandwidth_curves
from distsim.output.page.data_encoding import Numbers, encoded_payload, zigzag_deltas
from distsim.output.page.report_run import ReportRun
from distsim.output.page.run_summary import summary_data
from distsim.output.page.value_history import record_value_history
from distsim.output.text.comparison import compare_json
from distsim.trace.model import Trace

FORMAT_VERSION = 1
#: The kinds of pieces of the critical path, as the page numbers them.
_PATH_REASONS = ("compute", "transfer", "sleep", "wait", "late start")
#: The largest number of listed differences between two runs.
_MAX_DIVERGENCES = 500


def page_data(runs: Sequence[ReportRun], comparison: RunComparison | None) -> str:
    """All data of the page."""
    columns: dict[str, Numbers] = {}
    heads = [_run_data(report_run, f"{number}.", columns) for number, report_run in enumerate(runs)]
    files = [place.file for report_run in runs for place in report_run.trace.tables["place"]]
    head: dict[str, object] = {
        "format": FORMAT_VERSION,
        "runs": heads,
        "sources": source_texts(runs[0].file, [*(t.file for t in runs), *files]),
    }
    if comparison is not None:
        found = compare_json(comparison, (runs[0].name, runs[1].name))
        divergences = found["divergences"]
        shown = divergences[:_MAX_DIVERGENCES] if isinstance(divergences, list) else []
        head["comparison"] = {
            **found,
            "divergences": shown,
            "more_divergences": len(comparison.divergences) - len(shown),
        }
        if comparison.pairs:
            a, b = np.array(comparison.pairs, dtype=np.int64).T
            columns |= {"pair_a": zigzag_deltas(a), "pair_b": zigzag_deltas(b)}
    return encoded_payload(head, columns)


def _run_data(report_run: ReportRun, prefix: str, columns: dict[str, Numbers]) -> dict[str, object]:
    """A run's facts; its columns go into ``columns``."""
    trace, simulation = report_run.trace, report_run.simulation
    own = report_run.is_simulated
    if simulation is not None and own and report_run.representatives is None:
        time = simulation.timeline
    else:
        time = build_timeline(trace)
    tables = _string_tables(trace)
    head = summary_data(report_run, time) | {"tables": tables, "animations": animations(trace)}
    more: dict[str, Numbers] = {}
    if simulation is not None and own:
        named = CallArguments(report_run.representatives or simulation.program, trace)
        more |= {"tensor": named.tensor, "root": named.root}
        tables["tensor"] = list(named.tensors)
        folded = report_run.representatives is not None
        held = None if folded else record_value_history(simulation.program, trace)
        if held is not None:
            head["holdings"] = held.tables
            columns |= {prefix + name: numbers for name, numbers in held.columns.items()}
    if simulation is not None and simulation.cost.world_size >= trace.world_size:
        priced = CallCosts(simulation.cost, trace, more.get("root", np.full(len(trace), -1)))
        more["price"] = np.array(priced.price, dtype=np.int64)
        head |= {
            "prices": priced.prices,
            "curves": bandwidth_curves(simulation.cost, trace, time.collectives),
        }
    columns |= {
        prefix + name: numbers for name, numbers in encoded_call_columns(trace, more).items()
    }
    columns |= {prefix + name: numbers for name, numbers in _critical_path_columns(trace).items()}
    return head


def _string_tables(trace: Trace) -> dict[str, list[object]]:
    tables: dict[str, list[object]] = {
        name: list(trace.tables[name])
        for name in ("op", "group", "dtype", "reduce_op", "queue", "name")
    }
    tables["place"] = [[place.file, place.line, place.column] for place in trace.tables["place"]]
    return tables


def _critical_path_columns(trace: Trace) -> dict[str, Numbers]:
    """The critical path, piece by piece."""
    pieces = path_pieces(trace, trace.makespan_ns)
    numbers = np.array(
        [(p.row, p.rank, p.start_ns, p.end_ns, _PATH_REASONS.index(p.why)) for p in pieces],
        dtype=np.int64,
    ).reshape(-1, 5)
    row, rank, start, end, why = numbers.T
    return {
        "path_row": row + 1,
        "path_rank": rank,
        "path_start": zigzag_deltas(start),
        "path_end": zigzag_deltas(end),
        "path_why": why,
    }


# --- animations of the algorithms of collectives ---
#: The largest numbers of ranks of an animation, and of animated operations.
MAX_ANIMATED_RANKS, MAX_ANIMATED_OPS = 8, 8


def animations(trace: Trace) -> list[dict[str, object]]:
    """For every collective of the run and each of its algorithms: the chunks of each rank at the
    start, and the transfers of each round.

    ``rounds``: [source, destination, chunk, 1 if the receiver combines it with its own]. Larger
    groups are shown with `MAX_ANIMATED_RANKS` ranks.
    """
    sizes: dict[str, int] = {}
    groups = trace.header.get("groups", ())
    rows = trace["match"] >= 0
    matched = set(zip(trace["op"][rows].tolist(), trace["group"][rows].tolist(), strict=True))
    for op, group in sorted(matched):
        name = trace.tables["op"][op]
        n = len(groups[group][1]) if 0 <= group < len(groups) else 0
        if n > 1 and _has_algorithms(name):
            sizes[name] = max(sizes.get(name, 0), n)
    found = []
    for name, n in list(sizes.items())[:MAX_ANIMATED_OPS]:
        found += _operation_animations(OPERATIONS[name], n)
    return found


def _has_algorithms(op: str) -> bool:
    operation = OPERATIONS.get(op)
    if operation is None:
        return False
    return operation.kind == "collective" and bool(operation.algorithms)


def _operation_animations(row: type[Operation], full: int) -> list[dict[str, object]]:
    n = min(full, MAX_ANIMATED_RANKS)
    found = []
    for name, algorithm in row.algorithms.items():
        givers: Iterable[int] = (0,) if row.gives == "root" else range(n)
        if not _is_playable(algorithm, n, givers):
            continue
        held = [
            [[chunk, list(map(list, parts))] for chunk, parts in chunks.items()]
            for chunks in initial_chunks(algorithm.chunking, n, givers)
        ]
        rounds = [
            [[t.src, t.dst, t.chunk, int(t.reduce)] for t in transfers]
            for transfers in algorithm.rounds(n, 0)
        ]
        found.append(
            {
                "op": row.op,
                "algorithm": name,
                "n": n,
                "full": full,
                "chunking": algorithm.chunking,
                "held": held,
                "rounds": rounds,
            }
        )
    return found


def _is_playable(algorithm: CollectiveAlgorithm, n: int, givers: Iterable[int]) -> bool:
    """Whether the schedule runs from the root 0 with these givers."""
    try:
        apply_rounds(algorithm.rounds(n, 0), initial_chunks(algorithm.chunking, n, givers))
    except ValueError:
        return False
    return True


# --- the source files that findings and calls point to ---
#: The largest size of a file, size of all files in bytes, and number of files in a report.
_MAX_FILE_BYTES, _MAX_TOTAL_BYTES, _MAX_FILES = 200_000, 400_000, 12
#: A trace may name any file of this machine; only program files are read.
_SOURCE_SUFFIXES = (".yaml", ".yml", ".py")


def source_texts(main: str, named: Iterable[str]) -> dict[str, str]:
    """Text by file name: of ``main``, and of other program files in its folder or below the
    current folder.
    """
    found: dict[str, str] = {}
    left = _MAX_TOTAL_BYTES
    folders = [Path.cwd().resolve()]
    if main and main != "-":
        folders.append(Path(main).resolve().parent)
    for name in dict.fromkeys([main, *named]):
        text = _source_text(name, folders) if len(found) < _MAX_FILES else None
        if text is not None and len(text) <= left:
            found[name] = text
            left -= len(text)
    return found


def _source_text(name: str, folders: list[Path]) -> str | None:
    try:
        path = Path(name).resolve()
        if path.suffix not in _SOURCE_SUFFIXES:
            return None
        if not any(path.is_relative_to(folder) for folder in folders):
            return None
        if not path.is_file() or path.stat().st_size > _MAX_FILE_BYTES:
            return None
        return path.read_text(encoding="utf-8", errors="replace")
    except (OSError, ValueError, RuntimeError):
        # No such file, a NUL in its name, or a cycle of links.
        return None
