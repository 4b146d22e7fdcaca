"""The way from a view's name and a subject to text or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from distsim.errors import UsageError
from distsim.views.drawing.sequence import SequenceDiagram, place
from distsim.views.drawing.view import FORMATS, Subject, View
from distsim.views.pictures import names

VIEWS = names()


def view_of(name: str) -> View:
    """A view by its name. Raises UsageError where there is none."""
    known("view", name, VIEWS)
    view: View = import_module(f"distsim.views.pictures.{name}").VIEW
    return view


def render(name: str, fmt: str, subject: Subject) -> str | bytes:
    """A picture: text for svg, dot and mermaid, bytes for png and pdf.

    Raises UsageError for an unknown view, format or operation and for what a view lacks, EnvironmentFault where the format
    can't be made on this machine.
    """
    view = view_of(name)
    known("format", fmt, FORMATS)
    if fmt not in view.formats:
        only = " or ".join(view.formats)
        raise UsageError(f"the {name} is drawn as {only} only, not {fmt}", f"ask for --format {only}; any browser shows it")
    large = view.large(subject) if view.large is not None and fmt in ("svg", "png", "pdf") else None
    drawing = view.draw(subject) if large is None else large
    if isinstance(drawing, str):
        from distsim.views.drawing.convert import converted

        return drawing if fmt == "svg" else converted(drawing, "png" if fmt == "png" else "pdf")
    if fmt == "mermaid":
        from distsim.views.drawing.mermaid import flowchart, sequence

        return sequence(drawing) if isinstance(drawing, SequenceDiagram) else flowchart(drawing)
    from distsim.views.drawing.dot import dot, drawn

    picture = place(drawing) if isinstance(drawing, SequenceDiagram) else drawing
    text = dot(picture)
    if fmt == "dot":
        return text
    image = drawn(text, fmt, picture.engine)
    return image.decode() if fmt == "svg" else image


def known(what: str, name: str, names: Sequence[str]) -> None:
    """Raises UsageError where a name is none of these."""
    if name not in names:
        from distsim.names import near

        raise UsageError(f"there is no {what} {name}{near(name, names)}", f"there is {', '.join(names)}")


__all__ = ["FORMATS", "VIEWS", "Subject", "render", "view_of"]
