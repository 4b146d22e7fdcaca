"""How DistributedDataParallel cuts a model's parameters into buckets.

Source: torch 2.13, `torch/csrc/distributed/c10d/reducer.cpp` (compute_bucket_assignment_by_size, rebuild_buckets) and
`torch/nn/parallel/distributed.py` (BucketCapacityConfig.compute_bucket_size_limits).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from distsim.strategies.base import Layer

#: dist._DEFAULT_FIRST_BUCKET_BYTES.
FIRST_BYTES = 2**20
#: DDP's bucket_cap_mb, in bytes, where it is not given.
DEFAULT_CAP_BYTES = 25 * 2**20
#: DDP's broadcast_bucket_size: how much of the model one broadcast carries.
BROADCAST_BYTES = 250 * 2**20


class Param(NamedTuple):
    """One parameter: its number in `module.parameters()`, its layer, its elements."""

    number: int
    layer: int
    numel: int


class Bucket(NamedTuple):
    """Parameters that travel together."""

    params: tuple[Param, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(p.layer for p in self.params)


def parameters(model: Sequence[Layer]) -> list[Param]:
    """All parameters in the model's order."""
    found: list[Param] = []
    for k, layer in enumerate(model):
        for shape in layer.params:
            numel = 1
            for size in shape:
                numel *= size
            found.append(Param(len(found), k, numel))
    return found


def assign(params: Iterable[Param], itemsize: int, limits: Sequence[int | None]) -> list[Bucket]:
    """Fill buckets in order; one is closed as soon as it holds its limit or more. The last limit goes on; None is no limit."""
    found: list[Bucket] = []
    held: list[Param] = []
    nbytes = 0
    for param in params:
        held.append(param)
        nbytes += param.numel * itemsize
        limit = limits[min(len(found), len(limits) - 1)]
        if limit is not None and nbytes >= limit:
            found.append(Bucket(tuple(held)))
            held, nbytes = [], 0
    return [*found, Bucket(tuple(held))] if held else found


def initial(params: Sequence[Param], itemsize: int, cap: int | None, find_unused: bool) -> list[Bucket]:
    """The buckets of the first iteration, in the order of their reduction.

    Without find_unused_parameters there is a single one, as the order of the gradients is not known yet; with it, buckets are filled in
    the model's order and reduced from the last to the first, for ever.
    """
    limits: list[int | None] = limits_of(cap) if find_unused else [None]
    return assign(params, itemsize, limits)[::-1]


def rebuilt(params: Sequence[Param], itemsize: int, cap: int | None) -> list[Bucket]:
    """The buckets from the second iteration on: filled in the order in which gradients got ready, last layer first."""
    return assign(params[::-1], itemsize, limits_of(cap))


def limits_of(cap: int | None) -> list[int | None]:
    """A small first bucket lets communication start early; a cap that the user gave holds for all."""
    return [FIRST_BYTES, DEFAULT_CAP_BYTES] if cap is None else [cap]
