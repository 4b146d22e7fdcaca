"""The buffers and other fields of a recorded call, with the recorded numbers of bytes.

A trace has the size of the larger side of a collective, and the sizes of its parts if they are
unequal. The shapes of all buffers follow from that.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from distsim.common.errors import UsageError
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.resolved_call import DTYPE_BYTES, RankGroup
from distsim.program.code import BufferVector
from distsim.trace.model import TraceCall


def collective_fields(
    operation: type[Operation],
    call: TraceCall,
    args: Mapping[str, Any],
    group: RankGroup,
    memory: str,
) -> dict[str, object]:
    """The fields of a collective, with buffers that have the recorded number of bytes."""
    fields: dict[str, object] = {
        key: args[key] for key in ("timeout_ns", "wait_all_ranks") if key in args
    }
    if operation.root_field is not None:
        fields["root"] = call.peer if call.peer is not None else 0
    if operation.reduces:
        fields["reduce_op"] = call.reduce_op or "sum"
    if operation.gives == "none":
        return fields
    numel = element_count(call)
    if operation.coalesces is not None:
        numels = args.get("coalesced") or [numel]
        return fields | _coalesced_buffers(operation, numels, group.size, call.dtype, memory)
    if "tensor" in operation.model_fields:
        buffers = (buffer_of(memory, "in", (numel,), call.dtype),)
        return {**fields, "inputs": buffers, "outputs": buffers}
    takes_list = not call.op.endswith(("_tensor", "_single"))
    for side in ("input", "output"):
        own_parts = args.get(f"{side}_parts")
        if own_parts is not None and not takes_list and not _is_one(operation, side):
            fields[f"{side}_splits"] = tuple(own_parts)
        fields[f"{side}s"] = tuple(
            buffer_of(memory, f"{side} {number}", shape, call.dtype)
            for number, shape in enumerate(
                _buffer_shapes(operation, call, args, group, side, takes_list)
            )
        )
    return fields


def _is_one(operation: type[Operation], side: str) -> bool:
    """A rank has a single buffer on this side, in which it has no parts for the other ranks."""
    return bool(getattr(operation, f"{side}_parts") == "one")


def _buffer_shapes(
    operation: type[Operation],
    call: TraceCall,
    args: Mapping[str, Any],
    group: RankGroup,
    side: str,
    takes_list: bool,
) -> list[tuple[int, ...]]:
    """The shapes of a collective's buffers on one side.

    ``args`` has the sizes of parts if they are unequal. Otherwise the larger side has ``nbytes``,
    divided evenly among the ranks.
    """
    numel = element_count(call)
    if _is_one(operation, side):
        other_parts = args.get("output_parts" if side == "input" else "input_parts")
        if other_parts is None:
            return [(numel // group.size,)]
        return [(other_parts[group.group_rank(call.rank)],)]
    own_parts = args.get(f"{side}_parts")
    if own_parts is None:
        return [(group.size, numel // group.size)] if takes_list else [(numel,)]
    if takes_list:
        return [(part,) for part in own_parts]
    return [(sum(own_parts),)]


def _coalesced_buffers(
    operation: type[Operation], numels: Sequence[int], ranks: int, dtype: str, memory: str
) -> dict[str, object]:
    """The buffers of a coalesced launch; ``numels``: elements of the larger side of each part."""
    has_single_tensor = "tensor" in operation.model_fields
    sides: dict[str, object] = {}
    for side in ("input", "output"):
        is_smaller = not has_single_tensor and _is_one(operation, side)
        sizes = [numel // ranks if is_smaller else numel for numel in numels]
        name = "in" if has_single_tensor else side
        sides[f"{side}s"] = tuple(
            buffer_of(memory, f"{name} {number}", (size,), dtype)
            for number, size in enumerate(sizes)
        )
    return sides


def buffer_of(memory: str, side: str, shape: tuple[int, ...], dtype: str) -> BufferVector:
    """A buffer; it gets a name only if its memory has one."""
    name = f"{memory} {side} {dtype}{list(shape)}" if memory else ""
    return BufferVector(name, 0, shape, dtype)


def element_count(call: TraceCall) -> int:
    """The elements of a call. Raises UsageError for an unknown dtype."""
    if call.dtype not in DTYPE_BYTES:
        raise UsageError(
            f"the trace has a {call.op} of dtype `{call.dtype}`, which distsim does not know",
            "see `distsim explain`",
        )
    return call.nbytes // DTYPE_BYTES[call.dtype]
