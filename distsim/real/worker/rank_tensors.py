"""The tensors of a rank: whether this machine can hold them, made from the program's buffers,
filled as the simulator fills them, read back as numbers.
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
    """``memory[buffer]`` is the torch tensor of a buffer; a buffer without a name is fresh at each
    use.
    """

    def __init__(self, program: Program, rank: int, device: str) -> None:
        self.program, self.rank, self.device = program, rank, device
        self.names = {"rank": rank, **program.names_of(rank)}
        self.tensors: dict[str, Tensor] = {}
        self.buffers: dict[str, TensorBuffer] = {}

    def __getitem__(self, buffer: TensorBuffer) -> Tensor:
        if not buffer.name:
            return self._empty(buffer)
        found = self.tensors.get(buffer.label)
        if found is None:
            found = self.tensors[buffer.label] = self._empty(buffer)
            self.buffers[buffer.label] = buffer
            self._fill(found, self.initial(buffer))
        return found

    def reset(self) -> None:
        """Give every tensor its first value again."""
        for label, buffer in self.buffers.items():
            self.tensors[label].zero_()
            self._fill(self.tensors[label], self.initial(buffer))

    def initial(self, buffer: TensorBuffer) -> NDArray[np.generic] | None:
        """The numbers that the file gives a buffer, flat, of its size or of size 1."""
        spec = self.program.tensors.get(buffer.name)
        if spec is None or spec.value is None:
            return None
        return fill_numbers(
            spec.value, {**self.names, "copy": buffer.index}, buffer.numel, buffer.dtype, _NO_LIMIT
        )

    def assign(self, call: ResolvedCall) -> None:
        """`assign`: the value's numbers, computed as the simulator computes them, from what the
        named tensors hold.
        """
        for target in call.outputs or call.writes:
            env = _AssignNames(self, {**self.names, **dict(call.indices), "copy": target.index})
            self._fill(
                self[target], fill_numbers(call.value, env, target.numel, target.dtype, _NO_LIMIT)
            )

    def numbers(self, buffer: TensorBuffer) -> NDArray[np.generic]:
        """What a tensor holds now, flat."""
        return to_numpy(self[buffer], buffer.dtype)

    def packed(self, buffer: TensorBuffer) -> bytes:
        """A tensor's numbers as bytes: one element where all are the same, bit for bit, so that
        large ones stay small on disk.
        """
        import torch

        flat = self[buffer].detach().cpu().contiguous().view(-1)
        bits = flat.view(
            {1: torch.uint8, 2: torch.int16, 4: torch.int32}.get(flat.element_size(), torch.int64)
        )
        if flat.numel() > 1 and bits.numel() == flat.numel() and bool((bits == bits[0]).all()):
            return to_numpy(flat[:1], buffer.dtype).tobytes()
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
    """The names of an `assign`: numbers, and tensors, which are read only where the value names
    them.
    """

    def __init__(self, memory: RankTensors, plain: Mapping[str, object]) -> None:
        self.memory, self.plain = memory, plain

    def __getitem__(self, name: str) -> object:
        if name in self.plain:
            return self.plain[name]
        spec = self.memory.program.tensors[name]
        if spec.shape is None:
            raise KeyError(name)
        shape = tuple(at_row(n, self.memory.rank) for n in spec.shape)
        return widen_numbers(self.memory.numbers(TensorBuffer(name, 0, shape, spec.dtype)))

    def __iter__(self) -> Iterator[str]:
        return iter({**self.plain, **self.memory.program.tensors})

    def __len__(self) -> int:
        return len({**self.plain, **self.memory.program.tensors})


def to_numpy(tensor: Tensor, dtype: str) -> NDArray[np.generic]:
    """A tensor's numbers, flat, in numpy's form of its dtype."""
    import torch

    flat = tensor.detach().cpu().contiguous().view(-1)
    if not flat.numel():
        return np.zeros(0, numpy_dtype(dtype))
    data = flat.view(torch.uint8).numpy().tobytes()
    if dtype == "bool":  # gloo adds the bytes of booleans: true and true make a 2, which is true
        found: NDArray[np.generic] = np.frombuffer(data, dtype=np.uint8) != 0
        return found
    return np.frombuffer(data, dtype=numpy_dtype(dtype))


# --- what it weighs ---


def buffers_of(call: ResolvedCall) -> Iterator[TensorBuffer]:
    """All that a call and its parts read and write."""
    for piece in (call, *call.parts):
        yield from (*piece.inputs, *piece.outputs, *piece.writes, *piece.adds, *piece.reads)


def tensor_bytes(program: Program, ranks: Sequence[int]) -> int:
    """Bytes of all named buffers that the calls of these ranks use, and the most that buffers
    without a name take at a time.
    """
    return sum(_rank_bytes(program, rank) for rank in ranks)


def _rank_bytes(program: Program, rank: int) -> int:
    named: dict[str, int] = {}
    open_: dict[int, int] = {}  # position -> nameless bytes that its requests hold
    most = 0
    for position, call in program.calls_of(rank):
        fresh = 0
        for buffer in buffers_of(call):
            if buffer.name:
                named[buffer.label] = buffer.nbytes
            else:
                fresh += buffer.nbytes
        code_call = program.code_call(rank, position)
        for distance in (*code_call.waits, *code_call.drops):
            open_.pop(position - distance, None)
        most = max(most, sum(open_.values()) + fresh)
        if fresh and code_call.handled:
            open_[position] = fresh
    return sum(named.values()) + most


def check_memory(program: Program, ranks: Sequence[int]) -> None:
    """Raises EnvironmentFault where the tensors would not fit: the kernel would kill a rank, and
    that would look like a crash.
    """
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return
    free = next(
        (int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")), None
    )
    needed = tensor_bytes(program, ranks)
    if free is not None and needed > free * 3 // 4:
        raise EnvironmentFault(
            f"the tensors of {len(ranks)} ranks take {show_bytes(needed)}, and {show_bytes(free)} of memory are free here",
            "make them smaller with --set, or run on a larger machine",
        )
