"""How DistributedDataParallel splits a model's parameters into buckets, and its set-up calls.

The bucket layout depends only on the parameters' order, sizes and dtypes, so every rank computes it
alone. ``ReplicaWriter`` writes the calls that every replicated model makes besides the training
loop: the comparison of the replicas, the broadcast of the weights, and the rebuilt bucket layout.
When buckets are reduced during the backward pass is decided in
`distsim.scenario.strategies.ddp.calls`.

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

#: Bytes per element, for parameters and for buffers.
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
#: Default of DDP's bucket_cap_mb, in bytes.
DEFAULT_BUCKET_CAP_BYTES = 25 * 2**20
#: DDP's broadcast_bucket_size: the largest part of the model that one broadcast carries.
BROADCAST_BUCKET_BYTES = 250 * 2**20
#: _broadcast_coalesced keeps this many broadcasts in flight.
_BROADCASTS_IN_FLIGHT = 2


class ModelParameter(NamedTuple):
    """One parameter of a model.

    ``number`` is its index in `module.parameters()`, ``layer`` the index of its layer. An empty
    ``dtype`` means the model's dtype.
    """

    number: int
    layer: int
    numel: int
    shape: tuple[int, ...] = ()
    dtype: str = ""


class GradientBucket(NamedTuple):
    """Parameters whose gradients are reduced in one call; all have the same dtype."""

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
    """The trainable parameters in the model's order.

    With ``frozen``, the frozen parameters of each layer follow its trainable ones.
    """
    params: list[ModelParameter] = []
    for index, layer in enumerate(model):
        shapes = layer.params + layer.frozen if frozen else layer.params
        for shape in shapes:
            number = len(params)
            params.append(ModelParameter(number, index, prod(shape), shape, layer.dtype))
    return params


def assign_buckets(
    params: Iterable[ModelParameter],
    itemsize: int,
    limits: Sequence[int | None],
    ordered: bool = False,
) -> list[GradientBucket]:
    """Fill buckets in order, separately for each dtype.

    A bucket is closed as soon as it holds its limit or more. ``limits`` apply to the first, second
    … bucket of each dtype, and the last limit to all further ones; None means no limit. With
    ``ordered``, the buckets are sorted by their first parameter, as torch does where it knows no
    order of the gradients.
    """
    buckets: list[GradientBucket] = []
    open_params: dict[str, list[ModelParameter]] = {}
    open_bytes: dict[str, int] = {}
    closed_count: dict[str, int] = {}
    for param in params:
        dtype = param.dtype
        param_bytes = param.numel * (DTYPE_BYTES[dtype] if dtype else itemsize)
        open_params.setdefault(dtype, []).append(param)
        open_bytes[dtype] = open_bytes.get(dtype, 0) + param_bytes
        limit = limits[min(closed_count.get(dtype, 0), len(limits) - 1)]
        if limit is not None and open_bytes[dtype] >= limit:
            buckets.append(GradientBucket(tuple(open_params.pop(dtype))))
            open_bytes[dtype] = 0
            closed_count[dtype] = closed_count.get(dtype, 0) + 1

    buckets += [GradientBucket(tuple(rest)) for rest in reversed(open_params.values())]
    if ordered:
        buckets.sort(key=_first_parameter_number)
    return buckets


def _first_parameter_number(bucket: GradientBucket) -> int:
    return min(p.number for p in bucket.params)


def initial_buckets(
    params: Sequence[ModelParameter], itemsize: int, cap: int | None, find_unused: bool
) -> list[GradientBucket]:
    """The buckets of the first iteration, in the order of their reduction.

    Without find_unused_parameters, each dtype has a single bucket, as the order of the gradients
    is not known yet. With it, buckets are filled in the model's order, reduced from the last to
    the first, and never rebuilt.
    """
    limits: list[int | None] = bucket_limits(cap) if find_unused else [None]
    return assign_buckets(params, itemsize, limits, ordered=True)[::-1]


def rebuilt_buckets(
    params: Sequence[ModelParameter], itemsize: int, cap: int | None
) -> list[GradientBucket]:
    """The buckets after rebuilding: filled in the order in which gradients become ready.

    That order is the reverse of the model's.
    """
    return assign_buckets(params[::-1], itemsize, bucket_limits(cap))


def bucket_cap_bytes(cap_mb: float | None) -> int | None:
    """`bucket_cap_mb` in bytes; None if it is not given."""
    return None if cap_mb is None else int(cap_mb * 2**20)


def bucket_limits(cap: int | None) -> list[int | None]:
    """Size limits in bytes: a small first bucket by default, so that communication starts early.

    A cap that the user sets applies to all buckets, the first one included.
    """
    return [FIRST_BUCKET_BYTES, DEFAULT_BUCKET_CAP_BYTES] if cap is None else [cap]


#: Buckets by the name of their layout, which is part of their tensors' names. The first entry is
#: the layout of the first iteration, the second the layout after rebuilding.
BucketLayouts = Mapping[str, list[GradientBucket]]


class LayoutPhase(NamedTuple):
    """A bucket layout and the condition of the iterations that use it; None means all of them."""

    layout: str
    condition: str | None


def bucket_phases(
    layouts: BucketLayouts, setup: bool, iterations: int, iteration_name: str = "iteration"
) -> list[LayoutPhase]:
    """The layouts in use during ``iterations`` iterations, and when.

    ``setup`` False: start as if the first iteration were already over.
    """
    first, later = layouts
    if not setup or layouts[first] == layouts[later]:
        return [LayoutPhase(later, None)]
    if iterations < 2:
        return [LayoutPhase(first, None)]
    return [
        LayoutPhase(first, f"{iteration_name} == 0"),
        LayoutPhase(later, f"{iteration_name} > 0"),
    ]


class ReplicaWriter(EntryWriter):
    """Writes the calls of one model that the ``size`` ranks of a group replicate."""

    def __init__(
        self,
        prefix: str,
        dtype: str,
        group: GroupRef | None,
        size: int,
        params: Sequence[ModelParameter],
    ) -> None:
        super().__init__(prefix, dtype, group)
        self.size = size
        self.params = list(params)
        self.itemsize = FLOAT_DTYPE_BYTES[dtype]

    def bucket_layouts(
        self, cap_mb: float | None, later: str, find_unused: bool = False
    ) -> BucketLayouts:
        """Both layouts; ``later`` is the name of the one after rebuilding."""
        cap = bucket_cap_bytes(cap_mb)
        first = initial_buckets(self.params, self.itemsize, cap, find_unused)
        if find_unused:
            return {"initial": first, later: first}
        return {"initial": first, later: rebuilt_buckets(self.params, self.itemsize, cap)}

    def divide_by_size(self, name: str, ranks: str | None = None) -> Entry:
        """Divide gradients by the number of ranks, so that their sum over the ranks is the average.

        DDP divides when it copies them into the bucket, that is before the reduction.
        """
        entry: Entry = {"assign": {"tensor": name, "value": f"{name} * {1 / self.size!r}"}}
        return entry if ranks is None else {**entry, "ranks": ranks}

    def reduce(self, name: str, handle: str, k: int, ranks: str | None = None) -> Entry:
        """Start the all_reduce of one bucket."""
        return self.call(
            "all_reduce", ranks, tensor=name, op="sum", async_=True, as_=f"{handle}@{k}"
        )

    # --- set-up ---
    def coalesced_broadcast(
        self, names: Sequence[str], word: str, src: int | str = 0
    ) -> list[Entry]:
        """_broadcast_coalesced: broadcasts in order, at most two in flight at a time.

        ``word`` is part of the handles' name.
        """
        handle = f"{self.prefix}_{word}"
        steps: list[Entry] = []
        for k, name in enumerate(names):
            steps.append(
                self.call("broadcast", tensor=name, group_src=src, async_=True, as_=f"{handle}@{k}")
            )
            if k >= _BROADCASTS_IN_FLIGHT:
                steps.append(wait(f"{handle}@{k - _BROADCASTS_IN_FLIGHT}"))
        first_open = max(0, len(names) - _BROADCASTS_IN_FLIGHT)
        return steps + waits_for_copies(handle, range(first_open, len(names)))

    def declare_weight_messages(self) -> list[str]:
        """Declare the messages that carry the model's state; return their names."""
        return self.declare_broadcast_messages("weights", self.params)

    def declare_broadcast_messages(self, word: str, state: Sequence[ModelParameter]) -> list[str]:
        """Declare what _broadcast_coalesced sends: one dtype per message, 250 MiB at most."""
        messages = assign_buckets(state, self.itemsize, [BROADCAST_BUCKET_BYTES], ordered=True)
        return [
            self.tensor(f"{word}_{k}", message.numel, message.dtype or None)
            for k, message in enumerate(messages)
        ]

    def construction(self, dims: int) -> list[Entry]:
        """The constructor's calls: compare the parameters, then broadcast rank 0's weights.

        All ranks must have equally many parameters, of the same shapes and strides; ``dims`` is the
        total number of dimensions, and sizes and strides have so many numbers each.
        """
        count = self.tensor("count", 1, "int64", len(self.params))
        counts = self.tensor("counts", [self.size, 1], "int64")
        shapes = self.tensor("shapes", 2 * dims, "int64")
        return [
            self.call("all_gather", input=count, output=counts),
            self.call("broadcast", tensor=shapes, group_src=0),
            *self.coalesced_broadcast(self.declare_weight_messages(), "copied"),
        ]

    def sync_layout(self, buckets: Sequence[GradientBucket]) -> list[Entry]:
        """sync_bucket_indices: broadcast rank 0's order of the parameters, then the bucket sizes.

        The first message also carries the number of buckets.
        """
        order = self.tensor("order", len(self.params) + 1, "int32")
        sizes = self.tensor("sizes", len(buckets), "int32")
        return [self.call("broadcast", tensor=name, group_src=0) for name in (order, sizes)]
