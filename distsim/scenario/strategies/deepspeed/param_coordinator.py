"""When DeepSpeed's ZeRO 3 gathers a parameter and when it frees it.

``ParameterCoordinator`` replays DeepSpeed's coordinator, one pass after the other. The first pass
over the model is recorded (the trace): a module's parameters are gathered when the module is
reached, and freed after it. From the second pass on, each fetch also prefetches what comes next, up
to a number of elements, and parameters that are soon used again stay gathered.

A step of the trace is a module: the root, which holds nothing, then the layers in order; in the
backward pass the same again with the layers in reverse order. No calls are made here; see
`distsim.scenario.strategies.deepspeed.stage3_calls`.

Source: DeepSpeed 0.19.8, `runtime/zero/partitioned_param_coordinator.py`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

#: A parameter that was not fetched for any step of this pass.
_NO_STEP = -1


class FetchLimits(NamedTuple):
    """Limits in elements.

    By DeepSpeed's names: stage3_prefetch_bucket_size, stage3_max_reuse_distance,
    stage3_max_live_parameters, stage3_param_persistence_threshold.
    """

    prefetch: int
    reuse: int
    live: int
    persistent: int


class ParameterGather(NamedTuple):
    """Parameters that are gathered together.

    ``secondary``: among the ranks that hold the second copy (hpZ).
    """

    params: tuple[int, ...]
    secondary: bool = False


class ModuleFetch(NamedTuple):
    """The gathers when a module is reached: those that it needs, and prefetches."""

    required: list[ParameterGather]
    ahead: list[ParameterGather]


class _FutureUse(NamedTuple):
    """A parameter, and the step of the trace that uses it."""

    param: int
    step: int


class ParameterCoordinator:
    """The state of all parameters during training.

    ``layers`` are the numbers of elements of each layer's parameters, which are numbered through in
    the order of `module.parameters()`; ``run`` are the layers that compute, in order. With
    ``keeps_second_copy`` (hpZ) freed parameters go to a second copy, which fewer ranks share.
    """

    def __init__(
        self,
        layers: Sequence[Sequence[int]],
        run: Sequence[int],
        limits: FetchLimits,
        keeps_second_copy: bool = False,
    ) -> None:
        self.limits = limits
        self.keeps_second_copy = keeps_second_copy
        self.numel = [numel for layer in layers for numel in layer]
        self.layers: list[tuple[int, ...]] = []
        start = 0
        for layer in layers:
            self.layers.append(tuple(range(start, start + len(layer))))
            start += len(layer)
        #: Small parameters, which always stay gathered.
        self.persistent = [numel <= limits.persistent for numel in self.numel]
        #: The layer of each step of the trace; None is the root.
        self.trace: list[int | None] = [None, *run, None, *reversed(run)]
        #: Parameters that are gathered, or whose gather is in flight.
        self.gathered: set[int] = set()
        self.in_second_copy: set[int] = set(range(len(self.numel))) if keeps_second_copy else set()
        self.passes = 0
        self._start_pass()

    @property
    def is_traced(self) -> bool:
        """Whether the trace is complete, so that parameters can be prefetched and kept."""
        return self.passes > 0

    def _start_pass(self) -> None:
        """Before a pass over the model (`reset_step`)."""
        self.step = 0
        self.live_numel = 0
        self.queue = deque(
            _FutureUse(param, step)
            for step, layer in enumerate(self.trace)
            for param in self._params_of(layer)
        )
        #: The latest step of this pass for which a parameter was fetched.
        self.fetched_for: dict[int, int] = {}

    def end_pass(self) -> None:
        """After the backward pass."""
        self.passes += 1
        self._start_pass()

    def after_optimizer(self) -> list[ParameterGather]:
        """The gathers after the optimizer's step.

        Everything is freed, second copies are stale, and persistent parameters are gathered again.
        """
        self.gathered = {p for p, persistent in enumerate(self.persistent) if persistent}
        self.in_second_copy.clear()
        return [ParameterGather((p,)) for p in sorted(self.gathered)]

    def _params_of(self, layer: int | None) -> tuple[int, ...]:
        return () if layer is None else self.layers[layer]

    def _numel_of(self, params: Iterable[int]) -> int:
        return sum(self.numel[p] for p in params)

    # --- a step ---
    def reach_next_module(self) -> ModuleFetch:
        """Reach the next module of the trace: gather what it needs, and prefetch."""
        params = self._params_of(self.trace[self.step])
        required = self._gather([p for p in params if p not in self.gathered])
        ahead = self._prefetch(params) if self.is_traced else []
        self.step += 1
        return ModuleFetch(required, ahead)

    def _gather(self, params: Sequence[int]) -> list[ParameterGather]:
        self.gathered.update(params)
        self.live_numel += self._numel_of(params)
        second = tuple(p for p in params if p in self.in_second_copy)
        first = tuple(p for p in params if p not in self.in_second_copy)
        gathers = []
        if second:
            gathers.append(ParameterGather(second, secondary=True))
        if first:
            gathers.append(ParameterGather(first))
        return gathers

    def _prefetch(self, required: Sequence[int]) -> list[ParameterGather]:
        # Uses by the present module leave the queue, unless a prefetch took them from it before.
        missing = [p for p in required if self.fetched_for.get(p, _NO_STEP) < self.step]
        for _ in range(min(len(missing), len(self.queue))):
            use = self.queue.popleft()
            self.fetched_for[use.param] = use.step

        limit = min(self.limits.live - self.live_numel, self.limits.prefetch)
        numel = 0
        ahead: list[int] = []
        while self.queue and numel < limit:
            use = self.queue.popleft()
            latest = self.fetched_for.get(use.param, _NO_STEP)
            self.fetched_for[use.param] = max(latest, use.step)
            if use.param not in self.gathered and use.param not in ahead:
                ahead.append(use.param)
                numel += self.numel[use.param]
        return self._gather(ahead)

    def release(self, layer: int) -> None:
        """After a layer's pass: free its parameters.

        Once the trace is complete, those stay that are persistent, that are used again soon, or
        that a prefetch met for a later step.
        """
        params = set(self.layers[layer])
        if self.is_traced:
            params = {p for p in params if not self._is_needed_later(p)}
            params -= self._used_soon()
        self._free(params)

    def _is_needed_later(self, param: int) -> bool:
        return self.persistent[param] or self.fetched_for.get(param, _NO_STEP) > self.step

    def release_leftovers(self, layer: int) -> None:
        """After the first layer's backward pass: free all its parameters but persistent ones.

        The model's input requires no gradient, so that this layer's hook does not run; DeepSpeed
        frees what remains at the end (`release_backward_leftovers`).
        """
        self._free({p for p in self.layers[layer] if not self.persistent[p]})

    def _free(self, params: set[int]) -> None:
        freed = params & self.gathered
        self.gathered -= freed
        self.live_numel -= self._numel_of(freed)
        if self.keeps_second_copy:
            self.in_second_copy |= freed

    def _used_soon(self) -> set[int]:
        """Parameters of the next modules, until the reuse distance in elements is reached."""
        params: set[int] = set()
        distance = 0
        for layer in self.trace[self.step :]:
            if distance >= self.limits.reuse:
                break
            used = self._params_of(layer)
            params.update(used)
            distance += self._numel_of(used)
        return params
