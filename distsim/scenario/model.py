"""The `Scenario`: a file's content, read and checked, with nothing derived from it.

Derived facts (groups, classes of ranks, calls) belong to the `Program` that
`distsim.program.lower` makes. Files and texts become scenarios in `distsim.scenario.loading`.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, PrivateAttr

from distsim.common.errors import ScenarioProblem
from distsim.common.expressions import Expression
from distsim.scenario.format.models.entries import Entry
from distsim.scenario.format.models.expectations import Expectations
from distsim.scenario.format.models.launch import LaunchOptions
from distsim.scenario.format.models.sections import (
    FaultDecl,
    GroupDecl,
    MemoryDecl,
    ProcessGroupOptions,
    SweepDecl,
    TensorDecl,
    World,
)
from distsim.scenario.format.reading.scenario_reader import read_scenario_fields
from distsim.scenario.format.source.document import DataPath, YamlDocument
from distsim.scenario.format.source.problems import ProblemCollector, problem_at


class Scenario(BaseModel):
    """The ranks, what each of them does, and what must come out.

    Build one with `load`, `loads`, or with the same keys in Python::

        Scenario(
            name="sum",
            world=4,
            tensors={"x": {"shape": [1], "value": "rank"}},
            program=[{"all_reduce": {"tensor": "x"}}],
        )

    which raises ScenarioErrors as a file does, with paths (`program[0].all_reduce.tensor`) in place
    of lines. Two scenarios are equal if their contents are, wherever they were written.
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
        # Pydantic's own validation is not used: the reader checks across keys, and knows places.
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
        return self._content() == other._content()

    __hash__ = None  # type: ignore[assignment]

    def _content(self) -> dict[str, Any]:
        return {name: value for name, value in dict(self).items() if name != "file"}

    @property
    def strategies(self) -> tuple[str, ...]:
        """Names of the program's training strategies, each once, in the file's order."""
        from distsim.scenario.format.reading.strategy_expansion import strategy_names_in

        return strategy_names_in(self._document.root)

    @property
    def written(self) -> Any:
        """The file's content as plain data, before strategies are expanded."""
        return self._document.root

    def problem(self, path: DataPath, message: str, offset: int | None = None) -> ScenarioProblem:
        """A problem that is found after reading, with the value at ``path``.

        Paths start from those of entries (`ScenarioStep.path`), and lead on by keys.
        """
        return problem_at(self._document, path, message, offset=offset)

    def to_data(self, flat: bool = False) -> dict[str, object]:
        """The content of an equal file as plain data; ``flat`` as in `to_yaml`."""
        from distsim.scenario.format.dump import to_data

        return to_data(dict(self), flat)

    def to_yaml(self, flat: bool = False) -> str:
        """The text of an equal file: ``loads(s.to_yaml()) == s``.

        ``flat``: blocks that select all ranks are replaced by their entries.
        """
        from distsim.scenario.format.dump import to_yaml

        return to_yaml(dict(self), flat)


def build_scenario(fields: dict[str, Any], document: YamlDocument) -> Scenario:
    """A scenario from fields that `read_scenario_fields` returned."""
    scenario = Scenario.model_construct(**fields)
    object.__setattr__(scenario, "__pydantic_private__", {"_document": document})
    return scenario
