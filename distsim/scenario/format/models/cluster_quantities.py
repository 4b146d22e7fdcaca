"""Quantities by expression in a cluster: `bandwidth: lanes * 25 GB/s`, worked out where the cluster
is read.

An inline cluster knows what is the same on every rank (vars, axis sizes, `world_size`); a file of
its own knows numbers alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, get_args, get_origin

from pydantic import BaseModel, BeforeValidator

from distsim.common import units
from distsim.common.field_parsing import FieldError
from distsim.common.quantities import EXAMPLE_BY_KIND, read_quantity
from distsim.hardware.cluster import Cluster


class QuantityCodec(NamedTuple):
    """What a field measures, in the words of messages, and how such a value is read and written."""

    kind: str
    parse: Callable[[object], int | float]
    text: Callable[[Any], str]


QUANTITY_CODECS = (
    QuantityCodec("a duration", units.parse_duration_ns, lambda ns: units.duration_text(round(ns))),
    QuantityCodec("a size", units.parse_size_bytes, lambda n: units.size_text(round(n))),
    QuantityCodec("a bandwidth", units.parse_bandwidth, units.bandwidth_text),
    QuantityCodec(
        "a rate of floating-point operations", units.parse_flop_rate, units.flop_rate_text
    ),
)
KeyPath = tuple[str | int, ...]


def quantity_codec_of(metadata: Any) -> QuantityCodec | None:
    """What a field measures, by its validators; None for what is no quantity."""
    parsers = [m.func for m in metadata if isinstance(m, BeforeValidator)]
    return next((row for row in QUANTITY_CODECS if row.parse in parsers), None)


def evaluate_cluster_quantities(
    data: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[FieldError]]:
    """A cluster's mapping with every quantity by expression as a plain one, and what is wrong with
    expressions.

    ``known``: ``names`` that expressions may use, and ``kinds`` of the quantities among them. Where
    one is wrong, an example stands in its place, so that the cluster's own reader can look at the
    rest.
    """
    reader = _ClusterQuantityReader(known or {})
    return reader.mapping(Cluster, data, ()), reader.errors


class _ClusterQuantityReader:
    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known
        self.errors: list[FieldError] = []

    def mapping(
        self, model: type[BaseModel], data: Mapping[str, Any], way: KeyPath
    ) -> dict[str, Any]:
        fields = {info.alias or key: info for key, info in model.model_fields.items()}
        return {
            key: self.value(fields[key].annotation, fields[key].metadata, item, (*way, key))
            if key in fields
            else item
            for key, item in data.items()
        }

    def value(self, annotation: Any, metadata: Any, value: Any, way: KeyPath) -> Any:
        """A field's value, by its validators and its annotation."""
        row = quantity_codec_of(metadata)
        if row is not None:
            return self.quantity(row, value, way) if isinstance(value, str) else value
        if (
            isinstance(value, Mapping)
            and isinstance(annotation, type)
            and issubclass(annotation, BaseModel)
        ):
            return self.mapping(annotation, value, way)
        inner, arguments = get_origin(annotation), get_args(annotation)
        if isinstance(value, Mapping) and inner is dict:
            return {
                key: self.nested(arguments[1], item, (*way, key)) for key, item in value.items()
            }
        if isinstance(value, list | tuple) and inner is tuple:
            return [self.nested(arguments[0], item, (*way, k)) for k, item in enumerate(value)]
        return self.nested(arguments[0], value, way) if type(None) in arguments else value

    def nested(self, annotation: Any, value: Any, way: KeyPath) -> Any:
        return self.value(
            getattr(annotation, "__origin__", annotation),
            getattr(annotation, "__metadata__", ()),
            value,
            way,
        )

    def quantity(self, row: QuantityCodec, value: str, way: KeyPath) -> str:
        """The text as it stands where it is a quantity, or meant as one; else what its expression
        comes to.
        """
        try:
            row.parse(value)
        except ValueError as plain:
            try:
                return row.text(
                    read_quantity(
                        value, row.kind, self.known.get("names", {}), self.known.get("kinds", {})
                    )
                )
            except ValueError as error:
                if str(error) != str(plain):
                    self.errors.append(FieldError(str(error), way, getattr(error, "offset", None)))
                    return EXAMPLE_BY_KIND[row.kind]
        return value


__all__ = ["quantity_codec_of", "evaluate_cluster_quantities"]
