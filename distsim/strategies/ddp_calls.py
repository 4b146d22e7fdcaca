"""What DistributedDataParallel does besides reducing gradients: its construction, and the rebuilt buckets' layout.

Sources, torch 2.13: `torch/nn/parallel/distributed.py` (`__init__`, `_sync_module_states`), `torch/csrc/distributed/c10d/reducer.cpp`
(verify_params_across_processes, sync_bucket_indices) and `comm.cpp` (broadcast_coalesced).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distsim.strategies.base import Entry, step
from distsim.strategies.buckets import BROADCAST_BYTES, Bucket, Param, assign

#: _broadcast_coalesced keeps so many broadcasts in flight.
_IN_FLIGHT = 2


class Replicas:
    """One model among the ``size`` ranks of ``group`` that replicate it. Tensors begin with ``prefix`` and are collected."""

    def __init__(
        self, prefix: str, group: str | tuple[str, ...] | None, size: int, params: Sequence[Param], dtype: str, itemsize: int
    ) -> None:
        self.p, self.group, self.size = prefix, group, size
        self.params, self.dtype, self.itemsize = list(params), dtype, itemsize
        self.tensors: dict[str, Any] = {}

    def tensor(self, word: str, numel: int, dtype: str, value: Any = None) -> str:
        name = f"{self.p}_{word}"
        self.tensors[name] = {"shape": [numel], "dtype": dtype} | ({} if value is None else {"value": value})
        return name

    def call(self, row: str, /, ranks: Any = None, **fields: Any) -> Entry:
        return step(row, ranks, **fields, group=list(self.group) if isinstance(self.group, tuple) else self.group)

    def coalesced(self, names: Sequence[str], word: str, src: int | str = 0) -> list[Entry]:
        """_broadcast_coalesced: broadcasts one after the other, the third when the first has come."""
        found: list[Entry] = []
        for k, name in enumerate(names):
            found.append(self.call("broadcast", tensor=name, group_src=src, async_=True, as_=f"{self.p}_{word}@{k}"))
            if k >= _IN_FLIGHT:
                found.append({"wait": f"{self.p}_{word}@{k - _IN_FLIGHT}"})
        found += [{"wait": f"{self.p}_{word}@{k}"} for k in range(max(0, len(names) - _IN_FLIGHT), len(names))]
        return found

    def weights(self) -> list[str]:
        """The model's state in messages of 250 MiB."""
        return self.messages(self.params)

    def messages(self, state: Sequence[Param]) -> list[str]:
        parts = assign(state, self.itemsize, [BROADCAST_BYTES])
        return [self.tensor(f"weights_{k}", part.numel, self.dtype) for k, part in enumerate(parts)]

    def built(self, dims: int) -> list[Entry]:
        """All ranks must have as many parameters, of the same shapes and strides (``dims`` numbers each); then all get rank 0's weights."""
        count, counts = self.tensor("count", 1, "int64", len(self.params)), f"{self.p}_counts"
        self.tensors[counts] = {"shape": [self.size, 1], "dtype": "int64"}
        shapes = self.tensor("shapes", 2 * dims, "int64")
        return [
            self.call("all_gather", input=count, output=counts),
            self.call("broadcast", tensor=shapes, group_src=0),
            *self.coalesced(self.weights(), "copied"),
        ]

    def layout(self, buckets: Sequence[Bucket]) -> list[Entry]:
        """sync_bucket_indices: rank 0's order of parameters and their number, then the sizes of the buckets."""
        order = self.tensor("order", len(self.params) + 1, "int32")
        sizes = self.tensor("sizes", len(buckets), "int32")
        return [self.call("broadcast", tensor=name, group_src=0) for name in (order, sizes)]
