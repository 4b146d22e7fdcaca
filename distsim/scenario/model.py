"""The scenario: what a file says, read and checked, nothing derived; and how files and texts become
one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr

from distsim.common.errors import ScenarioErrors, ScenarioProblem
from distsim.common.expressions import Expression
from distsim.common.file_io import escape_control_characters, read_bytes
from distsim.common.records import gc_paused
from distsim.scenario.format.models.entries import Entry
from distsim.scenario.format.models.launch import LaunchOptions
from distsim.scenario.format.models.sections import (
    Expectations,
    FaultDecl,
    GroupDecl,
    MemoryDecl,
    ProcessGroupOptions,
    SweepDecl,
    TensorDecl,
    World,
)
from distsim.scenario.format.reading.scenario_reader import read_scenario_fields
from distsim.scenario.format.source.construct import construct
from distsim.scenario.format.source.document import (
    DataPath,
    ProblemCollector,
    YamlDocument,
    compose,
    problem_at,
)


class Scenario(BaseModel):
    """Who is there, what each rank does, and what must come out.

    Build one with `load`, `loads`, or from the same words in Python::

        Scenario(name="sum", world=4, tensors={"x": {"shape": [1], "value": "rank"}}, program=[{"all_reduce": {"tensor": "x"}}])

    which raises ScenarioErrors as a file does, with paths (`program[0].all_reduce.tensor`) in place
    of lines. Two scenarios are equal when they say the same, wherever they were written.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True
    )

    name: str
    about: str
    world: World
    backend: str
    cluster: str | dict[str, Any] | None
    mesh: dict[str, int]
    vars: dict[str, Expression]
    groups: dict[str, GroupDecl]
    tensors: dict[str, TensorDecl]
    memory: dict[str, MemoryDecl]
    program: tuple[Entry, ...]
    iterations: int
    options: ProcessGroupOptions
    launch: LaunchOptions
    faults: tuple[FaultDecl, ...]
    seed: int
    jitter: float
    sweep: SweepDecl | None
    expect: Expectations | None
    file: str
    _document: YamlDocument = PrivateAttr(default_factory=lambda: YamlDocument("<python>"))

    def __init__(self, /, **data: object) -> None:
        document = YamlDocument(str(data.pop("file", "<python>")), root=data)
        fields = read_scenario_fields(document, ProblemCollector(document))
        built = build_scenario(fields, document)
        object.__setattr__(self, "__dict__", dict(built.__dict__))
        object.__setattr__(self, "__pydantic_fields_set__", set(fields))
        object.__setattr__(self, "__pydantic_extra__", None)
        object.__setattr__(self, "__pydantic_private__", {"_document": document})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Scenario):
            return NotImplemented
        mine, theirs = ({k: v for k, v in dict(s).items() if k != "file"} for s in (self, other))
        return mine == theirs

    __hash__ = None  # type: ignore[assignment]

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the training strategies that the program is written with, each once, in the
        file's order.
        """
        from distsim.scenario.format.reading.strategy_expansion import strategy_names_in

        return strategy_names_in(self._document.root)

    @property
    def written(self) -> Any:
        """What the file says, as plain data, before strategies become calls."""
        return self._document.root

    def problem(self, path: DataPath, message: str, offset: int | None = None) -> ScenarioProblem:
        """A problem that shows later, at the value at ``path`` (`Step.path` and the keys below
        it).
        """
        return problem_at(self._document, path, message, offset=offset)

    def to_yaml(self, flat: bool = False) -> str:
        """The text of a file that says the same: ``loads(s.to_yaml()) == s``. ``flat`` leaves out
        blocks that select everybody.
        """
        from distsim.scenario.format.dump import to_yaml

        return to_yaml(self, flat)


def build_scenario(fields: dict[str, Any], document: YamlDocument) -> Scenario:
    """A scenario from fields that `read` gave."""
    scenario = Scenario.model_construct(**fields)
    object.__setattr__(scenario, "__pydantic_private__", {"_document": document})
    return scenario


# --- files and texts ---
def load(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, with ``sets`` (`name=value`, as `--set` takes them) applied.

    Raises ScenarioErrors with all problems of the file, UsageError for a wrong item of ``sets``.
    """
    return loads(_read_scenario_text(os.fspath(path)), os.fspath(path), sets)


def load_stdin(sets: Sequence[str] = ()) -> Scenario:
    """The scenario on standard input. Raises as `load` does."""
    return loads(_decode(_read_source(0, "<stdin>"), "<stdin>"), "<stdin>", sets)


def load_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain mapping in a cluster's file, with quantities by expression worked out. Raises
    ScenarioErrors.
    """
    from distsim.scenario.format.models.cluster_quantities import evaluate_cluster_quantities

    document = YamlDocument(os.fspath(path), _read_scenario_text(os.fspath(path)))
    document.node = compose(document)
    problems = ProblemCollector(document)
    document.root = data = construct(document, document.node, problems)
    if not isinstance(data, dict):
        problems.add((), "expected a mapping of keys to values")
    problems.raise_any()
    found, errors = evaluate_cluster_quantities(dict(data))
    for error in errors:
        problems.add(
            error.path,
            str(error),
            "a cluster's file knows numbers and units alone, as `4 * 25 GB/s`",
            offset=error.offset,
        )
    problems.raise_any()
    return found


def loads(text: str, file: str = "<text>", sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a text; ``file`` is what its places are called."""
    document = YamlDocument(escape_control_characters(file, one_line=True), text)
    with gc_paused():
        document.node = _compose_with_overrides(document, sets)
        problems = ProblemCollector(document)
        document.root = construct(document, document.node, problems)
        return build_scenario(read_scenario_fields(document, problems), document)


def _compose_with_overrides(document: YamlDocument, sets: Sequence[str]) -> object:
    """The root node, with what ``sets`` changes."""
    root = compose(document)
    if not sets:
        return root
    from distsim.scenario.format.source.overrides import apply_overrides

    return apply_overrides(document, root, sets)


def read_text(path: str | os.PathLike[str]) -> str:
    """The text of a scenario's file; `-` is standard input. Raises ScenarioErrors."""
    return (
        _decode(_read_source(0, "<stdin>"), "<stdin>")
        if path == "-"
        else _read_scenario_text(os.fspath(path))
    )


def load_raw(text: str, file: str = "<text>", sets: Sequence[str] = ()) -> dict[str, Any]:
    """A scenario's data as written, with ``sets`` applied, nothing expanded or checked. Raises
    ScenarioErrors, UsageError.
    """
    document = YamlDocument(escape_control_characters(file, one_line=True), text)
    document.node = _compose_with_overrides(document, sets)
    problems = ProblemCollector(document)
    data = construct(document, document.node, problems)
    problems.raise_any()
    return dict(data) if isinstance(data, dict) else {}


def _read_scenario_text(file: str) -> str:
    text = _decode(_read_source(file, file), file)
    if file.endswith(".py") or _PYTHON_START.match(text):
        raise _file_error(
            file,
            "a Python program; expected a scenario, YAML",
            f"run it: `distsim capture --nproc 2 -- python {file}`",
        )
    return text


#: How a Python program starts: its first line that is no comment, or the line that names its
#: interpreter.
_PYTHON_START = re.compile(
    r"#!.*python|(?:\s*(?:#.*)?\n)*(?:import \w|from [\w.]+ import |@?def \w|class \w)"
)


def _read_source(source: str | int, file: str) -> bytes:
    try:
        return read_bytes(source)
    except FileNotFoundError:
        raise _file_error(
            file,
            "no such file",
            _similar_file_hint(file) or "see how it is spelt; `distsim new FILE` writes a starter",
        ) from None
    except IsADirectoryError:
        raise _file_error(
            file, "this is a directory; expected a scenario file", "name a file in it"
        ) from None
    except TimeoutError as error:
        raise _file_error(
            file, f"can't be read: {error.strerror}", "write a scenario into it, or name a file"
        ) from None
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or error
        raise _file_error(
            file,
            f"can't be read: {message}; expected a scenario file",
            "name a YAML file that may be read",
        ) from None


def _decode(data: bytes, file: str) -> str:
    if b"\0" in data:
        raise _file_error(
            file,
            "a binary file; expected a scenario, YAML in UTF-8",
            "name a text file; `distsim new FILE` writes a starter",
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        message = (
            f"the byte 0x{data[error.start]:02x} is not UTF-8; expected a scenario, YAML in UTF-8"
        )
        raise ScenarioErrors(
            (ScenarioProblem(file, line, column, message, "", "save the file as UTF-8"),)
        ) from None


def _similar_file_hint(file: str) -> str:
    from distsim.common.message_text import closest_name

    folder, name = os.path.split(file)
    try:
        found = closest_name(
            name,
            sorted(
                entry for entry in os.listdir(folder or ".") if entry.endswith((".yaml", ".yml"))
            ),
        )
    except OSError:
        return ""
    return f"did you mean {os.path.join(folder, found)}?" if found else ""


def _file_error(file: str, message: str, hint: str = "") -> ScenarioErrors:
    return ScenarioErrors((ScenarioProblem(file, 0, 0, message, "", hint),))
