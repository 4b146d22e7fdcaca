"""Decide from the source of a script whether it needs a GPU; nothing is imported or run.

A program needs a GPU if one of its own files mentions CUDA, or if it imports an installed package
that asks torch for GPUs (accelerate, transformers, lightning, …). Such a package would otherwise
find no GPU and could train on each rank alone.

Own files are the script and what it imports, directly or not, from its folder or the working
folder. A file that is only next to the script says nothing about the program. Imports by a computed
name are not found; ``--cuda`` overrides the decision.
"""

from __future__ import annotations

import ast
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import PathFinder
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

#: Own files that are read, files and folders of an installed package, and bytes of each file.
_MAX_OWN_FILES: Final = 200
_MAX_PACKAGE_FILES: Final = 200
_MAX_FOLDERS: Final = 50
_MAX_BYTES: Final = 1 << 20
_CUDA_PATTERN: Final = re.compile(rb"\bcuda\b|\btorch\.accelerator\b")
#: A package asks torch for GPUs if it says so in code; a word in a comment is not enough.
_PACKAGE_PATTERN: Final = re.compile(rb"\btorch\.(cuda|accelerator)\b|[\"']cuda[\"']")
#: Packages that ask torch for GPUs and are too large to be searched.
GPU_PACKAGES: Final = frozenset(
    {
        "accelerate",
        "colossalai",
        "composer",
        "deepspeed",
        "lightning",
        "lightning_fabric",
        "megatron",
        "nemo",
        "peft",
        "pytorch_lightning",
        "torchtitan",
        "torchtune",
        "transformers",
        "trl",
        "verl",
    }
)
#: Packages that never choose a device for a script.
_DEVICE_FREE_PACKAGES: Final = frozenset(
    {
        *sys.stdlib_module_names,
        "distsim",
        "matplotlib",
        "numpy",
        "pandas",
        "pytest",
        "scipy",
        "tokenizers",
        "torch",
        "torchvision",
        "tqdm",
        "yaml",
    }
)


class CudaUse(NamedTuple):
    """Whether a program needs a GPU, and the reason, as the end of "because …"."""

    needed: bool
    reason: str


def find_cuda_use(script: str | os.PathLike[str], args: Sequence[str] = ()) -> CudaUse:
    """Search the program's files, and the installed packages that they import.

    ``args``: the program's arguments. Files of Python among them belong to it, as for pytest.
    """
    named = [Path(word.partition("::")[0]) for word in args]
    files, packages = _own_files([Path(script), *(path for path in named if path.suffix == ".py")])
    for file in files:
        found = _CUDA_PATTERN.search(_read_start(file))
        if found is not None:
            line = _read_start(file).count(b"\n", 0, found.start()) + 1
            word = found[0].decode()
            return CudaUse(True, f"{file.name}, line {line}, mentions {word}")
    for package, file in packages.items():
        if _asks_for_gpus(package):
            return CudaUse(True, f"{file.name} imports {package}, which asks torch for GPUs")
    return CudaUse(False, f"nothing that {Path(script).name} imports asks for a GPU")


# --- own files ---
def _own_files(scripts: Sequence[Path]) -> tuple[list[Path], dict[str, Path]]:
    """The program's own files, and the other packages, each with a file that imports it."""
    roots = [*(script.absolute().parent for script in scripts), Path.cwd()]
    pending = list(scripts)
    files: list[Path] = []
    packages: dict[str, Path] = {}
    while pending and len(files) < _MAX_OWN_FILES:
        file = pending.pop(0)
        if file in files:
            continue
        files.append(file)
        for module in _imports(file):
            own = _own_module_files(module, file, roots)
            pending += own
            if not own:
                packages.setdefault(module.partition(".")[0], file)
    packages.pop("", None)
    return files, packages


def _imports(file: Path) -> Iterator[str]:
    """Modules that a file imports anywhere; a relative import begins with dots."""
    try:
        tree = ast.parse(_read_start(file))
    except (SyntaxError, ValueError, RecursionError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = "." * node.level + (node.module or "")
            yield base
            # A name may be a module of the package.
            separator = "." if node.module else ""
            yield from (f"{base}{separator}{alias.name}" for alias in node.names)


def _own_module_files(module: str, importer: Path, roots: list[Path]) -> list[Path]:
    """The file of a module and of the packages around it, if they are the program's own."""
    name = module.lstrip(".")
    dots = len(module) - len(name)
    if dots:
        package = importer.absolute().parent
        for _ in range(dots - 1):
            package = package.parent
        roots = [package]
    parts = [part for part in name.split(".") if part]
    for root in roots:
        found = _files_along(root, parts)
        if found:
            return found
    return []


def _files_along(root: Path, parts: list[str]) -> list[Path]:
    """The files that an import of ``root.part.part…`` runs."""
    found: list[Path] = []
    folder = root
    for part in parts:
        module = folder / f"{part}.py"
        folder = folder / part
        if module.is_file():
            found.append(module)
            return found
        if not folder.is_dir():
            return found
        if (folder / "__init__.py").is_file():
            found.append(folder / "__init__.py")
    return found


# --- installed packages ---
def _asks_for_gpus(package: str) -> bool:
    if package in _DEVICE_FREE_PACKAGES:
        return False
    if package in GPU_PACKAGES:
        return PathFinder.find_spec(package) is not None
    return any(_PACKAGE_PATTERN.search(_read_start(file)) for file in _package_files(package))


def _package_files(package: str) -> list[Path]:
    """The first `_MAX_PACKAGE_FILES` Python files of an installed package."""
    try:
        spec = PathFinder.find_spec(package)
    except (ImportError, ValueError):
        return []
    if spec is None:
        return []
    if not spec.submodule_search_locations:
        return [Path(spec.origin)] if spec.origin and spec.origin.endswith(".py") else []
    found: list[Path] = []
    for location in spec.submodule_search_locations:
        for folder, subfolders, names in islice(os.walk(location), _MAX_FOLDERS):
            # In place: `os.walk` continues with what is left in the list.
            subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
            found += [Path(folder, name) for name in sorted(names) if name.endswith(".py")]
    return found[:_MAX_PACKAGE_FILES]


def _read_start(file: Path) -> bytes:
    try:
        with open(file, "rb") as stream:
            return stream.read(_MAX_BYTES)
    except OSError:
        return b""
