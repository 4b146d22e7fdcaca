"""What rows share when they say what each back end makes of them (`Op.bindings`)."""

from __future__ import annotations

from distsim.ops.base import Peers, Route
from distsim.ops.records import DTYPE_BYTES, Call
from distsim.schedules import binomial_children, binomial_parent

COMPLEX = frozenset({"complex64", "complex128"})
#: ProcessGroupNCCL where it moves data by sends and receives (`torch/csrc/cuda/nccl.cpp`); elsewhere it has other words.
NCCL_MOVES = "Unconvertible NCCL type {type}"
#: torch's Python layer.
ONLY_GLOO = "monitored_barrier is only implemented for GLOO backend."
_GLOO_HALVES = "Check failed: outputShape[0] * worldSize == inputShape[0] ({sizes})"
#: Refusals of ProcessGroupGloo (run) where the larger tensor's shape is not the smaller one's with its first axis n times as long.
GLOO_SHAPES = {
    "all_gather": "ProcessGroupGloo::allgather: invalid tensor size at index 0 (expected {one}, got {got})",
    "all_gather_coalesced":
        "ProcessGroupGloo::allgather_coalesced: invalid size of output tensor at index 0 (expected length {one}, got {got})",
    "reduce_scatter": _GLOO_HALVES,
}  # fmt: skip


def root_alone(n: int, root: int, me: int) -> Peers:
    """The root needs all, the others the root."""
    return None if me == root else frozenset((root,))


# --- what gloo's algorithms send (read in broadcast.cc, gather.cc, scatter.cc, reduce.cc; run with roots that differ) ---
#: gloo's default of the largest segment, bytes (``reduce.h``).
_MOST_SEGMENT = 1 << 20


def tree_route(call: Call, root: int, me: int) -> Route:
    """Down a binomial tree."""
    n = call.group.size
    v = (me - root) % n
    parents = frozenset({(binomial_parent(v) + root) % n}) if v else frozenset[int]()
    return Route(parents, frozenset((w + root) % n for w in binomial_children(n, v)))


def gather_route(call: Call, root: int, me: int) -> Route:
    """Everybody sends to the root."""
    return Route(receives=_others(call, me)) if me == root else Route(sends=frozenset({root}))


def scatter_route(call: Call, root: int, me: int) -> Route:
    """The root sends to everybody."""
    return Route(sends=_others(call, me)) if me == root else Route(receives=frozenset({root}))


def reduce_route(call: Call, root: int, me: int) -> Route:
    """A ring through all members leaves each with a chunk of the sum, which goes to the root; of small tensors the last ranks have none."""
    if me == root:
        return Route(receives=frozenset(i for i in _others(call, me) if i < _chunks(call)), ring=True)
    return Route(sends=frozenset({root} if me < _chunks(call) else ()), ring=True)


def _others(call: Call, me: int) -> frozenset[int]:
    return frozenset(range(call.group.size)) - {me}


def _chunks(call: Call) -> int:
    """How many group ranks have a part of the sum after the ring: at least two segments for each, of at most 1 MiB."""
    n, numel = call.group.size, call.inputs[0].numel
    if not numel:
        return 0
    segment = min(-(-numel // (2 * n)), _MOST_SEGMENT // DTYPE_BYTES[call.inputs[0].dtype])
    each = -(-max(-(-numel // segment), 2 * n) // n)
    return -(-numel // (each * segment))
