"""From boards to a standstill: how each rank ended, and what those that are stuck wait for, worked out as the checker does."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from distsim.check.diagnose import diagnose
from distsim.check.instructions import IRECV, ISEND, JOIN, JOIN_ASYNC, POST, RECV, SEND
from distsim.check.judge import unlike_findings
from distsim.check.layout import Layout, build_layout
from distsim.check.leftovers import standstill
from distsim.check.onepass import Pass
from distsim.check.unlike import unlike_calls
from distsim.check.waitfor import wait_for
from distsim.check.whereabouts import Whereabouts
from distsim.findings.record import Finding
from distsim.program.records import Program
from distsim.real.board import Phase, Seen
from distsim.standstill import Blocked, RankEnd, RankStatus, Standstill

#: Texts of errors that follow from another rank's end or from waiting; they name no culprit (gloo's own words, semantics 1.1, 2.4).
CONSEQUENCES = (
    "Connection closed by peer", "Connection reset by peer", "Application timeout caused pair closure", "Broken pipe",
    "Timed out waiting", "Wait timeout", "recv, 0 bytes", "Socket Timeout", "Read error", "remote worker", "ncclRemoteError",
)  # fmt: skip


class Stood(NamedTuple):
    """What a run left: the ends of all ranks, the findings as a simulated standstill would have them, and who is to blame."""

    standstill: Standstill
    findings: tuple[Finding, ...]
    culprits: tuple[int, ...]


def stood(program: Program, boards: Mapping[int, Seen], exits: Mapping[int, int | None], start_ns: int,
          simulated: Standstill) -> Stood:  # fmt: skip
    """Read the boards of a run that is over."""
    ends = tuple(rank_end(program, rank, boards.get(rank), exits.get(rank), start_ns) for rank in range(program.world_size))
    layout = build_layout(program)
    where = Whereabouts(layout)
    done = _arrived(layout, ends)
    left = standstill(done, where)
    waiting = tuple(_with_needs(one, simulated) for one in left.blocked)
    whole = Standstill(ends, tuple(one for one in waiting if ends[one.rank].status == "blocked"), left.unreceived)
    clear = replace(left, blocked=tuple(one for one in waiting if one.needs))
    unlikes = unlike_calls(done, where)
    found = (*unlike_findings(program, where, unlikes), *diagnose(program, clear, layout))
    odd = tuple(dict.fromkeys(r for u in unlikes for r in u.minority or u.ranks))
    return Stood(whole, found, culprits(clear, odd))


def _with_needs(one: Blocked, simulated: Standstill) -> Blocked:
    """Where the contract sees nothing that is missing, the back end's rules do: take what the simulation says of the same call."""
    if one.needs and one.needs[0].ranks:
        return one
    same = next((b for b in simulated.blocked if (b.rank, b.position) == (one.rank, one.position)), None)
    return one._replace(needs=same.needs) if same is not None else one._replace(needs=())


def rank_end(program: Program, rank: int, board: Seen | None, code: int | None, start_ns: int) -> RankEnd:
    """How a rank ended, from its board and its exit status."""
    if board is None or board.phase == Phase.NEW:
        return RankEnd(rank, "absent", 0)
    at_ns = max(board.since_ns - start_ns, 0) if start_ns else 0
    position = board.position if board.phase >= Phase.RUNNING else 0
    if board.phase == Phase.ENDED:
        return RankEnd(rank, "ended", len(program.code(rank).calls), at_ns)
    return RankEnd(rank, _status(board, code), position, at_ns, board.message or _signal_text(code))


def _status(board: Seen, code: int | None) -> RankStatus:
    if board.phase == Phase.STRUCK:
        return "killed"
    if board.phase in (Phase.RAISED, Phase.BROKEN):
        return "raised"
    if board.phase == Phase.EXITED:
        return "ended"
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


def _arrived(layout: Layout, ends: tuple[RankEnd, ...]) -> Pass:
    """The checker's counters as they are when every rank has come to where it was seen."""
    done = Pass(layout, "rendezvous")
    for end in ends:
        if end.status == "absent":
            done.status[end.rank] = "absent"
            continue
        inside = end.status in ("blocked", "raised", "crashed")
        last = min(end.position + inside, len(done.codes[end.rank]) - 1)
        for at in range(last):
            _post(done, end.rank, at)
        done.position[end.rank] = end.position
        done.status[end.rank] = "" if end.status == "blocked" or is_consequence(end) else end.status  # it waited, until then
        done.message[end.rank] = end.message
    return done


def _post(done: Pass, rank: int, at: int) -> None:
    """What a call adds to the counters, without waiting for anything."""
    op, a, b = done.codes[rank][at]
    layout, made = done.layout, done.made[rank]
    if op in (ISEND, SEND):
        channel = layout.send_chan[rank][a]
        made[at] = done.sent[channel]
        done.sent[channel] += 1
    elif op in (IRECV, RECV):
        channel = layout.recv_chan[rank][a]
        made[at] = done.received[channel]
        done.received[channel] += 1
    elif op in (JOIN, JOIN_ASYNC):
        made[at] = done._arrive(rank, layout.member[rank][a], b)
    elif op == POST:
        made[at] = done._post(rank, at, a)


def is_consequence(end: RankEnd) -> bool:
    """The error says no more than that somebody else is gone or did not come."""
    return end.status == "raised" and any(text in end.message for text in CONSEQUENCES)


def culprits(left: Standstill, odd: tuple[int, ...]) -> tuple[int, ...]:
    """Who brought the run down, the first one first.

    Ranks that failed of themselves or never came; else those whose calls do not fit the others' (``odd``); else those whom stuck
    ranks wait for and who have left; else the circle. The first rank that times out, or sees a connection close, is what
    launchers name; it is never meant here.
    """
    own = [e for e in left.ends if e.status in ("killed", "absent") or (e.status == "raised" and not is_consequence(e))]
    if own:
        return tuple(e.rank for e in sorted(own, key=lambda e: (e.at_ns, e.rank)))
    crashed = tuple(e.rank for e in left.ends if e.status == "crashed")
    if odd and (crashed or left.blocked):
        return odd
    if crashed or not left.blocked:
        return crashed
    graph = wait_for(left)
    gone = tuple(sorted({r for ranks in graph.on_gone.values() for r in ranks}))
    return gone or graph.core


__all__ = ["CONSEQUENCES", "Stood", "culprits", "is_consequence", "rank_end", "stood"]
