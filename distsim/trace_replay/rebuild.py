"""A program made of a trace: each rank's calls in order, with the messages, groups, requests and
durations that the trace tells.
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

#: How a trace says that a rank ended, and the fault that ends it so again.
_FAULT_OF_STATUS = {"killed": "kill", "absent": "absent"}
#: Fields of a call that are handed on as the trace has them.
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
#: A trace with more iterations is taken for a damaged one.
_MAX_ITERATIONS: Final = 1 << 24
#: What a process takes between two calls of a real run by itself: shorter pauses of a trace come
#: again without being asked for.
_UNRECORDED_PAUSE_NS: Final = 20_000


class ReplayScale(NamedTuple):
    """What durations are multiplied by: ``compute`` those of compute, ``gaps`` the host's own time
    between its calls.
    """

    compute: float = 1.0
    gaps: float = 1.0


UNSCALED: Final = ReplayScale()


@dataclass(frozen=True)
class RebuiltProgram:
    """``kept``: which rows of a run of the program are rows of the trace; the others are gaps
    between calls.

    ``untimed``: how many computes of the trace came to no end, and so last no time.
    """

    program: Program
    kept: NDArray[np.bool_]
    untimed: int = 0


@dataclass
class _RankBuildState:
    """The state while one rank's code is built. ``ended``: positions of requests by the position of
    the call that ends them.
    """

    builder: CodeBuilder
    index: dict[int, int] = field(
        default_factory=dict
    )  # position in the trace -> position in the code
    kept: list[bool] = field(default_factory=list)
    known: dict[Hashable, CodeCall] = field(default_factory=dict)
    free_ns: int = 0  # when the host came out of its last call
    ends: dict[int, int] = field(
        default_factory=dict
    )  # position in the trace of a request -> of the call that ended it
    held: dict[int, int] = field(
        default_factory=dict
    )  # position in the trace of a request -> number of its memory


def rebuild_program(
    trace: Trace,
    *,
    backend: str,
    scale: ReplayScale = UNSCALED,
    resolve: bool = True,
    real: bool = False,
    named: bool = False,
) -> RebuiltProgram:
    """The program that a trace tells of. Raises UsageError for an operation or dtype that distsim
    does not know.

    A compute lasts as long as it did. What a host did between two calls becomes a pause of its own.
    With ``resolve`` a receive from any source names the rank whose message it took. A rank that was
    killed, or never started, is so again.

    ``real``: pauses are as a run on torch.distributed needs them, where processes take time by
    themselves to issue a request and between two calls. ``named``: buffers have names, so that
    their memory is there before the run; no two requests under way at once share any.
    """
    return _ProgramBuilder(trace, backend, scale, resolve, real, named).build()


def node_count(trace: Trace) -> int:
    """Machines that the trace is of."""
    return int(trace.header.get("nodes") or 1)


class _ProgramBuilder:
    def __init__(
        self, trace: Trace, backend: str, scale: ReplayScale, resolve: bool, real: bool, named: bool
    ) -> None:
        self.trace, self.backend, self.scale, self.real, self.named = (
            trace,
            backend,
            scale,
            real,
            named,
        )
        self.size, self.nodes = trace.world_size, node_count(trace)
        self._check()
        self.recorded = trace.header.get("source") == "recorded"
        self.shelf = ProgramTables(self.size, backend)
        self.rows = list(trace.rows())
        self.offset = self._groups()
        self.partner = self._partners() if resolve else {}

    def _check(self) -> None:
        """Raises UsageError for what no run has."""
        header, calls = self.trace.header, self.trace
        named = [rank for _, ranks in header.get("groups") or () for rank in ranks] + [
            end[0] for end in header.get("ends") or ()
        ]
        if not all(type(rank) is int and 0 <= rank < self.size for rank in named):
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
        by_rank: list[list[int]] = [[] for _ in range(self.size)]
        for i, call in enumerate(self.rows):
            by_rank[call.rank].append(i)
        codes, kept = [], []
        for rank, rows in enumerate(by_rank):
            code, mask = self._code(rank, rows)
            codes.append(code)
            kept += mask
        header = self.trace.header
        links = tuple(
            LinkFault(link, tuple(nodes), factor)
            for link, nodes, factor in header.get("link_faults") or ()
        )
        faults = tuple(
            self._fault(rank, _FAULT_OF_STATUS[status], at_ns, codes[rank], by_rank[rank])
            for rank, status, at_ns in header.get("ends") or ()
            if status in _FAULT_OF_STATUS
        )
        program = Program(
            name=str(header.get("name") or "replay"),
            file=str(header.get("file") or ""),
            world_size=self.size,
            nodes=self.nodes,
            local_size=-(-self.size // self.nodes),
            backend=self.backend,
            options=dict(header.get("options") or {}),
            sites=self.shelf.sites,
            groups=self.shelf.groups,
            tensors={},
            codes=codes,
            code_of=list(range(self.size)),
            row_of=[0] * self.size,
            findings=self.shelf.findings(),
            faults=faults,
            link_faults=links,
            mesh=dict(header.get("mesh") or {}),
        )
        untimed = sum(
            c.op == "compute" and c.posted_ns >= 0 and c.finished_ns < 0 for c in self.rows
        )
        return RebuiltProgram(program, np.array(kept, dtype=np.bool_), untimed)

    def _fault(
        self, rank: int, kind: str, at_ns: int, code: SharedCode, rows: Sequence[int]
    ) -> RankFault:
        """A rank that died between two calls dies there; one that died in a call, at that time."""
        calls = [call for call in (self.rows[i] for i in rows) if call.part < 0]
        made = [call for call in calls if call.posted_ns >= 0]
        if made and made[-1].returned_ns < 0 and made[-1].posted_ns == at_ns:
            made.pop()  # it came to this call and no further
        if kind != "kill" or any(call.returned_ns < 0 for call in made):
            return RankFault(rank, kind, at_ns=None if kind == "absent" else max(at_ns, 0))
        return RankFault(rank, kind, position=len(code.calls) - (len(calls) - len(made)))

    def _groups(self) -> int:
        """Fill the shelf with the trace's groups; returns what to add to a group number of the
        trace.
        """
        told = self.trace.header.get("groups") or []
        world = tuple(range(self.size))
        offset = 0 if told and tuple(told[0][1]) == world else 1
        seen: dict[int, set[int]] = defaultdict(set)
        for rank, group, peer in zip(
            *(self.trace[n].tolist() for n in ("rank", "group", "peer")), strict=True
        ):
            seen[group] |= {rank, peer} if peer >= 0 else {rank}
        options = self.trace.header.get("group_options") or {}
        for number, name in enumerate(self.trace.tables.get("group", ())):
            ranks = tuple(told[number][1]) if number < len(told) else tuple(sorted(seen[number]))
            if number + offset:
                given = options.get(str(number), {})
                self.shelf.groups.append(
                    RankGroup(
                        number + offset, name, ranks, given.get("backend"), given.get("timeout_ns")
                    )
                )
        return offset

    def _partners(self) -> dict[int, int]:
        """For each receive that met a message, by row: the sender."""
        senders: dict[int, int] = {}
        for call in self.rows:
            if call.match >= 0 and call.op in ("send", "isend"):
                senders[call.match] = call.rank
        return {
            i: senders[c.match]
            for i, c in enumerate(self.rows)
            if c.op in ("recv", "irecv") and c.match in senders
        }

    # --- one rank ---
    def _code(self, rank: int, rows: Sequence[int]) -> tuple[SharedCode, list[bool]]:
        me = _RankBuildState(CodeBuilder(self.shelf, [rank]))
        ended = self._ended(rows)
        me.ends = {request: by for by, requests in ended.items() for request in requests}
        pieces: list[list[int]] = []
        for i in rows:
            if self.rows[i].part >= 0 and pieces:
                pieces[-1].append(i)
            else:
                pieces.append([i])
        for first, *parts in pieces:
            call = self.rows[first]
            if any(self._row(self.rows[i]).kind != "p2p" for i in parts):
                raise UsageError(
                    f"the trace has a part of a batch that is no message (rank {rank})",
                    "write the trace again",
                )
            self._gap(me, call)
            here = me.index[call.position] = len(me.builder.calls)
            spent = [here - me.index[p] for p in ended.get(call.position, ()) if p in me.index]
            me.builder.append(self._call(me, first, parts, spent))
            me.kept += [True] * (1 + len(parts))
        return me.builder.finish(), me.kept

    def _ended(self, rows: Sequence[int]) -> dict[int, list[int]]:
        """Requests by the position of the call that ended them. Where a trace does not say so, the
        times of waits tell.
        """
        found: dict[int, list[int]] = defaultdict(list)
        calls = [self.rows[i] for i in rows if self.rows[i].part < 0]
        requests = [c for c in calls if c.handle == c.position]
        told = [c for c in requests if c.ended_by > c.position]
        for call in told:
            found[call.ended_by].append(call.position)
        for wait in (c for c in calls if c.op == "wait" and c.args):
            if "waits" in (args := json.loads(wait.args)):
                found[wait.position] = [wait.position - back for back in args["waits"]]
        if not told:
            for wait in (c for c in calls if c.op == "wait"):
                for call in requests:
                    met = (
                        call.waited_ns >= 0 and wait.posted_ns <= call.waited_ns <= wait.returned_ns
                    )
                    if call.position < wait.position and (met or call.position == wait.handle):
                        found[wait.position].append(call.position)
        return found

    def _gap(self, me: _RankBuildState, call: TraceCall) -> None:
        """What the host did before this call, as a pause: for real also the assigns, of which no
        numbers are known.
        """
        gap_ns = (
            round((call.posted_ns - me.free_ns) * (self.scale.gaps if me.index else 1))
            if call.posted_ns >= 0
            else 0
        )
        if gap_ns > (_UNRECORDED_PAUSE_NS if self.real else 0):
            site = self.shelf.site(CallSite("", 0, 0, "sleep"))
            me.builder.append(
                me.builder.make(CallDraft(OPERATIONS["sleep"], site, 0, fields={"time_ns": gap_ns}))
            )
            me.kept.append(False)
        if self.recorded and (call.op == "assign" if self.real else call.handle == call.position):
            me.free_ns = (
                call.posted_ns
            )  # issuing a request took the host's time, which the simulator knows nothing of
        else:
            me.free_ns = max(call.returned_ns, me.free_ns)

    def _call(
        self, me: _RankBuildState, row: int, parts: Sequence[int], spent: Sequence[int]
    ) -> CodeCall:
        call = self.rows[row]
        kind = self._row(call).kind
        is_async = call.handle == call.position and kind != "wait"
        memory = self._memory(me, call, is_async)
        key = (
            memory,
            *call[1:8],
            call.group,
            call.args,
            call.name,
            call.place,
            is_async,
            call.ended_by == call.position,
            tuple(spent),
            self._lasted(call),
            self.partner.get(row),
            self.trace["group"][row],
            tuple(self._part_key(p) for p in parts),
        )
        if key in me.known:
            return me.known[key]
        draft = self._draft(row, memory)
        draft.is_async = is_async
        draft.parts = tuple(
            me.builder.make(self._draft(p, f"{memory}.{k}" if memory else ""))
            for k, p in enumerate(parts)
        )
        waits, drops = (tuple(spent), ()) if kind == "wait" else ((), tuple(spent))
        requests = CallRequests(
            waits=waits, drops=drops, handled=is_async and call.ended_by != call.position
        )
        found = me.known[key] = me.builder.make(draft, requests)
        return found

    def _memory(self, me: _RankBuildState, call: TraceCall, is_async: bool) -> str:
        """The name of the memory that a call works in; that of requests which have ended is used
        again.

        Empty (new memory at each call) where nobody asks for names, and for a request that nobody
        waits for.
        """
        if not self.named or (is_async and me.ends.get(call.position, -1) <= call.position):
            return ""
        for position in [p for p in me.held if me.ends[p] < call.position]:
            del me.held[position]
        number = next(k for k in range(len(me.held) + 1) if k not in me.held.values())
        if is_async:
            me.held[call.position] = number
        return f"memory {number}"

    def _part_key(self, row: int) -> Hashable:
        return (*self.rows[row][1:8], self.partner.get(row), int(self.trace["group"][row]))

    def _row(self, call: TraceCall) -> type[Operation]:
        if call.op not in OPERATIONS:
            raise UsageError(
                f"the trace has an operation `{call.op}`, which distsim does not know",
                "`distsim explain` lists them",
            )
        return OPERATIONS[call.op]

    def _lasted(self, call: TraceCall) -> int:
        """Of a local call; of one that a transfer slowed down, what it takes alone, for the replay
        slows it down again.
        """
        if self._row(call).kind != "local" or min(call.started_ns, call.finished_ns) < 0:
            return 0
        alone_ns = (
            json.loads(call.args).get("alone_ns") if "alone_ns" in (call.args or "") else None
        )
        lasted = call.finished_ns - call.started_ns if alone_ns is None else alone_ns
        return lasted if call.op == "sleep" else round(lasted * self.scale.compute)

    # --- one call ---
    def _draft(self, row: int, memory: str) -> CallDraft:
        call = self.rows[row]
        op = self._row(call)
        args = json.loads(call.args or "{}")
        site = self.shelf.site(
            CallSite(call.place.file, call.place.line, call.place.column, call.op)
        )
        group = int(self.trace["group"][row]) + self.offset
        draft = CallDraft(op, site, group)
        if op.kind in ("p2p", "remote"):
            peer = self.partner.get(row, call.peer)
            draft.peer, draft.tag, draft.is_async = (
                -1 if peer is None else peer,
                call.tag,
                op.nonblocking,
            )
            if not op.signals:
                buffer = _buffer(memory, "in", (_numel(call),), call.dtype)
                draft.fields = {"inputs": (buffer,), "outputs": (buffer,)}
        elif op.kind == "collective":
            draft.fields = self._collective(op, call, args, self.shelf.groups[group], memory)
        elif op.kind == "group":
            draft.fields = {
                "name": call.name,
                **{k: _as_tuple(args[k]) for k in _GROUP_FIELDS if k in args},
            }
        elif op.kind == "local":
            draft.fields = {
                "name": call.name,
                "time_ns": self._lasted(call),
                **{k: args[k] for k in _LOCAL_FIELDS if k in args},
            }
        if "queue" in args and op.kind != "local":
            draft.fields["queue"] = args["queue"]
        return draft

    def _collective(
        self,
        op: type[Operation],
        call: TraceCall,
        args: Mapping[str, Any],
        group: RankGroup,
        memory: str,
    ) -> dict[str, object]:
        fields: dict[str, object] = {
            k: args[k] for k in ("timeout_ns", "wait_all_ranks") if k in args
        }
        if op.root_field is not None:
            fields["root"] = call.peer if call.peer is not None else 0
        if op.reduces:
            fields["reduce_op"] = call.reduce_op or "sum"
        if op.gives == "none":
            return fields
        n, numel, listed = group.size, _numel(call), not call.op.endswith(("_tensor", "_single"))
        if op.coalesces is not None:
            return fields | _coalesced_buffers(
                op, args.get("coalesced") or [numel], n, call.dtype, memory
            )
        if "tensor" in op.model_fields:
            fields["inputs"] = fields["outputs"] = (_buffer(memory, "in", (numel,), call.dtype),)
            return fields
        for side, other in (("input", "output"), ("output", "input")):
            each, theirs = args.get(f"{side}_parts"), args.get(f"{other}_parts")
            shapes: list[tuple[int, ...]] = [(n, numel // n)] if listed else [(numel,)]
            if getattr(op, f"{side}_parts") == "one":
                shapes = [(numel // n if theirs is None else theirs[group.group_rank(call.rank)],)]
            elif each is not None:
                shapes = [(k,) for k in each] if listed else [(sum(each),)]
                fields |= {} if listed else {f"{side}_splits": tuple(each)}
            fields[f"{side}s"] = tuple(
                _buffer(memory, f"{side} {k}", shape, call.dtype) for k, shape in enumerate(shapes)
            )
        return fields


def _coalesced_buffers(
    op: type[Operation], numels: Sequence[int], n: int, dtype: str, memory: str
) -> dict[str, object]:
    """The buffers of a coalesced launch: ``numels`` are elements of the longer side of each
    part.
    """
    sides: dict[str, object] = {}
    for side in ("input", "output"):
        short = "tensor" not in op.model_fields and getattr(op, f"{side}_parts") == "one"
        sizes = [numel // n if short else numel for numel in numels]
        name = "in" if "tensor" in op.model_fields else side
        sides[f"{side}s"] = tuple(
            _buffer(memory, f"{name} {k}", (size,), dtype) for k, size in enumerate(sizes)
        )
    return sides


def _buffer(memory: str, side: str, shape: tuple[int, ...], dtype: str) -> BufferVector:
    return BufferVector(f"{memory} {side} {dtype}{list(shape)}" if memory else "", 0, shape, dtype)


def _numel(call: TraceCall) -> int:
    if call.dtype not in DTYPE_BYTES:
        raise UsageError(
            f"the trace has a {call.op} of dtype `{call.dtype}`, which distsim does not know",
            "see `distsim explain`",
        )
    return call.nbytes // DTYPE_BYTES[call.dtype]


def _as_tuple(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
