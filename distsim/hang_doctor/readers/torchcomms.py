"""Number the calls of a TorchComms Flight Recorder by group.

TorchComms writes dumps in torch's format (``comms/torchcomms/hooks/FlightRecorder.cpp``), but its
``collective_seq_id`` counts the calls of all groups and the messages together. Ranks make a
different number of calls on other groups, so these numbers cannot be compared between ranks. The
calls of each group are therefore counted here.
"""

from __future__ import annotations

import re
from collections import Counter

from distsim.hang_doctor.model.evidence_records import UNKNOWN_NUMBER, int_field

_MESSAGE = re.compile(r"(?:^|:)(?:send|recv)\b")


def has_one_counter(entries: list[object]) -> bool:
    """Whether one counter numbers the calls of all groups, which torch's own recorder never does.

    The numbers of all entries are consecutive, and those of some group alone are not.
    """
    last_of_group: dict[str, int] = {}
    has_gap = False
    expected = UNKNOWN_NUMBER
    for entry in entries:
        number = int_field(entry, "collective_seq_id")
        if number < 0 or int_field(entry, "p2p_seq_id") != 0:
            return False
        if expected not in (UNKNOWN_NUMBER, number):
            return False
        expected = number + 1
        group = _group(entry)
        has_gap |= last_of_group.get(group, number - 1) != number - 1
        last_of_group[group] = number
    return has_gap or any(_is_message(entry) for entry in entries)


def with_numbers_by_group(entries: list[object], lost_oldest_calls: bool) -> list[object]:
    """The entries with the number of each collective on its group, counted from 1.

    Unknown if the recording does not begin at the first call.
    """
    counts: Counter[str] = Counter()
    found: list[object] = []
    for entry in entries:
        if not isinstance(entry, dict):
            continue
        number = UNKNOWN_NUMBER
        if not _is_message(entry) and not lost_oldest_calls:
            counts[_group(entry)] += 1
            number = counts[_group(entry)]
        found.append({**entry, "collective_seq_id": number})
    return found


def _group(entry: object) -> str:
    return str(entry.get("process_group")) if isinstance(entry, dict) else ""


def _is_message(entry: object) -> bool:
    name = entry.get("profiling_name") if isinstance(entry, dict) else None
    return isinstance(name, str) and _MESSAGE.search(name) is not None
