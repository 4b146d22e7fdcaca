"""The strategy `coalescing_manager`: several collectives of one kind as one launch.

It is `with dist._coalescing_manager():`. If some collectives are only for some ranks, there is a
launch for each combination of their conditions.

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

#: The collectives that torch collects, by all their names, and the operation of their launch.
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
#: The largest world for which combinations of conditions without a rank are found.
_MAX_RANKS_ENUMERATED = 4096


class CoalescedCollective(NamedTuple):
    """One of the collectives; ``ranks`` is the condition of the ranks that make it (empty: all)."""

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
            f"a coalesced launch can contain {name_list(_COALESCED_OPERATIONS)}; torch "
            "issues any other call immediately and separately, found "
            f"{found}{did_you_mean(found, _COALESCED_OPERATIONS)}"
        )
    return CoalescedCollective(names[0], fields, _rank_condition(entry.get("ranks")))


def _rank_condition(ranks: object) -> str:
    """A selector as an expression; empty: all ranks."""
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        ranks = [ranks]
    if isinstance(ranks, list | tuple):
        return " or ".join(f"rank == {rank}" for rank in ranks)
    return "" if ranks is None else str(ranks)


CollectiveList = Annotated[
    tuple[CoalescedCollective, ...],
    PlainValidator(_parse_collectives),
    WithJsonSchema({"type": "array", "items": {"type": "object"}}),
]


class CoalescingManager(Strategy):
    name: ClassVar[str] = "coalescing_manager"
    about: ClassVar[str] = (
        "torch.distributed._coalescing_manager: launch several collectives of one kind on "
        "one group as a single operation with one request."
    )
    first_field: ClassVar[str | None] = "ops"

    ops: CollectiveList = Field(
        description="Collectives inside the context, which are launched together.",
        examples=[[{"all_reduce": {"tensor": "x"}}]],
    )
    is_async: StrictBool = Field(
        default=False,
        alias="async",
        description="Start the launch and continue; `as` names the request.",
        examples=[True],
    )
    handle: str | None = Field(
        default=None, alias="as", description="Name of the request.", examples=["h"]
    )
    on: str | None = Field(
        default=None, description="CUDA stream that is current at the call.", examples=["comm"]
    )

    @property
    def conditions(self) -> list[str]:
        """The different conditions of the parts."""
        return [text for text in dict.fromkeys(part.ranks for part in self.ops) if text]

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals: list[Refusal] = []
        for k, part in enumerate(self.ops):
            refusals += _refuse_collective(k, part, self.ops[0])
        if len(self.conditions) > _MAX_CONDITIONS:
            text = (
                f"the parts have more than {_MAX_CONDITIONS} different `ranks`; write the "
                "launches separately instead"
            )
            refusals.append((("ops",), text))
        return refusals

    def expand(self, context: ExpansionContext) -> Expansion:
        conditions = self.conditions
        steps: list[Entry] = []
        for truths in product((True, False), repeat=len(conditions)):
            holds = dict(zip(conditions, truths, strict=True))
            parts = [part for part in self.ops if holds.get(part.ranks, True)]
            if parts and not _selects_no_rank(holds, context):
                steps.append(self._launch(parts, _conjunction(holds) or None))
        return Expansion(steps)

    def _launch(self, parts: Sequence[CoalescedCollective], ranks: str | None) -> Entry:
        launch = parts[0].launch
        first = parts[0].fields
        tensors = {side: [part.fields[side] for part in parts] for side in _TENSOR_FIELDS[launch]}
        return step(
            launch,
            ranks,
            **tensors,
            op=first.get("op"),
            group=first.get("group"),
            async_=True if self.is_async else None,
            as_=self.handle,
            on=self.on,
        )


def _refuse_collective(
    k: int, part: CoalescedCollective, first: CoalescedCollective
) -> Iterator[Refusal]:
    """Why torch does not coalesce part ``k`` with the ``first`` one."""
    name = part.name
    fields = part.fields
    if part.launch != first.launch:
        text = (
            "all collectives of a coalesced launch must be of one kind, otherwise "
            f"torch raises; found {first.name} and {name}"
        )
        yield ("ops", k), text
        return
    yield from _refuse_part_fields(k, part)
    if fields.get("group") != first.fields.get("group"):
        text = (
            "all collectives of a coalesced launch must be on one group; torch issues "
            "one on another group separately"
        )
        yield ("ops", k), text
    op = fields.get("op", "sum")
    first_op = first.fields.get("op", "sum")
    if op != first_op:
        text = (
            f"torch uses the reduce op of the first part, {first_op}, for all parts: "
            f"use one reduce op, found {op}"
        )
        yield ("ops", k, name, "op"), text


def _refuse_part_fields(k: int, part: CoalescedCollective) -> Iterator[Refusal]:
    """Fields that a part does not have, and tensors that it lacks."""
    name = part.name
    fields = part.fields
    tensor_fields = _TENSOR_FIELDS[part.launch]
    known = [*tensor_fields, "group"]
    if "reduce" in name:
        known.append("op")
    for key in fields:
        if key in _LAUNCH_FIELDS:
            yield ("ops", k, name, key), f"`{key}` is a field of the launch, not of its parts"
        elif key not in known:
            advice = did_you_mean(str(key), known)
            text = f"unknown key `{key}`; a part has {name_list(known)}{advice}"
            yield ("ops", k, name, key), text
    if not all(key in (*known, *_LAUNCH_FIELDS) for key in fields):
        # A misspelt tensor would be reported twice.
        return
    for key in tensor_fields:
        if key not in fields or isinstance(fields[key], list | tuple):
            yield ("ops", k, name), f"a part of a coalesced launch needs one tensor as `{key}`"


# --- parts that only some ranks have ---
def _conjunction(holds: Mapping[str, bool]) -> str:
    """The condition that some conditions are true and others false."""
    terms: list[str] = []
    for text, is_true in holds.items():
        if not is_true:
            terms.append(f"not ({text})")
        elif len(holds) > 1:
            terms.append(f"({text})")
        else:
            terms.append(text)
    return " and ".join(terms)


def _selects_no_rank(holds: Mapping[str, bool], context: ExpansionContext) -> bool:
    """Whether it is certain that no rank fulfils exactly these conditions.

    Conditions that depend on more than the rank and the mesh may be true.
    """
    if context.world_size > _MAX_RANKS_ENUMERATED:
        return False
    with suppress(ExpressionError):
        conditions = [(parse_expression(text), is_true) for text, is_true in holds.items()]
        ranks = [_rank_variables(rank, context) for rank in range(context.world_size)]
        for expression, _ in conditions:
            if not expression.names <= ranks[0].keys():
                return False
        for variables in ranks:
            if all(bool(e.evaluate(variables)) == is_true for e, is_true in conditions):
                return False
        return True
    return False


def _rank_variables(rank: int, context: ExpansionContext) -> dict[str, int]:
    """The variables of an expression that depend only on the rank and the mesh."""
    variables = {
        "rank": rank,
        "world_size": context.world_size,
        "node": rank // context.ranks_per_node,
        "local_rank": rank % context.ranks_per_node,
    }
    sizes = list(context.mesh.values())
    for k, (axis, size) in enumerate(context.mesh.items()):
        stride = prod(sizes[k + 1 :])
        variables |= {axis: rank // stride % size, f"{axis}_size": size}
    return variables
