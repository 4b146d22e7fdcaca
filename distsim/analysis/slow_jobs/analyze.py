"""Analyses a recording: layers, costs of ranks, findings, verdict."""

from __future__ import annotations

import itertools
import re

import numpy as np

from distsim.analysis.slow_jobs.comparable import reason_not_to_compare
from distsim.analysis.slow_jobs.find_causes import CauseFinder
from distsim.analysis.slow_jobs.ideal_times import (
    LAYERS,
    balanced_times,
    even_times,
    mean_ideal,
    steady_times,
    usual_transfers,
)
from distsim.analysis.slow_jobs.missing_ranks import missing_rank_finding
from distsim.analysis.slow_jobs.peer_groups import PeerGroups, find_peer_groups
from distsim.analysis.slow_jobs.predicted_transfers import predicted_transfers
from distsim.analysis.slow_jobs.rank_costs import RankWhatIfs, rank_costs
from distsim.analysis.slow_jobs.slow_job import (
    NONE,
    NOT_SURE,
    BreakdownRow,
    SlowFinding,
    SlowJob,
    WaitForRank,
)
from distsim.analysis.slow_jobs.slow_transfers import slow_communication_finding
from distsim.analysis.slow_jobs.waiting import waits_for_rank
from distsim.common.errors import UsageError
from distsim.hardware.cluster import Cluster
from distsim.trace.recordings.event_graph import EventGraph, Flags, Times
from distsim.trace.recordings.recording import Recording

#: What remains when every loss is removed.
REST = "ideal compute and transfers"
#: Labels that count as communication although their members are not recorded.
_LOCAL_TRANSFERS = frozenset({"layernorm-grads-all-reduce"})


def select_steps(recording: Recording, text: str | None) -> Flags:
    """The steps that a range such as ``10-40`` names, all by default. Raises UsageError."""
    numbers = np.array(recording.graph.steps)
    if text is None:
        return np.ones(len(numbers), dtype=bool)
    match = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text)
    if match is None:
        raise UsageError(f"steps: {text} is no range", "for example 10-40")
    first, last = int(match[1]), int(match[2] or match[1])
    if first > last:
        raise UsageError(f"steps {text}: the range is reversed", f"use {last}-{first}")
    selected = (numbers >= first) & (numbers <= last)
    if not selected.any():
        known = f"{numbers.min()}-{numbers.max()}"
        raise UsageError(f"no step of this recording is in {text}", f"it has steps in {known}")
    return np.asarray(selected)


def analyze_recording(
    recording: Recording,
    selected: Flags | None = None,
    *,
    uses_mean: bool = False,
    cluster: Cluster | None = None,
) -> SlowJob:
    """The analysis of the selected steps.

    ``uses_mean``: the ideal for slowdowns is that of `mean_ideal`, and otherwise the last layer.
    ``cluster``: its predicted times are the reference for communication.
    Raises UsageError if the steps take no time.
    """
    graph = recording.graph
    if selected is None:
        selected = np.ones(len(graph.steps), dtype=bool)
    groups = find_peer_groups(graph, selected)
    counted = groups.usual_steps if groups.usual_steps.any() else selected
    own = graph.own
    gap = _gap_without_late_starts(graph)
    steady = steady_times(groups, own)
    even = even_times(groups, steady)
    balanced = balanced_times(groups, even)
    predicted = None if cluster is None else predicted_transfers(recording, groups, cluster)
    best = usual_transfers(groups, balanced)
    if predicted is not None:
        best = np.where(graph.is_work, best, np.minimum(best, predicted))
    recorded_steps = graph.step_times()
    if not recorded_steps[counted].any():
        raise UsageError(
            f"{recording.files[0]}: the recorded steps take no time",
            "record at least one whole step",
        )
    later = graph.step_times(np.stack([own, steady, even, balanced, best], axis=1), gap)
    means = [float(recorded_steps[counted].mean()), *later[counted].mean(axis=0).tolist()]
    layers = dict(zip(LAYERS, means, strict=True))
    rows = _breakdown(layers)
    ideal_own = mean_ideal(groups, own, _LOCAL_TRANSFERS) if uses_mean else best
    what_ifs = RankWhatIfs(groups, gap, own, steady, even, ideal_own)
    ranks = rank_costs(what_ifs, counted, means[0])
    numbers = [int(i) for i in np.flatnonzero(counted)]
    finder = CauseFinder(recording, what_ifs, ranks, rows, numbers, means[0])
    findings = _independent_findings(
        finder.findings(),
        slow_communication_finding(recording, groups, numbers, means[0], gap, predicted),
        missing_rank_finding(recording, groups, counted, gap, cluster),
    )
    not_comparable = reason_not_to_compare(recording, means[0])
    if not_comparable and not (len(ranks) == 1 and findings):
        # One rank may still show that a rank without a trace is late.
        findings = []
    else:
        not_comparable = ""
    return SlowJob(
        recording=recording,
        groups=groups,
        selected=selected,
        counted=counted,
        step_ns=means[0],
        ideal_ns=float(graph.step_times(ideal_own, gap)[counted].mean()),
        ideal="mean" if uses_mean else "peers",
        layers_ns=layers,
        breakdown=rows,
        ranks=ranks,
        findings=tuple(findings),
        verdict=NOT_SURE if not_comparable else _verdict(findings, finder),
        impact=_impact(groups, findings, counted),
        replay_error_ns=_replay_error(graph),
        recorded_steps_ns=recorded_steps,
        ideal_own=ideal_own,
        ideal_gap=gap,
        not_comparable=not_comparable,
    )


def _independent_findings(
    found: list[SlowFinding], communication: SlowFinding | None, missing: SlowFinding | None
) -> list[SlowFinding]:
    """All findings that do not follow from another one, the costliest first."""
    findings = list(found)
    if communication is not None and not _follows_from_rank(communication, found):
        findings.append(communication)
        findings.sort(key=lambda finding: -finding.cost_ns)
    # A rank without a trace may itself wait for a slow rank. Then it is no finding of its own.
    if missing is not None and all(missing.cost_ns > other.cost_ns for other in findings):
        findings.insert(0, missing)
    return findings


def _follows_from_rank(communication: SlowFinding, findings: list[SlowFinding]) -> bool:
    """Whether communication is slow only in steps in which a rank is slow."""
    steps = set(communication.slow_steps)
    ranks = [one for one in findings if one.kind == "intermittent"]
    return bool(steps) and any(steps <= set(one.slow_steps) for one in ranks)


def _gap_without_late_starts(graph: EventGraph) -> Times:
    if graph.late_start is None:
        return graph.gap
    return np.where(graph.late_start, 0.0, graph.gap)


def _breakdown(layers: dict[str, float]) -> tuple[BreakdownRow, ...]:
    """One row per loss, the largest first, after what remains without any."""
    total = layers["recorded"]
    times = list(layers.items())
    rows = [BreakdownRow(REST, layers["ideal"], layers["ideal"] / total)]
    for (_, before), (name, after) in itertools.pairwise(times):
        rows.append(BreakdownRow(LAYERS[name], before - after, (before - after) / total))
    return (rows[0], *sorted(rows[1:], key=lambda row: -row.cost_ns))


def _verdict(findings: list[SlowFinding], finder: CauseFinder) -> str:
    if findings:
        return findings[0].kind
    return NOT_SURE if finder.is_unsure() else NONE


def _impact(groups: PeerGroups, findings: list[SlowFinding], counted: Flags) -> WaitForRank | None:
    for finding in findings:
        if finding.kind in ("straggler", "intermittent"):
            return waits_for_rank(groups, finding.ranks[0], counted)
    return None


def _replay_error(graph: EventGraph) -> float:
    """The largest difference between the replay and the recording."""
    start, end = graph.replay()
    columns = graph.columns
    return float(max(np.abs(start - columns.start).max(), np.abs(end - columns.end).max()))
