"""The result of a run: columns of times, how each rank ended, and which calls matched.

Key idea: a trace has one row per call and part. Its columns are either *static*, known from the
program (operation, group, size), or times. Static values are computed once per distinct call of a
code and then spread over rows and ranks, because programs repeat their calls.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import accumulate
from typing import Any, Literal, cast

import numpy as np
from numpy.typing import NDArray

from distsim.common.records import dataclass
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding
from distsim.hardware.cluster import Cluster
from distsim.operations.core.resolved_call import DTYPE_BYTES, RankGroup, ResolvedCall, part_sizes
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CallSite, CodeCall, SharedCode, Vec
from distsim.program.model import Program
from distsim.semantics.form.mismatches import RowMismatch
from distsim.trace.model import NEVER, TRACE_SCHEMA_VERSION, Trace, TraceColumn

#: (by trace row, the number of its queue's name, -1 where the call determines it; the names).
QueueNames = tuple[Sequence[int] | NDArray[np.int64], list[str]]


#: A call, or a part of a batch: rank, position, part (-1: none).
CallKey = tuple[int, int, int]


class RunColumns:
    """Times of every trace row, -1 where the event never happened.

    The rows of rank r start at ``base[r]`` (see `SharedCode.offsets`). ``alone``: by row of a
    compute that a transfer slowed down, its duration without the transfer, ns.
    """

    def __init__(self, program: Program) -> None:
        self.base: list[int] = list(accumulate(program.rows(), initial=0))
        self.posted, self.returned, self.started, self.finished, self.waited, self.match = (
            np.full(self.base[-1], NEVER, dtype=np.int64) for _ in range(6)
        )
        self.alone: dict[int, int] = {}

    def row(self, program: Program, rank: int, position: int, part: int = -1) -> int:
        """The row of a call, or of a part of a batch."""
        return self.base[rank] + program.code(rank).offsets[position] + 1 + part


#: The driver that computed the times of a run (docs/explanation/architecture.md, "One form of the
#: blocking rules"). Ranks that run as columns of an equivalence class have local clocks, too.
DriverName = Literal["local clocks", "event-driven"]


@dataclass(frozen=True)
class SimulatedRun:
    """A finished simulation.

    ``alone``: transfers shared links, but each has the cost of one that runs alone. ``section``:
    for a folded run, the run of the representatives.
    """

    program: Program
    profile: str
    outcome: str
    trace: Trace
    final_state: FinalState
    makespan_ns: int
    findings: tuple[Finding, ...] = ()
    mismatches: tuple[RowMismatch, ...] = ()
    driver: DriverName = "local clocks"
    alone: bool = False
    section: SimulatedRun | None = None

    @property
    def simulated_ranks(self) -> int:
        """How many ranks the driver ran: all, or the representatives that stand for all."""
        return len((self.section or self).program.present)


@dataclass
class _TextTables:
    """The distinct values of each table of a trace; calling it returns the number of a value."""

    tables: dict[str, list[object]] = field(default_factory=dict)
    index: dict[str, dict[object, int]] = field(default_factory=dict)

    def __call__(self, table: str, value: object) -> int:
        index = self.index.setdefault(table, {})
        if value not in index:
            index[value] = len(index)
            self.tables.setdefault(table, []).append(value)
        return index[value]


#: How ranks end that neither finish nor block: they have no time after their end.
_EARLY_EXIT_STATUSES = ("killed", "raised", "crashed", "absent")


def build_trace(
    program: Program,
    columns: RunColumns,
    final_state: FinalState,
    *,
    profile: str,
    outcome: str,
    makespan_ns: int,
    cluster: str | Cluster,
    queues: QueueNames | None = None,
) -> Trace:
    """The columns of a run as a trace: the static columns of each call, and its times.

    ``queues``: of rows that ran on one. ``cluster``: the source of the times, or its name.
    """
    table = _TextTables()
    for group in program.groups:
        table("group", (group.id, group.name))
    static = _static_columns(program, columns, table)
    if queues is not None:
        queue_of_row, names = queues
        numbers = np.array(queue_of_row, dtype=np.int64)
        name_numbers = np.array([table("queue", name) for name in names], dtype=np.int16)
        static["queue"][numbers >= 0] = name_numbers[numbers[numbers >= 0]]
    for row, ns in columns.alone.items():
        args = json.loads(table.tables["args"][static["args"][row]] or "{}")
        static["args"][row] = table("args", json.dumps({**args, "alone_ns": ns}))
    all_columns = static
    for name in ("posted", "returned", "started", "finished", "waited"):
        all_columns[f"{name}_ns"] = np.frombuffer(getattr(columns, name), dtype=np.int64)
    all_columns["match"] = np.frombuffer(columns.match, dtype=np.int64)
    is_made = _rows_of_made_calls(program, columns)
    if is_made is not None:
        all_columns = {name: column[is_made] for name, column in all_columns.items()}
    tables: dict[str, list[object]] = {
        name: [] for name in ("op", "dtype", "reduce_op", "place", "queue", "name")
    }
    tables |= table.tables
    tables["group"] = [group.name for group in program.groups]
    tables["place"] = [site.place() for site in cast("list[CallSite]", tables["place"])]
    header = _trace_header(
        program, final_state, profile, outcome, makespan_ns=makespan_ns, cluster=cluster
    )
    return Trace(header, tables, all_columns)


def _static_columns(
    program: Program, columns: RunColumns, table: _TextTables
) -> dict[str, TraceColumn]:
    rows_by_code = [_code_rows(program, code, table) for code in program.codes]
    static: dict[str, TraceColumn] = {}
    for name, dtype in _STATIC_COLUMNS.items():
        column = np.empty(columns.base[-1], dtype=dtype)
        for code, rows in zip(program.codes, rows_by_code, strict=True):
            starts = np.array([columns.base[rank] for rank in code.ranks], dtype=np.int64)
            _write_code_rows(rows[name], column, starts)
        static[name] = column
    ranks = np.arange(program.world_size, dtype=np.int32)
    static["rank"] = np.repeat(ranks, np.diff(columns.base))
    return static


def _trace_header(
    program: Program,
    final_state: FinalState,
    profile: str,
    outcome: str,
    *,
    makespan_ns: int,
    cluster: str | Cluster,
) -> dict[str, Any]:
    early_ends = [end for end in final_state.ends if end.status in _EARLY_EXIT_STATUSES]
    return {
        "schema_version": TRACE_SCHEMA_VERSION,
        "source": "simulated",
        "name": program.name,
        "file": program.file,
        "world_size": program.world_size,
        "nodes": program.nodes,
        "local_size": program.local_size,
        "backend": profile,
        "cluster": cluster if isinstance(cluster, str) else cluster.name,
        "outcome": outcome,
        "makespan_ns": makespan_ns,
        "complete": outcome == "completes",
        "groups": [[g.name, list(g.ranks)] for g in program.groups],
        "group_options": _group_options(program.groups),
        "mesh": dict(program.mesh),
        "options": dict(program.options),
        "prices": None if isinstance(cluster, str) else dict(cluster.to_mapping()),
        "link_faults": [[f.link, list(f.nodes), f.factor] for f in program.link_faults],
        "ends": [[end.rank, end.status, end.at_ns] for end in early_ends],
    }


def _write_code_rows(values: TraceColumn, out: TraceColumn, starts: NDArray[np.int64]) -> None:
    """Write the values of a code, by row or by (row, rank), to where the rows of its ranks start.

    Ranks whose rows are adjacent are written all at once.
    """
    size = len(values)
    if (starts[1:] - starts[:-1] == size).all():
        out[starts[0] : starts[-1] + size].reshape(len(starts), size)[:] = (
            values if values.ndim == 1 else values.T
        )
        return
    for row, start in enumerate(starts.tolist()):
        out[start : start + size] = values if values.ndim == 1 else values[:, row]


def _group_options(groups: Sequence[RankGroup]) -> dict[str, dict[str, object]]:
    """Timeout and backend of groups with their own, by group id; the world has those of the run."""
    by_group: dict[str, dict[str, object]] = {}
    for group in groups:
        if not group.id:
            continue
        options = {"timeout_ns": group.timeout_ns, "backend": group.backend}
        given: dict[str, object] = {k: value for k, value in options.items() if value is not None}
        if given:
            by_group[str(group.id)] = given
    return by_group


#: Types of numbers in a column.
IntegerType = type[np.int16] | type[np.int32] | type[np.int64]
_STATIC_COLUMNS: dict[str, IntegerType] = {
    "op": np.int16,
    "group": np.int32,
    "peer": np.int32,
    "tag": np.int64,
    "nbytes": np.int64,
    "dtype": np.int16,
    "reduce_op": np.int16,
    "handle": np.int32,
    "place": np.int32,
    "iteration": np.int32,
    "queue": np.int16,
    "position": np.int32,
    "part": np.int16,
    "name": np.int32,
    "ended_by": np.int32,
    "args": np.int32,
}

#: Those that depend on the position of a call in the code.
_POSITION_COLUMNS = ("handle", "iteration", "position", "part", "ended_by")


def _rows_of_made_calls(program: Program, columns: RunColumns) -> NDArray[np.bool_] | None:
    """By row, whether its rank makes the call; None: all do. Other rows are not in the trace."""
    if not any(code.guards for code in program.codes):
        return None
    keep = np.ones(columns.base[-1], dtype=np.bool_)
    for code in program.codes:
        for position, mask in enumerate(code.guards or ()):
            if mask is not None:
                for row in np.flatnonzero(~mask).tolist():
                    base = columns.base[code.ranks[row]]
                    keep[base + code.offsets[position] : base + code.offsets[position + 1]] = False
    return keep


def _code_rows(program: Program, code: SharedCode, table: _TextTables) -> dict[str, TraceColumn]:
    """Per trace row of a code, the values of the static columns."""
    calls = code.calls
    if len(calls) != code.offsets[-1]:  # some are batches
        calls = [part for call in code.calls for part in (call, *call.parts)]
    distinct = {id(call): call for call in calls}
    values = [_call_columns(program, code, call, table) for call in distinct.values()]
    number = {call_id: k for k, call_id in enumerate(distinct)}
    index = np.array([number[id(call)] for call in calls], dtype=np.int64)
    by_position = _position_columns(code)
    columns: dict[str, TraceColumn] = {}
    for name, dtype in _STATIC_COLUMNS.items():
        if name in by_position:
            columns[name] = by_position[name].astype(dtype)
        else:
            of_calls = _column([one[name] for one in values], dtype, len(code.ranks))
            columns[name] = of_calls[index]
    return columns


def _position_columns(code: SharedCode) -> dict[str, NDArray[np.int64]]:
    """Per trace row of a code, the columns that depend on the position of a call."""
    offsets = np.array(code.offsets, dtype=np.int64)
    position = np.repeat(np.arange(len(code.calls)), np.diff(offsets))
    ends = np.array(code.iterations[1:], dtype=np.int64)
    iteration = np.minimum(np.searchsorted(ends, position, side="right"), max(len(ends) - 1, 0))
    handles = [_handle_of(k, call) for k, call in enumerate(code.calls)]
    columns = (
        np.array(handles, dtype=np.int64)[position],
        iteration,
        position,
        np.arange(len(position)) - offsets[position] - 1,
        np.array(_ended_by(code), dtype=np.int64)[position],
    )
    return dict(zip(_POSITION_COLUMNS, columns, strict=True))


def _handle_of(position: int, call: CodeCall) -> int:
    """The call that created the first request that a call waits for, or its own; -1: none."""
    if call.waits:
        return position - call.waits[0]
    return position if call.is_async else -1


def _ended_by(code: SharedCode) -> list[int]:
    """By call, where its request was waited for, lost its handle, or never had one."""
    ended_by = [NEVER] * len(code.calls)
    for position, call in enumerate(code.calls):
        if call.is_async and not call.handled:
            ended_by[position] = position
        for distance in (*call.drops, *call.waits):
            ended_by[position - distance] = position
    return ended_by


def _column(values: list[Vec], dtype: IntegerType, ranks: int) -> TraceColumn:
    """Shape (rows,), or (rows, ranks) where some row differs between the ranks."""
    if not any(isinstance(v, np.ndarray) for v in values):
        return np.array(values, dtype=dtype)
    out = np.empty((len(values), ranks), dtype=dtype)
    for row, value in enumerate(values):
        out[row] = value
    return out


def _call_columns(
    program: Program, code: SharedCode, call: CodeCall, table: _TextTables
) -> dict[str, Vec]:
    buffers = call.fields.get("inputs") or call.fields.get("outputs") or ()
    endpoint = code.endpoints[call.endpoint] if call.endpoint >= 0 else None
    if call.op == "compute":
        queue = call.fields.get("queue") or "compute"
    else:
        queue = "host" if call.group < 0 or not buffers else "comm"
    return {
        "op": table("op", call.op),
        "group": code.groups[call.group] if call.group >= 0 else 0,
        "peer": call.fields.get("root", -1) if endpoint is None else endpoint.peer,
        "tag": 0 if endpoint is None else endpoint.tag,
        "nbytes": call.nbytes,
        "dtype": table("dtype", buffers[0].dtype if buffers else ""),
        "reduce_op": table("reduce_op", call.fields.get("reduce_op") or ""),
        "place": table("place", program.sites[call.site]),
        "queue": table("queue", queue),
        "name": table("name", call.fields.get("name") or ""),
        "args": _args(program, code, call, table),
    }


#: Fields of a call that a trace keeps in addition to its columns, unless they have a value that
#: means "not given".
_KEPT_FIELDS = (
    "ranks",
    "local_sync",
    "store",
    "queue",
    "stream",
    "code",
    "message",
    "timeout_ns",
    "backend",
    "wait_all_ranks",
    "assume_src",
    "init_method",
    "work",
)
_KEPT_FIELD_SET = frozenset(_KEPT_FIELDS)
_EMPTY_VALUES = (None, "", 0, False, ())


def _args(program: Program, code: SharedCode, call: CodeCall, table: _TextTables) -> Vec:
    """Further arguments of a call, as numbers of JSON texts in the table; empty for most calls.

    ``waits``: for a wait for several requests, how many calls back each of them is, in the order in
    which it waits for them.
    """
    fields = call.fields
    if len(call.waits) > 1:
        queue = {"queue": fields["queue"]} if fields.get("queue") else {}
        return table("args", json.dumps({"waits": call.waits, **queue}))
    has_parts = _has_parts(call, "input") or _has_parts(call, "output")
    if not has_parts and _KEPT_FIELD_SET.isdisjoint(fields):
        return table("args", "")
    texts = [_args_text(program.resolve(rank, call)) for rank in code.ranks]
    numbers = [table("args", text) for text in texts]
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers, dtype=np.int32)


def _has_parts(call: CodeCall, side: str) -> bool:
    """Whether the inputs or outputs of a call may consist of parts of different sizes."""
    if call.fields.get(f"{side}_splits") is not None:
        return True
    return len(call.fields.get(f"{side}s") or ()) > 1


def _args_text(call: ResolvedCall) -> str:
    """The further arguments of one rank's call.

    ``ranks``: of a new group. ``input_parts``, ``output_parts``: elements for, and from, each rank
    of the group, if they differ. ``coalesced``: elements of each part of a launch, counted as
    `nbytes` counts them.
    """
    values = {name: getattr(call, name) for name in _KEPT_FIELDS}
    args: dict[str, Any] = {k: value for k, value in values.items() if value not in _EMPTY_VALUES}
    operation = OPERATIONS[call.op]
    if operation.coalesces is not None:
        args["coalesced"] = [
            operation.coalesces.nbytes(part) // DTYPE_BYTES[part.inputs[0].dtype]
            for part in operation.separate(call)
        ]
    elif operation.kind == "collective":
        parts: dict[str, Sequence[int]] = {}
        for side in ("input", "output"):
            buffers = getattr(call, f"{side}s")
            if buffers and getattr(operation, f"{side}_parts") == "n":
                splits = getattr(call, f"{side}_splits")
                parts[f"{side}_parts"] = part_sizes(buffers, call.group.size, splits)
        if len({size for sizes in parts.values() for size in sizes}) > 1:
            args |= parts
    return json.dumps(args, ensure_ascii=False) if args else ""


#: Outcomes from worst to best; the worst one of any rank is the run's outcome.
OUTCOMES_WORST_FIRST = ("crashes", "raises", "undefined", "hangs", "wrong-data", "completes")


def worst_outcome(final_state: FinalState, outcomes: Iterable[str]) -> str:
    """The worst outcome of a run; ``outcomes`` are those of its mismatches.

    A rank that a fault killed counts as a crash only if nothing else happened.
    """
    outcome_of_status = {"raised": "raises", "crashed": "crashes", "blocked": "hangs"}
    statuses = {end.status for end in final_state.ends}
    happened = {*outcomes}
    happened |= {outcome_of_status[status] for status in statuses if status in outcome_of_status}
    if final_state.blocked:
        happened.add("hangs")
    if not happened - {"completes"} and "killed" in statuses:
        return "crashes"
    return next((word for word in OUTCOMES_WORST_FIRST if word in happened), "completes")
