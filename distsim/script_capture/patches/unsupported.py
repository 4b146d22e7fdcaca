"""Refuse, by name, what moves data between ranks without a process group.

The hub would neither see nor evaluate it, and the result of the capture would be wrong.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Mapping
from functools import wraps
from importlib import import_module
from types import ModuleType
from typing import Any, Final, NoReturn

from distsim.script_capture.errors import UnsupportedError
from distsim.script_capture.patches.after_import import after_import

_TORCHCOMMS_TEXT: Final = (
    "distsim capture does not support torchcomms: use torch.distributed's process groups"
)
_BACKEND_CLASSES: Final = (
    "ProcessGroupGloo",
    "ProcessGroupNCCL",
    "ProcessGroupMPI",
    "ProcessGroupUCC",
)


def _refusal(text: str) -> Callable[..., NoReturn]:
    """A function that raises UnsupportedError."""

    def refuse(*args: object, **kwargs: object) -> NoReturn:
        """Raises UnsupportedError."""
        raise UnsupportedError(text)

    return refuse


def refuse_unsupported_transports() -> None:
    """Patch torch so that these transports raise UnsupportedError."""
    core = import_module("torch._C._distributed_c10d")
    for name in _BACKEND_CLASSES:
        # torch itself creates backends in C++, or through `install`. A script that calls the class
        # wants a real network.
        if hasattr(core, name):
            getattr(core, name).__init__ = _refusal(
                f"distsim capture does not support a {name} created directly: use "
                "init_process_group"
            )
    rpc: Any = import_module("torch.distributed.rpc")
    rpc.init_rpc = _refusal(  # its agent communicates in C++
        "distsim capture does not support torch.distributed.rpc (init_rpc)"
    )
    dist2: Any = import_module("torch.distributed._dist2")
    dist2.new_group = _refusal(
        "distsim capture does not support torch.distributed._dist2 (new_group):"
        " use init_process_group"
    )
    refuse_torchcomms()


def refuse_torchcomms() -> None:
    """torchcomms can be imported, but not used.

    Its communicators are C++ objects that no process group sees.
    """
    after_import("torchcomms", _refuse_new_comm)


def _refuse_new_comm(module: ModuleType) -> None:
    setattr(module, "new_comm", _refusal(_TORCHCOMMS_TEXT))  # noqa: B010 - not typed


def refuse_subprocess_ranks() -> None:
    """Refuse ranks that the script starts as programs: Lightning's launcher, torch's elastic.

    Such a rank would be a Python of its own, without the hub. It is recognised by the variables
    that say which rank it is.
    """
    original = subprocess.Popen.__init__

    @wraps(original)
    def start(self: Any, args: Any, *more: Any, **given: Any) -> None:
        env: Mapping[Any, Any] = given.get("env") or {}
        for name in ("RANK", "LOCAL_RANK"):
            if name in env and env[name] != os.environ.get(name):
                raise UnsupportedError(
                    "distsim capture does not support ranks that a script starts as subprocesses:"
                    " give --nproc N to start the ranks as torchrun does"
                )
        original(self, args, *more, **given)

    setattr(subprocess.Popen, "__init__", start)  # noqa: B010
