"""A document's data to the fields of a `Scenario`.

Key idea: every top-level key is read by itself, and a problem is noted rather than raised, so that
one problem hides no other. What cannot be read gets a default, on which reading goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import PurePath
from typing import Any, TypeVar

from pydantic import ValidationError

from distsim.common.errors import UsageError
from distsim.common.expressions import Expression
from distsim.common.message_text import closest_name, did_you_mean, name_list, value_text
from distsim.operations.core.field_types import PerRank, expression_field
from distsim.scenario.format.models.base_model import FormatModel
from distsim.scenario.format.models.entries import Entry
from distsim.scenario.format.models.expectations import Expectations
from distsim.scenario.format.models.launch import LaunchOptions
from distsim.scenario.format.models.scalars import MAX_WORLD, integer
from distsim.scenario.format.models.sections import (
    MEMORY_PARTS,
    FaultDecl,
    GroupDecl,
    MemoryDecl,
    ProcessGroupOptions,
    SweepDecl,
    TensorDecl,
    World,
)
from distsim.scenario.format.models.top_level import TOP_LEVEL_KEYS, ScenarioFileFields, parser_of
from distsim.scenario.format.reading.name_scope import NameScope
from distsim.scenario.format.reading.program_names import ProgramNameChecker
from distsim.scenario.format.reading.pydantic_errors import add_validation_errors
from distsim.scenario.format.reading.step_reader import StepReader
from distsim.scenario.format.reading.strategy_context import parse_variable, uniform_quantities
from distsim.scenario.format.reading.strategy_expansion import expand_strategies
from distsim.scenario.format.source.document import DataPath, YamlDocument
from distsim.scenario.format.source.problems import ProblemCollector

Model = TypeVar("Model", bound=FormatModel)

#: Fields of a scenario that may be None. Any other None is a value that could not be read.
_OPTIONAL_FIELDS = ("cluster", "sweep", "expect")


def read_scenario_fields(document: YamlDocument, problems: ProblemCollector) -> dict[str, Any]:
    """The fields of a `Scenario`. Raises ScenarioErrors with all problems, in order of place."""
    data = document.root
    if not isinstance(data, Mapping):
        if data is not None or not problems:
            problems.add(
                (),
                (
                    "expected a scenario (a mapping with `world`, `program` and other keys), "
                    f"found {value_text(data)}"
                ),
            )
        problems.raise_any()
        return {}
    fields = _ScenarioReader(document, problems, expand_strategies(data, problems)).fields()
    problems.raise_any()
    return fields


class _ScenarioReader:
    """Reads the keys of one file, in an order in which each finds the names that it may use."""

    def __init__(
        self, document: YamlDocument, problems: ProblemCollector, data: Mapping[Any, Any]
    ) -> None:
        self.document = document
        self.problems = problems
        self.data = data
        self.known_quantities = uniform_quantities(data)

    def fields(self) -> dict[str, Any]:
        self._report_unknown_keys()
        world = self._world()
        world_size = world.size if world else None
        found: dict[str, Any] = {
            "name": self._scalar("name", PurePath(self.document.file).stem or "scenario"),
            "about": self._scalar("about"),
            "world": world,
            "backend": self._scalar("backend"),
            "cluster": self._cluster(),
            "mesh": self._mesh(world_size),
            "iterations": self._scalar("iterations"),
            "options": self._section("options", ProcessGroupOptions, {}),
            "launch": self._section("launch", LaunchOptions, {}),
            "seed": self._scalar("seed"),
            "jitter": self._scalar("jitter"),
            "sweep": self._section("sweep", SweepDecl, None),
            "expect": self._section("expect", Expectations, None),
        }
        self._read_names_and_program(found, world_size)
        found["file"] = self.document.file
        unreadable = [key for key, value in found.items() if value is None]
        for key in unreadable:
            if key not in _OPTIONAL_FIELDS:
                del found[key]
        return found

    def _report_unknown_keys(self) -> None:
        for key in self.data:
            if key not in TOP_LEVEL_KEYS:
                self.problems.add(
                    (key,),
                    f"unknown key {key}; expected {name_list(TOP_LEVEL_KEYS, 20)}"
                    f"{did_you_mean(key, TOP_LEVEL_KEYS)}",
                    at_key=True,
                )

    def _read_names_and_program(self, found: dict[str, Any], world_size: int | None) -> None:
        """The keys that define or use names, definitions first."""
        scope = NameScope(self.problems, found["mesh"], world_size)
        scope.define_axes()
        found["vars"] = self._vars()
        scope.define_vars(found["vars"])
        found["groups"] = self._groups()
        scope.define_groups(found["groups"], world_size)
        scope.groups.update(name for name in self._names("groups") if isinstance(name, str))
        scope.groups.update(self._names_under_misspelt("groups"))
        declared = {
            name: self._tensor(name, value) for name, value in self._names("tensors").items()
        }
        found["tensors"] = self._with_defaults(declared)
        scope.define_tensors(found["tensors"])
        scope.tensors |= dict.fromkeys([*declared, *self._names_under_misspelt("tensors")])
        found["program"] = self._program(found["iterations"])
        ProgramNameChecker(scope).check(found["program"])
        found["memory"] = self._memory(scope)
        found["faults"] = self._faults(scope)
        if found["expect"] is not None:
            self._check_expectations(found["expect"], scope, found["tensors"])

    def _names_under_misspelt(self, key: str) -> list[str]:
        """The names under an unknown key that resembles ``key``.

        The unknown key is reported, so the use of these names is not reported as a second mistake.
        """
        return [
            name
            for written, names in self.data.items()
            if self._is_misspelt(written, key) and isinstance(names, Mapping)
            for name in names
        ]

    @staticmethod
    def _is_misspelt(written: object, key: str) -> bool:
        return written not in TOP_LEVEL_KEYS and closest_name(written, TOP_LEVEL_KEYS) == key

    # --- values of any key ---
    def _scalar(self, key: str, default: Any = None) -> Any:
        if default is None:
            default = ScenarioFileFields.model_fields[key].default
        if key not in self.data:
            return default
        try:
            return parser_of(key)(self.data[key])
        except ValueError as error:
            self.problems.error((key,), error)
            return default

    def _section(self, key: str, model: type[Model], default: Any) -> Model | None:
        value = self.data.get(key)
        if value is None:
            value = default
        return None if value is None else self._model((key,), model, value)

    def _model(
        self, path: DataPath, model: type[Model], value: Any, name: str = ""
    ) -> Model | None:
        """A model from the mapping at a path; None, with the problems noted, if it is invalid."""
        if isinstance(value, model):
            return value
        if not isinstance(value, Mapping):
            self.problems.add(path, f"expected a mapping, found {value_text(value)}")
            return None
        try:
            return model.model_validate(dict(value), context=self.known_quantities)
        except ValidationError as errors:
            add_validation_errors(self.problems, errors, path, model, name=name or str(path[-1]))
            return None

    def _names(self, key: str) -> Mapping[Any, Any]:
        """A top-level mapping of names; empty if it is missing or null."""
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.problems.add((key,), f"expected a mapping of names, found {value_text(value)}")
            return {}
        return value

    # --- world, mesh and cluster ---
    def _world(self) -> World | None:
        value = self.data.get("world")
        if value is None:
            remedy = "`world: 4`, or `world: {nodes: 2, ranks_per_node: 8}`"
            self.problems.add(("world",), "`world` is missing: the number of ranks", remedy)
            return None
        if isinstance(value, Mapping):
            return self._model(("world",), World, value)
        if isinstance(value, World):
            return value
        parse = integer(1, MAX_WORLD, "the number of ranks, an integer")
        try:
            return World(nodes=1, ranks_per_node=parse(value))
        except ValueError as error:
            self.problems.error(("world",), error)
            return None

    def _mesh(self, world_size: int | None) -> dict[str, int]:
        parse = integer(1, MAX_WORLD, "the size of an axis, an integer")
        given = self._names("mesh")
        mesh: dict[str, int] = {}
        for axis, value in given.items():
            try:
                mesh[axis] = parse(value)
            except ValueError as error:
                self.problems.error(("mesh", axis), error)
        is_complete = bool(mesh) and len(mesh) == len(given)
        if is_complete and world_size is not None and prod(mesh.values()) != world_size:
            product = " * ".join(str(size) for size in mesh.values())
            total = product if len(mesh) == 1 else f"{product} = {prod(mesh.values())}"
            self.problems.add(
                ("mesh",),
                f"the mesh has {total} ranks, but the world has {world_size}",
            )
        return mesh

    def _cluster(self) -> Any:
        """A preset's name, a file, or a mapping.

        Presets and mappings are checked here, files when they are needed.
        """
        value = self.data.get("cluster")
        if value is None:
            return None
        if isinstance(value, Mapping):
            return self._inline_cluster(_plain_data(value))
        if not isinstance(value, str):
            self.problems.add(
                ("cluster",),
                f"expected a preset, a file, or a cluster as a mapping, found {value_text(value)}",
            )
            return None
        if not _is_cluster_file(value):
            self._check_preset(value)
        return value

    def _check_preset(self, name: str) -> None:
        from distsim.hardware.cluster import PRESETS

        if name not in PRESETS:
            self.problems.add(
                ("cluster",),
                (
                    f"unknown cluster {name}; presets: "
                    f"{name_list(PRESETS)}{did_you_mean(name, PRESETS)}"
                ),
                "write the name of a preset, or of a cluster file that ends in .yaml",
            )

    def _inline_cluster(self, data: dict[str, Any]) -> dict[str, Any]:
        from distsim.hardware.cluster import cluster_from
        from distsim.scenario.format.models.cluster_quantities import evaluate_cluster_quantities

        data, errors = evaluate_cluster_quantities(data, self.known_quantities)
        for quantity_error in errors:
            self.problems.error(("cluster",), quantity_error)
        try:
            cluster_from(data)
        except UsageError as error:
            for line in error.message.splitlines():
                self._add_cluster_error(line, error.remedy)
        return data

    def _add_cluster_error(self, line: str, remedy: str) -> None:
        """A line of the cluster's own error, ``cluster.gpu.memory: expected …``, at its key."""
        place, _, message = line.partition(": ")
        path: DataPath = ("cluster",)
        if message and place.startswith("cluster"):
            path = tuple(place.split("."))
        # "expected …" says what to write, so it needs no remedy.
        needs_remedy = not message.startswith("expected")
        self.problems.add(path, message or line, remedy if needs_remedy else "")

    # --- declarations ---
    def _vars(self) -> dict[str, Expression]:
        found = {}
        for name, value in self._names("vars").items():
            try:
                found[name] = parse_variable(value)
            except ValueError as error:
                self.problems.error(("vars", name), error)
                found[name] = expression_field(0)
        return found

    def _groups(self) -> dict[str, GroupDecl]:
        found = {}
        for name, value in self._names("groups").items():
            if isinstance(value, list | tuple):  # short for its ranks
                value = {"ranks": value}
            group = self._model(("groups", name), GroupDecl, value, f"the group {name}")
            if group is not None:
                found[name] = group
        return found

    def _tensor(self, name: str, value: Any) -> TensorDecl | None:
        return self._model(("tensors", name), TensorDecl, value, f"the tensor {name}")

    def _with_defaults(self, declared: Mapping[str, TensorDecl | None]) -> dict[str, TensorDecl]:
        """The tensors that can be read, with all their fields filled in."""
        found = {name: tensor for name, tensor in declared.items() if tensor is not None}
        if all(tensor.like is None and tensor.shape is not None for tensor in found.values()):
            return found
        from distsim.scenario.format.reading.tensor_defaults import fill_in_tensors

        return fill_in_tensors(found, declared.keys(), self.problems)

    def _program(self, iterations: int) -> tuple[Entry, ...]:
        if "program" not in self.data:
            self.problems.add(
                ("program",),
                "`program` is missing: the list of calls",
                "for an empty program write `program: []`",
            )
        reader = StepReader(self.problems)
        return reader.entries(self.data.get("program", ()), ("program",), iterations)

    def _memory(self, scope: NameScope) -> dict[str, MemoryDecl]:
        found = {}
        for name, value in self._names("memory").items():
            path: DataPath = ("memory", name)
            if not isinstance(value, Mapping | MemoryDecl):
                remedy = ""
                if name in MEMORY_PARTS:
                    example = f"`memory: {{rank: {{{name}: {value_text(value)}}}}}`"
                    remedy = f"each entry needs a name: {example}"
                message = (
                    "expected the memory of ranks, such as `{parameters: 4 GiB}`, found "
                    f"{value_text(value)}"
                )
                self.problems.add(path, message, remedy)
                continue
            memory = self._model(path, MemoryDecl, value, f"the memory {name}")
            if memory is not None:
                found[name] = memory
                scope.selector(memory.ranks, path)
        return found

    def _faults(self, scope: NameScope) -> tuple[FaultDecl, ...]:
        value = self.data.get("faults")
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            self.problems.add(
                ("faults",),
                f"expected a list of faults, each with a dash, found {value_text(value)}",
            )
            return ()
        found = []
        for k, item in enumerate(value):
            path: DataPath = ("faults", k)
            fault = self._model(path, FaultDecl, item, "the fault")
            if fault is None:
                continue
            found.append(fault)
            scope.selector(fault.ranks, path)
            if fault.rank is not None:
                scope.ranks_in_world((fault.rank,), (*path, "rank"))
        return tuple(found)

    # --- expectations ---
    def _check_expectations(
        self,
        expect: Expectations,
        scope: NameScope,
        tensors: Mapping[str, TensorDecl],
    ) -> None:
        for reference, numbers in expect.values.items():
            path: DataPath = ("expect", "values", reference)
            name, _, _ = reference.partition("@")
            tensor = tensors.get(name)
            if tensor is not None and tensor.dtype != "bool" and _expects_bool(numbers):
                self.problems.add(
                    path, f"{reference} contains numbers; expected numbers, found true or false"
                )
            if name not in scope.tensors:
                scope.report_unknown_tensor(path, reference, at_key=True)
        for key in ("ranks", "core"):
            scope.ranks_in_world(getattr(expect, key) or (), ("expect", key))


def _expects_bool(numbers: object) -> bool:
    """Whether one of the expected numbers is true or false."""
    if isinstance(numbers, PerRank):
        items = [item for _, item in numbers.entries]
        return any(map(_expects_bool, [*items, numbers.default]))
    if isinstance(numbers, tuple):
        return any(map(_expects_bool, numbers))
    return isinstance(numbers, bool)


def _is_cluster_file(value: str) -> bool:
    return value.endswith((".yaml", ".yml", ".json")) or "/" in value


def _plain_data(value: Any) -> Any:
    """Data without the places of its values."""
    if isinstance(value, Mapping):
        return {str(key): _plain_data(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain_data(item) for item in value]
    return value
