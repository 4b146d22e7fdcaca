"""When DeepSpeed's ZeRO 3 gathers a parameter and when it lets go of it: its coordinator, played
through one pass after the other.

Source: DeepSpeed 0.19.8, `runtime/zero/partitioned_param_coordinator.py`. The first pass over the
model is recorded, and a module's parameters are gathered when it is reached and freed behind it.
From the second pass on each fetch also asks for what comes next, up to so many elements, and what
is soon used again is kept. A step of the trace is a module: the root, which holds nothing, the
layers in order, and the same again in the backward pass with the layers the other way round.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple


class FetchLimits(NamedTuple):
    """Limits in elements, by DeepSpeed's names: stage3_prefetch_bucket_size,
    stage3_max_reuse_distance, stage3_max_live_parameters, stage3_param_persistence_threshold."""

    prefetch: int
    reuse: int
    live: int
    kept: int


class ParameterGather(NamedTuple):
    """Parameters that are gathered together; ``secondary``: among the ranks of the second copy
    (hpZ); ``single``: each on its own.
    """

    params: tuple[int, ...]
    secondary: bool = False


class ParameterCoordinator:
    """``layers``: elements of each one's parameters, which are numbered through all in the order of
    `module.parameters()`; ``run``: the layers that compute, in order."""

    def __init__(
        self,
        layers: Sequence[Sequence[int]],
        run: Sequence[int],
        limits: FetchLimits,
        copies: bool = False,
    ) -> None:
        self.limits, self.copies = limits, copies
        self.numel = [numel for layer in layers for numel in layer]
        starts = [sum(map(len, layers[:k])) for k in range(len(layers))]
        self.layers = [
            tuple(range(start, start + len(layer)))
            for start, layer in zip(starts, layers, strict=True)
        ]
        self.kept = [numel <= limits.kept for numel in self.numel]
        #: The layers of the trace's steps; the root is None.
        self.order: list[int | None] = [None, *run, None, *reversed(run)]
        self.here: set[int] = set()  # gathered or on their way
        self.second = (
            set(range(len(self.numel))) if copies else set()
        )  # of which the second copy holds
        self.passes = 0
        self.begin()

    @property
    def traced(self) -> bool:
        """The trace is complete, and guides."""
        return self.passes > 0

    def begin(self) -> None:
        """Before a pass over the model (`reset_step`)."""
        self.step, self.live = 0, 0
        self.queue = deque(
            (p, s)
            for s, layer in enumerate(self.order)
            if layer is not None
            for p in self.layers[layer]
        )
        self.fetched_for: dict[int, int] = {}

    def ended(self) -> None:
        """After the backward pass."""
        self.passes += 1
        self.begin()

    def updated(self) -> list[ParameterGather]:
        """The optimizer has stepped: everything is freed, second copies are stale, and what is
        always kept is gathered again.
        """
        self.here = {p for p, kept in enumerate(self.kept) if kept}
        self.second.clear()
        return [ParameterGather((p,)) for p in sorted(self.here)]

    # --- a step ---
    def fetch(self) -> tuple[list[ParameterGather], list[ParameterGather]]:
        """Reach the next module: what must be gathered for it, and what is asked for ahead."""
        layer = self.order[self.step]
        mine = () if layer is None else self.layers[layer]
        now = self.gathered([p for p in mine if p not in self.here])
        ahead = self.ahead(mine) if self.traced else []
        self.step += 1
        return now, ahead

    def gathered(self, params: Sequence[int]) -> list[ParameterGather]:
        self.here.update(params)
        self.live += sum(self.numel[p] for p in params)
        kinds = [
            (True, [p for p in params if p in self.second]),
            (False, [p for p in params if p not in self.second]),
        ]
        return [ParameterGather(tuple(those), secondary) for secondary, those in kinds if those]

    def ahead(self, mine: Sequence[int]) -> list[ParameterGather]:
        missing = [p for p in mine if self.fetched_for.get(p, -1) < self.step]
        for _ in range(min(len(missing), len(self.queue))):
            param, used = self.queue.popleft()
            self.fetched_for[param] = used
        most, numel = min(self.limits.live - self.live, self.limits.prefetch), 0
        wanted: list[int] = []
        while self.queue and numel < most:
            param, used = self.queue.popleft()
            self.fetched_for[param] = max(self.fetched_for.get(param, -1), used)
            if param not in self.here and param not in wanted:
                wanted.append(param)
                numel += self.numel[param]
        return self.gathered(wanted)

    def release(self, layer: int) -> None:
        """Behind a layer's pass: free what is neither kept, nor used again soon, nor was passed
        over when asked for ahead.
        """
        free = {
            p
            for p in self.layers[layer]
            if not self.traced or not (self.kept[p] or self.fetched_for.get(p, -1) > self.step)
        }
        if self.traced:
            free -= self.soon()
        self.freed(free)

    def left_over(self, layer: int) -> None:
        """Behind the first layer's backward pass: the model's input wants no gradient, so that its
        hook does not come, and at the end everything but what is always kept is freed
        (`release_backward_leftovers`)."""
        self.freed({p for p in self.layers[layer] if not self.kept[p]})

    def freed(self, params: set[int]) -> None:
        free = params & self.here
        self.here -= free
        self.live -= sum(self.numel[p] for p in free)
        self.second |= free if self.copies else set()

    def soon(self) -> set[int]:
        """Parameters of the next modules, until so many elements are passed."""
        found: set[int] = set()
        passed = 0
        for layer in self.order[self.step :]:
            if passed >= self.limits.reuse:
                break
            mine = () if layer is None else self.layers[layer]
            found.update(mine)
            passed += sum(self.numel[p] for p in mine)
        return found


# --- gradients ---
def gradient_buckets(params: Sequence[tuple[int, int]], most: int) -> list[tuple[list[int], int]]:
    """(parameter, elements) in the order in which gradients come -> of each bucket its parameters,
    and the place of the one at which it goes out, the last bucket's being beyond the end
    (`reduce_independent_p_g_buckets_and_remove_grads`)."""
    found: list[tuple[list[int], int]] = []
    mine: list[int] = []
    held = 0
    for place, (param, numel) in enumerate(params):
        if held + numel > most and mine:
            found.append((mine, place))
            mine, held = [], 0
        mine.append(param)
        held += numel
    return [*found, (mine, len(params))] if mine else found


def large_gradient_pieces(start: int, numel: int, part: int, most: int) -> list[int]:
    """Elements of each call that reduces a gradient larger than a bucket: cut where an owner's part
    ends, and sent as soon as there are more than a bucket holds (`average_tensor`,
    `allreduce_and_scatter`). ``start``: its place among all parameters."""
    found: list[int] = []
    held, at, end = 0, start, start + numel
    while at < end:
        here = min(end, (at // part + 1) * part)
        held, at = held + here - at, here
        if held > most:
            found.append(held)
            held = 0
    return [*found, held] if held else found
