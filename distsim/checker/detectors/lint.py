"""Warn about habits that work now and fail later (DS606 to DS608).

Only the text of a program is examined; the verdict does not depend on these findings.

All three are about programs that run correctly today: a group whose timeout is not the one that was
set (DS606), a request that nothing can wait for (DS607), and a collective that a condition keeps
from a member (DS608). Each hangs or breaks after a small change of the program or of its timing.
False alarms would teach users to ignore findings, so each check stays silent in doubtful cases.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from distsim.backends import BackendProfile
from distsim.checker.detectors.request_leaks import request_leaks
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout, build_channel_layout
from distsim.checker.wording import call_words, location_text, parenthesised, rank_list
from distsim.common.units import duration_text
from distsim.findings.final_state import FinalState, RankEnd
from distsim.findings.finding_types import Finding
from distsim.operations.core.resolved_call import RankGroup
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CallSite, CodeCall
from distsim.program.model import Program


def lint_findings(
    program: Program, profile: BackendProfile, layout: ChannelLayout | None = None
) -> tuple[Finding, ...]:
    """DS606 to DS608 of a program under a backend. ``layout`` saves building it again."""
    layout = layout or build_channel_layout(program)
    return (
        *_default_timeout_findings(program, profile),
        *_dropped_request_findings(program, profile),
        *_excluded_member_findings(program, layout),
    )


#: Groups that DS606 names.
_MAX_SHOWN_GROUPS = 4


# --- DS606 ---
def _default_timeout_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    """Groups in use that keep the default although the world has another timeout.

    A new group does not inherit the world's timeout (semantics G12).
    """
    # Somebody who sets the world's timeout cares about timeouts, and expects it to apply to all
    # groups. Without that there is no sign that the default is unwanted.
    world_ns = program.options.get("timeout_ns")
    if not isinstance(world_ns, int) or world_ns == profile.timeout_ns:
        return []
    if profile.timed_out == "nothing":
        return []
    used = _used_group_ids(program)
    groups = [
        group for group in program.groups if group.id in used and _keeps_default_timeout(group)
    ]
    if not groups:
        return []
    group_names = {group.name for group in groups}
    sites = [
        site for site, call in _new_group_calls(program) if call.fields.get("name") in group_names
    ]
    ranks = tuple(sorted({rank for group in groups for rank in group.ranks}))
    places = tuple(dict.fromkeys(site.place() for site in sites))
    message, advice = _default_timeout_words(groups, world_ns, profile)
    return [Finding("DS606", "warning", message, ranks, (), (advice,), places)]


def _default_timeout_words(
    groups: list[RankGroup], world_ns: int, profile: BackendProfile
) -> tuple[str, str]:
    """Message and advice."""
    names = ", ".join(f"`{group.name}`" for group in groups[:_MAX_SHOWN_GROUPS])
    hidden = len(groups) - _MAX_SHOWN_GROUPS
    if hidden > 0:
        names += f" and {hidden} more"
    default, world = duration_text(profile.timeout_ns), duration_text(world_ns)
    if len(groups) == 1:
        subject, groups_are = f"group {names} sets", f"group {names} is"
    else:
        subject, groups_are = f"groups {names} set", f"groups {names} are"
    message = (
        f"{subject} no timeout, so {profile.name}'s default of {default} applies; the world uses "
        f"{world}"
    )
    where = "these groups are" if hidden > 0 else groups_are
    return message, f"set `timeout: {world}` where {where} created"


def _keeps_default_timeout(group: RankGroup) -> bool:
    # A group of one rank never waits, so its timeout is irrelevant.
    is_world = group.id == 0
    return not is_world and group.timeout_ns is None and group.size > 1


def _used_group_ids(program: Program) -> set[int]:
    found: set[int] = set()
    for code in program.codes:
        for call in code.distinct_calls():
            if call.group >= 0:
                found.update(int(group) for group in _group_ids(code.groups[call.group]))
    return found


def _group_ids(groups: object) -> Iterable[int]:
    return groups.tolist() if hasattr(groups, "tolist") else (groups,)  # type: ignore[return-value]


def _new_group_calls(program: Program) -> Iterable[tuple[CallSite, CodeCall]]:
    for code in program.codes:
        for call in code.distinct_calls():
            if call.op == "new_group":
                yield program.sites[call.site], call


# --- DS607 ---
_DROPPED_REQUEST_EFFECT = {
    "cancels": "cancels the message unless the peer has already made the matching call",
    "crashes": "ends the process if the request is still open",
}


def _dropped_request_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    """Messages for whose request no call can wait, if the backend minds (semantics G4, 2.1)."""
    if profile.dropped == "nothing":
        return []
    # Assume that every rank reaches its end: the habit is the same if a hang comes first, and the
    # finding must not disappear with it.
    ends = tuple(RankEnd(r, "ended", len(program.code(r).calls)) for r in program.present)
    found = []
    for leak in request_leaks(program, FinalState(ends, ())):
        call = program.call(leak.ranks[0], leak.position)
        is_message = OPERATIONS[call.op].kind in ("p2p", "batch")
        if not is_message or not (leak.dropped or leak.overwritten):
            continue
        place = program.place(leak.ranks[0], leak.position)
        if leak.dropped:
            why, advice = "has no handle", "keep the handle (`as: h`) and wait for it (`wait: h`)"
        else:
            why = "loses its handle, which is overwritten before a wait"
            advice = "index the handle (`as: h@i`) and wait for each"
        message = (
            f"{call_words(call)} on {rank_list(leak.ranks)}{parenthesised(location_text(place))} "
            f"{why}: {profile.name} {_DROPPED_REQUEST_EFFECT[profile.dropped]}"
        )
        found.append(Finding("DS607", "warning", message, leak.ranks, (), (advice,), (place,)))
    return found


# --- DS608 ---
def _excluded_member_findings(program: Program, layout: ChannelLayout) -> list[Finding]:
    """Collectives under a selector that excludes members which make no other call instead.

    Several groups with one name and the same members are one group whose ranks made it in another
    order; what members lack on each of them has no meaning.
    """
    if program.is_partial:
        # A member may have been stopped before it came to the call.
        return []
    call_index = CallIndex(layout)
    group_counts = Counter((group.name, group.ranks) for group in program.groups)
    stopped = _ranks_that_stop_early(program)
    found: dict[int, Finding] = {}
    for sequence, group in enumerate(program.groups):
        members = layout.sequence_ranks[sequence]
        if group_counts[group.name, group.ranks] > 1 or _run_same_calls(program, members):
            continue
        counts = {rank: _call_counts(program, call_index, rank, sequence) for rank in members}
        if len({count.total() for count in counts.values()}) == 1:
            continue
        ops: set[str] = set()
        for count in counts.values():
            ops.update(op for op, _ in count)
        for op in sorted(ops):
            found |= _excluded_members(program, sequence, op, counts, stopped)
    return [found[site] for site in sorted(found)]


def _run_same_calls(program: Program, members: tuple[int, ...]) -> bool:
    """Whether all members run one code without guards, or there is only one member."""
    codes = {program.code_of[rank] for rank in members}
    if len(members) < 2:
        return True
    return len(codes) == 1 and program.codes[codes.pop()].guards is None


def _ranks_that_stop_early(program: Program) -> set[int]:
    """Ranks whose last step is to fail or exit; the scenario does not say what they call later."""
    found = set()
    for fault in program.faults:
        if fault.kind == "kill" and fault.position == len(program.code(fault.rank).calls):
            found.add(fault.rank)
    for rank in program.present:
        calls = program.code(rank).calls
        if len(calls) and calls[len(calls) - 1].op in ("fail", "exit"):
            found.add(rank)
    return found


def _call_counts(
    program: Program, call_index: CallIndex, rank: int, sequence: int
) -> Counter[tuple[str, int]]:
    """(op, site) -> how often the rank's program makes this call on a sequence."""
    calls = (program.code_call(rank, p) for p in call_index.joins(rank, sequence))
    return Counter((call.op, call.site) for call in calls)


def _excluded_members(
    program: Program,
    sequence: int,
    op: str,
    counts: dict[int, Counter[tuple[str, int]]],
    stopped: set[int],
) -> dict[int, Finding]:
    """Site -> finding, for one operation on one sequence."""
    total: Counter[int] = Counter()
    sites: set[int] = set()
    for rank, count in counts.items():
        of_op = {site: times for (name, site), times in count.items() if name == op}
        total[rank] = sum(of_op.values())
        sites.update(of_op)
    # A member that makes the call as often as the others, but at another line, takes another branch
    # to the same collective. Only a lower count shows that calls are missing.
    most = max(total.values())
    candidates = [rank for rank, times in total.items() if times < most and rank not in stopped]
    found: dict[int, Finding] = {}
    if not candidates:
        return found
    for site in sorted(sites):
        callers = [rank for rank, count in counts.items() if count[op, site]]
        calling = set(callers)
        excluded = [rank for rank in candidates if rank not in calling]
        if excluded and len(callers) < len(counts):
            found[site] = _excluded_member_finding(program, sequence, op, site, callers, excluded)
    return found


def _excluded_member_finding(
    program: Program, sequence: int, op: str, site: int, callers: list[int], excluded: list[int]
) -> Finding:
    place = program.sites[site].place(callers[0])
    ranks = rank_list(excluded)
    are = "is" if len(excluded) == 1 else "are"
    them = "this rank" if len(excluded) == 1 else "these ranks"
    at_line = f" at {location_text(place)}" if location_text(place) else ""
    message = (
        f"{ranks} {are} in group {program.groups[sequence].name}, but `ranks:`{at_line} excludes "
        f"{them} from {op}"
    )
    advice = f"call {op} on {ranks} too, or use a group that contains only {rank_list(callers)}"
    concerned = tuple(sorted({*callers, *excluded}))
    return Finding("DS608", "note", message, concerned, (), (advice,), (place,))
