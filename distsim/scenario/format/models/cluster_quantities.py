"""Quantities by expression in a cluster, such as `bandwidth: lanes * 25 GB/s`, evaluated.

The expressions of an inline cluster may use names with one value for all ranks (vars, axis sizes,
`world_size`); those of a separate file only numbers. The cluster's own reader then finds plain
quantities.
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
    """What a field measures, as messages word it, and how such a value is read and written."""

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
    """What a field measures, by its validators; None if it is no quantity."""
    parsers = [m.func for m in metadata if isinstance(m, BeforeValidator)]
    return next((row for row in QUANTITY_CODECS if row.parse in parsers), None)


def evaluate_cluster_quantities(
    data: Mapping[str, Any], known: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], list[FieldError]]:
    """A cluster's mapping with every expression evaluated, and the errors of expressions.

    ``known``: ``names`` that expressions may use, and ``kinds`` of the quantities among them. A
    wrong expression is replaced by an example, so that the cluster's own reader can check the rest.
    """
    reader = _ClusterQuantityReader(known or {})
    return reader.mapping(Cluster, data, ()), reader.errors


class _ClusterQuantityReader:
    def __init__(self, known: Mapping[str, Any]) -> None:
        self.known = known
        self.errors: list[FieldError] = []

    def mapping(
        self, model: type[BaseModel], data: Mapping[str, Any], path: KeyPath
    ) -> dict[str, Any]:
        fields = {info.alias or key: info for key, info in model.model_fields.items()}
        found = dict(data)
        for key, item in data.items():
            if key in fields:
                info = fields[key]
                found[key] = self.value(info.annotation, info.metadata, item, (*path, key))
        return found

    def value(self, annotation: Any, metadata: Any, value: Any, path: KeyPath) -> Any:
        """A field's value, by its validators and its annotation."""
        codec = quantity_codec_of(metadata)
        if codec is not None:
            return self.quantity(codec, value, path) if isinstance(value, str) else value
        is_model = isinstance(annotation, type) and issubclass(annotation, BaseModel)
        if is_model and isinstance(value, Mapping):
            return self.mapping(annotation, value, path)
        inner, arguments = get_origin(annotation), get_args(annotation)
        if isinstance(value, Mapping) and inner is dict:
            return {
                key: self.nested(arguments[1], item, (*path, key)) for key, item in value.items()
            }
        if isinstance(value, list | tuple) and inner is tuple:
            return [self.nested(arguments[0], item, (*path, k)) for k, item in enumerate(value)]
        return self.nested(arguments[0], value, path) if type(None) in arguments else value

    def nested(self, annotation: Any, value: Any, path: KeyPath) -> Any:
        return self.value(
            getattr(annotation, "__origin__", annotation),
            getattr(annotation, "__metadata__", ()),
            value,
            path,
        )

    def quantity(self, codec: QuantityCodec, value: str, path: KeyPath) -> str:
        """The text of a plain quantity unchanged; otherwise the value of its expression as a text.

        A text that fails in the same path both times is returned too: the cluster's own reader
        reports it.
        """
        names, kinds = self.known.get("names", {}), self.known.get("kinds", {})
        try:
            codec.parse(value)
        except ValueError as plain_error:
            try:
                return codec.text(read_quantity(value, codec.kind, names, kinds))
            except ValueError as error:
                if str(error) != str(plain_error):
                    offset = getattr(error, "offset", None)
                    self.errors.append(FieldError(str(error), path, offset))
                    return EXAMPLE_BY_KIND[codec.kind]
        return value


__all__ = ["quantity_codec_of", "evaluate_cluster_quantities"]
