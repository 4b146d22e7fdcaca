"""The rules of the house that a machine can check (CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "distsim"
MODULES = sorted(PACKAGE.rglob("*.py"))
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_MODULES = {"pickle", "marshal", "shelve", "dill"}


def functions(path: Path) -> Iterator[tuple[str, int]]:
    """Name and length of every function, its docstring not counted."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if ast.get_docstring(node) is not None:
                doc = node.body[0]
                lines -= (doc.end_lineno or doc.lineno) - doc.lineno + 1
            yield node.name, lines


def called_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            yield node.func.id


def imported_modules(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""


each_module = pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(ROOT)))


@each_module
def test_a_file_has_at_most_400_lines_and_a_function_at_most_60(path: Path):
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 400
    assert [(name, lines) for name, lines in functions(path) if lines > 60] == []


def test_nineteen_of_twenty_functions_have_at_most_25_lines():
    lengths = sorted(lines for path in MODULES for _, lines in functions(path))

    assert lengths[int(len(lengths) * 0.95)] <= 25


@each_module
def test_only_the_command_line_prints(path: Path):
    if path.parent.name != "cli":
        assert "print" not in set(called_names(path))


@each_module
def test_nothing_is_evaluated_executed_or_unpickled(path: Path):
    assert FORBIDDEN_CALLS & set(called_names(path)) == set()
    assert FORBIDDEN_MODULES & {name.split(".")[0] for name in imported_modules(path)} == set()


@each_module
def test_nothing_is_left_for_later_in_the_code(path: Path):
    text = path.read_text(encoding="utf-8")

    assert re.findall(r"\b(?:TODO|FIXME|XXX|NotImplementedError)\b", text) == []


@each_module
def test_every_module_says_what_it_is_for(path: Path):
    tree = ast.parse(path.read_text(encoding="utf-8"))

    assert not tree.body or ast.get_docstring(tree)


@each_module
def test_no_module_keeps_state(path: Path):
    """`global` is how a function writes to its module; two simulations side by side would share it."""
    assert [n.lineno for n in ast.walk(ast.parse(path.read_text(encoding="utf-8"))) if isinstance(n, ast.Global)] == []


def test_the_ci_runs_the_readmes_own_test_command_and_every_torch_install_is_constrained():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    lines = [*readme.splitlines(), *(ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").splitlines()]
    installs = [line for line in lines if "pip install" in line and ("real" in line or "torch" in line)]

    assert len(re.findall(r"^python3 -m venv .* -m pytest.*$", readme, re.MULTILINE)) == 1
    assert [line for line in installs if "-c constraints.txt" not in line] == []
