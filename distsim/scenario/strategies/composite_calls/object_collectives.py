"""Object collectives: Python objects as bytes, their lengths first.

Source: torch 2.13, `torch/distributed/distributed_c10d.py` (broadcast_object_list,
all_gather_object, gather_object, scatter_object_list). An object is pickled to bytes (uint8);
lengths are int64. Where lengths differ, all send as many bytes as the longest.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar

from pydantic import Field, PlainValidator, ValidationInfo, WithJsonSchema

from distsim.scenario.strategies.base import (
    EntryWriter,
    Expansion,
    ExpansionContext,
    Refusal,
    Strategy,
)
from distsim.scenario.strategies.field_quantities import size_bytes
from distsim.scenario.strategies.field_types import AxesOrGroup, NonNegativeInt, parse_by_rank


def _parse_object_sizes(value: object, info: ValidationInfo) -> tuple[int, ...]:
    """Bytes of each object; a lone size is one object."""
    if isinstance(value, list | tuple) and not value:
        raise ValueError("expected at least one object, found an empty list")
    return tuple(
        size_bytes(item, info) for item in (value if isinstance(value, list | tuple) else [value])
    )


def _parse_size_by_rank(value: object, info: ValidationInfo) -> dict[int | str, int]:
    if isinstance(value, Mapping) and not value:
        raise ValueError("expected at least one rank or `else` in a per-rank mapping, found none")
    return parse_by_rank(value, lambda item: size_bytes(item, info))


_SIZE_SCHEMA = {"x-def": "size"}
_SIZES_SCHEMA = {"anyOf": [_SIZE_SCHEMA, {"type": "array", "minItems": 1, "items": _SIZE_SCHEMA}]}
_SIZE_BY_RANK_SCHEMA = {
    "type": "object",
    "minProperties": 1,
    "propertyNames": {"pattern": "^([0-9]+|else)$"},
    "additionalProperties": _SIZE_SCHEMA,
}
ObjectSizes = Annotated[
    tuple[int, ...], PlainValidator(_parse_object_sizes), WithJsonSchema(_SIZES_SCHEMA)
]
SizeByRank = Annotated[
    dict[int | str, int],
    PlainValidator(_parse_size_by_rank),
    WithJsonSchema({"anyOf": [_SIZE_SCHEMA, _SIZE_BY_RANK_SCHEMA]}),
]


class _ObjectCollective(Strategy):
    """The common part of the four strategies: a group, and tensors of bytes."""

    group: AxesOrGroup | None = Field(
        default=None,
        description="Ranks that take part [default: all ranks].",
        examples=["dp"],
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        return context.refuse_groups(group=self.group)

    def writer(self, context: ExpansionContext) -> EntryWriter:
        return EntryWriter(context.unused_prefix(self.name), "uint8", self.group)


class _RootedObjectList(_ObjectCollective):
    """A list of objects that one rank has."""

    first_field: ClassVar[str | None] = "objects"

    objects: ObjectSizes = Field(
        description="Pickled size of each object on the source rank.", examples=[["1 KiB", "64 B"]]
    )
    src: NonNegativeInt | None = Field(
        default=None, description="Source rank (global).", examples=[0]
    )
    group_src: NonNegativeInt | None = Field(
        default=None, description="Source rank within the group.", examples=[0]
    )

    @property
    def root(self) -> dict[str, int | None]:
        return _root_fields("src", self.src, self.group_src)


def _root_fields(word: str, rank: int | None, group_rank: int | None) -> dict[str, int | None]:
    """The fields that name the root; group rank 0 by default."""
    if rank is None and group_rank is None:
        group_rank = 0
    return {word: rank, f"group_{word}": group_rank}


class BroadcastObjectList(_RootedObjectList):
    name: ClassVar[str] = "broadcast_object_list"
    about: ClassVar[str] = (
        "torch.distributed.broadcast_object_list: send a list of Python objects from one "
        "rank to all. It broadcasts their lengths, then their bytes in one message."
    )

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = self.writer(context)
        lengths = writer.tensor("lengths", len(self.objects), "int64", list(self.objects))
        data = writer.tensor("bytes", sum(self.objects))
        steps = [
            writer.call("broadcast", tensor=lengths, **self.root),
            writer.call("broadcast", tensor=data, **self.root),
        ]
        return Expansion(steps, writer.tensors)


class AllGatherObject(_ObjectCollective):
    name: ClassVar[str] = "all_gather_object"
    about: ClassVar[str] = (
        "torch.distributed.all_gather_object: send a Python object of every rank to all. "
        "It gathers the lengths, then the objects, padded to the longest."
    )
    first_field: ClassVar[str | None] = "object"

    object: SizeByRank = Field(
        description="Pickled size of the object; by rank if it differs.",
        examples=[{0: "4 KiB", "else": "64 B"}],
    )

    def expand(self, context: ExpansionContext) -> Expansion:
        return self.gather_objects(context, "all_gather", {})

    def gather_objects(
        self, context: ExpansionContext, operation: str, root: Mapping[str, int | None]
    ) -> Expansion:
        """Gather the lengths on all ranks, then the objects with ``operation``.

        All ranks need the longest length, because every object is padded to it.
        """
        writer = self.writer(context)
        n = context.size_of(self.group)
        has_one_size = list(self.object) == ["else"]
        own_length = self.object["else"] if has_one_size else self.object
        length = writer.tensor("length", 1, "int64", own_length)
        lengths = writer.tensor("lengths", [n, 1], "int64")
        longest = max(self.object.values())
        own_object = writer.tensor("mine", longest)
        all_objects = writer.tensor("all", [n, longest])
        steps = [
            writer.call("all_gather", input=length, output=lengths),
            writer.call(operation, input=own_object, output=all_objects, **root),
        ]
        return Expansion(steps, writer.tensors)


class GatherObject(AllGatherObject):
    name: ClassVar[str] = "gather_object"
    about: ClassVar[str] = (
        "torch.distributed.gather_object: send a Python object of every rank to one. All "
        "ranks gather the lengths; one rank gathers the objects, padded to the longest."
    )

    dst: NonNegativeInt | None = Field(
        default=None, description="Destination rank (global).", examples=[0]
    )
    group_dst: NonNegativeInt | None = Field(
        default=None, description="Destination rank within the group.", examples=[0]
    )

    def expand(self, context: ExpansionContext) -> Expansion:
        root = _root_fields("dst", self.dst, self.group_dst)
        return self.gather_objects(context, "gather", root)


class ScatterObjectList(_RootedObjectList):
    name: ClassVar[str] = "scatter_object_list"
    about: ClassVar[str] = (
        "torch.distributed.scatter_object_list: send one Python object of a list to each "
        "rank. It broadcasts the longest length, then scatters the padded objects and the "
        "lengths."
    )

    def refuse(self, context: ExpansionContext) -> list[Refusal]:
        refusals = super().refuse(context)
        if refusals:
            return refusals
        n = context.size_of(self.group)
        if len(self.objects) == n:
            return []
        text = (
            f"expected an object for each of the {n} ranks of the group, found {len(self.objects)}"
        )
        return [(("objects",), text)]

    def expand(self, context: ExpansionContext) -> Expansion:
        writer = self.writer(context)
        n = context.size_of(self.group)
        longest = max(self.objects)
        longest_length = writer.tensor("longest", 1, "int64", longest)
        all_objects = writer.tensor("list", [n, longest])
        own_object = writer.tensor("mine", longest)
        all_lengths = writer.tensor(
            "lengths", [n, 1], "int64", [[length] for length in self.objects]
        )
        own_length = writer.tensor("length", 1, "int64")
        steps = [
            writer.call("broadcast", tensor=longest_length, **self.root),
            writer.call("scatter", input=all_objects, output=own_object, **self.root),
            writer.call("scatter", input=all_lengths, output=own_length, **self.root),
        ]
        return Expansion(steps, writer.tensors)
