"""Expressions over named numbers: `rank + 1`, `min(pp_size - 1 - pp, 4)`, `stage == 0`.

The grammar is a part of Python's: numbers, ``True`` and ``False`` (also ``true``, ``false``),
names, ``+ - * // %``, comparisons, ``and or not``, ``a if c else b``, ``min`` and ``max``. Values
are ints, floats and booleans with exactly Python's meaning.

A name may also refer to a numpy array with one element per rank. The result is then an array of
what Python would return for each element. Lazy evaluation holds per element as well: a branch that
an element does not take is not evaluated for it.

Everything is bounded: the length of the text, the nesting, and the size of every number.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Callable, Mapping
from dataclasses import field
from functools import lru_cache
from typing import Any

from distsim.common.records import dataclass

ExpressionNumber = int | float | bool
ExpressionNames = Mapping[str, Any]
_Evaluator = Callable[[ExpressionNames], Any]

#: Integers up to here are exact as floats too (IEEE 754 binary64), so mixing both loses nothing.
MAX_NUMBER = 2**53
MAX_LENGTH = 500
MAX_DEPTH = 100
_MAX_COPIED_NAMES = 64
ALLOWED_SYNTAX = (
    "numbers, names, + - * // %, comparisons, and, or, not, `a if c else b`, min and max"
)
_BOOLEAN_WORDS = {"True": True, "False": False, "true": True, "false": False}


class ExpressionError(ValueError):
    """Text that is not an expression, or an expression without a value.

    ``offset`` counts characters of the text from 0.
    """

    def __init__(self, message: str, offset: int = 0) -> None:
        super().__init__(message, offset)
        self.message = message
        self.offset = offset

    def __str__(self) -> str:
        return self.message


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed expression; two expressions are equal if their texts are equal.

    ``source`` is the content of the file (a number, or a text without surrounding blanks).
    ``names`` are the names whose values are needed for evaluation, ``offsets`` the position where
    each name first occurs. ``constant`` is the value if there are no names, else None.
    """

    text: str
    source: int | float | bool | str
    names: frozenset[str] = field(compare=False)
    constant: int | float | bool | None = field(compare=False)
    offsets: tuple[tuple[str, int], ...] = field(compare=False, repr=False)
    _run: _Evaluator = field(compare=False, repr=False)

    def evaluate(self, env: ExpressionNames) -> Any:
        """The value for these names: a number, or an array if a name that affects it is an array.

        Raises ExpressionError.
        """
        if self.constant is not None:
            return self.constant
        if len(env) > _MAX_COPIED_NAMES:
            # Conditional branches copy the names that they see: keep only those in use.
            env = {name: env[name] for name in self.names if name in env}
        return self._run(env)

    def __reduce__(self) -> tuple[Any, ...]:
        return parse_expression, (self.source,)

    def __str__(self) -> str:
        return self.text


def parse_expression(value: object) -> Expression:
    """An expression from a number or a text.

    Raises ExpressionError that names the unsupported part and the supported syntax.
    """
    if isinstance(value, bool):
        return _constant_expression(value)
    if isinstance(value, int | float):
        _bounded_literal(value, 0)
        return _constant_expression(value)
    if isinstance(value, str):
        return _parse_text(value)
    raise ExpressionError(f"expected a number or an expression, found {type(value).__name__}")


def _constant_expression(value: ExpressionNumber) -> Expression:
    return Expression(repr(value), value, frozenset(), value, (), lambda env: value)


@lru_cache(maxsize=4096)
def _parse_text(source: str) -> Expression:
    text = source.strip()
    start = len(source) - len(source.lstrip())
    if not text:
        raise ExpressionError("expected an expression, found an empty text")
    if len(text) > MAX_LENGTH:
        raise ExpressionError(
            f"the expression has {len(text)} characters; at most {MAX_LENGTH} are allowed", start
        )
    builder = _EvaluatorBuilder(text, start)
    run = builder.build(parse_syntax_tree(text, start), 0)
    offsets = tuple(builder.offsets.items())
    constant = None if offsets else run({})
    return Expression(text, text, frozenset(builder.offsets), constant, offsets, run)


def parse_syntax_tree(text: str, start: int) -> ast.expr:
    """The syntax tree of a text.

    ``start`` is the position of this text in the file's text. Raises ExpressionError.
    """
    if "#" in text:
        raise ExpressionError(
            f"`#` is not allowed in an expression; an expression may contain {ALLOWED_SYNTAX}",
            start + text.index("#"),
        )
    try:
        return ast.parse(" ".join(text.split("\n")), mode="eval").body
    except SyntaxError as error:
        offset = min(max((error.offset or 1) - 1, 0), len(text) - 1)
        remedy = f"; an expression may contain {ALLOWED_SYNTAX}"
        raise ExpressionError(
            f"`{_shortened(text)}` is not an expression{remedy}", start + offset
        ) from None
    except (ValueError, RecursionError, MemoryError):
        raise ExpressionError(
            f"`{_shortened(text)}` is not an expression; an expression may contain "
            f"{ALLOWED_SYNTAX}",
            start,
        ) from None


def _shortened(text: str) -> str:
    shown = "".join(c if c.isprintable() else " " for c in text)
    return shown if len(shown) <= 60 else shown[:57] + "..."


_REFUSED_SYNTAX: dict[type[ast.AST], str] = {
    ast.Attribute: "an attribute",
    ast.Subscript: "a subscript",
    ast.Lambda: "a lambda",
    ast.Tuple: "a tuple",
    ast.List: "a list",
    ast.Dict: "a mapping",
    ast.Set: "a set",
    ast.ListComp: "a comprehension",
    ast.GeneratorExp: "a comprehension",
    ast.SetComp: "a comprehension",
    ast.DictComp: "a comprehension",
    ast.NamedExpr: "an assignment",
    ast.JoinedStr: "a string",
    ast.Starred: "a `*`",
    ast.Await: "await",
    ast.Yield: "yield",
    ast.YieldFrom: "yield",
}
_REFUSED_OPERATORS: dict[type[ast.AST], str] = {
    ast.Pow: "a power (`**`)",
    ast.Div: "a division with `/` (write `//`)",
    ast.MatMult: "`@`",
    ast.LShift: "`<<`",
    ast.RShift: "`>>`",
    ast.BitOr: "`|` (write `or`)",
    ast.BitAnd: "`&` (write `and`)",
    ast.BitXor: "`^`",
    ast.Invert: "`~`",
    ast.In: "`in`",
    ast.NotIn: "`not in`",
    ast.Is: "`is` (write `==`)",
    ast.IsNot: "`is not` (write `!=`)",
}


class _EvaluatorBuilder:
    """Compiles a syntax tree to nested closures, and collects the names in it."""

    def __init__(self, text: str, start: int) -> None:
        self.text = text
        self.start = start
        self.offsets: dict[str, int] = {}

    def at(self, node: ast.expr) -> int:
        return self.start + len(self.text.encode()[: node.col_offset].decode(errors="ignore"))

    def refuse(self, what: str, node: ast.expr) -> ExpressionError:
        return ExpressionError(
            f"{what} is not allowed in an expression; an expression may contain {ALLOWED_SYNTAX}",
            self.at(node),
        )

    def build(self, node: ast.expr, depth: int) -> _Evaluator:
        if depth > MAX_DEPTH:
            raise ExpressionError(f"the expression is nested deeper than {MAX_DEPTH}", self.start)
        if isinstance(node, ast.Constant):
            return self.constant(node)
        if isinstance(node, ast.Name):
            return self.name(node)
        if isinstance(node, ast.BinOp):
            return self.arithmetic(node, depth)
        if isinstance(node, ast.UnaryOp):
            return self.unary(node, depth)
        if isinstance(node, ast.Compare):
            return self.comparison(node, depth)
        if isinstance(node, ast.BoolOp):
            return _boolean_operation(
                isinstance(node.op, ast.And), [self.build(v, depth + 1) for v in node.values]
            )
        if isinstance(node, ast.IfExp):
            return _conditional(
                self.build(node.test, depth + 1),
                self.build(node.body, depth + 1),
                self.build(node.orelse, depth + 1),
            )
        if isinstance(node, ast.Call):
            return self.call(node, depth)
        what = _REFUSED_SYNTAX.get(type(node))
        text = f"`{_shortened(ast.unparse(node))}`"
        raise self.refuse(f"{what} ({text})" if what else text, node)

    def constant(self, node: ast.Constant) -> _Evaluator:
        value = node.value
        if isinstance(value, str | bytes):
            raise self.refuse("a string", node)
        if not isinstance(value, int | float):
            raise self.refuse(f"`{value!r}`" if value is not Ellipsis else "`...`", node)
        _bounded_literal(value, self.at(node))
        return lambda env: value

    def name(self, node: ast.Name) -> _Evaluator:
        name, offset = node.id, self.at(node)
        if name in _BOOLEAN_WORDS:
            value = _BOOLEAN_WORDS[name]
            return lambda env: value
        if name in ("min", "max"):
            raise ExpressionError(f"{name} is a function: write {name}(a, b)", offset)
        self.offsets.setdefault(name, offset)

        def run(env: ExpressionNames) -> Any:
            try:
                return env[name]
            except KeyError:
                raise ExpressionError(f"{name} has no value here", offset) from None

        return run

    def arithmetic(self, node: ast.BinOp, depth: int) -> _Evaluator:
        operator = _ARITHMETIC.get(type(node.op))
        if operator is None:
            raise self.refuse(_REFUSED_OPERATORS[type(node.op)], node)
        left, right = self.build(node.left, depth + 1), self.build(node.right, depth + 1)
        divides, offset = isinstance(node.op, ast.FloorDiv | ast.Mod), self.at(node)

        def run(env: ExpressionNames) -> Any:
            a, b = left(env), right(env)
            if type(a) is int and type(b) is int and (b or not divides):
                result = operator(a, b)
                if -MAX_NUMBER <= result <= MAX_NUMBER:
                    return result
            return _bounded_arithmetic(operator, divides, a, b, offset)

        return run

    def unary(self, node: ast.UnaryOp, depth: int) -> _Evaluator:
        inner = self.build(node.operand, depth + 1)
        if isinstance(node.op, ast.Not):
            return lambda env: _logical_not(inner(env))
        if isinstance(node.op, ast.USub):
            return lambda env: -_as_number(inner(env))
        if isinstance(node.op, ast.UAdd):
            return lambda env: +_as_number(inner(env))
        raise self.refuse(_REFUSED_OPERATORS[type(node.op)], node)

    def comparison(self, node: ast.Compare, depth: int) -> _Evaluator:
        compares = []
        for op in node.ops:
            if type(op) not in _COMPARISON:
                raise self.refuse(_REFUSED_OPERATORS[type(op)], node)
            compares.append(_COMPARISON[type(op)])
        terms = [self.build(term, depth + 1) for term in (node.left, *node.comparators)]
        if len(compares) == 1:
            compare, left, right = compares[0], terms[0], terms[1]
            return lambda env: compare(left(env), right(env))
        return lambda env: _comparison_chain(compares, terms[0](env), terms[1:], env)

    def call(self, node: ast.Call, depth: int) -> _Evaluator:
        name = (
            node.func.id if isinstance(node.func, ast.Name) else _shortened(ast.unparse(node.func))
        )
        if name not in ("min", "max"):
            raise self.refuse(f"a call of {name}", node)
        if node.keywords or len(node.args) < 2:
            raise ExpressionError(f"{name} takes two or more numbers: {name}(a, b)", self.at(node))
        return _min_or_max(name == "max", [self.build(arg, depth + 1) for arg in node.args])


def _bounded_literal(value: ExpressionNumber, offset: int) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        raise ExpressionError(f"expected a finite number, found {value}", offset)
    if isinstance(value, int) and abs(value) > MAX_NUMBER:
        raise ExpressionError(
            "the number is too large: integers go up to 2**53 (9007199254740992)", offset
        )


# --- arithmetic: a fast path for ints, checks for all other values ---

_ARITHMETIC: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Add: lambda a, b: a + b,
    ast.Sub: lambda a, b: a - b,
    ast.Mult: lambda a, b: a * b,
    ast.FloorDiv: lambda a, b: a // b,
    ast.Mod: lambda a, b: a % b,
}
_COMPARISON: dict[type[ast.AST], Callable[[Any, Any], Any]] = {
    ast.Eq: lambda a, b: a == b,
    ast.NotEq: lambda a, b: a != b,
    ast.Lt: lambda a, b: a < b,
    ast.LtE: lambda a, b: a <= b,
    ast.Gt: lambda a, b: a > b,
    ast.GtE: lambda a, b: a >= b,
}


def _is_array(value: Any) -> bool:
    return not isinstance(value, int | float)


def _as_number(value: Any) -> Any:
    """Booleans as integers: Python adds True and True to 2, but numpy's booleans stay booleans."""
    return value.astype("int64") if _is_array(value) and value.dtype.kind == "b" else value


def _bounded_arithmetic(
    operator: Callable[[Any, Any], Any], divides: bool, a: Any, b: Any, offset: int
) -> Any:
    a, b = _as_number(a), _as_number(b)
    if not (_is_array(a) or _is_array(b)):
        if divides and b == 0:
            raise ExpressionError("division by zero", offset)
        result = operator(a, b)
        too_large = (
            abs(result) > MAX_NUMBER if isinstance(result, int) else not math.isfinite(result)
        )
    else:
        result, too_large = _array_arithmetic(operator, divides, a, b, offset)
    if too_large:
        raise ExpressionError(
            "a result is too large: integers go up to 2**53, other numbers must be finite", offset
        )
    return result


def _array_arithmetic(
    operator: Callable[[Any, Any], Any], divides: bool, a: Any, b: Any, offset: int
) -> tuple[Any, bool]:
    import numpy as np

    if divides and np.any(b == 0):
        raise ExpressionError("division by zero", offset)
    with np.errstate(all="ignore"):
        result = operator(a, b)
        if result.dtype.kind == "f":
            return result, not bool(np.isfinite(result).all())
        # Integer arrays overflow silently, so the size is checked on a float result.
        approximate = operator(np.asarray(a, "float64"), np.asarray(b, "float64"))
    return result, bool((np.abs(approximate) > MAX_NUMBER).any())


# --- lazy evaluation as in Python, for each element of an array ---


def _logical_not(value: Any) -> Any:
    return value == 0 if _is_array(value) else not value


def _masked_names(env: ExpressionNames, mask: Any) -> dict[str, Any]:
    """The names, with arrays reduced to the elements that ``mask`` selects."""
    return {name: value[mask] if _is_array(value) else value for name, value in env.items()}


def _merge_branches(mask: Any, chosen: Any, other: Any) -> Any:
    """An array of ``chosen`` where the mask is true, and ``other`` elsewhere.

    Both inputs contain only the values for their own elements.
    """
    import numpy as np

    kind = np.result_type(np.asarray(chosen).dtype, np.asarray(other).dtype)
    result = np.empty(mask.shape, kind)
    result[mask], result[~mask] = chosen, other
    return result


def _conditional(test: _Evaluator, yes: _Evaluator, no: _Evaluator) -> _Evaluator:
    def run(env: ExpressionNames) -> Any:
        condition = test(env)
        if not _is_array(condition):
            return yes(env) if condition else no(env)
        mask = condition != 0
        if mask.all():
            return yes(env)
        if not mask.any():
            return no(env)
        return _merge_branches(mask, yes(_masked_names(env, mask)), no(_masked_names(env, ~mask)))

    return run


def _boolean_operation(is_and: bool, terms: list[_Evaluator]) -> _Evaluator:
    """``and`` returns its first false operand, ``or`` its first true one; otherwise the last."""

    def run(env: ExpressionNames) -> Any:
        return step(env, 0)

    def step(env: ExpressionNames, k: int) -> Any:
        value = terms[k](env)
        if k == len(terms) - 1:
            return value
        if not _is_array(value):
            return step(env, k + 1) if bool(value) is is_and else value
        # Elements that are undecided after this operand continue with the next one.
        undecided = (value != 0) == is_and
        if not undecided.any():
            return value
        if undecided.all():
            return step(env, k + 1)
        later = step(_masked_names(env, undecided), k + 1)
        return _merge_branches(undecided, later, value[~undecided])

    return run


def _comparison_chain(
    compares: list[Callable[[Any, Any], Any]],
    left: Any,
    terms: list[_Evaluator],
    env: ExpressionNames,
) -> Any:
    """``a < b < c``: evaluates each term once, and only while all earlier comparisons hold."""
    right = terms[0](env)
    result = compares[0](left, right)
    if len(compares) == 1:
        return result
    if not _is_array(result):
        return _comparison_chain(compares[1:], right, terms[1:], env) if result else False
    if not result.any():
        return result
    left = right[result] if _is_array(right) else right
    rest = _comparison_chain(compares[1:], left, terms[1:], _masked_names(env, result))
    return _merge_branches(result, rest, False)


def _min_or_max(largest: bool, terms: list[_Evaluator]) -> _Evaluator:
    """The first of the largest (or smallest) operands, as in Python."""

    def run(env: ExpressionNames) -> Any:
        best = terms[0](env)
        for term in terms[1:]:
            value = term(env)
            better = value > best if largest else value < best
            if not _is_array(better):
                best = value if better else best
            else:
                import numpy as np

                best = np.where(better, value, best)
        return best

    return run
