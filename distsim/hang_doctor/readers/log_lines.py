"""Read a log line by line, with any prefixes, whichever tools have written the lines.

A log may mix the lines of several ranks and tools: torch's watchdog and reports, stacks, NCCL's own
lines, Python tracebacks and torchrun's summary. ``LogReader`` determines the rank of each line and
offers it to one reader after the other; each reader has a module of its own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import ThreadStack
from distsim.hang_doctor.readers.log_context import LogContext
from distsim.hang_doctor.readers.log_prefixes import split_prefix
from distsim.hang_doctor.readers.nccl_debug import CONNECTION_MISMATCH, NcclDebugReader
from distsim.hang_doctor.readers.process_ends import TorchrunSummaryReader, TracebackReader
from distsim.hang_doctor.readers.stacks import StackReader
from distsim.hang_doctor.readers.tool_lines import ToolLineReader
from distsim.hang_doctor.readers.torch_reports import read_torch_report
from distsim.hang_doctor.readers.watchdog_lines import WatchdogReader

#: Colours of a terminal, also where the escape character was lost in a paste.
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]|\[(?:36|0|31|32|33|1)m")
#: A headline by which people separate the stacks of several ranks: "Rank 3:", "== rank 3 stack ==".
_SECTION = re.compile(
    r"^\W*rank\W{0,3}(\d{1,7})\W*(?:(?:stack|dump|py-?spy|pid|https?:|unix).*)?$", re.IGNORECASE
)
#: Longer lines are not continued with the next line.
_MAX_WRAPPED_LINE = 2000


class LogReader:
    """Reads the lines of one file into the evidence.

    ``rank``: the rank that the file belongs to by its name; None if several ranks write to it.
    Afterwards ``found`` holds the kinds of lines that were recognised, and ``ranks`` the ranks that
    they are about.
    """

    def __init__(self, evidence: Evidence, source: str, rank: int | None = None) -> None:
        self._log = LogContext(evidence, source, rank)
        self._stacks = StackReader(source)
        self._watchdog = WatchdogReader(self._log)
        self._nccl = NcclDebugReader(evidence, source, self._log.ranks)
        self._torchrun = TorchrunSummaryReader(self._log)
        self._tracebacks = TracebackReader(self._log)
        self._tools = ToolLineReader(self._log)
        #: The rank of the latest headline.
        self._rank_of_section: int | None = None
        self._rank_of_stack: int | None = None
        self._line_number = 0

    @property
    def found(self) -> set[str]:
        """The kinds of lines that were recognised."""
        return self._log.found

    @property
    def ranks(self) -> set[int]:
        """The ranks that the recognised lines are about."""
        return self._log.ranks

    def read(self, lines: Iterator[str]) -> None:
        """Read all lines of the file."""
        for line in _joined_lines(lines):
            self._take(line)
        self._add_stack(self._stacks.close())
        self._torchrun.close()
        self._tools.close()
        self._nccl.done()
        self._log.found |= self._nccl.found

    def _take(self, line: str) -> None:
        self._line_number += 1
        prefixed = split_prefix(line)
        text = prefixed.text
        rank = self._rank_of_line(prefixed.rank)
        probable_rank = rank if rank is not None else prefixed.possible_rank

        belongs_to_stack, ended_stack = self._stacks.take(text)
        self._add_stack(ended_stack)
        if belongs_to_stack:
            self._rank_of_stack = probable_rank
            return
        section = _SECTION.match(text)
        if section is not None and int(section[1]) < MAX_RANKS:
            self._rank_of_section = int(section[1])
            return
        if self._watchdog.take_frame(text):
            return
        mismatch = CONNECTION_MISMATCH.search(text)
        if mismatch is not None:
            self._log.add_report("NCCL", () if rank is None else (rank,), mismatch[0])
        self._tools.take(text)
        if "NCCL" in text:
            # The watchdog's rank may be in the prefix, so it takes the whole line.
            self._watchdog.take(line, prefixed.rank, prefixed.possible_rank, self._line_number)
            if self._nccl.take(text, probable_rank):
                return
        read_torch_report(self._log, text)
        self._torchrun.take(text)
        self._tracebacks.take(text, probable_rank)

    def _rank_of_line(self, rank_in_prefix: int | None) -> int | None:
        if rank_in_prefix is not None:
            return rank_in_prefix
        if self._rank_of_section is not None:
            return self._rank_of_section
        return self._log.rank

    def _add_stack(self, stack: ThreadStack | None) -> None:
        if stack is None:
            return
        rank = self._rank_of_stack
        if rank is None:
            rank = self._stacks.command_rank
        self._log.found.add("stacks")
        if rank is not None and rank < MAX_RANKS:
            self._log.ranks.add(rank)
            self._log.evidence.add_stack(rank, stack)
        else:
            self._log.evidence.add_stack(None, stack)


def _joined_lines(lines: Iterator[str]) -> Iterator[str]:
    """The lines without colours; lines of the watchdog that a terminal has wrapped are joined."""
    start = ""
    for raw in lines:
        line = start + _COLOUR.sub("", raw.rstrip("\r\n"))
        start = ""
        if _is_wrapped_inside_work(line):
            start = line.rstrip()
        elif line.endswith("collective operation timeout:"):
            start = f"{line} "
        else:
            yield line
    if start:
        yield start


def _is_wrapped_inside_work(line: str) -> bool:
    if len(line) >= _MAX_WRAPPED_LINE:
        return False
    _, opening, rest = line.partition("WorkNCCL(")
    return bool(opening) and ")" not in rest
