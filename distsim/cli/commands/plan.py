"""`distsim plan`: which layout of a training step is fastest, and which fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import command_with_arguments
from distsim.cli.commands.simulate import FormatOption, OutputFormat
from distsim.cli.commands.sweep import WorkerArguments, comma_separated_names
from distsim.cli.shared import console

if TYPE_CHECKING:
    from distsim.hardware.cluster import Cluster as Machines
    from distsim.planning.layouts import PlanRequest
    from distsim.planning.ranking import LayoutPlan

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A preset (llama3-8b), or sizes as '{layers: 32, …}'."),
]
Gpus = Annotated[str, typer.Option("--gpus", metavar="N,M", help="How many GPUs there are.")]
ClusterNames = Annotated[
    str, typer.Option("--cluster", metavar="A,B", help="Which: presets or files.")
]
Batch = Annotated[
    int,
    typer.Option(
        "--global-batch", metavar="N", min=1, help="Sequences of a step, whatever the layout."
    ),
]
SequenceLength = Annotated[
    int | None,
    typer.Option(
        "--sequence", metavar="N", min=1, help="Tokens of a sequence; left out: the model's."
    ),
]
PerNode = Annotated[
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
StepFields = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="A field of `transformer:`, as launch=0 ns. Repeatable."
    ),
]
Outputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F",
        help="F.csv, F.parquet: all layouts; F.svg: a plot; F.yaml: the best as a scenario.",
    ),
]
#: Fields of a step that layouts decide.
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
#: Endings of outputs.
_OUTPUT_SUFFIXES = (".csv", ".parquet", ".svg", ".yaml", ".yml")


@dataclass(frozen=True)
class PlanArguments:
    """The arguments of `plan`."""

    model: Model
    gpus: Gpus
    cluster: ClusterNames
    global_batch: Batch
    sequence: SequenceLength = None
    ranks_per_node: PerNode = None
    only: OnlyOption = None
    sets: StepFields = None
    output: Outputs = None
    format: FormatOption = OutputFormat.text


@command_with_arguments(PlanArguments, WorkerArguments)
def command(given: PlanArguments, workers: WorkerArguments) -> None:
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

    outputs = _check_outputs(given.output or [])
    questions = [
        _plan_request(given, gpus, name)
        for gpus in _parse_counts(given.gpus)
        for name in _parse_cluster_names(given.cluster)
    ]
    tables = [path for path in outputs if path.suffix in (".csv", ".parquet")]
    how = PlanOptions(
        workers.jobs,
        workers.address,
        tables[0] if tables else None,
        workers.budget,
        workers.seed,
        workers.top,
    )
    with progress_bar("timing layouts") as tell:
        found = plan_layouts(questions, how, tell)
    _write_outputs(found, [path for path in outputs if path not in tables], _cluster_labels(given))
    console.out(
        console.to_json(layout_plan_json(found))
        if given.format is OutputFormat.json
        else layout_plan_text(found, workers.top)
    )
    raise typer.Exit(int(found.best is None))


def _check_outputs(paths: list[Path]) -> list[Path]:
    from distsim.common.errors import UsageError

    for path in paths:
        if path.suffix not in _OUTPUT_SUFFIXES:
            raise UsageError(
                f"-o {path}: what is it to be?", "end it in .csv, .parquet, .svg or .yaml"
            )
    if sum(path.suffix in (".csv", ".parquet") for path in paths) > 1:
        raise UsageError("-o: one table is kept", "name one file that ends in .csv or .parquet")
    return paths


def _parse_counts(text: str) -> list[int]:
    from distsim.common.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 2**17 for word in words):
        raise UsageError(
            f"--gpus {text}: expected numbers from 1 to 131072", "as --gpus 64 or --gpus 64,128"
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


def _cluster_labels(given: PlanArguments) -> dict[str, str]:
    """Names of clusters -> what the command called them."""
    return {_load_cluster(name).name: name for name in _parse_cluster_names(given.cluster)}


def _load_cluster(name: str) -> Machines:
    from distsim.cli.commands.replay import read_cluster
    from distsim.hardware.cluster import cluster_from

    return cluster_from(read_cluster(name) or name)


def _plan_request(given: PlanArguments, gpus: int, cluster: str) -> PlanRequest:
    from distsim.common.errors import UsageError
    from distsim.hardware.cluster.presets import gpus_per_machine
    from distsim.planning.layouts import PlanRequest

    fields = _parse_step_fields(given.sets or [])
    decided = [key for key in fields if key in _LAYOUT_FIELDS]
    if decided:
        remedy = "--only zero=1 looks at some values alone; --sequence has its own option"
        raise UsageError(f"--set {decided[0]}: the layouts decide that", remedy)
    model, choices = _parse_model(given.model), _parse_choices(given.only or [])
    machines = _load_cluster(cluster)
    per_node = _gpus_per_node(gpus, given.ranks_per_node or gpus_per_machine(machines.name))
    return PlanRequest(
        model, gpus, given.global_batch, machines, given.sequence, per_node, fields, choices
    )


def _gpus_per_node(gpus: int, per_node: int) -> int:
    """The GPUs of a machine, of which there have to be whole ones, or a part of one."""
    from distsim.common.errors import UsageError

    if gpus > per_node and gpus % per_node:
        least, most = gpus // per_node * per_node, -(-gpus // per_node) * per_node
        others = [n for n in range(per_node, 1, -1) if gpus % n == 0]
        remedy = f"--gpus {least} or {most}" + (
            f", or --ranks-per-node {others[0]}" if others else ""
        )
        raise UsageError(f"--gpus {gpus}: these are no whole machines of {per_node} GPUs", remedy)
    return per_node


def _parse_model(text: str) -> str | Mapping[str, object]:
    """A preset's name, or a mapping's text."""
    if not text.lstrip().startswith("{"):
        return text
    from distsim.scenario import load_raw

    found: dict[str, object] = load_raw(f"model: {text}", "MODEL")["model"]
    return dict(found)


def _parse_step_fields(sets: list[str]) -> dict[str, object]:
    from distsim.common.errors import UsageError
    from distsim.scenario import load_raw

    found: dict[str, object] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"expected name=value, found `{text}`", "as --set 'launch=0 ns'")
        found[name.strip()] = load_raw(f"value: {value}", "--set")["value"]
    return found


def _parse_choices(given: list[str]) -> dict[str, tuple[str | int, ...]]:
    from distsim.common.errors import UsageError
    from distsim.common.message_text import did_you_mean, name_list
    from distsim.planning.layouts import ParallelLayout

    found: dict[str, tuple[str | int, ...]] = {}
    known = [name for name in ParallelLayout._fields if name != "gpus"]
    for text in given:
        name, _, values = text.partition("=")
        words = comma_separated_names(values)
        if name not in known or not words:
            raise UsageError(
                f"--only {text}: expected one of {name_list(known)} and its values{did_you_mean(name, known)}",
                "as --only tp=1,2",
            )
        if name == "recompute":
            wrong = [word for word in words if word not in ("none", "selective", "op", "full")]
            found[name] = words
        else:
            least, most = (0, 3) if name == "zero" else (1, 2**17)
            wrong = [
                word
                for word in words
                if not (word.isascii() and word.isdigit() and least <= int(word) <= most)
            ]
            found[name] = () if wrong else tuple(map(int, words))
        if wrong:
            raise UsageError(
                f"--only {text}: {wrong[0]} is no value of {name}",
                "as --only tp=1,2 or --only recompute=none",
            )
    return found


def _write_outputs(plan: LayoutPlan, paths: list[Path], names: Mapping[str, str]) -> None:
    """Pictures, and the best layout as a scenario."""
    from distsim.output.text.layout_plan import layout_plan_svg
    from distsim.scenario.format.source.yaml_nodes import dump_yaml

    for path in paths:
        if path.suffix == ".svg":
            console.write_file(path, layout_plan_svg(plan))
        elif plan.best is not None:
            question = plan.question(plan.best)
            console.write_file(
                path, dump_yaml(question.scenario(plan.best.layout, names[plan.best.cluster]))
            )
        else:
            console.note(f"{path} is not written: no layout fits")
            continue
        console.note(f"wrote {path}")
