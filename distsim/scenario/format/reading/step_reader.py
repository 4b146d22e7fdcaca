"""Entries of a program, from data: steps, blocks, repeats. Problems are noted, and what can be read
is read on.
"""

from __future__ import annotations

import re
from contextlib import suppress
from functools import cache
from typing import Any

from pydantic import ValidationError

from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.operations.core.field_help import torch_argument_names
from distsim.operations.core.field_types import expression_field, parse_selector, per_rank
from distsim.operations.core.operation_base import Operation
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario.format.models.entries import (
    Entry,
    ScenarioBlock,
    ScenarioRepeat,
    ScenarioStep,
    Selector,
)
from distsim.scenario.format.models.top_level import BATCH_OPS, MAX_REPEAT_TIMES
from distsim.scenario.format.reading.pydantic_errors import add_validation_errors
from distsim.scenario.format.source.document import DataPath, ProblemCollector
from distsim.scenario.strategies import STRATEGIES

#: Rounds of nested repeats, multiplied.
MAX_REPEAT_ROUNDS = 10**7
_parse_times = per_rank(expression_field)


class StepReader:
    """Reads entries. What is wrong goes to ``problems``; a step that is partly wrong keeps its
    other fields.
    """

    def __init__(self, problems: ProblemCollector) -> None:
        self.problems = problems
        self._sound: dict[
            tuple[type[Operation], str] | None, Operation
        ] = {}  # by what is written: a layer's steps come again with each of its likes

    def entries(
        self, value: object, path: DataPath, rounds: int = 1, batch: bool = False
    ) -> tuple[Entry, ...]:
        """A list of entries; ``rounds``: how often the repeats around it run it."""
        if isinstance(value, ScenarioStep | ScenarioBlock | ScenarioRepeat):
            value = [value]
        if isinstance(value, str) and value.startswith("-"):
            self.problems.add(
                path,
                "a blank is missing after the dash",
                f"write `- {value[1:].split()[0] if value[1:].split() else ''}`",
            )
            return ()
        if isinstance(value, str) and _contains_second_entry(value):
            self.problems.add(
                path,
                _SECOND_ENTRY_MESSAGE,
                "put the dashes of a list in one column, one before each entry",
            )
            return ()
        if not isinstance(value, list | tuple):
            self.problems.add(
                path, f"expected a list of entries, each after a dash, found {value_text(value)}"
            )
            return ()
        found = (self.entry(item, (*path, k), rounds, batch) for k, item in enumerate(value))
        return tuple(entry for entry in found if entry is not None)

    def entry(self, item: Any, path: DataPath, rounds: int, batch: bool) -> Entry | None:
        if isinstance(item, ScenarioStep | ScenarioBlock | ScenarioRepeat):
            return item
        if isinstance(item, str):
            return self.step(item, None, None, path, (), batch) if self.known(item, path) else None
        if not isinstance(item, dict):
            message = f"expected an entry (`operation: {{fields}}`, or `ranks` and `steps`), found {value_text(item)}"
            self.problems.add(path, message)
            return None
        ranks = self.selector(item, path)
        keys = [key for key in item if key != "ranks"]
        known = [
            key
            for key in keys
            if key in OPERATIONS or key in OPERATION_ALIASES or key == "repeat" or key in STRATEGIES
        ]
        if "steps" in item and not known:
            return self.block(item, ranks, keys, path, rounds, batch)
        if not known:
            self.unknown(keys, path)
            return None
        self.report_extra_keys(keys, known, path)
        last = None
        for key in known:
            last = self.one(key, item[key], ranks, path, rounds, batch)
        return last

    def one(
        self, key: str, value: object, ranks: Selector, path: DataPath, rounds: int, batch: bool
    ) -> Entry | None:
        if key == "repeat":
            return self.repeat(value, ranks, path, rounds, batch)
        return self.step(key, value, ranks, path, (key,), batch)

    # --- who ---
    def selector(self, item: dict[object, object], path: DataPath) -> Selector:
        value = item.get("ranks")
        if value is None:
            if "ranks" in item:
                self.problems.add(
                    (*path, "ranks"),
                    "expected a rank, a list of ranks, or a condition as `stage == 0`, found nothing",
                )
            return None
        try:
            return parse_selector(value)
        except ValueError as error:
            self.problems.error((*path, "ranks"), error)
            return None

    # --- what is no single operation ---
    def known(self, text: str, path: DataPath) -> bool:
        if text in OPERATIONS or text in OPERATION_ALIASES or text in STRATEGIES:
            return True
        name, colon, rest = text.partition(":")
        if colon and (name in OPERATIONS or name in OPERATION_ALIASES):
            self.problems.add(
                path,
                f"a blank is missing after the colon: write `{name}: {rest.strip()}`",
                offset=len(name),
            )
        elif _contains_second_entry(text):
            self.problems.add(path, _SECOND_ENTRY_MESSAGE, "put the dashes of a list in one column")
        elif (call := _PYTHON_CALL.fullmatch(text)) is not None:
            self.problems.add(
                path,
                f"{call[1]} is written as a call; a step is a mapping",
                _call_as_mapping(call[1], call[2]),
            )
        elif text == "repeat":
            self.problems.add(path, "repeat needs `times` and `steps`")
        else:
            self.problems.add(path, _unknown_step_message(text))
        return False

    def unknown(self, keys: list[Any], path: DataPath) -> None:
        if not keys:
            self.problems.add(
                path, "expected an operation, or `steps` beside `ranks`: this entry does nothing"
            )
        for key in keys:
            self.problems.add((*path, key), _unknown_step_message(key), at_key=True)

    def report_extra_keys(self, keys: list[Any], known: list[str], path: DataPath) -> None:
        """More than one key in an entry."""
        for key in known[1:]:
            message = f"two operations in one entry, {known[0]} and {key}: put a dash before {key}"
            self.problems.add((*path, key), message, at_key=True)
        row = operation_row(known[0])
        for key in keys:
            if key in known:
                continue
            if key == "steps":
                self.problems.add(
                    (*path, key),
                    f"an entry is an operation or a block: `steps` stands beside {known[0]}",
                    at_key=True,
                )
            elif (row is not None and key in model_fields_by_key(row)) or (
                known[0] == "repeat" and key in ("times", "index")
            ):
                hint = f"indent {key} further than {known[0]}"
                self.problems.add(
                    (*path, key),
                    f"{key} is a field of {known[0]}, but stands beside it",
                    hint,
                    at_key=True,
                )
            else:
                message = f"unknown key {key} beside {known[0]}; only `ranks` may stand there{did_you_mean(key, ['ranks'])}"
                self.problems.add((*path, key), message, at_key=True)

    # --- blocks and repeats ---
    def block(
        self,
        item: dict[Any, Any],
        ranks: Selector,
        keys: list[Any],
        path: DataPath,
        rounds: int,
        batch: bool,
    ) -> ScenarioBlock:
        for key in keys:
            if key != "steps":
                self.problems.add(
                    (*path, key),
                    f"unknown key {key} in a block; it has `ranks` and `steps`{did_you_mean(key, ['ranks'])}",
                    at_key=True,
                )
        line, column = self.place(path)
        return ScenarioBlock(
            ranks, self.entries(item["steps"], (*path, "steps"), rounds, batch), line, column, path
        )

    def repeat(
        self, value: Any, ranks: Selector, path: DataPath, rounds: int, batch: bool
    ) -> ScenarioRepeat | None:
        here = (*path, "repeat")
        if batch:
            self.problems.add(here, "a batch holds isend and irecv only, found repeat", at_key=True)
        if not isinstance(value, dict):
            self.problems.add(
                here, f"expected `repeat: {{times, index, steps}}`, found {value_text(value)}"
            )
            return None
        for key in value:
            if key not in ("times", "index", "steps"):
                names = ("times", "index", "steps")
                self.problems.add(
                    (*here, key),
                    f"unknown key {key} in repeat; it has {name_list(names)}{did_you_mean(key, names)}",
                    at_key=True,
                )
        times = self.times(value, here, rounds)
        index = value.get("index")
        if index is not None and not (isinstance(index, str) and index.isidentifier()):
            self.problems.add(
                (*here, "index"),
                f"expected a name made of letters, digits and _, found {value_text(index)}",
            )
            index = None
        if "steps" not in value:
            self.problems.add(here, "repeat needs `steps`", at_key=True)
        constant = getattr(times, "constant", None) or 1
        steps = self.entries(
            value.get("steps", []), (*here, "steps"), rounds * max(1, int(constant))
        )
        line, column = self.place(path, "repeat")
        return ScenarioRepeat(times, index, steps, ranks, line, column, path)

    def times(self, value: dict[Any, Any], path: DataPath, rounds: int) -> Any:
        if "times" not in value:
            self.problems.add(path, "repeat needs `times`", at_key=True)
            return expression_field(1)
        try:
            times = _parse_times(value["times"])
        except ValueError as error:
            self.problems.error((*path, "times"), error)
            return expression_field(1)
        reason = repeat_count_error(getattr(times, "constant", None), rounds)
        if reason is not None:
            self.problems.add((*path, "times"), reason)
            return expression_field(1)
        return times

    # --- steps ---
    def step(
        self, name: str, value: object, ranks: Selector, path: DataPath, key: DataPath, batch: bool
    ) -> ScenarioStep | None:
        """One operation. ``key`` is what leads from the entry to the fields: empty for a bare
        word.
        """
        here = (*path, *key)
        row = operation_row(name)
        if row is None and not batch:
            return None  # a strategy that could not be expanded; why is noted
        if row is None or (batch and row.op not in BATCH_OPS):
            self.problems.add(
                here, f"a batch holds isend and irecv only, found {name}", at_key=bool(key)
            )
            return None
        fields, paths = self.fields(row, name, value, here)
        if fields is None:
            return None
        if row.kind == "batch" and "ops" in fields:
            fields["ops"] = self.entries(fields["ops"], (*here, "ops"), batch=True)
        if batch and ("as" in fields):
            self.problems.add(
                (*here, "as"), "a batch has one handle: put `as` beside `ops`", at_key=True
            )
        line, column = self.place(path, *key)
        return ScenarioStep(
            self.validated(row, fields, paths, name, here), ranks, line, column, path
        )

    def validated(
        self,
        row: type[Operation],
        fields: dict[str, Any],
        paths: dict[str, DataPath],
        name: str,
        here: DataPath,
    ) -> Operation:
        """The row with its fields; where some are wrong, with the others, so that their names are
        still looked at.
        """
        known = model_fields_by_key(row)
        strange = fields.keys() - known.keys()
        written = (row, repr(fields)) if not strange and _is_plain_data(fields) else None
        if written in self._sound:
            return self._sound[written]
        try:
            op = row.model_validate(
                {key: value for key, value in fields.items() if key in known} if strange else fields
            )
            return self._sound.setdefault(written, op) if written is not None else op
        except ValidationError as errors:
            add_validation_errors(
                self.problems, errors, here, row, paths, name, lenient=bool(strange)
            )
        found: dict[str, Any] = {}
        for key, value in fields.items():
            parse = (
                getattr(next(iter(row.model_fields[known[key]].metadata), None), "func", None)
                if key in known
                else None
            )
            with suppress(ValueError):
                if key in known:
                    found[known[key]] = parse(value) if parse else value
        return row.model_construct(**found)

    def fields(
        self, row: type[Operation], name: str, value: object, here: DataPath
    ) -> tuple[dict[str, object] | None, dict[str, DataPath]]:
        """The fields as a mapping, and for a field that stands elsewhere than under its name,
        where.
        """
        first = row.first_field
        if value is None:
            return {}, {}
        if isinstance(value, dict) and not (
            first and value and all(key == "else" or isinstance(key, int) for key in value)
        ):
            known = model_fields_by_key(row)
            for key in value:
                if key not in known:
                    self.report_unknown_field(row, name, key, here)
            return dict(value), {}
        if first is None:
            message = f"expected the fields of {name} as a mapping, found {value_text(value)}"
            hint = (
                f"`{name}: {{…}}`; it has {name_list(model_fields_by_key(row))}"
                if model_fields_by_key(row)
                else f"it has no fields: `- {name}`"
            )
            self.problems.add(here, message, hint)
            return None, {}
        return {first: value}, {first: here}

    def report_unknown_field(
        self, row: type[Operation], name: str, key: Any, here: DataPath
    ) -> None:
        """A field that an operation does not have: torch's word for another one, a misspelt one, or
        none.
        """
        known = model_fields_by_key(row)
        meant = torch_argument_names(row.op, set(known)).get(key) if isinstance(key, str) else None
        message = f"unknown field {key} in {name}; it has {name_list(known, 20)}"
        hint = ""
        if meant == "":
            hint = f"torch's {key} has no counterpart in a file: leave it out"
        elif meant is not None:
            example = next(iter(row.model_fields[known[meant]].examples or ()), "…")
            message += f"; did you mean {meant}?"
            hint = f"torch's {key} is `{meant}` in a file: `{meant}: {str(example).lower() if example is True else example}`"
        else:
            message += _similar_field_hint(key, known)
        self.problems.add((*here, key), message, hint, at_key=True)

    def place(self, path: DataPath, *key: str | int) -> tuple[int, int]:
        mark = self.problems.document.mark((*path, *key), at_key=bool(key))
        return (mark.line + 1, mark.column + 1) if mark else (0, 0)


@cache
def operation_row(name: str) -> type[Operation] | None:
    """The row behind an operation's name or alias; None for `repeat` and strategies."""
    return OPERATIONS.get(OPERATION_ALIASES.get(name, name))


@cache
def model_fields_by_key(row: type[Operation]) -> dict[str, str]:
    """A row's fields: the name in a file -> the name in the model."""
    return {info.alias or name: name for name, info in row.model_fields.items()}


def repeat_count_error(times: Any, rounds: int) -> str | None:
    """Why nobody can run something that often, or None."""
    if times is None:
        return None
    if isinstance(times, bool) or times != int(times) or times < 0:
        return (
            f"expected how often to repeat, an integer of zero or more, found {value_text(times)}"
        )
    if times > MAX_REPEAT_TIMES:
        return f"repeat is bounded: at most {MAX_REPEAT_TIMES} times, found {int(times)}; every call is simulated"
    if times * rounds > MAX_REPEAT_ROUNDS:
        made = f"nested repeats (and iterations) make {int(times) * rounds} rounds here, at most {MAX_REPEAT_ROUNDS}"
        return f"repeat is bounded: {made}; every call is simulated"
    return None


#: `send(x, 1)`, as it stands in Python.
_PYTHON_CALL = re.compile(
    r"(?:(?:torch\.)?(?:distributed|dist)\.)?([A-Za-z_]\w*)\((.*)\)?", re.DOTALL
)
_SECOND_ENTRY_MESSAGE = (
    "a second entry stands in this one: its dash is indented further than the one before"
)


def _contains_second_entry(text: str) -> bool:
    """Is a text of several lines made of what was meant as several entries?"""
    return " - " in text


def _call_as_mapping(name: str, arguments: str) -> str:
    """The mapping that a call stands for: arguments in the order of torch's signature."""
    row = operation_row(name)
    if row is None:
        return "write `- name: {field: value}`; `distsim explain` lists the steps"
    order = [
        word.strip().partition("=")[0]
        for word in row.words.signature.partition("(")[2].rpartition(")")[0].split(",")
    ]
    names, known = (
        torch_argument_names(row.op, set(model_fields_by_key(row))),
        model_fields_by_key(row),
    )
    found = {}
    for k, given in enumerate(
        part.strip() for part in arguments.rstrip(")").split(",") if part.strip()
    ):
        word, equals, value = given.partition("=")
        key, value = (
            (word.strip(), value.strip()) if equals else (order[k] if k < len(order) else "", given)
        )
        key = names.get(key, key)
        if key in known:
            found[key] = (
                value.removeprefix("dist.").lower() if value in ("True", "False") else value
            )
    body = ", ".join(f"{key}: {value}" for key, value in found.items())
    return f"write `- {row.op}: {{{body}}}`" if body else f"write `- {row.op}`"


def _unknown_step_message(name: object) -> str:
    known = [*OPERATIONS, *OPERATION_ALIASES, *STRATEGIES, "repeat", "ranks", "steps"]
    return f"unknown step {value_text(name)}{did_you_mean(name, known) or '; `distsim explain` lists the operations there are'}"


#: What people write who know another library.
_FOREIGN_FIELD_NAMES = {
    "to": "dst",
    "dest": "dst",
    "from": "src",
    "source": "src",
    "root": "src",
    "peer": "dst",
    "handle": "as",
    "reduce_op": "op",
    "is_async": "async",
    "async_": "async",
    "time_ns": "time",
    "duration": "time",
    "file": "init_method",
}


def _similar_field_hint(key: object, known: dict[str, str]) -> str:
    other = _FOREIGN_FIELD_NAMES.get(key) if isinstance(key, str) else None
    if other == "src" and "dst" in known:
        other = "dst"
    if other == "dst" and "src" in known:
        other = "src"
    return f"; did you mean {other}?" if other in known else did_you_mean(key, known)


__all__ = [
    "MAX_REPEAT_TIMES",
    "StepReader",
    "model_fields_by_key",
    "repeat_count_error",
    "operation_row",
]


def _is_plain_data(value: object) -> bool:
    """Whether a value's text says all of it."""
    kind = type(value)
    if kind is dict:
        return all(_is_plain_data(item) for item in value.values())  # type: ignore[attr-defined]
    if kind is list:
        return all(_is_plain_data(item) for item in value)  # type: ignore[attr-defined]
    return kind in (str, int, float, bool, type(None))
