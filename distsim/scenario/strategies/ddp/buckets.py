"""How DistributedDataParallel cuts a model's parameters into buckets, and what replicas say to each
other besides reducing them.

Sources, torch 2.13: `torch/csrc/distributed/c10d/reducer.cpp` (compute_bucket_assignment_by_size,
rebuild_buckets, verify_params_across_processes, sync_bucket_indices), `comm.cpp`
(broadcast_coalesced) and `torch/nn/parallel/distributed.py` (`__init__`, `_sync_module_states`,
BucketCapacityConfig.compute_bucket_size_limits).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import NamedTuple

from distsim.scenario.strategies.base import (
    Entry,
    EntryWriter,
    GroupRef,
    ModelLayer,
    wait,
    waits_for_copies,
)
from distsim.scenario.strategies.field_types import FLOAT_DTYPE_BYTES

#: Bytes of an element, of parameters and of buffers.
DTYPE_BYTES = {
    **FLOAT_DTYPE_BYTES,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}
#: dist._DEFAULT_FIRST_BUCKET_BYTES.
FIRST_BUCKET_BYTES = 2**20
#: DDP's bucket_cap_mb, in bytes, where it is not given.
DEFAULT_BUCKET_CAP_BYTES = 25 * 2**20
#: DDP's broadcast_bucket_size: how much of the model one broadcast carries.
BROADCAST_BUCKET_BYTES = 250 * 2**20


class ModelParameter(NamedTuple):
    """One parameter: its number in `module.parameters()`, its layer, its elements, its shape;
    ``dtype`` empty: the model's.
    """

    number: int
    layer: int
    numel: int
    shape: tuple[int, ...] = ()
    dtype: str = ""


class GradientBucket(NamedTuple):
    """Parameters that travel together, all of one dtype."""

    params: tuple[ModelParameter, ...]

    @property
    def numel(self) -> int:
        return sum(p.numel for p in self.params)

    @property
    def dtype(self) -> str:
        return self.params[0].dtype

    @property
    def layers(self) -> frozenset[int]:
        return frozenset(p.layer for p in self.params)


def model_parameters(model: Sequence[ModelLayer], frozen: bool = False) -> list[ModelParameter]:
    """All parameters that learn in the model's order; with ``frozen`` the others too, each layer's
    after its own.
    """
    shapes = [
        (k, layer.dtype, shape)
        for k, layer in enumerate(model)
        for shape in layer.params + (layer.frozen if frozen else ())
    ]
    return [
        ModelParameter(number, k, prod(shape), shape, dtype)
        for number, (k, dtype, shape) in enumerate(shapes)
    ]


def assign_buckets(
    params: Iterable[ModelParameter],
    itemsize: int,
    limits: Sequence[int | None],
    ordered: bool = False,
) -> list[GradientBucket]:
    """Fill buckets in order, those of each dtype apart; one is closed as soon as it holds its limit
    or more.

    The last limit goes on; None is no limit. ``ordered``: by the first parameter of each, as where
    no order of gradients is given.
    """
    found: list[GradientBucket] = []
    held: dict[str, list[ModelParameter]] = {}
    nbytes: dict[str, int] = {}
    closed: dict[str, int] = {}
    for param in params:
        key = param.dtype
        held.setdefault(key, []).append(param)
        nbytes[key] = nbytes.get(key, 0) + param.numel * (DTYPE_BYTES[key] if key else itemsize)
        limit = limits[min(closed.get(key, 0), len(limits) - 1)]
        if limit is not None and nbytes[key] >= limit:
            found.append(GradientBucket(tuple(held.pop(key))))
            nbytes[key] = 0
            closed[key] = closed.get(key, 0) + 1
    found += [GradientBucket(tuple(rest)) for rest in reversed(held.values())]
    return (
        sorted(found, key=lambda bucket: min(p.number for p in bucket.params)) if ordered else found
    )


def initial_buckets(
    params: Sequence[ModelParameter], itemsize: int, cap: int | None, find_unused: bool
) -> list[GradientBucket]:
    """The buckets of the first iteration, in the order of their reduction.

    Without find_unused_parameters there is a single one of each dtype, as the order of the
    gradients is not known yet; with it, buckets are filled in the model's order and reduced from
    the last to the first, for ever.
    """
    limits: list[int | None] = bucket_limits(cap) if find_unused else [None]
    return assign_buckets(params, itemsize, limits, ordered=True)[::-1]


def rebuilt_buckets(
    params: Sequence[ModelParameter], itemsize: int, cap: int | None
) -> list[GradientBucket]:
    """The buckets from the second iteration on: filled in the order in which gradients got ready,
    last layer first.
    """
    return assign_buckets(params[::-1], itemsize, bucket_limits(cap))


def bucket_limits(cap: int | None) -> list[int | None]:
    """A small first bucket lets communication start early; a cap that the user gave holds for
    all.
    """
    return [FIRST_BUCKET_BYTES, DEFAULT_BUCKET_CAP_BYTES] if cap is None else [cap]


#: Buckets by the word that their tensors have: those of the first iteration, then those of all
#: others.
BucketLayouts = Mapping[str, list[GradientBucket]]


def bucket_phases(
    layouts: BucketLayouts, setup: bool, runs: int, now: str = "iteration"
) -> list[tuple[str, str | None]]:
    """The buckets in use in so many iterations, and when; None: always. ``setup`` False: as if the
    first iteration were over.
    """
    first, later = layouts
    if not setup or layouts[first] == layouts[later]:
        return [(later, None)]
    return [(first, None)] if runs < 2 else [(first, f"{now} == 0"), (later, f"{now} > 0")]


#: _broadcast_coalesced keeps so many broadcasts in flight.
_BROADCASTS_IN_FLIGHT = 2


class ReplicaWriter(EntryWriter):
    """One model among the ``size`` ranks of a group that replicate it."""

    def __init__(
        self,
        prefix: str,
        dtype: str,
        group: GroupRef | None,
        size: int,
        params: Sequence[ModelParameter],
    ) -> None:
        super().__init__(prefix, dtype, group)
        self.size, self.params, self.itemsize = size, list(params), FLOAT_DTYPE_BYTES[dtype]

    def layouts(self, cap_mb: float | None, later: str, find_unused: bool = False) -> BucketLayouts:
        """The buckets; ``later`` is the word of those from the second iteration on."""
        cap = None if cap_mb is None else int(cap_mb * 2**20)
        first = initial_buckets(self.params, self.itemsize, cap, find_unused)
        return {
            "initial": first,
            later: first if find_unused else rebuilt_buckets(self.params, self.itemsize, cap),
        }

    def averaged(self, name: str, ranks: str | None = None) -> Entry:
        """Gradients are divided by the number of ranks as they enter the bucket, so that the sum is
        the average.
        """
        entry: Entry = {"assign": {"tensor": name, "value": f"{name} * {1 / self.size!r}"}}
        return entry if ranks is None else {**entry, "ranks": ranks}

    def reduce(self, name: str, handle: str, k: int, ranks: str | None = None) -> Entry:
        """One bucket's all_reduce, under way."""
        return self.call(
            "all_reduce", ranks, tensor=name, op="sum", async_=True, as_=f"{handle}@{k}"
        )

    def coalesced(self, names: Sequence[str], word: str, src: int | str = 0) -> list[Entry]:
        """_broadcast_coalesced: broadcasts one after the other, the third when the first has
        come.
        """
        found: list[Entry] = []
        for k, name in enumerate(names):
            found.append(
                self.call(
                    "broadcast", tensor=name, group_src=src, async_=True, as_=f"{self.p}_{word}@{k}"
                )
            )
            if k >= _BROADCASTS_IN_FLIGHT:
                found.append(wait(f"{self.p}_{word}@{k - _BROADCASTS_IN_FLIGHT}"))
        return found + waits_for_copies(
            f"{self.p}_{word}", range(max(0, len(names) - _BROADCASTS_IN_FLIGHT), len(names))
        )

    def weights(self) -> list[str]:
        """The model's state in messages of 250 MiB."""
        return self.messages(self.params)

    def messages(self, state: Sequence[ModelParameter]) -> list[str]:
        return self.parted("weights", state)

    def parted(self, word: str, state: Sequence[ModelParameter]) -> list[str]:
        """Tensors of what _broadcast_coalesced sends: each dtype apart, 250 MiB at most."""
        parts = assign_buckets(state, self.itemsize, [BROADCAST_BUCKET_BYTES], ordered=True)
        return [
            self.tensor(f"{word}_{k}", part.numel, part.dtype or None)
            for k, part in enumerate(parts)
        ]

    def built(self, dims: int) -> list[Entry]:
        """All ranks must have as many parameters, of the same shapes and strides (``dims`` numbers
        each); then all get rank 0's weights.
        """
        count, counts = (
            self.tensor("count", 1, "int64", len(self.params)),
            self.tensor("counts", [self.size, 1], "int64"),
        )
        shapes = self.tensor("shapes", 2 * dims, "int64")
        return [
            self.call("all_gather", input=count, output=counts),
            self.call("broadcast", tensor=shapes, group_src=0),
            *self.coalesced(self.weights(), "copied"),
        ]

    def layout(self, buckets: Sequence[GradientBucket]) -> list[Entry]:
        """sync_bucket_indices: rank 0's order of parameters and their number, then the sizes of the
        buckets.
        """
        order = self.tensor("order", len(self.params) + 1, "int32")
        sizes = self.tensor("sizes", len(buckets), "int32")
        return [self.call("broadcast", tensor=name, group_src=0) for name in (order, sizes)]
