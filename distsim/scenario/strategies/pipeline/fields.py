"""Pipeline parallelism: a schedule laid out on an axis of the mesh, with the calls that
torch.distributed.pipelining makes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    PlainValidator,
    StrictBool,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
)

from distsim.common import units
from distsim.common.file_io import read_bytes
from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.strategies.base import (
    CostOrEntries,
    Entry,
    Expansion,
    ExpansionContext,
    Refusal,
    Strategy,
    block,
    blocks_by_rank,
    step,
    tensor_declaration,
)
from distsim.scenario.strategies.field_types import (
    COST_OR_ENTRIES_SCHEMA,
    AxisOrGroup,
    Dtype,
    DurationNs,
    PositiveInt,
    Shape,
    parse_cost_or_entries,
    parse_keyed,
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
from distsim.scenario.strategies.pipeline.dualpipe import refuse_dualpipe, stage_copies_group
from distsim.scenario.strategies.pipeline.rank_calls import calls_of_rank, computes_before_recv
from distsim.scenario.strategies.pipeline.rank_entries import PipelineLayout, PipelineRankWriter
from distsim.scenario.strategies.pipeline.send_recv import with_send_recv
from distsim.scenario.strategies.pipeline.shape_exchange import (
    shape_exchange_entries,
    shape_vote_entries,
)
from distsim.scenario.strategies.pipeline.stage_data_parallel import (
    FsdpStageWriter,
    StageDataParallelFields,
    StageDataParallelWriter,
)
from distsim.scenario.strategies.pipeline.stage_ddp import DdpStageWriter

#: PyTorch's class names, and the papers' names, in lower case without signs.
_SCHEDULE_ALIASES = {
    "gpipe": "gpipe",
    "1f1b": "1f1b",
    "interleaved1f1b": "interleaved_1f1b",
    "loopedbfs": "looped_bfs",
    "zb1p": "zb1p",
    "interleavedzerobubble": "zb1p",
    "zbv": "zbv",
    "zbvzerobubble": "zbv",
    "dualpipev": "dualpipe_v",
    "dualpipe": "dualpipe",
}
_CHUNK_BOUNDS = {
    "gpipe": (1, 1),
    "1f1b": (1, 1),
    "zbv": (2, 2),
    "dualpipe_v": (2, 2),
    "dualpipe": (2, 2),
}
_EVEN_ROUND_SCHEDULES = ("interleaved_1f1b", "zb1p")

#: Stage -> cost; `else` stands for all stages that are not named.
StageCosts = dict[int | str, CostOrEntries]


def _parse_stage_costs(value: object, info: ValidationInfo) -> StageCosts:
    """`5 ms`, `{flops, bytes}`, a list of entries, or one of these per stage: `{0: 1 ms, else: 5
    ms}`.
    """
    if isinstance(value, Mapping) and any(key == "else" or isinstance(key, int) for key in value):
        return parse_keyed(
            value, lambda item: parse_cost_or_entries(item, info), "a stage or `else` as the key"
        )
    return {"else": parse_cost_or_entries(value, info)}


_STAGE_COSTS_SCHEMA = {
    "anyOf": [
        COST_OR_ENTRIES_SCHEMA,
        {
            "type": "object",
            "propertyNames": {"pattern": "^([0-9]+|else)$"},
            "additionalProperties": COST_OR_ENTRIES_SCHEMA,
        },
    ]
}
StageCostsField = Annotated[
    StageCosts, PlainValidator(_parse_stage_costs), WithJsonSchema(_STAGE_COSTS_SCHEMA)
]


@lru_cache(maxsize=16)
def _build_schedule(
    name: str, ranks: int, micro_batches: int, chunks: int, *, megatron: bool, defer: bool
) -> PipelineSchedule:
    """A schedule by its name, with its messages."""
    found = SCHEDULE_BUILDERS[name](ranks, micro_batches, chunks)
    return with_send_recv(found._replace(issue="megatron") if megatron else found, defer)


class StageActivation(BaseModel):
    """What one stage hands to the next for one micro-batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: Shape
    dtype: Dtype = "float32"


class Pipeline(Strategy):
    """``forward`` and ``backward`` are the costs of one micro-batch on one stage: a time, flops and
    bytes, or entries; per stage where they differ. Schedules that split the backward take
    ``backward_input`` and ``backward_weight``, each half of ``backward`` if left out.
    """

    name: ClassVar = "pipeline"
    about: ClassVar = "Pipeline parallelism as torch.distributed.pipelining runs it: micro-batches pass down the stages, gradients back up."
    first_field: ClassVar = "schedule"

    #: A schedule's name, a CSV file in PyTorch's format, or the lines of one.
    schedule: str | list[str]
    axis: AxisOrGroup = "pp"
    micro_batches: PositiveInt | None = None
    #: Stages per rank.
    chunks: PositiveInt | None = None
    forward: StageCostsField
    backward: StageCostsField | None = None
    backward_input: StageCostsField | None = None
    backward_weight: StageCostsField | None = None
    #: What a stage's last backward is instead, where something is done beside it.
    last_backward: StageCostsField | None = None
    #: A forward and a backward that overlap, where that is less than both one after the other
    #: (dualpipe, dualpipe_v).
    overlapped: DurationNs | None = None
    #: Data parallelism of the stages, with PyTorch's own calls for it.
    data_parallel: StageDataParallelFields | None = None
    activation: StageActivation
    #: A tensor of the file that every backward adds to; one of its own if left out.
    gradient: str | None = None
    #: With dualpipe: sum the gradients of a stage's two copies in the end.
    reduce_copies: StrictBool = True
    #: Before the first micro-batch: true as PyTorch does it without shapes given, `vote` as it does
    #: with them.
    shapes_exchange: bool | Literal["vote"] = False
    defer_pp_recv: bool = False
    #: Forward passes alone, as schedule.eval() runs them.
    evaluate: bool = False
    #: 1f1b with Megatron-LM's calls, which go with fewer micro-batches than stages as well; PyTorch
    #: refuses those.
    megatron: bool = False
    #: Activations carry 1000 * stage + micro-batch, gradients the same below zero, so that values
    #: show who got what.
    numbered: bool = False

    @field_validator("schedule", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        if isinstance(value, str) or (
            isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value)
        ):
            return value
        raise ValueError(
            f"expected a schedule's name, a CSV file or its lines as a list of texts, found {value_text(value)}"
        )

    # --- what can't be ---
    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        if self.axis not in context.mesh:
            remedy = (
                did_you_mean(self.axis, context.mesh)
                or f": name one of these with `axis`, or add {self.axis} to the mesh"
            )
            message = f"the axis {self.axis} is not in the mesh, which has {name_list(context.mesh)}{remedy}"
            return [(("axis",), message)]
        named = self._named()
        found = self._refused_name(named) if named is not None else []
        found += [] if found else self._refused_layout(named, context.mesh[self.axis])
        unknown = None if self.gradient is None else context.unknown_tensor(self.gradient)
        found += [] if unknown is None else [(("gradient",), unknown)]
        if not found and self.two_copies and not self._two_gradients(context):
            found = [
                (
                    ("gradient",),
                    "dualpipe: a rank has two stages, and each wants a gradient of its own: give it `copies: 2`",
                )
            ]
        if not found and self.data_parallel is not None:
            found = [
                (("data_parallel", *way), text)
                for way, text in context.refuse_groups(group=self.data_parallel.group)
            ]
        if found:
            return found
        try:
            made = self.made(context)
        except ValueError as error:
            return [(("schedule",), str(error))]
        found = [
            (("schedule",), text)
            for text in (list(computes_before_recv(made))[:1] if named is None else ())
        ]  # ours are met
        if (
            self.data_parallel is not None
            and self.data_parallel.style == "ddp"
            and _splits_backward(made)
        ):
            sentence = "a split backward computes weight gradients apart from autograd's accumulation, where DDP's hooks are: take fsdp"
            found.append((("data_parallel", "style"), sentence))
        if self.megatron and (
            named is None or _SCHEDULE_ALIASES[_normalized_name(named)] != "1f1b"
        ):
            found.append((("megatron",), "Megatron-LM's calls are laid out for 1f1b"))
        if self.data_parallel is not None and (self.evaluate or self.megatron):
            found.append(
                (
                    ("data_parallel",),
                    "data parallelism of stages has PyTorch's calls for it, and no gradients in forward passes alone: leave it out",
                )
            )
        return [*found, *([] if self.evaluate else self._refused_costs(made))]

    @property
    def two_copies(self) -> bool:
        """Whether each stage is on two ranks."""
        named = self._named()
        return named is not None and _SCHEDULE_ALIASES.get(_normalized_name(named)) == "dualpipe"

    def _two_gradients(self, context: ExpansionContext) -> bool:
        given = None if self.gradient is None else context.tensors[self.gradient]
        return (
            self.gradient is None
            or not self.reduce_copies
            or (isinstance(given, Mapping) and given.get("copies") == 2)
        )

    def _named(self) -> str | None:
        """The schedule's name as asked for; None where it is a file or its lines."""
        return (
            None
            if isinstance(self.schedule, list) or self.schedule.lower().endswith(".csv")
            else self.schedule
        )

    def _refused_name(self, named: str) -> list[Refusal]:
        if _normalized_name(named) in _SCHEDULE_ALIASES:
            return (
                []
                if self.micro_batches is not None
                else [(("micro_batches",), f"micro_batches: how many {named} has is missing")]
            )
        message = f"unknown schedule {named}; known are {name_list(SCHEDULE_BUILDERS)}, or a file that ends in .csv{did_you_mean(named, SCHEDULE_BUILDERS)}"
        return [(("schedule",), message)]

    def _refused_layout(self, named: str | None, ranks: int) -> list[Refusal]:
        if named is None:
            extra = (
                ("chunks",),
                "a schedule from a file says itself how many stages a rank has; leave chunks out",
            )
            return [extra] if self.chunks is not None else []
        name, count = _SCHEDULE_ALIASES[_normalized_name(named)], self.micro_batches or 0
        low, high = _CHUNK_BOUNDS.get(name, (1, 2**20))
        chunks = self._chunks(name)
        found: list[Refusal] = []
        if not low <= chunks <= high:
            stages = "one stage" if high == 1 else "two stages"
            remedy = "; interleaved_1f1b, looped_bfs and zb1p take any number" if high == 1 else ""
            found.append(
                (("chunks",), f"{name} has {stages} per rank, found chunks: {chunks}{remedy}")
            )
        least = {
            "1f1b": 1 if self.megatron or self.evaluate else ranks,
            "dualpipe_v": 2 * ranks,
        }.get(name, 1)
        if count < least:
            message = f"{name} needs at least as many micro-batches as stages, found {count} for {least} stages"
            message += "; Megatron-LM runs it so: megatron: true" if name == "1f1b" else ""
            found.append((("micro_batches",), message))
        elif name in _EVEN_ROUND_SCHEDULES and not micro_batches_per_round(ranks, count):
            rounds = count // ranks
            dealt = f"{name} deals {count} micro-batches out in {rounds} rounds of {ranks} or more"
            message = f"{dealt}, and {rounds} does not divide {count}{_nearest_micro_batches(ranks, count)}"
            found.append((("micro_batches",), message))
        found += (
            refuse_dualpipe(ranks, count, dict(self)) if name == "dualpipe" and not found else ()
        )
        if self.defer_pp_recv and name in ("gpipe", "1f1b"):
            found.append(
                (
                    ("defer_pp_recv",),
                    f"{name} has no receives to defer; PyTorch's class does not take the argument",
                )
            )
        return found

    def _refused_costs(self, schedule: PipelineSchedule) -> list[Refusal]:
        found: list[Refusal] = []
        for field in ("forward", "backward", "backward_input", "backward_weight", "last_backward"):
            given: StageCosts | None = getattr(self, field)
            strange = [
                stage
                for stage in given or ()
                if isinstance(stage, int) and stage >= schedule.length
            ]
            if strange:
                found.append(
                    (
                        (field, strange[0]),
                        f"there is no stage {strange[0]}; the stages are 0 to {schedule.length - 1}",
                    )
                )
            missing = [
                s
                for s in range(schedule.length)
                if given and s not in given and "else" not in given
            ]
            if missing:
                found.append(((field,), f"stage {missing[0]} has no entry, and there is no `else`"))
        halves = (self.backward_input is None) + (self.backward_weight is None)
        if halves == 1 or (halves == 2 and self.backward is None):
            found.append(
                (
                    ("backward",),
                    "expected `backward`, or both `backward_input` and `backward_weight`",
                )
            )
        if (
            not found
            and halves == 2
            and _splits_backward(schedule)
            and not all(_half_costs(c) for c in (self.backward or {}).values())
        ):
            message = "the schedule splits the backward: expected a time that can be halved, or `backward_input` and `backward_weight`"
            found.append((("backward",), message))
        return found + (self._refused_pairs(schedule) if self.overlapped is not None else [])

    def _refused_pairs(self, schedule: PipelineSchedule) -> list[Refusal]:
        """Whether forwards and backwards can be given less time beside each other."""
        if not any(action.parts for row in schedule.rows for action in row):
            return [
                (
                    ("overlapped",),
                    "the schedule overlaps no forward with a backward; dualpipe and dualpipe_v do",
                )
            ]
        if self.data_parallel is not None or self.last_backward is not None:
            return [
                (
                    ("overlapped",),
                    "overlapped goes with plain forward and backward times, not with data_parallel or last_backward",
                )
            ]
        times = [
            _half_costs(cost)
            for field in (self.forward, self.backward or {"else": {}})
            for cost in field.values()
        ]
        return (
            []
            if all(times)
            else [
                (
                    ("overlapped",),
                    "overlapped needs forward and backward as times, whose share of it each keeps",
                )
            ]
        )

    # --- the schedule ---
    def _chunks(self, name: str) -> int:
        if self.chunks is not None:
            return self.chunks
        return 1 if name in ("gpipe", "1f1b", "zb1p") else 2

    def made(self, context: ExpansionContext) -> PipelineSchedule:
        """The schedule with its messages. Raises ValueError with what is wrong with a file's
        schedule.
        """
        ranks, named = context.mesh[self.axis], self._named()
        if named is not None:
            name = _SCHEDULE_ALIASES[_normalized_name(named)]
            layout = name, ranks, self.micro_batches or 0, self._chunks(name)
            found = _build_schedule(
                *layout, megatron=self.megatron and name == "1f1b", defer=self.defer_pp_recv
            )
            return forward_only(found) if self.evaluate else found
        schedule = schedule_from_rows(parse_rows(self._lines(context)), self.micro_batches)
        if schedule.ranks != ranks:
            raise ValueError(
                f"the schedule is for {schedule.ranks} ranks, the axis {self.axis} has {ranks}"
            )
        found = with_send_recv(schedule, self.defer_pp_recv)
        return forward_only(found) if self.evaluate else found

    def _lines(self, context: ExpansionContext) -> Sequence[str]:
        if isinstance(self.schedule, list):
            return self.schedule
        path = Path(self.schedule)
        beside = Path(context.folder) / path
        try:
            return read_bytes(beside if beside.exists() else path).decode("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no text"
            raise ValueError(
                f"can't read {self.schedule}: {reason}; it is looked for beside the scenario's file, then here"
            ) from None

    def costs(self, schedule: PipelineSchedule) -> dict[tuple[str, int], CostOrEntries]:
        """What each kind of action costs on each stage."""
        found: dict[tuple[str, int], CostOrEntries] = {}
        split = not self.evaluate and (_splits_backward(schedule) or self.backward is None)
        for stage in range(schedule.stages):
            here = stage % schedule.length
            found["F", stage] = _cost_of_stage(self.forward, here)
            if self.backward is not None:
                found["B", stage] = _cost_of_stage(self.backward, here)
            if self.backward_input is not None and self.backward_weight is not None:
                found["I", stage], found["W", stage] = (
                    _cost_of_stage(self.backward_input, here),
                    _cost_of_stage(self.backward_weight, here),
                )
            elif split:
                found["I", stage], found["W", stage] = _half_costs(found["B", stage]) or ({}, {})
            if self.last_backward is not None:
                found["L", stage] = _cost_of_stage(self.last_backward, here)
        return found

    # --- the entries ---
    def expand(self, context: ExpansionContext) -> Expansion:
        schedule, prefix = self.made(context), context.unused_prefix("pipeline")
        chunks = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
        gradients, tensors = self._tensors(prefix, chunks, schedule.micro_batches, context)
        fields = self.data_parallel
        data = (
            None if fields is None else _stage_writer_type(fields)(fields, context, prefix, chunks)
        )
        layout = PipelineLayout(
            schedule,
            self.axis,
            prefix,
            self.costs(schedule),
            gradients,
            self.numbered,
            data,
            self.overlapped,
        )
        writers = [PipelineRankWriter(layout, rank) for rank in range(schedule.ranks)]
        before = [self._before(writer) for writer in writers]
        rows = [
            writer.entries(calls_of_rank(schedule, rank)) for rank, writer in enumerate(writers)
        ]
        groups: dict[str, Entry] = {}
        if schedule.directions > 1 and self.reduce_copies and not self.evaluate:
            groups = {f"{prefix}_copies": stage_copies_group(self.axis, context)}
        end = [
            step("all_reduce", tensor=name, group=group) for group in groups for name in gradients
        ]
        start = [*(data.setup() if data is not None else ()), *blocks_by_rank(before, self.axis)]
        if start and context.iterations > 1:
            start = [block(start, "iteration == 0")]
        return Expansion(
            [*start, *blocks_by_rank(rows, self.axis), *end],
            tensors | (data.tensors if data is not None else {}),
            groups,
        )

    def _before(self, writer: PipelineRankWriter) -> list[Entry]:
        if not self.shapes_exchange:
            return []
        ways = "F" if self.evaluate else "FB"
        told = (
            shape_exchange_entries(writer, self.activation.shape, self.activation.dtype, ways)
            if self.shapes_exchange is True
            else []
        )
        return [*shape_vote_entries(writer), *told]

    def _tensors(
        self, prefix: str, chunks: int, micro_batches: int, context: ExpansionContext
    ) -> tuple[list[str], dict[str, Entry]]:
        """The names of the chunks' gradients; and what is declared."""
        first = f"{prefix}_input"
        found = {
            first: tensor_declaration(self.activation.shape, self.activation.dtype)
            | {"copies": chunks * micro_batches}
        }
        found |= {
            f"{prefix}_{word}": {"like": first} for word in ("output", "output_grad", "input_grad")
        }
        name, many = self.gradient or f"{prefix}_weight_grad", chunks > 1
        if self.gradient is not None:
            given = context.tensors[name]
            many = many and isinstance(given, Mapping) and "copies" in given
        elif self.data_parallel is None:
            found[name] = {"shape": [1], **({"copies": chunks} if many else {})}
        return [f"{name}@{c}" if many else name for c in range(chunks)], found


def _nearest_micro_batches(ranks: int, count: int) -> str:
    """Counts of micro-batches on either side that come out even."""
    fewer = next(
        (n for n in range(count - 1, ranks - 1, -1) if micro_batches_per_round(ranks, n)), None
    )
    more = next(
        n for n in range(count + 1, 2 * count + ranks + 1) if micro_batches_per_round(ranks, n)
    )
    return f"; {more} would do" if fewer is None else f"; {fewer} or {more} would do"


def _normalized_name(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _stage_writer_type(fields: StageDataParallelFields) -> type[StageDataParallelWriter]:
    return DdpStageWriter if fields.style == "ddp" else FsdpStageWriter


def _splits_backward(schedule: PipelineSchedule) -> bool:
    return any(action.kind == "W" for row in schedule.rows for action in compute_actions(row))


def _cost_of_stage(costs: StageCosts, stage: int) -> CostOrEntries:
    return costs[stage] if stage in costs else costs["else"]


def _half_costs(cost: CostOrEntries) -> tuple[CostOrEntries, CostOrEntries] | None:
    """A time in two halves; None for what is not a time."""
    if not isinstance(cost, Mapping) or "time" not in cost:
        return None
    whole = units.parse_duration_ns(cost["time"])
    return {**cost, "time": units.duration_text(whole // 2)}, {
        **cost,
        "time": units.duration_text(whole - whole // 2),
    }
