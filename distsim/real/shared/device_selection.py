"""Chooses the backend and the devices of a real run, and the environment variables that they need.

Sources: torch/cuda/__init__.py and torch/csrc/cuda/Module.cpp (CUDA and fork), ProcessGroupNCCL.hpp
and ProcessGroupGloo.cpp, NCCL's `init.cc`, `env.rst` and `nccl.h`.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final, NamedTuple

from distsim.backends.nccl import MIN_CHANNELS_PER_PEER
from distsim.common.errors import EnvironmentFault, UsageError
from distsim.common.installation import install_command
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: The first NCCL that allows ranks to share a GPU on request (NCCL 2.30, `init.cc` and `env.rst`:
#: NCCL_MULTI_RANK_GPU_ENABLE).
SHARED_GPU_NCCL_VERSION: Final = (2, 30)
#: If one of these launchers shows a task a single GPU, the task has that GPU for itself; torchrun
#: shows all GPUs to every process.
_GPU_PER_TASK_LAUNCHERS: Final = ("srun", "mpirun", "mpiexec")


# --- backends ---


def require_torch() -> None:
    """Raise EnvironmentFault if torch is not installed or has no torch.distributed."""
    if find_spec("torch") is None:
        raise EnvironmentFault(
            "a real run needs torch, which is not installed here", install_command("real")
        )
    import torch.distributed

    if not torch.distributed.is_available():
        raise EnvironmentFault(
            "this build of torch has no torch.distributed", install_command("real")
        )


def visible_gpus() -> int:
    """The number of GPUs that torch sees.

    torch asks the driver's management library (NVML) if it can, which does not initialise CUDA.
    """
    import torch

    return torch.cuda.device_count()


def cuda_survives_fork() -> bool:
    """Forked ranks can use the GPUs, because this process has not begun to use CUDA.

    torch.cuda.device_count counts without CUDA if NVML answers. Otherwise it asks CUDA itself, and
    after that no child may use CUDA (torch/cuda/__init__.py; torch/csrc/cuda/Module.cpp,
    `poison_fork`).
    """
    import torch

    by_nvml = getattr(torch.cuda, "_device_count_nvml", lambda: -1)
    return not torch.cuda.is_initialized() and by_nvml() > 0  # type: ignore[no-untyped-call]


def choose_backend(wanted: str | None, scenario_backend: str, local_ranks: int) -> str:
    """gloo, nccl or mpi: the one that is asked for, else the scenario's.

    ``wanted`` may be ``auto``: nccl if every rank has a GPU, else gloo. Raises EnvironmentFault if
    the backend cannot run here, with one that can.
    """
    import torch.distributed as dist

    gpus = visible_gpus()
    if wanted == "auto":
        return "nccl" if dist.is_nccl_available() and gpus >= local_ranks else "gloo"
    name = wanted or scenario_backend
    is_available = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }[name]
    is_built_in = is_available()
    if name == "nccl" and not gpus:
        origin = "" if wanted else ", which the scenario asks for,"
        raise EnvironmentFault(
            f"nccl{origin} needs a GPU, but torch finds none",
            "run it on the CPU: add --backend gloo",
        )
    if not is_built_in:
        raise EnvironmentFault(
            f"this build of torch has no {name}",
            "add --backend gloo" if name != "gloo" else "install another build of torch",
        )
    return name


# --- devices ---


def usable_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


class RankDevices(NamedTuple):
    """The devices of the ranks on this machine.

    ``kind``: cpu or cuda. ``gpus``: how many are visible. ``shared``: several ranks share a GPU.
    ``separate_hosts``: these ranks pretend to NCCL that each is on its own machine, because NCCL
    would refuse them otherwise.
    """

    kind: str = "cpu"
    gpus: int = 0
    shared: bool = False
    separate_hosts: bool = False

    def gpu_of(self, local_rank: int) -> int:
        """The visible GPU of a local rank; ranks take turns if they outnumber the GPUs."""
        return local_rank % max(self.gpus, 1)


def choose_devices(
    wanted: str, backend: str, gpus: int, local_ranks: int, launcher: str | None = None
) -> RankDevices:
    """The devices of a run.

    ``wanted``: auto (GPUs for nccl, else the CPU), cpu or cuda. ``launcher``: the external launcher
    of this process, if any. Raises UsageError if the backend cannot work there, EnvironmentFault if
    the machine has no such device.
    """
    if backend == "nccl" and wanted == "cpu":
        raise UsageError(
            "nccl supports only GPUs, not the CPU", "omit --device, or add --backend gloo"
        )
    if wanted == "cpu" or (wanted == "auto" and backend != "nccl"):
        return RankDevices("cpu", gpus)
    if not gpus:
        raise EnvironmentFault(
            "--device cuda needs a GPU, but torch finds none", "run it on the CPU: --device cpu"
        )
    has_own_gpu = gpus == 1 and launcher in _GPU_PER_TASK_LAUNCHERS
    devices = RankDevices("cuda", gpus, shared=local_ranks > gpus and not has_own_gpu)
    if backend == "nccl" and devices.shared:
        return devices._replace(separate_hosts=nccl_version() < SHARED_GPU_NCCL_VERSION)
    return devices


def nccl_version() -> tuple[int, ...]:
    """The version of the loaded NCCL, else of the NCCL that torch was built with; empty if none."""
    import torch

    try:
        built: tuple[int | str, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ()
    return _loaded_nccl_version() or tuple(int(number) for number in built[:3])


def _loaded_nccl_version() -> tuple[int, ...]:
    """The version that ncclGetVersion of the library in this process returns.

    It is major * 10000 + minor * 100 + patch (nccl.h, since 2.9); older codes are not understood.
    """
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        code = ctypes.c_int()
        error = library.ncclGetVersion(ctypes.byref(code))
    except (AttributeError, OSError):
        return ()
    if error or code.value < 20900:
        return ()
    return code.value // 10000, code.value // 100 % 100, code.value % 100


def check_device_support(program: Program, backend: str, devices: RankDevices) -> None:
    """Raise UsageError with the operations that gloo does not support for CUDA tensors.

    Gloo's collectives copy the tensors to the CPU. Its messages read and write the tensor's memory
    directly, which must be CPU memory (torch's table of backends; ProcessGroupGloo.cpp, `send` and
    `recv`). Barriers have no tensor.
    """
    if backend != "gloo" or devices.kind != "cuda":
        return
    used = {call.op for code in program.codes for call in code.calls}
    refused = sorted(name for name in used if OPERATIONS[name].kind in ("p2p", "batch"))
    if refused:
        raise UsageError(
            f"gloo has no {', '.join(refused)} for CUDA tensors, only collectives",
            "omit --device cuda, or add --backend nccl",
        )


def backend_variables(
    backend: str, devices: RankDevices, options: Mapping[str, object], folder: str, rank: int = 0
) -> dict[str, str]:
    """Environment variables of a rank for torch and NCCL; empty for other backends.

    They carry out the scenario's options, and make NCCL report a hang. Sources: torch,
    ProcessGroupNCCL.hpp (TORCH_NCCL_..., TORCH_FR_...); NCCL's guide, "Environment Variables".
    """
    if devices.kind != "cuda" or backend != "nccl":
        return {}
    variables = {
        # The watchdog ends a process whose collective failed or exceeded its timeout.
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        # The monitor ends a process whose watchdog is stuck.
        "TORCH_NCCL_ENABLE_MONITORING": "1",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/fr-",
        "TORCH_NCCL_BLOCKING_WAIT": "1" if options.get("blocking_wait") else "0",
    }
    if options.get("launch_order_implicit"):
        variables["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    if "buffsize" in options:
        bytes_per_channel = int(str(options["buffsize"])) // MIN_CHANNELS_PER_PEER
        variables["NCCL_BUFFSIZE"] = str(bytes_per_channel)
    if devices.shared and devices.separate_hosts:
        # NCCL refuses two ranks with the same host and bus ID (`init.cc`, "Duplicate GPU
        # detected"); NCCL_HOSTID replaces the host.
        variables["NCCL_HOSTID"] = f"distsim-{rank}"
    elif devices.shared:
        variables["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    return variables


def default_variables(backend: str, devices: RankDevices) -> dict[str, str]:
    """Environment variables that a rank gets unless they are set already."""
    if devices.kind != "cuda":
        return {}
    # With more hardware queues, a stream that waits does not hold up the other streams.
    variables = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if backend == "nccl":
        variables |= {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "2000"}
        if devices.shared:
            # The kernels of all ranks that share a GPU must fit on it at the same time.
            variables["NCCL_MAX_CTAS"] = "8"
    return variables
