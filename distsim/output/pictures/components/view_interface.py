"""The interface of views: what a view declares, and the input that it draws."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeVar

from distsim.common.errors import UsageError
from distsim.output.pictures.drawing.box_diagram import BoxDiagram
from distsim.output.pictures.drawing.sequence_diagram import SequenceDiagram
from distsim.output.trace_data.selection import WHOLE_RUN, RunSelection

if TYPE_CHECKING:
    from distsim.checker.verdict import Verdict
    from distsim.engine.run_record import SimulatedRun
    from distsim.hardware.cost import CostModel
    from distsim.program.model import Program
    from distsim.scenario import Scenario
    from distsim.trace.model import Trace
    from distsim.values import BufferValues

T = TypeVar("T")
PICTURE_FORMATS = ("svg", "png", "pdf", "dot", "mermaid")


class OperationMeasurement(NamedTuple):
    """How long an operation took among ``group`` ranks."""

    op: str
    group: int
    nbytes: int
    ns: int


class PictureInput(NamedTuple):
    """The input of a view: a program with its run, or the operation ``op`` for ``ranks`` ranks.

    ``master``: the address of the store. ``part``: the part of the run to draw. ``trace``: a
    recording, if there is no program. ``cost``: the cost model of the run. ``measured``: measured
    times to draw next to predicted ones. ``members``: the (global) ranks of the operation's group,
    instead of ``ranks``. ``algorithm``: the algorithm of the operation; if empty, its first one.
    ``scenario``: the scenario that was simulated.
    """

    program: Program | None = None
    run: SimulatedRun | None = None
    values: BufferValues | None = None
    verdict: Verdict | None = None
    op: str | None = None
    ranks: int = 4
    master: str = "MASTER_ADDR:MASTER_PORT"
    part: RunSelection = WHOLE_RUN
    trace: Trace | None = None
    cost: CostModel | None = None
    measured: tuple[OperationMeasurement, ...] = ()
    members: tuple[int, ...] = ()
    algorithm: str = ""
    scenario: Scenario | None = None


class GalleryExample(NamedTuple):
    """A picture for the gallery: of a scenario, or of an operation, and what it teaches."""

    of: str
    about: str


class PictureView(NamedTuple):
    """A view and what it needs.

    ``draw`` returns a diagram, or the text of an SVG. ``of``: what a user must name. ``uses``:
    optional inputs that add to the picture. ``accepts_trace``: a recording is enough, no program is
    needed. ``large``: returns an SVG to use instead if there is too much for boxes, else None.
    """

    draw: Callable[[PictureInput], BoxDiagram | SequenceDiagram | str]
    of: Literal["scenario", "operation"] = "scenario"
    uses: tuple[str, ...] = ()
    formats: tuple[str, ...] = PICTURE_FORMATS
    examples: tuple[GalleryExample, ...] = ()
    accepts_trace: bool = False
    large: Callable[[PictureInput], str | None] | None = None


def draws_trace_or_run(
    svg: Callable[[Trace, RunSelection, str, Iterable[int] | None], str],
) -> Callable[[PictureInput], str]:
    """Make the ``draw`` function of a view from a function that draws a trace.

    ``svg`` takes the trace, the part, a title and the blocked ranks. For a recording, title and
    ranks are "" and None: the trace itself has them.
    """

    def drawn(subject: PictureInput) -> str:
        if subject.trace is not None:
            return svg(subject.trace, subject.part, "", None)
        run = require_input(subject.run, "run")
        return svg(run.trace, subject.part, run.program.name, run.final_state.stuck)

    return drawn


def require_input(part: T | None, what: str) -> T:
    """An input that the view cannot do without. Raises UsageError if it is missing."""
    if part is None:
        raise UsageError(f"this view needs a {what}", f"pass {what}=…")
    return part
