"""Findings about timing: races, verdicts that depend on buffering or on the order of events, a
search that hit its bound.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from distsim.checker.detectors.buffer_races import DataRace
from distsim.checker.matching.call_mismatch import part_call
from distsim.checker.reading_result import Frequency, ReadingResult
from distsim.checker.replay_schedule import BufferChoice, CallId, ReplaySchedule
from distsim.checker.wording import MAX_SHOWN, aligned_columns, call_words, location_text, rank_list
from distsim.findings.finding_types import Finding
from distsim.program.model import Program


def data_race_findings(program: Program, races: Iterable[DataRace]) -> tuple[Finding, ...]:
    """DS402 and DS403, one per pair of places and buffer."""
    found = []
    for race in races:
        rank = race.ranks[0]
        use, opened = (
            part_call(program, rank, race.position, race.part),
            program.call(rank, race.opened),
        )
        places = (program.place(rank, race.opened), program.place(rank, race.position))
        does = "writes" if race.code == "DS402" else "reads"
        head = f"{use.op} of {rank_list(race.ranks)} {does} {race.label} while {opened.op} still uses it"
        head += " on another stream" if race.streams else ""
        words = "is launched" if race.streams else "opens the request", f"{does} the buffer"
        rows = [
            (f"rank {rank}", call_words(call), location_text(place), word)
            for call, place, word in zip((opened, use), places, words, strict=True)
        ]
        advice = (
            "let the one stream wait for the other first (`wait_stream`), or give each its own tensor (`copies:`)"
            if race.streams
            else "put both into buffers of their own, or make the calls one after the other"
            if race.opened == race.position
            else f"wait for the {opened.op} first, or give each its own tensor (`copies:`)"
        )
        found.append(
            Finding(
                race.code,
                "error",
                "\n".join([head, *aligned_columns(rows)]),
                tuple(sorted(race.ranks)),
                (),
                (advice,),
                tuple(dict.fromkeys(places)),
            )
        )
    return tuple(found)


def sender_reliance_findings(program: Program, ending: ReadingResult) -> tuple[Finding, ...]:
    """DS401, one per place: receives that take another sender than the code relies on."""
    found = []
    groups: dict[int, list[tuple[int, int, int]]] = {}
    for receive in ending.broken_reliances:
        groups.setdefault(program.code_call(*receive[:2]).site, []).append(receive)
    for receives in groups.values():
        rank, position, part = receives[0]
        call, place = part_call(program, rank, position, part), program.place(rank, position)
        others = sorted(ending.takers[receives[0]] - {call.assume_src})
        message = (
            f"{call.op} of rank {rank} relies on rank {call.assume_src}, but a message of {rank_list(others)} can come first\n"
            + aligned_columns([(f"rank {rank}", call_words(call), location_text(place))])[0]
        )
        ranks = tuple(sorted({r for r, _, _ in receives}))
        advice = f"name the source (`src: {call.assume_src}`), or give each sender its own tag"
        found.append(Finding("DS401", "error", message, ranks, (), (advice,), (place,)))
    return tuple(found)


def buffering_findings(
    said: Mapping[str, Frequency], ranks: tuple[int, ...], *, sends: bool = True
) -> tuple[Finding, ...]:
    """DS603: a deadlock that some way of buffering hides. ``said``: the readings of a deadlock;
    ``sends``: some rank waits to send.
    """
    if said["buffered"] != "never" or set(said.values()) == {"never"}:
        return ()
    message, advice = (
        "it gets through where sends are buffered: small messages on mpi, and on nccl once ranks are connected",
        ("do not rely on it: a larger tensor, another back end, and it hangs"),
    )
    if not sends:
        message = "it gets through where a rank leaves a collective that has a root as soon as its own data have moved"
        advice = "do not rely on it: who may leave early differs by back end and size"
    if said["rendezvous"] == said["early"] == "never":
        message = (
            "it gets through where all sends are buffered and where none is, but not where only some are: with an eager limit"
            " between the sizes of its messages"
        )
        advice = "name the sources of the receives, so that no message can take another's place"
    return (Finding("DS603", "warning", message, ranks, (), (advice,)),)


def event_order_findings(
    program: Program, schedule: ReplaySchedule | None, kind: str
) -> tuple[Finding, ...]:
    """DS609: the order of events decides; one that goes wrong, choice by choice."""
    if schedule is None:
        return ()
    rows = []
    for choice in schedule.choices[:MAX_SHOWN]:
        call = choice.call if isinstance(choice, BufferChoice) else choice.receive
        does = (
            "is buffered and goes on"
            if isinstance(choice, BufferChoice)
            else f"takes the message of {_call_location(program, choice.send)}"
        )
        words = call_words(part_call(program, *call))
        rows.append(
            (
                f"rank {call.rank}",
                words,
                location_text(program.place(call.rank, call.position)),
                does,
            )
        )
    more = len(schedule.choices) - len(rows)
    lines = [
        f"the {kind} depends on the order of events; this one leads to it",
        *aligned_columns(rows),
    ]
    lines += [f"  … and {more} more"] if more > 0 else []
    places = tuple(
        dict.fromkeys(
            program.place(c.call.rank, c.call.position)
            if isinstance(c, BufferChoice)
            else program.place(c.receive.rank, c.receive.position)
            for c in schedule.choices[:MAX_SHOWN]
        )
    )
    ranks = tuple(
        sorted(
            {(c.call if isinstance(c, BufferChoice) else c.receive).rank for c in schedule.choices}
        )
    )
    advice = "name the source of the receive, or give messages of different meaning different tags"
    return (Finding("DS609", "warning", "\n".join(lines), ranks, (), (advice,), places),)


def _call_location(program: Program, call: CallId) -> str:
    place = location_text(program.place(call.rank, call.position))
    return f"rank {call.rank}" + (f", {place}" if place else "")


def search_bound_finding(stored: int, bound: int) -> Finding:
    """DS902: the search stopped at its bound."""
    message = f"not every order of events was looked at: the bound of {bound} states was reached ({stored} stored); others may do worse"
    return Finding(
        "DS902",
        "warning",
        message,
        (),
        (),
        ("raise the bound (--max-states), or name the sources where you can",),
    )
