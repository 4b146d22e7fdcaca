"""What rows share when they say what each back end makes of them (`Op.bindings`)."""

from __future__ import annotations

from distsim.ops.base import Peers

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
