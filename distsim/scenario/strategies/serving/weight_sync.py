"""Weights from trainers to the ranks that roll out: gathered among the trainers, broadcast to the
others.

Sources: TRL 0.20, `trl/trainer/grpo_trainer.py` (_sync_fsdp2_params_to_vllm: `full_tensor()` of
each parameter on every trainer, one after the other; the first one sends) and
`trl/extras/vllm_client.py` (update_named_param: a broadcast in a group of that trainer and all
workers of the server, then a barrier of it); vLLM,
`vllm/distributed/weight_transfer/nccl_engine.py` (the trainer is rank 0 of the group, a broadcast
per parameter, or packed into buffers); slime, `slime/backends/megatron_utils/update_weight` (one
group for each stage of the trainers' pipeline, each with the stage's first rank and all workers).
`full_tensor` is torch 2.13's: an all_gather_into_tensor of the shards, cut along the first axis and
padded (`torch/distributed/tensor/placement_types.py`).
"""

from __future__ import annotations

from math import prod
from typing import ClassVar

from pydantic import StrictBool

from distsim.scenario.strategies.base import (
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    Refusal,
    Strategy,
    block,
    compute,
    step,
)
from distsim.scenario.strategies.field_types import (
    ComputeCostField,
    Dtype,
    IntByRank,
    ParamShapes,
    PositiveInt,
)
from distsim.scenario.strategies.rank_lists import (
    RankList,
    group_declaration,
    refuse_overlapping_ranks,
    refuse_ranks_outside_world,
)


class WeightSync(Strategy):
    """A copy of the trainers' weights on every rank of the rollout."""

    name: ClassVar[str] = "weight_sync"
    about: ClassVar[str] = (
        "Weights of the trainers to the ranks that roll out: all_gather per parameter, then broadcasts in a group of its own."
    )

    trainers: RankList
    rollouts: RankList
    params: ParamShapes
    dtype: Dtype = "bfloat16"
    #: The trainers hold whole copies: nothing is gathered.
    sharded: StrictBool = True
    #: Stages of the trainers' pipeline, each with its part of the parameters, a gather and a group
    #: of its own.
    stages: PositiveInt = 1
    #: Parameters in one broadcast; 1: each alone.
    packed: PositiveInt = 1
    #: A barrier of the group after each broadcast, as TRL's client has it.
    barriers: StrictBool = False
    #: What loading a parameter takes on a rank of the rollout.
    load: ComputeCostField = {"time": "0 ns"}
    #: Trainers that gather less: the number of parameters that each takes part in.
    gathers: IntByRank = {}

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = refuse_ranks_outside_world(
            context, "trainers", self.trainers
        ) + refuse_ranks_outside_world(context, "rollouts", self.rollouts)
        found += refuse_overlapping_ranks(("trainers", self.trainers), ("rollouts", self.rollouts))
        if len(self.trainers) % self.stages:
            found.append(
                (
                    ("stages",),
                    f"{self.stages} stages do not divide the {len(self.trainers)} trainers",
                )
            )
        if self.stages > len(self.params):
            found.append(
                (
                    ("stages",),
                    f"{self.stages} stages of {len(self.params)} parameters: some would hold nothing",
                )
            )
        strange = [rank for rank in self.gathers if rank != "else" and rank not in self.trainers]
        return found + [(("gathers",), f"rank {rank} is no trainer") for rank in strange[:1]]

    def expand(self, context: ExpansionContext) -> Expansion:
        p = context.unused_prefix(self.name)
        each, steps = len(self.trainers) // self.stages, []
        tensors: dict[str, object] = {}
        groups: dict[str, object] = {}
        for k in range(self.stages):
            owners = self.trainers[k * each : (k + 1) * each]
            mark = f"_{k}" if self.stages > 1 else ""
            names = f"{p}_trainers{mark}", f"{p}_update{mark}"
            groups |= {
                names[0]: group_declaration(owners),
                names[1]: group_declaration((owners[0], *self.rollouts)),
            }
            bounds = [len(self.params) * i // self.stages for i in (k, k + 1)]
            writer = WeightSyncWriter(self, p + mark if mark else p, owners, names)
            steps += writer.entries(self.params[bounds[0] : bounds[1]])
            tensors |= writer.tensors
        return Expansion(steps, tensors, groups)


class WeightSyncWriter(EntryWriter):
    """Entries of one stage's parameters: ``groups`` are that of its trainers and that of the first
    one with the rollout.
    """

    def __init__(
        self, fields: WeightSync, prefix: str, owners: tuple[int, ...], groups: tuple[str, str]
    ) -> None:
        super().__init__(prefix, fields.dtype)
        self.f, self.owners, self.groups = fields, owners, groups

    def entries(self, params: tuple[tuple[int, ...], ...]) -> list[Entry]:
        found: list[Entry] = []
        batch: list[tuple[str, int]] = []
        for k, shape in enumerate(params):
            found += self.gathered(k, shape)
            batch.append((f"{self.prefix}_weight_{k}", prod(shape)))
            if len(batch) == self.f.packed or k == len(params) - 1:
                found += self.sent(k, batch)
                batch = []
        return found

    def gathered(self, k: int, shape: tuple[int, ...]) -> list[Entry]:
        """A parameter whole on every trainer of the stage."""
        n, f = len(self.owners), self.f
        rows = -(-shape[0] // n) * n if f.sharded else shape[0]
        whole = self.tensor(f"weight_{k}", [rows, *shape[1:]])
        if not f.sharded or n == 1:
            return [compute(f"weight {k}", {"time": "0 ns"}, [self.owners[0]], writes=[whole])]
        shard = self.tensor(f"shard_{k}", [rows // n, *shape[1:]])
        fewer = [
            rank for rank in self.owners if k >= f.gathers.get(rank, f.gathers.get("else", k + 1))
        ]
        gather = step(
            "all_gather_into_tensor", None, input=shard, output=whole, group=self.groups[0]
        )
        return [
            compute(f"shard {k}", {"time": "0 ns"}, list(self.owners), writes=[shard]),
            {**gather, "ranks": [rank for rank in self.owners if rank not in fewer]},
        ]

    def sent(self, k: int, batch: list[tuple[str, int]]) -> list[Entry]:
        """Parameters to the rollout, as they are, or several in one message."""
        first, group = self.owners[0], self.groups[1]
        members = [first, *self.f.rollouts]
        numel = sum(size for _, size in batch)
        message = self.tensor(f"sent_{k}", numel)
        pack = compute(
            "pack", {"time": "0 ns"}, [first], reads=[name for name, _ in batch], writes=[message]
        )
        steps: list[Entry] = [step("broadcast", None, tensor=message, src=first, group=group)]
        if self.f.barriers:
            steps.append(step("barrier", None, group=group))
        loads = [
            compute("load", self.f.load, list(self.f.rollouts), reads=[message]) for _ in batch
        ]
        return [pack, block(steps, members), *loads]
