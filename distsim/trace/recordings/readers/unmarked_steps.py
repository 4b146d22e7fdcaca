"""Finds the training steps of a profile, also without calls of `profiler.step()`.

- **Optimizer.** PyTorch annotates every `Optimizer.step`. A step ends with the last one before the
  next backward pass, so several optimizers of one step count once.
- **Repetition.** Without optimizers (inference), the communications of a rank repeat: a step is the
  shortest sequence of operations and sizes of which the whole profile consists.

All ranks must have the same number of steps, at least two from optimizers or three by repetition.
Otherwise the profiles are one step. A profile that starts in the middle of a step, or one step
before those of other ranks, is not noticed here; steps with unusual operations are set apart later.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

from distsim.trace.recordings.readers.kineto_file import ProfileEvent, RankProfile

#: Where the steps of a profile are from.
StepOrigin = Literal["marks", "optimizer", "repetition", "none"]
_OPTIMIZER = "Optimizer.step#"
_BACKWARD = "autograd::engine::evaluate_function"
_FEWEST_OPTIMIZER_STEPS = 2
_FEWEST_REPETITIONS = 3
_FOUND_FROM = {
    "optimizer": "the ends of Optimizer.step",
    "repetition": "repeated communication",
}


class FoundSteps(NamedTuple):
    """Number of a step -> its start and end."""

    steps: Mapping[int, tuple[float, float]]
    origin: StepOrigin


def find_steps(profile: RankProfile, *, as_one_step: bool = False) -> FoundSteps:
    """The marked steps of a rank, else those that are found, else the whole profile as one."""
    if not as_one_step:
        if profile.steps:
            return FoundSteps(profile.steps, "marks")
        methods: list[tuple[StepOrigin, Callable[[RankProfile], list[float]], int]] = [
            ("optimizer", _optimizer_ends, _FEWEST_OPTIMIZER_STEPS),
            ("repetition", _repetition_ends, _FEWEST_REPETITIONS),
        ]
        for origin, ends_of, fewest in methods:
            ends = ends_of(profile)
            if len(ends) >= fewest:
                return FoundSteps(_steps_between(profile, ends), origin)
    starts = [event.start for event in profile.events]
    ends = [event.end for event in profile.events]
    return FoundSteps({0: (min(starts, default=0.0), max(ends, default=0.0))}, "none")


def is_same_division(found: Sequence[FoundSteps]) -> bool:
    """Whether all ranks found their steps in the same way, and equally many."""
    origins = {one.origin for one in found}
    counts = {len(one.steps) for one in found}
    return "marks" in origins or (len(origins) == 1 and len(counts) == 1)


def origin_note(found: FoundSteps) -> str:
    """A sentence on where steps without marks are from; empty for marked ones."""
    if found.origin == "marks":
        return ""
    if found.origin == "none":
        return (
            "the profiles mark no steps and none were found, so they count as one step; "
            "call `profiler.step()` after every step to mark them"
        )
    source = _FOUND_FROM[found.origin]
    return f"the profiles mark no steps: {len(found.steps)} steps were found from {source}"


def _steps_between(profile: RankProfile, ends: list[float]) -> dict[int, tuple[float, float]]:
    first = min(event.start for event in profile.events if event.is_host)
    return dict(enumerate(zip([first, *ends[:-1]], ends, strict=True)))


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
