"""The strategy `pipeline`: a schedule on an axis of the mesh, with PyTorch's calls.

This module assembles the entries: from the fields and the schedule
(`distsim.scenario.strategies.pipeline.fields`) through the calls of each rank (`rank_calls`) to
entries (`rank_entries`). Ranks with the same entries share them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from distsim.scenario.strategies.base import (
    CostOrEntries,
    Entry,
    Expansion,
    ExpansionContext,
    block,
    blocks_by_rank,
    step,
    tensor_declaration,
)
from distsim.scenario.strategies.pipeline.actions import PipelineSchedule
from distsim.scenario.strategies.pipeline.dualpipe import stage_copies_group
from distsim.scenario.strategies.pipeline.fields import PipelineFields, splits_backward
from distsim.scenario.strategies.pipeline.rank_calls import calls_of_rank
from distsim.scenario.strategies.pipeline.rank_entries import (
    PairEntries,
    PipelineLayout,
    PipelineRankWriter,
)
from distsim.scenario.strategies.pipeline.shape_exchange import (
    shape_exchange_entries,
    shape_vote_entries,
)
from distsim.scenario.strategies.pipeline.stage_costs import cost_of_stage, half_costs
from distsim.scenario.strategies.pipeline.stage_data_parallel import (
    FsdpStageWriter,
    StageDataParallelWriter,
)
from distsim.scenario.strategies.pipeline.stage_ddp import DdpStageWriter


class _StageTensors(NamedTuple):
    """The names of the gradients by chunk, and the declarations of all tensors of the pipeline."""

    gradients: list[str]
    declarations: dict[str, Entry]


class Pipeline(PipelineFields):
    """``forward`` and ``backward`` are the costs of one micro-batch on one stage.

    A cost is a time, flops and bytes, or entries; or a mapping by stage. Schedules that split the
    backward pass use ``backward_input`` and ``backward_weight`` [default: half of ``backward``].
    """

    def expand(self, context: ExpansionContext, pairs: PairEntries | None = None) -> Expansion:
        """The entries of all ranks. ``pairs``: those of passes that overlap, by their stages."""
        schedule = self.build_schedule(context)
        prefix = context.unused_prefix("pipeline")
        chunks = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
        tensors = self._stage_tensors(prefix, chunks, schedule.micro_batches, context)
        data = self._data_parallel_writer(context, prefix, chunks)
        layout = PipelineLayout(
            schedule,
            self.axis,
            prefix,
            self.costs(schedule),
            tensors.gradients,
            self.numbered,
            data,
            self.overlapped,
            pairs,
        )
        writers = [PipelineRankWriter(layout, rank) for rank in range(schedule.ranks)]
        # In this order: the writers prepare the exchange of shapes without data parallelism.
        exchanges = [self._shape_exchange(writer) for writer in writers]
        rows = [
            writer.entries(calls_of_rank(schedule, rank, waits_before_pairs=pairs is not None))
            for rank, writer in enumerate(writers)
        ]

        start = [*(data.setup() if data is not None else ()), *blocks_by_rank(exchanges, self.axis)]
        if start and context.iterations > 1:
            start = [block(start, "iteration == 0")]
        groups: dict[str, Entry] = {}
        if schedule.directions > 1 and self.reduce_copies and not self.evaluate:
            groups = {f"{prefix}_copies": stage_copies_group(self.axis, context)}
        end = [
            step("all_reduce", tensor=name, group=group)
            for group in groups
            for name in tensors.gradients
        ]
        declarations = dict(tensors.declarations)
        if data is not None:
            declarations |= data.tensors
        return Expansion([*start, *blocks_by_rank(rows, self.axis), *end], declarations, groups)

    def costs(self, schedule: PipelineSchedule) -> dict[tuple[str, int], CostOrEntries]:
        """The cost of each kind of action on each stage; "L" is the last backward of a stage."""
        costs: dict[tuple[str, int], CostOrEntries] = {}
        is_split = splits_backward(schedule) or self.backward is None
        for stage in range(schedule.stages):
            model_stage = stage % schedule.length
            costs["F", stage] = cost_of_stage(self.forward, model_stage)
            if self.backward is not None:
                costs["B", stage] = cost_of_stage(self.backward, model_stage)
            if self.backward_input is not None and self.backward_weight is not None:
                costs["I", stage] = cost_of_stage(self.backward_input, model_stage)
                costs["W", stage] = cost_of_stage(self.backward_weight, model_stage)
            elif is_split and not self.evaluate:
                halves = half_costs(costs["B", stage])
                costs["I", stage] = {} if halves is None else halves.input
                costs["W", stage] = {} if halves is None else halves.weight
            if self.last_backward is not None:
                costs["L", stage] = cost_of_stage(self.last_backward, model_stage)
        return costs

    def _data_parallel_writer(
        self, context: ExpansionContext, prefix: str, chunks: int
    ) -> StageDataParallelWriter | None:
        fields = self.data_parallel
        if fields is None:
            return None
        writer = DdpStageWriter if fields.style == "ddp" else FsdpStageWriter
        return writer(fields, context, prefix, chunks)

    def _shape_exchange(self, writer: PipelineRankWriter) -> list[Entry]:
        """The messages about shapes before a rank's first micro-batch."""
        if not self.shapes_exchange:
            return []
        vote = shape_vote_entries(writer)
        if self.shapes_exchange == "vote":
            return vote
        directions = "F" if self.evaluate else "FB"
        shape, dtype = self.activation.shape, self.activation.dtype
        return [*vote, *shape_exchange_entries(writer, shape, dtype, directions)]

    def _stage_tensors(
        self, prefix: str, chunks: int, micro_batches: int, context: ExpansionContext
    ) -> _StageTensors:
        """Activations and their gradients have a copy for each chunk and micro-batch."""
        activation = f"{prefix}_input"
        declarations = {
            activation: {
                **tensor_declaration(self.activation.shape, self.activation.dtype),
                "copies": chunks * micro_batches,
            }
        }
        for word in ("output", "output_grad", "input_grad"):
            declarations[f"{prefix}_{word}"] = {"like": activation}

        gradient = self.gradient or f"{prefix}_weight_grad"
        has_copies = chunks > 1
        if self.gradient is not None:
            declared = context.tensors[gradient]
            has_copies = has_copies and isinstance(declared, Mapping) and "copies" in declared
        elif self.data_parallel is None:
            declarations[gradient] = {"shape": [1]}
            if has_copies:
                declarations[gradient]["copies"] = chunks
        gradients = [f"{gradient}@{c}" if has_copies else gradient for c in range(chunks)]
        return _StageTensors(gradients, declarations)
