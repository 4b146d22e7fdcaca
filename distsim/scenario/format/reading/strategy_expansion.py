"""Training strategies of a program, expanded: plain data in, plain data out, before the file's
entries are read.

An entry `- ddp: {…}` becomes a block in the same place, so that whatever is found inside it later
is shown at the strategy's own place: the document still holds what was written, and a path that
leads on into an expansion ends there.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from math import prod
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from distsim.backends import DEFAULT_BACKEND
from distsim.common.expressions import parse_expression
from distsim.common.message_text import name_list, value_text
from distsim.common.quantities import QuantityKind, has_units, parse_quantity, quantity_kind
from distsim.operations.core.field_types import expression_field
from distsim.scenario.format.models.scalars import MAX_WORLD, integer
from distsim.scenario.format.reading.pydantic_errors import add_validation_errors
from distsim.scenario.format.source.document import DataPath, ProblemCollector
from distsim.scenario.strategies import STRATEGIES
from distsim.scenario.strategies.base import Expansion, ExpansionContext, Strategy

if TYPE_CHECKING:
    from distsim.scenario.model import Scenario

#: Names that no strategy may invent.
_RESERVED_NAMES = frozenset(
    {
        "rank",
        "world_size",
        "node",
        "local_rank",
        "group_rank",
        "group_size",
        "index",
        "copy",
        "iteration",
        "all",
        "min",
        "max",
        "true",
        "false",
        "world",
        "else",
    }
)
#: Layers, micro-batches and the like of a strategy; each becomes calls.
MAX_EXPANDED_PARTS = 20_000
_DECLARING_KEYS = ("tensors", "groups", "vars", "memory")


def expand_strategies(
    data: Mapping[object, object], problems: ProblemCollector
) -> Mapping[object, object]:
    """The data with every strategy's entry replaced by its plain steps; the same object where there
    is none.

    What is wrong with a strategy is noted at its place, and its entry then does nothing.
    """
    program = data.get("program")
    if not isinstance(program, list | tuple) or not any(_strategy_entries(program)):
        return data
    return _StrategyExpander(data, problems).expanded()


def _strategy_entries(entries: Any) -> Iterator[Any]:
    """Every entry that is a strategy's, at any depth."""
    for item in entries if isinstance(entries, list | tuple) else ():
        if isinstance(item, str):
            if item in STRATEGIES:
                yield item
        elif isinstance(item, Mapping):
            if any(key in STRATEGIES for key in item):
                yield item
            inner = item.get("repeat")
            yield from _strategy_entries(item.get("steps"))
            yield from _strategy_entries(inner.get("steps") if isinstance(inner, Mapping) else None)


def strategy_names_in(data: Any) -> tuple[str, ...]:
    """Names of the strategies in a file's data as written, each once, in the order of their
    entries.
    """
    program = data.get("program") if isinstance(data, Mapping) else None
    words = [
        item if isinstance(item, str) else next(key for key in item if key in STRATEGIES)
        for item in _strategy_entries(program)
    ]
    return tuple(dict.fromkeys(words))


class _StrategyExpander:
    def __init__(self, data: Mapping[object, object], problems: ProblemCollector) -> None:
        self.data, self.problems = data, problems
        self.added: dict[str, dict[str, object]] = {key: {} for key in _DECLARING_KEYS}
        self.taken = set(_RESERVED_NAMES) | set(_declared_names(data))
        self.made: Strategy | None = None  # the entry that was expanded last
        self.partial: list[tuple[tuple[int, ...], Strategy, dict[str, Any]]] = []
        self.context = _strategy_context(
            data, self.taken, str(PurePath(problems.document.file).parent)
        )
        known = uniform_quantities(data)
        self.known = {
            "names": {} if self.context is None else _uniform_values(data, self.context),
            "quantities": known["names"],
            "kinds": known["kinds"],
        }

    def expanded(self) -> dict[object, object]:
        found = dict(self.data)
        found["program"] = self.entries(self.data["program"], ("program",))
        self.compare()
        for key, added in self.added.items():
            declared = self.data.get(key)
            if added and (declared is None or isinstance(declared, Mapping)):
                found[key] = {**(declared or {}), **added}
        return found

    def entries(self, entries: Any, path: DataPath) -> Any:
        if not isinstance(entries, list | tuple):
            return entries
        return [self.entry(item, (*path, k)) for k, item in enumerate(entries)]

    def entry(self, item: object, path: DataPath) -> object:
        if isinstance(item, str):
            return self.strategy(item, {}, path) if item in STRATEGIES else item
        if not isinstance(item, Mapping):
            return item
        names = [key for key in item if key in STRATEGIES]
        if names:
            return self.beside(item, names[0], path)
        found = dict(item)
        if "steps" in item:
            found["steps"] = self.entries(item["steps"], (*path, "steps"))
        body = item.get("repeat")
        if isinstance(body, Mapping) and "steps" in body:
            found["repeat"] = {
                **body,
                "steps": self.entries(body["steps"], (*path, "repeat", "steps")),
            }
        return found

    def beside(self, item: Mapping[object, object], name: str, path: DataPath) -> object:
        """A strategy's entry; strange keys beside it are left for the reader of steps to note."""
        if any(key not in (name, "ranks") for key in item):
            return item
        found = self.strategy(name, item[name], (*path, name))
        if "ranks" not in item:
            return found
        found = {"ranks": item["ranks"], **found}
        if self.made is not None and (ranks := self.selected(item["ranks"])):
            self.partial.append((ranks, self.made, found))
        return found

    def compare(self) -> None:
        """Entries of one strategy for some ranks each, that all ranks have one of, meet: they are
        told of each other.
        """
        for name in {made.name for _, made, _ in self.partial}:
            entries = [
                (ranks, made, found) for ranks, made, found in self.partial if made.name == name
            ]
            if self.context is not None and sorted(
                r for ranks, _, _ in entries for r in ranks
            ) == list(range(self.context.world_size)):
                models = {rank: made for ranks, made, _ in entries for rank in ranks}
                for ranks, made, found in entries:
                    found["steps"] = made.with_errors_between_ranks(ranks, models, found["steps"])

    def selected(self, ranks: Any) -> tuple[int, ...]:
        """The ranks of an entry that stand in the file as numbers; empty where they are no such."""
        one = [ranks] if isinstance(ranks, int) else ranks
        numbers = isinstance(one, list | tuple) and all(isinstance(rank, int) for rank in one)
        return tuple(sorted(set(one))) if numbers else ()

    def strategy(self, name: str, value: Any, here: DataPath) -> dict[str, Any]:
        made, self.made = self.validated(STRATEGIES[name], value, here), None
        if made is None or self.context is None:
            return {"steps": []}
        context = self.context._replace(taken=frozenset(self.taken), known=self.known)
        if not self.counted(made, here):
            return {"steps": []}
        refusals = made.refuse(context)
        for way, sentence in refusals:
            self.problems.add((*here, *way), sentence)
        self.made = None if refusals else made
        return {"steps": []} if refusals else self.keep(made.expand(context))

    def validated(self, model: type[Strategy], value: object, here: DataPath) -> Strategy | None:
        if value is None:
            value = {}
        by_rank = (
            isinstance(value, Mapping)
            and value
            and all(key == "else" or isinstance(key, int) for key in value)
        )
        if model.first_field is not None and (by_rank or not isinstance(value, Mapping)):
            value = {model.first_field: value}
        if not isinstance(value, Mapping):
            known = [info.alias or key for key, info in model.model_fields.items()]
            hint = f"`{model.name}: {{…}}`; it has {name_list(known)}"
            self.problems.add(
                here,
                f"expected the fields of {model.name} as a mapping, found {value_text(value)}",
                hint,
            )
            return None
        value = {key: self.inside(item, (*here, key)) for key, item in value.items()}
        try:
            return model.model_validate(value, context=self.known)
        except ValidationError as errors:
            add_validation_errors(self.problems, errors, here, model, name=model.name)
            return None

    def inside(self, value: Any, path: DataPath) -> Any:
        """A strategy's field with the strategies in its lists of entries expanded: tensor parallel
        layers as a stage's forward.
        """
        if isinstance(value, list | tuple):
            if any(
                isinstance(item, Mapping) and any(key in STRATEGIES for key in item)
                for item in value
            ):
                return self.entries(value, path)
            return [self.inside(item, (*path, k)) for k, item in enumerate(value)]
        return (
            {key: self.inside(item, (*path, key)) for key, item in value.items()}
            if isinstance(value, Mapping)
            else value
        )

    def counted(self, made: Strategy, here: DataPath) -> bool:
        """What is laid out one by one is not too many."""
        layers = getattr(made, "layers", 0)
        counts = {
            "layers": sum(one.count for one in layers) if isinstance(layers, tuple) else layers
        }
        counts |= {
            key: getattr(made, key, None)
            for key in ("micro_batches", "accumulate", "chunks", "pairs", "pieces")
        }
        for key, count in counts.items():
            if isinstance(count, int) and count > MAX_EXPANDED_PARTS:
                self.problems.add(
                    (*here, key),
                    f"{key} comes to {count}; at most {MAX_EXPANDED_PARTS} are laid out one by one",
                )
                return False
        return True

    def keep(self, expansion: Expansion) -> dict[str, object]:
        for key in _DECLARING_KEYS:
            added = getattr(expansion, key)
            self.added[key].update(added)
            self.taken.update(added)
        self.taken.update(_bound_names(expansion.steps))
        return {"steps": expansion.steps}


def _strategy_context(
    data: Mapping[Any, Any], taken: set[str], folder: str
) -> ExpansionContext | None:
    """What strategies may know; None where world or mesh can't be read (which is noted
    elsewhere).
    """
    try:
        nodes, per_node = _world_shape(data.get("world"))
        one = integer(1, MAX_WORLD)
        mesh = {str(axis): one(size) for axis, size in dict(data.get("mesh") or {}).items()}
        iterations = one(data.get("iterations", 1))
    except (ValueError, TypeError, KeyError):
        return None
    if mesh and prod(mesh.values()) != nodes * per_node:
        return None
    given = [data.get(key) for key in ("tensors", "groups")]
    named: list[Mapping[str, Any]] = [
        value if isinstance(value, Mapping) else {} for value in given
    ]
    backend = data.get("backend", DEFAULT_BACKEND)
    tensors, groups = named[0] or {}, named[1] or {}
    return ExpansionContext(
        nodes * per_node,
        per_node,
        mesh,
        str(backend),
        iterations,
        tensors,
        frozenset(taken),
        groups,
        folder,
    )


def _world_shape(value: Any) -> tuple[int, int]:
    one = integer(1, MAX_WORLD)
    if isinstance(value, Mapping):
        return one(value["nodes"]), one(value["ranks_per_node"])
    if hasattr(value, "ranks_per_node"):
        return value.nodes, value.ranks_per_node
    return 1, one(value)


def _uniform_values(data: Mapping[Any, Any], context: ExpansionContext) -> dict[str, Any]:
    """Numbers that are the same on every rank: the world's size, the axes' sizes, vars made of
    them.
    """
    found: dict[str, Any] = {"world_size": context.world_size}
    found |= {f"{axis}_size": size for axis, size in context.mesh.items()}
    given = data.get("vars")
    for name, value in given.items() if isinstance(given, Mapping) else ():
        with suppress(ValueError):
            expression = value if hasattr(value, "evaluate") else parse_expression(value)
            if expression.names <= found.keys():
                found[str(name)] = expression.evaluate(found)
    return found


def validated_strategies(scenario: Scenario) -> list[tuple[Strategy, ExpansionContext]]:
    """The strategies of a scenario as their fields say, each with what it may know; those inside
    others are left out.
    """
    data = scenario.written
    context = _strategy_context(data, set(), "") if isinstance(data, Mapping) else None
    if context is None:
        return []
    names, found = _uniform_values(data, context), []
    for item in _strategy_entries(data.get("program")):
        if isinstance(item, Mapping):
            word = next(key for key in item if key in STRATEGIES)
            value, model = item[word], STRATEGIES[word]
            fields = value if isinstance(value, Mapping) else {model.first_field: value}
            with suppress(ValidationError):
                found.append(
                    (model.model_validate(dict(fields), context={"names": names}), context)
                )
    return found


def uniform_quantities(data: Mapping[object, object]) -> dict[str, object]:
    """What parts that are no steps may use in quantities: ``names`` that are the same on every
    rank, and the ``kinds`` among them.
    """
    context = _strategy_context(data, set(), "")
    names: dict[str, object] = (
        {} if context is None else _uniform_values({**data, "vars": None}, context)
    )
    kinds: dict[str, QuantityKind] = {}
    given = data.get("vars")
    for name, value in given.items() if isinstance(given, Mapping) else ():
        with suppress(ValueError):
            found = (
                parse_quantity(value)
                if isinstance(value, str) and has_units(value)
                else expression_field(value)
            )
            if found.names <= names.keys():
                names[str(name)] = found.evaluate(names)
                kinds[str(name)] = quantity_kind(found, kinds) or None
    return {"names": names, "kinds": kinds}


def _declared_names(data: Mapping[object, object]) -> Iterator[str]:
    """Names that a file uses."""
    for key in ("vars", "groups", "tensors", "mesh"):
        value = data.get(key)
        for name in value if isinstance(value, Mapping) else ():
            yield str(name)
            yield f"{name}_size"
    yield from _bound_names(data.get("program"))


def _bound_names(value: object) -> Iterator[str]:
    """Names that steps bind: handles, indices, groups."""
    left = [value]
    while left:
        one = left.pop()
        if isinstance(one, dict):
            for key, part in one.items():
                if not isinstance(part, str):
                    left.append(part)
                elif key in ("as", "index", "name"):
                    yield part.partition("@")[0].strip()
        elif isinstance(one, list | tuple):
            left += one
        elif isinstance(one, Mapping):
            left.append(dict(one))
