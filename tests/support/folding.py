"""A program folded and unfolded, side by side: every rank's every time, outcome, verdict,
findings.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from distsim.analysis.timeline import build_timeline
from distsim.backends import BACKEND_PROFILES
from distsim.checker.verdict import verdict_of
from distsim.engine import may_fold_shared_links, run_program
from distsim.engine.backend_outcomes import backend_outcome
from distsim.engine.expand_folded import expand_blocked_state
from distsim.hardware.cost import CostModel
from distsim.program.lower import lower
from distsim.program.model import Program
from distsim.scenario import Scenario
from distsim.semantics.classes.representatives import FoldingError, representative_program
from distsim.simulation.simulate_scenario import cost_model, unfolded_timeline
from distsim.trace.model import Trace

_ROWS = (
    "position",
    "part",
    "op",
    "nbytes",
    "posted_ns",
    "returned_ns",
    "started_ns",
    "finished_ns",
    "waited_ns",
)


class Compared(NamedTuple):
    """Whether a scenario folds, by how much, how it ended, and what differs."""

    folded: bool
    ranks: int
    kept: int
    outcome: str
    differences: tuple[str, ...]
    ordered: bool = False  # followed in the order of time, because links are shared


def compared(scenario: Scenario) -> Compared:
    """Both ways to run a scenario, under its own back end; where what shares links does not fold,
    with links that nobody shares.
    """
    program = lower(scenario)
    cost = cost_model(scenario, program)
    part = representative_program(
        program,
        [cost],
        [BACKEND_PROFILES[program.backend]],
        worth=1.0,
        shared=may_fold_shared_links(program, cost),
    )
    if part is None or len(part.present) == program.world_size:
        return Compared(False, program.world_size, program.world_size, "", ())
    alone = cost.cluster.model_copy(update={"shared_links": False})
    for prices in (cost, cost_model(scenario, program, alone)):
        try:
            found = tuple(_differences(program, part, prices))
        except FoldingError:
            continue
        return Compared(
            True,
            program.world_size,
            len(part.present),
            found[0],
            found[2:],
            found[1] == "event-driven",
        )
    return Compared(False, program.world_size, program.world_size, "", ())


def _differences(program: Program, part: Program, cost: CostModel) -> list[str]:
    profile = BACKEND_PROFILES[program.backend]
    mine, theirs = (
        run_program(part, profile, cost, shared=may_fold_shared_links(program, cost)),
        run_program(program, profile, cost),
    )
    found: list[str] = [theirs.outcome, mine.driver]

    def same(what: str, one: Any, other: Any) -> None:
        if one != other:
            found.append(f"{what}: folded {one}, unfolded {other}")

    same("outcome", mine.outcome, theirs.outcome)
    same("makespan", mine.makespan_ns, theirs.makespan_ns)
    same("calls", part.call_count, program.call_count)
    left = expand_blocked_state(part, mine.final_state)
    same("ends", left and left.ends, theirs.final_state.ends)
    same("stuck", part.alike(mine.final_state.stuck), theirs.final_state.stuck)
    found += _rows(part, mine.trace, theirs.trace)
    measured, whole = unfolded_timeline(mine.trace, part, program), build_timeline(theirs.trace)
    for name in ("makespan_ns", "iteration_ns", "ranks", "critical_path"):
        same(name, getattr(measured, name), getattr(whole, name))
    same("collectives", sorted(measured.collectives), sorted(whole.collectives))
    ours, other = verdict_of(part), verdict_of(program)
    same(
        "verdict",
        (ours.verdict, ours.readings, part.alike(ours.ranks)),
        (other.verdict, other.readings, other.ranks),
    )
    same("codes", sorted({f.code for f in ours.findings}), sorted({f.code for f in other.findings}))
    mine_under, theirs_under = (
        backend_outcome(part, profile, cost),
        backend_outcome(program, profile, cost),
    )
    same("under", _told(part, mine_under), _told(program, theirs_under))
    return found


def _told(program: Program, outcome: Any) -> Any:
    return (
        outcome.outcome,
        outcome.possible,
        program.alike(outcome.ranks),
        outcome.flips_at_nbytes,
        outcome.variants,
    )


def _rows(part: Program, mine: Trace, theirs: Trace) -> list[str]:
    """Every rank's rows are those of the rank that stands for it."""
    assert part.representative_of is not None
    one, other = ({n: t[n] for n in ("rank", *_ROWS)} for t in (mine, theirs))
    texts = [
        np.array([t.text("op", i) for i in range(len(t.tables["op"]))] or [""])
        for t in (mine, theirs)
    ]
    for rank, of in enumerate(part.representative_of.tolist()):
        ours, own = one["rank"] == of, other["rank"] == rank
        if ours.sum() != own.sum():
            return [
                f"rank {rank} has {own.sum()} rows, rank {of}, which stands for it, {ours.sum()}"
            ]
        for name in _ROWS:
            a, b = one[name][ours], other[name][own]
            a, b = (texts[0][a], texts[1][b]) if name == "op" else (a, b)
            if not np.array_equal(a, b):
                return [
                    f"{name} of rank {rank}: folded {a[a != b][:4]} (rank {of}), unfolded {b[a != b][:4]}"
                ]
    return []
