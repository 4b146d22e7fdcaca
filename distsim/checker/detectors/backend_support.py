"""Detect what a backend refuses or ignores in a program: DS602 and DS701 to DS704.

Only the text of the program is examined. These findings are about one backend; the verdict is about
the contract.

Key idea: ask the backend's own table (`call_refusal`) about one example of each distinct call. To
learn which argument it objects to, change one argument at a time and ask again. So this module
lists no dtypes or operations itself.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import replace

from distsim.backends import BackendProfile, call_refusal, profile_for_call
from distsim.checker.detectors.signal_conflicts import barrier_sites, site_key
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout, build_channel_layout
from distsim.checker.wording import call_words, location_text, parenthesised, rank_list
from distsim.findings.codes import CODES
from distsim.findings.finding_types import Finding
from distsim.operations.core.resolved_call import REDUCE_OPS, ResolvedCall, TensorBuffer
from distsim.operations.one_sided import is_signal
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, SharedCode
from distsim.program.model import Program
from distsim.semantics.form.compiler import refusal_key
from distsim.semantics.form.group_creation import divergent_new_groups, new_group_error


def backend_findings(
    program: Program, profile: BackendProfile, layout: ChannelLayout | None = None
) -> tuple[Finding, ...]:
    """Calls that the backend refuses, and tags that it ignores although messages need them."""
    found = _refused_call_findings(program, profile) + _refused_group_findings(program, profile)
    if not profile.tags:
        found += _ignored_tag_findings(program, CallIndex(layout or build_channel_layout(program)))
    return tuple(found)


def _refused_call_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    """One finding per place and reason.

    The first rank of a code whose call is valid represents the others, because dtype, reduce op and
    source do not differ by row.
    """
    ranks_by_refusal: dict[tuple[str, int, str], set[int]] = defaultdict(set)
    examples: dict[tuple[str, int, str], tuple[ResolvedCall, BackendProfile]] = {}
    # Resolving a call is the expensive part. Calls with equal keys have the same answer,
    # so a large program asks only once for each.
    accepted: set[Hashable] = set()
    for code in program.codes:
        for code_call in code.distinct_calls():
            ranks = _ranks_with_valid_call(code, code_call)
            if not ranks:
                continue
            key = refusal_key(program, code, code.ranks.index(ranks[0]), code_call)
            if key in accepted:
                continue
            call = program.resolve(ranks[0], code_call)
            reason = call_refusal(profile, call)
            if not reason:
                accepted.add(key)
                continue
            # A group may have its own backend, so the refusing one may differ from the program's.
            refusing = profile_for_call(profile, call)
            refusal = (_refusal_code(call, refusing), code_call.site, reason)
            # In a folded program, a rank also speaks for the ranks that it represents.
            ranks_by_refusal[refusal].update(program.alike(ranks))
            examples.setdefault(refusal, (call, refusing))
    found = []
    barriers = barrier_sites(program) if ranks_by_refusal else set()
    for refusal, refused_ranks in sorted(ranks_by_refusal.items(), key=lambda item: item[0]):
        code_of_finding, site, reason = refusal
        call, refusing = examples[refusal]
        ranks = tuple(sorted(refused_ranks))
        place = program.sites[site].place(ranks[0])
        if code_of_finding == "DS704" and site_key(program.sites[site]) in barriers:
            # The program contains the signals of a barrier; the file contains the barrier.
            place = replace(place, op="symm_mem_barrier")
        where = f"{rank_list(ranks)}{parenthesised(location_text(place))}"
        subject = _refused_subject(code_of_finding, call, refusing)
        if place.op == "symm_mem_barrier":
            subject = f"{refusing.name}: symm_mem_barrier is not supported"
        message = f"{subject}; called on {where}\n  torch raises: {reason}"
        advice = _refusal_advice(code_of_finding, call, refusing)
        found.append(Finding(code_of_finding, "error", message, ranks, (), (advice,), (place,)))
    return found


def _refused_subject(code: str, call: ResolvedCall, refusing: BackendProfile) -> str:
    """What the backend does not support, without the place: `mpi: send does not support bool`."""
    tensors = [buffer.label for buffer in (*call.inputs, *call.outputs) if buffer.label]
    named = f" (tensor {tensors[0]})" if tensors else ""
    dtype = (call.inputs or call.outputs)[0].dtype if code in ("DS702", "DS703") else ""
    start = f"{refusing.name}: {call.op} does not support"
    if code == "DS702":
        return f"{start} {dtype}{named}"
    if code == "DS703":
        return f"{start} op={call.reduce_op} for {dtype}{named}"
    if code == "DS701":
        return f"{refusing.name}: {call.op} without `src` is not supported"
    return f"{refusing.name}: {call_words(call)} is not supported"


def _ranks_with_valid_call(code: SharedCode, call: CodeCall) -> Sequence[int]:
    if call.invalid is None:
        return code.ranks
    rows = zip(code.ranks, call.invalid.rows, strict=True)
    return [rank for rank, is_invalid in rows if not is_invalid]


def _refused_group_findings(program: Program, profile: BackendProfile) -> list[Finding]:
    """DS704 on groups that torch refuses to make, one per place."""
    # Only use_local_synchronization can fail here: otherwise all ranks take part, and torch derives
    # a name that cannot collide. The test avoids a walk over all calls of most programs.
    if not _has_local_groups(program):
        return []
    divergent = divergent_new_groups(program, profile)
    refusals: dict[int, dict[int, tuple[ResolvedCall, str]]] = defaultdict(dict)
    for rank in program.present:
        for position, call in program.calls_of(rank):
            if call.op != "new_group":
                continue
            reason = new_group_error(call, divergent.get((rank, position)), profile)
            if reason is not None:
                refusals[program.code_call(rank, position).site][rank] = call, reason
    found = []
    for site, by_rank in sorted(refusals.items()):
        ranks = tuple(sorted(by_rank))
        call, reason = by_rank[ranks[0]]
        place = program.sites[site].place(ranks[0])
        words = f"{call_words(call)} on {rank_list(ranks)}{parenthesised(location_text(place))}"
        message = f"{profile_for_call(profile, call).name} does not create {words}: {reason}"
        advice = _GROUP_NAME_ADVICE if "name" in reason else _LOCAL_SYNC_ADVICE
        found.append(Finding("DS704", "error", message, ranks, (), (advice,), (place,)))
    return found


def _has_local_groups(program: Program) -> bool:
    for code in program.codes:
        for call in code.calls:
            if call.op == "new_group" and call.fields.get("local_sync"):
                return True
    return False


#: What to do about a group that torch refuses to make.
_GROUP_NAME_ADVICE = (
    "use the existing group with this name, destroy it first, or remove use_local_synchronization "
    "and make the call on all ranks: torch derives the name from the members and the number of "
    "groups of each"
)
_LOCAL_SYNC_ADVICE = (
    "remove use_local_synchronization, and call new_group on all ranks of the world"
)


def _refusal_advice(number: str, refused: ResolvedCall, refusing: BackendProfile) -> str:
    # Gloo raises for an empty receive from any source, a case of its own: the general remedy of
    # DS704 (use another backend) would not help.
    if number == "DS704" and OPERATIONS[refused.op].direction == "recv" and refused.peer is None:
        return "name the source, or receive at least one element"
    if number == "DS702":
        buffer = (refused.inputs or refused.outputs)[0]
        return f"use float32 for {buffer.label or 'the tensor'}"
    if number == "DS703" and refusing.support is not None:
        dtype = (refused.inputs or refused.outputs)[0].dtype
        supported = [op for op in REDUCE_OPS if refusing.support.takes(refused.op, dtype, op)]
        if supported:
            names = _alternatives(supported)
            return f"use {names}. Or create a group on another backend"
    remedy = CODES[number].remedy
    return remedy[0].lower() + remedy[1:].rstrip(".")


def _alternatives(names: Sequence[str]) -> str:
    """`sum, avg or min`."""
    return " or ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _refusal_code(call: ResolvedCall, profile: BackendProfile) -> str:
    """Which argument the backend refuses: source (DS701), dtype, reduce op, or the call itself."""
    if call.op in ("recv", "irecv") and call.peer is None and not profile.any_source:
        return "DS701"
    # Whatever the backend accepts after a change of one argument is refused for that argument.
    inputs, outputs = _as_float32(call.inputs), _as_float32(call.outputs)
    if profile.refuse(replace(call, inputs=inputs, outputs=outputs)) is None:
        return "DS702"
    if call.reduce_op is not None and profile.refuse(replace(call, reduce_op="sum")) is None:
        return "DS703"
    return "DS704"


def _as_float32(buffers: tuple[TensorBuffer, ...]) -> tuple[TensorBuffer, ...]:
    return tuple(replace(b, dtype="float32") for b in buffers)


def _ignored_tag_findings(program: Program, call_index: CallIndex) -> list[Finding]:
    """Pairs of ranks whose messages are received in another order of tags than they are sent.

    A backend that ignores tags matches the messages of a pair in order. That is harmless as long as
    the tags of the k-th send and the k-th receive agree. Only the first difference of a pair is
    reported, because it shifts or swaps all later ones.
    """
    layout = call_index.layout
    channels_of: dict[tuple[int, int, int], list[int]] = defaultdict(list)
    keys = zip(layout.chan_group, layout.chan_src, layout.chan_dst, strict=True)
    for channel, key in enumerate(keys):
        # Signals of one-sided operations have channels of their own, encoded as large tags.
        if not is_signal(layout.chan_tag[channel]):
            channels_of[key].append(channel)
    ranks = range(program.world_size)
    found: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for (_, src, dst), channels in sorted(channels_of.items()):
        # With one channel there is one tag, so nothing can be confused. A peer outside the world is
        # an invalid call, which is reported elsewhere.
        if len(channels) < 2 or src not in ranks or dst not in ranks:
            continue
        sent = _tagged_messages(call_index, src, channels, sends=True)
        taken = _tagged_messages(call_index, dst, channels, sends=False)
        for (send, _, send_tag), (receive, _, receive_tag) in zip(sent, taken, strict=False):
            if send_tag != receive_tag:
                sites = (program.code_call(src, send).site, program.code_call(dst, receive).site)
                found[sites].append((src, dst))
                break
    return [_tag_finding(program, sites, pairs) for sites, pairs in sorted(found.items())]


def _tagged_messages(
    call_index: CallIndex, rank: int, channels: list[int], *, sends: bool
) -> list[tuple[int, int, int]]:
    """(position, part, tag) of a rank's messages on some channels, in program order."""
    found: list[tuple[int, int, int]] = []
    for channel in channels:
        tag = call_index.layout.chan_tag[channel]
        messages = call_index.messages(rank, channel, sends=sends)
        found += [(message.position, message.part, tag) for message in messages]
    return sorted(found)


def _tag_finding(program: Program, sites: tuple[int, int], pairs: list[tuple[int, int]]) -> Finding:
    src, dst = pairs[0]
    places = (program.sites[sites[0]].place(src), program.sites[sites[1]].place(dst))
    more = f" (and {len(pairs) - 1} more pairs)" if len(pairs) > 1 else ""
    message = (
        f"nccl ignores tags: the message from rank {src}{parenthesised(location_text(places[0]))} "
        f"arrives in a receive of rank {dst} with a different tag"
        f"{parenthesised(location_text(places[1]))}{more}"
    )
    ranks = tuple(sorted({rank for pair in pairs for rank in pair}))
    advice = f"receive the messages on rank {dst} in the order in which rank {src} sends them"
    return Finding("DS602", "warning", message, ranks, (), (advice,), places)
