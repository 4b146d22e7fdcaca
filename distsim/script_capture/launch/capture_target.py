"""The program or function that each rank runs, as Python would run it."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class CaptureTarget:
    """What each rank runs: the file ``name``, the module ``name``, or a function.

    ``home`` is the file of a module or of a function.
    """

    name: str
    args: tuple[str, ...] = ()
    module: bool = False
    function: Callable[[], object] | None = None
    home: str = ""

    @property
    def file(self) -> str:
        """The user's main file; "" if it is not known."""
        if self.home:
            return self.home
        return "" if self.module else self.name

    def run(self) -> object:
        """Run it in this process."""
        if self.function is not None:
            return self.function()
        sys.argv = [self.name, *self.args]
        if self.module:
            sys.path.insert(0, os.getcwd())
            return runpy.run_module(self.name, run_name="__main__", alter_sys=True)
        sys.path.insert(0, os.path.dirname(os.path.abspath(self.name)))
        return runpy.run_path(self.name, run_name="__main__")


__all__ = ["CaptureTarget"]
