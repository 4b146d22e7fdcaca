"""What a program's text lets one say beside the verdict: habits that pass now and bite later (DS606
to DS608).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from distsim.backends import BackendProfile
from distsim.checker.detectors.request_leaks import request_leaks
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout, build_channel_layout
from distsim.checker.wording import call_words, location_text, rank_list
from distsim.common.units import duration_text
from distsim.findings.final_state import FinalState, RankEnd
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CallSite, CodeCall
from distsim.program.model import Program


def lint_findings(
    program: Program, profile: BackendProfile, layout: ChannelLayout | None = None
) -> tuple[Finding, ...]:
    """DS606 to DS608 of a program under a profile. ``layout``, if at hand, saves building it
    again.
    """
    layout = layout or build_channel_layout(program)
    return (
        *_default_timeout_findings(program, profile),
        *_dropped_request_findings(program, profile),
        *_excluded_member_findings(program, layout),
    )


# --- DS606 ---
def _default_timeout_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    """Groups in use that keep the default although the world's timeout is another (semantics G12:
    new_group does not inherit).
    """
    world_ns = program.options.get("timeout_ns")
    if (
        not isinstance(world_ns, int)
        or world_ns == profile.timeout_ns
        or profile.timed_out == "nothing"
    ):
        return []
    used = {
        int(g)
        for code in program.codes
        for c in code.distinct_calls()
        if c.group >= 0
        for g in _group_ids(code.groups[c.group])
    }
    bare = [
        g for g in program.groups if g.id in used and g.id and g.timeout_ns is None and g.size > 1
    ]
    if not bare:
        return []
    names = ", ".join(g.name for g in bare[:4]) + (
        f" and {len(bare) - 4} more" if len(bare) > 4 else ""
    )
    are = ("group {} is", "its") if len(bare) == 1 else ("groups {} are", "their")
    default = duration_text(profile.timeout_ns)
    message = (
        f"the world gives up after {duration_text(world_ns)}, but {are[0].format(names)} made without a timeout and"
        f" wait{'s' if len(bare) == 1 else ''} {default}, {are[1]} default under {profile.name}"
    )
    advice = f"say `timeout: {duration_text(world_ns)}` where {names if len(bare) < 5 else 'they'} {'is' if len(bare) == 1 else 'are'} made"
    sites = [
        s
        for s, call in _new_group_calls(program)
        if call.fields.get("name") in {g.name for g in bare}
    ]
    ranks = tuple(sorted({r for g in bare for r in g.ranks}))
    return [
        Finding(
            "DS606",
            "warning",
            message,
            ranks,
            (),
            (advice,),
            tuple(dict.fromkeys(s.place() for s in sites)),
        )
    ]


def _group_ids(groups: object) -> Iterable[int]:
    return groups.tolist() if hasattr(groups, "tolist") else (groups,)  # type: ignore[return-value]


def _new_group_calls(program: Program) -> Iterable[tuple[CallSite, CodeCall]]:
    for code in program.codes:
        yield from (
            (program.sites[c.site], c) for c in code.distinct_calls() if c.op == "new_group"
        )


# --- DS607 ---
_DROPPED_REQUEST_EFFECT = {
    "cancels": "cancels it unless its counterpart already waits",
    "crashes": "ends the process if it is still open then",
}


def _dropped_request_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    """Messages whose request nobody can wait for any more, where the profile minds (semantics G4,
    2.1).
    """
    if profile.dropped == "nothing":
        return []
    ends = tuple(RankEnd(r, "ended", len(program.code(r).calls)) for r in program.present)
    found = []
    for leak in request_leaks(program, FinalState(ends, ())):
        call = program.call(leak.ranks[0], leak.position)
        if not (leak.dropped or leak.overwritten) or OPERATIONS[call.op].kind not in (
            "p2p",
            "batch",
        ):
            continue
        place = program.place(leak.ranks[0], leak.position)
        why = (
            "keeps no handle"
            if leak.dropped
            else "loses its handle, which is bound again before a wait"
        )
        message = f"{call_words(call)} of {rank_list(leak.ranks)}, {location_text(place)}, {why}: {profile.name} {_DROPPED_REQUEST_EFFECT[profile.dropped]}"
        advice = (
            "write `as: h` and `wait: h`"
            if leak.dropped
            else "index the handle, `as: h@i`, and wait for each"
        )
        found.append(Finding("DS607", "warning", message, leak.ranks, (), (advice,), (place,)))
    return found


# --- DS608 ---
def _excluded_member_findings(program: Program, layout: ChannelLayout) -> list[Finding]:
    """Collectives under a selector that shuts members out who have no other call in its place.

    Groups of one name and the same members are one that its ranks made in another order: what each
    of them lacks says nothing.
    """
    where = CallIndex(layout)
    made = Counter((group.name, group.ranks) for group in program.groups)
    cut = _ranks_that_stop_early(program)
    found: dict[int, Finding] = {}
    for sequence, group in enumerate(program.groups):
        members = layout.sequence_ranks[sequence]
        plain = {program.code_of[r] for r in members}
        if len(members) < 2 or (
            len(plain) == 1 and program.codes[next(iter(plain))].guards is None
        ):
            continue
        counts = {rank: _call_counts(program, where, rank, sequence) for rank in members}
        if (
            made[group.name, group.ranks] > 1
            or len({sum(count.values()) for count in counts.values()}) == 1
        ):
            continue
        for op in sorted({op for count in counts.values() for op, _ in count}):
            found |= _excluded_members(program, sequence, op, counts, cut)
    return [found[site] for site in sorted(found)]


def _ranks_that_stop_early(program: Program) -> set[int]:
    """Ranks whose last step is that they fail or leave: what they would have called next, nobody
    has written down.
    """
    killed = {
        f.rank
        for f in program.faults
        if f.kind == "kill" and f.position == len(program.code(f.rank).calls)
    }
    codes = {
        k
        for k, code in enumerate(program.codes)
        if len(code.calls) and code.calls[len(code.calls) - 1].op in ("fail", "exit")
    }
    return killed | {r for r in program.present if program.code_of[r] in codes}


def _call_counts(
    program: Program, where: CallIndex, rank: int, sequence: int
) -> Counter[tuple[str, int]]:
    """(op, site) -> how often the rank's program makes it on a sequence."""
    calls = (program.code_call(rank, p) for p in where.joins(rank, sequence))
    return Counter((call.op, call.site) for call in calls)


def _excluded_members(
    program: Program,
    sequence: int,
    op: str,
    counts: dict[int, Counter[tuple[str, int]]],
    cut: set[int],
) -> dict[int, Finding]:
    total = {
        rank: sum(n for (name, _), n in count.items() if name == op)
        for rank, count in counts.items()
    }
    most = max(total.values())
    short = [rank for rank, n in total.items() if n < most and rank not in cut]
    found = {}
    for site in (
        sorted({s for count in counts.values() for name, s in count if name == op}) if short else ()
    ):
        reach = [rank for rank, count in counts.items() if count[op, site]]
        reached = set(reach)
        out = [rank for rank in short if rank not in reached]
        if out and len(reach) < len(counts):
            place = program.sites[site].place(reach[0])
            who = rank_list(out)
            message = (
                f"{op} on {program.groups[sequence].name}, {location_text(place)}, stands under a selector that leaves out {who},"
                f" {'a member' if len(out) == 1 else 'members'} of the group"
            )
            advice = f"let {who} make it too, or make a group of {rank_list(reach)} for it"
            found[site] = Finding(
                "DS608", "note", message, tuple(sorted({*reach, *out})), (), (advice,), (place,)
            )
    return found
