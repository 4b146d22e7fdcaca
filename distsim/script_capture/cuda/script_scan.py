"""Decide from the source of a script whether it asks for a GPU; nothing is imported or run."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from itertools import islice
from typing import Final

#: Files of a folder that are scanned, folders of a package, and bytes of each file.
_MAX_FILES: Final = 200
_MAX_FOLDERS: Final = 50
_MAX_BYTES: Final = 1 << 20
_CUDA_PATTERN: Final = re.compile(rb"\bcuda\b|\btorch\.accelerator\b")
_IMPORT_PATTERN: Final = re.compile(rb"^[ \t]*(?:import|from)[ \t]+([A-Za-z_]\w*)", re.MULTILINE)


def script_mentions_cuda(script: str | os.PathLike[str]) -> bool:
    """Whether the program's files contain ``cuda`` or ``torch.accelerator``.

    These are the script, Python files of its folder, and packages of its folder that one of those
    imports. False if nothing can be read.
    """
    folder = os.path.dirname(os.path.abspath(script))
    texts = [_read_start(os.fspath(script))]
    texts += map(_read_start, _python_files(folder))
    for package in _imported_packages(texts):
        texts += map(_read_start, _python_files_below(os.path.join(folder, package)))
    return any(_CUDA_PATTERN.search(text) for text in texts)


def _imported_packages(texts: Iterable[bytes]) -> list[str]:
    packages: set[str] = set()
    for text in texts:
        packages.update(match[1].decode() for match in _IMPORT_PATTERN.finditer(text))
    return sorted(packages)


def _python_files(folder: str) -> list[str]:
    """The first `_MAX_FILES` Python files of a folder."""
    return _walk(folder, 1)


def _python_files_below(folder: str) -> list[str]:
    """The same of a folder with the folders in it, of these the first `_MAX_FOLDERS`."""
    return _walk(folder, _MAX_FOLDERS)


def _walk(root: str, max_folders: int) -> list[str]:
    found: list[str] = []
    for folder, subfolders, names in islice(os.walk(root), max_folders):
        # In place: `os.walk` continues with what is left in the list.
        subfolders[:] = sorted(name for name in subfolders if not name.startswith("."))
        files = (os.path.join(folder, name) for name in sorted(names) if name.endswith(".py"))
        found += [file for file in files if os.path.isfile(file)]
    return found[:_MAX_FILES]


def _read_start(file: str) -> bytes:
    try:
        with open(file, "rb") as lines:
            return lines.read(_MAX_BYTES)
    except OSError:
        return b""
