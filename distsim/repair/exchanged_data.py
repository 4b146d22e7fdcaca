"""Which data a program exchanges, and how far a changed program departs from it.

Key idea: a *contribution* is a message or a rank's share of a collective, with its tensors. Each
tensor has a version: the number of local writes by this rank before the call, in program order. A
receive changes no version, unlike in `distsim.values.lineage`. A changed program loses a
contribution if it no longer makes it, or makes it with another version of the tensor. Tags and the
group of a message are no part of a contribution, because a repair may change them without changing
the data.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import chain
from typing import NamedTuple

from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program
from distsim.repair.filled_tensors import Root

_SENDING_OP = {"send": "send", "isend": "send", "recv": "recv", "irecv": "recv"}
#: Calls after which a rank makes no other.
_ENDS = ("exit", "fail")
#: Accesses of another rank's memory: they carry data without a call there.
_REMOTE_OPS = ("put", "get")


#: What `ddp` exchanges about its own buckets, and its gradients, which it cuts into buckets.
_BUCKET_PLAN = ("ddp_order", "ddp_sizes", "ddp_used")
_BUCKETS = ("ddp_initial_", "ddp_bucket_")


class Contribution(NamedTuple):
    """A message or a share of a collective.

    ``partners``: the peer, or the members of the group. ``tensors``: (name, elements, own writes
    before the call) of each input; of a receive, (name, elements, 0) of each output.
    ``carries_data``: False for a receive, and for ranks that only receive what the root gives.
    """

    rank: int
    op: str
    partners: tuple[int, ...]
    root: int | None
    reduce_op: str | None
    tensors: tuple[tuple[str, int, int], ...]
    carries_data: bool = True

    @property
    def exchange(self) -> tuple[object, ...]:
        """The same for all ranks that exchange these tensors."""
        names = tuple(name for name, _, _ in self.tensors)
        return self.op, self.partners, names

    @property
    def rooted(self) -> tuple[object, ...]:
        """The same for all ranks that name this root."""
        return self.op, self.partners, self.root


class _MessageCall(NamedTuple):
    """A send (``op``) from ``source`` to ``target``, or the receive of it."""

    op: str
    source: int
    target: int

    @property
    def counterpart(self) -> _MessageCall:
        return self._replace(op="recv" if self.op == "send" else "send")


def _message_calls(contributions: Iterable[Contribution]) -> Iterator[_MessageCall]:
    for each in contributions:
        if each.op in _SENDING_OP.values() and each.partners:
            peer = each.partners[0]
            ends = (each.rank, peer) if each.op == "send" else (peer, each.rank)
            yield _MessageCall(each.op, *ends)


class DataLoss(NamedTuple):
    """How far a changed program departs from the original one; less is better.

    ``lost``: contributions of the correct ranks that no longer arrive. ``changed_ranks``: correct
    ranks whose calls differ. ``lost_by_outliers``: lost contributions of the other ranks.
    ``tensor_sets``: sets of tensors that ranks exchange; fewer, if all ranks name the same tensors.
    ``fewer_calls``: messages and collectives that ranks make less often than before. ``added``:
    tensors that ranks give and did not give before. ``changed_reductions``: calls of the correct
    ranks that now have another reduction. ``replaced``: lost contributions in whose place the rank
    makes a corrected one.
    """

    lost: int
    changed_ranks: int
    lost_by_outliers: int
    tensor_sets: int = 0
    fewer_calls: int = 0
    added: int = 0
    changed_reductions: int = 0
    replaced: int = 0

    @property
    def ended(self) -> int:
        """Lost contributions in whose place the rank makes no other one."""
        return self.lost - self.replaced


class ExchangedData:
    """The contributions of all ranks of a program, in program order."""

    def __init__(
        self,
        program: Program,
        empty_roots: Collection[Root] = (),
        substitutes: Mapping[str, str] | None = None,
    ) -> None:
        """``empty_roots``: roots that give no data. ``substitutes``: names for other tensors."""
        self.world_size = program.world_size
        self.members_of = {group.name: tuple(group.ranks) for group in program.groups}
        self.by_rank = {
            rank: [
                _renamed(each, substitutes or {})
                if (each.op, each.partners, each.root) not in empty_roots
                else each._replace(carries_data=False)
                for each in _contributions(program, rank)
            ]
            for rank in program.present
        }

    def loss_in(self, changed: ExchangedData, outliers: frozenset[int]) -> DataLoss:
        """What ``changed`` loses. ``outliers``: the ranks that depart from the majority."""
        lost = lost_by_outliers = changed_ranks = fewer_calls = added = reductions = replaced = 0
        kept_exchanges = {each.exchange for each in changed._all()}
        calls = Counter(chain.from_iterable(map(_message_calls, self.by_rank.values())))
        corrected = self._corrected_groups(changed)
        for rank, made in self.by_rank.items():
            before = _in_groups(made, corrected)
            after = changed.by_rank.get(rank, [])
            missing, additional = _without_changed_reductions(before, after)
            fewer_calls += max(0, len(before) - len(after))
            redirected = _redirected_sends(missing, additional, calls)
            redirected += _reordered_sends(missing, additional)
            redirected += self._regrouped(rank, missing, additional)
            added += sum(n for each, n in additional.items() if each.carries_data and each.tensors)
            added -= redirected
            replaced += self._replaced(rank, missing, additional, rank in outliers)
            if rank in outliers:
                # A collective that only outliers make, such as saving on rank 0, needs the other
                # ranks. If it disappears altogether, its data are lost.
                gone = [each for each in missing if each.exchange not in kept_exchanges]
                dropped = [each for each in gone if _count_like(each, after, before) < 0]
                lost += sum(each.op not in _SENDING_OP.values() for each in dropped)
                lost += self._lost_of_root(rank, missing, additional, dropped)
                lost_by_outliers += missing.total()
                continue
            lost += sum(count for each, count in missing.items() if each.carries_data)
            lost -= redirected
            lost += max(0, _receive_count(before) - _receive_count(after))
            changed_ranks += before != after
            reductions += (Counter(before) - Counter(after)).total() - missing.total()
        tensor_sets = len(kept_exchanges)
        return DataLoss(
            lost,
            changed_ranks,
            lost_by_outliers,
            tensor_sets,
            fewer_calls,
            added,
            reductions,
            min(lost, replaced),
        )

    def ranks_naming(self, roots: Collection[Root]) -> set[int]:
        """The ranks that make a collective with one of these roots."""
        return {each.rank for each in self._all() if (each.op, each.partners, each.root) in roots}

    def _regrouped(
        self, rank: int, missing: Counter[Contribution], additional: Counter[Contribution]
    ) -> int:
        """How many missing shares of collectives the rank now gives in another group.

        Only of collectives that not all members of the former group call: one of these ranks may
        have named the wrong group.
        """
        regrouped = 0
        given = Counter((each.op, each.tensors) for each in additional.elements())
        for each, count in missing.items():
            if not self._is_incomplete(rank, each):
                continue
            key = each.op, each.tensors
            moved = min(count, given[key])
            given[key] -= moved
            regrouped += moved if each.carries_data and each.tensors else 0
        return regrouped

    def _replaced(
        self,
        rank: int,
        missing: Counter[Contribution],
        additional: Counter[Contribution],
        is_outlier: bool,
    ) -> int:
        """How many missing contributions the rank now makes in a corrected form.

        The tensors have other sizes, or a receive is now a send. An outlier makes the collective of
        the other members in place of its own.
        """
        of_others = {each.exchange for each in self._all() if each.rank != rank}
        unmatched = list(additional.elements())
        replaced = 0
        lost = (each for each in missing.elements() if each.carries_data or each.op == "recv")
        for each in lost:
            for other in unmatched:
                is_resized = each.exchange == other.exchange and each.root == other.root
                is_turned = (each.op, other.op) == ("recv", "send")
                is_like_others = is_outlier and other.exchange in of_others and other.carries_data
                if each.partners == other.partners and (is_resized or is_turned or is_like_others):
                    unmatched.remove(other)
                    replaced += 1
                    break
        return replaced

    def _is_incomplete(self, rank: int, contribution: Contribution) -> bool:
        """Whether a rank makes a collective more often than another member of its group."""
        if contribution.op in _SENDING_OP.values():
            return False
        if rank not in contribution.partners:
            return True
        return any(
            _count_like(contribution, self.by_rank.get(member, []), self.by_rank[rank]) < 0
            for member in contribution.partners
        )

    def _lost_of_root(
        self,
        rank: int,
        missing: Counter[Contribution],
        additional: Counter[Contribution],
        counted: list[Contribution],
    ) -> int:
        """What a root no longer gives, although other ranks name it as the root.

        A root that now gives the tensor which the other ranks name gives what they expect.
        """
        of_others = [each for each in self._all() if each.rank != rank]
        expected = {each.exchange for each in of_others}
        corrected = {each.rooted for each in additional if each.exchange in expected}
        named = {each.rooted for each in of_others} - corrected
        lost = 0
        for each in missing:
            gives = each.root == rank and each.carries_data and each.reduce_op is None
            lost += gives and each.rooted in named and each not in counted
        return lost

    def lost_exchanges(
        self, changed: ExchangedData, ended_at: dict[int, int], outliers: frozenset[int]
    ) -> int:
        """How many contributions are lost that the correct ranks made before the failure.

        ``ended_at``: the number of contributions that each rank completed. A message counts only if
        both sides made their call.
        """
        corrected = self._corrected_groups(changed)
        made = {
            rank: _in_groups(before[: ended_at.get(rank, 0)], corrected)
            for rank, before in self.by_rank.items()
        }
        calls = Counter(chain.from_iterable(map(_message_calls, made.values())))
        lost = 0
        for rank, completed in made.items():
            if rank in outliers:
                continue
            after = map(_without_buffer, changed.by_rank.get(rank, []))
            missing = Counter(map(_without_buffer, completed)) - Counter(after)
            # A receive from any source may name its sender.
            lost += sum(count for each, count in missing.items() if each.partners)
            missing_messages = Counter(_message_calls(missing.elements()))
            for message, count in missing_messages.items():
                unmatched = calls[message] - calls[message.counterpart]
                lost -= min(count, max(0, unmatched))
        return lost

    def drops_collective(self, changed: ExchangedData) -> bool:
        """Whether a collective with data disappears on all of its ranks.

        It is a reduction that several ranks make, or any other that most members of the group make.
        A group keeps its collectives if a corrected list of members makes them under its name.
        """
        kept = changed._collectives().keys()
        corrected = self._corrected_groups(changed)
        return any(
            (op, corrected.get(members, members)) not in kept
            for op, members in self._shared_collectives()
        )

    def _corrected_groups(self, changed: ExchangedData) -> dict[tuple[int, ...], tuple[int, ...]]:
        """By the members of a group, its members in ``changed``, if those differ."""
        corrected = {}
        for name, members in self.members_of.items():
            after = changed.members_of.get(name, members)
            if after != members and members not in changed.members_of.values():
                corrected[members] = after
        return corrected

    def _shared_collectives(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        reductions = {each.op for each in self._all() if each.reduce_op is not None}
        for (op, members), ranks in self._collectives().items():
            least = 2 if op in reductions else len(members) // 2 + 1
            if len(ranks) >= least:
                yield op, members

    def _collectives(self) -> dict[tuple[str, tuple[int, ...]], set[int]]:
        found: dict[tuple[str, tuple[int, ...]], set[int]] = {}
        for each in self._all():
            if each.tensors and each.op not in (*_SENDING_OP.values(), *_REMOTE_OPS):
                found.setdefault((each.op, each.partners), set()).add(each.rank)
        return found

    def _all(self) -> Iterator[Contribution]:
        for contributions in self.by_rank.values():
            yield from contributions


def _in_groups(
    contributions: list[Contribution], corrected: dict[tuple[int, ...], tuple[int, ...]]
) -> list[Contribution]:
    """The contributions, each in the group of the corrected members."""
    return [
        each
        if each.op in _SENDING_OP.values()
        else each._replace(partners=corrected.get(each.partners, each.partners))
        for each in contributions
    ]


def _without_buffer(contribution: Contribution) -> Contribution:
    """A receive without its tensor: the data arrive in another one as well."""
    return contribution._replace(tensors=()) if contribution.op == "recv" else contribution


def _without_changed_reductions(
    before: list[Contribution], after: list[Contribution]
) -> tuple[Counter[Contribution], Counter[Contribution]]:
    """The contributions that are missing, and those that are new.

    A call with another reduction is neither: the ranks give the same data.
    """
    missing = Counter(before) - Counter(after)
    additional = Counter(after) - Counter(before)
    return _without_same_data(missing, additional), _without_same_data(additional, missing)


def _without_same_data(
    contributions: Counter[Contribution], others: Counter[Contribution]
) -> Counter[Contribution]:
    """The contributions without those that differ from one of ``others`` only in the reduction.

    Each of ``others`` stands for one contribution.
    """
    unmatched = Counter(each._replace(reduce_op=None) for each in others.elements())
    remaining = Counter[Contribution]()
    for each in contributions.elements():
        key = each._replace(reduce_op=None)
        if unmatched[key]:
            unmatched[key] -= 1
        else:
            remaining[each] += 1
    return remaining


def _redirected_sends(
    missing: Counter[Contribution],
    additional: Counter[Contribution],
    calls: Counter[_MessageCall],
) -> int:
    """How many missing sends of a rank, which no rank received, now go to another rank."""
    redirected: Counter[tuple[tuple[str, int, int], ...]] = Counter()
    for each, count in missing.items():
        for message in _message_calls([each]):
            if message.op == "send" and calls[message] > calls[message.counterpart]:
                redirected[each.tensors] += count
    sent = Counter(each.tensors for each in additional.elements() if each.op == "send")
    return (redirected & sent).total()


def _reordered_sends(missing: Counter[Contribution], additional: Counter[Contribution]) -> int:
    """How many missing sends the rank makes before or after another write of their tensors.

    No message is lost. `data_flow` counts the reads that see another write.
    """

    def without_versions(contributions: Counter[Contribution]) -> Counter[Contribution]:
        found = Counter[Contribution]()
        for each, count in contributions.items():
            if each.op == "send":
                tensors = tuple((name, numel, 0) for name, numel, _ in each.tensors)
                found[each._replace(tensors=tensors)] += count
        return found

    return (without_versions(missing) & without_versions(additional)).total()


def _count_like(
    contribution: Contribution, after: list[Contribution], before: list[Contribution]
) -> int:
    """How many more calls of this operation with the same partners are made than before.

    A call with another tensor in its place is a change, no loss.
    """
    like = (contribution.op, contribution.partners)
    return sum((each.op, each.partners) == like for each in after) - sum(
        (each.op, each.partners) == like for each in before
    )


def _receive_count(contributions: list[Contribution]) -> int:
    return sum(each.op == "recv" for each in contributions)


def completed_contributions(program: Program, positions: dict[int, int]) -> dict[int, int]:
    """By rank, the number of contributions of the calls before a position."""
    found = {}
    for rank, end in positions.items():
        before = (call for position, call in program.calls_of(rank) if position < end)
        found[rank] = sum(_count(call) for call in before)
    return found


def outlier_ranks(program: Program) -> frozenset[int]:
    """The ranks whose collectives differ from those of most members, in some group.

    A group without a majority (more than half of its members make the same calls) has no outliers.
    """
    sequences: dict[tuple[int, ...], dict[int, list[object]]] = {}
    for rank in program.present:
        for position, call in program.calls_of(rank):
            if OPERATIONS[call.op].kind == "collective":
                of_group = sequences.setdefault(call.group.ranks, {})
                agreed = program.code_call(rank, position).signature
                row = program.row_of[rank]
                number = agreed if isinstance(agreed, int) else int(agreed[row])
                of_group.setdefault(rank, []).append((call.op, number))
    found: set[int] = set()
    for members, by_rank in sequences.items():
        found.update(_minority(members, by_rank))
    return frozenset() if len(found) == program.world_size else frozenset(found)


def _minority(members: Iterable[int], by_rank: dict[int, list[object]]) -> set[int]:
    calls = {rank: tuple(by_rank.get(rank, ())) for rank in members}
    common, count = Counter(calls.values()).most_common(1)[0]
    if 2 * count <= len(calls):
        return set()
    return {rank for rank, made in calls.items() if made != common}


def _contributions(program: Program, rank: int) -> Iterator[Contribution]:
    own_writes: Counter[tuple[str, int]] = Counter()
    for _, call in program.calls_of(rank):
        if call.op in _ENDS:
            return
        for part in call.parts or (call,):
            if _count(part):
                yield _contribution(part, own_writes)
        if OPERATIONS[call.op].kind not in ("collective", "p2p", "remote"):
            written = (*call.outputs, *call.writes, *call.adds)
            own_writes.update((buffer.name, buffer.index) for buffer in written)


def _renamed(contribution: Contribution, names: Mapping[str, str]) -> Contribution:
    """The contribution with other names for some of its tensors."""
    tensors = tuple(
        (names.get(name, name), numel, version) for name, numel, version in contribution.tensors
    )
    return contribution._replace(tensors=tensors) if names else contribution


def _count(call: ResolvedCall) -> int:
    """The number of contributions of a call."""
    if call.parts:
        return sum(_count(part) for part in call.parts)
    if any(buffer.name in _BUCKET_PLAN for buffer in call.inputs or call.outputs):
        return 0
    is_message = call.op in _SENDING_OP or call.op in _REMOTE_OPS
    return int(is_message or OPERATIONS[call.op].kind == "collective")


def _contribution(call: ResolvedCall, own_writes: Counter[tuple[str, int]]) -> Contribution:
    partners = call.group.ranks
    if call.op in _SENDING_OP or call.op in _REMOTE_OPS:
        partners = () if call.peer is None else (call.peer,)
    carried = call.inputs or call.outputs
    tensors = []
    for buffer in carried:
        reads = call.inputs and call.op not in ("recv", "irecv")
        version = own_writes[buffer.name, buffer.index] if reads else 0
        if buffer.name.startswith(_BUCKETS):
            # The buckets depend on the options of `ddp`, the gradients do not.
            tensors.append(("ddp_gradients", 0, 0))
            continue
        tensors.append((buffer.label, buffer.numel, version))
    op = _SENDING_OP.get(call.op, call.op)
    is_giver = call.root == call.rank and bool(call.inputs)
    only_receives = OPERATIONS[call.op].gives == "root" and not is_giver
    return Contribution(
        call.rank,
        op,
        partners,
        call.root,
        call.reduce_op,
        tuple(tensors),
        op != "recv" and not only_receives,
    )


__all__ = [
    "Contribution",
    "DataLoss",
    "ExchangedData",
    "completed_contributions",
    "outlier_ranks",
]
