"""Find the line of the script at which two ranks diverge, from the lines that they executed.

A report names calls that do not match. The mistake is often an earlier line: a branch that only one
rank takes, or a loop that ends early on one rank. So the lines of two ranks are compared as `diff`
compares files. In the difference that matters, one rank executes the lines of mismatched calls more
often than the other, or reaches the call in which it is blocked. Other differences, such as
printing on rank 0, do not matter.

Limits: a branch and its call on one line are one line; the report names that line anyway. Branches
that end in equally many calls are not reported, because ranks often call one collective on two
lines. For messages between ranks, see `distsim.script_capture.result.message_divergence`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Final, NamedTuple

from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.registry import OPERATIONS
from distsim.script_capture.hub.state import RankProcess
from distsim.script_capture.protocol.message_types import NO_CALL_SITE
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.rank.line_trace import TracedLine
from distsim.script_capture.result.trace_difference import (
    TraceDifference,
    indentation,
    is_in_branch,
    is_loop,
    trace_differences,
)

#: Findings on calls that do not match, and on values that differ.
_CODE_PREFIXES: Final = ("DS2", "DS3")
_VALUES_CODE: Final = "DS612"
#: Kinds of calls that all members of a group make, and waits for these.
_COLLECTIVE_KINDS: Final = frozenset({"collective", "wait"})
#: A finding on ranks that wait for one that failed, and the operation of the place of its error.
_FAILED_RANK_CODE: Final = "DS303"
_ERROR: Final = "fail"
#: In place of the operation of a finding's place.
_BRANCH: Final = "branch"


#: By line of calls: how many of them an execution of the line makes, on average.
CallWeights = Mapping[TracedLine, float]
_HALF_A_CALL: Final = 0.5


class DivergencePoint(NamedTuple):
    """Where ``own`` and ``other`` rank go different ways.

    ``line`` is the last line that both execute, for the ``occurrence``-th time. ``own_next`` and
    ``other_next`` follow it. ``own_calls`` and ``other_calls`` are the lines of mismatched calls
    that each rank executes then, before the ranks are together again.
    """

    line: TracedLine
    occurrence: int
    own_next: TracedLine
    other_next: TracedLine
    own_calls: tuple[TracedLine, ...]
    other_calls: tuple[TracedLine, ...]


def find_divergence(
    own: Sequence[TracedLine],
    other: Sequence[TracedLine],
    own_weights: CallWeights,
    other_weights: CallWeights,
) -> DivergencePoint | None:
    """The first difference that explains why calls do not match.

    Either the ranks make unequally many of the calls in it, or it leads to where a rank is blocked
    in one of them.
    """
    for difference in trace_differences(own, other):
        i, j = difference.own_start, difference.other_start
        own_calls = tuple(line for line in own[i : difference.own_end] if line in own_weights)
        other_calls = tuple(
            line for line in other[j : difference.other_end] if line in other_weights
        )
        more = sum(own_weights[line] for line in own_calls)
        more -= sum(other_weights[line] for line in other_calls)
        ends_in_call = own[-1] in own_weights or other[-1] in other_weights
        if abs(more) >= _HALF_A_CALL or (difference.is_last and ends_in_call):
            return point_of(difference, own, other, own_calls, other_calls)
    # A rank that executes no further line ended, or is blocked in a call.
    return None


def point_of(
    difference: TraceDifference,
    own: Sequence[TracedLine],
    other: Sequence[TracedLine],
    own_calls: tuple[TracedLine, ...],
    other_calls: tuple[TracedLine, ...],
) -> DivergencePoint:
    """The place where a difference starts."""
    i, j = difference.own_start, difference.other_start
    last = own[i - 1]
    return DivergencePoint(last, own[:i].count(last), own[i], other[j], own_calls, other_calls)


# --- findings ---
def divergent_finding(findings: Sequence[Finding]) -> Finding | None:
    """The first finding, if a divergence of ranks may explain it."""
    if not findings:
        return None
    first = findings[0]
    if not first.code.startswith(_CODE_PREFIXES) and first.code != _VALUES_CODE:
        return None
    kinds = {kind_of(place.op) for place in _call_places(first)}
    is_mixed = first.code == "DS301" and "collective" in kinds
    if first.code != _VALUES_CODE and not (kinds and kinds <= _COLLECTIVE_KINDS) and not is_mixed:
        return None
    return first if len(compared_ranks(first)) == 2 else None


def _call_places(finding: Finding) -> list[SourceLocation]:
    """The places of a finding's calls: those with a line, without that of an error."""
    return [place for place in finding.places if place.line and place.op != _ERROR]


def _collective_places(finding: Finding) -> list[SourceLocation]:
    """The places of a finding's calls, or of its collectives if it also has messages.

    Which messages a rank posts depends on its role, so their lines show nothing.
    """
    places = _call_places(finding)
    collectives = [place for place in places if kind_of(place.op) in _COLLECTIVE_KINDS]
    return collectives or places


def waits_for_failed_rank(findings: Sequence[Finding], ranks: Mapping[int, RankProcess]) -> bool:
    """Whether the first finding is about ranks that wait for one that failed.

    Then the error is the cause, not the branch in which it happened: without the error, the rank
    might have made the awaited call after the branch, as in `if rank == 0: build()`. But if the
    awaited call is in a branch, the error may follow from the branch that the failed rank took.
    """
    if not findings:
        return False
    ends = [ranks[rank].ended for rank in findings[0].awaited if rank in ranks]
    failed = [end for end in ends if end is not None and (end.how == "raised" or end.code != 0)]
    if not failed or any(end.how != "raised" for end in failed):
        return bool(failed)
    return not _is_in_branch_of_script(findings[0])


def _is_in_branch_of_script(finding: Finding) -> bool:
    """Whether a branch of the script leads to a collective of the finding."""
    calls = _call_places(finding)
    if any(kind_of(call.op) not in _COLLECTIVE_KINDS for call in calls):
        return False
    return any(is_in_branch(TracedLine(call.file, call.line)) for call in calls)


def kind_of(op: str) -> str:
    """The kind of an operation; "" for what is none."""
    operation = OPERATIONS.get(op)
    return "" if operation is None else operation.kind


def compared_ranks(finding: Finding) -> list[int]:
    """Two ranks that differ: those whose calls are named first, else any affected ones."""
    named = [place.rank for place in finding.places if place.rank is not None]
    others = (*finding.core, *finding.awaited, *finding.ranks)
    return list(dict.fromkeys((*named, *others)))[:2]


def collective_lines(ranks: Mapping[int, RankProcess]) -> dict[int, Counter[TracedLine]]:
    """By rank: how many collectives each line made on groups that have all ranks."""
    found: dict[int, Counter[TracedLine]] = {}
    for rank, process in ranks.items():
        lines = found[rank] = Counter()
        for event in process.events:
            call = event.call
            if call is None or kind_of(call.op) != "collective":
                continue
            if len(call.group.ranks) == len(ranks):
                place = process.sites.get(event.site, NO_CALL_SITE)
                lines[TracedLine(place.file, place.line)] += 1
    return found


def with_divergence(
    findings: Sequence[Finding],
    traces: Mapping[int, Sequence[TracedLine]],
    collectives: Mapping[int, Mapping[TracedLine, int]],
) -> tuple[Finding, ...]:
    """Findings whose first one names the line at which the ranks diverge, if there is one.

    ``traces``: by rank, the lines that it executed. ``collectives``: as of `collective_lines`. They
    count if the lines of the finding explain nothing, for example if it names the line of a wait.
    """
    finding = divergent_finding(findings)
    if finding is None:
        return tuple(findings)
    own, other = compared_ranks(finding)
    own_lines, other_lines = traces.get(own, ()), traces.get(other, ())
    places = _collective_places(finding)
    named = dict.fromkeys((TracedLine(place.file, place.line) for place in places), 1.0)
    point = find_divergence(own_lines, other_lines, named, named)
    if point is None:
        own_weights = _weights(own_lines, collectives.get(own, {}))
        other_weights = _weights(other_lines, collectives.get(other, {}))
        point = find_divergence(own_lines, other_lines, own_weights, other_weights)
    if point is None:
        return tuple(findings)
    explained = explained_by_point(finding, point, (own, other), traces)
    return (explained, *findings[1:])


def _weights(lines: Sequence[TracedLine], calls: Mapping[TracedLine, int]) -> CallWeights:
    executions = Counter(line for line in lines if line in calls)
    return {line: calls[line] / count for line, count in executions.items()}


def explained_by_point(
    finding: Finding,
    point: DivergencePoint,
    ranks: tuple[int, int],
    traces: Mapping[int, Sequence[TracedLine]],
) -> Finding:
    """The finding, with the place where two ranks diverge, what follows there, and a remedy."""
    own, other = ranks
    main_file = finding.places[0].file
    line = line_text(point.line, main_file)
    text = source_text(*point.line)
    message = [
        finding.message,
        f"  ranks {min(ranks)} and {max(ranks)} diverge at {line}, "
        f"when it runs for the {ordinal(point.occurrence)} time:",
        f"    {text}",
        *_next_lines({own: point.own_next, other: point.other_next}, main_file),
    ]
    for call in dict.fromkeys((*point.own_calls, *point.other_calls)):
        counts = {rank: traces[rank].count(call) for rank in sorted(ranks)}
        if len(set(counts.values())) > 1:
            ran = ", ".join(f"{_times(count)} on rank {rank}" for rank, count in counts.items())
            message.append(f"    {line_text(call, main_file)} runs {ran}")
            break
    raising = _raising_rank(point, ranks)
    if raising is None:
        remedies = [f"{_remedy(point, text, line)}: `{text}`"]
        if finding.code == _FAILED_RANK_CODE:
            # The error may come first: then the rank would have made the call later.
            remedies = [*finding.help, f"if the error follows from the branch, {remedies[0]}"]
        explained = replace(finding, message="\n".join(message), help=tuple(remedies))
        return with_branch(_with_entered_branches(explained, point, ranks), point.line, own)
    rank, error = raising
    at_line = line_text(error, main_file)
    remedy = f"fix the error that rank {rank} raises at {at_line}: `{source_text(*error)}`"
    explained = replace(finding, message="\n".join(message), help=(remedy,))
    return with_branch(explained, error, rank)


def _with_entered_branches(
    finding: Finding, point: DivergencePoint, ranks: tuple[int, int]
) -> Finding:
    """The finding with the first line that only one of two ranks executes, in a branch."""
    if is_loop(source_text(*point.line)):
        return finding
    for rank, following in zip(ranks, (point.own_next, point.other_next), strict=True):
        if _is_inside(following, point.line) and not _has_place(finding, following, rank):
            finding = with_branch(finding, following, rank)
    return finding


def _has_place(finding: Finding, line: TracedLine, rank: int) -> bool:
    return any((place.file, place.line, place.rank) == (*line, rank) for place in finding.places)


def with_branch(finding: Finding, line: TracedLine, rank: int, op: str = _BRANCH) -> Finding:
    """The finding with this line as its first place."""
    place = SourceLocation(line.file, line.line, indentation(line) + 1, op, rank)
    return replace(finding, places=(place, *finding.places))


def _raising_rank(point: DivergencePoint, ranks: tuple[int, int]) -> tuple[int, TracedLine] | None:
    """The rank that goes on to a line that raises an error, and this line; None if none does."""
    for rank, following in zip(ranks, (point.own_next, point.other_next), strict=True):
        if source_text(*following).startswith("raise"):
            return rank, following
    return None


def _remedy(point: DivergencePoint, text: str, line: str) -> str:
    if is_loop(text):
        return f"run the loop at {line} the same number of times on all ranks"
    calls = (*point.own_calls, *point.other_calls)
    inside = [call for call in calls if _is_inside(call, point.line)]
    if point.own_calls and point.other_calls and len(inside) == len(calls):
        return f"make the same calls in the same order in both branches of {line}"
    remedy = f"let all ranks take the same branch at {line}"
    if not inside:
        return remedy
    return f"{remedy}, or move line {inside[0].line} out of it"


def _is_inside(line: TracedLine, branch: TracedLine) -> bool:
    """Whether a line belongs to a branch: all lines in between are indented, or start an `else`."""
    if line.file != branch.file or line.line <= branch.line:
        return False
    between = [TracedLine(branch.file, k) for k in range(branch.line + 1, line.line + 1)]
    return all(_continues_branch(each, indentation(branch)) for each in between)


def _continues_branch(line: TracedLine, outer: int) -> bool:
    text = source_text(*line)
    is_at_branch = indentation(line) == outer and text.startswith(("else", "elif", "except"))
    return not text or indentation(line) > outer or is_at_branch


def _next_lines(next_lines: Mapping[int, TracedLine], main_file: str) -> list[str]:
    return [
        f"    rank {rank} continues with {line_text(following, main_file)}: "
        f"{source_text(*following)}"
        for rank, following in sorted(next_lines.items())
    ]


def line_text(line: TracedLine, main_file: str) -> str:
    """A line as texts name it; its file only if it is not the finding's."""
    if line.file == main_file:
        return f"line {line.line}"
    return f"{line.file}:{line.line}"


def ordinal(number: int) -> str:
    """For example 1st."""
    if number % 100 in (11, 12, 13):
        return f"{number}th"
    return f"{number}{ {1: 'st', 2: 'nd', 3: 'rd'}.get(number % 10, 'th') }"


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


__all__ = [
    "DivergencePoint",
    "divergent_finding",
    "find_divergence",
    "waits_for_failed_rank",
    "with_divergence",
]
