"""Repairs of expressions that are off by one, or have the wrong comparison, sign or variable.

They choose ranks, peers and roots, count iterations, or define vars. Each function yields (words,
changed data). What a changed condition adds or removes is not known here: `search` compares the
data that the ranks exchange.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any, Final

from distsim.program.model import Program
from distsim.repair.scenario_data import (
    DataPath,
    ScenarioData,
    call_name,
    fields_of,
    make_step,
    ranks_of,
    step_paths,
    value_at,
    value_by_rank,
    with_steps_replaced,
)

_PEER_FIELDS: Final = ("src", "dst", "group_src", "group_dst", "tag")
_NUMBER: Final = re.compile(r"(?<![\w.])\d+(?![\w.])")
_ADDEND: Final = re.compile(r" ?[-+] ?\d+(?![\w.]| ?[*/%])")
#: The number of ranks as a bound, not as a divisor: the last rank is one less.
_LAST: Final = re.compile(r"(?<![\w%/*] )(?<![\w%/*])\b(world_size|\w+_size)\b(?! ?[-+*/%])")
_NEEDLESS_PARENTHESES: Final = re.compile(r"(?<!\w)\((\w+)\)")
_OTHER_SIGN: Final = str.maketrans("+-", "-+")
_COMPARISON: Final = re.compile(r"(?<![<>=!])(<=|>=|==|!=|<|>)(?!=)")
#: By comparison, those that are written in its place by mistake, the likely ones first.
_OTHER_COMPARISONS: Final = {
    "<": ("<=", ">", ">="),
    "<=": ("<", ">=", ">"),
    ">": (">=", "<", "<="),
    ">=": (">", "<=", "<"),
    "==": ("!=",),
    "!=": ("==",),
}


def change_conditions(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """The condition of a step or of a block gets another comparison or a number near its own."""
    entries = step_paths(data)
    around = [path for path in entries if _contains_any(path, named)]
    for path in dict.fromkeys((*around, *entries)):
        condition = ranks_of(value_at(data, path))
        # A condition on the iteration as well hardly names a wrong rank by mistake.
        if not isinstance(condition, str) or len(set(value_by_rank(program, condition))) < 2:
            continue
        for changed_text in _other_conditions(condition):
            values = value_by_rank(program, changed_text)
            # `fix_missing` lets all ranks run a block.
            if all(values) or not any(values) or not _differs(program, condition, changed_text):
                continue
            changed = copy.deepcopy(data)
            value_at(changed, path)["ranks"] = changed_text
            name = call_name(value_at(data, path))
            what = f"call {name}" if name else "run this block"
            yield f"{what} on the ranks where {changed_text}", changed


def _contains_any(path: DataPath, named: list[DataPath]) -> bool:
    return any(other[: len(path)] == path for other in named)


def change_expressions(
    data: ScenarioData, program: Program, named: list[DataPath]
) -> Iterator[tuple[str, ScenarioData]]:
    """A peer, a root or a tag gets another sign, a number near its own, or another var."""
    names = [str(name) for name in data.get("vars") or {}]
    for path in named:
        entry = value_at(data, path)
        fields = fields_of(entry)
        for key in (key for key in _PEER_FIELDS if isinstance(fields.get(key), str)):
            written = str(fields[key])
            others = [name for name in names if written.isidentifier() and name != written]
            for other in (*_other_numbers(written), *others):
                if not _differs(program, written, other):
                    continue
                step = make_step(call_name(entry), {**fields, key: other}, ranks_of(entry))
                words = f"{call_name(entry)}: set {key} to {other}"
                yield words, with_steps_replaced(data, path, [step])


def change_vars(data: ScenarioData, program: Program) -> Iterator[tuple[str, ScenarioData]]:
    """A var that depends on the rank or on the number of ranks is off by one."""
    variables: dict[str, Any] = data.get("vars") or {}
    for name, value in variables.items():
        # `fix_numbers` makes the iterations equal that a condition lets differ.
        if not isinstance(value, str) or " if " in value:
            continue
        for other in (*_other_conditions(value), *_other_numbers(value)):
            if _differs(program, value, other) and _is_as_varied(program, value, other):
                yield f"set the var {name} to {other}", {**data, "vars": {**variables, name: other}}


def _differs(program: Program, written: str, other: str) -> bool:
    """Whether an expression has another value; True if that depends on more than the rank."""
    values = value_by_rank(program, other)
    return not values or values != value_by_rank(program, written)


def _is_as_varied(program: Program, written: str, other: str) -> bool:
    """Whether an expression differs by rank if the written one does: `rank % 1` is nonsense."""
    before, after = value_by_rank(program, written), value_by_rank(program, other)
    return len(set(before)) < 2 or len(set(after)) != 1


def _other_conditions(condition: str) -> Iterator[str]:
    if _COMPARISON.search(condition):
        yield from _other_numbers(condition)
    for match in _COMPARISON.finditer(condition):
        for other in _OTHER_COMPARISONS[match.group()]:
            yield condition[: match.start()] + other + condition[match.end() :]


def _other_numbers(expression: str) -> Iterator[str]:
    """The expression with a number that is one more or less, without an addend, or with a sign.

    The number of ranks becomes the last rank.
    """
    for match in _NUMBER.finditer(expression):
        for number in (int(match.group()) + 1, int(match.group()) - 1):
            is_addend = bool(_ADDEND.match(expression, max(0, match.start() - 2)))
            # An addend of 0 is none.
            if number > 0 or (number == 0 and not is_addend):
                yield expression[: match.start()] + str(number) + expression[match.end() :]
    for match in _ADDEND.finditer(expression):
        rest = expression[: match.start()] + expression[match.end() :]
        yield _NEEDLESS_PARENTHESES.sub(r"\1", rest)
        turned = match.group().translate(_OTHER_SIGN)
        yield expression[: match.start()] + turned + expression[match.end() :]
    for match in _LAST.finditer(expression):
        yield f"{expression[: match.end()]} - 1{expression[match.end() :]}"


__all__ = ["change_conditions", "change_expressions", "change_vars"]
