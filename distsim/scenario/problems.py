"""Collects what is wrong with a scenario, each problem with its place."""

from __future__ import annotations

from collections.abc import Iterable

from distsim.errors import Problem, ScenarioErrors
from distsim.ops.fields import errors_of
from distsim.scenario.document import Document, Path

#: More than these are not shown: they follow from the first ones more often than not.
_MOST = 200


def path_text(path: Iterable[str | int]) -> str:
    """``("program", 0, "send", "dst")`` as ``program[0].send.dst``."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


class Problems:
    """The problems of one document so far. ``add`` never raises; ``raise_any`` does, with all of them in order of place."""

    def __init__(self, document: Document) -> None:
        self.document = document
        self.found: dict[tuple[str, int, int, str, str], Problem] = {}

    def __bool__(self) -> bool:
        return bool(self.found)

    def add(self, path: Path, message: str, hint: str = "", at_key: bool = False, offset: int | None = None) -> None:
        """Note a problem with the value at ``path`` (``at_key``: with its key; ``offset``: at that character of the text)."""
        self.keep(problem(self.document, path, message, hint, at_key, offset))

    def keep(self, found: Problem) -> None:
        key = (found.file, found.line, found.column, found.path, found.message)
        self.found.setdefault(key, found)

    def error(self, path: Path, error: ValueError) -> None:
        """Note a field parser's errors; they may know the way from the field to the culprit, and the character."""
        for one in errors_of(error):
            self.add((*path, *getattr(one, "path", ())), str(one), offset=getattr(one, "offset", None))

    def raise_any(self) -> None:
        if self.found:
            ordered = sorted(
                self.found.values(), key=lambda p: (p.file != self.document.file, p.line, p.column, p.path, p.message)
            )
            raise ScenarioErrors(tuple(ordered[:_MOST]))


def problem(
    document: Document, path: Path, message: str, hint: str = "", at_key: bool = False, offset: int | None = None
) -> Problem:
    """A problem with the value at a path; without a text to point at, with the path in place of a line."""
    spot = document.spot(path, at_key, offset)
    if not hint:
        from distsim.scenario.remedies import remedy

        hint = remedy(path, message)
    if spot is None:
        return Problem(document.file, 0, 0, message, "", hint, path_text(path))
    return Problem(spot.file, spot.line, spot.column, message, spot.source_line, hint)
