"""What a real run came to, in the simulator's words, and whether it ended as simulated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.check.wording import some_ranks
from distsim.real.sameness import Held
from distsim.real.standing import is_consequence
from distsim.standstill import RankEnd

if TYPE_CHECKING:
    from distsim.simulation import Simulation


def outcome_of(ends: Sequence[RankEnd], values: Sequence[Held], simulated: str) -> str:
    """The worst that happened, as the engines count it: crashes, raises, hangs, wrong-data, completes.

    A rank that a fault killed counts as a crash only where nothing else came of it. Where all ended with the very values that
    the simulation calls wrong, they are wrong.
    """
    statuses = {end.status for end in ends}
    if "crashed" in statuses:
        return "crashes"
    if "raised" in statuses:
        return "raises"
    if statuses & {"blocked", "silent"}:
        return "hangs"
    if "killed" in statuses:
        return "crashes"
    wrong = simulated == "wrong-data" or any(held.state == "differs" for held in values)
    return "wrong-data" if wrong else "completes"


def differences(simulation: Simulation, outcome: str, ends: Sequence[RankEnd]) -> tuple[str, ...]:
    """Where the real run ended otherwise than the simulated one.

    Which of several stuck ranks sees an error first is a race, so a rank that is stuck and one whose error says no more than that
    somebody is gone count as the same.
    """
    run, verdict = simulation.run, simulation.verdict
    if verdict is not None and verdict.depends_on == "schedule" and outcome in ("completes", "wrong-data", "hangs", "raises"):
        return ()  # another order of events is as true
    same_kind = {outcome, simulation.outcome} <= {"raises", "hangs"}
    if outcome != simulation.outcome and not same_kind and outcome in _possible(simulation):
        return ()
    found = []
    if outcome != simulation.outcome and not same_kind:
        found.append(f"the outcome is {outcome}, simulated {simulation.outcome}")
    crashed = {e.rank for e in ends if e.status == "crashed"} & {e.rank for e in run.standstill.ends if e.status == "crashed"}
    otherwise: dict[tuple[str, str], list[int]] = {}
    for real, simulated in zip(ends, run.standstill.ends, strict=True):
        here, there = _kind(real), _kind(simulated)
        if crashed and {here, there} <= {"stuck", "ended", "crashed"}:
            continue  # how far the others get beside a process that dies is a race too
        if here != there:
            otherwise.setdefault((here, there), []).append(real.rank)
        elif here == "stuck" and real.position != simulated.position:
            found.append(f"rank {real.rank} is stuck in call {real.position}, simulated in call {simulated.position}")
    found += [f"{some_ranks(ranks)}: {_WORDS[here]}, simulated: {_WORDS[there]}" for (here, there), ranks in otherwise.items()]
    return tuple(found)


_WORDS = {"stuck": "got no further", "ended": "came to the end", "raised": "raised an error of its own", "crashed": "crashed",
          "killed": "killed", "absent": "never started"}  # fmt: skip


def _kind(end: RankEnd) -> str:
    return "stuck" if end.status in ("blocked", "silent") or is_consequence(end) else end.status


def _possible(simulation: Simulation) -> set[str]:
    """What the program may come to in some order of events, as in another than that of simulated time."""
    from distsim.engine.outcomes import outcome_under
    from distsim.profiles import PROFILES

    found = outcome_under(simulation.program, PROFILES[simulation.run.profile], simulation.cost)
    return set(found.possible)


__all__ = ["differences", "outcome_of"]
