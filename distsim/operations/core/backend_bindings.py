"""What rows share when they say what each back end makes of them (`Op.bindings`)."""

from __future__ import annotations

from distsim.operations.core.algorithms import binomial_children, binomial_parent
from distsim.operations.core.operation_base import GroupRanks, MemberRoute
from distsim.operations.core.resolved_call import DTYPE_BYTES, ResolvedCall

COMPLEX_DTYPES = frozenset({"complex64", "complex128"})
#: ProcessGroupNCCL where it moves data by sends and receives (`torch/csrc/cuda/nccl.cpp`);
#: elsewhere it has other words.
NCCL_DTYPE_ERROR = "Unconvertible NCCL type {type}"
#: torch's Python layer.
MONITORED_BARRIER_ERROR = "monitored_barrier is only implemented for GLOO backend."
_GLOO_REDUCE_SCATTER_SHAPE_ERROR = (
    "Check failed: outputShape[0] * worldSize == inputShape[0] ({sizes})"
)
#: Refusals of ProcessGroupGloo (run) where the larger tensor's shape is not the smaller one's with
#: its first axis n times as long.
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
    """The root needs all, the others the root."""
    return None if me == root else frozenset((root,))


# --- what gloo's algorithms send ---
# Read in gloo's broadcast.cc, gather.cc, scatter.cc and reduce.cc; run with different roots.

#: gloo's default of the largest segment, bytes (``reduce.h``).
_MAX_SEGMENT_BYTES = 1 << 20


def tree_route(call: ResolvedCall, root: int, me: int) -> MemberRoute:
    """Down a binomial tree."""
    n = call.group.size
    v = (me - root) % n
    parents = frozenset({(binomial_parent(v) + root) % n}) if v else frozenset[int]()
    return MemberRoute(parents, frozenset((w + root) % n for w in binomial_children(n, v)))


def gather_route(call: ResolvedCall, root: int, me: int) -> MemberRoute:
    """Everybody sends to the root."""
    return (
        MemberRoute(receives=_other_group_ranks(call, me))
        if me == root
        else MemberRoute(sends=frozenset({root}))
    )


def scatter_route(call: ResolvedCall, root: int, me: int) -> MemberRoute:
    """The root sends to everybody."""
    return (
        MemberRoute(sends=_other_group_ranks(call, me))
        if me == root
        else MemberRoute(receives=frozenset({root}))
    )


def reduce_route(call: ResolvedCall, root: int, me: int) -> MemberRoute:
    """A ring through all members leaves each with a chunk of the sum, which goes to the root; of
    small tensors the last ranks have none.
    """
    if me == root:
        return MemberRoute(
            receives=frozenset(
                i for i in _other_group_ranks(call, me) if i < _ranks_with_chunk(call)
            ),
            ring=True,
        )
    return MemberRoute(sends=frozenset({root} if me < _ranks_with_chunk(call) else ()), ring=True)


def _other_group_ranks(call: ResolvedCall, me: int) -> frozenset[int]:
    return frozenset(range(call.group.size)) - {me}


def _ranks_with_chunk(call: ResolvedCall) -> int:
    """How many group ranks have a part of the sum after the ring: at least two segments for each,
    of at most 1 MiB.
    """
    n, numel = call.group.size, call.inputs[0].numel
    if not numel:
        return 0
    segment = min(-(-numel // (2 * n)), _MAX_SEGMENT_BYTES // DTYPE_BYTES[call.inputs[0].dtype])
    each = -(-max(-(-numel // segment), 2 * n) // n)
    return -(-numel // (each * segment))
