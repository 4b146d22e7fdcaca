"""Own times of a job without one kind of slowness after the other.

Each layer keeps what the previous one removed, so the differences between the step times of
consecutive layers add up to the whole slowdown:

- *recorded*: as recorded.
- *no delay*: work starts when its predecessors end. The difference is "late starts".
- *steady*: work takes its mean over steps at the same place of the same rank: "uneven work".
- *even*: work takes the low median over the peers of a rank: "ranks slower than peers".
- *balanced*: work takes the mean over all ranks, by label: "unequal stages".
- *ideal*: communication takes its usual transfer time: "slow communication".

The low median of peers is used, because a mean over them contains the straggler: in ByteDance's
trace AR it makes the ideal step 8 % longer. `mean_ideal` is that other reference, the one which
papers compare (arXiv 2505.05713, section 3).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Final

import numpy as np

from distsim.analysis.slow_jobs.peer_groups import PeerGroups
from distsim.trace.recordings.event_graph import Numbers, Times, sliced_lists

#: Layer -> what the difference to the previous layer means.
LAYERS: Final = {
    "recorded": "",
    "no delay": "late starts",
    "steady": "uneven work",
    "even": "ranks slower than peers",
    "balanced": "unequal stages",
    "ideal": "slow communication",
}


def steady_times(groups: PeerGroups, own: Times) -> Times:
    """Work takes its mean over the usual steps at the same place of the same rank."""
    rows = np.flatnonzero(groups.graph.is_work & groups.usual_rows)
    keys = _numbered(groups.rank_index[rows], groups.graph.columns.place[rows])
    sums = np.bincount(keys, weights=own[rows])
    result = own.copy()
    result[rows] = (sums / np.bincount(keys))[keys]
    return result


def even_times(groups: PeerGroups, steady: Times) -> Times:
    """Work takes the low median over the peers of a rank.

    If all peers run the same program, places correspond to each other. Otherwise the total of each
    label is scaled.
    """
    result = steady.copy()
    for role in np.unique(groups.role_of):
        members = np.flatnonzero(groups.role_of == role)
        rows = np.flatnonzero(
            groups.graph.is_work & groups.usual_rows & np.isin(groups.rank_index, members)
        )
        if not rows.size:
            continue  # ranks of this role do not work in usual steps
        if len(np.unique(groups.program_of[members])) == 1:
            result[rows] = _even_places(groups, rows, steady)
        else:
            result[rows] = _even_labels(groups, rows, steady)
    return result


def _even_places(groups: PeerGroups, rows: Numbers, steady: Times) -> Times:
    """The low median over ranks of the times at each place."""
    places = _numbered(groups.graph.columns.place[rows])
    by_rank = _numbered(groups.rank_index[rows], places)
    _, first = np.unique(by_rank, return_index=True)
    lists = sliced_lists(places[first], rows[first], int(places.max(initial=-1)) + 1)
    medians = [low_median(steady[lists.items[a:b]]) for a, b in pairwise(lists.first)]
    return np.array(medians)[places]


def _even_labels(groups: PeerGroups, rows: Numbers, steady: Times) -> Times:
    """The times, scaled so that each label takes the low median of the ranks' totals."""
    label = _numbered(groups.graph.columns.label[rows])
    rank = _numbered(groups.rank_index[rows])
    per_step = np.zeros((int(rank.max()) + 1, int(label.max()) + 1))
    np.add.at(per_step, (rank, label), steady[rows])
    steps = [groups.usual[i].sum() for i in np.unique(groups.rank_index[rows])]
    per_step /= np.array(steps)[:, None]
    target = np.sort(per_step, axis=0)[(len(per_step) - 1) // 2]
    factors = target / np.maximum(per_step, 1.0)
    return np.asarray(steady[rows] * np.minimum(factors, 1.0)[rank, label])


def balanced_times(groups: PeerGroups, even: Times) -> Times:
    """Work with a label that all roles have takes the mean over the ranks, per step."""
    result = even.copy()
    if not groups.has_stages:
        return result
    columns = groups.graph.columns
    rows = np.flatnonzero(groups.graph.is_work & groups.usual_rows)
    rank = groups.rank_index[rows]
    per_step = np.zeros((len(groups.ranks), len(groups.graph.labels)))
    np.add.at(per_step, (rank, columns.label[rows]), even[rows])
    per_step /= np.maximum(groups.usual.sum(axis=1), 1)[:, None]
    everywhere = (per_step > 0).all(axis=0)
    factors = np.where(everywhere, per_step.mean(axis=0) / np.maximum(per_step, 1e-9), 1.0)
    result[rows] *= factors[rank, columns.label[rows]]
    return result


def usual_transfers(groups: PeerGroups, own: Times) -> Times:
    """Communication takes the usual time of its operation and size.

    This is the median over all of them if no sizes are recorded, and otherwise the lower quartile,
    because sizes make transfers comparable.
    """
    columns = groups.graph.columns
    rows = np.flatnonzero(~groups.graph.is_work)
    result = own.copy()
    if not len(rows):
        return result
    keys = _numbered(columns.label[rows], columns.nbytes[rows])
    lists = sliced_lists(keys, rows, int(keys.max()) + 1)
    share = 0.25 if columns.nbytes.any() else 0.5
    for i in range(len(lists.first) - 1):
        members = lists.items[lists.first[i] : lists.first[i + 1]]
        result[members] = np.quantile(own[members], share)
    return result


def mean_ideal(groups: PeerGroups, own: Times, transfer_labels: frozenset[str]) -> Times:
    """The ideal of arXiv 2505.05713: work takes the mean of its label, communication the median.

    ``transfer_labels``: labels that count as communication although no other rank takes part.
    """
    graph = groups.graph
    is_transfer = np.isin(graph.columns.label, _label_numbers(groups, transfer_labels))
    result = own.copy()
    for label in range(len(graph.labels)):
        rows = np.flatnonzero(graph.columns.label == label)
        if not len(rows):
            continue
        is_median = bool(is_transfer[rows[0]] or not graph.is_work[rows[0]])
        result[rows] = np.median(own[rows]) if is_median else np.mean(own[rows])
    return result


def low_median(values: Times) -> float:
    """The median, or the lower one of the two middle values.

    With two peers, the ordinary median would keep half of the excess of the slower one.
    """
    return float(np.sort(values)[(len(values) - 1) // 2])


def _label_numbers(groups: PeerGroups, names: frozenset[str]) -> list[int]:
    return [i for i, name in enumerate(groups.graph.labels) if name in names]


def _numbered(*keys: Numbers) -> Numbers:
    """Equal numbers for rows with equal keys, from 0."""
    combined = np.zeros(len(keys[0]), dtype=np.int64)
    for key in keys:
        _, dense = np.unique(key, return_inverse=True)
        combined = combined * (int(dense.max(initial=0)) + 1) + dense
    return np.unique(combined, return_inverse=True)[1]
