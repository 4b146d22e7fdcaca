"""Detect equal collectives whose order differs between ranks, judged by tensor names (DS601).

The k-th calls of all members of a group meet, on every backend. If one rank calls x then y and
another one y then x, equal calls meet without an error, and the data are wrong.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from distsim.checker.diagnosis.first_divergence import divergence_on
from distsim.checker.matching.call_index import CallIndex
from distsim.checker.matching.channel_layout import ChannelLayout, build_channel_layout
from distsim.checker.wording import aligned_columns, call_words, location_text, rank_list
from distsim.findings.finding_types import Finding
from distsim.operations.registry import OPERATIONS
from distsim.program.code import BufferVector, CodeCall, at_row
from distsim.program.model import Program
from distsim.trace.model import Trace

#: The tensors of a collective, as (name, index): inputs, then outputs.
TensorNames = tuple[tuple[str, int], ...]


def swapped_collective_findings(
    program: Program, trace: Trace | None = None, layout: ChannelLayout | None = None
) -> tuple[Finding, ...]:
    """DS601: one finding per group with two swapped collectives.

    The parts of one coalesced launch may also be swapped. ``trace``: only calls that met in this
    run count; by default, all calls of the program do.
    """
    layout = layout or build_channel_layout(program)
    sequences = _calls_by_sequence(program, layout, CallIndex(layout))
    if not sequences:
        return ()
    met = None if trace is None else _calls_that_met(trace)
    found = []
    for sequence, calls_by_rank in sequences.items():
        if met is not None:
            calls_by_rank = {
                rank: [position for position in positions if (rank, position) in met]
                for rank, positions in calls_by_rank.items()
            }
        swap = _first_swap(program, calls_by_rank)
        if swap is not None:
            found.append(_swap_finding(program, layout.sequence_names[sequence], swap))
    return tuple(found)


def _calls_by_sequence(
    program: Program, layout: ChannelLayout, call_index: CallIndex
) -> dict[int, dict[int, list[int]]]:
    """Sequence -> rank -> positions of its calls there.

    Sequences on which all members run one code with the same names are omitted, and those with an
    extra, a missing or a swapped call, which has a finding of its own.
    """
    sequences: dict[int, dict[int, list[int]]] = {}
    plain = [_rows_name_same_tensors(program, number) for number in range(len(program.codes))]
    for sequence in range(len(program.groups)):
        members = layout.sequence_ranks[sequence]
        codes = {program.code_of[rank] for rank in members}
        if len(codes) == 1 and all(plain[c] for c in codes):
            continue
        divergence = divergence_on(call_index, sequence)
        # Calls that an extra or a missing call has shifted are not swapped.
        if divergence is None or not divergence.is_shift:
            sequences[sequence] = {rank: call_index.joins(rank, sequence) for rank in members}
    return sequences


def _calls_that_met(trace: Trace) -> set[tuple[int, int]]:
    """(rank, position) of the calls that met others in a run."""
    rows = np.flatnonzero((trace["match"] >= 0) & (trace["part"] < 0))
    return set(zip(trace["rank"][rows].tolist(), trace["position"][rows].tolist(), strict=True))


def _rows_name_same_tensors(program: Program, number: int) -> bool:
    """Whether all rows of a code name the same tensors in the same calls."""
    code = program.codes[number]
    if code.guards is not None:
        return False
    for call in code.distinct_calls(parts=False):
        # An index that differs by row is a vector.
        if not all(isinstance(buffer.index, int) for buffer in _tensor_buffers(call)):
            return False
    return True


def _tensor_buffers(call: CodeCall) -> tuple[BufferVector, ...]:
    return tuple(
        b
        for side in ("inputs", "outputs")
        for b in call.fields.get(side, ())
        if isinstance(b, BufferVector)
    )


def _tensor_names(program: Program, rank: int, position: int) -> TensorNames:
    row = program.row_of[rank]
    return tuple(
        dict.fromkeys(
            (b.name, int(at_row(b.index, row)))
            for b in _tensor_buffers(program.code_call(rank, position))
            if b.name
        )
    )


class _PlacedCall(NamedTuple):
    rank: int
    position: int


class _MetPair(NamedTuple):
    """Two calls that meet. ``first`` is a call of the sequence's first member."""

    first: _PlacedCall
    other: _PlacedCall


class _Swap(NamedTuple):
    """Two pairs of calls whose tensors are exchanged.

    Within one coalesced launch, whose parts are exchanged, both pairs are the same.
    """

    earlier: _MetPair
    later: _MetPair

    @property
    def is_within_launch(self) -> bool:
        """Whether the exchanged calls are parts of one launch."""
        return self.earlier == self.later

    @property
    def calls(self) -> list[_PlacedCall]:
        """Every call once, pair by pair."""
        return list(dict.fromkeys((*self.earlier, *self.later)))


def _first_swap(program: Program, calls_by_rank: dict[int, list[int]]) -> _Swap | None:
    """The first swap on a sequence, compared with the sequence's first member."""
    if not calls_by_rank:
        return None
    first = min(calls_by_rank)
    first_names = [_tensor_names(program, first, p) for p in calls_by_rank[first]]
    # Ranks with the same names in the same order need only one comparison.
    compared = {tuple(first_names)}
    for rank in sorted(calls_by_rank):
        names = [_tensor_names(program, rank, position) for position in calls_by_rank[rank]]
        if tuple(names) in compared:
            continue
        compared.add(tuple(names))
        swap = _swap_between(program, calls_by_rank, first, first_names, rank, names)
        if swap is not None:
            return swap
    return None


def _swap_between(
    program: Program,
    calls_by_rank: dict[int, list[int]],
    first: int,
    first_names: list[TensorNames],
    rank: int,
    names: list[TensorNames],
) -> _Swap | None:
    """The first swap between two ranks, whose calls have these names.

    A difference alone is no swap: ranks may name their tensors differently. It is one if the same
    two names meet again the other way round.
    """
    differing: dict[tuple[TensorNames, TensorNames], _MetPair] = {}
    for k, (x, y) in enumerate(zip(first_names, names, strict=False)):
        one = _PlacedCall(first, calls_by_rank[first][k])
        other = _PlacedCall(rank, calls_by_rank[rank][k])
        # Calls with other arguments do not meet without an error, which has its own finding.
        if x == y or not x or not y or not _equal_signatures(program, one, other):
            continue
        pair = _MetPair(one, other)
        coalesces = OPERATIONS[program.code_call(*one).op].coalesces is not None
        if coalesces and sorted(x) == sorted(y):
            return _Swap(pair, pair)
        earlier = differing.get((y, x))
        if earlier is not None and _equal_signatures(program, one, earlier.first):
            return _Swap(earlier, pair)
        differing.setdefault((x, y), pair)
    return None


def _equal_signatures(program: Program, one: _PlacedCall, other: _PlacedCall) -> bool:
    return bool(_signature(program, one) == _signature(program, other))


def _signature(program: Program, call: _PlacedCall) -> object:
    return at_row(program.code_call(*call).signature, program.row_of[call.rank])


def _swap_finding(program: Program, group: str, swap: _Swap) -> Finding:
    first, other = swap.earlier
    x, y = _first_differing_tensors(program, swap.earlier)
    rows = []
    for number, call in enumerate(swap.calls):
        begins_pair = number % 2 == 0
        note = "matched with the row below" if begins_pair and not swap.is_within_launch else ""
        words, line = call_words(program.call(*call)), location_text(program.place(*call))
        rows.append((f"rank {call.rank}", words, line, note))
    doing = "coalesce" if swap.is_within_launch else f"call {program.call(*first).op} on"
    what = f"{doing} {x} and {y}"
    head = (
        f"{x} of rank {first.rank} is combined with {y} of rank {other.rank}: the ranks {what} in "
        f"different orders on {group}, so the results are wrong"
    )
    ranks = tuple(sorted({first.rank, other.rank}))
    help_line = f"{what} in the same order on {rank_list(ranks)}"
    places = tuple(dict.fromkeys(program.place(*call) for call in swap.calls))
    return Finding(
        "DS601",
        "warning",
        "\n".join([head, *aligned_columns(rows)]),
        ranks,
        (),
        (help_line,),
        places,
    )


def _first_differing_tensors(program: Program, pair: _MetPair) -> tuple[str, str]:
    """The first tensors of two calls that have different names, as in a scenario."""
    names = (_tensor_names(program, *call) for call in pair)
    for tensors in zip(*names, strict=True):
        if tensors[0] != tensors[1]:
            first, other = (name if index == 0 else f"{name}@{index}" for name, index in tensors)
            return first, other
    raise AssertionError("the calls of a swap name the same tensors")
