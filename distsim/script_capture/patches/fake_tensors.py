"""Sizes in place of numbers: a rank under torch's FakeTensorMode, whose calls go to the hub all the
same.

Tensors have shape, dtype and device and no memory, so that a model far larger than this machine
runs through. Three things must stay real or be seen: meshes and objects, which are numbers of ranks
and bytes; and functional collectives, which the mode would answer by itself.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final

#: Functions of torch.distributed that send Python objects, in tensors of their bytes.
_OBJECT_COLLECTIVES: Final = (
    "all_gather_object",
    "gather_object",
    "broadcast_object_list",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
    "monitored_barrier",
    "barrier",
)
#: What an error of FakeTensorMode comes to, for people.
NEEDS_VALUES: Final = (
    "this line needs the numbers of a tensor, of which --fake keeps the size alone"
)


def is_fake(tensor: object) -> bool:
    """Has it a size and no numbers?"""
    return type(tensor).__name__ == "FakeTensor"


def fake_tensor_error(error: BaseException) -> str:
    """The text of an error where it says that numbers were needed; else nothing."""
    names = {kind.__name__ for kind in type(error).__mro__}
    return (
        NEEDS_VALUES
        if names & {"DataDependentOutputException", "DynamicOutputShapeException"}
        else ""
    )


@contextmanager
def fake_tensor_mode() -> Iterator[None]:
    """Everything inside has sizes alone. The patches of torch.distributed are laid before."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode: Any = FakeTensorMode
    _exempt_from_fake_mode()
    with mode(allow_non_fake_inputs=True), _functional_collectives_mode():
        yield


def _with_real_tensors(function: Callable[..., object]) -> Callable[..., object]:
    """The function with real tensors inside."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    @wraps(function)
    def run(*args: object, **kwargs: object) -> object:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return run


def _exempt_from_fake_mode() -> None:
    """Meshes are made of numbers of ranks, objects of bytes."""
    c10d, dist = (
        import_module("torch.distributed.distributed_c10d"),
        import_module("torch.distributed"),
    )
    for name in _OBJECT_COLLECTIVES:
        if hasattr(c10d, name):
            made = _with_real_tensors(getattr(c10d, name))
            for module in (c10d, dist):
                setattr(module, name, made)
    meshes = import_module("torch.distributed.device_mesh")
    for name, value in list(vars(meshes.DeviceMesh).items()):
        if (
            callable(value)
            and not isinstance(value, type | staticmethod)
            and name not in ("__hash__", "__eq__")
        ):
            setattr(meshes.DeviceMesh, name, _with_real_tensors(value))
    plain, made = meshes.init_device_mesh, _with_real_tensors(meshes.init_device_mesh)
    for module in list(sys.modules.values()):  # torch's own modules have it by name
        if getattr(module, "__dict__", {}).get("init_device_mesh") is plain:
            module.init_device_mesh = made  # type: ignore[attr-defined]


# --- functional collectives ---
def _functional_collectives_mode() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode as Untyped

    mode: Any = Untyped
    open_works: dict[int, Any] = {}

    class Collectives(mode):  # type: ignore[misc]
        """Above the mode of sizes: what goes to other ranks is called as the group's, and its wait
        as that call's.
        """

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = kwargs or {}
            if any(
                t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
                and t.__name__ != "FakeTensor"
                for t in types
            ):
                return NotImplemented  # a DTensor first becomes its parts, here where its collectives are seen
            if getattr(func, "namespace", "") != "_c10d_functional":
                return func(*args, **kwargs)
            name = func._schema.name.partition("::")[2]
            out = func(*args, **kwargs)
            if name == "wait_tensor":
                for work in [open_works.pop(id(args[0]), None)]:
                    if work is not None:
                        work[0].wait()
                return out
            outs = list(out) if isinstance(out, list | tuple) else [out]
            work = _call_group(name, outs, args)
            for tensor in outs:
                open_works[id(tensor)] = (
                    work,
                    tensor,
                )  # held, so that no other tensor takes its id
            return out

    return Collectives()


def _call_group(name: str, outs: Sequence[Any], args: Sequence[Any]) -> Any:
    """Make the call of the group that the operator stands for. Raises Unsupported for one that has
    none here.
    """
    from distsim.script_capture.rank.tensor_payloads import UnsupportedError

    resolve: Any = import_module("torch.distributed.distributed_c10d")._resolve_process_group
    plain = name.removesuffix("_").removesuffix("_out").removesuffix("_coalesced")
    ins = list(args[0]) if isinstance(args[0], list | tuple) else [args[0]]
    group = resolve(args[-1])
    reducing = (
        SimpleNamespace(reduceOp=SimpleNamespace(name=args[1]))
        if plain in ("all_reduce", "reduce_scatter_tensor")
        else None
    )
    if plain == "all_reduce":
        return (
            group.allreduce_coalesced(outs, reducing)
            if "coalesced" in name
            else group.allreduce(outs, reducing)
        )
    if plain == "all_gather_into_tensor":
        return (
            group.all_gather_single_coalesced(outs, ins)
            if "coalesced" in name
            else group.all_gather_single(outs[0], ins[0])
        )
    if plain == "reduce_scatter_tensor":
        many = group.reduce_scatter_single_coalesced
        return (
            many(outs, ins, reducing)
            if "coalesced" in name
            else group.reduce_scatter_single(outs[0], ins[0], reducing)
        )
    if plain == "all_to_all_single":
        return group.all_to_all_single(outs[0], ins[0], args[1], args[2])
    if plain == "broadcast":
        return group.broadcast(outs, SimpleNamespace(rootRank=args[1]))
    raise UnsupportedError(
        f"distsim capture --fake does not support {name} as a functional collective"
    )
