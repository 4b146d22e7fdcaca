"""GPUs of this machine, which no captured program gets: ranks may be more than there are, and what they compute is not judged."""

from __future__ import annotations

import os
import warnings

_NAME = "CUDA_VISIBLE_DEVICES"


def hide() -> None:
    """Let this process's torch, and those forked from it, find no GPU. Imports torch, of which nobody may have asked for one before.

    torch's C half counts devices once, also for the threads that autograd starts for each (c10/cuda/CUDAFunctions.cpp); so it counts
    here, while the driver shows none.
    """
    import torch

    count = getattr(torch._C, "_cuda_getDeviceCount", None)
    if count is None:  # a torch without CUDA
        return
    before = os.environ.get(_NAME)
    os.environ[_NAME] = ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            count()
    finally:
        if before is None:
            del os.environ[_NAME]
        else:
            os.environ[_NAME] = before
    setattr(torch.cuda, "_device_count_nvml", lambda: -1)  # noqa: B010 - NVML counts by itself, unless it fails


__all__ = ["hide"]
