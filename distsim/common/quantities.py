"""Expressions with units: `(rank + 1) * 1 ms`, `4 B * width * width`, `2 * 25 GB/s`.

A number with its unit is a quantity; otherwise the grammar is that of
`distsim.common.expressions`. Before parsing, each quantity is replaced with a placeholder letter,
so that the expression parser needs no units. Units are checked before anything is evaluated: only
quantities of the same kind are added and compared, and the result must be of the kind that the
field takes. A variable may hold a quantity too. Values are in the base units of
`distsim.common.units`: ns, bytes, bytes per ns, FLOP, FLOP per ns.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Mapping
from dataclasses import field
from fractions import Fraction
from typing import Any

from distsim.common import units
from distsim.common.expressions import (
    Expression,
    ExpressionError,
    ExpressionNames,
    parse_expression,
    parse_syntax_tree,
)
from distsim.common.records import dataclass

#: An example for each kind of quantity; the keys are the wording used in messages.
EXAMPLE_BY_KIND = {
    "a duration": "3 ms",
    "a size": "4 MiB",
    "a bandwidth": "50 GB/s",
    "floating-point operations": "2 TFLOP",
    "a rate of floating-point operations": "989 TFLOP/s",
}
ANY_QUANTITY = "a number or a quantity"
_PARSER_BY_KIND: dict[str, Callable[[object], int | float]] = {
    "a duration": units.parse_duration_ns,
    "a size": units.parse_size_bytes,
    "a bandwidth": units.parse_bandwidth,
    "floating-point operations": units.parse_flops,
    "a rate of floating-point operations": units.parse_flop_rate,
}
#: One number with its unit. There are no compound quantities (size / duration): `/` is no operator.
_QUANTITY_LITERAL = re.compile(
    r"(?<![\w.])((?:\d+(?:\.\d*)?|\.\d+)(?:[eE][+-]?\d+)?)\s*("
    + "|".join(sorted(map(re.escape, units.UNIT_BY_NAME), key=len, reverse=True))
    + r")(?![\w(]|/\w)",
    re.ASCII,
)
#: A text that contains an operator or a condition, or that is a single name, is meant as an
#: expression rather than as one quantity.
EXPRESSION_LIKE = (
    r"[*%(<>]|//|\s/|/\s|[^eE\s(]\s*[+-]|\bif\b"
    r"|^\s*[A-Za-z_\u0080-\uffff][A-Za-z0-9_\u0080-\uffff]*\s*$"
)
#: First of the letters that replace quantities in the parsed text. Each replacement is padded to
#: the quantity's length, so that offsets in error messages stay right.
_FIRST_PLACEHOLDER = 0x4E00
#: A quantity's kind; None for a plain number; `_ZERO_KIND` for zero, which fits every kind.
QuantityKind = str | None
_ZERO_KIND = ""


@dataclass(frozen=True, slots=True)
class QuantityExpression(Expression):
    """An expression with units.

    ``kind`` is the required kind of the result (a key of `EXAMPLE_BY_KIND`, or `ANY_QUANTITY`);
    values are in its base unit.
    """

    kind: str = field(default=ANY_QUANTITY, kw_only=True)
    _tree: ast.expr = field(compare=False, repr=False, kw_only=True)
    _kinds: Mapping[str, str] = field(compare=False, repr=False, kw_only=True)
    _start: int = field(default=0, compare=False, repr=False, kw_only=True)
    _written: str = field(default="", compare=False, repr=False, kw_only=True)

    def inferred_kind(self, known: Mapping[str, QuantityKind]) -> QuantityKind:
        """The kind of the result, given the kinds of the names (default: a plain number).

        Raises ExpressionError if units don't fit.
        """
        return _UnitChecker({**known, **self._kinds}, self._written, self._start).of(self._tree)

    def check(self, known: Mapping[str, QuantityKind]) -> None:
        """Raise ExpressionError unless the result is of the required kind."""
        found = self.inferred_kind(known)
        if self.kind not in (ANY_QUANTITY, found) and found != _ZERO_KIND:
            raise ExpressionError(
                f"expected {self.kind}, such as `{EXAMPLE_BY_KIND[self.kind]}`, "
                f"but {self.text} is {_kind_text(found)}",
                self._start,
            )

    def __reduce__(self) -> tuple[object, ...]:
        return parse_quantity, (self.source, self.kind)


def quantity_kind(value: Expression, known: Mapping[str, QuantityKind]) -> QuantityKind:
    """The kind of an expression's result, given the kinds of its names.

    Raises ExpressionError if units don't fit.
    """
    if isinstance(value, QuantityExpression):
        return value.inferred_kind(known)
    if not any(known.get(name) for name in value.names):
        return _ZERO_KIND if value.constant == 0 and not isinstance(value.constant, bool) else None
    return _UnitChecker(known, value.text, 0).of(parse_syntax_tree(value.text, 0))


def has_units(text: str) -> bool:
    """Whether a text contains a number with a unit."""
    return _QUANTITY_LITERAL.search(text) is not None


def parse_quantity(value: object, kind: str = ANY_QUANTITY) -> QuantityExpression:
    """Parse an expression with units.

    If the expression has no names, its units are checked at once; otherwise the caller must call
    `QuantityExpression.check`. Raises ExpressionError with the position in the text.
    """
    if not isinstance(value, str):
        raise ExpressionError(f"expected {kind} with a unit, found {type(value).__name__}")
    source = value.strip()
    start = len(value) - len(value.lstrip())
    letters, kinds, text = _replace_quantities(source)
    try:
        inner = parse_expression(text)
        found = parse_syntax_tree(text, start)
    except ExpressionError as error:
        raise ExpressionError(_restore_message(error.message, source), error.offset) from None
    offsets = tuple((name, start + offset) for name, offset in inner.offsets if name not in letters)
    names = frozenset(name for name, _ in offsets)
    made = QuantityExpression(
        source,
        source,
        names,
        None if names else _evaluate_replaced(inner, letters, {}),
        offsets,
        lambda env: _evaluate_replaced(inner, letters, env),
        kind=kind,
        _tree=found,
        _kinds=kinds,
        _start=start,
        _written=text,
    )
    if not names:
        made.check({})
    return made


def _evaluate_replaced(
    inner: Expression, letters: Mapping[str, int | float], env: ExpressionNames
) -> Any:
    return inner.evaluate({**env, **letters})


def _replace_quantities(source: str) -> tuple[dict[str, int | float], dict[str, str], str]:
    """Replace each quantity of a text with a placeholder letter.

    Returns the values by letter, the kinds by letter, and the text with the letters.
    """
    letters: dict[str, int | float] = {}
    kinds: dict[str, str] = {}

    def letter(match: re.Match[str]) -> str:
        name = chr(_FIRST_PLACEHOLDER + len(letters))
        factor = units.UNIT_BY_NAME[match[2]]
        number = Fraction(match[1]) * factor.factor
        letters[name] = int(number) if number.denominator == 1 else float(number)
        kinds[name] = factor.kind
        return name.ljust(len(match[0]))

    return letters, kinds, _QUANTITY_LITERAL.sub(letter, source)


def _restore_message(message: str, source: str) -> str:
    """The message with the original quantities instead of their placeholder letters."""
    found = iter(_QUANTITY_LITERAL.finditer(source))
    return re.sub(r"[\u4e00-\u4fff] *", lambda match: next(found, [match[0]])[0], message)


def _kind_text(kind: QuantityKind) -> str:
    return kind or "a plain number"


class _UnitChecker:
    """Infers the kind of each part of an expression; raises ExpressionError if units don't fit."""

    def __init__(self, known: Mapping[str, QuantityKind], text: str, start: int) -> None:
        self.known, self.text, self.start = known, text, start

    def of(self, node: ast.expr) -> QuantityKind:
        if isinstance(node, ast.Constant):
            return _ZERO_KIND if node.value == 0 and not isinstance(node.value, bool) else None
        if isinstance(node, ast.Name):
            return self.known.get(node.id)
        if isinstance(node, ast.BinOp):
            return self.operation(node)
        if isinstance(node, ast.UnaryOp):
            inner = self.of(node.operand)
            return None if isinstance(node.op, ast.Not) else inner
        if isinstance(node, ast.Compare):
            self.equal([node.left, *node.comparators], "compared", node)
            return None
        if isinstance(node, ast.IfExp):
            self.of(node.test)
            return self.equal([node.body, node.orelse], "chosen from", node)
        if isinstance(node, ast.BoolOp):
            return self.equal(node.values, "joined", node)
        return self.equal(node.args, "compared", node) if isinstance(node, ast.Call) else None

    def equal(self, nodes: list[ast.expr], what: str, whole: ast.expr) -> QuantityKind:
        """The kind that all these parts share; zeros fit every kind."""
        kinds = [self.of(node) for node in nodes]
        real = [kind for kind in kinds if kind != _ZERO_KIND]
        if any(kind != real[0] for kind in real):
            other = next(kind for kind in real if kind != real[0])
            raise self.wrong(
                f"{_kind_text(real[0])} and {_kind_text(other)} cannot be {what}", whole
            )
        return real[0] if real else _ZERO_KIND

    def operation(self, node: ast.BinOp) -> QuantityKind:
        if isinstance(node.op, ast.Add | ast.Sub):
            return self.equal(
                [node.left, node.right],
                "added" if isinstance(node.op, ast.Add) else "subtracted",
                node,
            )
        left, right = self.of(node.left), self.of(node.right)
        if isinstance(node.op, ast.Mult):
            if left and right:
                raise self.wrong(
                    f"{left} times {right} is not a quantity; multiply by a number", node
                )
            return left or right
        if isinstance(node.op, ast.Mod):
            return self.equal([node.left, node.right], "divided", node)
        if right and left != right:  # 7 // 3 ms
            raise self.wrong(f"{_kind_text(left)} divided by {right} is not a quantity", node)
        return None if right else left

    def wrong(self, message: str, node: ast.expr) -> ExpressionError:
        return ExpressionError(
            message, self.start + len(self.text.encode()[: node.col_offset].decode(errors="ignore"))
        )


def read_quantity(
    value: object, kind: str, names: Mapping[str, object], kinds: Mapping[str, QuantityKind]
) -> int | float:
    """The value of a quantity, or of an expression over names that are equal on all ranks.

    The value is in the base unit and not rounded. If the text is not meant as an expression, the
    ValueError is the one of the plain parser.
    """
    plain = _PARSER_BY_KIND[kind]
    if not isinstance(value, str):
        return plain(value)
    try:
        return plain(value)
    except ValueError as error:
        found = parse_quantity_expression(value, kind, error)
    unknown = [name for name in found.names if name not in names]
    if unknown:
        known = ", ".join(names) or "no names"
        raise ExpressionError(
            f"{unknown[0]} is not a number with one value for all ranks; known names: {known}",
            dict(found.offsets)[unknown[0]],
        )
    found.check(kinds)
    return bounded_quantity(found.evaluate(dict(names)), kind, value)


def parse_quantity_expression(value: str, kind: str, plain_error: ValueError) -> QuantityExpression:
    """An expression with units.

    Raises ``plain_error``, the plain parser's error, if the text was meant as a plain quantity.
    """
    if re.search(EXPRESSION_LIKE, value) is None:
        raise plain_error from None
    return parse_quantity(value, kind)


def bounded_quantity(value: object, kind: str, text: object) -> int | float:
    """``value`` if it is a number from 0 to 2**62 base units; raises ValueError otherwise."""
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise ValueError(f"expected {kind} of zero or more, and {text} is {value}")
    if value > units.MAX_QUANTITY:
        raise ValueError(f"expected {kind} that fits 62 bits in its smallest unit, found {text}")
    return value


__all__ = [
    "ANY_QUANTITY",
    "EXAMPLE_BY_KIND",
    "EXPRESSION_LIKE",
    "QuantityKind",
    "QuantityExpression",
    "bounded_quantity",
    "parse_quantity_expression",
    "has_units",
    "quantity_kind",
    "parse_quantity",
    "read_quantity",
]
