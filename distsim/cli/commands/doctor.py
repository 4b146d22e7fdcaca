"""`distsim doctor`: find the cause of a hang from the files that the job left, or live ranks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import FormatOption, OutputFormat

if TYPE_CHECKING:
    from distsim.hang_doctor import Diagnosis, Evidence

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
    typer.Option("--view", metavar="VIEW", help="wait-for: who waits for whom, as a picture."),
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
    from distsim.common.errors import UsageError
    from distsim.common.message_text import did_you_mean
    from distsim.hang_doctor import diagnose_hang

    if not paths and not pid and torchrun is None:
        raise UsageError(
            "nothing was named to look at",
            "`distsim doctor dumps/ train.log`, or --pid PID of a live rank",
        )
    if view not in (None, "wait-for"):
        hint = did_you_mean(view, ["wait-for"])
        raise UsageError(f"no view `{view}`{hint}", "known: wait-for")
    diagnosis = diagnose_hang(_collect_evidence(paths or [], pid or [], torchrun))
    if output is not None:
        _write_output(diagnosis, output)
    if view is not None and output is None:
        console.out(str(_wait_for_picture(diagnosis, "svg")).rstrip("\n"))
    else:
        _print_diagnosis(diagnosis, format, width)
    raise typer.Exit(_exit_status(diagnosis))


def _exit_status(diagnosis: Diagnosis) -> int:
    """1: a cause was found; 2: no rank is known and a file could not be read; 0: no hang found."""
    if diagnosis.causes:
        return 1
    evidence = diagnosis.evidence
    nothing_read = not evidence.ranks and any(file.problem for file in evidence.files)
    return 2 if nothing_read else 0


def _collect_evidence(paths: list[str], pids: list[int], torchrun: int | None) -> Evidence:
    from distsim.hang_doctor.model.reconcile import reconcile
    from distsim.hang_doctor.readers.input_files import read_evidence
    from distsim.hang_doctor.readers.live_processes import add_live_processes

    evidence = read_evidence(paths)
    if pids or torchrun is not None:
        add_live_processes(evidence, pids, torchrun)
        reconcile(evidence)
    return evidence


def _print_diagnosis(diagnosis: Diagnosis, format: OutputFormat, width: int | None) -> None:
    from distsim.output.json.diagnosis import doctor_json
    from distsim.output.text.diagnosis import doctor_text
    from distsim.output.text_layout import page_width

    if format is OutputFormat.json:
        console.out(console.to_json(doctor_json(diagnosis)))
        return
    console.out(doctor_text(diagnosis, width or page_width()))


def _write_output(diagnosis: Diagnosis, output: Path) -> None:
    """Write a minimal scenario or the wait-for picture, as the suffix of the file asks for."""
    from distsim.common.errors import UsageError
    from distsim.hang_doctor.minimal_scenario import minimal_scenario_text

    suffix = output.suffix.lower()
    if suffix in (".yaml", ".yml"):
        console.write_file(output, minimal_scenario_text(diagnosis))
    elif suffix in (".svg", ".png", ".pdf", ".dot"):
        console.write_file(output, _wait_for_picture(diagnosis, suffix[1:]))
    else:
        raise UsageError(
            f"-o {output}: what is to be written there?",
            "F.yaml for a scenario; F.svg, .png, .pdf or .dot for the picture",
        )
    console.note(f"wrote {output}")


def _wait_for_picture(diagnosis: Diagnosis, format: str) -> str | bytes:
    from distsim.output.pictures.drawing.dot import dot_text, render_dot
    from distsim.output.pictures.hang_graph import doctor_picture

    picture = doctor_picture(diagnosis)
    text = dot_text(picture)
    if format == "dot":
        return text
    image = render_dot(text, format, picture.engine)
    return image.decode() if format == "svg" else image
