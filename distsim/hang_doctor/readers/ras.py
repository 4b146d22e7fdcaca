"""Reports of NCCL's RAS subsystem, as text and as JSON: how many calls each rank has launched.

Only conclusions in the name of RAS result from it (``ToolReport``), because its counts have two
weaknesses: the text lists only the smaller set of ranks, which may be ahead or behind, and each
communicator has its own count. Numbers of ranks are those in the communicator, so the JSON is read
for the largest communicator only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    ToolReport,
    non_negative_int,
)

_TOOL = "NCCL RAS"

# --- text ---

_GROUP = re.compile(r"^#(\d+)-(\d+) \(([0-9a-f]+)\) (\w+)")
_COUNT = re.compile(r"^\s+(\d+) ranks? ha(?:ve|s) launched up to operation (\d+)")
_RANK = re.compile(r"^\s+Rank (\d+) -- GPU \d+ managed by process (\d+) on node (\S+)")
_KIND = re.compile(r"different (\w+) operation counts")


class _Count(NamedTuple):
    """The number of ranks that have launched all operations up to this one."""

    ranks: int
    operation: int


@dataclass
class _CountBlock:
    """The counts of one kind of operation on one communicator, while they are being read."""

    group: str = ""
    kind: str = ""
    counts: list[_Count] = field(default_factory=list)
    #: The ranks that are listed after the latest count.
    listed: list[int] = field(default_factory=list)


def is_ras_text(text: str) -> bool:
    """Whether this is the text report of RAS."""
    return "Job summary" in text and "Communicators" in text and "ranks" in text.lower()


def read_ras_text(evidence: Evidence, lines: list[str], source: str) -> set[int]:
    """Enter the counts of the ranks that the report lists; return these ranks."""
    seen: set[int] = set()
    block = _CountBlock()
    is_new_list = True
    for line in lines:
        group = _GROUP.match(line)
        kind = _KIND.search(line)
        count = _COUNT.match(line)
        rank = _RANK.match(line)
        if group is not None:
            _end_block(evidence, block, source)
            block = _CountBlock(evidence.add_group(f"comm {group[3]}"), block.kind)
        elif kind is not None:
            _end_block(evidence, block, source)
            block = _CountBlock(block.group, kind[1])
        elif count is not None:
            block.counts.append(_Count(int(count[1]), int(count[2])))
            is_new_list = True
        elif rank is not None and block.counts and int(rank[1]) < MAX_RANKS:
            if is_new_list:
                block.listed.clear()
            is_new_list = False
            number = int(rank[1])
            block.listed.append(number)
            seen.add(number)
            evidence.records_of(number, source)
            operation = block.counts[-1].operation
            evidence.add_progress(number, block.group, operation, UNKNOWN_NUMBER, source)
    _end_block(evidence, block, source)
    return seen


def _end_block(evidence: Evidence, block: _CountBlock, source: str) -> None:
    """Report a difference between the counts."""
    operations = {count.operation for count in block.counts}
    if len(operations) < 2:
        return
    kind = f"{block.kind} " if block.kind else ""
    counts = " and ".join(
        f"{count.ranks} at {kind}operation {count.operation}" for count in block.counts
    )
    group = evidence.groups.get(block.group)
    label = group.label if group is not None else "a communicator"
    is_behind = _operation_of_listed(block) == min(operations)
    position = "behind" if is_behind else "ahead (the ranks behind are not listed)"
    text = f"on {label}: {counts}; the listed ranks are {position}"
    evidence.tool_reports.append(ToolReport(_TOOL, tuple(sorted(block.listed)), text, source))


def _operation_of_listed(block: _CountBlock) -> int:
    """The operation that the listed ranks are at: that of the count with as many ranks."""
    for count in block.counts:
        if count.ranks == len(block.listed):
            return count.operation
    return block.counts[-1].operation


# --- JSON ---


def is_ras_json(data: object) -> bool:
    """Whether this looks like the JSON report of RAS."""
    if not isinstance(data, dict) or not isinstance(data.get("communicators"), list):
        return False
    return "nccl_version" in data or "ras" in data


def read_ras_json(evidence: Evidence, data: Mapping[str, Any], source: str) -> set[int]:
    """Enter the counts of every rank of the largest communicators; return these ranks."""
    communicators = [comm for comm in data["communicators"] if isinstance(comm, dict)]
    sizes = [non_negative_int(comm.get("size")) for comm in communicators]
    largest = max(sizes, default=0)
    seen: set[int] = set()
    for comm, size in zip(communicators, sizes, strict=True):
        if size == largest:
            seen |= _read_communicator(evidence, comm, size, source)
    return seen


def _read_communicator(
    evidence: Evidence, comm: Mapping[str, Any], size: int, source: str
) -> set[int]:
    members = tuple(range(size)) if 0 < size < MAX_RANKS else None
    key = evidence.add_group(f"comm {comm.get('hash')}", "", members, size=size)
    counts_by_rank: dict[int, dict[str, int]] = {}
    for entry in _rank_entries(comm.get("ranks")):
        counts = entry.fields.get("collective_counts")
        if isinstance(counts, dict):
            by_kind = {str(kind): non_negative_int(count) for kind, count in counts.items()}
            counts_by_rank[entry.rank] = by_kind
            evidence.records_of(entry.rank, source)
            total = sum(by_kind.values())
            evidence.add_progress(entry.rank, key, total, UNKNOWN_NUMBER, source)
    for entry in _rank_entries(comm.get("missing_ranks")):
        text = "is considered dead" if _is_considered_dead(entry) else "does not answer"
        evidence.tool_reports.append(ToolReport(_TOOL, (entry.rank,), text, source))
    kinds = {kind for counts in counts_by_rank.values() for kind in counts}
    for kind in sorted(kinds):
        counts = {rank: counts.get(kind, 0) for rank, counts in counts_by_rank.items()}
        _report_count_difference(evidence, key, kind, counts, source)
    return set(counts_by_rank)


class _RankEntry(NamedTuple):
    rank: int
    fields: Mapping[str, Any]


def _rank_entries(given: object) -> list[_RankEntry]:
    """The entries of a list that name a rank."""
    if not isinstance(given, list):
        return []
    entries = []
    for fields in given:
        if not isinstance(fields, dict):
            continue
        rank = non_negative_int(fields.get("rank"), UNKNOWN_NUMBER)
        if 0 <= rank < MAX_RANKS:
            entries.append(_RankEntry(rank, fields))
    return entries


def _is_considered_dead(entry: _RankEntry) -> bool:
    status = entry.fields.get("status")
    return isinstance(status, dict) and bool(status.get("considered_dead"))


def _report_count_difference(
    evidence: Evidence, key: str, kind: str, counts: Mapping[int, int], source: str
) -> None:
    low, high = min(counts.values()), max(counts.values())
    if low == high:
        return
    behind = tuple(sorted(rank for rank, count in counts.items() if count < high))
    label = evidence.groups[key].label
    text = f"on {label}: at {kind} {low} while others are at {high}"
    evidence.tool_reports.append(ToolReport(_TOOL, behind, text, source))
