"""Count RMS normalisation as a GPU runs it: one kernel forward, two backward (`_fused_rms_norm`).

On the CPU, where scripts are captured, torch composes it of eight operators forward and some thirty
backward. Counted one by one they would take, on an H100, 8 times as long as a profile of it shows.

Only `torch.nn.functional.rms_norm`, and with it `torch.nn.RMSNorm`, is fused on a GPU. A norm that
is written out in Python is not, and is counted operator by operator.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

#: The key in the metadata of an autograd node of a norm.
_METADATA_KEY: Final = "distsim.fused"
#: Where a node is in the backward graph of a norm: its backward pass begins at the head, and the
#: tail computes the gradient of its input.
_HEAD: Final = "head"
_INNER: Final = "inner"
_TAIL: Final = "tail"


class FusedNormWork(NamedTuple):
    """Bytes that each fused kernel reads and writes, and their dtype."""

    forward: int
    backward: tuple[int, ...]
    dtype: str


class _FusedNormCall:
    """One call. ``last_position``: that of the node whose operators ran last, "" before all."""

    def __init__(self, work: FusedNormWork) -> None:
        self.work = work
        self.last_position = ""


class FusedNormCounter:
    """Knows which operators belong to a norm. ``count_kernel`` counts a kernel: bytes, dtype."""

    def __init__(self, count_kernel: Callable[[int, str], None]) -> None:
        self._count_kernel = count_kernel
        self._thread = threading.local()

    def covers(self, func: Any) -> bool:
        """Whether this operator is part of a norm, and so must not be counted by itself.

        Called for each operator. The kernels of a norm's backward pass are counted when its first
        operator runs.
        """
        import torch

        if getattr(self._thread, "in_norm", False):
            return True
        # A forward pass. It may be a recomputed one, for which a node of the backward pass asked.
        if torch.is_grad_enabled():
            return False
        node: Any = torch._C._current_autograd_node()
        if node is None:
            return False
        marked = node.metadata.get(_METADATA_KEY)
        if marked is None:
            return False
        call, position = marked
        if position == _HEAD and call.last_position != _HEAD:
            self._count_backward(call.work)
        call.last_position = position
        # The tail may also add its gradient to those of other uses of the input, in a kernel of its
        # own.
        is_sum = position == _TAIL and func is torch.ops.aten.add.Tensor
        return not is_sum

    def _count_backward(self, work: FusedNormWork) -> None:
        for nbytes in work.backward:
            self._count_kernel(nbytes, work.dtype)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts, `torch.nn.functional.rms_norm` is counted as fused."""
        import torch

        functional: Any = torch.nn.functional
        original = functional.rms_norm

        def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
            self._thread.in_norm = True
            try:
                out = original(x, shape, weight, eps)
            finally:
                self._thread.in_norm = False
            work = _norm_work(x, weight, out)
            self._count_kernel(work.forward, work.dtype)
            if out.grad_fn is not None:
                inputs = [x] if weight is None else [x, weight]
                before = [tensor.grad_fn for tensor in inputs if tensor.grad_fn is not None]
                _mark_backward_nodes(out.grad_fn, before, _FusedNormCall(work))
            return out

        functional.rms_norm = rms_norm
        try:
            yield
        finally:
            functional.rms_norm = original


def _norm_work(x: Any, weight: Any, out: Any) -> FusedNormWork:
    """The forward kernel reads the input and writes the output.

    One backward kernel reads the output's gradient and the input, and writes the input's gradient.
    The other one reads both again for the weight's gradient.
    """
    x = getattr(x, "_local_tensor", x)  # the part of a DTensor on this rank
    out = getattr(out, "_local_tensor", out)
    input_bytes = x.numel() * x.element_size()
    output_bytes = out.numel() * out.element_size()
    both = input_bytes + output_bytes
    backward: tuple[int, ...] = (both + input_bytes,)
    if weight is not None and weight.requires_grad:
        backward = (both + input_bytes, both)
    return FusedNormWork(both, backward, str(out.dtype).removeprefix("torch."))


def _mark_backward_nodes(head: Any, before: Sequence[Any], call: _FusedNormCall) -> None:
    """Mark the nodes from the output (``head``) back to the nodes ``before`` the norm.

    ``before[0]`` is that of the input, if it has one.
    """
    pending = [head]
    seen: set[Any] = set()
    tails = []
    while pending:
        node = pending.pop()
        if node in seen or node.name().endswith("AccumulateGrad"):
            continue
        if any(node is end for end in before):
            continue
        seen.add(node)
        node.metadata[_METADATA_KEY] = call, _HEAD if node is head else _INNER
        next_nodes = [other for other, _ in node.next_functions if other is not None]
        if node is not head and before and any(other is before[0] for other in next_nodes):
            tails.append(node)
        pending += next_nodes
    if len(tails) == 1:
        tails[0].metadata[_METADATA_KEY] = call, _TAIL


__all__ = ["FusedNormCounter", "FusedNormWork"]
