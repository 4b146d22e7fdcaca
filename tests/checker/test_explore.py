"""Orders of events with open receives: what they end in, how few states that takes, and the
schedule that leads there.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from distsim.checker.explore.schedule_paths import follow_schedule
from distsim.checker.explore.search import StateSearch
from distsim.checker.matching.channel_layout import build_channel_layout
from distsim.checker.replay_schedule import (
    BufferChoice,
    CallId,
    ReplaySchedule,
    TakeChoice,
    schedule_from_json,
    schedule_to_json,
)
from distsim.checker.verdict import Verdict, verdict_of
from distsim.common.errors import UsageError
from distsim.program.from_calls import build_program
from distsim.program.model import Program
from tests.support.brute_force import BruteForce
from tests.support.small_programs import small_program

Calls = list[dict[str, Any]]
BARRIER = {"op": "barrier", "group": "world"}


def send(peer: int, **more: Any) -> dict[str, Any]:
    return {"op": "send", "peer": peer, "tag": 0, "numel": 4, "dtype": "float32", **more}


def recv(peer: int | None = None, **more: Any) -> dict[str, Any]:
    return {"op": "recv", "peer": peer, "tag": 0, "numel": 4, "dtype": "float32", **more}


def program(*ranks: Calls, **more: Any) -> Program:
    return build_program(len(ranks), dict(enumerate(ranks)), **more)


def judge(*ranks: Calls, **more: Any) -> Verdict:
    return verdict_of(program(*ranks), **more)


#: Rank 0's open receive may take the message that its named receive counts on.
STARVED = [[recv(), recv(1)], [send(0)], [send(0)]]
#: Sound with all sends buffered and with none; stuck where only rank 1's first is.
MIXED = [
    [recv(3)],
    [send(3), send(2)],
    [recv(), send(3), recv()],
    [send(0), send(2), recv(2), recv()],
]


def stored(found: Program, reading: str = "rendezvous", most: int = 10**6) -> int:
    """States that one reading needs."""
    search = StateSearch(build_channel_layout(found), reading)
    search.run(most)
    assert search.finished
    return search.stored


# --- what orders end in ---
def test_a_wildcard_receive_that_starves_a_named_one_is_a_schedule_dependent_deadlock() -> None:
    found = judge(*STARVED)

    assert (found.verdict, found.depends_on, found.complete) == ("deadlock", "schedule", True)
    assert found.stuck_sets == ((0, 2),)
    assert found.core == (0,)
    assert found.nondeterministic == (0,)
    assert {"DS609", "DS605"} <= {f.code for f in found.findings}


def test_a_harmless_choice_is_a_note() -> None:
    found = judge([recv(), recv()], [send(0)], [send(0)])

    assert (found.verdict, found.complete, found.nondeterministic) == ("ok", True, (0,))
    assert {f.code: f.severity for f in found.findings} == {"DS605": "note"}


def test_a_deadlock_that_needs_one_buffered_and_one_unbuffered_send_is_found() -> None:
    found = judge(*MIXED)

    assert (found.verdict, found.depends_on, found.ranks) == ("deadlock", "buffering", (2, 3))
    assert found.readings == {
        "rendezvous": "never",
        "early": "never",
        "buffered": "never",
        "mixed": "sometimes",
    }
    assert found.schedule is not None
    assert any(isinstance(choice, BufferChoice) for choice in found.schedule.choices)
    assert "small messages are buffered and large ones are not" in next(
        f.message for f in found.findings if f.code == "DS603"
    )


def test_messages_separated_by_a_barrier_leave_no_choice() -> None:
    """Rank 2 speaks behind the barrier that rank 0 enters after its first message."""
    found = judge([recv(), BARRIER, recv()], [send(0), BARRIER], [BARRIER, send(0)])

    assert (found.verdict, found.nondeterministic) == ("ok", ())


def test_an_earlier_named_receive_keeps_its_message() -> None:
    found = judge([recv(1), recv()], [send(0)], [send(0)])

    assert (found.verdict, found.nondeterministic) == ("ok", ())


def test_a_wildcard_receive_considers_a_late_sender() -> None:
    """Rank 3's message needs rank 2's open receive first; only then may it come before rank 1's."""
    late = [
        [recv(assume_from=1), recv()],
        [send(0)],
        [recv(), send(3, tag=1)],
        [send(2), recv(2, tag=1), send(0)],
    ]
    found = judge(*late)

    assert (found.verdict, found.ranks, found.depends_on) == ("race", (0,), "schedule")
    assert [f.code for f in found.findings if f.severity == "error"] == ["DS401"]


def test_a_wildcard_receive_that_always_gets_its_sender_is_no_race() -> None:
    assert judge([recv(assume_from=1), BARRIER], [send(0), BARRIER], [BARRIER]).verdict == "ok"


def test_a_mismatch_in_only_one_order_depends_on_the_schedule() -> None:
    sizes = [[recv(numel=4), recv(numel=8)], [send(0, numel=4)], [send(0, numel=8)]]
    found = judge(*sizes)

    assert (found.verdict, found.depends_on, found.readings["rendezvous"]) == (
        "mismatch",
        "schedule",
        "sometimes",
    )
    assert found.ranks == (0, 2)


def test_calls_after_a_mismatch_are_not_counted() -> None:
    """An execution is over for those whose calls don't fit: rank 1's message would meet the wrong
    receive only afterwards.
    """
    types = [[recv(dtype="int64"), recv()], [send(0, dtype="int64")], [send(0)]]
    groups = [[BARRIER, send(1, numel=8)], [{**BARRIER, "op": "all_reduce", "numel": 4}, recv(0)]]

    assert judge(*types).ranks == (0, 2)
    assert {f.code[:4] for f in judge(*groups).findings} == {"DS20"}


# --- how few states ---
def test_equal_receives_are_counted_not_distinguished() -> None:
    """Twelve receives of one rank, four senders that are alike: sorted counts of messages taken,
    C(3+4, 4) of them.
    """
    alike = program([recv()] * 12, *([[send(0)] * 3] * 4))

    assert stored(alike) == 35


def test_independent_wildcard_receives_are_explored_one_after_the_other() -> None:
    """Twelve receivers with four messages each: their choices add up and don't multiply."""
    apart = program(*([[send(to) for to in range(4, 16)]] * 4), *([[recv()] * 4] * 12))

    assert stored(apart) <= 12 * 16


def test_a_chosen_sender_is_forgotten_once_it_no_longer_matters() -> None:
    """Twelve tags, each with one receive and four messages that nobody waits for."""
    sends = [send(0, op="isend", tag=tag) for tag in range(12)]
    forgotten = program(
        [recv(tag=tag) for tag in range(12)], sends, [*sends, BARRIER][:-1], sends, sends
    )

    assert stored(forgotten) <= 13


def test_equal_senders_are_explored_once_and_all_reported() -> None:
    """One of three alike senders is left over: one state shows it, all three sets of stuck ranks
    are listed.
    """
    found = judge([recv(), recv()], [send(0)], [send(0)], [send(0)])

    assert found.stuck_sets == ((1,), (2,), (3,))
    assert found.ranks == found.core == (1, 2, 3)


@pytest.mark.parametrize("reading", ["rendezvous", "early", "buffered", "mixed"])
def test_the_search_visits_far_fewer_states_than_all_interleavings(reading: str) -> None:
    ours = theirs = 0
    for seed in range(40):
        small = small_program(seed)
        if small.world == 3:
            found = build_program(small.world, small.programs, groups=small.groups)
            if build_channel_layout(found).any_source:
                ours += stored(found, reading)
                theirs += BruteForce(small.programs, small.groups, reading, 10**6).explore().states

    assert theirs > 20 * ours > 0


# --- the bound ---
def many_orders() -> Program:
    """Twelve tags, four senders that wait at their end: all ways to deal the messages out
    matter.
    """
    tags = range(6)
    ranks = [
        [
            *(send(0, op="isend", tag=t, handle=f"h{t}") for t in tags),
            {"op": "wait", "handles": "all"},
            send(0, tag=50 + r),
        ]
        for r in range(1, 5)
    ]
    receives = (
        [recv(tag=t) for t in tags]
        + [recv(tag=t) for t in tags for _ in range(3)]
        + [recv(r, tag=50 + r) for r in range(1, 5)]
    )
    return program(receives, *ranks)


def test_a_search_that_hits_its_bound_reports_it() -> None:
    found = verdict_of(many_orders(), max_states=50)

    assert (found.verdict, found.complete, found.explored) == ("ok", False, 50)
    assert [f.severity for f in found.findings if f.code == "DS902"] == ["warning"]
    assert "50 states" in next(f.message for f in found.findings if f.code == "DS902")


def test_the_worst_outcome_before_the_bound_is_reported() -> None:
    found = judge(*MIXED, max_states=13)

    assert not found.complete
    assert judge(*STARVED, max_states=3).verdict == "deadlock"


def test_the_same_search_with_a_larger_bound_is_complete() -> None:
    found = verdict_of(many_orders())

    assert (found.verdict, found.complete) == ("ok", True)


# --- schedules ---
@pytest.mark.parametrize("ranks", [STARVED, MIXED])
def test_the_schedule_reproduces_the_hang_of_the_verdict(ranks: list[Calls]) -> None:
    found = judge(*ranks)
    assert found.schedule is not None
    written = json.loads(json.dumps(schedule_to_json(found.schedule, program(*ranks))))
    again = schedule_from_json(written)

    assert again == found.schedule
    assert follow_schedule(program(*ranks), again) == found.final_state
    assert follow_schedule(program(*ranks), again).stuck in found.stuck_sets


def test_an_empty_schedule_continues_with_the_lowest_sender() -> None:
    assert follow_schedule(program(*STARVED), ReplaySchedule("rendezvous", ())).stuck == (0, 2)


def test_the_choices_of_a_schedule_name_calls_and_their_lines() -> None:
    found = judge(*STARVED)
    assert found.schedule is not None

    assert found.schedule.choices == (TakeChoice((0, 0, -1), (1, 0, -1)),)
    assert schedule_to_json(found.schedule, program(*STARVED))["choices"] == [
        {
            "receive": {"rank": 0, "position": 0, "part": -1, "at": "rank 0:1"},
            "takes": {"rank": 1, "position": 0, "part": -1, "at": "rank 1:1"},
        },
    ]


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ([], "no schedule"),
        ({"schema_version": 2, "reading": "mixed"}, "no schedule"),
        ({"schema_version": 1, "reading": "mixed"}, "choices"),
        ({"schema_version": 1, "reading": "mixed", "choices": [{"takes": {}}]}, "choice 0"),
        (
            {"schema_version": 1, "reading": "mixed", "choices": [{"buffered": {"rank": "0"}}]},
            "without rank",
        ),
    ],
)
def test_an_invalid_schedule_is_refused_with_a_reason(data: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        schedule_from_json(data)


def test_a_schedule_of_another_program_is_refused() -> None:
    found = judge(*STARVED)
    assert found.schedule is not None

    with pytest.raises(UsageError, match="does not fit"):
        follow_schedule(program([recv(1)], [send(0)]), found.schedule)
    with pytest.raises(UsageError, match="waits for nothing"):
        follow_schedule(
            program(*STARVED), ReplaySchedule("rendezvous", (BufferChoice(CallId(1, 0)),))
        )
