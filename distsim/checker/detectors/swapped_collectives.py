"""Equal collectives that met by their order although the tensors' names say that others were
meant.
"""

from __future__ import annotations

import numpy as np

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
    """DS601: two equal collectives of a group where one rank has x first and y then, and another y
    first and x then; or two equal parts of one coalesced launch.

    The k-th calls of all members of a group meet, as on every back end. ``trace``: only calls that
    met in this run count; left out, all calls of the program do. One finding per group.
    """
    layout = layout or build_channel_layout(program)
    where = CallIndex(layout)
    found = []
    sequences = _calls_by_sequence(program, layout, where)
    if trace is not None and sequences:
        met = _calls_that_met(trace)
        sequences = {
            sequence: {r: [p for p in ps if (r, p) in met] for r, ps in rows.items()}
            for sequence, rows in sequences.items()
        }
    for sequence, rows in sequences.items():
        swap = _first_swap(program, rows)
        if swap is not None:
            found.append(_swap_finding(program, layout.sequence_names[sequence], *swap))
    return tuple(found)


def _calls_by_sequence(
    program: Program, layout: ChannelLayout, where: CallIndex
) -> dict[int, dict[int, list[int]]]:
    """Sequence -> rank -> positions of its calls there. Sequences on which all members run one code
    with the same names are left out.
    """
    sequences: dict[int, dict[int, list[int]]] = {}
    plain = [_rows_name_same_tensors(program, number) for number in range(len(program.codes))]
    for sequence in range(len(program.groups)):
        members = layout.sequence_ranks[sequence]
        codes = {program.code_of[rank] for rank in members}
        if len(codes) > 1 or not all(plain[c] for c in codes):
            sequences[sequence] = {rank: where.joins(rank, sequence) for rank in members}
    return sequences


def _calls_that_met(trace: Trace) -> set[tuple[int, int]]:
    """(rank, position) of the calls that met others in a run."""
    rows = np.flatnonzero((trace["match"] >= 0) & (trace["part"] < 0))
    return set(zip(trace["rank"][rows].tolist(), trace["position"][rows].tolist(), strict=True))


def _rows_name_same_tensors(program: Program, number: int) -> bool:
    """All rows of a code name the same tensors in the same calls."""
    code = program.codes[number]
    if code.guards is not None:
        return False
    return all(
        isinstance(b.index, int)
        for call in code.distinct_calls(parts=False)
        for b in _tensor_buffers(call)
    )


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


def _first_swap(
    program: Program, rows: dict[int, list[int]]
) -> tuple[tuple[int, int], tuple[int, int], tuple[int, int], tuple[int, int]] | None:
    """((p, k), (q, k), (p, m), (q, m)) with positions for k and m: the first swap on a sequence
    against its first member.
    """
    if not rows:
        return None
    p = min(rows)
    base = [_tensor_names(program, p, position) for position in rows[p]]
    seen: set[tuple[TensorNames, ...]] = {tuple(base)}
    for q in sorted(rows):
        names = [_tensor_names(program, q, position) for position in rows[q]]
        if tuple(names) in seen:
            continue
        seen.add(tuple(names))
        crossed: dict[tuple[TensorNames, TensorNames], int] = {}
        for k, (x, y) in enumerate(zip(base, names, strict=False)):
            if (
                x == y
                or not x
                or not y
                or not _equal_signatures(program, (p, rows[p][k]), (q, rows[q][k]))
            ):
                continue
            if (
                sorted(x) == sorted(y)
                and OPERATIONS[program.code_call(p, rows[p][k]).op].coalesces is not None
            ):
                return (p, rows[p][k]), (q, rows[q][k]), (p, rows[p][k]), (q, rows[q][k])
            earlier = crossed.get((y, x))
            if earlier is not None and _equal_signatures(
                program, (p, rows[p][k]), (p, rows[p][earlier])
            ):
                return (
                    (p, rows[p][earlier]),
                    (q, rows[q][earlier]),
                    (p, rows[p][k]),
                    (q, rows[q][k]),
                )
            crossed.setdefault((x, y), k)
    return None


def _equal_signatures(program: Program, one: tuple[int, int], other: tuple[int, int]) -> bool:
    a, b = (
        at_row(program.code_call(*call).signature, program.row_of[call[0]]) for call in (one, other)
    )
    return bool(a == b)


def _swap_finding(program: Program, group: str, *calls: tuple[int, int]) -> Finding:
    (p, _), (q, _) = calls[0], calls[1]
    x, y = next(
        (a, b)
        for a, b in zip(*(_tensor_names(program, *calls[i]) for i in (0, 1)), strict=True)
        if a != b
    )
    calls, within = tuple(dict.fromkeys(calls)), len({*calls}) == 2
    label = [name if index == 0 else f"{name}@{index}" for name, index in (x, y)]
    rows = [
        (
            f"rank {rank}",
            call_words(program.call(rank, position)),
            location_text(program.place(rank, position)),
        )
        for rank, position in calls
    ]
    what = f"one launch on {group} has its parts" if within else f"equal calls on {group}"
    doing = "coalesce" if within else "make the calls on"
    head = f"{label[0]} of rank {p} meets {label[1]} of rank {q}: {what} in another order, and the data are wrong"
    help_line = f"{doing} {label[0]} and {label[1]} in one order on {rank_list(sorted({p, q}))}"
    places = tuple(dict.fromkeys(program.place(*call) for call in calls))
    return Finding(
        "DS601",
        "warning",
        "\n".join([head, *aligned_columns(rows)]),
        tuple(sorted({p, q})),
        (),
        (help_line,),
        places,
    )
