"""How a file would write a number: by a var, by the number of ranks, or as the number.

Key idea: a repair with `times: 3` breaks when somebody changes `batches: 3`. A number is therefore
written like the expression that stood there, or like the same number elsewhere in the file. A file
that writes numbers keeps numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from distsim.program.model import Program
from distsim.repair.expression_text import name_order, with_name_replaced
from distsim.repair.scenario_data import (
    ScenarioData,
    fields_of,
    step_paths,
    value_at,
    value_by_rank,
)


def written_number(
    data: ScenarioData, program: Program, number: int, before: object, elsewhere: Iterable[object]
) -> str | int:
    """A text that has this value on all ranks; the number itself if the file shows none.

    ``before``: what is written there now. ``elsewhere``: expressions at similar places.
    """
    parts = [*_parts_of(before), *(part for each in elsewhere for part in _parts_of(each))]
    changed = _changed_names(data, before, [part for part in parts if part.isidentifier()])
    for text in (*parts, *changed, *_names_used(parts)):
        if set(value_by_rank(program, text)) == {number}:
            return text
    return number


def numbers_for_expressions(before: ScenarioData, after: ScenarioData) -> int:
    """How many fields of steps and shapes lose an expression that names something for a number."""
    lost = Counter(key for key, _ in (_expressions(before) - _expressions(after)).elements())
    gained = Counter(key for key, _ in (_numbers(after) - _numbers(before)).elements())
    return (lost & gained).total()


def _expressions(data: ScenarioData) -> Counter[tuple[str, str]]:
    fields = _fields_of_steps(data)
    return Counter((key, value) for key, value in fields if isinstance(value, str))


def _numbers(data: ScenarioData) -> Counter[tuple[str, int]]:
    return Counter((key, value) for key, value in _fields_of_steps(data) if type(value) is int)


def _fields_of_steps(data: ScenarioData) -> Iterator[tuple[str, object]]:
    for path in step_paths(data):
        yield from fields_of(value_at(data, path)).items()
    for name, tensor in (data.get("tensors") or {}).items():
        shape = tensor.get("shape") if isinstance(tensor, dict) else None
        for place, size in enumerate(shape if isinstance(shape, list) else ()):
            yield f"{name}, dimension {place}", size


def _parts_of(written: object) -> Iterator[str]:
    """The expressions in a value, which may have an entry for each rank; no plain numbers."""
    values = written.values() if isinstance(written, dict) else [written]
    yield from (value for value in values if isinstance(value, str))


def _names_used(parts: list[str]) -> Iterator[str]:
    """The names in some expressions, and the numbers one less and one more."""
    names = dict.fromkeys(name for part in parts for name in name_order(part))
    yield from names
    yield from (f"{name} - 1" for name in names)
    yield from (f"{name} + 1" for name in names)


def _changed_names(data: ScenarioData, before: object, likely: list[str]) -> Iterator[str]:
    """The expression with a var, or the size of an axis, in place of each of its names."""
    others = [*likely, *(str(name) for name in data.get("vars") or {})]
    mesh = data.get("mesh")
    others += [f"{axis}_size" for axis in mesh] if isinstance(mesh, dict) else []
    for part in _parts_of(before):
        for name in name_order(part):
            yield from (with_name_replaced(part, name, other) for other in others)


__all__ = ["numbers_for_expressions", "written_number"]
