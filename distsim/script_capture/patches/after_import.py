"""Change a module when the script imports it, so that capture need not import it first."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


class _Finder:
    """An entry of `sys.meta_path` for one module."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._change = change

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """The spec of the module, whose loader also changes it; None for another module."""
        spec = PathFinder.find_spec(name, path) if name == self._name else None
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            self._change(module)

        loader.exec_module = exec_module
        return spec


def after_import(name: str, change: Callable[[ModuleType], None]) -> None:
    """Call ``change`` with the module: now if it is loaded, else as soon as it is."""
    finder: Any = _Finder(name, change)
    sys.meta_path.insert(0, finder)
    module = sys.modules.get(name)
    if module is not None:  # imported before the ranks were forked
        change(module)


__all__ = ["after_import"]
