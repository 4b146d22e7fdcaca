"""Files and texts become scenarios; files that are none are refused with a reason."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from distsim.common.errors import ScenarioErrors, ScenarioProblem
from distsim.common.file_io import escape_control_characters, read_bytes
from distsim.common.reading_limits import reading_limits
from distsim.common.records import gc_paused
from distsim.scenario.format.reading.scenario_reader import read_scenario_fields
from distsim.scenario.format.source.construct import construct
from distsim.scenario.format.source.document import YamlDocument, compose
from distsim.scenario.format.source.problems import ProblemCollector
from distsim.scenario.model import Scenario, build_scenario
from distsim.scenario.packaged import packaged_names, packaged_scenario

_STDIN = "<stdin>"
_STDIN_DESCRIPTOR = 0
_MISSING_SCENARIO_HINT = "check the spelling, or create a scenario with `distsim new FILE`"
_MISSING_CLUSTER_HINT = "check the spelling; `distsim clusters` lists the presets"
#: The start of a Python program: its first line that is no comment, or the line that names its
#: interpreter.
_PYTHON_START = re.compile(
    r"#!.*python|(?:[^\S\n]*+(?:#.*)?\n)*+(?:import \w|from [\w.]+ import |@?def \w|class \w)"
)


def load(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, with ``sets`` (`name=value`, as `--set` takes them) applied.

    A name without a suffix that is not a file, such as ``hybrid``, is a scenario installed with
    distsim. Raises ScenarioErrors with all problems of the file, UsageError for a wrong item of
    ``sets``.
    """
    file = _file_of(os.fspath(path))
    return loads(_read_scenario_text(file), file, sets)


def load_stdin(sets: Sequence[str] = ()) -> Scenario:
    """The scenario on standard input. Raises as `load` does."""
    return loads(_stdin_text(), _STDIN, sets)


def loads(text: str, file: str = "<text>", sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a text; ``file`` is the name that its places get."""
    document = YamlDocument(escape_control_characters(file, one_line=True), text)
    # A file makes many small objects, and no garbage among them.
    with reading_limits(file, len(text)), gc_paused():
        problems = _construct_root(document, sets)
        return build_scenario(read_scenario_fields(document, problems), document)


def load_raw(text: str, file: str = "<text>", sets: Sequence[str] = ()) -> dict[str, Any]:
    """A scenario's data as written, with ``sets`` applied; nothing is expanded or checked.

    Raises ScenarioErrors and UsageError.
    """
    document = YamlDocument(escape_control_characters(file, one_line=True), text)
    with reading_limits(file, len(text)):
        _construct_root(document, sets).raise_any()
    return dict(document.root) if isinstance(document.root, dict) else {}


def load_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain mapping in a cluster's file, with quantities by expression evaluated.

    Raises ScenarioErrors.
    """
    from distsim.scenario.format.models.cluster_quantities import evaluate_cluster_quantities

    file = os.fspath(path)
    document = YamlDocument(file, _read_scenario_text(file, _MISSING_CLUSTER_HINT))
    with reading_limits(file):
        problems = _construct_root(document)
    if not isinstance(document.root, dict):
        problems.add((), "expected a mapping of keys to values")
    problems.raise_any()
    found, errors = evaluate_cluster_quantities(dict(document.root))
    for error in errors:
        problems.add(
            error.path,
            str(error),
            "a cluster file may use only numbers and units, such as `4 * 25 GB/s`",
            offset=error.offset,
        )
    problems.raise_any()
    return found


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a scenario's file; `-` is standard input. Raises ScenarioErrors."""
    return _stdin_text() if path == "-" else _read_scenario_text(_file_of(os.fspath(path)))


def _construct_root(document: YamlDocument, sets: Sequence[str] = ()) -> ProblemCollector:
    """Set the document's node and data, with ``sets`` applied; the problems found so far."""
    root = compose(document)
    if sets:
        from distsim.scenario.format.source.overrides import apply_overrides

        root = apply_overrides(document, root, sets)
    document.node = root
    problems = ProblemCollector(document)
    document.root = construct(document, root, problems)
    return problems


# --- texts ---
def _file_of(path: str) -> str:
    """The file to read: a path as given, or the installed scenario of this name.

    A file of the user always wins over an installed scenario.
    """
    if path.endswith((".yaml", ".yml", ".py")) or os.path.exists(path):
        return path
    installed = packaged_scenario(path)
    return path if installed is None else os.path.relpath(installed)


def _stdin_text() -> str:
    return _decode(_read_source(_STDIN_DESCRIPTOR, _STDIN), _STDIN)


def _read_scenario_text(file: str, missing_hint: str = _MISSING_SCENARIO_HINT) -> str:
    text = _decode(_read_source(file, file, missing_hint), file)
    if file.endswith(".py") or _PYTHON_START.match(text):
        raise _file_error(
            file,
            "the file is a Python program; expected a YAML scenario",
            f"capture it: `distsim capture --nproc 2 -- python {file}`",
        )
    return text


def _missing_file_hint(file: str, general_hint: str) -> str:
    """A similar name, or how to get such a file."""
    similar = _similar_file_hint(file) if file else ""
    if similar:
        return similar
    if file.startswith("scenarios/"):
        return "run it in a clone, or write the lessons' files: `distsim learn -o scenarios`"
    return general_hint


def _read_source(source: str | int, file: str, missing_hint: str = _MISSING_SCENARIO_HINT) -> bytes:
    """The bytes of a file, or of an open descriptor."""
    try:
        return read_bytes(source)
    except FileNotFoundError:
        problem = "no such file" if file else "the name of the file is empty"
        raise _file_error(file, problem, _missing_file_hint(file, missing_hint)) from None
    except IsADirectoryError:
        raise _file_error(
            file,
            "the path is a directory; expected a scenario file",
            "give a file in this directory",
        ) from None
    except TimeoutError as error:
        raise _file_error(
            file, f"cannot be read: {error.strerror}", "write a scenario to it, or give a file"
        ) from None
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or error
        raise _file_error(
            file,
            f"cannot be read: {message}; expected a scenario file",
            "give a readable YAML file",
        ) from None


def _decode(data: bytes, file: str) -> str:
    if b"\0" in data:
        raise _file_error(
            file,
            "the file is binary; expected a YAML scenario in UTF-8",
            "give a text file; `distsim new FILE` creates a scenario",
        )
    try:
        return data.decode("utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        message = (
            f"the byte 0x{data[error.start]:02x} is not valid UTF-8; expected a YAML scenario in "
            "UTF-8"
        )
        problem = ScenarioProblem(file, line, column, message, "", "save the file as UTF-8")
        raise ScenarioErrors((problem,)) from None


def _similar_file_hint(file: str) -> str:
    from distsim.common.message_text import closest_name

    if not os.path.splitext(file)[1]:
        installed = closest_name(file, packaged_names())
        if installed:
            return f"did you mean {installed}, a scenario that is installed with distsim?"
    folder, name = os.path.split(file)
    try:
        entries = os.listdir(folder or ".")
    except OSError:
        return ""
    scenario_files = sorted(entry for entry in entries if entry.endswith((".yaml", ".yml")))
    similar = closest_name(name, scenario_files)
    return f"did you mean {os.path.join(folder, similar)}?" if similar else ""


def _file_error(file: str, message: str, hint: str = "") -> ScenarioErrors:
    return ScenarioErrors((ScenarioProblem(file, 0, 0, message, "", hint),))
