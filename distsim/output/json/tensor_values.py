"""What the tensors hold at the end of a run: a few lines of text, and plain data for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.output.text_layout import page_width, ranks_label, truncated
from distsim.trace.packed_values import (
    HeaderValues,
    RankTensorValue,
    header_values,
    json_number,
    pack_tensor,
)

if TYPE_CHECKING:
    from distsim.simulation.simulate_scenario import Simulation
    from distsim.values.buffer_values import BufferValues

#: Lines of text, and elements of one tensor in JSON; a longer tensor that is not uniform is null
#: there.
MAX_VALUE_LINES = 24
MAX_ELEMENTS = 64


def values_lines(values: BufferValues | None) -> list[str]:
    """A line for each tensor and each set of ranks with equal values.

    Tensors whose numbers are unknown on all ranks are omitted.
    """
    if values is None:
        return []
    by_label: dict[str, dict[str, list[int]]] = {}
    for (rank, label), text in values.final.items():
        by_label.setdefault(label, {}).setdefault(text, []).append(rank)
    known = {label: texts for label, texts in by_label.items() if set(texts) != {"?"}}
    width = min(24, max(map(len, known), default=0))
    lines = []
    for label, texts in known.items():
        # The label is printed once, on the first line of its tensor.
        cell = truncated(label, width).ljust(width)
        for text, ranks in texts.items():
            lines.append(truncated(f"  {cell}  {text}  ({ranks_label(ranks)})", page_width()))
            cell = " " * width
    if len(lines) > MAX_VALUE_LINES:
        lines[MAX_VALUE_LINES:] = [
            f"  … and {len(lines) - MAX_VALUE_LINES} more; --format json has all"
        ]
    return lines


def values_json(values: BufferValues | None) -> Mapping[str, object] | None:
    """tensor -> rank -> a number (uniform), a nested list, or null (unknown, or longer than
    MOST_ELEMENTS).
    """
    if values is None:
        return None
    found: dict[str, dict[str, object]] = {}
    for rank, label in values.final:
        found.setdefault(label, {})[str(rank)] = _plain_value(values, rank, label)
    return found


def _plain_value(values: BufferValues, rank: int, label: str) -> object:
    array = values.array(rank, label)
    if array is None or array.size == 0:
        return None if array is None else []
    flat = array.reshape(-1)[:1] if not any(array.strides) else array.reshape(-1)
    if flat.size == 1 or (flat == flat[0]).all():
        return json_number(flat[0])
    return None if flat.size > MAX_ELEMENTS else _nested_list(array)


def _nested_list(array: NDArray[np.generic]) -> object:
    return [_nested_list(row) for row in array] if array.ndim else json_number(array.reshape(-1)[0])


def trace_header_values(simulation: Simulation) -> HeaderValues:
    """The keys of a trace's header that say what the tensors hold in the end; none where values
    were not asked for.
    """
    values = simulation.wide_values
    if values is None:
        return {}
    return header_values(
        RankTensorValue(rank, label, state.dtype, pack_tensor(values.array(rank, label)))
        for (rank, label), state in values.buffers.items()
    )
