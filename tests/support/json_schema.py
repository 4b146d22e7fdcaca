"""A validator of JSON Schema 2020-12, as far as the project's schemas use it; held against
python-jsonschema when it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
#: Keywords that say something about a value but ask nothing of it.
NOTES = {
    "$schema",
    "$id",
    "$defs",
    "title",
    "description",
    "default",
    "examples",
    "errorMessage",
    "deprecationMessage",
    "doNotSuggest",
    "x-unit",
    "then",
    "else",
    "required",
}


@cache
def _pattern(text: str) -> re.Pattern[str]:
    return re.compile(text)


class Schema:
    """A schema whose references point into its own definitions."""

    def __init__(self, whole: dict[str, Any]) -> None:
        self.whole = whole

    def fits(self, value: Any) -> bool:
        return next(self.faults(value), None) is None

    def faults(self, value: Any, schema: Any = None, path: str = "$") -> Iterator[str]:
        """Every keyword that the value does not satisfy, with its place."""
        schema = self.whole if schema is None else schema
        if schema is True or schema == {}:
            return
        if schema is False:
            yield f"{path}: nothing fits"
            return
        for word, want in schema.items():
            if word in NOTES and word != "required":
                continue
            check = getattr(self, f"_{word.lstrip('$')}", None)
            assert check is not None, f"the keyword {word} is not known to this validator"
            yield from check(value, want, path, schema)

    # --- keywords ---
    def _ref(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        yield from self.faults(value, self.whole["$defs"][want.removeprefix("#/$defs/")], path)

    def _anyOf(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802 - the keyword's name
        if not any(self._is(value, one, path) for one in want):
            yield f"{path}: none of {len(want)} forms"

    def _oneOf(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        if sum(self._is(value, one, path) for one in want) != 1:
            yield f"{path}: not exactly one of {len(want)} forms"

    def _allOf(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        for one in want:
            yield from self.faults(value, one, path)

    def _not(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        if self._is(value, want, path):
            yield schema.get("errorMessage", f"{path}: what may not be")

    def _if(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        yield from self.faults(
            value, schema.get("then" if self._is(value, want, path) else "else", True), path
        )

    def _is(self, value: Any, schema: Any, path: str) -> bool:
        return next(self.faults(value, schema, path), None) is None

    def _enum(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        if not any(_same(value, one) for one in want):
            yield f"{path}: {value!r} is none of {want}"

    def _const(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        if not _same(value, want):
            yield f"{path}: {value!r} is not {want!r}"

    def _type(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        kinds = [want] if isinstance(want, str) else want
        whole = isinstance(value, float) and value.is_integer()
        fits = (isinstance(value, TYPES[k]) or (k == "integer" and whole) for k in kinds)
        if not any(fits) or (isinstance(value, bool) and "boolean" not in kinds):
            yield f"{path}: {value!r} is no {want}"

    def _pattern(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        if isinstance(value, str) and _pattern(want).search(value) is None:
            yield f"{path}: {value!r} is not of the form {want}"

    def _maxLength(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        if isinstance(value, str) and len(value) > want:
            yield f"{path}: longer than {want}"

    def _bound(self, value: Any, path: str, fits: Any) -> Iterator[str]:
        if isinstance(value, int | float) and not isinstance(value, bool) and not fits(value):
            yield f"{path}: {value} is out of bounds"

    def _minimum(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        yield from self._bound(value, path, lambda v: v >= want)

    def _maximum(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        yield from self._bound(value, path, lambda v: v <= want)

    def _exclusiveMinimum(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        yield from self._bound(value, path, lambda v: v > want)

    def _exclusiveMaximum(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        yield from self._bound(value, path, lambda v: v < want)

    def _minItems(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        if isinstance(value, list) and len(value) < want:
            yield f"{path}: fewer than {want} items"

    def _maxItems(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        if isinstance(value, list) and len(value) > want:
            yield f"{path}: more than {want} items"

    def _uniqueItems(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        if isinstance(value, list) and want and len({repr(item) for item in value}) < len(value):
            yield f"{path}: an item twice"

    def _minProperties(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        if isinstance(value, dict) and len(value) < want:
            yield f"{path}: fewer than {want} keys"

    def _maxProperties(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        if isinstance(value, dict) and len(value) > want:
            yield f"{path}: more than {want} keys"

    def _required(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        if isinstance(value, dict):
            yield from (f"{path}: {key} is missing" for key in want if key not in value)

    def _propertyNames(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        for key in value if isinstance(value, dict) else ():
            yield from self.faults(key, want, f"{path}.{key}")

    def _properties(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        for key, item in value.items() if isinstance(value, dict) else ():
            if key in want:
                yield from self.faults(item, want[key], f"{path}.{key}")

    def _additionalProperties(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        for key, item in value.items() if isinstance(value, dict) else ():
            if key not in schema.get("properties", {}):
                found = next(self.faults(item, want, f"{path}.{key}"), None)
                if found is not None:
                    yield f"{path}: {key} is not allowed" if want is False else found

    def _items(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:
        for k, item in enumerate(value) if isinstance(value, list) else ():
            yield from self.faults(item, want, f"{path}[{k}]")

    def _prefixItems(self, value: Any, want: Any, path: str, schema: Any) -> Iterator[str]:  # noqa: N802
        for k, one in enumerate(want):
            if isinstance(value, list) and k < len(value):
                yield from self.faults(value[k], one, f"{path}[{k}]")


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)
