"""A trace in Chrome's trace event format, for Perfetto (https://ui.perfetto.dev) and chrome://tracing.

A process per machine; in it, for every rank, a thread for its host and one per queue; what overlaps on a queue gets further threads, as
slices of one thread must nest. A counter (``C``) of each machine tells the bytes that its ranks have under way, one of each rank what its
memory holds, by kind, where that is known (`distsim.views.holding`). Calls of the host, waits
and transfers are complete events (``X``); arrows (``s``, ``t``, ``f``) run from send to receive and through the members of a collective,
with the id of their match. What never ended is begun (``B``) and not ended: it stays open to the end, in red, where an instant event
(``i``) tells how the run ended. Times are microseconds. Format: "Trace Event Format" (Chromium project).
"""

from __future__ import annotations

import heapq
import json
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from typing import Final, NamedTuple

from distsim.ops.one_sided import SIGNALS, tag_text
from distsim.ops.table import OPS
from distsim.trace import Trace, TraceCall
from distsim.views.ending import how_it_ended
from distsim.views.holding import Filled
from distsim.views.tables import ranks_words

HOST: Final = 0
#: A reserved name of the format's colours.
_RED: Final = "terrible"
#: Events that are written at a time.
_CHUNK: Final = 8192
_ON_QUEUE: Final = ("compute", "assign")
_WAITS: Final = ("wait", "wait_stream", "synchronize")
_KINDS: Final = {name: row.kind for name, row in OPS.items()}
_DIRECTION: Final = {name: row.direction for name, row in OPS.items()}


#: A queue, and which of the threads that share it.
Thread = tuple[str, int]
#: Thread ids of each rank, over all machines.
Ids = dict[tuple[int, Thread], int]


Json = dict[str, object]


class _Slice(NamedTuple):
    rank: int
    thread: Thread
    start_ns: int
    end_ns: int
    name: str
    category: str
    args: str  # as JSON
    open: bool = False


def chrome_lines(trace: Trace, memory: Sequence[Filled] = ()) -> Iterator[str]:
    """The trace as JSON text in pieces, one event per line. The same trace gives the same text. ``memory``: what ranks hold."""
    ended = how_it_ended(trace)
    makespan = max(trace.makespan_ns, int(trace.header.get("until_ns") or 0) if ended else 0)
    events, threads = _events(trace, memory, makespan)
    events += [_end(ended, makespan)] if ended else []
    events.sort(key=lambda event: event.order)
    facts = {key: trace.header[key] for key in ("name", "backend", "cluster", "outcome", "source") if key in trace.header}
    if ended:
        facts |= {"outcome": "partial" if facts.get("outcome") == "completes" else facts.get("outcome"), "ended": ended}
    yield f'{{"displayTimeUnit": "ns", "otherData": {_json(facts)}, "traceEvents": [\n'
    lines = chain(map(_json, _names(trace, threads)), (event.text for event in events))
    before = ""
    while some := list(islice(lines, _CHUNK)):
        yield before + ",\n".join(some)
        before = ",\n"
    yield "\n]}\n"


def _events(trace: Trace, memory: Sequence[Filled], makespan: int) -> tuple[list[_Event], Ids]:
    slices: list[_Slice] = []
    work: list[tuple[TraceCall, int]] = []  # calls with a slice on a queue, and the slice's number
    for call in trace.rows():
        slices += _host_slices(call, makespan)
        piece = _queue_slice(trace, call, makespan)
        if piece is not None:
            work.append((call, len(slices)))
            slices.append(piece)
    _spread(slices)
    threads, machine = _threads(slices), _machines(trace)
    events = [*_arrows(slices, work, threads, machine), *_under_way(slices, work, machine)]
    events += (event for one in memory for event in _memory(one, machine))
    return [*(_event(piece, threads, machine) for piece in slices), *events], threads


class _Event(NamedTuple):
    """An event's place among the others (time, rank, thread, the longest first, phase), and the event as JSON, which is a fifth of it as a
    record."""

    order: tuple[int, int, int, int, str]
    text: str


def _made(order: tuple[int, int, int, int, str], event: Json) -> _Event:
    return _Event(order, _json(event))


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


# --- slices ---


def _host_slices(call: TraceCall, makespan: int) -> Iterator[_Slice]:
    """What the host does: the call, and in it the time until the call met its parties."""
    if call.posted_ns < 0 or call.op in _ON_QUEUE or call.part >= 0:
        return
    stuck = call.returned_ns < 0
    end = max(makespan, call.posted_ns) if stuck else call.returned_ns
    if end <= call.posted_ns and not stuck:
        return
    name = f"{call.op} (never returns)" if stuck else call.op
    category = "wait" if call.op in _WAITS else "sleep" if call.op == "sleep" else "call"
    yield _Slice(call.rank, ("host", 0), call.posted_ns, end, name, category, _json(_args(call)), stuck)
    met = call.started_ns if call.started_ns >= 0 else end
    waits_on = stuck and call.started_ns < 0
    if category == "call" and (waits_on or call.posted_ns < met <= end) and _meets(call):
        yield _Slice(call.rank, ("host", 0), call.posted_ns, met, f"waits for {_whom(call)}", "wait", "{}", waits_on)


def _queue_slice(trace: Trace, call: TraceCall, makespan: int) -> _Slice | None:
    """The work itself: a compute, a transfer, a member's share of a collective."""
    computes = call.op in _ON_QUEUE
    if call.started_ns < 0 or not (
        computes or _KINDS.get(call.op) == "remote" or (call.match >= 0 and _KINDS.get(call.op) in ("collective", "p2p"))
    ):
        return None
    end = call.finished_ns if call.finished_ns >= 0 else makespan
    way = {"send": f" to {_whom(call)}", "recv": f" from {_whom(call)}"}.get(_DIRECTION.get(call.op) or "", "")
    name = ((call.name or call.op) if computes else call.op + way) + ("" if call.finished_ns >= 0 else " (never ends)")
    args = _args(call) | ({} if computes else _rates(trace, call, end))
    category = "compute" if computes else "collective" if _joins(call) else "message"
    queue = call.queue if computes or call.queue not in ("", "host") else "comm"
    start, stays = call.started_ns, call.finished_ns < 0
    return _Slice(call.rank, (queue or "compute", 0), start, max(end, start), name, category, _json(args), stays)


def _joins(call: TraceCall) -> bool:
    return _KINDS.get(call.op) == "collective"


def _meets(call: TraceCall) -> bool:
    return _KINDS.get(call.op) in ("collective", "p2p", "remote", "group")


def _whom(call: TraceCall) -> str:
    if _DIRECTION.get(call.op) is None:
        return f"group {call.group}"
    return "any rank" if call.peer is None else f"rank {call.peer}"


def _args(call: TraceCall) -> Json:
    """What a click on a slice shows."""
    args: Json = {}
    if call.place.file:
        args["place"] = f"{call.place.file}:{call.place.line}:{call.place.column}"
    if _meets(call):
        args |= {"group": call.group, "bytes": call.nbytes}
        args |= {
            k: v for k, v in (("peer", call.peer), ("dtype", call.dtype), ("reduce_op", call.reduce_op)) if v not in (None, "")
        }
        args |= {tag_text(call.tag).split()[0]: call.tag % SIGNALS} if call.tag else {}
        args |= {"match": call.match} if call.match >= 0 else {}
    return args | {"call": call.position, "iteration": call.iteration}


def _rates(trace: Trace, call: TraceCall, end_ns: int) -> dict[str, float]:
    """algbw and busbw in GB/s, as nccl-tests defines them."""
    duration = end_ns - call.started_ns
    if duration <= 0 or call.nbytes <= 0:
        return {}
    algbw = call.nbytes / duration
    if not _joins(call):
        return {"algbw GB/s": round(algbw, 3)}
    n = next((len(ranks) for name, ranks in trace.header.get("groups", ()) if name == call.group and call.rank in ranks), 1)
    return {"algbw GB/s": round(algbw, 3), "busbw GB/s": round(algbw * OPS[call.op].busbw_factor(n), 3)}


def _spread(slices: list[_Slice]) -> None:
    """Give slices that overlap on a queue threads of their own. The host's nest as they are."""
    order = sorted(range(len(slices)), key=lambda i: (slices[i].start_ns, slices[i].end_ns, i))
    busy: dict[tuple[int, str], list[tuple[int, int]]] = {}  # (free from, number) of the threads in use
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


def _machines(trace: Trace) -> list[int]:
    """The machine of each rank."""
    local_size = max(int(trace.header.get("local_size") or trace.world_size), 1)
    return [rank // local_size for rank in range(trace.world_size)]


def _threads(slices: Iterable[_Slice]) -> Ids:
    """Thread ids: rank by rank the host, then its queues by name; each id once, whatever the machine."""
    return {key: number for number, key in enumerate(sorted({(s.rank, s.thread) for s in slices}, key=_by_host), start=1)}


def _by_host(key: tuple[int, Thread]) -> tuple[int, bool, Thread]:
    rank, thread = key
    return rank, thread[0] != "host", thread


def _names(trace: Trace, threads: Ids) -> Iterator[Json]:
    """The names of processes and threads, as metadata events."""
    machine = _machines(trace)
    for pid in sorted(set(machine)):
        ranks = [rank for rank, own in enumerate(machine) if own == pid]
        yield _meta("process_name", pid, HOST, name=f"machine {pid} ({ranks_words(ranks)})")
        yield _meta("process_sort_index", pid, HOST, sort_index=pid)
    for (rank, (queue, number)), tid in threads.items():
        name = f"rank {rank} {queue}" if number == 0 else f"rank {rank} {queue} ({number + 1})"
        yield _meta("thread_name", machine[rank], tid, name=name)
        yield _meta("thread_sort_index", machine[rank], tid, sort_index=tid)


def _meta(what: str, pid: int, tid: int, **args: object) -> Json:
    return {"ph": "M", "name": what, "pid": pid, "tid": tid, "args": args}


def _end(told: str, at_ns: int) -> _Event:
    """Where the recording ends, across all ranks."""
    return _made((at_ns, 0, HOST, 0, "i"), {
        "ph": "i", "s": "g", "name": told, "cat": "end", "pid": 0, "tid": HOST, "ts": at_ns / 1000, "cname": _RED,
    })  # fmt: skip


def _event(piece: _Slice, threads: Ids, machine: Sequence[int]) -> _Event:
    tid, dur_ns = threads[piece.rank, piece.thread], piece.end_ns - piece.start_ns
    phase, more = ("B", {"cname": _RED}) if piece.open else ("X", {"dur": dur_ns / 1000})
    text = _json({
        "ph": phase, "name": piece.name, "cat": piece.category, "pid": machine[piece.rank], "tid": tid, "ts": piece.start_ns / 1000,
        **more,
    })  # fmt: skip
    return _Event((piece.start_ns, piece.rank, tid, -dur_ns, phase), f'{text[:-1]}, "args": {piece.args}}}')


def _arrows(slices: list[_Slice], work: list[tuple[TraceCall, int]], threads: Ids, machine: Sequence[int]) -> Iterator[_Event]:
    """Per match a chain of flow events: send to receive, or through a collective's members by arrival."""
    matches: dict[int, list[tuple[tuple[bool, int, int], int]]] = {}
    for call, number in work:
        if call.match >= 0:
            key = (_DIRECTION.get(call.op) == "recv", call.started_ns, call.rank)
            matches.setdefault(call.match, []).append((key, number))
    for match, members in matches.items():
        chain = [slices[number] for _, number in sorted(members)]
        at_ns = 0
        for k, piece in enumerate(chain if len(chain) > 1 else ()):
            at_ns = max(at_ns, piece.start_ns)  # an arrow never runs backwards in time
            phase = "s" if k == 0 else "f" if k == len(chain) - 1 else "t"
            tid = threads[piece.rank, piece.thread]
            yield _made((at_ns, piece.rank, tid, 0, phase), {
                "ph": phase, "name": "match", "cat": piece.category, "id": match, "pid": machine[piece.rank], "tid": tid,
                "ts": at_ns / 1000,
                **({"bp": "e"} if phase == "f" else {}),
            })  # fmt: skip


def _under_way(slices: list[_Slice], work: list[tuple[TraceCall, int]], machine: Sequence[int]) -> Iterator[_Event]:
    """The bytes that each machine's ranks have under way, at every instant at which that changes. A message counts at its sender."""
    steps: dict[int, dict[int, int]] = {}
    for call, number in work:
        if call.nbytes > 0 and call.match >= 0 and _DIRECTION.get(call.op) != "recv":
            piece, own = slices[number], steps.setdefault(machine[call.rank], {})
            own[piece.start_ns] = own.get(piece.start_ns, 0) + call.nbytes
            if not piece.open:
                own[piece.end_ns] = own.get(piece.end_ns, 0) - call.nbytes
    for pid, own in sorted(steps.items()):
        total = 0
        for at_ns, change in sorted(own.items()):
            total += change
            if change:
                yield _made((at_ns, -1, HOST, pid, "C"), {
                    "ph": "C", "name": "bytes under way", "pid": pid, "tid": HOST, "ts": at_ns / 1000, "args": {"bytes": total},
                })  # fmt: skip


def _memory(one: Filled, machine: Sequence[int]) -> Iterator[_Event]:
    """What each of these ranks holds of each kind, at every instant at which that changes."""
    changes: list[tuple[int, str, int]] = []
    before: dict[str, int] = {}
    for at_ns, parts in one.levels():
        changes += [(at_ns, kind, nbytes) for kind, nbytes in parts.items() if before.get(kind) != nbytes]
        before = parts
    for rank in one.ranks:
        for at_ns, kind, nbytes in changes:
            yield _made((at_ns, -1, HOST, rank, "C"), {
                "ph": "C", "name": f"rank {rank} memory: {kind}", "pid": machine[rank], "tid": HOST, "ts": at_ns / 1000,
                "args": {"bytes": nbytes},
            })  # fmt: skip
