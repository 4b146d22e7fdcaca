"""DistributedDataParallel around the stages of a pipeline: when it reduces, and its set-up.

Each stage of a rank is a model of its own. All its micro-batches except the last backward run under
no_sync; gradients are added up meanwhile, and the last backward reduces the buckets. As without a
pipeline, there is a single bucket in the first iteration, and the first forward of the second
iteration rebuilds the buckets (no_sync does not prevent that).

Sources, torch 2.13: `torch/distributed/pipelining/stage.py` (forward_maybe_with_nosync,
backward_maybe_with_nosync) and `torch/nn/parallel/distributed.py` (`_pre_forward`).
"""

from __future__ import annotations

from collections.abc import Mapping

from distsim.scenario.strategies.base import (
    ZERO_COST,
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
    GradientTarget,
    GradientTargets,
    StageDataParallelFields,
    StageDataParallelWriter,
)


class DdpStageWriter(StageDataParallelWriter):
    """Stages that DDP replicates.

    Chunk c of a rank has `<prefix>_grad_<c>_<bucket>`, and `<prefix>_initial_<c>_0` before the
    buckets are rebuilt.
    """

    def __init__(
        self, fields: StageDataParallelFields, context: ExpansionContext, prefix: str, chunks: int
    ) -> None:
        self.dims = sum(len(shape) for shape in fields.params)
        self.replicas = [
            ReplicaWriter(
                f"{prefix}_chunk_{chunk}",
                fields.dtype,
                fields.group,
                context.size_of(fields.group),
                model_parameters([ModelLayer("stage", fields.params, {}, {})]),
            )
            for chunk in range(chunks)
        ]
        self.layouts = self.replicas[0].bucket_layouts(fields.bucket_cap_mb, "grad")
        self.phases = bucket_phases(self.layouts, fields.setup, context.iterations)
        self.rebuilds = fields.setup and context.iterations > 1
        # Last, because it calls `declare_tensors`.
        super().__init__(fields, context, prefix, chunks)

    def declare_tensors(self, chunk: int) -> None:
        for layout, _ in self.phases:
            for k, bucket in enumerate(self.layouts[layout]):
                self.tensor(f"{layout}_{chunk}_{k}", bucket.numel)
        replica = self.replicas[chunk]
        # Writing the calls declares their tensors.
        if self.fields.setup:
            replica.construction(self.dims)
        if self.rebuilds:
            replica.sync_layout(self.layouts["grad"])
        self.tensors |= replica.tensors

    def names(self, layout: str, chunk: int) -> tuple[str, ...]:
        """The tensors of a chunk's buckets."""
        return tuple(
            f"{self.prefix}_{layout}_{chunk}_{k}" for k in range(len(self.layouts[layout]))
        )

    # --- the actions of the schedule ---
    def setup(self) -> list[Entry]:
        if not self.fields.setup:
            return []
        return [entry for replica in self.replicas for entry in replica.construction(self.dims)]

    def before_first_forward(self, chunk: int) -> list[Entry]:
        if not self.rebuilds:
            return []
        return [block(self.replicas[chunk].sync_layout(self.layouts["grad"]), "iteration == 1")]

    def gradients(self, chunk: int) -> GradientTargets:
        return tuple(
            GradientTarget(self.names(layout, chunk), condition)
            for layout, condition in self.phases
        )

    def last_backward(self, chunk: int, cost: CostOrEntries, fresh: bool) -> list[Entry]:
        """Bucket by bucket, each reduced while the next is computed.

        The end waits for all of them (finalize_backward). Entries instead of a cost come first.
        """
        steps: list[Entry] = []
        compute_cost: ComputeCost = ZERO_COST
        if isinstance(cost, Mapping):
            compute_cost = cost
        else:
            steps += cost
        for layout, condition in self.phases:
            backward = self._backward_of_buckets(layout, chunk, compute_cost, fresh)
            steps += backward if condition is None else [block(backward, condition)]
        return steps

    def _backward_of_buckets(
        self, layout: str, chunk: int, cost: ComputeCost, fresh: bool
    ) -> list[Entry]:
        names = self.names(layout, chunk)
        replica = self.replicas[chunk]
        shares = self.shares([bucket.numel for bucket in self.layouts[layout]], cost)
        handle = f"{self.prefix}_{layout}_reduced_{chunk}"
        if layout == "grad":
            handle = f"{self.prefix}_reduced_{chunk}"
        effect = "writes" if fresh else "adds"
        steps: list[Entry] = []
        for k, (name, share) in enumerate(zip(names, shares, strict=True)):
            steps.append(compute(f"backward of bucket {k}", share, **{effect: [name]}))
            steps.append(replica.divide_by_size(name))
            steps.append(replica.reduce(name, handle, k))
        return steps + waits_for_copies(handle, range(len(names)))
