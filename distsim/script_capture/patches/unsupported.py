"""What goes from rank to rank past every process group, so that the hub would neither see nor judge
it: refused by name.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from typing import Any, Final, NoReturn

from distsim.script_capture.rank.tensor_payloads import UnsupportedError

#: Static methods of torch's `_SymmetricMemory` without which nobody comes to memory of another
#: rank.
_SYMMETRIC_MEMORY_FUNCTIONS: Final = ("empty_strided_p2p", "rendezvous", "get_mempool_allocator")
SYMMETRIC_MEMORY_UNSUPPORTED: Final = (
    "distsim capture does not support symmetric memory (torch.distributed._symmetric_memory)"
)


def _raise_unsupported(what: str) -> Callable[..., NoReturn]:
    def refuse(*args: object, **kwargs: object) -> NoReturn:
        """Raises Unsupported."""
        raise UnsupportedError(what)

    return refuse


def refuse_unsupported_transports() -> None:
    """Lay the refusals over torch."""
    core = import_module("torch._C._distributed_c10d")
    for name in _SYMMETRIC_MEMORY_FUNCTIONS:
        if hasattr(getattr(core, "_SymmetricMemory", None), name):
            setattr(
                core._SymmetricMemory,
                name,
                staticmethod(_raise_unsupported(SYMMETRIC_MEMORY_UNSUPPORTED)),
            )
    for name in ("ProcessGroupGloo", "ProcessGroupNCCL", "ProcessGroupMPI", "ProcessGroupUCC"):
        if hasattr(
            core, name
        ):  # torch itself makes them in C++ or through `patches`; who calls one by name means a real network
            getattr(core, name).__init__ = _raise_unsupported(
                f"distsim capture does not support a {name} made by hand: use init_process_group"
            )
    rpc: Any = import_module("torch.distributed.rpc")
    rpc.init_rpc = _raise_unsupported(
        "distsim capture does not support torch.distributed.rpc (init_rpc)"
    )  # its agent talks in C++
    newer: Any = import_module("torch.distributed._dist2")
    newer.new_group = _raise_unsupported(
        "distsim capture does not support torch.distributed._dist2 (new_group): use init_process_group"
    )


def refuse_subprocess_ranks() -> None:
    """A program that the script starts as a rank would be a Python of its own, without the hub:
    Lightning's launcher, torch's elastic.
    """
    original = subprocess.Popen.__init__

    @wraps(original)
    def start(self: Any, args: Any, *more: Any, **given: Any) -> None:
        env: Mapping[Any, Any] = given.get("env") or {}
        if any(
            name in env and env[name] != os.environ.get(name) for name in ("RANK", "LOCAL_RANK")
        ):
            raise UnsupportedError(
                "distsim capture does not see ranks that a script starts as programs of their own (subprocess):"
                " give --nproc N, and they are started as under torchrun"
            )
        original(self, args, *more, **given)

    setattr(subprocess.Popen, "__init__", start)  # noqa: B010


def symmetric_memory_error(error: BaseException) -> str:
    """The text of an error in which torch found no kernel of symmetric memory; else nothing."""
    return (
        SYMMETRIC_MEMORY_UNSUPPORTED
        if isinstance(error, NotImplementedError) and "'symm_mem::" in str(error)
        else ""
    )
