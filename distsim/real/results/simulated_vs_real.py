"""Compares how a real run ended with how its simulation ended.

Key idea: a difference counts only if the simulation is wrong. Real runs may differ without that,
because some things are races: which blocked rank sees an error first, how far the others
get while a process dies, and, for programs whose outcome depends on the order of events, the
outcome itself. These races are recognised here and reported as an agreement of a certain kind.

Values of buffers are compared in `value_check`; here only their number counts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from distsim.checker.wording import rank_list
from distsim.findings.final_state import RankEnd
from distsim.real.results.posted_calls import DivergingReceive
from distsim.real.results.rank_ends import is_consequence
from distsim.real.results.value_check import BufferCheck
from distsim.scenario.startup.init_method import rendezvous_info
from distsim.scenario.startup.records import StartupProcess
from distsim.simulation.simulate_scenario import Simulation


def outcome_of(
    ends: Sequence[RankEnd],
    values: Sequence[BufferCheck],
    simulated: str,
    diverging: Sequence[DivergingReceive] = (),
) -> str:
    """The worst outcome, in the engines' order: crashes, raises, hangs, wrong-data, completes.

    A rank that a fault killed counts as a crash only if nothing else resulted from it. If all ranks
    ended with exactly the values that the simulation calls wrong, the data are wrong. Other values
    are wrong too, unless receives from any source took other messages (``diverging``).
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
    if simulated == "wrong-data":
        return "wrong-data"
    values_differ = any(check.state == "differs" for check in values)
    return "wrong-data" if values_differ and not diverging else "completes"


#: Ends of a run that differ from the simulated one although the simulation is right.
_RACE = "as predicted, except for a race: which blocked rank sees an error first"
_ORDER = "differently, but in a possible way: the outcome depends on the order of events"
_NUMBERS = "with wrong data, as predicted, but with other values"


class SimulatedVsReal(NamedTuple):
    """A real run compared with its simulation.

    ``differences``: how it ended otherwise although it should not have. ``agreement``: if there are
    no differences, how the two go together; empty if they ended in the same way.
    """

    differences: tuple[str, ...]
    agreement: str = ""


def compare_with_simulation(
    simulation: Simulation,
    outcome: str,
    ends: Sequence[RankEnd],
    values: Sequence[BufferCheck],
    diverging: Sequence[DivergingReceive] = (),
) -> SimulatedVsReal:
    """How the end of the real run differs from that of the simulated one.

    Which of several blocked ranks sees an error first is a race, so a blocked rank and a rank that
    raised a consequence error count as the same. If the order of events decides how the program
    ends, or whose message a receive from any source takes (``diverging``), another order is as
    true.
    """
    differences: list[str] = []
    if not _same_kind_of_outcome(outcome, simulation.outcome):
        differences.append(f"the outcome is {outcome}, simulated: {simulation.outcome}")
    differences += _differing_ends(simulation, ends)

    wrong_buffers = sum(check.state == "differs" for check in values)
    if wrong_buffers and diverging and not differences:
        return SimulatedVsReal((), _ORDER)
    if wrong_buffers and outcome != "wrong-data":
        plural = "s" if wrong_buffers > 1 else ""
        differences.append(f"{wrong_buffers} buffer{plural} with values other than simulated")

    if not differences:
        return SimulatedVsReal((), _agreement(outcome, simulation.outcome, wrong_buffers))
    if _happens_in_another_order(simulation, outcome, ends):
        return SimulatedVsReal((), _ORDER)
    return SimulatedVsReal(tuple(differences))


def _same_kind_of_outcome(real: str, simulated: str) -> bool:
    """Whether a hang ends in errors depends on timeouts, so the two count as one kind."""
    return real == simulated or {real, simulated} <= {"raises", "hangs"}


def _agreement(real: str, simulated: str, wrong_buffers: int) -> str:
    """How two ends without a difference go together."""
    if real != simulated:
        return _RACE
    return _NUMBERS if wrong_buffers else ""


# --- other orders of events ---


def _happens_in_another_order(
    simulation: Simulation, outcome: str, ends: Sequence[RankEnd]
) -> bool:
    """The program may end as the real run did, in an order of events other than the simulated."""
    if _depends_on_order(simulation, outcome):
        return True
    is_other_kind = not _same_kind_of_outcome(outcome, simulation.outcome)
    if is_other_kind and outcome in _possible_outcomes(simulation):
        return True
    return _passed_stale_rendezvous(simulation, ends)


def _depends_on_order(simulation: Simulation, outcome: str) -> bool:
    """The checker found that the schedule decides how the program ends."""
    verdict = simulation.verdict
    if verdict is None or verdict.depends_on != "schedule":
        return False
    return outcome in ("completes", "wrong-data", "hangs", "raises")


def _possible_outcomes(simulation: Simulation) -> set[str]:
    """The outcomes of the program in any order of events, not only in that of simulated time."""
    # Imported here because most runs end as simulated and never need the enumeration.
    from distsim.backends import BACKEND_PROFILES
    from distsim.engine.backend_outcomes import backend_outcome

    profile = BACKEND_PROFILES[simulation.run.profile]
    found = backend_outcome(simulation.program, profile, simulation.cost)
    return set(found.possible)


def _passed_stale_rendezvous(simulation: Simulation, ends: Sequence[RankEnd]) -> bool:
    """All ranks passed a start-up at the rendezvous file of an earlier run (DS126).

    A rank that reads an address after its owner has rewritten it reads the new one. In real runs
    all three ranks sometimes did so.
    """
    has_stale_file = any(f.code == "DS126" for f in simulation.findings)
    return has_stale_file and all(end.status == "ended" for end in ends)


# --- ends of the ranks ---


_END_TEXTS = {
    "stuck": "blocked",
    "ended": "finished",
    "raised": "raised an error of its own",
    "crashed": "crashed",
    "killed": "killed",
    "absent": "never started",
}


def _end_kind(end: RankEnd) -> str:
    """A key of `_END_TEXTS`."""
    is_stuck = end.status in ("blocked", "silent") or is_consequence(end)
    return "stuck" if is_stuck else end.status


def _differing_ends(simulation: Simulation, ends: Sequence[RankEnd]) -> list[str]:
    """The ranks that ended otherwise than simulated, in words."""
    simulated_ends = _ends_matched_to_real(simulation, ends)
    crashed_in_both = _crashed_ranks(ends) & _crashed_ranks(simulated_ends)
    separated = _ranks_in_separate_worlds(simulation)
    differences: list[str] = []
    ranks_by_kinds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for real, simulated in zip(ends, simulated_ends, strict=True):
        kinds = (_end_kind(real), _end_kind(simulated))
        if crashed_in_both and {*kinds} <= {"stuck", "ended", "crashed"}:
            continue  # how far other ranks get while a process dies is a race too
        if kinds[0] != kinds[1]:
            ranks_by_kinds[kinds].append(real.rank)
            continue
        has_position = kinds[0] == "stuck" and real.rank not in separated
        if has_position and real.position != simulated.position:
            differences.append(
                f"rank {real.rank} is blocked in call {real.position}, "
                f"simulated: in call {simulated.position}"
            )
    for (real_kind, simulated_kind), ranks in ranks_by_kinds.items():
        differences.append(
            f"{rank_list(ranks)}: {_END_TEXTS[real_kind]}, simulated: {_END_TEXTS[simulated_kind]}"
        )
    return differences


def _crashed_ranks(ends: Sequence[RankEnd]) -> set[int]:
    return {end.rank for end in ends if end.status == "crashed"}


def _ranks_in_separate_worlds(simulation: Simulation) -> set[int]:
    """Ranks that pass the start-up in a group other than that of the others.

    The simulation does not predict how far they get, so their positions are not compared.
    """
    startup = simulation.program.startup
    if startup is None:
        return set()
    return {rank for rank, ending in startup.endings.items() if ending.status == "apart"}


def _ends_matched_to_real(simulation: Simulation, ends: Sequence[RankEnd]) -> Sequence[RankEnd]:
    """The simulated ends, exchanged among interchangeable processes to fit the real ends.

    If two processes bring the same to a start-up, for example both claim one rank, it is a race
    which of them is admitted.
    """
    matched = list(simulation.run.final_state.ends)
    for ranks in _interchangeable_processes(simulation):
        available = [matched[rank] for rank in ranks]
        unmatched: list[int] = []
        for rank in ranks:
            kind = _end_kind(ends[rank])
            fitting = next((end for end in available if _end_kind(end) == kind), None)
            if fitting is None:
                unmatched.append(rank)
            else:
                available.remove(fitting)
                matched[rank] = fitting
        for rank, end in zip(unmatched, available, strict=True):
            matched[rank] = end
    return matched


def _interchangeable_processes(simulation: Simulation) -> list[list[int]]:
    """Ranks grouped by what they bring to a start-up that fails."""
    startup = simulation.program.startup
    if startup is None or not startup.failed:
        return []
    groups: dict[object, list[int]] = defaultdict(list)
    for process in startup.entrances:
        if not process.absent:
            groups[_startup_key(process)].append(process.rank)
    return list(groups.values())


def _startup_key(process: StartupProcess) -> object:
    return (
        rendezvous_info(process),
        process.node,
        process.backend,
        process.timeout_ns,
        process.device,
    )
