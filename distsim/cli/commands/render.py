"""`distsim render`: draw a picture of a scenario, a trace or one operation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    BackendOption,
    ClusterOption,
    SetOption,
    command_with_arguments,
    read_input,
)
from distsim.output.pictures.views import view_names

_VIEW_NAMES = view_names()
VIEW_LIST = f"{', '.join(_VIEW_NAMES[:-1])} or {_VIEW_NAMES[-1]}"
#: The formats of `distsim.output.pictures.render`, repeated here so that --help need not load it; a
#: test compares the two.
FORMAT_LIST = "svg, png, pdf, dot or mermaid"

FileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        help="Scenario, or trace (.jsonl); `-` means standard input. Not needed "
        "for --view operation and algorithm.",
    ),
]
ViewOption = Annotated[
    str,
    typer.Option("--view", metavar="VIEW", help=f"One of {VIEW_LIST}."),
]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help=f"One of {FORMAT_LIST}. [default: the suffix of -o, otherwise svg]",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F",
        help="Write the picture to a file. [default: standard output]",
    ),
]
OpOption = Annotated[
    str | None,
    typer.Option(
        "--op", metavar="NAME", help="For --view operation or algorithm: the operation to draw."
    ),
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        metavar="NAME",
        help="For --view algorithm: the algorithm to draw, such as ring or tree. [default: the "
        "operation's usual one]",
    ),
]
RanksOption = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N|LIST",
        help="Draw only these ranks, such as 0-7,12. For --view operation or algorithm: "
        "the number of ranks, or a list. [default: all; for operation and algorithm, 4 ranks]",
    ),
]
StepsOption = Annotated[
    str | None,
    typer.Option(
        "--steps", metavar="LIST", help="Draw only these training iterations, such as 0-2,9."
    ),
]
TimeOption = Annotated[
    str | None,
    typer.Option(
        "--time", metavar="FROM..TO", help="Draw only this time interval, such as '1 ms..2.5 ms'."
    ),
]
GroupOption = Annotated[
    str | None,
    typer.Option(
        "--group", metavar="NAME", help="Draw only this group, or all groups of this mesh axis."
    ),
]
MeasuredOption = Annotated[
    Path | None,
    typer.Option(
        "--measured",
        metavar="F",
        help="For --view bandwidth: also draw measured times (nccl-tests, `distsim bench`).",
    ),
]


#: Formats that a terminal shows.
_TEXT_FORMATS = ("dot", "mermaid")
_SUFFIX_FORMATS = {"": "svg", "mmd": "mermaid", "gv": "dot"}


@dataclass(frozen=True)
class RenderArguments:
    """The arguments of `render`."""

    file: FileArgument = None
    view: ViewOption = "dataflow"
    format: FormatOption = None
    output: OutputOption = None
    op: OpOption = None
    algorithm: AlgorithmOption = None
    ranks: RanksOption = None
    steps: StepsOption = None
    time: TimeOption = None
    group: GroupOption = None
    measured: MeasuredOption = None
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: SetOption = None


@command_with_arguments(RenderArguments)
def command(arguments: RenderArguments) -> None:
    """Draw a picture of a scenario, a trace, or one operation.

    \b
    Example: distsim render scenarios/hybrid.yaml --view dataflow -o hybrid.svg
    Example: distsim render scenarios/hybrid.yaml --ranks 0-1 -o start.svg
    Example: distsim render --view operation --op all_gather -o all_gather.svg
    Example: distsim render --view algorithm --op all_reduce --ranks 8 -o ring.svg
    """
    from distsim.api.functions import render

    format = arguments.format or _format_from_suffix(arguments.output)
    file = arguments.file
    picture = render(
        None if file is None else read_input(file, arguments.sets),
        view=arguments.view,
        format=format,
        backend=arguments.backend,
        cluster=arguments.cluster,
        op=arguments.op,
        algorithm=arguments.algorithm,
        ranks=arguments.ranks,
        steps=arguments.steps,
        time=arguments.time,
        group=arguments.group,
        measured=arguments.measured,
    )
    for note in picture.notes:
        console.note(note)
    _write_picture(picture.content, arguments.output, format)


def _format_from_suffix(output: Path | None) -> str:
    suffix = output.suffix.lstrip(".").lower() if output is not None else ""
    return _SUFFIX_FORMATS.get(suffix, suffix)


def _write_picture(picture: str | bytes, output: Path | None, format: str) -> None:
    """Write to the file, else to standard output; a terminal gets only text formats."""
    from distsim.common.errors import UsageError

    if output is not None:
        console.write_file(output, picture)
        console.note(f"wrote {output}")
    elif sys.stdout.isatty() and format not in _TEXT_FORMATS:
        raise UsageError(
            f"the terminal cannot show {format.upper()} pictures",
            f"write a file with `-o picture.{format}`, or pipe the output",
        )
    elif isinstance(picture, str) and sys.stdout.isatty():
        console.out(picture.rstrip("\n"))
    elif isinstance(picture, str):
        # Bytes, because `out` would escape control characters and lines that CI systems obey.
        console.out_bytes(f"{picture.rstrip()}\n".encode())
    else:
        console.out_bytes(picture)
