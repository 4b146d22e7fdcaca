"""Facts about backends that several operations share in `Operation.bindings`."""

from __future__ import annotations

from distsim.operations.core.algorithms import binomial_children, binomial_parent
from distsim.operations.core.operation_base import GroupRanks, MemberRoute
from distsim.operations.core.resolved_call import DTYPE_BYTES, ResolvedCall

#: The error text of ProcessGroupNCCL for collectives that it implements with sends and receives
#: (`torch/csrc/cuda/nccl.cpp`); other collectives have another text.
NCCL_DTYPE_ERROR = "Unconvertible NCCL type {type}"
#: Raised by torch's Python layer.
MONITORED_BARRIER_ERROR = "monitored_barrier is only implemented for GLOO backend."
_GLOO_REDUCE_SCATTER_SHAPE_ERROR = (
    "Check failed: outputShape[0] * worldSize == inputShape[0] ({sizes})"
)
#: Errors of ProcessGroupGloo (run) if the larger tensor does not have the shape of the smaller one
#: with a first dimension n times as long.
GLOO_SHAPE_ERRORS = {
    "all_gather": (
        "ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected {one}, got {got})"
    ),
    "all_gather_coalesced": (
        "ProcessGroupGloo::allgather_coalesced: invalid size of output tensor at index 0 "
        "(expected length {one}, got {got})"
    ),
    "reduce_scatter": _GLOO_REDUCE_SCATTER_SHAPE_ERROR,
}


def needs_only_root(n: int, root: int, me: int) -> GroupRanks:
    """The root needs all members; the others need the root."""
    return None if me == root else frozenset((root,))


# --- what gloo's algorithms send ---
# Read in gloo's broadcast.cc, gather.cc, scatter.cc and reduce.cc; run with different roots.

#: gloo's default for the largest segment, in bytes (`kMaxSegmentSize`, also in ``reduce.h``).
GLOO_MAX_SEGMENT_BYTES = 1 << 20


def tree_route(call: ResolvedCall, root: int, me: int) -> MemberRoute:
    """Data flow down a binomial tree."""
    n = call.group.size
    # Positions in the tree, whose root has position 0.
    position = (me - root) % n
    children = frozenset((child + root) % n for child in binomial_children(n, position))
    if position == 0:
        return MemberRoute(sends=children)
    parent = (binomial_parent(position) + root) % n
    return MemberRoute(receives=frozenset({parent}), sends=children)


def gather_route(call: ResolvedCall, root: int, me: int) -> MemberRoute:
    """Every member sends to the root."""
    if me == root:
        return MemberRoute(receives=_other_group_ranks(call, me))
    return MemberRoute(sends=frozenset({root}))


def scatter_route(call: ResolvedCall, root: int, me: int) -> MemberRoute:
    """The root sends to every member."""
    if me == root:
        return MemberRoute(sends=_other_group_ranks(call, me))
    return MemberRoute(receives=frozenset({root}))


def reduce_route(call: ResolvedCall, root: int, me: int) -> MemberRoute:
    """A ring through all members, after which each sends its chunk of the sum to the root.

    If the tensor is small, the last ranks have no chunk.
    """
    owners = range(_ranks_with_chunk(call))
    if me == root:
        others = _other_group_ranks(call, me)
        return MemberRoute(receives=others.intersection(owners), ring=True)
    return MemberRoute(sends=frozenset({root} if me in owners else ()), ring=True)


def _other_group_ranks(call: ResolvedCall, me: int) -> frozenset[int]:
    return frozenset(range(call.group.size)) - {me}


def _ranks_with_chunk(call: ResolvedCall) -> int:
    """How many group ranks own a part of the sum after the ring.

    gloo cuts the tensor into at least two segments for each rank, of at most 1 MiB each.
    """
    n, numel = call.group.size, call.inputs[0].numel
    if not numel:
        return 0
    max_segment = GLOO_MAX_SEGMENT_BYTES // DTYPE_BYTES[call.inputs[0].dtype]
    segment = min(-(-numel // (2 * n)), max_segment)
    each = -(-max(-(-numel // segment), 2 * n) // n)
    return -(-numel // (each * segment))
