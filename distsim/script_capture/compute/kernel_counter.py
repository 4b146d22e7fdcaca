"""What a script computes, counted as it runs: FLOP and bytes of each operator, priced by a
cluster's roofline.

FLOP by the formulas of `torch.utils.flop_counter` (a multiply and an add are two), with those that
it lacks: attention on the CPU, grouped products, fused LSTMs, products with vectors. Bytes: what an
operator reads and what it writes, each tensor once; views move none. Kernels are kept apart,
because a roofline holds for one kernel: a step's price is the sum of its kernels' prices, launch
included.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from math import prod
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from distsim.hardware.cluster import Cluster, cluster_from
from distsim.hardware.cost import CostModel
from distsim.script_capture.compute.fused_norms import FusedNormCounter

if TYPE_CHECKING:
    import torch

#: Operators that make room and write nothing.
_ALLOCATION_OPS: Final = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "lift_fresh",
)
#: Operators without a kernel of their own; `_unsafe_view` is a view that its schema says nothing of
#: (every product of more than two axes ends in one).
_KERNEL_FREE_OPS: Final = (
    "detach",
    "alias",
    "_local_scalar_dense",
    "is_same_size",
    "resize_",
    "set_",
    "record_stream",
    "lift_fresh_copy",
    "_unsafe_view",
)


class ComputeKernel(NamedTuple):
    """One operator's work: ``flops``, ``nbytes`` read and written, and the dtype that it computes
    in.
    """

    flops: int
    nbytes: int
    dtype: str


class ComputeInterval(NamedTuple):
    """What was computed between two points: each kind of kernel, and how often."""

    kernels: tuple[tuple[ComputeKernel, int], ...] = ()

    @property
    def flops(self) -> int:
        return sum(kernel.flops * count for kernel, count in self.kernels)

    @property
    def bytes(self) -> int:
        return sum(kernel.nbytes * count for kernel, count in self.kernels)

    @property
    def dtype(self) -> str:
        """In which most FLOP were done; float32 where there were none."""
        by_dtype: Counter[str] = Counter()
        for kernel, count in self.kernels:
            by_dtype[kernel.dtype] += kernel.flops * count
        return by_dtype.most_common(1)[0][0] if by_dtype.total() else "float32"

    @property
    def launches(self) -> int:
        return sum(count for _, count in self.kernels)


class KernelCounter:
    """The count while it goes on. ``take`` may be called from any thread."""

    def __init__(self, site: Callable[[], str] | None) -> None:
        self._site, self._lock = site, threading.Lock()
        self._now: Counter[ComputeKernel] = Counter()
        self._sites: dict[str, Counter[ComputeKernel]] = {}

    def add(self, kernel: ComputeKernel) -> None:
        where = self._site() if self._site is not None else None
        with self._lock:
            self._now[kernel] += 1
            if where is not None:
                self._sites.setdefault(where, Counter())[kernel] += 1

    def take(self) -> ComputeInterval:
        """What was computed since the last time, or since the beginning."""
        with self._lock:
            found, self._now = self._now, Counter()
        return ComputeInterval(tuple(found.items()))

    def sites(self) -> dict[str, ComputeInterval]:
        """All of it, by call site, where `counting` was given a ``site``."""
        with self._lock:
            return {
                where: ComputeInterval(tuple(kernels.items()))
                for where, kernels in self._sites.items()
            }


@contextmanager
def count_kernels(site: Callable[[], str] | None = None) -> Iterator[KernelCounter]:
    """Count what torch computes inside; backward passes of other threads included. ``site`` names
    who calls, for `KernelCounter.sites`.
    """
    counted = KernelCounter(site)
    fused = FusedNormCounter(lambda nbytes, dtype: counted.add(ComputeKernel(0, nbytes, dtype)))
    with fused.watched(), _counting_mode(counted, fused):
        yield counted


def duration_ns(stretch: ComputeInterval, cluster: Cluster | str | Mapping[str, object]) -> int:
    """How long one rank's device takes, kernel by kernel: see
    `distsim.hardware.cost.CostModel.compute_ns`.
    """
    return duration_with_model_ns(
        stretch, CostModel(cluster if isinstance(cluster, Cluster) else cluster_from(cluster), 1, 1)
    )


def duration_with_model_ns(stretch: ComputeInterval, model: CostModel) -> int:
    """`duration_ns` by a cost model that is there already."""
    return sum(
        model.compute_ns(0, kernel.flops, kernel.nbytes, kernel.dtype) * count
        for kernel, count in stretch.kernels
    )


# --- counting ---


def _counting_mode(counted: KernelCounter, fused: FusedNormCounter) -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode as Untyped

    mode: Any = Untyped

    kinds: dict[object, _OperatorKind] = {}
    _flop_formulas()  # now, because imports fail inside of some of torch's questions

    class Count(mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if (
                getattr(func, "namespace", "prim") == "prim"
            ):  # a question about a tensor, from where nothing may go wrong
                return func(*args, **kwargs)
            if any(
                _is_tensor_wrapper(t) for t in types
            ):  # what it makes of its parts is what is computed
                return NotImplemented
            kind = kinds.get(func)
            if kind is None:
                kind = kinds[func] = _operator_kind(func)
            if kind.composite and torch.is_inference_mode_enabled():
                with self:
                    found = func.decompose(*args, **kwargs)
                if found is not NotImplemented:
                    return found
            out = func(*args, **kwargs)
            if not kind.free and not fused.covers(func):
                counted.add(_kernel_of_call(kind, out, args, kwargs))
            return out

    return Count()


def _is_tensor_wrapper(kind: type) -> bool:
    """Is this a tensor that computes with other tensors: a DTensor, one that waits for a
    collective, a quantized one?
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    own = getattr(kind, "__torch_dispatch__", None)
    return own is not torch.Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


class _OperatorKind(NamedTuple):
    """``free``: no kernel runs. ``formula``: FLOP, of the arguments and the result. ``composite``:
    it is made of other operators. ``causal``: of attention, where `is_causal`, the queries and the
    keys stand among the arguments."""

    free: bool
    formula: Callable[..., int] | None
    composite: bool
    causal: tuple[int, int, int] | None = None


def _operator_kind(func: object) -> _OperatorKind:
    import torch

    if not isinstance(func, torch._ops.OpOverload):
        return _OperatorKind(True, None, False)
    name = func._schema.name.partition("::")[2]
    results = func._schema.returns
    view = bool(results) and all(
        r.alias_info is not None and not r.alias_info.is_write for r in results
    )
    free = (
        view
        or not results
        or name in _ALLOCATION_OPS
        or name in _KERNEL_FREE_OPS
        or func._schema.name.startswith(("c10d", "_c10d", "distsim::"))
    )
    composite = func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd)
    return _OperatorKind(
        free,
        _flop_formulas().get(func._overloadpacket),
        composite,
        _causal_argument_positions(func._schema),
    )


def _causal_argument_positions(schema: Any) -> tuple[int, int, int] | None:
    names = [argument.name for argument in schema.arguments]
    asked = ("is_causal", "query", "key")
    if not schema.name.startswith("aten::_scaled_dot_product_") or not all(
        name in names for name in asked
    ):
        return None
    where = [names.index(name) for name in asked]
    return where[0], where[1], where[2]


def _computed_share(where: tuple[int, int, int] | None, args: Any, kwargs: Any) -> float:
    """Share of the scores that fused attention computes: tiles above the diagonal are skipped (Dao,
    arXiv:2307.08691, section 3.1.1). On an H100 causal attention over 8192 tokens takes 0.55 of the
    time without (`benchmarks/gpu`)."""
    if where is None or not (
        args[where[0]] if where[0] < len(args) else kwargs.get("is_causal", False)
    ):
        return 1.0
    queries, keys = (int(args[index].shape[-2]) for index in where[1:])
    rows = min(queries, keys)
    return (rows * (rows + 1) / 2 + (queries - rows) * keys) / max(queries * keys, 1)


def _kernel_of_call(
    kind: _OperatorKind, out: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> ComputeKernel:
    read, written = list(_tensors((*args, *kwargs.values()))), list(_tensors((out,)))
    flops = int(kind.formula(*args, **kwargs, out_val=out)) if kind.formula is not None else 0
    flops = round(flops * _computed_share(kind.causal, args, kwargs)) if flops else 0
    nbytes = sum(_nbytes(t) for t in read) + sum(_nbytes(t) for t in written)
    first = next((t for t in (*written, *read) if t.is_floating_point() or t.is_complex()), None)
    return ComputeKernel(
        flops, nbytes, "float32" if first is None else str(first.dtype).removeprefix("torch.")
    )


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _nbytes(t: torch.Tensor) -> int:
    """Bytes that a kernel touches: an axis that was expanded lies in memory once."""
    if t.layout is not _strided():
        return 0
    return (
        prod(n for n, step in zip(t.shape, t.stride(), strict=True) if step or n == 0)
        * t.element_size()
    )


def _strided() -> torch.layout:
    import torch

    return torch.strided


_formula_table: Final[dict[object, Callable[..., int]]] = {}


def _flop_formulas() -> dict[object, Callable[..., int]]:
    """FLOP of operators, of torch and of ours."""
    if not _formula_table:
        import logging

        import torch

        logger = logging.getLogger("torch.utils.flop_counter")
        logger.setLevel(logging.ERROR)  # else it says of each rank that there is no Triton
        known = import_module("torch.utils.flop_counter")

        aten = torch.ops.aten

        def attention(
            q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *args: object, **more: object
        ) -> int:
            return int(known.sdpa_flop_count(q.shape, k.shape, v.shape))

        def attention_backward(
            grad: torch.Tensor,
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            *args: object,
            **more: object,
        ) -> int:
            return int(known.sdpa_backward_flop_count(grad.shape, q.shape, k.shape, v.shape))

        _formula_table.update(known.flop_registry)
        _formula_table.update(
            {
                aten._scaled_dot_product_flash_attention_for_cpu: attention,
                aten._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward,
                aten.mv: _vector_flops,
                aten.dot: _vector_flops,
                aten.vdot: _vector_flops,
                aten.addmv: _addmv_flops,
                aten.addbmm: _addbmm_flops,
                aten._grouped_mm: _grouped_mm_flops,
                aten.mkldnn_rnn_layer: _lstm_flops,
                aten.mkldnn_rnn_layer_backward: _lstm_backward_flops,
            }
        )
    return _formula_table


def _vector_flops(a: torch.Tensor, b: object, **more: object) -> int:
    return 2 * int(a.numel())


def _addmv_flops(x: object, a: torch.Tensor, b: object, *args: object, **more: object) -> int:
    return 2 * int(a.numel())


def _addbmm_flops(
    x: object, a: torch.Tensor, b: torch.Tensor, *args: object, **more: object
) -> int:
    return 2 * int(a.numel()) * int(b.shape[-1])


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *args: object, **more: object) -> int:
    """A product for each group of rows, or of columns: together as many as in one product of a with
    one of b's.
    """
    return 2 * int(a.numel()) * int(b.shape[-1])


def _lstm_flops(
    x: torch.Tensor, w_in: torch.Tensor, w_hidden: torch.Tensor, *args: object, **more: object
) -> int:
    """Each step of each sequence is multiplied with both weights."""
    return 2 * int(x.shape[0]) * int(x.shape[1]) * (int(w_in.numel()) + int(w_hidden.numel()))


def _lstm_backward_flops(
    x: torch.Tensor, w_in: torch.Tensor, w_hidden: torch.Tensor, *args: object, **more: object
) -> int:
    """The products of the forward pass, for the gradients of inputs and of weights."""
    return 2 * _lstm_flops(x, w_in, w_hidden)


__all__ = ["KernelCounter", "ComputeKernel", "ComputeInterval", "count_kernels", "duration_ns"]
