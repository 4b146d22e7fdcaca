"""Cleans logs that were pasted from a terminal or a launcher.

Removes what launchers and terminals put before a line, and splits a text with several runs.
"""

from __future__ import annotations

import re
from typing import Final

#: What may precede a line: colours, mpirun's ``--tag-output`` (`[1,0]<stdout>:`) and
#: ``--timestamp-output``, srun's ``--label`` (` 0: `), container names (`worker-0 | `), times of
#: day, quotation marks of mails and issues.
_LINE_PREFIX: Final = re.compile(
    r"""^(?:
    (?:\x1b\[[0-9;]*[A-Za-z])+
    | \s*\[\d+,\s*\d+\]\s*<std(?:out|err|diag)>:?[ ]?
    | \s*\d{1,6}:[ ](?=[ \d\#])
    | \s*[A-Za-z][\w.-]*\s?\|[ ]
    | \s*\[?\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?\]?[ ]?(?:[|:-][ ])?
    | \s*(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[ ][A-Z][a-z]{2}[ ]+\d+[ ]\d\d:\d\d:\d\d[ ]\d{4}
    | \s*>[ ]
    )""",
    re.VERBOSE,
)
_COLOUR: Final = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
#: How many prefixes a line may have at most.
_MAX_PREFIXES: Final = 5


def strip_line_prefixes(text: str) -> list[str]:
    """The lines as the program wrote them."""
    unix_text = text.replace("\r\n", "\n").replace("\r", "\n")
    return [_strip_line(line) for line in unix_text.split("\n")]


def _strip_line(line: str) -> str:
    line = _COLOUR.sub("", line)
    for _ in range(_MAX_PREFIXES):
        prefix = _LINE_PREFIX.match(line)
        if prefix is None or not prefix.end():
            break
        line = line[prefix.end() :]
    # nccl-tests indents its rows, but never its comments.
    stripped = line.lstrip()
    return stripped if stripped.startswith("#") else line


#: The first line of a run of nccl-tests.
_RUN_HEADER: Final = re.compile(r"^#\s*(?:nThread|Collective test starting)\b")


def split_runs(lines: list[str], rows: list[int]) -> list[list[str]]:
    """The lines of each run. ``rows``: the numbers of the lines that hold measurements.

    A new run begins at a header that follows measurements. The lines between the last measurement
    and that header belong to the new run.
    """
    starts = [0]
    row_numbers = set(rows)
    last_row = -1
    for number, line in enumerate(lines):
        if number in row_numbers:
            last_row = number
        elif last_row >= starts[-1] and _RUN_HEADER.match(line):
            starts.append(last_row + 1)
    ends = [*starts[1:], len(lines)]
    return [lines[start:end] for start, end in zip(starts, ends, strict=True)]


__all__ = ["strip_line_prefixes", "split_runs"]
