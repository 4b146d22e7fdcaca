"""What every buffer contains after a run: its numbers, and which contributions they are made of.

Values are computed in a separate pass over the calls that matched in a finished run. They never
influence the run itself.
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
