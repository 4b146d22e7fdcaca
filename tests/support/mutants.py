"""Mutants of a module: copies of its code with one small change, which a test should detect.

Mutations replace:

- a comparison by its neighbour (`<` by `<=`) and by its opposite (`<` by `>=`),
- arithmetic operators, `and` by `or`, `min` by `max`, `any` by `all`, `break` by `continue`, each
  also in the other direction,
- a number by the next one, True by False, a string in a comparison by another one,
- a condition that is a bare name or a call by its negation, and a negation by its operand,
- a returned value by None,
- a statement that is only a call, a raise, a `del` or an augmented assignment by `pass`.

Annotations, docstrings and the texts of messages do not change. Neither does the `strict` of a
`zip`, which is an assertion, nor a returned False or None.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from types import CodeType

COMPARISON_MUTATIONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
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
OPERATOR_MUTATIONS: dict[type[ast.operator], type[ast.operator]] = {
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
CALL_MUTATIONS = {"min": "max", "max": "min", "any": "all", "all": "any"}
FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)
#: These conditions have mutations of their own, so they are not negated as a whole.
MUTATED_SEPARATELY = (ast.Compare, ast.BoolOp, ast.UnaryOp, ast.Constant)


@dataclass
class Change:
    """One change of a syntax tree.

    ``do`` makes it in place, ``undo`` reverts it. ``node`` is the node that it replaces. ``text``
    shows the code before and after.
    """

    node: ast.AST
    text: str
    do: Callable[[], None]
    undo: Callable[[], None]


@dataclass(frozen=True)
class Mutant:
    """A file with one change.

    ``name`` stays the same if lines move. ``function`` is the outermost function around the change,
    or None if the change affects code that runs at import.
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
        """A mutant without a change, as a control."""
        tree = ast.parse(path.read_text(encoding="utf-8"))
        nothing = Change(tree, "nothing", lambda: None, lambda: None)
        return cls(str(path.relative_to(root)), "nothing", None, 1, 1, tree, nothing)

    def code(self, file: str) -> CodeType:
        """The compiled module with the change."""
        self.change.do()
        try:
            return compile(self.tree, file, "exec", dont_inherit=True)
        finally:
            self.change.undo()

    def __str__(self) -> str:
        return f"{self.path}:{self.first} {self.name}"


def mutants_of(path: Path, root: Path) -> Iterator[Mutant]:
    """All mutants of a file in the order of the code.

    Mutants with the same function and text are numbered.
    """
    tree = ast.parse(path.read_text(encoding="utf-8"))
    name, name_counts = str(path.relative_to(root)), Counter[str]()
    for function, qualified, change in _changes(tree, (), None):
        base = f"{qualified}: {change.text}"
        name_counts[base] += 1
        label = base if name_counts[base] == 1 else f"{base} [{name_counts[base]}]"
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


def draw_sample(mutants: list[Mutant], count: int, seed: int) -> list[Mutant]:
    """A random sample in the order of lines, or all mutants if there are at most ``count``."""
    if len(mutants) <= count:
        return mutants
    return sorted(Random(seed).sample(mutants, count), key=lambda mutant: mutant.first)


def counts_by_size(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Distribute ``count`` mutants over parts in proportion to their size, at least one each."""
    total = sum(sizes.values())
    exact_counts = {name: max(1.0, count * size / total) for name, size in sizes.items()}
    counts = {name: int(share) for name, share in exact_counts.items()}
    for _ in range(sum(counts.values()), count):
        counts[max(counts, key=lambda name: exact_counts[name] - counts[name])] += 1
    for _ in range(max(count, len(counts)), sum(counts.values())):
        reducible = [name for name, number in counts.items() if number > 1]
        counts[min(reducible, key=lambda name: exact_counts[name] - counts[name])] -= 1
    return counts


def _changes(
    node: ast.AST, names: tuple[str, ...], function: str | None
) -> Iterator[tuple[str | None, str, Change]]:
    """(outermost function, qualified name, change) for all changes under a node."""
    where = ".".join(names) or "module"
    for field, value in ast.iter_fields(node):
        if field in (
            "annotation",
            "returns",
            "type_comment",
            "type_params",
            "decorator_list",
        ) or _is_excluded(node, field):
            continue
        for index, child in enumerate(value) if isinstance(value, list) else ((None, value),):
            if not isinstance(child, ast.AST) or _is_docstring(node, field, index, child):
                continue
            inner, outer = names, function
            if isinstance(child, (*FUNCTION, ast.ClassDef)):
                inner = (*names, child.name)
            if isinstance(node, FUNCTION) and field == "body" and function is None:
                # Only the body runs when the function is called. Defaults run at import.
                outer = where
            yield from (
                (outer, where, change) for change in _changes_of_node(node, field, index, child)
            )
            yield from _changes(child, inner, outer)


def _is_excluded(node: ast.AST, field: str) -> bool:
    """Whether a field holds code that is not mutated: types, imports, texts, assertions."""
    if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
        return True
    if isinstance(node, ast.keyword) and node.arg == "strict":
        return True
    return isinstance(node, (ast.JoinedStr, ast.Import, ast.ImportFrom)) or (
        isinstance(node, ast.Raise) and field in ("exc", "cause")
    )


def _is_docstring(node: ast.AST, field: str, index: int | None, child: ast.AST) -> bool:
    is_first_statement = (
        isinstance(node, (ast.Module, ast.ClassDef, *FUNCTION)) and field == "body" and index == 0
    )
    return (
        is_first_statement and isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
    )


def _changes_of_node(
    parent: ast.AST, field: str, index: int | None, node: ast.AST
) -> Iterator[Change]:
    for new in _replacements(parent, field, node):
        yield _change_to(parent, field, index, node, new)


def _change_to(
    parent: ast.AST, field: str, index: int | None, node: ast.AST, new: ast.AST
) -> Change:
    ast.fix_missing_locations(ast.copy_location(new, node))

    def replace(replacement: ast.AST) -> None:
        if index is None:
            setattr(parent, field, replacement)
        else:
            getattr(parent, field)[index] = replacement

    return Change(
        node, f"{_short(node)} -> {_short(new)}", lambda: replace(new), lambda: replace(node)
    )


def _short(node: ast.AST) -> str:
    text = " ".join(ast.unparse(node).split())
    return text if len(text) <= 90 else f"{text[:60]} … {text[-25:]}"


def _replacements(parent: ast.AST, field: str, node: ast.AST) -> Iterator[ast.AST]:
    """The nodes that may replace a node."""
    yield from _replaced_expressions(node)
    yield from _replaced_statements(node)
    is_condition = (
        field == "test" or field == "ifs" or (isinstance(parent, ast.BoolOp) and field == "values")
    )
    if is_condition and isinstance(node, ast.expr) and not isinstance(node, MUTATED_SEPARATELY):
        yield ast.UnaryOp(ast.Not(), node)
    if (
        isinstance(parent, ast.Compare)
        and isinstance(node, ast.Constant)
        and isinstance(node.value, str)
    ):
        yield ast.Constant(f"{node.value}?")


def _replaced_expressions(node: ast.AST) -> Iterator[ast.AST]:
    match node:
        case ast.Compare(ops=ops):
            for i, op in enumerate(ops):
                for other in COMPARISON_MUTATIONS[type(op)]:
                    yield ast.Compare(
                        node.left, [*ops[:i], other(), *ops[i + 1 :]], node.comparators
                    )
        case ast.BinOp(op=op) if type(op) in OPERATOR_MUTATIONS and not _is_text(node):
            yield ast.BinOp(node.left, OPERATOR_MUTATIONS[type(op)](), node.right)
        case ast.BoolOp(op=op, values=values):
            yield ast.BoolOp(ast.Or() if isinstance(op, ast.And) else ast.And(), values)
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield ast.Constant(not value)
        case ast.Constant(value=int(value) | float(value)):
            yield ast.Constant(value + 1)
        case ast.Call(func=ast.Name(id=name)) if name in CALL_MUTATIONS:
            yield ast.Call(ast.Name(CALL_MUTATIONS[name], ast.Load()), node.args, node.keywords)


def _is_text(node: ast.BinOp) -> bool:
    return any(
        isinstance(side, (ast.JoinedStr, ast.Constant))
        and not isinstance(getattr(side, "value", ""), (int, float))
        for side in (node.left, node.right)
    )


def _replaced_statements(node: ast.AST) -> Iterator[ast.AST]:
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
    if isinstance(node, ast.AugAssign) and type(node.op) in OPERATOR_MUTATIONS:
        yield ast.AugAssign(node.target, OPERATOR_MUTATIONS[type(node.op)](), node.value)
