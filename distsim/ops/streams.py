"""Names of CUDA streams as fields of a step."""

from __future__ import annotations

from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema


def _stream(value: object) -> str:
    if isinstance(value, str) and value != "host" and value.isidentifier():
        return "" if value == "current" else value
    raise ValueError(f"expected a stream's name (`current`: the default one), found {value!r}")


#: A stream's name; "" is the default stream, which a file may also call `current`.
StreamField = Annotated[
    str, PlainValidator(_stream), PlainSerializer(lambda name: name or "current"), WithJsonSchema({"type": "string"})
]
