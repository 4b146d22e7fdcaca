"""The floors of docs/architecture.md hold: read from the imports of every module, not from
goodwill.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from tests.support import source_trees
from tests.support.source_trees import PACKAGE, ROOT, nodes, tree

MODULES = [path for path in source_trees.MODULES if path != PACKAGE / "__init__.py"]

#: Library -> (rooms that may import it, whether only inside functions).
RULES = {
    "torch": (("real", "capture"), True),
    "simpy": (("engine",), False),
    "yaml": (("scenario",), False),
    "networkx": (("check", "views"), True),
    "pygraphviz": (("views",), True),
    "graphviz": (("views",), True),
    "scipy": (("calibrate",), True),
    "ml_dtypes": (("ops",), True),
    "typer": (("cli",), False),
    "rich": (("cli",), True),
}


class Import(NamedTuple):
    """``late``: not when the module is loaded, but inside a function or for the type checker
    alone.
    """

    name: str
    line: int
    late: bool


def room(path: Path) -> str:
    """``distsim/operations/registry.py`` is in room ``ops``,
    ``distsim/backends/message_matching.py`` in room ``match``.
    """
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def room_of_name(name: str) -> str | None:
    """The room of a dotted name under ``distsim``; None for the package itself and for other
    libraries.
    """
    parts = name.split(".")
    if parts[0] != "distsim" or len(parts) == 1:
        return None
    return (
        parts[1]
        if (PACKAGE / parts[1]).is_dir() or (PACKAGE / f"{parts[1]}.py").is_file()
        else None
    )


@cache
def imports(path: Path) -> tuple[Import, ...]:
    """Every import of a module with its full dotted name, wherever it stands."""

    def walk(node: ast.AST, late: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, late) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                yield from (
                    Import(f"{child.module or ''}.{alias.name}", child.lineno, late)
                    for alias in child.names
                )
            typing_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            yield from walk(
                child,
                late or typing_only or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)),
            )

    return tuple(walk(tree(path), False))


def floors() -> dict[str, int]:
    """Room -> floor, from the table in docs/architecture.md."""
    rows = re.findall(
        r"^\| (\d+) \| (.+) \|$",
        (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8"),
        re.MULTILINE,
    )
    return {name: int(number) for number, names in rows for name in re.findall(r"`(\w+)/?`", names)}


def test_every_room_of_the_package_has_a_floor_in_the_table():
    table = floors()

    assert sorted({room(p) for p in MODULES} - set(table)) == []


def test_a_module_imports_only_from_lower_floors_and_from_its_own_folder():
    table = floors()
    wrong = [
        f"{path.relative_to(ROOT)}:{found.line}: floor {table[here]} imports {found.name} (floor {table.get(there)})"
        for path in MODULES
        for here in (room(path),)
        for found in imports(path)
        for there in (room_of_name(found.name),)
        if there is not None and there != here and table.get(there, 99) >= table[here]
    ]

    assert wrong == []


def test_a_library_is_imported_only_in_its_rooms_and_a_slow_one_only_inside_functions():
    wrong = []
    for path in MODULES:
        for found in imports(path):
            rooms, late = RULES.get(found.name.split(".")[0], (None, False))
            if rooms is not None and (room(path) not in rooms or (late and not found.late)):
                wrong.append(f"{path.relative_to(ROOT)}:{found.line}: {found.name}")

    assert wrong == []


def test_imports_are_absolute():
    assert [
        str(p) for p in MODULES for n in nodes(p) if isinstance(n, ast.ImportFrom) and n.level
    ] == []
