"""What ranks hold at their peak, as a table beside what their device has."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.units import show_bytes
from distsim.views.tables import WIDTH, cut, folded, ranks_text, table

if TYPE_CHECKING:
    from distsim.check.memory import Held
    from distsim.cluster import Cluster

#: Lines of the table: the largest, and how many more there are.
MOST_KINDS = 12
#: Where the ranks have fewer characters than this left, the heads of the columns are shorter.
_LEAST_RANKS = 12
_SHORT = {"parameters": "params", "gradients": "grads", "activations": "activ."}


def memory_lines(found: Sequence[Held], cluster: Cluster) -> list[str]:
    """One line for each kind of rank, that is for all entries that hold the same; the fullest first. Empty where nothing is stated."""
    if not found:
        return []
    room = cluster.device.memory_nbytes
    kinds = [kind for kind in _kinds(found) if any(one.parts.get(kind) for one in found)]
    rows = sorted(_merged(found), key=lambda row: (-row[1].total, row[0]))
    cells = [
        [*(_size(one.parts.get(kind, 0)) for kind in kinds), show_bytes(one.total), _share(one.total, room)] for _, one in rows
    ]
    heads: tuple[dict[str, str], ...] = ({}, _SHORT)
    for words in heads:
        lines = table([*(words.get(kind, kind) for kind in kinds), "total", "%"], cells, left=())
        narrow = WIDTH - 2 - max(map(len, lines))
        if narrow >= _LEAST_RANKS:
            break
    labels = table(["ranks"], [[cut(label, narrow)] for label, _ in rows])
    wide = max(map(len, labels))
    lines = [f"{label.ljust(wide)}{line}" for label, line in zip(labels, lines, strict=True)][: 1 + MOST_KINDS]
    more = [f"  … {len(rows) - MOST_KINDS} more …"] if len(rows) > MOST_KINDS else []
    title = f"Memory of a rank at its peak; {cluster.device.name} has {show_bytes(room)}"
    return [*folded(title), *lines, *more]


def _kinds(found: Sequence[Held]) -> list[str]:
    return list(dict.fromkeys(kind for one in found for kind in one.parts))


def _merged(found: Sequence[Held]) -> list[tuple[str, Held]]:
    """(ranks, one of the entries) for entries that hold the same; by name where ranks have several entries."""
    seen = [rank for one in found for rank in one.ranks]
    if len(set(seen)) < len(seen):
        return [(one.name, one) for one in found]
    same: dict[tuple[tuple[str, int], ...], list[Held]] = {}
    for one in found:
        same.setdefault(tuple(one.parts.items()), []).append(one)
    return [(ranks_text(sorted(r for one in alike for r in one.ranks)), alike[0]) for alike in same.values()]


def _size(nbytes: int) -> str:
    return show_bytes(nbytes) if nbytes else "-"


def _share(nbytes: int, room: int) -> str:
    """Rounded up: what does not fit is never shown as 100 %"""
    if 0 < 100 * nbytes < room:
        return "<1"
    return str(-(-100 * nbytes // room)) if room else "-"
