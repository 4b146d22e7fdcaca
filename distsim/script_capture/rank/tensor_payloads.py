"""Convert tensors to payloads and back.

Small payloads travel in a frame, large ones through shared memory.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from distsim.script_capture.cuda.emulation import cuda_is_emulated
from distsim.script_capture.errors import UnsupportedError
from distsim.script_capture.protocol.wire import INLINE_LIMIT, PayloadLocation, PayloadReader
from distsim.script_capture.rank.client import HubClient

if TYPE_CHECKING:
    from torch import Tensor


def is_fake(tensor: object) -> bool:
    """Whether a tensor has a size but no values (torch's FakeTensorMode)."""
    return type(tensor).__name__ == "FakeTensor"


@cache
def _dtype_name(dtype: object) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(tensor: Tensor) -> str:
    """torch's name of a dtype: ``float32``."""
    return _dtype_name(tensor.dtype)


def readable_tensor(tensor: Tensor, op: str) -> Tensor:
    """A tensor whose memory the CPU can read. Raises UnsupportedError for one without memory."""
    if tensor.is_sparse or tensor.layout != _strided():
        raise UnsupportedError(f"distsim capture does not support sparse tensors in {op}")
    if tensor.device.type == "meta":
        raise UnsupportedError(
            f"distsim capture does not support tensors without memory (device meta) in {op}"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.requires_grad:
        tensor = tensor.detach()
    return tensor if _is_in_host_memory(tensor) else tensor.cpu()


def _is_in_host_memory(tensor: Tensor) -> bool:
    """Whether the CPU can read its memory.

    It cannot read that of a real GPU, which the tests of distsim may use.
    """
    return tensor.is_cpu or (tensor.is_cuda and cuda_is_emulated())


@cache
def _strided() -> object:
    import torch

    return torch.strided


@cache
def _tensor_type() -> type:
    import torch

    return torch.Tensor


def has_plain_memory(tensor: Tensor) -> bool:
    """Whether the bytes of its memory are its values, in order. Runs for each call."""
    if type(tensor) is not _tensor_type() or tensor.layout is not _strided():
        return False
    if not tensor.is_contiguous() or not (tensor.is_cpu or _is_in_host_memory(tensor)):
        return False
    return not (tensor.is_conj() or tensor.is_neg())


def pack_tensors(
    client: HubClient, tensors: Sequence[Tensor], op: str
) -> tuple[list[PayloadLocation], list[bytes]]:
    """The locations of the tensors' payloads, and the payloads that travel in the frame."""
    pieces: list[PayloadLocation] = []
    blobs: list[bytes] = []
    for tensor in tensors:
        # Only its size matters, and the hub knows that from the shapes.
        if is_fake(tensor):
            pieces.append([0])
            blobs.append(b"")
            continue
        dense = tensor if has_plain_memory(tensor) else readable_tensor(tensor, op).contiguous()
        count = dense.numel() * dense.element_size()
        slot = client.allocate_payload(count) if count > INLINE_LIMIT else None
        if slot is None:
            pieces.append([count])
            blobs.append(ctypes.string_at(dense.data_ptr(), count) if count else b"")
        else:
            address, location = slot
            ctypes.memmove(address, dense.data_ptr(), count)
            pieces.append(location)
    return pieces, blobs


def unpack_into(
    client: HubClient, tensor: Tensor, pieces: Sequence[PayloadLocation], blobs: PayloadReader
) -> None:
    """Fill a tensor with payloads, one behind the other.

    If they are larger than the tensor, the rest is ignored; if smaller, the rest of the tensor
    keeps its values.
    """
    if has_plain_memory(tensor):
        _copy_payloads(client, tensor, pieces, blobs)
        return
    if is_fake(tensor):
        return
    import torch

    with torch.no_grad():
        dense = tensor.detach()
        host = dense if _is_in_host_memory(dense) else dense.cpu()
        target = host.contiguous()
        _copy_payloads(client, target, pieces, blobs)
        if target is not dense:
            dense.copy_(target)


def _copy_payloads(
    client: HubClient, target: Tensor, pieces: Sequence[PayloadLocation], blobs: PayloadReader
) -> None:
    """Copy payloads from the frame and from shared memory, at most the size of the tensor."""
    address = target.data_ptr()
    room = target.numel() * target.element_size()
    for piece in pieces:
        count = min(piece[-1], room)
        if len(piece) == 1:
            ctypes.memmove(address, blobs.take(piece[0]), count)
        else:
            region, offset, _ = piece
            ctypes.memmove(address, client.regions.address[region] + offset, count)
        address += count
        room -= count
