"""Results that are wider than what they are made of, which torch has for GPUs alone: matrix
products (``out_dtype``), softmax of halves.

The factors are widened before they are multiplied, as a tensor core adds up in the result's width;
so is what softmax is taken of (autocast asks for that).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor, dtype

_registered_libraries: Final[list[Any]] = []


def matmul(a: Tensor, b: Tensor, out_dtype: dtype) -> Tensor:
    """`mm` and `bmm`."""
    return a.to(out_dtype) @ b.to(out_dtype)


def matmul_out(a: Tensor, b: Tensor, out_dtype: dtype, *, out: Tensor) -> Tensor:
    return out.copy_(matmul(a, b, out_dtype))


def addmm(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """`addmm` and `baddbmm`."""
    found = matmul(a, b, out_dtype) * alpha
    return found + x.to(out_dtype) * beta if beta else found


def addmm_out(
    x: Tensor,
    a: Tensor,
    b: Tensor,
    out_dtype: dtype,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: Tensor,
) -> Tensor:
    return out.copy_(addmm(x, a, b, out_dtype, beta=beta, alpha=alpha))


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _run_cpu_kernel("_softmax", x.float() if half_to_float else x, dim, False)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return _run_cpu_kernel("_log_softmax", x.float() if half_to_float else x, dim, False)


def softmax_backward(grad: Tensor, found: Tensor, dim: int, input_dtype: dtype) -> Tensor:
    """Of `softmax`: the gradient has the dtype of what it was taken of."""
    return _run_cpu_kernel("_softmax_backward_data", grad, found, dim, found.dtype).to(input_dtype)


def log_softmax_backward(grad: Tensor, found: Tensor, dim: int, input_dtype: dtype) -> Tensor:
    """Of `log_softmax`."""
    return _run_cpu_kernel("_log_softmax_backward_data", grad, found, dim, found.dtype).to(
        input_dtype
    )


def _run_cpu_kernel(name: str, x: Tensor, *given: Any) -> Tensor:
    """The CPU's kernel on the same memory; its result is on the device of ``x``, which need not be
    the current one.
    """
    import torch

    own: Any = torch.ops.distsim
    made = getattr(torch.ops.aten, name)(
        *(own.as_cpu(a) if isinstance(a, torch.Tensor) else a for a in (x, *given))
    )
    found: Tensor = own.from_cpu(made, x.device.index)
    return found


def register() -> None:
    """Give torch these as the kernels of its device."""
    import torch

    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    for name in ("mm", "bmm"):
        library.impl(f"{name}.dtype", matmul, "CUDA")
        library.impl(f"{name}.dtype_out", matmul_out, "CUDA")
    for name in ("addmm", "baddbmm"):
        library.impl(f"{name}.dtype", addmm, "CUDA")
        library.impl(f"{name}.dtype_out", addmm_out, "CUDA")
    for name, kernel in (
        ("_softmax", softmax),
        ("_log_softmax", log_softmax),
        ("_softmax_backward_data", softmax_backward),
        ("_log_softmax_backward_data", log_softmax_backward),
    ):
        library.impl(name, kernel, "CUDA")
    _registered_libraries.append(library)
