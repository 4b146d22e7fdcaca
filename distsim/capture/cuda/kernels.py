"""Kernels in Triton where there is no GPU: Triton's own interpreter runs them on the CPU, and asks a driver that knows none."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

_DRIVERS: Final = "triton.runtime.driver"
#: What `pretend.properties` says of the device, by the names that Triton has for it.
_PROPERTIES: Final = {"max_shared_mem": 166912, "max_num_regs": 65536, "multiprocessor_count": 108, "warpSize": 32,
                      "sm_clock_rate": 1410000, "mem_clock_rate": 1593000, "mem_bus_width": 5120}  # fmt: skip


def prepare() -> None:
    """For this process and those forked from it, from Triton's import on. Who sets TRITON_INTERPRET is obeyed."""
    if os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and _DRIVERS not in sys.modules:
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds one module, as it is found without this, and gives it the driver when it is loaded."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name != _DRIVERS:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loading(spec.loader)
        return spec


class _Loading(Loader):
    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self.loader.exec_module(module)
        getattr(module, "driver").set_active(_driver())  # noqa: B009 - Triton has no types


def _driver() -> object:
    """A driver of Triton's (backends/driver.py) for an A100 that nothing is compiled for."""

    class Utils:
        def get_device_properties(self, device: int) -> dict[str, int]:
            return _PROPERTIES

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"there is no GPU here for Triton's {name}: under distsim capture its kernels are interpreted")

    class Driver:
        utils = Utils()

        def get_current_device(self) -> int:
            return int(import_module("torch.cuda").current_device())

        def get_current_stream(self, device: int) -> int:
            return 0

        def get_device_capability(self, device: int = 0) -> tuple[int, int]:
            return 8, 0

        def get_current_target(self) -> object:
            return import_module("triton.backends.compiler").GPUTarget("cuda", 80, 32)

        def get_active_torch_device(self) -> object:
            return import_module("torch").device("cuda", self.get_current_device())

        def get_device_interface(self) -> ModuleType:
            return import_module("torch.cuda")

        def get_benchmarker(self) -> Any:
            return _equally_fast

    return Driver()


def _equally_fast(kernel_call: object, quantiles: Sequence[float] = (0.5,), **more: object) -> list[float]:
    """What `triton.autotune` measures each configuration by: the first is taken, on all ranks."""
    return [0.0] * len(quantiles)


__all__ = ["prepare"]
