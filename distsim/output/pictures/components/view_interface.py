"""What a view is, and what there may be to draw."""

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
    """What is drawn: a program with its run, or the operation ``op`` for ``ranks`` ranks.
    ``master`` is where the store listens. ``part``: which part of it. ``trace``: a recording, where
    there is no program. ``cost``: what the prices come from; ``measured``: what is drawn beside
    them. ``members``: of an operation, the (global) ranks of the group, in place of ``ranks``;
    ``algorithm``: by which it is brought about, its first one when empty. ``scenario``: what was
    simulated.
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
    """``of``: what a person must name; ``uses``: parts of a subject that add to the picture. What
    draws itself as svg gives text. ``of_trace``: a recording will do, no program is needed.
    ``large``: an svg in place of it where there is too much for boxes, else None.
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
    """How to draw a recording, or else a run, by what draws a trace: the part, a title and the
    ranks that are stuck ("" and None: as the trace says)."""

    def drawn(subject: PictureInput) -> str:
        if subject.trace is not None:
            return svg(subject.trace, subject.part, "", None)
        run = require_input(subject.run, "run")
        return svg(run.trace, subject.part, run.program.name, run.final_state.stuck)

    return drawn


def require_input(part: T | None, what: str) -> T:
    """A part of a subject without which there is nothing to draw. Raises UsageError where it was
    left out.
    """
    if part is None:
        raise UsageError(f"the view needs a {what} and none was given", f"hand in {what}=…")
    return part
