"""Simulated time: a program, the rules of a backend and the costs of a cluster give a
`SimulatedRun`.

Which events may happen is decided by `distsim.semantics`, what they cost by
`distsim.hardware.cost`; this package decides when they happen.
"""

from distsim.engine.run_record import SimulatedRun
from distsim.engine.simulate import (
    MAX_SHARED_LINK_CALLS,
    may_fold_shared_links,
    outcome_of_ordered_run,
    run_program,
)

__all__ = [
    "MAX_SHARED_LINK_CALLS",
    "SimulatedRun",
    "may_fold_shared_links",
    "outcome_of_ordered_run",
    "run_program",
]
