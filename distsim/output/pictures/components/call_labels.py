"""Short texts about calls, for the boxes of diagrams."""

from __future__ import annotations

from collections.abc import Sequence

from distsim.common.units import show_ns
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.operations.one_sided import tag_text
from distsim.operations.registry import OPERATIONS
from distsim.output.pictures.drawing.box_diagram import clipped
from distsim.output.text_layout import consecutive_ranges
from distsim.program.model import Program

_MAX_LABEL_WIDTH = 34


def ranks_in_words(ranks: Sequence[int], most: int = 6) -> str:
    """``ranks 0-3, 7``: runs of three or more are shortened, and at most ``most`` runs are
    listed.
    """
    runs = consecutive_ranges(sorted(ranks))
    shown = [
        f"{a}-{b}" if b - a > 1 else ", ".join(map(str, range(a, b + 1))) for a, b in runs[:most]
    ]
    more = f" and {sum(b - a + 1 for a, b in runs[most:])} more" if len(runs) > most else ""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(shown)}{more}"


def buffers_text(buffers: Sequence[TensorBuffer], most: int = 3) -> str:
    """The tensors' names; a fresh buffer by its shape."""
    names = list(dict.fromkeys(b.label or shape_text(b) for b in buffers))
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return clipped(", ".join(clipped(name, 24) for name in names[:most]) + more, _MAX_LABEL_WIDTH)


def shape_text(buffer: TensorBuffer) -> str:
    """``[8, 1024] bfloat16``."""
    return f"[{', '.join(map(str, buffer.shape))}] {buffer.dtype}"


def tensors_text(call: ResolvedCall) -> str:
    """The tensors that a call reads and writes: ``grad``, ``shard → full``."""
    given, got = list(call.inputs + call.reads), list(call.outputs + call.writes + call.adds)
    if given == got or not got:
        return buffers_text(given)
    return (
        f"→ {buffers_text(got)}"
        if not given
        else f"{buffers_text(given, 2)} → {buffers_text(got, 2)}"
    )


def group_text(call: ResolvedCall) -> str:
    """The group's name, empty for the world's."""
    return "" if call.group.id == 0 else clipped(call.group.name, 24)


def sends_to_peer(call: ResolvedCall) -> bool:
    """Whether the call moves data to its peer."""
    row = OPERATIONS[call.op]
    return row.direction == "send" or (row.kind == "remote" and row.gives == "all")


def operation_text(call: ResolvedCall) -> str:
    """The operation: ``all_reduce avg``, ``send → 1``, or a compute's own name."""
    if call.op == "compute":
        return clipped(call.name or "compute", _MAX_LABEL_WIDTH)
    if call.peer is not None or call.op in ("recv", "irecv"):
        other = "any" if call.peer is None else call.peer
        return f"{call.op} {'→' if sends_to_peer(call) else '←'} {other}"
    if call.op == "new_group":
        return clipped(f"new_group {call.name}", _MAX_LABEL_WIDTH)
    return f"{call.op} {call.reduce_op}" if call.reduce_op else call.op


def detail_text(call: ResolvedCall) -> str:
    """The second line: tensors, or how long it takes."""
    if call.op in ("compute", "sleep"):
        duration = show_ns(call.time_ns) if call.time_ns else ""
        tensors = tensors_text(call)
        # An arrow to the output follows the duration without a comma.
        needs_comma = duration and tensors and not tensors.startswith("→")
        separator = ", " if needs_comma else " "
        return f"{duration}{separator}{tensors}".strip()
    if call.op == "fail":
        return clipped(call.message, _MAX_LABEL_WIDTH)
    return tensors_text(call)


def call_text(call: ResolvedCall) -> str:
    """One line that names the whole call: ``recv x from rank 1, tag 3``."""
    words = (call.op, call.reduce_op, tensors_text(call))
    text = " ".join(word for word in words if word)
    if call.peer is not None:
        text += f" {'to' if sends_to_peer(call) else 'from'} rank {call.peer}"
    elif call.op in ("recv", "irecv"):
        text += " from any rank"
    parts = [text]
    if call.tag:
        parts.append(tag_text(call.tag))
    if group_text(call):
        parts.append(f"group {group_text(call)}")
    return ", ".join(parts)


def wait_text(program: Program, rank: int, position: int) -> str:
    """The requests that a ``wait`` completes: ``irecv act, isend act``."""
    waited = [
        program.call(rank, position - back) for back in program.code_call(rank, position).waits
    ]
    texts = [f"{c.op} {tensors_text(c)}".strip() for c in waited]
    return clipped(", ".join(texts), _MAX_LABEL_WIDTH) if texts else "no open request"


def place_text(program: Program, rank: int, position: int) -> str:
    """``file:line`` of a call, without its folders; empty at the end of the program."""
    if position >= len(program.code(rank).calls):
        return ""
    place = program.place(rank, position)
    return clipped(f"{place.file.rsplit('/', 1)[-1]}:{place.line}", 40)
