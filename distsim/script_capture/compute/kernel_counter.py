"""Count what a script computes while it runs: FLOP and bytes of each operator.

FLOP come from the formulas of `torch.utils.flop_counter` (a multiply and an add are two), and from
formulas for what it lacks: attention on the CPU, grouped products, fused LSTMs, products with
vectors. Bytes are what an operator reads and writes, each tensor once; views move none.

Kernels are kept apart, because a roofline holds for one kernel. The predicted time of a step is the
sum of the times of its kernels, launches included (`distsim.hardware.cost`). Captured programs
contain the kernels and not their time, so the same program can be simulated on any cluster.
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
from distsim.operations.core.resolved_call import DTYPE_BYTES, KernelWork
from distsim.script_capture.compute.fused_norms import FusedNormCounter

if TYPE_CHECKING:
    import torch

#: Operators that allocate memory and write nothing.
_ALLOCATION_OPS: Final = (
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "empty_permuted",
    "lift_fresh",
)
#: Namespaces of communication, and of the emulated device.
_OTHER_NAMESPACES: Final = ("c10d", "_c10d", "distsim::")
#: Operators without a kernel of their own. `_unsafe_view` is a view, but its schema does not say so
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


#: A dtype of the same width for those that distsim has no name for.
SUBSTITUTE_DTYPES: Final = {
    "uint16": "int16",
    "uint32": "int32",
    "uint64": "int64",
    "float8_e4m3fnuz": "float8_e4m3fn",
    "float8_e5m2fnuz": "float8_e5m2",
    "float8_e8m0fnu": "uint8",
    "complex32": "float32",
}


class ComputeKernel(NamedTuple):
    """The work of one operator: FLOP, bytes read and written, and the dtype it computes in."""

    flops: int
    nbytes: int
    dtype: str


class ComputeInterval(NamedTuple):
    """What was computed between two points: each distinct kernel, and how often."""

    kernels: tuple[tuple[ComputeKernel, int], ...] = ()

    @property
    def flops(self) -> int:
        """The floating-point operations of all kernels."""
        return sum(kernel.flops * count for kernel, count in self.kernels)

    @property
    def bytes(self) -> int:
        """The bytes that all kernels read and write."""
        return sum(kernel.nbytes * count for kernel, count in self.kernels)

    @property
    def dtype(self) -> str:
        """The dtype of most FLOP; float32 if there were none."""
        by_dtype: Counter[str] = Counter()
        for kernel, count in self.kernels:
            by_dtype[kernel.dtype] += kernel.flops * count
        return by_dtype.most_common(1)[0][0] if by_dtype.total() else "float32"

    @property
    def launches(self) -> int:
        """The number of kernel launches."""
        return sum(count for _, count in self.kernels)

    def work(self) -> tuple[KernelWork, ...]:
        """The kernels as a compute step states them, in as few entries as the roofline allows.

        Kernels without FLOP are limited by memory on every device, so their bytes can be added.
        Other kernels are merged only if they are equal.
        """
        copied = launches = 0
        entries = []
        for kernel, count in self.kernels:
            if kernel.flops:
                flops, nbytes = kernel.flops * count, kernel.nbytes * count
                entries.append(KernelWork(flops, nbytes, count, _stated_dtype(kernel.dtype)))
            else:
                copied += kernel.nbytes * count
                launches += count
        entries.sort(reverse=True)
        if launches:
            entries.append(KernelWork(0, copied, launches, "float32"))
        return tuple(entries)


def _stated_dtype(dtype: str) -> str:
    """The dtype as a compute step may state it; devices compute in float32 what they lack."""
    dtype = SUBSTITUTE_DTYPES.get(dtype, dtype)
    return dtype if dtype in DTYPE_BYTES else "float32"


class KernelCounter:
    """Counts kernels, for `count_kernels`. Its methods may be called from any thread.

    ``before_kernel`` is called before each kernel is counted, and may `take` those before.
    ``is_paused``: nothing is counted now.
    """

    def __init__(self, site: Callable[[], str] | None) -> None:
        self._site = site
        self._lock = threading.Lock()
        self._current: Counter[ComputeKernel] = Counter()
        self._by_site: dict[str, Counter[ComputeKernel]] = {}
        self.before_kernel: Callable[[], None] | None = None
        self.is_paused = False

    def add(self, kernel: ComputeKernel) -> None:
        """Count a kernel, and its line in the script if lines are wanted."""
        if self.is_paused:
            return
        if self.before_kernel is not None:
            self.before_kernel()
        site = self._site() if self._site is not None else None
        with self._lock:
            self._current[kernel] += 1
            if site is not None:
                self._by_site.setdefault(site, Counter())[kernel] += 1

    def take(self) -> ComputeInterval:
        """What was computed since the last call, or since the start."""
        with self._lock:
            kernels = self._current
            self._current = Counter()
        return ComputeInterval(tuple(kernels.items()))

    def sites(self) -> dict[str, ComputeInterval]:
        """Everything by call site, if `count_kernels` was given a ``site``."""
        with self._lock:
            return {
                site: ComputeInterval(tuple(kernels.items()))
                for site, kernels in self._by_site.items()
            }


@contextmanager
def count_kernels(site: Callable[[], str] | None = None) -> Iterator[KernelCounter]:
    """Count what torch computes inside, backward passes in other threads included.

    ``site`` returns the current call site, for `KernelCounter.sites`.
    """
    counter = KernelCounter(site)
    fused = FusedNormCounter(lambda nbytes, dtype: counter.add(ComputeKernel(0, nbytes, dtype)))
    with fused.watched(), _counting_mode(counter, fused):
        yield counter


def duration_ns(interval: ComputeInterval, cluster: Cluster | str | Mapping[str, object]) -> int:
    """How long one rank's device takes (`distsim.hardware.cost.CostModel.work_ns`)."""
    resolved = cluster if isinstance(cluster, Cluster) else cluster_from(cluster)
    return CostModel(resolved, 1, 1).work_ns(interval.work())


# --- counting ---


def _counting_mode(counter: KernelCounter, fused: FusedNormCounter) -> Any:
    """A mode that sees each operator on its way to its kernel."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode as Untyped

    mode: Any = Untyped

    kinds: dict[object, _OperatorKind] = {}
    # Now, because imports fail while torch asks an operator some of its questions.
    _flop_formulas()

    class KernelCountingMode(mode):  # type: ignore[misc]
        #: Such as DTensor's random numbers. torch takes this mode away while one runs, so the
        #: operators inside are not seen: it counts as one kernel without FLOP.
        supports_higher_order_operators = True

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if getattr(func, "namespace", "prim") == "prim":
                # A question about a tensor, from which no exception may come.
                return func(*args, **kwargs)
            if isinstance(func, torch._ops.HigherOrderOperator):
                out = func(*args, **kwargs)
                counter.add(_kernel_of_call(_HIGHER_ORDER_KIND, out, args, kwargs))
                return out
            if any(_is_tensor_wrapper(kind) for kind in types):
                # What is computed are the operators on its parts, which arrive here next.
                return NotImplemented
            kind = kinds.get(func)
            if kind is None:
                kind = kinds[func] = _operator_kind(func)
            if kind.is_composite and torch.is_inference_mode_enabled():
                # Otherwise such operators arrive here decomposed.
                with self:
                    found = func.decompose(*args, **kwargs)
                if found is not NotImplemented:
                    return found
            out = func(*args, **kwargs)
            if not kind.is_free and not fused.covers(func):
                counter.add(_kernel_of_call(kind, out, args, kwargs))
            return out

    return KernelCountingMode()


def _is_tensor_wrapper(kind: type) -> bool:
    """Whether such a tensor computes with other tensors.

    For example a DTensor, a tensor that waits for a collective, or a quantized one.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor

    own = getattr(kind, "__torch_dispatch__", None)
    return own is not torch.Tensor.__torch_dispatch__ and not issubclass(kind, FakeTensor)


class _OperatorKind(NamedTuple):
    """What is known about an operator.

    ``is_free``: no kernel runs. ``formula``: FLOP from the arguments and the result.
    ``is_composite``: it consists of other operators. ``causal``: None unless it is attention.
    """

    is_free: bool
    formula: Callable[..., int] | None
    is_composite: bool
    causal: _AttentionArguments | None = None


#: An operator that runs others. Which formula its work has is not known.
_HIGHER_ORDER_KIND: Final = _OperatorKind(False, None, False)


class _AttentionArguments(NamedTuple):
    """Positions of an attention operator's arguments."""

    is_causal: int
    query: int
    key: int


def _operator_kind(func: object) -> _OperatorKind:
    import torch

    if not isinstance(func, torch._ops.OpOverload):
        return _OperatorKind(True, None, False)
    schema = func._schema
    return _OperatorKind(
        _is_free(schema),
        _flop_formulas().get(func._overloadpacket),
        func.has_kernel_for_dispatch_key(torch._C.DispatchKey.CompositeImplicitAutograd),
        _attention_arguments(schema),
    )


def _is_free(schema: Any) -> bool:
    """Whether an operator runs no kernel that computes."""
    if not schema.returns or schema.name.startswith(_OTHER_NAMESPACES):
        return True
    name = schema.name.partition("::")[2]
    if name in _ALLOCATION_OPS or name in _KERNEL_FREE_OPS:
        return True
    aliases = [result.alias_info for result in schema.returns]
    is_view = all(alias is not None and not alias.is_write for alias in aliases)
    return is_view


def _attention_arguments(schema: Any) -> _AttentionArguments | None:
    if not schema.name.startswith("aten::_scaled_dot_product_"):
        return None
    names = [argument.name for argument in schema.arguments]
    try:
        return _AttentionArguments(*map(names.index, _AttentionArguments._fields))
    except ValueError:  # an attention operator without such an argument
        return None


def _computed_share(arguments: _AttentionArguments | None, args: Any, kwargs: Any) -> float:
    """The share of the scores that fused attention computes.

    Causal attention skips tiles above the diagonal (Dao, arXiv:2307.08691, section 3.1.1). On an
    H100 causal attention over 8192 tokens takes 0.55 of the time of full attention
    (`benchmarks/gpu`).
    """
    if arguments is None:
        return 1.0
    if arguments.is_causal < len(args):
        is_causal = args[arguments.is_causal]
    else:
        is_causal = kwargs.get("is_causal", False)
    if not is_causal:
        return 1.0
    queries = int(args[arguments.query].shape[-2])
    keys = int(args[arguments.key].shape[-2])
    rows = min(queries, keys)
    below_diagonal = rows * (rows + 1) / 2 + (queries - rows) * keys
    return below_diagonal / max(queries * keys, 1)


def _kernel_of_call(
    kind: _OperatorKind, out: object, args: tuple[object, ...], kwargs: dict[str, object]
) -> ComputeKernel:
    read = list(_tensors((*args, *kwargs.values())))
    written = list(_tensors((out,)))
    flops = int(kind.formula(*args, **kwargs, out_val=out)) if kind.formula is not None else 0
    if flops:
        flops = round(flops * _computed_share(kind.causal, args, kwargs))
    nbytes = sum(_nbytes(tensor) for tensor in (*read, *written))
    return ComputeKernel(flops, nbytes, _compute_dtype((*written, *read)))


def _compute_dtype(tensors: Iterable[torch.Tensor]) -> str:
    """The dtype of the first tensor that is not of integers."""
    for tensor in tensors:
        if tensor.is_floating_point() or tensor.is_complex():
            return str(tensor.dtype).removeprefix("torch.")
    return "float32"


def _tensors(values: Iterable[object]) -> Iterator[torch.Tensor]:
    import torch

    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that a kernel touches: an expanded axis (of stride 0) is in memory only once."""
    if tensor.layout is not _strided():
        return 0
    axes = zip(tensor.shape, tensor.stride(), strict=True)
    return prod(n for n, stride in axes if stride or n == 0) * tensor.element_size()


def _strided() -> torch.layout:
    import torch

    return torch.strided


_formula_table: Final[dict[object, Callable[..., int]]] = {}


def _flop_formulas() -> dict[object, Callable[..., int]]:
    """FLOP formulas by operator: torch's, and those of this module."""
    if not _formula_table:
        import logging

        import torch

        # Otherwise each rank logs that there is no Triton.
        logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
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
    """A product for each group of rows or of columns.

    Together they have as many FLOP as one product of ``a`` with one of the matrices of ``b``.
    """
    return 2 * int(a.numel()) * int(b.shape[-1])


def _lstm_flops(
    x: torch.Tensor, w_in: torch.Tensor, w_hidden: torch.Tensor, *args: object, **more: object
) -> int:
    """Each time step of each sequence is multiplied with both weights."""
    return 2 * int(x.shape[0]) * int(x.shape[1]) * (int(w_in.numel()) + int(w_hidden.numel()))


def _lstm_backward_flops(
    x: torch.Tensor, w_in: torch.Tensor, w_hidden: torch.Tensor, *args: object, **more: object
) -> int:
    """The products of the forward pass twice: for the gradients of inputs and of weights."""
    return 2 * _lstm_flops(x, w_in, w_hidden)


__all__ = ["KernelCounter", "ComputeKernel", "ComputeInterval", "count_kernels", "duration_ns"]
