"""Calls, places and lists of ranks in words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from distsim.checker.matching.call_index import part_call
from distsim.common.units import show_bytes
from distsim.findings.final_state import BlockedRank, WaitDependency
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: Ranks (or lines) shown one by one; further ones are summarised.
MAX_SHOWN = 8
#: So many numbers in a row are written as a stretch, `0-3`.
MIN_RUN_LENGTH = 4


def rank_list(ranks: Iterable[int], shown: int = MAX_SHOWN) -> str:
    """`rank 3`, `ranks 0, 1 and 2`, `ranks 0-516 and 518-1023`, or `ranks 0, 2, 4, 6, 8, 10, 12, 14
    and 504 more`.
    """
    numbers = list(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {number_list(numbers, shown)}"


def number_list(numbers: Sequence[int], shown: int = MAX_SHOWN) -> str:
    """`3`, `0, 1 and 2`, `0-516 and 518-1023`, or `0, 2, 4, 6, 8, 10, 12, 14 and 504 more`;
    stretches of four or more are folded.
    """
    stretches = _number_runs(numbers)
    words = [str(a) if a == b else f"{a}-{b}" for a, b in stretches]
    if len(words) > shown:
        left = sum(b - a + 1 for a, b in stretches[shown:])
        return f"{', '.join(words[:shown])} and {left} more"
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _number_runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each stretch of at least `MIN_RUN_LENGTH` numbers in a row; every other
    number for itself.
    """
    found: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(numbers) + 1):
        if i < len(numbers) and numbers[i] == numbers[i - 1] + 1:
            continue
        stretch = numbers[start:i]
        found += (
            [(stretch[0], stretch[-1])]
            if len(stretch) >= MIN_RUN_LENGTH
            else [(n, n) for n in stretch]
        )
        start = i
    return found


def plural(count: int, word: str) -> str:
    """`1 call`, `3 calls`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def more_like_this(count: int, word: str = "") -> list[str]:
    """`… and 3 more like this`, `… and 511 more pairs like this`, as a line of its own; no line for
    none.
    """
    kind = "" if not word else f" {word}" if count == 1 else f" {word}s"
    return [f"  … and {count} more{kind} like this"] if count > 0 else []


def call_words(call: ResolvedCall) -> str:
    """A call with what tells it from others: `send(x, dst=1, tag=3, 16 B)`, `all_reduce(grad,
    group=dp, 4 MiB)`.
    """
    row = OPERATIONS[call.op]
    most = 1 if row.coalesces is None else 3
    words = [b.label for b in (call.inputs or call.outputs)[:most] if b.name]
    words += (
        [f"{len(call.inputs) - most} more"]
        if row.coalesces is not None and len(call.inputs) > most
        else []
    )
    if row.direction is not None:
        words.append(
            f"{'dst' if row.direction == 'send' else 'src'}={'any' if call.peer is None else call.peer}"
        )
        if call.tag:
            words.append(tag_text(call.tag).replace(" ", "="))
    if row.kind == "remote":
        words.append(f"{'dst' if row.gives == 'all' else 'src'}={call.peer}")
    if row.root_field is not None:
        words.append(f"{row.root_field}={call.root}")
    if row.kind in ("p2p", "collective", "remote") and call.group.id != 0:
        words.append(f"group={call.group.name}")
    if row.reduces and call.reduce_op not in (None, "sum"):
        words.append(f"op={call.reduce_op}")
    if (
        row.kind in ("p2p", "collective", "remote")
        and not row.signals
        and (nbytes := row.nbytes(call))
    ):
        words.append(show_bytes(nbytes))
    if call.op == "new_group":
        words = [call.name, f"ranks={list(call.ranks)}"]
    if row.kind == "batch":
        words = [f"{len(call.parts)} messages"]
    return f"{call.op}({', '.join(words)})"


def unmatched_words(call: ResolvedCall, rank: int, awaited: int) -> str:
    """The head of a finding on a message or signal without its other side."""
    row = OPERATIONS[call.op]
    if row.signals and row.direction == "send":
        return f"rank {rank} signals again, and rank {awaited} never takes the signal before"
    if row.signals:
        return f"rank {rank} waits for a signal that rank {awaited} never gives"
    wants, lacks = ("send", "receives") if row.direction == "send" else ("receive", "sends")
    return f"rank {rank} waits to {wants} a message that rank {awaited} never {lacks}"


def partner_words(call: ResolvedCall) -> tuple[str, str]:
    """What the other side of a message or signal does, and what it has done ("has …")."""
    row = OPERATIONS[call.op]
    if row.signals:
        return (
            ("waits for", "come to the wait for") if row.direction == "send" else ("gives", "given")
        )
    return (
        ("receives", "posted the receive for")
        if row.direction == "send"
        else ("sends", "posted the send of")
    )


def place_of_call(program: Program, rank: int, position: int) -> SourceLocation | None:
    """Where the call at a position is written; None where there is no call (an implicit
    init_process_group, the end).
    """
    return program.place(rank, position) if position < len(program.code(rank).calls) else None


def location_text(place: SourceLocation | None) -> str:
    """`ring.yaml:9`, or nothing."""
    return "" if place is None or not place.line else f"{place.file}:{place.line}"


def blocked_call_words(program: Program, rank: int, position: int, request: int, part: int) -> str:
    """The call a blocked rank stands in; for a wait, also whose request it waits for."""
    if position >= len(program.code(rank).calls):
        return "the end of its program"
    call = program.call(rank, position)
    if request == position and part < 0:
        return call_words(call)
    if request == position:
        return f"{call.op}: {call_words(part_call(program, rank, position, part))}"
    return f"wait for {call_words(part_call(program, rank, request, part))}"


def blocked_device_words(program: Program, state: BlockedRank, need: WaitDependency) -> str:
    """Where a rank's device stands and where its host is, which only enqueues and has gone on."""
    device = call_words(part_call(program, state.rank, need.position, need.part))
    place = place_of_call(program, state.rank, state.position)
    if place is None:
        return f"device in {device}, host at its end"
    host = OPERATIONS[program.code_call(state.rank, state.position).op].op
    return f"device in {device}, host in {host}, line {place.line}"


def aligned_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns; the last column is free."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def cycle_words(path: tuple[int, ...]) -> str:
    """`ranks 0 → 1 → 0`, or `16 ranks (0 → 1 → 2 → 3 → … → 0)`."""
    if len(path) > MAX_SHOWN:
        return f"{len(path)} ranks ({' → '.join(map(str, path[:4]))} → … → {path[0]})"
    return f"ranks {' → '.join(map(str, (*path, path[0])))}"
