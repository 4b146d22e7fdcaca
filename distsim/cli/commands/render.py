"""`distsim render`: draw a picture of a scenario, a trace or one operation."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli.shared import console
from distsim.cli.shared.arguments import (
    BackendOption,
    ClusterOption,
    SetOption,
    command_with_arguments,
)
from distsim.cli.shared.input_files import is_trace, read_scenario
from distsim.output.pictures.views import view_names

if TYPE_CHECKING:
    from distsim.output.pictures.components.view_interface import (
        OperationMeasurement,
        PictureInput,
        PictureView,
    )

_VIEW_NAMES = view_names()
VIEW_LIST = f"{', '.join(_VIEW_NAMES[:-1])} or {_VIEW_NAMES[-1]}"
#: The formats of `distsim.output.pictures.render`, repeated here so that --help need not load it; a
#: test compares the two.
FORMAT_LIST = "svg, png, pdf, dot or mermaid"

FileArgument = Annotated[
    str | None,
    typer.Argument(
        metavar="FILE",
        help="A scenario, or a trace (.jsonl); - reads standard input. "
        "The views operation and algorithm need none.",
    ),
]
ViewOption = Annotated[str, typer.Option("--view", metavar="VIEW", help=f"One of {VIEW_LIST}.")]
FormatOption = Annotated[
    str | None,
    typer.Option(
        "--format",
        metavar="FORMAT",
        help=f"One of {FORMAT_LIST}; left out: by the name after -o, else svg.",
    ),
]
OutputOption = Annotated[
    Path | None,
    typer.Option("--output", "-o", metavar="F", help="Write there; left out: to standard output."),
]
OpOption = Annotated[
    str | None,
    typer.Option(
        "--op", metavar="NAME", help="The operation that the views operation and algorithm draw."
    ),
]
AlgorithmOption = Annotated[
    str | None,
    typer.Option(
        "--algorithm",
        metavar="NAME",
        help="Of the view algorithm: ring, tree, …; left out: the usual one.",
    ),
]
RanksOption = Annotated[
    str | None,
    typer.Option(
        "--ranks",
        metavar="N|LIST",
        help="Only these ranks, as 0-7,12. For operation and algorithm: a number or a list. "
        "[default: all; 4]",
    ),
]
StepsOption = Annotated[
    str | None,
    typer.Option("--steps", metavar="LIST", help="Only these training iterations, as 0-2,9."),
]
TimeOption = Annotated[
    str | None,
    typer.Option(
        "--time", metavar="FROM..TO", help="Only this stretch of time, as '1 ms..2.5 ms'."
    ),
]
GroupOption = Annotated[
    str | None,
    typer.Option("--group", metavar="NAME", help="Only this group, or all groups of this axis."),
]
MeasuredOption = Annotated[
    Path | None,
    typer.Option(
        "--measured",
        metavar="F",
        help="Of the view bandwidth: an output of nccl-tests or of `distsim bench`.",
    ),
]


_SUFFIX_FORMATS = {"": "svg", "mmd": "mermaid", "gv": "dot"}
_DEFAULT_OPERATION_RANKS = 4


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
    """Draw a picture of a scenario, or of one operation.

    \b
    Example: distsim render scenarios/hybrid.yaml --view dataflow -o hybrid.svg
    Example: distsim render scenarios/hybrid.yaml --ranks 0-1 -o start.svg
    Example: distsim render --view operation --op all_gather -o all_gather.svg
    Example: distsim render --view algorithm --op all_reduce --ranks 8 -o ring.svg
    """
    from distsim.output.pictures.render import load_view, render_picture

    format = arguments.format or _format_from_suffix(arguments.output)
    view = load_view(arguments.view)
    if view.of == "operation":
        picture_input = _input_of_operation(arguments)
    else:
        picture_input = _input_of_file(view, arguments)
    picture = render_picture(arguments.view, format, picture_input)
    _note_missing_ranks(picture_input)
    _write_picture(picture, arguments.output, format)


def _format_from_suffix(output: Path | None) -> str:
    suffix = output.suffix.lstrip(".").lower() if output is not None else ""
    return _SUFFIX_FORMATS.get(suffix, suffix)


# --- the input of a view ---


def _input_of_operation(arguments: RenderArguments) -> PictureInput:
    """One operation on N ranks, or on the ranks of a list. Raises UsageError."""
    from distsim.output.pictures.render import PictureInput
    from distsim.output.trace_data.selection import parse_number_ranges

    algorithm = arguments.algorithm or ""
    text = arguments.ranks
    if text is None or text.strip().isdecimal():
        count = int(text or _DEFAULT_OPERATION_RANKS)
        return PictureInput(op=arguments.op, ranks=count, members=(), algorithm=algorithm)
    members = parse_number_ranges(text, "ranks")
    return PictureInput(op=arguments.op, ranks=len(members), members=members, algorithm=algorithm)


def _input_of_file(view: PictureView, arguments: RenderArguments) -> PictureInput:
    """A scenario or a trace, with the part of it to draw. Raises UsageError if none is named."""
    from distsim.common.errors import UsageError
    from distsim.output.trace_data.selection import parse_selection

    if arguments.file is None:
        raise UsageError(
            f"the view {arguments.view} draws a scenario and none was named",
            f"`distsim render scenarios/hybrid.yaml --view {arguments.view}`",
        )
    part = parse_selection(arguments.ranks, arguments.steps, arguments.time, arguments.group)
    if is_trace(arguments.file):
        picture_input = _input_of_trace(view, arguments.file, arguments)
    else:
        picture_input = _input_of_scenario(view, arguments.file, arguments)
    measured = _read_measurements(arguments.measured)
    return picture_input._replace(part=part, measured=measured)


def _input_of_trace(view: PictureView, file: str, arguments: RenderArguments) -> PictureInput:
    """The trace as recorded if the view can draw that, else its calls simulated."""
    from distsim.cli.shared.trace_input import simulate_trace
    from distsim.output.pictures.components.view_interface import PictureInput
    from distsim.trace.jsonl import read_trace

    # Another backend or cluster changes the times, so the calls must be simulated.
    as_recorded = arguments.backend is None and arguments.cluster is None
    if view.accepts_trace and as_recorded:
        return PictureInput(trace=read_trace(file))
    simulation = simulate_trace(file, backend=arguments.backend, cluster=arguments.cluster)
    return PictureInput(
        simulation.program, simulation.run, None, simulation.verdict, cost=simulation.cost
    )


def _input_of_scenario(view: PictureView, file: str, arguments: RenderArguments) -> PictureInput:
    """The scenario simulated, with verdict and values only if the view uses them."""
    from distsim.output.pictures.components.view_interface import PictureInput
    from distsim.simulation.simulate_scenario import simulate
    from distsim.values import compute_values

    scenario = read_scenario(file, arguments.sets)
    simulation = simulate(
        scenario,
        backend=arguments.backend,
        cluster=arguments.cluster,
        with_verdict="verdict" in view.uses,
        with_values=False,
    )
    values = None
    if "values" in view.uses:
        values = compute_values(simulation.program, simulation.run.trace, at_calls=True)
    picture_input = PictureInput(
        simulation.program,
        simulation.run,
        values,
        simulation.verdict,
        cost=simulation.cost,
        scenario=simulation.scenario,
    )
    launch = scenario.launch
    if launch.master_addr and launch.master_port:
        return picture_input._replace(master=f"{launch.master_addr}:{launch.master_port}")
    return picture_input


def _read_measurements(file: Path | None) -> tuple[OperationMeasurement, ...]:
    """The measured times in a file. Raises UsageError."""
    if file is None:
        return ()
    from distsim.common.errors import UsageError
    from distsim.common.file_io import read_bytes
    from distsim.output.pictures.components.view_interface import OperationMeasurement
    from distsim.real.bench.measurement import bench_from_json
    from distsim.real.calibrate.measured_points import points_from_bench
    from distsim.real.calibrate.nccl_tests import points_from_nccl_tests

    try:
        text = read_bytes(file).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"can't read {file}: {error.strerror}",
            "an output of nccl-tests, or of `distsim bench --out F`",
        ) from None
    if '"distsim' in text[:400]:
        points = points_from_bench(bench_from_json(text, str(file)))
    else:
        points, _device = points_from_nccl_tests(text, str(file))
    return tuple(OperationMeasurement(p.op, p.group, p.nbytes, p.ns) for p in points)


# --- output ---


def _note_missing_ranks(picture_input: PictureInput) -> None:
    """Warn about ranks that were asked for and do not exist."""
    from distsim.output.trace_data.selection import absent_ranks_text

    source = picture_input.program or picture_input.trace
    if source is None or not source.world_size:
        return
    message = absent_ranks_text(picture_input.part, source.world_size)
    if message:
        console.note(message)


def _write_picture(picture: str | bytes, output: Path | None, format: str) -> None:
    """Write to the file, else to standard output; binary formats are refused on a terminal."""
    from distsim.common.errors import UsageError

    if output is not None:
        console.write_file(output, picture)
        console.note(f"wrote {output}")
    elif isinstance(picture, str) and sys.stdout.isatty():
        console.out(picture.rstrip("\n"))
    elif isinstance(picture, str):
        # Bytes, because `out` would escape control characters and lines that CI systems obey.
        console.out_bytes(f"{picture.rstrip()}\n".encode())
    elif sys.stdout.isatty():
        raise UsageError(f"a {format} is no text for a terminal", f"add `-o picture.{format}`")
    else:
        console.out_bytes(picture)
