"""The strategy `weight_sync`: weights from trainers to the ranks of the rollout.

Each parameter is gathered among the trainers, then broadcast to the ranks of the rollout.

Sources: TRL 0.20, `trl/trainer/grpo_trainer.py` (_sync_fsdp2_params_to_vllm: `full_tensor()` of
each parameter on every trainer, one after the other; the first one sends) and
`trl/extras/vllm_client.py` (update_named_param: a broadcast in a group of that trainer and all
workers of the server, then a barrier of it); vLLM,
`vllm/distributed/weight_transfer/nccl_engine.py` (the trainer is rank 0 of the group, a broadcast
per parameter, or packed into buffers); slime, `slime/backends/megatron_utils/update_weight` (one
group for each stage of the trainers' pipeline, each with the stage's first rank and all workers).
`full_tensor` is torch 2.13's: an all_gather_into_tensor of the shards, split along the first
dimension and padded (`torch/distributed/tensor/placement_types.py`).
"""

from __future__ import annotations

from math import prod
from typing import ClassVar, NamedTuple

from pydantic import Field, StrictBool

from distsim.scenario.strategies.base import (
    ZERO_COST,
    Entry,
    EntryWriter,
    Expansion,
    ExpansionContext,
    ParameterShapes,
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
        "Weight synchronisation from trainers to rollout ranks (RLHF). It all-gathers each "
        "parameter and broadcasts it in a separate group."
    )

    trainers: RankList = Field(
        description=(
            "Ranks that train, in the order of their pipeline stages. The first rank of each "
            "stage sends."
        ),
        examples=[[0, 1, 2, 3]],
    )
    rollouts: RankList = Field(
        description="Ranks that generate rollouts and receive all weights.", examples=[[4, 5]]
    )
    params: ParamShapes = Field(
        description=(
            "Parameters in the order in which they are sent, each a shape or a number of elements."
        ),
        examples=[[[4096, 4096], [4096]]],
    )
    dtype: Dtype = Field(
        default="bfloat16",
        description="Dtype of parameters and messages.",
        examples=["bfloat16"],
    )
    sharded: StrictBool = Field(
        default=True,
        description=(
            "Trainers hold shards, which are gathered first. false: each trainer holds a whole "
            "copy."
        ),
        examples=[False],
    )
    stages: PositiveInt = Field(
        default=1,
        description=(
            "Number of stages of the trainers' pipeline. Each stage has some of the parameters "
            "and a group of its own."
        ),
        examples=[2],
    )
    packed: PositiveInt = Field(
        default=1, description="Number of parameters per broadcast.", examples=[8]
    )
    barriers: StrictBool = Field(
        default=False,
        description="Call a barrier of the group after each broadcast, as TRL's client does.",
        examples=[True],
    )
    load: ComputeCostField = Field(
        default={"time": "0 ns"},
        description="Cost of loading a parameter on a rollout rank.",
        examples=["1 ms"],
    )
    gathers: IntByRank = Field(
        default={},
        description=("Trainers that stop early: `{RANK: NUMBER}` of parameters that each gathers."),
        examples=[{1: 2}],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = refuse_ranks_outside_world(context, "trainers", self.trainers)
        refusals += refuse_ranks_outside_world(context, "rollouts", self.rollouts)
        refusals += refuse_overlapping_ranks(
            ("trainers", self.trainers), ("rollouts", self.rollouts)
        )
        trainers = len(self.trainers)
        if trainers % self.stages:
            text = f"the {trainers} trainers are not divisible by {self.stages} stages"
            refusals.append((("stages",), text))
        if self.stages > len(self.params):
            text = (
                f"there are {self.stages} stages but only {len(self.params)} parameters, so "
                "some stages would be empty"
            )
            refusals.append((("stages",), text))
        keys = [rank for rank in self.gathers if rank != "else"]
        unknown = next((rank for rank in keys if rank not in self.trainers), None)
        if unknown is not None:
            refusals.append((("gathers",), f"rank {unknown} is not a trainer"))
        return refusals

    def expand(self, context: ExpansionContext) -> Expansion:
        prefix = context.unused_prefix(self.name)
        trainers_per_stage = len(self.trainers) // self.stages
        steps: list[Entry] = []
        tensors: dict[str, object] = {}
        groups: dict[str, object] = {}
        for k in range(self.stages):
            owners = self.trainers[k * trainers_per_stage : (k + 1) * trainers_per_stage]
            suffix = f"_{k}" if self.stages > 1 else ""
            names = _GroupNames(f"{prefix}_trainers{suffix}", f"{prefix}_update{suffix}")
            groups[names.trainers] = group_declaration(owners)
            groups[names.update] = group_declaration((owners[0], *self.rollouts))
            first = len(self.params) * k // self.stages
            end = len(self.params) * (k + 1) // self.stages
            writer = WeightSyncWriter(self, prefix + suffix, owners, names)
            steps += writer.entries(self.params[first:end])
            tensors |= writer.tensors
        return Expansion(steps, tensors, groups)


class _GroupNames(NamedTuple):
    """The groups of a stage: its trainers; the first of them with the ranks of the rollout."""

    trainers: str
    update: str


class _Weight(NamedTuple):
    """A gathered parameter, and its elements without padding."""

    tensor: str
    numel: int


class WeightSyncWriter(EntryWriter):
    """Entries of one stage's parameters, which the trainers ``owners`` hold."""

    def __init__(
        self, fields: WeightSync, prefix: str, owners: tuple[int, ...], groups: _GroupNames
    ) -> None:
        super().__init__(prefix, fields.dtype)
        self.fields = fields
        self.owners = owners
        self.groups = groups

    def entries(self, params: ParameterShapes) -> list[Entry]:
        steps: list[Entry] = []
        packed: list[_Weight] = []
        for k, shape in enumerate(params):
            steps += self.gather(k, shape)
            packed.append(_Weight(f"{self.prefix}_weight_{k}", prod(shape)))
            if len(packed) == self.fields.packed or k == len(params) - 1:
                steps += self.send(k, packed)
                packed = []
        return steps

    def gather(self, k: int, shape: tuple[int, ...]) -> list[Entry]:
        """Gather a parameter on every trainer of the stage that takes part."""
        ranks = len(self.owners)
        if not self.fields.sharded or ranks == 1:
            whole = self.tensor(f"weight_{k}", shape)
            return [compute(f"weight {k}", ZERO_COST, [self.owners[0]], writes=[whole])]
        rows = -(-shape[0] // ranks) * ranks
        whole = self.tensor(f"weight_{k}", [rows, *shape[1:]])
        shard = self.tensor(f"shard_{k}", [rows // ranks, *shape[1:]])
        gather = step(
            "all_gather_into_tensor",
            [rank for rank in self.owners if self.takes_part(rank, k)],
            input=shard,
            output=whole,
            group=self.groups.trainers,
        )
        return [compute(f"shard {k}", ZERO_COST, list(self.owners), writes=[shard]), gather]

    def takes_part(self, rank: int, k: int) -> bool:
        """Whether a trainer gathers parameter ``k``; by default each gathers all."""
        gathers = self.fields.gathers
        return k < gathers.get(rank, gathers.get("else", k + 1))

    def send(self, k: int, packed: list[_Weight]) -> list[Entry]:
        """Broadcast parameters, one or several in a message, to the ranks of the rollout."""
        source = self.owners[0]
        message = self.tensor(f"sent_{k}", sum(weight.numel for weight in packed))
        names = [weight.tensor for weight in packed]
        pack = compute("pack", ZERO_COST, [source], reads=names, writes=[message])
        group = self.groups.update
        broadcast = [step("broadcast", None, tensor=message, src=source, group=group)]
        if self.fields.barriers:
            broadcast.append(step("barrier", None, group=group))
        rollouts = list(self.fields.rollouts)
        load = compute("load", self.fields.load, rollouts, reads=[message])
        return [pack, block(broadcast, [source, *rollouts]), *[load] * len(packed)]
