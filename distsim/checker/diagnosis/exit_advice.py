"""What to say about ranks that wait for a rank which has exited.

How the rank ended, which call it does not make, and what a plain script would show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from distsim.backends import BACKEND_PROFILES
from distsim.checker.diagnosis.awaited_call import AwaitedCall
from distsim.checker.diagnosis.hang_advice import advise_missing_ranks
from distsim.checker.diagnosis.wait_for_graph import WaitEdge
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.wording import (
    call_words,
    location_text,
    parenthesised,
    place_of_call,
    rank_list,
)
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
    "silent": "makes no progress",
}
_EXIT_WORDS_PLURAL = {
    "ended": "have already ended",
    "raised": "have raised an error",
    "crashed": "have crashed",
    "killed": "were killed",
    "absent": "never started",
    "silent": "make no progress",
}
#: Calls of the whole world, which have advice of their own.
_WORLD_CALLS = ("new_group", "init_process_group")
#: Ranks that an advice line lists one by one.
_MAX_SHOWN_RANKS = 4


class ExitAdvice(NamedTuple):
    """Help lines, and the places of the calls that are themselves the mistake."""

    lines: tuple[str, ...]
    slips: tuple[SourceLocation, ...] = ()


class IncompleteNewGroup(NamedTuple):
    """A new_group call, and the ranks that never make it."""

    call: ResolvedCall
    missing: tuple[int, ...]


# --- how ranks ended ---
def ended_by_exit_call(program: Program, end: RankEnd) -> bool:
    """Whether the rank ended in an `exit` call, not at the end of its program."""
    calls = program.code(end.rank).calls
    if end.status not in ("ended", "raised") or end.position >= len(calls):
        return False
    return calls[end.position].op == "exit"


def exit_words(program: Program, ends: Sequence[RankEnd]) -> str:
    """How ranks ended.

    For example `has already ended` or `have exited with code 1`; `have exited` if the ranks ended
    in different ways.
    """
    is_single = len(ends) == 1
    if all(ended_by_exit_call(program, end) for end in ends):
        codes = {program.call(end.rank, end.position).code for end in ends}
        code = ""
        if len(codes) == 1 and codes != {0}:
            code = f" with code {next(iter(codes))}"
        return f"{'has' if is_single else 'have'} exited{code or ' early'}"
    if len({end.status for end in ends}) > 1:
        return "have exited"
    words = _EXIT_WORDS if is_single else _EXIT_WORDS_PLURAL
    return words[ends[0].status]


def closed_connection_note(program: Program, ends: Sequence[RankEnd]) -> list[str]:
    """What ranks that wait for a process see, if the backend reports that the process has ended."""
    if BACKEND_PROFILES[program.backend].peer_death != "raises":
        return []
    if program.options.get("stays_connected") or any(end.status != "ended" for end in ends):
        return []
    closing, them = "closes its connections when it ends", "it"
    if len(ends) > 1:
        closing, them = "close their connections when they end", "them"
    exited = rank_list(end.rank for end in ends)
    return [
        f"  on {program.backend}, {exited} {closing}: ranks that wait for {them} raise "
        '"Connection closed by peer"'
    ]


# --- advice ---
def advise_exited_ranks(
    call_index: CallIndex,
    ranks: Sequence[int],
    position: int,
    awaited: AwaitedCall | None,
    ends: Sequence[RankEnd],
) -> ExitAdvice:
    """What to do if ranks wait for ranks that have exited.

    ``position`` is the call in which the first of the waiting ranks is blocked.
    """
    exit_calls = _advise_exit_calls(call_index.layout.program, ends)
    if exit_calls:
        return ExitAdvice(exit_calls)
    exited = [end.rank for end in ends]
    is_group_call = (
        awaited is not None and not awaited.is_message and awaited.call.op not in _WORLD_CALLS
    )
    if awaited is None or not is_group_call or any(end.status != "ended" for end in ends):
        status, message = ends[0].status, ends[0].message
        return ExitAdvice(advise_missing_ranks(status, awaited, exited, message))
    branch = _advise_divergent_branch(call_index, ranks, position, awaited.sequence, exited)
    if branch is not None:
        return branch
    return ExitAdvice(advise_missing_ranks("ended", awaited, exited, "", ranks))


def _advise_exit_calls(program: Program, ends: Sequence[RankEnd]) -> tuple[str, ...]:
    """What to do if all ranks ended in an `exit` call; nothing if some did not."""
    if not all(ended_by_exit_call(program, end) for end in ends):
        return ()
    ranks = rank_list([end.rank for end in ends], _MAX_SHOWN_RANKS)
    location = location_text(place_of_call(program, ends[0].rank, ends[0].position))
    at_place = parenthesised(location)
    if any(program.call(end.rank, end.position).code for end in ends):
        exit_words = "exits" if len(ends) == 1 else "exit"
        return (
            f"find out from the log why {ranks} {exit_words} with an error code{at_place}; "
            "the other ranks only wait",
        )
    return (
        f"let {ranks} exit{at_place} only after the call that the other ranks make, "
        "or let all ranks exit together",
    )


def _advise_divergent_branch(
    call_index: CallIndex,
    ranks: Sequence[int],
    position: int,
    sequence: int,
    exited: Sequence[int],
) -> ExitAdvice | None:
    """Calls in a branch that the exited ranks do not take.

    None if these calls, and these alone, do not explain why the first rank waits on the sequence.
    """
    program, rank = call_index.layout.program, ranks[0]
    if len({site.file for site in program.sites}) > 1:
        # Built or recorded programs have a file per rank: their lines cannot be compared.
        return None
    positions = [each for each in call_index.joins(rank, sequence) if each <= position]
    sites = [program.code_call(rank, each).site for each in positions]
    extra: list[int] = []
    for other in exited:
        their_positions = call_index.joins(other, sequence)
        their_sites = [program.code_call(other, each).site for each in their_positions]
        shared = set(their_sites)
        more = [each for each, site in zip(positions, sites, strict=True) if site not in shared]
        is_explained = [site for site in sites if site in shared] == their_sites
        if not more or not is_explained or (extra and more != extra):
            return None
        extra = more

    others = rank_list(exited, _MAX_SHOWN_RANKS)
    words, place = call_words(program.call(rank, extra[0])), program.place(rank, extra[0])
    callers = rank_list(ranks, _MAX_SHOWN_RANKS)
    takes = "takes" if len(ranks) == 1 else "take"
    call, it = f"call {words}{parenthesised(location_text(place))}", "it"
    if len(extra) > 1:
        first = f"{words}, {location_text(place)}"
        call, it = f"make the same {len(extra)} calls (first: {first})", "them"
    line = f"{call} on {others} too, or move {it} out of the branch that only {callers} {takes}"
    return ExitAdvice((line,), (place,))


def incomplete_new_group(
    call_index: CallIndex, edges: Sequence[WaitEdge], awaited: Sequence[AwaitedCall | None]
) -> IncompleteNewGroup | None:
    """The first new_group that waits for ranks which never make it; ``awaited`` is by edge."""
    program = call_index.layout.program
    for edge, part in zip(edges, awaited, strict=False):
        if part is None or part.call.op != "new_group" or part.position is not None:
            continue
        missing = edge.need.ranks
        positions = call_index.joins(missing[0], part.sequence)
        names = {program.call(missing[0], position).name for position in positions}
        # A rank that makes it later, in another order, does not skip it.
        return None if part.call.name in names else IncompleteNewGroup(part.call, missing)
    return None
