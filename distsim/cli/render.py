"""`distsim render`: pictures."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from distsim.cli import console
from distsim.cli.app import Backend, BackendOption, ClusterOption, Sets, is_trace, read_scenario, taking
from distsim.views.pictures import names

if TYPE_CHECKING:
    from distsim.scenario import Scenario
    from distsim.views.drawing.view import Measurement, Subject, View

_NAMES = names()
VIEWS = f"{', '.join(_NAMES[:-1])} or {_NAMES[-1]}"
#: What distsim.views.render knows, named here so that --help need not load it; a test compares the two.
FORMATS = "svg, png, pdf, dot or mermaid"

File = Annotated[
    str | None,
    typer.Argument(metavar="FILE", help="A scenario, or a trace (.jsonl); - reads standard input. The view op needs none."),
]
ViewName = Annotated[str, typer.Option("--view", metavar="VIEW", help=f"One of {VIEWS}.")]
Format = Annotated[
    str | None, typer.Option("--format", metavar="FORMAT", help=f"One of {FORMATS}; left out: by the name after -o, else svg.")
]
Output = Annotated[Path | None, typer.Option("--output", "-o", metavar="F", help="Write there; left out: to standard output.")]
OpName = Annotated[str | None, typer.Option("--op", metavar="NAME", help="The operation that the views op and rounds draw.")]
Algorithm = Annotated[
    str | None, typer.Option("--algorithm", metavar="NAME", help="Of the view rounds: ring, tree, …; left out: the usual one.")
]
Ranks = Annotated[
    str | None,
    typer.Option(
        "--ranks", metavar="N|LIST", help="Only these ranks, as 0-7,12; of op and rounds: how many, or which. [default: all; 4]"
    ),
]
Steps = Annotated[str | None, typer.Option("--steps", metavar="LIST", help="Only these training iterations, as 0-2,9.")]
Time = Annotated[str | None, typer.Option("--time", metavar="FROM..TO", help="Only this stretch of time, as '1 ms..2.5 ms'.")]
GroupName = Annotated[str | None, typer.Option("--group", metavar="NAME", help="Only this group, or all groups of this axis.")]


MeasuredFile = Annotated[
    Path | None,
    typer.Option("--measured", metavar="F", help="Of the view bandwidth: an output of nccl-tests or of `distsim bench`."),
]


@dataclass(frozen=True)
class RenderOptions:
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
    sets: Sets = None


@taking(RenderOptions)
def command(given: RenderOptions) -> None:
    """Draw a picture of a scenario, or of one operation.

    \b
    Example: distsim render scenarios/hybrid.yaml --view dataflow -o hybrid.svg
    Example: distsim render scenarios/hybrid.yaml --ranks 0-1 -o start.svg
    Example: distsim render --view op --op all_gather -o all_gather.svg
    Example: distsim render --view rounds --op all_reduce --ranks 8 -o ring.svg
    """
    from distsim.errors import UsageError
    from distsim.views.part import part_of
    from distsim.views.render import Subject, render, view_of

    fmt, kind = given.format or _format_of(given.output), view_of(given.view)
    if kind.of == "operation":
        ranks, members = _count(given.ranks)
        subject = Subject(op=given.op, ranks=ranks, members=members, algorithm=given.algorithm or "")
    elif given.file is None:
        raise UsageError(
            f"the view {given.view} draws a scenario and none was named",
            f"`distsim render scenarios/hybrid.yaml --view {given.view}`",
        )
    else:
        part = part_of(given.ranks, given.steps, given.time, given.group)
        subject = _of_file(kind, given.file, given)._replace(part=part, measured=_measured(given.measured))
    picture = render(given.view, fmt, subject)
    _tell_missing(subject)
    _deliver(picture, given.output, fmt)


def _tell_missing(subject: Subject) -> None:
    """Ranks that were named and are not there."""
    from distsim.views.part import not_there

    size = (
        subject.program.world_size
        if subject.program is not None
        else subject.trace.world_size
        if subject.trace is not None
        else 0
    )
    missing = not_there(subject.part, size) if size else ""
    if missing:
        console.note(missing)


def _of_file(view: View, file: str, given: RenderOptions) -> Subject:
    """A scenario or a trace: as it was recorded where the view can draw that, else what its calls come to when simulated."""
    from distsim.cli.traced import simulate_trace
    from distsim.trace_io import read_trace
    from distsim.views.drawing.view import Subject

    if not is_trace(file):
        return _subject(view, read_scenario(file, given.sets), given.backend, given.cluster)
    if view.of_trace and given.backend is None and given.cluster is None:
        return Subject(trace=read_trace(file))
    done = simulate_trace(file, backend=given.backend, cluster=given.cluster)
    return Subject(done.program, done.run, None, done.verdict, cost=done.cost)


def _measured(file: Path | None) -> tuple[Measurement, ...]:
    """What a file of measurements has. Raises UsageError."""
    from distsim.calibrate.nccl_tests import from_nccl_log
    from distsim.calibrate.points import from_bench
    from distsim.errors import UsageError
    from distsim.files import read_bytes
    from distsim.views.drawing.view import Measurement

    if file is None:
        return ()
    try:
        text = read_bytes(file).decode(errors="replace")
    except OSError as error:
        raise UsageError(
            f"can't read {file}: {error.strerror}", "an output of nccl-tests, or of `distsim bench --out F`"
        ) from None
    from distsim.bench import from_json

    points = from_bench(from_json(text, str(file))) if '"distsim' in text[:400] else from_nccl_log(text, str(file))[0]
    return tuple(Measurement(p.op, p.group, p.nbytes, p.ns) for p in points)


def _count(ranks: str | None) -> tuple[int, tuple[int, ...]]:
    """For how many ranks an operation is drawn, or for which. Raises UsageError."""
    from distsim.views.part import numbers

    if ranks is None or ranks.strip().isdecimal():
        return int(ranks or 4), ()
    found = numbers(ranks, "ranks")
    return len(found), found


def _format_of(output: Path | None) -> str:
    """The format that a file's name asks for."""
    suffix = output.suffix.lstrip(".").lower() if output is not None else ""
    return {"": "svg", "mmd": "mermaid", "gv": "dot"}.get(suffix, suffix)


def _subject(view: View, scenario: Scenario, backend: Backend | None, cluster: str | None) -> Subject:
    """What the view needs and uses, and no more."""
    from distsim.simulation import simulate
    from distsim.values import compute_values
    from distsim.views.drawing.view import Subject

    done = simulate(scenario, backend=backend, cluster=cluster, with_verdict="verdict" in view.uses, with_values=False)
    values = compute_values(done.program, done.run.trace, at_calls=True) if "values" in view.uses else None
    found = Subject(done.program, done.run, values, done.verdict, cost=done.cost, scenario=done.scenario)
    launch = scenario.launch
    at = f"{launch.master_addr}:{launch.master_port}" if launch.master_addr and launch.master_port else found.master
    return found._replace(master=at)


def _deliver(picture: str | bytes, output: Path | None, fmt: str) -> None:
    from distsim.errors import UsageError

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
