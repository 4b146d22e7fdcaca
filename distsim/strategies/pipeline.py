"""Pipeline parallelism: a schedule laid out on an axis of the mesh, with the calls that torch.distributed.pipelining makes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, PlainValidator, StrictBool, ValidationInfo, WithJsonSchema, field_validator

from distsim import units
from distsim.files import read_bytes
from distsim.names import listing, near, shown
from distsim.strategies.base import Context, Cost, Entry, Expansion, Refusal, Strategy, block, blocks, declared, step
from distsim.strategies.fields import COST, Axis, Count, Dtype, Duration, Shape, cost, keyed
from distsim.strategies.pipeline_actions import Schedule, computes, forwards, from_rows, parse_rows
from distsim.strategies.pipeline_both import pair_group, refused
from distsim.strategies.pipeline_calls import calls_of, unmet
from distsim.strategies.pipeline_data import DataFields, DataWriter, ShardedStages
from distsim.strategies.pipeline_ddp import DdpStages
from distsim.strategies.pipeline_entries import Layout, RankWriter
from distsim.strategies.pipeline_messages import with_messages
from distsim.strategies.pipeline_schedules import BUILDERS, per_round
from distsim.strategies.pipeline_shapes import shapes, vote

#: PyTorch's class names, and the papers' names, in lower case without signs.
_NAMES = {
    "gpipe": "gpipe", "1f1b": "1f1b", "interleaved1f1b": "interleaved_1f1b", "loopedbfs": "looped_bfs", "zb1p": "zb1p",
    "interleavedzerobubble": "zb1p", "zbv": "zbv", "zbvzerobubble": "zbv", "dualpipev": "dualpipe_v",
    "dualpipe": "dualpipe",
}  # fmt: skip
_CHUNKS = {"gpipe": (1, 1), "1f1b": (1, 1), "zbv": (2, 2), "dualpipe_v": (2, 2), "dualpipe": (2, 2)}
_EVEN = ("interleaved_1f1b", "zb1p")

#: Stage -> cost; `else` stands for all stages that are not named.
StageCosts = dict[int | str, Cost]


def _stage_costs(value: object, info: ValidationInfo) -> StageCosts:
    """`5 ms`, `{flops, bytes}`, a list of entries, or one of these per stage: `{0: 1 ms, else: 5 ms}`."""
    if isinstance(value, Mapping) and any(key == "else" or isinstance(key, int) for key in value):
        return keyed(value, lambda item: cost(item, info), "a stage or `else` as the key")
    return {"else": cost(value, info)}


_COSTS = {"anyOf": [COST, {"type": "object", "propertyNames": {"pattern": "^([0-9]+|else)$"}, "additionalProperties": COST}]}
StageCostsField = Annotated[StageCosts, PlainValidator(_stage_costs), WithJsonSchema(_COSTS)]


@lru_cache(maxsize=16)
def _built(name: str, ranks: int, micro_batches: int, chunks: int, *, megatron: bool, defer: bool) -> Schedule:
    """A schedule by its name, with its messages."""
    found = BUILDERS[name](ranks, micro_batches, chunks)
    return with_messages(found._replace(issue="megatron") if megatron else found, defer)


class Activation(BaseModel):
    """What one stage hands to the next for one micro-batch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    shape: Shape
    dtype: Dtype = "float32"


class Pipeline(Strategy):
    """``forward`` and ``backward`` are the costs of one micro-batch on one stage: a time, flops and bytes, or entries; per stage where
    they differ. Schedules that split the backward take ``backward_input`` and ``backward_weight``, each half of ``backward`` if left out.
    """

    name: ClassVar = "pipeline"
    about: ClassVar = (
        "Pipeline parallelism as torch.distributed.pipelining runs it: micro-batches pass down the stages, gradients back up."
    )
    first_field: ClassVar = "schedule"

    #: A schedule's name, a CSV file in PyTorch's format, or the lines of one.
    schedule: str | list[str]
    axis: Axis = "pp"
    micro_batches: Count | None = None
    #: Stages per rank.
    chunks: Count | None = None
    forward: StageCostsField
    backward: StageCostsField | None = None
    backward_input: StageCostsField | None = None
    backward_weight: StageCostsField | None = None
    #: What a stage's last backward is instead, where something is done beside it.
    last_backward: StageCostsField | None = None
    #: A forward and a backward that overlap, where that is less than both one after the other (dualpipe, dualpipe_v).
    overlapped: Duration | None = None
    #: Data parallelism of the stages, with PyTorch's own calls for it.
    data_parallel: DataFields | None = None
    activation: Activation
    #: A tensor of the file that every backward adds to; one of its own if left out.
    gradient: str | None = None
    #: With dualpipe: sum the gradients of a stage's two copies in the end.
    reduce_copies: StrictBool = True
    #: Before the first micro-batch: true as PyTorch does it without shapes given, `vote` as it does with them.
    shapes_exchange: bool | Literal["vote"] = False
    defer_pp_recv: bool = False
    #: Forward passes alone, as schedule.eval() runs them.
    evaluate: bool = False
    #: 1f1b with Megatron-LM's calls, which go with fewer micro-batches than stages as well; PyTorch refuses those.
    megatron: bool = False
    #: Activations carry 1000 * stage + micro-batch, gradients the same below zero, so that values show who got what.
    numbered: bool = False

    @field_validator("schedule", mode="before")
    @classmethod
    def _words(cls, value: object) -> object:
        if isinstance(value, str) or (isinstance(value, list | tuple) and value and all(isinstance(v, str) for v in value)):
            return value
        raise ValueError(f"expected a schedule's name, a CSV file or its lines as a list of texts, found {shown(value)}")

    # --- what can't be ---
    def refuse(self, context: Context) -> list[Refusal]:
        if self.axis not in context.mesh:
            remedy = near(self.axis, context.mesh) or f": name one of these with `axis`, or add {self.axis} to the mesh"
            message = f"the axis {self.axis} is not in the mesh, which has {listing(context.mesh)}{remedy}"
            return [(("axis",), message)]
        named = self._named()
        found = self._refused_name(named) if named is not None else []
        found += [] if found else self._refused_layout(named, context.mesh[self.axis])
        unknown = None if self.gradient is None else context.unknown_tensor(self.gradient)
        found += [] if unknown is None else [(("gradient",), unknown)]
        if not found and self.two_copies and not self._two_gradients(context):
            found = [
                (("gradient",), "dualpipe: a rank has two stages, and each wants a gradient of its own: give it `copies: 2`")
            ]
        if not found and self.data_parallel is not None:
            found = [(("data_parallel", *way), text) for way, text in context.refused(group=self.data_parallel.group)]
        if found:
            return found
        try:
            made = self.made(context)
        except ValueError as error:
            return [(("schedule",), str(error))]
        found = [(("schedule",), text) for text in (list(unmet(made))[:1] if named is None else ())]  # ours are met
        if self.data_parallel is not None and self.data_parallel.style == "ddp" and _splits(made):
            sentence = (
                "a split backward computes weight gradients apart from autograd's accumulation, where DDP's hooks are: take fsdp"
            )
            found.append((("data_parallel", "style"), sentence))
        if self.megatron and (named is None or _NAMES[_plain(named)] != "1f1b"):
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
        return named is not None and _NAMES.get(_plain(named)) == "dualpipe"

    def _two_gradients(self, context: Context) -> bool:
        given = None if self.gradient is None else context.tensors[self.gradient]
        return self.gradient is None or not self.reduce_copies or (isinstance(given, Mapping) and given.get("copies") == 2)

    def _named(self) -> str | None:
        """The schedule's name as asked for; None where it is a file or its lines."""
        return None if isinstance(self.schedule, list) or self.schedule.lower().endswith(".csv") else self.schedule

    def _refused_name(self, named: str) -> list[Refusal]:
        if _plain(named) in _NAMES:
            return (
                []
                if self.micro_batches is not None
                else [(("micro_batches",), f"micro_batches: how many {named} has is missing")]
            )
        message = f"unknown schedule {named}; known are {listing(BUILDERS)}, or a file that ends in .csv{near(named, BUILDERS)}"
        return [(("schedule",), message)]

    def _refused_layout(self, named: str | None, ranks: int) -> list[Refusal]:
        if named is None:
            extra = (("chunks",), "a schedule from a file says itself how many stages a rank has; leave chunks out")
            return [extra] if self.chunks is not None else []
        name, count = _NAMES[_plain(named)], self.micro_batches or 0
        low, high = _CHUNKS.get(name, (1, 2**20))
        chunks = self._chunks(name)
        found: list[Refusal] = []
        if not low <= chunks <= high:
            stages = "one stage" if high == 1 else "two stages"
            remedy = "; interleaved_1f1b, looped_bfs and zb1p take any number" if high == 1 else ""
            found.append((("chunks",), f"{name} has {stages} per rank, found chunks: {chunks}{remedy}"))
        least = {"1f1b": 1 if self.megatron or self.evaluate else ranks, "dualpipe_v": 2 * ranks}.get(name, 1)
        if count < least:
            message = f"{name} needs at least as many micro-batches as stages, found {count} for {least} stages"
            message += "; Megatron-LM runs it so: megatron: true" if name == "1f1b" else ""
            found.append((("micro_batches",), message))
        elif name in _EVEN and not per_round(ranks, count):
            rounds = count // ranks
            dealt = f"{name} deals {count} micro-batches out in {rounds} rounds of {ranks} or more"
            message = f"{dealt}, and {rounds} does not divide {count}{_nearest(ranks, count)}"
            found.append((("micro_batches",), message))
        found += refused(ranks, count, dict(self)) if name == "dualpipe" and not found else ()
        if self.defer_pp_recv and name in ("gpipe", "1f1b"):
            found.append((("defer_pp_recv",), f"{name} has no receives to defer; PyTorch's class does not take the argument"))
        return found

    def _refused_costs(self, schedule: Schedule) -> list[Refusal]:
        found: list[Refusal] = []
        for field in ("forward", "backward", "backward_input", "backward_weight", "last_backward"):
            given: StageCosts | None = getattr(self, field)
            strange = [stage for stage in given or () if isinstance(stage, int) and stage >= schedule.length]
            if strange:
                found.append(((field, strange[0]), f"there is no stage {strange[0]}; the stages are 0 to {schedule.length - 1}"))
            missing = [s for s in range(schedule.length) if given and s not in given and "else" not in given]
            if missing:
                found.append(((field,), f"stage {missing[0]} has no entry, and there is no `else`"))
        halves = (self.backward_input is None) + (self.backward_weight is None)
        if halves == 1 or (halves == 2 and self.backward is None):
            found.append((("backward",), "expected `backward`, or both `backward_input` and `backward_weight`"))
        if not found and halves == 2 and _splits(schedule) and not all(_halves(c) for c in (self.backward or {}).values()):
            message = (
                "the schedule splits the backward: expected a time that can be halved, or `backward_input` and `backward_weight`"
            )
            found.append((("backward",), message))
        return found + (self._refused_pairs(schedule) if self.overlapped is not None else [])

    def _refused_pairs(self, schedule: Schedule) -> list[Refusal]:
        """Whether forwards and backwards can be given less time beside each other."""
        if not any(action.parts for row in schedule.rows for action in row):
            return [(("overlapped",), "the schedule overlaps no forward with a backward; dualpipe and dualpipe_v do")]
        if self.data_parallel is not None or self.last_backward is not None:
            return [
                (
                    ("overlapped",),
                    "overlapped goes with plain forward and backward times, not with data_parallel or last_backward",
                )
            ]
        times = [_halves(cost) for field in (self.forward, self.backward or {"else": {}}) for cost in field.values()]
        return (
            []
            if all(times)
            else [(("overlapped",), "overlapped needs forward and backward as times, whose share of it each keeps")]
        )

    # --- the schedule ---
    def _chunks(self, name: str) -> int:
        if self.chunks is not None:
            return self.chunks
        return 1 if name in ("gpipe", "1f1b", "zb1p") else 2

    def made(self, context: Context) -> Schedule:
        """The schedule with its messages. Raises ValueError with what is wrong with a file's schedule."""
        ranks, named = context.mesh[self.axis], self._named()
        if named is not None:
            name = _NAMES[_plain(named)]
            layout = name, ranks, self.micro_batches or 0, self._chunks(name)
            found = _built(*layout, megatron=self.megatron and name == "1f1b", defer=self.defer_pp_recv)
            return forwards(found) if self.evaluate else found
        schedule = from_rows(parse_rows(self._lines(context)), self.micro_batches)
        if schedule.ranks != ranks:
            raise ValueError(f"the schedule is for {schedule.ranks} ranks, the axis {self.axis} has {ranks}")
        found = with_messages(schedule, self.defer_pp_recv)
        return forwards(found) if self.evaluate else found

    def _lines(self, context: Context) -> Sequence[str]:
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

    def costs(self, schedule: Schedule) -> dict[tuple[str, int], Cost]:
        """What each kind of action costs on each stage."""
        found: dict[tuple[str, int], Cost] = {}
        split = not self.evaluate and (_splits(schedule) or self.backward is None)
        for stage in range(schedule.stages):
            here = stage % schedule.length
            found["F", stage] = _at(self.forward, here)
            if self.backward is not None:
                found["B", stage] = _at(self.backward, here)
            if self.backward_input is not None and self.backward_weight is not None:
                found["I", stage], found["W", stage] = _at(self.backward_input, here), _at(self.backward_weight, here)
            elif split:
                found["I", stage], found["W", stage] = _halves(found["B", stage]) or ({}, {})
            if self.last_backward is not None:
                found["L", stage] = _at(self.last_backward, here)
        return found

    # --- the entries ---
    def expand(self, context: Context) -> Expansion:
        schedule, prefix = self.made(context), context.prefix("pipeline")
        chunks = max(len(schedule.stages_of(rank)) for rank in range(schedule.ranks))
        gradients, tensors = self._tensors(prefix, chunks, schedule.micro_batches, context)
        fields = self.data_parallel
        data = None if fields is None else _stages(fields)(fields, context, prefix, chunks)
        layout = Layout(schedule, self.axis, prefix, self.costs(schedule), gradients, self.numbered, data, self.overlapped)
        writers = [RankWriter(layout, rank) for rank in range(schedule.ranks)]
        before = [self._before(writer) for writer in writers]
        rows = [writer.entries(calls_of(schedule, rank)) for rank, writer in enumerate(writers)]
        groups: dict[str, Entry] = {}
        if schedule.directions > 1 and self.reduce_copies and not self.evaluate:
            groups = {f"{prefix}_copies": pair_group(self.axis, context)}
        end = [step("all_reduce", tensor=name, group=group) for group in groups for name in gradients]
        start = [*(data.setup() if data is not None else ()), *blocks(before, self.axis)]
        if start and context.iterations > 1:
            start = [block(start, "iteration == 0")]
        return Expansion([*start, *blocks(rows, self.axis), *end], tensors | (data.tensors if data is not None else {}), groups)

    def _before(self, writer: RankWriter) -> list[Entry]:
        if not self.shapes_exchange:
            return []
        ways = "F" if self.evaluate else "FB"
        told = shapes(writer, self.activation.shape, self.activation.dtype, ways) if self.shapes_exchange is True else []
        return [*vote(writer), *told]

    def _tensors(self, prefix: str, chunks: int, micro_batches: int, context: Context) -> tuple[list[str], dict[str, Entry]]:
        """The names of the chunks' gradients; and what is declared."""
        first = f"{prefix}_input"
        found = {first: declared(self.activation.shape, self.activation.dtype) | {"copies": chunks * micro_batches}}
        found |= {f"{prefix}_{word}": {"like": first} for word in ("output", "output_grad", "input_grad")}
        name, many = self.gradient or f"{prefix}_weight_grad", chunks > 1
        if self.gradient is not None:
            given = context.tensors[name]
            many = many and isinstance(given, Mapping) and "copies" in given
        elif self.data_parallel is None:
            found[name] = {"shape": [1], **({"copies": chunks} if many else {})}
        return [f"{name}@{c}" if many else name for c in range(chunks)], found


def _nearest(ranks: int, count: int) -> str:
    """Counts of micro-batches on either side that come out even."""
    fewer = next((n for n in range(count - 1, ranks - 1, -1) if per_round(ranks, n)), None)
    more = next(n for n in range(count + 1, 2 * count + ranks + 1) if per_round(ranks, n))
    return f"; {more} would do" if fewer is None else f"; {fewer} or {more} would do"


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())


def _stages(fields: DataFields) -> type[DataWriter]:
    return DdpStages if fields.style == "ddp" else ShardedStages


def _splits(schedule: Schedule) -> bool:
    return any(action.kind == "W" for row in schedule.rows for action in computes(row))


def _at(costs: StageCosts, stage: int) -> Cost:
    return costs[stage] if stage in costs else costs["else"]


def _halves(cost: Cost) -> tuple[Cost, Cost] | None:
    """A time in two halves; None for what is not a time."""
    if not isinstance(cost, Mapping) or "time" not in cost:
        return None
    whole = units.parse_duration_ns(cost["time"])
    return {**cost, "time": units.duration_text(whole // 2)}, {**cost, "time": units.duration_text(whole - whole // 2)}
