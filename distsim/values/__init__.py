"""What every buffer holds after a run, in numbers and by whose contributions: a pass of its own
over the calls that met.
"""

from distsim.values.buffer_values import (
    BufferSnapshot,
    BufferValues,
    ElementRange,
    LineageViolation,
)
from distsim.values.lineage import TensorContribution
from distsim.values.numbers import LIMIT_ELEMENTS, fill_numbers
from distsim.values.propagation import compute_values

__all__ = [
    "LIMIT_ELEMENTS",
    "LineageViolation",
    "TensorContribution",
    "BufferSnapshot",
    "ElementRange",
    "BufferValues",
    "compute_values",
    "fill_numbers",
]
