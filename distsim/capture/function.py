"""A Python function as the program of every rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from distsim.capture.child import Target


def target_of(
    function: Callable[..., object], backend: str, args: Sequence[object], kwargs: Mapping[str, object], init: bool
) -> Target:
    """What the ranks run: the function, with ``init`` between the making of the world and its end. Loads torch, which they share."""
    import torch.distributed as dist

    def work() -> None:
        if init:
            dist.init_process_group(backend)
        function(*args, **kwargs)
        if init and dist.is_initialized():
            dist.destroy_process_group()

    code = getattr(function, "__code__", None)
    name = getattr(function, "__qualname__", "function")
    return Target(name, function=work, home=code.co_filename if code is not None else "")
