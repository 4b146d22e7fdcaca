"""The table of the calls of a run; simulated and recorded runs have the same form.

It consists of numpy columns, because a thousand ranks make millions of rows. Rows are ordered by
rank, and within a rank in program order; a batch has a row of its own, followed by one row per
part. Times are integer nanoseconds since the start of the run, -1 for what never happened.
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
    """One row of a trace in plain values.

    ``handle``: the position of the call whose request this wait ends; of a call that creates a
    request, its own position; else -1. ``match``: a number that all calls that met share, else -1.
    ``position``: the index of the call in its rank's program. ``part``: the index in its batch,
    else -1. ``name``: of a compute. ``ended_by``: the position of the call that ended this call's
    request, which is its wait or the call that reused its variable, else -1. ``args``: the other
    arguments of the call as a JSON object; see `distsim.simulation.trace_replay`.

    All columns in nanoseconds are instants since the start of the run, not durations, or `NEVER`:
    when the host reached the call (``posted_ns``) and went on (``returned_ns``), when the work
    began (``started_ns``) and was done (``finished_ns``), and when the wait for its request
    returned (``waited_ns``).
    """

    rank: int
    op: str
    group: str
    peer: int | None
    tag: int
    nbytes: int
    dtype: str
    reduce_op: str
    handle: int
    place: SourceLocation
    iteration: int
    queue: str
    match: int
    posted_ns: int
    returned_ns: int
    started_ns: int
    finished_ns: int
    waited_ns: int
    position: int
    part: int
    name: str
    ended_by: int
    args: str


TraceColumn = NDArray[np.signedinteger]
#: The columns of a trace and their dtypes. Text columns are indices into a table of `Trace.tables`;
#: -1 means no text.
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

#: Columns that older files lack, with their defaults.
OPTIONAL_COLUMNS: dict[str, int | None] = {"ended_by": NEVER, "args": None}

#: The columns that hold times.
TIME_COLUMNS = ("posted_ns", "returned_ns", "started_ns", "finished_ns", "waited_ns")

#: Which columns are indices into `Trace.tables` of the same name.
TEXT_COLUMNS = ("op", "group", "dtype", "reduce_op", "place", "queue", "name", "args")


@dataclass(eq=False)
class Trace:
    """The calls of a run, with a header.

    ``tables['group']`` holds the names of the groups, ``header['groups']`` also their ranks, one
    entry per group id.

    Keys of ``header``:

    - always: schema_version, source ("simulated" or "recorded"), name, file, world_size, nodes,
      local_size, backend, cluster, outcome, makespan_ns, complete, groups ([[name, [ranks]], …]),
      group_options (number of the group -> its own timeout_ns and backend), mesh;
    - of a simulated run: ``prices`` (the cluster as in its file), options and link_faults, which a
      replay needs;
    - of an incomplete recording: reason (see
      `distsim.real.results.real_run.RealRun`, and "under way"), until_ns (how long it was
      observed), said (rank -> its last error message) and culprits;
    - of a file that was cut: cut ({calls, read});
    - values, if known: see `distsim.trace.packed_values`.
    """

    header: Mapping[str, Any]
    tables: Mapping[str, list[Any]]
    columns: Mapping[str, TraceColumn]

    def __len__(self) -> int:
        return len(self.columns["rank"])

    def __getitem__(self, name: str) -> TraceColumn:
        return self.columns[name]

    def row(self, i: int) -> TraceCall:
        """One call; slow, for single rows."""
        numbers = {name: int(self.columns[name][i]) for name in COLUMN_TYPES}
        texts = {name: self.text(name, numbers[name]) for name in TEXT_COLUMNS}
        peer = None if numbers["peer"] < 0 else numbers["peer"]
        return TraceCall(**numbers | texts | {"peer": peer})

    def text(self, name: str, index: int) -> Any:
        """The text of an index in a text column; in column ``place`` a `SourceLocation`."""
        if index < 0:
            return NO_LOCATION if name == "place" else ""
        return self.tables[name][index]

    def rows(self) -> Iterator[TraceCall]:
        """All rows in order; much faster than `row` one by one."""
        columns: dict[str, list[Any]] = {name: self.columns[name].tolist() for name in COLUMN_TYPES}
        for name in TEXT_COLUMNS:
            # The last one stands for index -1, which means no text.
            texts = [*self.tables.get(name, []), self.text(name, -1)]
            columns[name] = [texts[i] for i in columns[name]]
        columns["peer"] = [None if peer < 0 else peer for peer in columns["peer"]]
        for values in zip(*(columns[name] for name in TraceCall._fields), strict=True):
            yield TraceCall(*values)

    @property
    def world_size(self) -> int:
        """The number of ranks, including those without a call."""
        size_in_rows = int(self.columns["rank"].max()) + 1 if len(self) else 0
        return max(int(self.header.get("world_size") or 0), size_in_rows)

    @property
    def makespan_ns(self) -> int:
        """The duration of the run: by the header, or by the latest time of any call if later."""
        latest_ns = 0
        if len(self):
            latest_ns = max(int(self.columns[name].max()) for name in TIME_COLUMNS)
        return max(int(self.header.get("makespan_ns") or 0), latest_ns, 0)

    def ops(self, *names: str) -> NDArray[np.bool_]:
        """Which rows are calls of these operations, as a mask."""
        return self.rows_with_text("op", frozenset(names))

    def rows_with_text(self, column: str, texts: frozenset[str]) -> NDArray[np.bool_]:
        """Which rows have one of these texts in a text column, as a mask."""
        numbers = self.columns[column]
        mask = np.zeros(len(numbers), dtype=np.bool_)
        for number, text in enumerate(self.tables[column]):
            if text in texts:
                mask |= numbers == number
        return mask
