"""When fully_shard gathers, frees and reduces: its hooks played through, unit by unit, without any
call yet.

Sources, torch 2.13, `torch/distributed/fsdp/_fully_shard/`: `_fsdp_state.py` (_pre_forward,
_post_forward, _pre_backward, _root_post_backward_final_callback), `_fsdp_param_group.py` (unshard,
reshard, post_backward, _backward_prefetch). A unit is what one fully_shard gathers as one. The hook
after a unit's backward hangs on an input that wants a gradient; units without one are reduced when
the whole backward pass is over, from the outermost in.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal, NamedTuple

from distsim.scenario.strategies.base import CostOrEntries, GroupRef

ParameterShapes = tuple[tuple[int, ...], ...]
HookEventKind = Literal["gather", "part", "wait", "forward", "backward", "settle", "reduce"]


class HookEvent(NamedTuple):
    """``part``: a gather among the ranks that share what a unit keeps after its forward pass (an
    int as reshard_after_forward).
    """

    kind: HookEventKind
    unit: int


@dataclass(frozen=True)
class FsdpUnit:
    """What one fully_shard holds itself; ``inner`` are units inside it. ``reshard``:
    reshard_after_forward. ``shard``: the axes that it is sharded over, where they are not those of
    the rest."""

    name: str
    params: ParameterShapes
    frozen: ParameterShapes
    forward: CostOrEntries
    backward: CostOrEntries
    reshard: bool | int
    inner: tuple[FsdpUnit, ...] = ()
    shard: GroupRef | None = None

    def rows(self, n: int, shapes: ParameterShapes) -> int:
        """Elements of one of n shards: cut along each parameter's first axis and padded
        (_get_dim0_padded_size).
        """
        return sum(-(-shape[0] // n) * prod(shape[1:]) for shape in shapes)

    @property
    def held(self) -> ParameterShapes:
        return self.params + self.frozen


class FsdpSettings(NamedTuple):
    """``at``: when the root computes, `first`, `last` or `both`. ``input_grad``: the model's input
    wants a gradient. Prefetches count units (set_modules_to_forward_prefetch,
    set_modules_to_backward_prefetch); 0 is what PyTorch does by itself."""

    at: str = "last"
    input_grad: bool = False
    forward_prefetch: int = 0
    backward_prefetch: int = 0


class FsdpHooks:
    """The units of a model and what each of them holds now. ``units[0]`` is the root, with or
    without parameters of its own.
    """

    def __init__(self, root: FsdpUnit, settings: FsdpSettings) -> None:
        self.settings = settings
        self.units: list[FsdpUnit] = []
        self.tokens = list(self._root(root))
        self.held = ["shard"] * len(self.units)
        self.pending: set[int] = set()
        self.order: list[int] = []
        #: Whether a unit's input wants a gradient, and its output.
        self.takes: dict[int, bool] = {}
        self.gives: dict[int, bool] = {}
        self._gradients()

    def _root(self, root: FsdpUnit) -> Iterator[tuple[str, int]]:
        self.units.append(root)
        yield "pre", 0
        if self.settings.at != "last":
            yield "first", 0
        for unit in root.inner:
            yield from self._unit(unit)
        if self.settings.at != "first":
            yield "work", 0
        yield "post", 0

    def _unit(self, unit: FsdpUnit) -> Iterator[tuple[str, int]]:
        number = len(self.units)
        self.units.append(unit)
        yield "pre", number
        for inner in unit.inner:
            yield from self._unit(inner)
        yield "work", number
        yield "post", number

    def _gradients(self) -> None:
        """Where gradients begin: nothing before the first parameter that learns wants one. A unit's
        own (its norms) come before those inside it."""
        wants = self.settings.input_grad
        self.works: dict[tuple[str, int], bool] = {}
        for token, k in self.tokens:
            if token == "pre":
                self.takes[k] = wants
                wants = wants or (k > 0 and bool(self.units[k].inner and self.units[k].params))
            elif token == "post":
                self.gives[k] = wants
            else:
                wants = wants or bool(self.units[k].params)
                self.works[token, k] = wants

    # --- a micro-batch ---
    def forward(self) -> list[HookEvent]:
        found: list[HookEvent] = []
        run = [k for token, k in self.tokens if token == "pre"]
        for token, k in self.tokens:
            if token == "pre":
                found += [*self._unshard(k), *self._wait(k)]
                ahead = run[run.index(k) + 1 :][: self.settings.forward_prefetch]
                found += [event for other in ahead for event in self._unshard(other)]
            elif token == "post":
                self._leave(k)
            else:
                found.append(HookEvent("forward", k))
        return found

    def _leave(self, k: int) -> None:
        if not self.units[k].held:
            return
        if self.held[k] == "full" and self.units[k].reshard:
            self.held[k] = "shard" if self.units[k].reshard is True else "part"
        self.order.append(k)

    def backward(self, reshards: bool, reduces: bool) -> list[HookEvent]:
        """``reshards``: set_reshard_after_backward; ``reduces``: set_requires_gradient_sync."""
        found: list[HookEvent] = []
        done: set[int] = set()
        self.open = False
        for token, k in reversed(self.tokens):
            if token == "post":
                found += self._pre_backward(k) if self.gives[k] else []
            elif token == "pre":
                if self.takes[k]:
                    found += self._post_backward(k, reshards, reduces)
                    done.add(k)
            elif self.works[token, k]:
                found.append(HookEvent("backward", k))
        for k in range(len(self.units)):
            found += [] if k in done else self._post_backward(k, reshards, reduces)
        found += [HookEvent("wait", k) for k in sorted(self.pending)]
        self.pending.clear()
        self.order.clear()
        return found

    def _pre_backward(self, k: int) -> list[HookEvent]:
        if not self.units[k].held:
            return []
        index, ahead = self.order.index(k), self.settings.backward_prefetch
        following = self.order[max(0, index - max(ahead, 1)) : index][::-1]
        return [
            *self._unshard(k),
            *self._wait(k),
            *(event for other in following for event in self._unshard(other)),
        ]

    def _post_backward(self, k: int, reshards: bool, reduces: bool) -> list[HookEvent]:
        unit = self.units[k]
        if not unit.held:
            return []
        if reshards:
            self.held[k] = "shard"
        if not reduces:
            return []
        found = [HookEvent("settle", k)] if self.open else []
        self.open = bool(unit.params)
        return [*found, *([HookEvent("reduce", k)] if unit.params else [])]

    def _unshard(self, k: int) -> list[HookEvent]:
        if not self.units[k].held or self.held[k] == "full" or k in self.pending:
            return []
        self.pending.add(k)
        return [HookEvent("gather" if self.held[k] == "shard" else "part", k)]

    def _wait(self, k: int) -> list[HookEvent]:
        if k not in self.pending:
            return []
        self.pending.discard(k)
        self.held[k] = "full"
        return [HookEvent("wait", k)]


def with_gathers_ahead(events: Sequence[HookEvent], ahead: int) -> list[HookEvent]:
    """A forward pass with ``ahead`` gathers under way beside the unit that computes: copying in
    overlaps the current all_gather.
    """
    gathers = [event for event in events if event.kind in ("gather", "part")]
    sent = min(ahead, len(gathers))
    found, came = gathers[:sent], 0
    for event in events:
        if event.kind in ("gather", "part"):
            number = gathers.index(event)
            found += gathers[sent : number + 1]
            sent = max(sent, number + 1)
            continue
        found.append(event)
        if event.kind == "wait":
            came += 1
            found += gathers[sent : came + ahead]
            sent = max(sent, min(came + ahead, len(gathers)))
    return found
