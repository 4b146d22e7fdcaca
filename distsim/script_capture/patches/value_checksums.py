"""Checksums of tensors, for `capture --check-values`."""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def checksum(tensor: Tensor) -> str:
    """A checksum of the values; tensors with equal values have equal ones."""
    plain = tensor.detach()
    if not plain.is_contiguous():
        plain = plain.contiguous()
    size = plain.numel() * plain.element_size()
    if not size or not plain.data_ptr():  # a fake tensor has no memory
        return ""
    memory = (ctypes.c_char * size).from_address(plain.data_ptr())
    return f"{zlib.crc32(memory):08x}"


__all__ = ["checksum"]
