"""When fully_shard gathers, frees and reduces: a run through its hooks, without any call yet.

A unit is what one fully_shard gathers as one. The model is a sequence of points at which hooks run
(before a unit, at its computation, after it). ``FsdpHooks`` walks through the points, forwards and
backwards, keeps track of which units are gathered, and returns the events that the hooks cause.
`distsim.scenario.strategies.fsdp.calls` makes calls of them.

The hook after a unit's backward pass belongs to an input that requires a gradient. Units without
such an input are reduced when the whole backward pass is over, from the outermost in.

Sources, torch 2.13, `torch/distributed/fsdp/_fully_shard/`: `_fsdp_state.py` (_pre_forward,
_post_forward, _pre_backward, _root_post_backward_final_callback), `_fsdp_param_group.py` (unshard,
reshard, post_backward, _backward_prefetch).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from distsim.scenario.strategies.base import CostOrEntries, GroupRef, ParameterShapes

#: ``part`` is a gather among the ranks that share what a unit keeps after its forward pass (an int
#: as reshard_after_forward). ``settle``: the reduction before must be over.
HookEventKind = Literal["gather", "part", "wait", "forward", "backward", "settle", "reduce"]
_GATHER_KINDS = ("gather", "part")
#: What a rank holds of a unit's parameters: its shard, a larger part, or all of them.
_UnitState = Literal["shard", "part", "full"]


class HookEvent(NamedTuple):
    """Something that the hooks cause; ``unit`` is an index into ``FsdpHooks.units``."""

    kind: HookEventKind
    unit: int


@dataclass(frozen=True)
class FsdpUnit:
    """The parameters that one fully_shard holds itself; ``inner`` are the units inside it.

    ``reshard`` is reshard_after_forward. ``shard`` are the axes over which the unit is sharded, if
    they are not those of the other units.
    """

    name: str
    params: ParameterShapes
    frozen: ParameterShapes
    forward: CostOrEntries
    backward: CostOrEntries
    reshard: bool | int
    inner: tuple[FsdpUnit, ...] = ()
    shard: GroupRef | None = None

    def shard_numel(self, ranks: int, shapes: ParameterShapes) -> int:
        """Elements of one of ``ranks`` shards.

        Each parameter is split along its first dimension and padded (_get_dim0_padded_size).
        """
        return sum(-(-shape[0] // ranks) * prod(shape[1:]) for shape in shapes)

    @property
    def all_params(self) -> ParameterShapes:
        return self.params + self.frozen


class FsdpSettings(NamedTuple):
    """``at``: when the root computes, `first`, `last` or `both`.

    ``input_grad``: the model's input requires a gradient. The prefetches count units
    (set_modules_to_forward_prefetch, set_modules_to_backward_prefetch); with 0, PyTorch prefetches
    as it does by default.
    """

    at: str = "last"
    input_grad: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0


class _HookPoint(NamedTuple):
    """A point of the forward pass.

    ``pre`` and ``post`` are before and after a unit; ``work`` is its computation, and ``first`` the
    root's computation before the layers.
    """

    kind: Literal["pre", "first", "work", "post"]
    unit: int


class FsdpHooks:
    """The units of a model and their present state.

    ``units[0]`` is the root, with or without parameters of its own. A unit in ``pending`` has been
    asked for, but not waited for.
    """

    def __init__(self, root: FsdpUnit, settings: FsdpSettings) -> None:
        self.settings = settings
        self.units: list[FsdpUnit] = []
        self.points = list(self._points_of_root(root))
        self.states: list[_UnitState] = ["shard"] * len(self.units)
        self.pending: set[int] = set()
        #: The units with parameters in the order in which their forward passes ended.
        self.post_forward_order: list[int] = []
        self.has_open_reduction = False
        #: Whether the input of a unit requires a gradient, its output, and its computation.
        self.input_wants_grad: dict[int, bool] = {}
        self.output_wants_grad: dict[int, bool] = {}
        self.work_wants_grad: dict[_HookPoint, bool] = {}
        self._propagate_requires_grad()

    def _points_of_root(self, root: FsdpUnit) -> Iterator[_HookPoint]:
        self.units.append(root)
        yield _HookPoint("pre", 0)
        if self.settings.at != "last":
            yield _HookPoint("first", 0)
        for unit in root.inner:
            yield from self._points_of_unit(unit)
        if self.settings.at != "first":
            yield _HookPoint("work", 0)
        yield _HookPoint("post", 0)

    def _points_of_unit(self, unit: FsdpUnit) -> Iterator[_HookPoint]:
        number = len(self.units)
        self.units.append(unit)
        yield _HookPoint("pre", number)
        for inner in unit.inner:
            yield from self._points_of_unit(inner)
        yield _HookPoint("work", number)
        yield _HookPoint("post", number)

    def _propagate_requires_grad(self) -> None:
        """Mark where gradients begin: nothing before the first trainable parameter needs one.

        A unit's own parameters (its norms) come before those of the units inside it.
        """
        wants_grad = self.settings.input_grad
        for point in self.points:
            unit = self.units[point.unit]
            if point.kind == "pre":
                self.input_wants_grad[point.unit] = wants_grad
                has_own_and_inner = bool(unit.inner and unit.params)
                wants_grad = wants_grad or (point.unit > 0 and has_own_and_inner)
            elif point.kind == "post":
                self.output_wants_grad[point.unit] = wants_grad
            else:
                wants_grad = wants_grad or bool(unit.params)
                self.work_wants_grad[point] = wants_grad

    # --- a micro-batch ---
    def forward(self) -> list[HookEvent]:
        events: list[HookEvent] = []
        run_order = [point.unit for point in self.points if point.kind == "pre"]
        for point in self.points:
            if point.kind == "pre":
                events += self._pre_forward(point.unit, run_order)
            elif point.kind == "post":
                self._post_forward(point.unit)
            else:
                events.append(HookEvent("forward", point.unit))
        return events

    def _pre_forward(self, unit: int, run_order: Sequence[int]) -> list[HookEvent]:
        first_ahead = run_order.index(unit) + 1
        ahead = run_order[first_ahead:][: self.settings.forward_prefetch]
        events = [*self._unshard(unit), *self._wait(unit)]
        for other in ahead:
            events += self._unshard(other)
        return events

    def _post_forward(self, k: int) -> None:
        unit = self.units[k]
        if not unit.all_params:
            return
        if self.states[k] == "full" and unit.reshard:
            self.states[k] = "shard" if unit.reshard is True else "part"
        self.post_forward_order.append(k)

    def backward(self, reshards: bool, reduces: bool) -> list[HookEvent]:
        """A backward pass, with set_reshard_after_backward and set_requires_gradient_sync."""
        events: list[HookEvent] = []
        finished: set[int] = set()
        self.has_open_reduction = False
        for point in reversed(self.points):
            unit = point.unit
            if point.kind == "post":
                if self.output_wants_grad[unit]:
                    events += self._pre_backward(unit)
            elif point.kind == "pre":
                if self.input_wants_grad[unit]:
                    events += self._post_backward(unit, reshards, reduces)
                    finished.add(unit)
            elif self.work_wants_grad[point]:
                events.append(HookEvent("backward", unit))

        # _root_post_backward_final_callback
        for unit in range(len(self.units)):
            if unit not in finished:
                events += self._post_backward(unit, reshards, reduces)
        events += [HookEvent("wait", unit) for unit in sorted(self.pending)]
        self.pending.clear()
        self.post_forward_order.clear()
        return events

    def _pre_backward(self, unit: int) -> list[HookEvent]:
        if not self.units[unit].all_params:
            return []
        index = self.post_forward_order.index(unit)
        # Without a setting, PyTorch prefetches the one unit that comes next.
        count = max(self.settings.backward_prefetch, 1)
        following = self.post_forward_order[max(0, index - count) : index][::-1]
        events = [*self._unshard(unit), *self._wait(unit)]
        for other in following:
            events += self._unshard(other)
        return events

    def _post_backward(self, k: int, reshards: bool, reduces: bool) -> list[HookEvent]:
        unit = self.units[k]
        if not unit.all_params:
            return []
        if reshards:
            self.states[k] = "shard"
        if not reduces:
            return []
        events = [HookEvent("settle", k)] if self.has_open_reduction else []
        self.has_open_reduction = bool(unit.params)
        if unit.params:
            events.append(HookEvent("reduce", k))
        return events

    def _unshard(self, k: int) -> list[HookEvent]:
        if not self.units[k].all_params or self.states[k] == "full" or k in self.pending:
            return []
        self.pending.add(k)
        return [HookEvent("gather" if self.states[k] == "shard" else "part", k)]

    def _wait(self, k: int) -> list[HookEvent]:
        if k not in self.pending:
            return []
        self.pending.discard(k)
        self.states[k] = "full"
        return [HookEvent("wait", k)]


def with_gathers_ahead(events: Sequence[HookEvent], ahead: int) -> list[HookEvent]:
    """A forward pass with ``ahead`` gathers in flight while a unit computes.

    Copying in overlaps the current all_gather. A gather is moved forward, but never behind the
    place where the hooks ask for it.
    """
    gathers = [event for event in events if event.kind in _GATHER_KINDS]
    issued = min(ahead, len(gathers))
    reordered = gathers[:issued]
    waited = 0
    for event in events:
        if event.kind in _GATHER_KINDS:
            position = gathers.index(event)
            reordered += gathers[issued : position + 1]
            issued = max(issued, position + 1)
            continue
        reordered.append(event)
        if event.kind == "wait":
            waited += 1
            target = min(waited + ahead, len(gathers))
            reordered += gathers[issued:target]
            issued = max(issued, target)
    return reordered
