"""Where each rank is when a capture is over.

A blocked rank has a status for each line at which one of its threads waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from distsim.script_capture.hub.state import PendingReply, RankProcess
from distsim.script_capture.launch.parent_process import CapturedRun
from distsim.script_capture.protocol.message_types import NO_CALL_SITE, CallOrigin
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.result.recorded_calls import BLOCKING_NAMES

#: How `CapturedRankStatus.what` begins if a rank waits for keys of the store; the keys follow.
STORE_KEY: Final = "store key"


@dataclass(frozen=True)
class CapturedRankStatus:
    """``state``: ended, raised, exited, killed, waits, runs or absent. ``what``: in which call."""

    rank: int
    state: str
    what: str
    place: CallOrigin

    @property
    def source(self) -> str:
        """The text of the line."""
        return source_text(self.place.file, self.place.line)


def rank_statuses(captured: CapturedRun, world_size: int) -> tuple[CapturedRankStatus, ...]:
    """The status of each rank, in order."""
    planned = {process.planned: process for process in captured.others if process.planned >= 0}
    found: list[CapturedRankStatus] = []
    for rank in range(world_size):
        process = captured.ranks.get(rank) or planned.get(rank)
        if process is None:
            absent = "never called init_process_group"
            found.append(CapturedRankStatus(rank, "absent", absent, NO_CALL_SITE))
        elif process.ended is not None:
            found.append(_ended_status(rank, process))
        else:
            found += _thread_statuses(rank, process)
    return tuple(found)


def _ended_status(rank: int, process: RankProcess) -> CapturedRankStatus:
    """How a rank ended: the error, the signal or the exit code."""
    ended = process.ended
    assert ended is not None
    text = ended.text
    if ended.how == "exited" and text in ("", str(ended.code)):
        text = f"with code {ended.code}"
    return CapturedRankStatus(rank, ended.how, text, ended.place)


def _thread_statuses(rank: int, process: RankProcess) -> list[CapturedRankStatus]:
    """One for each place at which a thread waits; if none does, one for the process."""
    waits = [
        _waiting_status(rank, process, process.waiting[number])
        for number in sorted(process.waiting)
    ]
    distinct = list(dict.fromkeys(waits))
    return distinct or [_status_without_waits(rank, process)]


def _waiting_status(rank: int, process: RankProcess, pending: PendingReply) -> CapturedRankStatus:
    """What a thread waits for: keys of the store, a call, or the start-up of all ranks."""
    place = process.sites.get(pending.site, NO_CALL_SITE)
    if pending.keys is not None:
        what = f"{STORE_KEY}: {', '.join(pending.keys)}"
        return CapturedRankStatus(rank, "waits", what, place)
    call = pending.call or pending.polled_call
    what = BLOCKING_NAMES.get(call.op, call.op) if call is not None else pending.startup_op
    return CapturedRankStatus(rank, "waits", what, place)


def _status_without_waits(rank: int, process: RankProcess) -> CapturedRankStatus:
    """The process waits for a future, or runs."""
    if process.futures:
        number = min(process.futures)
        op = process.calls[number].op
        place = _call_site_of(process, number)
        return CapturedRankStatus(rank, "waits", BLOCKING_NAMES.get(op, op), place)
    place = NO_CALL_SITE
    if process.events:
        last = process.events[-1]
        place = process.sites.get(last.site, NO_CALL_SITE)
    return CapturedRankStatus(rank, "runs", "its own code", place)


def _call_site_of(process: RankProcess, number: int) -> CallOrigin:
    """The place of the event with this number."""
    for event in process.events:
        if event.number == number:
            return process.sites.get(event.site, NO_CALL_SITE)
    return NO_CALL_SITE
