"""The problems of a document: collected while it is read, each with its place.

Problems are collected rather than raised one by one, so that a user sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Iterable

from distsim.common.errors import ScenarioErrors, ScenarioProblem
from distsim.common.message_text import value_text
from distsim.operations.core.field_types import single_errors
from distsim.scenario.format.source.document import DataPath, YamlDocument

#: Further problems are not shown; most of them follow from the first ones.
_MAX_PROBLEMS = 200


def path_text(path: Iterable[str | int]) -> str:
    """``("program", 0, "send", "dst")`` as ``program[0].send.dst``."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
        else:
            text += f".{part}" if text else str(part)
    return text


class ProblemCollector:
    """The problems of one document so far, each once.

    ``add`` never raises; ``raise_any`` does, with all of them in order of place.
    """

    def __init__(self, document: YamlDocument) -> None:
        self.document = document
        self.found: dict[tuple[str, int, int, str, str], ScenarioProblem] = {}

    def __bool__(self) -> bool:
        return bool(self.found)

    def add(
        self,
        path: DataPath,
        message: str,
        hint: str = "",
        at_key: bool = False,
        offset: int | None = None,
    ) -> None:
        """Note a problem with the value at ``path``.

        ``at_key``: with its key. ``offset``: at that character of the text.
        """
        self.keep(problem_at(self.document, path, message, hint, at_key, offset))

    def keep(self, problem: ScenarioProblem) -> None:
        """Note a problem unless the same one is noted already."""
        key = (problem.file, problem.line, problem.column, problem.path, problem.message)
        self.found.setdefault(key, problem)

    def error(self, path: DataPath, error: ValueError) -> None:
        """Note the errors of a field's parser.

        They may know the path from the field to the value in question, and the character.
        """
        for single in single_errors(error):
            full_path = (*path, *getattr(single, "path", ()))
            message = _with_key(full_path, str(single))
            self.add(full_path, message, offset=getattr(single, "offset", None))

    def raise_any(self) -> None:
        """Raise ScenarioErrors if there are problems; those of `--set` come last."""
        if not self.found:
            return
        ordered = sorted(
            self.found.values(),
            key=lambda p: (p.file != self.document.file, p.line, p.column, p.path, p.message),
        )
        raise ScenarioErrors(tuple(ordered[:_MAX_PROBLEMS]))


def _with_key(path: DataPath, message: str) -> str:
    """The message with the key in front if it reports an unknown value.

    The parser of a value does not know the key. If the value is itself a key, the key above it is
    named.
    """
    if not message.startswith("unknown value "):
        return message
    keys = [part for part in path if isinstance(part, str)]
    if keys and message.startswith(f"unknown value {value_text(keys[-1])}"):
        keys.pop()
    return f"{keys[-1]}: {message}" if keys else message


def problem_at(
    document: YamlDocument,
    path: DataPath,
    message: str,
    hint: str = "",
    at_key: bool = False,
    offset: int | None = None,
) -> ScenarioProblem:
    """A problem with the value at a path; without a text, the path stands for the place."""
    spot = document.spot(path, at_key, offset)
    if not hint:
        from distsim.scenario.format.schema.remedies import remedy

        hint = remedy(path, message)
    if spot is None:
        return ScenarioProblem(document.file, 0, 0, message, "", hint, path_text(path))
    return ScenarioProblem(spot.file, spot.line, spot.column, message, spot.source_line, hint)
