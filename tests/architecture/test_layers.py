"""The layers of docs/explanation/architecture.md hold, and no imports form a cycle.

Every import counts: at the top of a module, inside a function, and under ``TYPE_CHECKING``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import networkx as nx

from tests.support.source_trees import MODULES, ROOT, nodes, tree

ARCHITECTURE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


class ImportedName(NamedTuple):
    """``late``: inside a function or for the type checker, so not executed at import time."""

    name: str
    line: int
    late: bool


def module_name(path: Path) -> str:
    """``distsim.operations.registry``; a package is named by its folder."""
    dotted = ".".join(path.relative_to(ROOT).with_suffix("").parts)
    return dotted.removesuffix(".__init__")


PATHS = {module_name(path): path for path in MODULES}


def package_of(module: str) -> str | None:
    """``distsim.operations.registry`` is in ``operations``; None for the root and other libraries."""
    parts = module.split(".")
    return parts[1] if parts[0] == "distsim" and len(parts) > 1 else None


@cache
def imported_names(path: Path) -> tuple[ImportedName, ...]:
    """Every import of a module with its full dotted name."""

    def walk(node: ast.AST, late: bool) -> Iterator[ImportedName]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.expr):
                continue
            if isinstance(child, ast.Import):
                for alias in child.names:
                    yield ImportedName(alias.name, child.lineno, late)
            elif isinstance(child, ast.ImportFrom):
                for alias in child.names:
                    yield ImportedName(f"{child.module or ''}.{alias.name}", child.lineno, late)
            typing_only = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
            in_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef)
            yield from walk(child, late or typing_only or in_function)

    return tuple(walk(tree(path), False))


def imported_module(name: str) -> str | None:
    """The module of distsim that ``from a.b import c`` (as ``a.b.c``) loads, if any."""
    if name in PATHS:
        return name
    parent = name.rpartition(".")[0]
    return parent if parent in PATHS else None


def table_rows(columns: int) -> list[list[str]]:
    """The cells of all table rows of docs/explanation/architecture.md with this number of columns."""
    rows = re.findall(r"^\|(.+)\|$", ARCHITECTURE, re.MULTILINE)
    cells = [[cell.strip() for cell in row.split("|")] for row in rows]
    return [row for row in cells if len(row) == columns and not set(row[0]) <= set("- :")]


def layer_of_package() -> dict[str, int]:
    layers: dict[str, int] = {}
    for number, packages, _ in table_rows(3):
        if number.isdigit():
            layers |= dict.fromkeys(re.findall(r"`(\w+)`", packages), int(number))
    return layers


def library_rules() -> dict[str, tuple[set[str], bool]]:
    """Library -> packages that may import it, and whether only inside functions."""
    rules = {}
    for libraries, packages, late in table_rows(3):
        allowed = set(re.findall(r"`(\w+)`", packages))
        if allowed and not libraries.isdigit():
            rules |= dict.fromkeys(libraries.split(", "), (allowed, late == "yes"))
    return rules


def test_every_package_has_a_layer_in_the_table():
    found = {package_of(module) for module in PATHS} - {None}

    assert found == set(layer_of_package())


def test_a_package_imports_only_from_lower_layers():
    layers = layer_of_package()
    wrong = []
    for path in MODULES:
        importer = package_of(module_name(path))
        if importer is None:
            continue  # distsim/__init__.py loads public names from everywhere, when they are used
        for imported in imported_names(path):
            target = package_of(imported.name)
            if target is None or target == importer or target not in layers:
                continue
            if layers[target] <= layers[importer]:
                wrong.append(f"{path.relative_to(ROOT)}:{imported.line}: {imported.name}")

    assert wrong == []


def test_no_imports_form_a_cycle_in_any_package():
    graph = nx.DiGraph()
    for module, path in PATHS.items():
        for imported in imported_names(path):
            target = imported_module(imported.name)
            # A package's own name is loaded with each of its modules, before them.
            if target is not None and target != module and target != "distsim":
                graph.add_edge(module, target)
    cycles = [sorted(part) for part in nx.strongly_connected_components(graph) if len(part) > 1]

    assert cycles == []


def test_a_library_is_imported_only_where_the_table_allows_it():
    rules = library_rules()
    wrong = []
    for path in MODULES:
        for imported in imported_names(path):
            library = imported.name.split(".")[0]
            if library not in rules:
                continue
            allowed, only_late = rules[library]
            package = package_of(module_name(path))
            if package not in allowed or (only_late and not imported.late):
                wrong.append(f"{path.relative_to(ROOT)}:{imported.line}: {imported.name}")

    assert rules.keys() >= {"torch", "simpy", "scipy", "typer"}
    assert wrong == []


def test_the_docstring_of_every_package_states_what_belongs_there():
    packages = [path for path in MODULES if path.name == "__init__.py"]
    silent = [str(path.relative_to(ROOT)) for path in packages if not ast.get_docstring(tree(path))]

    assert silent == []


def test_imports_are_absolute():
    relative = [
        str(path)
        for path in MODULES
        for node in nodes(path)
        if isinstance(node, ast.ImportFrom) and node.level
    ]

    assert relative == []
