"""Which ranks do the same work, and in which steps they do it.

The program of a rank is its usual sequence of labels in a step. Steps with another sequence (a
checkpoint, an evaluation) are unusual; averages leave them out. Peers are ranks with the same role:
the same communications, beginning with the same one, and the same kinds of work. Data-parallel
replicas have the same program. The middle stages of a pipeline have the same role, although a 1F1B
schedule orders their work differently.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise

import numpy as np

from distsim.trace.recordings.event_graph import EventGraph, Flags, Numbers, sliced_lists


@dataclass(frozen=True, eq=False)
class PeerGroups:
    """``program_of``, ``role_of``: position of a rank in ``ranks`` -> number of its program or
    role.

    ``usual[rank, step]``: whether a rank runs its usual sequence in a step.
    """

    graph: EventGraph
    program_of: Numbers
    role_of: Numbers
    usual: Flags

    @cached_property
    def ranks(self) -> list[int]:
        return self.graph.ranks

    @cached_property
    def rank_index(self) -> Numbers:
        """By row, the position of its rank in ``ranks``."""
        return np.searchsorted(np.array(self.ranks), self.graph.columns.rank)

    @cached_property
    def usual_rows(self) -> Flags:
        """Rows of usual steps."""
        step = self.graph.columns.step
        return (step >= 0) & self.usual[self.rank_index, np.maximum(step, 0)]

    @cached_property
    def usual_steps(self) -> Flags:
        """By step, whether all ranks run their usual sequence."""
        return np.asarray(self.usual.all(axis=0))

    def peers_of(self, position: int) -> list[int]:
        """The positions of the other ranks with the same role."""
        same = np.flatnonzero(self.role_of == self.role_of[position])
        return [int(other) for other in same if other != position]

    @cached_property
    def has_stages(self) -> bool:
        """Whether ranks have different roles."""
        return len(np.unique(self.role_of)) > 1


def find_peer_groups(graph: EventGraph, selected: Flags) -> PeerGroups:
    """Compare the sequences of labels of all ranks in all steps.

    Steps that are not selected count as unusual, so that averages leave them out.
    """
    columns = graph.columns
    ranks, step_count = graph.ranks, len(graph.steps)
    position = np.searchsorted(np.array(ranks), columns.rank)
    counted = np.flatnonzero(columns.step >= 0)
    cells = position[counted] * step_count + columns.step[counted]
    by_cell = sliced_lists(cells, counted, len(ranks) * step_count)
    sequences: list[list[bytes]] = []
    for rank in range(len(ranks)):
        first = by_cell.first[rank * step_count : (rank + 1) * step_count + 1]
        sequences.append([_sequence(graph, by_cell.items[a:b]) for a, b in pairwise(first)])
    usual_sequence = [Counter(of_rank).most_common(1)[0][0] for of_rank in sequences]
    usual = np.array(
        [[one == usual_sequence[i] for one in of_rank] for i, of_rank in enumerate(sequences)]
    )
    programs: dict[bytes, int] = {}
    program_of = [programs.setdefault(sequence, len(programs)) for sequence in usual_sequence]
    roles: dict[object, int] = {}
    role_of = []
    for i, sequence in enumerate(usual_sequence):
        cell = i * step_count + sequences[i].index(sequence)
        rows = by_cell.items[by_cell.first[cell] : by_cell.first[cell + 1]]
        role_of.append(roles.setdefault(_role(graph, rows), len(roles)))
    return PeerGroups(graph, np.array(program_of), np.array(role_of), usual & selected)


def _sequence(graph: EventGraph, rows: Numbers) -> bytes:
    labels = graph.columns.label[rows]
    return np.stack([labels, graph.columns.place[rows]]).tobytes()


def _role(graph: EventGraph, rows: Numbers) -> object:
    """What the steps of peers have in common: communications in any order, and kinds of work."""
    labels = graph.columns.label[rows]
    is_work = graph.is_work[rows]
    communications = labels[~is_work]
    first = int(communications[0]) if len(communications) else -1
    counts = tuple(sorted(Counter(communications.tolist()).items()))
    return first, counts, frozenset(labels[is_work].tolist())
