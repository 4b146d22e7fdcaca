"""Answer what torch.cuda asks its C half, without CUDA.

Each patch has a reason: which code would fail without it. Each name has a function of its own,
because dynamo complains if two names share one. Both kinds of emulation install these patches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

#: Memory of a device in `torch.cuda.mem_get_info` and its properties: that of an A100 (NVIDIA data
#: sheet, 80 GB).
_DEVICE_MEMORY_BYTES: Final = 80 * 10**9
#: NCCL's version as torch packs it: major, minor, patch. That of torch 2.8's wheels.
NCCL_VERSION: Final = (2 << 32) | (27 << 16) | 3
#: Kinds of memory statistics, in bytes and as counts.
_BYTE_STATISTICS: Final = ("allocated", "reserved", "active", "inactive_split", "requested")
_COUNT_STATISTICS: Final = ("allocation", "segment", "active", "inactive_split")
_ZERO_STATISTICS: Final = (
    "num_alloc_retries",
    "num_ooms",
    "num_sync_all_streams",
    "num_device_alloc",
    "num_device_free",
)
CUDA_VERSION: Final = "12.8"
#: DeviceType::CUDA in C++.
_CUDA_DEVICE_TYPE: Final = 1


class CudaPatch(NamedTuple):
    """Set ``name`` to ``value`` in ``where``: a dotted module, or ``module:Class``."""

    where: str
    name: str
    value: Any
    reason: str


@dataclass
class EmulatedDevice:
    """The state behind the answers if ``cuda`` is an alias of the CPU.

    The extension has a state of its own (`distsim.script_capture.cuda.cpu_backed`).
    """

    count: int = 1
    index: int = 0
    stream: int = 0

    def get(self) -> int:
        """The current device."""
        return self.index

    def set(self, index: int) -> None:
        """Make a device the current one; a negative index changes nothing."""
        if index >= 0:
            self.index = index

    def get_stream(self, index: int) -> int:
        """The current stream, which is the same for all devices."""
        return self.stream

    def set_stream(self, index: int, stream: int) -> None:
        """Make a stream the current one."""
        self.stream = stream

    def memory(self) -> tuple[int, int, int]:
        """Bytes in use, their peak, and the number of allocations."""
        return 0, 0, 0

    def reset_peak(self) -> None:
        """Let the peak be what is in use."""


class EmulatedDeviceProperties(SimpleNamespace):
    """The result of `torch.cuda.get_device_properties`.

    Capability 8.0 (A100), so that libraries do not select code for newer GPUs.
    """


def device_properties() -> EmulatedDeviceProperties:
    """Numbers of an A100, under a name that says what the device is."""
    return EmulatedDeviceProperties(
        name="distsim (CPU memory)",
        major=8,
        minor=0,
        total_memory=_DEVICE_MEMORY_BYTES,
        multi_processor_count=108,
        is_integrated=0,
        is_multi_gpu_board=0,
        max_threads_per_multi_processor=2048,
        max_threads_per_block=1024,
        warp_size=32,
        regs_per_multiprocessor=65536,
        shared_memory_per_block=49152,
        shared_memory_per_multiprocessor=167936,
        shared_memory_per_block_optin=166912,
        L2_cache_size=41943040,
        gcnArchName="sm_80",
        uuid="00000000-0000-0000-0000-000000000000",
        pci_bus_id=0,
        pci_device_id=0,
        pci_domain_id=0,
        clock_rate=1410000,
        memory_clock_rate=1593000,
        memory_bus_width=5120,
    )


class FakeCudaRuntime:
    """torch.cuda.cudart(): its functions succeed and do nothing."""

    class cudaError:  # noqa: N801 - torch's name
        success = 0

    def __init__(self, device: EmulatedDevice) -> None:
        self._device = device

    def cudaMemGetInfo(self, index: int) -> tuple[int, int]:  # noqa: N802
        """Free and total bytes of a device."""
        return _DEVICE_MEMORY_BYTES - self._device.memory()[0], _DEVICE_MEMORY_BYTES

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cuda"):
            raise AttributeError(name)
        return lambda *args, **more: 0


class FakeNvtx:
    """torch._C._nvtx: marks for a profiler; they do nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith(("range", "mark", "deviceRange")):
            raise AttributeError(name)
        return lambda *args, **more: 0


def make_no_op() -> Callable[..., None]:
    """A new function that takes any arguments and does nothing."""

    def ignored(*args: object, **more: object) -> None:
        return None

    return ignored


def make_constant(value: object) -> Callable[..., object]:
    """A new function that takes any arguments and returns ``value``."""

    def answer(*args: object, **more: object) -> object:
        return value

    return answer


def _memory_stats_function(device: EmulatedDevice) -> Callable[..., dict[str, object]]:
    """A replacement for `torch._C._cuda_memoryStats`, whose result torch.cuda flattens."""

    def stats(*args: object) -> dict[str, object]:
        in_use, peak, allocations = device.memory()
        found: dict[str, object] = {}
        for kind in _BYTE_STATISTICS:
            found[f"{kind}_bytes"] = _statistic_by_pool(in_use, peak)
        for kind in _COUNT_STATISTICS:
            found[kind] = _statistic_by_pool(allocations, allocations)
        for kind in ("oversize_allocations", "oversize_segments"):
            found[kind] = _statistic(0, 0)
        return {**found, "max_split_size": -1, **dict.fromkeys(_ZERO_STATISTICS, 0)}

    return stats


def _statistic(current: int, peak: int) -> dict[str, int]:
    """As if what is the peak had been allocated once, and the rest freed since."""
    return {"current": current, "peak": peak, "allocated": peak, "freed": peak - current}


def _statistic_by_pool(current: int, peak: int) -> dict[str, dict[str, int]]:
    return {pool: _statistic(current, peak) for pool in ("all", "small_pool", "large_pool")}


def _stream_functions(device: EmulatedDevice) -> dict[str, tuple[Callable[..., object], str]]:
    """Functions of streams by name, with the reason for each."""

    def current(index: int) -> tuple[int, int, int]:
        return device.get_stream(index), index, _CUDA_DEVICE_TYPE

    def default(index: int) -> tuple[int, int, int]:
        return 0, index, _CUDA_DEVICE_TYPE

    def raw(index: int) -> int:
        return device.get_stream(index)

    def select(stream_id: int, device_index: int, device_type: int) -> None:
        device.set(device_index)
        device.set_stream(device_index, stream_id)

    return {
        "_cuda_getCurrentStream": (
            current,
            "torch.cuda.current_stream, which DDP, FSDP and autograd code ask for",
        ),
        "_cuda_getDefaultStream": (default, "torch.cuda.default_stream"),
        "_cuda_getCurrentRawStream": (raw, "dynamo's device interface imports it by name"),
        "_cuda_setStream": (select, "torch.cuda.stream(…) and set_stream"),
    }


def _device_functions(device: EmulatedDevice) -> dict[str, tuple[Callable[..., object], str]]:
    """Functions of devices by name, with the reason for each."""

    def count() -> int:
        return device.count

    def get() -> int:
        return device.get()

    def select(index: int) -> None:
        if index >= device.count:
            raise RuntimeError("CUDA error: invalid device ordinal")  # torch's own text
        # As torch's C half does: a DeviceMesh must not select another device afterwards.
        import_module("torch.cuda").init()
        device.set(index)

    def exchange(index: int) -> int:
        before = device.get()
        device.set(index)
        return before

    def maybe_exchange(index: int) -> int:
        before = device.get()
        device.set(index)
        return before

    return {
        "_cuda_getDeviceCount": (
            count,
            "torch.cuda.device_count and is_available: scripts choose their path by it",
        ),
        "_cuda_getDevice": (get, "torch.cuda.current_device"),
        "_cuda_setDevice": (
            select,
            "torch.cuda.set_device(local_rank), nearly every script's first line",
        ),
        "_cuda_exchangeDevice": (exchange, "with torch.cuda.device(…)"),
        "_cuda_maybeExchangeDevice": (
            maybe_exchange,
            "with torch.cuda.device(…) where the index may be -1",
        ),
    }


#: Functions of torch._C that do nothing here, and which code calls them.
_NO_OP_FUNCTIONS: Final = {
    "_cuda_init": "torch.cuda.init, at the first use of a device",
    "_cuda_synchronize": "torch.cuda.synchronize: the CPU has done its work when a call returns",
    "_cuda_emptyCache": "torch.cuda.empty_cache: there is no cache",
    "_host_emptyCache": "torch.cuda.graph, before it records",
    "_cuda_ipc_collect": "torch.cuda.ipc_collect",
    "_cuda_sleep": "torch.cuda._sleep, with which tests make a device busy",
    "_cuda_setMemoryFraction": "torch.cuda.set_per_process_memory_fraction",
    "_cuda_resetAccumulatedMemoryStats": "torch.cuda.reset_accumulated_memory_stats",
    "_cuda_resetPeakHostMemoryStats": "torch.cuda.reset_peak_host_memory_stats",
    "_cuda_resetAccumulatedHostMemoryStats": "torch.cuda.reset_accumulated_host_memory_stats",
    "_cuda_record_memory_history": "torch.cuda.memory._record_memory_history",
    "_cuda_record_memory_history_legacy": "torch.cuda.memory._record_memory_history, the old way",
    "_cuda_attach_out_of_memory_observer": "memory reports of Lightning and torchtitan",
    "_cuda_set_sync_debug_mode": "torch.cuda.set_sync_debug_mode",
    "_cuda_clearCublasWorkspaces": "torch.cuda.graphs and tests",
    "_cuda_cudaCachingAllocator_enable": "torch.cuda.caching_allocator_enable",
    "_cuda_lock_mutex": "torch.cuda.FreeMutex",
    "_cuda_unlock_mutex": "torch.cuda.FreeMutex",
}
#: Functions of torch._C with a constant result: the result, and which code calls them.
_CONSTANT_FUNCTIONS: Final[dict[str, tuple[object, str]]] = {
    "_cuda_isInBadFork": (False, "ranks are forked, and there is nothing that a fork breaks"),
    "_cuda_canDeviceAccessPeer": (True, "torch.cuda.can_device_access_peer"),
    "_cuda_getArchFlags": ("sm_80", "torch.cuda.get_arch_list"),
    "_cuda_getCurrentBlasHandle": (0, "torch.cuda.current_blas_handle"),
    "_cuda_getCurrentSolverHandle": (0, "torch.cuda.current_solver_handle"),
    "_cuda_get_sync_debug_mode": (0, "torch.cuda.get_sync_debug_mode"),
    "_cuda_getAllocatorBackend": ("native", "torch.cuda.get_allocator_backend"),
    "_cuda_cudaCachingAllocator_is_enabled": (True, "torch.cuda.caching_allocator_disabled"),
    "_cuda_getMemoryFraction": (1.0, "torch.cuda.get_per_process_memory_fraction"),
    "_cuda_hostMemoryStats": ({}, "torch.cuda.host_memory_stats"),
    "_cuda_memorySnapshot": ({"segments": [], "device_traces": []}, "torch.cuda.memory_snapshot"),
    "_nccl_version": (
        NCCL_VERSION,
        "torch.cuda.nccl.version, by which Lightning and transformers choose",
    ),
    "_nccl_version_suffix": (b"", "torch.cuda.nccl.version"),
}


def common_patches(device: EmulatedDevice) -> list[CudaPatch]:
    """The patches of both kinds of emulation."""
    c_functions = _c_function_patches(device)
    return [*c_functions, *_c_value_patches(device), *_python_patches(device, c_functions)]


def _c_function_patches(device: EmulatedDevice) -> list[CudaPatch]:
    """Functions of torch._C."""
    functions = _device_functions(device) | _stream_functions(device)
    found = [
        CudaPatch("torch._C", name, value, reason) for name, (value, reason) in functions.items()
    ]
    found += [
        CudaPatch("torch._C", name, make_no_op(), reason)
        for name, reason in _NO_OP_FUNCTIONS.items()
    ]
    found += [
        CudaPatch("torch._C", name, make_constant(value), reason)
        for name, (value, reason) in _CONSTANT_FUNCTIONS.items()
    ]
    return found


def _c_value_patches(device: EmulatedDevice) -> list[CudaPatch]:
    """Further names of torch._C, and the version."""

    def reset(*args: object) -> None:
        device.reset_peak()

    return [
        CudaPatch(
            "torch._C",
            "_cuda_memoryStats",
            _memory_stats_function(device),
            "torch.cuda.memory_allocated and its kin, which training loops log",
        ),
        CudaPatch(
            "torch._C", "_cuda_resetPeakMemoryStats", reset, "torch.cuda.reset_peak_memory_stats"
        ),
        CudaPatch(
            "torch._C",
            "_CudaDeviceProperties",
            EmulatedDeviceProperties,
            "the type of a device's properties",
        ),
        CudaPatch("torch._C", "_has_cuda", True, "torch.backends.cuda.is_built"),
        CudaPatch(
            "torch._C",
            "_has_cudnn",
            False,
            "recurrent layers ask cuDNN for its version in a build that has it",
        ),
        CudaPatch(
            "torch.version",
            "cuda",
            CUDA_VERSION,
            "libraries read CUDA's version to choose what they import",
        ),
    ]


def _python_patches(device: EmulatedDevice, c_functions: Iterable[CudaPatch]) -> list[CudaPatch]:
    """Names of torch.cuda, among them those that it took from its C half when it was imported."""

    def properties_of(index: int) -> EmulatedDeviceProperties:
        return device_properties()

    functions = {patch.name: patch.value for patch in c_functions}
    return [
        CudaPatch(
            "torch.cuda",
            "_cudart",
            FakeCudaRuntime(device),
            "torch.cuda's lazy start, mem_get_info and pinning by cudaHostRegister",
        ),
        CudaPatch(
            "torch.cuda",
            "_get_device_properties",
            properties_of,
            "get_device_properties: torch's C half defines it at its start",
        ),
        CudaPatch(
            "torch.cuda",
            "_CudaDeviceProperties",
            EmulatedDeviceProperties,
            "looked up when torch.cuda was imported",
        ),
        CudaPatch(
            "torch.cuda",
            "_is_in_bad_fork",
            make_constant(False),
            "looked up when torch.cuda was imported",
        ),
        CudaPatch(
            "torch.cuda",
            "_exchange_device",
            functions["_cuda_exchangeDevice"],
            "looked up when torch.cuda was imported",
        ),
        CudaPatch(
            "torch.cuda",
            "_maybe_exchange_device",
            functions["_cuda_maybeExchangeDevice"],
            "looked up when torch.cuda was imported",
        ),
        CudaPatch(
            "torch.cuda.graphs",
            "_cuda_isCurrentStreamCapturing",
            make_constant(False),
            "optimizers ask whether a graph is being captured",
        ),
        CudaPatch(
            "torch.cuda.nvtx",
            "_nvtx",
            FakeNvtx(),
            "DeepSpeed marks ranges for a profiler without asking whether there is one",
        ),
        CudaPatch(
            "torch.cuda",
            "_device_count_nvml",
            make_constant(-1),
            "device_count believes NVML first, which counts GPUs that are there",
        ),
        CudaPatch("torch.cuda", "utilization", make_constant(0), "asks NVML, which is not there"),
        CudaPatch("torch.cuda", "temperature", make_constant(0), "asks NVML, which is not there"),
        CudaPatch("torch.cuda", "power_draw", make_constant(0), "asks NVML, which is not there"),
    ]


def patch_owner(patch: CudaPatch) -> object:
    """The module or class that the patch changes."""
    module_name, _, class_name = patch.where.partition(":")
    module = import_module(module_name)
    return getattr(module, class_name) if class_name else module


def apply_patch(patch: CudaPatch) -> None:
    """Set the attribute that the patch replaces."""
    setattr(patch_owner(patch), patch.name, patch.value)
