"""Find which rank first departs from the other members of a sequence, and say how.

Key idea: most members make the same calls. Their list is the reference; the list of every other
member is aligned with it (`matching.call_alignment`). The earliest divergence is the cause of all
later differences on the sequence, which are shifted by it. Two members have no majority: then a
line that only one of them uses is that of an extra call, and a line that both use is that of a call
which one of them skips.

Lists are compared once per set of ranks with equal calls, so thousands of ranks cost little.
"""

from __future__ import annotations

from collections import defaultdict
from typing import Final, NamedTuple

from distsim.checker.matching.call_alignment import (
    AlignedCall,
    DivergenceKind,
    SequenceDivergence,
    first_divergence,
)
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.wording import call_words, location_text, parenthesised, rank_list
from distsim.findings.finding_types import SourceLocation
from distsim.program.model import Program

#: Sets of members with equal calls that are compared with the reference.
_MAX_COMPARED: Final = 8


#: torch's function that runs a backward pass.
_BACKWARD: Final = "_engine_run_backward"
#: By a part of the file that makes a captured call: what users call it.
_CALLERS: Final = {
    "torch/nn/parallel/distributed.py": "in DistributedDataParallel",
    "torch/distributed/fsdp/": "in FSDP",
    "torch/distributed/pipelining/": "in the pipeline schedule",
    "torch/distributed/checkpoint/": "in torch.distributed.checkpoint",
    "torch/distributed/tensor/": "in DTensor",
    _BACKWARD: "in backward()",
}


class PlacedCall(NamedTuple):
    """A call of a rank at a position of its program."""

    rank: int
    position: int


class CallDivergence(NamedTuple):
    """How some members of a sequence depart from the others.

    ``ranks`` depart, ``others`` do not. ``calls`` are the calls concerned: those that ``ranks``
    make in addition (extra) or instead (replaced, arguments), or that ``others`` make and ``ranks``
    skip (missing); each on the first rank that makes it. Of swapped calls, it is the one that
    ``ranks`` make first. ``met``: the call of the other side that meets the first of them.
    ``number`` counts the calls on the sequence before the divergence.
    """

    kind: DivergenceKind
    sequence: int
    number: int
    ranks: tuple[int, ...]
    others: tuple[int, ...]
    calls: tuple[PlacedCall, ...]
    met: PlacedCall | None = None

    @property
    def is_shift(self) -> bool:
        """Whether later calls meet others than they were meant for."""
        return self.kind in ("extra", "missing", "swapped")


class _CallList(NamedTuple):
    """The calls that some members make on a sequence; ``positions`` are those of the first."""

    ranks: tuple[int, ...]
    calls: list[AlignedCall]
    positions: list[int]

    def at(self, index: int) -> PlacedCall | None:
        if not 0 <= index < len(self.positions):
            return None
        return PlacedCall(self.ranks[0], self.positions[index])


def divergence_on(call_index: CallIndex, sequence: int) -> CallDivergence | None:
    """The first divergence of the members of a sequence.

    None if all make the same calls, or if no list of calls can serve as the reference.
    """
    lists = _call_lists(call_index, sequence)
    if len(lists) < 2:
        return None
    member_count = sum(len(each.ranks) for each in lists)
    lists.sort(key=lambda each: -len(each.ranks))
    reference, *outliers = lists
    has_majority = 2 * len(reference.ranks) > member_count
    if not has_majority and len(lists) > 2:
        return None  # With three opinions and no majority, it is open which call was meant.
    stopped = call_index.layout.program.is_partial
    found: list[tuple[_CallList, SequenceDivergence]] = []
    for outlier in outliers[:_MAX_COMPARED]:
        divergence = first_divergence(outlier.calls, reference.calls, stopped=stopped)
        if divergence is not None:
            found.append((outlier, divergence))
    if not found:
        return None
    # The earliest one: the others may be its consequences.
    found.sort(key=lambda each: (each[1].own, each[0].ranks))
    outlier, first = found[0]
    ranks = _ranks_with_same_divergence(found, reference)
    if not has_majority and _is_better_said_of_other(outlier, reference, first):
        return _placed(sequence, _seen_from_other(first), reference, outlier, reference.ranks)
    return _placed(sequence, first, outlier, reference, ranks)


def _call_lists(call_index: CallIndex, sequence: int) -> list[_CallList]:
    """The lists of calls that members make, those with equal arguments together."""
    ranks_by_list: dict[tuple[int, ...], list[int]] = defaultdict(list)
    by_identity: dict[int, tuple[int, ...]] = {}
    for rank in call_index.layout.sequence_ranks[sequence]:
        signatures = call_index.signatures(rank, sequence)
        # Ranks share lists, and the index keeps them: turn each into a key once.
        key = by_identity.setdefault(id(signatures), tuple(signatures))
        ranks_by_list[key].append(rank)
    return [
        _call_list(call_index, sequence, tuple(sorted(ranks))) for ranks in ranks_by_list.values()
    ]


def _call_list(call_index: CallIndex, sequence: int, ranks: tuple[int, ...]) -> _CallList:
    program = call_index.layout.program
    positions = list(call_index.joins(ranks[0], sequence))
    signatures = list(call_index.signatures(ranks[0], sequence))
    if program.is_partial:
        # Calls that a blocked rank would make later have no line, and say nothing.
        while positions and not program.place(ranks[0], positions[-1]).line:
            positions.pop()
            signatures.pop()
    calls = []
    for position, signature in zip(positions, signatures, strict=True):
        call = program.code_call(ranks[0], position)
        calls.append(AlignedCall(call.site, call.op, signature, program.sites[call.site].column))
    return _CallList(ranks, calls, positions)


def _ranks_with_same_divergence(
    found: list[tuple[_CallList, SequenceDivergence]], reference: _CallList
) -> tuple[int, ...]:
    """The ranks of all outliers that diverge in the same way as the first."""
    first_list, first = found[0]
    ranks: list[int] = []
    for outlier, divergence in found:
        is_same = divergence.kind == first.kind and divergence.own == first.own
        if is_same and _sites(outlier, reference, divergence) == _sites(
            first_list, reference, first
        ):
            ranks += outlier.ranks
    return tuple(sorted(ranks))


def _sites(
    outlier: _CallList, reference: _CallList, divergence: SequenceDivergence
) -> tuple[int, ...]:
    own = [outlier.calls[i].site for i in divergence.own_calls]
    other = [reference.calls[j].site for j in divergence.other_calls]
    return (*own, *other)


def _is_better_said_of_other(
    outlier: _CallList, reference: _CallList, divergence: SequenceDivergence
) -> bool:
    """Without a majority: an extra call at a shared line is one that the other side skips.

    Both sides run that line, so one of them leaves the loop or the branch around it too early. A
    missing call at a line of the other side alone is an extra call there.
    """
    if divergence.kind == "extra":
        shared = {call.site for call in reference.calls}
        return outlier.calls[divergence.own_calls[0]].site in shared
    if divergence.kind == "missing":
        shared = {call.site for call in outlier.calls}
        return reference.calls[divergence.other_calls[0]].site not in shared
    return False


def _seen_from_other(divergence: SequenceDivergence) -> SequenceDivergence:
    kinds: dict[DivergenceKind, DivergenceKind] = {"extra": "missing", "missing": "extra"}
    return SequenceDivergence(
        kinds.get(divergence.kind, divergence.kind),
        divergence.other,
        divergence.own,
        divergence.other_calls,
        divergence.own_calls,
    )


def _placed(
    sequence: int,
    divergence: SequenceDivergence,
    outlier: _CallList,
    reference: _CallList,
    ranks: tuple[int, ...],
) -> CallDivergence:
    """The divergence with ranks and positions."""
    kind, number = divergence.kind, min(divergence.own, divergence.other)
    calls = [outlier.at(i) for i in divergence.own_calls]
    met = reference.at(divergence.own)
    if kind == "missing":
        calls = [reference.at(j) for j in divergence.other_calls]
        met = outlier.at(divergence.other)
    elif kind == "swapped":
        # Not the moved call, which may occur much later, but the first calls that meet.
        calls, met = [outlier.at(number)], reference.at(number)
    return CallDivergence(
        kind,
        sequence,
        number,
        ranks,
        reference.ranks,
        tuple(call for call in calls if call is not None),
        met,
    )


# --- words ---
def divergence_head(program: Program, divergence: CallDivergence, members: int) -> str:
    """The first line of a finding on extra, missing or swapped calls of some of ``members``."""
    if divergence.kind == "swapped":
        return _swapped_head(program, divergence, members)
    if divergence.kind == "extra":
        return _extra_head(program, divergence, members)
    return _missing_head(program, divergence, members)


def _extra_head(program: Program, divergence: CallDivergence, members: int) -> str:
    count, first = len(divergence.calls), divergence.calls[0]
    makes = "makes" if len(divergence.ranks) == 1 else "make"
    what, which = f"one extra {_call_at(program, first)}", "this call"
    if count > 1:
        what = f"{count} extra calls (first: {_call_comma(program, first)})"
        which = "the first one"
    head = f"{rank_list(divergence.ranks)} {makes} {what}"
    if divergence.met is None:
        return head
    met = f"{_op_name(program, divergence.met)} of {_others_text(divergence, members)}"
    at = _at(program, divergence.met)
    return f"{head}, and the backend matches {which} with the {met}{at}"


def _missing_head(program: Program, divergence: CallDivergence, members: int) -> str:
    count, first = len(divergence.calls), divergence.calls[0]
    skips, its = ("skips", "its") if len(divergence.ranks) == 1 else ("skip", "their")
    make = "makes" if len(divergence.others) == 1 else "make"
    by_others = f"that {_others_text(divergence, members)} {make}"
    what, it = f"the {_call_at(program, first)} {by_others}", "that call"
    if count > 1:
        what = f"{count} calls {by_others} (first: {_call_comma(program, first)})"
        it = "the first of them"
    head = f"{rank_list(divergence.ranks)} {skips} {what}"
    if divergence.met is None:
        return head
    return f"{head}, so the backend matches {its} {_call_at(program, divergence.met)} with {it}"


def _swapped_head(program: Program, divergence: CallDivergence, members: int) -> str:
    first, met = divergence.calls[0], divergence.met
    assert met is not None
    calls = "calls" if len(divergence.ranks) == 1 else "call"
    others_call = "calls" if len(divergence.others) == 1 else "call"
    return (
        f"{rank_list(divergence.ranks)} {calls} {call_words(program.call(*first))}"
        f"{_at(program, first)} first, but {_others_text(divergence, members)} {others_call} "
        f"{call_words(program.call(*met))}{_at(program, met)} first"
    )


def _others_text(divergence: CallDivergence, members: int) -> str:
    is_rest = len(divergence.ranks) + len(divergence.others) == members
    if is_rest and len(divergence.others) > 1:
        return "the other ranks"
    return rank_list(divergence.others)


def _op_name(program: Program, call: PlacedCall) -> str:
    """The operation as the user wrote it."""
    return call_words(program.call(*call)).partition("(")[0]


def _call_at(program: Program, call: PlacedCall) -> str:
    return f"{_op_name(program, call)}{_at(program, call)}"


def _call_comma(program: Program, call: PlacedCall) -> str:
    where = _where(program, call)
    return _op_name(program, call) + (f", {where}" if where else "")


def _at(program: Program, call: PlacedCall) -> str:
    return parenthesised(_where(program, call))


def _where(program: Program, call: PlacedCall) -> str:
    """The line of a call, and the part of PyTorch that made it, if the program was captured."""
    place = location_text(program.place(*call))
    via = program.sites[program.code_call(*call).site].via
    callers = (name for folder, name in _CALLERS.items() if folder in via)
    return ", ".join(part for part in (place, next(callers, "")) if part)


def is_in_backward(program: Program, call: PlacedCall) -> bool:
    """Whether a backward pass of a captured program makes the call."""
    return _BACKWARD in program.sites[program.code_call(*call).site].via


def divergence_places(program: Program, divergence: CallDivergence) -> tuple[SourceLocation, ...]:
    """The places of the calls that are extra, skipped or swapped."""
    places = [program.place(*call) for call in divergence.calls]
    if divergence.kind == "swapped" and divergence.met is not None:
        places.append(program.place(*divergence.met))
    return tuple(dict.fromkeys(places))
