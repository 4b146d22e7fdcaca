"""The modules of distsim as syntax trees, parsed once for all tests that read them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

from distsim.common.records import gc_paused

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "distsim"
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    with gc_paused():
        return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    with gc_paused():
        return tuple(ast.walk(tree(path)))
