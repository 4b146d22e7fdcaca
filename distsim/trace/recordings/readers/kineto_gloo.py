"""PyTorch profiles of Gloo jobs: the host thread of every rank, with waits inferred.

A Gloo profile shows the calls (``c10d::allreduce_``) on the host thread, and the work of each call
as an annotation (``gloo:all_reduce``) on a worker thread or, for messages, behind the call. Nothing
links the two, so the k-th call of a kind belongs to the k-th annotation (workers take calls in
order). Nothing records when the host waits for a request, so waits are inferred.

**Waits.** A border is the begin or the end of a host operation. When a communication ends, the host
stands between two borders. If it waits there, it goes on soon after the end; if it works there, the
end falls anywhere. So a place is good if the host is long between its borders before the end, and
short after it. Over all ranks and steps with the same operations, the place with the best sum is
taken. Two simpler rules fail on busy machines: "the pause that ends with the collective" misses
threads that wake up late, and a high quantile of the places is wrong where workers stamp their ends
late. If a communication ends after the host has left the place, its end is cut there.

A blocking call waits right behind itself; ``async_op`` is the second last of its inputs.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.trace.recordings.event_graph import Times
from distsim.trace.recordings.readers.kineto_file import ProfileEvent, RankProfile

_CALL = re.compile(r"c10d::_?([a-z_]+?)_?$")
#: Call -> the annotation of its work, where the names differ.
_ANNOTATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather",
    "allgather_into_tensor_coalesced": "all_gather",
    "reduce_scatter_base": "all_reduce",
    "reduce_scatter": "all_reduce",
    "reduce_scatter_tensor_coalesced": "all_reduce",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all",
    "recv_any_source": "recv",
}
#: Call -> the name of the operation in torch.distributed.
_OPERATIONS = {
    "allreduce": "all_reduce",
    "allgather": "all_gather",
    "allgather_base": "all_gather_into_tensor",
    "reduce_scatter_base": "reduce_scatter_tensor",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
}
ROOTED = ("broadcast", "reduce", "gather", "scatter")
#: Rooted operation -> the position of the root among the inputs, from the end.
_ROOT_INPUTS = {"broadcast": -4, "reduce": -4, "gather": -3, "scatter": -3}
_MESSAGES = ("send", "recv")
#: Assumed, because a profile of Gloo names the type of tensors in a list only as a list.
_ELEMENT_BYTES = 4
_BACKWARD = "autograd::engine::evaluate_function"
_LOADER = "enumerate(DataLoader)"
_UNSEEN_WAIT_QUANTILE = 0.85
PHASES = ("data", "forward", "backward", "optimizer")


class HostCall(NamedTuple):
    """One call of a rank in a step; ``border`` is the number of its own begin.

    ``end``: the end of its work. ``peer``: the other rank of a message, or the root, as numbers in
    the group; else -1. ``tag``: of a message, else -1.
    """

    operation: str
    start: float
    end: float
    border: int
    end_border: int
    is_blocking: bool
    nbytes: int
    peer: int
    tag: int


@dataclass(eq=False)
class HostStep:
    """The host thread of a rank in one step.

    ``names``: number of the text of each border. ``phases``: by border, the number in `PHASES` of
    the phase that ends there.
    """

    start: float
    end: float
    times: Times
    names: NDArray[np.int32]
    phases: NDArray[np.int8]
    calls: list[HostCall]

    def leaves(self, border: int) -> float:
        """When the host has left the place behind a border at the latest."""
        return float(self.times[border + 1]) if border + 1 < len(self.times) else self.end

    def signature(self) -> tuple[object, ...]:
        """Equal for steps whose borders correspond to each other."""
        calls = tuple((call.operation, call.border) for call in self.calls)
        return (self.names.tobytes(), calls)


class RankHost(NamedTuple):
    """The steps of one rank by number. ``texts``: the names of borders, by their numbers."""

    steps: dict[int, HostStep]
    texts: list[str]


def host_steps(profile: RankProfile) -> RankHost:
    """The steps of a rank."""
    texts: dict[str, int] = {}
    thread = _host_thread(profile)
    host = [event for event in profile.events if event.is_host and event.thread == thread]
    works = _works_by_kind(profile)
    work_of = _match_calls(host, works)
    borders = [event for event in host if _is_border(event)]
    starts = [event.start for event in borders]
    steps = {}
    for number, (start, end) in profile.steps.items():
        candidates = borders[bisect_left(starts, start) : bisect_right(starts, end)]
        inside = [event for event in candidates if event.end <= end]
        steps[number] = _host_step(start, end, inside, work_of, texts)
    return RankHost(steps, list(texts))


def _host_thread(profile: RankProfile) -> str:
    """The thread that takes the steps; else the one with most calls or operations."""
    counts: dict[str, int] = defaultdict(int)
    for event in profile.events:
        if event.name.startswith("ProfilerStep#"):
            return event.thread
        if event.category == "cpu_op":
            counts[event.thread] += 1000 if event.name.startswith("c10d::") else 1
    return max(counts, key=lambda thread: counts[thread]) if counts else ""


def _is_border(event: ProfileEvent) -> bool:
    return not event.name.startswith(("ProfilerStep#", "gloo:"))


# --- calls and their work ---


def _call_kind(event: ProfileEvent) -> str | None:
    match = _CALL.match(event.name) if event.category == "cpu_op" else None
    return match[1] if match else None


def _works_by_kind(profile: RankProfile) -> dict[str, list[ProfileEvent]]:
    works: dict[str, list[ProfileEvent]] = defaultdict(list)
    for event in profile.events:
        if event.name.startswith("gloo:"):
            works[event.name.removeprefix("gloo:")].append(event)
    return works


def _match_calls(
    host: list[ProfileEvent], works: Mapping[str, list[ProfileEvent]]
) -> dict[float, ProfileEvent]:
    """Start of a call -> its work. Work of calls before the profile began is passed over."""
    taken: dict[str, int] = defaultdict(int)
    found: dict[float, ProfileEvent] = {}
    for event in host:
        kind = _call_kind(event)
        if kind is None:
            continue
        name = _ANNOTATIONS.get(kind, kind)
        candidates = works.get(name, [])
        position = taken[name]
        while position < len(candidates) and candidates[position].start < event.start:
            position += 1
        if position < len(candidates):
            found[event.start] = candidates[position]
            position += 1
        taken[name] = position
    return found


# --- one step ---


def _host_step(
    start: float,
    end: float,
    events: list[ProfileEvent],
    work_of: Mapping[float, ProfileEvent],
    texts: dict[str, int],
) -> HostStep:
    begins = [(event.start, 1, i) for i, event in enumerate(events)]
    # Of events that end together, the inner one ends first.
    ends = [(event.end, 0, -i) for i, event in enumerate(events)]
    borders = sorted(begins + ends)
    position_of: dict[tuple[int, int], int] = {}
    names = []
    for number, (_, is_begin, index) in enumerate(borders):
        event = events[abs(index)]
        position_of[is_begin, abs(index)] = number
        text = f"{'begin' if is_begin else 'end'} {event.name}"
        names.append(texts.setdefault(text, len(texts)))
    calls = [
        _host_call(event, work_of[event.start], position_of[1, i], position_of[0, i])
        for i, event in enumerate(events)
        if event.start in work_of and _call_kind(event) is not None
    ]
    phases = _phases(events, borders)
    times = np.array([time for time, _, _ in borders], dtype=np.float64)
    return HostStep(start, end, times, np.array(names, dtype=np.int32), phases, calls)


def _host_call(event: ProfileEvent, work: ProfileEvent, border: int, end_border: int) -> HostCall:
    kind = _call_kind(event) or ""
    inputs = event.args.get("Concrete Inputs")
    inputs = inputs if isinstance(inputs, list) else []
    operation = _OPERATIONS.get(kind, kind.removesuffix("_any_source"))
    is_message = operation in _MESSAGES
    peer = _integer(inputs, -2) if is_message else _root(operation, inputs)
    tag = _integer(inputs, -1) if is_message else -1
    is_blocking = not is_message and len(inputs) >= 2 and inputs[-2] == "False"
    return HostCall(
        operation,
        event.start,
        max(work.end, event.start),
        border,
        end_border,
        is_blocking,
        _largest_tensor(event.args.get("Input Dims")) * _ELEMENT_BYTES,
        peer,
        tag,
    )


def _root(operation: str, inputs: list[Any]) -> int:
    return _integer(inputs, _ROOT_INPUTS[operation]) if operation in _ROOT_INPUTS else -1


def _integer(values: list[Any], position: int) -> int:
    try:
        return int(values[position])
    except (IndexError, TypeError, ValueError):
        return -1


def _largest_tensor(dims: object) -> int:
    """The elements of the largest tensor among the inputs."""
    largest = 0
    pending = [dims]
    while pending:
        value = pending.pop()
        if not isinstance(value, list):
            continue
        if value and all(isinstance(size, int) for size in value):
            largest = max(largest, int(np.prod(value)))
        else:
            pending.extend(value)
    return largest


def _phases(events: list[ProfileEvent], borders: list[tuple[float, int, int]]) -> NDArray[np.int8]:
    """By border, the phase of the time that ends there.

    Data: up to the first operation, and up to the end of the data loader. Backward: between
    operations of autograd. Optimizer: after the last of them; its own annotation begins later than
    gradient clipping and hooks. Forward: everything else.
    """
    loader_end = max((e.end for e in events if e.name.startswith(_LOADER)), default=0.0)
    first_work = next(
        (e.start for e in events if e.end > loader_end and not _is_preparation(e)), loader_end
    )
    backward_ends = [e.end for e in events if e.name.startswith(_BACKWARD)]
    last_backward = max(backward_ends, default=float("inf"))
    phases = []
    current = "data"
    open_backward = 0
    for time, is_begin, index in borders:
        event = events[abs(index)]
        phases.append("data" if time <= first_work else current)
        if time <= first_work:
            current = "forward"
        if event.name.startswith(_BACKWARD):
            open_backward += 1 if is_begin else -1
            current = "backward"
        elif is_begin and current == "backward" and open_backward == 0:
            # In a pipeline, the forward of the next micro-batch follows.
            is_forward = event.name.startswith("aten::")
            current = "forward" if is_forward else "backward"
        if time >= last_backward:
            current = "optimizer"
    return np.array([PHASES.index(phase) for phase in phases], dtype=np.int8)


def _is_preparation(event: ProfileEvent) -> bool:
    return event.name.startswith((_LOADER, "Optimizer.zero_grad"))


# --- waits ---


def infer_waits(steps: Sequence[HostStep]) -> list[list[int]]:
    """For every step, and every call in it, the number of the border behind which the host waits.

    Steps with equal signatures share the answer.
    """
    same: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for i, step in enumerate(steps):
        same[step.signature()].append(i)
    waits: list[list[int]] = [[] for _ in steps]
    for members in same.values():
        positions = _wait_places([steps[i] for i in members])
        for i in members:
            waits[i] = positions
    return waits


def _wait_places(steps: Sequence[HostStep]) -> list[int]:
    """The places of all calls, in steps whose borders correspond to each other."""
    explained: dict[int, Times] = {}
    places = []
    for number, call in enumerate(steps[0].calls):
        ends = np.array([step.calls[number].end for step in steps])
        place = call.end_border
        if not call.is_blocking:
            place = _best_place(steps, ends, call.end_border, explained)
        until = np.minimum(ends, _leaving(steps, place))
        explained[place] = np.maximum(explained.get(place, -np.inf), until)
        places.append(place)
    return places


def _best_place(
    steps: Sequence[HostStep], ends: Times, first: int, explained: Mapping[int, Times]
) -> int:
    """The place whose pauses the ends of one call explain best.

    ``explained``: place -> until when earlier calls already explain the pause there, by step.
    """
    stood = [
        max(int(np.searchsorted(step.times, end, side="right")) - 1, first)
        for step, end in zip(steps, ends, strict=True)
    ]
    scores = {place: _explained_pause(steps, ends, place, explained) for place in set(stood)}
    best = max(sorted(scores), key=lambda place: scores[place])
    if scores[best] > 0:
        return best
    # The host never waited for this communication, so any late place is right.
    return int(np.quantile(stood, _UNSEEN_WAIT_QUANTILE, method="nearest"))


def _explained_pause(
    steps: Sequence[HostStep], ends: Times, place: int, explained: Mapping[int, Times]
) -> float:
    """Time at a place before the ends, minus the time by which the host left earlier or later."""
    entered = np.array([step.times[place] for step in steps])
    left = _leaving(steps, place)
    begin = np.maximum(entered, explained.get(place, -np.inf))
    waited = np.maximum(np.minimum(ends, left) - begin, 0)
    score = np.where(ends >= entered, waited - np.abs(left - ends), 0)
    return float(score.sum())


def _leaving(steps: Sequence[HostStep], place: int) -> Times:
    return np.array([step.leaves(place) for step in steps])
