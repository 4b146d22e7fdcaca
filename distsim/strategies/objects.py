"""Object collectives: Python objects as bytes, their lengths first.

Source: torch 2.13, `torch/distributed/distributed_c10d.py` (broadcast_object_list, all_gather_object, gather_object,
scatter_object_list). An object is pickled to bytes (uint8); lengths are int64. Where lengths differ, all send as many bytes as the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import PlainValidator, WithJsonSchema

from distsim import units
from distsim.strategies.base import Context, Entry, Expansion, Refusal, Strategy, step
from distsim.strategies.fields import Axes, Natural, shown


def _sizes(value: Any) -> tuple[int, ...]:
    """Bytes of each object; a lone size is one object."""
    if isinstance(value, list | tuple) and not value:
        raise ValueError("expected at least one object, found an empty list")
    return tuple(units.parse_size_bytes(item) for item in (value if isinstance(value, list | tuple) else [value]))


def _by_rank(value: Any) -> dict[int | str, int]:
    if not isinstance(value, Mapping):
        return {"else": units.parse_size_bytes(value)}
    if not value:
        raise ValueError("expected at least one rank or `else` in a per-rank mapping, found none")
    for key in value:
        if key != "else" and (isinstance(key, bool) or not isinstance(key, int) or key < 0):
            raise ValueError(f"expected a rank or `else` as the key of a per-rank mapping, found {shown(key)}")
    return {key: units.parse_size_bytes(item) for key, item in value.items()}


_ONE = {"anyOf": [{"type": "string"}, {"type": "array"}]}
Sizes = Annotated[tuple[int, ...], PlainValidator(_sizes), WithJsonSchema(_ONE)]
SizeByRank = Annotated[
    dict[int | str, int], PlainValidator(_by_rank), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}]})
]


class _Objects(Strategy):
    """What the four have in common: a group, and tensors of lengths and of bytes."""

    group: Axes | None = None

    def refuse(self, context: Context) -> list[Refusal]:
        unknown = context.unknown_group(self.group)
        return [] if unknown is None else [(("group",), unknown)]

    def call(self, row: str, /, **fields: Any) -> Entry:
        return step(row, **fields, group=list(self.group) if isinstance(self.group, tuple) else self.group)


def _int64(shape: list[int], value: Any = None) -> dict[str, Any]:
    return {"shape": shape, "dtype": "int64"} | ({} if value is None else {"value": value})


def _uint8(shape: list[int]) -> dict[str, Any]:
    return {"shape": shape, "dtype": "uint8"}


class BroadcastObjectList(_Objects):
    name: ClassVar[str] = "broadcast_object_list"
    about: ClassVar[str] = "A list of Python objects from one rank to all: their lengths, then their bytes in one message."
    first_field: ClassVar[str | None] = "objects"

    #: Bytes of each object, pickled.
    objects: Sizes
    src: Natural | None = None
    group_src: Natural | None = None

    def expand(self, context: Context) -> Expansion:
        p = context.prefix(self.name)
        root = {"src": self.src, "group_src": 0 if self.src is None and self.group_src is None else self.group_src}
        tensors = {f"{p}_lengths": _int64([len(self.objects)], list(self.objects)), f"{p}_bytes": _uint8([sum(self.objects)])}
        return Expansion([self.call("broadcast", tensor=name, **root) for name in tensors], tensors)


class AllGatherObject(_Objects):
    name: ClassVar[str] = "all_gather_object"
    about: ClassVar[str] = "A Python object of every rank to all: the lengths, then all objects, each padded to the longest."
    first_field: ClassVar[str | None] = "object"

    #: Bytes of the object, pickled; by rank where they differ.
    object: SizeByRank

    def expand(self, context: Context) -> Expansion:
        p, n = context.prefix(self.name), context.size_of(self.group)
        tensors, first = _lengths(self, p, n)
        longest = max(self.object.values())
        tensors |= {f"{p}_mine": _uint8([longest]), f"{p}_all": _uint8([n, longest])}
        return Expansion([first, self.call("all_gather", input=f"{p}_mine", output=f"{p}_all")], tensors)


class GatherObject(AllGatherObject):
    name: ClassVar[str] = "gather_object"
    about: ClassVar[str] = (
        "A Python object of every rank to one: the lengths to all, then the objects, each padded to the longest."
    )

    dst: Natural | None = None
    group_dst: Natural | None = None

    def expand(self, context: Context) -> Expansion:
        made = super().expand(context)
        fields = dict(made.steps[1]["all_gather"])
        group = fields.pop("group", None)
        root = {"dst": self.dst, "group_dst": 0 if self.dst is None and self.group_dst is None else self.group_dst}
        return made._replace(steps=[made.steps[0], step("gather", **fields, **root, group=group)])


class ScatterObjectList(_Objects):
    name: ClassVar[str] = "scatter_object_list"
    about: ClassVar[str] = (
        "One Python object from a list for each rank: the longest length to all, the objects padded to it, the lengths."
    )
    first_field: ClassVar[str | None] = "objects"

    objects: Sizes
    src: Natural | None = None
    group_src: Natural | None = None

    def refuse(self, context: Context) -> list[Refusal]:
        found = super().refuse(context)
        n = 0 if found else context.size_of(self.group)
        if found or len(self.objects) == n:
            return found
        return [(("objects",), f"expected an object for each of the {n} ranks of the group, found {len(self.objects)}")]

    def expand(self, context: Context) -> Expansion:
        p, n, longest = context.prefix(self.name), context.size_of(self.group), max(self.objects)
        root = {"src": self.src, "group_src": 0 if self.src is None and self.group_src is None else self.group_src}
        lengths = [[length] for length in self.objects]
        tensors = {
            f"{p}_longest": _int64([1], longest), f"{p}_list": _uint8([n, longest]), f"{p}_mine": _uint8([longest]),
            f"{p}_lengths": _int64([n, 1], lengths), f"{p}_length": _int64([1]),
        }  # fmt: skip
        steps = [
            self.call("broadcast", tensor=f"{p}_longest", **root),
            self.call("scatter", input=f"{p}_list", output=f"{p}_mine", **root),
            self.call("scatter", input=f"{p}_lengths", output=f"{p}_length", **root),
        ]
        return Expansion(steps, tensors)


def _lengths(fields: AllGatherObject, p: str, n: int) -> tuple[dict[str, Any], Entry]:
    """Every rank's length to all; the longest is then known."""
    sizes = fields.object
    value: Any = sizes["else"] if list(sizes) == ["else"] else sizes
    tensors = {f"{p}_length": _int64([1], value), f"{p}_lengths": _int64([n, 1])}
    return tensors, fields.call("all_gather", input=f"{p}_length", output=f"{p}_lengths")
