"""Writes a trace in Chrome's trace event format.

Perfetto (https://ui.perfetto.dev) and chrome://tracing open it. Format: "Trace Event Format"
(Chromium project). Times are microseconds.

Each machine is a process. Each of its ranks has a thread for its host and one for each queue. Work
that overlaps on a queue gets further threads, because the slices of one thread must nest.

- Calls of the host, waits and transfers are complete events (``X``).
- Arrows (``s``, ``t``, ``f``) lead from send to receive and through the members of a collective;
  their id is the id of the match.
- A call that never ended has a begin event (``B``) without an end event. The viewer draws it open
  to the end of the trace, in red, where an instant event (``i``) says how the run ended.
- A counter (``C``) of each machine shows the bytes that its ranks have in flight. A counter of each
  rank shows its memory by kind, if known (`distsim.output.trace_data.memory_over_time`).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from distsim.operations.one_sided import FIRST_SIGNAL_TAG, tag_text
from distsim.operations.registry import OPERATIONS
from distsim.output.text_layout import ranks_label
from distsim.output.trace_data.memory_over_time import MemoryProfile
from distsim.output.trace_data.partial_run import partial_run_text
from distsim.trace.model import Trace, TraceCall

HOST_TID: Final = 0
#: A reserved name of the format's colours.
_RED_NAME: Final = "terrible"
#: Events that are written at a time.
_EVENTS_PER_CHUNK: Final = 8192
_QUEUE_OPS: Final = ("compute", "assign")
_WAIT_OPS: Final = ("wait", "wait_stream", "synchronize")
_KIND_OF_OP: Final = {name: row.kind for name, row in OPERATIONS.items()}
_DIRECTION_OF_OP: Final = {name: row.direction for name, row in OPERATIONS.items()}


#: A queue, and which of the threads that share it.
QueueThread = tuple[str, int]
#: Thread ids of each rank, over all machines.
ThreadIds = dict[tuple[int, QueueThread], int]


JsonObject = dict[str, object]


class _ChromeSlice(NamedTuple):
    rank: int
    thread: QueueThread
    start_ns: int
    end_ns: int
    name: str
    category: str
    args: str  # as JSON
    open: bool = False


def chrome_trace_lines(trace: Trace, memory: Sequence[MemoryProfile] = ()) -> Iterator[str]:
    """The trace as JSON text in pieces, one event per line. The same trace gives the same text.

    ``memory``: the memory of ranks over time, for the counters.
    """
    ended = partial_run_text(trace)
    makespan = max(trace.makespan_ns, int(trace.header.get("until_ns") or 0) if ended else 0)
    events, threads = _trace_events(trace, memory, makespan)
    events += [_end_event(ended, makespan)] if ended else []
    events.sort(key=lambda event: event.order)
    facts = {
        key: trace.header[key]
        for key in ("name", "backend", "cluster", "outcome", "source")
        if key in trace.header
    }
    if ended:
        facts |= {
            "outcome": "partial" if facts.get("outcome") == "completes" else facts.get("outcome"),
            "ended": ended,
        }
    yield f'{{"displayTimeUnit": "ns", "otherData": {_json_text(facts)}, "traceEvents": [\n'
    lines = chain(
        map(_json_text, _metadata_events(trace, threads)), (event.text for event in events)
    )
    before = ""
    while some := list(islice(lines, _EVENTS_PER_CHUNK)):
        yield before + ",\n".join(some)
        before = ",\n"
    yield "\n]}\n"


def _trace_events(
    trace: Trace, memory: Sequence[MemoryProfile], makespan: int
) -> tuple[list[_ChromeEvent], ThreadIds]:
    slices: list[_ChromeSlice] = []
    work: list[tuple[TraceCall, int]] = []  # calls with a slice on a queue, and the slice's number
    for call in trace.rows():
        slices += _host_slices(call, makespan)
        piece = _queue_slice(trace, call, makespan)
        if piece is not None:
            work.append((call, len(slices)))
            slices.append(piece)
    _split_overlaps(slices)
    threads, machine = _thread_ids(slices), _machine_of_rank(trace)
    events = [
        *_flow_events(slices, work, threads, machine),
        *_in_flight_counters(slices, work, machine),
    ]
    events += (event for one in memory for event in _memory_counters(one, machine))
    return [*(_slice_event(piece, threads, machine) for piece in slices), *events], threads


class _ChromeEvent(NamedTuple):
    """An encoded event with its sort key: time, rank, thread, the longest first, phase.

    The event is stored as JSON text because that takes a fifth of the memory of a record.
    """

    order: tuple[int, int, int, int, str]
    text: str


def _encoded_event(order: tuple[int, int, int, int, str], event: JsonObject) -> _ChromeEvent:
    return _ChromeEvent(order, _json_text(event))


def _json_text(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- slices ---


def _host_slices(call: TraceCall, makespan: int) -> Iterator[_ChromeSlice]:
    """The host's slices: the call, and inside it the wait until its partners have arrived."""
    if call.posted_ns < 0 or call.op in _QUEUE_OPS or call.part >= 0:
        return
    blocked = call.returned_ns < 0
    end = max(makespan, call.posted_ns) if blocked else call.returned_ns
    if end <= call.posted_ns and not blocked:
        return
    name = f"{call.op} (never returns)" if blocked else call.op
    category = _host_category(call.op)
    yield _ChromeSlice(
        call.rank,
        ("host", 0),
        call.posted_ns,
        end,
        name,
        category,
        _json_text(_slice_args(call)),
        blocked,
    )
    if category != "call" or not _is_communication(call):
        return
    partners_missing = blocked and call.started_ns < 0
    partners_arrived_ns = call.started_ns if call.started_ns >= 0 else end
    if partners_missing or call.posted_ns < partners_arrived_ns <= end:
        yield _ChromeSlice(
            call.rank,
            ("host", 0),
            call.posted_ns,
            partners_arrived_ns,
            f"waits for {_partner_text(call)}",
            "wait",
            "{}",
            partners_missing,
        )


def _host_category(op: str) -> str:
    if op in _WAIT_OPS:
        return "wait"
    return "sleep" if op == "sleep" else "call"


def _queue_slice(trace: Trace, call: TraceCall, makespan: int) -> _ChromeSlice | None:
    """The slice of the work itself: a compute, a transfer, a member's share of a collective."""
    if call.started_ns < 0 or not _has_queue_work(call):
        return None
    never_ends = call.finished_ns < 0
    end = makespan if never_ends else call.finished_ns
    args = _slice_args(call)
    if call.op in _QUEUE_OPS:
        name, category = call.name or call.op, "compute"
        queue = call.queue or "compute"
    else:
        name = call.op + _direction_text(call)
        category = "collective" if _is_collective(call) else "message"
        queue = "comm" if call.queue in ("", "host") else call.queue
        args |= _bandwidth_args(trace, call, end)
    if never_ends:
        name += " (never ends)"
    return _ChromeSlice(
        call.rank,
        (queue, 0),
        call.started_ns,
        max(end, call.started_ns),
        name,
        category,
        _json_text(args),
        never_ends,
    )


def _has_queue_work(call: TraceCall) -> bool:
    """Whether a started call occupies a queue; two-sided communication does so once matched."""
    if call.op in _QUEUE_OPS:
        return True
    kind = _KIND_OF_OP.get(call.op)
    return kind == "remote" or (call.match >= 0 and kind in ("collective", "p2p"))


def _direction_text(call: TraceCall) -> str:
    direction = _DIRECTION_OF_OP.get(call.op)
    if direction == "send":
        return f" to {_partner_text(call)}"
    return f" from {_partner_text(call)}" if direction == "recv" else ""


def _is_collective(call: TraceCall) -> bool:
    return _KIND_OF_OP.get(call.op) == "collective"


def _is_communication(call: TraceCall) -> bool:
    return _KIND_OF_OP.get(call.op) in ("collective", "p2p", "remote", "group")


def _partner_text(call: TraceCall) -> str:
    if _DIRECTION_OF_OP.get(call.op) is None:
        return f"group {call.group}"
    return "any rank" if call.peer is None else f"rank {call.peer}"


def _slice_args(call: TraceCall) -> JsonObject:
    """What a click on a slice shows."""
    args: JsonObject = {}
    if call.place.file:
        args["place"] = f"{call.place.file}:{call.place.line}:{call.place.column}"
    if _is_communication(call):
        args |= {"group": call.group, "bytes": call.nbytes}
        optional = {"peer": call.peer, "dtype": call.dtype, "reduce_op": call.reduce_op}
        args |= {key: value for key, value in optional.items() if value not in (None, "")}
        if call.tag:
            kind_of_tag = tag_text(call.tag).split()[0]
            args[kind_of_tag] = call.tag % FIRST_SIGNAL_TAG
        if call.match >= 0:
            args["match"] = call.match
    return args | {"call": call.position, "iteration": call.iteration}


def _bandwidth_args(trace: Trace, call: TraceCall, end_ns: int) -> dict[str, float]:
    """algbw and busbw in GB/s, as nccl-tests defines them."""
    duration = end_ns - call.started_ns
    if duration <= 0 or call.nbytes <= 0:
        return {}
    algbw = call.nbytes / duration
    if not _is_collective(call):
        return {"algbw GB/s": round(algbw, 3)}
    busbw = algbw * OPERATIONS[call.op].busbw_factor(_group_size(trace, call))
    return {"algbw GB/s": round(algbw, 3), "busbw GB/s": round(busbw, 3)}


def _group_size(trace: Trace, call: TraceCall) -> int:
    """The size of the call's group; 1 if the trace does not list the group."""
    for name, ranks in trace.header.get("groups", ()):
        if name == call.group and call.rank in ranks:
            return len(ranks)
    return 1


def _split_overlaps(slices: list[_ChromeSlice]) -> None:
    """Move slices that overlap on a queue to further threads. The host's slices nest already."""
    order = sorted(range(len(slices)), key=lambda i: (slices[i].start_ns, slices[i].end_ns, i))
    busy: dict[
        tuple[int, str], list[tuple[int, int]]
    ] = {}  # (free from, number) of the threads in use
    free: dict[tuple[int, str], list[int]] = {}
    for i in order:
        piece = slices[i]
        queue = piece.thread[0]
        if queue == "host":
            continue
        key = (piece.rank, queue)
        used, spare = busy.setdefault(key, []), free.setdefault(key, [])
        while used and used[0][0] <= piece.start_ns:
            heapq.heappush(spare, heapq.heappop(used)[1])
        number = heapq.heappop(spare) if spare else len(used)
        heapq.heappush(used, (piece.end_ns, number))
        slices[i] = piece._replace(thread=(queue, number))


# --- events ---


def _machine_of_rank(trace: Trace) -> list[int]:
    """The machine of each rank."""
    local_size = max(int(trace.header.get("local_size") or trace.world_size), 1)
    return [rank // local_size for rank in range(trace.world_size)]


def _thread_ids(slices: Iterable[_ChromeSlice]) -> ThreadIds:
    """Thread ids: rank by rank the host, then its queues by name; each id once, whatever the
    machine.
    """
    return {
        key: number
        for number, key in enumerate(
            sorted({(s.rank, s.thread) for s in slices}, key=_host_first_key), start=1
        )
    }


def _host_first_key(key: tuple[int, QueueThread]) -> tuple[int, bool, QueueThread]:
    rank, thread = key
    return rank, thread[0] != "host", thread


def _metadata_events(trace: Trace, threads: ThreadIds) -> Iterator[JsonObject]:
    """The names of processes and threads, as metadata events."""
    machine = _machine_of_rank(trace)
    for pid in sorted(set(machine)):
        ranks = [rank for rank, own in enumerate(machine) if own == pid]
        yield _metadata_event(
            "process_name", pid, HOST_TID, name=f"node {pid} ({ranks_label(ranks)})"
        )
        yield _metadata_event("process_sort_index", pid, HOST_TID, sort_index=pid)
    for (rank, (queue, number)), tid in threads.items():
        name = f"rank {rank} {queue}" if number == 0 else f"rank {rank} {queue} ({number + 1})"
        yield _metadata_event("thread_name", machine[rank], tid, name=name)
        yield _metadata_event("thread_sort_index", machine[rank], tid, sort_index=tid)


def _metadata_event(what: str, pid: int, tid: int, **args: object) -> JsonObject:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _end_event(name: str, at_ns: int) -> _ChromeEvent:
    """Where the recording ends, across all ranks."""
    return _encoded_event(
        (at_ns, 0, HOST_TID, 0, "i"),
        {
            "ph": "i",
            "s": "g",
            "name": name,
            "cat": "end",
            "pid": 0,
            "tid": HOST_TID,
            "ts": at_ns / 1000,
            "cname": _RED_NAME,
        },
    )


def _slice_event(piece: _ChromeSlice, threads: ThreadIds, machine: Sequence[int]) -> _ChromeEvent:
    tid, dur_ns = threads[piece.rank, piece.thread], piece.end_ns - piece.start_ns
    phase, more = ("B", {"cname": _RED_NAME}) if piece.open else ("X", {"dur": dur_ns / 1000})
    text = _json_text(
        {
            "ph": phase,
            "name": piece.name,
            "cat": piece.category,
            "pid": machine[piece.rank],
            "tid": tid,
            "ts": piece.start_ns / 1000,
            **more,
        }
    )
    return _ChromeEvent(
        (piece.start_ns, piece.rank, tid, -dur_ns, phase), f'{text[:-1]}, "args": {piece.args}}}'
    )


def _flow_events(
    slices: list[_ChromeSlice],
    work: list[tuple[TraceCall, int]],
    threads: ThreadIds,
    machine: Sequence[int],
) -> Iterator[_ChromeEvent]:
    """Per match a chain of flow events: send to receive, or through a collective's members by
    arrival.
    """
    matches: dict[int, list[tuple[tuple[bool, int, int], int]]] = {}
    for call, number in work:
        if call.match >= 0:
            key = (_DIRECTION_OF_OP.get(call.op) == "recv", call.started_ns, call.rank)
            matches.setdefault(call.match, []).append((key, number))
    for match, members in matches.items():
        chain = [slices[number] for _, number in sorted(members)]
        at_ns = 0
        for k, piece in enumerate(chain if len(chain) > 1 else ()):
            at_ns = max(at_ns, piece.start_ns)  # an arrow never runs backwards in time
            phase = "s" if k == 0 else "f" if k == len(chain) - 1 else "t"
            tid = threads[piece.rank, piece.thread]
            yield _encoded_event(
                (at_ns, piece.rank, tid, 0, phase),
                {
                    "ph": phase,
                    "name": "match",
                    "cat": piece.category,
                    "id": match,
                    "pid": machine[piece.rank],
                    "tid": tid,
                    "ts": at_ns / 1000,
                    **({"bp": "e"} if phase == "f" else {}),
                },
            )


def _in_flight_counters(
    slices: list[_ChromeSlice], work: list[tuple[TraceCall, int]], machine: Sequence[int]
) -> Iterator[_ChromeEvent]:
    """The bytes that each machine's ranks have under way, at every instant at which that changes. A
    message counts at its sender.
    """
    steps: dict[int, dict[int, int]] = {}
    for call, number in work:
        if call.nbytes > 0 and call.match >= 0 and _DIRECTION_OF_OP.get(call.op) != "recv":
            piece, own = slices[number], steps.setdefault(machine[call.rank], {})
            own[piece.start_ns] = own.get(piece.start_ns, 0) + call.nbytes
            if not piece.open:
                own[piece.end_ns] = own.get(piece.end_ns, 0) - call.nbytes
    for pid, own in sorted(steps.items()):
        total = 0
        for at_ns, change in sorted(own.items()):
            total += change
            if change:
                yield _encoded_event(
                    (at_ns, -1, HOST_TID, pid, "C"),
                    {
                        "ph": "C",
                        "name": "bytes under way",
                        "pid": pid,
                        "tid": HOST_TID,
                        "ts": at_ns / 1000,
                        "args": {"bytes": total},
                    },
                )


def _memory_counters(one: MemoryProfile, machine: Sequence[int]) -> Iterator[_ChromeEvent]:
    """What each of these ranks holds of each kind, at every instant at which that changes."""
    changes: list[tuple[int, str, int]] = []
    before: dict[str, int] = {}
    for at_ns, parts in one.levels():
        changes += [
            (at_ns, kind, nbytes) for kind, nbytes in parts.items() if before.get(kind) != nbytes
        ]
        before = parts
    for rank in one.ranks:
        for at_ns, kind, nbytes in changes:
            yield _encoded_event(
                (at_ns, -1, HOST_TID, rank, "C"),
                {
                    "ph": "C",
                    "name": f"rank {rank} memory: {kind}",
                    "pid": machine[rank],
                    "tid": HOST_TID,
                    "ts": at_ns / 1000,
                    "args": {"bytes": nbytes},
                },
            )
