"""Match the calls of running ranks, under the most permissive reading of the contract.

A message is buffered, so its sender never waits. The k-th collective of a group on one rank meets
the k-th on the others; a member may return as soon as the members that its result depends on have
arrived. Calls that do not agree never meet. So a rank gets as far as any backend would let it.

What a backend adds to this (blocking sends, mismatches that it does not notice) is not done here:
`distsim.semantics` evaluates the recorded calls afterwards.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final, NamedTuple

from distsim.backends.message_matching import ANY_SENDER, MessageMatcher
from distsim.backends.profile import BackendProfile
from distsim.operations.registry import OPERATIONS
from distsim.script_capture.hub.collective_results import (
    CallContribution,
    CollectiveExecutor,
    Payload,
)
from distsim.script_capture.protocol.wire import SharedMemoryRegions, free_payload

#: `RankCall.peer` of a receive from any source, and of a collective without a root.
NO_PEER: Final = -1
#: `RankCall.match_number` of a call that has not met all its partners.
UNMATCHED: Final = 0
#: Key of a result that is the same for all members.
_SHARED_RESULT: Final = 0
#: Collectives whose members may bring different numbers of elements.
_UNEVEN_COLLECTIVES: Final = ("all_to_all", "all_to_all_single", "all_gather")


@dataclass(eq=False)
class GroupInstance:
    """A process group, one object for all its ranks.

    ``generation`` counts how many groups of this name and these ranks a rank had created before.
    ``collectives`` are those that not all members have returned from, and ``counts`` the number of
    collectives called so far; both are kept for each device, since calls on different devices never
    meet.
    """

    name: str
    ranks: tuple[int, ...]
    backend: str
    generation: int
    timeout_ns: int | None = None
    title: str = ""
    is_world: bool = False
    collectives: dict[tuple[str, int], CollectiveInstance] = field(default_factory=dict)
    counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def group_rank(self, rank: int) -> int:
        """The rank within the group."""
        return self.ranks.index(rank)

    def root_of(self, call: RankCall) -> int:
        """The group rank of a call's root; 0 if it has none."""
        return self.ranks.index(call.peer) if call.peer in self.ranks else 0


class CallTemplate(NamedTuple):
    """Everything about a call except its number and its payloads.

    ``waited``: its rank waits for it at once; that wait is an event of its own, with the next
    number. ``contribution``: what the call brings, without payloads.
    """

    site: int
    group: GroupInstance
    op: str
    peer: int
    tag: int
    is_async: bool
    waited: bool
    facts: list[Any]
    counts: list[int]
    contribution: CallContribution


@dataclass(eq=False, slots=True)
class RankCall:
    """A call that a rank made.

    ``results`` is None until the call is done. ``match_number`` is the same for calls that met each
    other, and `UNMATCHED` before all have arrived. ``matched_send`` is the send that a receive
    took.
    """

    rank: int
    number: int
    op: str
    group: GroupInstance
    peer: int
    tag: int
    contribution: CallContribution
    results: list[list[Payload]] | None = None
    source: int = -1
    collective: CollectiveInstance | None = None
    matched_send: RankCall | None = None
    timeout_ns: int | None = None
    match_number: int = UNMATCHED

    @property
    def device(self) -> str:
        """The device of its tensors if its group has a backend for each device, else ""."""
        extra = self.contribution.extra
        return str(extra.get("on", "")) if extra else ""

    @property
    def done(self) -> bool:
        """Whether the call has its results."""
        return self.results is not None


@dataclass(eq=False)
class CollectiveInstance:
    """One collective: which group ranks have arrived, and the results computed so far.

    ``completed`` counts members that have their result, and ``pending_reads`` those that have not
    yet copied it from shared memory. The inputs can be freed once all members are completed and
    none is pending.
    """

    arrived: dict[int, RankCall] = field(default_factory=dict)
    results: dict[Hashable, list[list[Payload]]] = field(default_factory=dict)
    pending_reads: int = 0
    completed: int = 0


class CallMatcher:
    """All groups, messages and collectives. ``matches`` counts the matches so far."""

    def __init__(self, regions: SharedMemoryRegions, profile: BackendProfile) -> None:
        self.regions = regions
        self.profile = profile
        self.executor = CollectiveExecutor(regions)
        self.messages = MessageMatcher(profile.specific_first)
        #: Every point-to-point call; the message matcher refers to them by index.
        self.items: list[RankCall] = []
        self.matches = 0
        self.group_instances: dict[Hashable, GroupInstance] = {}

    def use_profile(self, profile: BackendProfile) -> None:
        """Match messages by the rules of another backend from here on."""
        self.profile = profile
        self.messages.specific_first = profile.specific_first

    def group(self, facts: Sequence[Any], generation: int) -> GroupInstance:
        """The group that all its ranks share; ``facts`` as a rank's ``group`` message has them."""
        name, ranks, backend, timeout_ns, title, is_world = facts
        key = (name, tuple(ranks), generation)
        if key not in self.group_instances:
            self.group_instances[key] = GroupInstance(
                name, tuple(ranks), backend, generation, timeout_ns, title, is_world
            )
        return self.group_instances[key]

    def post(self, call: RankCall) -> list[RankCall]:
        """Add a call. Returns all calls that are done because of it."""
        if OPERATIONS[call.op].kind == "p2p":
            return self._post_message(call)
        return self._post_collective(call)

    # --- messages ---
    def _box(self, call: RankCall, receiver: int) -> Hashable:
        """The queue in which a send and a receive can meet."""
        has_channels = OPERATIONS[call.op].signals
        tag = call.tag if self.profile.tags or has_channels else 0
        return (id(call.group), receiver, tag, call.device)

    def post_receive(self, call: RankCall) -> list[RankCall]:
        """`post` for a receive that names its sender.

        A shortcut for loops: if no message is on its way to this box, there is nothing to match.
        """
        box = self._box(call, call.rank)
        if box in self.messages.boxes:
            return self.post(call)
        self.messages.receive(box, call.peer, len(self.items))
        self.items.append(call)
        return []

    def match_waiting_receive(self, send: RankCall) -> RankCall | None:
        """The receive that takes this message at once, if exactly one receive is in its box.

        Otherwise None, and the send must be posted. A shortcut for loops.
        """
        box = self._box(send, send.peer)
        queues = self.messages.boxes.get(box)
        if queues is None or queues.sends or len(queues.receives) != 1:
            return None
        waiting = queues.receives.get(send.rank, [])
        if len(waiting) != 1:
            return None
        del self.messages.boxes[box]
        self.matches += 1
        receive = self.items[waiting[0][1]]
        receive.match_number = send.match_number = self.matches
        receive.source = send.rank
        send.results = []
        return receive

    def _post_message(self, call: RankCall) -> list[RankCall]:
        item = len(self.items)
        self.items.append(call)
        if OPERATIONS[call.op].direction == "send":
            box = self._box(call, call.peer)
            self.messages.send(box, call.rank, item)
            call.results = []
            return [call, *self._match_sender(box, call.rank)]
        box = self._box(call, call.rank)
        if call.peer >= 0:
            self.messages.receive(box, call.peer, item)
            return self._match_sender(box, call.peer)
        self.messages.receive(box, ANY_SENDER, item)
        if len(call.group.ranks) == 2:
            # Only one sender is possible, so there is no choice to postpone.
            return [*self._take_from_any(box), *self._match_all_senders(box)]
        return []

    def _match_sender(self, box: Hashable, sender: int) -> list[RankCall]:
        """Match at most one message of this sender with a receive that names it."""
        pair = self.messages.meet(box, sender)
        return [] if pair is None else [self._hand_over(*pair)]

    def _match_all_senders(self, box: Hashable) -> list[RankCall]:
        """Match messages with receives that name their sender, as long as there are any.

        The lowest sender first, for a reproducible order.
        """
        done: list[RankCall] = []
        queues = self.messages.boxes.get(box)
        while queues is not None:
            pair = None
            for sender in sorted(queues.sends):
                pair = self.messages.meet(box, sender)
                if pair is not None:
                    break
            if pair is None:
                break
            done.append(self._hand_over(*pair))
            queues = self.messages.boxes.get(box)
        return done

    def _take_from_any(self, box: Hashable) -> list[RankCall]:
        """Match a receive from any source with the message of the lowest rank."""
        if box not in self.messages.boxes:
            return []
        choices = self.messages.takes_of(box)
        if not choices:
            return []
        sender = min(self.items[choice.send].rank for choice in choices)
        return [self._hand_over(*self.messages.take(box, sender))]

    def match_any_source(self) -> list[RankCall]:
        """When no rank can run: match a receive from any source that has a choice of messages.

        Receives from any source are postponed until then, so that which message they take does not
        depend on the speed of the ranks. The receive of the lowest rank goes first, and takes the
        message of the lowest sender.
        """
        receives: dict[Hashable, int] = {}
        for box in self.messages.boxes:
            choices = self.messages.takes_of(box)
            if choices:
                receives[box] = choices[0].receive
        if not receives:
            return []
        first = min(receives, key=lambda box: (self.items[receives[box]].rank, receives[box]))
        return [*self._take_from_any(first), *self._match_all_senders(first)]

    def _hand_over(self, send_item: int, receive_item: int) -> RankCall:
        send = self.items[send_item]
        receive = self.items[receive_item]
        receive.results = [[send.contribution.payloads[0]]]
        receive.source = send.rank
        receive.matched_send = send
        self.matches += 1
        receive.match_number = send.match_number = self.matches
        return receive

    # --- collectives ---
    def _post_collective(self, call: RankCall) -> list[RankCall]:
        group = call.group
        position = group.counts.get((call.device, call.rank), 0)
        group.counts[call.device, call.rank] = position + 1
        key = (call.device, position)
        collective = group.collectives.setdefault(key, CollectiveInstance())
        call.collective = collective
        collective.arrived[group.group_rank(call.rank)] = call
        if len(collective.arrived) == len(group.ranks):
            self.matches += 1
            for member_call in collective.arrived.values():
                member_call.match_number = self.matches
        done = self._completed_by(collective, call)
        for one in done:
            self._complete(one)
        if collective.completed == len(group.ranks):
            del group.collectives[key]
        return done

    def _completed_by(self, collective: CollectiveInstance, call: RankCall) -> list[RankCall]:
        """The calls that are done now that ``call`` has arrived."""
        arrived = collective.arrived
        size = len(call.group.ranks)
        has_root = OPERATIONS[call.op].root_field is not None
        if not has_root and all(other.op == call.op for other in arrived.values()):
            # Every member needs every other, so one comparison with each suffices.
            if len(arrived) < size:
                return []
            others = [other for other in arrived.values() if other is not call]
            if not all(calls_agree(call, other) for other in others):
                return []
            return [arrived[group_rank] for group_rank in range(size)]
        open_calls = [(k, other) for k, other in sorted(arrived.items()) if not other.done]
        return [other for k, other in open_calls if self._can_complete(other, k)]

    def _can_complete(self, call: RankCall, group_rank: int) -> bool:
        """Whether all members that the call's result needs have arrived, with calls that agree."""
        group = call.group
        arrived = call.collective.arrived if call.collective else {}
        size = len(group.ranks)
        needed = OPERATIONS[call.op].takes_from(size, group.root_of(call), group_rank)
        members = range(size) if needed is None else needed
        return all(k in arrived and calls_agree(call, arrived[k]) for k in members)

    def _complete(self, call: RankCall) -> None:
        collective = call.collective
        group = call.group
        assert collective is not None
        size = len(group.ranks)
        group_rank = group.group_rank(call.rank)
        is_shared = call.op.startswith("all_reduce")
        key: Hashable = _SHARED_RESULT if is_shared else (group_rank,)
        if key not in collective.results:
            # None for members that the result does not depend on and that have not arrived.
            contributions: list[Any] = [None] * size
            for k, member_call in collective.arrived.items():
                contributions[k] = member_call.contribution
            collective.results[key] = self.executor.outputs(
                call.op, contributions, group_rank, group.root_of(call)
            )
        call.results = collective.results[key]
        collective.completed += 1
        collective.pending_reads += uses_shared_memory(call.results)
        self._free_if_unused(collective, size)

    # --- memory ---
    def release(self, call: RankCall) -> None:
        """A rank has copied its result, or never will: free what it no longer needs."""
        if call.matched_send is not None:
            self._free_payloads(call.matched_send)
        elif call.collective is not None and call.done and uses_shared_memory(call.results or []):
            call.collective.pending_reads -= 1
            self._free_if_unused(call.collective, len(call.group.ranks))

    def forget(self, call: RankCall) -> None:
        """Drop a result that has been sent to its rank, unless it lies in shared memory.

        A result in shared memory is kept until the rank reports that it has copied it.
        """
        if uses_shared_memory(call.results or []):
            return
        if call.matched_send is not None:
            call.matched_send.contribution.payloads = ()
            call.matched_send = None
        call.results = []

    def _free_if_unused(self, collective: CollectiveInstance, size: int) -> None:
        if collective.completed < size or collective.pending_reads:
            return
        for call in list(collective.arrived.values()):
            self._free_payloads(call)
            call.contribution.payloads = ()
            call.collective = None

    def _free_payloads(self, call: RankCall) -> None:
        for payload in call.contribution.payloads:
            if not isinstance(payload, bytes):
                free_payload(self.regions, payload)


def uses_shared_memory(outputs: Sequence[Sequence[Payload]]) -> bool:
    """Whether part of a result lies in shared memory."""
    for output in outputs:
        for payload in output:
            if not isinstance(payload, bytes):
                return True
    return False


def calls_agree(one: RankCall, other: RankCall) -> bool:
    """Whether two calls can be part of the same collective, by the operation's table entry."""
    if one.op != other.op or one.peer != other.peer:
        return False
    operation = OPERATIONS[one.op]
    mine = one.contribution
    theirs = other.contribution
    if operation.gives == "none":
        return True
    if mine.dtype != theirs.dtype:
        return False
    if mine.extra.get("reduce_op") != theirs.extra.get("reduce_op"):
        return False
    is_rooted_move = operation.root_field is not None and not operation.reduces
    if one.op in _UNEVEN_COLLECTIVES or is_rooted_move:
        return True
    return _element_counts(mine) == _element_counts(theirs)


def _element_counts(contribution: CallContribution) -> list[int]:
    return [prod(shape) for shape in contribution.input_shapes]
