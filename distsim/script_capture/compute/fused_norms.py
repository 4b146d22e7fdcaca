"""RMS normalisation, counted as a GPU runs it: one kernel forward, two backward (torch's
`_fused_rms_norm`). On the CPU, where scripts are captured, torch makes it of eight operators and
some thirty backward: on an H100 8 times as long as what a profile of it shows.

Only `torch.nn.functional.rms_norm`, and with it `torch.nn.RMSNorm`, is fused there; a norm written
out in Python is not.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple

#: Under this word nodes of autograd's graph know the norm that they are of.
_METADATA_KEY: Final = "distsim.fused"


class FusedNormWork(NamedTuple):
    """Bytes that the fused kernels touch, and in which dtype."""

    forward: int
    backward: tuple[int, ...]
    dtype: str


class _FusedNormCall:
    """One call. ``head``: the node where its backward pass begins. ``last``: the node whose
    operators were met last.
    """

    def __init__(self, work: FusedNormWork) -> None:
        self.work, self.last = work, ""


class FusedNormCounter:
    """Knows which operators belong to a norm: asked at each one."""

    def __init__(self, add: Callable[[int, str], None]) -> None:
        """``add`` counts a kernel: bytes, dtype."""
        self._add, self._here = add, threading.local()

    def covers(self, func: Any) -> bool:
        """Is this operator a part of a norm, whose kernels are counted elsewhere? Those of its
        backward pass are counted at the first.
        """
        import torch

        if getattr(self._here, "inside", False):
            return True
        if torch.is_grad_enabled():  # a forward pass, a recomputed one too, though some node of the backward pass asked for it
            return False
        node: Any = torch._C._current_autograd_node()
        known = None if node is None else node.metadata.get(_METADATA_KEY)
        if known is None:
            return False
        norm, place = known
        if place == "head" != norm.last:
            for nbytes in norm.work.backward:
                self._add(nbytes, norm.work.dtype)
        norm.last = place
        return not (
            place == "tail" and func is torch.ops.aten.add.Tensor
        )  # the sum with what else the input's gradient is

    @contextmanager
    def watched(self) -> Iterator[None]:
        """While this lasts, `torch.nn.functional.rms_norm` is counted as fused."""
        import torch

        functional: Any = torch.nn.functional
        plain = functional.rms_norm

        def rms_norm(x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
            self._here.inside = True
            try:
                out = plain(x, shape, weight, eps)
            finally:
                self._here.inside = False
            work = _norm_work(x, weight, out)
            self._add(work.forward, work.dtype)
            if out.grad_fn is not None:
                _mark_backward_nodes(
                    out.grad_fn,
                    [t.grad_fn for t in (x, weight) if t is not None and t.grad_fn is not None],
                    _FusedNormCall(work),
                )
            return out

        functional.rms_norm = rms_norm
        try:
            yield
        finally:
            functional.rms_norm = plain


def _norm_work(x: Any, weight: Any, out: Any) -> FusedNormWork:
    """Forward: reads the input, writes the output. Backward: the input's gradient from the output's
    and the input; the weight's too.
    """
    here = [getattr(t, "_local_tensor", t) for t in (x, out)]
    read, written = (t.numel() * t.element_size() for t in here)
    once = (read + written + read,)
    more = (read + written,) if weight is not None and weight.requires_grad else ()
    return FusedNormWork(read + written, (*once, *more), str(here[1].dtype).removeprefix("torch."))


def _mark_backward_nodes(head: Any, ends: Sequence[Any], norm: _FusedNormCall) -> None:
    """The nodes from the output back to what was there before."""
    waiting, seen = [head], set[Any]()
    tails = []
    while waiting:
        node = waiting.pop()
        if (
            node in seen
            or node.name().endswith("AccumulateGrad")
            or any(node is end for end in ends)
        ):
            continue
        seen.add(node)
        node.metadata[_METADATA_KEY] = norm, "head" if node is head else "inner"
        before = [other for other, _ in node.next_functions if other is not None]
        tails += (
            [node] if any(other is ends[0] for other in before if ends) and node is not head else []
        )
        waiting += before
    if len(tails) == 1:
        tails[0].metadata[_METADATA_KEY] = norm, "tail"


__all__ = ["FusedNormCounter", "FusedNormWork"]
