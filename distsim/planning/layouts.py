"""The layouts of a training step on so many GPUs, and those that can't be, with the reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import product
from math import prod
from typing import Any, NamedTuple

from pydantic import ValidationError

from distsim.backends import DEVICE_BACKEND
from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean, name_list
from distsim.hardware.cluster import Cluster
from distsim.scenario.strategies.base import ExpansionContext
from distsim.scenario.strategies.training_step.micro_batch_cost import MicroBatchCost, step_flops
from distsim.scenario.strategies.training_step.presets import PRESETS, Architecture
from distsim.scenario.strategies.training_step.transformer import Transformer
from distsim.scenario.strategies.training_step.transformer_fields import ArchitectureFields

#: Axes of the mesh from the outermost in, as Megatron-LM lays them out
#: (`distsim.scenario.strategies.training_step.hybrid.MESH_AXIS_ORDERS`).
MESH_AXES = ("pp", "dp", "ep", "cp", "tp")
#: A context rank keeps at least so many tokens of a sequence, unless sizes of `cp` are asked for.
_MIN_TOKENS = 8192


class ParallelLayout(NamedTuple):
    """One way to lay a step out. ``chunks`` above 1: an interleaved schedule."""

    gpus: int
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1
    recompute: str = "none"
    micro_batch: int = 1

    @property
    def dp(self) -> int:
        """Replicas, but for those among which experts are dealt out."""
        return self.gpus // (self.tp * self.pp * self.cp * self.ep)

    @property
    def mesh(self) -> dict[str, int]:
        """The axes of more than one rank."""
        found = {axis: int(getattr(self, axis)) for axis in MESH_AXES}
        return {axis: size for axis, size in found.items() if size > 1} or {"dp": 1}

    def label(self) -> str:
        """`dp8 tp4 pp2x2 z1 b2 full`: two replicas … and two stages a rank, ZeRO 1, micro-batches
        of 2, all recomputed.
        """
        axes = [
            f"{axis}{getattr(self, axis)}"
            for axis in ("dp", "tp", "cp", "ep")
            if getattr(self, axis) > 1
        ]
        pipe = (
            [f"pp{self.pp}" + (f"x{self.chunks}" if self.chunks > 1 else "")] if self.pp > 1 else []
        )
        again = [] if self.recompute == "none" else [self.recompute]
        return " ".join([*axes, *pipe, f"z{self.zero}", f"b{self.micro_batch}", *again])


class RejectedLayout(NamedTuple):
    """A layout that is left out, and why."""

    layout: ParallelLayout
    reason: str


@dataclass(frozen=True)
class PlanRequest:
    """What is to be laid out. ``model``: a preset's name, or sizes as `transformer: {model: …}`
    takes them; ``step``: further fields of it.

    ``choices``: the values of a `ParallelLayout`'s fields that are looked at; those that are left
    out are chosen by the model and the machines. Raises UsageError for a model or a field that is
    none.
    """

    model: str | Mapping[str, Any]
    gpus: int
    global_batch: int
    cluster: Cluster
    sequence: int | None = None
    per_node: int = 8
    step: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    #: What was refused, by what it hinges on.
    refusals: dict[object, str | None] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.fields(ParallelLayout(1))  # is it a model?

    @cached_property
    def base(self) -> Transformer:
        return self.fields(ParallelLayout(1))

    @property
    def architecture(self) -> Architecture:
        return self.base.model.architecture()

    @property
    def tokens(self) -> int:
        """Of a sequence."""
        return self.base.sequence or self.architecture.sequence

    @property
    def node(self) -> int:
        """Ranks of a machine."""
        return min(self.per_node, self.gpus)

    def fields(self, layout: ParallelLayout) -> Transformer:
        """The `transformer:` entry of a layout."""
        step: dict[str, Any] = {
            **self.step_of(layout),
            "model": self.model if isinstance(self.model, str) else dict(self.model),
        }
        try:
            return Transformer.model_validate(step)
        except ValidationError as errors:
            raise _model_error(self.model, errors) from None

    def step_of(self, layout: ParallelLayout) -> dict[str, Any]:
        """The fields that a layout decides, and those that were given."""
        replicas = layout.dp * layout.ep * layout.micro_batch
        found: dict[str, Any] = {
            "micro_batch": layout.micro_batch,
            "micro_batches": max(self.global_batch // replicas, 1) if layout.gpus > 1 else 1,
            "zero": layout.zero,
            "recompute": layout.recompute,
        }
        if self.sequence is not None:
            found["sequence"] = self.sequence
        if layout.tp > 1 and layout.zero < 3:
            found["tensor_calls"] = "megatron"
        if layout.pp > 1:
            found["schedule"] = "1f1b" if layout.chunks == 1 else "interleaved_1f1b"
            found |= {"chunks": layout.chunks} if layout.chunks > 1 else {}
        return {**found, **self.step}

    def context(self, layout: ParallelLayout) -> ExpansionContext:
        return ExpansionContext(
            layout.gpus,
            min(self.node, layout.gpus),
            layout.mesh,
            DEVICE_BACKEND,
            1,
            {},
            frozenset(),
        )

    def scenario(self, layout: ParallelLayout, cluster: str | Mapping[str, Any]) -> dict[str, Any]:
        """The layout as the plain data of a scenario file."""
        nodes = max(layout.gpus // self.node, 1)
        world = (
            {"nodes": nodes, "ranks_per_node": layout.gpus // nodes} if nodes > 1 else layout.gpus
        )
        model = self.model if isinstance(self.model, str) else dict(self.model)
        step = {"model": model, **self.step_of(layout)}
        name = f"{model if isinstance(model, str) else 'model'} {layout.label()}"
        return {
            "name": name,
            "world": world,
            "backend": DEVICE_BACKEND,
            "cluster": cluster,
            "mesh": layout.mesh,
            "program": [{"transformer": step}],
        }

    @cached_property
    def flops(self) -> int:
        """Model FLOPs of a step: three passes over every matrix, all scores counted, nothing
        recomputed (PaLM, arXiv:2204.02311, appendix B: 6 N + 12 L H Q T per token)."""
        return step_flops(MicroBatchCost(self.architecture, 1, self.tokens), self.global_batch)


def candidate_layouts(question: PlanRequest) -> Iterator[ParallelLayout | RejectedLayout]:
    """Every layout of a question's choices, in a fixed order. What can't be comes with its
    reason.
    """
    axes = ("tp", "pp", "cp", "ep")
    for sizes in product(*(_axis_sizes(question, axis) for axis in axes)):
        if question.gpus % prod(sizes):
            continue
        tp, pp, cp, ep = sizes
        layout = ParallelLayout(question.gpus, tp=tp, pp=pp, cp=cp, ep=ep)
        for rest in product(
            *(
                _field_choices(question, word, layout)
                for word in ("chunks", "micro_batch", "zero", "recompute")
            )
        ):
            chunks, micro_batch, zero, recompute = rest
            one = layout._replace(
                chunks=chunks, micro_batch=micro_batch, zero=zero, recompute=recompute
            )
            reason = rejection_reason(question, one)
            yield one if reason is None else RejectedLayout(one, reason)


def rejection_reason(question: PlanRequest, layout: ParallelLayout) -> str | None:
    """Why a layout can't be; None where it can."""
    one = layout.dp * layout.ep * layout.micro_batch
    if question.global_batch % one:
        whole = f"{layout.dp * layout.ep} replicas" + (
            f" x {layout.micro_batch} sequences" if layout.micro_batch > 1 else ""
        )
        return f"the global batch of {question.global_batch} is not divisible by {whole}"
    count = question.global_batch // one
    if layout.pp > 1 and layout.chunks > 1 and count % layout.pp:
        return f"{count} micro-batches are no multiple of the {layout.pp} ranks of an interleaved pipeline"
    enough = min(
        count, layout.pp
    )  # what else a schedule asks of their number is asked of as many as fill the pipeline
    alike = layout._replace(micro_batch=1, recompute="none", zero=3 if layout.zero == 3 else 1)
    key = (alike, enough if layout.pp > 1 else 1)
    if key not in question.refusals:
        train = question.fields(layout).model_copy(update={"micro_batches": key[1]})
        found = train.refuse(question.context(layout))
        question.refusals[key] = found[0][1] if found else None
    return question.refusals[key]


def _axis_sizes(question: PlanRequest, axis: str) -> Sequence[int]:
    """Sizes of an axis that divide the GPUs."""
    model = question.architecture
    if axis in question.choices:
        return question.choices[axis]
    if axis == "tp":
        joined = max(question.node, question.cluster.intra.domain or 1)
        return [
            n
            for n in _divisors(question.gpus)
            if n <= joined and model.heads % n == 0 and model.kv_heads % n == 0
        ]
    if axis == "pp":
        return [n for n in _divisors(question.gpus) if n <= model.layers + 2]
    if axis == "cp":
        return [
            n for n in _divisors(question.gpus) if n == 1 or question.tokens // n >= _MIN_TOKENS
        ]
    return [
        n for n in _divisors(question.gpus) if n == 1 or (model.experts and model.experts % n == 0)
    ]


def _field_choices(question: PlanRequest, word: str, layout: ParallelLayout) -> Sequence[Any]:
    """What else may be chosen for a mesh."""
    if word in question.choices:
        return question.choices[word] if word != "chunks" or layout.pp > 1 else (1,)
    if word == "chunks":
        layers = question.architecture.layers
        return (1, *(c for c in (2, 4) if layout.pp > 1 and layout.pp * c <= layers))
    if word == "micro_batch":
        return (1, 2, 4, 8)
    if word == "zero":
        return (1, 2) if layout.pp > 1 else (1, 2, 3)
    return ("none", "full")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _model_error(model: object, errors: ValidationError) -> UsageError:
    first = errors.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    if isinstance(model, str) and model not in PRESETS and where.startswith("model"):
        said = (
            f"unknown model {model}; presets are {name_list(PRESETS)}{did_you_mean(model, PRESETS)}"
        )
        return UsageError(
            said,
            "or sizes, as '{layers: 32, hidden: 4096, heads: 32, ffn: 14336, vocabulary: 128256}'",
        )
    if first["type"] == "extra_forbidden":
        *inside, last = where.split(".")
        fields = ArchitectureFields.model_fields if inside else Transformer.model_fields
        known = [key for key in fields if key != "model"]
        what = "a model" if inside else "a step"
        return UsageError(
            f"{what} has no field `{last}`{did_you_mean(last, known)}",
            f"{what} has {name_list(known, 40)}",
        )
    return UsageError(f"{where}: {str(first['msg']).removeprefix('Value error, ')}")


__all__ = [
    "MESH_AXES",
    "ParallelLayout",
    "RejectedLayout",
    "PlanRequest",
    "candidate_layouts",
    "rejection_reason",
]
