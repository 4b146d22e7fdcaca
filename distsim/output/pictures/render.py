"""Draws a view: from its name and an input to text or bytes."""

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
#: Former names of views. They are too short to resemble the new names.
_RENAMED_VIEWS = {"op": "operation", "rounds": "algorithm", "waitfor": "wait-for"}


def load_view(name: str) -> PictureView:
    """The view with this name. Raises UsageError if there is none."""
    _require_known("view", name, VIEW_NAMES, _RENAMED_VIEWS.get(name))
    module = name.replace("-", "_")
    view: PictureView = import_module(f"distsim.output.pictures.views.{module}").VIEW
    return view


def render_picture(name: str, fmt: str, subject: PictureInput) -> str | bytes:
    """Draw a picture: text for svg, dot and mermaid, bytes for png and pdf.

    Raises UsageError for an unknown view, format or operation and for missing input, and
    EnvironmentFault if this machine cannot write the format.
    """
    view = load_view(name)
    _require_known("format", fmt, PICTURE_FORMATS)
    if fmt not in view.formats:
        only = f"{', '.join(view.formats[:-1])} or {view.formats[-1]}"
        raise UsageError(
            f"the view {name} cannot be written as {fmt}",
            f"use --format {only}",
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


def _require_known(what: str, name: str, names: Sequence[str], new_name: str | None = None) -> None:
    """Raises UsageError if a name is none of these. ``new_name``: the name that replaced it."""
    if name in names:
        return
    from distsim.common.message_text import did_you_mean, name_list

    hint = f"; did you mean {new_name}?" if new_name else did_you_mean(name, names)
    raise UsageError(f"no {what} `{name}`{hint}", f"known: {name_list(names, len(names))}")


__all__ = ["PICTURE_FORMATS", "VIEW_NAMES", "PictureInput", "render_picture", "load_view"]
