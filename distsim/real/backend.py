"""Which back end a real run uses, and whether this machine has what it needs."""

from __future__ import annotations

from importlib.util import find_spec

from distsim.errors import EnvironmentFault

_INSTALL = "pip install 'distsim[real]' brings it"


def need_torch() -> None:
    """Raises EnvironmentFault where torch is not installed, or has no torch.distributed."""
    if find_spec("torch") is None:
        raise EnvironmentFault("a real run needs torch, which is not installed here", _INSTALL)
    import torch.distributed

    if not torch.distributed.is_available():
        raise EnvironmentFault("this build of torch has no torch.distributed", _INSTALL)


def devices() -> int:
    """GPUs that torch sees."""
    import torch

    return torch.cuda.device_count() if torch.cuda.is_available() else 0


def choose(wanted: str | None, scenario: str, ranks_here: int) -> str:
    """gloo, nccl or mpi: the one asked for (``auto``: nccl where every rank has a GPU, else gloo), else the scenario's.

    Raises EnvironmentFault where it can't run here, with what can.
    """
    import torch.distributed as dist

    gpus = devices()
    if wanted == "auto":
        return "nccl" if dist.is_nccl_available() and gpus >= ranks_here else "gloo"
    name = wanted or scenario
    built_in = {"gloo": dist.is_gloo_available, "nccl": dist.is_nccl_available, "mpi": dist.is_mpi_available}[name]()
    said = "" if wanted else ", which the scenario asks for,"
    if name == "nccl" and not gpus:
        raise EnvironmentFault(f"nccl{said} needs a GPU, and torch sees none here", "run it on the CPU: add --backend gloo")
    if not built_in:
        raise EnvironmentFault(
            f"this build of torch has no {name}", "add --backend gloo" if name != "gloo" else "install another build of torch"
        )
    return name


__all__ = ["choose", "devices", "need_torch"]
