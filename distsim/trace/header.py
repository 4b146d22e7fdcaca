"""The header of a trace's file: read, and refused where it is not as distsim writes it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final

from distsim.common.errors import UsageError
from distsim.trace.model import TRACE_SCHEMA_VERSION
from distsim.trace.packed_values import has_valid_values

FORMAT: Final = "distsim-trace"
TRACE_REMEDY: Final = (
    "traces are written by `distsim simulate FILE --trace FILE.jsonl` and `distsim run --real`"
)
#: A trace with more ranks is taken for a damaged one.
MAX_RANKS: Final = 1 << 17
#: Keys of a header, and what they are where they are there.
_KEY_TYPES: Final = {
    "options": dict,
    "mesh": dict,
    "group_options": dict,
    "prices": dict,
    "ends": list,
    "link_faults": list,
    "name": str,
    "file": str,
    "backend": str,
    "cluster": str,
    "outcome": str,
    "reason": str,
    "said": dict,
    "culprits": list,
    "cut": dict,
    "ended_by": str,
}


def read_header(line: str, file: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    if header is None and line.startswith('{"format": "distsim-trace"') and not line.endswith("\n"):
        raise UsageError(
            f"{file}:1: the file is cut short in its header, so nothing can be read of it",
            "record it again",
        )
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        scenario = file.endswith((".yaml", ".yml"))
        remedy = (
            f"to run a scenario for real: `distsim run {file} --real`" if scenario else TRACE_REMEDY
        )
        raise UsageError(
            f"{file}:1: expected the header of a trace, found {shortened_line(line)}", remedy
        )
    version = header.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"{file}:1: the header has no schema_version", TRACE_REMEDY)
    if version > TRACE_SCHEMA_VERSION:
        raise UsageError(
            f"{file}:1: this trace has schema version {version}, this distsim reads up to {TRACE_SCHEMA_VERSION}",
            "use a newer distsim, or write the trace again with this one",
        )
    groups = header.get("groups", [])
    if not isinstance(groups, list) or not all(_is_group(g) for g in groups):
        raise UsageError(f"{file}:1: expected `groups` as a list of [name, [ranks]]", TRACE_REMEDY)
    if not all(
        _is_count(header.get(key, 0))
        for key in ("world_size", "nodes", "local_size", "makespan_ns", "calls", "until_ns")
    ):
        raise UsageError(
            f"{file}:1: expected world_size, nodes, local_size, makespan_ns and calls as whole numbers",
            TRACE_REMEDY,
        )
    _check_keys(header, file)
    _check_ranks(header, file)
    del header["format"]
    return header


def _check_ranks(header: Mapping[str, Any], file: str) -> None:
    """Raise UsageError for more ranks than anybody has, and for a rank that the world does not
    have.
    """
    size = header.get("world_size")
    if not size:
        return
    if size > MAX_RANKS:
        raise UsageError(
            f"{file}:1: {size} ranks are more than distsim reads, {MAX_RANKS}", TRACE_REMEDY
        )
    named = [rank for _, ranks in header.get("groups") or () for rank in ranks] + [
        end[0] for end in header.get("ends") or ()
    ]
    odd = next((rank for rank in named if not 0 <= rank < size), None)
    if odd is not None:
        raise UsageError(
            f"{file}:1: the header names rank {odd}, outside its world of {size}",
            "write the trace again",
        )


def _check_keys(header: Mapping[str, Any], file: str) -> None:
    """Raise UsageError for keys of a header that a replay or a comparison could not read."""
    wrong = next(
        (
            key
            for key, kind in _KEY_TYPES.items()
            if header.get(key) is not None and not isinstance(header[key], kind)
        ),
        None,
    )
    if wrong is None and not all(
        _is_link_fault(fault) for fault in header.get("link_faults") or ()
    ):
        wrong = "link_faults"
    if wrong is None and not all(_is_end(end) for end in header.get("ends") or ()):
        wrong = "ends"
    if wrong is None and not all(
        _is_group_option(given) for given in (header.get("group_options") or {}).values()
    ):
        wrong = "group_options"
    if wrong is None and not all(has_type(rank, int) for rank in header.get("culprits") or ()):
        wrong = "culprits"
    if wrong is None and not all(
        isinstance(text, str) for text in (header.get("said") or {}).values()
    ):
        wrong = "said"
    if wrong is None and not all(map(_is_count, (header.get("cut") or {}).values())):
        wrong = "cut"
    if wrong is None and not has_valid_values(header):
        wrong = "values"
    if wrong is not None:
        raise UsageError(
            f"{file}:1: `{wrong}` in the header is not as distsim writes it", TRACE_REMEDY
        )


def _is_link_fault(fault: object) -> bool:
    return (
        isinstance(fault, list)
        and len(fault) == 3
        and isinstance(fault[0], str)
        and isinstance(fault[1], list)
        and isinstance(fault[2], (int, float))
        and not isinstance(fault[2], bool)
    )


def has_type(value: object, kind: type) -> bool:
    """true is no number."""
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _is_end(end: object) -> bool:
    return (
        isinstance(end, list)
        and len(end) == 3
        and type(end[0]) is type(end[2]) is int
        and isinstance(end[1], str)
    )


def _is_group_option(given: object) -> bool:
    return (
        isinstance(given, dict)
        and _is_count(given.get("timeout_ns"))
        and isinstance(given.get("backend", ""), str)
    )


def _is_count(value: object) -> bool:
    return value is None or (type(value) is int and 0 <= value < 2**62)


def _is_group(group: object) -> bool:
    return (
        isinstance(group, list)
        and len(group) == 2
        and isinstance(group[0], str)
        and isinstance(group[1], list)
        and all(type(rank) is int and rank >= 0 for rank in group[1])
    )


def shortened_line(text: str) -> str:
    """A line as a message can show it."""
    text = " ".join(text.split()) or "nothing"
    return text if len(text) <= 60 else text[:57] + "..."
