"""Every key of a scenario file with its type, unit, default and example.

Read from the models and their JSON Schema, for pages of documentation and `distsim explain`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from distsim.common import units
from distsim.operations.core.field_schemas import QUANTITY_DEFINITIONS
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario.format.models.expectations import DurationBounds, Expectations
from distsim.scenario.format.models.top_level import (
    SECTION_MODELS,
    BlockFields,
    RepeatFields,
    ScenarioFileFields,
)
from distsim.scenario.format.schema.cluster import DEFINITION_NAMES
from distsim.scenario.format.schema.generate import inline_yaml, scenario_schema
from distsim.scenario.strategies import STRATEGIES

_MAX_CHOICES_SHOWN = 16
#: A part of the JSON schema.
Schema = Mapping[str, Any]

#: What a path has between a key and the keys of its items.
_NESTED_KEY_SUFFIX = {"groups": ".NAME", "tensors": ".NAME", "memory": ".NAME", "faults": "[]"}
_TYPE_TEXTS = {
    "string": "a text",
    "integer": "an integer",
    "number": "a number",
    "boolean": "true or false",
    "object": "a mapping",
    "array": "a list",
    "null": "nothing",
}


class FormatKey(NamedTuple):
    """One key.

    ``path`` is its place in a file (`tensors.NAME.shape`); ``default`` and ``example`` are written
    as in a file, "" if there is none.
    """

    path: str
    about: str
    kind: str
    unit: str
    default: str
    example: str
    required: bool

    @property
    def name(self) -> str:
        """The last part of the path."""
        return re.split(r"[.\]]", self.path)[-1]


@cache
def format_keys() -> dict[str, FormatKey]:
    """Every key by its path, in the order of the file; fields of steps as ``operation.field``."""
    return {key.path: key for key in (*_top_level_keys(), *_step_keys())}


def _top_level_keys() -> Iterator[FormatKey]:
    from distsim.hardware.cluster import Cluster

    whole = scenario_schema()
    for name, info in ScenarioFileFields.model_fields.items():
        yield _format_key(name, info, whole["properties"][name])
        if name in SECTION_MODELS:
            yield from _section_keys(
                name + _NESTED_KEY_SUFFIX.get(name, ""), SECTION_MODELS[name], whole
            )
        elif name == "cluster":
            yield from _cluster_keys("cluster", Cluster, "cluster", whole)
        elif name == "program":
            entry = whole["$defs"]["entry"]["else"]["properties"]
            for key, field in BlockFields.model_fields.items():
                yield _format_key(f"program[].{key}", field, entry[key])
            repeat = entry["repeat"]["properties"]
            for key, field in RepeatFields.model_fields.items():
                yield _format_key(f"program[].repeat.{key}", field, repeat[key])


def _section_keys(path: str, model: type[BaseModel], whole: Schema) -> Iterator[FormatKey]:
    properties = whole["$defs"][model.__name__]["properties"]
    for name, info in model.model_fields.items():
        written_name = info.alias or name
        yield _format_key(f"{path}.{written_name}", info, properties[written_name])
        if model is Expectations and name in ("makespan", "iteration"):
            yield from _section_keys(f"{path}.{name}", DurationBounds, whole)


def _cluster_keys(
    path: str, model: type[BaseModel], definition: str, whole: Schema
) -> Iterator[FormatKey]:
    properties = whole["$defs"][definition]["properties"]
    if definition == "cluster":
        yield FormatKey(
            "cluster.preset",
            properties["preset"]["description"],
            _type_text(properties["preset"]),
            "",
            "",
            "dgx-h100",
            False,
        )
    for name, info in model.model_fields.items():
        written_name = info.alias or name
        yield _format_key(f"{path}.{written_name}", info, properties[written_name])
        inner = info.annotation
        if written_name == "measured":
            inner = inner.__args__[0]  # type: ignore[union-attr]  # tuple[Curve, ...]
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from _cluster_keys(
                f"{path}.{written_name}" + "[]" * (written_name == "measured"),
                inner,
                DEFINITION_NAMES[inner],
                whole,
            )


def _step_keys() -> Iterator[FormatKey]:
    definitions = scenario_schema()["$defs"]
    for name, row in {**OPERATIONS, **STRATEGIES}.items():
        properties = definitions[f"{name}_fields"]["then"]["properties"]
        for field, info in row.model_fields.items():
            written_name = info.alias or field
            yield _format_key(f"{name}.{written_name}", info, properties[written_name])


def _format_key(path: str, info: FieldInfo, property: Schema) -> FormatKey:
    needed = info.is_required()
    default = "" if needed else _default_text(info, property)
    example = inline_yaml(info.examples[0]) if info.examples else ""
    return FormatKey(
        path,
        info.description or "",
        _type_text(property),
        _unit_names(property),
        default,
        example,
        needed,
    )


def _default_text(info: FieldInfo, property: Mapping[str, object]) -> str:
    if "default" in property:
        return inline_yaml(property["default"])
    found = info.get_default(call_default_factory=True, validated_data={})
    source = getattr(found, "source", found)
    return "" if source is None or source in ("", (), {}) else inline_yaml(source)


# --- words for a schema ---
def _type_text(schema: Mapping[str, object]) -> str:
    """A type in words: `an integer from 1 to 65535, or …`."""
    return ", or ".join(kind for kind in dict.fromkeys(_type_texts(schema)) if kind != "nothing")


def _type_texts(schema: Schema) -> Iterator[str]:
    if "$ref" in schema:
        yield _DEFINITION_TEXTS.get(schema["$ref"].rpartition("/")[2], "a mapping")
    for alternative in schema.get("anyOf", ()):
        yield from _type_texts(alternative)
    if "enum" in schema:
        yield _choices_text(schema["enum"])
    if "const" in schema:
        yield f"`{schema['const']}`"
    types = schema.get("type") or ()
    for kind in [types] if isinstance(types, str) else types:
        yield _bounded_type_text(kind, schema)


_DTYPES_TEXT = f"a dtype of torch ({', '.join(DTYPE_BYTES)})"
_DEFINITION_TEXTS = {
    "selector": "a rank, a list of ranks, or a condition",
    "value": "numbers or expressions, nested in lists",
    "expected": "a number, a list of numbers, or `?`",
    "numbers": "numbers, also by rank",
    "preset": "the name of a preset",
    "entry": "an entry",
    "name": "a name",
    "reference": "a name, or name@index",
    "condition": "an expression",
    "expression": "a number or an expression",
    "tensor": "a name, name@index, or {shape, dtype}",
    "dtype": _DTYPES_TEXT,
    **{
        word: f"{kind} with its unit, or an expression"
        for kind, word in QUANTITY_DEFINITIONS.items()
    },
    "size_count": "a size with its unit, or an expression",
    "flops_count": "a count with its unit, or an expression",
}


def _choices_text(words: list[object]) -> str:
    shown = [f"`{inline_yaml(word)}`" for word in words]
    if len(shown) <= _MAX_CHOICES_SHOWN:
        return " | ".join(shown)
    return f"{' | '.join(shown[:3])} and {len(shown) - 3} more"


def _bounded_type_text(kind: str, schema: Schema) -> str:
    if kind == "array":
        items = schema.get("items", {})
        return f"a list of {_plural(_type_text(items))}" if items else "a list"
    if kind == "object" and "else" in str(schema.get("propertyNames", "")):
        return "a mapping by rank: `{0: …, else: …}`"
    low, high = schema.get("minimum"), schema.get("maximum")
    if low is None:
        return _TYPE_TEXTS[kind]
    if high is None:
        return f"{_TYPE_TEXTS[kind]} of at least {low}"
    return f"{_TYPE_TEXTS[kind]} from {low} to {high}"


def _plural(words: str) -> str:
    """`an integer` as `integers`."""
    words, _, _ = words.partition(", or by rank")
    plural = re.sub(r"^an? (\w+)", r"\1s", words.replace("entry", "entrie"))
    return re.sub(r"\ba name, or name@index", "names, or name@index", plural)


def _unit_names(schema: Mapping[str, object]) -> str:
    """The units that a quantity may have."""
    kind_of_definition = {word: kind for kind, word in QUANTITY_DEFINITIONS.items()}
    for word in _definition_names(schema):
        kind = kind_of_definition.get(word.removesuffix("_count"))
        if kind:
            names = [name for name, unit in units.UNIT_BY_NAME.items() if unit.kind == kind]
            # The Greek letter is the same unit as the micro sign.
            return " ".join(name for name in names if not name.startswith("μ"))
    return str(schema.get("x-unit", ""))


def _definition_names(schema: Schema) -> Iterator[str]:
    """Names of the definitions that a value may be."""
    if "$ref" in schema:
        yield schema["$ref"].rpartition("/")[2]
    for alternative in schema.get("anyOf", ()):
        yield from _definition_names(alternative)


def find_key(path: str) -> FormatKey | None:
    """The key that a person means by a path.

    For example `SCENARIO.world.nodes`, `tensors.x.shape`, `program[2].send.dst` or
    `all_reduce.async`.
    """
    words = _key_words(path)
    path_by_words = _paths_by_words()
    for candidate in _path_candidates(words):
        found = path_by_words.get(tuple(candidate))
        if found is not None:
            return format_keys()[found]
    return None


def _key_words(path: str) -> list[str]:
    """The words of a path, without indices and what leads to a step."""
    words = [word for word in re.split(r"[.\[\]]+", path.strip()) if word and not word.isdigit()]
    if words and words[0].lower() in ("scenario", "file"):
        words = words[1:]
    if len(words) > 1 and words[0] == "program":
        words = _words_from_step(words)
    if words:
        words[0] = OPERATION_ALIASES.get(words[0], words[0])
    return words


def _words_from_step(words: list[str]) -> list[str]:
    """The words from the last step on; without a step, `program` and those from the last repeat."""
    last_step = last_repeat = None
    for position, word in enumerate(words):
        name = OPERATION_ALIASES.get(word, word)
        if position > 0 and (name in OPERATIONS or name in STRATEGIES):
            last_step = position
        if word == "repeat":
            last_repeat = position
    if last_step is not None:
        return words[last_step:]
    return ["program", *words[len(words) - 1 if last_repeat is None else last_repeat :]]


@cache
def _paths_by_words() -> dict[tuple[str, ...], str]:
    return {tuple(re.split(r"[.\[\]]+", path)): path for path in format_keys()}


def _path_candidates(words: list[str]) -> Iterator[list[str]]:
    """The words as they are, and with the second one taken for a name."""
    yield words
    if len(words) >= 2 and words[0] in ("groups", "tensors", "memory"):
        yield [words[0], "NAME", *words[2:]]
        yield [words[0], "NAME", *words[1:]]


__all__ = ["FormatKey", "find_key", "format_keys", "inline_yaml"]
