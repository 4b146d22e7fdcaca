"""Conclusions that torch prints itself: the desync report, monitored_barrier, and mismatches that
TORCH_DISTRIBUTED_DEBUG=DETAIL finds.
"""

from __future__ import annotations

import re

from distsim.hang_doctor.model.evidence_records import ReportedMismatch
from distsim.hang_doctor.model.operation_names import operation_family
from distsim.hang_doctor.readers.log_context import LogContext

_FINGERPRINT = re.compile(
    r"CollectiveFingerPrint\((?:SequenceNumber=(\d+),?\s*)?OpType=(\w+)"
    r"(?:,\s*TensorShape=\[([^\]]*)\])?"
)
_FINGERPRINT_RANK = re.compile(r"Rank (\d+) is running(?: inconsistent)? collective:")
_MONITORED_BARRIER = re.compile(
    r"(?:\[Rank \d+\]: )?Rank(?:s)? ([\d, ]+) failed to pass monitoredBarrier"
)
_LAGGING = re.compile(
    r"\[([\d, ]+)\] (finished collective #(\d+), but didn't join collective #\d+"
    r"|joined but didn't finish collective #(\d+))"
)
_NEVER_JOINED = re.compile(r"ranks \[([\d, ]+)\] are the lagging ranks that caused this timeout")


def read_torch_report(log: LogContext, text: str) -> None:
    """Enter the conclusion in a line, if there is one."""
    lagging = _LAGGING.search(text)
    if lagging is not None:
        log.add_report("torch's desync report", _numbers(lagging[1]), lagging[2])
    never_joined = _NEVER_JOINED.search(text)
    if never_joined is not None:
        ranks = _numbers(never_joined[1])
        log.add_report("torch's desync report", ranks, "never joined any collective")
    barrier = _MONITORED_BARRIER.search(text)
    if barrier is not None:
        log.add_report("monitored_barrier", _numbers(barrier[1]), "did not arrive")
    _read_mismatch(log, text)


def _numbers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d{1,7}", text)]


def _read_mismatch(log: LogContext, text: str) -> None:
    """A line that compares the calls of two ranks."""
    ranks = [int(rank) for rank in _FINGERPRINT_RANK.findall(text)][:2]
    fingerprints = _FINGERPRINT.findall(text)[:2]
    if len(ranks) < 2 or len(fingerprints) < 2:
        return
    log.found.add("a mismatch found by torch")
    log.ranks.update(ranks)
    calls = [_call_text(op, shape) for _, op, shape in fingerprints]
    mismatch = ReportedMismatch(ranks[0], calls[0], ranks[1], calls[1], log.source)
    if mismatch not in log.evidence.reported_mismatches:
        log.evidence.reported_mismatches.append(mismatch)


def _call_text(op: str, shape: str) -> str:
    family = operation_family(op)
    return f"{family} of [{shape}]" if shape else family
