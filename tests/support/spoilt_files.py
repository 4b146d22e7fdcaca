"""Scenario files with something wrong in them: places of a file's data changed as people and
programs do it.

`mutants` are data; what is wrong with them is for the loader and the schema to say.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

from distsim.scenario.format.source.construct import construct
from distsim.scenario.format.source.document import YamlDocument, compose
from distsim.scenario.format.source.problems import ProblemCollector

ROOT = Path(__file__).resolve().parents[2]
ODD: tuple[Any, ...] = (
    True,
    None,
    0,
    -1,
    1.5,
    2**31,
    "",
    "a text",
    "rank",
    "rank +",
    "x = 1",
    "3",
    "3 ms",
    "3 parsecs",
    "-1 ms",
    "4 MiB",
    [],
    {},
    [0, 0],
    ["a"],
    [[1]],
    {"0": 1},
    {"else": "x"},
    {"a": 1},
    "not a name",
    "1abc",
    "sum",
    "ReduceOp.SUM",
    1e30,
)
#: What people write beside the keys that there are.
STRANGE = (
    "tensr",
    "async_op",
    "dest",
    "steps",
    "Name",
    "world_size",
    "input_list",
    "x",
    "ranks",
    "group_",
    "timeout_s",
    "shpe",
)


def files() -> list[Path]:
    """Every scenario of the project."""
    return sorted((ROOT / "scenarios").rglob("*.yaml"))


def data_of(file: Path) -> Any:
    """A file's data as JSON has it."""
    document = YamlDocument(str(file), file.read_text(encoding="utf-8"))
    document.node = compose(document)
    return as_json(construct(document, document.node, ProblemCollector(document)))


def as_json(data: Any) -> Any:
    return json.loads(json.dumps(data))


def from_json(data: Any) -> Any:
    """The same with numbers for keys that are numbers, as a file has them."""
    if isinstance(data, list):
        return [from_json(item) for item in data]
    if isinstance(data, dict):
        return {
            int(key) if key.isascii() and key.isdigit() else key: from_json(item)
            for key, item in data.items()
        }
    return data


def mutants(count: int, seed: int) -> Iterator[tuple[str, Any]]:
    """So many (what was done, data), from all files in turn."""
    draw = Random(seed)
    bases = [(file.stem, data_of(file)) for file in files()]
    for k in range(count):
        name, base = bases[k % len(bases)]
        yield name, mutant(copy.deepcopy(base), draw)


def mutant(data: Any, draw: Random) -> Any:
    """The data with one place changed."""
    holder, key = draw.choice(
        [place for place in places(data) if place[1] not in ("about", "name", "expect", "values")]
    )
    kind = draw.randrange(6)
    if isinstance(holder, list) or kind < 3:
        holder[key] = draw.choice(ODD)
    elif kind == 3:
        del holder[key]
    elif kind == 4:
        holder[draw.choice(STRANGE)] = holder.pop(key)
    else:
        holder[draw.choice(STRANGE)] = draw.choice(ODD)
    return data


def places(data: Any) -> Iterator[tuple[Any, Any]]:
    """Every place in the data: what holds it, and its key."""
    for key in (
        list(data) if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    ):
        yield data, key
        yield from places(data[key])
