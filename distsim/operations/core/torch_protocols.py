"""What rows see of torch, which they don't import: `torch_call` is handed all of it.
``torch.distributed`` itself comes as a module.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from distsim.operations.core.resolved_call import TensorBuffer


class TorchTensor(Protocol):
    """torch.Tensor, as far as rows cut one up."""

    def unbind(self, dim: int, /) -> Sequence[TorchTensor]:
        """See torch.Tensor.unbind."""

    def split(self, sizes: list[int], /) -> Sequence[TorchTensor]:
        """See torch.Tensor.split."""


class TensorLookup(Protocol):
    """The tensor of a Buffer, contiguous and of its shape."""

    def __getitem__(self, buffer: TensorBuffer, /) -> TorchTensor: ...


class TorchWork(Protocol):
    """torch.distributed.Work: a request."""

    def wait(self) -> object:
        """See torch.distributed.Work.wait."""
