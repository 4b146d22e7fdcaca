"""Ranks that a strategy names one by one: trainers, rollouts, the members of a quorum."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from distsim.common.message_text import value_text
from distsim.scenario.strategies.base import Entry, ExpansionContext, Refusal
from distsim.scenario.strategies.field_types import integer_at_least


def _parse_rank_list(value: object, info: ValidationInfo) -> tuple[int, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"expected a list of ranks, as [0, 1], found {value_text(value) if value != [] else 'an empty list'}"
        )
    found = tuple(integer_at_least(0, "a rank")(rank, info) for rank in value)
    twice = next((rank for k, rank in enumerate(found) if rank in found[:k]), None)
    if twice is not None:
        raise ValueError(f"rank {twice} is named twice")
    return found


_RANK_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"x-def": "formula"}]}
RANK_LIST_SCHEMA = {"type": "array", "minItems": 1, "items": _RANK_SCHEMA}
#: Global ranks in an order that counts, none twice.
RankList = Annotated[
    tuple[int, ...], PlainValidator(_parse_rank_list), WithJsonSchema(RANK_LIST_SCHEMA)
]


def refuse_ranks_outside_world(
    context: ExpansionContext, field: str, ranks: Iterable[int]
) -> list[Refusal]:
    """A refusal where a field names a rank that the world lacks."""
    n = context.world_size
    strange = next((rank for rank in ranks if rank >= n), None)
    return [] if strange is None else [((field,), f"rank {strange} is outside the world of {n}")]


def refuse_overlapping_ranks(
    first: tuple[str, Sequence[int]], second: tuple[str, Sequence[int]]
) -> list[Refusal]:
    """A refusal where a rank stands in two fields that are for different ranks."""
    both = sorted({*first[1]} & {*second[1]})
    return (
        [((second[0],), f"rank {both[0]} stands in {first[0]} too: each rank does one of the two")]
        if both
        else []
    )


def group_declaration(ranks: Sequence[int]) -> Entry:
    """The declaration of a group of these ranks, whose order torch sorts."""
    return {"ranks": sorted(ranks)}
