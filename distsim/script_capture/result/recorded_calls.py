"""The events of a rank as calls of a program.

A program has batches as one call, blocking calls as such, and requests with the waits for them. The
events of a rank have each message of a batch, and each call and each wait, by itself. The order of
the events is that of `distsim.script_capture.result.thread_order`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from distsim.script_capture.hub.matching import GroupInstance, RankCall
from distsim.script_capture.hub.state import HubEvent, RankProcess
from distsim.script_capture.protocol.message_types import NO_CALL_SITE, CallOrigin, ProcessExit
from distsim.script_capture.result.stream_steps import with_stream_steps

#: Names of requests that are waited for at once.
BLOCKING_NAMES: Final = {"isend": "send", "irecv": "recv"}
_STARTUP_OP: Final = "init_process_group"
#: `HubEvent.batch` of a call outside of all batches.
_NO_BATCH: Final = 0


@dataclass
class CapturedCall:
    """A call of the program.

    ``calls`` are the posted calls; several are a batch. ``waits`` and ``drops`` are numbers of
    earlier calls: those that this call waits for, and those whose requests are dropped before it.
    ``handled`` says that the script kept the request. ``stream`` is the CUDA stream that was
    current.
    """

    op: str
    place: CallOrigin
    calls: tuple[RankCall, ...] = ()
    is_async: bool = False
    handled: bool = True
    waits: tuple[int, ...] = ()
    drops: list[int] = field(default_factory=list)
    event: HubEvent | None = None
    failure: ProcessExit | None = None
    stream: str = ""

    @property
    def call_numbers(self) -> set[int]:
        """The numbers of its calls among the rank's events."""
        return {call.number for call in self.calls}


def groups_in_order(processes: Sequence[RankProcess]) -> list[GroupInstance]:
    """Every group, in the order in which the ranks came to know it, rank by rank."""
    found: dict[int, GroupInstance] = {}
    for process in processes:
        for group in process.groups.values():
            found.setdefault(id(group), group)
    return list(found.values())


def recorded_calls_of(process: RankProcess, ordered: Sequence[HubEvent]) -> list[CapturedCall]:
    """The program of one rank, from its events in order.

    If the rank is blocked, it ends with the call in which it is.
    """
    events = with_stream_steps(_with_buffer_changes(_with_backward_waits(process, ordered)))
    batches = _single_call_batches(events)
    calls: list[CapturedCall] = []
    for chunk in _call_chunks(events, batches):
        _append_call(process, calls, chunk)
    return calls + _final_call(process)


# --- waits that C++ makes ---
def _with_backward_waits(process: RankProcess, ordered: Sequence[HubEvent]) -> list[HubEvent]:
    """Events with the waits of torch's C++ for futures that were requested in a backward pass.

    C++ waits at the end of the pass. If its end was not reported, it is before the next call that
    is not part of it.
    """
    in_backward: set[int] = set()
    for event in ordered:
        if event.kind == "future":
            in_backward.update(event.targets)

    open_futures: list[HubEvent] = []
    found: list[HubEvent] = []
    for event in ordered:
        if event.kind == "future":
            open_futures.append(event)
            continue
        is_end = event.kind == "backward"
        is_later_call = event.kind == "call" and event.number not in in_backward
        if is_end or is_later_call:
            found += [_as_wait(future, event.stream) for future in open_futures]
            open_futures = []
        if not is_end:
            found.append(event)
    raised = process.ended is not None and process.ended.how == "raised"
    if not raised:
        found += [_as_wait(future, future.stream) for future in open_futures]
    return found


def _as_wait(event: HubEvent, stream: str) -> HubEvent:
    return HubEvent(event.number, "wait", event.site, targets=event.targets, stream=stream)


# --- changed buffers ---
def _with_buffer_changes(events: list[HubEvent]) -> list[HubEvent]:
    """Events with each change of a buffer right behind the call, or the batch, that uses it.

    A change is only noticed, and reported, at the wait.
    """
    changes = {event.facts["call"]: event for event in events if event.kind == "changed"}
    if not changes:
        return events
    found: list[HubEvent] = []
    pending: list[HubEvent] = []
    batch = _NO_BATCH
    for event in events:
        is_in_batch = event.kind == "call" and event.batch == batch != _NO_BATCH
        if not is_in_batch:
            found += pending
            pending = []
        if event.kind == "changed":
            continue
        found.append(event)
        if event.kind == "call" and event.number in changes:
            pending.append(changes[event.number])
            batch = event.batch
    return [*found, *pending]


# --- batches ---
def _single_call_batches(events: Sequence[HubEvent]) -> set[int]:
    """Batches whose messages are all waited for in one go, or not at all.

    Such a batch is one call with one request. The messages of any other are calls of their own.
    """
    members: dict[int, set[int]] = {}
    batch_of: dict[int, int] = {}
    for event in events:
        if event.batch:
            members.setdefault(event.batch, set()).add(event.number)
            batch_of[event.number] = event.batch
    runs = _runs_of_waits(events, batch_of)
    found = set()
    for batch, numbers in members.items():
        batch_runs = runs.get(batch, [])
        if len(batch_runs) <= 1 or batch_runs[0] == numbers:
            found.add(batch)
    return found


def _runs_of_waits(
    events: Sequence[HubEvent], batch_of: Mapping[int, int]
) -> dict[int, list[set[int]]]:
    """For each batch the calls that are waited for, by runs of consecutive waits."""
    runs: dict[int, list[set[int]]] = {}
    last_batch = _NO_BATCH
    for event in events:
        batch = _NO_BATCH
        if event.kind == "wait":
            batch = batch_of.get(event.targets[0], _NO_BATCH)
        if batch:
            batch_runs = runs.setdefault(batch, [])
            if last_batch != batch:
                batch_runs.append(set())
            batch_runs[-1].update(event.targets)
        if event.kind != "drop":
            last_batch = batch
    return runs


def _call_chunks(events: Sequence[HubEvent], batches: set[int]) -> Iterator[list[HubEvent]]:
    """Events that are one call: a batch, the waits for one batch, or a single event."""
    batch_of = {event.number: event.batch for event in events if event.batch in batches}
    chunk: list[HubEvent] = []
    chunk_key: object = None
    for event in events:
        key = _chunk_key(event, batch_of)
        if chunk and (key is None or key != chunk_key):
            yield chunk
            chunk = []
        chunk.append(event)
        chunk_key = key
    if chunk:
        yield chunk


def _chunk_key(event: HubEvent, batch_of: Mapping[int, int]) -> object:
    """Consecutive events with the same key are one call; None is never the same."""
    if event.kind == "call" and event.number in batch_of:
        return "batch", batch_of[event.number]
    if event.kind == "wait" and event.targets[0] in batch_of:
        return "wait", batch_of[event.targets[0]]
    return None


# --- calls ---
def _append_call(
    process: RankProcess, calls: list[CapturedCall], chunk: Sequence[HubEvent]
) -> None:
    first = chunk[0]
    stream = first.stream
    place = process.sites.get(first.site, NO_CALL_SITE)
    if first.kind == "drop":
        _record_drop(calls, first.targets[0])
    elif first.kind == "wait":
        targets = tuple(target for event in chunk for target in event.targets)
        last = calls[-1] if calls else None
        if last is not None and last.stream == stream and _is_blocking(last, targets, place):
            last.is_async = False
            last.op = BLOCKING_NAMES.get(last.op, last.op)
        else:
            calls.append(CapturedCall("wait", place, waits=targets, stream=stream))
    elif first.kind == "call":
        posted = tuple(event.call for event in chunk if event.call is not None)
        op = "batch_isend_irecv" if first.batch else posted[0].op
        calls.append(CapturedCall(op, place, posted, is_async=first.is_async, stream=stream))
    else:
        calls.append(CapturedCall(first.kind, place, event=first, stream=stream))


def _is_blocking(call: CapturedCall, waited: Sequence[int], place: CallOrigin) -> bool:
    """Whether a request and the wait that follows it are a blocking call: both on one line."""
    if not call.is_async or not call.calls:
        return False
    is_same_line = (call.place.file, call.place.line) == (place.file, place.line)
    return is_same_line and call.call_numbers == set(waited)


def _record_drop(calls: list[CapturedCall], number: int) -> None:
    """Record that the script can no longer wait for a request.

    Either it never kept the request, or it dropped the request before the call that is now last.
    """
    for distance, call in enumerate(reversed(calls)):
        if call.is_async and number in call.call_numbers:
            if distance == 0:
                call.handled = False
            else:
                calls[-1].drops.append(number)
            return


def _final_call(process: RankProcess) -> list[CapturedCall]:
    """A rank that raised, or exited with a status, does so in a last call."""
    ended = process.ended
    if ended is None or ended.how not in ("raised", "exited"):
        return []
    op = "fail" if ended.how == "raised" else "exit"
    return [CapturedCall(op, ended.place, failure=ended)]


def missing_startup_calls(
    process: RankProcess, processes: Sequence[RankProcess]
) -> list[CapturedCall]:
    """The start-up call that a rank did not reach before it ended, if others made it.

    Without it, a program would start up by itself.
    """
    if process.ended is None or _startup_event(process) is not None:
        return []
    events = [_startup_event(other) for other in processes]
    event = next((event for event in events if event is not None), None)
    if event is None:
        return []
    startup = HubEvent(0, _STARTUP_OP, 0, facts=event.facts)
    missing = CapturedCall(_STARTUP_OP, NO_CALL_SITE, event=startup)
    if process.ended.how != "ended":
        return [missing]
    return [CapturedCall("exit", NO_CALL_SITE, failure=process.ended), missing]


def _startup_event(process: RankProcess) -> HubEvent | None:
    """The last one."""
    for event in reversed(process.events):
        if event.kind == _STARTUP_OP:
            return event
    return None
