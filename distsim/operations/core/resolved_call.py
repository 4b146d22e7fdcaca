"""Resolved calls: the plain records on which the methods of operations work, and checks that
operations share.

A *resolved call* is one operation on one rank with all expressions evaluated. This module knows no
files, clocks or backends. Functions that check membership, roots and buffers return why the call
may not be made, as a clause without a full stop, or None.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import field
from math import prod
from typing import Any, NamedTuple

from distsim.common.records import dataclass

#: Bytes of one element. Names are torch's (``torch.float32`` is ``float32``).
DTYPE_BYTES: dict[str, int] = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
    "complex64": 8,
    "complex128": 16,
}

#: torch.distributed.ReduceOp names as they are written in a file (``op: avg``).
REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class RankGroup:
    """A process group: ``ranks[i]`` is the global rank of group rank ``i``."""

    id: int
    name: str
    ranks: tuple[int, ...]
    backend: str | None = None
    timeout_ns: int | None = None

    @property
    def size(self) -> int:
        """The number of members."""
        return len(self.ranks)

    def group_rank(self, rank: int) -> int:
        """The group rank of a global rank, -1 when it is no member
        (torch.distributed.get_group_rank).
        """
        if 0 <= rank < len(self.ranks) and self.ranks[rank] == rank:  # the world, among others
            return rank
        return self.ranks.index(rank) if rank in self.ranks else -1


@dataclass(frozen=True, slots=True)
class TensorBuffer:
    """The memory that an operation uses: one copy of a tensor on one rank.

    ``name`` is empty for an inline ``{shape, dtype}``: a fresh buffer of that call alone.
    ``index`` is the copy's number in ``name@index`` (0 when the tensor has a single copy).
    """

    name: str
    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        """The element count on which all members must agree."""
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes as nccl-tests counts them (`Operation.nbytes`)."""
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def label(self) -> str:
        """The name in messages: ``x``, or ``x@2`` for a copy."""
        return self.name if self.index == 0 else f"{self.name}@{self.index}"


class KernelWork(NamedTuple):
    """Some kernels of a compute: their FLOP and bytes together, their number and their dtype."""

    flops: float
    nbytes: float
    kernels: int
    dtype: str


@dataclass(frozen=True, slots=True)
class ResolvedCall:
    """One operation on one rank, resolved to plain values.

    Only the fields that the row of ``op`` names are meaningful; the others keep their defaults. All
    ranks are global. ``inputs``/``outputs`` hold one buffer, or one per part where the file gave a
    list of names. In-place operations have the same buffer in both. Both are empty where this rank
    gives or gets nothing (gather's output away from ``dst``).
    """

    op: str
    rank: int
    group: RankGroup
    peer: int | None = None  # p2p: the other rank; None on a receive from any source
    tag: int = 0
    root: int | None = None  # global rank of src/dst of a rooted collective
    reduce_op: str | None = None
    inputs: tuple[TensorBuffer, ...] = ()
    outputs: tuple[TensorBuffer, ...] = ()
    input_splits: tuple[int, ...] | None = None
    output_splits: tuple[int, ...] | None = None
    is_async: bool = False
    assume_src: int | None = None
    name: str = ""  # compute's name, new_group's name
    ranks: tuple[int, ...] = ()  # new_group's members
    time_ns: int = 0  # compute, sleep
    flops: float = 0.0
    mem_bytes: float = 0.0
    kernels: int = 1  # that flops and bytes fall into
    dtype: str | None = None  # what a compute's flops are done in
    work: tuple[tuple[float, float, int, str], ...] = ()  # compute: as `KernelWork`
    reads: tuple[TensorBuffer, ...] = ()
    writes: tuple[TensorBuffer, ...] = ()
    adds: tuple[TensorBuffer, ...] = ()
    #: The stream that is current at the call: "" is the default stream; compute also has "host".
    queue: str = ""
    stream: str = ""  # wait_stream: the stream that is waited for
    timeout_ns: int | None = None  # new_group, init_process_group, monitored_barrier
    backend: str | None = None  # new_group, init_process_group
    init_method: str | None = None  # init_process_group
    store: str | None = None  # init_process_group: in place of init_method
    rank_argument: int | None = None  # init_process_group: its argument rank
    world_size_argument: int | None = None  # init_process_group: its argument world_size
    device_id: int | None = None  # init_process_group: the GPU of an eager start
    wait_all_ranks: bool = False  # monitored_barrier
    code: int = 0  # exit's code
    message: str = ""  # fail's message
    value: Any = None  # assign's value, as parsed (see distsim.values)
    indices: tuple[tuple[str, int], ...] = ()  # loop indices at an assign
    local_sync: bool = False  # new_group(use_local_synchronization=True)
    parts: tuple[ResolvedCall, ...] = field(default=())  # the isend/irecv of a batch

    @property
    def group_rank(self) -> int:
        """The caller's rank in the group."""
        return self.group.group_rank(self.rank)

    @property
    def kernel_work(self) -> tuple[KernelWork, ...]:
        """The kernels of a compute that is given by its work; empty if it is given by its time."""
        if self.work:
            return tuple(KernelWork(*kernels) for kernels in self.work)
        if not (self.flops or self.mem_bytes):
            return ()
        dtype = self.dtype or "float32"
        return (KernelWork(self.flops, self.mem_bytes, self.kernels, dtype),)

    @property
    def input_nbytes(self) -> int:
        """Bytes of all inputs."""
        return sum(b.nbytes for b in self.inputs)

    @property
    def output_nbytes(self) -> int:
        """Bytes of all outputs."""
        return sum(b.nbytes for b in self.outputs)


# --- why a call may not be made ---


_FLOAT_DTYPES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
COMPLEX_DTYPES = frozenset({"complex64", "complex128"})


def first_reason(reasons: Iterable[str | None]) -> str | None:
    """The first reason that is not None or empty."""
    return next((reason for reason in reasons if reason), None)


def group_text(group: RankGroup) -> str:
    """The group and its ranks, for messages."""
    ranks = ", ".join(map(str, group.ranks[:8])) + (", …" if group.size > 8 else "")
    return f"the group {group.name} (ranks {ranks})"


def caller_not_in_group(call: ResolvedCall) -> str | None:
    """The message for a caller that is not a member of the group, or None."""
    return (
        None
        if call.rank in call.group.ranks
        else f"rank {call.rank} is not in {group_text(call.group)}"
    )


def root_not_in_group(call: ResolvedCall, word: str) -> str | None:
    """The message for a root that is not a member of the group, or None."""
    if call.root is None or call.root in call.group.ranks:
        return None
    return f"{word} is rank {call.root}, which is not in {group_text(call.group)}"


def invalid_peer(call: ResolvedCall, peer: int | None) -> str | None:
    """The message for a peer that is the caller itself or not a member, or None."""
    if peer == call.rank:
        return f"rank {peer} is its own peer"
    if peer is not None and peer not in call.group.ranks:
        return f"rank {peer} is not in {group_text(call.group)}"
    return None


def differing_dtypes(buffers: Sequence[TensorBuffer]) -> str | None:
    """The message for buffers of one call with different dtypes, or None."""
    for other in buffers[1:]:
        if other.dtype != buffers[0].dtype:
            return (
                f"{_buffer_name(buffers[0])} is {buffers[0].dtype}, but {_buffer_name(other)} is "
                f"{other.dtype}"
            )
    return None


def differing_part_dtypes(buffers: Sequence[TensorBuffer]) -> str | None:
    """The message for parts of a coalesced launch with different dtypes, or None (torch:
    `_ensure_all_tensors_same_dtype` in all_reduce_coalesced).
    """
    reason = differing_dtypes(buffers)
    return f"the parts of one launch must have the same dtype: {reason}" if reason else None


def tensor_in_two_parts(
    inputs: Sequence[TensorBuffer], outputs: Sequence[TensorBuffer]
) -> str | None:
    """The message for parts of a launch that write the same tensor, or of which one writes a tensor
    that another reads; otherwise None.
    """
    for k, got in enumerate(outputs):
        others = [*outputs[:k], *inputs[:k], *inputs[k + 1 :]]
        if got.name and any((o.name, o.index) == (got.name, got.index) for o in others):
            return (
                f"{got.label} is used in two parts of one launch; parts run concurrently, so "
                "each needs its own tensor"
            )
    return None


def reduce_refusal(dtype: str, reduce_op: str) -> str | None:
    """Why no backend reduces this dtype with this op, or None. Restrictions of single backends are
    in their profiles.

    Source: ProcessGroupGloo ("Cannot use ReduceOp.BAND with non-integral dtype", "does not support
    RedOpType.PRODUCT on complex tensors"), ProcessGroupNCCL (bitwise ops never; complex only where
    the parts may be reduced on their own; bool AVG never).
    """
    if reduce_op in ("band", "bor", "bxor") and dtype in COMPLEX_DTYPES.union(_FLOAT_DTYPES):
        return f"reduce op {reduce_op} is only defined for integers, not for {dtype}"
    if reduce_op in ("product", "min", "max") and dtype in COMPLEX_DTYPES:
        return f"reduce op {reduce_op} is not defined for {dtype}"
    if reduce_op == "avg" and dtype == "bool":
        return "reduce op avg is not defined for bool"
    return None


def unsupported_reduction(call: ResolvedCall) -> str | None:
    """Why no backend supports the reduction of this call, or None."""
    buffers = call.inputs or call.outputs
    return reduce_refusal(buffers[0].dtype, call.reduce_op) if buffers and call.reduce_op else None


def part_sizes(
    buffers: Sequence[TensorBuffer], n: int, splits: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The element count of each part. A single buffer is split along its first dimension, by
    ``splits`` or equally; a list has one buffer for each part.
    """
    if len(buffers) != 1:
        return tuple(b.numel for b in buffers)
    if splits is None:
        return (buffers[0].numel // n,) * n
    rows = buffers[0].shape[0] if buffers[0].shape else 1
    return tuple(
        rows_of_part * (buffers[0].numel // rows if rows else 0) for rows_of_part in splits
    )


def wrong_part_count(buffers: Sequence[TensorBuffer], n: int, word: str) -> str | None:
    """The message for a list argument without n tensors, or None. Valid are n names, or one tensor
    whose first dimension has the size of the group.
    """
    if not buffers or (len(buffers) == n and n > 1):
        return None
    if len(buffers) > 1:
        return f"{word} has {len(buffers)} tensors, but the group has {n} ranks"
    shape = buffers[0].shape
    if n == 1 or (shape and shape[0] == n):
        return None
    named = f"{word} {_buffer_name(buffers[0])}" if buffers[0].name else word
    return (
        f"{named} has the shape {list(shape)}, but its first dimension must have the size of the "
        f"group, {n}"
    )


def wrong_element_count(word: str, found: int, wanted: int, why: str) -> str | None:
    """The message for a wrong element count, or None."""
    return None if found == wanted else f"{word} has {found} elements, but {why} {wanted}"


def _buffer_name(buffer: TensorBuffer) -> str:
    return buffer.label or f"a fresh {list(buffer.shape)}"
