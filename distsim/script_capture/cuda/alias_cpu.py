"""The smaller layer: ``cuda`` in a script is read as ``cpu``.

It takes what names a device where tensors and modules are made or moved, and answers torch.cuda's
questions. What it can't do: a script that insists on ``device.type == "cuda"`` fails, and a mistake
of mixed devices goes unseen.
"""

from __future__ import annotations

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

_installed_devices: Final[list[EmulatedDevice]] = []


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
    """A device of the CPU in place of one of CUDA's; everything else as it is."""
    import torch

    if isinstance(value, str) and (
        value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit())
    ):
        return "cpu"
    if isinstance(value, torch._C.device) and value.type == "cuda":
        return torch._C.device("cpu")
    return value


def _aliasing_mode() -> Any:
    """Takes devices out of the arguments of everything that torch lets pass by, `torch.empty` as
    well as `Tensor.to`.
    """
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            kwargs = {name: as_cpu_device(value) for name, value in (kwargs or {}).items()}
            if isinstance(kwargs.get("device"), int) and not isinstance(kwargs["device"], bool):
                kwargs["device"] = "cpu"  # a bare number is a GPU's
            if (
                func is torch.Tensor.to
                and len(args) > 1
                and isinstance(args[1], int)
                and not isinstance(args[1], bool)
            ):
                args = (args[0], "cpu", *args[2:])
            return func(*(as_cpu_device(value) for value in args), **kwargs)

    return OnCpu()


def _device_class() -> type:
    """`torch.device`, which makes devices of the CPU; `isinstance` holds for them as before."""
    import torch

    plain = torch._C.device

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain)

    class device(metaclass=Kind):  # noqa: N801 - torch's name
        def __new__(cls, *args: Any, **more: Any) -> Any:
            if args and isinstance(args[0], int) and not isinstance(args[0], bool):
                return plain("cpu")
            args, more = (
                tuple(as_cpu_device(value) for value in args),
                {name: as_cpu_device(value) for name, value in more.items()},
            )
            named = more.get("type", args[0] if args else None)
            return plain("cpu") if named == "cpu" else plain(*args, **more)

    return device


def _device_argument_patches() -> list[CudaPatch]:
    """Where devices are named outside of torch functions."""
    import torch

    plain_to: Any = torch.nn.Module.to
    plain_autocast: Any = torch.amp.autocast.__init__
    plain_ddp: Any = torch.nn.parallel.DistributedDataParallel.__init__

    def moved(self: Any, *args: Any, **more: Any) -> Any:
        return self

    def pinned(self: Any, *args: Any, **more: Any) -> Any:
        return self

    def module_moved(self: Any, *args: Any, **more: Any) -> Any:
        return self

    def module_to(self: Any, *args: Any, **more: Any) -> Any:
        args = tuple("cpu" if type(value) is int else as_cpu_device(value) for value in args)
        return plain_to(
            self,
            *args,
            **{
                name: "cpu" if type(value) is int else as_cpu_device(value)
                for name, value in more.items()
            },
        )

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
        CudaPatch("torch:Tensor", "cuda", moved, "x.cuda()"),
        CudaPatch("torch:Tensor", "pin_memory", pinned, "a CPU's torch has no memory to pin"),
        CudaPatch("torch.nn:Module", "cuda", module_moved, "model.cuda()"),
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
    """What takes a device's name in C, past all that torch lets pass by; and files that were
    written on a GPU.
    """
    import torch

    plain: Any = torch._C.Generator
    plain_restore: Any = torch.serialization.default_restore_location

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain)

    class Generator(metaclass=Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            return plain(as_cpu_device(device))

    def restore(storage: Any, location: str) -> Any:
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
    """The C half of `torch.accelerator`, which a build with CUDA has for the GPU alone, and one
    without it for nothing.
    """
    import torch

    exchange = {patch.name: patch.value for patch in common_patches(device)}
    cuda: Any = torch.cuda
    answers = {
        "getAccelerator": make_constant(torch._C.device("cuda")),
        "setDeviceIndex": exchange["_cuda_setDevice"],
        "getDeviceIndex": exchange["_cuda_getDevice"],
        "exchangeDevice": exchange["_cuda_exchangeDevice"],
        "maybeExchangeDevice": exchange["_cuda_maybeExchangeDevice"],
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
    """The number in what names a device: torch's own function refuses one of the CPU, which all
    devices are here.
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
    """Streams and events of nothing."""

    class Idle:
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

    class Stream(Idle):
        pass

    class Event(Idle):
        pass

    reason = "torch's own stands on a C class that only a build with CUDA has"
    found = [
        CudaPatch(where, "Stream", Stream, reason) for where in ("torch.cuda", "torch.cuda.streams")
    ]
    found += [
        CudaPatch(where, "Event", Event, reason) for where in ("torch.cuda", "torch.cuda.streams")
    ]
    return found
