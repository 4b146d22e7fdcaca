"""Joins the profiles of all ranks of a Gloo job to one event graph.

Communications match by group, step and order, and messages by sender, receiver, tag, step and
order, from the first step that all ranks recorded. A profile of Gloo does not name the group of a
call. If a rank has several groups, the group of a kind of call is the one whose members leave it
together.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distsim.trace.recordings.clock_alignment import align_clocks
from distsim.trace.recordings.graph_builder import EventRow, GraphBuilder
from distsim.trace.recordings.readers.kineto_file import RankProfile
from distsim.trace.recordings.readers.kineto_gloo import (
    PHASES,
    ROOTED,
    HostCall,
    HostStep,
    infer_waits,
)
from distsim.trace.recordings.readers.kineto_rank import (
    RankReading,
    base_shifts,
    common_steps,
    recording_of_ranks,
)
from distsim.trace.recordings.recording import (
    ClockAlignment,
    MeetingPartners,
    Recording,
    StepOperations,
)

FORMAT = "PyTorch profile (Gloo)"
_COMMUNICATION_LANE = 1
#: (rank, step number) -> the host of the rank in the step
HostSteps = dict[tuple[int, int], HostStep]
#: (rank, step number) -> the key of the meeting of each call
CallKeys = dict[tuple[int, int], list["MeetingKey | None"]]
GroupFamily = Sequence[tuple[int, ...]]


class MeetingKey(NamedTuple):
    """What the members of a communication have in common.

    ``partners``: the group of a collective, or sender and receiver of a message. ``tag``: None for
    collectives. ``order``: the number among those with equal partners and tag in the step.
    ``root``: None for collectives without a root.
    """

    partners: tuple[int, ...]
    tag: int | None
    step: int
    order: int = 0
    root: int | None = None


class ReadHosts(NamedTuple):
    """What the profiles of a job contain, before they are joined."""

    steps: HostSteps
    numbers: list[int]
    texts: list[str]


def gloo_recording(readings: Sequence[RankReading]) -> Recording:
    """The job of these ranks. Raises UsageError if they have no step in common."""
    profiles = [reading.profile for reading in readings]
    by_rank = {reading.profile.rank: reading for reading in readings}
    ranks = sorted(by_rank)
    hosts = _join_hosts(by_rank)
    keys = _meeting_keys(hosts, profiles)
    clocks = align_clocks(_aligning_meetings(hosts, keys), ranks)
    job = _GlooJob(hosts, keys, clocks)
    job.add_rows()
    origins = {rank: job.shifted(rank, hosts.steps[rank, hosts.numbers[0]].start) for rank in ranks}
    job.builder.clock_error_ns = clocks.worst_ns
    graph = job.builder.graph(hosts.numbers, origins)
    return recording_of_ranks(
        readings,
        graph,
        FORMAT,
        clocks=clocks,
        missing_members=_missing_members(job.builder.meeting_numbers(), set(by_rank)),
        inferred_waits=job.inferred_waits,
        operations=job.operations,
        partners=_partners(job.builder.meeting_numbers()),
    )


def _join_hosts(by_rank: Mapping[int, RankReading]) -> ReadHosts:
    """The common steps of all ranks on the clock of the first one, with common texts."""
    numbers = common_steps(by_rank.values())
    shifts = base_shifts(by_rank.values())
    texts: dict[str, int] = {}
    steps: HostSteps = {}
    for rank, reading in by_rank.items():
        host = reading.host
        assert host is not None, "ranks without a GPU have a host"
        of_text = [texts.setdefault(text, len(texts)) for text in host.texts]
        common_number = np.array(of_text, dtype=np.int32)
        for number in numbers:
            step = host.steps[number]
            step.names = common_number[step.names]
            steps[rank, number] = _shifted_step(step, shifts[rank])
    return ReadHosts(steps, numbers, list(texts))


def _shifted_step(step: HostStep, shift: float) -> HostStep:
    calls = [call._replace(start=call.start + shift, end=call.end + shift) for call in step.calls]
    return HostStep(
        step.start + shift, step.end + shift, step.times + shift, step.names, step.phases, calls
    )


# --- which calls meet ---


def _meeting_keys(hosts: ReadHosts, profiles: Sequence[RankProfile]) -> CallKeys:
    families = _group_families(profiles)
    ranks = sorted(profile.rank for profile in profiles)
    if not families:
        families = [[tuple(range(max(ranks) + 1))]]
    family_of = dict.fromkeys(_call_kinds(hosts), families[0])
    if len(families) > 1:
        for kind in family_of:
            family_of[kind] = min(families, key=lambda f: _mismatch(hosts, kind, f))
    return _keys_in_families(hosts, family_of)


def _group_families(profiles: Sequence[RankProfile]) -> list[GroupFamily]:
    """Groups of equal size, which divide the ranks between them; the largest groups first."""
    by_size: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    for profile in profiles:
        for members in profile.groups.values():
            if len(members) > 1:
                by_size[len(members)].add(members)
    families: list[GroupFamily] = []
    for size in sorted(by_size, reverse=True):
        groups = sorted(by_size[size])
        # Groups of one size may belong to two dimensions of a mesh.
        while groups:
            family: list[tuple[int, ...]] = []
            for group in groups:
                if not any(set(group) & set(other) for other in family):
                    family.append(group)
            families.append(family)
            groups = [group for group in groups if group not in family]
    return families


def _call_kinds(hosts: ReadHosts) -> set[tuple[str, int]]:
    return {_kind(call) for step in hosts.steps.values() for call in step.calls}


def _kind(call: HostCall) -> tuple[str, int]:
    """Calls of one kind belong to the same family of groups. Both sides of a message are one."""
    is_message = call.operation in ("send", "recv")
    return ("message" if is_message else call.operation, call.nbytes)


def _mismatch(hosts: ReadHosts, kind: tuple[str, int], family: GroupFamily) -> tuple[int, float]:
    """How badly calls of a kind fit a family: incomplete meetings, and the spread of their ends."""
    keys = _keys_in_families(hosts, {kind: family})
    ends: dict[Hashable, list[float]] = defaultdict(list)
    for cell, of_calls in keys.items():
        for call, key in zip(hosts.steps[cell].calls, of_calls, strict=True):
            if key is not None:
                ends[key].append(call.end)
    sizes = {2} if kind[0] == "message" else {len(group) for group in family}
    incomplete = sum(len(members) not in sizes for members in ends.values())
    spreads = [max(members) - min(members) for members in ends.values()]
    return incomplete, float(np.median(spreads)) if spreads else 0.0


def _keys_in_families(
    hosts: ReadHosts, family_of: Mapping[tuple[str, int], GroupFamily]
) -> CallKeys:
    """The meeting of each call; None for calls of other kinds."""
    keys: CallKeys = {}
    for (rank, number), step in hosts.steps.items():
        counts: dict[MeetingKey, int] = defaultdict(int)
        keys[rank, number] = []
        for call in step.calls:
            family = family_of.get(_kind(call))
            group = None if family is None else _group_of(rank, family)
            key = None if group is None else _first_key(call, rank, group, number)
            if key is not None:
                counts[key] += 1
                key = key._replace(order=counts[key])
            keys[rank, number].append(key)
    return keys


def _group_of(rank: int, family: GroupFamily) -> tuple[int, ...] | None:
    return next((group for group in family if rank in group), None)


def _first_key(call: HostCall, rank: int, group: tuple[int, ...], step: int) -> MeetingKey | None:
    """The key of a call, as if it were the first with its partners in the step."""
    if call.operation not in ("send", "recv"):
        root = group[call.peer] if 0 <= call.peer < len(group) else None
        return MeetingKey(group, None, step, root=root)
    if not 0 <= call.peer < len(group):
        return None
    peer = group[call.peer]
    partners = (rank, peer) if call.operation == "send" else (peer, rank)
    return MeetingKey(partners, call.tag, step)


def _partners(numbers: Mapping[Hashable, int]) -> dict[int, MeetingPartners]:
    keys = [(number, key) for key, number in numbers.items() if isinstance(key, MeetingKey)]
    return {number: MeetingPartners(key.partners, key.tag, key.root) for number, key in keys}


def _missing_members(
    numbers: Mapping[Hashable, int], present: set[int]
) -> dict[int, tuple[int, ...]]:
    """Meeting -> its members without a profile."""
    missing = {}
    for key, number in numbers.items():
        partners = key.partners if isinstance(key, MeetingKey) else ()
        absent = tuple(rank for rank in partners if rank not in present)
        if absent:
            missing[number] = absent
    return missing


def _aligning_meetings(
    hosts: ReadHosts, keys: CallKeys
) -> dict[Hashable, dict[int, tuple[float, float]]]:
    """Collectives that all members leave together; messages if there are none."""
    collectives: dict[Hashable, dict[int, tuple[float, float]]] = defaultdict(dict)
    messages: dict[Hashable, dict[int, tuple[float, float]]] = defaultdict(dict)
    for (rank, number), of_calls in keys.items():
        for call, key in zip(hosts.steps[rank, number].calls, of_calls, strict=True):
            if key is None or call.operation in ROOTED:
                continue
            if call.operation == "send":
                messages[key][rank] = (call.start, call.end)
            elif call.operation == "recv":
                # A small send ends before its receive is posted.
                messages[key][rank] = (-np.inf, call.end)
            else:
                collectives[key][rank] = (call.start, call.end)
    return collectives or _causal_messages(messages)


def _causal_messages(
    messages: Mapping[Hashable, dict[int, tuple[float, float]]],
) -> dict[Hashable, dict[int, tuple[float, float]]]:
    """Messages of which both sides are known. Only the receiver's end is bound by the sender."""
    return {key: members for key, members in messages.items() if len(members) == 2}


# --- rows ---


class _GlooJob:
    """Adds the rows of all ranks on one clock."""

    def __init__(self, hosts: ReadHosts, keys: CallKeys, clocks: ClockAlignment) -> None:
        self.hosts = hosts
        self.keys = keys
        self.clocks = clocks
        self.builder = GraphBuilder()
        self.inferred_waits = 0
        self.operations: dict[tuple[int, int], StepOperations] = {}
        self.shared_names: dict[bytes, tuple[str, ...]] = {}
        self.zero = min(
            step.start + clocks.offsets_ns[rank] for (rank, _), step in hosts.steps.items()
        )

    def shifted(self, rank: int, time: float) -> float:
        return time + self.clocks.offsets_ns[rank] - self.zero

    def add_rows(self) -> None:
        cells = sorted(self.hosts.steps)
        waits = dict(
            zip(cells, infer_waits([self.hosts.steps[cell] for cell in cells]), strict=True)
        )
        last_host: dict[int, int] = {}
        for rank, number in cells:
            previous = last_host.get(rank)
            last_host[rank] = self._add_step(rank, number, waits[rank, number], previous)

    def _add_step(self, rank: int, number: int, waits: list[int], previous: int | None) -> int:
        step = self.hosts.steps[rank, number]
        index = self.hosts.numbers.index(number)
        calls_at: dict[int, list[int]] = defaultdict(list)
        waits_at: dict[int, list[int]] = defaultdict(list)
        for i, call in enumerate(step.calls):
            calls_at[call.border].append(i)
            waits_at[waits[i]].append(i)
            self.inferred_waits += not call.is_blocking
        waited = np.zeros(len(step.times))
        communication: dict[int, int] = {}
        host = previous
        begin = step.start
        pending: list[int] = []
        for border in _cuts(step, calls_at, waits_at):
            time = float(step.times[border])
            phase = PHASES[step.phases[border]]
            host = self._add_work(rank, index, phase, (begin, time), host, pending)
            begin, pending = time, []
            for i in calls_at.get(border, ()):
                limit = step.leaves(waits[i])
                communication[i] = self._add_call(rank, number, i, limit, host)
            for i in waits_at.get(border, ()):
                pending.append(communication[i])
                end = self.builder.rows[communication[i]].end - self.shifted(rank, 0.0)
                begin = max(begin, end)
            if border + 1 < len(waited):
                waited[border + 1] = begin - time
        phase = PHASES[step.phases[-1]] if len(step.phases) else "data"
        host = self._add_work(rank, index, phase, (begin, step.end), host, pending)
        names = self._border_names(step)
        self.operations[rank, index] = StepOperations(names, step.times, waited)
        return host

    def _border_names(self, step: HostStep) -> tuple[str, ...]:
        """The texts of the borders; steps with equal borders share them."""
        key = step.names.tobytes()
        if key not in self.shared_names:
            self.shared_names[key] = tuple(self.hosts.texts[name] for name in step.names)
        return self.shared_names[key]

    def _add_work(
        self,
        rank: int,
        step: int,
        phase: str,
        times: tuple[float, float],
        host: int | None,
        pending: list[int],
    ) -> int:
        start, end = (self.shifted(rank, time) for time in times)
        before = pending if host is None else [host, *pending]
        return self.builder.add(EventRow(rank, 0, phase, step, start, max(start, end)), before)

    def _add_call(self, rank: int, number: int, i: int, limit: float, host: int) -> int:
        call = self.hosts.steps[rank, number].calls[i]
        key = self.keys[rank, number][i]
        row = EventRow(
            rank,
            _COMMUNICATION_LANE,
            call.operation,
            self.hosts.numbers.index(number),
            self.shifted(rank, call.start),
            self.shifted(rank, max(call.start, min(call.end, limit))),
            ("alone", rank, number, i) if key is None else key,
            call.nbytes,
            provides=not _only_receives(call, rank, key),
        )
        return self.builder.add(row, [host])


def _only_receives(call: HostCall, rank: int, key: MeetingKey | None) -> bool:
    """Whether no other member waits for this one: the receivers of a broadcast."""
    is_from_root = call.operation in ("broadcast", "scatter")
    return is_from_root and key is not None and key.root not in (None, rank)


def _cuts(
    step: HostStep, calls_at: Mapping[int, list[int]], waits_at: Mapping[int, list[int]]
) -> Iterator[int]:
    """Borders at which a piece of work ends: before calls and waits, and between phases."""
    for border in range(len(step.times)):
        ends_phase = (
            border + 1 < len(step.phases) and step.phases[border + 1] != step.phases[border]
        )
        if ends_phase or border in calls_at or border in waits_at:
            yield border
