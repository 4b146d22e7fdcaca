"""Import what a script will import once, before its ranks are forked.

Most of a short run's time goes into imports, and each rank would do them again. What a script
imports is found in its source, without running it.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import suppress
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Final

from distsim.script_capture.patches.available_backends import report_all_backends_available

#: Files in the script's own folder that are followed, to find what they import.
_MAX_FILES: Final = 200
#: Packages that do not indicate training.
_NON_TRAINING_PACKAGES: Final = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
#: What torch imports when a model is first wrapped, or an optimizer makes its first step.
_LATE = (
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.utils.data",
)


def imported_modules(file: Path) -> Iterator[str]:
    """Modules that a file imports when it is loaded, in order; not those that functions import."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            if not node.level and node.module:
                yield node.module
        elif isinstance(node, ast.If | ast.Try | ast.With):
            pending = [*ast.iter_child_nodes(node), *pending]


def external_imports(script: str) -> list[str]:
    """Modules outside the script's folder that the script, or files of its folder, import."""
    folder = Path(script).resolve().parent
    pending = [Path(script)]
    external: list[str] = []
    seen: set[Path] = set()
    while pending and len(seen) < _MAX_FILES:
        file = pending.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for name in imported_modules(file):
            own_file = _module_in_folder(name, folder)
            if own_file is not None:
                pending.append(own_file)
            elif name not in external:
                external.append(name)
    return external


def _module_in_folder(name: str, folder: Path) -> Path | None:
    base = folder.joinpath(*name.split("."))
    for file in (base.with_suffix(".py"), base / "__init__.py"):
        if file.exists():
            return file
    return None


def preload(script: str, args: Sequence[str] = ()) -> None:
    """Import torch, and what the script imports of installed packages.

    A failing import is ignored: it fails again in the ranks, where it is reported. ``args`` are the
    script's arguments, which some packages read when they are imported (torchtitan's parser, as a
    default).
    """
    given = sys.argv
    sys.argv = [script, *args]
    try:
        _preload_script_imports(script)
    finally:
        sys.argv = given


def _preload_script_imports(script: str) -> None:
    report_all_backends_available()
    names = external_imports(script)
    _import_modules(names)
    # A package other than these may be a library that trains.
    packages = {name.split(".")[0] for name in names}
    if not packages <= _NON_TRAINING_PACKAGES or _defines_models(script, names):
        _import_modules(_LATE)


def preload_lazy_torch_modules(file: str) -> None:
    """Import what each rank that runs a function of this file would import.

    The file itself, and so all that it imports, is loaded already.
    """
    if _defines_models(file, external_imports(file)):
        _import_modules(_LATE)


def _defines_models(script: str, names: Sequence[str]) -> bool:
    if any(name.startswith(("torch.nn", "torch.optim")) for name in names):
        return True
    with suppress(OSError):
        return b"nn." in Path(script).read_bytes()
    return False


def _import_modules(names: Sequence[str]) -> None:
    for name in names:
        package = name.split(".")[0]
        if package in ("__main__", "__future__", "distsim") or name in sys.modules:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(name)
            except KeyboardInterrupt:
                raise
            except BaseException:
                continue


def module_file(module: str) -> str:
    """The file of a module that is run by name; "" if there is none.

    It imports nothing, not even parent packages: torch must not be imported before
    `distsim.script_capture.cuda.emulation.select_emulation`.
    """
    search_path: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:depth]), search_path)
        if spec is None:
            return ""
        search_path = list(spec.submodule_search_locations or ())
    if search_path:  # a package
        spec = PathFinder.find_spec(f"{module}.__main__", search_path)
    return (spec.origin or "") if spec is not None else ""
