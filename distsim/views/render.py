"""Pictures: which views there are, in which formats, and the way from records to text or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from distsim.errors import UsageError
from distsim.program.records import Program
from distsim.views.pictures.lanes import Lanes, place
from distsim.views.pictures.records import Picture

VIEWS = ("dataflow", "op", "groups", "startup", "waitfor", "timeline")
#: Beyond this the values at single calls are left out of the data flow.
_MOST_CALLS_WITH_VALUES = 5_000
FORMATS = ("svg", "png", "pdf", "dot", "mermaid")


def render(
    view: str,
    fmt: str,
    *,
    program: Program | None,
    run: Any = None,
    values: Any = None,
    verdict: Any = None,
    op: str | None = None,
    ranks: int = 4,
    master: str = "MASTER_ADDR:MASTER_PORT",
) -> str | bytes:
    """A picture: text for svg, dot and mermaid, bytes for png and pdf.

    ``run`` (`distsim.engine.record.Run`) is needed by dataflow, waitfor and timeline; ``values`` adds numbers to dataflow;
    ``verdict`` gives waitfor the core; ``op`` is the operation to draw, for ``ranks`` ranks; ``master`` is where the store
    listens. The view ``op`` needs no program, all others do.
    Raises UsageError for an unknown view, format or operation and for what a view lacks, EnvironmentFault where the format
    can't be made on this machine.
    """
    _known("view", view, VIEWS)
    _known("format", fmt, FORMATS)
    if view == "timeline":
        return _timeline(fmt, program, run)
    drawing = _drawing(view, program, run, values, verdict, op, ranks, master)
    if fmt == "mermaid":
        from distsim.views.mermaid import flowchart, sequence

        return sequence(drawing) if isinstance(drawing, Lanes) else flowchart(drawing)
    from distsim.views.dot import dot

    picture = place(drawing) if isinstance(drawing, Lanes) else drawing
    text = dot(picture)
    if fmt == "dot":
        return text
    from distsim.views.dot_layout import drawn

    image = drawn(text, fmt, picture.engine)
    return image.decode() if fmt == "svg" else image


def _drawing(
    view: str, program: Program | None, run: Any, values: Any, verdict: Any, op: str | None, ranks: int, master: str
) -> Picture | Lanes:
    if view == "op":
        return _op(op, ranks)
    program = _given(program, view, "program")
    if view == "groups":
        from distsim.views.pictures.groups import groups_picture

        return groups_picture(program)
    if view == "startup":
        from distsim.views.pictures.startup import startup_lanes

        return startup_lanes(program, master)
    if view == "waitfor":
        from distsim.views.pictures.waitfor import waitfor_picture

        core: Sequence[int] | None = getattr(verdict, "core", None) or None
        return waitfor_picture(program, _given(run, view, "run").standstill, core)
    from distsim.views.pictures.dataflow import dataflow_lanes

    run = _given(run, view, "run")
    return dataflow_lanes(program, run, _with_calls(program, run, values))


def _with_calls(program: Program, run: Any, values: Any) -> Any:
    """Values at every call too, where the program is small enough for a picture that shows them."""
    if values is None or values.at_call or program.call_count > _MOST_CALLS_WITH_VALUES:
        return values
    from distsim.values import compute_values

    return compute_values(program, run.trace, at_calls=True)


def _op(op: str | None, ranks: int) -> Picture:
    from distsim.ops.table import ALIASES, OPS
    from distsim.views.pictures.op import MOST_RANKS, op_picture

    if op is None:
        raise UsageError("the view op draws one operation and none was named", "name one, as all_gather")
    _known("operation", op, tuple(sorted((*OPS, *ALIASES))))
    if not 2 <= ranks <= MOST_RANKS:
        raise UsageError(f"the view op draws 2 to {MOST_RANKS} ranks, not {ranks}", "leave the number out: it draws 4")
    return op_picture(OPS[ALIASES.get(op, op)], ranks)


def _timeline(fmt: str, program: Program | None, run: Any) -> str:
    from distsim.views.svg_timeline import timeline_svg

    if fmt != "svg":
        raise UsageError(f"the timeline is drawn as svg only, not {fmt}", "ask for --format svg; any browser shows it")
    return timeline_svg(_given(program, "timeline", "program"), _given(run, "timeline", "run"))


def _given(value: Any, view: str, what: str) -> Any:
    if value is None:
        raise UsageError(f"the view {view} needs a {what} and none was given", f"hand in {what}=…")
    return value


def _known(what: str, name: str, names: Sequence[str]) -> None:
    if name not in names:
        from distsim.names import near

        raise UsageError(f"there is no {what} {name}{near(name, names)}", f"there is {', '.join(names)}")
