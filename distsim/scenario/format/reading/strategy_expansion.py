"""Training strategies of a program, expanded: plain data in, plain data out.

This happens before the file's entries are read. An entry `- ddp: {…}` becomes a block in the same
place. The document still holds what was written, and a path that leads into an expansion ends at
the strategy; so a problem that is found inside an expansion is shown at the strategy's own place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import PurePath
from typing import Any, NamedTuple

from pydantic import ValidationError

from distsim.common.message_text import name_list, value_text
from distsim.scenario.format.models.entries import RESERVED_NAMES
from distsim.scenario.format.reading.pydantic_errors import add_validation_errors
from distsim.scenario.format.reading.strategy_context import (
    bound_names,
    declared_names,
    strategy_context,
    uniform_quantities,
    uniform_values,
)
from distsim.scenario.format.source.document import DataPath
from distsim.scenario.format.source.problems import ProblemCollector
from distsim.scenario.strategies import STRATEGIES
from distsim.scenario.strategies.base import Expansion, ExpansionContext, Strategy

#: Names that no strategy may invent.
_UNAVAILABLE_NAMES = frozenset({*RESERVED_NAMES, "all"})
#: Limit for the layers, micro-batches and similar counts of a strategy; each becomes calls.
MAX_EXPANDED_PARTS = 20_000
_PART_KEYS = ("micro_batches", "accumulate", "chunks", "pairs", "pieces")
_DECLARING_KEYS = ("tensors", "groups", "vars", "memory")


def expand_strategies(
    data: Mapping[object, object], problems: ProblemCollector
) -> Mapping[object, object]:
    """The data with every strategy's entry replaced by its plain steps.

    Data without strategies is returned as the same object. A mistake in a strategy is noted at its
    place, and its entry then does nothing.
    """
    program = data.get("program")
    if not isinstance(program, list | tuple) or not any(_strategy_entries(program)):
        return data
    return _StrategyExpander(data, problems).expanded()


def strategy_names_in(data: Any) -> tuple[str, ...]:
    """Names of the strategies in a file's data as written, each once, in the order of entries."""
    program = data.get("program") if isinstance(data, Mapping) else None
    names = [
        item if isinstance(item, str) else _strategy_name(item)
        for item in _strategy_entries(program)
    ]
    return tuple(dict.fromkeys(names))


def validated_strategies(data: Any) -> list[tuple[Strategy, ExpansionContext]]:
    """The validated strategies in a file's data as written, each with what it may know.

    Strategies inside others, and those that are invalid, are skipped.
    """
    context = strategy_context(data) if isinstance(data, Mapping) else None
    if context is None:
        return []
    names = uniform_values(data, context)
    found = []
    for item in _strategy_entries(data.get("program")):
        if not isinstance(item, Mapping):
            continue
        name = _strategy_name(item)
        model, value = STRATEGIES[name], item[name]
        fields = value if isinstance(value, Mapping) else {model.first_field: value}
        with suppress(ValidationError):
            strategy = model.model_validate(dict(fields), context={"names": names})
            found.append((strategy, context))
    return found


def _strategy_entries(entries: Any) -> Iterator[Any]:
    """Every entry that is a strategy's, at any depth."""
    if not isinstance(entries, list | tuple):
        return
    for item in entries:
        if isinstance(item, str):
            if item in STRATEGIES:
                yield item
        elif isinstance(item, Mapping):
            if any(key in STRATEGIES for key in item):
                yield item
            yield from _strategy_entries(item.get("steps"))
            body = item.get("repeat")
            if isinstance(body, Mapping):
                yield from _strategy_entries(body.get("steps"))


def _strategy_name(item: Mapping[Any, Any]) -> str:
    """The first key of an entry that is a strategy's name."""
    return next(str(key) for key in item if key in STRATEGIES)


class _PartialEntry(NamedTuple):
    """An expanded entry of a strategy that has a selector with plain ranks."""

    ranks: tuple[int, ...]
    strategy: Strategy
    block: dict[str, Any]  # changed in place by `_compare_partial_entries`


class _StrategyExpander:
    """Expands all strategies of one file.

    ``taken_names`` grows with each expansion, so that no two of them use the same names;
    ``declarations`` collects what the expansions declare.
    """

    def __init__(self, data: Mapping[object, object], problems: ProblemCollector) -> None:
        self.data = data
        self.problems = problems
        self.declarations: dict[str, dict[str, object]] = {key: {} for key in _DECLARING_KEYS}
        self.taken_names = {*_UNAVAILABLE_NAMES, *declared_names(data)}
        self.partial_entries: list[_PartialEntry] = []
        folder = str(PurePath(problems.document.file).parent)
        self.context = strategy_context(data, frozenset(self.taken_names), folder)
        quantities = uniform_quantities(data)
        self.known = {
            "names": {} if self.context is None else uniform_values(data, self.context),
            "quantities": quantities["names"],
            "kinds": quantities["kinds"],
        }

    def expanded(self) -> dict[object, object]:
        found = dict(self.data)
        found["program"] = self._entries(self.data["program"], ("program",))
        self._compare_partial_entries()
        for key, added in self.declarations.items():
            declared = self.data.get(key)
            if added and (declared is None or isinstance(declared, Mapping)):
                found[key] = {**(declared or {}), **added}
        return found

    # --- entries ---
    def _entries(self, entries: Any, path: DataPath) -> Any:
        if not isinstance(entries, list | tuple):
            return entries
        return [self._entry(item, (*path, k)) for k, item in enumerate(entries)]

    def _entry(self, item: object, path: DataPath) -> object:
        if isinstance(item, str):
            if item not in STRATEGIES:
                return item
            block, _ = self._expanded_strategy(item, {}, path)
            return block
        if not isinstance(item, Mapping):
            return item
        if any(key in STRATEGIES for key in item):
            return self._strategy_entry(item, _strategy_name(item), path)
        found = dict(item)
        if "steps" in item:
            found["steps"] = self._entries(item["steps"], (*path, "steps"))
        body = item.get("repeat")
        if isinstance(body, Mapping) and "steps" in body:
            steps = self._entries(body["steps"], (*path, "repeat", "steps"))
            found["repeat"] = {**body, "steps": steps}
        return found

    def _strategy_entry(self, item: Mapping[object, object], name: str, path: DataPath) -> object:
        """The block in place of a strategy's entry.

        An entry with further keys is left as it is: the reader of steps reports them.
        """
        if any(key not in (name, "ranks") for key in item):
            return item
        block, strategy = self._expanded_strategy(name, item[name], (*path, name))
        if "ranks" not in item:
            return block
        block = {"ranks": item["ranks"], **block}
        ranks = _plain_ranks(item["ranks"])
        if strategy is not None and ranks:
            self.partial_entries.append(_PartialEntry(ranks, strategy, block))
        return block

    def _compare_partial_entries(self) -> None:
        """Let the entries of one strategy know each other, if together they are for all ranks.

        Such entries are one strategy with arguments that differ by rank; their calls meet.
        """
        if self.context is None:
            return
        every_rank = list(range(self.context.world_size))
        for name in {entry.strategy.name for entry in self.partial_entries}:
            entries = [entry for entry in self.partial_entries if entry.strategy.name == name]
            ranks = [rank for entry in entries for rank in entry.ranks]
            if sorted(ranks) != every_rank:
                continue
            models = {rank: entry.strategy for entry in entries for rank in entry.ranks}
            for entry in entries:
                steps = entry.block["steps"]
                entry.block["steps"] = entry.strategy.with_errors_between_ranks(
                    entry.ranks, models, steps
                )

    # --- one strategy ---
    def _expanded_strategy(
        self, name: str, value: Any, path: DataPath
    ) -> tuple[dict[str, Any], Strategy | None]:
        """The block of a strategy, and its fields; an empty block and None if they are wrong."""
        nothing: dict[str, Any] = {"steps": []}
        strategy = self._validated(STRATEGIES[name], value, path)
        if strategy is None or self.context is None:
            return nothing, None
        if not self._check_counts(strategy, path):
            return nothing, None
        context = self.context._replace(taken=frozenset(self.taken_names), known=self.known)
        refusals = strategy.refuse(context)
        for key_path, message in refusals:
            self.problems.add((*path, *key_path), message)
        if refusals:
            return nothing, None
        return self._block(strategy.expand(context)), strategy

    def _validated(self, model: type[Strategy], value: Any, path: DataPath) -> Strategy | None:
        if value is None:
            value = {}
        if model.first_field is not None and not _is_field_mapping(value):
            value = {model.first_field: value}
        if not isinstance(value, Mapping):
            known = [info.alias or key for key, info in model.model_fields.items()]
            self.problems.add(
                path,
                f"expected the fields of {model.name} as a mapping, found {value_text(value)}",
                f"`{model.name}: {{…}}`; its fields: {name_list(known)}",
            )
            return None
        fields = {key: self._expanded_inside(item, (*path, key)) for key, item in value.items()}
        try:
            return model.model_validate(fields, context=self.known)
        except ValidationError as errors:
            add_validation_errors(self.problems, errors, path, model, name=model.name)
            return None

    def _expanded_inside(self, value: Any, path: DataPath) -> Any:
        """A strategy's field, with the strategies in its lists of entries expanded.

        For example tensor parallel layers as the forward pass of a pipeline stage.
        """
        if isinstance(value, Mapping):
            return {key: self._expanded_inside(item, (*path, key)) for key, item in value.items()}
        if not isinstance(value, list | tuple):
            return value
        if any(_is_strategy_mapping(item) for item in value):
            return self._entries(value, path)
        return [self._expanded_inside(item, (*path, k)) for k, item in enumerate(value)]

    def _check_counts(self, strategy: Strategy, path: DataPath) -> bool:
        """Whether the parts that are expanded one by one are not too many."""
        for keys, count in _part_counts(strategy):
            if isinstance(count, int) and count > MAX_EXPANDED_PARTS:
                self.problems.add(
                    (*path, *keys),
                    f"{keys[-1]} is {count}; the limit is {MAX_EXPANDED_PARTS}",
                )
                return False
        return True

    def _block(self, expansion: Expansion) -> dict[str, object]:
        """The steps of an expansion as a block; its declarations and names are noted."""
        for key in _DECLARING_KEYS:
            added = getattr(expansion, key)
            self.declarations[key].update(added)
            self.taken_names.update(added)
        self.taken_names.update(bound_names(expansion.steps))
        return {"steps": expansion.steps}


def _is_strategy_mapping(item: object) -> bool:
    return isinstance(item, Mapping) and any(key in STRATEGIES for key in item)


def _is_field_mapping(value: object) -> bool:
    """Whether a value holds fields; otherwise it stands for the first field.

    A mapping from ranks to values is such a value too.
    """
    if not isinstance(value, Mapping):
        return False
    is_per_rank = all(key == "else" or isinstance(key, int) for key in value)
    return not value or not is_per_rank


def _plain_ranks(selector: Any) -> tuple[int, ...]:
    """The ranks of a selector that is a number or a list of numbers; else empty."""
    ranks = [selector] if isinstance(selector, int) else selector
    if not isinstance(ranks, list | tuple):
        return ()
    if not all(isinstance(rank, int) for rank in ranks):
        return ()
    return tuple(sorted(set(ranks)))


def _part_counts(strategy: Strategy) -> Iterator[tuple[tuple[str, ...], object]]:
    """The numbers of parts that a strategy lays out one by one, and where they are."""
    layers = getattr(strategy, "layers", 0)
    if isinstance(layers, tuple):
        layers = sum(layer.count for layer in layers)
    yield ("layers",), layers
    for key in _PART_KEYS:
        yield (key,), getattr(strategy, key, None)
    for name, fields in strategy:
        # A strategy inside, such as the pipeline of `hybrid`.
        if isinstance(fields, Mapping):
            for key in ("layers", *_PART_KEYS):
                yield (name, key), fields.get(key)
