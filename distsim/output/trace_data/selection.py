"""Which part of a run a picture shows: ranks, steps, a stretch of time, a group."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.common.units import parse_duration_ns, show_ns
from distsim.output.text_layout import rank_list

if TYPE_CHECKING:
    from distsim.trace.model import Trace

#: A list names at most so many numbers.
_MAX_NUMBERS = 1 << 20


@dataclass(frozen=True)
class RunSelection:
    """What was asked for; None means all. ``time``: from and to in ns. ``group``: its name, or that
    of its family (an axis).
    """

    ranks: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    time: tuple[int, int] | None = None
    group: str | None = None

    @property
    def is_whole(self) -> bool:
        return self == WHOLE_RUN


WHOLE_RUN = RunSelection()


def parse_selection(
    ranks: str | None = None,
    steps: str | None = None,
    time: str | None = None,
    group: str | None = None,
) -> RunSelection:
    """A part as it is written: ``0-7,12``, ``3``, ``1 ms..2 ms``, ``dp``. Raises UsageError."""
    return RunSelection(
        None if ranks is None else parse_number_ranges(ranks, "ranks"),
        None if steps is None else parse_number_ranges(steps, "steps"),
        None if time is None else _parse_time_range(time),
        group,
    )


def parse_number_ranges(text: str, what: str) -> tuple[int, ...]:
    """``0-3,8`` as numbers, ascending. Raises UsageError."""
    found: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", piece)
        if match is None:
            raise UsageError(f"{what} {text!r} is no list of numbers", f"write `--{what} 0-3,8`")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MAX_NUMBERS:
            raise UsageError(
                f"{what} {piece.strip()} is no range",
                f"the lower number comes first: `--{what} 0-3,8`",
            )
        found.update(range(first, last + 1))
    return tuple(sorted(found))


def _parse_time_range(text: str) -> tuple[int, int]:
    first, dots, last = text.partition("..")
    try:
        start, end = (parse_duration_ns(side.strip()) for side in (first, last))
    except ValueError:
        start, end = 0, 0
    if not dots or start >= end:
        raise UsageError(
            f"time {text!r} is no stretch of time",
            "write from and to with their units: `--time '1 ms..2.5 ms'`",
        )
    return start, end


def selected_ranks(part: RunSelection, trace: Trace) -> tuple[int, ...]:
    """The ranks of a part: those that were named, in the groups that were named. Raises UsageError
    where that is nobody.
    """
    size = trace.world_size
    ranks = tuple(range(size)) if part.ranks is None else tuple(r for r in part.ranks if r < size)
    if not ranks and size:
        raise UsageError(
            f"no rank of {rank_list(part.ranks or ())} takes part",
            f"the run has the ranks 0 to {size - 1}",
        )
    if part.group is None:
        return ranks
    inside = {
        r
        for number in group_ids_named(part.group, trace)
        for r in trace.header["groups"][number][1]
    }
    found = tuple(r for r in ranks if r in inside)
    if not found:
        raise UsageError(
            f"none of the ranks is in the group {part.group}", "leave out --ranks, or name others"
        )
    return found


def absent_ranks_text(part: RunSelection, world_size: int) -> str:
    """``there is no rank 4-9: the run has the ranks 0 to 3``, where ranks were named that do not
    take part; else empty.
    """
    gone = tuple(r for r in part.ranks or () if r >= world_size)
    if not gone:
        return ""
    return f"there is no rank {rank_list(gone)}: the run has the ranks 0 to {world_size - 1}"


def group_ids_named(name: str, trace: Trace) -> tuple[int, ...]:
    """The groups that go by a name: their own, or that of the axis they are of. Raises
    UsageError.
    """
    groups = [str(group[0]) for group in trace.header.get("groups", ())]
    found = tuple(i for i, own in enumerate(groups) if own == name or own.partition("[")[0] == name)
    if not found:
        from distsim.common.message_text import did_you_mean

        families = list(dict.fromkeys(own.partition("[")[0] for own in groups))
        raise UsageError(
            f"there is no group {name}{did_you_mean(name, families)}",
            f"there is {', '.join(families[:12]) or 'none'}",
        )
    return found


def time_window(part: RunSelection, trace: Trace, end_ns: int) -> tuple[int, int]:
    """From when to when a part lasts: the time that was named, or that of its steps. Raises
    UsageError where there is none.
    """
    start, end = part.time or (0, end_ns)
    if start >= end_ns > 0:
        raise UsageError(
            f"nothing happens from {show_ns(start)} on", f"the run ends at {show_ns(end_ns)}"
        )
    if part.steps is not None:
        first, last = step_time_ranges(trace)
        steps = [s for s in part.steps if s < len(first) and last[s] >= 0]
        if not steps:
            raise UsageError(
                f"no step {part.steps[0]}",
                f"the run has the steps 0 to {len(first) - 1}" if len(first) else "",
            )
        start, end = max(start, int(first[steps].min())), min(end, int(last[steps].max()))
    return start, max(min(end, end_ns), start + 1)


def step_time_ranges(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """When each iteration's first work starts and its last ends, over all ranks; -1 where it has
    none.
    """
    iteration, started, finished = trace["iteration"], trace["started_ns"], trace["finished_ns"]
    count = int(iteration.max()) + 1 if len(trace) else 0
    inside = (iteration >= 0) & (started >= 0)
    first, last = (
        np.full(max(count, 0), np.iinfo(np.int64).max),
        np.full(max(count, 0), -1, dtype=np.int64),
    )
    np.minimum.at(first, iteration[inside], started[inside])
    np.maximum.at(last, iteration[inside], np.maximum(finished, started)[inside])
    return np.where(last >= 0, first, -1), last


def selection_text(part: RunSelection, world_size: int | None = None) -> str:
    """What was chosen, in a few words; empty for all of it. ``world_size``: what of it is not there
    is said too.
    """
    said = [f"ranks {rank_list(part.ranks)}"] if part.ranks is not None else []
    said += (
        [missing]
        if world_size is not None and (missing := absent_ranks_text(part, world_size))
        else []
    )
    said += [f"steps {rank_list(part.steps)}"] if part.steps is not None else []
    said += [f"{show_ns(part.time[0])} to {show_ns(part.time[1])}"] if part.time is not None else []
    said += [f"group {part.group}"] if part.group is not None else []
    return ", ".join(said)
