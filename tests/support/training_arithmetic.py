"""Real arithmetic in place of an expansion's compute steps, for tests that train a small model by
the calls of a strategy.

`assign` knows tensors by name alone, so repeats are written out first and a copy `name@3` becomes a
tensor `name_3`; every call stays what and where it was. Everything is float64, as the numbers of an
expression are, so that both sides round alike.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import yaml

from distsim.common.expressions import parse_expression
from distsim.scenario import Scenario, loads

Entry = dict[str, Any]
#: (tensor, expression) in order.
Assigns = list[tuple[str, str]]
#: From the fields of a compute step, and how often one of its name has come before, to what is done
#: instead.
Arithmetic = Callable[[dict[str, Any], int], Assigns]


def assigns(work: Assigns, **beside: Any) -> list[Entry]:
    return [{"assign": {"tensor": name, "value": value}, **beside} for name, value in work]


def unrolled(entries: list[Entry]) -> list[Entry]:
    """Entries with every repeat written out, its index as a number."""
    found: list[Entry] = []
    for entry in entries:
        if "repeat" in entry:
            fields = entry["repeat"]
            index = re.compile(rf"\b{fields.get('index', 'no index')}\b")
            for k in range(int(fields["times"])):
                found += unrolled(_replaced(fields["steps"], index, lambda _, k=k: str(k)))
        elif "steps" in entry:
            found.append({**entry, "steps": unrolled(entry["steps"])})
        else:
            found.append(entry)
    return found


def _with_own_tensors(entries: list[Entry], copied: set[str]) -> list[Entry]:
    """Unrolled entries with a tensor of its own for every copy."""
    reference = re.compile(r"(\w+)(?:@(.+))?$")
    return [
        {**entry, "steps": _with_own_tensors(entry["steps"], copied)}
        if "steps" in entry
        else _replaced(entry, reference, lambda m: _own(m, copied))
        for entry in entries
    ]


def _own(match: re.Match[str], copied: set[str]) -> str:
    name, index = match.groups()
    if index is None:
        return f"{name}_0" if name in copied else name
    return f"{name}_{parse_expression(index).evaluate({})}"


def _replaced(data: Any, pattern: re.Pattern[str], by: Callable[[re.Match[str]], str]) -> Any:
    """Plain data with every match of a pattern in its texts (at their start, where it ends in $)
    replaced; keys stay.
    """
    if isinstance(data, dict):
        return {key: _replaced(value, pattern, by) for key, value in data.items()}
    if isinstance(data, list):
        return [_replaced(value, pattern, by) for value in data]
    if not isinstance(data, str):
        return data
    return (
        pattern.sub(by, data) if not pattern.pattern.endswith("$") or pattern.match(data) else data
    )


def one_by_one(tensors: dict[str, Any]) -> dict[str, Any]:
    """Tensors of their own in place of copies; `like` says no more than the shape and dtype."""
    found: dict[str, Any] = {}
    for name, spec in tensors.items():
        model = {**tensors[spec["like"]], **spec} if "like" in spec else dict(spec)
        copies = model.pop("copies", None)
        model.pop("like", None)
        found |= {name: model} if copies is None else {f"{name}_{k}": model for k in range(copies)}
    return found


def with_arithmetic(
    entries: list[Entry], arithmetic: Arithmetic, seen: dict[str, int] | None = None
) -> list[Entry]:
    """The entries with assigns in place of compute steps."""
    seen = {} if seen is None else seen
    found: list[Entry] = []
    for entry in entries:
        if "steps" in entry:
            found.append({**entry, "steps": with_arithmetic(entry["steps"], arithmetic, seen)})
        elif "compute" in entry:
            name = entry["compute"]["name"] + str(entry.get("ranks", ""))
            seen[name] = seen.get(name, -1) + 1
            beside = {"ranks": entry["ranks"]} if "ranks" in entry else {}
            found += assigns(arithmetic(entry["compute"], seen[name]), **beside)
        else:
            found.append(entry)
    return found


class Trained:
    """A scenario's expansion on its way to a program that trains: change ``program`` and
    ``tensors``, then ask for the scenario.
    """

    def __init__(self, scenario: Scenario) -> None:
        self.data = yaml.safe_load(scenario.to_yaml())
        tensors = self.data.get("tensors", {})
        copied = {
            n for n, s in tensors.items() if "copies" in {**tensors.get(s.get("like"), {}), **s}
        }
        self.program = _with_own_tensors(unrolled(self.data["program"]), copied)
        if len(self.program) == 1 and set(self.program[0]) == {"steps"}:
            self.program = self.program[0]["steps"]
        self.tensors = one_by_one(tensors)

    def tensor(self, name: str, shape: Any, value: str | float | None = None) -> None:
        self.tensors[name] = {
            "shape": shape,
            "dtype": "float64",
            **({} if value is None else {"value": value}),
        }

    def compute(self, arithmetic: Arithmetic) -> None:
        self.program = with_arithmetic(self.program, arithmetic)

    def scenario(self) -> Scenario:
        return loads(
            yaml.safe_dump(
                {**self.data, "tensors": self.tensors, "program": self.program}, sort_keys=False
            )
        )
