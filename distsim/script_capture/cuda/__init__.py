"""A CUDA device where there is none, for scripts that ask for one: their tensors lie in CPU memory
and the CPU computes.

Two ways, of which `prepare` takes the first that works here: real CUDA tensors, by an extension
that is built at first use; else every ``cuda`` of the script is read as ``cpu``, which hides
mistakes of mixed devices and fails where a script insists on the name.
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

from distsim.script_capture.cuda.build_extension import ExtensionUnavailable, extension_library

if TYPE_CHECKING:
    import torch

#: Files beside a script that are looked at, folders of a package beside it, and bytes of each file.
_MAX_FILES: Final = 200
_MAX_FOLDERS: Final = 50
_MAX_BYTES: Final = 1 << 20
CPU_BACKED: Final = "cuda over CPU memory"
CPU_ALIASED: Final = "cuda spelled cpu"


@dataclass(frozen=True)
class CudaEmulation:
    """``name``: `CPU_BACKED` or `CPU_ALIASED`. ``reason``: why it is this one, in words."""

    name: str
    reason: str
    _library: ctypes.CDLL | None = None

    def install(self, devices: int = 1) -> None:
        """Let torch have so many devices, in this process and in those forked from it. Imports
        torch; again is no harm.
        """
        from distsim.script_capture.cuda import alias_cpu, cpu_backed, triton_interpreter

        triton_interpreter.enable_interpreter()
        if self._library is not None:
            cpu_backed.install(self._library, devices)
        else:
            alias_cpu.install(devices)


_loaded: list[ctypes.CDLL] = []


def select_emulation(environ: Mapping[str, str] | None = None) -> CudaEmulation:
    """The layer that works here: builds the extension if there is none, and loads it. Call it
    before torch is imported.

    ``environ``: CXX, PATH and XDG_CACHE_HOME in place of this process's. Never raises for a machine
    that lacks something.
    """
    if not _loaded and "torch" in sys.modules:
        return CudaEmulation(
            CPU_ALIASED, "torch was imported before, and asks for its devices only once"
        )
    try:
        path = extension_library(environ)
    except ExtensionUnavailable as reason:
        return CudaEmulation(CPU_ALIASED, str(reason))
    if not _loaded:
        try:
            _loaded.append(ctypes.CDLL(str(path)))
        except OSError as fault:
            return CudaEmulation(CPU_ALIASED, f"the extension can't be loaded: {fault}")
    return CudaEmulation(CPU_BACKED, f"built for this torch, kept in {path.parent}", _loaded[0])


def script_mentions_cuda(script: str | os.PathLike[str]) -> bool:
    """Does a script, a Python file beside it or one of a folder beside it that one of these
    imports, say ``cuda`` or ``torch.accelerator``? False where nothing can be read."""
    folder = os.path.dirname(os.path.abspath(script))
    texts = [_read_start(os.fspath(script)), *map(_read_start, _python_files(folder))]
    for package in sorted(
        {found[1].decode() for text in texts for found in _IMPORT_PATTERN.finditer(text)}
    ):
        texts += map(_read_start, _python_files(os.path.join(folder, package), deep=True))
    return any(_CUDA_PATTERN.search(text) for text in texts)


_CUDA_PATTERN: Final = re.compile(rb"\bcuda\b|\btorch\.accelerator\b")
_IMPORT_PATTERN: Final = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


def _python_files(folder: str, deep: bool = False) -> list[str]:
    """Those in a folder, of the first `_MAX_FOLDERS` in it as well if ``deep``: the first
    `_MAX_FILES`.
    """
    found = []
    for at, folders, names in islice(os.walk(folder), _MAX_FOLDERS if deep else 1):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        files = (os.path.join(at, name) for name in sorted(names) if name.endswith(".py"))
        found += [file for file in files if os.path.isfile(file)]
    return found[:_MAX_FILES]


def _read_start(file: str) -> bytes:
    try:
        with open(file, "rb") as lines:
            return lines.read(_MAX_BYTES)
    except OSError:
        return b""


def cuda_is_emulated() -> bool:
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
    """The same memory as a tensor of the current device, detached; under `CPU_ALIASED` the tensor
    itself.
    """
    import torch

    if not _loaded or tensor.device.type == "cuda":
        return tensor
    found: torch.Tensor = torch.ops.distsim.from_cpu(tensor.detach())
    return found


__all__ = [
    "CPU_BACKED",
    "CPU_ALIASED",
    "CudaEmulation",
    "as_cpu",
    "script_mentions_cuda",
    "from_cpu",
    "cuda_is_emulated",
    "select_emulation",
]
