"""Messages for malformed entries: typing mistakes, Python code, names of other libraries."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.operations.core.operation_base import Operation
from distsim.operations.core.torch_arguments import torch_argument_names
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario.format.reading.operation_fields import model_fields_by_key, operation_row
from distsim.scenario.strategies import STRATEGIES

#: A call as it is written in Python: `send(x, 1)`.
_PYTHON_CALL = re.compile(
    r"(?:(?:torch\.)?(?:distributed|dist)\.)?([A-Za-z_]\w*)\((.*)\)?", re.DOTALL
)
_SECOND_ENTRY_MESSAGE = (
    "this entry contains a second entry: its dash is indented further than the previous one"
)
#: Names of fields in other libraries, with the names here.
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


class StepMessage(NamedTuple):
    """A problem of an entry that is only a text: message, remedy, and where in the text it is."""

    message: str
    remedy: str = ""
    offset: int | None = None


def entry_list_text_message(text: str) -> StepMessage | None:
    """What is wrong with a text in place of a list of entries, if a dash is the reason."""
    if text.startswith("-"):
        words = text[1:].split()
        first_word = words[0] if words else ""
        return StepMessage("a space is missing after the dash", f"write `- {first_word}`")
    if _contains_second_entry(text):
        return StepMessage(
            _SECOND_ENTRY_MESSAGE, "align the dashes of a list in one column, one for each entry"
        )
    return None


def entry_text_message(text: str) -> StepMessage:
    """What is wrong with a text in place of an entry that names no operation."""
    name, colon, rest = text.partition(":")
    if colon and (name in OPERATIONS or name in OPERATION_ALIASES):
        message = f"a space is missing after the colon: write `{name}: {rest.strip()}`"
        return StepMessage(message, offset=len(name))
    if _contains_second_entry(text):
        return StepMessage(_SECOND_ENTRY_MESSAGE, "align the dashes of a list in one column")
    call = _PYTHON_CALL.fullmatch(text)
    if call is not None:
        message = f"{call[1]} is written as a function call; a step is a mapping"
        return StepMessage(message, _call_as_mapping(call[1], call[2]))
    if text == "repeat":
        return StepMessage("repeat needs `times` and `steps`")
    return StepMessage(unknown_step_message(text))


def _contains_second_entry(text: str) -> bool:
    """Whether a text of several lines was meant as several entries."""
    return " - " in text


#: Words with which other languages write a condition.
_CONDITION_WORDS = frozenset({"if", "then", "else", "when"})


def unknown_step_message(name: object) -> str:
    """The message for a step that is no operation, strategy or block."""
    known = [*OPERATIONS, *OPERATION_ALIASES, *STRATEGIES, "repeat", "ranks", "steps"]
    if name in _CONDITION_WORDS:
        return f"unknown step {value_text(name)}; a condition is `ranks: rank == 0` in a step"
    hint = did_you_mean(name, known) or "; `distsim explain` lists the operations"
    return f"unknown step {value_text(name)}{hint}"


# --- calls in Python ---
def _call_as_mapping(name: str, arguments: str) -> str:
    """The remedy for a call in Python: the mapping that means the same."""
    row = operation_row(name)
    if row is None:
        return "write `- name: {field: value}`; `distsim explain` lists the operations"
    known = model_fields_by_key(row)
    key_of_argument = torch_argument_names(row.op, set(known))
    fields = {}
    for argument, value in _python_arguments(row, arguments):
        key = key_of_argument.get(argument, argument)
        if key in known:
            fields[key] = value
    if not fields:
        return f"write `- {row.op}`"
    body = ", ".join(f"{key}: {value}" for key, value in fields.items())
    return f"write `- {row.op}: {{{body}}}`"


def _python_arguments(row: type[Operation], arguments: str) -> list[tuple[str, str]]:
    """Names and values of a call's arguments; positional ones in the order of torch's signature."""
    order = _signature_names(row)
    parts = [part.strip() for part in arguments.rstrip(")").split(",")]
    found = []
    for position, part in enumerate(part for part in parts if part):
        name, equals, value = part.partition("=")
        if equals:
            name, value = name.strip(), value.strip()
        else:
            name, value = (order[position] if position < len(order) else ""), part
        if value in ("True", "False"):
            value = value.lower()
        found.append((name, value))
    return found


def _signature_names(row: type[Operation]) -> list[str]:
    """The parameters of torch's function, in order."""
    _, _, parameters = row.words.signature.partition("(")
    parameters, _, _ = parameters.rpartition(")")
    return [parameter.strip().partition("=")[0] for parameter in parameters.split(",")]


# --- unknown fields ---
def unknown_field_message(row: type[Operation], name: str, key: Any) -> StepMessage:
    """For a field that an operation does not have: torch's name of a field, or a misspelt one."""
    known = model_fields_by_key(row)
    message = f"unknown field {key} in {name}; its fields: {name_list(known, 20)}"
    # torch's name -> the field here; "" if there is none
    field_of_argument = torch_argument_names(row.op, set(known))
    meant = field_of_argument.get(key) if isinstance(key, str) else None
    if meant is None:
        return StepMessage(message + _similar_field_hint(key, known))
    if meant == "":
        return StepMessage(message, f"torch's {key} has no counterpart in a scenario: remove it")
    example = next(iter(row.model_fields[known[meant]].examples or ()), "…")
    shown = "true" if example is True else example
    return StepMessage(
        f"{message}; did you mean {meant}?",
        f"write `{meant}: {shown}` for torch's {key}",
    )


def _similar_field_hint(key: object, known: dict[str, str]) -> str:
    other = _FOREIGN_FIELD_NAMES.get(key) if isinstance(key, str) else None
    if other == "src" and "dst" in known:
        other = "dst"
    if other == "dst" and "src" in known:
        other = "src"
    return f"; did you mean {other}?" if other in known else did_you_mean(key, known)
