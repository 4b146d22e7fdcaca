"""Compare calls that meet: the members of a collective, or a message and its receive.

The caller decides which calls meet; this module only says how they differ. It has no words for
reports, except the notes of operations whose pairs mismatch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from distsim.checker.matching.call_index import CallIndex, part_call
from distsim.checker.matching.channel_layout import WHOLE_CALL, ChannelLayout, joins_sequence
from distsim.common.records import dataclass
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall, SharedCode
from distsim.program.model import Program

#: `CallMismatch.sequence` of a message.
NO_SEQUENCE = -1

_Aspects = dict[str, tuple[Hashable, ...]]
#: Aspects that may differ from rank to rank in an all_to_all.
_SIZES = frozenset({"numel", "splits"})


@dataclass(frozen=True, slots=True)
class CallMismatch:
    """Calls that met and differ: a collective's members in group order, or sender and receiver.

    ``sequence`` is the collective's sequence (`NO_SEQUENCE` for a message), ``number`` its number
    there. ``calls`` are (rank, position, part). ``aspects`` maps what differs (op, numel, dtype,
    reduce_op, root, ranks, splits) to the value of each call, in the order of ``calls``. ``ranks``
    are all ranks concerned. ``order``: the members make the same calls in another order.
    ``minority``: the ranks that differ from a majority. ``note`` explains a pair that mismatches.
    ``later``: how many further calls of the sequence differ as well.
    """

    sequence: int
    number: int
    calls: tuple[tuple[int, int, int], ...]
    aspects: Mapping[str, tuple[Hashable, ...]]
    ranks: tuple[int, ...]
    order: bool = False
    minority: tuple[int, ...] = ()
    note: str = ""
    later: int = 0

    @property
    def is_collective(self) -> bool:
        """Whether the calls are collectives, not a message and its receive."""
        return self.sequence != NO_SEQUENCE


# --- collectives ---
def uneven_all_to_alls(layout: ChannelLayout, call_index: CallIndex) -> set[tuple[int, int]]:
    """(sequence, number) of all_to_all calls with uneven parts.

    Their signatures agree even if their splits do not, so they need a closer look.
    """
    found: set[tuple[int, int]] = set()
    for code in layout.program.codes:
        uneven = _uneven_calls(layout.program, code)
        if not uneven:
            continue
        code_number = layout.program.code_of[code.ranks[0]]
        slots = {layout.slot(code_number, call) for call in code.calls if id(call) in uneven}
        for rank in code.ranks:
            for sequence in {layout.sequence_of[layout.member[rank][slot]] for slot in slots}:
                for number, position in enumerate(call_index.joins(rank, sequence)):
                    if id(code.calls[position]) in uneven:
                        found.add((sequence, number))
    return found


def _uneven_calls(program: Program, code: SharedCode) -> set[int]:
    """The ids of a code's calls with uneven splits."""
    pairwise = [
        call
        for call in code.distinct_calls()
        if joins_sequence(call) and OPERATIONS[call.op].pairwise
    ]
    rank = code.ranks[0]
    return {id(call) for call in pairwise if _has_uneven_splits(program, rank, call)}


def _has_uneven_splits(program: Program, rank: int, call: CodeCall) -> bool:
    if call.invalid is not None or not isinstance(call.signature, int):
        return True
    return "numel" not in OPERATIONS[call.op].agreement(program.resolve(rank, call))


def sequence_mismatch(
    layout: ChannelLayout,
    call_index: CallIndex,
    sequence: int,
    number: int,
    ranks: Sequence[int],
) -> CallMismatch | None:
    """How the calls of one number on a sequence differ among the ranks that arrived, if they do.

    ``ranks`` are in group order.
    """
    program, members = layout.program, layout.sequence_ranks[sequence]
    calls = [(rank, call_index.joins(rank, sequence)[number]) for rank in ranks]
    signatures = {rank: call_index.signatures(rank, sequence) for rank in members}
    aspects = _differing_aspects(program, calls, [signatures[rank][number] for rank in ranks])
    note = ""
    operation = OPERATIONS[program.code_call(*calls[0]).op]
    if operation.pairwise:
        aspects, note = _pairwise_aspects(program, operation, calls, aspects)
    if operation.coalesces is not None and "numel" in aspects and "op" not in aspects:
        resolved = [program.call(*call) for call in calls]
        note = next((why for _, _, why in operation.mismatched_pairs(resolved)), "")
    if not aspects:
        return None
    is_other_order = not (operation.pairwise and note) and _is_other_order(
        list(signatures.values())
    )
    return CallMismatch(
        sequence,
        number,
        tuple((rank, position, WHOLE_CALL) for rank, position in calls),
        aspects,
        members,
        is_other_order,
        _minority_ranks(signatures, number),
        note,
    )


def _differing_aspects(
    program: Program, calls: list[tuple[int, int]], signatures: list[int]
) -> _Aspects:
    """The aspects in which calls, as (rank, position), differ, with the value of each call."""
    # Calls with equal signatures agree in all aspects, so one of them is resolved for all.
    agreements: dict[int, Mapping[str, Hashable]] = {}
    for (rank, position), signature in zip(calls, signatures, strict=True):
        if signature not in agreements:
            call = program.call(rank, position)
            agreements[signature] = OPERATIONS[call.op].agreement(call)
    by_call = [agreements[signature] for signature in signatures]
    names = dict.fromkeys(name for agreement in by_call for name in agreement)
    aspects = {name: tuple(agreement.get(name) for agreement in by_call) for name in names}
    return {name: values for name, values in aspects.items() if len(set(values)) > 1}


def _pairwise_aspects(
    program: Program, operation: type[Operation], calls: list[tuple[int, int]], aspects: _Aspects
) -> tuple[_Aspects, str]:
    """What differs in an all_to_all, and the note on the first pair that mismatches.

    Element counts and splits may differ from rank to rank, as long as what each rank sends to
    another is what that rank expects.
    """
    if aspects.keys() - _SIZES:
        return aspects, ""
    resolved = [program.call(rank, position) for rank, position in calls]
    pairs = operation.mismatched_pairs(resolved)
    aspects = {name: values for name, values in aspects.items() if name not in _SIZES}
    if not pairs:
        return aspects, ""
    aspects["splits"] = tuple(_split_sizes(call) for call in resolved)
    return aspects, pairs[0][2]


def _split_sizes(call: ResolvedCall) -> Hashable:
    return (call.input_splits, call.output_splits)


def _is_other_order(signatures: list[list[int]]) -> bool:
    """Whether all members make the same calls, and not all in the same order."""
    # Ranks share lists (`CallIndex.signatures`): sort each list once.
    distinct = list({id(one): one for one in signatures}.values())
    first = signatures[0]
    same_calls = all(sorted(one) == sorted(first) for one in distinct)
    return same_calls and any(one != first for one in distinct)


def _minority_ranks(signatures: Mapping[int, list[int]], number: int) -> tuple[int, ...]:
    """The ranks whose call of this number differs from that of more than half of the members.

    All calls of the ranks' programs count, whether they are reached or not.
    """
    calls = {rank: own[number] for rank, own in signatures.items() if number < len(own)}
    common, times = Counter(calls.values()).most_common(1)[0]
    if 2 * times <= len(calls):
        return ()
    return tuple(rank for rank, signature in calls.items() if signature != common)


# --- messages ---
def message_mismatch(
    program: Program,
    number: int,
    sender: tuple[int, int, int],
    receiver: tuple[int, int, int],
    later: int,
) -> CallMismatch:
    """The mismatch of a message and its receive, each as (rank, position, part).

    They met as number ``number`` of their channel.
    """
    send, receive = part_call(program, *sender), part_call(program, *receiver)
    sent = OPERATIONS[send.op].agreement(send)
    expected = OPERATIONS[receive.op].agreement(receive)
    aspects = {
        name: (value, expected.get(name))
        for name, value in sent.items()
        if value != expected.get(name)
    }
    ranks = tuple(sorted((sender[0], receiver[0])))
    return CallMismatch(NO_SEQUENCE, number, (sender, receiver), aspects, ranks, later=later)
