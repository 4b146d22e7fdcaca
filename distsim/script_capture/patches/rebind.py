"""Replace names of torch.distributed in packages that were imported before the ranks were forked.

What a script imports is loaded once, by the process that starts the ranks. So a package that has
``from torch.distributed import TCPStore`` has torch's own class. Such references are found once, in
that process; each rank then replaces them by its own.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Final, NamedTuple

#: The names that `distsim.script_capture.patches.install` replaces in torch.distributed.
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


class _Reference(NamedTuple):
    """``module.name`` is torch.distributed's ``original``."""

    module: ModuleType
    name: str
    original: str


_references: list[_Reference] = []
_scanned_modules: set[str] = set()


def find_references() -> None:
    """Scan all modules that were loaded since the last call."""
    dist = import_module("torch.distributed")
    name_by_id = {id(getattr(dist, name)): name for name in REPLACED_NAMES}
    modules = [module for name, module in list(sys.modules.items()) if name not in _scanned_modules]
    _scanned_modules.update(sys.modules)
    _references.extend(_references_in(modules, name_by_id))


def _references_in(modules: Iterable[object], name_by_id: dict[int, str]) -> Iterator[_Reference]:
    for module in modules:
        if not isinstance(module, ModuleType) or module.__name__.startswith("torch._C"):
            continue
        for name, value in list(vars(module).items()):
            original = name_by_id.get(id(value))
            if original is not None:
                yield _Reference(module, name, original)


def rebind_references() -> None:
    """Let each reference be what torch.distributed has now."""
    dist = import_module("torch.distributed")
    for module, name, original in _references:
        setattr(module, name, getattr(dist, original))
