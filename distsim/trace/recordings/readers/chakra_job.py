"""Joins the Chakra traces of all ranks to one event graph.

Collectives match by process group and order, messages by sender, receiver, tag and order. A trace
names its groups, but not their members, so the members are the ranks whose traces use the name;
without names, all ranks.

**Without start times.** Chakra's converter writes durations and dependencies, but no starts. So the
starts are computed: an operation starts when its dependencies have ended, and communication ends
when its last member has arrived and its transfer is over. A kernel of NCCL also waits for the other
ranks, so the transfer is the shortest duration among the members. Sends do not wait for their
receives.

**With start times**, these are kept, and so are the dependencies that the recording obeyed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from distsim.common.errors import UsageError
from distsim.trace.recordings.clock_alignment import align_clocks
from distsim.trace.recordings.event_graph import EventGraph, Numbers, Times
from distsim.trace.recordings.graph_builder import EventRow, GraphBuilder
from distsim.trace.recordings.readers.chakra_file import ChakraNode
from distsim.trace.recordings.readers.chakra_rank import ChakraOperation, ChakraRank
from distsim.trace.recordings.recording import ClockAlignment, MeetingPartners, Recording

FORMAT = "Chakra execution trace"
_ROOTED = ("broadcast", "reduce", "gather", "scatter")


class _MeetingKey(NamedTuple):
    """What the members of a communication have in common; ``tag`` is None for collectives."""

    partners: tuple[int, ...]
    group: str
    tag: int | None
    order: int


def chakra_recording(ranks: Sequence[ChakraRank]) -> Recording:
    """The job of these ranks. Raises UsageError if a trace holds no operations."""
    ranks = sorted(ranks, key=lambda one: one.rank)
    _check_operations(ranks)
    keys = _meeting_keys(ranks)
    steps = _common_steps(ranks)
    has_starts = all(one.has_starts for one in ranks)
    job = _ChakraJob(ranks, keys, steps)
    clocks = ClockAlignment()
    if has_starts:
        clocks = align_clocks(job.aligning_meetings(), [one.rank for one in ranks])
    builder = job.recorded(clocks) if has_starts else job.computed()
    graph = builder.graph(list(steps), {})
    present = {one.rank for one in ranks}
    world = max([*present, *_peers(ranks)]) + 1
    return Recording(
        graph,
        FORMAT,
        files=tuple(one.file for one in ranks),
        world_size=world,
        clocks=clocks,
        missing_ranks=tuple(rank for rank in range(world) if rank not in present),
        missing_members=_missing_members(builder.meeting_numbers(), present),
        partners=_partners(builder),
        operation_count=len(graph),
        is_profile=True,
        notes=tuple(_notes(ranks, steps, has_starts)),
    )


def _check_operations(ranks: Sequence[ChakraRank]) -> None:
    """Raises UsageError for a trace that holds no work and no communication."""
    for one in ranks:
        if not any(operation.node.kind != "none" for operation in one.operations):
            raise UsageError(
                f"{one.file}: this Chakra trace contains metadata only",
                "give the .et files that `chakra_converter` writes, one per rank",
            )


def _peers(ranks: Sequence[ChakraRank]) -> set[int]:
    return {operation.node.peer for one in ranks for operation in one.operations}


def _is_communication(node: ChakraNode) -> bool:
    return node.kind not in ("work", "none")


# --- which operations meet ---


def _meeting_keys(ranks: Sequence[ChakraRank]) -> dict[int, list[_MeetingKey | None]]:
    """By rank, the meeting of each operation; None for work and for messages without a partner."""
    members: dict[str, set[int]] = defaultdict(set)
    for one in ranks:
        for operation in one.operations:
            if operation.node.kind == "collective":
                members[operation.node.group].add(one.rank)
    members[""] = {one.rank for one in ranks}
    groups = {name: tuple(sorted(of_group)) for name, of_group in members.items()}
    keys: dict[int, list[_MeetingKey | None]] = {}
    for one in ranks:
        counts: dict[_MeetingKey, int] = defaultdict(int)
        keys[one.rank] = []
        for operation in one.operations:
            key = _first_key(operation.node, one.rank, groups)
            if key is not None:
                counts[key] += 1
                key = key._replace(order=counts[key])
            keys[one.rank].append(key)
    return keys


def _first_key(
    node: ChakraNode, rank: int, groups: Mapping[str, tuple[int, ...]]
) -> _MeetingKey | None:
    """The key of an operation, as if it were the first with its partners."""
    if node.kind == "collective":
        return _MeetingKey(groups[node.group], node.group, None, 0)
    if not _is_communication(node) or node.peer < 0 or node.peer == rank:
        return None
    ends = (rank, node.peer) if node.kind == "send" else (node.peer, rank)
    return _MeetingKey(ends, node.group, node.tag, 0)


def _missing_members(
    numbers: Mapping[Hashable, int], present: set[int]
) -> dict[int, tuple[int, ...]]:
    """Meeting -> its members without a trace."""
    missing = {}
    for key, number in numbers.items():
        partners = key.partners if isinstance(key, _MeetingKey) else ()
        absent = tuple(rank for rank in partners if rank not in present)
        if absent:
            missing[number] = absent
    return missing


def _partners(builder: GraphBuilder) -> dict[int, MeetingPartners]:
    """The members of meetings. No trace names a root, so it is the first rank of the group."""
    numbers = builder.meeting_numbers()
    found = {}
    for row in builder.rows:
        key = row.meeting
        if isinstance(key, _MeetingKey):
            root = key.partners[0] if row.label in _ROOTED else None
            found[numbers[key]] = MeetingPartners(key.partners, key.tag, root)
    return found


# --- steps ---


def _common_steps(ranks: Sequence[ChakraRank]) -> list[int]:
    """The steps that all ranks have; a single one if they are not marked."""
    common = set.intersection(*(set(one.steps) for one in ranks))
    if common and all(one.are_steps_marked for one in ranks):
        return sorted(common)
    return [0]


def _step_of(one: ChakraRank, steps: Sequence[int]) -> Numbers:
    """By operation, the index of its step. Earlier operations belong to the first step."""
    numbers = np.array([operation.node.number for operation in one.operations], dtype=np.float64)
    if len(steps) == 1:
        return np.zeros(len(numbers), dtype=np.int64)
    begins = np.array([one.steps[number] for number in steps], dtype=np.float64)
    return np.maximum(np.searchsorted(begins, numbers, side="right") - 1, 0)


def _notes(ranks: Sequence[ChakraRank], steps: Sequence[int], has_starts: bool) -> list[str]:
    notes = []
    if not has_starts:
        notes.append(
            "Chakra traces without start times: distsim computes starts and waits from durations "
            "and dependencies"
        )
    nodes = [operation.node for one in ranks for operation in one.operations]
    calls = [node for node in nodes if _is_communication(node)]
    without_time = sum(not node.duration_ns for node in calls)
    if without_time:
        notes.append(
            f"{without_time} of {len(calls)} communications have no duration and count as 0; "
            "`distsim replay --cluster NAME` predicts them"
        )
    alone = sum(node.kind in ("send", "recv") and node.peer < 0 for node in nodes)
    if alone:
        notes.append(f"{alone} messages name no other rank, so they wait for none")
    if not all(one.are_steps_marked for one in ranks):
        notes.append("the traces mark no steps, so they count as one step")
    return notes


# --- rows ---


class _ChakraJob:
    """The operations of all ranks with their meetings and steps."""

    def __init__(
        self,
        ranks: Sequence[ChakraRank],
        keys: Mapping[int, list[_MeetingKey | None]],
        steps: Sequence[int],
    ) -> None:
        self.ranks = ranks
        self.keys = keys
        self.step_of = {one.rank: _step_of(one, steps) for one in ranks}

    def aligning_meetings(self) -> dict[Hashable, dict[int, tuple[float, float]]]:
        """Collectives that all members leave together, by recorded times."""
        meetings: dict[Hashable, dict[int, tuple[float, float]]] = defaultdict(dict)
        for one in self.ranks:
            for operation, key in zip(one.operations, self.keys[one.rank], strict=True):
                node = operation.node
                if key is not None and key.tag is None and operation.label not in _ROOTED:
                    meetings[key][one.rank] = (node.start_ns, node.start_ns + node.duration_ns)
        return meetings

    def recorded(self, clocks: ClockAlignment) -> GraphBuilder:
        """Rows with the recorded times, on one clock that begins at 0."""
        shifts = {one.rank: round(clocks.offsets_ns[one.rank]) for one in self.ranks}
        zero = min(
            operation.node.start_ns + shifts[one.rank]
            for one in self.ranks
            for operation in one.operations
        )
        builder = GraphBuilder(clock_error_ns=clocks.worst_ns)
        for one in self.ranks:
            starts = [o.node.start_ns + shifts[one.rank] - zero for o in one.operations]
            ends = [
                start + operation.node.duration_ns
                for start, operation in zip(starts, one.operations, strict=True)
            ]
            times = (np.array(starts, dtype=np.float64), np.array(ends, dtype=np.float64))
            self._add_rank(builder, one, times, obeyed_only=True)
        return builder

    def computed(self) -> GraphBuilder:
        """Rows whose starts follow from durations and dependencies."""
        first = GraphBuilder()
        for one in self.ranks:
            durations = [float(operation.node.duration_ns) for operation in one.operations]
            self._add_rank(first, one, (np.zeros(len(durations)), np.array(durations)))
        graph = first.graph([0], {})
        start, end = graph.replay(_transfer_times(graph), np.zeros(len(graph)))
        builder = GraphBuilder()
        offset = 0
        for one in self.ranks:
            rows = slice(offset, offset + len(one.operations))
            self._add_rank(builder, one, (start[rows], end[rows]))
            offset += len(one.operations)
        return builder

    def _add_rank(
        self,
        builder: GraphBuilder,
        one: ChakraRank,
        times: tuple[Times, Times],
        *,
        obeyed_only: bool = False,
    ) -> None:
        """Add the rows of a rank. ``obeyed_only``: without edges that contradict the times."""
        start, end = times
        offset = len(builder.rows)
        steps = self.step_of[one.rank]
        for i, operation in enumerate(one.operations):
            row = self._row(one.rank, i, operation, int(steps[i]))
            before = [j for j in operation.before if not obeyed_only or end[j] <= start[i]]
            row = row._replace(start=float(start[i]), end=float(end[i]))
            builder.add(row, [offset + j for j in before])

    def _row(self, rank: int, i: int, operation: ChakraOperation, step: int) -> EventRow:
        node = operation.node
        key: Hashable = self.keys[rank][i]
        if key is None and _is_communication(node):
            key = ("alone", rank, i)
        is_send = node.kind == "send"
        return EventRow(
            rank,
            operation.lane,
            operation.label,
            step,
            0.0,
            0.0,
            key,
            node.nbytes,
            # A receive waits for its send, and a send for nothing.
            provides=node.kind != "recv" or not isinstance(key, _MeetingKey),
            may_wait=not is_send,
        )


def _transfer_times(graph: EventGraph) -> Times:
    """The duration of work; for communication the shortest positive one among its members."""
    columns = graph.columns
    own = columns.end.copy()
    rows = np.flatnonzero(~graph.is_work)
    shortest = np.full(graph.meeting_count, np.inf)
    known = rows[own[rows] > 0]
    np.minimum.at(shortest, columns.meeting[known], own[known])
    shortest[np.isinf(shortest)] = 0.0
    transfer = shortest[columns.meeting[rows]]
    # A send that returns at once takes no time; its receive takes that of the transfer.
    own[rows] = np.where(columns.waits[rows], transfer, np.minimum(own[rows], transfer))
    return own
