"""Mutants of a module: the same code with one small thing changed, which some test ought to notice.

What is changed: comparisons (to their neighbour and to their opposite), arithmetic, `and` and `or`,
negations, conditions that are a bare name or call, numbers, True and False, words that are compared
with, `min` and `max`, `any` and `all`, what is returned, `break` and `continue`; and calls, raises
and additions in place are left out. Annotations, docstrings and the texts of messages stay as they
are, and what no answer can depend on: `strict` of a `zip`, which is an assertion, and None for
False.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import CodeType

COMPARED: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
    ast.BitXor: ast.BitOr,
}
SWAPPED = {"min": "max", "max": "min", "any": "all", "all": "any"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
#: Conditions of these kinds are changed in their own parts.
TOLD_APART = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)


@dataclass
class Change:
    """Do it in place, undo it. ``node`` tells the lines; ``text`` the before and after."""

    node: ast.AST
    text: str
    do: Callable[[], None]
    undo: Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """``name``: stable when lines move. ``function``: the outermost function it lies in, None where
    the module itself changes.
    """

    path: str
    name: str
    function: str | None
    first: int
    last: int
    tree: ast.Module
    change: Change

    @classmethod
    def unchanged(cls, path: Path, root: Path) -> Mutant:
        """A mutant that is none, to try the trial itself."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nothing = Change(tree, "nothing", lambda: None, lambda: None)
        return cls(str(path.relative_to(root)), "nothing", None, 1, 1, tree, nothing)

    def code(self, file: str) -> CodeType:
        """The whole module with the change in it, compiled."""
        self.change.do()
        try:
            return compile(self.tree, file, "exec", dont_inherit=True)
        finally:
            self.change.undo()

    def __str__(self) -> str:
        return f"{self.path}:{self.first} {self.name}"


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    """All mutants of a file, in its order; those of one function and one text are numbered."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name, seen = str(path.relative_to(root)), Counter[str]()
    for function, qualified, change in _changes(tree, (), None):
        base = f"{qualified}: {change.text}"
        seen[base] += 1
        label = base if seen[base] == 1 else f"{base} [{seen[base]}]"
        first = getattr(change.node, "lineno", 1)
        yield Mutant(
            name,
            label,
            function,
            first,
            getattr(change.node, "end_lineno", None) or first,
            tree,
            change,
        )


def drawn(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """So many of them, in the order of their lines; all where there are no more. Another seed draws
    others.
    """
    if len(mutants) <= count:
        return mutants
    return sorted(Random(seed).sample(mutants, count), key=lambda mutant: mutant.first)


def shares(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """How many of ``count`` mutants each part gets: in proportion to its size, and at least one."""
    total = sum(sizes.values())
    wanted = {name: max(1.0, count * size / total) for name, size in sizes.items()}
    given = {name: int(share) for name, share in wanted.items()}
    for _ in range(sum(given.values()), count):
        given[max(given, key=lambda name: wanted[name] - given[name])] += 1
    for _ in range(max(count, len(given)), sum(given.values())):
        several = [name for name, number in given.items() if number > 1]
        given[min(several, key=lambda name: wanted[name] - given[name])] -= 1
    return given


def _changes(
    node: ast.AST, names: tuple[str, ...], function: str | None
) -> Iterator[tuple[str | None, str, Change]]:
    """(outermost function, qualified name, change) of what lies under a node."""
    where = ".".join(names) or "module"
    for field, value in ast.iter_fields(node):
        if field in (
            "annotation",
            "returns",
            "type_comment",
            "type_params",
            "decorator_list",
        ) or _is_silent(node, field):
            continue
        for place, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST) or _is_docstring(node, field, place, child):
                continue
            inner, outer = names, function
            if isinstance(child, (*FUNCTION, ast.ClassDef)):
                inner = (*names, child.name)
            if isinstance(node, FUNCTION) and field == "body" and function is None:
                outer = where  # defaults and decorators run when the module is loaded, the body when it is called
            yield from ((outer, where, change) for change in _at(node, field, place, child))
            yield from _changes(child, inner, outer)


def _is_silent(node: ast.AST, field: str) -> bool:
    """Types for the checker, texts of errors and of f-strings."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    return isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)) or (
        isinstance(node, ast.Raise) and field in ("exc", "cause")
    )


def _is_docstring(node: ast.AST, field: str, place: int | None, child: ast.AST) -> bool:
    bodies = (
        isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and field == "body" and place == 0
    )
    return bodies and isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)


def _at(parent: ast.AST, field: str, place: int | None, node: ast.AST) -> Iterator[Change]:
    for new in _others(parent, field, node):
        yield _replaced(parent, field, place, node, new)


def _replaced(
    parent: ast.AST, field: str, place: int | None, node: ast.AST, new: ast.AST
) -> Change:
    ast.fix_missing_locations(ast.copy_location(new, node))

    def put(what: ast.AST) -> None:
        if place is None:
            setattr(parent, field, what)
        else:
            getattr(parent, field)[place] = what

    return Change(node, f"{_short(node)} -> {_short(new)}", lambda: put(new), lambda: put(node))


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:60]} … {text[-25:]}"


def _others(parent: ast.AST, field: str, node: ast.AST) -> Iterator[ast.AST]:
    """What may stand in a node's place."""
    yield from _expressions(node)
    yield from _statements(node)
    is_condition = (
        field == "test" or field == "ifs" or (isinstance(parent, ast.BoolOp) and field == "values")
    )
    if is_condition and isinstance(node, ast.expr) and not isinstance(node, TOLD_APART):
        yield ast.UnaryOp(ast.Not(), node)
    if (
        isinstance(parent, ast.Compare)
        and isinstance(node, ast.Constant)
        and isinstance(node.value, str)
    ):
        yield ast.Constant(f"{node.value}?")


def _expressions(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in COMPARED[type(op)]:
                    yield ast.Compare(
                        node.left, [*ops[:i], other(), *ops[i + 1 :]], node.comparators
                    )
        case ast.BinOp(op=op) if type(op) in COMPUTED and not _is_text(node):
            yield ast.BinOp(node.left, COMPUTED[type(op)](), node.right)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in SWAPPED:
            yield ast.Call(ast.Name(SWAPPED[name], ast.Load()), node.args, node.keywords)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, (ast.JoinedStr, ast.Constant))
        and not isinstance(getattr(side, "value", ""), (int, float))
        for side in (node.left, node.right)
    )


def _statements(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Return(value=ast.expr() as value) if not (
            isinstance(value, ast.Constant) and any(value.value is v for v in (None, False))
        ):
            yield ast.Return(ast.Constant(None))
        case ast.Expr(value=ast.Call()) | ast.Raise() | ast.AugAssign() | ast.Delete():
            yield ast.Pass()
        case ast.Break():
            yield ast.Continue()
        case ast.Continue():
            yield ast.Break()
    if isinstance(node, ast.AugAssign) and type(node.op) in COMPUTED:
        yield ast.AugAssign(node.target, COMPUTED[type(node.op)](), node.value)
