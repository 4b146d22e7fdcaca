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

_SCENARIO_SUFFIXES = (".yaml", ".yml")
_PICTURE_SUFFIXES = (".svg", ".png", ".pdf", ".dot")

PathsArgument = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="PATH",
        help="Dumps, logs, stacks and traces, or folders with them. The content "
        "decides the file type.",
    ),
]
PidsOption = Annotated[
    list[int] | None,
    typer.Option(
        "--pid",
        metavar="PID",
        help="Process ID of a live rank; doctor reads its stack once. --live shows more. "
        "Repeatable.",
    ),
]
TorchrunOption = Annotated[
    int | None,
    typer.Option(
        "--torchrun",
        metavar="PID",
        help="Process ID of torchrun; doctor reads the stacks of its ranks once. --live shows "
        "more.",
    ),
]
LiveOption = Annotated[
    int | None,
    typer.Option(
        "--live",
        metavar="PID",
        help="Process ID of a launcher (or rank); doctor takes two snapshots of its ranks and "
        "their child processes, to see progress, and writes a bundle (hang-PID.zip, or -o F.zip).",
    ),
]
ViewOption = Annotated[
    str | None,
    typer.Option(
        "--view",
        metavar="VIEW",
        help="Draw a picture. The only VIEW is wait-for, the wait-for graph of the ranks.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="F",
        help="Write the smallest scenario with this hang (F.yaml), the picture (F.svg), or the "
        "bundle of --live (F.zip).",
    ),
]
WidthOption = Annotated[
    int | None,
    typer.Option("--width", metavar="N", min=40, max=200, help="Width of the report in columns."),
]


def command(
    paths: PathsArgument = None,
    pid: PidsOption = None,
    torchrun: TorchrunOption = None,
    live: LiveOption = None,
    format: FormatOption = OutputFormat.text,
    view: ViewOption = None,
    output: OutputOption = None,
    width: WidthOption = None,
) -> None:
    """Find the cause of a hang from the files of a job, or from its live ranks.

    The report shows which rank waits for which, which rank fell behind or diverged, and at which
    line. Input files: Flight Recorder dumps, logs of torch and NCCL, py-spy and faulthandler
    stacks, NCCL RAS reports, Kineto traces and distsim traces, from all or some ranks. The
    report says whether the records prove the cause, or whether it is only suspected. Live ranks are
    only read, never changed.

    \b
    Example: distsim doctor dumps/ train.log stacks/
    Example: distsim doctor --live 4711
    Example: distsim doctor dumps/ -o hang.yaml
    """
    from distsim.api.functions import doctor
    from distsim.cli.shared.trace_output import check_output_folder
    from distsim.common.errors import UsageError

    if view not in (None, "wait-for"):
        raise UsageError(f"unknown view {view}", "use --view wait-for")
    if output is not None:
        _check_output_suffix(output, is_live=live is not None)
    bundle = None if live is None else _bundle_path(live, output)
    # An inspection may not be repeatable, so everything that can fail is checked before it.
    for path in (output, bundle):
        if path is not None:
            check_output_folder(path)
    answer = doctor(*(paths or ()), pids=pid or (), torchrun=torchrun, live=live, width=width)
    if bundle is not None:
        _write_bundle(answer, bundle)
    if output is not None and output != bundle:
        _write_output(answer, output)
    if view is not None and output is None:
        console.out(str(answer.picture().content).rstrip("\n"))
    elif format is OutputFormat.json:
        console.out(console.to_json(answer.to_json()))
    else:
        console.out(answer.to_text())
    raise typer.Exit(_exit_status(answer.raw))


def _exit_status(diagnosis: Diagnosis) -> int:
    """1: a hang or its cause was found, or cannot be excluded; 2: nothing could be read; 0: no rank
    waits.
    """
    if diagnosis.causes:
        return 1
    evidence = diagnosis.evidence
    nothing_read = not evidence.ranks and any(file.problem for file in evidence.files)
    return 2 if nothing_read else 0


def _write_bundle(answer: DoctorAnswer, path: Path) -> None:
    console.write_file(path, answer.bundle)
    console.note(f"wrote {path}: attach it to a bug report; `distsim doctor {path}` reads it")


def _bundle_path(live: int, output: Path | None) -> Path:
    """Where the bundle of a live job goes; it is written even if -o names another kind of file."""
    if output is not None and output.suffix.lower() == ".zip":
        return output
    return Path(f"hang-{live}.zip")


def _check_output_suffix(output: Path, *, is_live: bool) -> None:
    from distsim.common.errors import UsageError

    suffix = output.suffix.lower()
    if suffix == ".zip" and not is_live:
        raise UsageError(f"-o {output}: only a live job has a bundle", "name the job: --live PID")
    if suffix not in (".zip", *_SCENARIO_SUFFIXES, *_PICTURE_SUFFIXES):
        bundle = "F.zip for the bundle, " if is_live else ""
        raise UsageError(
            f"-o {output}: unknown file type",
            f"use {bundle}F.yaml for a scenario, or F.svg, .png, .pdf or .dot for the picture",
        )


def _write_output(answer: DoctorAnswer, output: Path) -> None:
    """Write a minimal scenario or the wait-for picture, as the suffix of the file asks for."""
    suffix = output.suffix.lower()
    if suffix in _SCENARIO_SUFFIXES:
        console.write_file(output, answer.minimal_scenario())
    else:
        console.write_file(output, answer.picture(suffix[1:]).content)
    console.note(f"wrote {output}")
