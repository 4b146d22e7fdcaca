"""`with dist._coalescing_manager():`, several collectives of one kind as one launch.

Source: torch 2.13, `torch/distributed/distributed_c10d.py` (_coalescing_manager): all_reduce,
all_gather_single and reduce_scatter_single are collected, and become one call at the end of the
context. Kinds may not be mixed (RuntimeError). The reduce op of the first is taken for all. Calls
on another group, and all other operations, are not collected: they are issued at once, on their
own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import product
from math import prod
from typing import Annotated, ClassVar, NamedTuple

from pydantic import Field, PlainValidator, StrictBool, WithJsonSchema

from distsim.common.expressions import ExpressionError, parse_expression
from distsim.common.message_text import did_you_mean, name_list, value_text
from distsim.scenario.strategies.base import (
    Entry,
    Expansion,
    ExpansionContext,
    Refusal,
    Strategy,
    step,
)

#: What torch collects, by all its names: the operation that the launch is.
_COALESCED_OPERATIONS = {
    "all_reduce": "all_reduce_coalesced",
    "all_gather_into_tensor": "all_gather_into_tensor_coalesced",
    "all_gather_single": "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single": "reduce_scatter_tensor_coalesced",
}
#: The tensors of a part.
_TENSOR_FIELDS = {
    "all_reduce_coalesced": ("tensor",),
    "all_gather_into_tensor_coalesced": ("input", "output"),
    "reduce_scatter_tensor_coalesced": ("input", "output"),
}
_LAUNCH_FIELDS = ("async", "as", "on")
#: Each further condition doubles the calls that the file expands to.
_MAX_CONDITIONS = 4
#: Up to so many ranks it is worked out which combinations of conditions no rank has.
_MAX_RANKS_ENUMERATED = 4096


class CoalescedCollective(NamedTuple):
    """One of the collectives: its name and fields, and the condition of the ranks that make it
    (empty: all do).
    """

    name: str
    fields: Mapping[str, object]
    ranks: str = ""

    @property
    def launch(self) -> str:
        return _COALESCED_OPERATIONS[self.name]


def _parse_collectives(value: object) -> tuple[CoalescedCollective, ...]:
    if not isinstance(value, list | tuple) or not value:
        raise ValueError(
            f"expected a list of collectives, each after a dash, found {value_text(value)}"
        )
    return tuple(_parse_one_collective(item) for item in value)


def _parse_one_collective(item: object) -> CoalescedCollective:
    entry = item if isinstance(item, Mapping) else {}
    names = [key for key in entry if key != "ranks"]
    fields = entry[names[0]] if len(names) == 1 else None
    if not isinstance(fields, Mapping) or names[0] not in _COALESCED_OPERATIONS:
        found = names[0] if len(names) == 1 else value_text(item)
        raise ValueError(
            f"a coalesced launch holds {name_list(_COALESCED_OPERATIONS)}; torch issues any other call at once and on its own, "
            f"found {found}{did_you_mean(found, _COALESCED_OPERATIONS)}"
        )
    return CoalescedCollective(names[0], fields, _rank_condition(entry.get("ranks")))


def _rank_condition(ranks: object) -> str:
    """A selector as an expression; empty: all ranks."""
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        ranks = [ranks]
    return (
        " or ".join(f"rank == {rank}" for rank in ranks)
        if isinstance(ranks, list | tuple)
        else str("" if ranks is None else ranks)
    )


CollectiveList = Annotated[
    tuple[CoalescedCollective, ...],
    PlainValidator(_parse_collectives),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]


class CoalescingManager(Strategy):
    name: ClassVar[str] = "coalescing_manager"
    about: ClassVar[str] = "Collectives of one kind on one group as one launch, with one request."
    first_field: ClassVar[str | None] = "ops"

    ops: CollectiveList
    is_async: StrictBool = Field(default=False, alias="async")
    handle: str | None = Field(default=None, alias="as")
    on: str | None = None

    @property
    def conditions(self) -> list[str]:
        return [text for text in dict.fromkeys(part.ranks for part in self.ops) if text]

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        found = [
            refusal
            for k, part in enumerate(self.ops)
            for refusal in _refuse_collective(k, part, self.ops[0])
        ]
        if len(self.conditions) > _MAX_CONDITIONS:
            said = f"the parts have more than {_MAX_CONDITIONS} different `ranks`; write the launches out instead"
            found.append((("ops",), said))
        return found

    def expand(self, context: ExpansionContext) -> Expansion:
        conditions = self.conditions
        steps: list[Entry] = []
        for truths in product((True, False), repeat=len(conditions)):
            holds = dict(zip(conditions, truths, strict=True))
            parts = [part for part in self.ops if holds.get(part.ranks, True)]
            if parts and not _selects_no_rank(holds, context):
                ranks = " and ".join(
                    text if true else f"not ({text})" for text, true in _parenthesized(holds)
                )
                steps.append(self._launch(parts, ranks or None))
        return Expansion(steps)

    def _launch(self, parts: Sequence[CoalescedCollective], ranks: str | None) -> Entry:
        launch, first = parts[0].launch, parts[0].fields
        lists = {side: [part.fields[side] for part in parts] for side in _TENSOR_FIELDS[launch]}
        given = {key: first.get(key) for key in ("op", "group")}
        async_ = True if self.is_async else None
        return step(launch, ranks, **lists, **given, async_=async_, as_=self.handle, on=self.on)


def _refuse_collective(
    k: int, part: CoalescedCollective, first: CoalescedCollective
) -> Iterator[Refusal]:
    """What torch does not coalesce, of part k."""
    name, fields, launch = part.name, part.fields, part.launch
    if launch != first.launch:
        yield (
            ("ops", k),
            f"all collectives of a coalesced launch are of one kind, or torch raises; found {first.name} and {name}",
        )
        return
    known = [*_TENSOR_FIELDS[launch], "group", *(["op"] if "reduce" in name else [])]
    for key in fields:
        if key in _LAUNCH_FIELDS:
            yield ("ops", k, name, key), f"`{key}` belongs to the launch, not to a part of it"
        elif key not in known:
            yield (
                ("ops", k, name, key),
                f"unknown key `{key}`; a part has {name_list(known)}{did_you_mean(str(key), known)}",
            )
    for key in (
        _TENSOR_FIELDS[launch] if all(key in (*known, *_LAUNCH_FIELDS) for key in fields) else ()
    ):
        if key not in fields or isinstance(fields[key], list | tuple):
            yield ("ops", k, name), f"a part of a coalesced launch names one tensor as `{key}`"
    if fields.get("group") != first.fields.get("group"):
        yield (
            ("ops", k),
            "all collectives of a coalesced launch are on one group: torch issues one of another group on its own",
        )
    op, taken = fields.get("op", "sum"), first.fields.get("op", "sum")
    if op != taken:
        yield (
            ("ops", k, name, "op"),
            f"torch takes the reduce op of the first part, {taken}, for all: give one, found {op}",
        )


# --- parts that not all ranks have ---
def _parenthesized(holds: Mapping[str, bool]) -> Iterator[tuple[str, bool]]:
    for text, true in holds.items():
        yield (f"({text})" if true and len(holds) > 1 else text), true


def _selects_no_rank(holds: Mapping[str, bool], context: ExpansionContext) -> bool:
    """Is there surely no rank for which the conditions come out so? Those that hang on more than
    the rank and the mesh may be true.
    """
    if context.world_size > _MAX_RANKS_ENUMERATED:
        return False
    with suppress(ExpressionError):
        told = [(parse_expression(text), true) for text, true in holds.items()]
        names = [_rank_variables(rank, context) for rank in range(context.world_size)]
        if all(expression.names <= names[0].keys() for expression, _ in told):
            return not any(all(bool(e.evaluate(env)) == true for e, true in told) for env in names)
    return False


def _rank_variables(rank: int, context: ExpansionContext) -> dict[str, int]:
    found = {
        "rank": rank,
        "world_size": context.world_size,
        "node": rank // context.ranks_per_node,
        "local_rank": rank % context.ranks_per_node,
    }
    sizes = list(context.mesh.values())
    for k, (axis, size) in enumerate(context.mesh.items()):
        found |= {axis: rank // prod(sizes[k + 1 :]) % size, f"{axis}_size": size}
    return found
