"""Read the tables of torch's debug server: what its Flight Recorder analyzer found for each call.

Format: ``FlightRecorderHandler`` in ``torch/distributed/debug/_debug_handlers.py`` of torch 2.13,
which prints the records of ``torch/distributed/flight_recorder/components/types.py`` with
``tabulate``: as HTML on its page, and as plain columns in the files ``fr_trace_TIME.txt``. Columns
are separated by at least two spaces, and empty cells leave no mark, so a row is recognised by the
forms of its cells. Conclusions are entered in the name of the analyzer: it compares all ranks with
the first one.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from typing import Final

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import ToolReport
from distsim.hang_doctor.model.operation_names import operation_family
from distsim.hang_doctor.model.phrases import verb_form
from distsim.hang_doctor.readers.file_access import escaped
from distsim.hang_doctor.readers.tool_lines import ANALYZER

_TEXT_MARK: Final = b"--- NCCL Calls ---"
_PAGE_MARK: Final = b"<h2>NCCL Calls</h2>"
_MAX_ROW: Final = 100_000
_HTML_CELL: Final = re.compile(r"<td[^<>]{0,80}>([^<]{0,100000})</td>")
#: A row of the table Memberships: the group and one of its ranks.
_MEMBERSHIP: Final = re.compile(r"^\s*(\S{1,200})\s{2,}(\d{1,7})\s*$")
#: Sizes of tensors, in which no two spaces follow each other.
_SIZES: Final = r"\[(?:[\[\],\d]| (?! ))*\]"
#: A row of the table Collectives, up to its state.
_COLLECTIVE: Final = re.compile(
    r"^\s*\d+\s+\S+\s+(?:True|False)\s+(?P<number>\d{1,15})\s+\d+\s+\d+\s{2,}"
    r"(?P<group>\S{1,200}(?: \S{1,200}){0,8})\s{2,}(?P<name>\S{1,200}(?: \S{1,200}){0,8})\s{2,}"
    rf"{_SIZES}\s{{2,}}{_SIZES}\s{{2,}}\{{[\d, ]+\}}\s{{2,}}(?P<state>\w+)"
)
_MISSING_RANKS: Final = re.compile(r"(?<=  )\{(\d[\d, ]*)\}(?:\s|$)")
_OTHER_CALL: Final = re.compile(r"(\d{1,7}): Collective\(.{0,400}?collective_name='([^']{0,80})'")


def has_debug_tables(data: bytes) -> bool:
    """Whether this is a page or a file of the debug server with the tables of the analyzer."""
    return _TEXT_MARK in data or _PAGE_MARK in data


def read_debug_tables(evidence: Evidence, data: bytes, source: str) -> set[int]:
    """Enter the first finding on each group; return the ranks of the job."""
    text = data.decode("utf-8", "replace")
    rows = _rows_of_page(text) if _PAGE_MARK in data else iter(text.splitlines())
    ranks: set[int] = set()
    groups_with_finding: set[str] = set()
    for row in rows:
        membership = _MEMBERSHIP.match(row)
        if membership is not None and int(membership[2]) < MAX_RANKS:
            ranks.add(int(membership[2]))
            continue
        call = _COLLECTIVE.match(row[:_MAX_ROW])
        # The analyzer counts unequal sizes as mismatches even if the call completed.
        if call is None or call["state"] == "completed" or call["group"] in groups_with_finding:
            continue
        report = _report(call, row[call.end() : _MAX_ROW], source)
        if report is not None:
            groups_with_finding.add(call["group"])
            evidence.tool_reports.append(report)
    if not groups_with_finding:
        evidence.add_note(
            f"{escaped(source)}: the tables show no rank that has not joined a call or made "
            "another one; give doctor the dumps to see which calls are open"
        )
    return ranks


def _rows_of_page(text: str) -> Iterator[str]:
    """The rows of all tables, in the form of the text file."""
    for row in text.split("<tr>")[1:]:
        cells = (html.unescape(cell).strip() for cell in _HTML_CELL.findall(row[:_MAX_ROW]))
        yield "  ".join(cells)


def _report(call: re.Match[str], rest: str, source: str) -> ToolReport | None:
    """The finding on a call; None if all ranks made it. ``rest``: the cells after its state."""
    op = operation_family(call["name"].rpartition(":")[2])
    title = f"{op} (call {call['number']} of group {call['group'][:60]})"
    others = {int(rank): name for rank, name in _OTHER_CALL.findall(rest)}
    differing = tuple(sorted(rank for rank in others if rank < MAX_RANKS))
    if differing:
        names = dict.fromkeys(operation_family(name.rpartition(":")[2]) for name in others.values())
        verb = verb_form(differing, "differs", "differ")
        calls = verb_form(differing, "calls", "call")
        text = f"{verb} from the other ranks, which call {title}, and {calls} {' or '.join(names)}"
        return ToolReport(ANALYZER, differing, text, source)
    missing = _MISSING_RANKS.search(rest)
    if missing is None:
        return None
    numbers = map(int, re.findall(r"\d{1,7}", missing[1]))
    absent = tuple(rank for rank in numbers if rank < MAX_RANKS)
    return ToolReport(ANALYZER, absent, f"did not join {title}", source)
