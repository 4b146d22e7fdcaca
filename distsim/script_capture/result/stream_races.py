"""Findings for uses of a tensor that no wait orders.

`distsim.script_capture.patches.race_probes` finds and reports them.
"""

from __future__ import annotations

from collections.abc import Mapping

from distsim.findings.finding_types import Finding, SourceLocation
from distsim.script_capture.cuda.stream_clocks import STREAM_PREFIX
from distsim.script_capture.hub.state import RankProcess, ValueReport
from distsim.script_capture.protocol.message_types import RACE_REPORT

#: What begins the name of an actor that is a stream, and one that is a process group.
_STREAM, _GROUP = STREAM_PREFIX, "group "


def stream_race_findings(ranks: Mapping[int, RankProcess]) -> list[Finding]:
    """A finding for each pair of lines whose uses of a tensor race, with all ranks that have it."""
    found: dict[tuple[object, ...], list[tuple[int, ValueReport]]] = {}
    for rank, process in ranks.items():
        for report in process.values:
            if report.kind == RACE_REPORT:
                key = (report.place.file, report.place.line, report.entries)
                found.setdefault(key, []).append((rank, report))
    return [_finding(reports) for reports in found.values()]


def _finding(reports: list[tuple[int, ValueReport]]) -> Finding:
    ranks = tuple(rank for rank, _ in reports)
    report = reports[0][1]
    facts = dict(report.entries)
    place = report.place
    earlier_line = int(facts["earlier line"])
    at = f"line {place.line}"
    names = ", ".join(map(str, ranks))
    label = f"ranks {names}" if len(ranks) > 1 else f"rank {names}"
    verb = facts["access"] if len(ranks) == 1 else facts["access"].removesuffix("s")
    earlier = facts["earlier access"].removesuffix("s")
    message = (
        f"{label} {verb} a tensor at {at} that {facts['earlier operation']} (line {earlier_line})"
        f" may still {earlier}: no wait orders the two\n"
        f"  line {earlier_line}: {earlier}s it {_where(facts['earlier actor'])}\n"
        f"  {at}: {facts['operation']} {facts['access']} it {_where(facts['actor'])}"
    )
    places = (
        SourceLocation(place.file, place.line, 1, "", ranks[0]),
        SourceLocation(facts["earlier file"], earlier_line, 1, "", ranks[0]),
    )
    code = "DS402" if facts["access"] == "writes" else "DS403"
    remedy = f"{_remedy(facts['earlier actor'], facts['actor'])} before {at}"
    return Finding(code, "error", message, ranks, ranks, (remedy,), places)


def _where(actor: str) -> str:
    if actor.startswith(_GROUP):
        return f"on the communication stream of {actor}"
    if actor.startswith(_STREAM):
        name = actor.removeprefix(_STREAM)
        return f"on stream {name}" if name else "on the default stream"
    return f"on {actor}"


def _remedy(earlier: str, later: str) -> str:
    if earlier.startswith(_GROUP):
        return "call wait() on the Work"
    if later.startswith(_STREAM):
        name = earlier.removeprefix(_STREAM) or "torch.cuda.default_stream()"
        return f"call wait_stream({name}) on the stream that uses the tensor"
    return "call synchronize() on the stream"


__all__ = ["stream_race_findings"]
