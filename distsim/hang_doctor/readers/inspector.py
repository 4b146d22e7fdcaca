"""Read the files of NCCL's Inspector plugin: one JSON object for each finished collective.

Format: ``ext-profiler/inspector/README.md`` of NCCL 2.28 (output format v4.0). ``coll_sn`` counts
the calls of one function on one communicator, and ``rank`` is the rank in the communicator. So
only the largest communicators are read, and each function is compared by itself. An operation that
hangs is never written. So the counts show which ranks finished fewer calls, and only in the name of
the Inspector, because it writes at intervals.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    ToolCount,
    non_negative_int,
)

_TOOL: Final = "NCCL Inspector"
#: The beginning of a file is searched for these keys.
_KEYS: Final = (b'"inspector_output_format_version"', b'"coll_perf"', b'"p2p_perf"')
_HEAD_BYTES: Final = 4096


def is_inspector_file(data: bytes) -> bool:
    """Whether these bytes are the beginning of an Inspector file."""
    head = data[:_HEAD_BYTES]
    return _KEYS[0] in head and any(key in head for key in _KEYS[1:])


def read_inspector(evidence: Evidence, data: bytes, source: str) -> set[int]:
    """Enter the last finished call of each function; return the ranks in the file."""
    ranks: set[int] = set()
    for record in _json_objects(data):
        header, call = record.get("header"), record.get("coll_perf")
        if not isinstance(header, dict) or not isinstance(call, dict):
            continue
        rank = non_negative_int(header.get("rank"), UNKNOWN_NUMBER)
        number = non_negative_int(call.get("coll_sn"), UNKNOWN_NUMBER)
        if not 0 <= rank < MAX_RANKS or number < 0:
            continue
        key = ToolCount(
            _TOOL,
            non_negative_int(header.get("n_ranks")),
            f"{str(call.get('coll'))[:40]} on communicator {str(header.get('id'))[:40]}",
        )
        by_rank = evidence.tool_counts.setdefault(key, {})
        by_rank[rank] = max(by_rank.get(rank, 0), number)
        ranks.add(rank)
    for rank in ranks:
        evidence.records_of(rank, source)
    return ranks


def _json_objects(data: bytes) -> Iterable[dict[str, Any]]:
    """The objects of a file: one per line, or one after the other over several lines."""
    text = data.decode("utf-8", "replace")
    decoder = json.JSONDecoder()
    at = 0
    while True:
        at = text.find("{", at)
        if at < 0:
            return
        try:
            found, at = decoder.raw_decode(text, at)
        except (ValueError, RecursionError):
            # A damaged object, such as the last one of a process that was killed.
            at = text.find("\n", at)
            if at < 0:
                return
            continue
        if isinstance(found, dict):
            yield found
