"""Tensors as bytes and back: through a frame where they are small, through shared memory where they
are large.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING

from distsim.script_capture.cuda import cuda_is_emulated
from distsim.script_capture.patches.fake_tensors import is_fake
from distsim.script_capture.protocol.wire import INLINE_LIMIT, PayloadLocation, PayloadReader
from distsim.script_capture.rank.client import HubClient

if TYPE_CHECKING:
    from torch import Tensor


class UnsupportedError(RuntimeError):
    """A call that distsim can't capture. It says which."""


@cache
def _dtype_name(dtype: object) -> str:
    return str(dtype)[6:]


def dtype_of(tensor: Tensor) -> str:
    """torch's name of a dtype: ``float32``."""
    return _dtype_name(tensor.dtype)


def readable_tensor(tensor: Tensor, op: str) -> Tensor:
    """A tensor whose memory can be read. Raises Unsupported for one that has none."""
    if tensor.is_sparse or tensor.layout != _strided():
        raise UnsupportedError(f"distsim capture does not support sparse tensors in {op}")
    if tensor.device.type == "meta":
        raise UnsupportedError(
            f"distsim capture does not support tensors without memory (device meta) in {op}"
        )
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    tensor = tensor.detach() if tensor.requires_grad else tensor
    return tensor if _in_host_memory(tensor) else tensor.cpu()


def _in_host_memory(tensor: Tensor) -> bool:
    """Can the CPU read its memory? Not that of a GPU which is there, as tests may use one."""
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
    """Is its memory what it says, byte for byte?"""
    return (
        type(tensor) is _tensor_type()
        and tensor.layout is _strided()
        and tensor.is_contiguous()
        and (tensor.is_cpu or _in_host_memory(tensor))
        and not (tensor.is_conj() or tensor.is_neg())
    )


def pack_tensors(
    client: HubClient, tensors: Sequence[Tensor], op: str
) -> tuple[list[PayloadLocation], list[bytes]]:
    """The payloads of tensors, and what of them travels in the frame."""
    pieces: list[PayloadLocation] = []
    blobs: list[bytes] = []
    for tensor in tensors:
        if is_fake(tensor):
            pieces.append([0])
            blobs.append(b"")
            continue
        dense = tensor if has_plain_memory(tensor) else readable_tensor(tensor, op).contiguous()
        count = dense.numel() * dense.element_size()
        room = client.allocate_payload(count) if count > INLINE_LIMIT else None
        if room is None:
            pieces.append([count])
            blobs.append(ctypes.string_at(dense.data_ptr(), count) if count else b"")
        else:
            ctypes.memmove(room[0], dense.data_ptr(), count)
            pieces.append(room[1])
    return pieces, blobs


def unpack_into(
    client: HubClient, tensor: Tensor, pieces: Sequence[PayloadLocation], blobs: PayloadReader
) -> None:
    """Fill a tensor with payloads, one behind the other. What is too much is left out, as what is
    too little stays as it was.
    """
    if has_plain_memory(tensor):
        _copy_payloads(client, tensor, pieces, blobs)
        return
    if is_fake(tensor):
        return
    import torch

    with torch.no_grad():
        dense = tensor.detach()
        target = dense.contiguous() if _in_host_memory(dense) else dense.cpu().contiguous()
        _copy_payloads(client, target, pieces, blobs)
        if target is not dense:
            dense.copy_(target)


def _copy_payloads(
    client: HubClient, target: Tensor, pieces: Sequence[PayloadLocation], blobs: PayloadReader
) -> None:
    at, left = target.data_ptr(), target.numel() * target.element_size()
    for piece in pieces:
        count = min(piece[-1], left)
        if len(piece) == 1:
            ctypes.memmove(at, blobs.take(piece[0]), count)
        else:
            ctypes.memmove(at, client.regions.address[piece[0]] + piece[1], count)
        at, left = at + count, left - count
