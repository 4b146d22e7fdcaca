"""Times entries that all ranks execute in the same way, on a single rank.

No rank ever waits for another one, so the clock of one rank is that of all. The rules are those of
`distsim.semantics.form.device_compiler`: a host that runs ahead, a stream, and a communicator for
each group; a test compares this clock with whole simulations. The costs are those of the cost model
for the real groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from distsim.common import units
from distsim.common.errors import InternalError
from distsim.common.expressions import Expression, parse_expression
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.link_loads import CostedOperation
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.operations.registry import OPERATIONS
from distsim.scenario.strategies.base import Entry, GroupRef

#: Categories of a device's time; exposed communication has the name of its group instead.
MATRIX_PRODUCTS, MEMORY, LAUNCH = "products", "memory", "launch"


class EntryCost(NamedTuple):
    """The cost of a compute or a collective. ``kind``: the category of its time."""

    kind: str
    ns: int


class EntryCosts:
    """Costs of entries on one mesh. ``mesh``: the axes, the outermost first.

    ``factors``: on the costs of compute and of communication, to estimate ranges.
    """

    def __init__(
        self, cost: CostModel, mesh: Mapping[str, int], factors: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        self.cost, self.mesh, self.factors = cost, mesh, factors
        self._members: dict[GroupRef | None, tuple[int, ...]] = {}

    def inside(self, axes: Iterable[str | None]) -> tuple[object, ...]:
        """The sizes and strides of these axes, which determine the costs of groups along them."""
        found, stride = [], 1
        for axis in reversed(tuple(self.mesh)):
            if axis in axes:
                found.append((axis, self.mesh[axis], stride))
            stride *= self.mesh[axis]
        return tuple(found)

    def members(self, group: GroupRef | None) -> tuple[int, ...]:
        """The group of rank 0 along an axis or several axes; None: the world."""
        if group not in self._members:
            axes = self._axes(group)
            members, stride = [0], 1
            for axis in reversed(tuple(self.mesh)):
                size = self.mesh[axis]
                if axis in axes:
                    members = [rank + k * stride for k in range(size) for rank in members]
                stride *= size
            self._members[group] = tuple(sorted(members))
        return self._members[group]

    def _axes(self, group: GroupRef | None) -> tuple[str, ...]:
        if group is None:
            return tuple(self.mesh)
        return (group,) if isinstance(group, str) else tuple(group)

    def compute(self, fields: Mapping[str, Any]) -> EntryCost:
        """The cost of a compute that states a time, flops or bytes."""
        if "time" in fields:
            return EntryCost(LAUNCH, units.parse_duration_ns(fields["time"]))
        kernels = fields.get("kernels", 1)
        if "flops" in fields:
            flops = units.parse_flops(fields["flops"])
            ns = self.cost.compute_ns(0, flops, 0.0, fields["dtype"], kernels)
            return EntryCost(MATRIX_PRODUCTS, round(self.factors[0] * ns))
        nbytes = float(units.parse_size_bytes(fields["bytes"]))
        ns = self.cost.compute_ns(0, 0.0, nbytes, kernels=kernels)
        return EntryCost(MEMORY, round(self.factors[0] * ns))

    def collective(self, op: str, fields: Mapping[str, object]) -> EntryCost:
        """The cost of a collective. ``kind``: an axis, several joined by `+`, or `world`."""
        group = _entry_group(fields.get("group"))
        kind = "world" if group is None else "+".join(self._axes(group))
        return EntryCost(kind, self.collective_ns(op, fields, self.members(group)))

    def collective_ns(self, op: str, fields: Mapping[str, Any], ranks: tuple[int, ...]) -> int:
        """The time of a collective among these ranks."""
        larger_side = "output" if op.startswith("all_gather") else "input"
        tensor = fields.get("tensor") or fields[larger_side]
        nbytes = tensor["shape"][0] * DTYPE_BYTES[tensor["dtype"]]
        operation = cast("type[CostedOperation]", OPERATIONS[op])
        return round(self.factors[1] * self.cost.collective_ns(operation, ranks, nbytes))

    def message(self, src: int, dst: int, nbytes: int) -> int:
        """The time of a message between two ranks."""
        return round(self.factors[1] * self.cost.p2p_ns(src, dst, nbytes))


def _entry_group(value: object) -> GroupRef | None:
    return tuple(value) if isinstance(value, list | tuple) else cast("str | None", value)


class RankTimer:
    """The clocks of a rank in ns: of the host, the current stream, and each communicator.

    ``spent``: the current stream's time by category. ``handles``: (category, end) of asynchronous
    collectives. ``with_host=False`` ignores the host's work.
    """

    def __init__(self, entry_costs: EntryCosts, with_host: bool = True) -> None:
        self.entry_costs = entry_costs
        self.with_host = with_host
        self.host = self.current = 0
        self.communicators: dict[str, int] = {}
        self.handles: dict[str, tuple[str, int]] = {}
        self.spent: Counter[str] = Counter()
        self._costs: dict[int, EntryCost] = {}  # by the id of the entry
        # The ids stay valid only as long as the entries exist.
        self._costed_entries: list[Entry] = []

    def run(self, entries: Iterable[Entry], names: Mapping[str, int] | None = None) -> RankTimer:
        """Run entries after those that have run already; returns itself."""
        for entry in entries:
            self.entry(entry, names or {})
        return self

    def entry(self, entry: Entry, names: Mapping[str, int]) -> None:
        if "ranks" in entry and not _parsed_expression(str(entry["ranks"])).evaluate(dict(names)):
            return
        if "steps" in entry:
            self.run(cast("list[Entry]", entry["steps"]), names)
            return
        op = next(key for key in entry if key != "ranks")
        fields = cast("Any", entry[op])
        if op == "repeat":
            self.repeat(fields, names)
        elif op == "wait":
            self.wait(_handle_name(fields, names))
        elif op == "compute":
            self.compute(entry, fields)
        else:
            self.collective(op, entry, fields, names)

    def repeat(self, fields: Mapping[str, Any], names: Mapping[str, int]) -> None:
        index = fields.get("index")
        for k in range(fields["times"]):
            self.run(fields["steps"], {**names, index: k} if index else names)

    def _cost(self, entry: Entry, op: str, fields: Mapping[str, object]) -> EntryCost:
        cost = self._costs.get(id(entry))
        if cost is None:
            if op == "compute":
                cost = self.entry_costs.compute(fields)
            else:
                cost = self.entry_costs.collective(op, fields)
            self._costs[id(entry)] = cost
            self._costed_entries.append(entry)
        return cost

    def compute(self, entry: Entry, fields: Mapping[str, object]) -> None:
        cost = self._cost(entry, "compute", fields)
        if fields.get("on") == "host":
            self.host += cost.ns if self.with_host else 0
            return
        self._wait_for_launch()
        # Not `_advance`: a kernel of 0 ns must still have its category.
        self.spent[cost.kind] += cost.ns
        self.current += cost.ns

    def _wait_for_launch(self) -> None:
        """A kernel cannot start before the host has launched it."""
        self._advance(LAUNCH, self.host)

    def collective(
        self, op: str, entry: Entry, fields: Mapping[str, Any], names: Mapping[str, int]
    ) -> None:
        cost = self._cost(entry, op, fields)
        handle = fields.get("as")
        if handle is None:
            self._run_collective(cost)
        else:
            self._start_collective(_handle_name(handle, names), cost)

    def _run_collective(self, cost: EntryCost) -> None:
        """A blocking collective occupies the current stream and its communicator."""
        self._wait_for_launch()
        self._advance(cost.kind, self.communicators.get(cost.kind, 0))
        self._advance(cost.kind, self.current + cost.ns)
        self.communicators[cost.kind] = self.current

    def _start_collective(self, handle: str, cost: EntryCost) -> None:
        """An asynchronous collective starts when its input and its communicator are ready."""
        start_ns = max(self.host, self.current, self.communicators.get(cost.kind, 0))
        self.communicators[cost.kind] = start_ns + cost.ns
        self.handles[handle] = (cost.kind, start_ns + cost.ns)

    def wait(self, handle: str) -> None:
        if handle == "all":
            for kind, end in self.handles.values():
                self._advance(kind, end)
        elif handle in self.handles:
            self._advance(*self.handles[handle])
        else:
            raise InternalError(f"nothing is under way by the name {handle}")

    def _advance(self, kind: str, end_ns: int) -> None:
        """The current stream waits until ``end_ns``; the time belongs to a category."""
        if end_ns > self.current:
            self.spent[kind] += end_ns - self.current
            self.current = end_ns


def _handle_name(handle: str, names: Mapping[str, int]) -> str:
    """A handle whose index expression is evaluated."""
    name, _, index = handle.partition("@")
    if not index:
        return name
    return f"{name}@{int(_parsed_expression(index).evaluate(dict(names)))}"


def _parsed_expression(text: str) -> Expression:
    return parse_expression(text)


__all__ = ["LAUNCH", "MEMORY", "MATRIX_PRODUCTS", "RankTimer", "EntryCost", "EntryCosts"]
