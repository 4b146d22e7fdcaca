"""Files and texts to scenarios."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path as FilePath
from typing import Any

from distsim.collection import no_collection
from distsim.errors import Problem, ScenarioErrors
from distsim.scenario.construct import construct
from distsim.scenario.document import Document, compose
from distsim.scenario.model import Scenario, scenario_of
from distsim.scenario.overrides import apply
from distsim.scenario.problems import Problems
from distsim.scenario.read import read

#: Larger files are no scenarios.
MAX_BYTES = 16 * 2**20


def load(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, with ``sets`` (`name=value`, as `--set` takes them) applied.

    Raises ScenarioErrors with all problems of the file, UsageError for a wrong item of ``sets``.
    """
    return loads(_text(os.fspath(path)), os.fspath(path), sets)


def load_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain mapping in a YAML file that is no scenario (a cluster's file). Raises ScenarioErrors."""
    document = Document(os.fspath(path), _text(os.fspath(path)))
    document.node = compose(document)
    problems = Problems(document)
    data = construct(document, document.node, problems)
    if not isinstance(data, dict):
        problems.add((), "expected a mapping of keys to values")
    problems.raise_any()
    return dict(data)


def loads(text: str, file: str = "<text>", sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a text; ``file`` is what its places are called."""
    document = Document(file, text)
    with no_collection():
        document.node = apply(document, compose(document), sets)
        problems = Problems(document)
        document.root = construct(document, document.node, problems)
        return scenario_of(read(document, problems), document)


def _text(file: str) -> str:
    try:
        with FilePath(file).open("rb") as stream:
            data = stream.read(MAX_BYTES + 1)
    except FileNotFoundError:
        raise _failed(file, "no such file", _near_file(file)) from None
    except IsADirectoryError:
        raise _failed(file, "this is a directory; expected a scenario file", "name a file in it") from None
    except (OSError, ValueError) as error:
        raise _failed(file, f"can't be read: {getattr(error, 'strerror', None) or error}") from None
    if len(data) > MAX_BYTES:
        raise _failed(file, f"larger than {MAX_BYTES // 2**20} MiB; expected a scenario file")
    if b"\0" in data:
        raise _failed(file, "a binary file; expected a scenario, YAML in UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8; expected a scenario, YAML in UTF-8"
        raise ScenarioErrors((Problem(file, line, column, message),)) from None


def _near_file(file: str) -> str:
    from distsim.names import nearest

    folder, name = os.path.split(file)
    try:
        found = nearest(name, sorted(entry for entry in os.listdir(folder or ".") if entry.endswith((".yaml", ".yml"))))
    except OSError:
        return ""
    return f"did you mean {os.path.join(folder, found)}?" if found else ""


def _failed(file: str, message: str, hint: str = "") -> ScenarioErrors:
    return ScenarioErrors((Problem(file, 0, 0, message, "", hint),))
