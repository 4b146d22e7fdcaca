"""Blocked ranks are assumed to make the calls that other ranks wait for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from distsim.script_capture.hub.collective_results import CallContribution
from distsim.script_capture.hub.matching import RankCall
from distsim.script_capture.result.future_calls import assumed_future_calls, incomplete_calls

WORLD: Any = SimpleNamespace(ranks=(0, 1, 2), name="0")
X, TWO = [[4]], [[4], [4]]


def call(rank: int, number: int, op: str, peer: int = -1, tag: int = 0, **more: Any) -> RankCall:
    shapes = more.pop("shapes", (X, X))
    extra = more.pop("extra", {})
    contribution = CallContribution((), [*shapes, "float32", extra])
    return RankCall(rank, number, op, WORLD, peer, tag, contribution, **more)


def process(calls: list[RankCall], waits: list[int], futures: tuple[int, ...] = ()) -> Any:
    """A rank that has made these calls and waits for those with these numbers."""
    by_number = {one.number: one for one in calls}
    waiting = {
        k: SimpleNamespace(call=by_number[number], polled_call=None, startup_op=None)
        for k, number in enumerate(waits)
    }
    return SimpleNamespace(
        calls=by_number, waiting=waiting, futures=set(futures), ended=None, events=[]
    )


def essence(found: dict[int, list[Any]]) -> dict[int, list[tuple[object, ...]]]:
    """Operation, kind of call, peer, tag, and shapes of what each rank is assumed to call."""
    return {
        rank: [
            (one.op, made.op, made.rank, made.peer, made.tag, shapes(made))
            for one in calls
            for made in one.calls
        ]
        for rank, calls in found.items()
    }


def shapes(made: RankCall) -> tuple[object, object]:
    return made.contribution.input_shapes, made.contribution.output_shapes


def test_a_rank_waits_for_its_incomplete_calls_in_their_order() -> None:
    calls = [call(0, number, "all_reduce") for number in (1, 2, 3, 4)]
    calls[1].results = []
    waits = process(calls, [4, 2, 3], futures=(1, 3))

    assert [one.number for one in incomplete_calls(waits)] == [1, 3, 4]


def test_a_blocked_peer_is_assumed_to_send_what_a_receive_waits_for() -> None:
    receive = call(0, 5, "recv", peer=1, tag=7, shapes=([], X))
    other = call(1, 1, "recv", peer=2, shapes=([], X))
    found = assumed_future_calls([process([receive], [5]), process([other], [1]), process([], [])])

    assert essence(found) == {0: [], 1: [("send", "isend", 1, 0, 7, (X, []))]}


def test_a_message_with_another_tag_is_the_wrong_one_and_no_further_send_is_assumed() -> None:
    wrong = call(1, 1, "isend", peer=0, tag=3)
    blocked = call(1, 2, "recv", peer=2, shapes=([], X))
    receive = call(0, 5, "recv", peer=1, tag=7, shapes=([], X))
    found = assumed_future_calls(
        [process([receive], [5]), process([wrong, blocked], [2]), process([], [])]
    )

    assert essence(found) == {0: [], 1: []}


@pytest.mark.parametrize(
    ("op", "peer", "given", "extra", "of_peer"),
    [
        ("all_reduce", -1, (X, X), {}, (X, X)),
        ("scatter", 0, (TWO, X), {}, ([], X)),
        ("scatter", 1, ([], X), {}, (X * 3, X)),
        ("gather", 0, (X, TWO), {}, (X, [])),
        ("gather", 1, (X, []), {}, (X, X * 3)),
        ("all_to_all_single", -1, ([[2, 4]], X), {"input_splits": [1, 1]}, ([[8]], [[8]])),
        ("all_to_all_single", -1, ([[2, 4]], X), {}, ([[2, 4]], X)),
    ],
)
def test_the_blocked_members_that_are_missing_are_assumed_to_join_a_collective(
    op: str, peer: int, given: Any, extra: dict[str, Any], of_peer: object
) -> None:
    """Its root has a list where others have none; rank 2 has ended its calls without a wait."""
    arrived = SimpleNamespace(arrived={0: None})
    waits = call(0, 5, op, peer, shapes=given, extra=extra, collective=arrived)
    receive = call(1, 1, "recv", peer=2, shapes=([], X))
    found = assumed_future_calls([process([waits], [5]), process([receive], [1]), process([], [])])

    assert essence(found) == {0: [], 1: [(op, op, 1, peer, 0, of_peer)]}


@pytest.mark.parametrize(("match_number", "is_assumed"), [(0, True), (1, False)])
def test_a_rank_in_a_collective_is_assumed_to_receive_what_blocked_ranks_have_sent(
    match_number: int, is_assumed: bool
) -> None:
    collective = call(0, 5, "barrier", collective=SimpleNamespace(arrived={0: None, 1: None}))
    send = call(1, 1, "send", peer=0, tag=7, shapes=(X, []), match_number=match_number)
    blocked = call(1, 2, "recv", peer=2, shapes=([], X))
    found = assumed_future_calls(
        [process([collective], [5]), process([send, blocked], [2]), process([], [])]
    )

    received = [("recv", "irecv", 0, 1, 7, ([], X))]
    assert essence(found) == {0: received if is_assumed else [], 1: []}


def test_assumed_calls_have_numbers_that_no_real_call_has() -> None:
    """The numbers of real calls count from 1 on each rank."""
    arrived = SimpleNamespace(arrived={1: None})
    processes = [
        process([call(0, 1, "recv", peer=1, shapes=([], X))], [1]),
        process([call(1, 1, "all_reduce", collective=arrived)], [1]),
        process([], []),
    ]
    made = [
        one
        for calls in assumed_future_calls(processes).values()
        for captured in calls
        for one in captured.calls
    ]

    assert sorted(one.op for one in made) == ["all_reduce", "isend"]
    assert all(one.number < 0 for one in made)
    assert all(one.results is None for one in made)
