"""Words for calls, places and lists of ranks, as findings use them.

This module describes; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from distsim.checker.matching.call_index import part_call
from distsim.common.units import show_bytes
from distsim.findings.final_state import BlockedRank, WaitDependency
from distsim.findings.finding_types import SourceLocation
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.object_collectives import object_collective
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: Ranks (or lines) shown one by one; further ones are summarised.
MAX_SHOWN = 8
#: From this length on, a run of consecutive numbers is written as `0-3`.
MIN_RUN_LENGTH = 4


def rank_list(ranks: Iterable[int], shown: int = MAX_SHOWN) -> str:
    """For example `rank 3`, `ranks 0, 1 and 2`, or `ranks 0-516 and 518-1023`."""
    numbers = list(ranks)
    return f"rank{'' if len(numbers) == 1 else 's'} {number_list(numbers, shown)}"


def number_list(numbers: Sequence[int], shown: int = MAX_SHOWN) -> str:
    """For example `0, 1 and 2`, `0-516 and 518-1023`, or `0, 2, 4, 6, 8, 10, 12, 14 and 504 more`.

    Runs of `MIN_RUN_LENGTH` or more consecutive numbers are abbreviated.
    """
    runs = _number_runs(numbers)
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs]
    if len(words) > shown:
        omitted = sum(last - first + 1 for first, last in runs[shown:])
        return f"{', '.join(words[:shown])} and {omitted} more"
    if len(words) < 2:
        return "".join(words)
    return f"{', '.join(words[:-1])} and {words[-1]}"


def _number_runs(numbers: Sequence[int]) -> list[tuple[int, int]]:
    """First and last of each run of at least `MIN_RUN_LENGTH`; other numbers one by one."""
    found: list[tuple[int, int]] = []
    start = 0
    for i in range(1, len(numbers) + 1):
        if i < len(numbers) and numbers[i] == numbers[i - 1] + 1:
            continue
        run = numbers[start:i]
        if len(run) >= MIN_RUN_LENGTH:
            found.append((run[0], run[-1]))
        else:
            found += [(number, number) for number in run]
        start = i
    return found


def plural(count: int, word: str) -> str:
    """`1 call`, `3 calls`."""
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def more_like_this(count: int, word: str = "") -> list[str]:
    """A line such as `… and 511 more pairs like this`; no line if there are none."""
    if count <= 0:
        return []
    kind = ""
    if word:
        kind = f" {word}" if count == 1 else f" {word}s"
    return [f"  … and {count} more{kind} like this"]


def call_words(call: ResolvedCall, program: Program | None = None) -> str:
    """A call with the arguments that distinguish it.

    For example `send(x, dst=1, tag=3, 16 B)` or `all_reduce(grad, group=dp, 4 MiB)`. The calls of
    an object collective are shown as the user wrote it: `broadcast_object_list(src=1)`. With
    ``program``, tag 0 and copy 0 are shown too if the program has other tags and copies.
    """
    written = object_collective(call)
    if written:
        return f"{written}({', '.join(_place_words(call))})"
    return f"{call.op}({', '.join(_argument_words(call, program))})"


def _place_words(call: ResolvedCall) -> list[str]:
    """The root and the group of a call."""
    words = []
    root_field = OPERATIONS[call.op].root_field
    if root_field is not None:
        words.append(f"{root_field}={call.root}")
    if call.group.id != 0:
        words.append(f"group={call.group.name}")
    return words


def _argument_words(call: ResolvedCall, program: Program | None) -> list[str]:
    operation = OPERATIONS[call.op]
    if call.op == "new_group":
        return [call.name, f"ranks={list(call.ranks)}"]
    if operation.kind == "batch":
        return [plural(len(call.parts), "message")]
    words = _buffer_words(call, program)
    if operation.direction is not None:
        peer = "any" if call.peer is None else call.peer
        words.append(f"{'dst' if operation.direction == 'send' else 'src'}={peer}")
        if call.tag:
            words.append(tag_text(call.tag).replace(" ", "="))
        elif program is not None and "tags" in program.features and not operation.signals:
            words.append("tag=0")
    if operation.kind == "remote":
        words.append(f"{'dst' if operation.gives == 'all' else 'src'}={call.peer}")
    if operation.root_field is not None:
        words.append(f"{operation.root_field}={call.root}")
    communicates = operation.kind in ("p2p", "collective", "remote")
    if communicates and call.group.id != 0:
        words.append(f"group={call.group.name}")
    if operation.reduces and call.reduce_op not in (None, "sum"):
        words.append(f"op={call.reduce_op}")
    if communicates and not operation.signals:
        nbytes = operation.nbytes(call)
        if nbytes:
            words.append(show_bytes(nbytes))
    return words


def _buffer_words(call: ResolvedCall, program: Program | None) -> list[str]:
    """The labels of the call's tensors; of a coalesced call, those of the first three."""
    is_coalesced = OPERATIONS[call.op].coalesces is not None
    shown = 3 if is_coalesced else 1
    buffers = [buffer for buffer in (call.inputs or call.outputs)[:shown] if buffer.name]
    words = [buffer_label(buffer, program) for buffer in buffers]
    if is_coalesced and len(call.inputs) > shown:
        words.append(f"{len(call.inputs) - shown} more")
    return words


def buffer_label(buffer: TensorBuffer, program: Program | None) -> str:
    """The name of a tensor; with ``program``, copy 0 is `x@0` if the tensor has several copies."""
    spec = None if program is None else program.tensors.get(buffer.name)
    if spec is not None and buffer.index == 0 and np.max(spec.copies) > 1:
        return f"{buffer.name}@0"
    return buffer.label


def unmatched_words(call: ResolvedCall, rank: int, awaited: int, at_line: str) -> str:
    """The headline of a finding on a message or signal without a counterpart.

    ``at_line``: the place of the call, from `parenthesised`.
    """
    operation = OPERATIONS[call.op]
    sends = operation.direction == "send"
    if operation.signals and sends:
        again = f"rank {rank} signals rank {awaited} again{at_line}"
        return f"{again}, but rank {awaited} never consumes the previous signal"
    if operation.signals:
        waits = f"rank {rank} waits for a signal from rank {awaited}{at_line}"
        return f"{waits}, but rank {awaited} never sends it"
    if sends:
        waits = f"rank {rank} waits to send a message to rank {awaited}{at_line}"
        return f"{waits}, but rank {awaited} never receives it"
    waits = f"rank {rank} waits for a message from rank {awaited}{at_line}"
    return f"{waits}, but rank {awaited} never sends it"


def partner_words(call: ResolvedCall) -> tuple[str, str]:
    """What the counterpart of a message or signal does, and what it has done ("has …")."""
    operation = OPERATIONS[call.op]
    if operation.direction == "send":
        if operation.signals:
            return "waits for", "reached the wait for"
        return "receives", "posted the receive for"
    return "sends", "sent" if operation.signals else "posted the send for"


def place_of_call(program: Program, rank: int, position: int) -> SourceLocation | None:
    """The place of the call at a position.

    None if there is no call: at an implicit init_process_group, or at the end of the program.
    """
    return program.place(rank, position) if position < len(program.code(rank).calls) else None


def location_text(place: SourceLocation | None) -> str:
    """For example `ring.yaml:9`; empty if the place is unknown."""
    return "" if place is None or not place.line else f"{place.file}:{place.line}"


def parenthesised(location: str) -> str:
    """For example ` (ring.yaml:9)`; empty if the place is unknown."""
    return f" ({location})" if location else ""


def blocked_call_words(program: Program, rank: int, position: int, request: int, part: int) -> str:
    """The call in which a rank is blocked; for a wait, the call that made the request."""
    if position >= len(program.code(rank).calls):
        return "the end of its program"
    call = program.call(rank, position)
    if request == position and part < 0:
        return call_words(call, program)
    if request == position:
        return f"{call.op}: {call_words(part_call(program, rank, position, part), program)}"
    return f"wait for {call_words(part_call(program, rank, request, part), program)}"


def blocked_device_words(program: Program, state: BlockedRank, need: WaitDependency) -> str:
    """Where a rank's device is blocked, and where its host is, which has only enqueued the work."""
    device = call_words(part_call(program, state.rank, need.position, need.part))
    place = place_of_call(program, state.rank, state.position)
    if place is None:
        return f"device in {device}, host at the end"
    host = OPERATIONS[program.code_call(state.rank, state.position).op].op
    return f"device in {device}, host in {host}, line {place.line}"


def aligned_columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of cells as lines with aligned columns."""
    if not rows:
        return []
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]


def cycle_words(path: tuple[int, ...]) -> str:
    """For example `ranks 0 → 1 → 0`, or `16 ranks (0 → 1 → 2 → 3 → … → 0)`."""
    if len(path) > MAX_SHOWN:
        return f"{len(path)} ranks ({' → '.join(map(str, path[:4]))} → … → {path[0]})"
    return f"ranks {' → '.join(map(str, (*path, path[0])))}"
