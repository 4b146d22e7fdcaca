"""Simulated time: a program, the rules of a backend and the costs of a cluster give a
`SimulatedRun`.

`distsim.semantics` decides which events may happen, and computes their times if their order cannot
matter (`distsim.semantics.local`). This package computes the times of all other programs, shares
links among transfers, and records the trace.
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
