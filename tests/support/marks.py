"""Record which lines a test reaches, also in forked processes.

Each function gets a copy of its code with a mark before every statement. The function object stays
the same, so callers and references do not notice. `sys.settrace` is called for every function call
and makes the tests ten times slower. `sys.monitoring` needs Python 3.12.
"""

from __future__ import annotations

import ast
import gc
import mmap
from collections.abc import Iterator, Sequence
from itertools import compress
from pathlib import Path
from types import CodeType, FunctionType

#: The global name through which marked code reaches the shared memory.
MARKS = "__marks__"


class Marks:
    """One byte per statement of the functions of some files.

    The bytes lie in memory that this process shares with the processes that it forks.
    """

    def __init__(self, files: Sequence[str]) -> None:
        self.files, self.trees, self.lines = (
            files,
            list[ast.Module](),
            list[tuple[str, frozenset[int]]](),
        )
        for file in files:
            tree = ast.parse(Path(file).read_text(encoding="utf-8"))
            for lines in insert_marks(tree, len(self.lines)):
                self.lines.append((file, lines))
            self.trees.append(tree)
        self.memory = mmap.mmap(-1, max(len(self.lines), 1))

    def install(self) -> None:
        """Replace the code of all loaded functions by code that sets their bytes.

        Code that runs only while a module is imported is not recorded.
        """
        loaded: dict[tuple[str, str, int], list[FunctionType]] = {}
        for f in gc.get_objects():
            if type(f) is FunctionType and f.__code__.co_filename in self.files:
                loaded.setdefault(
                    (f.__code__.co_filename, f.__code__.co_qualname, f.__code__.co_firstlineno), []
                ).append(f)
        for file, tree in zip(self.files, self.trees, strict=True):
            for code in functions_of(compile(tree, file, "exec", dont_inherit=True)):
                for function in loaded.get((file, code.co_qualname, code.co_firstlineno), ()):
                    # Lambdas are skipped, because several of them can start on one line.
                    if (
                        function.__code__.co_freevars == code.co_freevars
                        and code.co_name != "<lambda>"
                    ):
                        function.__globals__[MARKS] = self.memory
                        function.__code__ = code

    def clear(self) -> None:
        self.memory[:] = bytes(len(self.memory))

    def reached(self) -> list[int]:
        """The numbers of the statements that were reached."""
        return list(compress(range(len(self.lines)), self.memory))


def insert_marks(node: ast.AST, first: int, inside: bool = False) -> Iterator[frozenset[int]]:
    """Insert a mark before each statement of all functions under a node.

    The marks are numbered from ``first``. Yields the lines of each marked statement, in order.
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
                for new_node in ast.walk(mark):
                    ast.copy_location(new_node, child)
                marked.append(mark)
                yield own_lines(child)
                first += 1
            marked.append(child)
            if isinstance(child, ast.AST):
                for lines in insert_marks(child, first, inside or is_function):
                    yield lines
                    first += 1
        value[:] = marked


def is_docstring(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def own_lines(statement: ast.stmt) -> frozenset[int]:
    """The lines of a statement without the lines of the statements inside it."""
    lines = set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    for node in ast.walk(statement):
        if isinstance(node, ast.stmt) and node is not statement:
            lines.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return frozenset(lines | {statement.lineno})


def functions_of(code: CodeType) -> Iterator[CodeType]:
    """The code of all functions and classes inside a code object, at any depth."""
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield const
            yield from functions_of(const)
