"""`distsim plan`: find the fastest layout of a training step that fits in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import FormatOption, OutputFormat, command_with_arguments
from distsim.cli.shared.worker_arguments import WorkerArguments, comma_separated_names

if TYPE_CHECKING:
    from distsim.api.results import PlanAnswer

ModelArgument = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="Model preset (llama3-8b), or sizes: '{layers: 32, …}'."),
]
GpusOption = Annotated[
    str,
    typer.Option("--gpus", metavar="N,M", help="Number of GPUs, or several numbers to compare."),
]
ClusterNamesOption = Annotated[
    str, typer.Option("--cluster", metavar="A,B", help="Hardware models (presets or files).")
]
BatchOption = Annotated[
    int,
    typer.Option(
        "--global-batch",
        metavar="N",
        min=1,
        help="Number of sequences per step, the same for every layout.",
    ),
]
SequenceOption = Annotated[
    int | None,
    typer.Option(
        "--sequence",
        metavar="N",
        min=1,
        help="Number of tokens per sequence. [default: the model's, at most 8192]",
    ),
]
PerNodeOption = Annotated[
    int | None,
    typer.Option(
        "--ranks-per-node",
        metavar="N",
        min=1,
        help="Number of GPUs per node. [default: the preset's, or 8]",
    ),
]
RestrictOption = Annotated[
    list[str] | None,
    typer.Option(
        "--restrict",
        metavar="KEY=A,B",
        help="Restrict the search to these values of tp, pp, chunks (stages per pipeline rank), "
        "cp, ep, zero, recompute, micro_batch, schedule or precision. Repeatable.",
    ),
]
MemoryReserveOption = Annotated[
    str | None,
    typer.Option(
        "--memory-reserve",
        metavar="SIZE",
        help="Memory per GPU for the CUDA context and NCCL, such as '2 GiB'. "
        "[default: estimated for each layout]",
    ),
]
FrameworkOption = Annotated[
    str | None,
    typer.Option(
        "--framework",
        metavar="NAME",
        help="Try only what this framework supports: megatron, torchtitan or deepseek. "
        "[default: what at least one of them supports]",
    ),
]
StepFieldsOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help=(
            "Set a field of the training step (`distsim explain transformer` lists them), "
            "such as 'launch=0 ns'. Repeatable."
        ),
    ),
]
OutputsOption = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F",
        help="Write all layouts (F.csv, F.parquet) or a plot (F.svg). Or write the fastest layout "
        "as a scenario (F.yaml), or the fastest one for torchtitan (F.toml) or Megatron-LM "
        "(F.args). Repeatable.",
    ),
]

_TABLE_SUFFIXES = (".csv", ".parquet")
_OUTPUT_SUFFIXES = (*_TABLE_SUFFIXES, ".svg", ".yaml", ".yml", ".toml", ".args")


@dataclass(frozen=True)
class PlanArguments:
    """The arguments of `plan`."""

    model: ModelArgument
    gpus: GpusOption
    cluster: ClusterNamesOption
    global_batch: BatchOption
    sequence: SequenceOption = None
    ranks_per_node: PerNodeOption = None
    restrict: RestrictOption = None
    memory_reserve: MemoryReserveOption = None
    framework: FrameworkOption = None
    sets: StepFieldsOption = None
    output: OutputsOption = None
    format: FormatOption = OutputFormat.text


@command_with_arguments(PlanArguments, WorkerArguments)
def command(arguments: PlanArguments, workers: WorkerArguments) -> None:
    """Find the fastest parallel layout for training a transformer.

    A layout combines tensor, pipeline, context, expert and data parallelism, pipeline schedule,
    ZeRO stage, recomputation, micro-batch size, and FP8 where the GPU supports it. For each layout,
    distsim checks the memory, searches for hangs, and predicts the step time. Exit status: 1 if no
    layout fits, otherwise 0.

    \b
    Example: distsim plan llama3-8b --gpus 8 --cluster dgx-h100 --global-batch 64
    """
    from distsim.api.functions import plan
    from distsim.cli.shared.progress import progress_bar

    outputs = arguments.output or []
    _check_outputs(outputs)
    # Rows of the table are written as they are computed; the other outputs follow at the end.
    table = next((path for path in outputs if path.suffix in _TABLE_SUFFIXES), None)
    with progress_bar("timing layouts") as show_progress:
        answer = plan(
            _parse_model(arguments.model),
            gpus=_parse_gpu_counts(arguments.gpus),
            cluster=_parse_cluster_names(arguments.cluster),
            global_batch=arguments.global_batch,
            sequence=arguments.sequence,
            ranks_per_node=arguments.ranks_per_node,
            step=_parse_step_fields(arguments.sets or []),
            choices=_parse_choices(arguments.restrict or []),
            memory_reserve=_parse_memory_reserve(arguments.memory_reserve),
            framework=arguments.framework,
            jobs=workers.jobs,
            address=workers.address,
            output=table,
            budget=workers.budget,
            seed=workers.seed,
            top=workers.top,
            progress=show_progress,
        )
    _write_outputs(answer, [path for path in outputs if path != table])
    if arguments.format is OutputFormat.json:
        console.out(console.to_json(answer.to_json()))
    else:
        console.out(answer.to_text())
    raise typer.Exit(int(answer.raw.best is None))


# --- arguments ---


def _check_outputs(paths: list[Path]) -> None:
    """Raises UsageError for an unknown suffix, or for several tables."""
    from distsim.common.errors import UsageError

    for path in paths:
        if path.suffix not in _OUTPUT_SUFFIXES:
            raise UsageError(
                f"-o {path}: unknown file type",
                "use a name that ends in .csv, .parquet, .svg, .yaml, .toml or .args",
            )
    if sum(path.suffix in _TABLE_SUFFIXES for path in paths) > 1:
        raise UsageError(
            "-o: only one table can be written", "name one file that ends in .csv or .parquet"
        )


def _parse_gpu_counts(text: str) -> list[int]:
    from distsim.common.errors import UsageError
    from distsim.planning.plan_request import MAX_GPUS, is_number

    words = [word.strip() for word in text.split(",")]
    if not all(is_number(word, 1, MAX_GPUS) for word in words):
        raise UsageError(
            f"--gpus {text}: expected numbers from 1 to {MAX_GPUS}",
            "for example --gpus 64 or --gpus 64,128",
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
            raise UsageError(
                f"expected name=value, found `{text}`", "for example --set 'launch=0 ns'"
            )
        step[name.strip()] = load_raw(f"value: {value}", "--set")["value"]
    return step


def _parse_choices(texts: list[str]) -> dict[str, tuple[str, ...]]:
    """The values of ``--restrict``: a field of the layout -> the values to try."""
    choices: dict[str, tuple[str, ...]] = {}
    for text in texts:
        name, _, values = text.partition("=")
        choices[name] = comma_separated_names(values)
    return choices


def _parse_memory_reserve(text: str | None) -> int | None:
    from distsim.common.errors import UsageError
    from distsim.common.units import parse_size_bytes

    if text is None:
        return None
    try:
        return parse_size_bytes(text)
    except ValueError as error:
        raise UsageError(
            f"--memory-reserve {text}: {error}", "for example --memory-reserve '2 GiB'"
        ) from None


# --- output ---


def _write_outputs(answer: PlanAnswer, paths: list[Path]) -> None:
    """Write the plot, and the best layout as a scenario or for a framework."""
    for path in paths:
        content = _output_content(answer, path.suffix)
        if content is None:
            console.note(
                f"{path} was not written, because no layout fits or the framework lacks it"
            )
            continue
        console.write_file(path, content)
        console.note(f"wrote {path}")


def _output_content(answer: PlanAnswer, suffix: str) -> str | bytes | None:
    """The content of a file with this suffix; None if no layout fits."""
    if suffix == ".svg":
        return answer.to_svg().content
    if suffix == ".toml":
        return answer.best_torchtitan_config()
    if suffix == ".args":
        return answer.best_megatron_arguments()
    return answer.best_scenario()
