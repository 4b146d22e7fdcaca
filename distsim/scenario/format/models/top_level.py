"""The form of a scenario file as Pydantic fields: its top level, blocks and repeats, cluster files.

`distsim.scenario.format.reading.scenario_reader` reads a file by these fields, key by key;
`distsim.scenario.format.schema` derives the JSON Schema and the key reference from them. The fields
of steps are defined in `distsim.operations`, of training strategies in
`distsim.scenario.strategies`, of all other sections in `distsim.scenario.format.models.sections`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from distsim.backends import BACKEND_PROFILES, DEFAULT_BACKEND
from distsim.common.field_parsing import FieldSchema
from distsim.common.quantities import EXAMPLE_BY_KIND
from distsim.operations.core.field_schemas import (
    NAME_PATTERN,
    expression_schema,
    name_schema,
    per_rank_schema,
    quantity_schema,
)
from distsim.operations.core.field_types import expression_field
from distsim.scenario.format.models.base_model import FormatModel
from distsim.scenario.format.models.launch import LaunchOptions
from distsim.scenario.format.models.scalars import (
    MAX_WORLD,
    choice,
    expected_error,
    fraction,
    integer,
    parsed_by,
    text,
)
from distsim.scenario.format.models.sections import (
    Expectations,
    FaultDecl,
    GroupDecl,
    MemoryDecl,
    ProcessGroupOptions,
    SweepDecl,
    TensorDecl,
    World,
)

MAX_REPEAT_TIMES = 10**6
#: Operations that may be parts of a batch.
BATCH_OPS = ("isend", "irecv")
ENTRIES_SCHEMA: FieldSchema = {"type": "array", "items": {"x-def": "entry"}}
_RANKS_SCHEMA: FieldSchema = {
    "type": "array",
    "minItems": 1,
    "uniqueItems": True,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_WORLD},
}


def _parse_name(value: object) -> str:
    if not text(value).strip():
        raise expected_error("a name", "")
    return text(value)


def mapping_schema(value: FieldSchema) -> FieldSchema:
    """A mapping of names to values."""
    return {
        "type": "object",
        "propertyNames": {"pattern": f"^{NAME_PATTERN}$"},
        "additionalProperties": value,
    }


def _model_reference(model: type[FormatModel]) -> FieldSchema:
    return {"x-model": model.__name__}


_WORLD_SCHEMA: FieldSchema = {
    "anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_WORLD}, _model_reference(World)]
}
_GROUP_SCHEMA: FieldSchema = {"anyOf": [_RANKS_SCHEMA, _model_reference(GroupDecl)]}
_QUANTITIES_SCHEMA: FieldSchema = {
    "anyOf": [expression_schema(), *(quantity_schema(kind) for kind in EXAMPLE_BY_KIND)]
}
_CLUSTER_FILE_PATTERN = r"^\S*(?:/\S*|\.(?:yaml|yml|json))$"
_CLUSTER_SCHEMA: FieldSchema = {
    "anyOf": [
        {"x-def": "preset"},
        {"type": "string", "pattern": _CLUSTER_FILE_PATTERN},
        {"x-def": "cluster"},
    ]
}


class ScenarioFileFields(FormatModel):
    """The top level of a scenario file."""

    name: Annotated[str, *parsed_by(_parse_name, {"type": "string", "pattern": r"\S"})] = ""
    about: Annotated[str, *parsed_by(text, {"type": "string"})] = ""
    world: Annotated[Any, WithJsonSchema(_WORLD_SCHEMA)]
    backend: Annotated[
        str, *parsed_by(choice(*BACKEND_PROFILES), {"enum": [*BACKEND_PROFILES]})
    ] = DEFAULT_BACKEND
    cluster: Annotated[Any, WithJsonSchema(_CLUSTER_SCHEMA)] = None
    mesh: Annotated[
        Any, WithJsonSchema(mapping_schema({"type": "integer", "minimum": 1, "maximum": MAX_WORLD}))
    ] = None
    vars: Annotated[Any, WithJsonSchema(mapping_schema(_QUANTITIES_SCHEMA))] = None
    groups: Annotated[Any, WithJsonSchema(mapping_schema(_GROUP_SCHEMA))] = None
    tensors: Annotated[Any, WithJsonSchema(mapping_schema(_model_reference(TensorDecl)))] = None
    memory: Annotated[object, WithJsonSchema(mapping_schema(_model_reference(MemoryDecl)))] = None
    program: Annotated[Any, WithJsonSchema(ENTRIES_SCHEMA)]
    iterations: Annotated[
        int,
        *parsed_by(
            integer(1, MAX_REPEAT_TIMES),
            {"type": "integer", "minimum": 1, "maximum": MAX_REPEAT_TIMES},
        ),
    ] = 1
    options: Annotated[object, WithJsonSchema(_model_reference(ProcessGroupOptions))] = None
    launch: Annotated[object, WithJsonSchema(_model_reference(LaunchOptions))] = None
    faults: Annotated[
        Any, WithJsonSchema({"type": "array", "items": _model_reference(FaultDecl)})
    ] = None
    seed: Annotated[
        int, *parsed_by(integer(0, 2**53), {"type": "integer", "minimum": 0, "maximum": 2**53})
    ] = 0
    jitter: Annotated[
        float, *parsed_by(fraction, {"type": "number", "minimum": 0, "exclusiveMaximum": 1})
    ] = 0.0
    sweep: Annotated[object, WithJsonSchema(_model_reference(SweepDecl))] = None
    expect: Annotated[object, WithJsonSchema(_model_reference(Expectations))] = None


TOP_LEVEL_KEYS = tuple(ScenarioFileFields.model_fields)


class BlockFields(FormatModel):
    """Entries for some ranks."""

    ranks: Annotated[Any, WithJsonSchema({"x-def": "selector"})] = None
    steps: Annotated[Any, WithJsonSchema(ENTRIES_SCHEMA)]


class RepeatFields(FormatModel):
    """Entries that are repeated."""

    times: Annotated[Any, *parsed_by(expression_field, per_rank_schema(expression_schema()))]
    index: Annotated[str | None, WithJsonSchema(name_schema())] = None
    steps: Annotated[Any, WithJsonSchema(ENTRIES_SCHEMA)]


#: Mappings of the file that hold parts: key -> the part.
SECTION_MODELS: dict[str, type[FormatModel]] = {
    "world": World,
    "groups": GroupDecl,
    "tensors": TensorDecl,
    "memory": MemoryDecl,
    "options": ProcessGroupOptions,
    "launch": LaunchOptions,
    "faults": FaultDecl,
    "sweep": SweepDecl,
    "expect": Expectations,
}


def parser_of(key: str) -> Any:
    """The parser of a single value of the top level."""
    return ScenarioFileFields.model_fields[key].metadata[0].func


__all__ = [
    "ENTRIES_SCHEMA",
    "BATCH_OPS",
    "TOP_LEVEL_KEYS",
    "MAX_REPEAT_TIMES",
    "SECTION_MODELS",
    "BlockFields",
    "ScenarioFileFields",
    "RepeatFields",
    "mapping_schema",
    "parser_of",
]
