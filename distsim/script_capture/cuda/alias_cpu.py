"""The simpler emulation: ``cuda`` in a script is read as ``cpu``.

Names of devices are replaced wherever tensors and modules are created or moved, and torch.cuda's
questions are answered as if there were GPUs. It has limits: a script that insists on
``device.type == "cuda"`` fails, and a mistake of mixed devices is not noticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from distsim.script_capture.cuda.fake_driver import (
    CudaPatch,
    EmulatedDevice,
    apply_patch,
    common_patches,
    make_constant,
    make_no_op,
)
from distsim.script_capture.cuda.hide_gpus import hide_gpus

#: The device, once the patches are installed.
_installed_devices: Final[list[EmulatedDevice]] = []
_CUDA_MODULES: Final = ("torch.cuda", "torch.cuda.streams")


def install(count: int) -> None:
    """Read ``cuda`` as ``cpu`` from here on."""
    import torch

    if _installed_devices:
        _installed_devices[0].count = count
        return
    hide_gpus()
    device = EmulatedDevice(count)
    for patch in [
        *common_patches(device),
        *_device_argument_patches(),
        *_constructor_patches(),
        *_device_index_patches(device),
        *_accelerator_patches(device),
        *_idle_class_patches(),
    ]:
        apply_patch(patch)
    torch.cuda._initialized = True
    torch.cuda._cached_device_count = None
    setattr(torch.cuda, "default_generators", (torch.default_generator,) * count)  # noqa: B010 - its type says one
    _aliasing_mode().__enter__()
    _installed_devices.append(device)


def as_cpu_device(value: Any) -> Any:
    """The CPU in place of a CUDA device; any other value as it is."""
    import torch

    if isinstance(value, str) and _names_cuda_device(value):
        return "cpu"
    if isinstance(value, torch._C.device) and value.type == "cuda":
        return torch._C.device("cpu")
    return value


def _names_cuda_device(text: str) -> bool:
    """``cuda`` or ``cuda:1``, but not an invalid name, which must still fail."""
    kind, _, index = text.partition(":")
    return kind == "cuda" and (text == "cuda" or index.isdigit())


def _is_gpu_number(value: object) -> bool:
    """A bare number names a GPU. A bool is an int too, but the value of another argument."""
    return isinstance(value, int) and not isinstance(value, bool)


def _with_cpu_devices(values: Iterable[Any]) -> tuple[Any, ...]:
    return tuple(as_cpu_device(value) for value in values)


def _with_cpu_keywords(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: as_cpu_device(value) for name, value in values.items()}


def _aliasing_mode() -> Any:
    """A mode that replaces devices in the arguments of every torch function.

    It sees `torch.empty` as well as `Tensor.to`, but not what bypasses `__torch_function__`.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class CpuAliasingMode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = _with_cpu_keywords(kwargs or {})
            if _is_gpu_number(kwargs.get("device")):
                kwargs["device"] = "cpu"
            if func is torch.Tensor.to and len(args) > 1 and _is_gpu_number(args[1]):
                args = (args[0], "cpu", *args[2:])
            return func(*_with_cpu_devices(args), **kwargs)

    return CpuAliasingMode()


def _device_class() -> type:
    """A `torch.device` that creates CPU devices; `isinstance` holds for them as before."""
    import torch

    plain = torch._C.device

    class DeviceMeta(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain)

    class device(metaclass=DeviceMeta):  # noqa: N801 - torch's name
        def __new__(cls, *args: Any, **more: Any) -> Any:
            if args and _is_gpu_number(args[0]):
                return plain("cpu")
            args = _with_cpu_devices(args)
            more = _with_cpu_keywords(more)
            kind = more.get("type", args[0] if args else None)
            # Without an index, which may be that of a GPU.
            return plain("cpu") if kind == "cpu" else plain(*args, **more)

    return device


def _device_argument_patches() -> list[CudaPatch]:
    """Where devices are named in calls that are no torch functions."""
    import torch

    plain_to: Any = torch.nn.Module.to
    plain_autocast: Any = torch.amp.autocast.__init__
    plain_ddp: Any = torch.nn.parallel.DistributedDataParallel.__init__

    # Three functions, not one: dynamo complains if two names share a function.
    def tensor_cuda(self: Any, *args: Any, **more: Any) -> Any:
        return self

    def pin_memory(self: Any, *args: Any, **more: Any) -> Any:
        return self

    def module_cuda(self: Any, *args: Any, **more: Any) -> Any:
        return self

    def as_cpu_target(value: Any) -> Any:
        return "cpu" if type(value) is int else as_cpu_device(value)

    def module_to(self: Any, *args: Any, **more: Any) -> Any:
        named = {name: as_cpu_target(value) for name, value in more.items()}
        return plain_to(self, *(as_cpu_target(value) for value in args), **named)

    def ddp(
        self: Any,
        module: Any,
        device_ids: Any = None,
        output_device: Any = None,
        *args: Any,
        **more: Any,
    ) -> None:
        plain_ddp(self, module, None, None, *args, **more)

    def autocast(self: Any, device_type: str, *args: Any, **more: Any) -> None:
        plain_autocast(self, as_cpu_device(device_type), *args, **more)

    return [
        CudaPatch("torch", "device", _device_class(), "scripts make devices by name and number"),
        CudaPatch("torch:Tensor", "cuda", tensor_cuda, "x.cuda()"),
        CudaPatch("torch:Tensor", "pin_memory", pin_memory, "a CPU's torch has no memory to pin"),
        CudaPatch("torch.nn:Module", "cuda", module_cuda, "model.cuda()"),
        CudaPatch(
            "torch.nn:Module", "to", module_to, "model.to(local_rank): a bare number is a GPU's"
        ),
        CudaPatch(
            "torch.nn.parallel:DistributedDataParallel",
            "__init__",
            ddp,
            "device_ids must not be given for modules of the CPU",
        ),
        CudaPatch("torch.amp:autocast", "__init__", autocast, 'torch.autocast("cuda", …)'),
    ]


def _constructor_patches() -> list[CudaPatch]:
    """What reads a device's name in C, where no mode sees it, and files written on a GPU."""
    import torch

    plain: Any = torch._C.Generator
    plain_restore: Any = torch.serialization.default_restore_location

    class GeneratorMeta(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain)

    class Generator(metaclass=GeneratorMeta):
        def __new__(cls, device: Any = "cpu") -> Any:
            return plain(as_cpu_device(device))

    def restore(storage: Any, location: str) -> Any:
        """Where torch.load puts a storage that was saved on a device."""
        return plain_restore(storage, "cpu" if location.startswith("cuda") else location)

    return [
        CudaPatch(
            "torch", "Generator", Generator, 'torch.Generator("cuda"), for what is drawn on the GPU'
        ),
        CudaPatch(
            "torch.serialization",
            "default_restore_location",
            restore,
            "torch.load of what a GPU wrote, and to a GPU",
        ),
    ]


def _accelerator_patches(device: EmulatedDevice) -> list[CudaPatch]:
    """The C half of `torch.accelerator`.

    A build with CUDA has it only for GPUs, and one without CUDA for nothing.
    """
    import torch

    cuda_functions = {patch.name: patch.value for patch in common_patches(device)}
    cuda: Any = torch.cuda
    answers = {
        "getAccelerator": make_constant(torch._C.device("cuda")),
        "setDeviceIndex": cuda_functions["_cuda_setDevice"],
        "getDeviceIndex": cuda_functions["_cuda_getDevice"],
        "exchangeDevice": cuda_functions["_cuda_exchangeDevice"],
        "maybeExchangeDevice": cuda_functions["_cuda_maybeExchangeDevice"],
        "synchronizeDevice": make_no_op(),
        "setStream": make_no_op(),
        "getStream": lambda index: cuda.Stream(),
        "isAllocatorInitialized": make_constant(False),
        "emptyCache": make_no_op(),
        "getMemoryInfo": lambda index: torch.cuda.mem_get_info(),
    }
    reason = "torch.accelerator, for scripts that do not say cuda"
    return [
        CudaPatch("torch._C", f"_accelerator_{name}", value, reason)
        for name, value in answers.items()
    ]


def _device_index_patches(device: EmulatedDevice) -> list[CudaPatch]:
    """The index of a device.

    torch's own function refuses CPU devices, which all devices are here.
    """

    def index(named: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        if isinstance(named, str) and named.startswith("cuda:"):
            return int(named[5:])
        return named if isinstance(named, int) else device.get()

    reason = "scripts hand devices to torch.cuda.set_device and its kin"
    return [
        CudaPatch(where, "_get_device_index", index, reason)
        for where in (
            "torch.cuda",
            "torch.cuda._utils",
            "torch.cuda.memory",
            "torch.accelerator",
            "torch.accelerator._utils",
        )
    ]


def _idle_class_patches() -> list[CudaPatch]:
    """Streams and events without a device: every method exists and does nothing."""

    class IdleObject:
        stream_id = cuda_stream = device_index = priority = 0

        def __init__(self, *args: Any, **more: Any) -> None:
            """Any arguments."""

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *args, **more: None

        def query(self) -> bool:
            return True

        def elapsed_time(self, other: object) -> float:
            return 0.0

        def __enter__(self) -> Any:
            return self

        def __exit__(self, *error: object) -> None:
            """Nothing was entered."""

    class Stream(IdleObject):
        pass

    class Event(IdleObject):
        pass

    reason = "torch's own stands on a C class that only a build with CUDA has"
    found = [CudaPatch(where, "Stream", Stream, reason) for where in _CUDA_MODULES]
    found += [CudaPatch(where, "Event", Event, reason) for where in _CUDA_MODULES]
    return found
