"""Real CUDA tensors: the extension does the work, and torch.cuda is told of it."""

from __future__ import annotations

import ctypes
import time
from typing import Any, Final

from distsim.script_capture.cuda import sync_batchnorm, wide_outputs
from distsim.script_capture.cuda.fake_driver import (
    CudaPatch,
    EmulatedDevice,
    apply_patch,
    common_patches,
    make_constant,
)
from distsim.script_capture.cuda.hide_gpus import temporary_environment
from distsim.script_capture.patches.dynamo import run_traced_graph
from distsim.script_capture.rank.tensor_payloads import UnsupportedError

_installed_devices: Final[list[ExtensionDevice]] = []


class ExtensionDevice(EmulatedDevice):
    """The state of the extension, by its C functions."""

    def __init__(self, library: ctypes.CDLL, count: int) -> None:
        super().__init__(count)
        self._c = library
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
        self.count = count
        self._c.distsim_set_device_count(count)

    def get(self) -> int:
        return int(self._c.distsim_get_device())

    def set(self, index: int) -> None:
        if index >= 0:
            self._c.distsim_set_device(index)

    def get_stream(self, index: int) -> int:
        return int(self._c.distsim_get_stream(index))

    def set_stream(self, index: int, stream: int) -> None:
        self._c.distsim_set_stream(index, stream)

    def memory(self) -> tuple[int, int, int]:
        return (
            int(self._c.distsim_allocated()),
            int(self._c.distsim_peak()),
            int(self._c.distsim_allocations()),
        )

    def reset_peak(self) -> None:
        self._c.distsim_reset_peak()


def install(library: ctypes.CDLL, count: int) -> None:
    """Let torch.cuda have so many devices."""
    # While torch is imported: a build with CUDA overrides operators by kernels that Triton compiles
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
        ]:
            apply_patch(patch)
        sync_batchnorm.register()
        wide_outputs.register()
        _installed_devices.append(device)
    torch.cuda._cached_device_count = None
    torch.cuda.default_generators = tuple(
        torch.ops.distsim.default_generator(k) for k in range(count)
    )
    torch.cuda._initialized = (
        False  # as ever: until a device is used or chosen, a DeviceMesh chooses it by LOCAL_RANK
    )


def compile_patches() -> list[CudaPatch]:
    """torch.compile, whose code for a GPU could be neither built nor run."""
    reason = "torch.compile writes Triton and C++ for the GPU that is not there: litgpt's and torchtitan's models"
    return [
        CudaPatch("torch:_TorchCompileInductorWrapper", "__call__", run_traced_graph, reason),
        CudaPatch(
            "torch.cuda",
            "graph_pool_handle",
            make_constant((0, 1)),
            "asked for before a CUDA graph is made: the graph is what is refused",
        ),
        CudaPatch(
            "torch.cuda.graphs:CUDAGraph",
            "__new__",
            refuse_cuda_graphs,
            "what a graph replays would run no Python, and be seen by nobody",
        ),
    ]


def refuse_cuda_graphs(cls: type, *args: object, **more: object) -> None:
    """Raises Unsupported, with what it is by name."""
    raise UnsupportedError(
        "distsim capture does not support CUDA graphs (torch.cuda.CUDAGraph): turn them off in the program"
    )


def storage_patches() -> list[CudaPatch]:
    """Storages, of which torch's C half knows those of a GPU only in a build with CUDA."""
    import torch

    plain_new, plain_resize = torch.UntypedStorage.__new__, torch.UntypedStorage.resize_

    def make(cls: Any, *args: Any, **more: Any) -> Any:
        device = torch.device(more["device"]) if more.get("device") is not None else None
        if device is None or device.type != "cuda":
            return plain_new(cls, *args, **more)
        size = args[0] if args and isinstance(args[0], int) else len(args[0]) if args else 0
        found = torch.empty(size, dtype=torch.uint8, device=device)
        if args and not isinstance(args[0], int):
            found.copy_(torch.tensor(list(args[0]), dtype=torch.uint8))
        return found.untyped_storage()

    def resize(self: Any, size: int) -> Any:
        if self.device.type != "cuda":
            return plain_resize(self, size)
        with torch.no_grad():
            torch.ops.distsim.resize_storage(
                torch.empty(0, dtype=torch.uint8, device=self.device).set_(self), size
            )
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
    """Streams and events, which torch without CUDA has as classes that can't be made."""
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
    import torch

    class Stream(torch.Stream):
        """A stream: what is launched on it is done when the call returns."""

        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            if given:
                return super().__new__(cls, **given)
            index = torch.cuda._utils._get_device_index(device, optional=True)
            return super().__new__(cls, torch.device("cuda", index), priority=priority)

        def record_event(self, event: Any = None) -> Any:
            event = getattr(torch.cuda, "Event")() if event is None else event  # noqa: B009 - ours, not torch's
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
    import torch

    class Event(torch.Event):
        """An event, with the time at which it was recorded."""

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
            """The rest is done in __new__."""
            self.at_ns = 0

        def record(self, stream: Any = None) -> None:
            super().record(stream or torch.cuda.current_stream())
            self.at_ns = time.perf_counter_ns()

        def elapsed_time(self, end_event: Any) -> float:
            return (int(end_event.at_ns) - self.at_ns) / 1e6

    Event.__module__ = "torch.cuda.streams"
    return Event
