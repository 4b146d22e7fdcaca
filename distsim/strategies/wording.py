"""Pydantic's errors in the words of a scenario file, for fields that a strategy validates itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from distsim.names import listing, near
from distsim.strategies.fields import shown


def sentence(error: Mapping[str, Any], model: type[BaseModel], name: str) -> str:
    """What one error of `ValidationError.errors()` says about a field of ``model``, which the file calls ``name``."""
    loc, kind = error["loc"], error["type"]
    if kind == "missing":
        return f"{name} needs `{loc[-1]}`"
    if kind == "extra_forbidden" and len(loc) == 1:
        return (
            f"unknown key {loc[0]} in {name}; expected {listing(model.model_fields, 16)}{near(str(loc[0]), model.model_fields)}"
        )
    if kind == "literal_error":
        return choice(error["ctx"]["expected"], error.get("input"))
    return str(error["msg"]).removeprefix("Value error, ")


def choice(expected: str, found: Any) -> str:
    """Of a value that is none of some words; ``expected`` is `'none', 'selective' or 'full'`, as pydantic has it."""
    words = [word.strip("'") for word in expected.replace(" or ", ", ").split(", ")]
    return f"expected {expected.replace(chr(39), '')}, found {shown(found)}{near(str(found), words)}"
