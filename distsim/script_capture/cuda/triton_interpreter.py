"""Run Triton kernels without a GPU: Triton's own interpreter runs them on the CPU.

Triton asks its driver for a device, and finds none. So it gets a driver that describes the emulated
device, for which nothing is compiled.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from distsim.script_capture.cuda.fake_driver import device_properties

_DRIVER_MODULE: Final = "triton.runtime.driver"
#: Triton's names of properties -> those of `fake_driver.device_properties`.
_PROPERTY_NAMES: Final = {
    "max_shared_mem": "shared_memory_per_block_optin",
    "max_num_regs": "regs_per_multiprocessor",
    "warpSize": "warp_size",
    "multiprocessor_count": "multi_processor_count",
    "sm_clock_rate": "clock_rate",
    "mem_clock_rate": "memory_clock_rate",
    "mem_bus_width": "memory_bus_width",
}


def enable_interpreter() -> None:
    """Interpret kernels in this process and those forked from it, once Triton is imported.

    Unless the user has set TRITON_INTERPRET to something else.
    """
    is_wanted = os.environ.setdefault("TRITON_INTERPRET", "1") == "1"
    if is_wanted and _DRIVER_MODULE not in sys.modules:
        sys.meta_path.insert(0, _TritonDriverFinder())


class _TritonDriverFinder(MetaPathFinder):
    """Finds Triton's driver module as usual, and activates our driver when it is loaded."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != _DRIVER_MODULE:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _TritonDriverLoader(spec.loader)
        return spec


class _TritonDriverLoader(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        getattr(module, "driver").set_active(_interpreter_driver())  # noqa: B009 - Triton has no types


def _interpreter_driver() -> object:
    """A driver with the methods of Triton's DriverBase (triton/backends/driver.py)."""
    known = device_properties()

    class DriverUtils:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return {name: getattr(known, ours) for name, ours in _PROPERTY_NAMES.items()}

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(
                f"there is no GPU here for Triton's {name}:"
                " under distsim capture its kernels are interpreted"
            )

    class InterpreterDriver:
        utils = DriverUtils()

        def get_current_device(self) -> int:
            return int(import_module("torch.cuda").current_device())

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return known.major, known.minor

        def get_current_target(self) -> object:
            capability = 10 * known.major + known.minor
            compiler = import_module("triton.backends.compiler")
            return compiler.GPUTarget("cuda", capability, known.warp_size)

        def get_active_torch_device(self) -> object:
            return import_module("torch").device("cuda", self.get_current_device())

        def get_device_interface(self) -> ModuleType:
            return import_module("torch.cuda")

        def get_benchmarker(self) -> Any:
            return _constant_timings

    return InterpreterDriver()


def _constant_timings(
    kernel_call: object, quantiles: Sequence[float] = (0.5,), **more: object
) -> list[float]:
    """What `triton.autotune` measures: equal times, so all ranks take the first configuration."""
    return [0.0] * len(quantiles)


__all__ = ["enable_interpreter"]
