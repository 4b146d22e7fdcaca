"""Rebuilds a program from a trace: each rank's calls in order, with the recorded durations.

A compute takes as long as in the trace, and a pause of the host between two calls becomes a
`sleep`. Communication gets no durations: the simulator predicts them. So a replay under the
hardware model of the recording reproduces the run, and under another one it predicts the run there.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import DTYPE_BYTES, RankGroup
from distsim.operations.registry import OPERATIONS
from distsim.program.assemble import CodeBuilder
from distsim.program.call_builder import CallDraft, CallRequests
from distsim.program.code import BufferVector, CallSite, CodeCall, SharedCode
from distsim.program.model import LinkFault, Program, RankFault
from distsim.program.program_tables import ProgramTables
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
    """The number of machines in the run of a trace."""
    return int(trace.header.get("nodes") or 1)


class _ProgramBuilder:
    """Builds one program; see `rebuild_program` for the parameters.

    ``group_offset``: what to add to a group id of the trace to get the one of the program.
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
        self.group_offset = self._add_groups()
        self.senders = self._senders() if resolve else {}

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
                f"the trace has a call in iteration {calls['iteration'].max()}",
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
        program = Program(
            name=str(header.get("name") or "replay"),
            file=str(header.get("file") or ""),
            world_size=self.size,
            nodes=self.nodes,
            local_size=-(-self.size // self.nodes),
            backend=self.backend,
            options=dict(header.get("options") or {}),
            sites=self.tables.sites,
            groups=self.tables.groups,
            tensors={},
            codes=codes,
            code_of=list(range(self.size)),
            row_of=[0] * self.size,
            findings=self.tables.findings(),
            faults=self._rank_faults(codes, rows_by_rank),
            link_faults=self._link_faults(),
            mesh=dict(header.get("mesh") or {}),
        )
        computes = [call for call in self.rows if call.op == "compute"]
        untimed = sum(call.posted_ns >= 0 and call.finished_ns < 0 for call in computes)
        return RebuiltProgram(program, np.array(kept, dtype=np.bool_), untimed)

    def _link_faults(self) -> tuple[LinkFault, ...]:
        return tuple(
            LinkFault(link, tuple(nodes), factor)
            for link, nodes, factor in self.trace.header.get("link_faults") or ()
        )

    def _rank_faults(
        self, codes: Sequence[SharedCode], rows_by_rank: Sequence[Sequence[int]]
    ) -> tuple[RankFault, ...]:
        """Faults that end ranks as in the trace."""
        faults = []
        for rank, status, at_ns in self.trace.header.get("ends") or ():
            if status == "absent":
                faults.append(RankFault(rank, "absent", at_ns=None))
            elif status == "killed":
                faults.append(self._kill_fault(rank, at_ns, codes[rank], rows_by_rank[rank]))
        return tuple(faults)

    def _kill_fault(
        self, rank: int, at_ns: int, code: SharedCode, rows: Sequence[int]
    ) -> RankFault:
        """A rank that died between two calls dies there again; inside a call, at the same time."""
        calls = [call for call in (self.rows[row] for row in rows) if call.part < 0]
        posted = [call for call in calls if call.posted_ns >= 0]
        if posted and posted[-1].returned_ns < 0 and posted[-1].posted_ns == at_ns:
            posted.pop()  # it died at the very beginning of this call
        if any(call.returned_ns < 0 for call in posted):
            return RankFault(rank, "kill", at_ns=max(at_ns, 0))
        calls_not_posted = len(calls) - len(posted)
        return RankFault(rank, "kill", position=len(code.calls) - calls_not_posted)

    def _add_groups(self) -> int:
        """Add the trace's groups to the program's tables; return the offset of their ids.

        Group 0 of a program is always the world. If the trace's first group is another one, all ids
        shift by one.
        """
        header_groups = self.trace.header.get("groups") or []
        world = tuple(range(self.size))
        has_world_first = header_groups and tuple(header_groups[0][1]) == world
        offset = 0 if has_world_first else 1
        options = self.trace.header.get("group_options") or {}
        ranks_in_calls = self._ranks_in_calls()
        for number, name in enumerate(self.trace.tables.get("group", ())):
            if number + offset == 0:
                continue
            if number < len(header_groups):
                ranks = tuple(header_groups[number][1])
            else:
                ranks = tuple(sorted(ranks_in_calls[number]))
            own_options = options.get(str(number), {})
            backend, timeout_ns = own_options.get("backend"), own_options.get("timeout_ns")
            self.tables.groups.append(RankGroup(number + offset, name, ranks, backend, timeout_ns))
        return offset

    def _ranks_in_calls(self) -> dict[int, set[int]]:
        """For each group, the ranks and peers of its calls."""
        ranks_of: dict[int, set[int]] = defaultdict(set)
        columns = [self.trace[name].tolist() for name in ("rank", "group", "peer")]
        for rank, group, peer in zip(*columns, strict=True):
            ranks_of[group].add(rank)
            if peer >= 0:
                ranks_of[group].add(peer)
        return ranks_of

    def _senders(self) -> dict[int, int]:
        """For each receive that met a message, by row: the sender."""
        sender_of_match = {
            call.match: call.rank
            for call in self.rows
            if call.match >= 0 and call.op in ("send", "isend")
        }
        receives = [
            (row, call) for row, call in enumerate(self.rows) if call.op in ("recv", "irecv")
        ]
        return {
            row: sender_of_match[call.match]
            for row, call in receives
            if call.match in sender_of_match
        }

    # --- one rank ---
    def _rank_code(self, rank: int, rows: Sequence[int]) -> tuple[SharedCode, list[bool]]:
        """The code of a rank, and which of its rows are rows of the trace."""
        state = _RankBuildState(CodeBuilder(self.tables, [rank]))
        requests_ended_by = self._requests_ended_by(rows)
        for position, requests in requests_ended_by.items():
            state.ended_at.update(dict.fromkeys(requests, position))
        for first, *parts in self._batches(rows):
            if any(self._operation(self.rows[part]).kind != "p2p" for part in parts):
                raise UsageError(
                    f"the trace has a part of a batch that is no message (rank {rank})",
                    "write the trace again",
                )
            call = self.rows[first]
            self._add_pause(state, call)
            code_position = state.code_position[call.position] = len(state.builder.calls)
            ended = [
                code_position - state.code_position[request]
                for request in requests_ended_by.get(call.position, ())
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

    def _requests_ended_by(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """The requests that each call ends, by positions in the trace.

        If the trace has no column ``ended_by``, the times of the waits show it.
        """
        found: dict[int, list[int]] = defaultdict(list)
        calls = [call for call in (self.rows[row] for row in rows) if call.part < 0]
        waits = [call for call in calls if call.op == "wait"]
        requests = [call for call in calls if call.handle == call.position]
        stated = [call for call in requests if call.ended_by > call.position]
        for call in stated:
            found[call.ended_by].append(call.position)
        for wait in waits:
            args = json.loads(wait.args) if wait.args else {}
            if "waits" in args:
                found[wait.position] = [wait.position - distance for distance in args["waits"]]
        if stated:
            return found
        for wait in waits:
            for request in requests:
                if request.position < wait.position and _is_ended_by_wait(request, wait):
                    found[wait.position].append(request.position)
        return found

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
                buffer = _buffer(memory, "in", (_numel(call),), call.dtype)
                draft.fields = {"inputs": (buffer,), "outputs": (buffer,)}
        elif operation.kind == "collective":
            draft.fields = self._collective_fields(
                operation, call, args, self.tables.groups[group], memory
            )
        elif operation.kind == "group":
            draft.fields = {"name": call.name}
            draft.fields |= {key: _as_tuple(args[key]) for key in _GROUP_FIELDS if key in args}
        elif operation.kind == "local":
            draft.fields = {"name": call.name, "time_ns": self._local_duration_ns(call)}
            draft.fields |= {key: args[key] for key in _LOCAL_FIELDS if key in args}
        if "queue" in args and operation.kind != "local":
            draft.fields["queue"] = args["queue"]
        return draft

    def _collective_fields(
        self,
        operation: type[Operation],
        call: TraceCall,
        args: Mapping[str, Any],
        group: RankGroup,
        memory: str,
    ) -> dict[str, object]:
        """The fields of a collective, with buffers that have the recorded number of bytes."""
        fields: dict[str, object] = {
            key: args[key] for key in ("timeout_ns", "wait_all_ranks") if key in args
        }
        if operation.root_field is not None:
            fields["root"] = call.peer if call.peer is not None else 0
        if operation.reduces:
            fields["reduce_op"] = call.reduce_op or "sum"
        if operation.gives == "none":
            return fields
        numel = _numel(call)
        if operation.coalesces is not None:
            numels = args.get("coalesced") or [numel]
            return fields | _coalesced_buffers(operation, numels, group.size, call.dtype, memory)
        if "tensor" in operation.model_fields:
            buffers = (_buffer(memory, "in", (numel,), call.dtype),)
            return {**fields, "inputs": buffers, "outputs": buffers}
        takes_list = not call.op.endswith(("_tensor", "_single"))
        for side in ("input", "output"):
            own_parts = args.get(f"{side}_parts")
            if own_parts is not None and not takes_list and not _is_one(operation, side):
                fields[f"{side}_splits"] = tuple(own_parts)
            fields[f"{side}s"] = tuple(
                _buffer(memory, f"{side} {number}", shape, call.dtype)
                for number, shape in enumerate(
                    _buffer_shapes(operation, call, args, group, side, takes_list)
                )
            )
        return fields


def _call_key(call: TraceCall) -> tuple[object, ...]:
    """What distinguishes calls in general: op, group, peer, tag, nbytes, dtype and reduce_op."""
    return call[1:8]


def _is_ended_by_wait(request: TraceCall, wait: TraceCall) -> bool:
    """The request was completed during the wait, or the wait names it."""
    is_during_wait = wait.posted_ns <= request.waited_ns <= wait.returned_ns
    return (request.waited_ns >= 0 and is_during_wait) or request.position == wait.handle


def _is_one(operation: type[Operation], side: str) -> bool:
    """A rank has a single buffer on this side, in which it has no parts for the other ranks."""
    return bool(getattr(operation, f"{side}_parts") == "one")


def _buffer_shapes(
    operation: type[Operation],
    call: TraceCall,
    args: Mapping[str, Any],
    group: RankGroup,
    side: str,
    takes_list: bool,
) -> list[tuple[int, ...]]:
    """The shapes of a collective's buffers on one side.

    ``args`` has the sizes of parts if they are unequal. Otherwise the larger side has ``nbytes``,
    divided evenly among the ranks.
    """
    numel = _numel(call)
    if _is_one(operation, side):
        other_parts = args.get("output_parts" if side == "input" else "input_parts")
        if other_parts is None:
            return [(numel // group.size,)]
        return [(other_parts[group.group_rank(call.rank)],)]
    own_parts = args.get(f"{side}_parts")
    if own_parts is None:
        return [(group.size, numel // group.size)] if takes_list else [(numel,)]
    if takes_list:
        return [(part,) for part in own_parts]
    return [(sum(own_parts),)]


def _coalesced_buffers(
    operation: type[Operation], numels: Sequence[int], ranks: int, dtype: str, memory: str
) -> dict[str, object]:
    """The buffers of a coalesced launch; ``numels``: elements of the larger side of each part."""
    has_single_tensor = "tensor" in operation.model_fields
    sides: dict[str, object] = {}
    for side in ("input", "output"):
        is_smaller = not has_single_tensor and _is_one(operation, side)
        sizes = [numel // ranks if is_smaller else numel for numel in numels]
        name = "in" if has_single_tensor else side
        sides[f"{side}s"] = tuple(
            _buffer(memory, f"{name} {number}", (size,), dtype) for number, size in enumerate(sizes)
        )
    return sides


def _buffer(memory: str, side: str, shape: tuple[int, ...], dtype: str) -> BufferVector:
    """A buffer; it gets a name only if its memory has one."""
    name = f"{memory} {side} {dtype}{list(shape)}" if memory else ""
    return BufferVector(name, 0, shape, dtype)


def _numel(call: TraceCall) -> int:
    if call.dtype not in DTYPE_BYTES:
        raise UsageError(
            f"the trace has a {call.op} of dtype `{call.dtype}`, which distsim does not know",
            "see `distsim explain`",
        )
    return call.nbytes // DTYPE_BYTES[call.dtype]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
