"""A Python function as what the ranks run, for `distsim.testing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distsim.script_capture.launch.capture_target import CaptureTarget
from distsim.script_capture.launch.preload import preload_lazy_torch_modules


def function_target(
    function: Callable[..., object],
    backend: str,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    init: bool,
) -> CaptureTarget:
    """Each rank calls the function; with ``init``, the world's group exists meanwhile.

    Loads torch, so that the ranks share it.
    """
    import torch.distributed as dist

    def work() -> None:
        if init:
            dist.init_process_group(backend)
        function(*args, **kwargs)
        if init and dist.is_initialized():
            dist.destroy_process_group()

    code = getattr(function, "__code__", None)
    home = code.co_filename if code is not None else ""
    preload_lazy_torch_modules(home)
    return CaptureTarget(getattr(function, "__qualname__", "function"), function=work, home=home)
