"""Matrix products whose result is wider than their factors (``out_dtype``), which torch has for GPUs alone.

The factors are widened before they are multiplied, as a tensor core adds up in the result's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor, dtype

_kept: Final[list[Any]] = []


def product(a: Tensor, b: Tensor, out_dtype: dtype) -> Tensor:
    """`mm` and `bmm`."""
    return a.to(out_dtype) @ b.to(out_dtype)


def product_out(a: Tensor, b: Tensor, out_dtype: dtype, *, out: Tensor) -> Tensor:
    return out.copy_(product(a, b, out_dtype))


def added(x: Tensor, a: Tensor, b: Tensor, out_dtype: dtype, *, beta: float = 1, alpha: float = 1) -> Tensor:
    """`addmm` and `baddbmm`."""
    found = product(a, b, out_dtype) * alpha
    return found + x.to(out_dtype) * beta if beta else found


def added_out(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: dtype, *, beta: float = 1, alpha: float = 1, out: Tensor
) -> Tensor:  # fmt: skip
    return out.copy_(added(x, a, b, out_dtype, beta=beta, alpha=alpha))


def register() -> None:
    """Give torch these as the kernels of its device."""
    import torch

    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    for name in ("mm", "bmm"):
        library.impl(f"{name}.dtype", product, "CUDA")
        library.impl(f"{name}.dtype_out", product_out, "CUDA")
    for name in ("addmm", "baddbmm"):
        library.impl(f"{name}.dtype", added, "CUDA")
        library.impl(f"{name}.dtype_out", added_out, "CUDA")
    _kept.append(library)
