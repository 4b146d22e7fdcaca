"""Rebuilds a program from a trace: each rank's calls in order, with the recorded durations.

A compute that states its work takes as long as that work takes on the cluster of the replay; any
other compute takes as long as in the trace. A pause of the host between two calls becomes a
`sleep`. Communication gets no durations: the simulator predicts them. So a replay under the
hardware model of the recording reproduces the run, and under another one it predicts the run there.
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.hardware.cluster import cluster_from
from distsim.hardware.cost import CostModel
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import KernelWork
from distsim.operations.registry import OPERATIONS
from distsim.program.assemble import CodeBuilder
from distsim.program.call_builder import CallDraft, CallRequests
from distsim.program.code import CallSite, CodeCall, SharedCode
from distsim.program.from_calls import program_of_ranks
from distsim.program.model import Program
from distsim.program.program_tables import ProgramTables
from distsim.simulation.trace_replay.call_buffers import buffer_of, collective_fields, element_count
from distsim.simulation.trace_replay.recorded_faults import link_faults, rank_faults
from distsim.simulation.trace_replay.recorded_groups import add_recorded_groups
from distsim.simulation.trace_replay.recorded_requests import requests_ended_by, senders_by_row
from distsim.trace.model import Trace, TraceCall

#: Arguments of a call that are taken over unchanged.
_LOCAL_FIELDS = ("queue", "stream", "code", "message")
_GROUP_FIELDS = (
    "name",
    "ranks",
    "local_sync",
    "store",
    "timeout_ns",
    "backend",
    "init_method",
    "wait_all_ranks",
)
#: A trace with more iterations is considered damaged.
_MAX_ITERATIONS: Final = 1 << 24
#: The time that a process needs between two calls of a real run anyway: shorter pauses of a trace
#: recur by themselves.
_UNRECORDED_PAUSE_NS: Final = 20_000


class ReplayScale(NamedTuple):
    """Factors on durations: of computes, and of the host's pauses between its calls."""

    compute: float = 1.0
    gaps: float = 1.0


UNSCALED: Final = ReplayScale()


@dataclass(frozen=True)
class RebuiltProgram:
    """A program, and how it relates to its trace.

    ``kept``: which rows of a run of the program are rows of the trace; the others are pauses.
    ``untimed``: how many computes of the trace never ended, and so take no time in the program.
    """

    program: Program
    kept: NDArray[np.bool_]
    untimed: int = 0


@dataclass
class _RankBuildState:
    """The state while the code of one rank is built.

    Calls are identified by their positions in the trace, because pauses shift those in the code.
    ``code_position``: by the position in the trace. ``calls_by_key``: equal calls share one object.
    ``free_ns``: when the host returned from its last call. ``ended_at``: for each request, the call
    that ends it. ``memory_number``: for each open request, the number of its memory.
    """

    builder: CodeBuilder
    code_position: dict[int, int] = field(default_factory=dict)
    kept: list[bool] = field(default_factory=list)
    calls_by_key: dict[Hashable, CodeCall] = field(default_factory=dict)
    free_ns: int = 0
    ended_at: dict[int, int] = field(default_factory=dict)
    memory_number: dict[int, int] = field(default_factory=dict)


def rebuild_program(
    trace: Trace,
    *,
    backend: str,
    scale: ReplayScale = UNSCALED,
    resolve: bool = True,
    real: bool = False,
    named: bool = False,
) -> RebuiltProgram:
    """The program of a trace.

    Raises UsageError for an operation or dtype that distsim does not know. With ``resolve`` a
    receive from any source names the rank whose message it took. A rank that was killed, or never
    started, is so again.

    ``real``: the program is for a run on torch.distributed, where processes take time by themselves
    to issue a request and between two calls; pauses are shortened accordingly. ``named``: buffers
    have names, so that their memory is allocated before the run; no two requests that are open at
    the same time share any.
    """
    return _ProgramBuilder(trace, backend, scale, resolve, real, named).build()


def node_count(trace: Trace) -> int:
    """The number of nodes in the run of a trace."""
    return int(trace.header.get("nodes") or 1)


class _ProgramBuilder:
    """Builds one program; see `rebuild_program` for the parameters.

    ``group_offset``: what to add to a group id of the trace to get the one of the program.
    ``cost``: the costs of the trace. ``predicted_ns``: by arguments of a compute, the duration of
    its work by these costs.
    ``senders``: the sender of the message of each receive, by row of the trace.
    """

    def __init__(
        self, trace: Trace, backend: str, scale: ReplayScale, resolve: bool, real: bool, named: bool
    ) -> None:
        self.trace = trace
        self.backend = backend
        self.scale = scale
        self.real = real
        self.named = named
        self.size = trace.world_size
        self.nodes = node_count(trace)
        self._check()
        self.recorded = trace.header.get("source") == "recorded"
        self.tables = ProgramTables(self.size, backend)
        self.rows = list(trace.rows())
        self.group_offset = add_recorded_groups(trace, self.tables)
        self.senders = senders_by_row(self.rows) if resolve else {}
        costs = trace.header.get("prices")
        self.cost = CostModel(cluster_from(costs), 1, 1) if costs else None
        self.predicted_ns: dict[str, int] = {}

    def _check(self) -> None:
        """Raise UsageError for contents that no run has."""
        header, calls = self.trace.header, self.trace
        group_ranks = [rank for _, ranks in header.get("groups") or () for rank in ranks]
        ended_ranks = [end[0] for end in header.get("ends") or ()]
        for rank in (*group_ranks, *ended_ranks):
            if type(rank) is not int or not 0 <= rank < self.size:
                raise UsageError(
                    f"the trace's header names a rank outside its world of {self.size}",
                    "write the trace again",
                )
        if len(calls) and calls["iteration"].max() >= _MAX_ITERATIONS:
            raise UsageError(
                f"the trace has a call in iteration {calls['iteration'].max()}, which is too large",
                "write the trace again",
            )

    def build(self) -> RebuiltProgram:
        rows_by_rank: list[list[int]] = [[] for _ in range(self.size)]
        for row, call in enumerate(self.rows):
            rows_by_rank[call.rank].append(row)
        codes, kept = [], []
        for rank, rows in enumerate(rows_by_rank):
            code, rank_kept = self._rank_code(rank, rows)
            codes.append(code)
            kept += rank_kept
        header = self.trace.header
        program = program_of_ranks(
            self.tables,
            codes,
            name=str(header.get("name") or "replay"),
            file=str(header.get("file") or ""),
            nodes=self.nodes,
            backend=self.backend,
            options=dict(header.get("options") or {}),
            faults=rank_faults(self.trace, codes, self._calls_by_rank(rows_by_rank)),
            link_faults=link_faults(self.trace),
            mesh=dict(header.get("mesh") or {}),
        )
        computes = [call for call in self.rows if call.op == "compute"]
        untimed = sum(call.posted_ns >= 0 and call.finished_ns < 0 for call in computes)
        return RebuiltProgram(program, np.array(kept, dtype=np.bool_), untimed)

    def _calls_by_rank(self, rows_by_rank: Sequence[Sequence[int]]) -> list[list[TraceCall]]:
        return [[self.rows[row] for row in rows] for rows in rows_by_rank]

    # --- one rank ---
    def _rank_code(self, rank: int, rows: Sequence[int]) -> tuple[SharedCode, list[bool]]:
        """The code of a rank, and which of its rows are rows of the trace."""
        state = _RankBuildState(CodeBuilder(self.tables, [rank]))
        ended_by = requests_ended_by([self.rows[row] for row in rows])
        for position, requests in ended_by.items():
            state.ended_at.update(dict.fromkeys(requests, position))
        for first, *parts in self._batches(rows):
            if any(self._operation(self.rows[part]).kind != "p2p" for part in parts):
                raise UsageError(
                    f"the trace has a part of a batch that is not a message (rank {rank})",
                    "write the trace again",
                )
            call = self.rows[first]
            self._add_pause(state, call)
            code_position = state.code_position[call.position] = len(state.builder.calls)
            ended = [
                code_position - state.code_position[request]
                for request in ended_by.get(call.position, ())
                if request in state.code_position
            ]
            state.builder.append(self._code_call(state, first, parts, ended))
            state.kept += [True] * (1 + len(parts))
        return state.builder.finish(), state.kept

    def _batches(self, rows: Sequence[int]) -> list[list[int]]:
        """Each call with the parts of its batch, by rows of the trace."""
        batches: list[list[int]] = []
        for row in rows:
            if self.rows[row].part >= 0 and batches:
                batches[-1].append(row)
            else:
                batches.append([row])
        return batches

    def _add_pause(self, state: _RankBuildState, call: TraceCall) -> None:
        """Add a pause for what the host did before this call, and note when the call returned.

        In a real run the assigns become pauses too, because their numbers are unknown.
        """
        pause_ns = 0
        if call.posted_ns >= 0:
            # The time before the first call is no pause between calls, so it is not scaled.
            factor = self.scale.gaps if state.code_position else 1
            pause_ns = round((call.posted_ns - state.free_ns) * factor)
        if pause_ns > (_UNRECORDED_PAUSE_NS if self.real else 0):
            site = self.tables.site(CallSite("", 0, 0, "sleep"))
            draft = CallDraft(OPERATIONS["sleep"], site, 0, fields={"time_ns": pause_ns})
            state.builder.append(state.builder.make(draft))
            state.kept.append(False)

        if self.real:
            counts_as_pause = call.op == "assign"
        else:
            # Issuing a request took the host's time, of which the simulator knows nothing.
            counts_as_pause = call.handle == call.position
        if self.recorded and counts_as_pause:
            state.free_ns = call.posted_ns
        else:
            state.free_ns = max(call.returned_ns, state.free_ns)

    def _code_call(
        self, state: _RankBuildState, row: int, parts: Sequence[int], ended: Sequence[int]
    ) -> CodeCall:
        """The call of a row; equal calls of a rank share one object, to keep programs small.

        ``ended``: distances to the requests that it ends.
        """
        call = self.rows[row]
        is_wait = self._operation(call).kind == "wait"
        is_async = call.handle == call.position and not is_wait
        ends_itself = call.ended_by == call.position
        memory = self._memory(state, call, is_async)
        key = (
            memory,
            *_call_key(call),
            call.group,
            call.args,
            call.name,
            call.place,
            is_async,
            ends_itself,
            tuple(ended),
            self._local_duration_ns(call),
            self.senders.get(row),
            self.trace["group"][row],
            tuple(self._part_key(part) for part in parts),
        )
        known = state.calls_by_key.get(key)
        if known is not None:
            return known
        draft = self._draft(row, memory)
        draft.is_async = is_async
        draft.parts = tuple(
            state.builder.make(self._draft(part, f"{memory}.{number}" if memory else ""))
            for number, part in enumerate(parts)
        )
        requests = CallRequests(
            waits=tuple(ended) if is_wait else (),
            drops=() if is_wait else tuple(ended),
            handled=is_async and not ends_itself,
        )
        made = state.calls_by_key[key] = state.builder.make(draft, requests)
        return made

    def _memory(self, state: _RankBuildState, call: TraceCall, is_async: bool) -> str:
        """The name of the memory in which a call works; that of ended requests is used again.

        Empty (new memory at each call) if names are not wanted, and for a request that no call
        ends.
        """
        is_never_ended = state.ended_at.get(call.position, -1) <= call.position
        if not self.named or (is_async and is_never_ended):
            return ""
        open_requests = {
            request: number
            for request, number in state.memory_number.items()
            if state.ended_at[request] >= call.position
        }
        used = set(open_requests.values())
        number = next(k for k in range(len(used) + 1) if k not in used)
        if is_async:
            open_requests[call.position] = number
        state.memory_number = open_requests
        return f"memory {number}"

    def _part_key(self, row: int) -> Hashable:
        return (
            *_call_key(self.rows[row]),
            self.senders.get(row),
            int(self.trace["group"][row]),
        )

    def _operation(self, call: TraceCall) -> type[Operation]:
        if call.op not in OPERATIONS:
            raise UsageError(
                f"the trace has an operation `{call.op}`, which distsim does not know",
                "`distsim explain` lists them",
            )
        return OPERATIONS[call.op]

    def _local_duration_ns(self, call: TraceCall) -> int:
        """The duration of a local call; 0 for other calls.

        For a compute that a transfer slowed down, the duration without it, because the replay slows
        it down again.
        """
        is_local = self._operation(call).kind == "local"
        if not is_local or min(call.started_ns, call.finished_ns) < 0:
            return 0
        duration_ns: int = call.finished_ns - call.started_ns
        if "alone_ns" in (call.args or ""):  # cheaper than parsing the arguments of every call
            alone_ns = json.loads(call.args).get("alone_ns")
            if alone_ns is not None:
                duration_ns = alone_ns
        return duration_ns if call.op == "sleep" else round(duration_ns * self.scale.compute)

    def _local_cost(self, call: TraceCall, args: dict[str, Any]) -> dict[str, object]:
        """The work of a local call if that explains its duration, otherwise its duration.

        The cluster of the replay then decides how long the work takes. A duration that a fault,
        chance or `scale` changed, or that was measured, is kept.
        """
        duration_ns = self._local_duration_ns(call)
        work = args.get("work")
        if not work or self.recorded or self.scale.compute != 1:
            return {"time_ns": duration_ns}
        if call.finished_ns >= 0 and duration_ns != self._predicted_ns(call.args):
            return {"time_ns": duration_ns}
        return {"work": tuple(tuple(kernels) for kernels in work)}

    def _predicted_ns(self, args: str) -> int | None:
        """The duration of work by the costs of the trace; None if these are not in the trace."""
        if self.cost is None:
            return None
        known = self.predicted_ns.get(args)
        if known is None:
            kernels = [KernelWork(*row) for row in json.loads(args)["work"]]
            known = self.predicted_ns[args] = self.cost.work_ns(kernels)
        return known

    # --- one call ---
    def _draft(self, row: int, memory: str) -> CallDraft:
        call = self.rows[row]
        operation = self._operation(call)
        args = json.loads(call.args or "{}")
        place = call.place
        site = self.tables.site(CallSite(place.file, place.line, place.column, call.op))
        group = int(self.trace["group"][row]) + self.group_offset
        draft = CallDraft(operation, site, group)
        if operation.kind in ("p2p", "remote"):
            peer = self.senders.get(row, call.peer)
            draft.peer = -1 if peer is None else peer
            draft.tag = call.tag
            draft.is_async = operation.nonblocking
            if not operation.signals:
                buffer = buffer_of(memory, "in", (element_count(call),), call.dtype)
                draft.fields = {"inputs": (buffer,), "outputs": (buffer,)}
        elif operation.kind == "collective":
            draft.fields = collective_fields(
                operation, call, args, self.tables.groups[group], memory
            )
        elif operation.kind == "group":
            draft.fields = {"name": call.name}
            draft.fields |= {key: _as_tuple(args[key]) for key in _GROUP_FIELDS if key in args}
        elif operation.kind == "local":
            draft.fields = {"name": call.name, **self._local_cost(call, args)}
            draft.fields |= {key: args[key] for key in _LOCAL_FIELDS if key in args}
        if "queue" in args and operation.kind != "local":
            draft.fields["queue"] = args["queue"]
        return draft


def _call_key(call: TraceCall) -> tuple[object, ...]:
    """What distinguishes calls in general: op, group, peer, tag, nbytes, dtype and reduce_op."""
    return call[1:8]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
