"""Findings about results that depend on timing.

Reliance on a sender (DS401), deadlocks that buffering hides (DS603), verdicts that depend on the
order of events (DS609), and a search that hit its bound (DS902).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from distsim.checker.matching.call_index import part_call
from distsim.checker.reading_result import Frequency, ReadingResult
from distsim.checker.replay_schedule import BufferChoice, CallId, ReplaySchedule, TakeChoice
from distsim.checker.wording import MAX_SHOWN, aligned_columns, call_words, location_text, rank_list
from distsim.findings.finding_types import Finding
from distsim.program.model import Program


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
        f"{call.op} of rank {rank} relies on rank {call.assume_src}, "
        f"but a message of {rank_list(others)} can come first"
    )
    rows = aligned_columns([(f"rank {rank}", call_words(call), location_text(place))])
    ranks = tuple(sorted({receiver for receiver, _, _ in receives}))
    advice = f"name the source (`src: {call.assume_src}`), or give each sender its own tag"
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
            "it gets through where all sends are buffered and where none is, but not where only "
            "some are: with an eager limit between the sizes of its messages"
        )
        advice = "name the sources of the receives, so that no message can take another's place"
    elif sends:
        message = (
            "it gets through where sends are buffered: small messages on mpi, and on nccl once "
            "ranks are connected"
        )
        advice = "do not rely on it: a larger tensor, another back end, and it hangs"
    else:
        message = (
            "it gets through where a rank leaves a collective that has a root as soon as its own "
            "data have moved"
        )
        advice = "do not rely on it: who may leave early differs by back end and size"
    return (Finding("DS603", "warning", message, ranks, (), (advice,)),)


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
        f"the {kind} depends on the order of events; this one leads to it",
        *aligned_columns(rows),
    ]
    if len(schedule.choices) > len(shown):
        lines.append(f"  … and {len(schedule.choices) - len(shown)} more")
    ranks = tuple(sorted({_choosing_call(choice).rank for choice in schedule.choices}))
    advice = "name the source of the receive, or give messages of different meaning different tags"
    unique_places = tuple(dict.fromkeys(places))
    return (Finding("DS609", "warning", "\n".join(lines), ranks, (), (advice,), unique_places),)


def _choosing_call(choice: TakeChoice | BufferChoice) -> CallId:
    return choice.call if isinstance(choice, BufferChoice) else choice.receive


def _effect_words(program: Program, choice: TakeChoice | BufferChoice) -> str:
    if isinstance(choice, BufferChoice):
        return "is buffered and goes on"
    return f"takes the message of {_call_location(program, choice.send)}"


def _call_location(program: Program, call: CallId) -> str:
    place = location_text(program.place(call.rank, call.position))
    return f"rank {call.rank}" + (f", {place}" if place else "")


def search_bound_finding(stored: int, bound: int) -> Finding:
    """DS902: the search stopped at its bound."""
    message = (
        f"not every order of events was looked at: the bound of {bound} states was reached "
        f"({stored} stored); others may do worse"
    )
    advice = "raise the bound (--max-states), or name the sources where you can"
    return Finding("DS902", "warning", message, (), (), (advice,))
