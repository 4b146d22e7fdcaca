"""Marks between the statements of a program's functions: which lines a test reaches, in forked
processes as well.

A function has its code replaced by the same with marks, so that nothing of how it is called or held
changes. `sys.settrace` would be told of every call of every function, which takes ten times as long
as the tests; `sys.monitoring` comes with Python 3.12.
"""

from __future__ import annotations

import ast
import gc
import mmap
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path
from types import CodeType, FunctionType

#: A module's name for the bytes of its statements.
MARKS = "__marks__"


class Marks:
    """A byte a statement of some files' functions, in memory that this process shares with all that
    it forks.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self.files, self.trees, self.lines = (
            files,
            list[ast.Module](),
            list[tuple[str, frozenset[int]]](),
        )
        for file in files:
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
            for lines in lay_marks(tree, len(self.lines)):
                self.lines.append((file, lines))
            self.trees.append(tree)
        self.memory = mmap.mmap(-1, max(len(self.lines), 1))

    def lay(self) -> None:
        """Every function that is there sets its bytes from now on. It is loaded for this: what runs
        once at loading is not seen.
        """
        there: dict[tuple[str, str, int], list[FunctionType]] = {}
        for f in gc.get_objects():
            if type(f) is FunctionType and f.__code__.co_filename in self.files:
                there.setdefault(
                    (f.__code__.co_filename, f.__code__.co_qualname, f.__code__.co_firstlineno), []
                ).append(f)
        for file, tree in zip(self.files, self.trees, strict=True):
            for code in functions_of(compile(tree, file, "exec", dont_inherit=True)):
                for function in there.get((file, code.co_qualname, code.co_firstlineno), ()):
                    if (
                        function.__code__.co_freevars == code.co_freevars
                        and code.co_name != "<lambda>"
                    ):  # of which a line has several
                        function.__globals__[MARKS] = self.memory
                        function.__code__ = code

    def clear(self) -> None:
        self.memory[:] = bytes(len(self.memory))

    def reached(self) -> list[int]:
        """The numbers of statements that were reached."""
        return list(compress(range(len(self.lines)), self.memory))


def lay_marks(node: ast.AST, first: int, inside: bool = False) -> Iterator[frozenset[int]]:
    """Put a mark before each statement of a function, numbered from ``first``; of each, in order,
    the lines that are its own.
    """
    is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    for name, value in ast.iter_fields(node):
        if not isinstance(value, list):
            continue
        marked: list[ast.AST] = []
        for child in value:
            if (
                isinstance(child, ast.stmt)
                and (inside or is_function)
                and not (name == "body" and is_docstring(child))
            ):
                mark = ast.parse(f"{MARKS}[{first}] = 1").body[0]
                for each in ast.walk(mark):
                    ast.copy_location(each, child)
                marked.append(mark)
                yield own_lines(child)
                first += 1
            marked.append(child)
            if isinstance(child, ast.AST):
                for lines in lay_marks(child, first, inside or is_function):
                    yield lines
                    first += 1
        value[:] = marked


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def own_lines(statement: ast.stmt) -> frozenset[int]:
    """Its lines without those of the statements in it."""
    lines = set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    for node in ast.walk(statement):
        if isinstance(node, ast.stmt) and node is not statement:
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines | {statement.lineno})


def functions_of(code: CodeType) -> Iterator[CodeType]:
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from functions_of(const)
