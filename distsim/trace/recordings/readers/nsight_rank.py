"""Reads an export of Nsight Systems and reduces each of its ranks to what the job needs."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from distsim.trace.recordings.readers.kineto_rank import RankReading, reduced_rank
from distsim.trace.recordings.readers.nsight_file import read_nsight_file

FORMAT = "Nsight Systems export"


class NsightReading(NamedTuple):
    """The ranks of one file, and notes about what is missing in it."""

    ranks: list[RankReading]
    notes: list[str]


def read_nsight(path: Path, *, as_one_step: bool = False) -> NsightReading:
    """Read one file. Raises UsageError. ``as_one_step``: ignore all signs of steps."""
    file = read_nsight_file(path)
    ranks = [reduced_rank(profile, as_one_step=as_one_step) for profile in file.profiles]
    return NsightReading(ranks, file.notes)
