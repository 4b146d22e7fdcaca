"""CUDA graphs on the emulated device: record the operators of a graph, and run them at each replay.

A graph is recorded below autograd, operator by operator, with its tensors. Real devices run nothing
while a graph is recorded. Here the operators run, because later ones need tensors to work on; then
tensors from outside of the graph get their old values back. At a replay, the operators run again on
the same tensors, and results are copied to where the first ones are.

Calls of process groups are recorded and not made; each replay makes them. The groups do so
themselves (`RecordedGraph.add_step`), because a call is no operator.

All work of a replay runs on its stream: streams inside of a graph are not kept apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from distsim.script_capture.cuda.operator_mode import operator_mode
from distsim.script_capture.errors import UnsupportedError

if TYPE_CHECKING:
    from torch import Tensor

#: CUDA's error for a call that waits for the device, such as `Tensor.item`.
_NOT_PERMITTED: Final = "CUDA error: operation not permitted when stream is capturing"
#: Functional collectives, whose result is complete after `wait_tensor`.
_FUNCTIONAL_COLLECTIVES: Final = "_c10d_functional"
_HOST_READS: Final = ("aten::_local_scalar_dense", "aten::nonzero")


class GraphHooks:
    """What the counter of kernels does about graphs. These do nothing."""

    def begin(self) -> None:
        """Recording starts: from here on, nothing that runs counts."""

    def end(self) -> None:
        """Recording ends."""

    def uncounted(self) -> AbstractContextManager[None]:
        """A part of a replay that a real device does not run."""
        return nullcontext()


class RecordedGraph:
    """What a graph does: its steps, in order.

    ``inside_operator``: a call of a process group belongs to the operator that is being run.
    """

    def __init__(self) -> None:
        self.steps: list[Callable[[], object]] = []
        self.inside_operator = False
        self._own_memory: set[int] = set()
        self._overwritten: dict[object, tuple[Tensor, Tensor]] = {}

    def add_step(self, step: Callable[[], object]) -> None:
        """Let each replay run this, at this place."""
        self.steps.append(step)

    def run_operator(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run an operator and record it, unless it does nothing on the device."""
        inputs = list(_tensors(args)) + list(_tensors(kwargs.values()))
        self._refuse_host_reads(func, inputs, kwargs)
        if _writes(func):
            self._save_values(inputs)
        self.inside_operator = True
        try:
            out = func(*args, **kwargs)
        finally:
            self.inside_operator = False
        outputs = list(_tensors([out]))
        if not any(tensor.is_cuda for tensor in (*inputs, *outputs)):
            return out
        used = {_memory_of(tensor) for tensor in inputs}
        own = [tensor for tensor in outputs if _memory_of(tensor) not in used]
        self._own_memory.update(map(_memory_of, own))
        is_wait = func.name().startswith(f"{_FUNCTIONAL_COLLECTIVES}::wait_tensor")
        if (own or _writes(func)) and not is_wait:
            self.add_step(lambda: _run_again(func, args, kwargs, out))
        return out

    def _refuse_host_reads(
        self, func: Any, inputs: Sequence[Tensor], kwargs: dict[str, Any]
    ) -> None:
        """Raises RuntimeError, as CUDA does, for an operator that waits for the device."""
        if not any(tensor.is_cuda for tensor in inputs):
            return
        target = kwargs.get("device")
        is_copy_to_host = target is not None and str(target).startswith("cpu")
        if is_copy_to_host and kwargs.get("non_blocking"):
            is_copy_to_host = False
        if is_copy_to_host or func.name().partition(".")[0] in _HOST_READS:
            raise RuntimeError(_NOT_PERMITTED)

    def _save_values(self, tensors: Sequence[Tensor]) -> None:
        """Keep the values of tensors from outside, which an operator may change now."""
        for tensor in tensors:
            if not tensor.is_cuda or _memory_of(tensor) in self._own_memory:
                continue
            key = (_memory_of(tensor), tensor.storage_offset(), tensor.shape, tensor.stride())
            if key not in self._overwritten:
                self._overwritten[key] = (tensor, tensor.clone())

    def restore_values(self) -> None:
        """Undo what recording changed outside of the graph."""
        for tensor, values in reversed(self._overwritten.values()):
            tensor.copy_(values)
        self._overwritten.clear()


def _run_again(func: Any, args: Sequence[Any], kwargs: dict[str, Any], first: Any) -> None:
    """Run an operator, and copy its results to where the first ones are."""
    found = func(*args, **kwargs)
    if func.namespace == _FUNCTIONAL_COLLECTIVES:
        wait_tensor = import_module("torch").ops._c10d_functional.wait_tensor
        for tensor in _tensors([found]):
            wait_tensor(tensor)
    with _hooks[0].uncounted():
        for old, new in zip(_tensors([first]), _tensors([found]), strict=True):
            if _memory_of(old) != _memory_of(new):
                old.copy_(new)


def _tensors(values: Any) -> Iterator[Tensor]:
    """The tensors among values, and in lists of them."""
    torch: Any = import_module("torch")
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _memory_of(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _writes(func: Any) -> bool:
    arguments = func._schema.arguments
    return any(a.alias_info is not None and a.alias_info.is_write for a in arguments)


# --- recording ---
#: The graph that is being recorded, and the mode that records it.
_recording: Final[list[tuple[RecordedGraph, Any]]] = []
_hooks: Final[list[GraphHooks]] = [GraphHooks()]


def set_graph_hooks(hooks: GraphHooks) -> None:
    """Let the counter of kernels know about graphs."""
    _hooks[0] = hooks


def graph_being_recorded() -> RecordedGraph | None:
    """The graph that is being recorded; None while none is."""
    return _recording[-1][0] if _recording else None


def is_recording() -> bool:
    """As `torch.cuda.is_current_stream_capturing`."""
    return bool(_recording)


class CUDAGraph:
    """A `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._graph: RecordedGraph | None = None

    def capture_begin(self, *args: object, **more: object) -> None:
        """Record what is done from here on."""
        if _recording:
            raise RuntimeError(_NOT_PERMITTED)
        _hooks[0].begin()
        graph = RecordedGraph()
        mode = operator_mode(graph.run_operator)
        _recording.append((graph, mode))
        mode.__enter__()

    def capture_end(self) -> None:
        """Stop recording."""
        self._graph, mode = _recording.pop()
        mode.__exit__(None, None, None)
        with _below_autograd():
            self._graph.restore_values()
        _hooks[0].end()

    def replay(self) -> None:
        """Do what was recorded."""
        if self._graph is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        with _below_autograd():
            for step in self._graph.steps:
                step()

    def reset(self) -> None:
        """Forget what was recorded."""
        self._graph = None

    def pool(self) -> tuple[int, int]:
        """All graphs share one memory pool."""
        return 0, 1

    def instantiate(self) -> None:
        """Nothing is left to do."""

    def enable_debug_mode(self) -> None:
        """There is nothing to dump."""

    def debug_dump(self, debug_path: str) -> None:
        """There is nothing to dump."""

    def register_generator_state(self, state: object) -> None:
        """Random operators draw new numbers at each replay anyway."""

    def raw_cuda_graph(self) -> int:
        """Raises UnsupportedError: there is no graph of CUDA."""
        raise UnsupportedError(
            "distsim capture does not support CUDAGraph.raw_cuda_graph: its graphs are emulated"
        )

    raw_cuda_graph_exec = raw_cuda_graph
    get_graph_data = raw_cuda_graph


@contextmanager
def _below_autograd() -> Iterator[None]:
    torch: Any = import_module("torch")
    with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
        yield


CUDAGraph.__module__ = "torch.cuda.graphs"

__all__ = [
    "CUDAGraph",
    "GraphHooks",
    "RecordedGraph",
    "graph_being_recorded",
    "is_recording",
    "set_graph_hooks",
]
