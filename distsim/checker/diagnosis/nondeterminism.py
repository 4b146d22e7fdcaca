"""Findings about results that depend on timing.

Reliance on a sender (DS401), deadlocks that buffering hides (DS603), verdicts that depend on the
order of events (DS609), and a search that hit its bound (DS902).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from distsim.backends import BACKEND_PROFILES
from distsim.checker.matching.call_index import part_call
from distsim.checker.reading_result import Frequency, ReadingResult
from distsim.checker.replay_schedule import BufferChoice, CallId, ReplaySchedule, TakeChoice
from distsim.checker.wording import (
    MAX_SHOWN,
    aligned_columns,
    call_words,
    location_text,
    parenthesised,
    rank_list,
)
from distsim.common.units import show_bytes
from distsim.findings.finding_types import Finding
from distsim.program.model import Program

#: The message of DS603 if no send decides.
EARLY_RETURN = (
    "the program completes only if a rank may return from a collective with a root "
    "(broadcast, gather, …) before the other ranks have arrived"
)


def sender_reliance_findings(program: Program, result: ReadingResult) -> tuple[Finding, ...]:
    """DS401, one per place: receives that take another sender than the code relies on."""
    by_site: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, position, part in result.broken_reliances:
        by_site[program.code_call(rank, position).site].append((rank, position, part))
    return tuple(
        _sender_reliance_finding(program, result, receives) for receives in by_site.values()
    )


def _sender_reliance_finding(
    program: Program, result: ReadingResult, receives: list[tuple[int, int, int]]
) -> Finding:
    """The finding on receives, each (rank, position, part), of one place."""
    rank, position, part = receives[0]
    call, place = part_call(program, rank, position, part), program.place(rank, position)
    others = sorted(result.takers[receives[0]] - {call.assume_src})
    head = (
        f"{call.op} on rank {rank}{parenthesised(location_text(place))} relies on a message from "
        f"rank {call.assume_src}, but a message from {rank_list(others)} can arrive first"
    )
    rows = aligned_columns([(f"rank {rank}", call_words(call), location_text(place))])
    ranks = tuple(sorted({receiver for receiver, _, _ in receives}))
    receive = f"receive{parenthesised(location_text(place))}"
    advice = (
        f"set `src: {call.assume_src}` in the {receive}, or use a different tag for each sender"
    )
    return Finding("DS401", "error", "\n".join([head, *rows]), ranks, (), (advice,), (place,))


def buffering_findings(
    frequencies: Mapping[str, Frequency], ranks: tuple[int, ...], *, sends: bool = True
) -> tuple[Finding, ...]:
    """DS603: a deadlock that some way of buffering hides.

    ``frequencies``: how often each reading deadlocks. ``sends``: whether some rank waits to send.
    """
    if frequencies["buffered"] != "never" or set(frequencies.values()) == {"never"}:
        return ()
    if frequencies["rendezvous"] == frequencies["early"] == "never":
        message = (
            "the program completes if all sends are buffered or none is; it may hang if small "
            "messages are buffered and large ones are not"
        )
        advice = "set `src` in the receives, so that each one takes the intended message"
    elif sends:
        message = "\n".join(
            ["the program completes only if sends are buffered", *_buffering_backends()]
        )
        advice = (
            "fix the deadlock, and do not rely on buffering: the program hangs if a tensor is "
            "larger or the backend buffers less"
        )
    else:
        message = EARLY_RETURN
        advice = (
            "fix the deadlock: which ranks may return early depends on the backend and the size"
        )
    return (Finding("DS603", "warning", message, ranks, (), (advice,)),)


def _buffering_backends() -> Iterator[str]:
    """One line for each backend that buffers sends."""
    for name, profile in BACKEND_PROFILES.items():
        if profile.buffer_option is None:
            continue
        line = f"  {name} buffers messages up to {show_bytes(profile.buffer_option.default)}"
        if profile.publishes_communicator_id:
            line += ". But the first send between two ranks blocks until both have connected"
        yield line


def event_order_findings(
    program: Program, schedule: ReplaySchedule | None, kind: str
) -> tuple[Finding, ...]:
    """DS609: the order of events decides; the finding lists one order that fails."""
    if schedule is None:
        return ()
    shown = schedule.choices[:MAX_SHOWN]
    rows, places = [], []
    for choice in shown:
        call = _choosing_call(choice)
        place = program.place(call.rank, call.position)
        words = call_words(part_call(program, *call))
        effect = _effect_words(program, choice)
        rows.append((f"rank {call.rank}", words, location_text(place), effect))
        places.append(place)
    lines = [
        f"the {kind} occurs only in some orders of events, for example in this order",
        *aligned_columns(rows),
    ]
    if len(schedule.choices) > len(shown):
        lines.append(f"  … and {len(schedule.choices) - len(shown)} more")
    ranks = tuple(sorted({_choosing_call(choice).rank for choice in schedule.choices}))
    advice = (
        f"{_source_advice(program, schedule)}, or use different tags for different kinds of "
        "messages"
    )
    unique_places = tuple(dict.fromkeys(places))
    return (Finding("DS609", "warning", "\n".join(lines), ranks, (), (advice,), unique_places),)


def _source_advice(program: Program, schedule: ReplaySchedule) -> str:
    """Names the first receive that takes a message of one of several senders."""
    receives = [choice.receive for choice in schedule.choices if isinstance(choice, TakeChoice)]
    if not receives:
        return "set `src` in the receive"
    place = location_text(program.place(receives[0].rank, receives[0].position))
    return f"set `src` in the receive{parenthesised(place)}"


def _choosing_call(choice: TakeChoice | BufferChoice) -> CallId:
    return choice.call if isinstance(choice, BufferChoice) else choice.receive


def _effect_words(program: Program, choice: TakeChoice | BufferChoice) -> str:
    if isinstance(choice, BufferChoice):
        return "is buffered and returns"
    return f"takes the message of {_call_location(program, choice.send)}"


def _call_location(program: Program, call: CallId) -> str:
    place = location_text(program.place(call.rank, call.position))
    return f"rank {call.rank}{parenthesised(place)}"


def search_bound_finding(stored: int, bound: int) -> Finding:
    """DS902: the search stopped at its bound."""
    message = (
        f"the search reached its limit of {bound} states ({stored} stored), so it did not check "
        "every order of events; unchecked orders may fail"
    )
    advice = "raise the bound (--max-states), or name the sources of the receives"
    return Finding("DS902", "warning", message, (), (), (advice,))
