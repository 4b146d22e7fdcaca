"""A remedy for each refusal: what to write, by the message's cause and by what the key takes.

Key idea: a remedy is chosen by the message's text, so that no parser has to word it. The first
pattern that matches wins; without one, the key's example serves. `problem_at` asks here for every
problem that has no hint of its own. Examples are those of the reference
(`distsim.scenario.format.schema.key_reference`).
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

#: In place of a remedy: an example of the key that is missing.
_MISSING_KEY = "needed"
#: Messages (as a regular expression) -> the remedy, with the groups of the match.
_REMEDIES_BY_MESSAGE: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"found the unit .*did you mean (\S+)\?", "write the unit as `{1}`"),
    (r"expected true or false", "write `true` or `false`"),
    (r"in quotes is a number", "leave the quotes out: a rank is named by its number"),
    (r"expected either `(\w+)`.* or `(\w+)`|found both", "give one of them, and not both"),
    (r"expected `async: true` beside `as`", "add `async: true`"),
    (
        r"unknown (?:key|field|step) '?([^';]+?)'?(?: in [^;]*| beside [^;]*)?[;,]"
        r".*did you mean ([\w.]+)\?",
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
        "use arithmetic, comparisons, min and max alone; "
        "`distsim explain expressions` shows what there is",
    ),
    (r"write (`[^`]+`)", "write {1}"),
    (r"put a dash before (\w+)", "`- {1}: …` on a line of its own is a second entry"),
    (r"^repeat needs|expected `repeat:", "as `repeat: {{times: 4, index: m, steps: [barrier]}}`"),
    (r"this entry does nothing", "add what they do: `steps: [barrier]`, or an operation"),
    (r": swap them$", "give `at_most` the larger of the two"),
    (r"needs its `(\w+)`, as (.*)$", "add `{1}: {2}`"),
    (r"expected one of `ranks`, `axes` and `by`", "give one of the three, as `{{ranks: [0, 1]}}`"),
    (r"^(\S+) needs `(\w+)`", _MISSING_KEY),
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


_SINGLE_EQUALS = re.compile(r"(?<![=<>!])=(?!=)")


def _expression_remedy(text: str) -> str:
    """The likely mistake in a text that is no expression."""
    if _SINGLE_EQUALS.search(text):
        return f"`=` gives a value, `==` compares: write `{_SINGLE_EQUALS.sub('==', text)}`"
    if "&&" in text or "||" in text:
        return f"write `{text.replace('&&', 'and').replace('||', 'or')}`"
    if text.startswith("!") or " !" in text:
        return f"write `{re.sub(r'!(?!=)', 'not ', text)}`"
    if text.count("(") != text.count(")"):
        return _parenthesis_remedy(text)
    if has_units(text):
        return "this key takes a plain number: leave the unit out"
    if re.search(r"[-+*/%<>=]\s*$|\b(?:and|or|not|if|else)\s*$", text):
        return "something is missing after the last operator"
    if re.match(r"\s*[*/%<>=]", text):
        return "something is missing before the first operator"
    if re.fullmatch(r"[\w.]+(?:\s+[\w.]+)+", text):
        return f"an operator is missing, as in `{' + '.join(text.split()[:2])}`"
    return (
        "write numbers, names, + - * // %, comparisons, and, or, not; "
        "`distsim explain expressions` shows more"
    )


def _parenthesis_remedy(text: str) -> str:
    missing = text.count("(") - text.count(")")
    if missing > 0:
        return f"close the parenthesis: `{text + ')' * missing}`"
    last = text.rfind(")")
    return f"delete the last parenthesis: `{text[:last] + text[last + 1 :]}`"


def remedy(path: tuple[str | int, ...], message: str) -> str:
    """The remedy for a problem with the value at a path; never empty."""
    key = _innermost_key(path)
    for pattern, advice in _REMEDIES_BY_MESSAGE:
        match = re.search(pattern, message)
        if match is None:
            continue
        if advice == _MISSING_KEY:
            return _missing_key_remedy(match[1], match[2], key)
        if isinstance(advice, str):
            return advice.format(match[0], *match.groups())
        return advice(match)
    return _key_remedy(path, key, message)


def _missing_key_remedy(parent: str, name: str, key: FormatKey | None) -> str:
    """An example of the missing key ``name``; ``key`` is the innermost known one at the place."""
    from distsim.scenario.format.schema.key_reference import find_key, format_keys

    if key is None:
        place = parent
    elif key.name == name:
        place = key.path.rpartition(".")[0]
    else:
        place = key.path
    found = find_key(f"{place}.{name}")
    if found is None:  # any key of this name has a similar example
        found = next((known for known in format_keys().values() if known.name == name), None)
    example = found.example if found is not None and found.example else "…"
    return f"add `{name}: {example}`"


def _is_step(words: list[str]) -> bool:
    """Whether the path ends with an operation or a strategy."""
    if len(words) < 2 or words[0] != "program":
        return False
    last = words[-1]
    return last in OPERATIONS or last in OPERATION_ALIASES or last in STRATEGIES


def _step_remedy(name: str, message: str) -> str:
    """An operation's example, and its page."""
    from distsim.scenario.format.schema.generate import inline_yaml

    row = OPERATIONS.get(OPERATION_ALIASES.get(name, name))
    page = f"`distsim explain {name}` has its fields"
    if message.startswith("unknown"):
        return f"leave it out; {page}"
    if row is None:
        return page
    first = row.first_field
    if first is not None and "expected" in message and "`" + first not in message:
        info = next(i for key, i in row.model_fields.items() if (i.alias or key) == first)
        example = next(iter(info.examples or ()), "…")
        return f"as `{name}: {inline_yaml(example)}`; {page}"
    return f"as `{row.words.example.splitlines()[0].removeprefix('- ')}`; {page}"


def _key_remedy(path: tuple[str | int, ...], key: FormatKey | None, message: str) -> str:
    words = [str(part) for part in path if not isinstance(part, int)]
    if words and _is_step(words):
        return _step_remedy(words[-1], message)
    if len(words) > 1 and message.startswith("unknown field") and _is_step(words[:-1]):
        return _step_remedy(words[-2], message)
    if key is None:
        return "`distsim explain scenario` lists the keys of the file"
    page = f"`distsim explain {_explain_argument(key)}`"
    if message.startswith("unknown key"):
        return f"leave it out; {page} lists what may stand there"
    if key.example:
        return f"as `{key.name}: {key.example}`; {page} has more"
    return f"{page} says what may stand there"


def _explain_argument(key: FormatKey) -> str:
    return key.path.replace("[]", "")


def _innermost_key(path: tuple[str | int, ...]) -> FormatKey | None:
    """The last key on the path that the reference knows."""
    from distsim.scenario.format.schema.key_reference import find_key

    words = [str(part) for part in path if not isinstance(part, int)]
    while words and not _is_step(words):
        found = find_key(".".join(words))
        if found is not None:
            return found
        words.pop()
    return None


__all__ = ["remedy"]
