"""`distsim slow`: find the straggler, its cost, and the step time without it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    FormatOption,
    OutputFormat,
    command_with_arguments,
    parse_share,
)
from distsim.cli.shared.progress import progress_bar

if TYPE_CHECKING:
    from distsim.api.results import SlowAnswer

PathsArgument = Annotated[
    list[str],
    typer.Argument(
        metavar="PATH…",
        help="Recordings of one job, or folders with them: PyTorch profiler traces "
        "(.json, .json.gz; one per rank), Chakra traces (.et; one per rank), exports of Nsight "
        "Systems (.sqlite), distsim traces (.jsonl), or operation tables (.csv, .parquet; "
        "docs/how-to/slow.md lists the columns).",
    ),
]
StepsOption = Annotated[
    str | None,
    typer.Option("--steps", metavar="A-B", help="Analyse only these steps. [default: all]"),
]
IdealOption = Annotated[
    str,
    typer.Option(
        "--ideal",
        metavar="peers|mean",
        help="Compare each rank with its peers (the median of the ranks with the same role) or "
        "with the mean over all ranks (as in arXiv 2505.05713).",
        show_default=True,
    ),
]
ReferenceOption = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        metavar="NAME",
        help="Compare communication with times predicted for this hardware model (preset or file), "
        "assuming one rank per node. [default: compare with the usual times in the recording]",
    ),
]
WhatIfOption = Annotated[
    list[str] | None,
    typer.Option(
        "--what-if",
        metavar="CHANGE",
        help="Predict a step with a change: like-peers=2 (rank 2 works like its peers), "
        "compute@6-7=0.8 (compute times of ranks 6 and 7, multiplied by 0.8), or cluster=NAME "
        "(communication on this hardware). Repeatable.",
    ),
]
FailAboveOption = Annotated[
    str | None,
    typer.Option(
        "--fail-above",
        metavar="SHARE",
        help="Exit with 1 only if a finding costs more than this share of a step: 0.1 or 10%. "
        "[default: any finding]",
    ),
]
TraceOption = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="F.json",
        help=(
            "Write two timelines for Perfetto: the job as recorded, and the job without slow ranks "
            "and slow communication."
        ),
    ),
]
PictureOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F",
        help="Write pictures (F.svg: extra time per rank and step, breakdown, one step), or the "
        "report with the same pictures (F.html).",
    ),
]
JobsOption = Annotated[
    int,
    typer.Option(
        "--jobs", "-j", min=1, metavar="N", help="Number of worker processes.", show_default=True
    ),
]


@dataclass(frozen=True)
class SlowArguments:
    """The arguments of `slow`."""

    paths: PathsArgument
    steps: StepsOption = None
    ideal: IdealOption = "peers"
    cluster: ReferenceOption = None
    what_if: WhatIfOption = None
    format: FormatOption = OutputFormat.text
    fail_above: FailAboveOption = None
    trace: TraceOption = None
    output: PictureOption = None
    jobs: JobsOption = 4


@command_with_arguments(SlowArguments)
def command(arguments: SlowArguments) -> None:
    """Find out why a job is slow: the straggler, its cost, and the step time without it.

    Exit status: 1 if slow finds a straggler or slow communication, otherwise 0.

    \b
    Example: distsim slow profiles/
    Example: distsim slow run.jsonl --format json
    Example: distsim slow profiles/ --fail-above 10%
    Example: distsim slow profiles/ -o slow.html --trace perfetto.json
    """
    from distsim.api.functions import slow

    _check_output_files(arguments.output, arguments.trace, arguments.paths)
    limit = None
    if arguments.fail_above is not None:
        limit = parse_share(arguments.fail_above, "--fail-above")
    with progress_bar("reading ranks") as advance:
        answer = slow(
            *arguments.paths,
            steps=arguments.steps,
            ideal=arguments.ideal,
            cluster=arguments.cluster,
            what_if=arguments.what_if or (),
            jobs=arguments.jobs,
            progress=advance,
        )
    _write_files(answer, arguments)
    if arguments.format is OutputFormat.json:
        console.out(console.to_json(answer.to_json()))
    else:
        console.out(answer.to_text())
    is_bad = not answer.ok if limit is None else answer.cost_share > limit
    raise typer.Exit(int(is_bad or answer.raw.hangs))


def _write_files(answer: SlowAnswer, arguments: SlowArguments) -> None:
    trace, output = arguments.trace, arguments.output
    if trace is not None:
        console.write_file(trace, answer.timeline())
        console.note(f"wrote {trace}")
    if output is not None:
        is_page = output.suffix.lower() == ".html"
        console.write_file(output, answer.to_html().html if is_page else answer.to_svg().content)
        console.note(f"wrote {output}")


def _check_output_files(output: Path | None, trace: Path | None, inputs: list[str]) -> None:
    """Check the names of both files before anything is read, and protect the recordings."""
    from distsim.cli.shared.trace_output import check_is_no_input, check_output_folder
    from distsim.common.errors import UsageError
    from distsim.common.file_io import is_stream

    if output is not None and output.suffix.lower() not in (".svg", ".html"):
        raise UsageError(f"{output}: unknown suffix", "use .svg or .html")
    is_file = trace is not None and not is_stream(trace)
    if trace is not None and is_file and trace.suffix.lower() != ".json":
        raise UsageError(f"--trace {trace}: unknown suffix", "use a name that ends in .json")
    for path in (output, trace):
        if path is not None:
            check_output_folder(path)
            check_is_no_input(path, inputs)
    if output is not None and trace is not None and output.resolve() == trace.resolve():
        raise UsageError(f"-o and --trace both name {output}", "name two files")
