"""Finds the training steps of profiles without calls of `profiler.step()`.

- **Optimizer.** PyTorch annotates every `Optimizer.step`. A step ends with the last one before the
  next backward pass, so several optimizers of one step count once.
- **Repetition.** Without optimizers (inference), the communications of a rank repeat: a step is the
  shortest sequence of operations and sizes of which the whole profile consists.

All ranks must have the same number of steps, at least two from optimizers or three by repetition.
Otherwise the profiles are one step. A profile that starts in the middle of a step, or one step
before those of other ranks, is not noticed here; steps with unusual operations are set apart later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from distsim.recordings.readers.kineto_file import ProfileEvent, RankProfile

_OPTIMIZER = "Optimizer.step#"
_BACKWARD = "autograd::engine::evaluate_function"
_FEWEST_OPTIMIZER_STEPS = 2
_FEWEST_REPETITIONS = 3
_PROFILER_STEP_HELP = "call `profiler.step()` after every step to mark them"


class FoundSteps(NamedTuple):
    """The profiles with their steps, and a sentence on where the steps are from."""

    profiles: list[RankProfile]
    note: str


def find_unmarked_steps(profiles: Sequence[RankProfile]) -> FoundSteps:
    """Add steps to profiles that have none; profiles with marks stay unchanged."""
    if any(profile.steps for profile in profiles):
        return FoundSteps(list(profiles), "")
    methods = {
        "the ends of Optimizer.step": (_optimizer_ends, _FEWEST_OPTIMIZER_STEPS),
        "repeated communication": (_repetition_ends, _FEWEST_REPETITIONS),
    }
    for name, (ends_of, fewest) in methods.items():
        found = _profiles_with_steps(profiles, ends_of, fewest)
        if found:
            count = len(found[0].steps)
            note = f"the profiles mark no steps: {count} steps were found from {name}"
            return FoundSteps(found, note)
    note = "the profiles mark no steps and none were found, so they count as one step"
    return FoundSteps(list(profiles), f"{note}; {_PROFILER_STEP_HELP}")


def _profiles_with_steps(
    profiles: Sequence[RankProfile],
    ends_of: Callable[[RankProfile], list[float]],
    fewest: int,
) -> list[RankProfile]:
    """The profiles cut at the ends of steps; empty if the ranks do not have equally many."""
    ends = [ends_of(profile) for profile in profiles]
    counts = {len(of_rank) for of_rank in ends}
    if len(counts) != 1 or counts.pop() < fewest:
        return []
    return [_with_steps(*pair) for pair in zip(profiles, ends, strict=True)]


def _with_steps(profile: RankProfile, ends: list[float]) -> RankProfile:
    host = [event.start for event in profile.events if event.is_host]
    starts = [min(host), *ends[:-1]]
    return profile._replace(steps=dict(enumerate(zip(starts, ends, strict=True))))


def _optimizer_ends(profile: RankProfile) -> list[float]:
    """The end of the last optimizer before each next backward pass, and of the last one."""
    ends: list[float] = []
    is_new_step = True
    for event in profile.events:
        if event.name.startswith(_BACKWARD):
            is_new_step = True
        elif event.name.startswith(_OPTIMIZER) and event.is_host:
            if is_new_step or not ends:
                ends.append(event.end)
            ends[-1] = max(ends[-1], event.end)
            is_new_step = False
    return ends


def _repetition_ends(profile: RankProfile) -> list[float]:
    """The end of the last call of each repetition; empty without any."""
    calls = [event for event in profile.events if _is_call(event)]
    kinds = [_kind(event) for event in calls]
    period = _shortest_period(kinds)
    if period == len(kinds):
        return []
    return [event.end for event in calls[period - 1 :: period]]


def _is_call(event: ProfileEvent) -> bool:
    return event.is_host and event.name.startswith(("c10d::", "record_param_comms"))


def _kind(event: ProfileEvent) -> tuple[str, ...]:
    keys = ("Collective name", "In msg nelems", "Input Dims")
    return (event.name, *(str(event.args.get(key)) for key in keys))


def _shortest_period(kinds: Sequence[object]) -> int:
    """The length of the shortest sequence that fills the whole one when repeated.

    It follows from the longest proper prefix that is also a suffix (Knuth, Morris and Pratt).
    """
    borders = [0] * len(kinds)
    for position in range(1, len(kinds)):
        length = borders[position - 1]
        while length and kinds[position] != kinds[length]:
            length = borders[length - 1]
        borders[position] = length + (kinds[position] == kinds[length])
    period = len(kinds) - (borders[-1] if borders else 0)
    return period if period and len(kinds) % period == 0 else len(kinds)
