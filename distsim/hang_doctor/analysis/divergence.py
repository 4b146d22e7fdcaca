"""Where ranks part: calls of one number that do not fit each other, and the first call at which one
goes another way.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from distsim.hang_doctor.analysis.wait_graph import JobWaitState, matching_message
from distsim.hang_doctor.model.evidence_records import EvidenceCall
from distsim.hang_doctor.model.operation_names import OPS_OF_EQUAL_INPUT, OPS_OF_EQUAL_OUTPUT
from distsim.hang_doctor.readers.stacks import user_frame

#: By how many calls one rank's calls may be shifted against another's.
_MAX_SHIFT = 16


#: What a call is told by: operation, size and line.
CallSignature = tuple[str, int, str]


class MismatchSide(NamedTuple):
    """Ranks that do the same: what, and one call of theirs to show it."""

    ranks: tuple[int, ...]
    text: str
    call: EvidenceCall


class RecordedMismatch(NamedTuple):
    """A call that its members make differently. ``what``: kind, size or dtype. The largest party
    comes first.
    """

    group: str
    number: int
    what: str
    parties: tuple[MismatchSide, ...]

    @property
    def odd(self) -> tuple[int, ...]:
        """Who differs from a clear majority: two thirds or more of those seen, at least two ranks;
        else nobody.
        """
        total, first = sum(len(p.ranks) for p in self.parties), len(self.parties[0].ranks)
        if first < 2 or first * 3 < total * 2:
            return ()
        return tuple(sorted(r for p in self.parties[1:] for r in p.ranks))


class RankDivergence(NamedTuple):
    """One rank against the others: from call ``number`` on it is shifted. ``extra``: it makes these
    calls and they do not; else the other way round.
    """

    rank: int
    group: str
    number: int
    calls: int
    extra: bool
    call: EvidenceCall


def agreed_elements(call: EvidenceCall) -> int:
    """The elements that all members must agree on, -1 unknown or free."""
    if call.op in OPS_OF_EQUAL_INPUT:
        return call.elements_in
    return call.elements_out if call.op in OPS_OF_EQUAL_OUTPUT else -1


def calls_by_number(whole: JobWaitState, group: str) -> dict[int, dict[int, EvidenceCall]]:
    """Number of a collective -> rank -> its call."""
    found: dict[int, dict[int, EvidenceCall]] = {}
    for rank, given in whole.evidence.ranks.items():
        if rank in whole.evidence.disputed:
            continue
        for call in given.calls:
            if call.group == group and not call.p2p and call.number >= 0 and call.op:
                found.setdefault(call.number, {})[rank] = call
    return found


def first_mismatch(whole: JobWaitState, group: str) -> RecordedMismatch | None:
    """The first call on a group that does not fit."""
    for number, calls in sorted(calls_by_number(whole, group).items()):
        if len(calls) < 2:
            continue
        for what, say in _COMPARED_ASPECTS:
            said = {rank: text for rank, call in calls.items() if (text := say(call))}
            if what == "dtype" and any(c.op == "barrier" for c in calls.values()):
                continue
            if len(set(said.values())) > 1:
                return RecordedMismatch(group, number, what, _mismatch_sides(calls, said))
    return None


def _kind_text(call: EvidenceCall) -> str:
    return call.op


def _dtype_text(call: EvidenceCall) -> str:
    return call.dtype


def _size_text(call: EvidenceCall) -> str:
    size = agreed_elements(call)
    return f"{size:,} elements" if size >= 0 and call.op != "barrier" else ""


#: What the members of a call must agree on, the gravest first.
_COMPARED_ASPECTS: tuple[tuple[str, Callable[[EvidenceCall], str]], ...] = (
    ("kind", _kind_text),
    ("size", _size_text),
    ("dtype", _dtype_text),
)


def _mismatch_sides(
    calls: dict[int, EvidenceCall], said: dict[int, str]
) -> tuple[MismatchSide, ...]:
    groups: dict[str, list[int]] = {}
    for rank, text in sorted(said.items()):
        groups.setdefault(text, []).append(rank)
    parties = [MismatchSide(tuple(ranks), text, calls[ranks[0]]) for text, ranks in groups.items()]
    return tuple(sorted(parties, key=lambda p: (-len(p.ranks), p.ranks)))


def mismatched_message(whole: JobWaitState) -> tuple[EvidenceCall, EvidenceCall] | None:
    """Two messages that met and differ in size or dtype."""
    for given in whole.evidence.ranks.values():
        for call in given.calls:
            if not call.p2p or call.op != "send" or call.state != "waiting":
                continue
            other = matching_message(whole, call)
            if other is None:
                continue
            mine, theirs = call.elements_in, max(other.elements_out, other.elements_in)
            if (mine >= 0 and theirs >= 0 and mine != theirs) or (
                call.dtype and other.dtype and call.dtype != other.dtype
            ):
                return call, other
    return None


# --- who went another way ---


def source_place(call: EvidenceCall) -> str:
    frame = user_frame(call.frames)
    return frame.place if frame is not None and frame.line else ""


def _signature(call: EvidenceCall) -> CallSignature:
    return call.op, agreed_elements(call), source_place(call)


def rank_divergences(whole: JobWaitState, group: str) -> list[RankDivergence]:
    """Ranks whose calls on a group, after some left out or some too many, go on as those of the
    others do.

    Told by operation, size and the line of the call, against what most ranks do; a mere branch
    (other lines, same calls) is none.
    """
    calls = calls_by_number(whole, group)
    ranks = sorted({r for at in calls.values() for r in at})
    if len(ranks) < 2:
        return []
    lines = {
        rank: {n: _signature(at[rank]) for n, at in calls.items() if rank in at} for rank in ranks
    }
    if not any(sign[2] for signs in lines.values() for sign in signs.values()):
        return []
    said = {n: Counter(lines[rank][n] for rank in at) for n, at in sorted(calls.items())}
    if all(len(signs) == 1 for signs in said.values()):
        return []
    found = []
    for rank in ranks:
        parting = _rank_divergence(
            rank, lines[rank], _common_calls(lines[rank], said), calls, group
        )
        if parting is not None:
            found.append(parting)
    return found


def _rank_divergence(
    rank: int,
    mine: dict[int, CallSignature],
    reference: dict[int, CallSignature],
    calls: dict[int, dict[int, EvidenceCall]],
    group: str,
) -> RankDivergence | None:
    numbers = sorted(n for n in mine if n in reference)
    start = next((n for n in numbers if mine[n] != reference[n]), None)
    if start is None or _is_branch(mine, reference, numbers):
        return None
    for shift in range(1, _MAX_SHIFT + 1):
        if _continues_after_shift(mine, reference, start, shift) and _is_not_a_loop(
            mine, reference, start, shift
        ):
            return RankDivergence(rank, group, start, shift, True, calls[start][rank])
        if _continues_after_shift(reference, mine, start, shift) and _is_not_a_loop(
            reference, mine, start, shift
        ):
            shown = next(call for other, call in calls[start].items() if other != rank)
            return RankDivergence(rank, group, start, shift, False, shown)
    return None


def _is_branch(
    mine: dict[int, CallSignature], reference: dict[int, CallSignature], numbers: list[int]
) -> bool:
    """Do calls at other lines, which else are alike, explain it as well? They stand between calls
    that agree without any shift.
    """
    other = [n for n in numbers if mine[n] != reference[n]]
    return other[-1] < numbers[-1] and all(mine[n][:2] == reference[n][:2] for n in other)


def _common_calls(
    mine: dict[int, CallSignature], said: dict[int, Counter[CallSignature]]
) -> dict[int, CallSignature]:
    """What all the others do at each number; the number is left out where they do not agree."""
    found: dict[int, CallSignature] = {}
    for number, signs in said.items():
        own = mine.get(number)
        others = [sign for sign, count in signs.items() if sign != own or count > 1]
        if len(others) == 1:
            found[number] = others[0]
    return found


def _continues_after_shift(
    longer: dict[int, CallSignature], other: dict[int, CallSignature], start: int, shift: int
) -> bool:
    """Without ``shift`` calls from ``start`` on, does ``longer`` go on as ``other``? At least one
    call must say so.
    """
    common = [n for n in other if n >= start and n + shift in longer]
    return bool(common) and all(longer[n + shift] == other[n] for n in common)


def _is_not_a_loop(
    longer: dict[int, CallSignature], other: dict[int, CallSignature], start: int, shift: int
) -> bool:
    """The calls in between are of lines that the other does not have there: else a loop would look
    like a shift.
    """
    return all(longer.get(n) != other.get(start) for n in range(start, start + shift))
