"""Reduce ops as torch passes them, and the one that no other backend than NCCL has."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from distsim.script_capture.rank.tensor_payloads import is_fake

if TYPE_CHECKING:
    from torch import Tensor

#: NCCL's reduce op that multiplies before it adds; FSDP2 uses it to divide gradients.
PREMUL_SUM: Final = "premul_sum"


def reduce_op_name(opts: Any) -> str:
    """The reduce op as distsim names it, or `PREMUL_SUM`."""
    op = getattr(opts, "reduceOp", opts)
    kind = getattr(op, "op", None)
    return _lowercase_name(op) if kind is None else _cached_reduce_op_name(kind)


@cache
def _cached_reduce_op_name(kind: object) -> str:
    return _lowercase_name(kind)


def _lowercase_name(kind: object) -> str:
    return str(getattr(kind, "name", kind)).rsplit(".", 1)[-1].lower()


def premultiplied_inputs(tensors: Sequence[Tensor], opts: Any, backend: str) -> list[Tensor]:
    """What PREMUL_SUM adds: each input times the factor of the reduce op.

    Raises RuntimeError as torch does for backends other than NCCL.
    """
    if "nccl" not in backend:
        raise RuntimeError(f"Cannot use ReduceOp.PREMUL_SUM with {backend.capitalize()}")
    dispatch = import_module("torch.utils._python_dispatch")
    reduce_op = opts.reduceOp if hasattr(opts, "reduceOp") else opts
    factor = reduce_op.__getstate__()[1]
    # Without the modes that count kernels: NCCL's kernel multiplies on the way, and not the script.
    with dispatch._disable_current_modes():
        return [t if is_fake(t) else t.detach() * factor for t in tensors]
