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
from itertools import islice
from typing import TYPE_CHECKING, Final

from distsim.capture.cuda.build import NoBuild, library

if TYPE_CHECKING:
    import torch

#: Files beside a script that are looked at, folders of a package beside it, and bytes of each file.
_MOST_FILES: Final = 200
_MOST_FOLDERS: Final = 50
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
        from distsim.capture.cuda import kernels, real, spelled

        kernels.prepare()
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
    """Does a script, a Python file beside it or one of a folder beside it that one of these imports, say ``cuda`` or
    ``torch.accelerator``? False where nothing can be read."""
    folder = os.path.dirname(os.path.abspath(script))
    texts = [_read(os.fspath(script)), *map(_read, _python_files(folder))]
    for package in sorted({found[1].decode() for text in texts for found in _IMPORTS.finditer(text)}):
        texts += map(_read, _python_files(os.path.join(folder, package), deep=True))
    return any(_CUDA.search(text) for text in texts)


_CUDA: Final = re.compile(rb"\bcuda\b|\btorch\.accelerator\b")
_IMPORTS: Final = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


def _python_files(folder: str, deep: bool = False) -> list[str]:
    """Those in a folder, of the first `_MOST_FOLDERS` in it as well if ``deep``: the first `_MOST_FILES`."""
    found = []
    for at, folders, names in islice(os.walk(folder), _MOST_FOLDERS if deep else 1):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (os.path.join(at, name) for name in sorted(names) if name.endswith(".py"))
        found += [file for file in files if os.path.isfile(file)]
    return found[:_MOST_FILES]


def _read(file: str) -> bytes:
    try:
        with open(file, "rb") as lines:
            return lines.read(_MOST_BYTES)
    except OSError:
        return b""


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
