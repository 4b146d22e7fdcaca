"""Chooses the ranks and trace rows that a data-flow picture draws.

A large run has too many columns and rows for one picture. Ranks that make the same calls are
represented by one of them, drawn together with ranks that it exchanges messages with; of many equal
steps, one is drawn. Notes tell the reader what was omitted.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from distsim.output.trace_data.lanes import group_equal_steps, symmetric_ranks
from distsim.output.trace_data.selection import (
    RunSelection,
    group_ids_named,
    selected_ranks,
    selection_text,
    time_window,
)
from distsim.trace.model import Trace

#: The least number of columns, even if all ranks make the same calls: with a single column, the
#: picture of a collective would not show that several ranks take part.
_MIN_COLUMNS = 4


class DataflowSelection(NamedTuple):
    """What to draw.

    ``ranks`` are drawn, in ascending order. ``represented_ranks[rank]`` are the ranks that are not
    drawn because they make the same calls as ``rank``; each rank is represented at most once.
    ``rows`` is a mask over the rows of the trace. ``notes`` describe what was omitted.
    """

    ranks: tuple[int, ...]
    represented_ranks: dict[int, tuple[int, ...]]
    rows: NDArray[np.bool_]
    notes: tuple[str, ...]


def select_ranks_and_rows(
    trace: Trace, part: RunSelection, most: int, rows_too_many: int, must: Sequence[int] = ()
) -> DataflowSelection:
    """Choose at most ``most`` ranks. ``must``: ranks to draw first (blocked or failed ones).

    One step is chosen only if a rank has more than ``rows_too_many`` rows and no rank must be
    drawn. Raises UsageError if the part selects nothing.
    """
    ranks = selected_ranks(part, trace)
    rows = _selected_rows(trace, part)
    notes = [] if part.is_whole else [selection_text(part, trace.world_size)]
    if part.steps is None and part.time is None and not must:
        per_rank = int(rows.sum()) // max(trace.world_size, 1)
        steps = group_equal_steps(trace, ranks) if per_rank > rows_too_many else ()
        if steps:
            step = max(steps, key=lambda s: (s.times, -s.first))
            rows &= trace["iteration"] == step.first
            count = sum(s.times for s in steps)
            same = (
                f"one of {step.times} identical steps"
                if step.times > 1
                else "the other steps differ"
            )
            notes.append(f"step {step.first} of {count} is drawn, {same}")
    if len(ranks) <= most:
        return DataflowSelection(ranks, {}, rows, tuple(notes))
    classes = symmetric_ranks(trace, ranks, rows)
    shown = _columns_to_draw(classes, ranks, must, _message_partners(trace, rows), most)
    represented_ranks = _represented_ranks(shown, classes)
    represented = sum(len(others) for others in represented_ranks.values())
    remaining = len(ranks) - len(shown) - represented
    if represented:
        notes.append(
            f"{represented} ranks are not drawn because they make the same calls as a drawn rank"
        )
    if remaining:
        notes.append(
            f"{remaining} more ranks differ from these and are not drawn; select them with --ranks"
        )
    return DataflowSelection(tuple(sorted(shown)), represented_ranks, rows, tuple(notes))


def _columns_to_draw(
    classes: Sequence[Sequence[int]],
    ranks: Sequence[int],
    must: Sequence[int],
    partners: dict[int, list[int]],
    most: int,
) -> list[int]:
    """At most ``most`` ranks, chosen in order of importance.

    First the ranks that must be drawn, then one rank of each class, then up to three message
    partners of each drawn rank, then further ranks until there are ``_MIN_COLUMNS``.
    """
    selectable = set(ranks)
    required = [rank for rank in must if rank in selectable]
    shown = list(dict.fromkeys(required[:most]))

    already_shown = set(shown)
    representatives = [members[0] for members in classes if already_shown.isdisjoint(members)]
    shown += representatives[: max(most - len(shown), 0)]

    # The list grows while it is iterated: partners of added ranks are considered too.
    for rank in shown:
        room = most - len(shown)
        if room <= 0:
            break
        candidates = selectable.difference(shown)
        added = [partner for partner in partners.get(rank, ()) if partner in candidates]
        shown += added[: min(3, room)]

    everyone = chain.from_iterable(classes)
    others = [rank for rank in everyone if rank not in shown]
    shown += others[: max(min(_MIN_COLUMNS, most) - len(shown), 0)]
    return shown


def _represented_ranks(
    shown: Sequence[int], classes: Sequence[Sequence[int]]
) -> dict[int, tuple[int, ...]]:
    """For each drawn rank, the ranks of its class that are not drawn.

    If several ranks of a class are drawn, the first one represents the others.
    """
    class_of = {rank: members for members in classes for rank in members}
    excluded = set(shown)
    represented_ranks: dict[int, tuple[int, ...]] = {}
    for rank in sorted(shown):
        others = tuple(member for member in class_of[rank] if member not in excluded)
        represented_ranks[rank] = others
        excluded.update(others)
    return represented_ranks


def _selected_rows(trace: Trace, part: RunSelection) -> NDArray[np.bool_]:
    rows: NDArray[np.bool_] = trace["posted_ns"] >= 0
    if part.group is not None:
        rows = rows & np.isin(trace["group"], group_ids_named(part.group, trace))
    if part.time is not None:
        start, end = time_window(RunSelection(time=part.time), trace, max(trace.makespan_ns, 1))
        last = np.maximum(trace["returned_ns"], trace["finished_ns"])
        rows = rows & (trace["posted_ns"] < end) & ((last >= start) | (trace["returned_ns"] < 0))
    if part.steps is not None:
        time_window(RunSelection(steps=part.steps), trace, max(trace.makespan_ns, 1))
        rows = rows & np.isin(trace["iteration"], part.steps)
    return rows.copy()


def _message_partners(trace: Trace, rows: NDArray[np.bool_]) -> dict[int, list[int]]:
    """The ranks that each rank exchanges messages with, in order of first use."""
    p2p = rows & (trace["peer"] >= 0) & (trace["match"] >= 0)
    pairs = np.stack([trace["rank"][p2p], trace["peer"][p2p]])
    found: dict[int, list[int]] = {}
    if pairs.size:
        _, first = np.unique(pairs, axis=1, return_index=True)
        for a, b in pairs[:, np.sort(first)].T.tolist():
            found.setdefault(a, []).append(b)
    return found
