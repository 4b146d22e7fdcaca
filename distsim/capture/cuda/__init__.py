"""A CUDA device where there is none, for scripts that ask for one: their tensors lie in CPU memory and the CPU computes.

Two ways, of which `prepare` takes the first that works here: real CUDA tensors, by an extension that is built at first use; else every
``cuda`` of the script is read as ``cpu``, which hides mistakes of mixed devices and fails where a script insists on the name.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from distsim.capture.cuda.build import NoBuild, library

if TYPE_CHECKING:
    import torch

#: Files beside a script that are looked at, and bytes of each.
_MOST_FILES: Final = 200
_MOST_BYTES: Final = 1 << 20
REAL: Final = "cuda over CPU memory"
SPELLED: Final = "cuda spelled cpu"


@dataclass(frozen=True)
class Layer:
    """``name``: `REAL` or `SPELLED`. ``reason``: why it is this one, in words."""

    name: str
    reason: str
    _library: ctypes.CDLL | None = None

    def install(self, devices: int = 1) -> None:
        """Let torch have so many devices, in this process and in those forked from it. Imports torch; again is no harm."""
        from distsim.capture.cuda import real, spelled

        if self._library is not None:
            real.install(self._library, devices)
        else:
            spelled.install(devices)


_loaded: list[ctypes.CDLL] = []


def prepare(environ: Mapping[str, str] | None = None) -> Layer:
    """The layer that works here: builds the extension if there is none, and loads it. Call it before torch is imported.

    ``environ``: CXX, PATH and XDG_CACHE_HOME in place of this process's. Never raises for a machine that lacks something.
    """
    if not _loaded and "torch" in sys.modules:
        return Layer(SPELLED, "torch was imported before, and asks for its devices only once")
    try:
        path = library(environ)
    except NoBuild as reason:
        return Layer(SPELLED, str(reason))
    if not _loaded:
        try:
            _loaded.append(ctypes.CDLL(str(path)))
        except OSError as fault:
            return Layer(SPELLED, f"the extension can't be loaded: {fault}")
    return Layer(REAL, f"built for this torch, kept in {path.parent}", _loaded[0])


def asks_for_cuda(script: str | os.PathLike[str]) -> bool:
    """Does a script, or a Python file beside it, say ``cuda`` or ``torch.accelerator``? False where nothing can be read."""
    folder = os.path.dirname(os.path.abspath(script))
    try:
        beside = sorted(os.path.join(folder, name) for name in os.listdir(folder) if name.endswith(".py"))[:_MOST_FILES]
    except OSError:
        return False
    return any(_says_cuda(file) for file in (os.fspath(script), *beside))


def _says_cuda(file: str) -> bool:
    try:
        with open(file, "rb") as lines:
            return re.search(rb"\bcuda\b|\btorch\.accelerator\b", lines.read(_MOST_BYTES)) is not None
    except OSError:
        return False


def over_cpu() -> bool:
    """Do CUDA tensors of this process lie in CPU memory?"""
    return bool(_loaded)


def as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor, detached; a tensor of the CPU is itself."""
    import torch

    if tensor.device.type != "cuda":
        return tensor
    found: torch.Tensor = torch.ops.distsim.as_cpu(tensor.detach())
    return found


def from_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the current device, detached; under `SPELLED` the tensor itself."""
    import torch

    if not _loaded or tensor.device.type == "cuda":
        return tensor
    found: torch.Tensor = torch.ops.distsim.from_cpu(tensor.detach())
    return found


__all__ = ["REAL", "SPELLED", "Layer", "as_cpu", "asks_for_cuda", "from_cpu", "over_cpu", "prepare"]
