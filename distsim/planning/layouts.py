"""Enumerates the parallel layouts of a training step, and rejects impossible ones with a reason.

The sizes of the mesh axes are chosen by the model and the machines unless the request states them.
Whether a layout is possible, the `transformer:` strategy decides itself, by the same checks as for
a scenario; nothing is simulated or timed here.
"""

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
from distsim.hardware.cost.memory_fit import memory_outside_torch
from distsim.planning.frameworks import (
    ANY_FRAMEWORK,
    FP8_DTYPE,
    FRAMEWORKS,
    PRECISIONS,
    SCHEDULE_NAMES,
    Framework,
)
from distsim.scenario.strategies.base import ExpansionContext
from distsim.scenario.strategies.training_step.architecture_fields import ArchitectureFields
from distsim.scenario.strategies.training_step.micro_batch_cost import MicroBatchCost, step_flops
from distsim.scenario.strategies.training_step.presets import PRESETS, Architecture
from distsim.scenario.strategies.training_step.transformer import Transformer
from distsim.scenario.strategies.training_step.transformer_fields import PAIR_SCHEDULES

#: Axes of the mesh from the outermost in, as Megatron-LM lays them out
#: (`distsim.scenario.strategies.training_step.hybrid.MESH_AXIS_ORDERS`).
MESH_AXES = ("pp", "dp", "ep", "cp", "tp")
#: A context rank keeps at least this many tokens of a sequence, unless sizes of `cp` are requested.
_MIN_TOKENS = 8192
#: The default length of a sequence, unless the model's maximum is shorter. Models are pre-trained
#: with 4096 or 8192 tokens, even if a later phase extends the context (Llama 3, arXiv:2407.21783,
#: section 3.4.1).
DEFAULT_SEQUENCE = 8192
#: The usual names of data parallelism by ZeRO stage.
_ZERO_NAMES = ("DDP", "ZeRO-1", "ZeRO-2", "FSDP")


class ParallelLayout(NamedTuple):
    """One way to distribute a step.

    ``chunks`` above 1 with `1f1b`: the interleaved schedule. ``precision``: that of the layers'
    matrix products, `bf16` (the dtype of the step) or `fp8`.
    """

    gpus: int
    tp: int = 1
    pp: int = 1
    chunks: int = 1
    cp: int = 1
    ep: int = 1
    zero: int = 1
    recompute: str = "none"
    micro_batch: int = 1
    schedule: str = "1f1b"
    precision: str = "bf16"

    @property
    def dp(self) -> int:
        """Replicas, without those among which experts are distributed (`ep`)."""
        return self.gpus // (self.tp * self.pp * self.cp * self.ep)

    @property
    def mesh(self) -> dict[str, int]:
        """The axes with more than one rank."""
        sizes = {axis: int(getattr(self, axis)) for axis in MESH_AXES}
        return {axis: size for axis, size in sizes.items() if size > 1} or {"dp": 1}

    def label(self) -> str:
        """The name in terms of PyTorch and Megatron, such as `ZeRO-1 DP8 TP4 PP2x2 b2`.

        It means 8 replicas that shard the optimizer's states, tensor parallelism of 4, 2 pipeline
        ranks of 2 stages each, and micro-batches of 2.
        """
        name = _ZERO_NAMES[self.zero]
        if self.dp == 1:
            # DDP with one replica is no data parallelism; ZeRO may still shard among other axes.
            words = [] if self.zero == 0 else [name]
        elif name.startswith("ZeRO"):
            words = [name, f"DP{self.dp}"]
        else:
            words = [f"{name}{self.dp}"]
        sizes = {"TP": self.tp, "CP": self.cp, "EP": self.ep}
        words += [f"{axis}{size}" for axis, size in sizes.items() if size > 1]
        if self.pp > 1:
            stages = f"x{self.chunks}" if self.chunks > 1 else ""
            words.append(f"PP{self.pp}{stages}")
            if self.schedule != "1f1b":
                words.append(SCHEDULE_NAMES[self.schedule])
        if self.precision == "fp8":
            words.append("FP8")
        words.append(f"b{self.micro_batch}")
        if self.recompute != "none":
            words.append(f"recompute={self.recompute}")
        return " ".join(words)


class RejectedLayout(NamedTuple):
    """A layout that is impossible, and why."""

    layout: ParallelLayout
    reason: str


@dataclass(frozen=True)
class PlanRequest:
    """The training step, machines and choices for which layouts are wanted.

    ``model``: a preset's name, or sizes as in `transformer: {model: …}`; ``step``: further fields
    of `transformer:`. ``choices``: the values of fields of `ParallelLayout` that are tried; the
    model and the machines determine those of other fields. ``reserve_nbytes``: memory of a rank
    that torch's allocator cannot use; None estimates it for each layout. ``framework``: a name in
    `FRAMEWORKS`. Raises UsageError for an unknown model or field.
    """

    model: str | Mapping[str, Any]
    gpus: int
    global_batch: int
    cluster: Cluster
    sequence: int | None = None
    per_node: int = 8
    step: Mapping[str, Any] = field(default_factory=dict)
    choices: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    reserve_nbytes: int | None = None
    framework: str | None = None
    #: Cache of `rejection_reason`, by the properties on which a rejection depends.
    refusals: dict[object, str | None] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        self.fields(ParallelLayout(1))  # raises for an unknown model or field

    @cached_property
    def base(self) -> Transformer:
        return self.fields(ParallelLayout(1))

    @property
    def architecture(self) -> Architecture:
        return self.base.model.architecture()

    @property
    def supported(self) -> Framework:
        """What the framework supports."""
        return ANY_FRAMEWORK if self.framework is None else FRAMEWORKS[self.framework]

    @property
    def precisions(self) -> Sequence[Any]:
        """The precisions that are tried: FP8 if the device has a rate for it."""
        if "precision" in self.choices:
            return self.choices["precision"]
        has_fp8 = FP8_DTYPE in self.cluster.device.peak
        decides = "matmul_dtype" not in self.step and not self.base.autocast
        return PRECISIONS if has_fp8 and decides else PRECISIONS[:1]

    @property
    def tokens(self) -> int:
        """Tokens of a sequence."""
        return self.base.sequence or self.architecture.sequence

    def memory_reserve(self, layout: ParallelLayout) -> int:
        """Bytes of a rank outside torch's allocator: CUDA context and NCCL buffers.

        A rank has one communicator for each axis of the mesh, and one for all ranks.
        """
        if self.reserve_nbytes is not None:
            return self.reserve_nbytes
        if layout.gpus == 1:
            communicators = 0
        elif len(layout.mesh) == 1:
            communicators = 1
        else:
            communicators = len(layout.mesh) + 1
        return memory_outside_torch(
            self.cluster.device, communicators, has_all_to_all=layout.ep > 1
        )

    @property
    def node(self) -> int:
        """Ranks of a node."""
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
        """The fields that a layout determines, and those of the request, which take precedence."""
        sequences_per_round = layout.dp * layout.ep * layout.micro_batch
        micro_batches = 1
        if layout.gpus > 1:
            micro_batches = max(self.global_batch // sequences_per_round, 1)
        step: dict[str, Any] = {
            "micro_batch": layout.micro_batch,
            "micro_batches": micro_batches,
            "zero": layout.zero,
            "recompute": layout.recompute,
        }
        if self.sequence is not None:
            step["sequence"] = self.sequence
        tensor_calls = self._tensor_calls(layout)
        if tensor_calls is not None:
            step["tensor_calls"] = tensor_calls
        if layout.pp > 1:
            is_interleaved = layout.schedule == "1f1b" and layout.chunks > 1
            step["schedule"] = "interleaved_1f1b" if is_interleaved else layout.schedule
            if is_interleaved:
                step["chunks"] = layout.chunks
        if layout.precision == "fp8":
            step["matmul_dtype"] = FP8_DTYPE
        if layout.ep * layout.cp * layout.tp > self.node and layout.ep > 1:
            # Libraries that send one copy of a token to each node need GPUs with FP8 (DeepEP).
            has_deepep = FP8_DTYPE in self.cluster.device.peak
            step["expert_dispatch"] = "deepep" if has_deepep else "all_to_all"
        return {**step, **self.step}

    def _tensor_calls(self, layout: ParallelLayout) -> str | None:
        """The library whose calls and kernels a layout uses; None: that of `transformer:`.

        Without a framework, FSDP is PyTorch's, and so are split backward passes with tensor
        parallelism; other layouts with tensor or expert parallelism use fused kernels.
        """
        if self.supported.tensor_calls is not None:
            return self.supported.tensor_calls
        if layout.zero == 3:
            return None
        if layout.tp > 1:
            return "megatron" if layout.schedule == "1f1b" else None
        return "megatron" if layout.ep > 1 and self.cluster.device.peak else None

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
        world: object = layout.gpus
        if nodes > 1:
            world = {"nodes": nodes, "ranks_per_node": layout.gpus // nodes}
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
        """Model FLOPs of a step, without recomputation.

        Three passes over every matrix, with all attention scores (PaLM, arXiv:2204.02311, appendix
        B: 6 N + 12 L H Q T per token).
        """
        return step_flops(MicroBatchCost(self.architecture, 1, self.tokens), self.global_batch)


def candidate_layouts(request: PlanRequest) -> Iterator[ParallelLayout | RejectedLayout]:
    """Every layout of a request's choices, in a fixed order; impossible ones with their reason."""
    axes = ("tp", "pp", "cp", "ep")
    for sizes in product(*(_axis_sizes(request, axis) for axis in axes)):
        if request.gpus % prod(sizes):
            continue
        tp, pp, cp, ep = sizes
        mesh = ParallelLayout(request.gpus, tp=tp, pp=pp, cp=cp, ep=ep)
        for schedule in _schedules(request, mesh):
            for layout in _layouts_with(request, mesh._replace(schedule=schedule)):
                reason = rejection_reason(request, layout)
                yield layout if reason is None else RejectedLayout(layout, reason)


def _layouts_with(request: PlanRequest, mesh: ParallelLayout) -> Iterator[ParallelLayout]:
    """The layouts of a mesh and a schedule."""
    fields = ("chunks", "micro_batch", "zero", "recompute", "precision")
    for choices in product(*(_field_choices(request, name, mesh) for name in fields)):
        yield mesh._replace(**dict(zip(fields, choices, strict=True)))


def rejection_reason(request: PlanRequest, layout: ParallelLayout) -> str | None:
    """Why a layout is impossible; None if it is possible."""
    replicas = layout.dp * layout.ep
    sequences_per_round = replicas * layout.micro_batch
    if request.global_batch % sequences_per_round:
        divisor = f"{replicas} replicas"
        if layout.micro_batch > 1:
            divisor += f" x {layout.micro_batch} sequences"
        return f"the global batch of {request.global_batch} is not divisible by {divisor}"
    micro_batches = request.global_batch // sequences_per_round
    is_interleaved = layout.pp > 1 and layout.chunks > 1 and layout.schedule == "1f1b"
    if is_interleaved and micro_batches % layout.pp:
        return (
            f"the number of micro-batches ({micro_batches}) is not a multiple of the number of "
            f"pipeline ranks ({layout.pp}), which the interleaved schedule requires"
        )
    # The strategy's own checks are slow, so their results are shared by layouts for which they are
    # equal: the sizes of micro-batches and recomputation do not matter, of ZeRO only stage 3, and
    # of the number of micro-batches only whether they fill the pipeline.
    enough = min(micro_batches, 2 * layout.pp + micro_batches % 2) if layout.pp > 1 else 1
    zero_stage = 3 if layout.zero == 3 else 1
    representative = layout._replace(
        micro_batch=1, recompute="none", zero=zero_stage, precision="bf16"
    )
    key = (representative, enough)
    if key not in request.refusals:
        step = request.fields(layout).model_copy(update={"micro_batches": enough})
        refusals = step.refuse(request.context(layout))
        request.refusals[key] = refusals[0][1] if refusals else None
    return request.refusals[key]


# --- choices ---


def _axis_sizes(request: PlanRequest, axis: str) -> Sequence[int]:
    """The sizes of an axis that are tried; unless requested, divisors of the number of GPUs."""
    if axis in request.choices:
        return request.choices[axis]
    model = request.architecture
    divisors = _divisors(request.gpus)
    if axis == "tp":
        # Tensor parallelism stays inside a machine or an NVLink domain.
        largest = max(request.node, request.cluster.intra.domain or 1)
        largest = min(largest, request.supported.max_tensor or largest)
        return [
            size
            for size in divisors
            if size <= largest and model.heads % size == 0 and model.kv_heads % size == 0
        ]
    if axis == "pp":
        return [size for size in divisors if size <= model.layers + 2]
    if axis == "cp":
        return [size for size in divisors if size == 1 or request.tokens // size >= _MIN_TOKENS]
    return [size for size in divisors if size == 1 or _divides_experts(model, size)]


def _divides_experts(model: Architecture, size: int) -> bool:
    return bool(model.experts) and model.experts % size == 0


def _schedules(request: PlanRequest, mesh: ParallelLayout) -> Sequence[Any]:
    """The schedules that are tried for a mesh."""
    if mesh.pp == 1:
        return ("1f1b",)
    if "schedule" in request.choices:
        return request.choices["schedule"]
    schedules = request.supported.schedules
    if mesh.ep > 1:
        return schedules
    # Only the messages of experts overlap in a pair, so DualPipe has no use without them.
    return tuple(name for name in schedules if name not in PAIR_SCHEDULES) or schedules


def _field_choices(request: PlanRequest, name: str, layout: ParallelLayout) -> Sequence[Any]:
    """The values of a field that are tried for a mesh with a schedule."""
    if name == "chunks" and (layout.pp == 1 or layout.schedule != "1f1b"):
        return (1,)
    if name == "precision":
        return request.precisions
    if name in request.choices:
        return request.choices[name]
    if name == "chunks":
        return (1, *_even_chunks(request.architecture.layers, layout.pp))
    if name == "micro_batch":
        return (1, 2, 4, 8)
    framework = request.supported
    if name == "zero":
        return tuple(stage for stage in framework.zero_stages if stage < 3 or layout.pp == 1)
    if layout.schedule in PAIR_SCHEDULES and not framework.pairs_recompute:
        return ("none",)
    return framework.recompute_experts if request.architecture.experts else framework.recompute


def _even_chunks(layers: int, ranks: int) -> list[int]:
    """About 2 and 4 stages per rank, with equal numbers of layers if that is possible.

    Megatron-LM's interleaved schedule needs equal stages; embedding and head may count as layers.
    """
    possible = range(2, layers // ranks + 1)
    even = [c for c in possible if layers % (ranks * c) == 0 or (layers + 2) % (ranks * c) == 0]
    wanted = (2, 4)
    if not even:
        return [chunks for chunks in wanted if chunks in possible]
    return sorted({min(even, key=lambda c: (abs(c - target), c)) for target in wanted})


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _model_error(model: object, errors: ValidationError) -> UsageError:
    """Pydantic's first error in the words of the command line."""
    first = errors.errors(include_url=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    is_unknown_preset = isinstance(model, str) and model not in PRESETS
    if is_unknown_preset and where.startswith("model"):
        return UsageError(
            f"unknown model {model}; presets are {name_list(PRESETS)}"
            f"{did_you_mean(str(model), PRESETS)}",
            "or pass sizes, for example "
            "'{layers: 32, hidden: 4096, heads: 32, ffn: 14336, vocabulary: 128256}'",
        )
    if first["type"] == "extra_forbidden":
        *parents, last = where.split(".")
        is_in_model = bool(parents)
        fields = ArchitectureFields.model_fields if is_in_model else Transformer.model_fields
        known = [key for key in fields if key != "model"]
        what = "a model" if is_in_model else "a step"
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
