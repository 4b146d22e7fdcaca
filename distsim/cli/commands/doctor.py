"""`distsim doctor`: find the cause of a hang from the files that the job left, or live ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import FormatOption, OutputFormat

if TYPE_CHECKING:
    from distsim.api.results import DoctorAnswer
    from distsim.hang_doctor import Diagnosis

PathsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH…",
        help="Dumps, logs, stacks, traces; folders of them. Each is recognised by what it holds.",
    ),
]
PidsOption = Annotated[
    list[int] | None,
    typer.Option("--pid", metavar="PID", help="Take the stack of a live rank. Repeatable."),
]
TorchrunOption = Annotated[
    int | None,
    typer.Option(
        "--torchrun", metavar="PID", help="Take the stacks of all ranks that this launcher started."
    ),
]
ViewOption = Annotated[
    str | None,
    typer.Option("--view", metavar="VIEW", help="waitfor: who waits for whom, as a picture."),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F",
        help="F.yaml: the smallest scenario with this standstill; F.svg: the picture.",
    ),
]
WidthOption = Annotated[
    int | None, typer.Option("--width", metavar="N", min=40, max=200, help="Columns of the report.")
]


def command(
    paths: PathsArgument = None,
    pid: PidsOption = None,
    torchrun: TorchrunOption = None,
    format: FormatOption = OutputFormat.text,
    view: ViewOption = None,
    output: OutputOption = None,
    width: WidthOption = None,
) -> None:
    """Say why a job hangs, from what it left: who waits for whom, who is behind or went another
    way, and at which line.

    Takes Flight Recorder dumps, logs of torch and NCCL, py-spy and faulthandler stacks, RAS
    reports, Kineto and distsim's traces, of all ranks or of some. A rank is called the culprit only
    where the records prove it. Live ranks are only looked at.

    \b
    Example: distsim doctor dumps/ train.log stacks/
    Example: distsim doctor --torchrun 4711
    Example: distsim doctor dumps/ -o hang.yaml
    """
    from distsim.api.functions import doctor
    from distsim.common.errors import UsageError

    if view not in (None, "waitfor"):
        raise UsageError(f"there is no view {view}", "there is waitfor")
    answer = doctor(*(paths or ()), pids=pid or (), torchrun=torchrun, width=width)
    if output is not None:
        _write_output(answer, output)
    if view is not None and output is None:
        console.out(str(answer.picture().content).rstrip("\n"))
    elif format is OutputFormat.json:
        console.out(console.to_json(answer.to_json()))
    else:
        console.out(answer.to_text())
    raise typer.Exit(_exit_status(answer.raw))


def _exit_status(diagnosis: Diagnosis) -> int:
    """1: a cause was found; 2: no rank is known and a file could not be read; 0: no hang found."""
    if diagnosis.causes:
        return 1
    evidence = diagnosis.evidence
    nothing_read = not evidence.ranks and any(file.problem for file in evidence.files)
    return 2 if nothing_read else 0


def _write_output(answer: DoctorAnswer, output: Path) -> None:
    """Write a minimal scenario or the wait-for picture, as the suffix of the file asks for."""
    from distsim.common.errors import UsageError

    suffix = output.suffix.lower()
    if suffix in (".yaml", ".yml"):
        console.write_file(output, answer.minimal_scenario())
    elif suffix in (".svg", ".png", ".pdf", ".dot"):
        console.write_file(output, answer.picture(suffix[1:]).content)
    else:
        raise UsageError(
            f"-o {output}: what is to be written there?",
            "F.yaml for a scenario; F.svg, .png, .pdf or .dot for the picture",
        )
    console.note(f"wrote {output}")
