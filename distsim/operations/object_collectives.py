"""Which calls belong to an object collective: the lengths of the pickled objects, or their bytes.

Key idea: an object collective is written as plain calls on tensors that are named after it
(`distsim.scenario.strategies.composite_calls.object_collectives`).
"""

from __future__ import annotations

import re

from distsim.operations.core.resolved_call import ResolvedCall

_OBJECT_TENSOR = re.compile(
    r"(broadcast_object_list|all_gather_object|gather_object|scatter_object_list)\d*_([a-z]+)$"
)


def object_collective(call: ResolvedCall) -> str:
    """The object collective to which a call belongs, or ""."""
    match = _object_tensor(call)
    return match[1] if match else ""


def is_broadcast_of_lengths(call: ResolvedCall) -> bool:
    """Whether a call broadcasts the lengths of the objects of a broadcast_object_list."""
    match = _object_tensor(call)
    return match is not None and match.groups() == ("broadcast_object_list", "lengths")


def _object_tensor(call: ResolvedCall) -> re.Match[str] | None:
    buffers = call.inputs or call.outputs
    return _OBJECT_TENSOR.match(buffers[0].name) if buffers else None
