"""Several launchers agree through a store; here they are threads of one process."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import pytest

from distsim.common.errors import EnvironmentFault
from distsim.real.launch.coordinator import LaunchCoordinator, StoreCoordinator

dist = pytest.importorskip("torch.distributed")

Answer = TypeVar("Answer")


def coordinators(count: int = 2, wait_s: float = 20.0) -> list[StoreCoordinator]:
    store = dist.HashStore()
    return [StoreCoordinator(store, number, count, wait_s) for number in range(count)]


def together(launchers: list[StoreCoordinator], act: Callable[[StoreCoordinator], Answer]) -> list:
    with ThreadPoolExecutor(len(launchers)) as pool:
        return list(pool.map(act, launchers))


def goes_on() -> str:
    return ""


def test_a_single_launcher_agrees_with_itself() -> None:
    alone = LaunchCoordinator()
    progress = {0: (b"a", None)}

    assert (alone.ready(0, True), alone.ready(0, False)) == (True, False)
    assert alone.share(progress) == progress
    assert (alone.decide("done"), alone.offset("start"), alone.agree_on(3)) == ("done", (0, 0), 3)
    assert alone.gather({"x": b"1"}) == [{"x": b"1"}]


def test_a_repetition_starts_once_the_ranks_of_all_launchers_are_ready() -> None:
    first, second = coordinators()

    assert [first.ready(0, False), first.ready(0, True), first.ready(0, True)] == [False] * 3
    assert second.ready(0, True)
    assert first.ready(0, True)
    assert not first.ready(1, True), "the next repetition is announced anew"
    assert second.ready(1, True)


def test_launchers_that_do_not_arrive_are_named() -> None:
    first, _, third = coordinators(3, wait_s=0.05)
    third.store.set("here/2", b"1")

    with pytest.raises(EnvironmentFault, match=r"2 of 3 launchers arrived within 0 s; missing: 1"):
        first.meet(goes_on)


def test_a_signal_ends_the_wait_for_other_launchers() -> None:
    first, _ = coordinators(wait_s=20)

    with pytest.raises(EnvironmentFault, match="ended by SIGINT; not all launchers had arrived"):
        first.meet(lambda: "SIGINT")


def test_all_launchers_meet_and_end_with_the_status_of_the_first() -> None:
    launchers = coordinators(3)

    assert together(launchers, lambda one: one.meet(goes_on)) == [None] * 3
    assert together(launchers, lambda one: one.agree_on(5 + one.number)) == [5, 5, 5]


def test_a_launcher_that_hears_no_status_reports_an_environment_fault() -> None:
    _, second = coordinators(wait_s=-30)

    assert second.agree_on(0) == 4


def test_the_first_launcher_knows_the_progress_of_all_ranks_and_gathers_their_records() -> None:
    first, second = coordinators()
    own, other = {0: (b"zero", None)}, {1: (b"one\x00", -9), 2: (b"", 0)}

    assert second.share(other) == other
    assert first.share(own) == {**own, **other}
    assert first.share({0: (b"later", 1)})[0] == (b"later", 1), "its own ranks are always new"
    records = {"small": b"x", "large": bytes(range(256)) * 5000}
    assert second.gather(records) == [records]
    assert first.gather({"mine": b"y"}) == [{"mine": b"y"}, records]


def test_a_record_that_does_not_arrive_is_omitted() -> None:
    first, _ = coordinators(wait_s=0.05)

    assert first.gather({"mine": b"y"}) == [{"mine": b"y"}]


def test_the_offset_of_a_clock_is_within_the_stated_error() -> None:
    """Both launchers read the same clock, so the true offset is zero."""
    (nothing, measured) = together(coordinators(), lambda one: one.offset("start"))

    assert nothing == (0, 0)
    offset_ns, error_ns = measured
    assert abs(offset_ns) <= error_ns


def test_the_offset_is_unknown_if_the_first_launcher_does_not_answer() -> None:
    _, second = coordinators(wait_s=0.05)

    assert second.offset("end") == (0, 2**62)
