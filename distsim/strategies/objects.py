"""Object collectives: Python objects as bytes, their lengths first.

Source: torch 2.13, `torch/distributed/distributed_c10d.py` (broadcast_object_list, all_gather_object, gather_object,
scatter_object_list). An object is pickled to bytes (uint8); lengths are int64. Where lengths differ, all send as many bytes as the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import PlainValidator, ValidationInfo, WithJsonSchema

from distsim.strategies.amounts import size_bytes
from distsim.strategies.base import Context, Expansion, Refusal, Strategy, Writer
from distsim.strategies.fields import Axes, Natural, by_rank


def _sizes(value: object, info: ValidationInfo) -> tuple[int, ...]:
    """Bytes of each object; a lone size is one object."""
    if isinstance(value, list | tuple) and not value:
        raise ValueError("expected at least one object, found an empty list")
    return tuple(size_bytes(item, info) for item in (value if isinstance(value, list | tuple) else [value]))


def _size_by_rank(value: object, info: ValidationInfo) -> dict[int | str, int]:
    if isinstance(value, Mapping) and not value:
        raise ValueError("expected at least one rank or `else` in a per-rank mapping, found none")
    return by_rank(value, lambda item: size_bytes(item, info))


_SIZE = {"x-def": "size"}
_ONE = {"anyOf": [_SIZE, {"type": "array", "minItems": 1, "items": _SIZE}]}
_EACH = {"type": "object", "minProperties": 1, "propertyNames": {"pattern": "^([0-9]+|else)$"}, "additionalProperties": _SIZE}
Sizes = Annotated[tuple[int, ...], PlainValidator(_sizes), WithJsonSchema(_ONE)]
SizeByRank = Annotated[dict[int | str, int], PlainValidator(_size_by_rank), WithJsonSchema({"anyOf": [_SIZE, _EACH]})]


class _Objects(Strategy):
    """What the four have in common: a group, and tensors of bytes."""

    group: Axes | None = None

    def refuse(self, context: Context) -> list[Refusal]:
        return context.refused(group=self.group)

    def writer(self, context: Context) -> Writer:
        return Writer(context.prefix(self.name), "uint8", self.group)


class _FromOne(_Objects):
    """A list of objects that one rank has."""

    first_field: ClassVar[str | None] = "objects"

    #: Bytes of each object, pickled.
    objects: Sizes
    src: Natural | None = None
    group_src: Natural | None = None

    @property
    def root(self) -> dict[str, int | None]:
        return _root("src", self.src, self.group_src)


def _root(word: str, rank: int | None, group_rank: int | None) -> dict[str, int | None]:
    """The fields that name the root: where the file names none, group rank 0."""
    return {word: rank, f"group_{word}": 0 if rank is None and group_rank is None else group_rank}


class BroadcastObjectList(_FromOne):
    name: ClassVar[str] = "broadcast_object_list"
    about: ClassVar[str] = "A list of Python objects from one rank to all: their lengths, then their bytes in one message."

    def expand(self, context: Context) -> Expansion:
        w = self.writer(context)
        tensors = w.tensor("lengths", len(self.objects), "int64", list(self.objects)), w.tensor("bytes", sum(self.objects))
        return Expansion([w.call("broadcast", tensor=name, **self.root) for name in tensors], w.tensors)


class AllGatherObject(_Objects):
    name: ClassVar[str] = "all_gather_object"
    about: ClassVar[str] = "A Python object of every rank to all: the lengths, then all objects, each padded to the longest."
    first_field: ClassVar[str | None] = "object"

    #: Bytes of the object, pickled; by rank where they differ.
    object: SizeByRank

    def expand(self, context: Context) -> Expansion:
        return self.gathered(context, "all_gather", {})

    def gathered(self, context: Context, row: str, root: Mapping[str, int | None]) -> Expansion:
        """Every rank's length to all; then the longest is known, and the objects travel."""
        w, n, sizes = self.writer(context), context.size_of(self.group), self.object
        lengths = (
            w.tensor("length", 1, "int64", sizes["else"] if list(sizes) == ["else"] else sizes),
            w.tensor("lengths", [n, 1], "int64"),
        )
        longest = max(sizes.values())
        objects = w.tensor("mine", longest), w.tensor("all", [n, longest])
        first = w.call("all_gather", input=lengths[0], output=lengths[1])
        return Expansion([first, w.call(row, input=objects[0], output=objects[1], **root)], w.tensors)


class GatherObject(AllGatherObject):
    name: ClassVar[str] = "gather_object"
    about: ClassVar[str] = (
        "A Python object of every rank to one: the lengths to all, then the objects, each padded to the longest."
    )

    dst: Natural | None = None
    group_dst: Natural | None = None

    def expand(self, context: Context) -> Expansion:
        return self.gathered(context, "gather", _root("dst", self.dst, self.group_dst))


class ScatterObjectList(_FromOne):
    name: ClassVar[str] = "scatter_object_list"
    about: ClassVar[str] = (
        "One Python object from a list for each rank: the longest length to all, the objects padded to it, the lengths."
    )

    def refuse(self, context: Context) -> list[Refusal]:
        found = super().refuse(context)
        n = 0 if found else context.size_of(self.group)
        if found or len(self.objects) == n:
            return found
        return [(("objects",), f"expected an object for each of the {n} ranks of the group, found {len(self.objects)}")]

    def expand(self, context: Context) -> Expansion:
        w, n, longest = self.writer(context), context.size_of(self.group), max(self.objects)
        told = w.tensor("longest", 1, "int64", longest)
        objects = w.tensor("list", [n, longest]), w.tensor("mine", longest)
        lengths = w.tensor("lengths", [n, 1], "int64", [[length] for length in self.objects]), w.tensor("length", 1, "int64")
        scattered = [w.call("scatter", input=whole, output=part, **self.root) for whole, part in (objects, lengths)]
        return Expansion([w.call("broadcast", tensor=told, **self.root), *scattered], w.tensors)
