"""Reads the profile of one rank and reduces it to what the job needs.

A job has many ranks, so the events of a rank are dropped in the process that read them. What
remains are borders, calls and runs of kernels.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from distsim.common.errors import UsageError
from distsim.trace.recordings.event_graph import EventGraph
from distsim.trace.recordings.readers.kineto_cuda import DeviceStep, device_steps
from distsim.trace.recordings.readers.kineto_file import (
    RankProfile,
    activities_in,
    activity_times,
    read_profile,
)
from distsim.trace.recordings.readers.kineto_gloo import RankHost, host_steps
from distsim.trace.recordings.readers.unmarked_steps import FoundSteps, find_steps
from distsim.trace.recordings.recording import Recording


class RankReading(NamedTuple):
    """One rank. ``profile``: without its events, with the times of its steps.

    ``device``: the steps of a rank with GPU events; ``host``: those of any other rank.
    ``activities``: step -> activity -> its time, see `Recording.activities`.
    """

    profile: RankProfile
    event_count: int
    found_steps: FoundSteps
    host: RankHost | None
    device: dict[int, DeviceStep] | None
    activities: dict[int, dict[str, float]]


def read_rank(path: Path, *, as_one_step: bool = False) -> RankReading:
    """Read one file. Raises UsageError. ``as_one_step``: ignore all signs of steps."""
    return reduced_rank(read_profile(path), as_one_step=as_one_step)


def reduced_rank(profile: RankProfile, *, as_one_step: bool = False) -> RankReading:
    """The steps of a profile, without its events."""
    found = find_steps(profile, as_one_step=as_one_step)
    profile = profile._replace(steps=found.steps)
    has_device = any(event.is_device for event in profile.events)
    activities = activity_times(profile.events)
    return RankReading(
        profile._replace(events=[]),
        len(profile.events),
        found,
        None if has_device else host_steps(profile),
        device_steps(profile) if has_device else None,
        {step: activities_in(activities, times) for step, times in profile.steps.items()},
    )


def common_steps(readings: Iterable[RankReading]) -> list[int]:
    """The numbers of the steps that all ranks have. Raises UsageError if there are none."""
    common = set.intersection(*(set(reading.profile.steps) for reading in readings))
    if not common:
        raise UsageError(
            "PyTorch profiles without a common step (ProfilerStep#N)",
            "call `profiler.step()` after every step, and record the same steps on all ranks",
        )
    return sorted(common)


def base_shifts(readings: Iterable[RankReading]) -> dict[int, float]:
    """By rank, what to add to its times, because the clocks of files have different base times."""
    bases = {reading.profile.rank: reading.profile.base_ns for reading in readings}
    first = min(bases.values())
    return {rank: float(base - first) for rank, base in bases.items()}


def recording_of_ranks(
    readings: Sequence[RankReading], graph: EventGraph, format: str, **fields: Any
) -> Recording:
    """The recording of a job, with what the files of all kinds of profiles contain."""
    profiles = [reading.profile for reading in readings]
    present = {profile.rank for profile in profiles}
    activities = {
        (reading.profile.rank, index): reading.activities.get(number, {})
        for reading in readings
        for index, number in enumerate(graph.steps)
    }
    world = max([profile.world_size for profile in profiles] + [max(present) + 1])
    return Recording(
        graph,
        format,
        files=tuple(profile.file for profile in profiles),
        world_size=world,
        is_profile=True,
        activities=activities,
        missing_ranks=tuple(rank for rank in range(world) if rank not in present),
        operation_count=sum(reading.event_count for reading in readings),
        **fields,
    )
