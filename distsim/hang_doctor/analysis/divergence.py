"""Where ranks diverge: mismatched calls, and ranks that make a call too many or too few.

Two questions are answered separately. *Mismatches*: do the calls with one number on one group have
the same operation, size and dtype? *Divergences*: is the sequence of a rank's calls that of the
other ranks with some calls inserted or removed? The second question names the call that is wrong,
where the first only finds a later symptom. It needs the source lines of the calls, because without
them most programs consist of one repeated operation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

from distsim.hang_doctor.analysis.message_pairs import matching_message
from distsim.hang_doctor.analysis.stack_position import user_frame
from distsim.hang_doctor.analysis.wait_state import JobWaitState
from distsim.hang_doctor.model.evidence_records import UNKNOWN_NUMBER, EvidenceCall
from distsim.hang_doctor.model.operation_names import OPS_OF_EQUAL_INPUT, OPS_OF_EQUAL_OUTPUT

#: The largest number of inserted or removed calls that is tried.
_MAX_SHIFT = 16

#: Number of a collective -> rank -> its call.
CallsByNumber = dict[int, dict[int, EvidenceCall]]


# --- mismatches ---


class MismatchSide(NamedTuple):
    """Ranks that make the same call. ``call`` is one of their calls, as an example."""

    ranks: tuple[int, ...]
    text: str
    call: EvidenceCall


class RecordedMismatch(NamedTuple):
    """A collective that its members call differently. The largest side comes first.

    ``what``: kind, size or dtype.
    """

    group: str
    number: int
    what: str
    sides: tuple[MismatchSide, ...]

    @property
    def minority(self) -> tuple[int, ...]:
        """The ranks that differ from a clear majority; empty if there is none.

        A clear majority is at least two ranks, and at least two thirds of those seen.
        """
        total = sum(len(side.ranks) for side in self.sides)
        majority = len(self.sides[0].ranks)
        if majority < 2 or majority * 3 < total * 2:
            return ()
        return tuple(sorted(rank for side in self.sides[1:] for rank in side.ranks))


def _agreed_elements(call: EvidenceCall) -> int:
    """The element count that all members must agree on; UNKNOWN_NUMBER if unknown or free."""
    if call.op in OPS_OF_EQUAL_INPUT:
        return call.elements_in
    if call.op in OPS_OF_EQUAL_OUTPUT:
        return call.elements_out
    return UNKNOWN_NUMBER


def _kind_text(call: EvidenceCall) -> str:
    return call.op


def _size_text(call: EvidenceCall) -> str:
    size = _agreed_elements(call)
    if size < 0 or call.op == "barrier":
        return ""
    return "1 element" if size == 1 else f"{size:,} elements"


def _dtype_text(call: EvidenceCall) -> str:
    return call.dtype


class _Aspect(NamedTuple):
    """Something that the members of a call must agree on. An empty text means unknown."""

    name: str
    text_of: Callable[[EvidenceCall], str]


#: The most serious first, because only the first difference of a call is reported.
_COMPARED_ASPECTS = (
    _Aspect("kind", _kind_text),
    _Aspect("size", _size_text),
    _Aspect("dtype", _dtype_text),
)


def _calls_by_number(job: JobWaitState, group: str) -> CallsByNumber:
    """The collectives on a group, except those of ranks whose files contradict each other."""
    found: CallsByNumber = {}
    for rank, records in job.evidence.ranks.items():
        if rank in job.evidence.disputed_ranks:
            continue
        for call in records.calls:
            is_numbered = call.number >= 0 and not call.p2p
            if call.group == group and is_numbered and call.op:
                found.setdefault(call.number, {})[rank] = call
    return found


def first_mismatch(job: JobWaitState, group: str) -> RecordedMismatch | None:
    """The first collective on a group whose members do not make the same call."""
    for number, calls in sorted(_calls_by_number(job, group).items()):
        if len(calls) < 2:
            continue
        for aspect in _COMPARED_ASPECTS:
            if len(set(map(aspect.text_of, calls.values()))) == 1:
                continue
            sides = _sides(calls, aspect)
            if len(sides) > 1:
                return RecordedMismatch(group, number, aspect.name, sides)
    return None


def _sides(calls: Mapping[int, EvidenceCall], aspect: _Aspect) -> tuple[MismatchSide, ...]:
    """The ranks by what they say about an aspect, the largest side first."""
    # The dtype of a barrier is the library's choice, not the user's.
    if aspect.name == "dtype" and any(call.op == "barrier" for call in calls.values()):
        return ()
    ranks_by_text: dict[str, list[int]] = {}
    for rank, call in sorted(calls.items()):
        text = aspect.text_of(call)
        if text:
            ranks_by_text.setdefault(text, []).append(rank)
    sides = [
        MismatchSide(tuple(ranks), text, calls[ranks[0]]) for text, ranks in ranks_by_text.items()
    ]
    return tuple(sorted(sides, key=lambda side: (-len(side.ranks), side.ranks)))


def mismatched_message(job: JobWaitState) -> tuple[EvidenceCall, EvidenceCall] | None:
    """The first open send whose matching receive has another size or dtype, with that receive."""
    for records in job.evidence.ranks.values():
        for send in records.calls:
            if not send.p2p or send.op != "send" or send.state != "waiting":
                continue
            recv = matching_message(job, send)
            if recv is not None and _differ(send, recv):
                return send, recv
    return None


def _differ(send: EvidenceCall, recv: EvidenceCall) -> bool:
    sent = send.elements_in
    received = max(recv.elements_out, recv.elements_in)
    if sent >= 0 and received >= 0 and sent != received:
        return True
    return bool(send.dtype and recv.dtype) and send.dtype != recv.dtype


# --- divergences ---


class CallSignature(NamedTuple):
    """What identifies a call when the sequences of two ranks are compared."""

    op: str
    elements: int
    place: str

    def is_same_call_elsewhere(self, other: CallSignature) -> bool:
        """Whether both are the same call, perhaps at different source lines."""
        return (self.op, self.elements) == (other.op, other.elements)


#: The calls of one rank, or those on which most ranks agree, by number.
CallSequence = dict[int, CallSignature]


class RankDivergence(NamedTuple):
    """From call ``number`` on, the calls of a rank are shifted against those of the others.

    ``extra``: the rank makes ``call_count`` calls that the others do not make; otherwise it omits
    ``call_count`` calls that the others make. ``call`` is the first of those calls.
    """

    rank: int
    group: str
    number: int
    call_count: int
    extra: bool
    call: EvidenceCall


def rank_divergences(job: JobWaitState, group: str) -> list[RankDivergence]:
    """Ranks whose calls on a group continue like those of the others after a shift.

    Calls are compared by operation, size and source line. A branch (other lines, but the same
    calls) is no divergence.
    """
    calls = _calls_by_number(job, group)
    ranks = sorted({rank for calls_of_number in calls.values() for rank in calls_of_number})
    if len(ranks) < 2:
        return []
    sequences = {rank: _sequence(calls, rank) for rank in ranks}
    if not any(_has_places(sequence) for sequence in sequences.values()):
        return []
    votes = {
        number: Counter(sequences[rank][number] for rank in calls_of_number)
        for number, calls_of_number in sorted(calls.items())
    }
    if all(len(signatures) == 1 for signatures in votes.values()):
        return []

    found = []
    for rank in ranks:
        reference = _agreed_sequence_of_others(sequences[rank], votes)
        divergence = _divergence_of(rank, sequences[rank], reference, calls, group)
        if divergence is not None:
            found.append(divergence)
    return found


def _sequence(calls: CallsByNumber, rank: int) -> CallSequence:
    return {
        number: _signature(calls_of_number[rank])
        for number, calls_of_number in calls.items()
        if rank in calls_of_number
    }


def _signature(call: EvidenceCall) -> CallSignature:
    frame = user_frame(call.frames)
    place = frame.place if frame is not None and frame.line else ""
    return CallSignature(call.op, _agreed_elements(call), place)


def _has_places(sequence: CallSequence) -> bool:
    return any(signature.place for signature in sequence.values())


def _agreed_sequence_of_others(
    own: CallSequence, votes: Mapping[int, Counter[CallSignature]]
) -> CallSequence:
    """The call that all other ranks make at each number, where they all make the same."""
    agreed: CallSequence = {}
    for number, signatures in votes.items():
        # The rank's own vote counts only if another rank makes the same call.
        others = [
            signature
            for signature, count in signatures.items()
            if signature != own.get(number) or count > 1
        ]
        if len(others) == 1:
            agreed[number] = others[0]
    return agreed


def _divergence_of(
    rank: int, own: CallSequence, reference: CallSequence, calls: CallsByNumber, group: str
) -> RankDivergence | None:
    """The smallest shift that explains why the rank differs from the reference."""
    common = sorted(number for number in own if number in reference)
    start = next((number for number in common if own[number] != reference[number]), None)
    if start is None or _is_branch(own, reference, common):
        return None
    for shift in range(1, _MAX_SHIFT + 1):
        if _has_insertion(own, reference, start, shift):
            return RankDivergence(rank, group, start, shift, True, calls[start][rank])
        if _has_insertion(reference, own, start, shift):
            example = next(call for other, call in calls[start].items() if other != rank)
            return RankDivergence(rank, group, start, shift, False, example)
    return None


def _is_branch(own: CallSequence, reference: CallSequence, common: list[int]) -> bool:
    """Whether the rank makes the same calls at other lines, and then agrees again without shift."""
    different = [number for number in common if own[number] != reference[number]]
    if different[-1] == common[-1]:
        return False
    return all(own[number].is_same_call_elsewhere(reference[number]) for number in different)


def _has_insertion(longer: CallSequence, shorter: CallSequence, start: int, count: int) -> bool:
    """Whether ``longer`` is ``shorter`` with ``count`` calls inserted at ``start``."""
    return _agree_after_shift(longer, shorter, start, count) and _inserted_calls_are_new(
        longer, shorter, start, count
    )


def _agree_after_shift(longer: CallSequence, shorter: CallSequence, start: int, shift: int) -> bool:
    """Whether the calls after the insertion agree; at least one call must be there to show it."""
    common = [number for number in shorter if number >= start and number + shift in longer]
    if not common:
        return False
    return all(longer[number + shift] == shorter[number] for number in common)


def _inserted_calls_are_new(
    longer: CallSequence, shorter: CallSequence, start: int, shift: int
) -> bool:
    """Whether the inserted calls differ from the call that ``shorter`` makes at that point.

    Otherwise one more iteration of a loop would look like a shift.
    """
    inserted = range(start, start + shift)
    return all(longer.get(number) != shorter.get(start) for number in inserted)
