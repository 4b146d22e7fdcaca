"""Names of torch.distributed that packages have imported for themselves before a rank replaces
them.

What a script imports is loaded once, before its ranks part, so a package's `from torch.distributed
import TCPStore` has torch's own. The places are found once, by whoever starts the ranks; each rank
lays its own there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Final

#: What of torch.distributed `distsim.script_capture.patches.install` replaces under its name.
REPLACED_NAMES: Final = (
    "init_process_group",
    "new_group",
    "destroy_process_group",
    "split_group",
    "send",
    "recv",
    "batch_isend_irecv",
    "TCPStore",
    "FileStore",
    "PrefixStore",
)

_references: list[tuple[ModuleType, str, str]] = []
_scanned_modules: set[str] = set()


def find_references() -> None:
    """Look through all that is loaded, and was not when somebody last looked."""
    dist = import_module("torch.distributed")
    wanted = {id(getattr(dist, name)): name for name in REPLACED_NAMES}
    modules = [module for name, module in list(sys.modules.items()) if name not in _scanned_modules]
    _scanned_modules.update(sys.modules)
    _references.extend(_references_in(modules, wanted))


def _references_in(
    modules: Iterable[object], wanted: dict[int, str]
) -> Iterator[tuple[ModuleType, str, str]]:
    for module in modules:
        if isinstance(module, ModuleType) and not module.__name__.startswith("torch._C"):
            found = [
                (name, wanted[id(value)])
                for name, value in list(vars(module).items())
                if id(value) in wanted
            ]
            yield from ((module, name, which) for name, which in found)


def rebind_references() -> None:
    """Put what torch.distributed has now in the place of what they took."""
    dist = import_module("torch.distributed")
    for module, name, which in _references:
        setattr(module, name, getattr(dist, which))
