"""The tensors of a rank: creates them, fills them as the simulator does, and reads them back.

Also estimates their memory, so that a run that does not fit is refused before the kernel kills a
rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from distsim.common.errors import EnvironmentFault
from distsim.common.units import show_bytes
from distsim.operations.core.collective_results import numpy_dtype
from distsim.operations.core.resolved_call import ResolvedCall, TensorBuffer
from distsim.program.code import at_row
from distsim.program.model import Program
from distsim.values import fill_numbers
from distsim.values.numbers import widen_numbers

if TYPE_CHECKING:
    from torch import Tensor

#: No limit on written-out numbers: a real tensor holds them all.
_NO_LIMIT = 2**62


class RankTensors:
    """``tensors[buffer]`` is the torch tensor of a buffer.

    A buffer without a name gets a fresh tensor at each use.
    """

    def __init__(self, program: Program, rank: int, device: str) -> None:
        self.program, self.rank, self.device = program, rank, device
        self.names = {"rank": rank, **program.names_of(rank)}
        self.tensors: dict[str, Tensor] = {}
        self.buffers: dict[str, TensorBuffer] = {}

    def __getitem__(self, buffer: TensorBuffer) -> Tensor:
        if not buffer.name:
            return self._empty(buffer)
        tensor = self.tensors.get(buffer.label)
        if tensor is None:
            tensor = self.tensors[buffer.label] = self._empty(buffer)
            self.buffers[buffer.label] = buffer
            self._fill(tensor, self.initial(buffer))
        return tensor

    def reset(self) -> None:
        """Give every tensor its initial value again."""
        for label, buffer in self.buffers.items():
            self.tensors[label].zero_()
            self._fill(self.tensors[label], self.initial(buffer))

    def initial(self, buffer: TensorBuffer) -> NDArray[np.generic] | None:
        """The initial numbers of a buffer in the scenario, flat, of its size or of size 1."""
        spec = self.program.tensors.get(buffer.name)
        if spec is None or spec.value is None:
            return None
        names = {**self.names, "copy": buffer.index}
        return fill_numbers(spec.value, names, buffer.numel, buffer.dtype, _NO_LIMIT)

    def assign(self, call: ResolvedCall) -> None:
        """Execute an `assign`: compute the numbers as the simulator does."""
        for target in call.outputs or call.writes:
            numbers_by_name = {**self.names, **dict(call.indices), "copy": target.index}
            names = _AssignNames(self, numbers_by_name)
            numbers = fill_numbers(call.value, names, target.numel, target.dtype, _NO_LIMIT)
            self._fill(self[target], numbers)

    def numbers(self, buffer: TensorBuffer) -> NDArray[np.generic]:
        """The current contents of a tensor, flat."""
        return to_numpy(self[buffer], buffer.dtype)

    def packed(self, buffer: TensorBuffer) -> bytes:
        """A tensor's numbers as bytes; a single element if all are the same, bit for bit.

        So large tensors stay small on disk.
        """
        import torch

        flat = self[buffer].detach().cpu().contiguous().view(-1)
        integer_types = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
        bits = flat.view(integer_types.get(flat.element_size(), torch.int64))
        # complex128 has 16 bytes and becomes two integers; such a tensor is always written whole.
        is_one_to_one = bits.numel() == flat.numel()
        if flat.numel() > 1 and is_one_to_one and bool((bits == bits[0]).all()):
            flat = flat[:1]
        return to_numpy(flat, buffer.dtype).tobytes()

    def _empty(self, buffer: TensorBuffer) -> Tensor:
        import torch

        return torch.zeros(buffer.shape, dtype=getattr(torch, buffer.dtype), device=self.device)

    def _fill(self, tensor: Tensor, numbers: NDArray[np.generic] | None) -> None:
        if numbers is None or not tensor.numel():
            return
        import torch

        flat = np.ascontiguousarray(np.broadcast_to(numbers, tensor.numel()))
        source = torch.frombuffer(bytearray(flat.tobytes()), dtype=tensor.dtype)
        tensor.view(-1).copy_(source)


class _AssignNames(Mapping[str, object]):
    """The names that an `assign` may use: numbers, and tensors.

    A tensor is read only if the expression names it.
    """

    def __init__(self, tensors: RankTensors, numbers: Mapping[str, object]) -> None:
        self.tensors, self.numbers = tensors, numbers

    def __getitem__(self, name: str) -> object:
        if name in self.numbers:
            return self.numbers[name]
        spec = self.tensors.program.tensors[name]
        if spec.shape is None:
            raise KeyError(name)
        shape = tuple(at_row(size, self.tensors.rank) for size in spec.shape)
        return widen_numbers(self.tensors.numbers(TensorBuffer(name, 0, shape, spec.dtype)))

    def __iter__(self) -> Iterator[str]:
        return iter({**self.numbers, **self.tensors.program.tensors})

    def __len__(self) -> int:
        return len({**self.numbers, **self.tensors.program.tensors})


def to_numpy(tensor: Tensor, dtype: str) -> NDArray[np.generic]:
    """A tensor's numbers, flat, in numpy's equivalent of its dtype."""
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return np.zeros(0, numpy_dtype(dtype))
    data = flat.view(torch.uint8).numpy().tobytes()
    if dtype == "bool":
        # gloo adds the bytes of booleans: true and true make a 2, which is true.
        booleans: NDArray[np.generic] = np.frombuffer(data, dtype=np.uint8) != 0
        return booleans
    return np.frombuffer(data, dtype=numpy_dtype(dtype))


# --- memory ---


def buffers_of(call: ResolvedCall) -> Iterator[TensorBuffer]:
    """All buffers that a call and its parts read and write."""
    for piece in (call, *call.parts):
        yield from (*piece.inputs, *piece.outputs, *piece.writes, *piece.adds, *piece.reads)


def tensor_bytes(program: Program, ranks: Sequence[int]) -> int:
    """Bytes of all tensors of these ranks.

    They are the named buffers, and the peak of the buffers without a name.
    """
    return sum(_rank_bytes(program, rank) for rank in ranks)


def _rank_bytes(program: Program, rank: int) -> int:
    named: dict[str, int] = {}
    open_requests: dict[int, int] = {}  # position -> bytes of nameless buffers that it keeps alive
    nameless_peak = 0
    for position, call in program.calls_of(rank):
        nameless = 0
        for buffer in buffers_of(call):
            if buffer.name:
                named[buffer.label] = buffer.nbytes
            else:
                nameless += buffer.nbytes
        code_call = program.code_call(rank, position)
        for distance in (*code_call.waits, *code_call.drops):
            open_requests.pop(position - distance, None)
        nameless_peak = max(nameless_peak, sum(open_requests.values()) + nameless)
        if nameless and code_call.handled:
            open_requests[position] = nameless
    return sum(named.values()) + nameless_peak


def check_memory(program: Program, ranks: Sequence[int]) -> None:
    """Raise EnvironmentFault if the tensors would not fit into memory.

    Otherwise the kernel would kill a rank, and that would look like a crash of the program.
    """
    free = _available_memory()
    needed = tensor_bytes(program, ranks)
    if free is not None and needed > free * 3 // 4:
        raise EnvironmentFault(
            f"the tensors of {len(ranks)} ranks take {show_bytes(needed)}, "
            f"but only {show_bytes(free)} of memory are free here",
            "make them smaller with --set, or run on a node with more memory",
        )


def _available_memory() -> int | None:
    """Bytes that the kernel regards as available; None if it does not report them."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
