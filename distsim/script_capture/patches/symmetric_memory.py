"""Emulate symmetric memory (torch.distributed._symmetric_memory): tensors that ranks share.

A tensor lies in an anonymous file, which the other ranks map at the rendezvous. So a rank reads and
writes the memory of others at once, as GPUs do over NVLink. What orders these accesses are calls:
a barrier is a barrier of the group, and signals are the operations `put_signal` and `wait_signal`.
Collectives on symmetric memory are calls of the group, and fused operators are computed as torch's
own fallbacks do: the collective first, then the product.

Not found: an access that no barrier and no signal orders. What hands addresses of other ranks to
kernels, or lets kernels signal (NVSHMEM, tiles, signal pads), is refused.
"""

from __future__ import annotations

import math
import mmap
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.operations.one_sided import FIRST_SIGNAL_TAG
from distsim.script_capture.cuda.emulation import from_cpu
from distsim.script_capture.errors import UnsupportedError
from distsim.script_capture.rank.hub_calls import TensorTransfer

if TYPE_CHECKING:
    from torch import Tensor

#: Attributes of torch's `_SymmetricMemory` that only kernels can use.
_KERNEL_ATTRIBUTES: Final = (
    "buffer_ptrs",
    "buffer_ptrs_dev",
    "signal_pad_ptrs",
    "signal_pad_ptrs_dev",
    "get_signal_pad",
    "boxed",
)
_DISPATCH_KEYS: Final = ("CUDA", "CPU")
_SIGNAL_PAD_BYTES: Final = 2048
_MODULE_PATCHED: Final = "_distsim_patched"
#: Fused operators, each with the fallback of torch that has the same arguments.
_FUSED: Final = (
    "fused_all_gather_matmul",
    "fused_all_gather_scaled_matmul",
    "fused_matmul_reduce_scatter",
    "fused_scaled_matmul_reduce_scatter",
)


class _Segment(NamedTuple):
    """Memory of a rank: the tensor of its bytes, and the file that holds them."""

    content: Tensor
    descriptor: int

    @property
    def size(self) -> int:
        return self.content.numel()

    def contains(self, tensor: Tensor) -> bool:
        start = self.content.data_ptr()
        return start <= tensor.data_ptr() < start + self.size


def _mapped(descriptor: int, nbytes: int) -> Tensor:
    """The bytes of a file as a tensor of the current device."""
    torch: Any = import_module("torch")
    memory = mmap.mmap(descriptor, nbytes)
    content: Tensor = torch.frombuffer(memory, dtype=torch.uint8)
    return from_cpu(content) if torch.cuda.is_available() else content


def _view(
    content: Tensor, sizes: Sequence[int], strides: Sequence[int], dtype: Any, offset: int
) -> Tensor:
    """A tensor in these bytes; ``offset`` counts elements."""
    itemsize = dtype.itemsize
    whole = content.numel() // itemsize * itemsize
    return content[:whole].view(dtype).as_strided(sizes, strides, offset)


def _row_major(sizes: Sequence[int]) -> list[int]:
    return [math.prod(sizes[k + 1 :]) for k in range(len(sizes))]


# --- the handle ---
class EmulatedSymmetricMemory:
    """A `torch._C._distributed_c10d._SymmetricMemory`: the memory of all ranks of a group."""

    signal_pad_size = _SIGNAL_PAD_BYTES
    multicast_ptr = 0
    offset = 0

    def __init__(self, group: Any, contents: Sequence[Tensor]) -> None:
        self._group = group
        self._contents = contents
        self.rank = group.rank()
        self.world_size = group.size()
        self.buffer_size = contents[self.rank].numel()
        self.device = contents[self.rank].device

    def get_buffer(
        self, rank: int, sizes: Sequence[int], dtype: Any, storage_offset: int = 0
    ) -> Tensor:
        """A tensor in the memory of a rank."""
        needed = (math.prod(sizes) + storage_offset) * dtype.itemsize
        if needed > self.buffer_size:
            raise RuntimeError(
                f"SymmetricMemory::get_buffer: the requested size ({needed} bytes) exceeds the"
                f" allocated size ({self.buffer_size} bytes)"
            )
        return _view(self._contents[rank], sizes, _row_major(sizes), dtype, storage_offset)

    def get_remote_tensor(self, peer: int, sizes: Sequence[int], dtype: Any) -> Tensor:
        """As `get_buffer`, from the start of the memory."""
        return self.get_buffer(peer, sizes, dtype)

    def barrier(self, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for all ranks of the group."""
        self._group.barrier().wait()

    def put_signal(self, dst_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Signal a rank of the group."""
        transfer = TensorTransfer(completes_locally=True)
        self._signal("put_signal", dst_rank, channel, (self._cell(),), (), transfer=transfer)

    def wait_signal(self, src_rank: int, channel: int = 0, timeout_ms: int = 0) -> None:
        """Wait for the signal of a rank of the group."""
        self._signal("wait_signal", src_rank, channel, (), (self._cell(),))

    def _signal(
        self,
        op: str,
        group_rank: int,
        channel: int,
        inputs: tuple[Tensor, ...],
        outputs: tuple[Tensor, ...],
        **more: Any,
    ) -> None:
        peer = self._group.members[group_rank]
        tag = FIRST_SIGNAL_TAG + channel
        self._group.call(op, inputs, outputs, peer=peer, tag=tag, **more).wait()

    def _cell(self) -> Tensor:
        torch: Any = import_module("torch")
        cell: Tensor = torch.zeros(4, dtype=torch.uint8, device=self.device)
        return cell

    def __getattr__(self, name: str) -> Any:
        if name in _KERNEL_ATTRIBUTES:
            raise UnsupportedError(
                f"distsim capture does not support SymmetricMemory.{name}, which only kernels can"
                " use: use get_buffer, barrier, put_signal and wait_signal"
            )
        raise AttributeError(name)


# --- allocation and rendezvous ---
class _SymmetricHeap:
    """The symmetric memory of this process; stands for the static methods of torch's class."""

    def __init__(self) -> None:
        self._segments: list[_Segment] = []
        self._handles: dict[tuple[int, str], EmulatedSymmetricMemory] = {}
        self._groups: dict[int, str] = {}

    def empty_strided_p2p(
        self,
        size: Sequence[int],
        stride: Sequence[int],
        dtype: Any,
        device: Any,
        group_name: str | None = None,
        alloc_id: int | None = None,
    ) -> Tensor:
        """A new tensor that other ranks can map."""
        if type(import_module("torch").empty(0)).__name__ == "FakeTensor":
            raise UnsupportedError(
                "distsim capture --fake does not support symmetric memory, because its tensors"
                " have no memory: omit --fake"
            )
        _patch_module()
        nbytes = max(math.prod(size) * dtype.itemsize, 1)
        descriptor = os.memfd_create("symmetric memory")
        os.ftruncate(descriptor, nbytes)
        segment = _Segment(_mapped(descriptor, nbytes), descriptor)
        self._segments.append(segment)
        if group_name is not None:
            self._groups[segment.descriptor] = group_name
        return _view(segment.content, size, stride, dtype, 0)

    def segment_of(self, tensor: Tensor) -> _Segment | None:
        """The memory that contains a tensor; None if it is not symmetric."""
        return next((segment for segment in self._segments if segment.contains(tensor)), None)

    def is_symm_mem_tensor(self, tensor: Tensor) -> bool:
        """Whether a tensor lies in symmetric memory."""
        return self.segment_of(tensor) is not None

    def rendezvous(
        self, tensor: Tensor, group_name: str | None = None
    ) -> EmulatedSymmetricMemory | None:
        """Map the memory of all ranks; None for a tensor in other memory."""
        segment = self.segment_of(tensor)
        if segment is None:
            return None
        name = group_name or self._groups.get(segment.descriptor, "0")
        known = self._handles.get((segment.descriptor, name))
        if known is None:
            known = self._handles[segment.descriptor, name] = _handle(segment, name)
        return known


def _handle(segment: _Segment, group_name: str) -> EmulatedSymmetricMemory:
    dist: Any = import_module("torch.distributed")
    group = dist.distributed_c10d._resolve_process_group(group_name)
    found: list[Any] = [None] * group.size()
    own = (os.getpid(), segment.descriptor, segment.size)
    dist.all_gather_object(found, own, group=group)
    sizes = [size for _, _, size in found]
    if len(set(sizes)) > 1:
        raise RuntimeError(f"SymmetricMemory::rendezvous: ranks allocated different sizes: {sizes}")
    contents = [
        segment.content if rank == group.rank() else _content_of(*location)
        for rank, location in enumerate(found)
    ]
    group.barrier().wait()  # no rank may end before the others have mapped its memory
    return EmulatedSymmetricMemory(group, contents)


def _content_of(pid: int, descriptor: int, nbytes: int) -> Tensor:
    """The memory of another rank."""
    opened = os.open(f"/proc/{pid}/fd/{descriptor}", os.O_RDWR)
    try:
        return _mapped(opened, nbytes)
    finally:
        os.close(opened)


# --- operators ---
class _Collectives:
    """Operators of the namespace symm_mem, as calls of the group."""

    def __init__(self, heap: _SymmetricHeap) -> None:
        self._heap = heap

    def _require(self, tensor: Tensor, operator: str) -> None:
        """Raises RuntimeError, as torch's kernels do, for a tensor in other memory."""
        if not self._heap.is_symm_mem_tensor(tensor):
            raise RuntimeError(
                f"{operator}: input must be allocated with symm_mem.empty()"
                " (torch.distributed._symmetric_memory)"
            )

    def _all_reduce(self, tensor: Tensor, reduce_op: str, group_name: str) -> Tensor:
        dist: Any = import_module("torch.distributed")
        operations = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG}
        if reduce_op not in operations:
            raise RuntimeError(f"symmetric memory supports sum and avg only, found {reduce_op}")
        group = dist.distributed_c10d._resolve_process_group(group_name)
        dist.all_reduce(tensor, operations[reduce_op], group=group)
        return tensor

    def one_shot_all_reduce(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        """A new tensor with the reduction."""
        self._require(input, "one_shot_all_reduce")
        return self._all_reduce(input.clone(), reduce_op, group_name)

    def one_shot_all_reduce_out(
        self, input: Tensor, reduce_op: str, group_name: str, out: Tensor
    ) -> Tensor:
        """The reduction in ``out``."""
        return out.copy_(self.one_shot_all_reduce(input, reduce_op, group_name))

    def one_shot_all_reduce_copy(
        self, symm_buffer: Tensor, local_input: Tensor, reduce_op: str, group_name: str
    ) -> Tensor:
        """As `one_shot_all_reduce`, of a tensor that is first copied to symmetric memory."""
        self._require(symm_buffer, "one_shot_all_reduce_copy")
        return self._all_reduce(local_input.clone(), reduce_op, group_name)

    def one_shot_all_reduce_copy_out(
        self,
        symm_buffer: Tensor,
        local_input: Tensor,
        reduce_op: str,
        group_name: str,
        out: Tensor,
    ) -> Tensor:
        """The reduction in ``out``."""
        found = self.one_shot_all_reduce_copy(symm_buffer, local_input, reduce_op, group_name)
        return out.copy_(found)

    def two_shot_all_reduce_(self, input: Tensor, reduce_op: str, group_name: str) -> Tensor:
        """The reduction in place."""
        self._require(input, "two_shot_all_reduce_")
        return self._all_reduce(input, reduce_op, group_name)

    def multimem_all_gather_out(self, input: Tensor, group_name: str, out: Tensor) -> Tensor:
        """The tensors of all ranks in ``out``, which is symmetric."""
        self._require(out, "multimem_all_gather_out")
        dist: Any = import_module("torch.distributed")
        group = dist.distributed_c10d._resolve_process_group(group_name)
        dist.all_gather_into_tensor(out, input.contiguous(), group=group)
        return out

    def by_name(self) -> dict[str, Callable[..., Any]]:
        """Each operator with the function that computes it."""
        return {
            "one_shot_all_reduce": self.one_shot_all_reduce,
            "one_shot_all_reduce_out": self.one_shot_all_reduce_out,
            "one_shot_all_reduce_copy": self.one_shot_all_reduce_copy,
            "one_shot_all_reduce_copy_out": self.one_shot_all_reduce_copy_out,
            "two_shot_all_reduce_": self.two_shot_all_reduce_,
            "two_shot_all_reduce_out": self.one_shot_all_reduce_out,
            "multimem_all_reduce_": self.two_shot_all_reduce_,
            "multimem_one_shot_all_reduce": self.one_shot_all_reduce,
            "multimem_one_shot_all_reduce_out": self.one_shot_all_reduce_out,
            "multimem_all_gather_out": self.multimem_all_gather_out,
        }


# --- patches ---
#: Registrations end with the library that made them.
_libraries: Final[list[Any]] = []


def install_symmetric_memory() -> None:
    """Patch the class of torch, and its operators."""
    core: Any = import_module("torch._C._distributed_c10d")
    heap = _SymmetricHeap()
    core._SymmetricMemory = _replacement(heap)
    # `empty` would take memory from a pool of the CUDA allocator.
    os.environ["TORCH_SYMMMEM_IMPLICIT_POOL"] = "0"
    _implement(_Collectives(heap).by_name())
    _patch_module()


def _patch_module() -> None:
    """Patch torch's module in Python, if it is imported.

    Importing it takes 40 ms, so this is done again when memory is allocated.
    """
    module: Any = sys.modules.get("torch.distributed._symmetric_memory")
    if module is None or _MODULE_PATCHED in vars(module):
        return
    setattr(module, _MODULE_PATCHED, True)
    module._SymmetricMemory = import_module("torch._C._distributed_c10d")._SymmetricMemory
    module._use_implicit_mempool = None  # read the variable again
    _implement({name: getattr(module, f"_{name}_fallback") for name in _FUSED})


def _implement(functions: Mapping[str, Callable[..., Any]]) -> None:
    torch: Any = import_module("torch")
    library = torch.library.Library("symm_mem", "IMPL")
    _libraries.append(library)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that kernels of torch are overridden
        for name, function in functions.items():
            for key in _DISPATCH_KEYS:
                library.impl(name, function, key, allow_override=True)


def _replacement(heap: _SymmetricHeap) -> type:
    """In place of torch's class `_SymmetricMemory`, whose static methods are the entry points."""

    def refuse_pools(device: object = None) -> None:
        raise UnsupportedError(
            "distsim capture does not support memory pools of symmetric memory: allocate with"
            " torch.distributed._symmetric_memory.empty"
        )

    statics: dict[str, Callable[..., object]] = {
        "empty_strided_p2p": heap.empty_strided_p2p,
        "rendezvous": heap.rendezvous,
        "is_symm_mem_tensor": heap.is_symm_mem_tensor,
        "has_multicast_support": lambda device_type, index: False,
        "set_group_info": lambda *args: None,
        "set_backend": lambda name: None,
        "get_backend": lambda device: "CUDA",
        "get_mempool_allocator": refuse_pools,
    }
    methods = {name: staticmethod(function) for name, function in statics.items()}
    return type("_SymmetricMemory", (EmulatedSymmetricMemory,), methods)


__all__ = ["EmulatedSymmetricMemory", "install_symmetric_memory"]
