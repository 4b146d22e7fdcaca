"""Standstills in which nobody is seen to be behind: what is known all the same, and what other
tools concluded.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

from distsim.hang_doctor.analysis.causes import CauseLine, HangCause
from distsim.hang_doctor.analysis.wait_chains import activity_text, same_call
from distsim.hang_doctor.analysis.wait_graph import (
    EvidenceWait,
    JobWaitState,
    RankWaitState,
    last_finished,
    matching_message,
)
from distsim.hang_doctor.model.evidence_records import CauseGrade, EvidenceCall, StackFrame
from distsim.hang_doctor.model.phrases import call_text, may_hide_a_wait, ranks_text, verb_form
from distsim.hang_doctor.readers.stacks import user_frame

#: Where in a library's own sources an error was raised, as gloo and c10d write it.
_SOURCE_PREFIX: Final = re.compile(r"\[/?\S*?\.(cc|cpp|h|hpp):\d+\] *")

# --- nobody is behind ---


def finished_elsewhere(whole: JobWaitState) -> list[HangCause]:
    """A rank stands in a call which another member has finished: what met there did not belong
    together, or it left early.
    """
    found = []
    for rank, stand in whole.ranks.items():
        for wait in stand.waits:
            call = wait.call
            if call.p2p or call.number < 0 or not whole.evidence.groups[call.group].sure:
                continue
            after = tuple(
                m
                for m in whole.members(call.group)
                if m != rank and last_finished(whole, m, call.group) >= call.number
            )
            if not after:
                continue
            title = f"rank {rank} is still in {call_text(whole.evidence, call)}, which {ranks_text(after)} {verb_form(after, 'has', 'have')} finished"
            details = [
                "a call that needs everybody can't end on one and not on another, unless their calls were others (other order, "
                "size or group), or the connection broke between them; who is wrong, this does not tell"
            ]
            lines = [((rank,), call.op or "a call", wait.frame)]
            found.append(
                HangCause(
                    "passed",
                    "suspected",
                    title,
                    (),
                    (rank, *after),
                    lines,
                    details,
                    call.group,
                    call.number,
                )
            )
    return found[:4]


def missing_evidence(whole: JobWaitState) -> list[HangCause]:
    """All of whom something is known stand in one call; whoever is missing was not given."""
    found: dict[tuple[str, int], list[EvidenceWait]] = {}
    for stand in whole.ranks.values():
        for wait in stand.waits:
            found.setdefault((wait.call.group, wait.call.number), []).append(wait)
    causes = []
    for (group, number), waits in found.items():
        unknown = tuple(sorted({r for w in waits for r in w.silent}))
        if group and not whole.evidence.groups[group].sure:
            unknown = ()
        if not unknown:
            continue
        inside = tuple(sorted({w.rank for w in waits}))
        title = (
            f"{ranks_text(inside)} {verb_form(inside, 'waits', 'wait')} in {call_text(whole.evidence, waits[0].call)}; {ranks_text(unknown)} "
            f"{verb_form(unknown, 'is', 'are')} not in what I was given"
        )
        lines = [(inside, waits[0].call.op, waits[0].frame)]
        causes.append(
            HangCause(
                "silent",
                "unknown",
                title,
                (),
                inside,
                lines,
                [
                    f"whether {verb_form(unknown, 'it is', 'they are')} behind, gone, or only {verb_form(unknown, 'its', 'their')} files "
                    "are missing, nothing here tells"
                ],
                group,
                number,
            )
        )
    return sorted(causes, key=lambda c: (c.number, c.group))


def consequence_errors(whole: JobWaitState) -> list[HangCause]:
    """Errors that come of another rank's end, or of waiting for it, and nothing else."""
    ended = [s for s in whole.ranks.values() if s.end is not None and s.end.follows]
    if not ended:
        return []
    ranks = tuple(s.rank for s in ended)
    text = ended[0].end.text if ended[0].end else ""
    title = f"{ranks_text(ranks)} failed because of another rank: {_first_sentence(text)}"
    lines = _activity_lines(whole, ranks)
    return [
        HangCause(
            "follows",
            "unknown",
            title,
            (),
            ranks,
            lines,
            ["the cause is with a rank that ended, or never came, before: see its log"],
        )
    ]


def waits_of_unknown_members(whole: JobWaitState) -> list[HangCause]:
    """Ranks in a call of which nothing says who else belongs to it."""
    found: dict[tuple[str, int, str], list[EvidenceWait]] = {}
    for stand in whole.ranks.values():
        for wait in stand.waits:
            if (
                wait.open_ended
                and not wait.missing
                and not wait.silent
                and wait.call.source != "its stack"
            ):
                found.setdefault((wait.call.group, wait.call.number, wait.call.op), []).append(wait)
    if not found:
        return []
    parts = [
        f"{ranks_text(w.rank for w in waits)} {verb_form([w.rank for w in waits], 'waits', 'wait')} in {call_text(whole.evidence, waits[0].call)}"
        for waits in found.values()
    ]
    hidden = f"; and {len(parts) - 4} more" if len(parts) > 4 else ""
    lines = [
        (tuple(w.rank for w in waits), waits[0].call.op or "a call", waits[0].frame)
        for waits in found.values()
    ]
    ranks = tuple(sorted({w.rank for waits in found.values() for w in waits}))
    unsure = any(not whole.evidence.groups[group].sure for group, _, _ in found)
    details = ["who else belongs to it, and how far they are, these files do not say"]
    details += (
        [
            "the lines name no group, or a number that differs between processes: calls of two ranks may be of two groups"
        ]
        if unsure and not whole.evidence.disputes
        else []
    )
    return [HangCause("waits", "unknown", "; ".join(parts[:4]) + hidden, (), ranks, lines, details)]


def communication_hangs(whole: JobWaitState) -> list[HangCause]:
    """Every member is in the call, the calls fit, and it is not done: then it is the communication
    that hangs.
    """
    found = []
    for stand in whole.ranks.values():
        for wait in stand.waits:
            group = whole.evidence.groups.get(wait.call.group)
            if (
                wait.missing
                or wait.silent
                or wait.open_ended
                or group is None
                or group.members is None
                or not group.sure
            ):
                continue
            if wait.call.p2p:
                continue
            inside = tuple(
                r for r in group.members if any(same_call(w, wait) for w in whole.ranks[r].waits)
            )
            if len(inside) < len(group.members):
                continue
            text = call_text(whole.evidence, wait.call)
            title = f"all {len(inside)} members are in {text}, and their calls fit: the communication itself hangs"
            details = [
                "no rank is to blame by these records: look at the network, at the errors of NCCL and "
                "the driver (NCCL_DEBUG=WARN, dmesg), at a device kernel before the call"
            ]
            found.append(
                HangCause(
                    "communication",
                    "proved",
                    title,
                    (),
                    inside,
                    [(inside, wait.call.op, wait.frame)],
                    details,
                    wait.call.group,
                    wait.call.number,
                )
            )
    return found[:1]


def matched_messages_hang(whole: JobWaitState) -> list[HangCause]:
    """A send and a receive have each other, hang on nobody else, and do not end."""
    met: dict[tuple[int, int, int, int], tuple[EvidenceCall, EvidenceCall]] = {}
    for wait in (
        w for stand in whole.ranks.values() for w in stand.waits if w.call.p2p and not w.missing
    ):
        other = matching_message(whole, wait.call)
        if other is not None:
            send, recv = (wait.call, other) if wait.call.op == "send" else (other, wait.call)
            met[send.rank, send.order, recv.rank, recv.order] = send, recv
    uneven = next((pair for pair in met.values() if pair[0].batched != pair[1].batched), None)
    if uneven is not None:
        return [_batched_against_single(*uneven)]
    hanging = _blocked_behind_missing(whole, list(met.values()))
    pairs = [
        pair
        for pair in met.values()
        if not any(call.rank in hanging for call in pair if call.state == "waiting")
    ]
    if not pairs:
        return []
    send, recv = pairs[0]
    more = f", and so are {len(pairs) - 1} more" if len(pairs) > 1 else ""
    title = (
        f"the send of rank {send.rank} and its receive on rank {recv.rank} are both posted and fit{more}: the communication itself "
        "hangs"
    )
    details = [
        "no rank is to blame by these records: look at the network, at the errors of NCCL and the driver (NCCL_DEBUG=WARN, dmesg)"
    ]
    ranks = tuple(sorted({call.rank for pair in pairs for call in pair}))
    return [
        HangCause(
            "communication",
            "proved",
            title,
            (),
            ranks,
            _message_lines(send, recv),
            details,
            send.group,
        )
    ]


def _blocked_behind_missing(
    whole: JobWaitState, pairs: list[tuple[EvidenceCall, EvidenceCall]]
) -> set[int]:
    """Ranks that wait for somebody who is missing or unknown, and those whose open messages are
    with such ranks: a batch ends as one.
    """
    found = {
        s.rank
        for s in whole.ranks.values()
        if any(w.missing or w.silent or w.open_ended for w in s.waits)
    }
    while True:
        more = {
            call.rank
            for pair in pairs
            if all(c.state == "waiting" for c in pair) and found & {c.rank for c in pair}
            for call in pair
        }
        if more <= found:
            return found
        found |= more


def _message_lines(send: EvidenceCall, recv: EvidenceCall) -> list[CauseLine]:
    return [
        ((send.rank,), f"send to rank {recv.rank}", user_frame(send.frames)),
        ((recv.rank,), f"recv from rank {send.rank}", user_frame(recv.frames)),
    ]


def _batched_against_single(send: EvidenceCall, recv: EvidenceCall) -> HangCause:
    """In torch a batch goes over the group's communicator, a message alone over one of the two
    ranks, unless that was made at the start.
    """
    first, second = ("in a batch", "alone") if send.batched else ("alone", "in a batch")
    title = f"rank {send.rank} sends to rank {recv.rank} {first}, and rank {recv.rank} receives it {second}: on NCCL the two need not meet"
    details = [
        "a batch runs on the communicator of the group, a message alone on one of the two ranks, unless init_process_group was "
        "given a device_id: issue both sides with batch_isend_irecv, or both without"
    ]
    return HangCause(
        "connection",
        "suspected",
        title,
        (),
        (send.rank, recv.rank),
        _message_lines(send, recv),
        details,
        send.group,
    )


def connection_mismatches(whole: JobWaitState) -> list[HangCause]:
    """NCCL's error where two ranks connect other things than each other in one call. Whose call is
    the wrong one, it does not say.
    """
    said = [one for one in whole.evidence.said if one.tool == "NCCL"]
    if not said:
        return []
    ranks = tuple(sorted({rank for one in said for rank in one.ranks if rank in whole.ranks}))
    title = f'two ranks connect different things in one call: NCCL says "{said[0].text}"{f" on {ranks_text(ranks)}" if ranks else ""}'
    details = [
        "the first message of a direction, and the first collective of a group, are connected by both sides together: two sends first, "
        "or a batch of both directions against single calls, do not mirror each other",
        "post both directions in one batch_isend_irecv on both ranks, or let one of them receive first; "
        "`distsim capture` of the script names the calls",
    ]
    return [
        HangCause(
            "connection", "suspected", title, (), ranks, _activity_lines(whole, ranks), details
        )
    ]


def tool_reports(whole: JobWaitState) -> list[HangCause]:
    """What other tools concluded, in their name."""
    found = []
    for said in whole.evidence.said:
        if said.tool == "monitored_barrier":
            known = [r for r in said.ranks if r in whole.ranks and whole.ranks[r].waits]
            title = f"{ranks_text(said.ranks)} did not come to a monitored_barrier in its time"
            found.append(
                HangCause(
                    "behind",
                    "proved",
                    title,
                    () if known else said.ranks,
                    said.ranks,
                    _activity_lines(whole, said.ranks),
                )
            )
        elif said.tool == "NCCL":
            continue
        elif said.ranks:
            detail = (
                "its numbers mix the groups of a job, so I do not take it for proof"
                if "desync" in said.tool
                else "it lists the smaller party and counts each communicator by itself: a hint, no proof of who is wrong"
            )
            if "does not answer" in said.text or "dead" in said.text:
                detail = "a process that does not answer has ended, is stopped, or its machine is gone: look there first"
            found.append(
                HangCause(
                    "reported",
                    "suspected",
                    f"{said.tool} says: {ranks_text(said.ranks)} {said.text}",
                    (),
                    said.ranks,
                    _activity_lines(whole, said.ranks),
                    [detail],
                )
            )
    return found[:6]


def _first_sentence(text: str) -> str:
    """Of an error, without the place in the library's own sources."""
    return _SOURCE_PREFIX.sub("", text).partition(". ")[0][:160]


def _activity_lines(
    whole: JobWaitState, ranks: Iterable[int]
) -> list[tuple[tuple[int, ...], str, StackFrame | None]]:
    return [
        ((r,), activity_text(whole.ranks[r]), whole.ranks[r].told)
        for r in ranks
        if r in whole.ranks and whole.ranks[r].told is not None
    ]


def stacks_only(whole: JobWaitState) -> list[HangCause]:
    """Stacks alone: who is in a collective, who is elsewhere. A stack names no group, so this
    proves little.
    """
    inside: dict[tuple[str, str], list[int]] = {}
    outside: list[RankWaitState] = []
    for stand in whole.ranks.values():
        if stand.place is None or stand.place.frame is None:
            continue
        if stand.place.op:
            inside.setdefault((stand.place.op, stand.place.frame.place), []).append(stand.rank)
        else:
            outside.append(stand)
    if not inside:
        return []
    lines = [
        (tuple(ranks), op, whole.ranks[ranks[0]].frame)
        for (op, _), ranks in sorted(inside.items(), key=lambda kv: -len(kv[1]))
    ]
    lines += [
        (
            (s.rank,),
            "host code"
            if not may_hide_a_wait(s.frame)
            else "host code, or a wait that a stack does not show",
            s.frame,
        )
        for s in outside
    ]
    within = tuple(sorted(r for ranks in inside.values() for r in ranks))
    if outside:
        ranks = tuple(s.rank for s in outside)
        title = f"{ranks_text(within)} {verb_form(within, 'is', 'are')} in communication, {ranks_text(ranks)} {verb_form(ranks, 'is', 'are')} not"
        grade: CauseGrade = "suspected" if len(ranks) <= len(within) else "unknown"
        return [
            HangCause(
                "stacks",
                grade,
                title,
                (),
                ranks,
                lines,
                ["stacks do not tell groups and call numbers: no proof"],
            )
        ]
    if len(inside) > 1:
        parts = "; ".join(
            f"{ranks_text(r)} in {op} at {at}"
            for (op, at), r in sorted(inside.items(), key=lambda kv: -len(kv[1]))
        )
        return [
            HangCause(
                "stacks",
                "suspected",
                f"ranks stand in different calls: {parts}",
                (),
                tuple(whole.ranks),
                lines,
                ["if they are of one group, they do not fit; stacks do not tell groups"],
            )
        ]
    (op, at), same = next(iter(inside.items()))
    return [
        HangCause(
            "stacks",
            "unknown",
            f"{ranks_text(same)} {verb_form(same, 'is', 'are')} in {op} at {at}; nobody I was given is elsewhere",
            (),
            tuple(same),
            lines,
        )
    ]
