"""A remedy for each refusal: what to write, by the message's cause and by what the key takes.

`Problems` asks here where whoever noted a problem gave no advice. The examples are those of the
reference (`distsim.scenario.format.schema.key_reference`).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from distsim.common.quantities import has_units
from distsim.operations.registry import OPERATION_ALIASES, OPERATIONS
from distsim.scenario.strategies import STRATEGIES

if TYPE_CHECKING:
    from distsim.scenario.format.schema.key_reference import FormatKey

#: Messages (as a regular expression) -> the remedy, with the groups of the match.
_REMEDIES_BY_MESSAGE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"found the unit .*did you mean (\S+)\?", "write the unit as `{1}`"),
    (r"expected true or false", "write `true` or `false`"),
    (r"in quotes is a number", "leave the quotes out: a rank is named by its number"),
    (r"expected either `(\w+)`.* or `(\w+)`|found both", "give one of them, and not both"),
    (r"expected `async: true` beside `as`", "add `async: true`"),
    (
        r"unknown (?:key|field|step) '?([^';]+?)'?(?: in [^;]*| beside [^;]*)?[;,].*did you mean ([\w.]+)\?",
        "write `{2}` in place of `{1}`",
    ),
    (r"did you mean ([\w./-]+)\?$", "write `{1}`"),
    (r"torch calls it avg", "write `op: avg`"),
    (r"it compares with `==`", "write `==` to compare"),
    (r"`(.*)` is not an expression", lambda match: _expression_remedy(match[1])),
    (r"a division with `/`", "write `//`: it rounds down"),
    (r"a power \(", "multiply: `n * n`"),
    (r"`(in|not in)`", "write `rank == 1 or rank == 2`; for ranks that are known, `ranks: [1, 2]`"),
    (r"`([|&~^])`|`(is|is not)`", "write `and`, `or`, `not`, `==` or `!=`"),
    (
        r"allowed are numbers, names.*$",
        "use arithmetic, comparisons, min and max alone; `distsim explain expressions` shows what there is",
    ),
    (r"write (`[^`]+`)", "write {1}"),
    (r"put a dash before (\w+)", "`- {1}: …` on a line of its own is a second entry"),
    (r"^repeat needs|expected `repeat:", "as `repeat: {{times: 4, index: m, steps: [barrier]}}`"),
    (r"this entry does nothing", "add what they do: `steps: [barrier]`, or an operation"),
    (r": swap them$", "give `at_most` the larger of the two"),
    (r"needs its `(\w+)`, as (.*)$", "add `{1}: {2}`"),
    (r"expected one of `ranks`, `axes` and `by`", "give one of the three, as `{{ranks: [0, 1]}}`"),
    (r"^(\S+) needs `(\w+)`", "needed"),
    (r"unknown tensor (\w+)", "declare it: `tensors: {{{1}: {{shape: [4]}}}}`"),
    (
        r"unknown group (\w+)",
        "an axis of `mesh` is a group; or declare it: `groups: {{{1}: [0, 1]}}`",
    ),
    (r"unknown axis (\w+)", "add it to the mesh: `mesh: {{{1}: 2, …}}`"),
    (r"unknown handle (\w+)", "bind it where the request starts: `as: {1}`"),
    (r"unknown name (\w+) in an expression", "a var defines it: `vars: {{{1}: 4}}`"),
    (r"the var (\w+) is defined further down", "move {1} above it"),
    (
        r"known beside a `group:` only",
        "add `group: …` to the step, or count with `rank` and `world_size`",
    ),
    (r"known in `value:` only", "count with `rank`, or put it under `value:` of the tensor"),
    (
        r"is outside the world of (\d+)|is outside the world",
        "ranks count from 0; `world` says how many there are",
    ),
    (r"already (?:a word|an axis|the size|a var|a group|an index)", "give it another name"),
    (r"is already the index", "give the inner one another name"),
    (r"stands here twice", "keep one of them, or give one another name"),
    (
        r"the mesh does not give the world",
        "the sizes of the axes, multiplied, are the number of ranks",
    ),
    (r"a batch holds isend and irecv only", "put it before or after the batch"),
    (r"batch has one handle", "`batch_isend_irecv: {{ops: […], as: h}}`"),
    (r"repeat is bounded", "simulate fewer rounds: they repeat themselves"),
    (r"unknown step", "`distsim explain` lists the steps"),
    (
        r"is not the same|same on every rank",
        "use vars, the sizes of axes and `world_size`, which all ranks know alike",
    ),
    (r"division by zero", "see which value the divisor has, on every rank"),
    (r"(?:number|result) is too large", "take a smaller number"),
    (r"at most \d+ are (?:allowed|simulated)|too large", "make it smaller"),
    (r"names a rank twice|stands here twice|name a rank twice", "name each once"),
    (
        r"can't be (?:added|subtracted|compared|divided|joined|chosen from)",
        "give both the same unit, as `3 ms + 200 us`",
    ),
    (r"no quantity that there is", "multiply or divide a quantity by a plain number"),
    (r"has no entry in a per-rank mapping", "add the rank, or `else: …` for all others"),
    (r"is like itself", "give one of them a `shape`"),
    (r"have different lengths", "make the lists equally long, or give a `shape`"),
    (r"each after a dash", "write each on a line of its own, after `- `"),
    (r"found an empty text", "write something there, or leave the key out"),
)


def _expression_remedy(text: str) -> str:
    """What was meant by a text that is no expression."""
    if re.search(r"(?<![=<>!])=(?!=)", text):
        return (
            f"`=` gives a value, `==` compares: write `{re.sub(r'(?<![=<>!])=(?!=)', '==', text)}`"
        )
    if "&&" in text or "||" in text:
        return f"write `{text.replace('&&', 'and').replace('||', 'or')}`"
    if text.startswith("!") or " !" in text:
        return f"write `{re.sub(r'!(?!=)', 'not ', text)}`"
    if text.count("(") != text.count(")"):
        more = "(" if text.count("(") > text.count(")") else ")"
        return f"{'close' if more == '(' else 'delete'} the {'parenthesis' if more == '(' else 'last parenthesis'}: `{_balanced(text)}`"
    if has_units(text):
        return "this key takes a plain number: leave the unit out"
    if re.search(r"[-+*/%<>=]\s*$|\b(?:and|or|not|if|else)\s*$", text):
        return "something is missing after the last operator"
    if re.match(r"\s*[*/%<>=]", text):
        return "something is missing before the first operator"
    if re.fullmatch(r"[\w.]+(?:\s+[\w.]+)+", text):
        return f"an operator is missing, as in `{' + '.join(text.split()[:2])}`"
    return "write numbers, names, + - * // %, comparisons, and, or, not; `distsim explain expressions` shows more"


def _balanced(text: str) -> str:
    missing = text.count("(") - text.count(")")
    return (
        text + ")" * missing
        if missing > 0
        else text[: text.rfind(")")] + text[text.rfind(")") + 1 :]
    )


def remedy(path: tuple[str | int, ...], message: str) -> str:
    """What to do about a problem with the value at a path; never empty."""
    key = _innermost_key(path)
    for pattern, advice in _REMEDIES_BY_MESSAGE:
        match = re.search(pattern, message)
        if match is not None:
            said = (
                advice.format(match[0], *match.groups())
                if isinstance(advice, str)
                else advice(match)
            )
            return _missing_key_remedy(match, key) if said == "needed" else said
    return _key_remedy(path, key, message)


def _missing_key_remedy(match: re.Match[str], key: FormatKey | None) -> str:
    """An example of a key that is missing."""
    from distsim.scenario.format.schema.key_reference import find_key, format_keys

    place = (
        key.path.rpartition(".")[0]
        if key is not None and key.name == match[2]
        else key.path
        if key is not None
        else match[1]
    )
    found = find_key(f"{place}.{match[2]}") or next(
        (k for k in format_keys().values() if k.name == match[2]), None
    )
    return (
        f"add `{match[2]}: {found.example}`"
        if found is not None and found.example
        else f"add `{match[2]}: …`"
    )


def _is_step(words: list[str]) -> bool:
    """Does the path end with an operation or a strategy?"""
    return (
        words[0] == "program"
        and (words[-1] in OPERATIONS or words[-1] in OPERATION_ALIASES or words[-1] in STRATEGIES)
        and len(words) > 1
    )


def _step_remedy(name: str, message: str) -> str:
    """An operation's example, and its page."""
    from distsim.scenario.format.schema.generate import inline_yaml

    row = OPERATIONS.get(OPERATION_ALIASES.get(name, name))
    page = f"`distsim explain {name}` has its fields"
    if message.startswith("unknown"):
        return f"leave it out; {page}"
    if row is None:
        return page
    if (
        row.first_field is not None
        and "expected" in message
        and "`" + row.first_field not in message
    ):
        info = next(i for k, i in row.model_fields.items() if (i.alias or k) == row.first_field)
        return f"as `{name}: {inline_yaml(next(iter(info.examples or ()), '…'))}`; {page}"
    return f"as `{row.words.example.splitlines()[0].removeprefix('- ')}`; {page}"


def _key_remedy(path: tuple[str | int, ...], key: FormatKey | None, message: str) -> str:
    words = [str(part) for part in path if not isinstance(part, int)]
    if words and _is_step(words):
        return _step_remedy(words[-1], message)
    if len(words) > 1 and message.startswith("unknown field") and _is_step(words[:-1]):
        return _step_remedy(words[-2], message)
    if key is None:
        return "`distsim explain scenario` lists the keys of the file"
    if message.startswith("unknown key"):
        return (
            f"leave it out; `distsim explain {_explain_argument(key)}` lists what may stand there"
        )
    if key.example:
        return (
            f"as `{key.name}: {key.example}`; `distsim explain {_explain_argument(key)}` has more"
        )
    return f"`distsim explain {_explain_argument(key)}` says what may stand there"


def _explain_argument(key: FormatKey) -> str:
    return key.path.replace("[]", "")


def _innermost_key(path: tuple[str | int, ...]) -> FormatKey | None:
    """The innermost key on the way that the reference knows."""
    from distsim.scenario.format.schema.key_reference import find_key

    words = [str(part) for part in path if not isinstance(part, int)]
    while words and not _is_step(words):
        found = find_key(".".join(words))
        if found is not None:
            return found
        words.pop()
    return None


__all__ = ["remedy"]
