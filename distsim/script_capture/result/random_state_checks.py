"""Compare the random states of tensor-parallel ranks at each dropout (`capture --check-values`).

The k-th dropout of one rank corresponds to the k-th of another, if both are on the same line. Only
ranks whose activations are equal there must have the same state
(`distsim.script_capture.patches.random_probes`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from distsim.findings.finding_types import Finding, SourceLocation
from distsim.script_capture.hub.state import RankProcess, ValueReport
from distsim.script_capture.protocol.message_types import DROPOUT_REPORT, MODEL_GROUP_REPORT

_REMEDY = (
    "give the ranks {ranks} the same random state before this dropout: call torch.manual_seed with"
    " the same value, and draw equally many random numbers"
)


def random_state_findings(ranks: Mapping[int, RankProcess]) -> list[Finding]:
    """A finding for the first dropout of each tensor-parallel group that draws other numbers."""
    dropouts = {
        rank: [report for report in process.values if report.kind == DROPOUT_REPORT]
        for rank, process in ranks.items()
    }
    groups = {
        report.ranks
        for process in ranks.values()
        for report in process.values
        if report.kind == MODEL_GROUP_REPORT
    }
    findings = (_finding_of_group(group, dropouts) for group in sorted(groups))
    return [finding for finding in findings if finding is not None]


def _finding_of_group(
    group: Sequence[int], dropouts: Mapping[int, Sequence[ValueReport]]
) -> Finding | None:
    members = [rank for rank in group if dropouts.get(rank)]
    last_equal: ValueReport | None = None
    for step in range(min((len(dropouts[rank]) for rank in members), default=0)):
        reports = {rank: dropouts[rank][step] for rank in members}
        if len({report.place for report in reports.values()}) > 1:
            return None  # from here on, it is not known which dropouts correspond
        copies = _ranks_with_equal_activations(reports)
        states = {rank: dict(reports[rank].entries)["random state"] for rank in copies}
        if len(set(states.values())) > 1:
            return _finding(states, reports, step, last_equal)
        if states:
            last_equal = next(iter(reports.values()))
    return None


def _ranks_with_equal_activations(reports: Mapping[int, ValueReport]) -> list[int]:
    """The ranks that hold the activation that most of them hold, if several do."""
    activations = {rank: dict(report.entries)["activation"] for rank, report in reports.items()}
    value, count = Counter(activations.values()).most_common(1)[0]
    if count < 2 or not value:  # fake tensors have no values
        return []
    return [rank for rank in reports if activations[rank] == value]


def _finding(
    states: Mapping[int, str],
    reports: Mapping[int, ValueReport],
    step: int,
    last_equal: ValueReport | None,
) -> Finding:
    ranks = tuple(sorted(states))
    common = Counter(states[rank] for rank in ranks).most_common(1)[0][0]
    odd = tuple(rank for rank in ranks if states[rank] != common)
    names = ", ".join(map(str, ranks))
    message = (
        f"tensor-parallel ranks {names} drop different elements of equal activations: the random"
        f" state of {_label(odd)} differs, dropout {step + 1}"
    )
    if last_equal is not None:
        message += f"\n  the states were still equal at dropout {last_equal.step + 1}"
        message += f" (line {last_equal.place.line})"
    places = tuple(
        SourceLocation(reports[rank].place.file, reports[rank].place.line, 1, "dropout", rank)
        for rank in odd
        if reports[rank].place.line
    )
    return Finding("DS612", "error", message, ranks, odd, (_REMEDY.format(ranks=names),), places)


def _label(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"ranks {numbers}" if len(ranks) > 1 else f"rank {numbers}"


__all__ = ["random_state_findings"]
