"""What a run leaves behind: columns of times, how each rank ended, who met."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import field
from itertools import accumulate
from typing import cast

import numpy as np
from numpy.typing import NDArray

from distsim.common.records import dataclass
from distsim.findings.final_state import FinalState
from distsim.findings.finding_types import Finding
from distsim.hardware.cluster import Cluster
from distsim.operations.core.resolved_call import DTYPE_BYTES, RankGroup, ResolvedCall, part_sizes
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CallSite, CodeCall, Program, SharedCode, Vec
from distsim.trace.model import NEVER, TRACE_SCHEMA_VERSION, Trace, TraceColumn

#: For each trace row the number of its queue's name, -1 where the call tells it; and the names.
QueueNames = tuple[Sequence[int] | NDArray[np.int64], list[str]]


#: A call, or a part of a batch: rank, position, part (-1: none).
CallKey = tuple[int, int, int]


class RunColumns:
    """Times of every trace row, -1 where it never happened; the rows of rank r start at ``base[r]``
    (see `SharedCode.offsets`).

    ``alone``: what computes that a transfer slowed down take by themselves, ns.
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


@dataclass(frozen=True)
class SimulatedRun:
    """A finished simulation.

    ``mismatches``: (rows of the trace that met, names of what differed). ``alone``: what was under
    way at once shared links, which is not counted.
    """

    program: Program
    profile: str
    outcome: str
    trace: Trace
    final_state: FinalState
    makespan_ns: int
    findings: tuple[Finding, ...] = ()
    mismatches: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = ()
    path: str = "fast"  # which engine ran: "fast" or "ordered"
    alone: bool = False
    section: SimulatedRun | None = None  # of a folded run: that of the ranks that stand for all


@dataclass
class _TextTables:
    """Texts of a trace, each once."""

    tables: dict[str, list[object]] = field(default_factory=dict)
    index: dict[str, dict[object, int]] = field(default_factory=dict)

    def __call__(self, table: str, value: object) -> int:
        index = self.index.setdefault(table, {})
        if value not in index:
            index[value] = len(index)
            self.tables.setdefault(table, []).append(value)
        return index[value]


#: How ranks end that did not end by themselves or in a wait: their time is over when they are.
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
    """The columns of a run as a trace: what the program says of each call, beside its times.

    ``queues``: of rows that ran on one. ``cluster``: what gave the times, or the name of what
    did.
    """
    table = _TextTables()
    for group in program.groups:
        table("group", (group.id, group.name))
    static: dict[str, TraceColumn] = {}
    fixed = [_code_rows(program, code, table) for code in program.codes]
    for name, dtype in _STATIC_COLUMNS.items():
        out = np.empty(columns.base[-1], dtype=dtype)
        for code, rows in zip(program.codes, fixed, strict=True):
            _write_code_rows(
                rows[name],
                out,
                np.array([columns.base[rank] for rank in code.ranks], dtype=np.int64),
            )
        static[name] = out
    static["rank"] = np.repeat(np.arange(program.world_size, dtype=np.int32), np.diff(columns.base))
    if queues is not None:
        numbers, names = (
            np.array(queues[0], dtype=np.int64),
            np.array([table("queue", name) for name in queues[1]], dtype=np.int16),
        )
        static["queue"][numbers >= 0] = names[numbers[numbers >= 0]]
    for row, ns in columns.alone.items():
        said = json.loads(table.tables["args"][static["args"][row]] or "{}")
        static["args"][row] = table("args", json.dumps({**said, "alone_ns": ns}))
    keep = _rows_of_made_calls(program, columns)
    times = {
        f"{n}_ns": np.frombuffer(getattr(columns, n), dtype=np.int64)
        for n in ("posted", "returned", "started", "finished", "waited")
    }
    every = {**static, **times, "match": np.frombuffer(columns.match, dtype=np.int64)}
    if keep is not None:
        every = {name: column[keep] for name, column in every.items()}
    tables = {
        **{n: [] for n in ("op", "dtype", "reduce_op", "place", "queue", "name")},
        **table.tables,
    }
    tables["group"] = [group.name for group in program.groups]
    tables["place"] = [site.place() for site in cast("list[CallSite]", tables["place"])]
    header = {
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
        "ends": [
            [end.rank, end.status, end.at_ns]
            for end in final_state.ends
            if end.status in _EARLY_EXIT_STATUSES
        ],
    }
    return Trace(header, tables, every)


def _write_code_rows(values: TraceColumn, out: TraceColumn, starts: NDArray[np.int64]) -> None:
    """Write the values of a code, by row or by row and rank, where the rows of its ranks start; of
    ranks side by side all at once.
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
    """Timeout and back end of groups that have their own, by the group's number; the world's are
    those of the run.
    """
    given: dict[str, dict[str, object]] = {
        str(g.id): {"timeout_ns": g.timeout_ns, "backend": g.backend} for g in groups if g.id
    }
    said = {
        number: {name: value for name, value in found.items() if value is not None}
        for number, found in given.items()
    }
    return {number: found for number, found in said.items() if found}


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

#: Of these, what differs from one place of a call to another.
_POSITION_COLUMNS = ("handle", "iteration", "position", "part", "ended_by")


def _rows_of_made_calls(program: Program, columns: RunColumns) -> NDArray[np.bool_] | None:
    """Rows of calls that guards leave out are no rows of the trace."""
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
    pieces = code.calls
    if len(pieces) != code.offsets[-1]:
        pieces = [
            piece
            for call in code.calls
            for piece in ((call, *call.parts) if call.parts else (call,))
        ]
    distinct = {id(piece): piece for piece in pieces}
    facts = [_call_columns(program, code, piece, table) for piece in distinct.values()]
    number = {one: k for k, one in enumerate(distinct)}
    index = np.array([number[id(piece)] for piece in pieces], dtype=np.int64)
    places = _position_columns(code)
    return {
        name: places[name].astype(dtype)
        if name in places
        else _column([fact[name] for fact in facts], dtype, len(code.ranks))[index]
        for name, dtype in _STATIC_COLUMNS.items()
    }


def _position_columns(code: SharedCode) -> dict[str, NDArray[np.int64]]:
    """Per trace row of a code, the columns that go by the place of a call."""
    offsets = np.array(code.offsets, dtype=np.int64)
    position = np.repeat(np.arange(len(code.calls)), np.diff(offsets))
    ends = np.array(code.iterations[1:], dtype=np.int64)
    iteration = np.minimum(np.searchsorted(ends, position, side="right"), max(len(ends) - 1, 0))
    handles = [
        k - call.waits[0] if call.waits else k if call.is_async else -1
        for k, call in enumerate(code.calls)
    ]
    columns = (
        np.array(handles, dtype=np.int64)[position],
        iteration,
        position,
        np.arange(len(position)) - offsets[position] - 1,
        np.array(_ended_by(code), dtype=np.int64)[position],
    )
    return dict(zip(_POSITION_COLUMNS, columns, strict=True))


def _ended_by(code: SharedCode) -> list[int]:
    """For each call where its request was waited for, lost its handle, or never had one."""
    found = [NEVER] * len(code.calls)
    for position, call in enumerate(code.calls):
        if call.is_async and not call.handled:
            found[position] = position
        if call.drops or call.waits:
            for distance in (*call.drops, *call.waits):
                found[position - distance] = position
    return found


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
    port = code.ports[call.port] if call.port >= 0 else None
    queue = (
        (call.fields.get("queue") or "compute")
        if call.op == "compute"
        else ("host" if call.group < 0 or not buffers else "comm")
    )
    return {
        "op": table("op", call.op),
        "group": code.groups[call.group] if call.group >= 0 else 0,
        "peer": call.fields.get("root", -1) if port is None else port.peer,
        "tag": 0 if port is None else port.tag,
        "nbytes": call.nbytes,
        "dtype": table("dtype", buffers[0].dtype if buffers else ""),
        "reduce_op": table("reduce_op", call.fields.get("reduce_op") or ""),
        "place": table("place", program.sites[call.site]),
        "queue": table("queue", queue),
        "name": table("name", call.fields.get("name") or ""),
        "args": _args(program, code, call, table),
    }


#: Fields of a call that a trace keeps beside its columns where they are given, and the values that
#: say nothing.
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
)
_KEPT_FIELD_SET = frozenset(_KEPT_FIELDS)
_EMPTY_VALUES = (None, "", 0, False, ())


def _args(program: Program, code: SharedCode, call: CodeCall, table: _TextTables) -> Vec:
    """What else the call was given, as the text of a JSON object; empty for most. Vec of numbers in
    the table.

    ``waits``: how many calls back each of the requests is that a wait ends, in the order in which
    it waits for them.
    """
    fields = call.fields
    parts = any(
        fields.get(f"{side}_splits") is not None or len(fields.get(f"{side}s") or ()) > 1
        for side in ("input", "output")
    )
    if len(call.waits) > 1:
        on = {"queue": fields["queue"]} if fields.get("queue") else {}
        return table("args", json.dumps({"waits": call.waits, **on}))
    if not parts and _KEPT_FIELD_SET.isdisjoint(fields):
        return table("args", "")
    texts = [_args_text(program.resolve(rank, call)) for rank in code.ranks]
    numbers = [table("args", text) for text in texts]
    return numbers[0] if len(set(numbers)) == 1 else np.array(numbers, dtype=np.int32)


def _args_text(call: ResolvedCall) -> str:
    """``ranks``: of a new group; ``input_parts``, ``output_parts``: elements for, and of, each rank
    of the group where they differ; ``coalesced``: elements of each part of a launch, counted as
    `nbytes` counts them."""
    found = {
        name: getattr(call, name)
        for name in _KEPT_FIELDS
        if getattr(call, name) not in _EMPTY_VALUES
    }
    row, n = OPERATIONS[call.op], call.group.size
    if row.coalesces is not None:
        found["coalesced"] = [
            row.coalesces.nbytes(part) // DTYPE_BYTES[part.inputs[0].dtype]
            for part in row.separate(call)
        ]
    elif row.kind == "collective":
        sides = {
            f"{side}_parts": part_sizes(buffers, n, getattr(call, f"{side}_splits"))
            for side in ("input", "output")
            if (buffers := getattr(call, f"{side}s")) and getattr(row, f"{side}_parts") == "n"
        }
        if len({size for sizes in sides.values() for size in sizes}) > 1:
            found |= sides
    return json.dumps(found, ensure_ascii=False) if found else ""


#: Outcomes from worst to best; the worst thing that any rank met is the run's outcome.
OUTCOMES_WORST_FIRST = ("crashes", "raises", "undefined", "hangs", "wrong-data", "completes")


def worst_outcome(final_state: FinalState, outcomes: Iterable[str]) -> str:
    """The worst that happened, given also what came of calls that met and did not fit.

    A rank that a fault killed counts as a crash only where nothing else came of it."""
    words = {"raised": "raises", "crashed": "crashes", "blocked": "hangs"}
    happened = {*outcomes, *(words[end.status] for end in final_state.ends if end.status in words)}
    if final_state.blocked:
        happened.add("hangs")
    if not happened - {"completes"} and any(end.status == "killed" for end in final_state.ends):
        return "crashes"
    return next((word for word in OUTCOMES_WORST_FIRST if word in happened), "completes")
