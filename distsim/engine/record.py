"""What a run leaves behind: columns of times, how each rank ended, who met."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import NDArray

from distsim.findings.record import Finding
from distsim.program.records import Code, CodeCall, Program
from distsim.standstill import Standstill
from distsim.trace import NEVER, TRACE_SCHEMA_VERSION, Trace

#: For each trace row the number of its queue's name, -1 where the call tells it; and the names.
Queues = tuple[Sequence[int], list[str]]


class Columns:
    """Times of every trace row, -1 where it never happened; the rows of rank r start at ``base[r]`` (see `Code.offsets`)."""

    def __init__(self, program: Program) -> None:
        sizes = [program.code(rank).offsets[-1] for rank in range(program.world_size)]
        self.base: list[int] = list(accumulate(sizes, initial=0))
        self.posted, self.returned, self.started, self.finished, self.waited, self.match = (
            array("q", [NEVER]) * self.base[-1] for _ in range(6)
        )

    def row(self, program: Program, rank: int, position: int, part: int = -1) -> int:
        """The row of a call, or of a part of a batch."""
        return self.base[rank] + program.code(rank).offsets[position] + 1 + part


@dataclass(frozen=True)
class Run:
    """A finished simulation. ``possible`` lists the outcomes when there are several.

    ``mismatches``: (rows of the trace that met, names of what differed).
    """

    program: Program
    profile: str
    outcome: str
    trace: Trace
    standstill: Standstill
    makespan_ns: int
    possible: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    mismatches: tuple[tuple[tuple[int, ...], tuple[str, ...]], ...] = ()
    path: str = "fast"  # which engine ran: "fast" or "ordered"


@dataclass
class _Tables:
    """Texts of a trace, each once."""

    tables: dict[str, list[Any]] = field(default_factory=dict)
    index: dict[str, dict[Any, int]] = field(default_factory=dict)

    def __call__(self, table: str, value: Any) -> int:
        index = self.index.setdefault(table, {})
        if value not in index:
            index[value] = len(index)
            self.tables.setdefault(table, []).append(value)
        return index[value]


#: How ranks end that did not end by themselves or in a wait: their time is over when they are.
_GONE = ("killed", "raised", "crashed", "absent")


def build_trace(
    program: Program, columns: Columns, standstill: Standstill, *, profile: str, outcome: str, makespan_ns: int, cluster: str,
    queues: Queues | None = None,
) -> Trace:  # fmt: skip
    """The columns of a run as a trace: what the program says of each call, beside its times. ``queues``: of rows that ran on one."""
    table = _Tables()
    for group in program.groups:
        table("group", (group.id, group.name))
    static: dict[str, NDArray[Any]] = {}
    fixed = [_code_rows(program, code, table) for code in program.codes]
    for name, dtype in _STATIC.items():
        out = np.empty(columns.base[-1], dtype=dtype)
        for code, rows in zip(program.codes, fixed, strict=True):
            values = rows[name]
            for row, rank in enumerate(code.ranks):
                out[columns.base[rank] : columns.base[rank + 1]] = values if values.ndim == 1 else values[:, row]
        static[name] = out
    static["rank"] = np.repeat(np.arange(program.world_size, dtype=np.int32), np.diff(columns.base))
    if queues is not None:
        numbers, names = np.array(queues[0], dtype=np.int64), np.array([table("queue", name) for name in queues[1]], dtype=np.int16)
        static["queue"][numbers >= 0] = names[numbers[numbers >= 0]]
    keep = _made(program, columns)
    times = {
        f"{n}_ns": np.frombuffer(getattr(columns, n), dtype=np.int64)
        for n in ("posted", "returned", "started", "finished", "waited")
    }
    every = {**static, **times, "match": np.frombuffer(columns.match, dtype=np.int64)}
    if keep is not None:
        every = {name: column[keep] for name, column in every.items()}
    tables = {**{n: [] for n in ("op", "dtype", "reduce_op", "place", "queue", "name")}, **table.tables}
    tables["group"] = [name for _, name in table.tables["group"]]
    header = {
        "schema_version": TRACE_SCHEMA_VERSION, "source": "simulated", "name": program.name, "file": program.file,
        "world_size": program.world_size, "nodes": program.nodes, "local_size": program.local_size, "backend": profile,
        "cluster": cluster, "outcome": outcome, "makespan_ns": makespan_ns, "complete": outcome == "completes",
        "groups": [[g.name, list(g.ranks)] for g in program.groups], "mesh": dict(program.mesh),
        "ends": [[end.rank, end.status, end.at_ns] for end in standstill.ends if end.status in _GONE],
    }  # fmt: skip
    return Trace(header, tables, every)


_STATIC = {"op": np.int16, "group": np.int32, "peer": np.int32, "tag": np.int64, "nbytes": np.int64, "dtype": np.int16,
           "reduce_op": np.int16, "handle": np.int32, "place": np.int32, "iteration": np.int32, "queue": np.int16,
           "position": np.int32, "part": np.int16, "name": np.int32}  # fmt: skip


def _made(program: Program, columns: Columns) -> NDArray[np.bool_] | None:
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


def _code_rows(program: Program, code: Code, table: _Tables) -> dict[str, NDArray[Any]]:
    """Per trace row of a code, the values of the static columns."""
    rows: dict[str, Any] = {name: [] for name in _STATIC}
    known: dict[int, dict[str, Any]] = {}
    ends = list(code.iterations[1:])
    iteration = 0
    for position, call in enumerate(code.calls):
        while iteration < len(ends) - 1 and position >= ends[iteration]:
            iteration += 1
        for part, piece in enumerate((call, *call.parts), -1):
            facts = known.get(id(piece)) or known.setdefault(id(piece), _facts(program, code, piece, table))
            for name, value in facts.items():
                rows[name].append(value)
            rows["handle"].append(position - call.waits[0] if call.waits else position if call.is_async else -1)
            rows["iteration"].append(iteration)
            rows["position"].append(position)
            rows["part"].append(part)
    return {name: _column(rows[name], dtype, len(code.ranks)) for name, dtype in _STATIC.items()}


def _column(values: list[Any], dtype: Any, ranks: int) -> NDArray[Any]:
    """Shape (rows,), or (rows, ranks) where some row differs between the ranks."""
    if not any(isinstance(v, np.ndarray) for v in values):
        return np.array(values, dtype=dtype)
    out = np.empty((len(values), ranks), dtype=dtype)
    for row, value in enumerate(values):
        out[row] = value
    return out


def _facts(program: Program, code: Code, call: CodeCall, table: _Tables) -> dict[str, Any]:
    buffers = call.fields.get("inputs") or call.fields.get("outputs") or ()
    port = code.ports[call.port] if call.port >= 0 else None
    queue = call.fields.get("queue") or (
        "compute" if call.op == "compute" else "host" if call.group < 0 or not buffers else "comm"
    )
    return {
        "op": table("op", call.op), "group": code.groups[call.group] if call.group >= 0 else 0,
        "peer": call.fields.get("root", -1) if port is None else port.peer, "tag": 0 if port is None else port.tag, "nbytes": call.nbytes,
        "dtype": table("dtype", buffers[0].dtype if buffers else ""), "reduce_op": table("reduce_op", call.fields.get("reduce_op") or ""),
        "place": table("place", program.sites[call.site].place()), "queue": table("queue", queue),
        "name": table("name", call.fields.get("name") or ""),
    }  # fmt: skip


def sorted_ends(ends: Sequence[Any]) -> tuple[Any, ...]:
    """Rank order."""
    return tuple(sorted(ends, key=lambda end: end.rank))
