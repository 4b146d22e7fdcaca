"""A document's data to the fields of a scenario. Every top-level key is read by itself, so that one
problem hides no other.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import PurePath
from typing import Any, TypeVar

from pydantic import ValidationError

from distsim.common.errors import UsageError
from distsim.common.expressions import Expression
from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.common.quantities import has_units, parse_quantity
from distsim.operations.core.field_types import PerRank, expression_field
from distsim.scenario.format.models.base_model import FormatModel
from distsim.scenario.format.models.launch import LaunchOptions
from distsim.scenario.format.models.scalars import MAX_WORLD, integer
from distsim.scenario.format.models.sections import (
    MEMORY_PARTS,
    Expectations,
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
from distsim.scenario.format.reading.pydantic_errors import add_validation_errors
from distsim.scenario.format.reading.step_reader import MAX_REPEAT_ROUNDS, StepReader
from distsim.scenario.format.reading.strategy_expansion import expand_strategies, uniform_quantities
from distsim.scenario.format.source.document import DataPath, ProblemCollector, YamlDocument

P = TypeVar("P", bound=FormatModel)


def read_scenario_fields(document: YamlDocument, problems: ProblemCollector) -> dict[str, Any]:
    """The fields of a `Scenario`. Raises ScenarioErrors with all problems, in order of place."""
    data = document.root
    if not isinstance(data, Mapping):
        if data is not None or not problems:
            problems.add(
                (),
                f"expected a scenario, a mapping with `world`, `program` and the like, found {value_text(data)}",
            )
        problems.raise_any()
        return {}
    fields = _ScenarioReader(document, problems, expand_strategies(data, problems)).fields()
    problems.raise_any()
    return fields


class _ScenarioReader:
    def __init__(
        self, document: YamlDocument, problems: ProblemCollector, data: Mapping[Any, Any]
    ) -> None:
        self.document, self.problems, self.data = document, problems, data
        self.known = uniform_quantities(data)

    def fields(self) -> dict[str, Any]:
        for key in self.data:
            if key not in TOP_LEVEL_KEYS:
                self.problems.add(
                    (key,),
                    f"unknown key {key}; expected {name_list(TOP_LEVEL_KEYS, 20)}{did_you_mean(key, TOP_LEVEL_KEYS)}",
                    at_key=True,
                )
        world = self.world()
        size = world.size if world else None
        found: dict[str, Any] = {
            "name": self.scalar("name", PurePath(self.document.file).stem or "scenario"),
            "about": self.scalar("about"),
            "world": world,
            "backend": self.scalar("backend"),
            "cluster": self.cluster(),
            "mesh": self.mesh(size),
            "iterations": self.scalar("iterations"),
            "options": self.part("options", ProcessGroupOptions, {}),
            "launch": self.part("launch", LaunchOptions, {}),
            "seed": self.scalar("seed"),
            "jitter": self.scalar("jitter"),
            "sweep": self.part("sweep", SweepDecl, None),
            "expect": self.part("expect", Expectations, None),
        }
        self.program(found, size)
        found["file"] = self.document.file
        return {
            key: value
            for key, value in found.items()
            if value is not None or key in ("cluster", "sweep", "expect")
        }

    # --- single values ---
    def scalar(self, key: str, default: Any = None) -> Any:
        default = ScenarioFileFields.model_fields[key].default if default is None else default
        if key not in self.data:
            return default
        try:
            return parser_of(key)(self.data[key])
        except ValueError as error:
            self.problems.error((key,), error)
            return default

    def part(self, key: str, model: type[P], default: Any) -> P | None:
        value = self.data.get(key)
        value = default if value is None else value
        return None if value is None else self.mapping((key,), model, value)

    def mapping(self, path: DataPath, model: type[P], value: Any, name: str = "") -> P | None:
        """A model from the mapping at a path; what is wrong is noted."""
        if isinstance(value, model):
            return value
        if not isinstance(value, Mapping):
            self.problems.add(path, f"expected a mapping, found {value_text(value)}")
            return None
        try:
            return model.model_validate(dict(value), context=self.known)
        except ValidationError as errors:
            add_validation_errors(self.problems, errors, path, model, name=name or str(path[-1]))
            return None

    def named(self, key: str) -> Mapping[Any, Any]:
        """A top-level mapping of names; left out or null: none."""
        value = self.data.get(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.problems.add((key,), f"expected a mapping of names, found {value_text(value)}")
            return {}
        return value

    # --- who is there ---
    def world(self) -> World | None:
        value = self.data.get("world")
        if value is None:
            hint = "`world: 4`, or `world: {nodes: 2, ranks_per_node: 8}`"
            self.problems.add(("world",), "expected `world`: how many ranks there are", hint)
            return None
        if isinstance(value, Mapping):
            return self.mapping(("world",), World, value)
        if isinstance(value, World):
            return value
        try:
            return World(
                nodes=1,
                ranks_per_node=integer(1, MAX_WORLD, "the number of ranks, an integer")(value),
            )
        except ValueError as error:
            self.problems.error(("world",), error)
            return None

    def cluster(self) -> Any:
        """A preset's name, a file, or a mapping; presets and mappings are checked here, files when
        they are needed.
        """
        value = self.data.get("cluster")
        if value is None:
            return None
        if isinstance(value, Mapping):
            return self.inline_cluster(_plain_data(value))
        if not isinstance(value, str):
            self.problems.add(
                ("cluster",),
                f"expected a preset, a file, or a cluster as a mapping, found {value_text(value)}",
            )
            return None
        if not _is_cluster_file(value):
            from distsim.hardware.cluster import PRESETS

            if value not in PRESETS:
                known = name_list(PRESETS)
                self.problems.add(
                    ("cluster",),
                    f"unknown cluster {value}; presets are {known}{did_you_mean(value, PRESETS)}",
                    "a file's name ends in .yaml",
                )
        return value

    def inline_cluster(self, data: dict[str, Any]) -> dict[str, Any]:
        from distsim.hardware.cluster import cluster_from
        from distsim.scenario.format.models.cluster_quantities import evaluate_cluster_quantities

        data, errors = evaluate_cluster_quantities(data, self.known)
        for found in errors:
            self.problems.error(("cluster",), found)
        try:
            cluster_from(data)
        except UsageError as error:
            for line in error.message.splitlines():
                place, _, message = line.partition(": ")
                keys: DataPath = (
                    tuple(place.split("."))
                    if message and place.startswith("cluster")
                    else ("cluster",)
                )
                self.problems.add(
                    keys, message or line, "" if message.startswith("expected") else error.remedy
                )
        return data

    def mesh(self, size: int | None) -> dict[str, int]:
        found: dict[str, int] = {}
        given = self.named("mesh")
        for axis, value in given.items():
            try:
                found[axis] = integer(1, MAX_WORLD, "the size of an axis, an integer")(value)
            except ValueError as error:
                self.problems.error(("mesh", axis), error)
        if size is not None and found and len(found) == len(given) and prod(found.values()) != size:
            product = " * ".join(str(n) for n in found.values())
            total = f"{product} = {prod(found.values())}" if len(found) > 1 else product
            self.problems.add(
                ("mesh",),
                f"the mesh does not give the world: it has {total} ranks, the world {size}",
            )
        return found

    # --- what there is to name, and the program ---
    def tensors(self, declared: Mapping[str, TensorDecl | None]) -> dict[str, TensorDecl]:
        """Those that can be read, with what their declarations leave out."""
        found = {name: tensor for name, tensor in declared.items() if tensor is not None}
        if all(tensor.like is None and tensor.shape is not None for tensor in found.values()):
            return found
        from distsim.scenario.format.reading.tensor_defaults import fill_in_tensors

        return fill_in_tensors(found, declared.keys(), self.problems)

    def program(self, found: dict[str, Any], size: int | None) -> None:
        scope = NameScope(self.problems, found["mesh"], size)
        scope.define_axes()
        found["vars"] = self.vars()
        scope.define_vars(found["vars"])
        found["groups"] = self.groups()
        scope.define_groups(found["groups"], size)
        scope.groups |= {name for name in self.named("groups") if isinstance(name, str)}
        declared = {name: self.tensor(name, value) for name, value in self.named("tensors").items()}
        found["tensors"] = self.tensors(declared)
        scope.define_tensors(found["tensors"])
        scope.tensors |= dict.fromkeys(declared)
        reader = StepReader(self.problems)
        if "program" not in self.data:
            self.problems.add(
                ("program",),
                "expected `program`: what the ranks do, a list of entries",
                "`program: []` does nothing",
            )
        found["program"] = reader.entries(
            self.data.get("program", ()), ("program",), found["iterations"]
        )
        scope.entries(found["program"])
        found["memory"] = self.memory(scope)
        found["faults"] = self.faults(scope, size)
        self.expected(found["expect"], scope, size, found["tensors"])

    def vars(self) -> dict[str, Expression]:
        found = {}
        for name, value in self.named("vars").items():
            try:
                found[name] = parse_variable(value)
            except ValueError as error:
                self.problems.error(("vars", name), error)
                found[name] = expression_field(0)
        return found

    def groups(self) -> dict[str, GroupDecl]:
        found = {}
        for name, value in self.named("groups").items():
            short = isinstance(value, list | tuple)
            group = self.mapping(
                ("groups", name),
                GroupDecl,
                {"ranks": value} if short else value,
                f"the group {name}",
            )
            if group is not None:
                found[name] = group
        return found

    def tensor(self, name: str, value: Any) -> TensorDecl | None:
        return self.mapping(("tensors", name), TensorDecl, value, f"the tensor {name}")

    def memory(self, scope: NameScope) -> dict[str, MemoryDecl]:
        found = {}
        for name, value in self.named("memory").items():
            if not isinstance(value, Mapping | MemoryDecl):
                hint = (
                    f"an entry has a name of its own: `memory: {{rank: {{{name}: {value_text(value)}}}}}`"
                    if name in MEMORY_PARTS
                    else ""
                )
                said = f"expected what ranks hold, as `{{parameters: 4 GiB}}`, found {value_text(value)}"
                self.problems.add(("memory", name), said, hint)
                continue
            made = self.mapping(("memory", name), MemoryDecl, value, f"the memory {name}")
            if made is not None:
                found[name] = made
                scope.selector(made.ranks, ("memory", name), [])
        return found

    def faults(self, scope: NameScope, size: int | None) -> tuple[FaultDecl, ...]:
        value = self.data.get("faults")
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            self.problems.add(
                ("faults",),
                f"expected a list of faults, each after a dash, found {value_text(value)}",
            )
            return ()
        found = []
        for k, item in enumerate(value):
            fault = self.mapping(("faults", k), FaultDecl, item, "the fault")
            if fault is None:
                continue
            found.append(fault)
            scope.selector(fault.ranks, ("faults", k), [])
            if fault.rank is not None:
                self.outside(("faults", k, "rank"), (fault.rank,), size)
        return tuple(found)

    def expected(
        self,
        expect: Expectations | None,
        scope: NameScope,
        size: int | None,
        tensors: Mapping[str, TensorDecl],
    ) -> None:
        if expect is None:
            return
        for name, numbers in expect.values.items():
            tensor = tensors.get(name.partition("@")[0])
            if tensor is not None and tensor.dtype != "bool" and _expects_bool(numbers):
                self.problems.add(
                    ("expect", "values", name),
                    f"{name} holds numbers; expected numbers, found true or false",
                )
            if name.partition("@")[0] not in scope.tensors:
                known = scope.tensors
                message = f"unknown tensor {name}; declared are {name_list(known)}{did_you_mean(name, known)}"
                self.problems.add(("expect", "values", name), message, at_key=True)
        for key in ("ranks", "core"):
            self.outside(("expect", key), getattr(expect, key) or (), size)

    def outside(self, path: DataPath, ranks: tuple[int, ...], size: int | None) -> None:
        strange = [rank for rank in ranks if size is not None and rank >= size]
        if strange:
            self.problems.add(
                path,
                f"rank {strange[0]} is outside the world of {size} ranks (0 to {size - 1 if size else 0})",
            )


def parse_variable(value: Any) -> Expression:
    """A var: a number, an expression, or a quantity with its unit. Raises ValueError."""
    return (
        parse_quantity(value)
        if isinstance(value, str) and has_units(value)
        else expression_field(value)
    )


def _expects_bool(numbers: object) -> bool:
    """Is one of the expected numbers true or false?"""
    if isinstance(numbers, PerRank):
        return any(_expects_bool(item) for _, item in numbers.entries) or _expects_bool(
            numbers.default
        )
    return (
        any(map(_expects_bool, numbers))
        if isinstance(numbers, tuple)
        else isinstance(numbers, bool)
    )


def _is_cluster_file(value: str) -> bool:
    return value.endswith((".yaml", ".yml", ".json")) or "/" in value


def _plain_data(value: Any) -> Any:
    """Data without its places."""
    if isinstance(value, Mapping):
        return {str(key): _plain_data(item) for key, item in value.items()}
    return [_plain_data(item) for item in value] if isinstance(value, list | tuple) else value


__all__ = ["TOP_LEVEL_KEYS", "MAX_REPEAT_ROUNDS", "read_scenario_fields"]
