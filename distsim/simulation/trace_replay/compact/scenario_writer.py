"""Writes the aligned program as the text of a scenario, in YAML's flow style.

The form of a step says which values follow; `_FormReader` takes them for all ranks at once and
replaces numbers that differ by expressions of the rank.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final

import numpy as np

from distsim.common.units import duration_text
from distsim.operations.registry import OPERATIONS
from distsim.simulation.trace_replay.compact.call_forms import UNKNOWN_TIME, CallForm, FieldSpec
from distsim.simulation.trace_replay.compact.group_names import GroupNames
from distsim.simulation.trace_replay.compact.rank_alignment import AlignedEntry, AlignedStep
from distsim.simulation.trace_replay.compact.rank_expressions import (
    FittedValue,
    RankVariables,
    fit_expression,
    fit_selector,
    values_by_rank,
)

#: Durations that differ by less than this share, or by less than this many nanoseconds, are written
#: as their mean, unless exact durations are wanted.
_MEAN_TOLERANCE: Final = 0.1
_MEAN_TOLERANCE_NS: Final = 20_000
_PLAIN_SCALAR: Final = re.compile(
    r"[A-Za-z_][\w ./@*+()%<>=!-]*[\w)]|[A-Za-z_]|\([\w ./@*+()%<>=!-]*[\w)]|\d+ [a-zA-Z]+"
)
_YAML_KEYWORDS: Final = {"true", "false", "null", "yes", "no", "on", "off", "y", "n", "nan", "inf"}


@dataclass
class ScenarioWriter:
    """Writes entries. Unless ``exact``, similar durations of ranks are written as their mean."""

    families: GroupNames
    names: RankVariables
    exact: bool
    averaged: int = 0
    _groups: dict[int, dict[int, tuple[int, ...]]] = field(default_factory=dict)

    def program(self, entries: Sequence[AlignedEntry]) -> list[str]:
        """The lines of the scenario's program."""
        return self._entries(entries, set(range(self.names.size)), "  ")

    def _entries(self, entries: Sequence[AlignedEntry], here: set[int], indent: str) -> list[str]:
        lines: list[str] = []
        for ranks, chosen in groupby(entries, key=lambda e: frozenset(e.ranks)):
            group = list(chosen)
            selector = self._selector(ranks, here)
            inner = [
                self._entry(entry, set(ranks), "" if len(group) > 1 else selector)
                for entry in group
            ]
            if len(group) > 1 and selector:
                lines += [f"{indent}- ranks: {selector}", f"{indent}  steps:"]
                lines += [f"{indent}    {line}" for entry in inner for line in entry]
            else:
                lines += [f"{indent}{line}" for entry in inner for line in entry]
        return lines

    def _selector(self, ranks: frozenset[int], here: set[int]) -> str:
        """The text of a selector; empty if it selects all ranks that get here."""
        order = np.array(sorted(here), dtype=np.int64)
        found = fit_selector(np.isin(order, sorted(ranks)), order, self.names)
        return "" if found is None else yaml_flow(found)

    def _entry(self, entry: AlignedEntry, ranks: set[int], selector: str) -> list[str]:
        if isinstance(entry, AlignedStep):
            return self._step(entry, selector)
        times = self._number([entry.times[r] for r in sorted(ranks)], sorted(ranks))
        body = self._entries(entry.body, ranks, "      ")
        head = ["- repeat:", f"    times: {yaml_flow(times)}", "    steps:", *body]
        return [*head, f"  ranks: {selector}"] if selector else head

    def _step(self, step: AlignedStep, selector: str) -> list[str]:
        ranks = sorted(step.ranks)
        pause = [max(step.times[r][0], 0) for r in ranks]
        lines = list(self._pause(pause, ranks, selector))
        cursor = _FormReader(
            self, ranks, [step.ints[r] for r in ranks], [step.times[r][1:] for r in ranks]
        )
        body = cursor.fields(step.form)
        note = f"  # {step.form.source}" if step.form.source else ""
        work = body.get("work")
        if isinstance(work, list) and len(work) > 1:
            # One line would be too long to read.
            return [*lines, *_compute_lines(step.form.op, body, note), *_ranks_line(selector)]
        alone = list(body) == [OPERATIONS[step.form.op].first_field] and not isinstance(
            next(iter(body.values())), dict
        )
        given = yaml_flow(next(iter(body.values()))) if alone else yaml_flow_mapping(body)
        words = f"- {step.form.op}: {given}" if body or selector else f"- {step.form.op}"
        return [*lines, f"{words}{note}", *_ranks_line(selector)]

    def _pause(self, pause: Sequence[int], ranks: Sequence[int], selector: str) -> Iterator[str]:
        lasting = {r: ns for r, ns in zip(ranks, pause, strict=True) if ns > 0}
        if not lasting:
            return
        whom = selector if len(lasting) == len(ranks) else yaml_flow(_rank_or_list(sorted(lasting)))
        yield f"- sleep: {yaml_flow(self.duration(list(lasting.values()), sorted(lasting)))}"
        if whom:
            yield f"  ranks: {whom}"

    # --- values ---
    def duration(self, values: Sequence[int], ranks: Sequence[int]) -> object:
        """The duration of a step: one text, or a text for each rank."""
        known = [value for value in values if value != UNKNOWN_TIME]
        mean_of_known = round(sum(known) / len(known)) if known else 0
        durations = [mean_of_known if value == UNKNOWN_TIME else max(value, 0) for value in values]
        spread = max(durations) - min(durations)
        tolerance = max(_MEAN_TOLERANCE * max(durations), _MEAN_TOLERANCE_NS)
        if spread and not self.exact and spread <= tolerance:
            self.averaged += len(durations)
            durations = [round(sum(durations) / len(durations))] * len(durations)
        if len(set(durations)) == 1:
            return duration_text(durations[0])
        return values_by_rank([duration_text(duration) for duration in durations], ranks)

    def _number(self, values: Sequence[int], ranks: Sequence[int]) -> FittedValue:
        return fit_expression(
            np.array(values, dtype=np.int64), np.array(ranks, dtype=np.int64), self.names
        )

    def peer(
        self, side: str, family: int, values: Sequence[int], ranks: Sequence[int]
    ) -> tuple[str, object]:
        """The field and its value: a global rank, or a group rank if that is simpler."""
        plain = self._number(values, ranks)
        if family <= 0 or isinstance(plain, int) or (isinstance(plain, str) and len(plain) < 12):
            return side, plain
        members = self._groups.setdefault(family, self.families.ranks_in_group(family))
        inside = np.array(
            [members[r].index(v) for r, v in zip(ranks, values, strict=True)], dtype=np.int64
        )
        mine = np.array([members[r].index(r) for r in ranks], dtype=np.int64)
        sizes = np.array([len(members[r]) for r in ranks], dtype=np.int64)
        found = fit_expression(inside, np.array(ranks, dtype=np.int64), self.names, (mine, sizes))
        return (
            (side, plain)
            if isinstance(found, dict) and not isinstance(plain, dict)
            else (f"group_{side}", found)
        )


class _FormReader:
    """Walks over a form, and takes the values of all ranks for each place in it."""

    def __init__(
        self,
        writer: ScenarioWriter,
        ranks: Sequence[int],
        ints: Sequence[tuple[int, ...]],
        times: Sequence[tuple[int, ...]],
    ) -> None:
        self.writer, self.ranks = writer, ranks
        self.ints, self.times = iter(zip(*ints, strict=True)), iter(zip(*times, strict=True))

    def fields(self, form: CallForm) -> dict[str, object]:
        found: dict[str, object] = {}
        for name, spec in form.fields:
            if spec[0] == "peer":
                key, value = self.writer.peer(
                    str(spec[1]), int(str(spec[2])), next(self.ints), self.ranks
                )
                found[key] = value
            else:
                found[name] = self._value(spec)
        return found

    def _value(self, spec: FieldSpec) -> Any:
        kind = spec[0]
        if kind == "text":
            return duration_text(int(str(spec[1]))) if len(spec) > 2 else _without_tuples(spec[1])
        if kind == "int":
            return self._number()
        if kind == "time":
            return self.writer.duration(next(self.times), self.ranks)
        if kind == "ints":
            return self._ints(int(str(spec[1])))
        if kind == "shape":
            shape = {"shape": [self._number() for _ in range(int(str(spec[2])))]}
            return shape if spec[1] == "float32" else {**shape, "dtype": str(spec[1])}
        if kind == "work":
            return self._work(int(str(spec[1])), str(spec[2]))
        inner: Sequence[Any] = spec[1]  # type: ignore[assignment]
        if kind == "list":
            return [self._value(one) for one in inner]
        return [{form.op: self.fields(form)} for form in inner]

    def _number(self) -> FittedValue:
        return self.writer._number(next(self.ints), self.ranks)

    def _work(self, kernels: int, dtype: str) -> dict[str, object]:
        """An entry of the `work` of a compute; defaults are omitted."""
        flops = _with_unit(self._number(), "FLOP")
        nbytes = _with_unit(self._number(), "B")
        entry: dict[str, object] = {"flops": flops} if flops != "0 FLOP" else {}
        entry["bytes"] = nbytes
        if kernels != 1:
            entry["kernels"] = kernels
        return entry if dtype == "float32" else {**entry, "dtype": dtype}

    def _ints(self, count: int) -> Any:
        """A list of numbers or expressions; if no expressions fit, a list for each rank."""
        columns = [next(self.ints) for _ in range(count)]
        fitted = [self.writer._number(column, self.ranks) for column in columns]
        if not any(isinstance(item, dict) for item in fitted):
            return fitted
        lists = [tuple(row) for row in zip(*columns, strict=True)]
        return {key: list(value) for key, value in values_by_rank(lists, self.ranks).items()}


def _compute_lines(op: str, body: Mapping[str, Any], note: str) -> Iterator[str]:
    """A compute with a line for each entry of its work."""
    yield f"- {op}:{note}"
    for name, value in body.items():
        if name == "work":
            yield "    work:"
            yield from (f"    - {yaml_flow(entry)}" for entry in value)
        else:
            yield f"    {name}: {yaml_flow(value)}"


def _ranks_line(selector: str) -> list[str]:
    return [f"  ranks: {selector}"] if selector else []


def _with_unit(value: object, unit: str) -> object:
    """A number with its unit, as the field of a quantity needs it; an expression needs none."""
    if isinstance(value, dict):
        return {rank: _with_unit(one, unit) for rank, one in value.items()}
    return f"{value} {unit}" if isinstance(value, int) else value


def _without_tuples(value: object) -> object:
    return [_without_tuples(v) for v in value] if isinstance(value, tuple) else value


def _rank_or_list(ranks: list[int]) -> int | list[int]:
    return ranks[0] if len(ranks) == 1 else ranks


# --- YAML ---


def yaml_flow_mapping(fields: Mapping[Any, Any]) -> str:
    """A mapping in YAML's flow style."""
    return (
        "{"
        + ", ".join(f"{yaml_flow(key)}: {yaml_flow(value)}" for key, value in fields.items())
        + "}"
    )


def yaml_flow(value: object) -> str:
    """A value in YAML's flow style, on one line."""
    if isinstance(value, str):
        bare = _PLAIN_SCALAR.fullmatch(value) is not None and value.lower() not in _YAML_KEYWORDS
        return value if bare else json.dumps(value, ensure_ascii=False)
    if isinstance(value, Mapping):
        return yaml_flow_mapping(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(yaml_flow, value)) + "]"
    if isinstance(value, bool) or value is None:
        return json.dumps(value)
    return str(value)
