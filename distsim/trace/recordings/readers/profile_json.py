"""Parses the JSON of a profile one event at a time.

A profile of 100 000 events is 34 MB of text and 230 MB as Python objects, of which a reader keeps a
tenth. So each event is parsed, reduced by the caller and dropped. The cyclic garbage collector is
paused, because it would walk over all kept events again and again.

The text is parsed as a whole if its first list of events is a nested one.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from distsim.common.records import gc_paused

_EVENTS_KEY = re.compile(r'"traceEvents"\s*:\s*\[')
_BETWEEN = re.compile(r"[\s,]*")
Kept = TypeVar("Kept")


class ParsedProfile(NamedTuple):
    """The values around the events, and what ``keep`` returned for each event; None is dropped.

    ``has_events``: whether there is a list of events.
    """

    values: dict[str, Any]
    events: list[Any]
    has_events: bool


def parse_profile(content: bytes, keep: Callable[[Any], Kept | None]) -> ParsedProfile:
    """Parse a profile. Raises ValueError or RecursionError for damaged JSON."""
    text = content.decode(json.detect_encoding(content), "surrogatepass")
    with gc_paused():
        found = _EVENTS_KEY.search(text)
        parsed = None if found is None else _parse_in_pieces(text, found, keep)
        return _parse_whole(text, keep) if parsed is None else parsed


def _parse_in_pieces(
    text: str, found: re.Match[str], keep: Callable[[Any], Kept | None]
) -> ParsedProfile | None:
    """The profile, or None if the list is not a value of the outermost object."""
    decode = json.JSONDecoder().raw_decode
    skip = _BETWEEN.match
    events = []
    position = skip(text, found.end()).end()  # type: ignore[union-attr]
    while not text.startswith("]", position):
        event, position = decode(text, position)
        kept = keep(event)
        if kept is not None:
            events.append(kept)
        position = skip(text, position).end()  # type: ignore[union-attr]
    values = json.loads(text[: found.end()] + text[position:])
    is_outermost = isinstance(values, dict) and values.get("traceEvents") == []
    return ParsedProfile(values, events, True) if is_outermost else None


def _parse_whole(text: str, keep: Callable[[Any], Kept | None]) -> ParsedProfile:
    data = json.loads(text)
    values = data if isinstance(data, dict) else {}
    events = values.get("traceEvents")
    if not isinstance(events, list):
        return ParsedProfile(values, [], False)
    kept = [one for one in map(keep, events) if one is not None]
    return ParsedProfile(values, kept, True)


__all__ = ["ParsedProfile", "parse_profile"]
