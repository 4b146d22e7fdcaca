"""The plain records that every column of an operation's row works on.

A *resolved call* is one operation on one rank with all expressions evaluated. Nothing in here knows a
file, a clock or a back end.
"""

from __future__ import annotations

from dataclasses import field
from math import prod
from typing import Any

from distsim.records import dataclass

#: Bytes of one element. Names are torch's (``torch.float32`` is ``float32``).
DTYPE_BYTES: dict[str, int] = {
    "float64": 8, "float32": 4, "float16": 2, "bfloat16": 2,
    "float8_e4m3fn": 1, "float8_e5m2": 1,
    "int64": 8, "int32": 4, "int16": 2, "int8": 1, "uint8": 1, "bool": 1,
    "complex64": 8, "complex128": 16,
}  # fmt: skip

#: torch.distributed.ReduceOp names as they are written in a file (``op: avg``).
REDUCE_OPS = ("sum", "avg", "product", "min", "max", "band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Group:
    """A process group: ``ranks[i]`` is the global rank of group rank ``i``."""

    id: int
    name: str
    ranks: tuple[int, ...]
    backend: str | None = None
    timeout_ns: int | None = None

    @property
    def size(self) -> int:
        return len(self.ranks)

    def group_rank(self, rank: int) -> int:
        """The group rank of a global rank, -1 when it is no member (torch.distributed.get_group_rank)."""
        if 0 <= rank < len(self.ranks) and self.ranks[rank] == rank:  # the world, among others
            return rank
        return self.ranks.index(rank) if rank in self.ranks else -1


@dataclass(frozen=True, slots=True)
class Buffer:
    """The memory an operation names: one copy of a tensor on one rank.

    ``name`` is empty for an inline ``{shape, dtype}``: a fresh buffer of that call alone.
    ``index`` is the copy's number in ``name@index`` (0 when the tensor has a single copy).
    """

    name: str
    index: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def numel(self) -> int:
        return prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPE_BYTES[self.dtype]

    @property
    def label(self) -> str:
        return self.name if self.index == 0 else f"{self.name}@{self.index}"


@dataclass(frozen=True, slots=True)
class Call:
    """One operation on one rank, resolved to plain values.

    Only the fields that the row of ``op`` names are meaningful; the others keep their defaults.
    All ranks are global. ``inputs``/``outputs`` hold one buffer, or one per part where the file gave a list
    of names. In-place operations have the same buffer in both. Both are empty where this rank gives or gets
    nothing (gather's output away from ``dst``).
    """

    op: str
    rank: int
    group: Group
    peer: int | None = None  # p2p: the other rank; None on a receive from any source
    tag: int = 0
    root: int | None = None  # global rank of src/dst of a rooted collective
    reduce_op: str | None = None
    inputs: tuple[Buffer, ...] = ()
    outputs: tuple[Buffer, ...] = ()
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
    reads: tuple[Buffer, ...] = ()
    writes: tuple[Buffer, ...] = ()
    adds: tuple[Buffer, ...] = ()
    queue: str = ""  # the stream that is current at the call: "" the default one, or a name; compute also "host"
    stream: str = ""  # wait_stream: the stream that is waited for
    timeout_ns: int | None = None  # new_group, init_process_group, monitored_barrier
    backend: str | None = None  # new_group, init_process_group
    init_method: str | None = None  # init_process_group
    store: str | None = None  # init_process_group: in place of init_method
    said_rank: int | None = None  # init_process_group: its argument rank
    said_world: int | None = None  # init_process_group: its argument world_size
    device_id: int | None = None  # init_process_group: the GPU of an eager start
    wait_all_ranks: bool = False  # monitored_barrier
    code: int = 0  # exit's code
    message: str = ""  # fail's message
    value: Any = None  # assign's value, as parsed (see distsim.values)
    indices: tuple[tuple[str, int], ...] = ()  # loop indices at an assign
    local_sync: bool = False  # new_group(use_local_synchronization=True)
    parts: tuple[Call, ...] = field(default=())  # the isend/irecv of a batch

    @property
    def group_rank(self) -> int:
        return self.group.group_rank(self.rank)

    @property
    def input_nbytes(self) -> int:
        return sum(b.nbytes for b in self.inputs)

    @property
    def output_nbytes(self) -> int:
        return sum(b.nbytes for b in self.outputs)
