"""Hide the GPUs of this machine from a captured program.

There may be more ranks than GPUs, and what ranks compute does not matter for their calls.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable of this process meanwhile."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


def hide_gpus() -> None:
    """Let torch find no GPU, in this process and those forked from it.

    Imports torch. No code may have asked torch for a GPU before: its C half counts devices once,
    also for the threads that autograd starts for each (c10/cuda/CUDAFunctions.cpp). So it counts
    here, while the driver shows none.
    """
    import torch

    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    if count is None:  # a torch without CUDA
        return
    with temporary_environment("CUDA_VISIBLE_DEVICES", ""), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count()
    # NVML counts by itself; -1 means that it failed.
    setattr(torch.cuda, "_device_count_nvml", lambda: -1)  # noqa: B010
    # For torch, CUDA has been used now, and cannot be used after a fork. A rank must get the same
    # error as on a machine without a GPU instead.
    setattr(torch.cuda, "_is_in_bad_fork", lambda: False)  # noqa: B010
    setattr(torch._C, "_cuda_init", _raise_no_gpu)  # noqa: B010


def _raise_no_gpu() -> None:
    """Raises what torch raises if the driver shows no device (c10/cuda/CUDAFunctions.cpp)."""
    raise RuntimeError("No CUDA GPUs are available")


__all__ = ["temporary_environment", "hide_gpus"]
