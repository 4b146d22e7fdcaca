"""Findings about what is left over when a program ends.

Requests that are never waited for (DS501), messages that are never received (DS502), any-source
receives with a choice (DS605), and ranks that a fault or an error ended (DS801 to DS805).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

from distsim.checker.detectors.request_leaks import RequestLeak
from distsim.checker.diagnosis.hang_advice import remedy_for_error
from distsim.checker.matching.call_index import part_call
from distsim.checker.wording import (
    aligned_columns,
    call_words,
    location_text,
    parenthesised,
    rank_list,
)
from distsim.findings.codes import CODES
from distsim.findings.final_state import FinalState, RankEnd
from distsim.findings.finding_types import Finding, SourceLocation
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program


def leak_findings(program: Program, leaks: Iterable[RequestLeak]) -> tuple[Finding, ...]:
    """DS501, one per place."""
    return tuple(_leak_finding(program, leak) for leak in leaks)


def _leak_finding(program: Program, leak: RequestLeak) -> Finding:
    rank = leak.ranks[0]
    call, place = program.call(rank, leak.position), program.place(rank, leak.position)
    times = f" ({leak.count} requests)" if leak.count > len(leak.ranks) else ""
    advice = "keep the handle (`as: h`), and wait for `h` before the tensor is used again"
    if leak.overwritten:
        why = "its handle is overwritten before the wait"
        advice = "give each request its own handle (`as: h@i` in a loop), and wait for each"
    elif leak.dropped:
        why = "the call has no handle"
    else:
        why = "no call waits for its handle"
    never_wait = "never waits" if len(leak.ranks) == 1 else "never wait"
    at_line = parenthesised(location_text(place))
    head = f"{rank_list(leak.ranks)} {never_wait} for {call.op}{at_line}{times}: {why}"
    rows = aligned_columns([(f"rank {rank}", call_words(call), location_text(place))])
    message = "\n".join([head, *rows])
    return Finding("DS501", "warning", message, leak.ranks, (), (advice,), (place,))


def unreceived_findings(program: Program, final_state: FinalState) -> tuple[Finding, ...]:
    """DS502, one per place of the sends."""
    by_site: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
    for rank, position, part in final_state.unreceived:
        call = program.code_call(rank, position)
        if part >= 0:
            call = call.parts[part]
        by_site[call.site].append((rank, position, part))
    return tuple(
        _unreceived_finding(program, site, sends) for site, sends in sorted(by_site.items())
    )


def _unreceived_finding(program: Program, site: int, sends: list[tuple[int, int, int]]) -> Finding:
    """The finding on sends, each (rank, position, part), of one place."""
    first_rank = sends[0][0]
    call = part_call(program, *sends[0])
    ranks = tuple(sorted({rank for rank, _, _ in sends}))
    place: SourceLocation = program.sites[site].place(first_rank)
    number = f"{len(sends)} messages" if len(sends) > 1 else "a message"
    verb_ending = "s" if len(ranks) == 1 else ""
    at_line = parenthesised(location_text(place))
    if OPERATIONS[call.op].signals:
        signals = number.replace("message", "signal")
        head = f"{rank_list(ranks)} send{verb_ending} {signals}{at_line} that no rank waits for"
        advice = (
            f"wait for the signal on rank {call.peer}; otherwise the next wait on this channel "
            "takes it too early"
        )
    else:
        head = f"{rank_list(ranks)} send{verb_ending} {number}{at_line} that no rank receives"
        it = "it" if len(sends) == 1 else "them"
        advice = f"receive {it} on rank {call.peer}, or remove the send"
    rows = aligned_columns([(f"rank {first_rank}", call_words(call), location_text(place))])
    message = "\n".join([head, *rows])
    return Finding("DS502", "warning", message, ranks, (), (advice,), (place,))


def open_receive_findings(
    program: Program, choices: Iterable[tuple[int, int, int]]
) -> tuple[Finding, ...]:
    """DS605, one per place.

    ``choices`` are any-source receives (rank, position, part) that may take messages of several
    senders.
    """
    by_site: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for rank, position, _ in choices:
        by_site[program.code_call(rank, position).site].append((rank, position))
    found = []
    for receives in by_site.values():
        ranks = tuple(dict.fromkeys(rank for rank, _ in receives))
        place = program.place(*receives[0])
        message = (
            f"{rank_list(ranks)}{parenthesised(location_text(place))}: recv from any source can "
            "take messages from several senders"
        )
        advice = "if only one sender is meant, set `src` in the recv"
        found.append(Finding("DS605", "note", message, ranks, (), (advice,), (place,)))
    return tuple(found)


def rank_end_findings(program: Program, final_state: FinalState) -> tuple[Finding, ...]:
    """DS801 to DS805: ranks that a fault, a `fail` or an `exit` with a code ended.

    One finding per kind, place and message.
    """
    groups: dict[tuple[str, SourceLocation | None, str], list[int]] = defaultdict(list)
    for end in final_state.ends:
        code = _end_code(program, end)
        if code is not None:
            groups[code, _end_place(program, end), end.message].append(end.rank)

    found = []
    for (code, place, message), ranks in groups.items():
        at_line = parenthesised(location_text(place))
        text = f"{rank_list(ranks)} {_end_words(code, message, at_line, len(ranks) == 1)}"
        places = () if place is None else (place,)
        severity, advice = CODES[code].severity, remedy_for_error(message)
        found.append(Finding(code, severity, text, tuple(ranks), (), advice, places))
    return tuple(found)


def _end_place(program: Program, end: RankEnd) -> SourceLocation | None:
    """The call at which a rank ended, without what distinguishes the rank."""
    if end.status == "absent" or end.position >= len(program.code(end.rank).calls):
        return None
    place = program.place(end.rank, end.position)
    return SourceLocation(place.file, place.line, place.column, place.op)


def _end_words(code: str, message: str, at_line: str, is_single: bool) -> str:
    was = "was" if is_single else "were"
    if code == "DS801":
        return f"{was} killed by an injected fault{at_line}"
    if code == "DS803":
        return f"exited with an error code{at_line}"
    if code == "DS805":
        return "never started"
    if message == "fault":
        return f"raised an injected error{at_line}"
    error = f": {message}" if message else ""
    return f"raised an error{at_line}{error}"


def _end_code(program: Program, end: RankEnd) -> str | None:
    """The code of the finding on a rank's end; None for an end that needs no finding."""
    if end.status == "absent":
        return "DS805"
    if end.status == "killed":
        return "DS801"
    calls = program.code(end.rank).calls
    if end.position >= len(calls):
        return None
    op = calls[end.position].op
    if end.status == "raised":
        # Other errors that calls raise have findings of their own.
        is_deliberate = end.message == "fault" or OPERATIONS[op].op == "fail"
        return "DS802" if is_deliberate else None
    if op == "exit" and program.call(end.rank, end.position).code:
        return "DS803"
    return None
