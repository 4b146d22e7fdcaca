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
        found = "an empty list" if value == [] else value_text(value)
        raise ValueError(f"expected a list of ranks such as [0, 1], found {found}")
    ranks = tuple(integer_at_least(0, "a rank")(rank, info) for rank in value)
    duplicate = next((rank for k, rank in enumerate(ranks) if rank in ranks[:k]), None)
    if duplicate is not None:
        raise ValueError(f"rank {duplicate} occurs twice")
    return ranks


_RANK_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 0}, {"x-def": "formula"}]}
RANK_LIST_SCHEMA = {"type": "array", "minItems": 1, "items": _RANK_SCHEMA}
#: Global ranks without duplicates, whose order matters.
RankList = Annotated[
    tuple[int, ...], PlainValidator(_parse_rank_list), WithJsonSchema(RANK_LIST_SCHEMA)
]


def refuse_ranks_outside_world(
    context: ExpansionContext, field: str, ranks: Iterable[int]
) -> list[Refusal]:
    """A refusal for the first rank of a field that is outside the world."""
    n = context.world_size
    outside = next((rank for rank in ranks if rank >= n), None)
    return [] if outside is None else [((field,), f"rank {outside} is outside the world of {n}")]


def refuse_overlapping_ranks(
    first: tuple[str, Sequence[int]], second: tuple[str, Sequence[int]]
) -> list[Refusal]:
    """A refusal if a rank is in two fields, each given as (name, ranks)."""
    first_field, first_ranks = first
    second_field, second_ranks = second
    both = sorted({*first_ranks} & {*second_ranks})
    if not both:
        return []
    text = f"rank {both[0]} is also in {first_field}: each rank can be in only one of both"
    return [((second_field,), text)]


def group_declaration(ranks: Sequence[int]) -> Entry:
    """The declaration of a group of some ranks; torch sorts their order."""
    return {"ranks": sorted(ranks)}
