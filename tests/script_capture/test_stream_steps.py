"""The log of a rank's streams becomes steps of a program that order the same work, and no others."""

from __future__ import annotations

from distsim.script_capture.hub.state import HubEvent
from distsim.script_capture.result.stream_steps import with_stream_steps


def compute(stream: str = "", flops: int = 1) -> HubEvent:
    facts = {"kernels": [[flops, 0, "float32", 1]]}
    return HubEvent(0, "compute", 0, stream=stream, facts=facts)


def log(*steps: tuple[str, int, str]) -> HubEvent:
    return HubEvent(0, "streams", 0, facts={"steps": [list(step) for step in steps]})


def record(event: int, stream: str = "") -> HubEvent:
    return log(("record", event, stream))


def block(event: int, stream: str = "") -> HubEvent:
    return log(("block", event, stream))


def texts(*events: HubEvent) -> list[str]:
    """The steps, each as ``kind [other stream] on stream``."""
    found = []
    for event in with_stream_steps(events):
        other = str(event.facts.get("stream", "")) if event.kind != "compute" else ""
        found.append(" ".join(filter(None, (event.kind, other, f"on {event.stream}"))))
    return found


def test_a_stream_waits_for_another_if_that_one_got_no_work_after_the_event() -> None:
    assert texts(compute("copy"), record(1, "copy"), block(1), compute()) == [
        "compute on copy",
        "wait_stream copy on ",
        "compute on ",
    ]


def test_a_helper_stream_keeps_what_the_event_covers_apart_from_later_work() -> None:
    assert texts(compute("copy"), record(1, "copy"), compute("copy"), block(1), compute()) == [
        "compute on copy",
        "wait_stream copy on copy_event",
        "compute on copy",
        "wait_stream copy_event on ",
        "compute on ",
    ]


def test_waits_that_add_nothing_are_omitted() -> None:
    """For a stream without work, for the stream itself, for a known event, for none."""
    found = texts(
        record(1, "copy"),
        block(1),
        compute(),
        record(2),
        block(2),
        block(2, "copy"),
        block(2, "copy"),
        block(99, "copy"),
        record(3),
    )

    assert found == ["compute on ", "wait_stream on copy"]


def test_a_stream_knows_what_the_stream_that_it_waited_for_had_waited_for() -> None:
    found = texts(compute("a"), record(1, "a"), block(1, "b"), record(2, "b"), block(2), block(1))

    assert found == ["compute on a", "wait_stream a on b", "wait_stream b on "]


def test_helpers_of_a_loop_repeat_and_open_events_have_different_ones() -> None:
    """Two events are open at once, three times."""
    rounds = []
    for number in range(3):
        first, second = 2 * number, 2 * number + 1
        rounds += [compute("copy"), record(first, "copy"), compute("copy"), record(second, "copy")]
        rounds += [compute("copy"), block(first), compute(), block(second), compute()]
    found = texts(*rounds)

    assert found == 3 * [
        "compute on copy",
        "wait_stream copy on copy_event",
        "compute on copy",
        "wait_stream copy on copy_event2",
        "compute on copy",
        "wait_stream copy_event on ",
        "compute on ",
        "wait_stream copy_event2 on ",
        "compute on ",
    ]


def test_the_host_waits_for_an_event_a_stream_or_the_device_once() -> None:
    found = texts(
        log(("sync device", 0, "")),
        compute("copy"),
        record(1, "copy"),
        compute(),
        log(("sync event", 1, "")),
        log(("sync stream", 0, "copy")),
        log(("sync stream", 0, "")),
        log(("sync device", 0, "")),
        compute(),
        log(("sync device", 0, "")),
    )

    assert found == [
        "compute on copy",
        "compute on ",
        "synchronize copy on ",
        "synchronize current on ",
        "compute on ",
        "synchronize on ",
    ]


def test_computes_between_which_nothing_is_left_are_one() -> None:
    (merged,) = with_stream_steps([compute(), record(1), compute(), record(2), compute(flops=5)])

    assert sorted(merged.facts["kernels"]) == [[1, 0, "float32", 2], [5, 0, "float32", 1]]
