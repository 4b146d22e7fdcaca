"""What the tensors hold at the end of a run, as plain data for JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

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

#: Elements of one tensor; a longer tensor that is not uniform is null.
MAX_ELEMENTS = 64


def values_json(values: BufferValues | None) -> Mapping[str, object] | None:
    """tensor -> rank -> a number (uniform), a nested list, or null (unknown, or longer than
    MAX_ELEMENTS).
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
