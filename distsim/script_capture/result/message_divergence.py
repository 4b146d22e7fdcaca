"""Find the line that explains why messages between ranks do not match.

Senders and receivers differ by design, so their lines cannot be compared. Three other comparisons
show a mistake, in this order:

1. A message goes to another rank than the other messages of its line, and is never received.
2. Two ranks have the same role: their messages differ behind one line only (replicas of a pipeline
   stage, or its inner stages). This line is where they diverge.
3. A branch of one rank goes another way once, and other messages follow than at its other runs.

Two stages of a pipeline whose schedules differ by design (warm-up) differ behind several lines, so
they have different roles.
"""

from __future__ import annotations

import ast
import linecache
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple

from distsim.findings.finding_types import Finding
from distsim.script_capture.hub.matching import UNMATCHED
from distsim.script_capture.hub.state import RankProcess
from distsim.script_capture.protocol.message_types import NO_CALL_SITE
from distsim.script_capture.rank.call_sites import source_text
from distsim.script_capture.rank.line_trace import TracedLine
from distsim.script_capture.result.divergence_point import (
    DivergencePoint,
    compared_ranks,
    explained_by_point,
    kind_of,
    line_text,
    ordinal,
    point_of,
    with_branch,
)
from distsim.script_capture.result.trace_difference import trace_differences

#: Findings on messages that do not match.
_CODE_PREFIXES: Final = ("DS2", "DS3")
#: Ranks of the same role make more than this share of their messages on the same lines. The first
#: and an inner stage of a pipeline share half of them.
_ROLE_SHARE: Final = 0.5
#: Ranks whose lines are compared with those of a rank.
_MAX_CANDIDATES: Final = 4
#: So many equal cases make a rule, to which one other case is an exception.
_USUAL: Final = 2


class PostedMessage(NamedTuple):
    """A send or a receive of a rank. ``matched``: the other rank has posted its half."""

    line: TracedLine
    op: str
    peer: int
    matched: bool


#: By line: the operations of messages that any rank posts there.
_LineOps = Mapping[TracedLine, str]
_Traces = Mapping[int, Sequence[TracedLine]]


def posted_messages(ranks: Mapping[int, RankProcess]) -> dict[int, list[PostedMessage]]:
    """The messages of each rank, in order."""
    found: dict[int, list[PostedMessage]] = {}
    for rank, process in ranks.items():
        messages = found[rank] = []
        for event in process.events:
            call = event.call
            if call is None or kind_of(call.op) != "p2p":
                continue
            place = process.sites.get(event.site, NO_CALL_SITE)
            op = call.op.removeprefix("i")
            is_matched = call.match_number != UNMATCHED
            line = TracedLine(place.file, place.line)
            messages.append(PostedMessage(line, op, call.peer, is_matched))
    return found


def is_about_messages(findings: Sequence[Finding]) -> bool:
    """Whether the first finding is about messages that do not match."""
    if not findings or not findings[0].code.startswith(_CODE_PREFIXES):
        return False
    kinds = {kind_of(place.op) for place in findings[0].places if place.line}
    return bool(kinds & {"p2p", "batch", "wait"}) and "collective" not in kinds


def with_message_divergence(
    findings: Sequence[Finding],
    traces: _Traces,
    messages: Mapping[int, Sequence[PostedMessage]],
) -> tuple[Finding, ...]:
    """Findings whose first one names the line that explains it, if there is one.

    ``traces``: by rank, the lines that it executed. ``messages``: as of `posted_messages`.
    """
    if not is_about_messages(findings):
        return tuple(findings)
    first = findings[0]
    if _are_at_one_line(first):
        return tuple(findings)
    line_ops = _operations_by_line(messages)
    ranks = [rank for rank in _involved_ranks(first, messages) if traces.get(rank)]
    explained = (
        _with_odd_peer(first, ranks, messages)
        or _with_role_divergence(first, ranks, traces, messages, line_ops)
        or _with_odd_branch(first, ranks, traces, line_ops)
    )
    return tuple(findings) if explained is None else (explained, *findings[1:])


def _are_at_one_line(finding: Finding) -> bool:
    """Whether several ranks wait for each other at one line, so that no branch leads to it."""
    lines = {(place.file, place.line) for place in finding.places}
    return finding.code == "DS301" and len(finding.places) > 1 and len(lines) == 1


def _involved_ranks(finding: Finding, messages: Mapping[int, Sequence[PostedMessage]]) -> list[int]:
    """The ranks of the finding, and the partners of messages that have none."""
    named = [rank for rank in compared_ranks(finding) if messages.get(rank)]
    partners = [message.peer for rank in named for message in messages[rank] if not message.matched]
    return [rank for rank in dict.fromkeys((*named, *partners)) if messages.get(rank)]


def _operations_by_line(messages: Mapping[int, Sequence[PostedMessage]]) -> _LineOps:
    found: dict[TracedLine, set[str]] = defaultdict(set)
    for posted in messages.values():
        for message in posted:
            found[message.line].add(message.op)
    return {line: " and ".join(sorted(ops)) for line, ops in found.items()}


# --- a wrong peer ---
def _with_odd_peer(
    finding: Finding, ranks: Sequence[int], messages: Mapping[int, Sequence[PostedMessage]]
) -> Finding | None:
    for rank in ranks:
        by_line: dict[tuple[TracedLine, str], list[PostedMessage]] = defaultdict(list)
        for message in messages[rank]:
            by_line[message.line, message.op].append(message)
        for (line, op), posted in by_line.items():
            peers = Counter(message.peer for message in posted)
            usual, count = peers.most_common(1)[0]
            odd = [k for k, message in enumerate(posted) if message.peer != usual]
            if count < _USUAL or len(odd) != 1 or posted[odd[0]].matched:
                continue
            return _odd_peer_text(finding, rank, (line, op), odd[0] + 1, (usual, posted[odd[0]]))
    return None


def _odd_peer_text(
    finding: Finding,
    rank: int,
    call: tuple[TracedLine, str],
    occurrence: int,
    peers: tuple[int, PostedMessage],
) -> Finding:
    line, op = call
    usual, odd = peers
    where = line_text(line, finding.places[0].file)
    argument, verb = ("dst", "send to") if op == "send" else ("src", "receive from")
    message = (
        f"{finding.message}\n"
        f"  the {ordinal(occurrence)} {op} of rank {rank} at {where} has {argument}={odd.peer};"
        f" all others have {argument}={usual}:\n"
        f"    {source_text(*line)}"
    )
    remedy = f"let rank {rank} {verb} rank {usual} at {where} the {ordinal(occurrence)} time, too"
    return with_branch(replace(finding, message=message, help=(remedy,)), line, rank, op)


# --- ranks of the same role ---
def _with_role_divergence(
    finding: Finding,
    ranks: Sequence[int],
    traces: _Traces,
    messages: Mapping[int, Sequence[PostedMessage]],
    line_ops: _LineOps,
) -> Finding | None:
    for rank in ranks:
        for other in _similar_ranks(rank, messages):
            if not traces.get(other):
                continue
            points = list(_message_differences(traces[rank], traces[other], line_ops))
            if not points:  # the rank does what another rank of its role does
                break
            if len({point.line for point in points}) == 1:
                return explained_by_point(finding, points[0], (rank, other), traces)
    return None


def _similar_ranks(rank: int, messages: Mapping[int, Sequence[PostedMessage]]) -> list[int]:
    """Ranks that post most of their messages on the same lines, the most similar first."""
    own = Counter((message.line, message.op) for message in messages[rank])
    shares: dict[int, float] = {}
    for other, posted in messages.items():
        counts = Counter((message.line, message.op) for message in posted)
        both = (own & counts).total()
        if other != rank and both > _ROLE_SHARE * (own | counts).total():
            shares[other] = both / (own | counts).total()
    return sorted(shares, key=lambda other: (-shares[other], other))[:_MAX_CANDIDATES]


def _message_differences(
    own: Sequence[TracedLine], other: Sequence[TracedLine], line_ops: _LineOps
) -> Iterator[DivergencePoint]:
    """The differences in which the ranks post different messages."""
    for difference in trace_differences(own, other):
        own_part = own[difference.own_start : difference.own_end]
        other_part = other[difference.other_start : difference.other_end]
        own_calls = tuple(line for line in own_part if line in line_ops)
        other_calls = tuple(line for line in other_part if line in line_ops)
        own_ops = [line_ops[line] for line in own_calls]
        other_ops = [line_ops[line] for line in other_calls]
        common = min(len(own_ops), len(other_ops))
        is_cut = difference.is_last and own_ops[:common] == other_ops[:common]
        if own_ops != other_ops and not is_cut:
            yield point_of(difference, own, other, own_calls, other_calls)


# --- a branch of one rank that goes another way once ---
def _with_odd_branch(
    finding: Finding, ranks: Sequence[int], traces: _Traces, line_ops: _LineOps
) -> Finding | None:
    for rank in ranks:
        named = {
            TracedLine(place.file, place.line) for place in finding.places if place.rank == rank
        }
        found = _odd_branch(traces[rank], line_ops, named)
        if found is None:
            continue
        main_file = finding.places[0].file
        where = line_text(found.line, main_file)
        following = f"{line_text(found.following, main_file)}: {source_text(*found.following)}"
        message = (
            f"{finding.message}\n"
            f"  rank {rank} takes another branch at {where} when it runs for the"
            f" {ordinal(found.occurrence)} time than at its {found.others} other runs:\n"
            f"    {source_text(*found.line)}\n"
            f"    it continues with {following}"
        )
        checked = f"check the branch at {where}: {source_text(*found.line)}"
        remedies = (f"{checked}, or {finding.help[0]}",) if finding.help else (checked,)
        return with_branch(replace(finding, message=message, help=remedies), found.line, rank)
    return None


class _OddBranch(NamedTuple):
    """A branch that goes another way at its ``occurrence``-th run than at ``others`` runs."""

    line: TracedLine
    occurrence: int
    following: TracedLine
    others: int


def _odd_branch(
    trace: Sequence[TracedLine], line_ops: _LineOps, named: Collection[TracedLine]
) -> _OddBranch | None:
    """The first such branch whose odd run posts other messages, or reaches a ``named`` line."""
    runs: dict[TracedLine, list[int]] = defaultdict(list)
    for k, line in enumerate(trace[:-1]):
        if line.line in _conditional_lines(line.file):
            runs[line].append(k)
    found = []
    for line, starts in runs.items():
        usual, count = Counter(trace[k + 1] for k in starts).most_common(1)[0]
        odd = [n for n, k in enumerate(starts) if trace[k + 1] != usual]
        # After the last run, it is not known which messages belong to it.
        if count < _USUAL or len(odd) != 1 or odd[0] == len(starts) - 1:
            continue
        parts = [trace[start:end] for start, end in pairwise(starts)]
        odd_part = parts.pop(odd[0])
        if _posts_other_messages(odd_part, parts, line_ops, named):
            found.append((starts[odd[0]], _OddBranch(line, odd[0] + 1, odd_part[1], count)))
    return min(found)[1] if found else None


def _posts_other_messages(
    odd: Sequence[TracedLine],
    others: Sequence[Sequence[TracedLine]],
    line_ops: _LineOps,
    named: Collection[TracedLine],
) -> bool:
    ops = [line_ops[line] for line in odd if line in line_ops]
    if all(ops != [line_ops[line] for line in other if line in line_ops] for other in others):
        return True
    return any(line in odd and not any(line in other for other in others) for line in named)


@cache
def _conditional_lines(file: str) -> frozenset[int]:
    """The lines of ``if`` statements."""
    try:
        tree = ast.parse("".join(linecache.getlines(file)))
    except (SyntaxError, ValueError):
        return frozenset()
    return frozenset(node.lineno for node in ast.walk(tree) if isinstance(node, ast.If))


__all__ = ["PostedMessage", "is_about_messages", "posted_messages", "with_message_divergence"]
