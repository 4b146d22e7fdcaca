"""How each rank of a real run ended, from its progress file and its exit status.

Key idea: a rank that ended because of *another* rank (its connection was closed, its wait timed
out) must be distinguished from one that failed by itself. Only the latter can be blamed. The texts
of the errors decide, because torch raises the same exception types for both.

Sources: gloo's own texts (semantics 1.1, 2.4). This module does not look at what a blocked rank
waits for; see `postmortem`.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping

from distsim.findings.final_state import RankEnd, RankEndStatus
from distsim.program.model import Program
from distsim.real.shared.progress_file import (
    NO_DEVICE_POSITION,
    STOPPED_MESSAGE,
    ProgressSnapshot,
    RankPhase,
)

#: Texts of errors that only report another rank's end or an expired wait. Such an error never names
#: the cause.
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

#: The consequence errors of a rank whose own timeout, or whose group's timeout, expired.
_TIMEOUT_ERRORS = ("Timed out waiting", "Wait timeout")

#: Signals by which another process ends a rank; any other signal comes from the rank itself.
_SIGNALS_FROM_OUTSIDE = (-signal.SIGKILL, -signal.SIGTERM)


def rank_end(
    program: Program,
    rank: int,
    snapshot: ProgressSnapshot | None,
    exit_code: int | None,
    start_ns: int,
    terminated_by_launcher: bool = False,
) -> RankEnd:
    """How a rank ended. ``start_ns``: the common start of the repetition, 0 if there was none.

    ``terminated_by_launcher``: the launcher sent SIGTERM because another rank had failed.
    """
    if snapshot is None or snapshot.phase == RankPhase.NEW:
        return RankEnd(rank, "absent", 0)
    at_ns = max(snapshot.since_ns - start_ns, 0) if start_ns else 0
    position = snapshot.position if snapshot.phase >= RankPhase.RUNNING else 0
    has_finished = snapshot.phase in (RankPhase.WRITING, RankPhase.ENDED)
    if has_finished and not _died_by_own_signal(exit_code):
        return RankEnd(rank, "ended", len(program.code(rank).calls), at_ns)
    status = _rank_status(snapshot, exit_code, terminated_by_launcher)
    message = snapshot.message or _signal_text(exit_code) or _device_text(program, snapshot)
    return RankEnd(rank, status, position, at_ns, message)


def _died_by_own_signal(exit_code: int | None) -> bool:
    """The process ended by a signal that no other process sent.

    After the program is over, what a library still does in the background can crash the process.
    """
    return exit_code is not None and exit_code < 0 and exit_code not in _SIGNALS_FROM_OUTSIDE


def _rank_status(
    snapshot: ProgressSnapshot, exit_code: int | None, terminated_by_launcher: bool
) -> RankEndStatus:
    if snapshot.phase == RankPhase.STRUCK:
        return "killed"
    if snapshot.phase in (RankPhase.RAISED, RankPhase.BROKEN):
        return "raised"
    if snapshot.phase == RankPhase.EXITED:
        return "ended"
    if exit_code is None:
        return "silent" if snapshot.message == STOPPED_MESSAGE else "blocked"
    if exit_code == -signal.SIGTERM and terminated_by_launcher:
        return "blocked"
    return "killed" if exit_code in _SIGNALS_FROM_OUTSIDE else "crashed"


def _signal_text(exit_code: int | None) -> str:
    if exit_code is None or exit_code >= 0:
        return ""
    try:
        return f"ended by {signal.Signals(-exit_code).name}"
    except ValueError:
        return f"ended by signal {-exit_code}"


def _device_text(program: Program, snapshot: ProgressSnapshot) -> str:
    """The call at which the device is, if the host has run ahead of it."""
    if snapshot.device in (NO_DEVICE_POSITION, snapshot.position):
        return ""
    place = program.place(snapshot.rank, snapshot.device)
    return f"its device is in {place.op}, line {place.line}"


# --- causes and consequences ---


def was_terminated_by_launcher(
    snapshots: Mapping[int, ProgressSnapshot], exit_codes: Mapping[int, int | None]
) -> bool:
    """Whether SIGTERM came from a launcher that ended all ranks because one of them had failed.

    torch's elastic launcher does that. It needs a rank that failed by itself: a rank that raised a
    consequence error does not count.
    """
    return any(_is_failure(snapshots[rank], exit_code) for rank, exit_code in exit_codes.items())


def _is_failure(snapshot: ProgressSnapshot, exit_code: int | None) -> bool:
    """The rank failed by itself, by its exit status."""
    if snapshot.phase == RankPhase.RAISED and _is_consequence_error(snapshot.message):
        return False
    return exit_code not in (None, 0, -signal.SIGTERM)


def is_consequence(end: RankEnd) -> bool:
    """The rank's error only reports that another rank ended or did not arrive."""
    return end.status == "raised" and _is_consequence_error(end.message)


def _is_consequence_error(message: str) -> bool:
    return any(text in message for text in CONSEQUENCE_ERRORS)


def failed_by_itself(end: RankEnd) -> bool:
    """The rank failed, and not because of other ranks."""
    if end.status == "raised":
        return not is_consequence(end)
    return end.status in ("killed", "crashed", "silent", "absent")


def has_timed_out(end: RankEnd) -> bool:
    """The rank's own timeout expired."""
    return end.status == "raised" and any(text in end.message for text in _TIMEOUT_ERRORS)
