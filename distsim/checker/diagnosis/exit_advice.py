"""Ranks that wait for one who is no longer there: how it went, which call it does not make, and
what a plain script would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.backends import BACKEND_PROFILES
from distsim.checker.diagnosis.awaited_call import AwaitedCall
from distsim.checker.diagnosis.hang_advice import BlockedWait, advise_missing_ranks
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.wording import call_words, location_text, place_of_call, rank_list
from distsim.findings.final_state import RankEnd
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.program.model import Program

_EXIT_WORDS = {
    "ended": "has already ended",
    "raised": "has raised an error",
    "crashed": "has crashed",
    "killed": "was killed",
    "absent": "never started",
    "silent": "does not move",
}
_EXIT_WORDS_PLURAL = {
    "ended": "have already ended",
    "raised": "have raised an error",
    "crashed": "have crashed",
    "killed": "were killed",
    "absent": "never started",
    "silent": "do not move",
}
#: Calls of the whole world, which have a rule of their own.
_WORLD_CALLS = ("new_group", "init_process_group")


def ended_by_exit_call(program: Program, end: RankEnd) -> bool:
    """The rank has left by `exit`, not by coming to its last line."""
    calls = program.code(end.rank).calls
    return (
        end.status in ("ended", "raised")
        and end.position < len(calls)
        and calls[end.position].op == "exit"
    )


def exit_words(program: Program, ends: Sequence[RankEnd]) -> str:
    """`has already ended`, `have left by exit with code 1`; `are gone` where not all went in one
    way.
    """
    lone = len(ends) == 1
    if all(ended_by_exit_call(program, end) for end in ends):
        codes = {program.call(end.rank, end.position).code for end in ends}
        code = f" with code {next(iter(codes))}" if len(codes) == 1 and codes != {0} else ""
        return f"{'has' if lone else 'have'} left by exit{code}"
    if len({end.status for end in ends}) > 1:
        return "are gone"
    return (_EXIT_WORDS if lone else _EXIT_WORDS_PLURAL)[ends[0].status]


def advise_exit_calls(program: Program, ends: Sequence[RankEnd]) -> tuple[str, ...]:
    """What to do about ranks that all have left by `exit`; nothing where they have not."""
    if not all(ended_by_exit_call(program, end) for end in ends):
        return ()
    who, spot = (
        rank_list([end.rank for end in ends], 4),
        location_text(place_of_call(program, ends[0].rank, ends[0].position)),
    )
    if any(program.call(end.rank, end.position).code for end in ends):
        why = (
            f"why the exit with an error code, {spot}?"
            if spot
            else "why the exit with an error code?"
        )
        return (f"look at the log of {who} first: {why} The others only follow",)
    at_place = f", {spot}," if spot else ""
    return (
        f"{who} exit{'s' if len(ends) == 1 else ''}{at_place} before the call that the others make: leave together, or after it",
    )


def open_connection_note(program: Program, ends: Sequence[RankEnd]) -> list[str]:
    """Where a back end tells its peers of a process that ends: which of the two is meant. Programs
    that come to their end keep their process (semantics G13 speaks of one that is gone)."""
    last = all(
        end.status == "ended" and end.position >= len(program.code(end.rank).calls) for end in ends
    )
    if not last or BACKEND_PROFILES[program.backend].peer_death != "raises":
        return []
    they, whose = ("it stays", "its") if len(ends) == 1 else ("they stay", "their")
    return [
        f"  {they} connected here, as under `run --real`; where a plain script's process ends, {whose} peers raise"
        ' "Connection closed by peer" at once'
    ]


class ExitAdvice(NamedTuple):
    """What to do, and the places of the calls that are themselves the mistake."""

    lines: tuple[str, ...]
    slips: tuple[SourceLocation, ...] = ()


def advise_divergent_branch(
    where: CallIndex, ranks: Sequence[int], position: int, sequence: int, gone: Sequence[int]
) -> ExitAdvice | None:
    """Calls in a branch that the others do not take: where these, and these alone, are why one rank
    waits on a sequence for others.
    """
    program, rank = where.layout.program, ranks[0]
    if (
        len({site.file for site in program.sites}) > 1
    ):  # built or recorded: lines of two ranks have nothing in common
        return None
    mine = [
        (program.code_call(rank, p).site, p) for p in where.joins(rank, sequence) if p <= position
    ]
    extra: list[int] = []
    for other in gone:
        theirs = [program.code_call(other, p).site for p in where.joins(other, sequence)]
        known = set(theirs)
        more = [p for site, p in mine if site not in known]
        if (
            not more
            or [site for site, _ in mine if site in known] != theirs
            or (extra and more != extra)
        ):
            return None
        extra = more
    others, make = rank_list(gone, 4), "makes" if len(ranks) == 1 else "make"
    words, place = call_words(program.call(rank, extra[0])), program.place(rank, extra[0])
    many = "" if len(extra) == 1 else f"{len(extra)} calls, the first "
    does = "does" if len(gone) == 1 else "do"
    return ExitAdvice(
        (
            f"{rank_list(ranks, 4)} {make} {many}{words}, {location_text(place)}, in a branch that {others} {does} not take:",
            f"let {others} make it too, or take it out of the branch",
        ),
        (place,),
    )


def incomplete_new_group(
    where: CallIndex, turns: Sequence[BlockedWait], parts: Sequence[AwaitedCall | None]
) -> tuple[ResolvedCall, tuple[int, ...]] | None:
    """A new_group that waits for ranks which never make it, and these."""
    program = where.layout.program
    for (_, need, _), part in zip(turns, parts, strict=False):
        if part is not None and part.call.op == "new_group" and part.position is None:
            made = (
                program.call(need.ranks[0], p) for p in where.joins(need.ranks[0], part.sequence)
            )
            return (
                None
                if any(call.name == part.call.name for call in made)
                else (part.call, need.ranks)
            )
    return None


def advise_exited_ranks(
    where: CallIndex,
    ranks: Sequence[int],
    position: int,
    part: AwaitedCall | None,
    ends: Sequence[RankEnd],
) -> ExitAdvice:
    """What to do where ranks wait, the first of them in the call at a position, for ranks that have
    left.
    """
    if advice := advise_exit_calls(where.layout.program, ends):
        return ExitAdvice(advice)
    gone = [end.rank for end in ends]
    if (
        part is None
        or part.is_message
        or part.call.op in _WORLD_CALLS
        or any(end.status != "ended" for end in ends)
    ):
        return ExitAdvice(advise_missing_ranks(ends[0].status, part, gone, ends[0].message))
    return advise_divergent_branch(where, ranks, position, part.sequence, gone) or ExitAdvice(
        advise_missing_ranks("ended", part, gone, "", ranks)
    )
