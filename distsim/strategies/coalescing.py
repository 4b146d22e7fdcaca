"""`with dist._coalescing_manager():`, several collectives of one kind as one launch.

Source: torch 2.13, `torch/distributed/distributed_c10d.py` (_coalescing_manager): all_reduce, all_gather_single and reduce_scatter_single
are collected and handed over together. The table of operations has no launch that holds several collectives, so that they are issued
one after the other without a wait between them, and waited for at the end: the order, the bytes and who waits for whom are the same;
the time is that of as many launches instead of one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import field_validator

from distsim.names import listing, near
from distsim.strategies.base import Context, Entry, Expansion, Refusal, Strategy
from distsim.strategies.fields import shown

#: What has a coalesced form in c10d, with the names that 2.13 gives them.
_KINDS = {
    "all_reduce": "all_reduce", "all_gather_into_tensor": "all_gather", "all_gather_single": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter", "reduce_scatter_single": "reduce_scatter",
}  # fmt: skip


class CoalescingManager(Strategy):
    name: ClassVar[str] = "coalescing_manager"
    about: ClassVar[str] = "Collectives of one kind on one group, issued together and waited for together."
    first_field: ClassVar[str | None] = "ops"

    ops: tuple[dict[str, Any], ...]

    @field_validator("ops", mode="before")
    @classmethod
    def _entries(cls, value: Any) -> Any:
        if not isinstance(value, list | tuple) or not value:
            raise ValueError(f"expected a list of collectives, each after a dash, found {shown(value)}")
        for item in value:
            names = [key for key in item if key != "ranks"] if isinstance(item, Mapping) else []
            if len(names) != 1 or names[0] not in _KINDS or not isinstance(item[names[0]], Mapping):
                found = names[0] if len(names) == 1 else shown(item)
                raise ValueError(f"a coalesced launch holds {listing(_KINDS)}, found {found}{near(found, _KINDS)}")
        return [dict(item) for item in value]

    def refuse(self, context: Context) -> list[Refusal]:
        found: list[Refusal] = []
        kinds = [_KINDS[_name(item)] for item in self.ops]
        groups = [repr(item[_name(item)].get("group")) for item in self.ops]
        for k, item in enumerate(self.ops):
            if kinds[k] != kinds[0]:
                found.append(
                    (("ops", k), f"all collectives of a coalesced launch are of one kind, found {kinds[0]} and {kinds[k]}")
                )
            if groups[k] != groups[0]:
                found.append((("ops", k), "all collectives of a coalesced launch are on one group"))
            found += [
                (("ops", k, _name(item), key), f"`{key}` belongs to the launch, not to a part of it")
                for key in ("async", "as")
                if key in item[_name(item)]
            ]
        return found

    def expand(self, context: Context) -> Expansion:
        p = context.prefix(self.name)
        steps: list[Entry] = []
        for k, item in enumerate(self.ops):
            name = _name(item)
            steps.append({**item, name: {**item[name], "async": True, "as": f"{p}_done@{k}"}})
        waits = [
            {"wait": f"{p}_done@{k}"} | ({"ranks": item["ranks"]} if "ranks" in item else {}) for k, item in enumerate(self.ops)
        ]
        return Expansion([*steps, *waits])


def _name(item: Mapping[str, Any]) -> str:
    return next(key for key in item if key != "ranks")
