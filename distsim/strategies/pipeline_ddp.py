"""DistributedDataParallel around the stages of a pipeline: when it reduces, and what it does once.

Sources, torch 2.13: `torch/distributed/pipelining/stage.py` (forward_maybe_with_nosync, backward_maybe_with_nosync) and
`torch/nn/parallel/distributed.py` (`_pre_forward`). Each stage of a rank is a model of its own. All its micro-batches but the last
backward run under no_sync; gradients add up meanwhile, and the last backward reduces the buckets. As without a pipeline there is a
single bucket in the first iteration, and the first forward of the second iteration rebuilds (no_sync does not keep it from that).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from distsim.strategies.base import Context, Entry, Layer, block, compute
from distsim.strategies.buckets import initial, parameters, rebuilt
from distsim.strategies.ddp_calls import Replicas
from distsim.strategies.fields import DTYPES
from distsim.strategies.pipeline_data import DataFields, DataWriter, Sums

#: The buckets of the first iteration, and those of all others.
_WORDS = ("initial", "grad")


class DdpStages(DataWriter):
    """Stages that DDP replicates. Chunk c of a rank has `<prefix>_grad_<c>_<bucket>`, and `<prefix>_initial_<c>_0` before."""

    def __init__(self, fields: DataFields, context: Context, prefix: str, chunks: int) -> None:
        cap = None if fields.bucket_cap_mb is None else round(fields.bucket_cap_mb * 2**20)
        self.itemsize, self.iterations = DTYPES[fields.dtype], context.iterations
        self.dims = sum(len(shape) for shape in fields.params)
        self.params = parameters([Layer("stage", fields.params, {}, {})])
        self.layouts = dict(zip(_WORDS, (initial(self.params, self.itemsize, cap, False), rebuilt(self.params, self.itemsize, cap)),
                                strict=True))  # fmt: skip
        super().__init__(fields, context, prefix, chunks)

    def replicas(self, c: int) -> Replicas:
        return Replicas(f"{self.p}_chunk_{c}", self.f.group, self.n, self.params, self.f.dtype, self.itemsize)

    def declared(self, c: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for word, _ in self.phases():
            names = self.names(word, c)
            found |= {n: {"shape": [b.numel], "dtype": self.f.dtype} for n, b in zip(names, self.layouts[word], strict=True)}
        made = self.replicas(c)
        if self.f.setup:
            made.built(self.dims)
        if self.rebuilds():
            made.layout(self.layouts["grad"])
        return found | made.tensors

    def names(self, word: str, c: int) -> tuple[str, ...]:
        return tuple(f"{self.p}_{word}_{c}_{k}" for k in range(len(self.layouts[word])))

    def phases(self) -> list[tuple[str, str | None]]:
        """The buckets in use, and when; None: always."""
        if not self.f.setup or self.layouts["initial"] == self.layouts["grad"]:
            return [("grad", None)]
        if self.iterations == 1:
            return [("initial", None)]
        return [("initial", "iteration == 0"), ("grad", "iteration > 0")]

    def rebuilds(self) -> bool:
        return self.f.setup and self.iterations > 1

    # --- what the schedule's actions do ---
    def setup(self, chunks: int) -> list[Entry]:
        return [entry for c in range(chunks) for entry in self.replicas(c).built(self.dims)] if self.f.setup else []

    def before_first_forward(self, c: int) -> list[Entry]:
        return [block(self.replicas(c).layout(self.layouts["grad"]), "iteration == 1")] if self.rebuilds() else []

    def gradients(self, c: int) -> Sums:
        return tuple((self.names(word, c), when) for word, when in self.phases())

    def last_backward(self, c: int, price: Any, fresh: bool) -> list[Entry]:
        """Bucket by bucket, each reduced while the next is computed; the end waits for all (finalize_backward)."""
        before: list[Entry] = [] if isinstance(price, Mapping) else list(price)
        found = []
        for word, when in self.phases():
            steps = self._reduced(word, c, price if isinstance(price, Mapping) else None, fresh)
            found += steps if when is None else [block(steps, when)]
        return before + found

    def _reduced(self, word: str, c: int, price: Mapping[str, Any] | None, fresh: bool) -> list[Entry]:
        names, call = self.names(word, c), self.replicas(c).call
        parts = self.shares([bucket.numel for bucket in self.layouts[word]], price or {"time": "0 ns"})
        handle = f"{self.p}_reduced_{c}" if word == "grad" else f"{self.p}_{word}_reduced_{c}"
        found: list[Entry] = []
        for k, (name, part) in enumerate(zip(names, parts, strict=True)):
            found.append(compute(f"backward of bucket {k}", part, **{"writes" if fresh else "adds": [name]}))
            found.append({"assign": {"tensor": name, "value": f"{name} * {1 / self.n!r}"}})
            found.append(call("all_reduce", tensor=name, op="sum", async_=True, as_=f"{handle}@{k}"))
        return found + [{"wait": f"{handle}@{k}"} for k in range(len(names))]
