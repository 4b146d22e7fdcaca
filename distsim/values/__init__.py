"""What every buffer holds after a run, in numbers and by whose contributions: a pass of its own over the calls that met."""

from distsim.values.compute import compute_values
from distsim.values.lineage import Contribution
from distsim.values.numbers import LIMIT_ELEMENTS, fill
from distsim.values.record import Breach, Seen, Stretch, Values

__all__ = ["LIMIT_ELEMENTS", "Breach", "Contribution", "Seen", "Stretch", "Values", "compute_values", "fill"]
