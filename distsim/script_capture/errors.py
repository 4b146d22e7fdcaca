"""The error for programs that capture cannot handle, and texts that several modules need for it."""

from __future__ import annotations

from typing import Final

SYMMETRIC_MEMORY_UNSUPPORTED: Final = (
    "distsim capture does not support this operator of symmetric memory: use the collectives of"
    " torch.ops.symm_mem, or get_buffer and barrier"
)


class UnsupportedError(RuntimeError):
    """The script uses something that distsim cannot capture; the text names it."""
