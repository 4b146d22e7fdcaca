"""GPUs of this machine, which no captured program gets: ranks may be more than there are, and what
they compute is not judged.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def temporary_environment(name: str, value: str) -> Iterator[None]:
    """A variable of this process's environment, for as long as it takes."""
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
    """Let this process's torch, and those forked from it, find no GPU. Imports torch, of which
    nobody may have asked for one before.

    torch's C half counts devices once, also for the threads that autograd starts for each
    (c10/cuda/CUDAFunctions.cpp); so it counts here, while the driver shows none.
    """
    import torch

    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    if count is None:  # a torch without CUDA
        return
    with temporary_environment("CUDA_VISIBLE_DEVICES", ""), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        count()
    setattr(torch.cuda, "_device_count_nvml", lambda: -1)  # noqa: B010 - NVML counts by itself, unless it fails
    # To have counted and be forked is, to torch, a CUDA that was used and can't be in a child; a
    # rank is told what it would be told alone.
    setattr(torch.cuda, "_is_in_bad_fork", lambda: False)  # noqa: B010
    setattr(torch._C, "_cuda_init", _raise_no_gpu)  # noqa: B010


def _raise_no_gpu() -> None:
    """Raises what torch raises where the driver shows no device (c10/cuda/CUDAFunctions.cpp)."""
    raise RuntimeError("No CUDA GPUs are available")


__all__ = ["temporary_environment", "hide_gpus"]
