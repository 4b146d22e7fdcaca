"""Damage files as accidents and attackers do: bytes, places of a YAML or JSON tree, records, lines.

All changes come from a `random.Random`, so that a case can be repeated by its seed.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator
from random import Random
from typing import Any

import yaml

#: Values that readers may not expect.
ODD_VALUES: tuple[Any, ...] = (
    True,
    None,
    0,
    -1,
    1,
    2**31,
    2**53,
    -(2**63),
    10**30,
    1e30,
    1e308,
    float("inf"),
    "",
    "nan",
    "rank",
    "-rank - 1",
    "1 // 0",
    "0 s",
    "1e30 s",
    "\x1b[31m",
    "a\nb",
    "::error::x",
    "é→",
    [],
    {},
    [[]],
    [0, 0],
    {"0": 1},
    "x" * 3000,
    "((((",
    "world",
    "all",
    "4 EiB",
    0.5,
)
_ODD_BYTES = (
    b"99999999999999999999",
    b"-1",
    b"true",
    b"null",
    b"\xff",
    b"\0",
    b"{",
    b"]",
    b"1e400",
)
_ODD_NUMBERS = (0, 1, -1, 7, 2**31, 2**53, 2**64)
_ODD_KEYS = ("x", "ranks", "steps", "repeat", "tensor", 7)


def mutant(data: bytes, suffix: str, draw: Random) -> bytes:
    """A damaged copy of a file; most copies of YAML and JSON can still be parsed."""
    if draw.random() < 0.7:
        with contextlib.suppress(yaml.YAMLError, ValueError, RecursionError):
            if suffix == ".yaml":
                return _mutated_yaml(data, draw)
            if suffix == ".json":
                return json.dumps(_mutated_tree(json.loads(data), draw)).encode()
            if suffix == ".jsonl":
                return _mutated_records(data.splitlines(keepends=True), draw)
            if suffix in (".log", ".txt"):
                return _mutated_lines(data.splitlines(keepends=True), draw)
    for _ in range(draw.randint(1, 4)):
        data = _mutated_bytes(data, draw)
    return data


def _mutated_yaml(data: bytes, draw: Random) -> bytes:
    tree = yaml.safe_load(data)
    for _ in range(draw.randint(1, 3)):
        tree = _mutated_tree(tree, draw)
    text = yaml.safe_dump(tree, allow_unicode=True, sort_keys=False)
    return text.encode("utf-8", "surrogateescape")


def _mutated_records(lines: list[bytes], draw: Random) -> bytes:
    """JSON Lines with one to three records changed, doubled, dropped or swapped.

    The header is the one that changes in a third of the cases.
    """
    for _ in range(draw.randint(1, 3)):
        place = 0 if draw.random() < 0.35 else draw.randrange(len(lines))
        kind = draw.randrange(10)
        if place and kind <= 2:
            _rearrange(lines, place, draw)
        else:
            lines[place] = json.dumps(_mutated_tree(json.loads(lines[place]), draw)).encode()
            lines[place] += b"\n"
    return b"".join(lines)


def _mutated_lines(lines: list[bytes], draw: Random) -> bytes:
    """A text with lines changed, repeated, dropped or swapped."""
    for _ in range(draw.randint(1, 4)):
        place = draw.randrange(len(lines))
        if draw.random() < 0.4:
            _rearrange(lines, place, draw)
        elif draw.random() < 0.2:
            # Long repetitions are what slow patterns take too much time for.
            start = draw.randrange(len(lines[place]) + 1)
            part = lines[place][start : start + draw.randint(1, 12)]
            lines[place] = lines[place][:start] + part * 2000 + lines[place][start:]
        else:
            lines[place] = _mutated_bytes(lines[place], draw)
    return b"".join(lines)


def _rearrange(lines: list[bytes], place: int, draw: Random) -> None:
    """Double, drop or swap a line."""
    other = draw.randrange(len(lines))
    kind = draw.randrange(3)
    if kind == 0:
        lines.insert(place, lines[other])
    elif kind == 1 and len(lines) > 2:
        del lines[place]
    else:
        lines[place], lines[other] = lines[other], lines[place]


def _mutated_bytes(data: bytes, draw: Random) -> bytes:
    place = draw.randrange(len(data) + 1)
    length = draw.randint(1, 40)
    kind = draw.randrange(6)
    if kind == 0:
        return data[:place] + bytes([draw.randrange(256)]) + data[place + 1 :]
    if kind == 1:
        return data[:place]
    if kind == 2:
        return data[:place] + data[place + length :]
    if kind == 3:
        return data[: place + length] + data[place:]
    if kind == 4:
        return data[:place] + draw.choice(_ODD_BYTES) + data[place:]
    numbers = [match.span() for match in re.finditer(rb"\d+", data)]
    start, end = draw.choice(numbers) if numbers else (place, place)
    return data[:start] + str(draw.choice(_ODD_NUMBERS)).encode() + data[end:]


def _mutated_tree(tree: Any, draw: Random) -> Any:
    """The tree with one place in it changed."""
    places = list(_places(tree))
    if not places:
        return draw.choice(ODD_VALUES)
    holder, key = draw.choice(places)
    kind = draw.randrange(8)
    if kind < 4:
        holder[key] = draw.choice(ODD_VALUES)
    elif kind == 4:
        del holder[key]
    elif kind == 5:
        other_holder, other_key = draw.choice(places)
        holder[key] = yaml.safe_load(yaml.safe_dump(other_holder[other_key]))
    elif kind == 6 and isinstance(holder, dict):
        holder[draw.choice(_ODD_KEYS)] = holder.pop(key)
    elif isinstance(holder, list):
        holder.insert(key, holder[key])
    return tree


def _places(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in a tree, as its container and key."""
    keys: list[Any] = []
    if isinstance(tree, dict):
        keys = list(tree)
    elif isinstance(tree, list):
        keys = list(range(len(tree)))
    for key in keys:
        yield tree, key
        yield from _places(tree[key])
