"""Whether all ranks of a program are meant to skip a step together.

Key idea: a condition such as `not (rank == 2 and iteration == 1)` lets one rank skip what the
others do. Either no rank should skip it, or all ranks should. Three signs show the second: the file
says so; another block depends on the same iterations on all ranks; the ranks agree on a flag by a
reduction with `max` or `min`.
"""

from __future__ import annotations

import json
import re
from typing import Any, Final

from distsim.program.model import Program
from distsim.repair.expression_text import conjuncts, negated, without_names
from distsim.repair.scenario_data import (
    ScenarioData,
    depends_on_rank,
    fields_of,
    is_block,
    names_in,
    op_of,
    ranks_of,
    step_paths,
    value_at,
)

_RANKS: Final = r"\b(all|every|each|everywhere|together)\b"
_SKIPS: Final = re.compile(rf"\bskip\w*\b[^.;]{{0,60}}{_RANKS}|{_RANKS}[^.;]{{0,40}}\bskip")
_AGREEING_OPS: Final = ("max", "min", "band", "bor")


class SharedDecisions:
    """The steps of a file that all ranks skip in the same iterations.

    ``_conditions``: by content of the step, the iterations in which all ranks run it.
    """

    def __init__(self, words: str, data: ScenarioData, program: Program) -> None:
        says_so = bool(_SKIPS.search(_unbroken(words))) or _agrees_on_flag(data)
        timed = _conditions_of_all_ranks(data, program)
        self._conditions: dict[str, str] = {}
        for path in step_paths(data):
            entry = value_at(data, path)
            rest = _condition_without_rank(program, ranks_of(entry))
            if rest and (says_so or rest in timed or negated(rest) in timed):
                self._conditions[_content(entry)] = rest

    def condition_of(self, entry: Any) -> str:
        """The iterations in which all ranks run a step; empty if it is none of these steps."""
        return self._conditions.get(_content(entry), "")

    def broken_in(self, data: ScenarioData) -> int:
        """How many of these steps now run in all iterations."""
        entries = (value_at(data, path) for path in step_paths(data))
        alone = {_content(entry) for entry in entries if ranks_of(entry) is None}
        return len(self._conditions.keys() & alone)


def _unbroken(words: str) -> str:
    """The words without line breaks and the marks of comments."""
    return " ".join(line.strip().removeprefix("#").strip() for line in words.splitlines())


def _condition_without_rank(program: Program, selector: object) -> str:
    """What remains of a negated condition on rank and iteration; empty if it is none."""
    if not isinstance(selector, str) or len(conjuncts(selector)) > 1:
        return ""
    names = {name for name in names_in(selector) if depends_on_rank(program, name)}
    rest = without_names(selector, names) if names else ""
    return rest if rest != selector else ""


def _conditions_of_all_ranks(data: ScenarioData, program: Program) -> set[str]:
    """The conditions of steps that do not depend on the rank."""
    selectors = (ranks_of(value_at(data, path)) for path in step_paths(data))
    texts = {str(selector) for selector in selectors if isinstance(selector, str)}
    return {text for text in texts if not depends_on_rank(program, text)}


def _agrees_on_flag(data: ScenarioData) -> bool:
    """Whether the ranks reduce a flag, which an assign sets under a condition."""
    steps = [value_at(data, path) for path in step_paths(data)]
    flags = {
        fields_of(step).get("tensor")
        for step in steps
        if op_of(step) == "assign" and " if " in str(fields_of(step).get("value"))
    }
    reduced = (fields_of(step) for step in steps if op_of(step) == "all_reduce")
    return any(each.get("op") in _AGREEING_OPS and each.get("tensor") in flags for each in reduced)


def _content(entry: Any) -> str:
    """A step without its selector, as text; a block counts by its steps."""
    if is_block(entry):
        return json.dumps(entry.get("steps") or entry.get("repeat"), default=str)
    if not isinstance(entry, dict):
        return str(entry)
    kept = {key: value for key, value in entry.items() if key != "ranks"}
    return json.dumps(kept, default=str)


__all__ = ["SharedDecisions"]
