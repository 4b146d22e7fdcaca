"""What a script will import, imported once before its ranks part: most of a short run's time goes
into imports.
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
from typing import Any

from distsim.script_capture.cuda.fake_driver import NCCL_VERSION

#: Modules of the script's own folder that are followed, to find what they import.
_MAX_FILES = 200


def imported_modules(file: Path) -> Iterator[str]:
    """Modules that a file imports when it is loaded, in order; not those that functions import."""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError, RecursionError):
        return
    waiting: list[ast.AST] = list(tree.body)
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level and node.module:
            yield node.module
        elif isinstance(node, ast.If | ast.Try | ast.With):
            waiting = [*ast.iter_child_nodes(node), *waiting]


def external_imports(script: str) -> list[str]:
    """Modules outside the script's folder that it, or files beside it, import."""
    folder = Path(script).resolve().parent
    waiting, found = [Path(script)], list[str]()
    seen: set[Path] = set()
    while waiting and len(seen) < _MAX_FILES:
        file = waiting.pop(0)
        if file in seen:
            continue
        seen.add(file)
        for name in imported_modules(file):
            beside = folder.joinpath(*name.split("."))
            own = next(
                (p for p in (beside.with_suffix(".py"), beside / "__init__.py") if p.exists()), None
            )
            if own is not None:
                waiting.append(own)
            elif name not in found:
                found.append(name)
    return found


#: Installed packages that say nothing about training.
_NON_TRAINING_PACKAGES = frozenset({*sys.stdlib_module_names, "torch", "numpy"})
#: What torch imports by itself when a model is first wrapped, or an optimizer makes its first step.
_LATE = (
    "torch._dynamo",
    "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor",
    "torch.utils.data",
)


class ProcessGroupNCCL:
    """Stands for the class that a torch without nccl lacks; no group of the hub is one."""


def report_all_backends_available() -> None:
    """Let torch say that it has every back end: some packages ask once, when they are imported."""
    dist: Any = importlib.import_module("torch.distributed")
    c10d = importlib.import_module("torch.distributed.distributed_c10d")
    for name in ("is_nccl_available", "is_gloo_available", "is_mpi_available"):
        for module in (dist, c10d):
            setattr(module, name, lambda: True)
    if not hasattr(
        c10d, "ProcessGroupNCCL"
    ):  # torch asks whether a group is one where it has nccl (`_set_pg_timeout`: torchtitan)
        for module in (dist, c10d):
            setattr(module, "ProcessGroupNCCL", ProcessGroupNCCL)  # noqa: B010 - a name that no wheel for CPUs has
    core: Any = importlib.import_module("torch._C")
    if not hasattr(
        core, "_nccl_version"
    ):  # torch's logger asks when a call of nccl raises, and would hide what it raised
        core._nccl_version, core._nccl_version_suffix = lambda: NCCL_VERSION, lambda: b""


def preload(script: str, args: Sequence[str] = ()) -> None:
    """Import torch, and what the script imports of installed packages. What fails fails again in
    the ranks, where it is told.

    ``args``: the script's own words, which some packages read as they are imported (torchtitan's
    parser, as a default).
    """
    given, sys.argv = sys.argv, [script, *args]
    try:
        _preload_script_imports(script)
    finally:
        sys.argv = given


def _preload_script_imports(script: str) -> None:
    report_all_backends_available()
    names = external_imports(script)
    _import_modules(
        [
            *names,
            *(
                _LATE
                if any(name.split(".")[0] not in _NON_TRAINING_PACKAGES for name in names)
                or _defines_models(script, names)
                else ()
            ),
        ]
    )


def preload_lazy_torch_modules(file: str) -> None:
    """For a function of this file, which is loaded with all that it imports: what each of its ranks
    would import for itself.
    """
    if _defines_models(file, external_imports(file)):
        _import_modules(_LATE)


def _defines_models(script: str, names: Sequence[str]) -> bool:
    with suppress(OSError):
        return (
            any(name.startswith(("torch.nn", "torch.optim")) for name in names)
            or b"nn." in Path(script).read_bytes()
        )
    return False


def _import_modules(names: Sequence[str]) -> None:
    for name in names:
        if name.split(".")[0] in ("__main__", "__future__", "distsim") or name in sys.modules:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                importlib.import_module(name)
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise


def module_file(module: str) -> str:
    """The file of a module that is run by name; empty where there is none. Imports nothing: torch
    must come after `cuda.prepare`.
    """
    places: list[str] | None = [os.getcwd(), *sys.path]
    spec = None
    parts = module.split(".")
    for k in range(len(parts)):
        spec = PathFinder.find_spec(".".join(parts[: k + 1]), places)
        if spec is None:
            return ""
        places = list(spec.submodule_search_locations or ())
    if places:
        spec = PathFinder.find_spec(f"{module}.__main__", places)
    return (spec.origin or "") if spec is not None else ""
