"""The form of a scenario file as Pydantic fields: its top level, blocks and repeats, cluster files.

`distsim.scenario.format.reading.scenario_reader` reads a file by these fields, key by key;
`distsim.scenario.format.schema` derives the JSON Schema and the key reference from them. The fields
of steps are defined in `distsim.operations`, of training strategies in
`distsim.scenario.strategies`, of all other sections in `distsim.scenario.format.models.sections`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from distsim.backends import BACKEND_PROFILES, DEFAULT_BACKEND
from distsim.common.field_parsing import FieldSchema, expected_error
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
from distsim.scenario.format.models.expectations import Expectations
from distsim.scenario.format.models.launch import LaunchOptions
from distsim.scenario.format.models.scalars import (
    MAX_WORLD,
    choice,
    fraction,
    integer,
    parsed_by,
    text,
)
from distsim.scenario.format.models.sections import (
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

    name: Annotated[str, *parsed_by(_parse_name, {"type": "string", "pattern": r"\S"})] = Field(
        default="",
        description="Name of the scenario [default: the name of the file].",
        examples=["ring"],
    )
    about: Annotated[str, *parsed_by(text, {"type": "string"})] = Field(
        default="",
        description="What the scenario shows, in one or two sentences.",
        examples=[("Four ranks pass a token round.")],
    )
    world: Annotated[Any, WithJsonSchema(_WORLD_SCHEMA)] = Field(
        description="Number of ranks on one node, or `{nodes, ranks_per_node}`.",
        examples=[4],
    )
    backend: Annotated[
        str, *parsed_by(choice(*BACKEND_PROFILES), {"enum": [*BACKEND_PROFILES]})
    ] = Field(
        default=DEFAULT_BACKEND,
        description="Backend whose rules apply: what blocks, what is buffered, what raises.",
        examples=["nccl"],
    )
    cluster: Annotated[Any, WithJsonSchema(_CLUSTER_SCHEMA)] = Field(
        default=None,
        description=(
            "Hardware model: a preset (`distsim clusters`), a cluster file, or a mapping. A "
            "mapping with `preset` lists only the keys that differ."
        ),
        examples=["dgx-a100"],
    )
    mesh: Annotated[
        Any, WithJsonSchema(mapping_schema({"type": "integer", "minimum": 1, "maximum": MAX_WORLD}))
    ] = Field(
        default=None,
        description=(
            "Ranks as a grid, as in init_device_mesh; the last axis varies fastest. Each axis "
            "defines groups and a name for expressions."
        ),
        examples=[{"replica": 2, "stage": 2}],
    )
    vars: Annotated[Any, WithJsonSchema(mapping_schema(_QUANTITIES_SCHEMA))] = Field(
        default=None,
        description=(
            "Named numbers, conditions and quantities. An expression may use the variables above "
            "it."
        ),
        examples=[{"next": "(rank + 1) % world_size", "step": "3 ms"}],
    )
    groups: Annotated[Any, WithJsonSchema(mapping_schema(_GROUP_SCHEMA))] = Field(
        default=None,
        description=(
            "Groups by name, in addition to the axes of the mesh. A list of ranks is short for "
            "`{ranks: […]}`."
        ),
        examples=[{"pair": [0, 1]}],
    )
    tensors: Annotated[Any, WithJsonSchema(mapping_schema(_model_reference(TensorDecl)))] = Field(
        default=None,
        description="Tensors by name.",
        examples=[{"grad": {"shape": [1024], "dtype": "bfloat16"}}],
    )
    memory: Annotated[object, WithJsonSchema(mapping_schema(_model_reference(MemoryDecl)))] = Field(
        default=None,
        description=(
            "Peak memory of ranks, by name. distsim compares it with the memory of the device."
        ),
        examples=[{"all": {"parameters": "4 GiB"}}],
    )
    program: Annotated[Any, WithJsonSchema(ENTRIES_SCHEMA)] = Field(
        description=(
            "The calls: a list of entries. Each rank runs, in this order, the entries that select "
            "it."
        ),
        examples=[["barrier"]],
    )
    iterations: Annotated[
        int,
        *parsed_by(
            integer(1, MAX_REPEAT_TIMES),
            {"type": "integer", "minimum": 1, "maximum": MAX_REPEAT_TIMES},
        ),
    ] = Field(
        default=1,
        description=(
            "Number of training steps: how often the program runs. `iteration` counts them from 0."
        ),
        examples=[3],
    )
    options: Annotated[object, WithJsonSchema(_model_reference(ProcessGroupOptions))] = Field(
        default=None,
        description="Settings of torch.distributed and of the backends.",
        examples=[{"timeout": "30 s"}],
    )
    launch: Annotated[object, WithJsonSchema(_model_reference(LaunchOptions))] = Field(
        default=None,
        description="How the ranks are started: for the launch plan and for real runs.",
        examples=[{"master_port": 29500}],
    )
    faults: Annotated[
        Any, WithJsonSchema({"type": "array", "items": _model_reference(FaultDecl)})
    ] = Field(
        default=None,
        description="Faults to inject: ranks that die, are slow or start late, and slow links.",
        examples=[[{"rank": 1, "kind": "kill", "at": "3 ms"}]],
    )
    seed: Annotated[
        int, *parsed_by(integer(0, 2**53), {"type": "integer", "minimum": 0, "maximum": 2**53})
    ] = Field(
        default=0,
        description="Seed of the random numbers. Runs with the same seed are identical.",
        examples=[7],
    )
    jitter: Annotated[
        float, *parsed_by(fraction, {"type": "number", "minimum": 0, "exclusiveMaximum": 1})
    ] = Field(
        default=0.0,
        description="Largest random slowdown of each compute step: 0.1 is up to 10 %.",
        examples=[0.1],
    )
    sweep: Annotated[object, WithJsonSchema(_model_reference(SweepDecl))] = Field(
        default=None,
        description="Grid of points that `distsim sweep` simulates.",
        examples=[{"grid": {"mesh.dp": [1, 2, 4]}}],
    )
    expect: Annotated[object, WithJsonSchema(_model_reference(Expectations))] = Field(
        default=None,
        description="Expected results; `distsim test` compares them.",
        examples=[{"verdict": "ok"}],
    )


TOP_LEVEL_KEYS = tuple(ScenarioFileFields.model_fields)


class BlockFields(FormatModel):
    """Entries for some ranks."""

    ranks: Annotated[Any, WithJsonSchema({"x-def": "selector"})] = Field(
        default=None,
        description=(
            "Ranks that run the entry: a rank, a list of ranks, or a condition [default: all]. "
            "Steps accept this key too."
        ),
        examples=["stage == 0"],
    )
    steps: Annotated[Any, WithJsonSchema(ENTRIES_SCHEMA)] = Field(
        description="Entries for these ranks, in order.", examples=[["barrier"]]
    )


class RepeatFields(FormatModel):
    """Entries that are repeated."""

    times: Annotated[Any, *parsed_by(expression_field, per_rank_schema(expression_schema()))] = (
        Field(
            description="Number of repetitions, by rank if it differs.", examples=["micro_batches"]
        )
    )
    index: Annotated[str | None, WithJsonSchema(name_schema())] = Field(
        default=None, description="Name that counts the repetitions from 0.", examples=["m"]
    )
    steps: Annotated[Any, WithJsonSchema(ENTRIES_SCHEMA)] = Field(
        description="Entries to repeat.", examples=[["barrier"]]
    )


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
