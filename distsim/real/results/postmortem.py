"""Diagnoses a real run that is over: what blocked ranks wait for, the findings, and the blame.

Key idea: the progress files say in which call each rank was. Matching all posted calls in posting
order (`posted_calls`) gives what each blocked rank waits for, in the form in which the simulator
describes a hang. So the diagnosis of simulated hangs (`checker.diagnosis`) serves real runs too.

How a single rank ended is decided in `rank_ends`; the comparison with the simulated run is made in
`simulated_vs_real`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.checker.diagnosis.hang_findings import diagnose_hang
from distsim.checker.diagnosis.match_findings import (
    attach_consequences,
    is_consequence_line,
    without_repeated_findings,
)
from distsim.checker.diagnosis.wait_for_graph import build_wait_for_graph
from distsim.findings.final_state import (
    BlockedRank,
    FinalState,
    RankEnd,
    RankEndStatus,
    WaitDependency,
)
from distsim.findings.finding_types import Finding
from distsim.program.model import Program
from distsim.real.results.posted_calls import (
    WHOLE_CALL,
    PostedRequest,
    WaitAnalysis,
    analyze_waits,
)
from distsim.real.results.rank_ends import (
    failed_by_itself,
    has_timed_out,
    is_consequence,
    rank_end,
    was_terminated_by_launcher,
)
from distsim.real.shared.progress_file import NO_DEVICE_POSITION, ProgressSnapshot, RankPhase
from distsim.simulation.simulate_scenario import Simulation


class PostmortemResult(NamedTuple):
    """The ends of all ranks, the findings (as for a simulated hang), and the ranks to blame."""

    final_state: FinalState
    findings: tuple[Finding, ...]
    culprits: tuple[int, ...]


def postmortem(
    simulation: Simulation,
    snapshots: Mapping[int, ProgressSnapshot],
    exit_codes: Mapping[int, int | None],
    start_ns: int,
    sources: Mapping[PostedRequest, int],
) -> PostmortemResult:
    """Diagnose a run from its last progress snapshots.

    ``sources``: the rank whose message each receive from any source took.
    """
    program = simulation.program
    ends = _rank_ends(program, snapshots, exit_codes, start_ns)
    # A rank that raised a consequence error was waiting until then, so it counts as stuck.
    stuck = [end for end in ends if end.status == "blocked" or is_consequence(end)]
    waits = analyze_waits(
        program,
        [_posted_count(end) for end in ends],
        _positions_of_interest(stuck, snapshots),
        sources,
    )
    waiting = [_blocked_rank(simulation, waits, ends, end, snapshots[end.rank]) for end in stuck]
    blocked = tuple(wait for wait in waiting if ends[wait.rank].status == "blocked")
    final_state = FinalState(ends, blocked, waits.unreceived)
    if _startup_failed(program, ends):
        return _startup_result(simulation, final_state)

    diagnosed = _state_for_diagnosis(final_state, waiting)
    mismatches, mismatched_ranks = _mismatches(simulation, ends)
    timeouts = _timeout_findings(simulation, ends)
    hangs = diagnose_hang(program, diagnosed, taken=waits.taken)
    findings = without_repeated_findings(attach_consequences((*mismatches, *timeouts), hangs))
    # A rank whose receive from any source took the wrong message is to blame only if nothing else
    # went wrong.
    something_else_failed = bool(mismatched_ranks) or any(map(failed_by_itself, ends))
    takers = () if something_else_failed else _message_takers(findings, waits)
    culprits = (
        takers
        or blamed_ranks(ends, diagnosed, mismatched_ranks)
        or _awaited_by_timed_out(waits, ends)
    )
    return PostmortemResult(final_state, findings, culprits)


def _rank_ends(
    program: Program,
    snapshots: Mapping[int, ProgressSnapshot],
    exit_codes: Mapping[int, int | None],
    start_ns: int,
) -> tuple[RankEnd, ...]:
    terminated = was_terminated_by_launcher(snapshots, exit_codes)
    return tuple(
        rank_end(program, rank, snapshots.get(rank), exit_codes.get(rank), start_ns, terminated)
        for rank in range(program.world_size)
    )


def _posted_count(end: RankEnd) -> int:
    """How many calls a rank has posted; the call it was in counts unless it ended before it."""
    if end.status == "absent":
        return 0
    ended_inside_call = end.status in ("blocked", "raised", "crashed", "silent")
    return end.position + ended_inside_call


def _positions_of_interest(
    stuck: Sequence[RankEnd], snapshots: Mapping[int, ProgressSnapshot]
) -> set[tuple[int, int]]:
    """(rank, position) of the calls that the hosts and the devices of stuck ranks are in."""
    found = set[tuple[int, int]]()
    for end in stuck:
        if end.position >= 0:
            found.add((end.rank, end.position))
        device = snapshots[end.rank].device
        if device != NO_DEVICE_POSITION:
            found.add((end.rank, device))
    return found


# --- a start-up that failed ---


def _startup_failed(program: Program, ends: Sequence[RankEnd]) -> bool:
    if program.startup is None or not program.startup.failed:
        return False
    return any(end.status != "ended" for end in ends)


def _startup_result(simulation: Simulation, final_state: FinalState) -> PostmortemResult:
    """The result if the start-up fails; the simulation has already found why."""
    startup = simulation.program.startup
    assert startup is not None
    findings = tuple(f for f in simulation.findings if f.code.startswith("DS12"))
    culprits = {rank for cause in startup.causes for rank in cause.ranks}
    return PostmortemResult(final_state, findings, tuple(sorted(culprits)))


# --- what blocked ranks wait for ---


def _blocked_rank(
    simulation: Simulation,
    waits: WaitAnalysis,
    ends: Sequence[RankEnd],
    end: RankEnd,
    snapshot: ProgressSnapshot,
) -> BlockedRank:
    """What a stuck rank waits for."""
    needs = waits.at[end.rank, end.position].needs
    absent = tuple(other.rank for other in ends if other.status == "absent")
    if snapshot.phase < RankPhase.RUNNING and absent:
        needs = (WaitDependency(0, WHOLE_CALL, absent),)
    device_is_behind = snapshot.device != NO_DEVICE_POSITION
    if device_is_behind:
        # The host ran ahead, so the device's call is the one that waits; it comes first.
        device_needs = waits.at[end.rank, snapshot.device].needs
        needs = tuple(dict.fromkeys((*device_needs, *needs)))
    if not needs:
        needs = _needs_after_posting(simulation, waits, ends, end)
    return BlockedRank(end.rank, end.position, needs, end.at_ns, device=device_is_behind)


def _needs_after_posting(
    simulation: Simulation, waits: WaitAnalysis, ends: Sequence[RankEnd], end: RankEnd
) -> tuple[WaitDependency, ...]:
    """What a rank waits for although every call it needs was posted.

    First choice: members of the call that died or were stopped in it. Otherwise what the simulation
    says for this call. Otherwise members that lost their own peer, if some rank failed by itself.
    """
    others = waits.at[end.rank, end.position].others
    failed = [rank for rank in others if failed_by_itself(ends[rank])]
    dead = tuple(rank for rank in failed if ends[rank].status != "absent")
    if dead:
        return (WaitDependency(end.position, WHOLE_CALL, dead),)

    simulated = _simulated_needs(simulation, end)
    if simulated:
        return simulated

    if not is_consequence(end) or not any(map(failed_by_itself, ends)):
        return ()
    lost = tuple(rank for rank in others if _lost_its_peer(ends[rank]))
    return (WaitDependency(end.position, WHOLE_CALL, lost),) if lost else ()


def _lost_its_peer(end: RankEnd) -> bool:
    """Whether a rank stopped because another one did."""
    return is_consequence(end) or end.status == "blocked"


def _simulated_needs(simulation: Simulation, end: RankEnd) -> tuple[WaitDependency, ...]:
    """What the rank waits for in the simulation, if it is blocked in the same call there."""
    for blocked in simulation.run.final_state.blocked:
        if (blocked.rank, blocked.position) == (end.rank, end.position):
            return blocked.needs
    return ()


def _state_for_diagnosis(final_state: FinalState, waiting: Sequence[BlockedRank]) -> FinalState:
    """The final state as the diagnosis of hangs takes it.

    It contains only ranks whose needs are known. Ranks that lost their peer count as blocked.
    """
    explained = tuple(wait for wait in waiting if wait.needs)
    explained_ranks = {wait.rank for wait in explained}
    ends = tuple(
        end._replace(status=_status_for_diagnosis(end, end.rank in explained_ranks))
        for end in final_state.ends
    )
    return FinalState(ends, explained, final_state.unreceived)


def _status_for_diagnosis(end: RankEnd, has_known_needs: bool) -> RankEndStatus:
    """Blocked if the needs are known; a blocked rank without known needs counts as silent."""
    if has_known_needs:
        return "blocked"
    return "silent" if end.status == "blocked" else end.status


# --- findings ---


def _timeout_findings(simulation: Simulation, ends: Sequence[RankEnd]) -> tuple[Finding, ...]:
    """The simulation's findings on timeouts that are too short, if a timeout expired for real."""
    if not any(map(has_timed_out, ends)):
        return ()
    return tuple(f for f in simulation.findings if f.code == "DS804")


def _mismatches(
    simulation: Simulation, ends: Sequence[RankEnd]
) -> tuple[tuple[Finding, ...], tuple[int, ...]]:
    """Findings on mismatched calls, and the ranks of these calls if the run failed."""
    verdict = simulation.verdict
    if verdict is None or verdict.verdict != "mismatch":
        return (), ()
    found = tuple(
        _without_simulated_consequences(f) for f in simulation.findings if f.code.startswith("DS2")
    )
    if not found:
        return (), ()
    failed = any(end.status in ("blocked", "crashed") for end in ends)
    return found, (verdict.culprits or verdict.ranks) if failed else ()


def _without_simulated_consequences(finding: Finding) -> Finding:
    """A mismatch without its consequences in the simulation; those of the real run replace them."""
    lines = [line for line in finding.message.splitlines() if not is_consequence_line(line)]
    return replace(finding, message="\n".join(lines))


# --- blame ---


def blamed_ranks(
    ends: Sequence[RankEnd], state: FinalState, mismatched_ranks: tuple[int, ...]
) -> tuple[int, ...]:
    """The ranks that brought the run down, the first one first.

    In this order: ranks that failed by themselves or were absent; the ranks of mismatched calls;
    ranks that crashed; ranks that exited while others wait for them; the wait-for cycle. Launchers
    name the first rank that times out or sees a closed connection; such a rank is never blamed
    here.
    """
    # A crash can be the consequence of a mismatch, so crashed ranks are considered later.
    failed = [end for end in ends if failed_by_itself(end) and end.status != "crashed"]
    if failed:
        return tuple(end.rank for end in sorted(failed, key=lambda end: (end.at_ns, end.rank)))
    crashed = tuple(end.rank for end in ends if end.status == "crashed")
    if mismatched_ranks and (crashed or state.blocked):
        return mismatched_ranks
    if crashed or not state.blocked:
        return crashed
    graph = build_wait_for_graph(state)
    awaited_exited = {rank for ranks in graph.waits_on_exited.values() for rank in ranks}
    return tuple(sorted(awaited_exited)) or graph.core


def _message_takers(findings: Sequence[Finding], waits: WaitAnalysis) -> tuple[int, ...]:
    """Ranks whose receive from any source took the very message that they wait for now.

    The sender of that message has done all it had to do, so it is not to blame.
    """
    takers = {receive.rank for receive in waits.taken}
    named = {place.rank for f in findings if f.code == "DS304" for place in f.places}
    return tuple(sorted(takers & named))


def _awaited_by_timed_out(waits: WaitAnalysis, ends: Sequence[RankEnd]) -> tuple[int, ...]:
    """Ranks for which timed-out ranks waited, without those that timed out themselves."""
    timed_out = {end.rank for end in ends if has_timed_out(end)}
    awaited = set[int]()
    for rank in timed_out:
        awaited.update(waits.at[rank, ends[rank].position].others)
    return tuple(sorted(awaited - timed_out))
