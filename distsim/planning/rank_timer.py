"""The time of entries that all ranks run alike, on one of them: nobody is ever waited for, so one
rank's clock is everybody's.

The rules are those of `distsim.semantics.form.device_compiler` (a host that runs ahead, a stream, a
communicator for each group); a test holds this clock against whole simulations. Prices are the cost
model's, of the real groups.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

from distsim.common import units
from distsim.common.errors import InternalError
from distsim.common.expressions import Expression, parse_expression
from distsim.hardware.cost import CostModel
from distsim.hardware.cost.link_loads import PricedOperation
from distsim.operations.core.resolved_call import DTYPE_BYTES
from distsim.operations.registry import OPERATIONS
from distsim.scenario.strategies.base import Entry, GroupRef

#: What an instant of the device goes into, besides a group's name for exposed communication.
MATRIX_PRODUCTS, MEMORY, LAUNCH = "products", "memory", "launch"


class PricedEntry(NamedTuple):
    """A compute or a collective: its ns, and what they go into."""

    kind: str
    ns: int


class EntryPrices:
    """Prices of entries on one mesh. ``mesh``: axes from the outermost in; ranks count row by row.

    ``factors``: what computes and what communication take more than their price, for bands.
    """

    def __init__(
        self, cost: CostModel, mesh: Mapping[str, int], factors: tuple[float, float] = (1.0, 1.0)
    ) -> None:
        self.cost, self.mesh, self.factors = cost, mesh, factors
        self._members: dict[GroupRef | None, tuple[int, ...]] = {}

    def inside(self, axes: Iterable[str | None]) -> tuple[object, ...]:
        """What decides the prices of groups along these axes: their sizes and strides."""
        found, stride = [], 1
        for axis in reversed(tuple(self.mesh)):
            if axis in axes:
                found.append((axis, self.mesh[axis], stride))
            stride *= self.mesh[axis]
        return tuple(found)

    def members(self, group: GroupRef | None) -> tuple[int, ...]:
        """The group of rank 0: along an axis, or several; None: everybody."""
        if group not in self._members:
            axes = (
                tuple(self.mesh) if group is None else (group,) if isinstance(group, str) else group
            )
            found, stride = [0], 1
            for axis in reversed(tuple(self.mesh)):
                if axis in axes:
                    found = [rank + k * stride for k in range(self.mesh[axis]) for rank in found]
                stride *= self.mesh[axis]
            self._members[group] = tuple(sorted(found))
        return self._members[group]

    def compute(self, fields: Mapping[str, Any]) -> PricedEntry:
        if "time" in fields:
            return PricedEntry(LAUNCH, units.parse_duration_ns(fields["time"]))
        kernels = fields.get("kernels", 1)
        if "flops" in fields:
            flops = units.parse_flops(fields["flops"])
            return PricedEntry(
                MATRIX_PRODUCTS,
                round(
                    self.factors[0] * self.cost.compute_ns(0, flops, 0.0, fields["dtype"], kernels)
                ),
            )
        nbytes = float(units.parse_size_bytes(fields["bytes"]))
        return PricedEntry(
            MEMORY, round(self.factors[0] * self.cost.compute_ns(0, 0.0, nbytes, kernels=kernels))
        )

    def collective(self, op: str, fields: Mapping[str, object]) -> PricedEntry:
        """``kind`` is the group: an axis, several joined by `+`, or `world`."""
        group = _entry_group(fields.get("group"))
        kind = "world" if group is None else group if isinstance(group, str) else "+".join(group)
        return PricedEntry(kind, self.met(op, fields, self.members(group)))

    def met(self, op: str, fields: Mapping[str, Any], ranks: tuple[int, ...]) -> int:
        """A collective among these ranks, in ns."""
        tensor = (
            fields.get("tensor") or fields["output" if op.startswith("all_gather") else "input"]
        )
        nbytes = tensor["shape"][0] * DTYPE_BYTES[tensor["dtype"]]
        return round(
            self.factors[1]
            * self.cost.collective_ns(cast("type[PricedOperation]", OPERATIONS[op]), ranks, nbytes)
        )

    def message(self, src: int, dst: int, nbytes: int) -> int:
        """A message between two ranks, in ns."""
        return round(self.factors[1] * self.cost.p2p_ns(src, dst, nbytes))


def _entry_group(value: object) -> GroupRef | None:
    return tuple(value) if isinstance(value, list | tuple) else cast("str | None", value)


class RankTimer:
    """A rank's clocks in ns: the host's, the current stream's, each communicator's; what the
    current stream's time went into.

    ``hosted``: False leaves the host's work out.
    """

    def __init__(self, prices: EntryPrices, hosted: bool = True) -> None:
        self.prices, self.hosted = prices, hosted
        self.host = self.current = 0
        self.comms: dict[str, int] = {}
        self.handles: dict[str, tuple[str, int]] = {}
        self.spent: Counter[str] = Counter()
        self._priced: dict[int, PricedEntry] = {}
        self._kept: list[Entry] = []

    def run(self, entries: Iterable[Entry], names: Mapping[str, int] | None = None) -> RankTimer:
        """Run entries after what has run; returns itself."""
        for entry in entries:
            self.entry(entry, names or {})
        return self

    def entry(self, entry: Entry, names: Mapping[str, int]) -> None:
        if "ranks" in entry and not _parsed_expression(str(entry["ranks"])).evaluate(dict(names)):
            return
        if "steps" in entry:
            self.run(cast("list[Entry]", entry["steps"]), names)
            return
        op, fields = next(
            (key, cast("Any", value)) for key, value in entry.items() if key != "ranks"
        )
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

    def priced(self, entry: Entry, op: str, fields: Mapping[str, object]) -> PricedEntry:
        found = self._priced.get(id(entry))
        if found is None:
            found = (
                self.prices.compute(fields)
                if op == "compute"
                else self.prices.collective(op, fields)
            )
            self._priced[id(entry)] = found
            self._kept.append(entry)
        return found

    def compute(self, entry: Entry, fields: Mapping[str, object]) -> None:
        kind, ns = self.priced(entry, "compute", fields)
        if fields.get("on") == "host":
            self.host += ns if self.hosted else 0
            return
        self.launched()
        self.spent[kind] += ns
        self.current += ns

    def launched(self) -> None:
        """The device waits for the host, where that is behind."""
        if self.host > self.current:
            self.spent[LAUNCH] += self.host - self.current
            self.current = self.host

    def collective(
        self, op: str, entry: Entry, fields: Mapping[str, Any], names: Mapping[str, int]
    ) -> None:
        kind, ns = self.priced(entry, op, fields)
        handle = fields.get("as")
        if handle is None:
            self.launched()
            self.until(kind, self.comms.get(kind, 0))
            self.until(kind, self.current + ns)
            self.comms[kind] = self.current
            return
        self.comms[kind] = max(self.host, self.current, self.comms.get(kind, 0)) + ns
        self.handles[_handle_name(handle, names)] = (kind, self.comms[kind])

    def wait(self, handle: str) -> None:
        if handle == "all":
            for kind, end in self.handles.values():
                self.until(kind, end)
        elif handle in self.handles:
            self.until(*self.handles[handle])
        else:
            raise InternalError(f"nothing is under way by the name {handle}")

    def until(self, kind: str, end: int) -> None:
        """The current stream waits for communication of a kind."""
        if end > self.current:
            self.spent[kind] += end - self.current
            self.current = end


def _handle_name(handle: str, names: Mapping[str, int]) -> str:
    """A handle with its number worked out."""
    word, _, index = handle.partition("@")
    return f"{word}@{int(_parsed_expression(index).evaluate(dict(names)))}" if index else word


def _parsed_expression(text: str) -> Expression:
    return parse_expression(text)


__all__ = ["LAUNCH", "MEMORY", "MATRIX_PRODUCTS", "RankTimer", "PricedEntry", "EntryPrices"]
