"""What a back end refuses or overlooks in a program's text: findings about one profile, beside the
verdict, which is about the contract.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

from distsim.backends import BackendProfile, call_refusal, profile_for_call
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout, build_channel_layout
from distsim.checker.wording import call_words, location_text, rank_list
from distsim.findings.codes import CODES
from distsim.findings.finding_types import Finding
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.one_sided import is_signal
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.semantics.form.compiler import refusal_key
from distsim.semantics.form.group_creation import divergent_new_groups, new_group_error


def backend_findings(
    program: Program, profile: BackendProfile, layout: ChannelLayout | None = None
) -> tuple[Finding, ...]:
    """DS701 to DS704, calls that the profile refuses, and DS602, tags that it ignores although the
    order of messages needs them.
    """
    found = _refused_call_findings(program, profile) + _refused_group_findings(program, profile)
    if not profile.tags:
        found += _ignored_tag_findings(program, CallIndex(layout or build_channel_layout(program)))
    return tuple(found)


def _refused_call_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    """One finding per place and reason. A code's first rank whose call is valid speaks for it:
    dtype, reduce op and source do not differ by row."""
    groups: dict[tuple[str, int, str], set[int]] = {}
    said: dict[tuple[str, int, str], tuple[ResolvedCall, BackendProfile]] = {}
    taken: set[Hashable] = set()  # what need not be asked again
    for code in program.codes:
        for made in code.distinct_calls():
            ranks = (
                code.ranks
                if made.invalid is None
                else [r for r, wrong in zip(code.ranks, made.invalid[0], strict=True) if not wrong]
            )
            if not ranks:
                continue
            alike = refusal_key(program, code, code.ranks.index(ranks[0]), made)
            if alike in taken:
                continue
            call = program.resolve(ranks[0], made)
            reason = call_refusal(profile, call)
            if not reason:
                taken.add(alike)
            else:
                judge = profile_for_call(profile, call)
                key = (_refusal_code(call, judge), made.site, reason)
                groups.setdefault(key, set()).update(program.alike(ranks))
                said.setdefault(key, (call, judge))
    found = []
    for (number, site, reason), those in sorted(groups.items(), key=lambda item: item[0]):
        place = program.sites[site].place(min(those))
        refused, judge = said[number, site, reason]
        words = f"{call_words(refused)} of {rank_list(sorted(those))}"
        message = f"{judge.name} refuses {words}, {location_text(place)}: {reason}"
        found.append(
            Finding(
                number,
                "error",
                message,
                tuple(sorted(those)),
                (),
                (_refusal_advice(number, refused),),
                (place,),
            )
        )
    return found


def _refused_group_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    """DS704 of groups that torch does not make, one for each place."""
    if not any(
        call.op == "new_group" and call.fields.get("local_sync")
        for code in program.codes
        for call in code.calls
    ):
        return []
    unlike, said = (
        divergent_new_groups(program, profile),
        dict[int, dict[int, tuple[ResolvedCall, str]]](),
    )
    for rank in program.present:
        for position, call in program.calls_of(rank):
            made = unlike.get((rank, position))
            if (
                call.op == "new_group"
                and (reason := new_group_error(call, made, profile)) is not None
            ):
                said.setdefault(program.code_call(rank, position).site, {})[rank] = call, reason
    found = []
    for site, those in sorted(said.items()):
        ranks, (call, reason) = tuple(sorted(those)), those[min(those)]
        place = program.sites[site].place(ranks[0])
        message = f"{profile_for_call(profile, call).name} refuses {call_words(call)} of {rank_list(ranks)}, {location_text(place)}: {reason}"
        found.append(
            Finding(
                "DS704",
                "error",
                message,
                ranks,
                (),
                (_GROUP_NAME_ADVICE if "name" in reason else _LOCAL_SYNC_ADVICE,),
                (place,),
            )
        )
    return found


#: What to do about a group of which torch makes none.
_GROUP_NAME_ADVICE = (
    "torch names a group with use_local_synchronization by its members and by how many groups each is in, and one that is still there"
    " has this name: use it, destroy it first, or leave use_local_synchronization out and let all ranks make the call"
)
_LOCAL_SYNC_ADVICE = (
    "leave use_local_synchronization out, and let all ranks of the world make the call"
)


def _refusal_advice(number: str, refused: ResolvedCall) -> str:
    if number == "DS704" and OPERATIONS[refused.op].direction == "recv" and refused.peer is None:
        return "name the source, or receive one element at least"
    remedy = CODES[number].remedy
    return remedy[0].lower() + remedy[1:].rstrip(".")


def _refusal_code(call: ResolvedCall, profile: BackendProfile) -> str:
    """Which of its arguments the profile refuses: the source, the dtype, the reduce op, or the call
    as such.
    """
    if call.op in ("recv", "irecv") and call.peer is None and not profile.any_source:
        return "DS701"
    if (
        profile.refuse(
            replace(call, inputs=_as_float32(call.inputs), outputs=_as_float32(call.outputs))
        )
        is None
    ):
        return "DS702"
    return (
        "DS703"
        if call.reduce_op is not None and profile.refuse(replace(call, reduce_op="sum")) is None
        else "DS704"
    )


def _as_float32(buffers: tuple[TensorBuffer, ...]) -> tuple[TensorBuffer, ...]:
    return tuple(replace(b, dtype="float32") for b in buffers)


def _ignored_tag_findings(program: Program, where: CallIndex) -> list[Finding]:
    """Pairs whose messages are received in another order of tags than they are sent in."""
    layout = where.layout
    pairs: dict[tuple[int, int, int], list[int]] = {}
    for channel, key in enumerate(
        zip(layout.chan_group, layout.chan_src, layout.chan_dst, strict=True)
    ):
        if not is_signal(layout.chan_tag[channel]):
            pairs.setdefault(key, []).append(channel)
    found: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for (_, src, dst), channels in sorted(pairs.items()):
        if len(channels) < 2 or not (
            0 <= src < program.world_size and 0 <= dst < program.world_size
        ):
            continue
        sent = sorted(
            (m.position, m.part, layout.chan_tag[c])
            for c in channels
            for m in where.messages(src, c, sends=True)
        )
        taken = sorted(
            (m.position, m.part, layout.chan_tag[c])
            for c in channels
            for m in where.messages(dst, c, sends=False)
        )
        for one, other in zip(sent, taken, strict=False):
            if one[2] != other[2]:
                sites = (program.code_call(src, one[0]).site, program.code_call(dst, other[0]).site)
                found.setdefault(sites, []).append((src, dst))
                break
    return [_tag_finding(program, sites, who) for sites, who in sorted(found.items())]


def _tag_finding(program: Program, sites: tuple[int, int], who: list[tuple[int, int]]) -> Finding:
    src, dst = who[0]
    places = (program.sites[sites[0]].place(src), program.sites[sites[1]].place(dst))
    more = f" (and {len(who) - 1} more pairs)" if len(who) > 1 else ""
    message = (
        f"nccl ignores tags: the message of rank {src}, {location_text(places[0])}, goes to the receive of rank {dst}, "
        f"{location_text(places[1])}, which has another tag{more}"
    )
    ranks = tuple(sorted({r for pair in who for r in pair}))
    return Finding(
        "DS602",
        "warning",
        message,
        ranks,
        (),
        ("receive in the order in which the messages are sent",),
        places,
    )
