"""Events for calls of the hub's groups in torch's profiler.

A backend records an event for each of its calls; the hub's groups have no backend that would.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@cache
def _profiler_query() -> Callable[[], bool]:
    autograd = import_module("torch.autograd")
    found: Callable[[], bool] = autograd._profiler_enabled
    return found


def is_profiling() -> bool:
    """Whether torch's profiler is recording."""
    return _profiler_query()()


def record_profiler_event(name: str, tensors: Sequence[Tensor]) -> None:
    """Record the event that torch's profiler would have for a call.

    It ends on another thread, as an event of a backend's worker thread does.
    """
    autograd = import_module("torch.autograd")
    event = autograd._record_function_with_args_enter(name, *tensors)
    worker = threading.Thread(target=autograd._record_function_with_args_exit, args=(event,))
    worker.start()
    worker.join()
