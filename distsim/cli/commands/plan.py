"""`distsim plan`: find the fastest layout of a training step that fits in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import FormatOption, OutputFormat, command_with_arguments
from distsim.cli.shared.input_files import read_cluster
from distsim.cli.shared.worker_arguments import WorkerArguments, comma_separated_names

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster
    from distsim.planning.layouts import PlanRequest
    from distsim.planning.ranking import LayoutPlan

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A preset (llama3-8b), or sizes as '{layers: 32, …}'."),
]
GpusOption = Annotated[str, typer.Option("--gpus", metavar="N,M", help="How many GPUs there are.")]
ClusterNamesOption = Annotated[
    str, typer.Option("--cluster", metavar="A,B", help="Which: presets or files.")
]
BatchOption = Annotated[
    int,
    typer.Option(
        "--global-batch", metavar="N", min=1, help="Sequences of a step, whatever the layout."
    ),
]
SequenceOption = Annotated[
    int | None,
    typer.Option(
        "--sequence", metavar="N", min=1, help="Tokens of a sequence; left out: the model's."
    ),
]
PerNodeOption = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        metavar="N",
        min=1,
        help="GPUs of a machine; left out, the preset's, or 8.",
    ),
]
OnlyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--only",
        metavar="KEY=A,B",
        help="Look at these values only: tp, pp, chunks, cp, ep, zero, recompute, micro_batch.",
    ),
]
StepFieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A field of `transformer:`, as launch=0 ns. Repeatable."
    ),
]
OutputsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F",
        help="F.csv, F.parquet: all layouts; F.svg: a plot; F.yaml: the best as a scenario.",
    ),
]

#: Fields of `transformer:` that the layout decides, so that --set may not.
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
_TABLE_SUFFIXES = (".csv", ".parquet")
_OUTPUT_SUFFIXES = (*_TABLE_SUFFIXES, ".svg", ".yaml", ".yml")
_MAX_GPUS = 2**17
_RECOMPUTE_CHOICES = ("none", "selective", "op", "full")
_MAX_ZERO_STAGE = 3


@dataclass(frozen=True)
class PlanArguments:
    """The arguments of `plan`."""

    model: ModelArgument
    gpus: GpusOption
    cluster: ClusterNamesOption
    global_batch: BatchOption
    sequence: SequenceOption = None
    ranks_per_node: PerNodeOption = None
    only: OnlyOption = None
    sets: StepFieldsOption = None
    output: OutputsOption = None
    format: FormatOption = OutputFormat.text


@command_with_arguments(PlanArguments, WorkerArguments)
def command(arguments: PlanArguments, workers: WorkerArguments) -> None:
    """Find the fastest layout of a transformer's training step.

    Every layout of tensor, pipeline (1F1B, interleaved), context, expert and data parallelism, ZeRO
    stage, recomputation and micro-batch that keeps the global batch is checked for its memory and
    for hangs, and timed. Ends with 1 where none fits.

    \b
    Example: distsim plan llama3-8b --gpus 8 --cluster dgx-h100 --global-batch 64
    """
    from distsim.cli.shared.progress import progress_bar
    from distsim.output.text.layout_plan import layout_plan_json, layout_plan_text
    from distsim.planning.ranking import PlanOptions, plan_layouts

    outputs = arguments.output or []
    _check_outputs(outputs)
    requests = [
        _plan_request(arguments, gpus, cluster)
        for gpus in _parse_gpu_counts(arguments.gpus)
        for cluster in _parse_cluster_names(arguments.cluster)
    ]
    # Rows of the table are written as they are computed; the other outputs follow at the end.
    table = next((path for path in outputs if path.suffix in _TABLE_SUFFIXES), None)
    options = PlanOptions(
        jobs=workers.jobs,
        address=workers.address,
        output=table,
        budget=workers.budget,
        seed=workers.seed,
        exact=workers.top,
    )
    with progress_bar("timing layouts") as show_progress:
        plan = plan_layouts(requests, options, show_progress)
    others = [path for path in outputs if path != table]
    _write_outputs(plan, others, _cluster_labels(arguments))
    if arguments.format is OutputFormat.json:
        console.out(console.to_json(layout_plan_json(plan)))
    else:
        console.out(layout_plan_text(plan, workers.top))
    raise typer.Exit(int(plan.best is None))


# --- arguments ---


def _check_outputs(paths: list[Path]) -> None:
    """Raises UsageError for an unknown suffix, or for several tables."""
    from distsim.common.errors import UsageError

    for path in paths:
        if path.suffix not in _OUTPUT_SUFFIXES:
            raise UsageError(
                f"-o {path}: what is it to be?", "end it in .csv, .parquet, .svg or .yaml"
            )
    if sum(path.suffix in _TABLE_SUFFIXES for path in paths) > 1:
        raise UsageError("-o: one table is kept", "name one file that ends in .csv or .parquet")


def _is_number(word: str, low: int, high: int) -> bool:
    """Whether a word is a decimal number between two bounds (inclusive)."""
    return word.isascii() and word.isdigit() and low <= int(word) <= high


def _parse_gpu_counts(text: str) -> list[int]:
    from distsim.common.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(_is_number(word, 1, _MAX_GPUS) for word in words):
        raise UsageError(
            f"--gpus {text}: expected numbers from 1 to {_MAX_GPUS}",
            "as --gpus 64 or --gpus 64,128",
        )
    return list(dict.fromkeys(map(int, words)))


def _parse_cluster_names(text: str) -> tuple[str, ...]:
    from distsim.common.errors import UsageError

    names = comma_separated_names(text)
    if not names:
        raise UsageError(
            "--cluster: expected a preset or a file", "`distsim clusters` lists the presets"
        )
    return names


def _cluster_labels(arguments: PlanArguments) -> dict[str, str]:
    """The name of each cluster -> the preset or file that the command names it by."""
    names = _parse_cluster_names(arguments.cluster)
    return {_load_cluster(name).name: name for name in names}


def _load_cluster(name: str) -> Cluster:
    from distsim.hardware.cluster import cluster_from

    return cluster_from(read_cluster(name) or name)


def _plan_request(arguments: PlanArguments, gpus: int, cluster_name: str) -> PlanRequest:
    from distsim.common.errors import UsageError
    from distsim.hardware.cluster.presets import gpus_per_machine
    from distsim.planning.layouts import PlanRequest

    step = _parse_step_fields(arguments.sets or [])
    decided = [key for key in step if key in _LAYOUT_FIELDS]
    if decided:
        raise UsageError(
            f"--set {decided[0]}: the layouts decide that",
            "--only zero=1 looks at some values alone; --sequence has its own option",
        )
    model = _parse_model(arguments.model)
    choices = _parse_choices(arguments.only or [])
    cluster = _load_cluster(cluster_name)
    per_node = arguments.ranks_per_node or gpus_per_machine(cluster.name)
    _check_whole_machines(gpus, per_node)
    return PlanRequest(
        model,
        gpus,
        arguments.global_batch,
        cluster,
        sequence=arguments.sequence,
        per_node=per_node,
        step=step,
        choices=choices,
    )


def _check_whole_machines(gpus: int, per_node: int) -> None:
    """Raises UsageError if several machines are needed and one of them would be used in part."""
    from distsim.common.errors import UsageError

    if gpus <= per_node or gpus % per_node == 0:
        return
    fewer = gpus // per_node * per_node
    more = fewer + per_node
    remedy = f"--gpus {fewer} or {more}"
    divisors = [n for n in range(per_node, 1, -1) if gpus % n == 0]
    if divisors:
        remedy += f", or --ranks-per-node {divisors[0]}"
    raise UsageError(f"--gpus {gpus}: these are no whole machines of {per_node} GPUs", remedy)


def _parse_model(text: str) -> str | Mapping[str, object]:
    """The name of a preset, or the sizes in a YAML mapping."""
    if not text.lstrip().startswith("{"):
        return text
    from distsim.scenario import load_raw

    sizes: dict[str, object] = load_raw(f"model: {text}", "MODEL")["model"]
    return dict(sizes)


def _parse_step_fields(sets: list[str]) -> dict[str, object]:
    """The values of ``--set``, read as YAML."""
    from distsim.common.errors import UsageError
    from distsim.scenario import load_raw

    step: dict[str, object] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"expected name=value, found `{text}`", "as --set 'launch=0 ns'")
        step[name.strip()] = load_raw(f"value: {value}", "--set")["value"]
    return step


def _parse_choices(texts: list[str]) -> dict[str, tuple[str | int, ...]]:
    """The values of ``--only``: a field of the layout -> the values to try."""
    from distsim.common.errors import UsageError
    from distsim.common.message_text import did_you_mean, name_list
    from distsim.planning.layouts import ParallelLayout

    known = [name for name in ParallelLayout._fields if name != "gpus"]
    choices: dict[str, tuple[str | int, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        words = comma_separated_names(values)
        if name not in known or not words:
            raise UsageError(
                f"--only {text}: expected one of {name_list(known)} and its values"
                f"{did_you_mean(name, known)}",
                "as --only tp=1,2",
            )
        for word in words:
            if not _is_choice(name, word):
                raise UsageError(
                    f"--only {text}: {word} is no value of {name}",
                    "as --only tp=1,2 or --only recompute=none",
                )
        choices[name] = words if name == "recompute" else tuple(map(int, words))
    return choices


def _is_choice(field: str, word: str) -> bool:
    if field == "recompute":
        return word in _RECOMPUTE_CHOICES
    if field == "zero":
        return _is_number(word, 0, _MAX_ZERO_STAGE)
    return _is_number(word, 1, _MAX_GPUS)


# --- output ---


def _write_outputs(plan: LayoutPlan, paths: list[Path], labels: Mapping[str, str]) -> None:
    """Write the plot, and the best layout as a scenario."""
    from distsim.output.text.layout_plan import layout_plan_svg
    from distsim.scenario.format.source.yaml_nodes import dump_yaml

    for path in paths:
        if path.suffix == ".svg":
            console.write_file(path, layout_plan_svg(plan))
        elif plan.best is not None:
            request = plan.question(plan.best)
            scenario = request.scenario(plan.best.layout, labels[plan.best.cluster])
            console.write_file(path, dump_yaml(scenario))
        else:
            console.note(f"{path} is not written: no layout fits")
            continue
        console.note(f"wrote {path}")
