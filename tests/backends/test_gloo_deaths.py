"""Which members of a gloo collective notice that another one is dead (G13), as run.

`tests/data/gloo_deaths.json` has, for each collective with root 0, and for a death before the other
ranks call it (``before``) or while they wait in it (``during``), one word for each run. Its letters
are the ranks: ``d`` died, ``a`` lives but does not call, ``r`` raised, ``b`` was blocked, ``c``
completed. Ranks that raised stayed alive. torch 2.13.0 on CPUs; each run was repeated.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from distsim.backends.gloo_contacts import contact

RUNS = json.loads(
    (Path(__file__).parents[1] / "data" / "gloo_deaths.json").read_text(encoding="utf-8")
)


@pytest.mark.parametrize("case", RUNS)
def test_the_members_that_raised_are_those_that_use_a_connection_with_the_dead_one(
    case: str,
) -> None:
    op, _, death = case.partition(" ")
    for word in RUNS[case].split():
        raised = {rank for rank, end in enumerate(word) if end == "r"}
        assert _notices_death(op, word, death == "before") == raised, word


def _notices_death(op: str, word: str, died_before: bool) -> set[int]:
    dead = word.index("d")
    arrived = {rank for rank, end in enumerate(word) if end not in "da"}
    found = set()
    for rank in arrived:
        use = contact(op, len(word), 0, rank, dead)
        if use is None:
            continue
        needed = use.posts_after if died_before else use.waits_after
        if needed <= arrived:
            found.add(rank)
    return found
