"""The work of a compute step as a file states it: a list of kernels, each with FLOP and bytes.

The cost of a kernel is the larger of two times, for its FLOP and for its bytes. So a sum over
kernels that are limited by different things cannot be replaced by one pair of totals, and a
recorded program keeps such kernels apart. Lowering turns each entry into a `KernelWork`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from distsim.common.expressions import Expression
from distsim.common.field_parsing import (
    FieldErrorCollector,
    FieldParser,
    FieldSchema,
    ParsedFieldType,
    PerRank,
    expected_error,
    list_of,
)
from distsim.common.message_text import did_you_mean, name_list
from distsim.common.records import dataclass
from distsim.common.units import flops_text, size_text
from distsim.operations.core.field_schemas import per_rank_schema, quantity_schema
from distsim.operations.core.field_types import (
    parse_byte_count,
    parse_dtype,
    parse_flop_count,
    unit_serializer,
)

#: More kernels in one entry are considered a mistake.
_MAX_KERNELS = 10**9


@dataclass(frozen=True, slots=True)
class KernelWorkEntry:
    """One entry of ``work``: the FLOP and bytes of some kernels together, and their number."""

    flops: float | Expression | PerRank[float | Expression] = 0.0
    nbytes: int | Expression | PerRank[int | Expression] = 0
    kernels: int = 1
    dtype: str = "float32"


def _parse_entry(value: object) -> KernelWorkEntry:
    """One entry of the list. Raises ValueError."""
    if isinstance(value, KernelWorkEntry):
        return value
    if not isinstance(value, Mapping):
        raise expected_error("a mapping {flops, bytes, kernels, dtype}", value)
    for key in value:
        if key not in _PARSERS:
            suggestion = did_you_mean(str(key), _PARSERS)
            raise ValueError(f"unknown key {key}; known keys: {name_list(_PARSERS)}{suggestion}")
    if "flops" not in value and "bytes" not in value:
        raise ValueError("expected `flops`, `bytes` or both, found neither")
    gather = FieldErrorCollector()
    fields: dict[str, Any] = {}
    for key, given in value.items():
        name = "nbytes" if key == "bytes" else key
        fields[name] = gather.take(key, _PARSERS[key], given)
    gather.done()
    return KernelWorkEntry(**fields)


def _parse_kernels(value: object) -> int:
    if type(value) is not int or not 1 <= value <= _MAX_KERNELS:
        raise expected_error(f"a number of kernels from 1 to {_MAX_KERNELS}", value)
    return value


_PARSERS: dict[str, FieldParser[Any]] = {
    "flops": parse_flop_count,
    "bytes": parse_byte_count,
    "kernels": _parse_kernels,
    "dtype": parse_dtype,
}


def _write_entries(entries: tuple[KernelWorkEntry, ...]) -> list[dict[str, object]]:
    """The list as a file has it; defaults are omitted."""
    return [_write_entry(entry) for entry in entries]


def _write_entry(entry: KernelWorkEntry) -> dict[str, object]:
    written: dict[str, object] = {}
    if entry.flops != 0:
        written["flops"] = unit_serializer(flops_text)(entry.flops)
    if entry.nbytes != 0 or not written:
        written["bytes"] = unit_serializer(size_text)(entry.nbytes)
    if entry.kernels != 1:
        written["kernels"] = entry.kernels
    if entry.dtype != "float32":
        written["dtype"] = entry.dtype
    return written


_SCHEMA: FieldSchema = {
    "type": "array",
    "items": {
        "type": "object",
        "additionalProperties": False,
        "anyOf": [{"required": ["flops"]}, {"required": ["bytes"]}],
        "properties": {
            "flops": per_rank_schema(quantity_schema("floating-point operations", bare=True)),
            "bytes": per_rank_schema(quantity_schema("a size", bare=True)),
            "kernels": {"type": "integer", "minimum": 1, "maximum": _MAX_KERNELS},
            "dtype": {"x-def": "dtype"},
        },
    },
}
#: A tuple of `KernelWorkEntry`.
WorkField = Annotated[
    tuple[KernelWorkEntry, ...],
    ParsedFieldType(list_of(_parse_entry), _SCHEMA, _write_entries),
]


__all__ = ["KernelWorkEntry", "WorkField"]
