"""Remove what launchers and log collectors put before a line, and read the rank from it."""

from __future__ import annotations

import re
from typing import NamedTuple

from distsim.hang_doctor.model.evidence import MAX_RANKS

#: The group ``rank`` is the rank. The group ``weak`` is a number that may be something else, such
#: as a local rank.
_PREFIXES = (
    # mpirun --tag-output
    re.compile(r"^\[\d+,(?P<rank>\d{1,7})\]<(?:stderr|stdout|stddiag)>:?\s?"),
    # torch
    re.compile(r"^\[rank(?P<rank>\d{1,7})\]:?(?=[\s\[])(?: (?=\s*(?:File|Traceback|\w|\()))?"),
    # srun --label
    re.compile(r"^\s{0,4}(?P<weak>\d{1,7}): "),
    # torchrun --tee: [default3]:
    re.compile(r"^\[\w+?(?P<weak>\d{1,5})\]:\s?(?!\[?[EWIF]\d)"),
    # kubectl logs --prefix
    re.compile(r"^\[pod/[^\]]*\]\s"),
    # container logs, kubectl --timestamps
    re.compile(r"^\d{4}-\d\d-\d\dT[\d:.]+(?:Z|[+-]\d\d:?\d\d)\s(?:std(?:err|out) [FP] )?"),
    # Ray
    re.compile(r"^\((?:\w+ )?(?:[\w.]+ )?pid=\d+(?:, ip=[\d.]+)?\)\s?"),
    # stern, pdsh
    re.compile(
        r"^(?=[\w.-]*(?:worker|master|launcher|rank|node|pod))[\w.-]++(?: [\w.-]++)? "
        r"(?=\[rank|\[E|Traceback|  File)"
    ),
    # the line numbers of a paste
    re.compile(r"^\[\d+\] (?=\[)"),
)
#: Prefixes are nested: a line of torch in a container under kubectl has three.
_MAX_PREFIXES = 4


class PrefixedLine(NamedTuple):
    """A line without its prefixes.

    ``rank`` is the rank in a prefix. ``possible_rank`` is a number in a prefix that may be a rank.
    """

    rank: int | None
    possible_rank: int | None
    text: str


def split_prefix(line: str) -> PrefixedLine:
    """Remove up to four prefixes, one after the other; the first number of each kind counts."""
    rank: int | None = None
    possible_rank: int | None = None
    for _ in range(_MAX_PREFIXES):
        match = _first_match(line)
        if match is None:
            break
        numbers = match.groupdict()
        if rank is None and numbers.get("rank"):
            rank = int(numbers["rank"])
        if possible_rank is None and numbers.get("weak"):
            possible_rank = int(numbers["weak"])
        line = line[match.end() :]
    if rank is not None and rank >= MAX_RANKS:
        rank = None
    return PrefixedLine(rank, possible_rank, line)


def _first_match(line: str) -> re.Match[str] | None:
    for pattern in _PREFIXES:
        match = pattern.match(line)
        if match is not None:
            return match
    return None
