"""Tensors as bytes and back: through a frame where they are small, through shared memory where they are large."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING

from distsim.capture.client import Client
from distsim.capture.fake import is_fake
from distsim.capture.wire import INLINE, Blobs, Piece

if TYPE_CHECKING:
    from torch import Tensor


class Unsupported(RuntimeError):
    """A call that distsim can't capture. It says which."""


def dtype_of(tensor: Tensor) -> str:
    """torch's name of a dtype: ``float32``."""
    return str(tensor.dtype)[6:]


def plain(tensor: Tensor, op: str) -> Tensor:
    """A tensor whose memory can be read. Raises Unsupported for one that has none."""
    if tensor.is_sparse or tensor.layout != _strided():
        raise Unsupported(f"distsim capture does not support sparse tensors in {op}")
    if tensor.device.type == "meta":
        raise Unsupported(f"distsim capture does not support tensors without memory (device meta) in {op}")
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.detach() if tensor.requires_grad else tensor


def _strided() -> object:
    import torch

    return torch.strided


def give(client: Client, tensors: Sequence[Tensor], op: str) -> tuple[list[Piece], list[bytes]]:
    """The payloads of tensors, and what of them travels in the frame."""
    pieces: list[Piece] = []
    blobs: list[bytes] = []
    for tensor in tensors:
        if is_fake(tensor):
            pieces.append([0])
            blobs.append(b"")
            continue
        dense = plain(tensor, op).contiguous()
        count = dense.numel() * dense.element_size()
        room = client.region_piece(count) if count > INLINE else None
        if room is None:
            pieces.append([count])
            blobs.append(ctypes.string_at(dense.data_ptr(), count) if count else b"")
        else:
            ctypes.memmove(room[0], dense.data_ptr(), count)
            pieces.append(room[1])
    return pieces, blobs


def get(client: Client, tensor: Tensor, pieces: Sequence[Piece], blobs: Blobs) -> None:
    """Fill a tensor with payloads, one behind the other. What is too much is left out, as what is too little stays as it was."""
    import torch

    if is_fake(tensor):
        return
    with torch.no_grad():
        dense = tensor.detach()
        target = dense if dense.is_contiguous() else dense.contiguous()
        at, left = target.data_ptr(), target.numel() * target.element_size()
        for piece in pieces:
            count = min(piece[-1], left)
            if len(piece) == 1:
                data = blobs.take(piece[0])
                ctypes.memmove(at, data, count)
            else:
                ctypes.memmove(at, client.regions.address[piece[0]] + piece[1], count)
            at, left = at + count, left - count
        if target is not dense:
            dense.copy_(target)
