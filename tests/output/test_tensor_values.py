"""What tensors hold in the JSON of a simulation."""

from __future__ import annotations

import numpy as np
import pytest

from distsim.output.json.tensor_values import MAX_ELEMENTS, values_json
from distsim.scenario import loads
from distsim.simulation.simulate_scenario import simulate


def held(shape: list[int], value: str) -> object:
    """Tensor x of rank 1 of 2."""
    text = (
        f"world: 2\nbackend: gloo\ntensors: {{x: {{shape: {shape}, value: {value}}}}}\n"
        "program: [broadcast: {tensor: x, src: 1}]\n"
    )
    values = values_json(simulate(loads(text)).values)
    assert values is not None
    found = values["x"]
    assert isinstance(found, dict)
    return found["1"]


@pytest.mark.parametrize(
    ("shape", "value", "expected"),
    [
        ([3], "rank", 1.0),
        ([2, 2], "7", 7.0),
        ([1], "index", 0.0),
        ([3], "index + rank", [1.0, 2.0, 3.0]),
        ([2, 2], "index", [[0.0, 1.0], [2.0, 3.0]]),
        ([MAX_ELEMENTS], "index", np.arange(MAX_ELEMENTS).tolist()),
        ([MAX_ELEMENTS + 1], "index", None),
        ([MAX_ELEMENTS + 1], "rank", 1.0),
    ],
    ids=str,
)
def test_a_tensor_is_a_number_if_uniform_a_nested_list_if_short_and_else_null(
    shape: list[int], value: str, expected: object
) -> None:
    assert held(shape, value) == expected


def test_values_that_were_not_computed_are_null() -> None:
    assert values_json(None) is None
