"""On what a real run works: which back end, the CPU or CUDA devices, which of them a rank takes,
and what a back end can do there.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Final, NamedTuple

from distsim.backends.nccl import MIN_CHANNELS_PER_PEER
from distsim.common.errors import EnvironmentFault, UsageError
from distsim.operations.registry import OPERATIONS
from distsim.program.model import Program

#: The first NCCL that lets ranks share a GPU on request (NCCL 2.30, `init.cc` and `env.rst`:
#: NCCL_MULTI_RANK_GPU_ENABLE).
SHARED_GPU_NCCL_VERSION: Final = (2, 30)
#: What a task that srun or mpirun started with one visible GPU has for itself; torchrun shows every
#: process all of them.
_GPU_PER_TASK_LAUNCHERS: Final = ("srun", "mpirun", "mpiexec")
_INSTALL_HINT: Final = "pip install 'distsim[real]' brings it"


# --- back ends ---


def require_torch() -> None:
    """Raises EnvironmentFault where torch is not installed, or has no torch.distributed."""
    if find_spec("torch") is None:
        raise EnvironmentFault("a real run needs torch, which is not installed here", _INSTALL_HINT)
    import torch.distributed

    if not torch.distributed.is_available():
        raise EnvironmentFault("this build of torch has no torch.distributed", _INSTALL_HINT)


def visible_gpus() -> int:
    """GPUs that torch sees. It asks the driver's management library where it can, which leaves CUDA
    alone.
    """
    import torch

    return torch.cuda.device_count()


def cuda_survives_fork() -> bool:
    """Forked ranks can use the GPUs: nothing in this process has begun to use CUDA.

    torch.cuda.device_count counts without CUDA where NVML answers; else it asks CUDA itself,
    after which no child may use it (torch/cuda/__init__.py; torch/csrc/cuda/Module.cpp,
    `poison_fork`).
    """
    import torch

    by_nvml = getattr(torch.cuda, "_device_count_nvml", lambda: -1)
    return not torch.cuda.is_initialized() and by_nvml() > 0  # type: ignore[no-untyped-call]


def choose_backend(wanted: str | None, scenario: str, ranks_here: int) -> str:
    """gloo, nccl or mpi: the one asked for (``auto``: nccl where every rank has a GPU, else gloo),
    else the scenario's.

    Raises EnvironmentFault where it can't run here, with what can.
    """
    import torch.distributed as dist

    gpus = visible_gpus()
    if wanted == "auto":
        return "nccl" if dist.is_nccl_available() and gpus >= ranks_here else "gloo"
    name = wanted or scenario
    built_in = {
        "gloo": dist.is_gloo_available,
        "nccl": dist.is_nccl_available,
        "mpi": dist.is_mpi_available,
    }[name]()
    said = "" if wanted else ", which the scenario asks for,"
    if name == "nccl" and not gpus:
        raise EnvironmentFault(
            f"nccl{said} needs a GPU, and torch sees none here",
            "run it on the CPU: add --backend gloo",
        )
    if not built_in:
        raise EnvironmentFault(
            f"this build of torch has no {name}",
            "add --backend gloo" if name != "gloo" else "install another build of torch",
        )
    return name


# --- devices ---


def usable_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class RankDevices(NamedTuple):
    """What the ranks of this machine work on: cpu or cuda, how many GPUs are visible, whether
    several ranks share one.

    ``apart``: ranks that share one tell NCCL that they are on machines of their own, since it would
    refuse them otherwise.
    """

    kind: str = "cpu"
    gpus: int = 0
    shared: bool = False
    apart: bool = False

    def of(self, local_rank: int) -> int:
        """The visible GPU that a local rank takes: its own, or in turn where ranks outnumber
        GPUs.
        """
        return local_rank % max(self.gpus, 1)


def choose_devices(
    wanted: str, backend: str, count: int, ranks_here: int, launcher: str | None = None
) -> RankDevices:
    """The devices of a run. ``wanted``: auto (GPUs for nccl, else the CPU), cpu or cuda.
    ``launcher``: who started this process, if anybody did. Raises UsageError for a back end that
    can't work there, EnvironmentFault where the machine can't.
    """
    if backend == "nccl" and wanted == "cpu":
        raise UsageError(
            "nccl works on GPUs only, not on the CPU", "leave --device out, or add --backend gloo"
        )
    if wanted == "cpu" or (wanted == "auto" and backend != "nccl"):
        return RankDevices("cpu", count)
    if not count:
        raise EnvironmentFault(
            "--device cuda needs a GPU, and torch sees none here", "run it on the CPU: --device cpu"
        )
    own = count == 1 and launcher in _GPU_PER_TASK_LAUNCHERS
    found = RankDevices("cuda", count, ranks_here > count and not own)
    return (
        found._replace(apart=nccl_version() < SHARED_GPU_NCCL_VERSION)
        if backend == "nccl" and found.shared
        else found
    )


def nccl_version() -> tuple[int, ...]:
    """The version of the NCCL that is loaded, else of the one torch was built with; empty where
    there is none.
    """
    import torch

    try:
        built: tuple[int | str, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    except (AttributeError, RuntimeError):
        return ()
    return _loaded_version() or tuple(int(n) for n in built[:3])


def _loaded_version() -> tuple[int, ...]:
    """What ncclGetVersion of the library in this process says: major * 10000 + minor * 100 + patch
    (nccl.h, since 2.9).
    """
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        found = ctypes.c_int()
        if library.ncclGetVersion(ctypes.byref(found)) or found.value < 20900:
            return ()
    except (AttributeError, OSError):
        return ()
    return found.value // 10000, found.value // 100 % 100, found.value % 100


def check_device_support(program: Program, backend: str, devices: RankDevices) -> None:
    """Raises UsageError for operations that gloo can't do with CUDA tensors, by their names.

    Its collectives go by way of the CPU; its messages read and write the tensor's memory directly,
    which must be the CPU's (torch's table of back ends; ProcessGroupGloo.cpp, `send` and `recv`).
    Barriers hold no tensor.
    """
    if backend != "gloo" or devices.kind != "cuda":
        return
    used = {call.op for code in program.codes for call in code.calls}
    refused = sorted(name for name in used if OPERATIONS[name].kind in ("p2p", "batch"))
    if refused:
        raise UsageError(
            f"gloo has no {', '.join(refused)} for CUDA tensors, only collectives",
            "leave --device cuda out, or run it with --backend nccl",
        )


def backend_variables(
    backend: str, devices: RankDevices, options: Mapping[str, object], folder: str, rank: int = 0
) -> dict[str, str]:
    """Variables of a rank's environment that torch and NCCL read: the file's options, and what
    keeps a hang from being silent.

    Sources: torch, ProcessGroupNCCL.hpp (TORCH_NCCL_…, TORCH_FR_…); NCCL's guide, "Environment
    Variables". NCCL calls two ranks on one GPU a duplicate where host and bus are the same
    (`init.cc`, "Duplicate GPU detected"); NCCL_HOSTID says which host it is.
    """
    if devices.kind != "cuda" or backend != "nccl":
        return {}
    found = {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",  # the watchdog ends a process whose collective failed or outlasted its timeout
        "TORCH_NCCL_ENABLE_MONITORING": "1",  # and the monitor one whose watchdog is stuck
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/fr-",
        "TORCH_NCCL_BLOCKING_WAIT": "1" if options.get("blocking_wait") else "0",
    }
    if options.get("launch_order_implicit"):
        found["NCCL_LAUNCH_ORDER_IMPLICIT"] = "1"
    if "buffsize" in options:
        found["NCCL_BUFFSIZE"] = str(int(str(options["buffsize"])) // MIN_CHANNELS_PER_PEER)
    if devices.shared:
        found |= (
            {"NCCL_HOSTID": f"distsim-{rank}"}
            if devices.apart
            else {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}
        )
    return found


def default_variables(backend: str, devices: RankDevices) -> dict[str, str]:
    """Variables that a rank gets where nobody has set them.

    CUDA_DEVICE_MAX_CONNECTIONS: with more hardware queues, what one stream waits for does not hold
    up another. NCCL_MAX_CTAS: ranks that share a GPU must all find room on it.
    """
    if devices.kind != "cuda":
        return {}
    found = {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if backend == "nccl":
        found |= {"NCCL_DEBUG": "WARN", "TORCH_FR_BUFFER_SIZE": "2000"}
    return found | ({"NCCL_MAX_CTAS": "8"} if devices.shared and backend == "nccl" else {})
