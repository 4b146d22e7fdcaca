"""Distributed checkpoints: rank 0 gathers plans, sends them back, and gathers results.

Plans and results are pickled objects of given sizes. A plan has an entry for each tensor, so the
plans of a large model have megabytes.

Sources, torch 2.13, `torch/distributed/checkpoint/`:

- `state_dict_saver.py`, _save_state_dict: `reduce_scatter("plan")`, writing, `all_reduce("write")`.
  async_save does the same in a thread and on a Gloo group.
- `state_dict_loader.py`, _load_state_dict: `reduce_scatter("plan")`, reading, `all_gather("read")`.
- `utils.py`, _DistWrapper: these functions call gather_object, scatter_object_list,
  broadcast_object_list and all_gather_object.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, cast

from pydantic import Field, PlainValidator, StrictBool, ValidationInfo, WithJsonSchema

from distsim.backends import SUPPORT_BY_BACKEND
from distsim.common.message_text import value_text
from distsim.scenario.strategies.base import (
    Entry,
    Expansion,
    ExpansionContext,
    GroupRef,
    Refusal,
    Strategy,
    block,
    compute,
    step,
    wait,
)
from distsim.scenario.strategies.composite_calls.object_collectives import (
    AllGatherObject,
    BroadcastObjectList,
    GatherObject,
    ObjectSizes,
    ScatterObjectList,
    SizeByRank,
)
from distsim.scenario.strategies.field_quantities import size_bytes
from distsim.scenario.strategies.field_types import AxesOrGroup, CostOrEntriesField, IntByRank


def _parse_byte_size(value: object, info: ValidationInfo) -> int:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(f"expected a size such as 4 KiB, found {value_text(value)}")
    return size_bytes(value, info)


ByteSize = Annotated[int, PlainValidator(_parse_byte_size), WithJsonSchema({"x-def": "size"})]
#: The size of None when pickled.
_PICKLED_NONE_BYTES = 4


class _CheckpointStrategy(Strategy):
    """The common part of saving and loading: rank 0 of the group makes the global plan."""

    group: AxesOrGroup | None = Field(
        default=None,
        description="Ranks that take part [default: all ranks].",
        examples=["dp"],
    )
    plan: SizeByRank = Field(
        description="Pickled size of each rank's plan; by rank if it differs.",
        examples=[{0: "40 KiB", "else": "12 KiB"}],
    )
    global_plan: ObjectSizes | None = Field(
        default=None,
        description=(
            "Pickled size of the plan that rank 0 sends back: one size, or one per rank "
            "[default: the size of `plan`]."
        ),
        examples=[["40 KiB", "12 KiB"]],
    )
    skips: IntByRank = Field(
        default={},
        description="Ranks that skip the call in one iteration: `{RANK: ITERATION}`.",
        examples=[{1: 0}],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = context.refuse_groups(group=self.group)
        n = 0 if found else context.size_of(self.group)
        if n and self.global_plan is not None and len(self.global_plan) not in (1, n):
            found.append(
                (
                    ("global_plan",),
                    (
                        f"expected one size, or one for each of the {n} ranks, found "
                        f"{len(self.global_plan)}"
                    ),
                )
            )
        return found

    def global_plan_sizes(self, context: ExpansionContext) -> tuple[int, ...]:
        """The size of the plan that rank 0 sends back to each rank of the group."""
        n = context.size_of(self.group)
        if self.global_plan is None:
            default = self.plan.get("else", 1)
            return tuple(self.plan.get(rank, default) for rank in range(n))
        return self.global_plan * n if len(self.global_plan) == 1 else self.global_plan

    def unless_skipped(self, steps: list[Entry]) -> list[Entry]:
        """The entries without the ranks and iterations that skip the call."""
        conditions = [
            f"not (rank == {rank} and iteration == {iteration})"
            for rank, iteration in self.skips.items()
            if rank != "else"
        ]
        return [block(steps, " and ".join(conditions))] if conditions else steps


class _ObjectCollectiveExpander:
    """Object collectives one after the other, each with tensors of its own."""

    def __init__(self, context: ExpansionContext, group: GroupRef | None) -> None:
        self.context = context
        self.group = group
        self.tensors: dict[str, object] = {}

    def call(self, model: type[Strategy], **fields: object) -> list[Entry]:
        """The plain calls of one object collective."""
        context = self.context._replace(taken=self.context.taken | self.tensors.keys())
        if self.group is not None:
            fields["group"] = self.group
        collective = model.model_validate(fields, context=dict(self.context.known))
        expansion = collective.expand(context)
        self.tensors |= expansion.tensors
        return expansion.steps

    def exchange_plans(self, fields: _CheckpointStrategy) -> list[Entry]:
        """`reduce_scatter("plan")`: the local plans to rank 0, the global plan back."""
        local_plans = self.call(GatherObject, object=_sizes_as_text(fields.plan))
        sizes = [f"{size} B" for size in fields.global_plan_sizes(self.context)]
        return local_plans + self.call(ScatterObjectList, objects=sizes)


def _sizes_as_text(sizes: Mapping[int | str, int]) -> dict[int | str, str]:
    return {rank: f"{size} B" for rank, size in sizes.items()}


class DcpSave(_CheckpointStrategy):
    """torch.distributed.checkpoint.save."""

    name: ClassVar[str] = "dcp_save"
    about: ClassVar[str] = (
        "torch.distributed.checkpoint.save. Plans go to rank 0 and back, each rank writes, "
        "results go to rank 0, and all ranks receive the metadata."
    )

    results: SizeByRank = Field(
        description="Pickled size of each rank's write results.", examples=["8 KiB"]
    )
    metadata: ByteSize = Field(
        description="Pickled size of the metadata, which all ranks receive.", examples=["80 KiB"]
    )
    write: CostOrEntriesField = Field(
        default={"time": "0 ns"},
        description="Cost of writing a rank's part.",
        examples=["200 ms"],
    )
    use_collectives: StrictBool = Field(
        default=True,
        description=(
            "Plan together. false: each rank plans alone, and the save ends with a barrier."
        ),
        examples=[False],
    )

    def expand(self, context: ExpansionContext) -> Expansion:
        calls = _ObjectCollectiveExpander(context, self.group)
        write = compute("write checkpoint", self.write)
        if not self.use_collectives:
            return Expansion(self.unless_skipped([write, step("barrier", group=self.group)]))
        plans = calls.exchange_plans(self)
        results = calls.call(GatherObject, object=_sizes_as_text(self.results))
        metadata = calls.call(BroadcastObjectList, objects=f"{self.metadata} B")
        steps = [*plans, write, *results, *metadata]
        return Expansion(self.unless_skipped(steps), calls.tensors)


class DcpAsyncSave(DcpSave):
    """torch.distributed.checkpoint.async_save: a thread saves while the rank continues."""

    name: ClassVar[str] = "dcp_async_save"
    about: ClassVar[str] = (
        "torch.distributed.checkpoint.async_save. The calls of `dcp_save` run in a thread "
        "on a Gloo group; the rank waits for them later."
    )

    stage: CostOrEntriesField = Field(
        default={"time": "0 ns"},
        description="Cost of copying the state to the host, which blocks the rank.",
        examples=["20 ms"],
    )
    beside: CostOrEntriesField = Field(
        default=(),
        description=(
            "Cost of work until the rank waits for the future's result: a time, or entries."
        ),
        examples=["100 ms"],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = super().refuse(context)
        group = context.groups.get(self.group) if isinstance(self.group, str) else None
        group_backend = group.get("backend") if isinstance(group, Mapping) else None
        backend = str(group_backend or context.backend)
        if not found and _has_no_cpu_tensors(backend):
            found.append(
                (
                    ("group",),
                    (
                        "async_save needs a group with a CPU backend, but this group has only "
                        f"{backend}: use a group with `backend: gloo`, as "
                        "init_process_group('cpu:gloo,cuda:nccl') creates"
                    ),
                )
            )
        return found

    def expand(self, context: ExpansionContext) -> Expansion:
        save = super().expand(context)
        prefix = context.unused_prefix(self.name)
        calls, handles = _as_async_calls(save.steps, f"{prefix}_call", prefix)
        waits: list[Entry] = [step("wait_stream", stream=prefix)]
        waits += [wait(handle) for handle in handles]
        steps = [
            compute("stage", self.stage),
            *calls,
            compute("during the checkpoint", self.beside),
            *self.unless_skipped(waits),
        ]
        return Expansion(steps, save.tensors)


def _has_no_cpu_tensors(backend: str) -> bool:
    support = SUPPORT_BY_BACKEND.get(backend)
    return support is not None and support.cpu == "no"


def _as_async_calls(steps: list[Entry], handle: str, stream: str) -> tuple[list[Entry], list[str]]:
    """The entries as another thread would run them, and the handles of their requests.

    Calls become asynchronous, so the rank does not wait for them, and computations run on a stream
    of their own.
    """
    handles: list[str] = []

    def started(entry: Entry) -> Entry:
        if "steps" in entry:
            return {**entry, "steps": [started(one) for one in cast("list[Entry]", entry["steps"])]}
        [name] = (key for key in entry if key != "ranks")
        fields = cast("Entry", entry[name])
        if name == "compute":
            return {**entry, name: {**fields, "on": stream}}
        handles.append(f"{handle}_{len(handles)}")
        return {**entry, name: {**fields, "async": True, "as": handles[-1]}}

    return [started(entry) for entry in steps], handles


class DcpLoad(_CheckpointStrategy):
    """torch.distributed.checkpoint.load."""

    name: ClassVar[str] = "dcp_load"
    about: ClassVar[str] = (
        "torch.distributed.checkpoint.load. Plans go to rank 0 and back, each rank reads, "
        "and all ranks exchange their results."
    )

    read: CostOrEntriesField = Field(
        default={"time": "0 ns"},
        description="Cost of reading a rank's part.",
        examples=["200 ms"],
    )

    def expand(self, context: ExpansionContext) -> Expansion:
        calls = _ObjectCollectiveExpander(context, self.group)
        plans = calls.exchange_plans(self)
        results = calls.call(AllGatherObject, object=f"{_PICKLED_NONE_BYTES} B")
        steps = [*plans, compute("read checkpoint", self.read), *results]
        return Expansion(self.unless_skipped(steps), calls.tensors)
