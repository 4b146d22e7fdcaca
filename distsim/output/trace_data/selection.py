"""The part of a run that a picture shows: ranks, steps, an interval of time, a group."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import UsageError
from distsim.common.units import parse_duration_ns, show_ns
from distsim.output.text_layout import rank_list

if TYPE_CHECKING:
    from distsim.trace.model import Trace

#: The longest range of numbers.
_MAX_NUMBERS = 1 << 20


@dataclass(frozen=True)
class RunSelection:
    """The requested part; None means all.

    ``time``: start and end in ns. ``group``: the name of a group, or of an axis with groups.
    """

    ranks: tuple[int, ...] | None = None
    steps: tuple[int, ...] | None = None
    time: tuple[int, int] | None = None
    group: str | None = None

    @property
    def is_whole(self) -> bool:
        """Whether everything is selected."""
        return self == WHOLE_RUN


WHOLE_RUN = RunSelection()


def parse_selection(
    ranks: str | None = None,
    steps: str | None = None,
    time: str | None = None,
    group: str | None = None,
) -> RunSelection:
    """Parse ``0-7,12``, ``3``, ``1 ms..2 ms`` and ``dp``. Raises UsageError."""
    rank_numbers = None if ranks is None else parse_number_ranges(ranks, "ranks")
    step_numbers = None if steps is None else parse_number_ranges(steps, "steps")
    interval = None if time is None else _parse_time_range(time)
    return RunSelection(rank_numbers, step_numbers, interval, group)


def parse_number_ranges(text: str, what: str) -> tuple[int, ...]:
    """``0-3,8`` as numbers, ascending. Raises UsageError."""
    found: set[int] = set()
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})\s*(?:-\s*(\d{1,9})\s*)?", piece)
        if match is None:
            raise UsageError(
                f"{what}: {text!r} is not a list of numbers", f"for example `--{what} 0-3,8`"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first or last - first >= _MAX_NUMBERS:
            raise UsageError(
                f"{what}: {piece.strip()} is not a range",
                f"put the lower number first, for example `--{what} 0-3,8`",
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
            f"time: {text!r} is not a time range",
            "give start and end with units, for example `--time '1 ms..2.5 ms'`",
        )
    return start, end


def selected_ranks(part: RunSelection, trace: Trace) -> tuple[int, ...]:
    """The existing ranks of a part that are in its groups. Raises UsageError if there is none."""
    size = trace.world_size
    ranks: Sequence[int] = range(size) if part.ranks is None else part.ranks
    ranks = tuple(rank for rank in ranks if rank < size)
    if not ranks and size:
        raise UsageError(
            f"the run has no rank {rank_list(part.ranks or ())}",
            f"its ranks are 0 to {size - 1}",
        )
    if part.group is None:
        return ranks
    members: set[int] = set()
    for group_id in group_ids_named(part.group, trace):
        _name, group_ranks = trace.header["groups"][group_id]
        members.update(group_ranks)
    found = tuple(rank for rank in ranks if rank in members)
    if not found:
        raise UsageError(
            f"none of these ranks is in group {part.group}", "remove --ranks, or select other ranks"
        )
    return found


def absent_ranks_text(part: RunSelection, world_size: int) -> str:
    """A message about requested ranks that do not exist; empty if all exist."""
    absent = tuple(rank for rank in part.ranks or () if rank >= world_size)
    if not absent:
        return ""
    return f"the run has no rank {rank_list(absent)}; its ranks are 0 to {world_size - 1}"


def group_ids_named(name: str, trace: Trace) -> tuple[int, ...]:
    """The groups with this name, or on the axis with this name. Raises UsageError."""
    groups = [str(group[0]) for group in trace.header.get("groups", ())]
    # The groups of an axis are named `dp[pp=0]`, `dp[pp=1]`.
    axes = [group.partition("[")[0] for group in groups]
    found = tuple(i for i, names in enumerate(zip(groups, axes, strict=True)) if name in names)
    if not found:
        from distsim.common.message_text import did_you_mean

        families = list(dict.fromkeys(axes))
        raise UsageError(
            f"no group `{name}`{did_you_mean(name, families)}",
            f"known: {', '.join(families[:12]) or 'none'}",
        )
    return found


def time_window(part: RunSelection, trace: Trace, end_ns: int) -> tuple[int, int]:
    """Start and end of a part: its interval, limited to its steps. Raises UsageError if empty."""
    start, end = part.time or (0, end_ns)
    if start >= end_ns > 0:
        raise UsageError(
            f"the time range starts after the end of the run ({show_ns(end_ns)})",
            f"choose a start before {show_ns(end_ns)}",
        )
    if part.steps is not None:
        first, last = step_time_ranges(trace)
        existing = [step for step in part.steps if step < len(first)]
        steps = [step for step in existing if last[step] >= 0]
        if not steps:
            raise UsageError(
                f"the run has no step {part.steps[0]}",
                f"its steps are 0 to {len(first) - 1}" if len(first) else "",
            )
        start = max(start, int(first[steps].min()))
        end = min(end, int(last[steps].max()))
    return start, max(min(end, end_ns), start + 1)


def step_time_ranges(trace: Trace) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Start and end of each iteration over all ranks; -1 for an iteration without work."""
    iteration, started, finished = trace["iteration"], trace["started_ns"], trace["finished_ns"]
    count = int(iteration.max()) + 1 if len(trace) else 0
    inside = (iteration >= 0) & (started >= 0)
    first = np.full(max(count, 0), np.iinfo(np.int64).max)
    last = np.full(max(count, 0), -1, dtype=np.int64)
    np.minimum.at(first, iteration[inside], started[inside])
    np.maximum.at(last, iteration[inside], np.maximum(finished, started)[inside])
    return np.where(last >= 0, first, -1), last


def selection_text(part: RunSelection, world_size: int | None = None) -> str:
    """The selection in a few words; empty for the whole run.

    ``world_size``: if given, requested ranks that do not exist are named as well.
    """
    texts = []
    if part.ranks is not None:
        texts.append(f"ranks {rank_list(part.ranks)}")
    if world_size is not None:
        absent = absent_ranks_text(part, world_size)
        texts += [absent] if absent else []
    if part.steps is not None:
        texts.append(f"steps {rank_list(part.steps)}")
    if part.time is not None:
        start, end = part.time
        texts.append(f"{show_ns(start)} to {show_ns(end)}")
    if part.group is not None:
        texts.append(f"group {part.group}")
    return ", ".join(texts)
