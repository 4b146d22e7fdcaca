"""`distsim slow`: find the straggler, its cost, and the step time without it."""

from __future__ import annotations

from typing import Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import FormatOption, OutputFormat, parse_share
from distsim.cli.shared.progress import progress_bar

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH…",
        help="Recordings of one job, or folders with them: PyTorch profiler traces "
        "(.json, .json.gz; one per rank), distsim traces (.jsonl), operation tables "
        "(.csv, .parquet).",
    ),
]
StepsOption = Annotated[
    str | None,
    typer.Option("--steps", metavar="A-B", help="Analyse only these steps [all]."),
]
IdealOption = Annotated[
    str,
    typer.Option(
        "--ideal",
        metavar="peers|mean",
        help="Reference for slowdowns: peers (median of equal ranks), or mean (mean over all "
        "ranks, as in arXiv 2505.05713).",
        show_default=True,
    ),
]
FailAboveOption = Annotated[
    str | None,
    typer.Option(
        "--fail-above",
        metavar="SHARE",
        help="Exit with 1 only if a finding costs more than this share of a step: 0.1 or 10% "
        "[any finding].",
    ),
]
JobsOption = Annotated[
    int, typer.Option("--jobs", "-j", min=1, help="Processes that read ranks.", show_default=True)
]


def command(
    paths: PathsArgument,
    steps: StepsOption = None,
    ideal: IdealOption = "peers",
    format: FormatOption = OutputFormat.text,
    fail_above: FailAboveOption = None,
    jobs: JobsOption = 4,
) -> None:
    """Find out why a job is slow: the straggler, its cost, and the step time without it.

    An operation table has the columns dp_rank, stage, rank, step, optype, start_ts and duration
    (seconds; start_ts counts from the start of the step), seq_id (number among equal operations
    of the step on this rank) and mc (model chunk). optype is forward-compute, backward-compute,
    forward-send, forward-recv, backward-send, backward-recv, params-all-gather,
    grads-reduce-scatter, layernorm-grads-all-reduce, embedding-grads-all-reduce, gc,
    optimizer-clip-main-grad or optimizer.

    \b
    Example: distsim slow profiles/
    Example: distsim slow run.jsonl --format json
    Example: distsim slow profiles/ --fail-above 10%
    """
    from distsim.api.functions import slow

    limit = None if fail_above is None else parse_share(fail_above, "--fail-above")
    with progress_bar("reading ranks") as advance:
        answer = slow(*paths, steps=steps, ideal=ideal, jobs=jobs, progress=advance)
    if format is OutputFormat.json:
        console.out(console.to_json(answer.to_json()))
    else:
        console.out(answer.to_text())
    raise typer.Exit(int(not answer.ok if limit is None else answer.cost_share > limit))
