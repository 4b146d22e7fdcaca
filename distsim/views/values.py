"""What the tensors hold at the end of a run: a few lines of text, and plain data for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.trace_values import HeaderValues, Kept, header_values, number, packed
from distsim.views.tables import cut, page_width, ranks_words

if TYPE_CHECKING:
    from distsim.simulation import Simulation
    from distsim.values.record import Values

#: Lines of text, and elements of one tensor in JSON; a longer tensor that is not uniform is null there.
MOST_LINES = 24
MOST_ELEMENTS = 64


def values_lines(values: Values | None) -> list[str]:
    """A line per tensor and set of ranks that hold the same; tensors with unknown numbers everywhere are left out."""
    if values is None:
        return []
    by_label: dict[str, dict[str, list[int]]] = {}
    for (rank, label), text in values.final.items():
        by_label.setdefault(label, {}).setdefault(text, []).append(rank)
    known = {label: texts for label, texts in by_label.items() if set(texts) != {"?"}}
    width = min(24, max((len(label) for label in known), default=0))
    lines = [
        cut(
            f"  {cut(label if i == 0 else '', width).ljust(width)}  {text}  ({ranks_words(ranks)})",
            page_width(),
        )
        for label, texts in known.items()
        for i, (text, ranks) in enumerate(texts.items())
    ]
    if len(lines) > MOST_LINES:
        lines[MOST_LINES:] = [f"  … and {len(lines) - MOST_LINES} more; --format json has all"]
    return lines


def values_json(values: Values | None) -> Mapping[str, object] | None:
    """tensor -> rank -> a number (uniform), a nested list, or null (unknown, or longer than MOST_ELEMENTS)."""
    if values is None:
        return None
    found: dict[str, dict[str, object]] = {}
    for rank, label in values.final:
        found.setdefault(label, {})[str(rank)] = _plain(values, rank, label)
    return found


def _plain(values: Values, rank: int, label: str) -> object:
    array = values.array(rank, label)
    if array is None or array.size == 0:
        return None if array is None else []
    flat = array.reshape(-1)[:1] if not any(array.strides) else array.reshape(-1)
    if flat.size == 1 or (flat == flat[0]).all():
        return number(flat[0])
    return None if flat.size > MOST_ELEMENTS else _nested(array)


def _nested(array: NDArray[np.generic]) -> object:
    return [_nested(row) for row in array] if array.ndim else number(array.reshape(-1)[0])


def values_header(simulation: Simulation) -> HeaderValues:
    """The keys of a trace's header that say what the tensors hold in the end; none where values were not asked for."""
    values = simulation.wide_values
    if values is None:
        return {}
    return header_values(
        Kept(rank, label, state.dtype, packed(values.array(rank, label))) for (rank, label), state in values.buffers.items()
    )
