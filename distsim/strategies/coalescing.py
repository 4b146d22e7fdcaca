"""`with dist._coalescing_manager():`, several collectives of one kind as one launch.

Source: torch 2.13, `torch/distributed/distributed_c10d.py` (_coalescing_manager): all_reduce, all_gather_single and reduce_scatter_single
are collected, and become one call at the end of the context. Kinds may not be mixed (RuntimeError). The reduce op of the first is
taken for all. Calls on another group, and all other operations, are not collected: they are issued at once, on their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from math import prod
from typing import Any, ClassVar

from pydantic import Field, StrictBool, field_validator

from distsim.expr import ExpressionError, parse
from distsim.names import listing, near
from distsim.strategies.base import Context, Entry, Expansion, Refusal, Strategy, step
from distsim.strategies.fields import shown

#: What torch collects, by all its names: the operation that the launch is.
_LAUNCHES = {
    "all_reduce": "all_reduce_coalesced",
    "all_gather_into_tensor": "all_gather_into_tensor_coalesced", "all_gather_single": "all_gather_into_tensor_coalesced",
    "reduce_scatter_tensor": "reduce_scatter_tensor_coalesced", "reduce_scatter_single": "reduce_scatter_tensor_coalesced",
}  # fmt: skip
#: The tensors of a part.
_TENSORS = {"all_reduce_coalesced": ("tensor",), "all_gather_into_tensor_coalesced": ("input", "output"),
            "reduce_scatter_tensor_coalesced": ("input", "output")}  # fmt: skip
_OF_THE_LAUNCH = ("async", "as", "on")
#: Each further condition doubles the calls that the file expands to.
_MOST_CONDITIONS = 4
#: Up to so many ranks it is worked out which combinations of conditions no rank has.
_MOST_RANKS = 4096


class CoalescingManager(Strategy):
    name: ClassVar[str] = "coalescing_manager"
    about: ClassVar[str] = "Collectives of one kind on one group as one launch, with one request."
    first_field: ClassVar[str | None] = "ops"

    ops: tuple[dict[str, Any], ...]
    is_async: StrictBool = Field(default=False, alias="async")
    handle: str | None = Field(default=None, alias="as")
    on: str | None = None

    @field_validator("ops", mode="before")
    @classmethod
    def _entries(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"expected a list of collectives, each after a dash, found {shown(value)}")
        for item in value:
            names = [key for key in item if key != "ranks"] if isinstance(item, Mapping) else []
            if len(names) != 1 or names[0] not in _LAUNCHES or not isinstance(item[names[0]], Mapping):
                found = names[0] if len(names) == 1 else shown(item)
                raise ValueError(
                    f"a coalesced launch holds {listing(_LAUNCHES)}; torch issues any other call at once and on its own, "
                    f"found {found}{near(found, _LAUNCHES)}"
                )
        return [dict(item) for item in value]

    def refuse(self, context: Context) -> list[Refusal]:
        first = _name(self.ops[0])
        return [
            *(refusal for k, item in enumerate(self.ops) for refusal in _wrong(k, item, first, self.ops[0][first])),
            *self._too_many(),
        ]

    def _too_many(self) -> Iterator[Refusal]:
        if len(_conditions(self.ops)) > _MOST_CONDITIONS:
            yield ("ops",), f"the parts have more than {_MOST_CONDITIONS} different `ranks`; write the launches out instead"

    def expand(self, context: Context) -> Expansion:
        conditions = _conditions(self.ops)
        steps: list[Entry] = []
        for truths in product((True, False), repeat=len(conditions)):
            holds = dict(zip(conditions, truths, strict=True))
            parts = [item for item in self.ops if holds.get(_condition(item), True)]
            if parts and not _nobody(holds, context):
                ranks = " and ".join(text if true else f"not ({text})" for text, true in _bracketed(holds))
                steps.append(self._launch(parts, ranks or None))
        return Expansion(steps)

    def _launch(self, parts: list[dict[str, Any]], ranks: str | None) -> Entry:
        name = _name(parts[0])
        fields = [part[_name(part)] for part in parts]
        launch = _LAUNCHES[name]
        lists = {side: [each[side] for each in fields] for side in _TENSORS[launch]}
        given = {key: fields[0].get(key) for key in ("op", "group")}
        async_ = True if self.is_async else None
        return step(launch, ranks, **lists, **given, async_=async_, as_=self.handle, on=self.on)


def _wrong(k: int, item: Mapping[str, Any], first: str, like: Mapping[str, Any]) -> Iterator[Refusal]:
    """What torch does not coalesce, of part k."""
    name = _name(item)
    fields, launch = item[name], _LAUNCHES[name]
    if launch != _LAUNCHES[first]:
        yield ("ops", k), f"all collectives of a coalesced launch are of one kind, or torch raises; found {first} and {name}"
        return
    known = [*_TENSORS[launch], "group", *(["op"] if "reduce" in name else [])]
    for key in fields:
        if key in _OF_THE_LAUNCH:
            yield ("ops", k, name, key), f"`{key}` belongs to the launch, not to a part of it"
        elif key not in known:
            yield ("ops", k, name, key), f"unknown key `{key}`; a part has {listing(known)}{near(str(key), known)}"
    for key in _TENSORS[launch] if all(key in (*known, *_OF_THE_LAUNCH) for key in fields) else ():
        if key not in fields or isinstance(fields[key], list | tuple):
            yield ("ops", k, name), f"a part of a coalesced launch names one tensor as `{key}`"
    if fields.get("group") != like.get("group"):
        yield ("ops", k), "all collectives of a coalesced launch are on one group: torch issues one of another group on its own"
    op, taken = fields.get("op", "sum"), like.get("op", "sum")
    if op != taken:
        yield ("ops", k, name, "op"), f"torch takes the reduce op of the first part, {taken}, for all: give one, found {op}"


def _name(item: Mapping[str, Any]) -> str:
    return next(key for key in item if key != "ranks")


# --- parts that not all ranks have ---
def _condition(item: Mapping[str, Any]) -> str:
    """The selector of a part as an expression; empty: all ranks."""
    ranks = item.get("ranks")
    if ranks is None:
        return ""
    if isinstance(ranks, int) and not isinstance(ranks, bool):
        ranks = [ranks]
    return " or ".join(f"rank == {rank}" for rank in ranks) if isinstance(ranks, list | tuple) else str(ranks)


def _conditions(ops: tuple[dict[str, Any], ...]) -> list[str]:
    return [text for text in dict.fromkeys(_condition(item) for item in ops) if text]


def _bracketed(holds: Mapping[str, bool]) -> Iterator[tuple[str, bool]]:
    for text, true in holds.items():
        yield (f"({text})" if true and len(holds) > 1 else text), true


def _nobody(holds: Mapping[str, bool], context: Context) -> bool:
    """Is there surely no rank for which the conditions come out so? Those that hang on more than the rank and the mesh may be true."""
    if context.world_size > _MOST_RANKS:
        return False
    with suppress(ExpressionError):
        told = [(parse(text), true) for text, true in holds.items()]
        names = [_names(rank, context) for rank in range(context.world_size)]
        if all(expression.names <= names[0].keys() for expression, _ in told):
            return not any(all(bool(e.evaluate(env)) == true for e, true in told) for env in names)
    return False


def _names(rank: int, context: Context) -> dict[str, Any]:
    found = {"rank": rank, "world_size": context.world_size, "node": rank // context.ranks_per_node,
             "local_rank": rank % context.ranks_per_node}  # fmt: skip
    sizes = list(context.mesh.values())
    for k, (axis, size) in enumerate(context.mesh.items()):
        found |= {axis: rank // prod(sizes[k + 1 :]) % size, f"{axis}_size": size}
    return found
