"""From boards to a standstill: how each rank ended, and what those that are stuck wait for, worked out as the checker does."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from distsim.check.diagnose import diagnose
from distsim.check.waitfor import wait_for
from distsim.findings.record import Finding
from distsim.program.records import Program
from distsim.real.board import STOPPED, Phase, Seen
from distsim.real.posted import Posted, Request
from distsim.simulation import Simulation
from distsim.standstill import Blocked, Need, RankEnd, RankStatus, Standstill

#: Texts of errors that follow from another rank's end or from waiting; they name no culprit (gloo's own words, semantics 1.1, 2.4).
CONSEQUENCES = (
    "Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure", "Broken pipe",
    "Timed out waiting", "Wait timeout", "recv, 0 bytes", "Socket Timeout", "Read error", "remote worker", "ncclRemoteError",
)  # fmt: skip

#: Those of them that a rank's own timeout has, or its group's.
_PATIENCE = ("Timed out waiting", "Wait timeout")


class Stood(NamedTuple):
    """What a run left: the ends of all ranks, the findings as a simulated standstill would have them, and who is to blame."""

    standstill: Standstill
    findings: tuple[Finding, ...]
    culprits: tuple[int, ...]


def stood(simulation: Simulation, boards: Mapping[int, Seen], exits: Mapping[int, int | None], start_ns: int,
          sources: Mapping[Request, int]) -> Stood:  # fmt: skip
    """Read the boards of a run that is over. ``sources``: whom receives from any source met."""
    program = simulation.program
    ends = tuple(rank_end(program, rank, boards.get(rank), exits.get(rank), start_ns) for rank in range(program.world_size))
    posted = Posted(program, ends, sources)
    absent = tuple(end.rank for end in ends if end.status == "absent")
    waiting = []
    for end in ends:
        if end.status == "blocked" or is_consequence(end):  # a rank that lost its peer waited until then
            early = boards[end.rank].phase < Phase.RUNNING and absent
            needs = (Need(0, -1, absent),) if early else posted.needs(end.rank, end.position)
            behind = boards[end.rank].device
            if behind >= 0:  # the host ran ahead: its device is what waits
                needs = tuple(dict.fromkeys((*posted.needs(end.rank, behind), *needs)))
            waiting.append(
                Blocked(end.rank, end.position, needs or _further(simulation, posted, ends, end), end.at_ns, device=behind >= 0)
            )
    whole = Standstill(ends, tuple(one for one in waiting if ends[one.rank].status == "blocked"), posted.unreceived())
    clear = tuple(one for one in waiting if one.needs)
    shown = {one.rank for one in clear}
    waited = tuple(replace(end, status=_shown(end, end.rank in shown)) for end in ends)
    left = Standstill(waited, clear, whole.unreceived)
    misfits, odd = _misfits(simulation, ends)
    late = tuple(f for f in simulation.findings if f.code == "DS804") if any(map(_timed_out, ends)) else ()
    return Stood(whole, (*misfits, *late, *diagnose(program, left)), culprits(ends, left, odd) or _late(posted, ends))


def _timed_out(end: RankEnd) -> bool:
    return end.status == "raised" and any(text in end.message for text in _PATIENCE)


def _late(posted: Posted, ends: tuple[RankEnd, ...]) -> tuple[int, ...]:
    """Whom those waited for whose own timeout ran out; not those whose own did too."""
    waited = {end.rank for end in ends if _timed_out(end)}
    awaited = {rank for one in waited for rank in posted.others(one, ends[one].position)}
    return tuple(sorted(awaited - waited))


def _shown(end: RankEnd, waits: bool) -> RankStatus:
    """How a diagnosis takes an end: those who lost their peer as waiting, those who wait for nothing it knows as silent."""
    if waits:
        return "blocked"
    return "silent" if end.status == "blocked" else end.status


def _further(simulation: Simulation, posted: Posted, ends: tuple[RankEnd, ...], end: RankEnd) -> tuple[Need, ...]:
    """Where all that a call needs was posted: who of its members died or was stopped in it, else what the simulation says."""
    others = posted.others(end.rank, end.position)
    dead = tuple(
        r
        for r in others
        if ends[r].status in ("killed", "crashed", "silent") or (ends[r].status == "raised" and not is_consequence(ends[r]))
    )
    if dead:
        return (Need(end.position, -1, dead),)
    stuck = simulation.run.standstill.blocked
    needs = next((b.needs for b in stuck if (b.rank, b.position) == (end.rank, end.position)), ())
    rooted = any(
        e.status in ("killed", "crashed", "silent", "absent") or (e.status == "raised" and not is_consequence(e)) for e in ends
    )
    lost = tuple(r for r in others if rooted and (is_consequence(ends[r]) or ends[r].status == "blocked"))
    return needs or ((Need(end.position, -1, lost),) if lost and is_consequence(end) else ())


def _misfits(simulation: Simulation, ends: tuple[RankEnd, ...]) -> tuple[tuple[Finding, ...], tuple[int, ...]]:
    """Findings on calls that meet and do not fit, and whose calls they are; nothing where all went well."""
    verdict = simulation.verdict
    found = tuple(f for f in simulation.findings if f.code.startswith("DS2"))
    if verdict is None or verdict.verdict != "mismatch" or not found:
        return (), ()
    failed = any(end.status in ("blocked", "crashed") for end in ends)
    return found, (verdict.culprits or verdict.ranks) if failed else ()


def rank_end(program: Program, rank: int, board: Seen | None, code: int | None, start_ns: int) -> RankEnd:
    """How a rank ended, from its board and its exit status."""
    if board is None or board.phase == Phase.NEW:
        return RankEnd(rank, "absent", 0)
    at_ns = max(board.since_ns - start_ns, 0) if start_ns else 0
    position = board.position if board.phase >= Phase.RUNNING else 0
    if board.phase in (Phase.WRITING, Phase.ENDED):
        return RankEnd(rank, "ended", len(program.code(rank).calls), at_ns)
    message = board.message or _signal_text(code) or _device_text(program, board)
    return RankEnd(rank, _status(board, code), position, at_ns, message)


def _device_text(program: Program, board: Seen) -> str:
    """Where a device stands that is behind its host."""
    if board.device < 0 or board.device == board.position:
        return ""
    place = program.place(board.rank, board.device)
    return f"its device is at {place.op}, line {place.line}"


def _status(board: Seen, code: int | None) -> RankStatus:
    if board.phase == Phase.STRUCK:
        return "killed"
    if board.phase in (Phase.RAISED, Phase.BROKEN):
        return "raised"
    if board.phase == Phase.EXITED:
        return "ended"
    if code is None and board.message == STOPPED:
        return "silent"
    if code is None or code == -signal.SIGTERM:
        return "blocked"
    return "killed" if code == -signal.SIGKILL else "crashed"


def _signal_text(code: int | None) -> str:
    if code is None or code >= 0:
        return ""
    try:
        return f"ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"ended by signal {-code}"


def is_consequence(end: RankEnd) -> bool:
    """The error says no more than that somebody else is gone or did not come."""
    return end.status == "raised" and any(text in end.message for text in CONSEQUENCES)


def culprits(ends: tuple[RankEnd, ...], left: Standstill, odd: tuple[int, ...]) -> tuple[int, ...]:
    """Who brought the run down, the first one first.

    Ranks that failed of themselves or never came; else those whose calls do not fit the others' (``odd``); else those whom stuck
    ranks wait for and who have left; else the circle. The first rank that times out, or sees a connection close, is what
    launchers name; it is never meant here.
    """
    own = [e for e in ends if e.status in ("killed", "absent", "silent") or (e.status == "raised" and not is_consequence(e))]
    if own:
        return tuple(e.rank for e in sorted(own, key=lambda e: (e.at_ns, e.rank)))
    crashed = tuple(e.rank for e in ends if e.status == "crashed")
    if odd and (crashed or left.blocked):
        return odd
    if crashed or not left.blocked:
        return crashed
    graph = wait_for(left)
    gone = tuple(sorted({r for ranks in graph.on_gone.values() for r in ranks}))
    return gone or graph.core


__all__ = ["CONSEQUENCES", "Stood", "culprits", "is_consequence", "rank_end", "stood"]
