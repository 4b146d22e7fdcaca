"""A run that is over: how each rank ended, what those that are stuck wait for, who is to blame, and
whether it ended as simulated.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from distsim.checker.diagnosis.hang_findings import diagnose_hang
from distsim.checker.diagnosis.match_findings import attach_consequences, without_repeated_findings
from distsim.checker.diagnosis.wait_for_graph import build_wait_for_graph
from distsim.checker.wording import rank_list
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
    DivergingReceive,
    PostedRequest,
    WaitAnalysis,
    analyze_waits,
)
from distsim.real.results.value_check import BufferCheck
from distsim.real.shared.progress_file import STOPPED_MESSAGE, ProgressSnapshot, RankPhase
from distsim.scenario.startup.init_method import rendezvous_info
from distsim.simulation.simulate_scenario import Simulation

#: Texts of errors that follow from another rank's end or from waiting; they name no culprit (gloo's
#: own words, semantics 1.1, 2.4).
CONSEQUENCE_ERRORS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Application timeout caused pair closure",
    "Broken pipe",
    "Timed out waiting",
    "Wait timeout",
    "recv, 0 bytes",
    "Socket Timeout",
    "Read error",
    "remote worker",
    "ncclRemoteError",
    "wait timeout after",
    "waiting for clients",
    "The client socket has timed out",
    "connectFullMesh failed",
)

#: Those of them that a rank's own timeout has, or its group's.
_TIMEOUT_ERRORS = ("Timed out waiting", "Wait timeout")


class PostmortemResult(NamedTuple):
    """What a run left: the ends of all ranks, the findings as a simulated standstill would have
    them, and who is to blame.
    """

    final_state: FinalState
    findings: tuple[Finding, ...]
    culprits: tuple[int, ...]


def postmortem(
    simulation: Simulation,
    boards: Mapping[int, ProgressSnapshot],
    exits: Mapping[int, int | None],
    start_ns: int,
    sources: Mapping[PostedRequest, int],
) -> PostmortemResult:
    """Read the boards of a run that is over. ``sources``: whom receives from any source met."""
    program = simulation.program
    told = _was_terminated_by_launcher(boards, exits)
    ends = tuple(
        rank_end(program, rank, boards.get(rank), exits.get(rank), start_ns, told)
        for rank in range(program.world_size)
    )
    stuck = [
        end for end in ends if end.status == "blocked" or is_consequence(end)
    ]  # a rank that lost its peer waited until then
    asked = {
        (end.rank, at) for end in stuck for at in (end.position, boards[end.rank].device) if at >= 0
    }
    found = analyze_waits(program, [_posted_count(end) for end in ends], asked, sources)
    waiting = [_blocked_rank(simulation, found, ends, end, boards[end.rank]) for end in stuck]
    whole = FinalState(
        ends, tuple(one for one in waiting if ends[one.rank].status == "blocked"), found.unreceived
    )
    clear = tuple(one for one in waiting if one.needs)
    shown = {one.rank for one in clear}
    waited = tuple(
        end._replace(status=_status_for_diagnosis(end, end.rank in shown)) for end in ends
    )
    left = FinalState(waited, clear, whole.unreceived)
    mismatches, odd = _mismatches(simulation, ends)
    late = (
        tuple(f for f in simulation.findings if f.code == "DS804")
        if any(map(_timed_out, ends))
        else ()
    )
    if (
        program.startup is not None
        and program.startup.failed
        and any(end.status != "ended" for end in ends)
    ):
        start = tuple(f for f in simulation.findings if f.code.startswith("DS12"))
        return PostmortemResult(
            whole,
            start,
            tuple(sorted({rank for cause in program.startup.causes for rank in cause.ranks})),
        )
    told_once = without_repeated_findings(
        attach_consequences((*mismatches, *late), diagnose_hang(program, left, taken=found.taken))
    )
    took = (
        _message_takers(told_once, found)
        if not odd and not any(map(_failed_by_itself, ends))
        else ()
    )
    return PostmortemResult(
        whole,
        told_once,
        took or blamed_ranks(ends, left, odd) or _awaited_by_timed_out(found, ends),
    )


def _message_takers(findings: Sequence[Finding], found: WaitAnalysis) -> tuple[int, ...]:
    """Ranks whose receive from any source took the message that they wait for: whoever sent it did
    all it had to.
    """
    takers = {receive.rank for receive in found.taken}
    named = {place.rank for f in findings if f.code == "DS304" for place in f.places}
    return tuple(sorted(takers & named))


def _posted_count(end: RankEnd) -> int:
    """How many calls a rank has posted: the one it was in counts where it was not ended before
    it.
    """
    inside = end.status in ("blocked", "raised", "crashed", "silent")
    return 0 if end.status == "absent" else end.position + inside


def _blocked_rank(
    simulation: Simulation,
    found: WaitAnalysis,
    ends: Sequence[RankEnd],
    end: RankEnd,
    board: ProgressSnapshot,
) -> BlockedRank:
    """What a rank that got no further waits for."""
    absent = tuple(other.rank for other in ends if other.status == "absent")
    early = board.phase < RankPhase.RUNNING and absent
    needs = (WaitDependency(0, -1, absent),) if early else found.at[end.rank, end.position].needs
    if board.device >= 0:  # the host ran ahead: its device is what waits
        needs = tuple(dict.fromkeys((*found.at[end.rank, board.device].needs, *needs)))
    return BlockedRank(
        end.rank,
        end.position,
        needs or _needs_after_posting(simulation, found, ends, end),
        end.at_ns,
        device=board.device >= 0,
    )


def _timed_out(end: RankEnd) -> bool:
    return end.status == "raised" and any(text in end.message for text in _TIMEOUT_ERRORS)


def _awaited_by_timed_out(found: WaitAnalysis, ends: Sequence[RankEnd]) -> tuple[int, ...]:
    """Whom those waited for whose own timeout ran out; not those whose own did too."""
    waited = {end.rank for end in ends if _timed_out(end)}
    awaited = {rank for one in waited for rank in found.at[one, ends[one].position].others}
    return tuple(sorted(awaited - waited))


def _status_for_diagnosis(end: RankEnd, waiting: bool) -> RankEndStatus:
    """How a diagnosis takes an end: those who lost their peer as waiting, those who wait for
    nothing it knows as silent.
    """
    if waiting:
        return "blocked"
    return "silent" if end.status == "blocked" else end.status


def _needs_after_posting(
    simulation: Simulation, found: WaitAnalysis, ends: Sequence[RankEnd], end: RankEnd
) -> tuple[WaitDependency, ...]:
    """Where all that a call needs was posted: who of its members died or was stopped in it, else
    what the simulation says.
    """
    others = found.at[end.rank, end.position].others
    dead = tuple(r for r in others if _failed_by_itself(ends[r]) and ends[r].status != "absent")
    if dead:
        return (WaitDependency(end.position, -1, dead),)
    stuck = simulation.run.final_state.blocked
    needs = next((b.needs for b in stuck if (b.rank, b.position) == (end.rank, end.position)), ())
    rooted = any(map(_failed_by_itself, ends))
    lost = tuple(
        r for r in others if rooted and (is_consequence(ends[r]) or ends[r].status == "blocked")
    )
    return needs or (
        (WaitDependency(end.position, -1, lost),) if lost and is_consequence(end) else ()
    )


def _failed_by_itself(end: RankEnd) -> bool:
    """Of itself, not because of others."""
    return end.status in ("killed", "crashed", "silent", "absent") or (
        end.status == "raised" and not is_consequence(end)
    )


def _mismatches(
    simulation: Simulation, ends: Sequence[RankEnd]
) -> tuple[tuple[Finding, ...], tuple[int, ...]]:
    """Findings on calls that meet and do not fit, and whose calls they are; nothing where all went
    well.
    """
    verdict = simulation.verdict
    found = tuple(
        _without_simulated_consequences(f) for f in simulation.findings if f.code.startswith("DS2")
    )
    if verdict is None or verdict.verdict != "mismatch" or not found:
        return (), ()
    failed = any(end.status in ("blocked", "crashed") for end in ends)
    return found, (verdict.culprits or verdict.ranks) if failed else ()


def _without_simulated_consequences(finding: Finding) -> Finding:
    """A mismatch without what followed from it in the simulation: what did for real is told in its
    place.
    """
    lines = (
        line
        for line in finding.message.splitlines()
        if not line.startswith("  in its wake, ") and not line.endswith(" more waits behind it")
    )
    return replace(finding, message="\n".join(lines))


def _was_terminated_by_launcher(
    boards: Mapping[int, ProgressSnapshot], exits: Mapping[int, int | None]
) -> bool:
    """A launcher as torch's sends SIGTERM to the others once a rank has failed: is there one who
    failed of itself, by its status?
    """
    failed = (
        code
        for rank, code in exits.items()
        if not (boards[rank].phase == RankPhase.RAISED and _blames_other_rank(boards[rank].message))
    )
    return any(code not in (None, 0, -signal.SIGTERM) for code in failed)


def rank_end(
    program: Program,
    rank: int,
    board: ProgressSnapshot | None,
    code: int | None,
    start_ns: int,
    terminated_by_launcher: bool = False,
) -> RankEnd:
    """How a rank ended, from its board and its exit status. ``told_to_end``: SIGTERM came from the
    launcher because of another rank.
    """
    if board is None or board.phase == RankPhase.NEW:
        return RankEnd(rank, "absent", 0)
    at_ns = max(board.since_ns - start_ns, 0) if start_ns else 0
    position = board.position if board.phase >= RankPhase.RUNNING else 0
    if board.phase in (RankPhase.WRITING, RankPhase.ENDED) and not _died_by_own_signal(code):
        return RankEnd(rank, "ended", len(program.code(rank).calls), at_ns)
    message = board.message or _signal_text(code) or _device_text(program, board)
    return RankEnd(
        rank, _rank_status(board, code, terminated_by_launcher), position, at_ns, message
    )


def _died_by_own_signal(code: int | None) -> bool:
    """A signal that nobody sent: what a library still does in the background of a program that is
    over may end its process.
    """
    return code is not None and code < 0 and code not in (-signal.SIGKILL, -signal.SIGTERM)


def _device_text(program: Program, board: ProgressSnapshot) -> str:
    """Where a device stands that is behind its host."""
    if board.device < 0 or board.device == board.position:
        return ""
    place = program.place(board.rank, board.device)
    return f"its device is at {place.op}, line {place.line}"


def _rank_status(
    board: ProgressSnapshot, code: int | None, terminated_by_launcher: bool
) -> RankEndStatus:
    if board.phase == RankPhase.STRUCK:
        return "killed"
    if board.phase in (RankPhase.RAISED, RankPhase.BROKEN):
        return "raised"
    if board.phase == RankPhase.EXITED:
        return "ended"
    if code is None and board.message == STOPPED_MESSAGE:
        return "silent"
    if code is None or (code == -signal.SIGTERM and terminated_by_launcher):
        return "blocked"
    return "killed" if code in (-signal.SIGKILL, -signal.SIGTERM) else "crashed"


def _signal_text(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def is_consequence(end: RankEnd) -> bool:
    """The error says no more than that somebody else is gone or did not come."""
    return end.status == "raised" and _blames_other_rank(end.message)


def _blames_other_rank(message: str) -> bool:
    return any(text in message for text in CONSEQUENCE_ERRORS)


def blamed_ranks(
    ends: Sequence[RankEnd], left: FinalState, odd: tuple[int, ...]
) -> tuple[int, ...]:
    """Who brought the run down, the first one first.

    Ranks that failed of themselves or never came; else those whose calls do not fit the others'
    (``odd``); else those whom stuck ranks wait for and who have left; else the circle. The first
    rank that times out, or sees a connection close, is what launchers name; it is never meant
    here.
    """
    own = [e for e in ends if _failed_by_itself(e) and e.status != "crashed"]
    if own:
        return tuple(e.rank for e in sorted(own, key=lambda e: (e.at_ns, e.rank)))
    crashed = tuple(e.rank for e in ends if e.status == "crashed")
    if odd and (crashed or left.blocked):
        return odd
    if crashed or not left.blocked:
        return crashed
    graph = build_wait_for_graph(left)
    gone = tuple(sorted({r for ranks in graph.waits_on_exited.values() for r in ranks}))
    return gone or graph.core


# --- beside the simulation ---


def outcome_of(
    ends: Sequence[RankEnd],
    values: Sequence[BufferCheck],
    simulated: str,
    taken: Sequence[DivergingReceive] = (),
) -> str:
    """The worst that happened, as the engines count it: crashes, raises, hangs, wrong-data,
    completes.

    A rank that a fault killed counts as a crash only where nothing else came of it. Where all ended
    with the very values that the simulation calls wrong, they are wrong; other values are not,
    where receives from any source have ``taken`` other messages.
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
    wrong = simulated == "wrong-data" or (
        not taken and any(held.state == "differs" for held in values)
    )
    return "wrong-data" if wrong else "completes"


#: Where a run ended otherwise than simulated and the simulation is right all the same.
_RACE = "as simulated, but for who of those that are stuck sees an error first, which is a race"
_ORDER = "not as simulated, but in a way that the program may: the order of events decides it"
_NUMBERS = "with wrong data, as simulated, though with other numbers"


class SimulatedVsReal(NamedTuple):
    """A real run beside its simulation. ``differences``: where it ended otherwise and should not
    have; ``agreement``: where there are none, how the two go together, empty where they ended
    alike."""

    differences: tuple[str, ...]
    agreement: str = ""


def compare_with_simulation(
    simulation: Simulation,
    outcome: str,
    ends: Sequence[RankEnd],
    values: Sequence[BufferCheck],
    taken: Sequence[DivergingReceive] = (),
) -> SimulatedVsReal:
    """Where the real run ended otherwise than the simulated one.

    Which of several stuck ranks sees an error first is a race, so a rank that is stuck and one
    whose error says no more than that somebody is gone count as the same. Where the order of events
    decides how the program ends, or whose message a receive from any source has ``taken``, another
    order is as true.
    """
    verdict = simulation.verdict
    wrong = sum(held.state == "differs" for held in values)
    same_kind = outcome == simulation.outcome or {outcome, simulation.outcome} <= {
        "raises",
        "hangs",
    }
    found = [] if same_kind else [f"the outcome is {outcome}, simulated {simulation.outcome}"]
    found += _differing_ends(simulation, ends)
    if wrong and taken and not found:
        return SimulatedVsReal((), _ORDER)
    if wrong and outcome != "wrong-data":
        found.append(f"{wrong} buffer{'s' if wrong > 1 else ''} with other values than simulated")
    if not found:
        return SimulatedVsReal(
            (), _RACE if outcome != simulation.outcome else _NUMBERS if wrong else ""
        )
    by_order = verdict is not None and verdict.depends_on == "schedule"
    if (
        (by_order and outcome in ("completes", "wrong-data", "hangs", "raises"))
        or (not same_kind and outcome in _possible_outcomes(simulation))
        or _passed_stale_rendezvous(simulation, ends)
    ):
        return SimulatedVsReal((), _ORDER)
    return SimulatedVsReal(tuple(found))


def _passed_stale_rendezvous(simulation: Simulation, ends: Sequence[RankEnd]) -> bool:
    """All are through a start-up at a file of an earlier run: who reads an address there that its
    owner has written anew reads the new one (run: all three ranks did, now and then)."""
    return any(f.code == "DS126" for f in simulation.findings) and all(
        end.status == "ended" for end in ends
    )


def _differing_ends(simulation: Simulation, ends: Sequence[RankEnd]) -> list[str]:
    """The ranks that ended otherwise than simulated, in words."""
    simulated_ends = _ends_matched_to_real(simulation, ends)
    crashed = {e.rank for e in ends if e.status == "crashed"} & {
        e.rank for e in simulated_ends if e.status == "crashed"
    }
    startup = simulation.program.startup
    apart = (
        {r for r, e in startup.endings.items() if e.status == "apart"}
        if startup is not None
        else set()
    )
    found, otherwise = list[str](), dict[tuple[str, str], list[int]]()
    for real, simulated in zip(ends, simulated_ends, strict=True):
        here, there = _end_kind(real), _end_kind(simulated)
        if crashed and {here, there} <= {"stuck", "ended", "crashed"}:
            continue  # how far the others get beside a process that dies is a race too
        if here != there:
            otherwise.setdefault((here, there), []).append(real.rank)
        elif here == "stuck" and real.position != simulated.position and real.rank not in apart:
            found.append(
                f"rank {real.rank} is stuck in call {real.position}, simulated in call {simulated.position}"
            )
    found += [
        f"{rank_list(ranks)}: {_END_TEXTS[here]}, simulated: {_END_TEXTS[there]}"
        for (here, there), ranks in otherwise.items()
    ]
    return found


def _ends_matched_to_real(simulation: Simulation, ends: Sequence[RankEnd]) -> Sequence[RankEnd]:
    """The simulated ends. Of processes that bring the same to a start-up, as two that say one rank,
    whoever comes first is a race: their ends are exchanged so that they go with the real ones."""
    found, startup = list(simulation.run.final_state.ends), simulation.program.startup
    alike: dict[object, list[int]] = {}
    for one in startup.entrances if startup is not None and startup.failed else ():
        if not one.absent:
            alike.setdefault(
                (rendezvous_info(one), one.node, one.backend, one.timeout_ns, one.device), []
            ).append(one.rank)
    for ranks in alike.values():
        left, others = [found[rank] for rank in ranks], list[int]()
        for rank in ranks:
            fitting = next((end for end in left if _end_kind(end) == _end_kind(ends[rank])), None)
            if fitting is None:
                others.append(rank)
            else:
                left.remove(fitting)
                found[rank] = fitting
        for rank, end in zip(others, left, strict=True):
            found[rank] = end
    return found


_END_TEXTS = {
    "stuck": "got no further",
    "ended": "came to the end",
    "raised": "raised an error of its own",
    "crashed": "crashed",
    "killed": "killed",
    "absent": "never started",
}


def _end_kind(end: RankEnd) -> str:
    return "stuck" if end.status in ("blocked", "silent") or is_consequence(end) else end.status


def _possible_outcomes(simulation: Simulation) -> set[str]:
    """What the program may come to in some order of events, as in another than that of simulated
    time.
    """
    from distsim.backends import BACKEND_PROFILES
    from distsim.engine.backend_outcomes import backend_outcome

    found = backend_outcome(
        simulation.program, BACKEND_PROFILES[simulation.run.profile], simulation.cost
    )
    return set(found.possible)
