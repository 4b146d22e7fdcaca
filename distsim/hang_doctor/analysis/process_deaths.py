"""Which deaths of processes came before the hang, and which ended a job that already hung.

Users and schedulers kill almost every hung job, so a signal alone proves no cause. Three things
can prove one. The signal is a fault of the process itself, such as a segmentation fault. The kernel
reports that it ran out of memory. Or the times show that the process died before the others began
to wait. If one signal ended several ranks within seconds, somebody ended the whole job.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from typing import Literal

from distsim.hang_doctor.model.evidence import Evidence
from distsim.hang_doctor.model.evidence_records import ProcessEnd, RankEvidence

#: Ranks that end within this time of each other end together. Torchrun kills ranks that ignore its
#: SIGTERM only 30 s later (``SubprocessContext._close`` in torch 2.13).
_TOGETHER_S = 5.0
#: Signals that a process raises by its own fault.
_OWN_FAULTS = (signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)

#: When a process died: before the others began to wait, after that, or unknown.
DeathOrder = Literal["before", "after", "unknown"]


def ended_from_outside(evidence: Evidence) -> dict[int, ProcessEnd]:
    """The ranks that one signal ended together, with their ends; empty if there are none."""
    by_signal: dict[int, dict[int, ProcessEnd]] = {}
    for rank, records in evidence.ranks.items():
        end = _unexplained_signal(evidence, records)
        if end is not None:
            by_signal.setdefault(end.signal, {})[rank] = end
    found: dict[int, ProcessEnd] = {}
    for ends in by_signal.values():
        if len(ends) > 1 and _are_together(ends.values()):
            found.update(ends)
    return found


def _unexplained_signal(evidence: Evidence, records: RankEvidence) -> ProcessEnd | None:
    """The end by a signal that may have come from outside; None if an error explains the end."""
    if any(not end.signal and not end.unexplained for end in records.ends):
        return None
    for end in records.ends:
        is_own_fault = end.signal in _OWN_FAULTS or end.pid in evidence.oom_killed_pids
        if end.signal and not is_own_fault:
            return end
    return None


def _are_together(ends: Iterable[ProcessEnd]) -> bool:
    times = [end.time_s for end in ends if end.time_s is not None]
    return not times or max(times) - min(times) <= _TOGETHER_S


def death_order(evidence: Evidence, rank: int, end: ProcessEnd) -> DeathOrder:
    """Whether a rank that a signal ended died before the other ranks began to wait."""
    if not end.signal or end.signal in _OWN_FAULTS or end.pid in evidence.oom_killed_pids:
        return "before"
    others = [records for other, records in evidence.ranks.items() if other != rank]
    starts = [records.waits_since_s for records in others if records.waits_since_s is not None]
    if end.time_s is not None and starts:
        # Torchrun's times have whole seconds.
        return "before" if end.time_s < min(starts) else "after"
    # A stack shows that the process lived while the stacks of the others were taken.
    was_alive = bool(evidence.ranks[rank].stacks) and any(records.stacks for records in others)
    return "after" if was_alive else "unknown"
