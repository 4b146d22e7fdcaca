"""Logs as people paste them: what launchers and terminals put before a line, and several runs in
one text.
"""

from __future__ import annotations

import re
from typing import Final

#: Before a line: colours, mpirun's ``--tag-output`` (`[1,0]<stdout>:`) and ``--timestamp-output``,
#: srun's ``--label`` (` 0: `), container names (`worker-0 | `), times of day, quotation marks of
#: mails and issues.
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
#: Prefixes on top of each other.
_MAX_PREFIXES: Final = 5


def strip_line_prefixes(text: str) -> list[str]:
    """The lines as the program wrote them."""
    return [
        _strip_line(line) for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    ]


def _strip_line(line: str) -> str:
    line = _COLOUR.sub("", line)
    for _ in range(_MAX_PREFIXES):
        found = _LINE_PREFIX.match(line)
        if found is None or not found.end():
            break
        line = line[found.end() :]
    stripped = line.lstrip()
    return stripped if stripped.startswith("#") else line


#: With one of these a run of nccl-tests begins.
_RUN_HEADER: Final = re.compile(r"^#\s*(?:nThread|Collective test starting)\b")


def split_runs(lines: list[str], rows: list[int]) -> list[list[str]]:
    """The lines of each run; ``rows``: the numbers of those that hold measurements. What stands
    before a run's header belongs to it."""
    cuts, measured = [0], iter(sorted(rows))
    last, following = -1, next(measured, None)
    for k, line in enumerate(lines):
        if k == following:
            last, following = k, next(measured, None)
        elif last >= cuts[-1] and _RUN_HEADER.match(line):
            cuts.append(last + 1)
    return [lines[a:b] for a, b in zip(cuts, [*cuts[1:], len(lines)], strict=True)]


__all__ = ["strip_line_prefixes", "split_runs"]
