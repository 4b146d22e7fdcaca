"""Record a few training steps now and then, cheaply enough to stay switched on::

    import distsim.recorder

    distsim.recorder.start("profiles")  # on every rank, after init_process_group

The end of an optimizer's step ends a training step, so the loop needs no change. After ``first``
steps, and then every ``every`` steps, PyTorch's profiler records ``steps`` steps and writes
``profiles/step<N>/rank<R>.json.gz``. `distsim slow profiles/step<N>` reads them. After ``windows``
of these windows, the recorder removes itself.

Between windows, a training step pays for one Python call. The profiler itself runs only in a window
and in the step before it. `benchmarks/recorder_overhead.py` measures both. torch is loaded by
`start`, nothing else of distsim is.

Limits: a job with several optimizers counts the steps of the first one that steps. Steps before
`start` do not count, so all ranks must call it at the same step. A failed write stops the recorder
with a warning, never the training.
"""

from __future__ import annotations

import os
import warnings
import weakref
from pathlib import Path
from typing import Any

_active: list[Recorder] = []


class Recorder:
    """Profiles windows of steps on one rank. Use `start`."""

    def __init__(self, folder: Path, steps: int, first: int, every: int, windows: int) -> None:
        self.folder = folder
        self.steps = steps
        self.first = first
        self.every = every
        self.windows = windows
        self._done_steps = 0
        self._done_windows = 0
        self._profiler: Any = None
        self._optimizer: weakref.ref[Any] | None = None
        self._next_start = first
        self._handle: Any = None

    def attach(self) -> None:
        """Begin to count the steps of optimizers."""
        from torch.optim.optimizer import register_optimizer_step_post_hook

        self._handle = register_optimizer_step_post_hook(self._after_optimizer)

    def detach(self) -> None:
        """Stop for good. A window that is not complete is dropped."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        profiler, self._profiler = self._profiler, None
        if profiler is not None:
            profiler.on_trace_ready = None
            profiler.stop()

    def _after_optimizer(self, optimizer: Any, args: object, kwargs: object) -> None:
        counted = self._optimizer() if self._optimizer is not None else None
        if counted is None:
            self._optimizer = weakref.ref(optimizer)
        elif counted is not optimizer:
            return
        self._done_steps += 1
        if self._profiler is not None:
            self._profiler.step()
        elif self._done_steps >= self._next_start:
            self._start_window()

    def _start_window(self) -> None:
        from torch.profiler import profile, schedule

        start = self._done_steps
        self._next_start = start + self.every
        # The first step of a profiler is slow, so it only warms up.
        self._profiler = profile(
            record_shapes=True,
            schedule=schedule(wait=0, warmup=1, active=self.steps, repeat=1),
            on_trace_ready=lambda done: self._end_window(done, start),
        )
        self._profiler.start()

    def _end_window(self, profiler: Any, start: int) -> None:
        self._profiler = None
        self._done_windows += 1
        try:
            self._write(profiler, self.folder / f"step{start}")
        except (OSError, RuntimeError) as error:
            warnings.warn(f"distsim.recorder stopped: {error}", stacklevel=2)
            self._done_windows = self.windows
        if self._done_windows >= self.windows:
            self.detach()

    def _write(self, profiler: Any, folder: Path) -> None:
        """Write the profile of this rank; a reader never finds half a file."""
        folder.mkdir(parents=True, exist_ok=True)
        rank = _rank()
        unfinished = folder / f".rank{rank}.json.gz"
        profiler.export_chrome_trace(str(unfinished))
        unfinished.replace(folder / f"rank{rank}.json.gz")


def start(
    folder: str | os.PathLike[str] = "profiles",
    *,
    steps: int = 6,
    first: int = 10,
    every: int = 1000,
    windows: int = 5,
) -> None:
    """Record ``steps`` steps after ``first`` steps and then every ``every`` steps.

    ``windows``: after this many recordings, the recorder removes itself. A second call replaces the
    first one.
    """
    counts = {"steps": steps, "first": first, "every": every, "windows": windows}
    for name, value in counts.items():
        least = 0 if name == "first" else 1
        if value < least:
            raise ValueError(f"distsim.recorder.start: {name}={value}; use {least} or more")
    stop()
    recorder = Recorder(Path(folder), steps, first, max(every, steps + 2), windows)
    recorder.attach()
    _active.append(recorder)


def stop() -> None:
    """Remove the recorder, if there is one."""
    while _active:
        _active.pop().detach()


def _rank() -> int:
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank()
    return int(os.environ.get("RANK", "0"))
