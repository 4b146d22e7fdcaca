"""The modules of distsim as syntax trees, parsed once for all tests that read them."""

from __future__ import annotations

import ast
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "distsim"
MODULES = sorted(PACKAGE.rglob("*.py"))


@cache
def tree(path: Path) -> ast.Module:
    with no_garbage_collection():
        return ast.parse(path.read_text(encoding="utf-8"))


@cache
def nodes(path: Path) -> tuple[ast.AST, ...]:
    with no_garbage_collection():
        return tuple(ast.walk(tree(path)))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """While trees are built, which takes thrice as long if the collector looks at all of them."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
