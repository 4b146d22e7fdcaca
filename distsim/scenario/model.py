"""The scenario: what a file says, read and checked, nothing derived."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr

from distsim.errors import Problem
from distsim.expr import Expression
from distsim.scenario.document import Document, Path
from distsim.scenario.entries import Entry
from distsim.scenario.launch import Launch
from distsim.scenario.parts import Expect, FaultDecl, GroupDecl, MemoryDecl, Options, Sweep, TensorDecl, World
from distsim.scenario.problems import Problems, problem
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
