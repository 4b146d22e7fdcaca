"""Entries of a program, from data: steps, blocks and repeats.

Key idea: a problem is noted and reading goes on, so that a file's problems are reported together. A
step that is partly wrong keeps its valid fields, so that the names in them are checked too.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from pydantic import ValidationError

from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.operations.core.field_types import expression_field, parse_selector, per_rank
from distsim.operations.core.operation_base import Operation
from distsim.scenario.format.models.entries import (
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
    Selector,
)
from distsim.scenario.format.models.top_level import BATCH_OPS, MAX_REPEAT_TIMES
from distsim.scenario.format.reading.operation_fields import (
    is_step_name,
    model_fields_by_key,
    operation_row,
)
from distsim.scenario.format.reading.pydantic_errors import add_validation_errors
from distsim.scenario.format.reading.step_messages import (
    StepMessage,
    entry_list_text_message,
    entry_text_message,
    unknown_field_message,
    unknown_step_message,
)
from distsim.scenario.format.source.document import DataPath
from distsim.scenario.format.source.problems import ProblemCollector

#: Limit for the rounds of nested repeats, multiplied.
MAX_REPEAT_ROUNDS = 10**7
_REPEAT_KEYS = ("times", "index", "steps")
_parse_times = per_rank(expression_field)


class _EntryContext(NamedTuple):
    """Where an entry is read: its path, the number of rounds that the repeats around it make."""

    path: DataPath
    rounds: int = 1
    in_batch: bool = False

    def below(self, *keys: str | int) -> _EntryContext:
        return _EntryContext((*self.path, *keys), self.rounds, self.in_batch)


class _StepFields(NamedTuple):
    """The fields of a step by their keys, and the paths of those not written under their key."""

    values: dict[str, Any]
    paths: Mapping[str, DataPath] = {}


class StepReader:
    """Reads entries; mistakes are added to ``problems``."""

    def __init__(self, problems: ProblemCollector) -> None:
        self.problems = problems
        #: By operation and text of the fields: strategies write the same step once for each layer.
        self._valid_ops: dict[tuple[type[Operation], str], Operation] = {}

    def entries(self, value: object, path: DataPath, rounds: int = 1) -> tuple[Entry, ...]:
        """A list of entries; ``rounds``: how often the repeats around it run it."""
        return self._entries(value, _EntryContext(path, rounds))

    def _entries(self, value: object, context: _EntryContext) -> tuple[Entry, ...]:
        if isinstance(value, ScenarioStep | ScenarioBlock | ScenarioRepeat):
            value = [value]
        if isinstance(value, str):
            message = entry_list_text_message(value)
            if message is not None:
                self._add(context.path, message)
                return ()
        if not isinstance(value, list | tuple):
            self.problems.add(
                context.path,
                f"expected a list of entries, each with a dash, found {value_text(value)}",
            )
            return ()
        found = [self._entry(item, context.below(k)) for k, item in enumerate(value)]
        return tuple([entry for entry in found if entry is not None])

    def _entry(self, item: Any, context: _EntryContext) -> Entry | None:
        if isinstance(item, ScenarioStep | ScenarioBlock | ScenarioRepeat):
            return item
        if isinstance(item, str):
            if is_step_name(item):
                return self._step(item, None, None, context, ())
            self._add(context.path, entry_text_message(item))
            return None
        if not isinstance(item, dict):
            self.problems.add(
                context.path,
                "expected an entry (`operation: {fields}`, or `ranks` and `steps`), "
                f"found {value_text(item)}",
            )
            return None
        return self._mapping_entry(item, context)

    def _mapping_entry(self, item: dict[Any, Any], context: _EntryContext) -> Entry | None:
        ranks = self._selector(item, context.path)
        keys = [key for key in item if key != "ranks"]
        known = [key for key in keys if key == "repeat" or is_step_name(key)]
        if not known:
            if "steps" in item:
                return self._block(item, ranks, keys, context)
            self._report_unknown_steps(keys, context.path)
            return None
        self._report_extra_keys(keys, known, context.path)
        # Two operations in one entry are a problem that is noted above; both are read for theirs.
        entry: Entry | None = None
        for key in known:
            if key == "repeat":
                entry = self._repeat(item[key], ranks, context)
            else:
                entry = self._step(key, item[key], ranks, context, (key,))
        return entry

    # --- selectors ---
    def _selector(self, item: dict[Any, Any], path: DataPath) -> Selector:
        value = item.get("ranks")
        if value is None:
            if "ranks" in item:
                self.problems.add(
                    (*path, "ranks"),
                    (
                        "expected a rank, a list of ranks, or a condition such as `stage == 0`, "
                        "found nothing"
                    ),
                )
            return None
        try:
            return parse_selector(value)
        except ValueError as error:
            self.problems.error((*path, "ranks"), error)
            return None

    # --- wrong keys ---
    def _report_unknown_steps(self, keys: list[Any], path: DataPath) -> None:
        if not keys:
            self.problems.add(
                path, "this entry does nothing: expected an operation, or `steps` with `ranks`"
            )
        for key in keys:
            self.problems.add((*path, key), unknown_step_message(key), at_key=True)

    def _report_extra_keys(self, keys: list[Any], known: list[str], path: DataPath) -> None:
        """Keys of an entry besides its selector and its first operation."""
        operation = known[0]
        for key in known[1:]:
            message = (
                f"this entry has two operations, {operation} and {key}: put a dash before {key}"
            )
            self.problems.add((*path, key), message, at_key=True)
        for key in keys:
            if key in known:
                continue
            remedy = ""
            if key == "steps":
                message = (
                    "an entry is either an operation or a block, but this one has both "
                    f"{operation} and `steps`"
                )
            elif _is_field_of(operation, key):
                message = f"{key} is a field of {operation}, but is not indented under it"
                remedy = f"indent {key} further than {operation}"
            else:
                message = (
                    f"unknown key {key} next to {operation}; only `ranks` is allowed "
                    f"there{did_you_mean(key, ['ranks'])}"
                )
            self.problems.add((*path, key), message, remedy, at_key=True)

    # --- blocks and repeats ---
    def _block(
        self, item: dict[Any, Any], ranks: Selector, keys: list[Any], context: _EntryContext
    ) -> ScenarioBlock:
        for key in keys:
            if key != "steps":
                self.problems.add(
                    (*context.path, key),
                    (
                        f"unknown key {key} in a block; its keys: `ranks` and "
                        f"`steps`{did_you_mean(key, ['ranks'])}"
                    ),
                    at_key=True,
                )
        line, column = self._place(context.path)
        steps = self._entries(item["steps"], context.below("steps"))
        return ScenarioBlock(ranks, steps, line, column, context.path)

    def _repeat(self, value: Any, ranks: Selector, context: _EntryContext) -> ScenarioRepeat | None:
        path = (*context.path, "repeat")
        if context.in_batch:
            self.problems.add(
                path, "a batch may contain only isend and irecv, found repeat", at_key=True
            )
        if not isinstance(value, dict):
            self.problems.add(
                path, f"expected `repeat: {{times, index, steps}}`, found {value_text(value)}"
            )
            return None
        self._report_unknown_repeat_keys(value, path)
        times = self._times(value, path, context.rounds)
        index = self._index(value, path)
        if "steps" not in value:
            self.problems.add(path, "repeat needs `steps`", at_key=True)
        # A count that is no constant is checked later, when its names have values.
        constant_times = getattr(times, "constant", None) or 1
        inner = _EntryContext((*path, "steps"), context.rounds * max(1, int(constant_times)))
        steps = self._entries(value.get("steps", []), inner)
        line, column = self._place(context.path, "repeat")
        return ScenarioRepeat(times, index, steps, ranks, line, column, context.path)

    def _report_unknown_repeat_keys(self, value: dict[Any, Any], path: DataPath) -> None:
        for key in value:
            if key not in _REPEAT_KEYS:
                self.problems.add(
                    (*path, key),
                    (
                        f"unknown key {key} in repeat; its fields: "
                        f"{name_list(_REPEAT_KEYS)}{did_you_mean(key, _REPEAT_KEYS)}"
                    ),
                    at_key=True,
                )

    def _times(self, value: dict[Any, Any], path: DataPath, rounds: int) -> Any:
        """How often a repeat runs; once, if that cannot be read."""
        once = expression_field(1)
        if "times" not in value:
            self.problems.add(path, "repeat needs `times`", at_key=True)
            return once
        try:
            times = _parse_times(value["times"])
        except ValueError as error:
            self.problems.error((*path, "times"), error)
            return once
        reason = repeat_count_error(getattr(times, "constant", None), rounds)
        if reason is not None:
            self.problems.add((*path, "times"), reason)
            return once
        return times

    def _index(self, value: dict[Any, Any], path: DataPath) -> str | None:
        index = value.get("index")
        if index is None or (isinstance(index, str) and index.isidentifier()):
            return index
        self.problems.add(
            (*path, "index"),
            f"expected a name made of letters, digits and _, found {value_text(index)}",
        )
        return None

    # --- steps ---
    def _step(
        self,
        name: str,
        value: object,
        ranks: Selector,
        context: _EntryContext,
        keys: tuple[str, ...],
    ) -> ScenarioStep | None:
        """One operation; ``keys`` lead from the entry to its fields (none for a bare name)."""
        path = (*context.path, *keys)
        row = operation_row(name)
        if row is None and not context.in_batch:
            return None  # a strategy that could not be expanded; the reason is noted
        if row is None or (context.in_batch and row.op not in BATCH_OPS):
            self.problems.add(
                path, f"a batch may contain only isend and irecv, found {name}", at_key=bool(keys)
            )
            return None
        fields = self._fields(row, name, value, path)
        if fields is None:
            return None
        if row.kind == "batch" and "ops" in fields.values:
            inner = _EntryContext((*path, "ops"), in_batch=True)
            fields.values["ops"] = self._entries(fields.values["ops"], inner)
        if context.in_batch and "as" in fields.values:
            self.problems.add(
                (*path, "as"), "a batch has a single handle: write `as` next to `ops`", at_key=True
            )
        line, column = self._place(context.path, *keys)
        op = self._validated(row, fields, name, path)
        return ScenarioStep(op, ranks, line, column, context.path)

    def _fields(
        self, row: type[Operation], name: str, value: object, path: DataPath
    ) -> _StepFields | None:
        """The fields of a step; None, with a problem noted, if it has none of its own form."""
        first = row.first_field
        if value is None:
            return _StepFields({})
        if isinstance(value, dict) and not (first and _is_per_rank_mapping(value)):
            known = model_fields_by_key(row)
            for key in value:
                if key not in known:
                    message = unknown_field_message(row, name, key)
                    self._add((*path, key), message, at_key=True)
            return _StepFields(dict(value))
        if first is not None:
            return _StepFields({first: value}, {first: path})
        known = model_fields_by_key(row)
        if known:
            remedy = f"`{name}: {{…}}`; its fields: {name_list(known)}"
        else:
            remedy = f"{name} has no fields: `- {name}`"
        self.problems.add(
            path, f"expected the fields of {name} as a mapping, found {value_text(value)}", remedy
        )
        return None

    def _validated(
        self, row: type[Operation], fields: _StepFields, name: str, path: DataPath
    ) -> Operation:
        """The operation with its fields; if some are wrong, with the others alone."""
        known = model_fields_by_key(row)
        has_unknown = not fields.values.keys() <= known.keys()
        if has_unknown or not _is_plain_data(fields.values):
            cache_key = None
        else:
            cache_key = (row, repr(fields.values))
            if cache_key in self._valid_ops:
                return self._valid_ops[cache_key]
        given = {key: value for key, value in fields.values.items() if key in known}
        try:
            op = row.model_validate(given)
        except ValidationError as errors:
            add_validation_errors(
                self.problems, errors, path, row, fields.paths, name, lenient=has_unknown
            )
            return _with_valid_fields(row, given)
        if cache_key is not None:
            self._valid_ops[cache_key] = op
        return op

    # --- places ---
    def _place(self, path: DataPath, *keys: str | int) -> tuple[int, int]:
        """Line and column of an entry, or of a key in it; (0, 0) in a scenario built in Python."""
        mark = self.problems.document.mark((*path, *keys), at_key=bool(keys))
        return (mark.line + 1, mark.column + 1) if mark else (0, 0)

    def _add(self, path: DataPath, message: StepMessage, at_key: bool = False) -> None:
        self.problems.add(
            path, message.message, message.remedy, at_key=at_key, offset=message.offset
        )


def repeat_count_error(times: Any, rounds: int) -> str | None:
    """Why a repeat of so many times, inside so many rounds, is refused; None if it is accepted."""
    if times is None:
        return None
    if isinstance(times, bool) or times != int(times) or times < 0:
        return f"expected a number of repetitions, 0 or more, found {value_text(times)}"
    if times > MAX_REPEAT_TIMES:
        return (
            f"a repeat may have at most {MAX_REPEAT_TIMES} repetitions, found {int(times)}; "
            "distsim simulates every call"
        )
    if times * rounds > MAX_REPEAT_ROUNDS:
        return (
            f"nested repeats and iterations make {int(times) * rounds} repetitions here; at "
            f"most {MAX_REPEAT_ROUNDS} are allowed, because distsim simulates every call"
        )
    return None


def _is_field_of(operation: str, key: Any) -> bool:
    if operation == "repeat":
        return key in ("times", "index")
    row = operation_row(operation)
    return row is not None and key in model_fields_by_key(row)


def _is_per_rank_mapping(value: dict[Any, Any]) -> bool:
    """Whether a mapping gives values by rank, rather than fields by name."""
    return bool(value) and all(key == "else" or isinstance(key, int) for key in value)


def _with_valid_fields(row: type[Operation], given: Mapping[str, Any]) -> Operation:
    """The operation with those fields that can be parsed, unvalidated."""
    known = model_fields_by_key(row)
    valid: dict[str, Any] = {}
    for key, value in given.items():
        name = known[key]
        parser = getattr(next(iter(row.model_fields[name].metadata), None), "func", None)
        with suppress(ValueError):
            valid[name] = parser(value) if parser else value
    return row.model_construct(**valid)


def _is_plain_data(value: object) -> bool:
    """Whether a value is fully described by its text."""
    kind = type(value)
    if kind is dict:
        return all(_is_plain_data(item) for item in value.values())  # type: ignore[attr-defined]
    if kind is list:
        return all(_is_plain_data(item) for item in value)  # type: ignore[attr-defined]
    return kind in (str, int, float, bool, type(None))
