"""What a JSON Schema says of the texts in a file: names, expressions, quantities. Editors check them, and complete from the examples.

Patterns are a part of both ECMA 262 (which JSON Schema names) and Python; they take every text that the loader takes, and most of what
it refuses by form.
"""

from __future__ import annotations

from distsim import units
from distsim.fields import Schema
from distsim.quantities import EXAMPLES, EXPRESSION_LIKE

#: A name as Python has it, as far as a pattern can say so.
WORD = "[A-Za-z_\u0080-\uffff][A-Za-z0-9_\u0080-\uffff]*"
_NUMBER = r"[+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?"


def _grammar(units_text: str = "") -> str:
    """Operands with operators between them; whether parentheses close is beyond a pattern."""
    number = rf"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?{units_text}(?![A-Za-z0-9_.])"
    operand = rf"(?:{number}|(?!(?:and|or|if|else|not|in|is)\b){WORD}(?!\s*\())"
    before = r"(?:(?:[-+(]|not\b|(?:min|max)\s*\()\s*)*"
    operator = r"(?:\s*(?://|[*%,+-]|<=?|>=?|==|!=)\s*|\s*\b(?:and|or|if|else)\b\s*)"
    return rf"^\s*{before}{operand}(?:\s*\))*(?:{operator}{before}{operand}(?:\s*\))*)*\s*$"


def _text(pattern: str) -> Schema:
    return {"type": "string", "maxLength": 500, "pattern": pattern}


_TEXT_EXPRESSION = _text(_grammar())
_A_NUMBER: Schema = {"pattern": r"^[\s0-9.eE+-]*$"}
#: Names of the definitions of quantities, by what they measure.
KINDS = {"a duration": "duration", "a size": "size", "a bandwidth": "bandwidth", "floating-point operations": "flops",
         "a rate of floating-point operations": "flop_rate"}  # fmt: skip


def _quantity(kind: str, bare: bool = False) -> Schema:
    names = "|".join(sorted((name for name, unit in units.FAMILY_OF.items() if unit.kind == kind), key=len, reverse=True))
    plain: Schema = {"type": "string", "pattern": rf"^\s*{_NUMBER}\s*(?:{names})\s*$"}
    every = "|".join(sorted(units.FAMILY_OF, key=len, reverse=True))
    written: Schema = {**_text(_grammar(rf"(?:\s*(?:{every}))?")), "allOf": [{"pattern": EXPRESSION_LIKE}]}
    if bare:
        written = {**_text(_grammar(rf"(?:\s*(?:{every}))?")), "not": _A_NUMBER}
    return {"anyOf": [plain, written], "examples": [EXAMPLES[kind]]}


#: What fields refer to by name.
DEFINITIONS: dict[str, Schema] = {
    "name": {"type": "string", "pattern": f"^{WORD}$"},
    "reference": {"type": "string", "pattern": rf"^\s*{WORD}\s*(?:@.*\S.*)?$", "description": "A name, or name@index."},
    "condition": {**_TEXT_EXPRESSION, "not": _A_NUMBER, "description": "An expression that is true or false."},
    "formula": _TEXT_EXPRESSION,
    "expression": {"anyOf": [{"type": "number"}, {"type": "boolean"}, {"x-def": "formula"}],
                   "description": "A number, or an expression over rank, world_size, vars and the like."},
    **{word: _quantity(kind) for kind, word in KINDS.items()},
    "size_count": _quantity("a size", bare=True), "flops_count": _quantity("floating-point operations", bare=True),
}  # fmt: skip


def _named(name: str) -> Schema:
    return {"x-def": name}


def name_schema() -> Schema:
    """A name."""
    return _named("name")


def reference_schema() -> Schema:
    """A tensor or a handle: ``name``, or ``name@index``."""
    return _named("reference")


def text_expression() -> Schema:
    """A text that may be a condition."""
    return _named("condition")


def expression_schema() -> Schema:
    """A number, true or false, or an expression."""
    return _named("expression")


def quantity_schema(kind: str, bare: bool = False) -> Schema:
    """A quantity by its unit, or an expression with units; ``bare``: an expression that counts base units as well."""
    return _named(KINDS[kind] + "_count" * bare)


def per_rank_schema(one: Schema) -> Schema:
    """A value, or ``{0: …, 1: …, else: …}``."""
    keys = {"pattern": "^([0-9]+|else)$"}
    return {"anyOf": [one, {"type": "object", "minProperties": 1, "propertyNames": keys, "additionalProperties": one}]}


__all__ = [
    "DEFINITIONS", "KINDS", "WORD", "expression_schema", "name_schema", "per_rank_schema", "quantity_schema", "reference_schema",
    "text_expression",
]  # fmt: skip
