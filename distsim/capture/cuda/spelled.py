"""The smaller layer: ``cuda`` in a script is read as ``cpu``.

It takes what names a device where tensors and modules are made or moved, and answers torch.cuda's questions. What it can't do: a script
that insists on ``device.type == "cuda"`` fails, and a mistake of mixed devices goes unseen.
"""

from __future__ import annotations

from typing import Any, Final

from distsim.capture.cuda.hidden import hide
from distsim.capture.cuda.pretend import Device, Patch, fixed, nothing, patches, put

_installed: Final[list[Device]] = []


def install(count: int) -> None:
    """Read ``cuda`` as ``cpu`` from here on."""
    import torch

    if _installed:
        _installed[0].count = count
        return
    hide()
    device = Device(count)
    for patch in [*patches(device), *_places(), *_makers(), *_indices(device), *_accelerator(device), *_idle_classes()]:
        put(patch)
    torch.cuda._initialized = True
    torch.cuda._cached_device_count = None
    setattr(torch.cuda, "default_generators", (torch.default_generator,) * count)  # noqa: B010 - its type says one
    _mode().__enter__()
    _installed.append(device)


def on_cpu(value: Any) -> Any:
    """A device of the CPU in place of one of CUDA's; everything else as it is."""
    import torch

    if isinstance(value, str) and (value == "cuda" or (value.startswith("cuda:") and value[5:].isdigit())):
        return "cpu"
    if isinstance(value, torch._C.device) and value.type == "cuda":
        return torch._C.device("cpu")
    return value


def _mode() -> Any:
    """Takes devices out of the arguments of everything that torch lets pass by, `torch.empty` as well as `Tensor.to`."""
    import torch
    from torch.overrides import TorchFunctionMode

    class OnCpu(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            kwargs = {name: on_cpu(value) for name, value in (kwargs or {}).items()}
            if isinstance(kwargs.get("device"), int) and not isinstance(kwargs["device"], bool):
                kwargs["device"] = "cpu"  # a bare number is a GPU's
            if func is torch.Tensor.to and len(args) > 1 and isinstance(args[1], int) and not isinstance(args[1], bool):
                args = (args[0], "cpu", *args[2:])
            return func(*(on_cpu(value) for value in args), **kwargs)

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
            args, more = tuple(on_cpu(value) for value in args), {name: on_cpu(value) for name, value in more.items()}
            named = more.get("type", args[0] if args else None)
            return plain("cpu") if named == "cpu" else plain(*args, **more)

    return device


def _places() -> list[Patch]:
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
        args = tuple("cpu" if type(value) is int else on_cpu(value) for value in args)
        return plain_to(self, *args, **{name: "cpu" if type(value) is int else on_cpu(value) for name, value in more.items()})

    def ddp(self: Any, module: Any, device_ids: Any = None, output_device: Any = None, *args: Any, **more: Any) -> None:
        plain_ddp(self, module, None, None, *args, **more)

    def autocast(self: Any, device_type: str, *args: Any, **more: Any) -> None:
        plain_autocast(self, on_cpu(device_type), *args, **more)

    return [
        Patch("torch", "device", _device_class(), "scripts make devices by name and number"),
        Patch("torch:Tensor", "cuda", moved, "x.cuda()"),
        Patch("torch:Tensor", "pin_memory", pinned, "a CPU's torch has no memory to pin"),
        Patch("torch.nn:Module", "cuda", module_moved, "model.cuda()"),
        Patch("torch.nn:Module", "to", module_to, "model.to(local_rank): a bare number is a GPU's"),
        Patch(
            "torch.nn.parallel:DistributedDataParallel", "__init__", ddp, "device_ids must not be given for modules of the CPU"
        ),
        Patch("torch.amp:autocast", "__init__", autocast, 'torch.autocast("cuda", …)'),
    ]


def _makers() -> list[Patch]:
    """What takes a device's name in C, past all that torch lets pass by; and files that were written on a GPU."""
    import torch

    plain: Any = torch._C.Generator
    plain_restore: Any = torch.serialization.default_restore_location

    class Kind(type):
        def __instancecheck__(cls, value: object) -> bool:
            return isinstance(value, plain)

    class Generator(metaclass=Kind):
        def __new__(cls, device: Any = "cpu") -> Any:
            return plain(on_cpu(device))

    def restore(storage: Any, location: str) -> Any:
        return plain_restore(storage, "cpu" if location.startswith("cuda") else location)

    return [
        Patch("torch", "Generator", Generator, 'torch.Generator("cuda"), for what is drawn on the GPU'),
        Patch("torch.serialization", "default_restore_location", restore, "torch.load of what a GPU wrote, and to a GPU"),
    ]


def _accelerator(device: Device) -> list[Patch]:
    """The C half of `torch.accelerator`, which a build with CUDA has for the GPU alone, and one without it for nothing."""
    import torch

    exchange = {patch.name: patch.value for patch in patches(device)}
    cuda: Any = torch.cuda
    answers = {
        "getAccelerator": fixed(torch._C.device("cuda")), "setDeviceIndex": exchange["_cuda_setDevice"],
        "getDeviceIndex": exchange["_cuda_getDevice"], "exchangeDevice": exchange["_cuda_exchangeDevice"],
        "maybeExchangeDevice": exchange["_cuda_maybeExchangeDevice"], "synchronizeDevice": nothing(), "setStream": nothing(),
        "getStream": lambda index: cuda.Stream(), "isAllocatorInitialized": fixed(False), "emptyCache": nothing(),
        "getMemoryInfo": lambda index: torch.cuda.mem_get_info(),
    }  # fmt: skip
    reason = "torch.accelerator, for scripts that do not say cuda"
    return [Patch("torch._C", f"_accelerator_{name}", value, reason) for name, value in answers.items()]


def _indices(device: Device) -> list[Patch]:
    """The number in what names a device: torch's own function refuses one of the CPU, which all devices are here."""

    def index(named: Any, optional: bool = False, allow_cpu: bool = False) -> int:
        if isinstance(named, str) and named.startswith("cuda:"):
            return int(named[5:])
        return named if isinstance(named, int) else device.get()

    reason = "scripts hand devices to torch.cuda.set_device and its kin"
    return [
        Patch(where, "_get_device_index", index, reason)
        for where in ("torch.cuda", "torch.cuda._utils", "torch.cuda.memory", "torch.accelerator", "torch.accelerator._utils")
    ]


def _idle_classes() -> list[Patch]:
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
    found = [Patch(where, "Stream", Stream, reason) for where in ("torch.cuda", "torch.cuda.streams")]
    found += [Patch(where, "Event", Event, reason) for where in ("torch.cuda", "torch.cuda.streams")]
    return found
