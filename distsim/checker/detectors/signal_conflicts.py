"""Detect explicit signals that meet a barrier of symmetric memory, or vice versa (DS611).

The barrier fills and empties the same cells as put_signal and wait_signal of its channel, and each
wait takes the signal in the cell, whichever call it was meant for.

Source: torch 2.13, `CUDASymmetricMemoryOps.cu` (barrier_kernel).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from distsim.checker.matching.channel_layout import ChannelLayout
from distsim.checker.wording import aligned_columns, location_text, parenthesised
from distsim.findings.finding_types import Finding
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import OPERATIONS
from distsim.program.code import CallSite
from distsim.program.model import Program


class _SignalCall(NamedTuple):
    rank: int
    position: int
    site: CallSite


def signal_findings(program: Program, layout: ChannelLayout) -> tuple[Finding, ...]:
    """DS611: the first conflict of each barrier.

    The barrier takes an explicit signal, or an explicit wait takes a signal of the barrier.
    """
    barriers = barrier_sites(program)
    if not barriers:
        return ()
    found: dict[tuple[str, int, int], Finding] = {}
    for given, taken in _matched_signals(program, layout):
        one, other = (site_key(given.site), site_key(taken.site))
        if (one in barriers) != (other in barriers):
            barrier = one if one in barriers else other
            found.setdefault(barrier, _conflict_finding(program, given, taken, one in barriers))
    return tuple(found.values())


def site_key(site: CallSite) -> tuple[str, int, int]:
    """The place of a call in its file."""
    return site.file, site.line, site.column


def barrier_sites(program: Program) -> set[tuple[str, int, int]]:
    """The places of the barriers of symmetric memory.

    A symm_mem_barrier is expanded to signals and waits of the same place; any other operation is
    only one of the two.
    """
    kinds: dict[tuple[str, int, int], set[str]] = {}
    for code in program.codes:
        for call in code.distinct_calls():
            if OPERATIONS[call.op].signals and program.sites[call.site].line:
                kinds.setdefault(site_key(program.sites[call.site]), set()).add(call.op)
    return {site for site, ops in kinds.items() if len(ops) > 1}


def _matched_signals(
    program: Program, layout: ChannelLayout
) -> Iterator[tuple[_SignalCall, _SignalCall]]:
    """Each signal with the wait that takes it, by number on its channel."""
    linked = layout.linked
    signals: dict[int, _SignalCall] = {}
    waits: list[tuple[int, _SignalCall]] = []
    for rank in program.present:
        code, base = program.code(rank), linked.base[rank]
        for position in code.positions(program.row_of[rank]):
            call = code.calls[position]
            if not OPERATIONS[call.op].signals:
                continue
            row = base + code.offsets[position]
            signal_call = _SignalCall(rank, position, program.sites[call.site])
            if OPERATIONS[call.op].direction == "send":
                signals[row] = signal_call
            elif linked.mate[row] >= 0:
                waits.append((int(linked.mate[row]), signal_call))
    yield from ((signals[row], wait) for row, wait in waits if row in signals)


def _conflict_finding(
    program: Program, given: _SignalCall, taken: _SignalCall, by_barrier: bool
) -> Finding:
    channel = tag_text(program.call(given.rank, given.position).tag)
    words = ("put_signal", "symm_mem_barrier")
    if by_barrier:
        words = ("symm_mem_barrier", "wait_signal")
    # The program contains the signals of a barrier; the file contains the barrier.
    places = tuple(
        replace(program.place(one.rank, one.position), op=word)
        for one, word in zip((given, taken), words, strict=True)
    )
    given_line, taken_line = (parenthesised(location_text(place)) for place in places)
    if by_barrier:
        head = (
            f"wait_signal on rank {taken.rank}{taken_line} consumes a signal of rank "
            f"{given.rank}'s barrier{given_line} on {channel}"
        )
    else:
        head = (
            f"the barrier on rank {taken.rank}{taken_line} consumes the put_signal of rank "
            f"{given.rank}{given_line} on {channel}"
        )
    rows = [
        (f"rank {one.rank}", word, location_text(p))
        for one, word, p in zip((given, taken), words, places, strict=True)
    ]
    advice = (
        "use another channel for the barrier (`symm_mem_barrier: {channel: 1}`, in torch "
        "`handle.barrier(channel=1)`)"
    )
    ranks = tuple(sorted({given.rank, taken.rank}))
    return Finding(
        "DS611",
        "warning",
        "\n".join([head, *aligned_columns(rows)]),
        ranks,
        (),
        (advice,),
        tuple(dict.fromkeys(places)),
    )


__all__ = ["barrier_sites", "signal_findings", "site_key"]
