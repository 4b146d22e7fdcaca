"""Compare values that must be equal on several ranks (`capture --check-values`).

The ranks report checksums in the order of their steps
(`distsim.script_capture.patches.value_probes`). The first report that differs is the cause; later
ones follow from it. So there is one finding for each set of ranks and kind of comparison.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from distsim.findings.finding_types import Finding, SourceLocation
from distsim.script_capture.hub.state import RankProcess, ValueReport
from distsim.script_capture.protocol.message_types import (
    DROPOUT_REPORT,
    MODEL_GROUP_REPORT,
    NO_CALL_SITE,
    RACE_REPORT,
)

#: Kinds of one training step, in the order in which a step reports them: a difference in one
#: explains those in the kinds after it.
_KINDS_OF_A_STEP: Final = ("parameter order", "parameter", "value")
#: Kinds that other modules evaluate.
_OTHER_REPORTS: Final = (DROPOUT_REPORT, MODEL_GROUP_REPORT, RACE_REPORT)


class _Difference(NamedTuple):
    """``values`` has the value of each rank for ``name``; ``others`` more names differ."""

    kind: str
    step: int
    name: str
    values: Mapping[int, str]
    others: int
    reports: Mapping[int, ValueReport]


def value_findings(ranks: Mapping[int, RankProcess]) -> list[Finding]:
    """A finding for the first difference of each set of ranks that must agree."""
    first: dict[object, _Difference] = {}
    for (kind, _, step, members), reports in sorted(_reports_by_step(ranks).items()):
        difference = _difference(kind, step, reports)
        if difference is None:
            continue
        family = "step" if kind in _KINDS_OF_A_STEP else kind
        known = first.get((family, members))
        if known is None or _order(difference) < _order(known):
            first[family, members] = difference
    return [_finding(difference) for _, difference in sorted(first.items(), key=str)]


def _order(difference: _Difference) -> tuple[int, int]:
    kinds = _KINDS_OF_A_STEP
    position = kinds.index(difference.kind) if difference.kind in kinds else 0
    return difference.step, position


def _reports_by_step(
    ranks: Mapping[int, RankProcess],
) -> dict[tuple[str, int, int, tuple[int, ...]], dict[int, ValueReport]]:
    """Reports that must agree: by kind, model or optimizer, step and members."""
    found: dict[tuple[str, int, int, tuple[int, ...]], dict[int, ValueReport]] = {}
    for rank, process in ranks.items():
        for report in process.values:
            if report.kind in _OTHER_REPORTS:
                continue
            key = (report.kind, report.owner, report.step, report.ranks)
            found.setdefault(key, {})[rank] = report
    return found


def _difference(kind: str, step: int, reports: Mapping[int, ValueReport]) -> _Difference | None:
    """The first name whose values differ. Only names that all ranks report count."""
    tables = {rank: dict(report.entries) for rank, report in reports.items()}
    names = [name for name, _ in next(iter(reports.values())).entries]
    differing = []
    for name in names:
        values = {table.get(name) for table in tables.values()}
        if len(values) > 1 and None not in values:
            differing.append(name)
    if not differing:
        return None
    values_by_rank = {rank: table[differing[0]] for rank, table in tables.items()}
    return _Difference(kind, step, differing[0], values_by_rank, len(differing) - 1, reports)


def _finding(difference: _Difference) -> Finding:
    ranks = tuple(sorted(difference.values))
    # Of equally frequent values, that of the lowest rank counts as the common one.
    common = Counter(difference.values[rank] for rank in ranks).most_common(1)[0][0]
    odd = tuple(rank for rank in ranks if difference.values[rank] != common)
    message, remedy = _texts(difference, common, odd)
    return Finding("DS612", "error", message, ranks, odd, (remedy,), _places(difference, odd))


def _texts(difference: _Difference, common: str, odd: Sequence[int]) -> tuple[str, str]:
    label = _label(odd)
    step = difference.step + 1
    name = difference.name
    more = f" ({difference.others} more values differ)" if difference.others else ""
    if difference.kind == "unit":
        value = difference.values[odd[0]]
        return (
            f"all_gather {step} of FSDP joins shards of different parameters: {label} gathers"
            f" {value}, the other ranks gather {common}",
            "run the same layers in the same order on all ranks: give random choices the same seed",
        )
    if difference.kind == "parameter order":
        value = difference.values[odd[0]]
        return (
            f"DDP reduces different parameters together: {name} is {value} on {label}, and"
            f" {common} on the other ranks{more}",
            "register the parameters in the same order on all ranks",
        )
    if difference.kind == "parameter":
        return (
            f"replicas differ: parameter {name} has other values on {label}, forward pass {step}"
            f"{more}",
            f"find what changes {name} on {label} only; DDP keeps replicas equal only if every"
            " change is the same on all ranks",
        )
    if difference.kind == "copy":
        return (
            f"copies differ: parameter {name} of the optimizer has the placement Replicate and"
            f" other values on {label}, optimizer step {step}{more}",
            "change the local tensor on all ranks, or use the placement Shard",
        )
    remedy = "run the backward pass before optimizer.step() outside of no_sync(), on all ranks"
    if not name.startswith("gradient"):
        remedy = f"give all ranks the same {name.partition(' of ')[0]}: load it on every rank"
    return f"replicas differ: {name} on {label}, optimizer step {step}{more}", remedy


def _places(difference: _Difference, odd: Sequence[int]) -> tuple[SourceLocation, ...]:
    found = []
    for rank in odd:
        place = difference.reports[rank].place
        if place != NO_CALL_SITE:
            found.append(SourceLocation(place.file, place.line, 1, difference.kind, rank))
    return tuple(found)


def _label(ranks: Sequence[int]) -> str:
    numbers = ", ".join(map(str, ranks))
    return f"ranks {numbers}" if len(ranks) > 1 else f"rank {numbers}"


__all__ = ["value_findings"]
