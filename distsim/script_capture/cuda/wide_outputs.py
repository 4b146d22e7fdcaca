"""Operators whose result has a wider dtype than their arguments, which torch has only for GPUs.

Matrix products with ``out_dtype``, and softmax of half-precision tensors (autocast uses it). The
arguments are widened first: a tensor core adds in the result's width, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor, dtype

#: Kept, because torch removes the kernels of a library that is garbage-collected.
_registered_libraries: Final[list[Any]] = []


def matmul(a: Tensor, b: Tensor, out_dtype: dtype) -> Tensor:
    """For `mm` and `bmm`."""
    return a.to(out_dtype) @ b.to(out_dtype)


def matmul_out(a: Tensor, b: Tensor, out_dtype: dtype, *, out: Tensor) -> Tensor:
    """`matmul` into an existing tensor."""
    return out.copy_(matmul(a, b, out_dtype))


def addmm(
    x: Tensor, a: Tensor, b: Tensor, out_dtype: dtype, *, beta: float = 1, alpha: float = 1
) -> Tensor:
    """For `addmm` and `baddbmm`. With ``beta`` 0, ``x`` may hold anything, NaN included."""
    product = matmul(a, b, out_dtype) * alpha
    return product + x.to(out_dtype) * beta if beta else product


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
    """`addmm` into an existing tensor."""
    return out.copy_(addmm(x, a, b, out_dtype, beta=beta, alpha=alpha))


def softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Softmax; with ``half_to_float``, its result is float32."""
    return _run_cpu_kernel("_softmax", x.float() if half_to_float else x, dim, False)


def log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """Logarithm of softmax; with ``half_to_float``, its result is float32."""
    return _run_cpu_kernel("_log_softmax", x.float() if half_to_float else x, dim, False)


def softmax_backward(grad: Tensor, found: Tensor, dim: int, input_dtype: dtype) -> Tensor:
    """The backward of `softmax`: the gradient has the dtype of its input."""
    return _run_cpu_kernel("_softmax_backward_data", grad, found, dim, found.dtype).to(input_dtype)


def log_softmax_backward(grad: Tensor, found: Tensor, dim: int, input_dtype: dtype) -> Tensor:
    """The backward of `log_softmax`."""
    return _run_cpu_kernel("_log_softmax_backward_data", grad, found, dim, found.dtype).to(
        input_dtype
    )


def _run_cpu_kernel(name: str, x: Tensor, *others: Any) -> Tensor:
    """Run the CPU's kernel on the same memory.

    The result is on the device of ``x``, which need not be the current one.
    """
    import torch

    extension: Any = torch.ops.distsim
    arguments = [
        extension.as_cpu(value) if isinstance(value, torch.Tensor) else value
        for value in (x, *others)
    ]
    result = getattr(torch.ops.aten, name)(*arguments)
    found: Tensor = extension.from_cpu(result, x.device.index)
    return found


def register() -> None:
    """Register these functions as kernels of the CUDA device."""
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
