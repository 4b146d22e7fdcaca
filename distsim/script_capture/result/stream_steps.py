"""Turn the log of a rank's streams into steps of a program: wait_stream and synchronize.

A script orders streams by events: a stream records one, and another stream, or the host, waits for
it. A program has no events, but a stream may wait for what another stream holds at that moment.

- If the recording stream has got no further work in between, the waiting stream waits for it.
- Otherwise an additional stream without work, named after the recording one, takes the place of the
  event: it waits for the recording stream where the event is recorded, and the other waits for it.

Waits that add nothing are omitted: for a stream without work, for what the stream already knows,
and for the stream itself. FSDP makes many of them.

Not recorded: a copy to the CPU and `Tensor.item`, which also make the host wait.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from distsim.script_capture.hub.state import HubEvent

#: Kinds of events that put work on their stream, or make it wait for work.
_WORK_KINDS: Final = ("call", "wait", "compute")
#: The default stream, where a step must name it.
_CURRENT: Final = "current"
#: In `_StreamTracker.known`: what the host has waited for.
_HOST: Final = "host"
#: The last part of the name of a stream that stands for an event.
_EVENT_SUFFIX: Final = "_event"


@dataclass(eq=False)
class _RecordedEvent:
    """An event: which work of its stream, and of streams that this one had waited for, it covers.

    ``position``: of its record step among the steps. ``last_use``: the last position at which the
    stream in its place is waited for, -1 if none is needed. ``helper``: the name of that stream.
    """

    stream: str
    known: dict[str, int]
    position: int
    last_use: int = -1
    helper: str = ""


@dataclass(eq=False)
class _Step:
    """A step of the result: an event of the rank, or a wait that is still to be named.

    ``recorded``: the event that is recorded here. ``source``: the event or the stream that
    ``waiting`` (None: the host) waits for.
    """

    event: HubEvent
    recorded: _RecordedEvent | None = None
    source: _RecordedEvent | str | None = None
    waiting: str | None = None


@dataclass
class _StreamTracker:
    """The work of each stream, counted, and what each stream (and the host) knows to be over."""

    work: dict[str, int] = field(default_factory=dict)
    known: dict[str, dict[str, int]] = field(default_factory=dict)

    def add_work(self, stream: str) -> None:
        self.work[stream] = self.work.get(stream, 0) + 1

    def covered_by(self, stream: str) -> dict[str, int]:
        """What is over when all present work of a stream is over."""
        return {**self.known.get(stream, {}), stream: self.work.get(stream, 0)}

    def learn(self, who: str, covered: dict[str, int]) -> bool:
        """Note that ``who`` waits for this work. False if it knew all of it."""
        known = self.known.setdefault(who, {})
        news = {
            stream: count
            for stream, count in covered.items()
            if stream != who and count > known.get(stream, 0)
        }
        known.update(news)
        return bool(news)


def with_stream_steps(events: Sequence[HubEvent]) -> list[HubEvent]:
    """Events with waits of streams in place of the log.

    Computes that become adjacent are merged.
    """
    if not any(event.kind == "streams" for event in events):
        return list(events)
    steps = _steps_of(events)
    _name_helpers(steps)
    return _merged_computes(_finished_events(steps))


def _steps_of(events: Sequence[HubEvent]) -> list[_Step]:
    tracker = _StreamTracker()
    recorded: dict[int, _RecordedEvent] = {}
    steps: list[_Step] = []
    for event in events:
        if event.kind != "streams":
            if event.kind in _WORK_KINDS:
                tracker.add_work(event.stream)
            steps.append(_Step(event))
            continue
        for kind, number, stream in event.facts["steps"]:
            if kind == "record":
                made = _RecordedEvent(stream, tracker.covered_by(stream), len(steps))
                recorded[number] = made
                steps.append(_Step(event, recorded=made))
            else:
                step = _wait_step(event, kind, recorded.get(number), stream, tracker)
                if step is not None:
                    if isinstance(step.source, _RecordedEvent):
                        step.source.last_use = len(steps)
                    steps.append(step)
    return steps


def _wait_step(
    event: HubEvent,
    kind: str,
    awaited: _RecordedEvent | None,
    stream: str,
    tracker: _StreamTracker,
) -> _Step | None:
    """The wait of a stream or of the host; None if it adds nothing."""
    if kind == "sync device":
        everything = dict(tracker.work)
        return _Step(event) if tracker.learn(_HOST, everything) else None
    waiting = stream if kind == "block" else None
    if kind == "sync stream":
        covered = tracker.covered_by(stream)
        source: _RecordedEvent | str = stream
    elif awaited is None:  # recorded before there was a second stream
        return None
    else:
        covered = awaited.known
        is_unchanged = tracker.covered_by(awaited.stream) == covered
        source = awaited.stream if is_unchanged else awaited
    if waiting is not None and source == waiting:
        return None
    if not tracker.learn(_HOST if waiting is None else waiting, covered):
        return None
    return _Step(event, source=source, waiting=waiting)


def _name_helpers(steps: Sequence[_Step]) -> None:
    """Give each event that needs a stream in its place the first one that is free.

    So the names of a loop repeat. Such a stream serves events of one stream only, because what it
    waited for before must be over when a later event of that stream is.
    """
    busy_until: dict[str, dict[str, int]] = {}
    for position, step in enumerate(steps):
        made = step.recorded
        if made is None or made.last_use < 0:
            continue
        helpers = busy_until.setdefault(made.stream, {})
        free = [name for name, end in helpers.items() if end < position]
        if free:
            made.helper = free[0]
        else:
            number = str(len(helpers) + 1) if helpers else ""
            made.helper = f"{made.stream or _CURRENT}{_EVENT_SUFFIX}{number}"
        helpers[made.helper] = made.last_use


def _finished_events(steps: Sequence[_Step]) -> list[HubEvent]:
    finished: list[HubEvent] = []
    for step in steps:
        if step.event.kind != "streams":
            finished.append(step.event)
        elif step.recorded is not None:
            made = step.recorded
            if made.last_use >= 0:
                finished.append(_wait_event(step.event, made.helper, made.stream))
        elif step.source is None:
            finished.append(replace(step.event, kind="synchronize", stream="", facts={}))
        else:
            source = step.source
            name = source if isinstance(source, str) else source.helper
            if step.waiting is not None:
                finished.append(_wait_event(step.event, step.waiting, name))
            else:
                facts = {"stream": name or _CURRENT}
                finished.append(replace(step.event, kind="synchronize", stream="", facts=facts))
    return finished


def _wait_event(event: HubEvent, waiting: str, other: str) -> HubEvent:
    return replace(event, kind="wait_stream", stream=waiting, facts={"stream": other})


def _merged_computes(events: Sequence[HubEvent]) -> list[HubEvent]:
    """Adjacent computes of one stream as one."""
    merged: list[HubEvent] = []
    for event in events:
        last = merged[-1] if merged else None
        if last is None or not _are_one_compute(last, event):
            merged.append(event)
            continue
        counts: Counter[tuple[object, ...]] = Counter()
        for *kernel, count in (*last.facts["kernels"], *event.facts["kernels"]):
            counts[tuple(kernel)] += count
        kernels = [[*kernel, count] for kernel, count in counts.items()]
        merged[-1] = replace(event, facts={"kernels": kernels})
    return merged


def _are_one_compute(one: HubEvent, next_one: HubEvent) -> bool:
    if not one.kind == next_one.kind == "compute":
        return False
    return (one.stream, one.thread) == (next_one.stream, next_one.thread)


__all__ = ["with_stream_steps"]
