"""Pipelines written as repeats are the pipelines written out; their expansion grows with what they
do, not with its square.
"""

from __future__ import annotations

from typing import Any

import pytest

from distsim.scenario import Scenario
from distsim.scenario.strategies.pipeline import rank_entries
from distsim.scenario.strategies.pipeline.loop_rerolling import (
    EntryTemplate,
    TemplateInstance,
    _RepeatFinder,
    reroll_loops,
)
from tests.support.strategy_checks import calls_of

SCHEDULES = [
    ("1f1b", 2, 12, 1),
    ("interleaved_1f1b", 4, 16, 2),
    ("interleaved_1f1b", 2, 16, 4),
    ("zb1p", 4, 20, 2),
    ("looped_bfs", 2, 9, 3),
    ("zbv", 4, 20, 2),
    ("dualpipe_v", 2, 16, 2),
    ("dualpipe", 4, 24, 2),
]


def pipeline(schedule: str, ranks: int, count: int, chunks: int, **more: Any) -> Scenario:
    given = {} if schedule in ("1f1b", "gpipe") else {"chunks": chunks}
    fields = {
        "schedule": schedule,
        "micro_batches": count,
        "forward": "1 ms",
        "backward": "2 ms",
        "activation": {"shape": [4]},
    }
    return Scenario(
        name="p",
        world=ranks,
        mesh={"pp": ranks},
        program=[{"pipeline": {**fields, **given, **more}}],
    )


def said(one: Scenario) -> dict[int, list[Any]]:
    """The calls of each rank; a number that is assigned is worked out, and counters of repeats are
    left.
    """

    def plain(call: Any) -> Any:
        value = None if call.value is None else call.value.evaluate(dict(call.indices))
        return [
            value,
            *(
                getattr(call, field)
                for field in call.__slots__
                if field not in ("value", "indices")
            ),
        ]

    return {rank: [plain(call) for call in calls] for rank, calls in calls_of(one).items()}


@pytest.mark.parametrize("layout", SCHEDULES)
def test_repeats_represent_the_calls_written_one_by_one(
    layout: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also repeats inside repeats, with numbers that go on with both."""
    short = pipeline(*layout, numbered=True)

    monkeypatch.setattr(
        rank_entries,
        "reroll_loops",
        lambda pieces, *indices: [e for one in pieces for e in one.entries()],
    )
    long = pipeline(*layout, numbered=True)

    assert said(short) == said(long)
    assert len(short.to_yaml()) < len(long.to_yaml())


class Word(EntryTemplate):
    """A template of its own name."""

    def __init__(self, word: str) -> None:
        self.word = word

    def key(self) -> str:
        return self.word

    def entries(self, numbers: Any) -> list[dict[str, object]]:
        return [{"wait": f"{self.word}@{number}"} for number in numbers]


def test_a_long_body_is_a_repeat_of_repeats() -> None:
    """Thirty steps of a, one of b, six times over: seven entries."""
    pieces = [
        TemplateInstance(Word(word), (100 * k + m,))
        for k in range(6)
        for word, m in [*(("a", m) for m in range(30)), ("b", 0)]
    ]
    (found,) = reroll_loops(pieces, "i", "j")

    assert found["repeat"] == {
        "times": 6,
        "index": "i",
        "steps": [
            {"repeat": {"times": 30, "index": "j", "steps": [{"wait": "a@(0 + 100 * i + j)"}]}},
            {"wait": "b@(0 + 100 * i)"},
        ],
    }


def test_four_times_the_micro_batches_of_an_interleaved_pipeline_add_few_entries() -> None:
    """From 32 micro-batches to 128 hardly anything is added: the steady part is one repeat."""
    sizes = [
        len(pipeline("interleaved_1f1b", 8, count, 4).to_yaml().splitlines()) for count in (32, 128)
    ]

    assert sizes[1] < 1.1 * sizes[0]


def test_a_run_is_looked_up_for_every_start() -> None:
    """abab…, from any place on: body of two, as many rounds as are left."""
    runs = _RepeatFinder([TemplateInstance(Word("ab"[k % 2]), (k // 2,)) for k in range(20)])

    assert [runs.longest(k) for k in (0, 1, 14, 17, 19)] == [
        (2, 10),
        (2, 9),
        (2, 3),
        (1, 1),
        (1, 1),
    ]
