"""`distsim plan`: which layout of a training step is fastest, and which fit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.app import taking
from distsim.cli.simulate import Format, FormatOption
from distsim.cli.sweep import Workers, names_of

if TYPE_CHECKING:
    from distsim.cluster import Cluster as Machines
    from distsim.planning.layouts import Question
    from distsim.planning.plan import Plan

Model = Annotated[str, typer.Argument(metavar="MODEL", help="A preset (llama3-8b), or sizes as '{layers: 32, …}'.")]
Gpus = Annotated[str, typer.Option("--gpus", metavar="N,M", help="How many GPUs there are.")]
Cluster = Annotated[str, typer.Option("--cluster", metavar="A,B", help="Which: presets or files.")]
Batch = Annotated[int, typer.Option("--global-batch", metavar="N", min=1, help="Sequences of a step, whatever the layout.")]
Sequence = Annotated[
    int | None, typer.Option("--sequence", metavar="N", min=1, help="Tokens of a sequence; left out: the model's.")
]
PerNode = Annotated[
    int | None, typer.Option("--ranks-per-node", metavar="N", min=1, help="GPUs of a machine; left out, the preset's, or 8.")
]
Only = Annotated[
    list[str] | None,
    typer.Option(
        "--only", metavar="KEY=A,B", help="Look at these values only: tp, pp, chunks, cp, ep, zero, recompute, micro_batch."
    ),
]
Steps = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A field of `transformer:`, as launch=0 ns. Repeatable.")
]
Outputs = Annotated[
    list[Path] | None,
    typer.Option(
        "--output", "-o", metavar="F", help="F.csv, F.parquet: all layouts; F.svg: a plot; F.yaml: the best as a scenario."
    ),
]
#: Fields of a step that layouts decide.
_DECIDED = ("model", "micro_batch", "micro_batches", "zero", "recompute", "schedule", "chunks", "sequence")
#: Endings of outputs.
_ENDINGS = (".csv", ".parquet", ".svg", ".yaml", ".yml")


@dataclass(frozen=True)
class PlanOptions:
    """The arguments of `plan`."""

    model: Model
    gpus: Gpus
    cluster: Cluster
    global_batch: Batch
    sequence: Sequence = None
    ranks_per_node: PerNode = None
    only: Only = None
    sets: Steps = None
    output: Outputs = None
    format: FormatOption = Format.text


@taking(PlanOptions, Workers)
def command(given: PlanOptions, workers: Workers) -> None:
    """Find the fastest layout of a transformer's training step.

    Every layout of tensor, pipeline (1F1B, interleaved), context, expert and data parallelism, ZeRO stage, recomputation and micro-batch
    that keeps the global batch is checked for its memory and for hangs, and timed. Ends with 1 where none fits.

    \b
    Example: distsim plan llama3-8b --gpus 8 --cluster dgx-h100 --global-batch 64
    """
    from distsim.cli.progress import counted
    from distsim.planning.plan import How, plan
    from distsim.views.planview import plan_json, plan_text

    outputs = _outputs(given.output or [])
    questions = [_question(given, gpus, name) for gpus in _numbers(given.gpus) for name in _clusters(given.cluster)]
    tables = [path for path in outputs if path.suffix in (".csv", ".parquet")]
    how = How(workers.jobs, workers.address, tables[0] if tables else None, workers.budget, workers.seed, workers.top)
    with counted("timing layouts") as tell:
        found = plan(questions, how, tell)
    _write(found, [path for path in outputs if path not in tables], _names(given))
    console.out(console.to_json(plan_json(found)) if given.format is Format.json else plan_text(found, workers.top))
    raise typer.Exit(int(found.best is None))


def _outputs(paths: list[Path]) -> list[Path]:
    from distsim.errors import UsageError

    for path in paths:
        if path.suffix not in _ENDINGS:
            raise UsageError(f"-o {path}: what is it to be?", "end it in .csv, .parquet, .svg or .yaml")
    if sum(path.suffix in (".csv", ".parquet") for path in paths) > 1:
        raise UsageError("-o: one table is kept", "name one file that ends in .csv or .parquet")
    return paths


def _numbers(text: str) -> list[int]:
    from distsim.errors import UsageError

    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdigit() and 0 < int(word) <= 2**17 for word in words):
        raise UsageError(f"--gpus {text}: expected numbers from 1 to 131072", "as --gpus 64 or --gpus 64,128")
    return list(dict.fromkeys(map(int, words)))


def _clusters(text: str) -> tuple[str, ...]:
    from distsim.errors import UsageError

    names = names_of(text)
    if not names:
        raise UsageError("--cluster: expected a preset or a file", "`distsim clusters` lists the presets")
    return names


def _names(given: PlanOptions) -> dict[str, str]:
    """Names of clusters -> what the command called them."""
    return {_cluster(name).name: name for name in _clusters(given.cluster)}


def _cluster(name: str) -> Machines:
    from distsim.cli.replay import read_cluster
    from distsim.cluster import cluster_from

    return cluster_from(read_cluster(name) or name)


def _question(given: PlanOptions, gpus: int, cluster: str) -> Question:
    from distsim.cluster.presets import gpus_of_a_machine
    from distsim.errors import UsageError
    from distsim.planning.layouts import Question

    fields = _fields(given.sets or [])
    decided = [key for key in fields if key in _DECIDED]
    if decided:
        remedy = "--only zero=1 looks at some values alone; --sequence has its own option"
        raise UsageError(f"--set {decided[0]}: the layouts decide that", remedy)
    model, choices = _model(given.model), _choices(given.only or [])
    machines = _cluster(cluster)
    per_node = _machine(gpus, given.ranks_per_node or gpus_of_a_machine(machines.name))
    return Question(model, gpus, given.global_batch, machines, given.sequence, per_node, fields, choices)


def _machine(gpus: int, per_node: int) -> int:
    """The GPUs of a machine, of which there have to be whole ones, or a part of one."""
    from distsim.errors import UsageError

    if gpus > per_node and gpus % per_node:
        least, most = gpus // per_node * per_node, -(-gpus // per_node) * per_node
        others = [n for n in range(per_node, 1, -1) if gpus % n == 0]
        remedy = f"--gpus {least} or {most}" + (f", or --ranks-per-node {others[0]}" if others else "")
        raise UsageError(f"--gpus {gpus}: these are no whole machines of {per_node} GPUs", remedy)
    return per_node


def _model(text: str) -> str | Mapping[str, object]:
    """A preset's name, or a mapping's text."""
    if not text.lstrip().startswith("{"):
        return text
    from distsim.scenario import raw

    found: dict[str, object] = raw(f"model: {text}", "MODEL")["model"]
    return dict(found)


def _fields(sets: list[str]) -> dict[str, object]:
    from distsim.errors import UsageError
    from distsim.scenario import raw

    found: dict[str, object] = {}
    for text in sets:
        name, equals, value = text.partition("=")
        if not equals:
            raise UsageError(f"expected name=value, found `{text}`", "as --set 'launch=0 ns'")
        found[name.strip()] = raw(f"value: {value}", "--set")["value"]
    return found


def _choices(given: list[str]) -> dict[str, tuple[str | int, ...]]:
    from distsim.errors import UsageError
    from distsim.names import listing, near
    from distsim.planning.layouts import Layout

    found: dict[str, tuple[str | int, ...]] = {}
    known = [name for name in Layout._fields if name != "gpus"]
    for text in given:
        name, _, values = text.partition("=")
        words = names_of(values)
        if name not in known or not words:
            raise UsageError(
                f"--only {text}: expected one of {listing(known)} and its values{near(name, known)}", "as --only tp=1,2"
            )
        if name == "recompute":
            wrong = [word for word in words if word not in ("none", "selective", "op", "full")]
            found[name] = words
        else:
            least, most = (0, 3) if name == "zero" else (1, 2**17)
            wrong = [word for word in words if not (word.isascii() and word.isdigit() and least <= int(word) <= most)]
            found[name] = () if wrong else tuple(map(int, words))
        if wrong:
            raise UsageError(f"--only {text}: {wrong[0]} is no value of {name}", "as --only tp=1,2 or --only recompute=none")
    return found


def _write(plan: Plan, paths: list[Path], names: Mapping[str, str]) -> None:
    """Pictures, and the best layout as a scenario."""
    from distsim.scenario.document import write
    from distsim.views.planview import plan_svg

    for path in paths:
        if path.suffix == ".svg":
            console.write_file(path, plan_svg(plan))
        elif plan.best is not None:
            question = plan.question(plan.best)
            console.write_file(path, write(question.scenario(plan.best.layout, names[plan.best.cluster])))
        else:
            console.note(f"{path} is not written: no layout fits")
            continue
        console.note(f"wrote {path}")
