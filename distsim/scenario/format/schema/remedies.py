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
    (r"in quotes is a number", "remove the quotes: a rank is a number"),
    (r"expected either `(\w+)`.* or `(\w+)`|found both", "keep one of them"),
    (r"`as` needs `async: true`", "add `async: true`"),
    (
        r"unknown (?:key|field|step) '?([^';]+?)'?(?: in [^;]*| next to [^;]*)?[;,]"
        r".*did you mean ([\w.]+)\?",
        "write `{2}` instead of `{1}`",
    ),
    (r"did you mean '?([\w./-]+)'?\?$", "write `{1}`"),
    (r"it compares with `==`", "write `==` to compare"),
    (r"`(.*)` is not an expression", lambda match: _expression_remedy(match[1])),
    (r"a division with `/`", "write `//`, which rounds down"),
    (r"a power \(", "multiply: `n * n`"),
    (r"`(in|not in)`", "write `rank == 1 or rank == 2`; for fixed ranks, `ranks: [1, 2]`"),
    (r"`([|&~^])`|`(is|is not)`", "write `and`, `or`, `not`, `==` or `!=`"),
    (
        r"an expression may contain numbers, names.*$",
        "use only arithmetic, comparisons, min and max; see `distsim explain expressions`",
    ),
    (r"write (`[^`]+`)", "write {1}"),
    (r"put a dash before (\w+)", "write `- {1}: …` on its own line for a second entry"),
    (
        r"^repeat needs|expected `repeat:",
        ("for example `repeat: {{times: 4, index: m, steps: [barrier]}}`"),
    ),
    (r"this entry does nothing", "add an operation, or `steps: [barrier]`"),
    (r"is greater than `at_most`", "swap the two values"),
    (r"needs its `(\w+)`, such as (.*)$", "add `{1}: {2}`"),
    (
        r"expected one of `ranks`, `axes` and `by`",
        ("give one of the three, for example `{{ranks: [0, 1]}}`"),
    ),
    (r"^(\S+) needs `(\w+)`", _MISSING_KEY),
    (r"unknown tensor (\w+)", "declare it: `tensors: {{{1}: {{shape: [4]}}}}`"),
    (
        r"unknown group (\w+)",
        "use an axis of `mesh`, or declare the group: `groups: {{{1}: [0, 1]}}`",
    ),
    (r"unknown axis (\w+)", "add it to the mesh: `mesh: {{{1}: 2, …}}`"),
    (r"unknown handle (\w+)", "add `as: {1}` to the call that starts the request"),
    (r"unknown name (\w+) in an expression", "define it: `vars: {{{1}: 4}}`"),
    (r"the variable (\w+) is defined further down", "move {1} above it"),
    (
        r"only available in a step with `group:`",
        "add `group: …` to the step, or use `rank` and `world_size`",
    ),
    (r"only available in `value:`", "use `rank`, or move the expression to `value:` of the tensor"),
    (
        r"is outside the world of (\d+)|is outside the world",
        "ranks start at 0; `world` sets their number",
    ),
    (
        r"already (?:a built-in name|an axis|the size|a variable|a group|an index)",
        "choose another name",
    ),
    (r"is already the index", "choose another name for the inner index"),
    (r"is listed twice", "keep one of them, or rename one"),
    (
        r"the mesh has .* ranks, but the world",
        "the product of the axis sizes must be the number of ranks",
    ),
    (r"a batch may contain only isend and irecv", "move it before or after the batch"),
    (r"batch has a single handle", "`batch_isend_irecv: {{ops: […], as: h}}`"),
    (r"a repeat may have at most|nested repeats and iterations", "use fewer repetitions"),
    (
        r"unknown step '(?:if|then|else|when)'",
        "write `- barrier:` and, below it, `ranks: rank == 0`",
    ),
    (r"unknown step", "`distsim explain` lists all operations"),
    (
        r"is not the same|same on every rank",
        "use variables, axis sizes and `world_size`, which are the same on all ranks",
    ),
    (r"division by zero", "check the value of the divisor on every rank"),
    (r"(?:number|result) is too large", "use a smaller number"),
    (r"at most \d+ are (?:allowed|simulated)|the limit is \d+|too large", "make it smaller"),
    (
        r"lists? a rank twice|is listed twice|contains an axis twice|name a rank twice",
        "name each once",
    ),
    (
        r"cannot be (?:added|subtracted|compared|divided|joined|chosen from)",
        "use the same kind of unit for both, such as `3 ms + 200 us`",
    ),
    (r"no quantity that there is", "multiply or divide a quantity by a plain number"),
    (r"has no entry in a per-rank mapping", "add the rank, or `else: …` for all other ranks"),
    (r"refers to itself through `like`", "give one of them a `shape`"),
    (r"have different lengths", "make the lists equally long, or give a `shape`"),
    (r"each after a dash", "write each on its own line after `- `"),
    (r"found an empty string", "write a value, or remove the key"),
)


_SINGLE_EQUALS = re.compile(r"(?<![=<>!])=(?!=)")


def _expression_remedy(text: str) -> str:
    """The likely mistake in a text that is no expression."""
    if _SINGLE_EQUALS.search(text):
        return f"use `==` to compare: write `{_SINGLE_EQUALS.sub('==', text)}`"
    if "&&" in text or "||" in text:
        return f"write `{text.replace('&&', 'and').replace('||', 'or')}`"
    if text.startswith("!") or " !" in text:
        return f"write `{re.sub(r'!(?!=)', 'not ', text)}`"
    if text.count("(") != text.count(")"):
        return _parenthesis_remedy(text)
    if has_units(text):
        return "this key needs a plain number: remove the unit"
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
    page = f"`distsim explain {name}` lists the fields"
    if message.startswith("unknown"):
        return f"remove it; {page}"
    if row is None:
        return page
    first = row.first_field
    if first is not None and "expected" in message and "`" + first not in message:
        info = next(i for key, i in row.model_fields.items() if (i.alias or key) == first)
        example = next(iter(info.examples or ()), "…")
        return f"for example `{name}: {inline_yaml(example)}`; {page}"
    return f"for example `{row.words.example.splitlines()[0].removeprefix('- ')}`; {page}"


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
        return f"remove it; {page} lists the valid keys"
    if key.example:
        return f"for example `{key.name}: {key.example}`; {page} shows more"
    return f"{page} describes the valid values"


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
