"""Checks of a request for a plan, before any layout is timed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from distsim.common.errors import UsageError
from distsim.common.message_text import did_you_mean, name_list
from distsim.hardware.cluster import Cluster
from distsim.hardware.cluster.presets import gpus_per_machine
from distsim.planning.frameworks import FP8_DTYPE, FRAMEWORKS, PRECISIONS, SCHEDULES
from distsim.planning.layouts import DEFAULT_SEQUENCE, ParallelLayout, PlanRequest

MAX_GPUS = 2**17
_MAX_GLOBAL_BATCH = 10**9
#: Fields of `transformer:` that the layout decides, so that a request may not.
_LAYOUT_FIELDS = (
    "model",
    "micro_batch",
    "micro_batches",
    "zero",
    "recompute",
    "schedule",
    "chunks",
    "sequence",
)
#: The values of the layout's fields that are words.
_WORD_CHOICES = {
    "recompute": ("none", "selective", "modules", "op", "full"),
    "schedule": SCHEDULES,
    "precision": PRECISIONS,
}
_MAX_ZERO_STAGE = 3


def checked_plan_request(
    model: str | Mapping[str, Any],
    gpus: int,
    cluster: Cluster,
    global_batch: int,
    *,
    sequence: int | None = None,
    ranks_per_node: int | None = None,
    step: Mapping[str, Any] | None = None,
    choices: Mapping[str, Sequence[Any]] | None = None,
) -> PlanRequest:
    """The request for the layouts of a step.

    ``sequence``: by default the model's maximum, but at most `DEFAULT_SEQUENCE`.
    ``ranks_per_node``: by default that of the cluster's preset. Raises UsageError for a number of
    GPUs that fills no whole nodes, a field that the layouts decide, and an impossible choice.
    """
    decided = [key for key in step or {} if key in _LAYOUT_FIELDS]
    if decided:
        raise UsageError(
            f"--set {decided[0]}: each layout decides this field",
            "use --restrict zero=1 to fix a value, and --sequence for the sequence length",
        )
    if not 1 <= global_batch <= _MAX_GLOBAL_BATCH:
        raise UsageError(
            f"--global-batch {global_batch}: expected a number from 1 to {_MAX_GLOBAL_BATCH}",
            "for example --global-batch 512",
        )
    layout_choices = _checked_choices(choices or {})
    _check_precisions(layout_choices, cluster)
    per_node = ranks_per_node or gpus_per_machine(cluster.name)
    _check_gpu_count(gpus, per_node)
    request = PlanRequest(
        model,
        gpus,
        global_batch,
        cluster,
        sequence=sequence,
        per_node=per_node,
        step=step or {},
        choices=layout_choices,
    )
    if sequence is None and request.tokens > DEFAULT_SEQUENCE:
        return replace(request, sequence=DEFAULT_SEQUENCE)
    return request


def is_number(word: str, low: int, high: int) -> bool:
    """Whether a word is a decimal number between two bounds (inclusive)."""
    return word.isascii() and word.isdigit() and low <= int(word) <= high


def _check_gpu_count(gpus: int, per_node: int) -> None:
    """Raises UsageError if several nodes are needed and one of them would be used in part."""
    if not 1 <= gpus <= MAX_GPUS:
        raise UsageError(
            f"--gpus {gpus}: expected numbers from 1 to {MAX_GPUS}",
            "for example --gpus 64 or --gpus 64,128",
        )
    if gpus <= per_node or gpus % per_node == 0:
        return
    fewer = gpus // per_node * per_node
    more = fewer + per_node
    remedy = f"--gpus {fewer} or {more}"
    divisors = [n for n in range(per_node, 1, -1) if gpus % n == 0]
    if divisors:
        remedy += f", or --ranks-per-node {divisors[0]}"
    raise UsageError(f"--gpus {gpus}: does not fill whole nodes of {per_node} GPUs", remedy)


def for_framework(request: PlanRequest, framework: str) -> PlanRequest:
    """The request for what one framework supports.

    Raises UsageError for an unknown framework, and for a chosen schedule that it lacks.
    """
    if framework not in FRAMEWORKS:
        raise UsageError(
            f"--framework {framework}: expected {name_list(FRAMEWORKS)}"
            f"{did_you_mean(framework, FRAMEWORKS)}",
            "without --framework, plan tries what any framework supports",
        )
    supported = FRAMEWORKS[framework]
    for schedule in request.choices.get("schedule", ()):
        if schedule not in supported.schedules:
            raise UsageError(
                f"--restrict schedule={schedule}: {supported.title} does not have it",
                f"{supported.title} has {name_list(supported.schedules)}",
            )
    return replace(request, framework=framework)


def _check_precisions(choices: Mapping[str, Sequence[Any]], cluster: Cluster) -> None:
    """Raises UsageError for FP8 on a device without a rate for it."""
    device = cluster.device
    if "fp8" in choices.get("precision", ()) and FP8_DTYPE not in device.peak:
        raise UsageError(
            f"--restrict precision=fp8: {device.name or cluster.name} has no rate for FP8",
            "use --restrict precision=bf16, or a cluster with H100 or newer GPUs",
        )


def _checked_choices(choices: Mapping[str, Sequence[Any]]) -> dict[str, tuple[str | int, ...]]:
    """The values of the layout's fields that are tried, numbers as integers."""
    known = [name for name in ParallelLayout._fields if name != "gpus"]
    checked: dict[str, tuple[str | int, ...]] = {}
    for name, values in choices.items():
        words = tuple(str(value) for value in values)
        text = f"{name}={','.join(words)}"
        if name not in known or not words:
            raise UsageError(
                f"--restrict {text}: expected one of {name_list(known)} and its values"
                f"{did_you_mean(name, known)}",
                "for example --restrict tp=1,2",
            )
        for word in words:
            if not _is_choice(name, word):
                raise UsageError(
                    f"--restrict {text}: {word} is not a value of {name}",
                    "for example --restrict tp=1,2 or --restrict recompute=none",
                )
        checked[name] = words if name in _WORD_CHOICES else tuple(map(int, words))
    return checked


def _is_choice(field: str, word: str) -> bool:
    if field in _WORD_CHOICES:
        return word in _WORD_CHOICES[field]
    if field == "zero":
        return is_number(word, 0, _MAX_ZERO_STAGE)
    return is_number(word, 1, MAX_GPUS)
