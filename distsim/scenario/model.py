"""The scenario: what a file says, read and checked, nothing derived; and how files and texts become one."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr

from distsim.errors import Problem, ScenarioErrors
from distsim.expr import Expression
from distsim.files import read_bytes, visible
from distsim.records import no_collection
from distsim.scenario.construct import construct
from distsim.scenario.document import Document, Path, Problems, compose, problem
from distsim.scenario.entries import Entry
from distsim.scenario.launch import Launch
from distsim.scenario.parts import Expect, FaultDecl, GroupDecl, MemoryDecl, Options, Sweep, TensorDecl, World
from distsim.scenario.read import read


class Scenario(BaseModel):
    """Who is there, what each rank does, and what must come out.

    Build one with `load`, `loads`, or from the same words in Python::

        Scenario(name="sum", world=4, tensors={"x": {"shape": [1], "value": "rank"}}, program=[{"all_reduce": {"tensor": "x"}}])

    which raises ScenarioErrors as a file does, with paths (`program[0].all_reduce.tensor`) in place of lines. Two scenarios are
    equal when they say the same, wherever they were written.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True, defer_build=True)

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
    options: Options
    launch: Launch
    faults: tuple[FaultDecl, ...]
    seed: int
    jitter: float
    sweep: Sweep | None
    expect: Expect | None
    file: str
    _document: Document = PrivateAttr(default_factory=lambda: Document("<python>"))

    def __init__(self, /, **data: object) -> None:
        document = Document(str(data.pop("file", "<python>")), root=data)
        fields = read(document, Problems(document))
        built = scenario_of(fields, document)
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
        """Names of the training strategies that the program is written with, each once, in the file's order."""
        from distsim.scenario.expansion import strategies_of

        return strategies_of(self._document.root)

    @property
    def written(self) -> Any:
        """What the file says, as plain data, before strategies become calls."""
        return self._document.root

    def problem(self, path: Path, message: str, offset: int | None = None) -> Problem:
        """A problem that shows later, at the value at ``path`` (`Step.path` and the keys below it)."""
        return problem(self._document, path, message, offset=offset)

    def to_yaml(self, flat: bool = False) -> str:
        """The text of a file that says the same: ``loads(s.to_yaml()) == s``. ``flat`` leaves out blocks that select everybody."""
        from distsim.scenario.dump import to_yaml

        return to_yaml(self, flat)


def scenario_of(fields: dict[str, Any], document: Document) -> Scenario:
    """A scenario from fields that `read` gave."""
    scenario = Scenario.model_construct(**fields)
    object.__setattr__(scenario, "__pydantic_private__", {"_document": document})
    return scenario


# --- files and texts ---
def load(path: str | os.PathLike[str], sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a file, with ``sets`` (`name=value`, as `--set` takes them) applied.

    Raises ScenarioErrors with all problems of the file, UsageError for a wrong item of ``sets``.
    """
    return loads(_text(os.fspath(path)), os.fspath(path), sets)


def load_stdin(sets: Sequence[str] = ()) -> Scenario:
    """The scenario on standard input. Raises as `load` does."""
    return loads(_decoded(_read(0, "<stdin>"), "<stdin>"), "<stdin>", sets)


def load_mapping(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The plain mapping in a cluster's file, with quantities by expression worked out. Raises ScenarioErrors."""
    from distsim.scenario.cluster_quantities import worked_out

    document = Document(os.fspath(path), _text(os.fspath(path)))
    document.node = compose(document)
    problems = Problems(document)
    document.root = data = construct(document, document.node, problems)
    if not isinstance(data, dict):
        problems.add((), "expected a mapping of keys to values")
    problems.raise_any()
    found, errors = worked_out(dict(data))
    for error in errors:
        problems.add(
            error.path, str(error), "a cluster's file knows numbers and units alone, as `4 * 25 GB/s`", offset=error.offset
        )
    problems.raise_any()
    return found


def loads(text: str, file: str = "<text>", sets: Sequence[str] = ()) -> Scenario:
    """The scenario in a text; ``file`` is what its places are called."""
    document = Document(visible(file, one_line=True), text)
    with no_collection():
        document.node = _composed(document, sets)
        problems = Problems(document)
        document.root = construct(document, document.node, problems)
        return scenario_of(read(document, problems), document)


def _composed(document: Document, sets: Sequence[str]) -> object:
    """The root node, with what ``sets`` changes."""
    root = compose(document)
    if not sets:
        return root
    from distsim.scenario.overrides import apply

    return apply(document, root, sets)


def text_of(path: str | os.PathLike[str]) -> str:
    """The text of a scenario's file; `-` is standard input. Raises ScenarioErrors."""
    return _decoded(_read(0, "<stdin>"), "<stdin>") if path == "-" else _text(os.fspath(path))


def raw(text: str, file: str = "<text>", sets: Sequence[str] = ()) -> dict[str, Any]:
    """A scenario's data as written, with ``sets`` applied, nothing expanded or checked. Raises ScenarioErrors, UsageError."""
    document = Document(visible(file, one_line=True), text)
    document.node = _composed(document, sets)
    problems = Problems(document)
    data = construct(document, document.node, problems)
    problems.raise_any()
    return dict(data) if isinstance(data, dict) else {}


def _text(file: str) -> str:
    text = _decoded(_read(file, file), file)
    if file.endswith(".py") or _PYTHON.match(text):
        raise _failed(
            file, "a Python program; expected a scenario, YAML", f"run it: `distsim capture --nproc 2 -- python {file}`"
        )
    return text


#: How a Python program starts: its first line that is no comment, or the line that names its interpreter.
_PYTHON = re.compile(r"#!.*python|(?:\s*(?:#.*)?\n)*(?:import \w|from [\w.]+ import |@?def \w|class \w)")


def _read(source: str | int, file: str) -> bytes:
    try:
        return read_bytes(source)
    except FileNotFoundError:
        raise _failed(
            file, "no such file", _near_file(file) or "see how it is spelt; `distsim new FILE` writes a starter"
        ) from None
    except IsADirectoryError:
        raise _failed(file, "this is a directory; expected a scenario file", "name a file in it") from None
    except TimeoutError as error:
        raise _failed(file, f"can't be read: {error.strerror}", "write a scenario into it, or name a file") from None
    except (OSError, ValueError) as error:
        message = getattr(error, "strerror", None) or error
        raise _failed(file, f"can't be read: {message}; expected a scenario file", "name a YAML file that may be read") from None


def _decoded(data: bytes, file: str) -> str:
    if b"\0" in data:
        raise _failed(
            file, "a binary file; expected a scenario, YAML in UTF-8", "name a text file; `distsim new FILE` writes a starter"
        )
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        column = error.start - data.rfind(b"\n", 0, error.start)
        message = f"the byte 0x{data[error.start]:02x} is not UTF-8; expected a scenario, YAML in UTF-8"
        raise ScenarioErrors((Problem(file, line, column, message, "", "save the file as UTF-8"),)) from None


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
