"""Change the text of an expression: other names, fewer operands.

Expressions are a part of Python's grammar, so Python's own syntax tree is changed and written out
again. Nothing is evaluated here. A text that Python cannot parse yields no change.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator

_OPPOSITE: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Lt: ast.GtE,
    ast.GtE: ast.Lt,
    ast.Gt: ast.LtE,
    ast.LtE: ast.Gt,
}


def with_name_replaced(text: str, name: str, replacement: str) -> str:
    """The expression with another expression in place of a name; the same text if it fails."""
    tree, value = _parsed(text), _parsed(replacement)
    if tree is None or value is None:
        return text

    class Replacement(ast.NodeTransformer):
        def visit_Name(self, node: ast.Name) -> ast.expr:
            assert value is not None
            return value if node.id == name else node

    return ast.unparse(Replacement().visit(tree))


def name_order(text: str) -> list[str]:
    """The names of an expression in the order of their first use."""
    tree = _parsed(text)
    if tree is None:
        return []
    nodes = sorted(_names_of(tree), key=lambda node: (node.lineno, node.col_offset))
    return list(dict.fromkeys(node.id for node in nodes))


def conjuncts(condition: str) -> list[str]:
    """The conditions that an `and` joins; the condition alone if it is no `and`."""
    tree = _parsed(condition)
    if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And):
        return [_operand_text(value) for value in tree.values]
    return [condition]


def without_names(condition: str, names: Collection[str]) -> str:
    """The condition without the operands of `and`, `or` and `not` that use one of the names.

    Empty if nothing remains.
    """
    tree = _parsed(condition)
    kept = None if tree is None else _without(tree, names)
    return "" if kept is None else ast.unparse(kept)


def negated(condition: str) -> str:
    """The opposite of a condition, with `!=` in place of `not … ==`; empty if it fails."""
    tree = _parsed(condition)
    return "" if tree is None else ast.unparse(_negated(tree))


def _without(tree: ast.expr, names: Collection[str]) -> ast.expr | None:
    if isinstance(tree, ast.BoolOp):
        values = [kept for value in tree.values if (kept := _without(value, names)) is not None]
        if len(values) < 2:
            return values[0] if values else None
        return ast.BoolOp(tree.op, values)
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
        kept = _without(tree.operand, names)
        return None if kept is None else _negated(kept)
    uses_name = any(node.id in names for node in _names_of(tree))
    return None if uses_name else tree


def _negated(tree: ast.expr) -> ast.expr:
    if isinstance(tree, ast.UnaryOp) and isinstance(tree.op, ast.Not):
        return tree.operand
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and type(tree.ops[0]) in _OPPOSITE:
        opposite = _OPPOSITE[type(tree.ops[0])]()
        return ast.Compare(tree.left, [opposite], tree.comparators)
    return ast.UnaryOp(ast.Not(), tree)


def _operand_text(tree: ast.expr) -> str:
    text = ast.unparse(tree)
    return f"({text})" if isinstance(tree, ast.BoolOp) else text


def _names_of(tree: ast.expr) -> Iterator[ast.Name]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Name):
            yield node


def _parsed(text: str) -> ast.expr | None:
    try:
        return ast.parse(text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


__all__ = ["conjuncts", "name_order", "negated", "with_name_replaced", "without_names"]
