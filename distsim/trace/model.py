"""A run, call by call: one shape for simulated and recorded runs.

Columns, because a thousand ranks make millions of rows. Row order: rank by rank, within a rank in
program order; a batch has a row of its own, followed by one row per part. Times are integer
nanoseconds since the start of the run, -1 where it never happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.common.records import dataclass
from distsim.findings.finding_types import SourceLocation

TRACE_SCHEMA_VERSION: Final = 1
NEVER: Final = -1
NO_LOCATION: Final = SourceLocation("", 0, 0)


class TraceCall(NamedTuple):
    """One row of a trace, in plain values."""

    rank: int
    op: str
    group: str
    peer: int | None
    tag: int
    nbytes: int
    dtype: str
    reduce_op: str
    handle: int  # position of the call whose request this wait ends, or of the call itself when it made one; -1 none
    place: SourceLocation
    iteration: int
    queue: str
    match: int  # shared by all calls that met; -1 none
    posted_ns: int
    returned_ns: int
    started_ns: int
    finished_ns: int
    waited_ns: int
    position: int  # index of the call in its rank's program
    part: int  # index in its batch, -1
    name: str  # a compute's name
    ended_by: int  # position of the call that ended this call's request: its wait, or the one that took its handle; -1 none
    args: str  # what else the call was given, as a JSON object; see `distsim.trace_replay`


TraceColumn = NDArray[np.signedinteger]
#: Integer columns of a trace and their dtypes. Text columns are indices into a table of
#: `Trace.tables`; -1 there is no text.
COLUMN_TYPES: dict[str, type[np.signedinteger]] = {
    "rank": np.int32,
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
    "match": np.int64,
    "posted_ns": np.int64,
    "returned_ns": np.int64,
    "started_ns": np.int64,
    "finished_ns": np.int64,
    "waited_ns": np.int64,
    "position": np.int32,
    "part": np.int16,
    "name": np.int32,
    "ended_by": np.int32,
    "args": np.int32,
}

#: Columns that a file may leave out, with what stands for them: they came later than the others.
OPTIONAL_COLUMNS: dict[str, int | None] = {"ended_by": NEVER, "args": None}

#: The columns that hold times.
TIME_COLUMNS = ("posted_ns", "returned_ns", "started_ns", "finished_ns", "waited_ns")

#: Which columns are indices into `Trace.tables` of the same name.
TEXT_COLUMNS = ("op", "group", "dtype", "reduce_op", "place", "queue", "name", "args")


@dataclass(eq=False)
class Trace:
    """``tables['group']`` holds the groups' names, ``header['groups']`` their ranks (name -> list,
    one row per group id).

    ``header`` keys: schema_version, source ("simulated" or "recorded"), name, file, world_size,
    nodes, local_size, backend, cluster, outcome, makespan_ns, complete, groups: [[name, [ranks…]],
    …], group_options (number of the group -> timeout_ns, backend, where it has its own), mesh; of a
    simulated run also prices (the cluster as its file has it), options and link_faults, which a
    replay needs. ``values``, where known: see `distsim.trace.packed_values`. Of a recording that
    did not come to its end also reason (see `distsim.real.results.real_run.RealRun`, and "under
    way"), until_ns (how long it was watched), said (rank -> its last words) and culprits; of a file
    that was cut, cut: {calls, read}.
    """

    header: Mapping[str, Any]
    tables: Mapping[str, list[Any]]
    columns: Mapping[str, TraceColumn]

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def __getitem__(self, name: str) -> TraceColumn:
        return self.columns[name]

    def row(self, i: int) -> TraceCall:
        numbers = {name: int(self.columns[name][i]) for name in COLUMN_TYPES}
        texts = {name: self.text(name, numbers[name]) for name in TEXT_COLUMNS}
        return TraceCall(
            **numbers | texts | {"peer": None if numbers["peer"] < 0 else numbers["peer"]}
        )

    def text(self, name: str, index: int) -> Any:
        """What an index in a text column stands for: a text, or a `SourceLocation` in column
        ``place``.
        """
        if index < 0:
            return NO_LOCATION if name == "place" else ""
        return self.tables[name][index]

    def rows(self) -> Iterator[TraceCall]:
        """All rows in order; much faster than `row` one by one."""
        columns: dict[str, list[Any]] = {name: self.columns[name].tolist() for name in COLUMN_TYPES}
        for name in TEXT_COLUMNS:
            texts = [
                *self.tables.get(name, []),
                self.text(name, -1),
            ]  # index -1, no text, is the last one
            columns[name] = [texts[i] for i in columns[name]]
        columns["peer"] = [None if peer < 0 else peer for peer in columns["peer"]]
        for values in zip(*(columns[name] for name in TraceCall._fields), strict=True):
            yield TraceCall(*values)

    @property
    def world_size(self) -> int:
        """Ranks of the run, those without a call included."""
        seen = int(self.columns["rank"].max()) + 1 if len(self) else 0
        return max(int(self.header.get("world_size") or 0), seen)

    @property
    def makespan_ns(self) -> int:
        """From the start to the end of the run: what the header says, else the latest time of any
        call.
        """
        latest = (
            max((int(self.columns[n].max()) for n in TIME_COLUMNS), default=0) if len(self) else 0
        )
        return max(int(self.header.get("makespan_ns") or 0), latest, 0)

    def ops(self, *names: str) -> NDArray[np.bool_]:
        """Which rows are calls of these operations."""
        return self.said("op", frozenset(names))

    def said(self, column: str, texts: frozenset[str]) -> NDArray[np.bool_]:
        """In which rows a column of texts holds one of these."""
        numbers = self.columns[column]
        found = np.zeros(len(numbers), dtype=np.bool_)
        for number, text in enumerate(self.tables[column]):
            if text in texts:
                found |= numbers == number
        return found


# --- how a run ended ---

#: Outcomes of runs all of whose ranks came to their ends.
_FINISHED_OUTCOMES: Final = ("completes", "wrong-data", "undefined")
#: Statuses of ranks that are the cause before any that merely got no further.
_FAILED_STATUSES: Final = ("killed", "crashed", "absent")
#: Calls in which a rank waits for nobody.
_LOCAL_OPS: Final = ("compute", "sleep", "assign")


class StoppedRank(NamedTuple):
    """Where a rank got no further. ``row``: of its last call, -1 before the first; ``inside``: in
    that call, not behind it.

    ``status``: as in `distsim.findings.final_state.RankEndStatus`; "blocked" for whoever just got
    no further. ``said``: an error's words.
    """

    rank: int
    status: str
    row: int
    inside: bool
    at_ns: int
    said: str = ""


def is_partial(trace: Trace) -> bool:
    """Whether the trace is of a run that did not come to its end, or its file was cut."""
    outcome = trace.header.get("outcome")
    if trace.header.get("cut") or trace.header.get("reason") in ("interrupted", "under way"):
        return True
    return outcome not in _FINISHED_OUTCOMES and not (
        outcome is None and trace.header.get("complete", True)
    )


def stopped_ranks(trace: Trace) -> tuple[StoppedRank, ...]:
    """The ranks that did not come to their end, the cause first: whom the recording blames, the
    dead, those who were at work alone, then by time. Empty for a run that came to its end; of a
    file that was cut, only ranks that are known to stand."""
    if trace.header.get("outcome") in _FINISHED_OUTCOMES or not is_partial(trace):
        return ()
    last, reached = _last_posted_calls(trace)
    gone = {rank: (status, at_ns) for rank, status, at_ns in trace.header.get("ends") or ()}
    said, is_cut = trace.header.get("said") or {}, bool(trace.header.get("cut"))
    found = []
    for rank in range(trace.world_size):
        row = last[rank]
        inside = row >= 0 and int(trace["returned_ns"][row]) < 0
        open_row = row if inside else reached.get(rank, -1)
        status, at_ns = gone.get(rank, ("blocked", -1))
        if (
            rank in gone
            or open_row >= 0
            or (not is_cut and not _has_posted_all_calls(trace, rank, row))
        ):
            row = open_row if open_row >= 0 else row
            found.append(
                StoppedRank(
                    rank,
                    status,
                    row,
                    open_row >= 0,
                    max(at_ns, _post_time(trace, row)),
                    str(said.get(str(rank), "")),
                )
            )
    blamed = set(trace.header.get("culprits") or ())
    return tuple(
        sorted(
            found,
            key=lambda s: (
                s.rank not in blamed,
                s.status not in _FAILED_STATUSES,
                not _is_in_local_work(trace, s),
                s.at_ns,
                s.rank,
            ),
        )
    )


def _post_time(trace: Trace, row: int) -> int:
    return int(trace["posted_ns"][row]) if row >= 0 else 0


def _is_in_local_work(trace: Trace, stop: StoppedRank) -> bool:
    """In a call of its own, or between two calls: nothing holds it up but itself."""
    return stop.row >= 0 and (
        not stop.inside or trace.text("op", int(trace["op"][stop.row])) in _LOCAL_OPS
    )


def _last_posted_calls(trace: Trace) -> tuple[list[int], dict[int, int]]:
    """(the row of each rank's last call that was posted, -1; by rank the first row whose work was
    never done though its host went on).
    """
    whole = trace["part"] < 0
    rank, posted = trace["rank"], trace["posted_ns"] >= 0
    last = np.full(trace.world_size, -1, dtype=np.int64)
    made = np.flatnonzero(whole & posted)
    np.maximum.at(last, rank[made], made)
    left = (
        posted
        & (trace["finished_ns"] < 0)
        & (trace["returned_ns"] >= 0)
        & (trace["handle"] == trace["position"])
        & whole
    )
    reached: dict[int, int] = {}
    for row in np.flatnonzero(left).tolist():
        reached.setdefault(int(rank[row]), row)
    return last.tolist(), reached


def _has_posted_all_calls(trace: Trace, rank: int, row: int) -> bool:
    """Whether a rank has made its last call: none that it has not posted follows."""
    after = row + 1
    while (
        after < len(trace) and int(trace["rank"][after]) == rank and int(trace["part"][after]) >= 0
    ):
        after += 1
    if row < 0:
        return not bool((trace["rank"] == rank).any())
    return after >= len(trace) or int(trace["rank"][after]) != rank
