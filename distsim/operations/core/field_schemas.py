"""What a JSON Schema says of the texts in a file: names, expressions, quantities. Editors check
them, and complete from the examples.

Patterns are a part of both ECMA 262 (which JSON Schema names) and Python; they take every text that
the loader takes, and most of what it refuses by form.
"""

from __future__ import annotations

from distsim.common import units
from distsim.common.field_parsing import FieldSchema
from distsim.common.quantities import EXAMPLE_BY_KIND, EXPRESSION_LIKE

#: A name as Python has it, as far as a pattern can say so.
NAME_PATTERN = "[A-Za-z_\u0080-\uffff][A-Za-z0-9_\u0080-\uffff]*"
_NUMBER_PATTERN = r"[+]?(?:[0-9]{1,30}(?:\.[0-9]{0,30})?|\.[0-9]{1,30})(?:[eE][+-]?[0-9]{1,3})?"


def _expression_pattern(units_text: str = "") -> str:
    """Operands with operators between them; whether parentheses close is beyond a pattern."""
    number = rf"(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?{units_text}(?![A-Za-z0-9_.])"
    operand = rf"(?:{number}|(?!(?:and|or|if|else|not|in|is)\b){NAME_PATTERN}(?!\s*\())"
    before = r"(?:(?:[-+(]|not\b|(?:min|max)\s*\()\s*)*"
    operator = r"(?:\s*(?://|[*%,+-]|<=?|>=?|==|!=)\s*|\s*\b(?:and|or|if|else)\b\s*)"
    return rf"^\s*{before}{operand}(?:\s*\))*(?:{operator}{before}{operand}(?:\s*\))*)*\s*$"


def _text_schema(pattern: str) -> FieldSchema:
    return {"type": "string", "maxLength": 500, "pattern": pattern}


_FORMULA_SCHEMA = _text_schema(_expression_pattern())
_BARE_NUMBER_SCHEMA: FieldSchema = {"pattern": r"^[\s0-9.eE+-]*$"}
#: Names of the definitions of quantities, by what they measure.
QUANTITY_DEFINITIONS = {
    "a duration": "duration",
    "a size": "size",
    "a bandwidth": "bandwidth",
    "floating-point operations": "flops",
    "a rate of floating-point operations": "flop_rate",
}


def _quantity_definition(kind: str, bare: bool = False) -> FieldSchema:
    names = "|".join(
        sorted(
            (name for name, unit in units.UNIT_BY_NAME.items() if unit.kind == kind),
            key=len,
            reverse=True,
        )
    )
    plain: FieldSchema = {"type": "string", "pattern": rf"^\s*{_NUMBER_PATTERN}\s*(?:{names})\s*$"}
    every = "|".join(sorted(units.UNIT_BY_NAME, key=len, reverse=True))
    written: FieldSchema = {
        **_text_schema(_expression_pattern(rf"(?:\s*(?:{every}))?")),
        "allOf": [{"pattern": EXPRESSION_LIKE}],
    }
    if bare:
        written = {
            **_text_schema(_expression_pattern(rf"(?:\s*(?:{every}))?")),
            "not": _BARE_NUMBER_SCHEMA,
        }
    return {"anyOf": [plain, written], "examples": [EXAMPLE_BY_KIND[kind]]}


#: What fields refer to by name.
SCHEMA_DEFINITIONS: dict[str, FieldSchema] = {
    "name": {"type": "string", "pattern": f"^{NAME_PATTERN}$"},
    "reference": {
        "type": "string",
        "pattern": rf"^\s*{NAME_PATTERN}\s*(?:@.*\S.*)?$",
        "description": "A name, or name@index.",
    },
    "condition": {
        **_FORMULA_SCHEMA,
        "not": _BARE_NUMBER_SCHEMA,
        "description": "An expression that is true or false.",
    },
    "formula": _FORMULA_SCHEMA,
    "expression": {
        "anyOf": [{"type": "number"}, {"type": "boolean"}, {"x-def": "formula"}],
        "description": (
            "A number, or an expression over rank, world_size, variables and similar names."
        ),
    },
    **{word: _quantity_definition(kind) for kind, word in QUANTITY_DEFINITIONS.items()},
    "size_count": _quantity_definition("a size", bare=True),
    "flops_count": _quantity_definition("floating-point operations", bare=True),
}


def _definition_reference(name: str) -> FieldSchema:
    return {"x-def": name}


def name_schema() -> FieldSchema:
    """A name."""
    return _definition_reference("name")


def reference_schema() -> FieldSchema:
    """A tensor or a handle: ``name``, or ``name@index``."""
    return _definition_reference("reference")


def condition_schema() -> FieldSchema:
    """A text that may be a condition."""
    return _definition_reference("condition")


def expression_schema() -> FieldSchema:
    """A number, true or false, or an expression."""
    return _definition_reference("expression")


def quantity_schema(kind: str, bare: bool = False) -> FieldSchema:
    """A quantity by its unit, or an expression with units; ``bare``: an expression that counts base
    units as well.
    """
    return _definition_reference(QUANTITY_DEFINITIONS[kind] + "_count" * bare)


def per_rank_schema(one: FieldSchema) -> FieldSchema:
    """A value, or ``{0: …, 1: …, else: …}``."""
    keys = {"pattern": "^([0-9]+|else)$"}
    return {
        "anyOf": [
            one,
            {
                "type": "object",
                "minProperties": 1,
                "propertyNames": keys,
                "additionalProperties": one,
            },
        ]
    }


__all__ = [
    "SCHEMA_DEFINITIONS",
    "QUANTITY_DEFINITIONS",
    "NAME_PATTERN",
    "expression_schema",
    "name_schema",
    "per_rank_schema",
    "quantity_schema",
    "reference_schema",
    "condition_schema",
]
