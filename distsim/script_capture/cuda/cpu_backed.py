"""The fuller emulation: real CUDA tensors in CPU memory, by the extension.

The extension registers device, allocator and kernels with torch's C++. This module adds what torch
asks in Python.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

from distsim.script_capture.cuda.fake_driver import (
    CudaPatch,
    EmulatedDevice,
    apply_patch,
    common_patches,
    make_constant,
)
from distsim.script_capture.cuda.graphs import CUDAGraph, is_recording
from distsim.script_capture.cuda.hide_gpus import temporary_environment
from distsim.script_capture.cuda.stream_log import name_new_stream
from distsim.script_capture.cuda.sync_batchnorm import register as register_sync_batchnorm
from distsim.script_capture.cuda.wide_outputs import register as register_wide_outputs

#: The device, once the patches are installed.
_installed_devices: Final[list[ExtensionDevice]] = []


class ExtensionDevice(EmulatedDevice):
    """The state of the extension, through its C functions."""

    def __init__(self, library: ctypes.CDLL, count: int) -> None:
        super().__init__(count)
        self._library = library
        for name in (
            "distsim_allocated",
            "distsim_peak",
            "distsim_allocations",
            "distsim_get_stream",
        ):
            getattr(library, name).restype = ctypes.c_int64
        library.distsim_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
        self.resize(count)

    def resize(self, count: int) -> None:
        """Change the number of devices."""
        self.count = count
        self._library.distsim_set_device_count(count)

    def get(self) -> int:
        """The current device."""
        return int(self._library.distsim_get_device())

    def set(self, index: int) -> None:
        """Make a device the current one; a negative index changes nothing."""
        if index >= 0:
            self._library.distsim_set_device(index)

    def get_stream(self, index: int) -> int:
        """The current stream of a device."""
        return int(self._library.distsim_get_stream(index))

    def set_stream(self, index: int, stream: int) -> None:
        """Make a stream the current one of a device."""
        self._library.distsim_set_stream(index, stream)

    def memory(self) -> tuple[int, int, int]:
        """Allocated bytes, their peak, and the number of allocations."""
        return (
            int(self._library.distsim_allocated()),
            int(self._library.distsim_peak()),
            int(self._library.distsim_allocations()),
        )

    def reset_peak(self) -> None:
        """Count the peak of allocated bytes from now on."""
        self._library.distsim_reset_peak()


def install(library: ctypes.CDLL, count: int) -> None:
    """Let torch.cuda have so many devices."""
    # When it is imported, a torch with CUDA overrides operators by kernels that Triton compiles
    # (torch/_native, since 2.13).
    with temporary_environment("TORCH_DISABLE_NATIVE_JIT", "1"):
        import torch

    if _installed_devices:
        _installed_devices[0].resize(count)
    else:
        device = ExtensionDevice(library, count)
        for patch in [
            *common_patches(device),
            *stream_event_patches(),
            *storage_patches(),
            *compile_patches(),
            synchronize_patch(library),
        ]:
            apply_patch(patch)
        register_sync_batchnorm()
        register_wide_outputs()
        _installed_devices.append(device)
    torch.cuda._cached_device_count = None
    torch.cuda.default_generators = tuple(
        torch.ops.distsim.default_generator(k) for k in range(count)
    )
    # As usual before a device is used or selected: until then, a DeviceMesh selects it by
    # LOCAL_RANK.
    torch.cuda._initialized = False


def synchronize_patch(library: ctypes.CDLL) -> CudaPatch:
    """torch.cuda.synchronize, which the extension logs."""

    def synchronize(*args: object) -> None:
        library.distsim_log_synchronize()

    return CudaPatch("torch._C", "_cuda_synchronize", synchronize, "the host waits for its device")


def compile_patches() -> list[CudaPatch]:
    """torch.compile, whose code for a GPU could neither be built nor run, and CUDA graphs."""
    reason = (
        "torch.compile writes Triton and C++ for the GPU that is not there: litgpt's and"
        " torchtitan's models"
    )
    return [
        CudaPatch("torch:_TorchCompileInductorWrapper", "__call__", run_traced_graph, reason),
        CudaPatch(
            "torch.cuda.graphs",
            "_graph_pool_handle",
            make_constant((0, 1)),
            "all CUDA graphs share one memory pool",
        ),
        *[
            CudaPatch(module, "CUDAGraph", CUDAGraph, "graphs are recorded and run here")
            for module in ("torch.cuda", "torch.cuda.graphs")
        ],
        CudaPatch(
            "torch.cuda.graphs",
            "_cuda_isCurrentStreamCapturing",
            is_recording,
            "optimizers ask whether a graph is being recorded",
        ),
    ]


def run_traced_graph(wrapper: object, model: Any, inputs: Sequence[Any], **more: object) -> Any:
    """Run what torch.compile makes of a graph as it was traced: operator by operator.

    Replaces the compiler, for the forward and for the backward pass.
    """
    aot_eager: Any = import_module("torch._dynamo.backends.debugging").aot_eager
    return aot_eager(model, inputs)


def storage_patches() -> list[CudaPatch]:
    """Storages: torch's C half knows those of a GPU only in a build with CUDA."""
    import torch

    plain_new = torch.UntypedStorage.__new__
    plain_resize = torch.UntypedStorage.resize_

    def make(cls: Any, *args: Any, **more: Any) -> Any:
        """The argument is a number of bytes, or a sequence of their values."""
        named = more.get("device")
        device = torch.device(named) if named is not None else None
        if device is None or device.type != "cuda":
            return plain_new(cls, *args, **more)
        content = args[0] if args else 0
        if isinstance(content, int):
            return torch.empty(content, dtype=torch.uint8, device=device).untyped_storage()
        tensor = torch.empty(len(content), dtype=torch.uint8, device=device)
        tensor.copy_(torch.tensor(list(content), dtype=torch.uint8))
        return tensor.untyped_storage()

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return plain_resize(self, size)
        with torch.no_grad():
            view = torch.empty(0, dtype=torch.uint8, device=self.device).set_(self)
            torch.ops.distsim.resize_storage(view, size)
        return self

    return [
        CudaPatch(
            "torch:UntypedStorage",
            "__new__",
            staticmethod(make),
            "torch.load to a device; sizes alone",
        ),
        CudaPatch(
            "torch:UntypedStorage",
            "resize_",
            resize,
            "FSDP frees gathered parameters by resizing their storage",
        ),
    ]


def stream_event_patches() -> list[CudaPatch]:
    """Streams and events: those of a torch without CUDA cannot be created."""
    stream, event = _stream_class(), _event_class()
    reason = "torch's own stands on a C class that only a build with CUDA has"
    places = (
        ("torch.cuda", "Stream", stream),
        ("torch.cuda.streams", "Stream", stream),
        ("torch.cuda", "Event", event),
        ("torch.cuda.streams", "Event", event),
        ("torch._C", "_CudaStreamBase", stream),
        ("torch._C", "_CudaEventBase", event),
        ("torch.cuda", "ExternalStream", stream),
    )
    return [CudaPatch(where, name, value, reason) for where, name, value in places]


def _stream_class() -> type:
    """A `torch.cuda.Stream` on torch's generic stream, which the extension supports."""
    import torch

    class Stream(torch.Stream):
        """A stream. The CPU has done the work when a call returns, so all streams are idle.

        The extension logs what waits for what (`distsim.script_capture.cuda.stream_log`).
        """

        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            if given:
                return super().__new__(cls, **given)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            made: Any = super().__new__(cls, torch.device("cuda", index), priority=priority)
            name_new_stream(int(made.stream_id), sys._getframe(1))
            return made

        def record_event(self, event: Any = None) -> Any:
            if event is None:
                event = getattr(torch.cuda, "Event")()  # noqa: B009 - ours, not torch's
            event.record(self)
            return event

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return 0, -5

    Stream.__module__ = "torch.cuda.streams"
    return Stream


def _event_class() -> type:
    """A `torch.cuda.Event` on torch's generic event, which the extension supports."""
    import torch

    class Event(torch.Event):
        """An event that knows when it was recorded."""

        def __new__(
            cls,
            enable_timing: bool = False,
            blocking: bool = False,
            interprocess: bool = False,
            external: bool = False,
        ) -> Any:
            return super().__new__(
                cls,
                torch.device("cuda"),
                enable_timing=True,
                blocking=blocking,
                interprocess=interprocess,
            )

        def __init__(self, *args: object, **more: object) -> None:
            """`__new__` has done the rest."""
            self.recorded_ns = 0

        def record(self, stream: Any = None) -> None:
            super().record(stream or torch.cuda.current_stream())
            self.recorded_ns = time.perf_counter_ns()

        def elapsed_time(self, end_event: Any) -> float:
            return (int(end_event.recorded_ns) - self.recorded_ns) / 1e6

    Event.__module__ = "torch.cuda.streams"
    return Event
