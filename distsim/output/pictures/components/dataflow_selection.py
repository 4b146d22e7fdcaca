"""Which ranks and rows a data flow draws: alike ranks by one of them and whom it talks to, of many
equal steps one.
"""

from __future__ import annotations

from collections.abc import Sequence
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

#: So many columns are drawn even if all ranks are alike: a collective is between several.
_MIN_COLUMNS = 4


class DataflowSelection(NamedTuple):
    """``ranks`` are drawn, in order; ``stand_for[rank]``: who else is alike; ``rows``: which rows
    count; ``notes``: what was left out.
    """

    ranks: tuple[int, ...]
    represented_ranks: dict[int, tuple[int, ...]]
    rows: NDArray[np.bool_]
    notes: tuple[str, ...]


def select_ranks_and_rows(
    trace: Trace, part: RunSelection, most: int, rows_too_many: int, must: Sequence[int] = ()
) -> DataflowSelection:
    """At most ``most`` ranks. ``must``: ranks that are drawn first (stuck, or dead ones). Raises
    UsageError for a part that is nothing.
    """
    ranks, rows, notes = (
        selected_ranks(part, trace),
        _selected_rows(trace, part),
        [selection_text(part, trace.world_size)] if not part.is_whole else [],
    )
    if part.steps is None and part.time is None and not must:
        per_rank = int(rows.sum()) // max(trace.world_size, 1)
        steps = group_equal_steps(trace, ranks) if per_rank > rows_too_many else ()
        if steps:
            step = max(steps, key=lambda s: (s.times, -s.first))
            rows &= trace["iteration"] == step.first
            count = sum(s.times for s in steps)
            same = (
                f"which {step.times} of them are equal to"
                if step.times > 1
                else "the others differ"
            )
            notes.append(f"step {step.first} of {count} is drawn, {same}")
    if len(ranks) <= most:
        return DataflowSelection(ranks, {}, rows, tuple(notes))
    classes = symmetric_ranks(trace, ranks, rows)
    shown = list(dict.fromkeys([r for r in must if r in set(ranks)][:most]))
    shown += [m[0] for m in classes if not set(m) & set(shown)][: max(most - len(shown), 0)]
    partners = _message_partners(trace, rows)
    for rank in shown:
        if len(shown) >= most:
            break
        shown += [r for r in partners.get(rank, ()) if r not in shown and r in set(ranks)][
            : max(min(3, most - len(shown)), 0)
        ]
    shown += [r for members in classes for r in members if r not in shown][
        : max(min(_MIN_COLUMNS, most) - len(shown), 0)
    ]
    of = {rank: members for members in classes for rank in members}
    represented_ranks: dict[int, tuple[int, ...]] = {}
    told_of: set[int] = set()
    for rank in sorted(shown):
        others = tuple(r for r in of[rank] if r not in shown and r not in told_of)
        represented_ranks[rank] = others
        told_of.update(others)
    left = len(ranks) - len(shown) - len(told_of)
    notes += [f"{len(told_of)} ranks are alike to one that is drawn"] if told_of else []
    notes += (
        [f"{left} more ranks differ from these and are not drawn: choose them with --ranks"]
        if left
        else []
    )
    return DataflowSelection(tuple(sorted(shown)), represented_ranks, rows, tuple(notes))


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
    """Whom each rank exchanges messages with, in order of first use."""
    p2p = rows & (trace["peer"] >= 0) & (trace["match"] >= 0)
    pairs = np.stack([trace["rank"][p2p], trace["peer"][p2p]])
    found: dict[int, list[int]] = {}
    if pairs.size:
        _, first = np.unique(pairs, axis=1, return_index=True)
        for a, b in pairs[:, np.sort(first)].T.tolist():
            found.setdefault(a, []).append(b)
    return found
