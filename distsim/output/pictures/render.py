"""The way from a view's name and a subject to text or bytes."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from distsim.common.errors import UsageError
from distsim.output.pictures.components.view_interface import (
    PICTURE_FORMATS,
    PictureInput,
    PictureView,
)
from distsim.output.pictures.drawing.sequence_diagram import SequenceDiagram, laid_out_diagram
from distsim.output.pictures.views import view_names

VIEW_NAMES = view_names()


def load_view(name: str) -> PictureView:
    """A view by its name. Raises UsageError where there is none."""
    require_known("view", name, VIEW_NAMES)
    view: PictureView = import_module(f"distsim.output.pictures.views.{name}").VIEW
    return view


def render_picture(name: str, fmt: str, subject: PictureInput) -> str | bytes:
    """A picture: text for svg, dot and mermaid, bytes for png and pdf.

    Raises UsageError for an unknown view, format or operation and for what a view lacks,
    EnvironmentFault where the format can't be made on this machine.
    """
    view = load_view(name)
    require_known("format", fmt, PICTURE_FORMATS)
    if fmt not in view.formats:
        only = " or ".join(view.formats)
        raise UsageError(
            f"the {name} is drawn as {only} only, not {fmt}",
            f"ask for --format {only}; any browser shows it",
        )
    large = view.large(subject) if view.large is not None and fmt in ("svg", "png", "pdf") else None
    drawing = view.draw(subject) if large is None else large
    if isinstance(drawing, str):
        from distsim.output.pictures.drawing.svg_conversion import convert_svg

        return drawing if fmt == "svg" else convert_svg(drawing, "png" if fmt == "png" else "pdf")
    if fmt == "mermaid":
        from distsim.output.pictures.drawing.mermaid import flowchart_text, sequence_text

        return (
            sequence_text(drawing)
            if isinstance(drawing, SequenceDiagram)
            else flowchart_text(drawing)
        )
    from distsim.output.pictures.drawing.dot import dot_text, render_dot

    picture = laid_out_diagram(drawing) if isinstance(drawing, SequenceDiagram) else drawing
    text = dot_text(picture)
    if fmt == "dot":
        return text
    image = render_dot(text, fmt, picture.engine)
    return image.decode() if fmt == "svg" else image


def require_known(what: str, name: str, names: Sequence[str]) -> None:
    """Raises UsageError where a name is none of these."""
    if name not in names:
        from distsim.common.message_text import did_you_mean

        raise UsageError(
            f"there is no {what} {name}{did_you_mean(name, names)}", f"there is {', '.join(names)}"
        )


__all__ = ["PICTURE_FORMATS", "VIEW_NAMES", "PictureInput", "render_picture", "load_view"]
