"""Merge what several files say about the same job, after the last file was read.

Calls are sorted, calls that two files describe become one, contradictions are recorded, and
members of groups and the number of ranks are inferred where the files imply them. This module
changes an ``Evidence`` in place and draws no conclusions about the hang.
"""

from __future__ import annotations

from distsim.hang_doctor.model.evidence import MAX_RANKS, Evidence
from distsim.hang_doctor.model.evidence_records import (
    UNKNOWN_NUMBER,
    CallState,
    EvidenceCall,
    RankEvidence,
)


def reconcile(evidence: Evidence) -> None:
    """Sort and merge all calls, record contradictions, infer groups and the number of ranks.

    May be called again after more files were added.
    """
    _separate_namesakes(evidence)
    for key in evidence.groups_counting_messages:
        _drop_counters(evidence, key)
    for records in evidence.ranks.values():
        _merge_calls_of_rank(evidence, records)
    _infer_members_and_world(evidence)


# --- groups that share a name ---


def _separate_namesakes(evidence: Evidence) -> None:
    """Assign what logs say about a rank to the group of that name that contains the rank.

    Logs name groups but not their members.
    """
    # A list, because the loop may add groups.
    for group in list(evidence.groups.values()):
        if group.members is not None and group.key == group.name:
            _assign_ranks_to_namesakes(evidence, group.name)
    for group in evidence.groups.values():
        if group.may_share_name and group.members is None and group.sure:
            group.sure = False
            evidence.add_note(
                f"{group.label}: older versions of torch give this name to all groups that one "
                "split creates; a log does not list their ranks, but a Flight Recorder dump does"
            )


def _assign_ranks_to_namesakes(evidence: Evidence, name: str) -> None:
    keys = [name, *evidence.keys_of_namesakes.get(name, [])]
    if len(keys) > 1:
        for key in keys:
            evidence.groups[key].shares_name = True
    for rank, records in evidence.ranks.items():
        if rank in (evidence.groups[name].members or ()):
            continue
        group_of_rank = _first_group_with(evidence, keys, rank)
        if group_of_rank is None:
            group_of_rank = evidence.add_group(f"{name} of others", sure=False)
        _move_to_group(records, name, group_of_rank)


def _first_group_with(evidence: Evidence, keys: list[str], rank: int) -> str | None:
    for key in keys:
        if rank in (evidence.groups[key].members or ()):
            return key
    return None


def _move_to_group(records: RankEvidence, key: str, new_key: str) -> None:
    """Assign the calls and counters of a rank on one group to another group."""
    if key in records.status:
        progress = records.status.pop(key)
        records.status.setdefault(new_key, progress)
    records.calls = [
        call._replace(group=new_key) if call.group == key else call for call in records.calls
    ]


# --- counters of messages and collectives ---


def _drop_counters(evidence: Evidence, key: str) -> None:
    """Forget the counters of a group on which messages and collectives share one counter.

    The number of messages differs between ranks, so a smaller number does not mean that a rank is
    behind.
    """
    evidence.add_note(
        f"on {evidence.groups[key].label} the log's counters mix messages and collectives, so they "
        "do not show which rank is behind"
    )
    for records in evidence.ranks.values():
        records.status.pop(key, None)
        records.calls = [_without_shared_number(call, key) for call in records.calls]


def _without_shared_number(call: EvidenceCall, group: str) -> EvidenceCall:
    if call.group == group and call.op == "coalesced":
        return call._replace(number=UNKNOWN_NUMBER)
    return call


# --- calls that two files describe ---


def _merge_calls_of_rank(evidence: Evidence, records: RankEvidence) -> None:
    """Merge collectives of one number and sort all calls of a rank."""
    collectives: dict[tuple[str, int], EvidenceCall] = {}
    others: list[EvidenceCall] = []
    for call in records.calls:
        if call.p2p or call.number < 0:
            others.append(call)
            continue
        key = (call.group, call.number)
        before = collectives.get(key)
        if before is None:
            collectives[key] = call
        elif before.op != call.op and evidence.groups[call.group].sure:
            _record_contradiction(evidence, before, call)
        else:
            collectives[key] = _merged_call(before, call)
    records.calls = sorted(
        [*collectives.values(), *others], key=lambda call: (call.order, call.at_ns, call.number)
    )


def _record_contradiction(evidence: Evidence, one: EvidenceCall, other: EvidenceCall) -> None:
    evidence.disputed_ranks.add(one.rank)
    group = evidence.groups[one.group].label
    evidence.disputes.append(
        f"call {one.number} of rank {one.rank} on {group} is {one.op} in {one.source} and "
        f"{other.op} in {other.source}: the files are of two jobs, or two ranks have the same "
        "number; it is unknown which file is right"
    )


def _merged_call(one: EvidenceCall, other: EvidenceCall) -> EvidenceCall:
    """One call with everything that either record knows about it."""
    return one._replace(
        state=_furthest_state(one, other),
        started=one.started or other.started,
        sizes=one.sizes if one.sizes is not None else other.sizes,
        elements_in=max(one.elements_in, other.elements_in),
        elements_out=max(one.elements_out, other.elements_out),
        dtype=one.dtype or other.dtype,
        frames=one.frames or other.frames,
        at_ns=one.at_ns or other.at_ns,
        order=max(one.order, other.order),
    )


def _furthest_state(one: EvidenceCall, other: EvidenceCall) -> CallState:
    states = (one.state, other.state)
    if "done" in states:
        return "done"
    if "waiting" in states:
        return "waiting"
    return "over" if "over" in states else "unknown"


# --- members and the number of ranks ---


def _infer_members_and_world(evidence: Evidence) -> None:
    groups = evidence.groups.values()
    default = next((group for group in groups if group.is_default), None)
    # Logs list no members, but the sizes of a gathering call show how many there are.
    if default is not None and default.sure and default.size > max(evidence.ranks, default=-1):
        evidence.world = max(evidence.world, default.size)
    if default is not None and default.members is None and evidence.world:
        default.members = tuple(range(evidence.world))

    for group in groups:
        if group.members:
            evidence.world = max(evidence.world, max(group.members) + 1)

    for group in groups:
        # Members beyond MAX_RANKS are damage, so the list is not usable.
        if group.sure and group.members and max(group.members) >= MAX_RANKS:
            group.members = None
        group.size = max(group.size, len(group.members or ()))
