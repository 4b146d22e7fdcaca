"""The kernels of SyncBatchNorm, which torch has only for GPUs, by their formulas.

Sources: Ioffe and Szegedy, 2015; variances of several ranks are combined as in Chan et al., 1983.
They are correct, not fast.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from torch import Tensor

#: Kept, because torch removes the kernels of a library that is garbage-collected.
_registered_libraries: Final[list[Any]] = []


def _non_channel_axes(x: Tensor) -> list[int]:
    """All axes except that of the channels."""
    return [axis for axis in range(x.dim()) if axis != 1]


def _broadcast_channels(x: Tensor, per_channel: Tensor) -> Tensor:
    """A vector with one element per channel, in a shape that broadcasts with ``x``."""
    return per_channel.reshape([1, -1] + [1] * (x.dim() - 2))


def channel_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation of each channel, at least in float32."""
    import torch

    x = x if x.dtype == torch.float64 else x.float()
    variance, mean = torch.var_mean(x, dim=_non_channel_axes(x), correction=0)
    return mean, (variance + eps).rsqrt()


def gather_stats(
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
    counts: Tensor,
) -> tuple[Tensor, Tensor]:
    """Mean and 1 / standard deviation over all ranks, from those of each rank."""
    weights = counts.reshape(-1, 1).to(mean.dtype)
    total = weights.sum()
    total_mean = (mean * weights).sum(0) / total
    variances = invstd.pow(-2) - eps
    variance = ((variances + (mean - total_mean) ** 2) * weights).sum(0) / total
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(total_mean.to(running_mean.dtype), alpha=momentum)
    if running_var is not None:
        unbiased = variance * total / (total - 1).clamp(min=1)
        running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
    return total_mean, (variance + eps).rsqrt()


def normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, invstd: Tensor, eps: float
) -> Tensor:
    """The normalized tensor, scaled and shifted."""
    found = (x - _broadcast_channels(x, mean)) * _broadcast_channels(x, invstd)
    if weight is not None:
        found = found * _broadcast_channels(x, weight)
    if bias is not None:
        found = found + _broadcast_channels(x, bias)
    return found.to(x.dtype)


def backward_reduce(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    for_input: bool,
    for_weight: bool,
    for_bias: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Sums by channel, and the gradients of weight and bias.

    The sums are those of the gradient, and of the gradient times the centred input.
    """
    grad = grad.to(mean.dtype)
    axes = _non_channel_axes(x)
    centred = x.to(mean.dtype) - _broadcast_channels(x, mean)
    total = grad.sum(axes)
    product = (grad * centred).sum(axes)
    dtype = mean.dtype if weight is None else weight.dtype
    weight_grad = (product * invstd).to(dtype) if for_weight else None
    bias_grad = total.to(dtype) if for_bias else None
    return total, product, weight_grad, bias_grad


def backward_element(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    invstd: Tensor,
    weight: Tensor | None,
    total: Tensor,
    product: Tensor,
    counts: Tensor,
) -> Tensor:
    """The gradient of the input."""
    n = counts.sum().to(mean.dtype)
    centred = x.to(mean.dtype) - _broadcast_channels(x, mean)
    found = (
        grad.to(mean.dtype)
        - _broadcast_channels(x, total / n)
        - centred * _broadcast_channels(x, invstd**2 * product / n)
    )
    scale = invstd if weight is None else invstd * weight
    return (found * _broadcast_channels(x, scale)).to(x.dtype)


def register() -> None:
    """Register these functions as kernels of the CUDA device."""
    import torch

    make: Any = torch.library.Library
    library = make("aten", "IMPL")
    for name, kernel in (
        ("batch_norm_stats", channel_stats),
        ("batch_norm_gather_stats_with_counts", gather_stats),
        ("batch_norm_elemt", normalize),
        ("batch_norm_backward_reduce", backward_reduce),
        ("batch_norm_backward_elemt", backward_element),
    ):
        library.impl(name, kernel, "CUDA")
    _registered_libraries.append(library)
