"""Entry point of the local driver: run ranks one by one, or by classes of equal ranks."""

from __future__ import annotations

from distsim.semantics.form.completion import CompletionConditions
from distsim.semantics.form.linked_program import LinkedProgram
from distsim.semantics.local.rank_clocks import (
    MIN_RANKS_PER_CLASS,
    LocalClocks,
    RunProgress,
    local_run_inputs,
)


def run_local_clocks(linked: LinkedProgram, conditions: CompletionConditions) -> RunProgress:
    """Run a program in which the order of events does not matter, by classes where that pays."""
    if len(linked.units) * MIN_RANKS_PER_CLASS <= len(linked.program.present):
        # Imported only here: short programs do not need them, and start-up time counts.
        from distsim.semantics.local.class_clocks import run_quotient
        from distsim.semantics.local.quotient import coarsest_quotient

        quotient = coarsest_quotient(linked, conditions)
        if quotient is not None:
            return run_quotient(linked, conditions, quotient)
    return LocalClocks(local_run_inputs(linked, conditions)).run()
