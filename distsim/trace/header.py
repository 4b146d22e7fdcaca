"""Reads the header of a trace file, and refuses one that distsim has not written.

A trace is untrusted input: a replay, a comparison or a picture relies on the types of the header's
values, so all of them are checked here, once. Each check names the wrong key in its message.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Final

from distsim.common.errors import UsageError
from distsim.common.file_io import escape_control_characters
from distsim.trace.model import TRACE_SCHEMA_VERSION
from distsim.trace.packed_values import has_valid_values

FORMAT: Final = "distsim-trace"
TRACE_REMEDY: Final = (
    "traces are written by `distsim simulate FILE --trace FILE.jsonl` and `distsim run --real`"
)
#: A trace with more ranks is considered damaged.
MAX_RANKS: Final = 1 << 17
#: Larger whole numbers would not fit into the columns.
_MAX_COUNT: Final = 2**62
#: The longest line that a message quotes.
_MAX_QUOTED: Final = 60
#: The types of optional keys of a header.
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
#: Options of a backend that are numbers of bytes or nanoseconds.
_COUNT_OPTIONS: Final = ("buffsize", "eager_limit", "timeout_ns")
_COUNT_KEYS: Final = ("world_size", "nodes", "local_size", "makespan_ns", "calls", "until_ns")


def read_header(line: str, file: str) -> dict[str, Any]:
    """The header from its line. Raises UsageError for a line that is no valid header."""
    header = _parse_header(line, file)
    _check_version(header, file)
    groups = header.get("groups", [])
    if not isinstance(groups, list) or not all(_is_group(group) for group in groups):
        raise UsageError(f"{file}:1: expected `groups` as a list of [name, [ranks]]", TRACE_REMEDY)
    if not all(_is_count(header.get(key, 0)) for key in _COUNT_KEYS):
        raise UsageError(
            f"{file}:1: expected world_size, nodes, local_size, makespan_ns and calls "
            "as whole numbers",
            TRACE_REMEDY,
        )
    _check_keys(header, file)
    _check_ranks(header, file)
    del header["format"]
    return header


def _parse_header(line: str, file: str) -> dict[str, Any]:
    try:
        header = json.loads(line)
    except (ValueError, RecursionError):
        header = None
    is_cut = line.startswith('{"format": "distsim-trace"') and not line.endswith("\n")
    if header is None and is_cut:
        raise UsageError(
            f"{file}:1: the file ends inside its header, so it cannot be read",
            "record it again",
        )
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        remedy = TRACE_REMEDY
        if file.endswith((".yaml", ".yml")):
            remedy = f"to run a scenario for real: `distsim run {file} --real`"
        raise UsageError(
            f"{file}:1: expected the header of a trace, found {shortened_line(line)}", remedy
        )
    return header


def _check_version(header: Mapping[str, Any], file: str) -> None:
    version = header.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise UsageError(f"{file}:1: the header has no schema_version", TRACE_REMEDY)
    if version > TRACE_SCHEMA_VERSION:
        raise UsageError(
            f"{file}:1: this trace has schema version {version}, "
            f"but this distsim reads up to {TRACE_SCHEMA_VERSION}",
            "use a newer distsim, or write the trace again with this one",
        )


def _check_ranks(header: Mapping[str, Any], file: str) -> None:
    """Raise UsageError for too many ranks, and for a rank outside the world."""
    world_size = header.get("world_size")
    if not world_size:
        return
    if world_size > MAX_RANKS:
        raise UsageError(
            f"{file}:1: {world_size} ranks are too many: distsim reads at most {MAX_RANKS}",
            TRACE_REMEDY,
        )
    group_ranks = [rank for _, ranks in header.get("groups") or () for rank in ranks]
    ended_ranks = [end[0] for end in header.get("ends") or ()]
    for rank in (*group_ranks, *ended_ranks):
        if not 0 <= rank < world_size:
            raise UsageError(
                f"{file}:1: the header names rank {rank}, outside its world of {world_size}",
                "write the trace again",
            )


# --- types of values ---


def _check_keys(header: Mapping[str, Any], file: str) -> None:
    """Raise UsageError for the first key whose value a replay or a comparison could not read."""
    wrong = _wrong_key(header)
    if wrong is not None:
        raise UsageError(f"{file}:1: `{wrong}` in the header has an invalid value", TRACE_REMEDY)


def _wrong_key(header: Mapping[str, Any]) -> str | None:
    for key, kind in _KEY_TYPES.items():
        value = header.get(key)
        if value is not None and not isinstance(value, kind):
            return key
    for key, is_valid in _ITEM_CHECKS.items():
        container = header.get(key) or ()
        items = container.values() if isinstance(container, dict) else container
        if not all(is_valid(item) for item in items):
            return key
    options = header.get("options") or {}
    for name in _COUNT_OPTIONS:
        if not _is_count(options.get(name)):
            return f"options.{name}"
    return None if has_valid_values(header) else "values"


def has_type(value: object, kind: type) -> bool:
    """Whether a value has a type; unlike for isinstance, a bool is no int."""
    return isinstance(value, kind) and not (kind is int and isinstance(value, bool))


def _is_rank(value: object) -> bool:
    return has_type(value, int)


def _is_text(value: object) -> bool:
    return isinstance(value, str)


def _is_count(value: object) -> bool:
    """A number of zero or more, or null."""
    return value is None or (type(value) is int and 0 <= value < _MAX_COUNT)


def _is_link_fault(fault: object) -> bool:
    """[link, nodes, factor]."""
    if not isinstance(fault, list) or len(fault) != 3:
        return False
    link, nodes, factor = fault
    is_number = isinstance(factor, (int, float)) and not isinstance(factor, bool)
    return isinstance(link, str) and isinstance(nodes, list) and is_number


def _is_end(end: object) -> bool:
    """[rank, status, time]."""
    if not isinstance(end, list) or len(end) != 3:
        return False
    rank, status, at_ns = end
    return type(rank) is int and isinstance(status, str) and type(at_ns) is int


def _is_group_option(options: object) -> bool:
    """{timeout_ns, backend}, both optional."""
    if not isinstance(options, dict):
        return False
    return _is_count(options.get("timeout_ns")) and isinstance(options.get("backend", ""), str)


def _is_group(group: object) -> bool:
    """[name, ranks]."""
    if not isinstance(group, list) or len(group) != 2:
        return False
    name, ranks = group
    if not isinstance(name, str) or not isinstance(ranks, list):
        return False
    return all(type(rank) is int and rank >= 0 for rank in ranks)


#: Checks of the items of lists and of the values of dictionaries. They run in this order, after all
#: types of keys, so that a damaged header always yields the same message.
_ITEM_CHECKS: Final[dict[str, Callable[[object], bool]]] = {
    "link_faults": _is_link_fault,
    "ends": _is_end,
    "group_options": _is_group_option,
    "culprits": _is_rank,
    "said": _is_text,
    "cut": _is_count,
}


def shortened_line(text: str) -> str:
    """A line in the form in which a message quotes it."""
    text = escape_control_characters(" ".join(text.split())) or "nothing"
    return text if len(text) <= _MAX_QUOTED else text[: _MAX_QUOTED - 3] + "..."
