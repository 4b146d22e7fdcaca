"""PyTorch profiles of one rank with GPU kernels: host, streams, and their dependencies.

Rows of a rank are

- the host, all threads as one lane, cut at launches of communication and at waits for the device;
- runs of kernels of a stream. A run ends at the launch of a communication, at a wait, and at the
end
  of a phase. These places are the same in every step and on every rank. Idle time between the
  kernels of a run counts as its own time;
- NCCL kernels. A kernel spins until its partners arrive, so its start is the arrival of the rank.

A run starts after its launch and after the run before it on its stream. An NCCL kernel also waits
for the compute that was launched before it, and compute behind a `cudaStreamWaitEvent` waits for
the communication launched before that. The profile does not name the events of such waits, so only
edges are kept which the recording obeyed.

A host call waits for the device if a device operation ended shortly before it returned: besides
`*Synchronize`, also `cudaMemcpyAsync` from pageable memory and `cudaGraphLaunch`.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import defaultdict
from collections.abc import Hashable
from typing import NamedTuple

from distsim.trace.recordings.readers.kineto_file import ProfileEvent, RankProfile

_NCCL = re.compile(r"nccl(?:Dev)?Kernel_?([A-Za-z]+)|nccl(?:Dev)?[A-Z]\w*Kernel", re.IGNORECASE)
#: A call that lasts longer, and returns this soon after a device operation, waited for it.
_WAITING_NS = 100e3
_RETURN_NS = 100e3
#: By the names that c10 gives to the types of tensors.
_ELEMENT_BYTES = {
    "Byte": 1,
    "Char": 1,
    "Bool": 1,
    "Half": 2,
    "BFloat16": 2,
    "Short": 2,
    "Double": 8,
    "Long": 8,
}
_USUAL_ELEMENT_BYTES = 4
_BACKWARD = "autograd::engine::evaluate_function"
_OPTIMIZER = "Optimizer.step#"


class DeviceRun(NamedTuple):
    """Kernels that run one after the other. ``launch``: when the host launched the first one.

    ``meeting``, ``nbytes``: of an NCCL kernel. ``awaits``: whether a stream wait precedes it.
    """

    stream: str
    label: str
    start: float
    end: float
    launch: float
    meeting: Hashable
    nbytes: int
    awaits: bool


class HostWait(NamedTuple):
    """A host call that waited for a device operation until ``device_end``."""

    start: float
    end: float
    device_end: float


class DeviceStep(NamedTuple):
    """One step of a rank: its runs in the order of their starts, and the waits of its host."""

    start: float
    end: float
    runs: list[DeviceRun]
    waits: list[HostWait]


def is_communication(event: ProfileEvent) -> bool:
    """Whether a device event is a kernel of NCCL (or RCCL)."""
    return event.is_device and event.name.lower().startswith("nccl")


def device_steps(profile: RankProfile) -> dict[int, DeviceStep]:
    """The steps of a profile."""
    reader = _DeviceReader(profile)
    return {number: reader.step(*times, number) for number, times in profile.steps.items()}


class _DeviceReader:
    """Looks up the launches, phases and waits of a profile."""

    def __init__(self, profile: RankProfile) -> None:
        self.profile = profile
        self.device = [event for event in profile.events if event.is_device]
        calls = [event for event in profile.events if event.is_cuda_call]
        self.call_of = {event.args.get("correlation"): event for event in calls}
        self.device.sort(key=lambda event: (event.start, event.end))
        events = profile.events
        self.backward = _merged([e for e in events if e.name.startswith(_BACKWARD)])
        self.optimizer = _merged([e for e in events if e.name.startswith(_OPTIMIZER)])
        # Without host operations, nothing shows which kernels belong to the backward pass.
        has_phases = any(e.category == "cpu_op" for e in events) or bool(self.backward[0])
        self.first_phase = "forward" if has_phases else "compute"
        in_communication = _merged([e for e in events if e.name == "record_param_comms"])
        waits = [e.start for e in calls if e.name.endswith("StreamWaitEvent")]
        self.stream_waits = sorted(t for t in waits if not _covers(in_communication, t))
        self.waits = self._host_waits(calls)
        launches = [self._launch(e) for e in self.device if is_communication(e)]
        host_waits = [wait.start for wait in self.waits]
        self.cuts = sorted({*launches, *self.stream_waits, *host_waits})
        self.by_launch = sorted(self.device, key=self._launch)
        self.launch_times = [self._launch(event) for event in self.by_launch]
        self.wait_starts = host_waits
        self.wait_ends = {wait.device_end for wait in self.waits}

    def step(self, start: float, end: float, number: int) -> DeviceStep:
        """The runs that were launched in a time, and the waits of the host in it."""
        first, last = (bisect_left(self.launch_times, time) for time in (start, end))
        inside = sorted(self.by_launch[first:last], key=lambda event: (event.start, event.end))
        counts: dict[Hashable, int] = defaultdict(int)
        runs: list[DeviceRun] = []
        by_stream: dict[str, list[ProfileEvent]] = defaultdict(list)
        for event in inside:
            by_stream[_stream(event)].append(event)
        for stream, events in by_stream.items():
            runs.extend(self._runs(stream, events, number, counts))
        # Runs of one start: the one launched first comes first.
        runs.sort(key=lambda run: (run.start, run.launch))
        first, last = (bisect_left(self.wait_starts, time) for time in (start, end))
        waits = self.waits[first:last]
        return DeviceStep(start, end, runs, waits)

    def _launch(self, event: ProfileEvent) -> float:
        """When the host began to launch a device operation; its start if that is unknown."""
        call = self.call_of.get(event.args.get("correlation"))
        return event.start if call is None else min(call.start, event.start)

    def _host_waits(self, calls: list[ProfileEvent]) -> list[HostWait]:
        ends = sorted(event.end for event in self.device)
        waits: list[HostWait] = []
        for call in sorted(calls, key=lambda call: call.start):
            position = bisect_right(ends, call.end) - 1
            if position < 0 or call.end - call.start < _WAITING_NS:
                continue
            is_soon = call.end - ends[position] <= _RETURN_NS and ends[position] > call.start
            if is_soon and (not waits or call.start >= waits[-1].end):
                waits.append(HostWait(call.start, call.end, ends[position]))
        return waits

    def _phase(self, time: float) -> str:
        if _covers(self.backward, time):
            return "backward"
        return "optimizer" if _covers(self.optimizer, time) else self.first_phase

    def _runs(
        self, stream: str, events: list[ProfileEvent], number: int, counts: dict[Hashable, int]
    ) -> list[DeviceRun]:
        runs: list[DeviceRun] = []
        previous: object = None
        for event in events:
            launch = self._launch(event)
            if is_communication(event):
                runs.append(self._communication(stream, event, number, counts))
                previous = None
                continue
            label = self._phase(launch)
            epoch = (bisect_right(self.cuts, launch), label)
            if epoch == previous:
                runs[-1] = runs[-1]._replace(end=max(runs[-1].end, event.end))
            else:
                before = self.cuts[epoch[0] - 1] if epoch[0] else 0.0
                awaits = before in self.stream_waits
                start = max(event.start, runs[-1].end) if runs else event.start
                end = max(event.end, start)
                runs.append(DeviceRun(stream, label, start, end, launch, None, 0, awaits))
            # A host wait ends with this operation, so the run does, too.
            previous = None if event.end in self.wait_ends else epoch
        return runs

    def _communication(
        self, stream: str, event: ProfileEvent, number: int, counts: dict[Hashable, int]
    ) -> DeviceRun:
        args = event.args
        match = _NCCL.match(event.name)
        operation = str(args.get("Collective name") or (match and match[1]) or "nccl").lower()
        group = str(args.get("Process Group Ranks") or args.get("Process Group Name") or stream)
        partners: tuple[object, ...] = (group,)
        if operation in ("send", "recv"):
            rank = self.profile.rank
            peer = args.get("Dst Rank" if operation == "send" else "Src Rank")
            ends = (rank, peer) if operation == "send" else (peer, rank)
            partners = (group, *ends)
        counts[partners] += 1
        elements = args.get("In msg nelems")
        element_bytes = _ELEMENT_BYTES.get(str(args.get("dtype")), _USUAL_ELEMENT_BYTES)
        size = elements * element_bytes if isinstance(elements, int) else 0
        key = (partners, number, counts[partners])
        launch = self._launch(event)
        return DeviceRun(stream, operation, event.start, event.end, launch, key, size, False)


def _stream(event: ProfileEvent) -> str:
    stream = event.args.get("stream")
    return event.thread if stream is None else str(stream)


def _merged(events: list[ProfileEvent]) -> tuple[list[float], list[float]]:
    """The union of the times of events, as sorted begins and ends."""
    begins: list[float] = []
    ends: list[float] = []
    for event in sorted(events, key=lambda event: event.start):
        if ends and event.start <= ends[-1]:
            ends[-1] = max(ends[-1], event.end)
        else:
            begins.append(event.start)
            ends.append(event.end)
    return begins, ends


def _covers(intervals: tuple[list[float], list[float]], time: float) -> bool:
    begins, ends = intervals
    position = bisect_right(begins, time) - 1
    return position >= 0 and time <= ends[position]
