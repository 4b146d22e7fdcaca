"""The names of pipeline schedules, the layouts that each allows, and how a schedule is built.

A schedule is named by PyTorch's class or by its paper, in any spelling. The schedules themselves
are in `distsim.scenario.strategies.pipeline.builtin_schedules`.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from distsim.scenario.strategies.pipeline.actions import PipelineSchedule
from distsim.scenario.strategies.pipeline.builtin_schedules import (
    SCHEDULE_BUILDERS,
    micro_batches_per_round,
)
from distsim.scenario.strategies.pipeline.send_recv import with_send_recv

#: PyTorch's class names, and the papers' names, in lower case without punctuation.
_SCHEDULE_ALIASES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "loopedbfs": "looped_bfs",
    "zb1p": "zb1p",
    "interleavedzerobubble": "zb1p",
    "zbv": "zbv",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipe_v",
    "dualpipe": "dualpipe",
}
_ONE_STAGE_BY_DEFAULT = ("gpipe", "1f1b", "zb1p")
#: Schedules that deal micro-batches out in rounds of equal size.
EVEN_ROUND_SCHEDULES = ("interleaved_1f1b", "zb1p")


class ChunkBounds(NamedTuple):
    """The smallest and the largest number of stages per rank."""

    low: int
    high: int


_ANY_CHUNKS = ChunkBounds(1, 2**20)
_CHUNK_BOUNDS = {
    "gpipe": ChunkBounds(1, 1),
    "1f1b": ChunkBounds(1, 1),
    "zbv": ChunkBounds(2, 2),
    "dualpipe_v": ChunkBounds(2, 2),
    "dualpipe": ChunkBounds(2, 2),
}


def canonical_name(name: str) -> str | None:
    """The name of a schedule in ``SCHEDULE_BUILDERS``; None if there is none of this name."""
    letters = "".join(c for c in name.lower() if c.isalnum())
    return _SCHEDULE_ALIASES.get(letters)


def chunk_bounds(schedule: str) -> ChunkBounds:
    """How many stages a rank may have under a schedule."""
    return _CHUNK_BOUNDS.get(schedule, _ANY_CHUNKS)


def default_chunks(schedule: str) -> int:
    """Stages per rank if the file does not say."""
    return 1 if schedule in _ONE_STAGE_BY_DEFAULT else 2


@lru_cache(maxsize=16)
def build_named_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int, *, megatron: bool, defer: bool
) -> PipelineSchedule:
    """A schedule by its canonical name, with its messages."""
    schedule = SCHEDULE_BUILDERS[name](ranks, micro_batches, chunks)
    if megatron:
        schedule = schedule._replace(issue="megatron")
    return with_send_recv(schedule, defer)


def nearest_micro_batches(ranks: int, count: int) -> str:
    """Advice: the nearest counts of micro-batches that divide into equal rounds."""
    fewer = next((n for n in range(count - 1, ranks - 1, -1) if _is_even(ranks, n)), None)
    more = next(n for n in range(count + 1, 2 * count + ranks + 1) if _is_even(ranks, n))
    return f"; use {more}" if fewer is None else f"; use {fewer} or {more}"


def _is_even(ranks: int, micro_batches: int) -> bool:
    return micro_batches_per_round(ranks, micro_batches) > 0
