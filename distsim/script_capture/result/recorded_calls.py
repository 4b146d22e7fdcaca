"""What a rank did, call by call, as the calls of a program: requests with their waits, batches as
one, blocking calls as such.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from distsim.script_capture.hub.matching import GroupInstance, RankCall
from distsim.script_capture.hub.state import HubEvent, Place, ProcessExit, RankProcess
from distsim.script_capture.rank.call_sites import NO_CALL_SITE

#: Blocking calls by what they are when somebody waits at once.
BLOCKING_NAMES = {"isend": "send", "irecv": "recv"}
_STARTUP_OP = "init_process_group"


@dataclass
class CapturedCall:
    """A call of the program. ``calls``: what was posted (several: a batch). ``waits`` and ``drops``
    are numbers of earlier calls.
    """

    op: str
    place: Place
    calls: tuple[RankCall, ...] = ()
    is_async: bool = False
    handled: bool = True
    waits: tuple[int, ...] = ()
    drops: list[int] = field(default_factory=list)
    event: HubEvent | None = None
    failure: ProcessExit | None = None


def groups_in_order(members: Sequence[RankProcess]) -> list[GroupInstance]:
    """Every group that a call used or a rank made, in the order in which ranks came to them, rank
    by rank.
    """
    found: dict[int, GroupInstance] = {}
    for member in members:
        for team in member.group_instances.values():
            found.setdefault(id(team), team)
    return list(found.values())


def recorded_calls_of(member: RankProcess, done: Sequence[HubEvent]) -> list[CapturedCall]:
    """The program of one rank. It ends in the call in which the rank stands, if it does. ``done``:
    its events, one after the other.
    """
    events = _with_buffer_changes(_with_backward_waits(member, done))
    batches = _whole_batches(events)
    steps: list[CapturedCall] = []
    for chunk in _call_chunks(events, batches):
        _append_call(member, steps, chunk)
    return steps + _final_call(member)


def _call_chunks(events: Sequence[HubEvent], batches: set[int]) -> Iterator[list[HubEvent]]:
    """Events that are one call: a batch, the waits of one batch, or one event."""
    parts = {e.number: e.batch for e in events if e.batch in batches}
    held: list[HubEvent] = []
    key: object = None
    for event in events:
        own = _chunk_key(event, parts)
        if held and (own is None or own != key):
            yield held
            held = []
        held.append(event)
        key = own
    if held:
        yield held


def _chunk_key(event: HubEvent, parts: dict[int, int]) -> object:
    if event.kind == "call" and event.number in parts:
        return "batch", parts[event.number]
    if event.kind == "wait" and event.targets[0] in parts:
        return "wait", parts[event.targets[0]]
    return None


def _whole_batches(events: Sequence[HubEvent]) -> set[int]:
    """Batches whose messages are all waited for in one go, or not at all: they are one call with
    one request.
    """
    sizes: dict[int, set[int]] = {}
    batch_of: dict[int, int] = {}
    for event in events:
        if event.batch:
            sizes.setdefault(event.batch, set()).add(event.number)
            batch_of[event.number] = event.batch
    runs: dict[int, list[set[int]]] = {}
    last = 0
    for event in events:
        batch = batch_of.get(event.targets[0], 0) if event.kind == "wait" else 0
        if batch:
            run = runs.setdefault(batch, [])
            if last != batch:
                run.append(set())
            run[-1] |= set(event.targets)
        if event.kind != "drop":
            last = batch
    return {b for b, numbers in sizes.items() if len(runs.get(b, [])) <= 1 or runs[b][0] == numbers}


def _with_backward_waits(member: RankProcess, ordered: Sequence[HubEvent]) -> list[HubEvent]:
    """Events in order, with the waits that torch's C++ makes at the end of a backward pass for what
    was called in it.
    """
    open_ones: list[HubEvent] = []
    found: list[HubEvent] = []
    inside = {t for e in ordered if e.kind == "future" for t in e.targets}
    for event in ordered:
        if event.kind == "future":
            open_ones.append(event)
            continue
        over = event.kind == "backward"
        if (over or (event.kind == "call" and event.number not in inside)) and open_ones:
            found += [_as_wait(e) for e in open_ones]
            open_ones = []
        if not over:
            found.append(event)
    raised = member.ended is not None and member.ended.how == "raised"
    return found if raised else found + [_as_wait(e) for e in open_ones]


def _with_buffer_changes(events: list[HubEvent]) -> list[HubEvent]:
    """Events with what changed a call's tensors behind that call, or behind the batch that it is
    part of.
    """
    changes = {e.facts["call"]: e for e in events if e.kind == "changed"}
    if not changes:
        return events
    found, held, batch = list[HubEvent](), list[HubEvent](), 0
    for event in events:
        if held and (event.kind != "call" or event.batch != batch or not batch):
            found, held = [*found, *held], []
        if event.kind == "changed":
            continue
        found.append(event)
        if event.number in changes and event.kind == "call":
            held.append(changes[event.number])
            batch = event.batch
    return [*found, *held]


def _as_wait(event: HubEvent) -> HubEvent:
    return HubEvent(event.number, "wait", event.site, targets=event.targets)


def _append_call(member: RankProcess, steps: list[CapturedCall], chunk: Sequence[HubEvent]) -> None:
    first = chunk[0]
    place = member.sites.get(first.site, NO_CALL_SITE)
    last = steps[-1] if steps else None
    if first.kind == "drop":
        _record_drop(steps, first.targets[0])
    elif first.kind == "wait":
        targets = tuple(t for e in chunk for t in e.targets)
        if (
            last is not None
            and last.is_async
            and last.calls
            and {c.number for c in last.calls} == set(targets)
            and _same_line(last, place)
        ):
            last.is_async, last.op = False, BLOCKING_NAMES.get(last.op, last.op)
        else:
            steps.append(CapturedCall("wait", place, waits=targets))
    elif first.kind == "call":
        calls = tuple(e.call for e in chunk if e.call is not None)
        op = "batch_isend_irecv" if first.batch and _is_batch(chunk) else calls[0].op
        steps.append(CapturedCall(op, place, calls, is_async=first.is_async))
    else:
        steps.append(CapturedCall(first.kind, place, event=first))


def _is_batch(chunk: Sequence[HubEvent]) -> bool:
    return len(chunk) > 1 or chunk[0].batch != 0


def _same_line(step: CapturedCall, place: Place) -> bool:
    return step.place[:2] == place[:2]


def _record_drop(steps: list[CapturedCall], number: int) -> None:
    """A request that nobody can wait for any more: at once, or later, by the next call."""
    for back, step in enumerate(reversed(steps)):
        if step.is_async and any(c.number == number for c in step.calls):
            if back == 0:
                step.handled = False
            else:
                steps[-1].drops.append(number)
            return


def _final_call(member: RankProcess) -> list[CapturedCall]:
    """A rank that raised or left with a status does so in its last call."""
    ended = member.ended
    if ended is None or ended.how not in ("raised", "exited"):
        return []
    return [CapturedCall("fail" if ended.how == "raised" else "exit", ended.place, failure=ended)]


def missing_startup_calls(
    member: RankProcess, members: Sequence[RankProcess]
) -> list[CapturedCall]:
    """For a rank that ended before it began, where others began: the beginning that it did not come
    to. A program without one would begin by itself."""
    began = [{e.kind: e for e in m.events}.get(_STARTUP_OP) for m in (member, *members)]
    if began[0] is not None or not any(began) or member.ended is None:
        return []
    event = next(e for e in began if e is not None)
    begins = CapturedCall(
        _STARTUP_OP, NO_CALL_SITE, event=HubEvent(0, _STARTUP_OP, 0, facts=event.facts)
    )
    return (
        [CapturedCall("exit", NO_CALL_SITE, failure=member.ended), begins]
        if member.ended.how == "ended"
        else [begins]
    )
