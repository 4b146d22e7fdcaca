"""What rows see of torch, which they don't import: `torch_call` is handed all of it. ``torch.distributed`` itself comes as a module."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distsim.ops.records import Buffer


class Tensor(Protocol):
    """torch.Tensor, as far as rows cut one up."""

    def unbind(self, dim: int, /) -> Sequence[Tensor]: ...
    def split(self, sizes: list[int], /) -> Sequence[Tensor]: ...


class Memory(Protocol):
    """The tensor of a Buffer, contiguous and of its shape."""

    def __getitem__(self, buffer: Buffer, /) -> Tensor: ...


class Work(Protocol):
    """torch.distributed.Work: a request."""

    def wait(self) -> object: ...
