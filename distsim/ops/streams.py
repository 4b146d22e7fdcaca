"""Names of CUDA streams as fields of a step."""

from __future__ import annotations

from typing import Annotated

from distsim.fields import Parsed


def _stream(value: object) -> str:
    if isinstance(value, str) and value != "host" and value.isidentifier():
        return "" if value == "current" else value
    raise ValueError(f"expected a stream's name (`current`: the default one), found {value!r}")


#: A stream's name; "" is the default stream, which a file may also call `current`.
StreamField = Annotated[str, Parsed(_stream, {"type": "string"}, lambda name: name or "current")]
