"""Names of torch.distributed that packages have imported for themselves before a rank replaces them.

What a script imports is loaded once, before its ranks part, so a package's `from torch.distributed import TCPStore` has torch's own. The
places are found once, by whoever starts the ranks; each rank lays its own there.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from importlib import import_module
from types import ModuleType
from typing import Final

#: What of torch.distributed `distsim.capture.patches` replaces under its name.
REPLACED: Final = (
    "init_process_group", "new_group", "destroy_process_group", "split_group", "send", "recv", "batch_isend_irecv", "TCPStore",
    "FileStore", "PrefixStore",
)  # fmt: skip

_places: list[tuple[ModuleType, str, str]] = []
_seen: set[str] = set()


def find() -> None:
    """Look through all that is loaded, and was not when somebody last looked."""
    dist = import_module("torch.distributed")
    wanted = {id(getattr(dist, name)): name for name in REPLACED}
    modules = [module for name, module in list(sys.modules.items()) if name not in _seen]
    _seen.update(sys.modules)
    _places.extend(_borrowed(modules, wanted))


def _borrowed(modules: Iterable[object], wanted: dict[int, str]) -> Iterator[tuple[ModuleType, str, str]]:
    for module in modules:
        if isinstance(module, ModuleType) and not module.__name__.startswith("torch._C"):
            found = [(name, wanted[id(value)]) for name, value in list(vars(module).items()) if id(value) in wanted]
            yield from ((module, name, which) for name, which in found)


def lay() -> None:
    """Put what torch.distributed has now in the place of what they took."""
    dist = import_module("torch.distributed")
    for module, name, which in _places:
        setattr(module, name, getattr(dist, which))
