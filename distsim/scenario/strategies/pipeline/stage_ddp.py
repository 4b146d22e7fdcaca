"""DistributedDataParallel around the stages of a pipeline: when it reduces, and what it does once.

Sources, torch 2.13: `torch/distributed/pipelining/stage.py` (forward_maybe_with_nosync,
backward_maybe_with_nosync) and `torch/nn/parallel/distributed.py` (`_pre_forward`). Each stage of a
rank is a model of its own. All its micro-batches but the last backward run under no_sync; gradients
add up meanwhile, and the last backward reduces the buckets. As without a pipeline there is a single
bucket in the first iteration, and the first forward of the second iteration rebuilds (no_sync does
not keep it from that).
"""

from __future__ import annotations

from collections.abc import Mapping

from distsim.scenario.strategies.base import (
    ComputeCost,
    CostOrEntries,
    Entry,
    ExpansionContext,
    ModelLayer,
    block,
    compute,
    waits_for_copies,
)
from distsim.scenario.strategies.ddp.buckets import ReplicaWriter, bucket_phases, model_parameters
from distsim.scenario.strategies.pipeline.stage_data_parallel import (
    GradientTargets,
    StageDataParallelFields,
    StageDataParallelWriter,
)


class DdpStageWriter(StageDataParallelWriter):
    """Stages that DDP replicates. Chunk c of a rank has `<prefix>_grad_<c>_<bucket>`, and
    `<prefix>_initial_<c>_0` before.
    """

    def __init__(
        self, fields: StageDataParallelFields, context: ExpansionContext, prefix: str, chunks: int
    ) -> None:
        self.dims = sum(len(shape) for shape in fields.params)
        self.chunks = [
            ReplicaWriter(
                f"{prefix}_chunk_{c}",
                fields.dtype,
                fields.group,
                context.size_of(fields.group),
                model_parameters([ModelLayer("stage", fields.params, {}, {})]),
            )
            for c in range(chunks)
        ]
        self.layouts = self.chunks[0].bucket_layouts(fields.bucket_cap_mb, "grad")
        self.phases = bucket_phases(self.layouts, fields.setup, context.iterations)
        self.rebuilds = fields.setup and context.iterations > 1
        super().__init__(fields, context, prefix, chunks)

    def declare(self, c: int) -> None:
        for word, _ in self.phases:
            for k, bucket in enumerate(self.layouts[word]):
                self.tensor(f"{word}_{c}_{k}", bucket.numel)
        made = self.chunks[c]
        if self.f.setup:
            made.construction(self.dims)
        if self.rebuilds:
            made.sync_layout(self.layouts["grad"])
        self.tensors |= made.tensors

    def names(self, word: str, c: int) -> tuple[str, ...]:
        return tuple(f"{self.prefix}_{word}_{c}_{k}" for k in range(len(self.layouts[word])))

    # --- what the schedule's actions do ---
    def setup(self) -> list[Entry]:
        return (
            [entry for made in self.chunks for entry in made.construction(self.dims)]
            if self.f.setup
            else []
        )

    def before_first_forward(self, c: int) -> list[Entry]:
        return (
            [block(self.chunks[c].sync_layout(self.layouts["grad"]), "iteration == 1")]
            if self.rebuilds
            else []
        )

    def gradients(self, c: int) -> GradientTargets:
        return tuple((self.names(word, c), when) for word, when in self.phases)

    def last_backward(self, c: int, cost: CostOrEntries, fresh: bool) -> list[Entry]:
        """Bucket by bucket, each reduced while the next is computed; the end waits for all
        (finalize_backward).
        """
        found: list[Entry] = [] if isinstance(cost, Mapping) else list(cost)
        for word, when in self.phases:
            steps = self._reduced(
                word, c, cost if isinstance(cost, Mapping) else {"time": "0 ns"}, fresh
            )
            found += steps if when is None else [block(steps, when)]
        return found

    def _reduced(self, word: str, c: int, price: ComputeCost, fresh: bool) -> list[Entry]:
        names, made = self.names(word, c), self.chunks[c]
        parts = self.shares([bucket.numel for bucket in self.layouts[word]], price)
        handle = (
            f"{self.prefix}_reduced_{c}" if word == "grad" else f"{self.prefix}_{word}_reduced_{c}"
        )
        found: list[Entry] = []
        for k, (name, part) in enumerate(zip(names, parts, strict=True)):
            found.append(
                compute(f"backward of bucket {k}", part, **{"writes" if fresh else "adds": [name]})
            )
            found += [made.divide_by_size(name), made.reduce(name, handle, k)]
        return found + waits_for_copies(handle, range(len(names)))
