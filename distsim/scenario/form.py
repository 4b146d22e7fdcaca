"""The form of a scenario file as Pydantic fields: its top level, blocks and repeats, cluster files.

`distsim.scenario.read` reads a file by these fields, key by key; `schema` and `reference` are made from them. Steps are rows of
`distsim.ops`, training strategies those of `distsim.strategies`, all other parts those of `distsim.scenario.parts`.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import WithJsonSchema

from distsim.fields import Schema
from distsim.ops.fields import expression
from distsim.ops.patterns import WORD, expression_schema, name_schema, per_rank_schema, quantity_schema
from distsim.profiles import DEFAULT_BACKEND, PROFILES
from distsim.quantities import EXAMPLES
from distsim.scenario.launch import Launch
from distsim.scenario.part import Part
from distsim.scenario.parts import Expect, FaultDecl, GroupDecl, MemoryDecl, Options, Sweep, TensorDecl, World
from distsim.scenario.scalars import MAX_WORLD, choice, field, fraction, integer, text, wrong

MAX_TIMES = 10**6
#: What a batch may hold.
IN_A_BATCH = ("isend", "irecv")
ENTRIES: Schema = {"type": "array", "items": {"x-def": "entry"}}
_RANKS: Schema = {
    "type": "array",
    "minItems": 1,
    "uniqueItems": True,
    "items": {"type": "integer", "minimum": 0, "maximum": MAX_WORLD},
}


def _name(value: object) -> str:
    if not text(value).strip():
        raise wrong("a name", "")
    return text(value)


def named(value: Schema) -> Schema:
    """A mapping of names to values."""
    return {"type": "object", "propertyNames": {"pattern": f"^{WORD}$"}, "additionalProperties": value}


def _of(model: type[Part]) -> Schema:
    return {"x-model": model.__name__}


_WORLD: Schema = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_WORLD}, _of(World)]}
_GROUP: Schema = {"anyOf": [_RANKS, _of(GroupDecl)]}
_QUANTITIES: Schema = {"anyOf": [expression_schema(), *(quantity_schema(kind) for kind in EXAMPLES)]}
_FILE = r"^\S*(?:/\S*|\.(?:yaml|yml|json))$"
_CLUSTER: Schema = {"anyOf": [{"x-def": "preset"}, {"type": "string", "pattern": _FILE}, {"x-def": "cluster"}]}


class File(Part):
    """The top level of a scenario file."""

    name: Annotated[str, *field(_name, {"type": "string", "pattern": r"\S"})] = ""
    about: Annotated[str, *field(text, {"type": "string"})] = ""
    world: Annotated[Any, WithJsonSchema(_WORLD)]
    backend: Annotated[str, *field(choice(*PROFILES), {"enum": [*PROFILES]})] = DEFAULT_BACKEND
    cluster: Annotated[Any, WithJsonSchema(_CLUSTER)] = None
    mesh: Annotated[Any, WithJsonSchema(named({"type": "integer", "minimum": 1, "maximum": MAX_WORLD}))] = None
    vars: Annotated[Any, WithJsonSchema(named(_QUANTITIES))] = None
    groups: Annotated[Any, WithJsonSchema(named(_GROUP))] = None
    tensors: Annotated[Any, WithJsonSchema(named(_of(TensorDecl)))] = None
    memory: Annotated[object, WithJsonSchema(named(_of(MemoryDecl)))] = None
    program: Annotated[Any, WithJsonSchema(ENTRIES)]
    iterations: Annotated[int, *field(integer(1, MAX_TIMES), {"type": "integer", "minimum": 1, "maximum": MAX_TIMES})] = 1
    options: Annotated[object, WithJsonSchema(_of(Options))] = None
    launch: Annotated[object, WithJsonSchema(_of(Launch))] = None
    faults: Annotated[Any, WithJsonSchema({"type": "array", "items": _of(FaultDecl)})] = None
    seed: Annotated[int, *field(integer(0, 2**53), {"type": "integer", "minimum": 0, "maximum": 2**53})] = 0
    jitter: Annotated[float, *field(fraction, {"type": "number", "minimum": 0, "exclusiveMaximum": 1})] = 0.0
    sweep: Annotated[object, WithJsonSchema(_of(Sweep))] = None
    expect: Annotated[object, WithJsonSchema(_of(Expect))] = None


KEYS = tuple(File.model_fields)


class Block(Part):
    """Entries for some ranks."""

    ranks: Annotated[Any, WithJsonSchema({"x-def": "selector"})] = None
    steps: Annotated[Any, WithJsonSchema(ENTRIES)]


class Repeat(Part):
    """Entries that are repeated."""

    times: Annotated[Any, *field(expression, per_rank_schema(expression_schema()))]
    index: Annotated[str | None, WithJsonSchema(name_schema())] = None
    steps: Annotated[Any, WithJsonSchema(ENTRIES)]


#: Mappings of the file that hold parts: key -> the part.
PARTS: dict[str, type[Part]] = {
    "world": World, "groups": GroupDecl, "tensors": TensorDecl, "memory": MemoryDecl, "options": Options, "launch": Launch,
    "faults": FaultDecl, "sweep": Sweep, "expect": Expect,
}  # fmt: skip


def parser(key: str) -> Any:
    """The parser of a single value of the top level."""
    return File.model_fields[key].metadata[0].func


__all__ = ["ENTRIES", "IN_A_BATCH", "KEYS", "MAX_TIMES", "PARTS", "Block", "File", "Repeat", "named", "parser"]
