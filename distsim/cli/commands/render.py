"""`distsim render`: pictures."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.application import (
    BackendName,
    BackendOption,
    ClusterOption,
    SetOption,
    command_with_arguments,
    is_trace,
    read_scenario,
)
from distsim.cli.shared import console
from distsim.output.pictures.views import view_names

if TYPE_CHECKING:
    from distsim.output.pictures.components.view_interface import (
        OperationMeasurement,
        PictureInput,
        PictureView,
    )
    from distsim.scenario import Scenario

_VIEW_NAMES = view_names()
VIEW_LIST = f"{', '.join(_VIEW_NAMES[:-1])} or {_VIEW_NAMES[-1]}"
#: What distsim.output.pictures.render knows, named here so that --help need not load it; a test
#: compares the two.
FORMAT_LIST = "svg, png, pdf, dot or mermaid"

File = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        help="A scenario, or a trace (.jsonl); - reads standard input. The view op needs none.",
    ),
]
ViewName = Annotated[str, typer.Option("--view", metavar="VIEW", help=f"One of {VIEW_LIST}.")]
Format = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help=f"One of {FORMAT_LIST}; left out: by the name after -o, else svg.",
    ),
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="F", help="Write there; left out: to standard output."),
]
OpName = Annotated[
    str | None,
    typer.Option("--op", metavar="NAME", help="The operation that the views op and rounds draw."),
]
Algorithm = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        metavar="NAME",
        help="Of the view rounds: ring, tree, …; left out: the usual one.",
    ),
]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N|LIST",
        help="Only these ranks, as 0-7,12; of op and rounds: how many, or which. [default: all; 4]",
    ),
]
Steps = Annotated[
    str | None,
    typer.Option("--steps", metavar="LIST", help="Only these training iterations, as 0-2,9."),
]
Time = Annotated[
    str | None,
    typer.Option(
        "--time", metavar="FROM..TO", help="Only this stretch of time, as '1 ms..2.5 ms'."
    ),
]
GroupName = Annotated[
    str | None,
    typer.Option("--group", metavar="NAME", help="Only this group, or all groups of this axis."),
]


MeasuredFile = Annotated[
    Path | None,
    typer.Option(
        "--measured",
        metavar="F",
        help="Of the view bandwidth: an output of nccl-tests or of `distsim bench`.",
    ),
]


@dataclass(frozen=True)
class RenderArguments:
    """The arguments of `render`."""

    file: File = None
    view: ViewName = "dataflow"
    format: Format = None
    output: Output = None
    op: OpName = None
    algorithm: Algorithm = None
    ranks: Ranks = None
    steps: Steps = None
    time: Time = None
    group: GroupName = None
    measured: MeasuredFile = None
    backend: BackendOption = None
    cluster: ClusterOption = None
    sets: SetOption = None


@command_with_arguments(RenderArguments)
def command(given: RenderArguments) -> None:
    """Draw a picture of a scenario, or of one operation.

    \b
    Example: distsim render scenarios/hybrid.yaml --view dataflow -o hybrid.svg
    Example: distsim render scenarios/hybrid.yaml --ranks 0-1 -o start.svg
    Example: distsim render --view op --op all_gather -o all_gather.svg
    Example: distsim render --view rounds --op all_reduce --ranks 8 -o ring.svg
    """
    from distsim.common.errors import UsageError
    from distsim.output.pictures.render import PictureInput, load_view, render_picture
    from distsim.output.trace_data.selection import parse_selection

    fmt, kind = given.format or _format_from_suffix(given.output), load_view(given.view)
    if kind.of == "operation":
        ranks, members = _parse_operation_ranks(given.ranks)
        subject = PictureInput(
            op=given.op, ranks=ranks, members=members, algorithm=given.algorithm or ""
        )
    elif given.file is None:
        raise UsageError(
            f"the view {given.view} draws a scenario and none was named",
            f"`distsim render scenarios/hybrid.yaml --view {given.view}`",
        )
    else:
        part = parse_selection(given.ranks, given.steps, given.time, given.group)
        subject = _subject_of_file(kind, given.file, given)._replace(
            part=part, measured=_read_measurements(given.measured)
        )
    picture = render_picture(given.view, fmt, subject)
    _note_missing_ranks(subject)
    _write_picture(picture, given.output, fmt)


def _note_missing_ranks(subject: PictureInput) -> None:
    """Ranks that were named and are not there."""
    from distsim.output.trace_data.selection import absent_ranks_text

    size = (
        subject.program.world_size
        if subject.program is not None
        else subject.trace.world_size
        if subject.trace is not None
        else 0
    )
    missing = absent_ranks_text(subject.part, size) if size else ""
    if missing:
        console.note(missing)


def _subject_of_file(view: PictureView, file: str, given: RenderArguments) -> PictureInput:
    """A scenario or a trace: as it was recorded where the view can draw that, else what its calls
    come to when simulated.
    """
    from distsim.cli.shared.trace_input import simulate_trace
    from distsim.output.pictures.components.view_interface import PictureInput
    from distsim.trace.jsonl import read_trace

    if not is_trace(file):
        return _simulate_for_view(
            view, read_scenario(file, given.sets), given.backend, given.cluster
        )
    if view.accepts_trace and given.backend is None and given.cluster is None:
        return PictureInput(trace=read_trace(file))
    done = simulate_trace(file, backend=given.backend, cluster=given.cluster)
    return PictureInput(done.program, done.run, None, done.verdict, cost=done.cost)


def _read_measurements(file: Path | None) -> tuple[OperationMeasurement, ...]:
    """What a file of measurements has. Raises UsageError."""
    from distsim.common.errors import UsageError
    from distsim.common.file_io import read_bytes
    from distsim.output.pictures.components.view_interface import OperationMeasurement
    from distsim.real.calibrate.measured_points import points_from_bench
    from distsim.real.calibrate.nccl_tests import points_from_nccl_tests

    if file is None:
        return ()
    try:
        text = read_bytes(file).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"can't read {file}: {error.strerror}",
            "an output of nccl-tests, or of `distsim bench --out F`",
        ) from None
    from distsim.real.bench.measurement import bench_from_json

    points = (
        points_from_bench(bench_from_json(text, str(file)))
        if '"distsim' in text[:400]
        else points_from_nccl_tests(text, str(file))[0]
    )
    return tuple(OperationMeasurement(p.op, p.group, p.nbytes, p.ns) for p in points)


def _parse_operation_ranks(ranks: str | None) -> tuple[int, tuple[int, ...]]:
    """For how many ranks an operation is drawn, or for which. Raises UsageError."""
    from distsim.output.trace_data.selection import parse_number_ranges

    if ranks is None or ranks.strip().isdecimal():
        return int(ranks or 4), ()
    found = parse_number_ranges(ranks, "ranks")
    return len(found), found


def _format_from_suffix(output: Path | None) -> str:
    """The format that a file's name asks for."""
    suffix = output.suffix.lstrip(".").lower() if output is not None else ""
    return {"": "svg", "mmd": "mermaid", "gv": "dot"}.get(suffix, suffix)


def _simulate_for_view(
    view: PictureView, scenario: Scenario, backend: BackendName | None, cluster: str | None
) -> PictureInput:
    """What the view needs and uses, and no more."""
    from distsim.output.pictures.components.view_interface import PictureInput
    from distsim.simulation.simulate_scenario import simulate
    from distsim.values import compute_values

    done = simulate(
        scenario,
        backend=backend,
        cluster=cluster,
        with_verdict="verdict" in view.uses,
        with_values=False,
    )
    values = (
        compute_values(done.program, done.run.trace, at_calls=True)
        if "values" in view.uses
        else None
    )
    found = PictureInput(
        done.program, done.run, values, done.verdict, cost=done.cost, scenario=done.scenario
    )
    launch = scenario.launch
    at = (
        f"{launch.master_addr}:{launch.master_port}"
        if launch.master_addr and launch.master_port
        else found.master
    )
    return found._replace(master=at)


def _write_picture(picture: str | bytes, output: Path | None, fmt: str) -> None:
    from distsim.common.errors import UsageError

    if output is not None:
        console.write_file(output, picture)
        console.note(f"wrote {output}")
    elif isinstance(picture, str) and sys.stdout.isatty():
        console.out(picture.rstrip("\n"))
    elif isinstance(picture, str):
        console.out_bytes(f"{picture.rstrip()}\n".encode())
    elif sys.stdout.isatty():
        raise UsageError(f"a {fmt} is no text for a terminal", f"add `-o picture.{fmt}`")
    else:
        console.out_bytes(picture)
