"""Run a rank under torch's FakeTensorMode: tensors with sizes but without values.

Fake tensors have a shape, a dtype and a device, and no memory. So a script whose model is far
larger than this machine can run, and its calls go to the hub as always. Three things need care:

- Meshes and Python objects must stay real: they are made of ranks and of bytes.
- Functional collectives must be seen: the mode would compute their results by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

from distsim.script_capture.errors import UnsupportedError

#: Functions of torch.distributed that run with real tensors: those that send Python objects (as
#: tensors of their bytes), and barriers.
_FUNCTIONS_WITH_REAL_TENSORS: Final = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "monitored_barrier",
    "barrier",
)


@contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """Everything inside has sizes only. Call it after torch.distributed has been patched."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode
    _exempt_from_fake_mode()
    with mode(allow_non_fake_inputs=True), _functional_collectives_mode():
        yield


def _with_real_tensors(function: Callable[..., object]) -> Callable[..., object]:
    """The function, with real tensors inside."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    @wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _exempt_from_fake_mode() -> None:
    """Let object collectives and device meshes use real tensors."""
    c10d = import_module("torch.distributed.distributed_c10d")
    dist = import_module("torch.distributed")
    for name in _FUNCTIONS_WITH_REAL_TENSORS:
        if hasattr(c10d, name):
            function = _with_real_tensors(getattr(c10d, name))
            for module in (c10d, dist):
                setattr(module, name, function)
    device_mesh: Any = import_module("torch.distributed.device_mesh")
    for name, value in list(vars(device_mesh.DeviceMesh).items()):
        if not callable(value) or isinstance(value, type | staticmethod):
            continue
        if name not in ("__hash__", "__eq__"):
            setattr(device_mesh.DeviceMesh, name, _with_real_tensors(value))
    original = device_mesh.init_device_mesh
    replacement = _with_real_tensors(original)
    # Modules of torch have imported the function by name.
    for module in list(sys.modules.values()):
        if getattr(module, "__dict__", {}).get("init_device_mesh") is original:
            setattr(module, "init_device_mesh", replacement)  # noqa: B010 - not in their types


# --- functional collectives ---
class _OpenCollective(NamedTuple):
    """A functional collective that is not waited for.

    It keeps its tensor, so that no other tensor gets the id by which it is looked up.
    """

    work: Any
    tensor: Any


def _functional_collectives_mode() -> Any:
    """A mode above FakeTensorMode that makes each functional collective a call of its group."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode as Untyped

    mode: Any = Untyped
    open_collectives: dict[int, _OpenCollective] = {}

    def is_wrapper(kind: Any) -> bool:
        is_plain = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__
        return not is_plain and kind.__name__ != "FakeTensor"

    class FunctionalCollectivesMode(mode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if any(is_wrapper(kind) for kind in types):
                # A DTensor first splits into its parts; then its collectives arrive here.
                return NotImplemented
            out = func(*args, **kwargs)
            if getattr(func, "namespace", "") != "_c10d_functional":
                return out
            name = func._schema.name.partition("::")[2]
            if name == "wait_tensor":
                collective = open_collectives.pop(id(args[0]), None)
                if collective is not None:
                    collective.work.wait()
                return out
            outputs = list(out) if isinstance(out, list | tuple) else [out]
            work = _call_group(name, outputs, args)
            for tensor in outputs:
                open_collectives[id(tensor)] = _OpenCollective(work, tensor)
            return out

    return FunctionalCollectivesMode()


def _call_group(name: str, outputs: Sequence[Any], args: Sequence[Any]) -> Any:
    """Make the call of the group that a functional operator is for.

    Raises UnsupportedError for an operator that has none here.
    """
    resolve: Any = import_module("torch.distributed.distributed_c10d")._resolve_process_group
    group = resolve(args[-1])
    op = name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
    is_coalesced = "coalesced" in name
    inputs = list(args[0]) if isinstance(args[0], list | tuple) else [args[0]]
    if op == "all_reduce":
        call = group.allreduce_coalesced if is_coalesced else group.allreduce
        return call(outputs, _reduce_options(args[1]))
    if op == "all_gather_into_tensor":
        if is_coalesced:
            return group.all_gather_single_coalesced(outputs, inputs)
        return group.all_gather_single(outputs[0], inputs[0])
    if op == "reduce_scatter_tensor":
        if is_coalesced:
            return group.reduce_scatter_single_coalesced(outputs, inputs, _reduce_options(args[1]))
        return group.reduce_scatter_single(outputs[0], inputs[0], _reduce_options(args[1]))
    if op == "all_to_all_single":
        return group.all_to_all_single(outputs[0], inputs[0], args[1], args[2])
    if op == "broadcast":
        return group.broadcast(outputs, SimpleNamespace(rootRank=args[1]))
    raise UnsupportedError(
        f"distsim capture --fake does not support {name} as a functional collective"
    )


def _reduce_options(reduce_op: str) -> object:
    """Options with the attributes that `ProcessGroupMethods` reads."""
    return SimpleNamespace(reduceOp=SimpleNamespace(name=reduce_op))
