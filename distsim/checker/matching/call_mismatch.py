"""What met and does not fit, after a pass: collectives whose members differ, messages that are not
what their receive expects.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence

from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout, joins_sequence
from distsim.common.records import dataclass
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CodeCall
from distsim.program.model import Program


@dataclass(frozen=True, slots=True)
class CallMismatch:
    """Calls that met and differ: a collective's members in group order, or sender and receiver.

    ``sequence`` is the collective's sequence (-1: a message), ``number`` its number there.
    ``calls`` are (rank, position, part). ``aspects`` maps what differs (op, numel, dtype,
    reduce_op, root, ranks, splits) to each call's value, in the order of ``calls``. ``ranks`` are
    all who belong to it. ``order``: the members make the same calls in another order. ``minority``:
    those who differ from a majority. ``note`` says more of a pair that does not fit. ``later``: how
    many further calls of the sequence differ as well.
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


def uneven_all_to_alls(layout: ChannelLayout, where: CallIndex) -> set[tuple[int, int]]:
    """(sequence, n) of all_to_all calls with uneven parts: their signatures agree, their splits may
    not.
    """
    found: set[tuple[int, int]] = set()
    program = layout.program
    for code in program.codes:
        uneven = {
            id(c)
            for c in code.distinct_calls()
            if joins_sequence(c)
            and OPERATIONS[c.op].pairwise
            and _has_uneven_splits(program, code.ranks[0], c)
        }
        if not uneven:
            continue
        slots = {
            layout.slot(program.code_of[code.ranks[0]], c) for c in code.calls if id(c) in uneven
        }
        for rank in code.ranks:
            for sequence in sorted(
                {layout.sequence_of[layout.member[rank][slot]] for slot in slots}
            ):
                found |= {
                    (sequence, n)
                    for n, p in enumerate(where.joins(rank, sequence))
                    if id(code.calls[p]) in uneven
                }
    return found


def _has_uneven_splits(program: Program, rank: int, call: CodeCall) -> bool:
    if call.invalid is not None:
        return True
    return "numel" not in OPERATIONS[call.op].agreement(
        program.resolve(rank, call)
    ) or not isinstance(call.signature, int)


def sequence_mismatch(
    layout: ChannelLayout, where: CallIndex, sequence: int, n: int, ranks: Sequence[int]
) -> CallMismatch | None:
    """What differs among the ranks that came to the n-th call of a sequence (in group order); None
    where nothing does.
    """
    program, members = layout.program, layout.sequence_ranks[sequence]
    came = [(rank, where.joins(rank, sequence)[n]) for rank in ranks]
    whole = [where.signatures(rank, sequence) for rank in members]
    here = dict(zip(members, whole, strict=True))
    said: dict[int, Mapping[str, Hashable]] = {}  # equal signatures agree in all
    for rank, p in came:
        if here[rank][n] not in said:
            call = program.call(rank, p)
            said[here[rank][n]] = OPERATIONS[call.op].agreement(call)
    agreed = [said[here[rank][n]] for rank in ranks]
    aspects = {
        name: tuple(a.get(name) for a in agreed)
        for name in dict.fromkeys(k for a in agreed for k in a)
    }
    aspects = {name: values for name, values in aspects.items() if len(set(values)) > 1}
    note, row = "", OPERATIONS[program.code_call(*came[0]).op]
    calls = (
        [program.call(rank, p) for rank, p in came]
        if row.pairwise or row.coalesces is not None
        else []
    )
    if row.pairwise and not aspects.keys() - {"numel", "splits"}:
        crossed = row.mismatched_pairs(calls)
        aspects = {k: v for k, v in aspects.items() if k not in ("numel", "splits")}
        if crossed:
            aspects["splits"], note = tuple(_split_sizes(c) for c in calls), crossed[0][2]
    if row.coalesces is not None and "numel" in aspects and "op" not in aspects:
        note = next((why for _, _, why in row.mismatched_pairs(calls)), "")
    if not aspects:
        return None
    kinds = list({id(signatures): signatures for signatures in whole}.values())
    order = all(sorted(s) == sorted(whole[0]) for s in kinds) and any(s != whole[0] for s in kinds)
    order = order and not (row.pairwise and note)
    met = tuple((rank, p, -1) for rank, p in came)
    return CallMismatch(
        sequence, n, met, aspects, members, order, _minority_ranks(members, whole, n), note
    )


def _split_sizes(call: ResolvedCall) -> Hashable:
    return (call.input_splits, call.output_splits)


def _minority_ranks(members: tuple[int, ...], whole: list[list[int]], n: int) -> tuple[int, ...]:
    """The ranks whose n-th call differs from that of more than half of the members, as their
    programs have it.
    """
    said = [
        (rank, signatures[n])
        for rank, signatures in zip(members, whole, strict=True)
        if n < len(signatures)
    ]
    common, times = Counter(signature for _, signature in said).most_common(1)[0]
    return (
        tuple(rank for rank, signature in said if signature != common)
        if 2 * times > len(said)
        else ()
    )


# --- messages ---
def message_mismatch(
    program: Program,
    k: int,
    sender: tuple[int, int, int],
    receiver: tuple[int, int, int],
    later: int,
) -> CallMismatch:
    """A message and its receive, each as (rank, position, part), that met as number k of their kind
    and differ.
    """
    said = [
        OPERATIONS[c.op].agreement(c)
        for c in (part_call(program, *sender), part_call(program, *receiver))
    ]
    aspects = {
        name: (said[0].get(name), said[1].get(name))
        for name in said[0]
        if said[0].get(name) != said[1].get(name)
    }
    return CallMismatch(
        -1, k, (sender, receiver), aspects, tuple(sorted((sender[0], receiver[0]))), later=later
    )


def part_call(program: Program, rank: int, position: int, part: int) -> ResolvedCall:
    """The resolved call at a position, or one part of the batch there."""
    call = program.call(rank, position)
    return call.parts[part] if part >= 0 and call.parts else call
