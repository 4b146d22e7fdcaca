"""The fields of `pipeline:`, and the checks of its layout.

``PipelineFields`` also builds the schedule, because most checks need it. The entries are written by
`distsim.scenario.strategies.pipeline.strategy`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, field_validator

from distsim.common.file_io import read_bytes
from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.strategies.base import ExpansionContext, Refusal, Strategy
from distsim.scenario.strategies.field_types import (
    AxisOrGroup,
    Dtype,
    DurationNs,
    PositiveInt,
    Shape,
)
from distsim.scenario.strategies.pipeline.actions import (
    PipelineSchedule,
    compute_actions,
    forward_only,
    parse_rows,
    schedule_from_rows,
)
from distsim.scenario.strategies.pipeline.builtin_schedules import (
    SCHEDULE_BUILDERS,
    micro_batches_per_round,
)
from distsim.scenario.strategies.pipeline.dualpipe import refuse_dualpipe
from distsim.scenario.strategies.pipeline.rank_calls import computes_before_recv
from distsim.scenario.strategies.pipeline.schedule_names import (
    EVEN_ROUND_SCHEDULES,
    build_named_schedule,
    canonical_name,
    chunk_bounds,
    default_chunks,
    nearest_micro_batches,
)
from distsim.scenario.strategies.pipeline.send_recv import with_send_recv
from distsim.scenario.strategies.pipeline.stage_costs import StageCosts, StageCostsField, half_costs
from distsim.scenario.strategies.pipeline.stage_data_parallel import StageDataParallelFields

_COST_FIELDS = ("forward", "backward", "backward_input", "backward_weight", "last_backward")


class StageActivation(BaseModel):
    """What one stage hands to the next for one micro-batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: Shape
    dtype: Dtype = "float32"


class PipelineFields(Strategy):
    """The fields of `pipeline:`, the checks of their layout, and the schedule."""

    name: ClassVar = "pipeline"
    about: ClassVar = (
        "Pipeline parallelism as in torch.distributed.pipelining: GPipe, 1F1B, interleaved "
        "and zero-bubble schedules. Stages send activations of micro-batches forward and "
        "gradients backward."
    )
    first_field: ClassVar = "schedule"

    schedule: str | list[str] = Field(
        description=(
            "Pipeline schedule: a name such as 1f1b, a CSV file in PyTorch's format, or the "
            "lines of one."
        ),
        examples=["1f1b"],
    )
    axis: AxisOrGroup = Field(
        default="pp", description="Mesh axis of this strategy.", examples=["pp"]
    )
    micro_batches: PositiveInt | None = Field(
        default=None,
        description="Micro-batches per iteration [default: those of a CSV schedule].",
        examples=[8],
    )
    chunks: PositiveInt | None = Field(
        default=None,
        description=(
            "Stages per rank (virtual pipeline stages) [default: as the schedule requires]."
        ),
        examples=[2],
    )
    forward: StageCostsField = Field(
        description=(
            "Cost of one stage's forward pass for one micro-batch: a time, or `{flops, bytes}`."
        ),
        examples=["2 ms"],
    )
    backward: StageCostsField | None = Field(
        default=None,
        description="Cost of one stage's backward pass for one micro-batch.",
        examples=["4 ms"],
    )
    backward_input: StageCostsField | None = Field(
        default=None,
        description=(
            "Cost of the part of a backward pass that computes input gradients (zero-bubble "
            "schedules)."
        ),
        examples=["2 ms"],
    )
    backward_weight: StageCostsField | None = Field(
        default=None,
        description=(
            "Cost of the part of a backward pass that computes weight gradients (zero-bubble "
            "schedules)."
        ),
        examples=["2 ms"],
    )
    last_backward: StageCostsField | None = Field(
        default=None,
        description=(
            "Cost of a stage's last backward pass, if it does more, such as reducing gradients "
            "[default: `backward`]."
        ),
        examples=["5 ms"],
    )
    overlapped: DurationNs | None = Field(
        default=None,
        description=(
            "Time of a forward and a backward pass that overlap (DualPipe) [default: the sum "
            "of both]."
        ),
        examples=["5 ms"],
    )
    data_parallel: StageDataParallelFields | None = Field(
        default=None,
        description=(
            "Data parallelism of the stages: DDP or fully_shard, with PyTorch's calls for it."
        ),
        examples=[{"axis": "dp", "params": 1048576}],
    )
    activation: StageActivation = Field(
        description="Shape and dtype of the activation between two stages.",
        examples=[{"shape": [8, 1024], "dtype": "bfloat16"}],
    )
    gradient: str | None = Field(
        default=None,
        description=(
            "Tensor of the scenario to which every backward pass adds [default: a tensor of "
            "its own]."
        ),
        examples=["grad"],
    )
    reduce_copies: StrictBool = Field(
        default=True,
        description="DualPipe: sum the gradients of each stage's two copies at the end.",
        examples=[False],
    )
    shapes_exchange: bool | Literal["vote"] = Field(
        default=False,
        description=(
            "Send messages before the first micro-batch. true: the shapes, as PyTorch does if "
            "it has to infer them. vote: the vote that PyTorch takes if shapes are given."
        ),
        examples=[True],
    )
    defer_pp_recv: bool = Field(
        default=False,
        description="Post a receive only when its stage is about to run (defer_pp_recv).",
        examples=[True],
    )
    evaluate: bool = Field(
        default=False,
        description="Run forward passes only, as schedule.eval() does.",
        examples=[True],
    )
    megatron: bool = Field(
        default=False,
        description=(
            "Make Megatron-LM's calls for 1F1B, which wait for each batch of messages. Allows "
            "fewer micro-batches than stages, which PyTorch refuses."
        ),
        examples=[True],
    )
    numbered: bool = Field(
        default=False,
        description=(
            "Fill activations with 1000 * stage + micro-batch, so that values show which "
            "message a rank received."
        ),
        examples=[True],
    )

    @field_validator("schedule", mode="before")
    @classmethod
    def _text_or_lines(cls, value: object) -> object:
        if isinstance(value, str) or _is_list_of_texts(value):
            return value
        raise ValueError(
            "expected a schedule's name, a CSV file or its lines as a list of texts, "
            f"found {value_text(value)}"
        )

    # --- the schedule ---
    @property
    def schedule_name(self) -> str | None:
        """The schedule's name as the file spells it; None for a CSV file or its lines."""
        if isinstance(self.schedule, list) or self.schedule.lower().endswith(".csv"):
            return None
        return self.schedule

    @property
    def canonical_schedule(self) -> str | None:
        """The name of the built-in schedule; None if it is not one."""
        name = self.schedule_name
        return None if name is None else canonical_name(name)

    @property
    def two_copies(self) -> bool:
        """Whether each stage is on two ranks."""
        return self.canonical_schedule == "dualpipe"

    def chunks_of(self, schedule: str) -> int:
        """Stages per rank with a built-in schedule."""
        return default_chunks(schedule) if self.chunks is None else self.chunks

    def build_schedule(self, context: ExpansionContext) -> PipelineSchedule:
        """The schedule with its messages. Raises ValueError for a wrong schedule from a file."""
        ranks = context.mesh[self.axis]
        name = self.canonical_schedule
        if name is None:
            schedule = self._schedule_from_file(context, ranks)
        else:
            schedule = build_named_schedule(
                name,
                ranks,
                self.micro_batches or 0,
                self.chunks_of(name),
                megatron=self.megatron and name == "1f1b",
                defer=self.defer_pp_recv,
            )
        return forward_only(schedule) if self.evaluate else schedule

    def _schedule_from_file(self, context: ExpansionContext, ranks: int) -> PipelineSchedule:
        rows = parse_rows(self._schedule_lines(context))
        schedule = schedule_from_rows(rows, self.micro_batches)
        if schedule.ranks != ranks:
            raise ValueError(
                f"the schedule is for {schedule.ranks} ranks, but the axis {self.axis} has {ranks}"
            )
        return with_send_recv(schedule, self.defer_pp_recv)

    def _schedule_lines(self, context: ExpansionContext) -> Sequence[str]:
        if isinstance(self.schedule, list):
            return self.schedule
        path = Path(self.schedule)
        path_from_scenario = Path(context.folder) / path
        try:
            data = read_bytes(path_from_scenario if path_from_scenario.exists() else path)
            return data.decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is not a text file"
            raise ValueError(
                f"cannot read {self.schedule}: {reason}; distsim searches the scenario's "
                "folder, then the current folder"
            ) from None

    # --- checks of the layout ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        """First the problems that the schedule cannot be built with, then those of the schedule."""
        refusals = self._refuse_before_schedule(context)
        if refusals:
            return refusals
        try:
            schedule = self.build_schedule(context)
        except ValueError as error:
            return [(("schedule",), str(error))]
        refusals = [
            *self._refuse_late_receives(schedule),
            *self._refuse_data_parallel(schedule),
        ]
        if not self.evaluate:
            refusals += self._refuse_costs(schedule)
        return refusals

    def _refuse_before_schedule(self, context: ExpansionContext) -> list[Refusal]:
        if self.axis not in context.mesh:
            remedy = (
                did_you_mean(self.axis, context.mesh)
                or f": set `axis` to one of these, or add {self.axis} to the mesh"
            )
            text = f"the mesh has no axis {self.axis}, only {name_list(context.mesh)}{remedy}"
            return [(("axis",), text)]
        refusals = self._refuse_schedule(context.mesh[self.axis])
        if self.gradient is not None:
            unknown = context.unknown_tensor(self.gradient)
            if unknown is not None:
                refusals.append((("gradient",), unknown))
        if refusals:
            return refusals
        refusals = self._refuse_single_gradient(context)
        if refusals or self.data_parallel is None:
            return refusals
        return [
            (("data_parallel", *path), text)
            for path, text in context.refuse_groups(group=self.data_parallel.group)
        ]

    def _refuse_schedule(self, ranks: int) -> list[Refusal]:
        """Problems of the schedule's name and of the layout that it allows."""
        name = self.schedule_name
        if name is None:
            if self.chunks is None:
                return []
            text = "a schedule from a file sets the number of stages per rank: remove `chunks`"
            return [(("chunks",), text)]
        schedule = canonical_name(name)
        if schedule is None:
            text = (
                f"unknown schedule {name}; expected {name_list(SCHEDULE_BUILDERS)}, or a "
                f"file that ends in .csv{did_you_mean(name, SCHEDULE_BUILDERS)}"
            )
            return [(("schedule",), text)]
        if self.micro_batches is None:
            return [(("micro_batches",), f"{name} needs `micro_batches`")]
        refusals = [
            *self._refuse_chunks(schedule),
            *self._refuse_micro_batches(schedule, ranks, self.micro_batches),
        ]
        if schedule == "dualpipe" and not refusals:
            refusals += refuse_dualpipe(ranks, self.micro_batches, dict(self))
        if self.defer_pp_recv and schedule in ("gpipe", "1f1b"):
            text = (
                f"{schedule} has no receives to defer; PyTorch's class does not have this argument"
            )
            refusals.append((("defer_pp_recv",), text))
        return refusals

    def _refuse_chunks(self, schedule: str) -> Iterator[Refusal]:
        bounds = chunk_bounds(schedule)
        chunks = self.chunks_of(schedule)
        if bounds.low <= chunks <= bounds.high:
            return
        if bounds.high == 1:
            stages = "one stage"
            remedy = "; interleaved_1f1b, looped_bfs and zb1p support any number"
        else:
            stages = "two stages"
            remedy = ""
        yield ("chunks",), f"{schedule} has {stages} per rank, found chunks: {chunks}{remedy}"

    def _refuse_micro_batches(self, schedule: str, ranks: int, count: int) -> Iterator[Refusal]:
        least = self._least_micro_batches(schedule, ranks)
        if count < least:
            text = (
                f"{schedule} needs at least as many micro-batches as stages, "
                f"found {count} for {least} stages"
            )
            if schedule == "1f1b":
                text += "; Megatron-LM supports this: set `megatron: true`"
            yield ("micro_batches",), text
        elif schedule in EVEN_ROUND_SCHEDULES and not micro_batches_per_round(ranks, count):
            rounds = count // ranks
            text = (
                f"{schedule} runs {count} micro-batches in {rounds} rounds of {ranks} or "
                f"more, and {count} is not divisible by "
                f"{rounds}{nearest_micro_batches(ranks, count)}"
            )
            yield ("micro_batches",), text

    def _least_micro_batches(self, schedule: str, ranks: int) -> int:
        if schedule == "1f1b" and not self.megatron and not self.evaluate:
            return ranks
        return 2 * ranks if schedule == "dualpipe_v" else 1

    def _refuse_single_gradient(self, context: ExpansionContext) -> list[Refusal]:
        """With two stages per rank, one tensor for the gradients of both."""
        if not self.two_copies or not self.reduce_copies or self.gradient is None:
            return []
        declared = context.tensors[self.gradient]
        if isinstance(declared, Mapping) and declared.get("copies") == 2:
            return []
        text = (
            "with dualpipe a rank has two stages, and each needs a gradient of its "
            "own: add `copies: 2` to the tensor"
        )
        return [(("gradient",), text)]

    def _refuse_late_receives(self, schedule: PipelineSchedule) -> list[Refusal]:
        """The first computation of a file's schedule without its input; ours have none."""
        if self.schedule_name is not None:
            return []
        problem = next(computes_before_recv(schedule), None)
        return [] if problem is None else [(("schedule",), problem)]

    def _refuse_data_parallel(self, schedule: PipelineSchedule) -> Iterator[Refusal]:
        data_parallel = self.data_parallel
        is_ddp = data_parallel is not None and data_parallel.style == "ddp"
        if is_ddp and splits_backward(schedule):
            text = (
                "DDP's hooks do not run in a split backward pass, which computes weight "
                "gradients outside of autograd's accumulation: use fsdp"
            )
            yield ("data_parallel", "style"), text
        if self.megatron and self.canonical_schedule != "1f1b":
            yield ("megatron",), "`megatron` supports only the schedule 1f1b"
        if data_parallel is not None and (self.evaluate or self.megatron):
            text = (
                "data_parallel uses PyTorch's calls, and forward passes alone have no "
                "gradients: remove it"
            )
            yield ("data_parallel",), text

    # --- checks of the costs ---
    def _refuse_costs(self, schedule: PipelineSchedule) -> list[Refusal]:
        refusals: list[Refusal] = []
        for field in _COST_FIELDS:
            costs: StageCosts | None = getattr(self, field)
            if costs:
                refusals += _refuse_stage_costs(field, costs, schedule.length)
        refusals += self._refuse_halves(schedule, are_costs_valid=not refusals)
        if self.overlapped is not None:
            refusals += self._refuse_overlapped(schedule)
        return refusals

    def _refuse_halves(
        self, schedule: PipelineSchedule, are_costs_valid: bool
    ) -> Iterator[Refusal]:
        """Problems of a backward that is given whole, or in two halves."""
        missing = (self.backward_input is None) + (self.backward_weight is None)
        if missing == 1 or (missing == 2 and self.backward is None):
            text = "expected `backward`, or both `backward_input` and `backward_weight`"
            yield ("backward",), text
        elif missing == 2 and are_costs_valid and splits_backward(schedule):
            costs = (self.backward or {}).values()
            if not all(half_costs(cost) for cost in costs):
                text = (
                    "the schedule splits the backward pass: expected a time that can be "
                    "halved, or `backward_input` and `backward_weight`"
                )
                yield ("backward",), text

    def _refuse_overlapped(self, schedule: PipelineSchedule) -> list[Refusal]:
        """Why forwards and backwards that overlap cannot be given another time."""
        if not any(action.parts for row in schedule.rows for action in row):
            text = (
                "the schedule does not overlap forward and backward passes; dualpipe and "
                "dualpipe_v do"
            )
            return [(("overlapped",), text)]
        if self.data_parallel is not None or self.last_backward is not None:
            text = (
                "`overlapped` needs plain forward and backward times; it does not support "
                "data_parallel or last_backward"
            )
            return [(("overlapped",), text)]
        backward: StageCosts = self.backward or {"else": {}}
        costs = [*self.forward.values(), *backward.values()]
        if all(half_costs(cost) for cost in costs):
            return []
        text = (
            "`overlapped` needs times as `forward` and `backward`, to divide the "
            "overlapped time in proportion"
        )
        return [(("overlapped",), text)]


def _is_list_of_texts(value: object) -> bool:
    if not isinstance(value, list | tuple) or not value:
        return False
    return all(isinstance(line, str) for line in value)


def _refuse_stage_costs(field: str, costs: StageCosts, stages: int) -> Iterator[Refusal]:
    """Stages that do not exist, and stages without a cost."""
    unknown = [stage for stage in costs if isinstance(stage, int) and stage >= stages]
    if unknown:
        text = f"there is no stage {unknown[0]}; the stages are 0 to {stages - 1}"
        yield (field, unknown[0]), text
    if "else" in costs:
        return
    missing = [stage for stage in range(stages) if stage not in costs]
    if missing:
        yield (field,), f"stage {missing[0]} has no entry, and there is no `else`"


def splits_backward(schedule: PipelineSchedule) -> bool:
    """Whether the schedule computes the two halves of the backward pass separately."""
    return any(action.kind == "W" for row in schedule.rows for action in compute_actions(row))
