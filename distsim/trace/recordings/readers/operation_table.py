"""Operation tables: one row per operation of a pipeline-parallel job, as CSV or Parquet.

The steps may be a sample. This is the format that ByteDance publishes with "Understanding
Stragglers in Large Model Training Using What-if Analysis" (arXiv 2505.05713;
ByteDance-Seed/StragglerAnalysis, readme.md). Columns:

- ``dp_rank``, ``stage``, ``rank``: data-parallel rank, pipeline stage and global rank of the
worker.
- ``step``: training step.
- ``optype``: see `_COMPUTE`, `_MESSAGES` and `_TAIL`.
- ``start_ts``, ``duration``: in seconds; the start counts from the start of the step.
- ``seq_id``: number among the operations of this optype in the step, on this rank.
- ``mc``: model chunk (virtual stage), -1 for none.

The table has no dependencies. They follow from the schedule, which is the order of computations of
the first step on each stage's first worker; `_dependencies` states the rules. Interleaved schedules
(more than one model chunk) and overlapped gradient reduction are refused, because their rules are
not known here.
"""

from __future__ import annotations

import csv
import gzip
import io
import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from distsim.common.errors import EnvironmentFault, UsageError, raise_if_out_of_memory
from distsim.common.file_io import is_stream, open_bytes
from distsim.common.installation import install_command
from distsim.trace.recordings.event_graph import (
    NO_MEETING,
    EventColumns,
    EventGraph,
    Flags,
    Numbers,
)
from distsim.trace.recordings.recording import Recording

if TYPE_CHECKING:
    from collections.abc import Iterator

FORMAT = "operation table"
COLUMNS = ("dp_rank", "stage", "rank", "step", "optype", "start_ts", "duration", "seq_id", "mc")
_LARGEST_FILE = 2 << 30
_MAX_RANK = (1 << 17) - 1
_MAX_NUMBER = 1 << 53
_MAX_SECONDS = 1e6
#: The smallest and the largest value of each column of numbers.
_LIMITS: Mapping[str, tuple[float, float]] = {
    "dp_rank": (0, _MAX_RANK),
    "stage": (0, _MAX_RANK),
    "rank": (0, _MAX_RANK),
    "step": (-1, _MAX_NUMBER),
    "seq_id": (-1, _MAX_NUMBER),
    "mc": (-1, _MAX_NUMBER),
    "start_ts": (0, _MAX_SECONDS),
    "duration": (0, _MAX_SECONDS),
}
#: Columns that may have empty cells.
_OPTIONAL = ("step", "seq_id", "mc")
_COMPUTE = ("forward-compute", "backward-compute")
#: Message -> (its counterpart, the difference of their stages).
_MESSAGES = {
    "forward-send": ("forward-recv", 1),
    "forward-recv": ("forward-send", -1),
    "backward-send": ("backward-recv", -1),
    "backward-recv": ("backward-send", 1),
}
#: What follows the last computation of a step, in order.
_TAIL = (
    "gc",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "grads-reduce-scatter",
    "optimizer-clip-main-grad",
    "optimizer",
)
#: Collectives -> the columns whose equal values make a meeting, besides the step and the number.
_COLLECTIVES = {
    "params-all-gather": ("stage",),
    "grads-reduce-scatter": ("stage",),
    "embedding-grads-all-reduce": ("dp_rank",),
    "optimizer-clip-main-grad": (),
}
_REMEDY = "docs/how-to/slow.md lists the columns and operation types"
#: (optype, number, stage): an operation of the schedule, which every step and pipeline repeats.
ScheduledOperation = tuple[str, int, int]


def is_operation_table(path: Path) -> bool:
    """Whether the file's name is that of a table."""
    return path.name.lower().endswith((".csv", ".parquet", ".csv.gz"))


def read_operation_table(path: Path) -> Recording:
    """Read a table. Raises UsageError for a missing column and for a schedule without rules."""
    table = _read_columns(path)
    _check_schedule(table, path)
    _check_duplicates(table, path)
    table, dropped = _complete_steps(table)
    if not len(table["rank"]):
        raise UsageError(f"{path}: no step has the operations of all ranks", _REMEDY)
    order = np.lexsort((table["dp_rank"], table["step"]))
    rows_of = _rows_by_operation(table, order)
    before, after = _edges(table, rows_of)
    graph = _graph(table, before, after)
    ranks = np.unique(table["rank"])
    missing = _missing_workers(table)
    stages = dict(zip(table["rank"].tolist(), table["stage"].tolist(), strict=True))
    notes = (f"{dropped} incomplete steps were omitted",) if dropped else ()
    return Recording(
        graph,
        FORMAT,
        (str(path),),
        world_size=len(ranks) + len(missing.ranks),
        missing_ranks=tuple(sorted(missing.ranks.values())),
        missing_members=missing.members(table, graph.columns.meeting),
        stages=stages if max(stages.values()) else {},
        operation_count=len(graph),
        notes=notes,
    )


# --- the file ---


def _read_columns(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LARGEST_FILE:
        raise UsageError(f"{path} is larger than 2 GiB", "split the table by step")
    texts = _parquet_columns(path) if path.suffix.lower() == ".parquet" else _csv_columns(path)
    missing = [name for name in COLUMNS if name not in texts]
    if missing:
        raise UsageError(
            f"{path}: this table has no column {', '.join(missing)}",
            f"an operation table needs the columns {', '.join(COLUMNS)}",
        )
    columns: dict[str, Any] = {"optype": np.asarray(texts["optype"], dtype=object)}
    for name in COLUMNS:
        if name != "optype":
            columns[name] = _numbers(texts[name], name, path)
    columns["start_ns"] = np.rint(columns["start_ts"] * 1e9)
    columns["end_ns"] = np.rint((columns["start_ts"] + columns["duration"]) * 1e9)
    return columns


def _numbers(values: Any, name: str, path: Path) -> Any:
    """A column of seconds as float64, any other as whole numbers, -1 for an empty cell."""
    try:
        numbers = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        row = next((i for i, value in enumerate(values) if not _is_number(value)), 0)
        raise _bad_cell(path, row, name, values[row], "is not a number") from None
    if name in _OPTIONAL:
        numbers = np.nan_to_num(numbers, nan=-1)
    low, high = _LIMITS[name]
    is_whole = name not in ("start_ts", "duration")
    # A NaN fails the comparisons as well.
    good = (numbers >= low) & (numbers <= high)
    if is_whole:
        good &= numbers == np.rint(numbers)
    if not good.all():
        row = int(np.flatnonzero(~good)[0])
        if np.isnan(numbers[row]):
            raise _bad_cell(path, row, name, values[row], "is not a number")
        kind = "whole number" if is_whole else "number"
        raise _bad_cell(
            path, row, name, values[row], f"is not a {kind} from {low:,.0f} to {high:,.0f}"
        )
    return numbers.astype(np.int64) if is_whole else numbers


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return False
    return True


def _row_number(path: Path, row: int) -> int:
    """The number that a spreadsheet shows: the header of a CSV file is row 1."""
    return row + (1 if path.suffix.lower() == ".parquet" else 2)


def _bad_cell(path: Path, row: int, name: str, value: object, problem: str) -> UsageError:
    place = f"{path}, row {_row_number(path, row)}, column {name}"
    return UsageError(f"{place}: {str(value)[:40]} {problem}", _REMEDY)


def _check_duplicates(columns: Mapping[str, Any], path: Path) -> None:
    """Refuse two rows of one operation, because either could be the right one."""
    _, optype = np.unique(columns["optype"].astype(str), return_inverse=True)
    keys = [columns[name] for name in ("seq_id", "mc", "step", "stage", "dp_rank", "rank")]
    keys.append(optype)
    order = np.lexsort(keys)
    same = np.ones(max(len(order) - 1, 0), dtype=bool)
    for key in keys:
        same &= key[order][1:] == key[order][:-1]
    if same.any():
        # The sort is stable, so the earlier row comes first.
        place = int(np.flatnonzero(same)[0])
        first, second = (_row_number(path, int(order[i])) for i in (place, place + 1))
        raise UsageError(
            f"{path}: rows {first} and {second} are the same operation of one rank and step",
            "remove one of them, or give equal operations different numbers in column seq_id",
        )


def _parquet_columns(path: Path) -> dict[str, Any]:
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise_if_out_of_memory(error)
        raise EnvironmentFault(
            f"{path}: pyarrow is not installed, which reads Parquet", install_command("sweep")
        ) from None
    if is_stream(path):
        raise UsageError(f"{path}: a Parquet file cannot be read from a pipe", _REMEDY)
    try:
        table: Any = parquet.read_table(path)
    except (OSError, ValueError) as error:
        reason = str(error).partition("\n")[0]
        raise UsageError(f"{path} is no readable Parquet file: {reason}", _REMEDY) from None
    columns = {}
    for name in table.column_names:
        values = table.column(name)
        columns[name] = values.to_pylist() if name == "optype" else values.to_numpy()
    return columns


def _csv_columns(path: Path) -> dict[str, Any]:
    columns: dict[str, list[str]] = {}
    try:
        with open_bytes(path) as raw:
            is_gzip = path.suffix.lower() == ".gz"
            unpacked = io.BufferedReader(gzip.GzipFile(fileobj=raw)) if is_gzip else raw
            text = io.TextIOWrapper(unpacked, encoding="utf-8", newline="")
            for line in csv.DictReader(text):
                for name in COLUMNS:
                    if name in line:
                        columns.setdefault(name, []).append(line[name] or "nan")
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} is no readable table: {error}", _REMEDY) from None
    return columns


def _check_schedule(table: Mapping[str, Any], path: Path) -> None:
    if table["mc"].max(initial=0) > 0:
        raise UsageError(
            f"{path}: the schedule is interleaved (column mc exceeds 0), which is not supported",
            "record a schedule with one model chunk per stage",
        )
    known = {*_COMPUTE, *_MESSAGES, *_TAIL, "params-all-gather"}
    unknown = sorted({str(name) for name in np.unique(table["optype"])} - known)
    if unknown:
        raise UsageError(f"{path}: unknown optype {', '.join(unknown)}", _REMEDY)


def _complete_steps(table: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The table without steps that lack operations, and the number of steps that were omitted."""
    steps, counts = np.unique(table["step"], return_counts=True)
    usual = np.bincount(counts).argmax() if len(counts) else 0
    complete = steps[counts == usual]
    kept = np.isin(table["step"], complete)
    return {name: values[kept] for name, values in table.items()}, len(steps) - len(complete)


class MissingWorkers(NamedTuple):
    """``ranks``: (data-parallel rank, stage) -> global rank, of workers without rows."""

    ranks: Mapping[tuple[int, int], int]

    def members(self, table: Mapping[str, Any], meetings: Numbers) -> dict[int, tuple[int, ...]]:
        """Meeting -> its members without rows."""
        if not self.ranks:
            return {}
        found: dict[int, tuple[int, ...]] = {}
        last = int(table["stage"].max())
        known, first = np.unique(meetings, return_index=True)
        for meeting, row in zip(known.tolist(), first.tolist(), strict=True):
            if meeting != NO_MEETING:
                absent = self._absent(table, row, last)
                if absent:
                    found[meeting] = absent
        return found

    def _absent(self, table: Mapping[str, Any], row: int, last: int) -> tuple[int, ...]:
        """The members without rows of the meeting of a row; ``last``: the last stage."""
        optype = str(table["optype"][row])
        pipeline, stage = int(table["dp_rank"][row]), int(table["stage"][row])
        if optype in _MESSAGES:
            partner = (pipeline, stage + _MESSAGES[optype][1])
            return (self.ranks[partner],) if partner in self.ranks else ()
        same = _COLLECTIVES[optype]
        absent = []
        for (its_pipeline, its_stage), rank in self.ranks.items():
            other_stage = "stage" in same and its_stage != stage
            other_pipeline = "dp_rank" in same and its_pipeline != pipeline
            between = optype.startswith("embedding") and its_stage not in (0, last)
            if not (other_stage or other_pipeline or between):
                absent.append(rank)
        return tuple(absent)


def _missing_workers(table: Mapping[str, Any]) -> MissingWorkers:
    """The workers that the grid of pipelines and stages lacks.

    Their global ranks follow from the others, because ranks count evenly in both directions.
    """
    known = {
        (int(dp), int(stage)): int(rank)
        for dp, stage, rank in zip(table["dp_rank"], table["stage"], table["rank"], strict=True)
    }
    pipelines = range(max(dp for dp, _ in known) + 1)
    stages = range(max(stage for _, stage in known) + 1)
    absent = [(dp, stage) for dp in pipelines for stage in stages if (dp, stage) not in known]
    workers = np.array([(dp, stage, 1) for dp, stage in known], dtype=np.float64)
    weights = np.linalg.lstsq(workers, np.array(list(known.values())), rcond=None)[0]
    ranks = {worker: int(np.rint(np.dot([*worker, 1], weights))) for worker in absent}
    return MissingWorkers(ranks)


# --- dependencies ---


def _rows_by_operation(
    table: Mapping[str, Any], order: Numbers
) -> dict[ScheduledOperation, Numbers]:
    """The rows of each operation of the schedule, by step and data-parallel rank.

    Equal positions of two of these arrays belong to the same step of the same pipeline.
    """
    rows_of: dict[ScheduledOperation, list[int]] = {}
    keys = zip(
        table["optype"][order].tolist(),
        table["seq_id"][order].tolist(),
        table["stage"][order].tolist(),
        order.tolist(),
        strict=True,
    )
    for optype, number, stage, row in keys:
        rows_of.setdefault((optype, number, stage), []).append(row)
    # The stages may differ in workers, because the rows of a rank may be missing.
    for stage in {operation[2] for operation in rows_of}:
        if len({len(rows) for op, rows in rows_of.items() if op[2] == stage}) > 1:
            raise UsageError(f"the workers of stage {stage} differ in operations", _REMEDY)
    return {operation: np.array(rows) for operation, rows in rows_of.items()}


def _edges(
    table: Mapping[str, Any], rows_of: Mapping[ScheduledOperation, Numbers]
) -> tuple[Numbers, Numbers]:
    before: list[Numbers] = []
    after: list[Numbers] = []
    for stage in range(int(table["stage"].max()) + 1):
        for earlier, later in _dependencies(table, rows_of, stage):
            if earlier in rows_of and later in rows_of:
                before.append(rows_of[earlier])
                after.append(rows_of[later])
    none = np.empty(0, dtype=np.int64)
    return np.concatenate([none, *before]), np.concatenate([none, *after])


def _dependencies(
    table: Mapping[str, Any], rows_of: Mapping[ScheduledOperation, Numbers], stage: int
) -> Iterator[tuple[ScheduledOperation, ScheduledOperation]]:
    """Pairs (earlier, later) of one stage; some may name operations that it does not have."""
    order = _computations_in_order(table, rows_of, stage)
    if not order:
        return
    yield from itertools.pairwise(order)
    for message in _MESSAGES:
        kind = message.split("-")[0]
        count = sum(operation[0] == f"{kind}-compute" for operation in order)
        for number in range(count):
            compute = (f"{kind}-compute", number, stage)
            this = (message, number, stage)
            if message.endswith("send"):
                yield compute, this
            else:
                yield this, compute
                yield (f"{kind}-compute", number - 1, stage), this
            yield this, (message, number + 1, stage)
    kinds = [operation[0] for operation in order]
    first_backward = kinds.index("backward-compute") if "backward-compute" in kinds else 0
    if first_backward >= 2:
        # The exchange of the first backward starts when the second last forward is finished.
        for message in ("backward-send", "backward-recv"):
            yield order[first_backward - 2], (message, 0, stage)
    first_forward = next((op for op in order if op[0] == "forward-compute"), None)
    if first_forward is not None:
        yield ("params-all-gather", 0, stage), first_forward
    yield ("params-all-gather", 0, stage), ("grads-reduce-scatter", 0, stage)
    tail = [(name, 0, stage) for name in _TAIL if (name, 0, stage) in rows_of]
    last = _last_computation(table, rows_of, order)
    yield from zip([last, *tail], tail, strict=False)


def _computations_in_order(
    table: Mapping[str, Any], rows_of: Mapping[ScheduledOperation, Numbers], stage: int
) -> list[ScheduledOperation]:
    """The computations of a stage in the order of the first step on its first pipeline."""
    found = [op for op in rows_of if op[0] in _COMPUTE and op[2] == stage]
    return sorted(found, key=lambda op: (table["start_ns"][rows_of[op][0]], op[1], op[0]))


def _last_computation(
    table: Mapping[str, Any],
    rows_of: Mapping[ScheduledOperation, Numbers],
    order: list[ScheduledOperation],
) -> ScheduledOperation:
    return max(order, key=lambda op: float(table["end_ns"][rows_of[op][0]]))


# --- the graph ---


def _graph(table: Mapping[str, Any], before: Numbers, after: Numbers) -> EventGraph:
    names, label = np.unique(table["optype"].astype(str), return_inverse=True)
    steps, step = np.unique(table["step"], return_inverse=True)
    count = len(label)
    in_step_origin = np.full(len(steps), np.inf)
    np.minimum.at(in_step_origin, step, table["start_ns"])
    everyone = np.ones(count, dtype=bool)
    columns = EventColumns(
        rank=table["rank"],
        lane=np.isin(table["optype"], _COMPUTE + _TAIL, invert=True).astype(np.int64),
        label=label.astype(np.int64),
        step=step.astype(np.int64),
        # All micro-batches of a kind do the same work.
        place=label.astype(np.int64),
        start=table["start_ns"],
        end=table["end_ns"],
        meeting=_meetings(table),
        provides=everyone,
        waits=everyone,
        nbytes=np.zeros(count, dtype=np.int64),
        origin=in_step_origin[step],
    )
    late: Flags = everyone
    return EventGraph(
        columns,
        before,
        after,
        [str(name) for name in names],
        [int(number) for number in steps],
        independent_steps=True,
        late_start=late,
    )


def _meetings(table: Mapping[str, Any]) -> Numbers:
    """The meeting of each row: messages by pipeline and number, collectives by their members."""
    keys: dict[tuple[Any, ...], int] = {}
    meetings = np.full(len(table["rank"]), NO_MEETING, dtype=np.int64)
    for optype, (counterpart, distance) in _MESSAGES.items():
        rows = np.flatnonzero(table["optype"] == optype)
        name = min(optype, counterpart)
        for row in rows.tolist():
            stage = int(table["stage"][row])
            link = min(stage, stage + distance)
            pipeline, number = int(table["dp_rank"][row]), int(table["seq_id"][row])
            key = (name, link, pipeline, int(table["step"][row]), number)
            meetings[row] = keys.setdefault(key, len(keys))
    for optype, same in _COLLECTIVES.items():
        rows = np.flatnonzero(table["optype"] == optype)
        for row in rows.tolist():
            members = tuple(int(table[name][row]) for name in same)
            collective = (optype, members, int(table["step"][row]), int(table["seq_id"][row]))
            meetings[row] = keys.setdefault(collective, len(keys))
    return meetings
