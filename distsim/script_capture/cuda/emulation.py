"""Choose how CUDA is emulated: tensors lie in CPU memory, and the CPU computes.

There are two ways. `CPU_BACKED`: real CUDA tensors, by an extension that is compiled at first use.
`CPU_ALIASED`, if that is not possible: each ``cuda`` of the script is read as ``cpu``. This hides
mistakes of mixed devices, and fails if a script insists on the name.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from distsim.script_capture.cuda.build_extension import ExtensionUnavailable, extension_library
from distsim.script_capture.cuda.stream_log import StreamLog

if TYPE_CHECKING:
    import torch

CPU_BACKED: Final = "CUDA tensors in CPU memory"
CPU_ALIASED: Final = "CUDA devices replaced by cpu"

#: The extension, once it is loaded; it cannot be unloaded.
_loaded: list[ctypes.CDLL] = []


@dataclass(frozen=True)
class CudaEmulation:
    """``name`` is `CPU_BACKED` or `CPU_ALIASED`; ``reason`` is a text why it is this one."""

    name: str
    reason: str
    _library: ctypes.CDLL | None = None

    def install(self, devices: int = 1) -> None:
        """Let torch have so many devices, in this process and those forked from it.

        Imports torch. May be called again, with another number.
        """
        from distsim.script_capture.cuda.alias_cpu import install as install_alias
        from distsim.script_capture.cuda.cpu_backed import install as install_extension
        from distsim.script_capture.cuda.triton_interpreter import enable_interpreter

        enable_interpreter()
        if self._library is not None:
            install_extension(self._library, devices)
        else:
            install_alias(devices)


def select_emulation(environ: Mapping[str, str] | None = None) -> CudaEmulation:
    """The emulation that works here. Call it before torch is imported.

    Builds the extension if there is none, and loads it. ``environ``: CXX, PATH and XDG_CACHE_HOME,
    if not those of this process. Never raises for a machine that lacks something.
    """
    if not _loaded and "torch" in sys.modules:
        return CudaEmulation(
            CPU_ALIASED, "torch was imported earlier, and it looks for devices only once"
        )
    try:
        path = extension_library(environ)
    except ExtensionUnavailable as reason:
        return CudaEmulation(CPU_ALIASED, str(reason))
    if not _loaded:
        try:
            _loaded.append(ctypes.CDLL(str(path)))
        except OSError as error:
            return CudaEmulation(CPU_ALIASED, f"cannot load the extension: {error}")
    return CudaEmulation(CPU_BACKED, f"built for this torch and kept in {path.parent}", _loaded[0])


def cuda_is_emulated() -> bool:
    """Whether CUDA tensors of this process lie in CPU memory."""
    return bool(_loaded)


def stream_log() -> StreamLog | None:
    """The log of the streams of this process; None under `CPU_ALIASED`, which has none."""
    return StreamLog(_loaded[0]) if _loaded else None


def as_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a CPU tensor, detached; a CPU tensor is returned as it is."""
    import torch

    if tensor.device.type != "cuda":
        return tensor
    found: torch.Tensor = torch.ops.distsim.as_cpu(tensor.detach())
    return found


def from_cpu(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor of the current device, detached.

    Under `CPU_ALIASED` the tensor itself.
    """
    import torch

    if not _loaded or tensor.device.type == "cuda":
        return tensor
    found: torch.Tensor = torch.ops.distsim.from_cpu(tensor.detach())
    return found


__all__ = [
    "CPU_ALIASED",
    "CPU_BACKED",
    "CudaEmulation",
    "as_cpu",
    "cuda_is_emulated",
    "from_cpu",
    "select_emulation",
    "stream_log",
]
